"""What a question needs of the context around it, by its English words.

Pure. Two tests: may its answer depend on a volatile span of the system prompt, and does it stand
alone after a history of other talk? Both are conservative: a question in another language needs
everything. Knows no digests. Invariant: in doubt the answer is that it needs it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from cache.context.volatile import Span, SpanKind
from cache.decision.text_features import remembered
from cache.decision.words import CALENDAR, FUNCTION_WORDS, stem, stems, word_set

QUESTION_CHARS_MAX = 400
"""A longer last text may hold anything: it needs all of its context."""

_WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)*")


DAYS = CALENDAR | stems("mon tue wed thu fri sat sun")
# what only the clock and the calendar say
_MOMENT_WORDS = (
    stems(
        """
        today tonight tomorrow yesterday now currently current date weekday weekend left remain
        remaining ago yet still already soon age old until till expire expires expired expiry
        expiration deadline due overdue latest recent recently upcoming next last past season
        weather holiday holidays christmas easter birthday anniversary calendar timestamp clock
        countdown elapsed since ended ends passed future nowadays present moment instant
        """
    )
    | DAYS
)
# these, where the rest of the prompt has days to count to or to compare with
_SPELL_WORDS = stems(
    "when day days week weeks month months year years hour hours minute minutes long open close closed"
    " opening end start begin late early too"
)
_NAME_WORDS = stems(
    """
    name names named call called who whom whose i'm title surname forename nickname initial initials
    gender sex pronoun pronouns mr mrs ms dr sir madam hello hi hey welcome greet greeting greetings
    introduce introduction profile account personal personally address addressed sign signed signing
    signature letter email mail draft write compose poem song story spell user users customer guest
    caller member identity identify person remember know registered logged login fill form
    application note message speak speaking talk talking me myself
    """
)
_ID_WORDS = stems(
    """
    id ids identifier identification number no nr reference ref code session log ticket trace
    account profile user where room seat table address email mail contact registered
    """
)
_COUNTER_WORDS = stems(
    "day days row streak times turn turns message messages attempt attempts count counter often long far progress practise practice"
)
_ORDER_WORDS = stems(
    "order first last second third fourth next previous begin top bottom before after sort sorted position line"
)
# the prompt itself, or the talk: an answer may quote anything
_QUOTING = stems(
    """
    prompt prompts instruction instructions instructed verbatim repeat above context conversation
    summarise summarize summary recap told yourself everything anything ignore disregard previous
    beginning earlier said system message messages json hidden secret print output configuration
    metadata header details info information data
    """
)
_MINE = stems("i i'm i've i'd me my mine myself we us our ours")
# of a span whose label no table knows
_POINTING = stems(
    "it its this these those they them one ones token key string uuid hash hashed valid decode decoded decrypt decipher"
    " plaintext encoded encrypted"
)
# what a rule reads of an id: "codes that start with 7 are test calls"
_FORMS = stems(
    "start starts starting begin begins beginning end ends ending prefix suffix first last digit digits letter letters"
    " character even odd contain contains containing range between higher lower greater less than older newer"
)
_FOREIGN = word_set(
    """
    wie ist ich bin mein meine meinen heute welche welcher welches heiße heisse uhr wann wer datum
    tag bitte und nicht deutsch antworte sprich réponds parle habla responde rispondi como cómo
    quien quién llamo hoy fecha día dia cuál cual qué es mi soy está quel quelle jour heure je ma
    qui suis appelle sommes est oggi chiamo giorno che quale mio sono hoje nome meu minha qual eu
    vandaag welke mijn naam wat hoe heet ik jak mam jestem dzisiaj hur jag mitt hvad jeg min bugün
    adım
    """
)


_ENGLISH = FUNCTION_WORDS | {"vs", "versus"}


@remembered(2048)
def words_of(text: str) -> tuple[str, ...]:
    """The words of a text, case-folded and stemmed, in their order."""
    return tuple(_stems_in(text))


def _stems_in(text: str) -> Iterator[str]:
    return (stem(word.removesuffix("'s")) for word in _WORD.findall(text.casefold().replace("’", "'")))


def is_english(text: str, beside: str = "") -> bool:
    """Whether a text is likely English: in ASCII letters, with a function word or a word of
    `beside`, and none that only other languages have.
    """
    raw = _WORD.findall(text.casefold().replace("’", "'"))
    if not all(word.isascii() or not word.isalpha() for word in raw) or not _FOREIGN.isdisjoint(raw):
        return False
    stems = frozenset(map(stem, raw))
    return not stems.isdisjoint(_ENGLISH) or not stems.isdisjoint(_stems_in(beside))


def relied_on(question: str, spans: Sequence[Span], rest: str, *, has_tools: bool) -> frozenset[int]:
    """The places of those spans that the answer to a question may depend on.

    `rest` is the prompt without its spans. With `has_tools` an answer may act for the user.
    """
    is_read = len(question) <= QUESTION_CHARS_MAX and is_english(question, rest)
    terms = frozenset(words_of(_ASIDE.sub("", question))) if is_read else _QUOTING
    if not _QUOTING.isdisjoint(terms):
        return frozenset(range(len(spans)))
    asks_now = bool(_NOW_ASKED.search(question) or _STATE_ASKED.search(question))
    moments = [span.value for span in spans if span.kind is SpanKind.MOMENT]
    dated = _sentences_with(_DATED, rest) if moments else frozenset()
    timed = _sentences_with(_CLOCK, rest) if any(":" in value for value in moments) else frozenset()
    needed = set()
    for index, span in enumerate(spans):
        # the sentences that have days or times to compare this moment with
        facts = dated | timed if ":" in span.value else dated
        is_moment = span.kind is SpanKind.MOMENT
        if (
            _needs(terms, span, has_tools=has_tools)
            or (span.is_learned and _points_at(terms, span, rest))
            or (is_moment and (asks_now or not (facts - FUNCTION_WORDS).isdisjoint(terms)))
            or (is_moment and facts and (_PAST_ASKED.match(question) or not _SPELL_WORDS.isdisjoint(terms)))
        ):
            needed.add(index)
    return frozenset(needed)


@remembered(512)
def _sentences_with(figures: re.Pattern[str], text: str) -> frozenset[str]:
    """The words of those sentences that have such figures."""
    return frozenset(
        word for sentence in _SENTENCE.split(text) if figures.search(sentence) for word in _stems_in(sentence)
    )


# a rate, a clause that says when, and where the talk is: none names a moment, a line or a session
_ASIDE = re.compile(
    r"\b(?:(?:an?|per|each|every) (?:year|month|week|day|hour|night)|(?:before|after) (?=\w+ing\b|you\b|i\b|we\b)"
    r"|(?:in|during) this (?:session|chat|conversation)\b(?=\W*$))",
    re.IGNORECASE,
)
# facts of the day: "is the office open?", "can I call you?", "who is the president?"
_STATE_ASKED = re.compile(
    r"^\W*(?:\w+,? )?(?:is|are|am|can|could|may|will|do|does)\b.*\b(?:open|closed?|available|availability|start(?:ed)?)\b"
    r"|^\W*(?:\w+,? )?(?:is|are|am|can|could|may|will)\b.*\b(?:call|visit|come|reach|work(?:ing)?|ready|begun|in session"
    r"|on duty|busy|dark|light|winter|summer|spring|autumn|fall|online|running)\b"
    r"|\bwho(?:['’]s| is| are) (?:the|our|your)\b",
    re.IGNORECASE,
)
# beside a date: "was the visit missed?"
_PAST_ASKED = re.compile(r"\W*(?:was|were|has|have|had|did)\b", re.IGNORECASE)
_NOW_ASKED = re.compile(
    r"\bis it (?:\w+ )?(?:morning|noon|afternoon|evening|night|midnight)\b"
    r"|\b(?:what|which|the)(?:['’]s| is)? (?:the )?(?:time|day|date|month|year|hour|week)\b|\b(?:time|day|date|month|year) is\b",
    re.IGNORECASE,
)
# a date, a day or a season
_DATED = re.compile(
    r"\b\d{4}-\d\d|\b\d{1,2}[./]\d{1,2}[./]\d{2,4}|\bmay \d|\d(?:st|nd|rd|th)? (?:of )?may\b"
    r"|\b(?:(?:mon|tues|wednes|thurs|fri|satur|sun|holi|week)days?|mon|tue|wed|thu|fri|sat|sun|weekends?|summer|winter|spring|autumn"
    r"|january|february|march|april|june|july|august|september|october|november|december|christmas|easter|deadlines?|expir\w*|valid)\b",
    re.IGNORECASE,
)
_SENTENCE = re.compile(r"[.!?;](?=\s|$)|\n")
_CLOCK = re.compile(r"\b\d{1,2}[:.]\d\d\b|\b\d{1,2} ?(?:am|pm|o'clock)\b", re.IGNORECASE)


def _points_at(terms: frozenset[str], span: Span, rest: str) -> bool:
    """Whether a question may be about a span that no table knows: it says "this", names nothing,
    has a code or a word of a sentence that has a word of the span's label; any may where such a
    sentence reads the form of an id.
    """
    has_code = any(word.isalnum() and not word.isalpha() and not word.isdigit() for word in terms)
    if has_code or not _POINTING.isdisjoint(terms) or terms <= FUNCTION_WORDS or _FORM_READ.search(rest):
        return True
    beside = _words_with(span.label, rest)
    return not _FORMS.isdisjoint(beside) or not (beside - FUNCTION_WORDS).isdisjoint(terms)


# "those that end in 7 cost more", of whatever
_FORM_READ = re.compile(
    r"\b(?:start|begin|end)(?:s|ing)? (?:in|with|on) (?:an? )?[\"'“]?(?:\d|[A-Z]\b)|\bdigits?\b|\b(?:odd|even) (?:numbers?|ones?)\b"
)
_LETTERED = re.compile(r"(?<![\w'’])[B-HJ-Z](?![\w'’])|[A-Za-z]\d|\d[A-Za-z]")  # "those with a B are urgent"


@remembered(512)
def _words_with(label: str, text: str) -> frozenset[str]:
    """The words of those sentences that have a word of a label, and `_FORMS` where one has a letter or a code."""
    named = frozenset(words_of(label)) - FUNCTION_WORDS
    read = ((frozenset(_stems_in(sentence)), sentence) for sentence in _SENTENCE.split(text))
    beside = [(words, sentence) for words, sentence in read if not named.isdisjoint(words)]
    forms = _FORMS if any(_LETTERED.search(sentence) for _, sentence in beside) else frozenset()
    return forms.union(*(words for words, _ in beside))


def _needs(terms: frozenset[str], span: Span, *, has_tools: bool) -> bool:
    span_words = frozenset(words_of(span.label)) | frozenset(
        word for word in words_of(span.value) if span.kind in _WORDED or not word.isalpha()
    )
    if span.kind is not SpanKind.ORDER and not (span_words - FUNCTION_WORDS).isdisjoint(terms):
        return True
    if has_tools and span.kind in (SpanKind.NAME, SpanKind.ID) and not _MINE.isdisjoint(terms):
        return True
    return not _ASKED_FOR[span.kind].isdisjoint(terms)


_WORDED = (SpanKind.NAME, SpanKind.MOMENT, SpanKind.OTHER)  # whose words say something
_ASKED_FOR = {
    SpanKind.MOMENT: _MOMENT_WORDS,
    SpanKind.NAME: _NAME_WORDS - stems("me myself"),
    SpanKind.ID: _ID_WORDS,
    SpanKind.COUNTER: _COUNTER_WORDS,
    SpanKind.ORDER: _ORDER_WORDS,
    SpanKind.OTHER: _MINE | _NAME_WORDS | _ID_WORDS | _MOMENT_WORDS,
}
