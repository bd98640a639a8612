"""Volatile spans of a system prompt: dates, times, ids, names and counters that say when and for
which user a prompt was made.

Pure functions of the text and of the operator's patterns. A span is taken by its type and by the
words before it ("Today is", "session", "signed in as"), never by its type alone: the same date
after "valid until" is a fact. Knows no other prompt: every host finds the same spans. Invariant:
what is not recognised is no span, and so stays exact.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import Any

from cache.decision.text_features import remembered
from cache.decision.words import word_set

TEXT_CHARS_MAX = 32_768
"""A longer system prompt has no spans."""
_SPANS_MAX = 32
# a text with more of these is read no further and has no spans: they bound the time of any text
_CUES_MAX = 512
_FOUND_MAX = 4 * _SPANS_MAX
_PATTERNS_S_MAX = 0.05  # of the operator's patterns in one text
_LINE_CHARS_MAX = 2_048  # of a line or a sentence


class SpanKind(StrEnum):
    """What a volatile span says."""

    MOMENT = "moment"  # a date or a time of the day
    ID = "id"  # of a session, an account, a place or a device
    NAME = "name"  # of the user
    COUNTER = "counter"  # turns, attempts, days in a row
    ORDER = "order"  # of the lines of a list of tools
    OTHER = "other"  # an operator's pattern


@dataclass(frozen=True, slots=True)
class Span:
    """Characters `start` to `end` of a text. `label` has the words before it that name it; `value`
    is what a digest takes where it matters. One that `is_learned` has a label that no table knows.
    """

    start: int
    end: int
    kind: SpanKind
    value: str
    label: str = ""
    is_learned: bool = False


def _any(alternatives: str) -> str:
    return f"(?:{'|'.join(alternatives.split())})"


_MONTH = (
    "jan(?:uary|uar|vier|uari|eiro)?|feb(?:ruary|ruar|ruari)?|mar(?:ch|s|zo|ço)?|m(?:är|ae)rz|maart|apr(?:il|ile)?|abril|avril"
    "|may|mai|mayo|maggio|mei|maio|june?|juni|juin|junio|giugno|junho|july?|juli|juillet|julio|luglio|julho"
    "|aug(?:ust|ustus)?|août|agosto|sept?(?:ember|embre|iembre|tembre)?|setembro|settembre|oct(?:ober|obre)?|okt(?:ober)?|octubre"
    "|ottobre|outubro|nov(?:ember|embre|iembre|embro)?|dec(?:ember)?|dez(?:ember|embro)?|décembre|diciembre|dicembre"
    "|février|fevereiro|febrero|febbraio|enero|gennaio|janeiro"
)
_WEEKDAY = (
    "mon(?:day)?|tue(?:s(?:day)?)?|wed(?:nesday)?|thu(?:r(?:s(?:day)?)?)?|fri(?:day)?|sat(?:urday)?|sun(?:day)?"
    "|montag|dienstag|mittwoch|donnerstag|freitag|samstag|sonnabend|sonntag|lundi|mardi|mercredi|jeudi|vendredi|samedi|dimanche"
    "|lunes|martes|miércoles|jueves|viernes|sábado|domingo|lunedì|martedì|mercoledì|giovedì|venerdì|sabato|domenica"
    "|maandag|dinsdag|woensdag|donderdag|vrijdag|zaterdag|zondag|segunda-feira|terça-feira|quarta-feira|quinta-feira|sexta-feira"
)
_DAY = r"(?:\d{1,2}(?:st|nd|rd|th|\.|º|er)?)"
_DATE = (
    rf"(?:\d{{4}}[-/.]\d{{1,2}}[-/.]\d{{1,2}}|\d{{1,2}}[-/.]\d{{1,2}}[-/.]\d{{2,4}}"
    rf"|(?:the )?{_DAY} (?:of |de |di )?(?:{_MONTH})\b\.?(?:,? (?:de |del )?\d{{4}}\b)?"
    rf"|(?:{_MONTH})\b\.? {_DAY}\b(?:,? \d{{4}}\b)?|(?:{_MONTH})\b\.? \d{{4}}\b|(?:{_WEEKDAY})\b|\d{{4}}-W\d\d(?:-\d)?)"
)
_ZONE = r"(?: ?(?:Z|UTC|GMT|[CEMPWB]E?[SD]?T|[+-]\d\d:?\d\d|[A-Z][a-z]+/[A-Z][A-Za-z_]+)\b(?:[+-]\d{1,2})?)?"
_TIME = rf"(?:\d{{1,2}}[:.h]\d\d(?:[:.]\d\d(?:[.,]\d{{1,9}})?)?(?: ?[ap]\.?m\b\.?)?|\d{{1,2}} ?[ap]\.?m\b\.?){_ZONE}"
_STAMP = rf"(?:\d{{4}}-\d\d-\d\d[T_]\d\d:?\d\d(?::?\d\d(?:[.,]\d{{1,9}})?)?{_ZONE}|\b1[5-9]\d{{8}}(?:\d{{3}})?\b)"
_MOMENT = rf"(?:{_STAMP}|{_DATE}|{_TIME})"
# a chain of them: "Friday, 9 May 2025 at 14:05"
_AND = r"(?:,? (?:at |um |à |a las |alle |om |às |and it is |the |der |den |le |il |el )?| ?[|/–-] ?|, )"
_MOMENTS = rf"(?i:{_MOMENT}(?:{_AND}{_MOMENT}){{0,3}})"
# with a digit, or all in capitals: never a plain word
_ID = (
    r"(?:[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}"
    r"|(?=[\w.#-]{0,63}\d)[\w#](?:[\w.-]{0,62}\w)?(?: \d{2,6}\b){0,4})"
)
_CODE = r"(?:[A-Z][A-Z0-9_-]{1,15}\b(?![ ]?[a-z]))"
_LETTER = r"[^\W\d_a-zß-öø-ÿ]"  # a capital, nearly: of any alphabet
_WORD = rf"{_LETTER}[^\W\d_]*(?:[-'’][^\W\d_]+)*"
_NAME_WORD = rf"(?:{_LETTER}\.|{_WORD}|(?:van|von|de|da|del|di|der|den|dos|la|le|bin|al|el|y) {_WORD})"
_TITLE = r"(?:Mrs?|Ms|Miss|Mx|Dr|Prof|Herr|Frau|Señora?|Sra?|Mme|Sig|Sig\.ra|Dhr|Mevr)\b\.? "
_NAMES = rf"(?:{_TITLE})?{_WORD}(?: {_NAME_WORD}){{0,3}}"
_FULL_NAMES = rf"(?:{_TITLE}{_NAMES}|{_WORD}(?: {_NAME_WORD}){{1,3}})"
# given names: after "Customer:" two words with capitals may be a firm, a plan or a room as well
_GIVEN = _any(
    """
    Aaron Abdul Abigail Adam Adele Adrian Agnes Ahmed Aisha Akira Alan Alba Albert Alejandro Alex Alexander
    Alexandra Alfred Ali Alice Alicia Alina Alison Amanda Amelia Amina Amir Amy Ana Anders Andre Andrea Andreas
    Andrew Angela Anita Anja Anna Anne Annika Anthony Anton Antonio Arthur Astrid Ayesha Barbara Beatrice Ben
    Benjamin Bernard Bianca Bjorn Bob Brian Bruno Camille Carla Carlos Carmen Carol Caroline Catherine Cecilia
    Charles Charlotte Chen Chiara Chloe Chris Christian Christina Christine Christoph Claire Clara Claudia Colin
    Daniel Daniela Danielle David Deborah Denis Devika Diana Diego Dimitri Dmitri Dominik Dorothy Edith Eduardo
    Edward Elena Elias Elif Elisa Elizabeth Ella Ellen Emil Emily Emma Eric Erik Erika Ethan Eva Evelyn Fatima
    Felix Femi Fernando Filip Finn Fiona Florian Frances Francesca Francis Frank Fred Frederik Gabriel Gabriela
    George Georgia Gerald Giovanni Giulia Grace Greta Gustav Hana Hanna Hannah Hans Harold Hassan Heidi Helen
    Helena Henrik Henry Hiroshi Hugo Ian Ibrahim Ida Ines Ingrid Irene Iris Isabel Isabella Ivan Jack Jacob
    Jakob James Jamal Jan Jana Jane Janet Jasmin Jasper Javier Jean Jennifer Jens Jessica Jin Joan Joanna Johan
    Johanna Johannes John Jonas Jonathan Jorge Jose José Josef Joseph Joshua Juan Judith Julia Julian Julie
    Juliette Karen Karim Karin Karl Katarina Kate Katharina Katherine Kathleen Katrin Keiko Kelly Kenji Kenneth
    Kevin Khalid Klaus Kofi Kristin Kwame Lara Lars Laura Lea Leila Lena Leo Leon Leonie Lina Linda Lisa Lorenzo
    Louis Louise Luca Lucas Lucia Lucy Luis Lukas Maja Malik Marc Marco Marcus Margaret Maria Marie Marina Mario
    Mark Marko Marta Martha Martin Martina Mary Mateo Matthew Matthias Maya Mehmet Mei Melissa Mia Michael
    Michelle Miguel Mikhail Milan Mira Miriam Mirela Mohamed Mohammed Monica Monika Nadia Nancy Naomi Natalia
    Natalie Nathan Neha Nicholas Nicola Nicole Niklas Nina Noah Nora Olga Oliver Olivia Omar Oscar Pablo Pamela
    Patricia Patrick Paul Paula Pedro Peter Petra Philip Philipp Pierre Piotr Priya Rachel Rafael Rahul Raj
    Rebecca Renata Ricardo Richard Robert Roberto Robin Rosa Ruth Ryan Sabine Sam Samir Samuel Sandra Sanjay
    Sara Sarah Sebastian Sergei Sharon Silvia Simon Sofia Sonia Sophia Sophie Stefan Stefano Stella Stephanie
    Stephen Steven Sunita Susan Sven Svetlana Takeshi Tamara Tanja Tanya Tariq Teresa Theo Theresa Thomas Tim
    Timothy Tobias Tom Tomas Tomasz Ursula Valentina Vera Veronica Victor Victoria Viktor Vincent Virginia
    Walter Wei William Xavier Yara Yasmin Youssef Yuki Yuri Yusuf Zara Zoe
    """
)
_EMAIL = r"[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63}){1,4}"

_SIGN = r"(?:\*{0,2}[\"']? ?(?:[:=#]|is\b:?|ist\b|est\b|es\b|è|é)(?: now| the| heute| at| on| le| el| il| o| den)?[ \"'`*<(\[]{0,3}|> ?)"
_IS = rf"(?:{_SIGN}| )"
_NOW = (
    r"(?:today(?:['’]s)?(?: date| day)?|(?:the )?(?:current|present|local|server|system|user(?:['’]s)? local)"
    r"(?: local| utc| system)?[ _-]?(?:date(?:[ _/-]?(?:and|&)?[ _/-]?time)?|time(?:stamp)?|day|datetime)(?: \([^)\n]{1,24}\))?"
    r"|timestamp|datetime|rendered|it|now|heute|(?:aktuelles? )?datum|uhrzeit|aujourd['’]hui(?: nous sommes)?|date du jour"
    r"|hoy|fecha(?: actual| de hoy)?|hora actual|oggi|data(?: odierna| di oggi| de hoje| atual)?|hoje|vandaag)"
)
_NOW_ALONE = r"(?:date|time|day|date and time|date/time)"  # a label only where a clause begins with it
# what has an id of its own in every request; "run 5" or "terminal 2" may be facts
_SESSIONS = (
    "session request conversation chat thread trace correlation execution invocation transaction sitzung vorgang sesión"
    " sessione sessie sessão"
)
_STATIONS = "run terminal kiosk till"
_USERS = (
    "user customer guest caller client member patient student learner pupil employee visitor account subscriber passenger traveler"
    " traveller player reader applicant candidate cardholder borrower resident participant attendee contact driver rider buyer"
    " nutzer nutzerin benutzer benutzerin kunde kundin gast patientin mitarbeiter mitarbeiterin utilisateur utilisatrice usuario"
    " usuaria cliente utente gebruiker klant"
)
_BEGINNING = "session call chat conversation lesson shift user"
_BEGAN = rf"{_any(_BEGINNING)}(?: has| was)? (?:began|begun|started|opened|logged in|signed in|joined)"
_USER = f"(?:account holder|{_any(_USERS)})"
_NUMBER_WORD = (
    r"(?:ids?|identifier|numbers?|no\.?|nr\.?|num|ref(?:erence)?(?: number| no\.?)?|code|key|token|uuid|handle"
    r"|nummer|número|numéro|numero)"
)
_NUMBERED = rf"(?:[ _-]?{_NUMBER_WORD})"
_WITHS = "talking speaking chatting in signed logged angemeldet"
_WITH = (
    r"(?:(?:talking|speaking|chatting) (?:to|with)|in (?:a )?(?:conversation|chat|call) with|(?:signed|logged)[ -]in"
    r"(?: as)?(?: (?:user|customer|employee|member|account))?(?: is)?|angemeldet(?: als)?)"
)
_TURNS = "turn attempt iteration message"
_PLACE = r"(?:room|seat|table|cabin|suite|berth|pitch|zimmer|tisch|chambre|habitación)"
_NAMED = r"(?:['’]s)?(?: full| first| last| display| given)?[ _-]?(?:name(?: is)?|called|named)"
_END = r"(?=\s*(?:$|[.,;:!?()\[\]{}<>|\"'*\n/–-]|and\b|who\b|whose\b|has\b|is\b|from\b|with\b|in room\b|und\b))"
# what follows an id or a moment: "id 0 is the admin" and "5 pm at which" are rules
_DONE = r"(?=\s*(?:$|[.,;:!?()\[\]{}<>|\"'*\n]|and\b|with\b))"
_MIXED = r"(?=[\w.-]*\d)(?=[\d.-]*[A-Za-z])[\w#](?:[\w.-]{2,62}\w)"


def _pattern(
    cues: str, kind: SpanKind, before: str, value: str, after: str = _DONE
) -> tuple[list[str], SpanKind, re.Pattern[str]]:
    """Of labels that begin with one of the words `cues`. A cue is read in any case, a name only as it is written."""
    return cues.split(), kind, re.compile(f"(?i:(?P<label>{before}))(?P<value>{value}){after}", re.MULTILINE)


# a bare label is one only beside the session's or the user's data, or in a line of its own at an end of the text
_BARE = frozenset(("date", "time", "day"))
_NOWS = (
    "today the current present local server system user timestamp datetime rendered it now heute aktuelle aktuelles datum uhrzeit"
    " aujourd date hoy fecha hora oggi data hoje vandaag"
)
_BY_CUE: dict[str, list[tuple[SpanKind, re.Pattern[str]]]] = {}
for _cues, _kind, _label in (
    _pattern(_NOWS, SpanKind.MOMENT, f"{_NOW}{_SIGN}", _MOMENTS),
    _pattern("nous", SpanKind.MOMENT, r"nous sommes (?:le |au )?", _MOMENTS),
    _pattern(_BEGINNING, SpanKind.MOMENT, f"{_BEGAN}(?: at| on)?[: ]{{1,2}}", _MOMENTS),
    _pattern(_SESSIONS, SpanKind.ID, f"{_any(_SESSIONS)}{_NUMBERED}{_IS}", _ID),
    _pattern(_SESSIONS, SpanKind.ID, f"{_any(_SESSIONS)}{_SIGN}", r"\d{5,20}"),
    _pattern(f"{_SESSIONS} {_STATIONS}", SpanKind.ID, f"{_any(f'{_SESSIONS} {_STATIONS}')}{_IS}", _MIXED),
    _pattern(_STATIONS, SpanKind.ID, f"{_any(_STATIONS)}{_NUMBERED}{_IS}", _ID),
    _pattern("terminal kiosk till", SpanKind.ID, r"(?:terminal|kiosk|till)(?: ?[:=#] ?| )", _CODE),
    _pattern(_USERS, SpanKind.ID, f"{_USER}(?:['’]s)?(?: account| membership| card)?{_NUMBERED}{_IS}", _ID),
    _pattern(_USERS, SpanKind.ID, f"{_USER}(?: ?[:=#] ?)", r"(?:[A-Z]{0,5}[-_#]?\d[\w-]{3,40}(?: \d{2,6}\b){0,4})"),
    _pattern(_USERS, SpanKind.ID, f"(?:{_USER}(?:['’]s)? )(?:e-?mail(?: address)?){_IS}", _EMAIL),
    _pattern(_USERS, SpanKind.NAME, f"{_USER}{_NAMED}(?:{_IS})", _NAMES, _END),
    _pattern(_USERS, SpanKind.NAME, f"{_USER}(?: is)? (?:called|named) ", _NAMES, _END),
    _pattern(
        _USERS, SpanKind.NAME, f"{_USER}(?: ?[:=] ?)", rf"(?:{_TITLE}{_NAMES}|{_GIVEN}(?: {_NAME_WORD}){{1,3}})", _END
    ),
    _pattern(_WITHS, SpanKind.NAME, f"{_WITH}(?: {_USER})?(?: ?[:=] ?)", _FULL_NAMES, _END),
    _pattern(_WITHS, SpanKind.NAME, f"{_WITH}(?: the {_USER})? ", _FULL_NAMES, _END),
    _pattern(
        _TURNS,
        SpanKind.COUNTER,
        rf"{_any(_TURNS)}(?: (?:number|no\.?))?(?: ?[:=#] ?)",
        r"\d{1,6}(?: ?(?:of|/) ?\d{1,6})?",
    ),
    _pattern("streak", SpanKind.COUNTER, r"streak(?: of| is|:|=) ?", r"\d{1,5}\b(?!%)"),
    _pattern(" ".join(_BARE), SpanKind.MOMENT, f"{_NOW_ALONE}{_IS}", _MOMENTS),
):
    for _cue in _cues:
        _BY_CUE.setdefault(_cue, []).append((_kind, _label))


def _tails(suffixes: Iterable[str]) -> str:
    """A pattern of any of these words in any case, which reads each letter once."""
    by_letter: dict[str, list[str]] = {}
    for word in suffixes:
        by_letter.setdefault(word[:1], []).append(word[1:])
    return (
        f"(?:{'|'.join(letter and f'[{letter}{letter.upper()}]{_tails(rest)}' for letter, rest in by_letter.items())})"
    )


# `re` looks fastest for a set of letters; "the" and "in" are everywhere
_CUE = re.compile(
    rf"[{''.join({case for cue in _BY_CUE for case in (cue[0], cue[0].upper())})}](?<![\w'’-].)"
    rf"{_tails(cue[1:] for cue in _BY_CUE)}(?=[ \"'’_/:=#*>-])"
    r"(?i:(?<!\bthe)(?<!\bin)|(?= (?:current|present|local|server|system|user|a |conv|chat|call)))"
)
_ROW = re.compile(r"(?P<value>\d(?<!\w.)\d{0,4})(?i:(?= days? in a row| ?-?days? streak))(?P<label>)")
# further ids in the sentence that has the user's name
_FOLLOWING = tuple(
    re.compile(rf"(?i)\b(?P<label>{before})(?P<value>{value})")
    for before, value in (
        (rf"{_PLACE}(?: (?:no\.?|number))? ?[:#]? ?", r"\d{1,5}[A-Z]?\b"),
        (rf"(?:{_USER} )?{_NUMBER_WORD}{_IS}", _ID),
    )
)
_RUN = re.compile(r"\w+")
_SENTENCE_END = re.compile(r"(?<!\bMr)(?<!\bMs)(?<!\bDr)(?<!\bMrs)(?<!\bProf)[.!?](?=\s)|\n")
_CONDITIONAL = re.compile(
    r"(?i)\b(?:if|when|whenever|unless|until|except|once|where|in case|not|never|only|suppose|assume|pretend"
    r"|example|e\.g\.|wenn|falls|si|quand"
    r"|lorsque|cuando|se|quando|als|nicht)\b[^.;!?\n]{0,80}$"
)

# words that a user's "name" never has: what stands there is a role, a plan, a firm or a language
_NO_NAMES = word_set(
    """
    admin administrator guest manager premium basic gold silver bronze platinum diamond plus pro enterprise standard
    free trial business
    student teacher child children adult adults senior junior internal external owner editor viewer reader member
    members new returning
    existing vip staff employee employees anonymous unknown none yes no true false corp corporation inc ltd limited
    gmbh llc ag plc co
    company group bank team support service services department customer customers user users client clients patient
    patients english
    german french spanish italian dutch portuguese polish russian chinese japanese korean arabic turkish hindi swedish
    danish norwegian
    finnish greek czech american british canadian australian european asian african user's everyone everybody anyone
    people human
    humans beginner intermediate advanced expert developer developers engineer engineers doctor nurse lawyer sales
    marketing finance legal
    hr it north south east west level tier plan read write only full limited restricted public private verified
    unverified active inactive
    online offline male female man woman kids teen teenager tenant partner partners supplier vendor investor investors
    press lead head chief officer director president auditor analyst agent operations accounting compliance security
    chef
    driver pilot captain contractor intern trainee assistant procurement engineering research management purchasing
    general personal professional private corporate commercial retail wholesale first economy class pregnant diabetic
    vegan vegetarian
    """
)

# of a role or a department, not of a person
_NO_NAME_ENDS = ("ing", "tion", "sion", "ment", "ness", "ance", "ence", "ics", "ship", "ware", "ology", "istry", "ity")

_TOOLS = re.compile(
    r"(?im)^[ \t#*]*(?:(?:your|the|available|allowed|enabled) )*(?:tools?|functions?)"
    r"(?: available| you (?:can|may) (?:use|call))?(?:[ \t*]*:)?[ \t*]*\n"
    r"(?P<label>)(?P<value>(?:[ \t]*[-*•][ \t]+`?[a-z_][\w.]*`?[ \t]*(?:[(:–—-][^\n]*)?(?:\n|\Z)){2,})"
)


def compile_pattern(text: str) -> re.Pattern[str]:
    """An operator's pattern, compiled. Raises ValueError for one that is no regular expression or
    matches an empty text.
    """
    import regex  # unlike `re`, it can stop a search; few installations have patterns

    try:
        pattern: re.Pattern[str] = regex.compile(text)
    except (regex.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{text!r} is no regular expression: {error}") from None
    if pattern.match(""):
        raise ValueError(f"{text!r} matches an empty text: it has to match what is volatile")
    return pattern


def _operators(patterns: Iterable[Any], text: str) -> Iterator[Span]:
    """The spans of the operator's patterns that end their search in time."""
    ends_at = time.perf_counter() + _PATTERNS_S_MAX
    for pattern in patterns:
        try:
            matches = list(pattern.finditer(text, timeout=max(0.0, ends_at - time.perf_counter())))
        except TimeoutError:
            return
        for match in matches:
            if match.end() > match.start():
                yield Span(match.start(), match.end(), SpanKind.OTHER, match[0])


@remembered(512)
def spans(text: str, patterns: tuple[re.Pattern[str], ...] = ()) -> tuple[Span, ...]:
    """The volatile spans of a system prompt in their order, none inside another; `patterns` are the
    operator's.
    """
    if len(text) > TEXT_CHARS_MAX:
        return ()
    cues = [*islice(_CUE.finditer(text), _CUES_MAX + 1)]
    if len(cues) > _CUES_MAX:
        return ()
    all_spans = [span_of(match, SpanKind.COUNTER) for match in _ROW.finditer(text)]
    bare, counts = [], Counter[str]()
    for word in cues:
        cue = word[0].casefold()
        for kind, pattern in _BY_CUE.get(cue, ()):
            match = pattern.match(text, word.start())
            if match is not None:
                span = span_of(match, kind)
                if cue in _BARE:
                    bare.append(span)
                elif kind is not SpanKind.NAME or _is_name(span, counts := counts or Counter(_RUN.findall(text))):
                    all_spans.append(span)
        if len(all_spans) + len(bare) > _FOUND_MAX:
            return ()
    end = 0
    for name in [span for span in all_spans if span.kind is SpanKind.NAME]:
        if name.start < end:
            continue  # its sentence is read
        end = name.end + _LINE_CHARS_MAX
        sentence_end = _SENTENCE_END.search(text, name.end, end)
        end = sentence_end.start() if sentence_end else end
        for pattern in _FOLLOWING:
            all_spans += (span_of(match, SpanKind.ID) for match in pattern.finditer(text, name.end, end))
    all_spans += [span for span in bare if _is_beside(span, all_spans, text)]
    all_spans = [span for span in all_spans if not _CONDITIONAL.search(text, max(0, span.start - 96), span.start)]
    all_spans += (span_of(match, SpanKind.ORDER) for match in _TOOLS.finditer(text))
    all_spans += _operators(patterns, text)
    return apart(all_spans)


def span_of(match: re.Match[str], kind: SpanKind) -> Span:
    return Span(*match.span("value"), kind, match["value"], match["label"])


def _is_name(span: Span, counts: Counter[str]) -> bool:
    """Whether a name is neither a role nor a word that the prompt has elsewhere in small letters."""
    parts = re.split(r"[ .'’-]", span.value.casefold())
    if not _NO_NAMES.isdisjoint(parts) or any(len(word) > 4 and word.endswith(_NO_NAME_ENDS) for word in parts):
        return False
    own = _RUN.findall(span.value)
    return not any(len(word) > 3 and counts[word] > own.count(word) for word in parts)


def _is_beside(span: Span, others: Sequence[Span], text: str) -> bool:
    """Whether a moment whose label begins a clause stands in a line of nothing but the session's or
    the user's data, or alone in the first or last line.
    """
    before = text[: span.start - len(span.label)].rstrip(" \t>*#-")
    if before and before[-1] not in ",;(|[.!?\n":
        return False
    start, end = text.rfind("\n", 0, span.start) + 1, text.find("\n", span.end)
    end = len(text) if end < 0 else end
    if end - start > _LINE_CHARS_MAX:
        return False
    inside = [member for member in others if start <= member.start < end]
    left = list(text[start:end])
    for member in (span, *inside):
        for at in range(max(start, member.start - len(member.label)) - start, min(member.end, end) - start):
            left[at] = ""
    if any(letter.isalnum() for letter in left):
        return False
    is_at_end = not text[:start].strip() or not text[end:].strip()
    return is_at_end or any(member.kind in (SpanKind.NAME, SpanKind.ID) for member in inside)


def apart(spans: list[Span]) -> tuple[Span, ...]:
    """In their order; of two that overlap the one that begins first, or the longer."""
    kept: list[Span] = []
    for span in sorted(spans, key=lambda one: (one.start, -one.end)):
        if not kept or span.start >= kept[-1].end:
            kept.append(span)
    return tuple(kept) if len(kept) <= _SPANS_MAX else ()
