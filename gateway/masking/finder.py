"""Finds the values to mask in a text: by checksum, by format, by the operator's patterns and lists.

Patterns run in RE2, whose time is linear in the text. Sources: ISO/IEC 7812-1 (cards, Luhn), ISO 13616
(IBAN, mod 97), RFC 5321 (addresses, the usual ones), python-stdnum (national ids), Google's libphonenumber.
Invariants: spans never overlap and cover each value whole; a text without a span is returned as it was.
"""

import re
import unicodedata
from collections.abc import Iterator
from itertools import accumulate

import phonenumbers
import re2
import stdnum
from stdnum import iban, luhn

from gateway.masking.vault import PLACEHOLDER, Span
from gateway.settings import MaskSettings

_EMAIL = (
    r"[\p{L}\p{Nd}](?:[\p{L}\p{Nd}._%+&'-]*[\p{L}\p{Nd}_+-])?[@\x{FF20}]"
    r"(?:[\p{L}\p{Nd}](?:[\p{L}\p{Nd}-]*[\p{L}\p{Nd}])?\.)+\p{L}{2,}"
)
_KEY = (
    r"\b(?:[spr]k[-_][\w-]{16,}|gh[pousr]_\w{30,}|github_pat_\w{22,}|glpat-[\w-]{20,}|A[KS]IA[A-Z0-9]{16}|AIza[\w-]{35}"
    r"|xox[abeoprs]-[\w-]{10,}|hf_\w{30,}|npm_\w{30,}|pypi-[\w-]{50,}|SG\.[\w-]{16,}\.[\w-]{16,}|ya29\.[\w-]{20,}"
    r"|eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]+)|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?-----END [A-Z ]*PRIVATE KEY-----"
)
_DIGITS = r"\+?\p{Nd}(?:[\p{Zs}.()/\p{Pd}]{0,2}\p{Nd}){6,}"
_IBAN = r"\b[A-Za-z]{2}\p{Nd}{2}[\p{Zs}\p{Pd}]?[A-Za-z\p{Nd}]{3}"
_ID = r"(?:\p{L}{1,6}[ ./-])?[\p{L}\p{Nd}]*\p{Nd}[\p{L}\p{Nd}]*(?:[ ./-][\p{L}\p{Nd}]+){0,4}"

_GROUPS = re.compile(r"\d+")
_PARTS = re.compile(r"[^\W_]+")
_IBAN_TAIL = re.compile(r"(?:[ \u00a0-]?[^\W_]){11,30}")
_DATE = re.compile(r"(?:19|20)\d\d\D\d\d?\D\d\d?(?!\d)")
_GROUPS_MAX = 8  # of a number: more are several numbers
_PHONE_CHECKS, _IBAN_CHECKS = 10, 5  # whose time a look at libphonenumber's tables, or at an IBAN, takes
_STATES_BYTES_MAX = 64 << 20  # of a pattern's automaton in RE2, made as texts need them
# a character as JSON or a URL spells it, and what shows nothing
_SPELLED = r"\\u(?:[0-9a-cA-CefEF][0-9a-fA-F]|[dD][0-7])[0-9a-fA-F]{2}|%[2-7][0-9a-fA-F]|[\x{AD}\x{200B}-\x{200D}\x{2060}\x{FEFF}]"
_IS_SPELLED = re2.compile(_SPELLED)
_ESCAPED = "nrtbf"  # a JSON text in a text has these letters of its escapes before a value


class Finder:
    """Finds what `settings` name."""

    def __init__(self, settings: MaskSettings) -> None:
        self._regions = settings.regions
        modules = [stdnum.get_cc_module(*name.split(".")) for name in settings.ids]
        self._ids = [module for module in modules if module is not None]
        kinds = set(settings.kinds)
        sources = {"LITERAL": PLACEHOLDER.pattern}  # of equal spans the first has its name
        sources |= {name: rf"(?i:{'|'.join(map(re2.escape, words))})" for name, words in settings.lists.items()}
        sources |= settings.patterns
        sources |= {"KEY": _KEY} if "keys" in kinds else {}
        sources |= {"EMAIL": _EMAIL} if "emails" in kinds else {}
        sources |= {"IBAN": _IBAN} if "ibans" in kinds else {}
        sources |= {"ID": _ID} if settings.ids else {}
        sources |= {"DIGITS": _DIGITS} if kinds & {"cards", "phones"} else {}
        self._kinds, self._lists = kinds, settings.lists
        options = re2.Options()
        options.log_errors, options.max_mem = False, _STATES_BYTES_MAX
        self._patterns = {name: re2.compile(source, options) for name, source in sources.items()}

    def has_any(self, text: str) -> bool:
        """Whether a text may have a value: a scan for each pattern, which is all that most texts cost."""
        texts = (text, _plain(text)[0]) if _IS_SPELLED.search(text) else (text,)
        return any(pattern.search(one) is not None for one in texts for pattern in self._patterns.values())

    def spans(self, text: str, left: list[int]) -> list[Span]:
        """The values of a text in order, those that overlap as one."""
        spans = self._found(text, left)
        if _IS_SPELLED.search(text):
            plain, at = _plain(text)
            spans += [(at[start], at[end], kind) for start, end, kind in self._found(plain, left) if end > start]
        merged: list[Span] = []
        for start, end, kind in sorted(spans, key=lambda span: (span[0], -span[1])):
            if merged and start < merged[-1][1]:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]), merged[-1][2])
            elif end > start:
                merged.append((start, end, kind))
        return merged

    def _found(self, text: str, left: list[int]) -> list[Span]:
        spans: list[Span] = []
        for name, pattern in self._patterns.items():
            for match in pattern.finditer(text):
                start, end = match.span()
                if start and text[start - 1] == "\\" and text[start] in _ESCAPED:
                    start += 1
                spans += self._proven(name, text, start, end, left)
        return spans

    def _proven(self, name: str, text: str, start: int, end: int, left: list[int]) -> Iterator[Span]:
        """The values in the candidate of a pattern."""
        if name == "IBAN":
            yield from _iban(text, start, left)
        elif name == "DIGITS":
            yield from self._number(text, start, end, left)
        elif name == "ID":
            yield from self._id(text, start, end, left)
        elif name == "KEY":
            if any(map(str.isdigit, text[start:end])):
                yield start, end, name
        elif name not in self._lists or not (text[start - 1 : start].isalnum() or text[end : end + 1].isalnum()):
            yield start, end, name

    def _number(self, text: str, start: int, end: int, left: list[int]) -> Iterator[Span]:
        """The card numbers and the phone numbers in a run of digits and what separates them."""
        groups = [(start + one.start(), start + one.end()) for one in _GROUPS.finditer(text[start:end])]
        is_international, until = text[start] == "+", 0
        for number, (begin, _) in enumerate(groups):
            if begin < until:
                continue
            sizes = list(accumulate(stop - first for first, stop in groups[number : number + _GROUPS_MAX]))
            may_call = "phones" in self._kinds and (self._regions or (is_international and number == 0))
            for size, (_, stop) in zip(reversed(sizes), reversed(groups[number : number + len(sizes)]), strict=True):
                if not ((may_call and 7 <= size <= 15) or 13 <= size <= 19):
                    continue
                left[0] -= 1
                if left[0] <= 0:
                    yield begin, end, "NUMBER"
                    return
                given = _ascii(text[start if number == 0 else begin : stop])  # with its +
                if kind := self._kind_of_number(given, size, left, may_call=bool(may_call)):
                    yield start if number == 0 else begin, stop, kind
                    until = stop
                    break

    def _kind_of_number(self, given: str, size: int, left: list[int], *, may_call: bool) -> str:
        """`CARD` or `PHONE`; empty for another number."""
        if "cards" in self._kinds and 13 <= size <= 19 and "2" <= given[0] <= "6":
            groups = _GROUPS.findall(given)
            # the groups of a card have four digits or more, but for the last
            if all(len(group) > 3 for group in groups[:-1]) and luhn.is_valid("".join(groups)):
                return "CARD"
        if not may_call or size > 15 or _DATE.match(given):
            return ""
        for region in [None] if given[0] == "+" else self._regions:
            left[0] -= _PHONE_CHECKS
            try:
                if phonenumbers.is_valid_number(phonenumbers.parse(given, region)):
                    return "PHONE"
            except phonenumbers.NumberParseException:
                continue
        return ""

    def _id(self, text: str, start: int, end: int, left: list[int]) -> Iterator[Span]:
        """The national ids among up to five parts of letters and digits; one of digits is no part of a longer number."""
        parts = [(start + one.start(), start + one.end()) for one in _PARTS.finditer(text[start:end])]
        are_digits = [False, *(text[first:last].isdigit() for first, last in parts), False]
        until = 0
        for number, (begin, _) in enumerate(parts):
            if begin < until or (are_digits[number] and are_digits[number + 1]):
                continue
            for last in range(min(len(parts), number + 5) - 1, number - 1, -1):
                stop = parts[last][1]
                if (are_digits[last + 1] and are_digits[last + 2]) or not 6 <= stop - begin <= 24:
                    continue
                left[0] -= len(self._ids)
                if left[0] <= 0:
                    yield begin, end, "NUMBER"
                    return
                if any(module.is_valid(_ascii(text[begin:stop])) for module in self._ids):
                    until = stop
                    yield begin, stop, "ID"
                    break


def _iban(text: str, start: int, left: list[int]) -> Iterator[Span]:
    """The IBAN that begins here, at its longest."""
    tail = _IBAN_TAIL.match(text, start + 4)
    for end in range(tail.end() if tail else 0, start + 14, -1):
        if text[end : end + 1].isalnum() or not text[end - 1].isalnum():
            continue
        left[0] -= _IBAN_CHECKS
        if left[0] <= 0 or iban.is_valid(_ascii(text[start:end]).replace("\u00a0", "")):
            yield start, end, "IBAN"
            return


def _ascii(text: str) -> str:
    """A text with the digits of every script as 0 to 9."""
    if text.isascii():
        return text
    return "".join(str(unicodedata.decimal(one)) if one.isdecimal() else one for one in text)


def _plain(text: str) -> tuple[str, list[int]]:
    """A text without its spellings, and where each of its characters, and its end, is in `text`."""
    pieces, places, until = list[str](), list[int](), 0
    for match in _IS_SPELLED.finditer(text):
        start, end = match.span()
        hexadecimal = match[0].lstrip("\\u%")
        char = chr(int(hexadecimal, 16)) if hexadecimal.isascii() else ""
        pieces += [text[until:start], char]
        places += [*range(until, start), *[start] * len(char)]
        until = end
    return "".join([*pieces, text[until:]]), [*places, *range(until, len(text) + 1)]
