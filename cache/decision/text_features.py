"""The features of a short text: numbers, names, polarity, direction, form, time. English, by
tables.

Pure functions, no model. Encoders put "enable" beside "disable" and 15 beside 50; the words show
the difference. A text in another language still has its numbers, quotes, identifiers and words
compared. Invariant: reading is deterministic and total.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cache.decision import words as lists
from cache.decision.texts import HIDDEN, INVISIBLE, read_for, remembered

__all__ = ("HIDDEN", "INVISIBLE", "TextFeatures", "read", "read_for", "remembered")


@dataclass(frozen=True, slots=True)
class TextFeatures:
    """One text, read. Words are case-folded and stemmed; `content` leaves out function words, in
    order.
    """

    tokens: tuple[str, ...]
    clauses: tuple[tuple[str, ...], ...]  # the words between two marks of punctuation, in order
    content: tuple[str, ...]
    numbers: tuple[tuple[str, str], ...]  # value and unit ("" where there is none), in order
    names: frozenset[str]  # capitalised inside a sentence, or an identifier; stemmed
    quotes: frozenset[str]
    negations: int
    poles: frozenset[tuple[int, int]]  # antonym pair and side
    roles: frozenset[tuple[str, str]]  # preposition and the content word it governs
    forms: frozenset[str]  # formats, lengths, languages and audiences asked for
    scopes: frozenset[str]  # quantifiers and restrictions
    owners: frozenset[str]
    times: frozenset[str]  # words whose meaning moves with the clock
    dates: frozenset[str]  # days, months and parts of a day
    question: str  # who, when, wher, why, count, amount, whether, or "" for the rest
    moods: frozenset[str]  # by `MOODS`; "?" where yes or no is asked for
    asks: int  # how many things are asked for, as in "when and where"
    content_set: frozenset[str]
    # content words that begin like a reversal, and the rest of each: ("unlock", "lock")
    reversals: tuple[tuple[str, str], ...]
    is_latin: bool  # in Latin letters
    hidden: str  # characters that no screen shows and a model reads as letters
    marks: tuple[str, ...]  # signs, operators and other marks that are none of prose, in order
    cased: frozenset[str]  # words and units that mean another thing in another case, as written
    codes: frozenset[str]  # words of letters and digits, and links with digits, without hyphens


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


class _Figure(NamedTuple):
    """A number: the words from `start` to `end`, its value as text and its unit."""

    start: int
    end: int
    value: str
    unit: str


_TOKEN = re.compile(
    r"""
    (?P<quote> "[^"]+" | “[^”]+” | `[^`]+` | (?<![\w])'[^']+'(?![\w]) )
  | (?P<link> https?://\S+ | (?<![\w.+-])[\w.+-]+@[\w-]+\.[\w.]+ | (?:[~.]?/[\w.-]+)+/? )
  | (?P<number> [$€£¥#]?\d+(?:[.,:/]\d+)*%? (?![\w-]*[^\W\d_][\w-]*\d) (?:[^\W\d_]{1,3}\b)? )
  | (?P<word> [^\W_]+(?:['’.&_+#/-][^\W_]+)*[+#]* )
    """,
    re.VERBOSE,
)
_SENTENCE_END = frozenset(".!?:;\n")
_CLAUSE_END = _SENTENCE_END | frozenset(",()[]{}<>|*~…–—¿¡。！？；：，、（）\r\u2028\u2029")
_LATIN_LAST = "\u024f"
_NUMERALS = frozenset((*lists.SMALL, *lists.OTHER_NUMBERS))  # words that a number can begin with
_HAVE = frozenset(map(lists.stem, ("have", "has", "had")))
_MODALS = frozenset(word for word in lists.FUNCTION_WORDS if lists.MOODS.get(word, "?") not in lists.ASKED_FOR)
_LINKS = lists.GREETINGS | frozenset(("and", "but", "or", "then", "now"))  # before a question
_WHO, _WHERE = frozenset(map(lists.stem, ("who", "whose", "whom"))), lists.stem("where")
_ASKING = _WHO | {"how", "when", _WHERE, "why"}
_THINGS = _WHO | {"what", "which"}
_DO = frozenset(map(lists.stem, ("do", "does", "did")))
_AUXILIARIES = lists.ASKING_WHETHER | _MODALS | {"be"}
_JOINING = frozenset(("and", "or"))
_BEFORE_ASKING = frozenset(("at", "by", "for", "from", "in", "on", "to", "until", "till", "with", "within", "of"))
_ASKED_AFTER = _AUXILIARIES | lists.AMOUNTS | _JOINING | {""}
_GOVERNING = frozenset(("of", "to", "for", "from"))
_OPERANDS = ("a", "s", "d", "t", "m", "for", "whil")  # function words that programs and formulas give a place


@remembered(16_384)
def read(text: str) -> TextFeatures:
    """Read a text. Results are remembered: the same prompts come again."""
    hidden = "".join(HIDDEN.findall(text))
    text = HIDDEN.sub("", INVISIBLE.sub("", text))
    tokens: list[str] = []
    starts: list[int] = []  # of the clauses
    names, quotes = set[str](), set[str]()
    figures: list[_Figure] = []
    cased, spelled = set[str](), set[str]()
    end = 0
    is_shouted = text.isupper()  # then capitals say nothing
    for match in _TOKEN.finditer(text):
        token, kind = match.group(), match.lastgroup
        is_start = (
            end == 0 or not _SENTENCE_END.isdisjoint(text[end : match.start()]) or lists.GREETINGS.issuperset(tokens)
        )
        if end == 0 or not _CLAUSE_END.isdisjoint(text[end : match.start()]) or " - " in text[end : match.start()]:
            starts.append(len(tokens))
        end = match.end()
        if kind == "quote":
            quotes.add(" ".join((token[1:-1] if token[0] == "`" else token[1:-1].casefold()).split()))
            tokens += (lists.stem(word) for word in re.findall(r"\w+", token.casefold()))
        elif kind == "link":
            names.add(token.casefold())
            tokens.append(token.casefold())
        elif kind == "number":
            value, unit = _figure(token)
            cased.update(_cased_unit(token.lstrip("$€£¥#.,:/%0123456789")))
            figures.append(_Figure(len(tokens), len(tokens) + 1, value, unit))
            tokens.append(value)
        else:
            parts, is_identifier = _word(token.lower() if is_shouted else token)
            tokens += parts
            cased.update(_cased_unit(token))
            if token.lower() in lists.CASED_WORDS and not (is_start and token.istitle()):
                spelled.add(token)
            if is_identifier or (not is_start and token[0].isupper() and not is_shouted):
                names.update(part for part in parts if token.isupper() or part not in lists.FUNCTION_WORDS)
    figures = [_with_unit(tokens, figure) for figure in sorted([*figures, *_spelled_out(tokens)])]
    taken = {place for figure in figures for place in range(figure.start, figure.end)}
    content = tuple(word for at, word in enumerate(tokens) if word not in lists.FUNCTION_WORDS and at not in taken)
    present, bounds = frozenset(tokens), itertools.pairwise((*starts, len(tokens)))
    clauses = tuple(tuple(tokens[start:stop]) for start, stop in bounds if start < stop)
    return TextFeatures(
        tokens=tuple(tokens),
        clauses=clauses,
        content=content,
        numbers=tuple(_by_the_clock(figure.value, figure.unit) for figure in figures),
        names=frozenset(names - {"i"}),
        quotes=frozenset(quotes),
        negations=sum(word in lists.NEGATIONS for word in tokens) if present & lists.NEGATIONS else 0,
        poles=frozenset(pole for word in present & lists.POLES.keys() for pole in lists.POLES[word]),
        roles=frozenset(_roles(tokens)),
        forms=present & lists.FORMS,
        scopes=present & lists.SCOPES,
        owners=present & lists.OWNERS,
        times=present & lists.TIMES,
        dates=present & lists.DATES,
        question=_question(tokens),
        moods=_moods(tokens, is_asking=any(map(_asks, clauses))),
        asks=sum(map(_asks, clauses)),
        content_set=frozenset(content),
        reversals=_reversals(frozenset(content)),
        is_latin=text.isascii() or not any(char > _LATIN_LAST and char.isalpha() for char in text),
        hidden=hidden,
        marks=_marks(text.rstrip(" \t\n.?…")),
        # capitals say nothing in a text that has none, or nothing else
        cased=frozenset(() if is_shouted else cased if text.islower() else cased | spelled),
        codes=frozenset(filter(None, map(_code, present))),
    )


def _marks(text: str) -> tuple[str, ...]:
    if not _ANY_MARK.search(text):
        return ()
    found = (match.group() for match in _MARK.finditer(text) if match.lastindex is None)
    return tuple("".join(mark.split()).translate(_HYPHENS) for mark in found)


def _cased_unit(token: str) -> tuple[str, ...]:
    return (token,) if token.lower() in lists.CASED_UNITS else ()


def is_cased_otherwise(left: TextFeatures, right: TextFeatures) -> bool:
    """Whether both have a word or a unit whose case tells what it is, in another case: "5 Mb", "5 MB"."""
    mine, theirs = _by_fold(left.cased), _by_fold(right.cased)
    return any(mine[fold] != theirs[fold] for fold in mine.keys() & theirs.keys())


def _by_fold(cased: frozenset[str]) -> dict[str, set[str]]:
    spellings: dict[str, set[str]] = {}
    for word in cased:
        spellings.setdefault(word.lower(), set()).add(word)
    return spellings


def is_inverted(left: TextFeatures, right: TextFeatures) -> bool:
    """The same words, names or persons in another order, or a preposition that governs what another
    one governs on the other side.
    """
    if (len(left.tokens) == len(right.tokens) and _is_moved(left, right)) or _is_turned_question(left, right):
        return True
    names = left.names | right.names
    if any(_is_reordered(left, right, among) for among in (names, lists.PERSONS, names | lists.PERSONS)):
        return True
    # "did Anna call Ben", "was Anna called by Ben"
    if any(word in left.tokens and word in right.tokens for role, word in left.roles ^ right.roles if role == "by"):
        return True
    governed: dict[str, set[str]] = {}
    for preposition, word in left.roles:
        governed.setdefault(preposition, set()).add(word)
    for preposition, word in right.roles:
        mine = governed.get(preposition)
        # both texts name both words, but this preposition governs another one of them
        if mine is not None and word not in mine and word in left.tokens and mine & set(right.tokens):
            return True
    return False


def _is_moved(left: TextFeatures, right: TextFeatures) -> bool:
    """The same words, those that say something in another order."""
    first, second = (["a" if word == "an" else word for word in text.tokens] for text in (left, right))
    stated = left.content_set.union(_OPERANDS) - lists.NEGATIONS
    is_same = sorted(first) == sorted(second)
    return is_same and [word for word in first if word in stated] != [word for word in second if word in stated]


def is_exchanged(left: TextFeatures, right: TextFeatures) -> bool:
    """Whether two words have changed places around a third (a chases b), around a preposition or in
    a question.

    It finds less than `is_inverted`, and its finds are never harmless.
    """
    if _is_turned_question(left, right):
        return True
    shared = (left.content_set & right.content_set) - lists.LIGHT_WORDS
    first, second = (list(dict.fromkeys(word for word in some.content if word in shared)) for some in (left, right))
    if first != second and (_has_exchange(first, second) or _has_exchange(_uttered(left), _uttered(right))):
        return True
    for preposition, word in left.roles:
        for its, its_word in right.roles:
            if preposition != its or word == its_word:
                continue
            if _precedes(left, its_word, word) and _precedes(right, word, its_word):
                return True
            if any((its_other, word) in right.roles for its_other, governed in left.roles if governed == its_word):
                return True
    return False


def _has_exchange(first: list[str], second: list[str]) -> bool:
    """Whether the lists differ by two words alone, each in the other's place and not side by
    side.
    """
    if len(first) != len(second):
        return False
    moved = [place for place, pair in enumerate(zip(first, second, strict=True)) if pair[0] != pair[1]]
    if len(moved) != 2 or moved[1] - moved[0] < 2:
        return False
    return first[moved[0]] == second[moved[1]] and first[moved[1]] == second[moved[0]]


def _uttered(reading: TextFeatures) -> list[str]:
    return [word for word in reading.tokens if word not in lists.GREETINGS]


def _precedes(reading: TextFeatures, word: str, later: str) -> bool:
    """Whether one word comes before another, with something between them."""
    words = reading.tokens
    return word in words and later in words and words.index(word) + 1 < words.index(later)


def _is_turned_question(left: TextFeatures, right: TextFeatures) -> bool:
    """Whether two texts of the same content ask for or name the two sides of a deed: "Who hired
    Ann?", "Who did Ann hire?", "Who was hired by Ann?".
    """
    if left.content_set <= lists.LIGHT_WORDS or left.content_set != right.content_set:
        return False
    is_of_things = not any(_THINGS.isdisjoint(text.tokens) for text in (left, right))
    if is_of_things and _has_gap(left) != _has_gap(right):
        return True
    if left.content == right.content:
        return {role for role, _ in left.roles ^ right.roles} == {"by"}
    pairs = ((left, right), (right, left))
    return is_of_things and any(_DO & {*some.tokens} and not _AUXILIARIES & {*plain.tokens} for some, plain in pairs)


def _has_gap(reading: TextFeatures) -> bool:
    """Whether a preposition has the person asked for, or none at all, after it: "Who is it from?"."""
    pairs = itertools.pairwise((*reading.tokens, "who"))
    return any(word in _GOVERNING and follower in _WHO for word, follower in pairs)


def _is_reordered(left: TextFeatures, right: TextFeatures, among: frozenset[str]) -> bool:
    """Both texts say the same of these words, in another order of their first places."""
    if len(among.intersection(left.tokens)) < 2:
        return False
    first, second = (
        list(dict.fromkeys("i" if word == "me" else word for word in text.tokens if word in among))
        for text in (left, right)
    )
    return first != second and sorted(first) == sorted(second)


def is_negated(left: TextFeatures, right: TextFeatures) -> bool:
    """One text denies, forbids or reverses what the other states."""
    if left.negations % 2 != right.negations % 2:
        return True
    for pair, side in left.poles - right.poles:
        if (pair, 1 - side) in right.poles - left.poles:
            return True
    mine, theirs = left.content_set - right.content_set, right.content_set - left.content_set
    return any(word in mine and root in theirs for word, root in left.reversals) or any(
        word in theirs and root in mine for word, root in right.reversals
    )


def _reversals(content: frozenset[str]) -> tuple[tuple[str, str], ...]:
    return tuple(
        (word, word[len(prefix) :])
        for word in sorted(word for word in content if word.startswith(lists.REVERSING))
        for prefix in lists.REVERSING
        if word.startswith(prefix) and len(word) > len(prefix) + 2
    )


def _code(word: str) -> str:
    """A word of letters and digits without its hyphens; empty for another word."""
    has_both = not word.isalpha() and any(map(str.isdigit, word)) and any(map(str.isalpha, word))
    return word.replace("-", "") if has_both else ""


@remembered(32_768)
def _word(token: str) -> tuple[tuple[str, ...], bool]:
    """The stems of a word's parts, and whether it is an identifier."""
    return tuple(lists.stem(part) for part in _split(_plain(token))), _is_identifier(token)


def _plain(token: str) -> str:
    token = token.casefold().replace("’", "'")
    return token[:-2] if token.endswith("'s") else token.rstrip(".'")


def _split(word: str) -> list[str]:
    """Contractions and hyphens: "don't" is do not, "two-factor" is two factor."""
    if word in lists.CONTRACTIONS:
        return lists.CONTRACTIONS[word].split()
    if word.endswith("n't"):
        return [word[:-3], "not"]
    if "'" in word:
        word = word.split("'")[0]
    return [part for part in re.split(r"[-/]", word) if part] if word.replace("-", "").isalpha() else [word]


def _is_identifier(token: str) -> bool:
    """Has digits or underscores among letters, an inner capital, or is all capitals: D-7781,
    snake_case, iPhone, EU, C++.
    """
    if len(token) > 1 and token.isupper():
        return True
    inner = any(char.isupper() for char in token[1:])
    return (
        inner
        or "_" in token
        or (any(c.isdigit() for c in token) and any(c.isalpha() for c in token))
        or token[-1] in "+#"
    )


def _figure(token: str) -> tuple[str, str]:
    """A number's value as text and its unit, from `$1,000`, `5km`, `15%`, `#7`."""
    match = re.fullmatch(r"([$€£¥#]?)(.*?\d)(%?)([^\W\d_]*)", token)
    assert match is not None, token
    symbol, value, percent, letters = match.groups()
    if re.fullmatch(r"\d{1,3}(,\d{3})+(\.\d+)?", value):
        value = value.replace(",", "")
    letters = letters.casefold()
    if letters in ("st", "nd", "rd", "th"):
        letters = ""
    unit = lists.UNITS.get(symbol or percent or lists.stem(letters), letters)
    return value, unit + letters if symbol else unit  # "$5M"


def _with_unit(tokens: list[str], figure: _Figure) -> _Figure:
    """The figure with the unit that follows it, where it has none yet."""
    follower = tokens[figure.end] if figure.end < len(tokens) else ""
    if figure.unit or follower not in lists.UNITS:
        return figure
    return _Figure(figure.start, figure.end + 1, figure.value, lists.UNITS[follower])


def _by_the_clock(value: str, unit: str) -> tuple[str, str]:
    """ "7 pm" as "19:00"; 7:00 without a half of the day may be either."""
    match = re.fullmatch(r"(0?[1-9]|1[0-2])(?:[:.](\d\d))?", value) if unit in ("am", "pm") else None
    if match is None:
        return value, unit
    return f"{int(match[1]) % 12 + 12 * (unit == 'pm'):02}:{match[2] or '00'}", ""


def _spelled_out(tokens: list[str]) -> list[_Figure]:
    """Numbers in words: "two hundred and five" is 205, "twice" is 2x."""
    figures = []
    start = 0
    if _NUMERALS.isdisjoint(tokens):
        return []
    while start < len(tokens):
        end, value = _spelled_out_at(tokens, start)
        if end > start and not _is_no_number(tokens, start, end):
            figures.append(_Figure(start, end, value, ""))
        start = max(end, start + 1)
    return figures


def _spelled_out_at(tokens: list[str], start: int) -> tuple[int, str]:
    """The end of the number that starts here, and its value; `start` itself where none does."""
    total = group = 0
    end = start
    while end < len(tokens):
        word = tokens[end]
        if word in lists.SMALL:
            group += lists.SMALL[word]
        elif word == lists.HUNDRED and group:
            group *= 100
        elif word in lists.LARGE and group:
            total, group = total + group * lists.LARGE[word], 0
        elif (
            word == "and"
            and end > start
            and tokens[end - 1] == lists.HUNDRED
            and end + 1 < len(tokens)
            and tokens[end + 1] in lists.SMALL
        ):
            pass
        else:
            break
        end += 1
    if end > start:
        return end, str(total + group)
    value = lists.OTHER_NUMBERS.get(tokens[start])
    if value is not None and tokens[max(0, start - 2) : start] == ["and", "a"]:
        value = "+" + value  # "an hour and a half"
    return (start, "") if value is None else (start + 1, value)


def _is_no_number(tokens: list[str], start: int, end: int) -> bool:
    """ "which one", "one of"; "once it is dry", "at once"."""
    before, after = tokens[max(0, start - 1) : start], tokens[end : end + 1]
    if tokens[start:end] == [lists.ONCE]:
        return before == ["at"] or not lists.AFTER_WHEN.isdisjoint(after)
    return tokens[start:end] == [lists.ONE] and (after == ["of"] or not lists.BEFORE_PRONOUN_ONE.isdisjoint(before))


def _roles(tokens: list[str]) -> list[tuple[str, str]]:
    roles = []
    for i, word in enumerate(tokens):
        if word in lists.PREPOSITIONS:
            for follower in tokens[i + 1 : i + 4]:
                if follower in lists.PREPOSITIONS:
                    break
                if follower not in lists.FUNCTION_WORDS:
                    roles.append((lists.PREPOSITIONS[word], follower))
                    break
    return roles


def _moods(tokens: list[str], *, is_asking: bool) -> frozenset[str]:
    """The modal verbs of what is asked. "Can you" and "will you" at the start only ask."""
    pairs = list(itertools.pairwise((*tokens, "")))
    # "When I descale it, how much ..." asks for no time
    aside = {word for word in tokens if word in _ASKING} if is_asking else set()
    aside -= {word for word, follower in pairs if _is_asking(word, follower)}
    first, follower = next((pair for pair in pairs if pair[0] not in _LINKS), ("", ""))
    aside -= _WHO & {first}  # "Who rinses it?"
    aside |= {word for word, after in pairs if word == "how" and after in lists.AMOUNTS}
    moods = {
        lists.MOODS[word] for word, follower in pairs if word in lists.MOODS and follower != "you" and word not in aside
    }
    moods |= {"must" for word, follower in pairs if word in _HAVE and follower == "to"}
    is_asked = first in lists.ASKING_WHETHER or (first in _MODALS and follower != "you")
    if is_asked and _question(tokens) in ("", "whether"):
        moods |= {"?", "did"} if first in _HAVE and follower != "to" else {"?"}
    return frozenset(moods)


def _is_asking(word: str, follower: str) -> bool:
    return word in _ASKING and (follower in _ASKED_AFTER or follower in _ASKING | _THINGS)


def _asks(clause: Sequence[str]) -> int:
    """How many things a clause asks for: question words at its start, or after "and" or "or"."""
    count, is_due = 0, True
    for word, follower in itertools.pairwise((*clause, "")):
        if word in _THINGS or _is_asking(word, follower):
            count += is_due
            is_due = False
        else:
            is_due = word in _JOINING or (is_due and (word in _LINKS or word in _BEFORE_ASKING))
    return count


def _question(tokens: list[str]) -> str:
    for i, word in enumerate(tokens[:8]):
        if word not in _ASKING:
            continue
        if word in _WHO:
            return "who"
        if word == "how" and tokens[i + 1 : i + 2] == ["com"]:
            return "why"
        if word == "how" and tokens[i + 1 : i + 2] and tokens[i + 1] in lists.AMOUNTS:
            return "count" if tokens[i + 1] == "many" else "amount"
        if word != "how":
            return word
    return "whether" if tokens[:1] and tokens[0] in lists.ASKING_WHETHER else ""
