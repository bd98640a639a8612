"""What the words of a short text commit to: numbers, names, polarity, direction, form, time. English, by tables and rules.

Pure functions, no model. Encoders put "enable" beside "disable" and 15 beside 50; the words show what such vectors hide. A text in
another language still has its numbers, quotes, identifiers and words compared. Invariant: reading is deterministic and total.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Reading:
    """One text, read. Words are case-folded and stemmed; `content` leaves out function words, in order."""

    words: tuple[str, ...]
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
    question: str  # who, when, where, why, amount, whether, or "" for the rest

    @property
    def content_set(self) -> frozenset[str]:
        return frozenset(self.content)


class _Figure(NamedTuple):
    """A number: the words from `start` to `end`, its value as text and its unit."""

    start: int
    end: int
    value: str
    unit: str


_TOKEN = re.compile(
    r"""
    (?P<quote> "[^"]+" | “[^”]+” | `[^`]+` | (?<![\w])'[^']+'(?![\w]) )
  | (?P<link> https?://\S+ | [\w.+-]+@[\w-]+\.[\w.]+ | (?:[~.]?/[\w.-]+)+/? )
  | (?P<number> [$€£¥#]?\d+(?:[.,:/]\d+)*%? (?![\w-]*[^\W\d_][\w-]*\d) (?:[^\W\d_]{1,3}\b)? )
  | (?P<word> [^\W_]+(?:['’.&_+#/-][^\W_]+)*[+#]* )
    """,
    re.VERBOSE,
)
_SENTENCE_END = frozenset(".!?:;\n")


@functools.lru_cache(maxsize=16_384)
def read(text: str) -> Reading:
    """Read a text. Results are remembered: the same prompts come again."""
    words: list[str] = []
    names: set[str] = set()
    quotes: set[str] = set()
    figures: list[_Figure] = []
    end = 0
    for match in _TOKEN.finditer(text):
        token, kind = match.group(), match.lastgroup
        is_start, end = end == 0 or not _SENTENCE_END.isdisjoint(text[end : match.start()]), match.end()
        if kind == "quote":
            quotes.add(" ".join(token[1:-1].casefold().split()))
            words += (stem(word) for word in re.findall(r"\w+", token.casefold()))
        elif kind == "link":
            names.add(token.casefold())
            words.append(token.casefold())
        elif kind == "number":
            value, unit = _figure(token)
            figures.append(_Figure(len(words), len(words) + 1, value, unit))
            words.append(value)
        else:
            word = _plain(token)
            parts = [stem(part) for part in _split(word)]
            words += parts
            if _is_identifier(token) or (token[0].isupper() and not is_start):
                names.update(parts)
    figures = [_with_unit(words, figure) for figure in sorted([*figures, *_spelled_out(words)])]
    taken = {place for figure in figures for place in range(figure.start, figure.end)}
    content = tuple(word for place, word in enumerate(words) if word not in _FUNCTION_WORDS and place not in taken)
    present = frozenset(words)
    return Reading(
        words=tuple(words),
        content=content,
        numbers=tuple((figure.value, figure.unit) for figure in figures),
        names=frozenset(name for name in names if name not in _FUNCTION_WORDS),
        quotes=frozenset(quotes),
        negations=sum(word in _NEGATIONS for word in words),
        poles=frozenset(pole for word in present for pole in _POLES.get(word, ())),
        roles=frozenset(_roles(words)),
        forms=present & _FORMS,
        scopes=present & _SCOPES,
        owners=present & _OWNERS,
        times=present & _TIMES,
        question=_question(words),
    )


def stem(word: str) -> str:
    """A light stemmer: plural, possessive, -ing, -ed, -ly. (The plural rules are Harman's S stemmer, 1991.)"""
    if len(word) <= 3 or not word.isalpha():
        return word
    if word.endswith("ies") and word[-4] not in "ae":
        word = word[:-3] + "y"
    elif (word.endswith("es") and word[-3] not in "aeo") or (word.endswith("s") and word[-2] not in "us"):
        word = word[:-1]
    for suffix in ("ing", "ed", "ly"):
        if word.endswith(suffix) and len(word) - len(suffix) >= 3 and word not in _WHOLE:
            word = word[: -len(suffix)]
            if len(word) > 3 and word[-1] == word[-2] and word[-1] not in "lse":
                word = word[:-1]
            break
    return word[:-1] if len(word) > 3 and word.endswith("e") else word


def is_inverted(one: Reading, other: Reading) -> bool:
    """The same words, names or persons in another order, or a preposition that governs what another one governs on the other
    side."""
    if sorted(one.words) == sorted(other.words) and _stated(one) != _stated(other):
        return True
    if any(_is_reordered(one, other, among) for among in (one.names | other.names, _PERSONS)):
        return True
    governed: dict[str, set[str]] = {}
    for preposition, word in one.roles:
        governed.setdefault(preposition, set()).add(word)
    for preposition, word in other.roles:
        mine = governed.get(preposition)
        # both texts name both words, but this preposition governs another one of them
        if mine is not None and word not in mine and word in one.words and mine & set(other.words):
            return True
    return False


def _stated(reading: Reading) -> list[str]:
    return [word for word in reading.content if word not in _NEGATIONS]


def _is_reordered(one: Reading, other: Reading, among: frozenset[str]) -> bool:
    """Both texts say the same of these words, in another order of their first places."""
    first = list(dict.fromkeys(word for word in one.words if word in among))
    second = list(dict.fromkeys(word for word in other.words if word in among))
    return first != second and sorted(first) == sorted(second)


def is_negated(one: Reading, other: Reading) -> bool:
    """One text denies, forbids or reverses what the other states."""
    if one.negations % 2 != other.negations % 2:
        return True
    for pair, side in one.poles - other.poles:
        if (pair, 1 - side) in other.poles - one.poles:
            return True
    mine, theirs = one.content_set - other.content_set, other.content_set - one.content_set
    return any(_is_prefixed(a, b) or _is_prefixed(b, a) for a in mine for b in theirs)


def _is_prefixed(word: str, root: str) -> bool:
    return len(root) > 2 and word.endswith(root) and word[: -len(root)] in _REVERSING


def _plain(token: str) -> str:
    token = token.casefold().replace("’", "'")
    return token[:-2] if token.endswith("'s") else token.rstrip(".'")


def _split(word: str) -> list[str]:
    """Contractions and hyphens: "don't" is do not, "two-factor" is two factor."""
    if word in _CONTRACTIONS:
        return _CONTRACTIONS[word].split()
    if word.endswith("n't"):
        return [word[:-3], "not"]
    if "'" in word:
        word = word.split("'")[0]
    return [part for part in re.split(r"[-/]", word) if part] if word.replace("-", "").isalpha() else [word]


def _is_identifier(token: str) -> bool:
    """Has digits or underscores among letters, an inner capital, or is all capitals: D-7781, snake_case, iPhone, EU, C++."""
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
    unit = _UNITS.get(symbol or percent or stem(letters), letters)
    return value, unit


def _with_unit(words: list[str], figure: _Figure) -> _Figure:
    """The figure with the unit that follows it, where it has none yet."""
    follower = words[figure.end] if figure.end < len(words) else ""
    if figure.unit or follower not in _UNITS:
        return figure
    return _Figure(figure.start, figure.end + 1, figure.value, _UNITS[follower])


def _spelled_out(words: list[str]) -> list[_Figure]:
    """Numbers in words: "two hundred and five" is 205, "twice" is 2x."""
    found = []
    start = 0
    while start < len(words):
        end, value = _spelled_out_at(words, start)
        if end > start and not _is_pronoun_one(words, start, end):
            found.append(_Figure(start, end, value, ""))
        start = max(end, start + 1)
    return found


def _spelled_out_at(words: list[str], start: int) -> tuple[int, str]:
    """The end of the number that starts here, and its value; `start` itself where none does."""
    total = group = 0
    end = start
    while end < len(words):
        word = words[end]
        if word in _SMALL:
            group += _SMALL[word]
        elif word == _HUNDRED and group:
            group *= 100
        elif word in _LARGE and group:
            total, group = total + group * _LARGE[word], 0
        elif (
            word == "and"
            and end > start
            and words[end - 1] == _HUNDRED
            and end + 1 < len(words)
            and words[end + 1] in _SMALL
        ):
            pass
        else:
            break
        end += 1
    if end > start:
        return end, str(total + group)
    value = _OTHER_NUMBERS.get(words[start])
    return (start, "") if value is None else (start + 1, value)


def _is_pronoun_one(words: list[str], start: int, end: int) -> bool:
    """ "which one", "one of": no number is meant."""
    if words[start:end] != [_ONE]:
        return False
    return words[end : end + 1] == ["of"] or (start > 0 and words[start - 1] in _BEFORE_PRONOUN_ONE)


def _roles(words: list[str]) -> list[tuple[str, str]]:
    roles = []
    for i, word in enumerate(words):
        if word in _PREPOSITIONS:
            for follower in words[i + 1 : i + 4]:
                if follower in _PREPOSITIONS:
                    break
                if follower not in _FUNCTION_WORDS:
                    roles.append((_PREPOSITIONS[word], follower))
                    break
    return roles


def _question(words: list[str]) -> str:
    for i, word in enumerate(words[:8]):
        if word in ("who", "whose", "whom"):
            return "who"
        if word == "how" and words[i + 1 : i + 2] == ["com"]:
            return "why"
        if word == "how" and words[i + 1 : i + 2] and words[i + 1] in _AMOUNTS:
            return "amount"
        if word in ("when", "where", "why"):
            return word
    return "whether" if words[:1] and words[0] in _ASKING_WHETHER else ""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _stems(text: str) -> frozenset[str]:
    return frozenset(stem(word) for word in text.split())


_WHOLE = _words(
    """
    nothing something anything everything during morning evening king ring spring string thing bring family reply apply supply
    only early daily monthly weekly need speed feed seed italy july hundred
    """
)
_CONTRACTIONS = {
    "can't": "can not",
    "cannot": "can not",
    "won't": "will not",
    "shan't": "shall not",
    "ain't": "is not",
    "let's": "let us",
    "i'm": "i am",
    "what's": "what is",
    "it's": "it is",
}
_NEGATIONS = _stems(
    "not no never without neither nor none nobody nothing nowhere except unless hardly barely avoid lack"
)
_REVERSING = frozenset(("un", "dis", "in", "im", "ir", "il", "non", "de", "mis", "anti"))
_PAIRS = """
on off|enable disable|activate deactivate|increase decrease|raise lower|add remove|add subtract|buy sell|start stop|start end
begin end|open close|up down|before after|more less|more fewer|most least|maximum minimum|max min|best worst|better worse
cheap expensive|hot cold|warm cold|left right|import export|encrypt decrypt|encode decode|lock unlock|install uninstall
allow deny|allow block|allow forbid|allow ban|accept reject|accept decline|approve reject|first last|highest lowest|high low
largest smallest|large small|big small|biggest smallest|long short|longest shortest|fast slow|fastest slowest|upgrade downgrade
upload download|push pull|win lose|love hate|like dislike|like hate|true false|positive negative|include exclude|with without
ascend descend|ascending descending|inside outside|above below|over under|oldest newest|old new|old young|oldest youngest
early late|arrive depart|arrival departure|send receive|borrow lend|give take|pass fail|public private|mute unmute|pause resume
create delete|insert delete|join leave|login logout|connect disconnect|attach detach|compress decompress|pro con
advantage disadvantage|benefit drawback|benefit risk|cause effect|deposit withdraw|gain lose|profit loss|hire fire|rise fall
success failure|valid invalid|safe dangerous|safe unsafe|legal illegal|possible impossible|visible hidden|show hide|same different
male female|man woman|men women|boy girl|husband wife|mother father|brother sister|north south|east west|day night
input output|read write|serialize deserialize|subscribe unsubscribe|follow unfollow|mount unmount|parent child|buyer seller
brighter dimmer|bright dim|louder quieter|loud quiet|internal external|employer employee
"""
_POLES: dict[str, list[tuple[int, int]]] = {}
for _index, _pair in enumerate(re.split(r"[|\n]", _PAIRS.strip())):
    for _side, _word in enumerate(_pair.split()):
        _POLES.setdefault(stem(_word), []).append((_index, _side))

_FUNCTION_WORDS = _stems(
    """
    a an the this that these those there here it its i me we us you he she they them him his her their our my your mine yours
    is are was were be been being am do does did done doing have has had having can could will would shall should may might must
    of in on at to for from by with about as into onto than then and or but if so because while what which who whom whose when
    where why how please tell show give let get got want need like know say explain describe find help make just also really very
    much many some any would could s t d ll re ve m
    """
)
LIGHT_WORDS = _stems("city place thing way method kind type sort name person people process step steps")
"""Words that say what kind of answer is meant and may be left out: "which city is the capital" asks for the capital."""

_PREPOSITIONS = {
    "from": "from", "out": "from", "to": "to", "into": "to", "onto": "to", "than": "than", "before": "before", "after": "after",
    "over": "over", "under": "under", "by": "by", "against": "against", "minus": "minus", "divided": "divided", "per": "per",
}  # fmt: skip
_AMOUNTS = _stems("many much long far old often big tall high deep wide heavy fast late soon")
_ASKING_WHETHER = _stems("is are was were am do does did has have had")
_PERSONS = frozenset(("me", "you"))
_FORMS = _stems(
    """
    json yaml xml csv html markdown latex table list bullet bullets numbered prose poem haiku essay email code regex sql python
    java javascript typescript rust golang kotlin swift ruby php bash powershell c++ c#
    english french spanish german italian portuguese russian chinese mandarin japanese korean arabic hindi dutch polish turkish
    greek latin swedish norwegian danish finnish hebrew vietnamese thai czech ukrainian
    brief briefly short shorter long longer concise detailed detail depth summary summarize summarise tldr step sentence sentences
    paragraph paragraphs word words formal informal casual polite child kid beginner expert layman five-year-old example examples
    """
)
_SCOPES = _stems(
    "all every each any some few several most least only except both either half whole entire total average always"
)
_OWNERS = _stems(
    "my mine our ours your yours his her hers their theirs wife husband mother father brother sister son daughter boss"
)
_TIMES = _stems(
    """
    today tonight tomorrow yesterday now currently current latest recent recently newest upcoming nowadays live
    """
)
_BEFORE_PRONOUN_ONE = _words("which this that the any no every some another each only good best right other")
_UP_TO_NINETEEN = """
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen
"""
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_SMALL = {stem(word): value for value, word in enumerate(_UP_TO_NINETEEN.split())}
_SMALL |= {stem(word): 10 * value for value, word in enumerate(_TENS.split(), 2)}
_ONE, _HUNDRED = stem("one"), stem("hundred")
_LARGE = {stem("thousand"): 10**3, stem("million"): 10**6, stem("billion"): 10**9, stem("trillion"): 10**12}
_OTHER_NUMBERS = {
    stem(word): value
    for word, value in (
        ("half", "1/2"), ("quarter", "1/4"), ("dozen", "12"), ("once", "1x"), ("twice", "2x"), ("double", "2x"), ("triple", "3x"),
        ("second", "2"), ("third", "3"), ("fourth", "4"), ("fifth", "5"), ("sixth", "6"), ("seventh", "7"), ("eighth", "8"),
        ("ninth", "9"), ("tenth", "10"), ("hundred", "100"), ("thousand", "1000"), ("million", "1000000"),
    )
}  # fmt: skip
_UNITS = {
    stem(word): names.split()[0]
    for names in (
        "km kilometer kilometre", "mi mile", "m meter metre", "cm centimeter centimetre", "mm millimeter millimetre", "ft foot feet",
        "inch inches", "yd yard", "kg kilogram kilo", "g gram", "mg milligram", "lb lbs pound", "oz ounce", "l liter litre",
        "ml milliliter millilitre", "gal gallon", "% percent percentage", "$ dollar usd", "€ euro eur", "£ gbp quid", "¥ yen",
        "s sec second seconds", "min minute mins", "h hour hr hrs", "day", "week", "month", "year", "am", "pm", "c celsius",
        "f fahrenheit", "kb kilobyte", "mb megabyte", "gb gigabyte", "tb terabyte", "mph", "kph", "people", "time",
    )
    for word in names.split()
}  # fmt: skip
