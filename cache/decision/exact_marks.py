"""The exact check: what two prompts must have alike, in every language, before one may answer the other.

Pure functions of two texts. They are numbers with their units and spelling, codes, links, signs and
operators, the case of a unit or of a word that capitals make a name, and hidden characters. No
similarity, no verdict and no verifier overrides a difference in them. Words that the encoder cannot
read have no vector at all (`cache.encoder.embedder`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from cache.decision.harmless import FILLERS, LARGE, NUMBERS, TENS
from cache.decision.texts import HIDDEN, remembered, visible
from cache.query import MissReason

# "3 - 5", "-40", "6!", "a < b", "B-", "i++", "a*?", "-rf", "\\Pi", "int[]", "→", ":("; not the marks of prose, its dashes
# and lists, the sign of an amount, or the hyphen of "30-day"
_PROSE = "'\"’‘“”`(…–—¿¡«»。！？；：，、（）「」『』《》।؟،؛°"
_MARK = re.compile(
    rf"""
    (?<=[\d)])\s?[-−](?=\s?[\d(]) | (?<![\w)])[-−–](?=[\d(.$€£¥]) | (?<=[\d)])!
  | (?m:^)[^\S\n]*[-*•>\#]+(?=[^\S\n]) ()| (?<!\S)[-–—]+(?=\s) ()| [$€£¥\#](?=\s?\d) ()| (?<=\d)\s?% ()
  | (?<=[^\W\d])/(?=[^\W\d]) ()| (?<=\w)@(?=\w) ()
  | (?<![^\s("'“‘])[^\w\s\[{{{_PROSE}]+[^\W\d]\w* | (?<!\S)(?![?!。！？]+\Z|['"`]+\s)[^\w\s]+(?!\S)
  | [^\w\s.,;:!?)\-{_PROSE}]+[:?]* | [:,](?=[\]}})]) | (?<=\w)-+(?!\w) | (?<=[^\W\d])[;:?!]+(?=\w)
  | (?:(?<=\d)|(?<=\b[^\W\d]))[?!;]+(?=\s[a-z]) | (?<=\b[A-Za-z])['′](?!\w)
    """,
    re.VERBOSE,
)
_ANY_MARK = re.compile(r"[^\w\s.,'’]|(?<!\w)[.,']|'(?!\w)")
_HYPHENS = str.maketrans("−–", "--")
_TOKEN = re.compile(
    r"""
    (?P<link> https?://\S+ | (?<![\w.+-])[\w.+-]+@[\w-]+\.[\w.]+ | (?<![\w.])(?:[~.]?/[\w.-]+){2,}/? | \w+(?:_\w+)+ )
  | (?P<symbol> [$€£¥#]?)(?P<value> \d+(?:[.,:/]\d+)*)(?![\w-]*[^\W\d_][\w-]*\d)
    (?P<unit> \s?%|(?:\s?-?(?:[^\W\d_]{1,3}|[^\W\d_]+(?=\b)))?\b)
  | (?P<code> (?=[\w.-]*\d)\w[\w.-]*\w | \b[A-Za-z]\+\+ | \b[A-Za-z]\# )
  | (?P<word> [^\W\d_]+ )
    """,
    re.VERBOSE,
)
_SPACE, _ENDS = " \"'“‘«(¿¡", ".!?:;\n"  # before the first word of a sentence
_UNIT_LETTERS = 3


@dataclass(frozen=True, slots=True)
class Marks:
    """What must be alike. `numbers` in order, each with the letters of its unit, empty where it has
    none; `shouted` are words in capitals, `names` those inside a sentence that begin with one, `small`
    those without, empty where case says nothing.
    """

    numbers: tuple[tuple[str, str], ...]
    codes: tuple[str, ...]
    signs: tuple[str, ...]
    hidden: str
    shouted: frozenset[str]
    names: frozenset[str]
    small: frozenset[str]


@remembered(1 << 18)
def marks_of(text: str) -> Marks:
    """Read a text. Results are remembered: the same prompts come again."""
    hidden = "".join(HIDDEN.findall(text))
    plain = visible(text)
    numbers: list[tuple[str, str]] = []
    codes, spelled_words, names = list[str](), list[str](), list[str]()
    spelled = 0
    for match in _TOKEN.finditer(plain):
        word = match["word"]
        if match["value"]:
            value = match["value"]
            value = value.replace(",", "") if re.fullmatch(r"\d{1,3}(,\d{3})+(\.\d+)?", value) else value
            numbers.append((value.removesuffix(":00").lstrip("0") or "0", match["symbol"] + _unit(match["unit"])))
            spelled_words.extend(re.findall(r"[^\W\d_]+", match["unit"]))
        elif word is None:
            codes.append(match.group().casefold().strip(".-").replace("-", ""))
        elif (number := _named(word.casefold())) is not None:
            is_same = numbers and match.start() - spelled <= 1 and spelled  # "twenty-five"
            if is_same and 20 <= int(numbers[-1][0]) < 100 and number < 10:
                numbers[-1] = (str(int(numbers[-1][0]) + number), "")
            elif is_same and number >= 100:
                numbers[-1] = (str(int(numbers[-1][0]) * number), "")
            else:
                numbers.append((str(number), ""))
            spelled = match.end()
        else:
            spelled_words.append(word)
            if not word.islower() and plain[: match.start()].rstrip(_SPACE)[-1:] not in _ENDS:
                names.append(word)
    is_shouted = plain.isupper()
    return Marks(
        numbers=tuple(numbers),
        codes=tuple(codes),
        signs=_signs(plain.rstrip(" \t\n.?…")),
        hidden=hidden,
        shouted=frozenset()
        if is_shouted
        else frozenset(word for word in spelled_words if len(word) > 1 and word.isupper()),
        names=frozenset(names),
        small=frozenset()
        if plain.islower() or is_shouted
        else frozenset(word for word in spelled_words if word.islower()),
    )


def _named(word: str) -> int | None:
    return NUMBERS.get(word, TENS.get(word, LARGE.get(word)))


def _unit(text: str) -> str:
    letters = text.strip(" -")
    return letters if len(letters) <= _UNIT_LETTERS and letters.casefold() not in FILLERS else ""


def _signs(text: str) -> tuple[str, ...]:
    if not _ANY_MARK.search(text):
        return ()
    found = (match.group() for match in _MARK.finditer(text) if match.lastindex is None)
    return tuple("".join(sign.split()).translate(_HYPHENS) for sign in found)


def veto(prompt: str, known: str) -> MissReason | None:
    """Why the answer to `known` may not answer `prompt` whatever else is known; None where it may."""
    mine, theirs = marks_of(prompt), marks_of(known)
    if [value for value, _ in mine.numbers] != [value for value, _ in theirs.numbers]:
        return MissReason.NUMBERS
    if any(_differ(a, b) for (_, a), (_, b) in zip(mine.numbers, theirs.numbers, strict=True)):
        return MissReason.NUMBERS
    if mine.codes != theirs.codes or mine.signs != theirs.signs or mine.hidden != theirs.hidden:
        return MissReason.MARKS
    if any(map(_is_other_case, (mine, theirs), (theirs, mine))):
        return MissReason.MARKS
    return None


def _differ(unit: str, other: str) -> bool:
    """Whether two units differ: "kg" and "g", "Mb" and "MB"; not "PM" and "pm"."""
    if not unit or not other or unit == other:
        return False
    is_plain = len(unit) > 1 and all(one.islower() or one.isupper() for one in (unit, other))
    return not is_plain or unit.casefold() != other.casefold()


def _is_other_case(left: Marks, right: Marks) -> bool:
    return any(word.lower() in right.small for word in left.shouted - right.shouted)


def is_recased(prompt: str, known: str) -> bool:
    """Whether capitals make a word a name in one text alone: "Turkey" and "turkey". Case says
    nothing in a text that has none.
    """
    left, right = marks_of(prompt), marks_of(known)
    return any(
        word.lower() in other.small or any(word.lower() == name.lower() for name in other.names)
        for one, other in ((left, right), (right, left))
        for word in one.names - other.names
    )
