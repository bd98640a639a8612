"""Learned spans: ids of system prompts that were seen to vary.

State of one process, empty at first: another one learns for itself. What it has not learned costs
it hits and brings no wrong one, since a compat shows what it leaves out. Candidates are ids that
look random, whatever their label, and codes after words such as "ticket". Knows no question.
Invariant: a candidate is a span only after three values in the same place of a partition's prompts,
close to each other; words, amounts, versions and dates are no candidates.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from collections.abc import Sequence

from cache.context.volatile import Span, SpanKind, apart
from cache.decision.words import FUNCTION_WORDS, word_set

PLACES_MAX = 4_096
_VALUES = 3  # so many values in a place, within so many prompts that have it
_WINDOW = 32
_READ_MAX = 512
_CANDIDATES_MAX = 32
_TOKEN_CHARS_MAX = 96
_LABEL_CHARS_MAX = 160

# with a letter or a sign before it, or of five characters; `re` looks fastest for a set
_FIGURES = re.compile(r"[0-9](?:[0-9A-Za-z_-]{4,}|(?<=[A-Za-z_-][0-9])[0-9A-Za-z_-]*)")
# things that have a code; of what is in `_NUMBERED` only its number says no more than which one it is
_CODED = word_set(
    """
    trace span req request correlation session conversation host pod worker booking reservation ticket
    """
)
_NUMBERED = _CODED | word_set(
    "node container order case cart basket ride trip call job device instance sandbox workspace build task connection station message"
)
# what has such a key is content
_CONTENT = word_set(
    """
    sha sha1 sha256 sha512 md5 hash checksum digest commit revision payload data base64 hex cipher ciphertext encoded
    text input secret seed wallet address contract sequence position board grid map formula smiles vin iban part model
    """
)
_NUMBER = word_set("id ids identifier number no nr num ref reference code key token uuid handle")
_PLAIN = FUNCTION_WORDS | _NUMBER
_PLACE_WORD = re.compile(r"[^\W_]+")
_SIGNS, _QUOTES = ":=#|", " \"'`*(["
_NO_KEY = re.compile(r"[^\w. -]")
_WORD = re.compile(r"[A-Za-z]+")
_CUE_CHARS_MAX = 24
_KEY_CHARS_MAX = 48
_SENTENCE_END = re.compile(r"[.!?]\s+(?=[A-Z])|\n")

# the words of a code: "INC0048", "web-eu-3"
_WORDS, _LETTERS = re.compile(r"(?:[A-Za-z]+[-_])+"), re.compile(r"[A-Za-z]{3,}(?=\d{4})")
_RAW = re.compile(r"[0-9a-fA-F]{12,}|01[0-9A-HJKMNP-TV-Z]{24}")  # or a ULID
_SWITCH = re.compile(r"\d(?=[A-Za-z])|[A-Za-z](?=\d)")
_CASES = re.compile(r"\d(?=\D)|[A-Z](?=[a-z\d])|[a-z](?=[A-Z\d])")
# formulas and names of parts; numbers of vehicles and of bank accounts; words: a model may know more of them
_SPEAKING = re.compile(r"(?:[A-Z][a-z]?\d*)+|(?:[A-Za-z]\d{1,2})+|[A-HJ-NPR-Z\d]{17}|[A-Z]{2}\d\d[A-Z\d]{11,30}")
_WORDY = re.compile(r"(?=[a-z]{0,3}[aeiouy])[a-z]{4}|(?=[A-Z]{0,3}[AEIOUY])[A-Z]{4}")
_AMOUNT = re.compile(r"(?:\d+[A-Za-z]{1,3})+|\d+[xX]\d+.*|(?:19|20)\d\d\D?.*")
_PART = re.compile(r"(?<![^\W_])[A-Za-z]{3,}(?![^\W_])")


class Learned:
    """Which places of the system prompts of each partition vary. One per process."""

    def __init__(self, places_max: int = PLACES_MAX) -> None:
        self._places_max = places_max
        # by partition and place: how often it came and when each of its last values did; None once it is learned
        self._places: OrderedDict[int, tuple[int, dict[int, int]] | None] = OrderedDict()

    def spans(self, partition: bytes, text: str, known: tuple[Span, ...]) -> tuple[Span, ...]:
        """The spans `known` in a system prompt, and those that are learned; this prompt is one more to learn from."""
        ids = candidates(text, known)
        label_words = [frozenset(_PLACE_WORD.findall(label)) - _PLAIN for label, _ in ids]
        counts = Counter(word for own_words in label_words for word in own_words)
        # a word of two places is of records, or of ids that an answer may compare
        varying = [
            span
            for (label, span), own_words in zip(ids, label_words, strict=True)
            if own_words
            and own_words.isdisjoint(_CONTENT)
            and all(counts[word] == 1 for word in own_words)
            and self._varies(partition, label, span.value)
        ]
        return apart([*known, *varying]) if varying else known

    def _varies(self, partition: bytes, label: str, value: str) -> bool:
        key = hash((partition, label))  # decision: memos-per-partition
        seen = self._places.pop(key, (0, {}))
        if seen is not None:
            count, values = seen[0] + 1, seen[1]
            values.pop(hash(value), None)
            values[hash(value)] = count
            if len(values) > _VALUES:
                del values[next(iter(values))]
            is_learned = len(values) == _VALUES and count - next(iter(values.values())) < _WINDOW
            seen = None if is_learned else (count, values)
        self._places[key] = seen
        if len(self._places) > self._places_max:
            self._places.popitem(last=False)
        return seen is None


def candidates(text: str, known: Sequence[Span] = ()) -> list[tuple[str, Span]]:
    """The ids of a text that may be learned, outside the spans `known`, in their order, each with
    the words that tell its place; none where there is too much that looks like one.
    """
    ids: list[tuple[str, Span]] = []
    read = 0
    for match in _FIGURES.finditer(text):
        start, end = match.span()
        read += 1
        if read > _READ_MAX:
            return []
        first = max(0, start - _TOKEN_CHARS_MAX)
        while start > first and (text[start - 1].isalnum() or text[start - 1] in "-_"):
            start -= 1
        if end - start > _TOKEN_CHARS_MAX or any(span.start < end and start < span.end for span in known):
            continue
        one = _code(text, start, end)
        if one is not None:
            ids.append(one)
            if len(ids) > _CANDIDATES_MAX:
                return []
    return ids


def _code(text: str, start: int, end: int) -> tuple[str, Span] | None:
    """A code that looks random; or one after a word that says what it is of. Its own words stay."""
    before = start
    if not _is_random(text[start:end], is_whole=True):
        words = _WORDS.match(text, start, end)
        start = words.end() if words is not None else start
        if not _is_random(text[start:end]):
            letters = _LETTERS.match(text, start, end)
            start = letters.end() if letters is not None else start
            # a code that the prompt names twice is one that it says something of
            if not _is_coded(text, before, start, end) or _is_twice(text, text[before:end]):
                return None
    return _placed(text, before, start, end)


def _is_twice(text: str, token: str) -> bool:
    """Whether a text has a token more than once; it is read no further than that."""
    return text.find(token, text.find(token) + 1) >= 0


def _is_random(token: str, *, is_whole: bool = False) -> bool:
    plain = token.replace("-", "").replace("_", "")
    if len(plain) < 10 or len(set(plain)) < 6:
        return False
    switches = len(_SWITCH.findall(plain))
    if _SPEAKING.fullmatch(plain):
        return False
    if is_whole:
        return switches > 2 and _RAW.fullmatch(plain) is not None
    if _AMOUNT.fullmatch(token) or _PART.search(token):
        return False
    is_mixed = (
        len(plain) > 13 and switches > 2 and 2 * len(_CASES.findall(plain)) >= len(plain) and plain.lower() != plain
    )
    return is_mixed or (switches > 4 and not _WORDY.search(plain))


def _is_coded(text: str, before: int, start: int, end: int) -> bool:
    """Whether a word before a token names a thing that has a code."""
    tail = text[max(0, before - _CUE_CHARS_MAX) : before].rstrip(_QUOTES + _SIGNS)
    told = ["", *(word.casefold() for word in _WORD.findall(tail))]
    is_numbered = told[-1] in _NUMBER
    known = told[-2] in _NUMBERED if is_numbered else told[-1] in _CODED
    if not known or not (tail[-1].isalpha() or (is_numbered and tail[-1] == ".")):
        return False
    token = text[start:end]
    # "win10" is no code, "QX7LTM" is
    is_mixed = end - start > 4 and not token[:3].isalpha() and not token.replace("-", "").replace("_", "").isdigit()
    return (before < start or is_numbered or is_mixed) and not (_AMOUNT.fullmatch(token) or _PART.search(token))


def _placed(text: str, before: int, start: int, end: int) -> tuple[str, Span]:
    """A span whose label is its key, or else its sentence; and the words up to `before`, from the last figure on."""
    first = max(text.rfind("\n", 0, before) + 1, before - _LABEL_CHARS_MAX)
    before_id = text[first:before]
    key = before_id.rstrip(_QUOTES)
    if key[-1:] in _SIGNS:
        label = slot_label = " ".join(_NO_KEY.split(key[-_KEY_CHARS_MAX:-1].rstrip(_QUOTES))[-1].split()[-4:])
    else:
        before_id = _SENTENCE_END.split(before_id)[-1]
        slot_label = re.split(r"[0-9]", before_id)[-1]
        label = before_id + " " + _SENTENCE_END.split(text[end : end + _LABEL_CHARS_MAX])[0]
    label += " " + text[before:start]
    return slot_label.casefold(), Span(start, end, SpanKind.ID, text[before:end], label, is_learned=True)
