"""The parts of a prompt: what must be equal, and the one span that is compared by meaning.

Pure: takes a text and returns digests and that span. Knows no cache and no similarity, and of a
namespace only how many of its prompts have a line. Lines and the strings of JSON are read one by
one. Tags that name documents, long fences, and paragraphs of over `LONG_WORDS` words are documents.
The question is the one line with a question's label, at the start or the end of the prompt, or the
one string under such a key. Where a prompt has neither, what is left over between the lines of a
known template is, or a line at an end that asks about a longer text.

Invariants: all of a text but its question is in its frame, so it is equal where frames are, byte
for byte, but for the order of chunks that have the same tag or kind of heading, and for lines that
say the same question once more; a text of which the question can't be told has either no question,
or no frame and all of it is compared.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from hashlib import blake2b
from itertools import groupby

import msgspec

from cache.decision.guards import LONG_WORDS
from cache.decision.text_features import remembered

TEMPLATE_PROMPTS = 3
"""Of a namespace that have a line: from then on it is a template's, or that of a known document."""

_DIGEST_BYTES = 12
_SPANS_MAX = 64  # a prompt with more has no slot
_CHARS_MAX = 3_000  # of a prompt of which an entry keeps the long paragraphs
_PIECES_MAX, _LINES_MAX = 600, 3_000  # a prompt with more has no question: they bound the time of any prompt
_MARKS_MAX = 8  # around a question
_JSON_MAX = 4  # attempts to read JSON in a prompt
_LABELS_MAX = 2  # of questions with the same words
_LABEL_CHARS = 100  # of a line in which a label may be: patterns read no more
_TEMPLATE_WORDS = 12  # fewer, and what prompts share is no template

_DOCUMENTS = (
    "articles?|attachments?|background|chunks?|contents?|contexts?|data|documents?|docs?|evidence|excerpts?|facts|files?|"
    "knowledge|memor(?:y|ies)|notes|pages?|passages?|polic(?:y|ies)|references?|records?|reports?|results?|snippets?|"
    "sources?|tables?|transcripts?"
)
_QUESTIONS = "(?:[\\w'’]{1,20}[ _-])?(?:question|query|request|instruction|task)"
_PLAIN_QUESTION = re.compile(r"question|query|\bq\b", re.IGNORECASE)  # what else asks may be an instruction
_QUESTION_KEY = re.compile(_QUESTIONS, re.IGNORECASE)
_FENCE = re.compile(r"(`{3,}|~{3,})")
_TAG = re.compile(r"<([A-Za-z][\w.-]*)(?:\s[^<>]*)?>")
_TAGS = re.compile(r"<(/?)([A-Za-z][\w.-]*)[\s>]")
_CLOSING = re.compile(r"</[A-Za-z][\w.-]*>")
_DOCUMENT_TAG = re.compile(rf"(?:[\w.-]+[_.-])?(?:{_DOCUMENTS})(?:[_.-]?\d+)?", re.IGNORECASE)
_DOCUMENT_LABEL = re.compile(
    rf"[#>*_\[ -]*(?:the |here (?:is|are) (?:the )?)?(?:\w+ )?(?:{_DOCUMENTS})(?: *\(?#?\d+\)?)?[*_\]]*(?::|\s*$)",
    re.IGNORECASE,
)
_QUESTION_LABEL = re.compile(
    rf"(?:#{{1,6}} *{_QUESTIONS}:?\s*$|[*_]{{0,2}}(?:{_QUESTIONS}|q)[*_]{{0,2}}:[*_]{{0,2}}[ \t]*|<{_QUESTIONS}>[ \t]*)",
    re.IGNORECASE,
)
_HEADING = re.compile(
    r"(\[)[^\[\]/][^\[\]]*\]$|(\*\*)[^*]+\*\*:?$|(#{2,6}) .+$|(={2,}|-{2,})[^=-].*(?<=[=-]{2})$|(<<)[^<>]+>>$"
)
_INLINE_HEADING = re.compile(r'(\[)[^\[\]/][^\[\]]*\] |(")[^"]+": ')
_ORDINAL = re.compile(
    r"\b(?:step|part|chapter|section|phase|day|turn|example|page)\b|^\W*\d|\b(?:first|then|last)\b", re.I
)
# what relies on the order of chunks: words of a question, and of instructions beside it
_ORDERED = re.compile(
    r"\b(?:order|first|second|third|last|latest|newest|final|next|previous|earlie(?:r|st)|later|top|bottom|beginning|"
    r"start|opening|closing|end|continue|cit(?:e|ations?)|number(?:s|ed)?|\d+(?:st|nd|rd|th))\b|"
    rf"\b(?:{_DOCUMENTS}|email|message|text|paragraph) (?:one|two|three|four|five|\d+|(?-i:[A-Z]))\b|\[\d",
    re.IGNORECASE,
)
_CITED = re.compile(r"\b(?:order|cit(?:e|es|ed|ing|ations?)|numbered|latest|newest|most recent)\b|\[\d", re.IGNORECASE)
_LABEL = re.compile(r"[#>*_(\s-]{0,6}(?:\[[^\[\]\n]{1,30}\]:?|[^\W\d][\w '’-]{0,40}[*_)]{0,3}:[*_]{0,2})\s+")
_FIELD = re.compile(r"[^\W\d][^:\n\d]{0,30}: +\S")


_JSON_TOKEN = re.compile(r'"((?:[^"\\]|\\.)*)"(\s*:)?|[{}\[\]]')
_JSON_START = re.compile(r'\s*[{\[]\s*(?:["{\[]|$)')
_TAGGED = re.compile(r"<([A-Za-z][\w.-]*)(?:\s[^<>]*)?>(.*)</\1>", re.DOTALL)
_OPENING = " \t\"'“`<[(*_>"
_PAIRS = {'"': '"', "'": "'", "“": "”", "`": "`", "<": ">", "[": "]", "(": ")", "*": "*", "_": "_"}


@dataclass(frozen=True, slots=True)
class Parts:
    """`frame` digests all that must be equal, or is empty where the whole text is compared;
    `question` is compared by meaning, or is empty where nothing is. `has_documents`: the frame has
    what the question may be about.
    """

    frame: bytes
    question: str
    has_documents: bool = False


class PieceKind(IntEnum):
    """Of a span."""

    LINE = 0
    QUOTED = 1  # a line of a short fence: a label in it is none
    LONG = 2  # a paragraph that nothing names a document: it may be an instruction
    DOCUMENT = 3


_MARKED = (PieceKind.QUOTED, PieceKind.DOCUMENT)


class Piece(msgspec.Struct, frozen=True, gc=False):
    """A line, a paragraph or a string of JSON, or a document whose `text` is left out. `glue` is
    what stands between it and the piece before, `paragraph` the number of its paragraph, `chunk`
    the tag or heading of a chunk whose order among its like is free, `key` that of a string of
    JSON.
    """

    digest: bytes
    text: str
    glue: str
    paragraph: int
    chunk: str
    kind: PieceKind
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Split:
    """A prompt as far as its own text shows it. Where it has `spans`, a template may show a slot:
    then `slot` has its parts.
    """

    parts: Parts
    spans: tuple[Piece, ...] = ()

    @classmethod
    def of(cls, spans: tuple[Piece, ...]) -> Split:
        """Split a prompt of these spans without a template."""
        is_marked = any(span.kind in _MARKED for span in spans)
        labels = [index for index, span in enumerate(spans) if _is_asking(span)]
        plain = [index for index in labels if _is_plain(spans[index])]
        labels = plain or labels
        found = [_question(spans, index) for index in labels] if len(labels) <= _LABELS_MAX else []
        asked = {one[0].question: one for one in found if one is not None}
        if len(asked) == 1 and None not in found:
            ((parts, is_sure),) = asked.values()
            # a paragraph of one line at the start is the instruction
            is_told = any(span.kind and (index > 0 or "\n" in span.text) for index, span in enumerate(spans))
            return cls(replace(parts, has_documents=is_marked or is_told), () if plain and is_sure else spans)
        if is_marked or labels:
            return cls(Parts(_frame(spans, 0, 0), ""), spans)
        return cls(Parts(b"", "".join(span.glue + span.text for span in spans)), spans)

    @property
    def lines(self) -> list[bytes]:
        """The lines, and the labels at their starts, that a template may have."""
        labels = (_LABEL.match(span.text) for span in self.spans)
        return [*(span.digest for span in self.spans), *(_digest(match.group()) for match in labels if match)]

    def slot(self, count: Callable[[bytes], int], *, is_lookup: bool = False) -> Parts:
        """The parts where `count` prompts have each of these lines. In a lookup also where no known
        line may be a question that many have asked: in an entry's place that would change with each
        prompt.
        """
        shared = _Shared(self.spans, count).parts(is_lookup)
        if shared is None:
            return self.parts
        # a label that the template does not bear out is no question's
        return shared if shared.question else Parts(_frame(self.spans, 0, 0), "") if self.parts.frame else self.parts


class _Shared:
    """The spans of a prompt, and how many prompts of its namespace have each of them."""

    def __init__(self, spans: Sequence[Piece], count: Callable[[bytes], int]) -> None:
        self._spans = spans
        self._counts = [count(span.digest) for span in spans]
        self._known = [some >= TEMPLATE_PROMPTS for some in self._counts]
        labels = [_LABEL.match(span.text) for span in spans]
        # how many prompts have its label, and the label's length
        self._labels = [(count(_digest(one.group())), one.end()) if one is not None else (0, 0) for one in labels]
        self._records = _records(spans)

    def parts(self, is_lookup: bool) -> Parts | None:
        """What is left over between known lines, in one place, is compared. Where there are
        documents, a line at an end that asks goes before. None without a template, and no question
        where it can't be told.
        """
        groups = self._groups()
        asked = self._asked(groups)
        if asked is not None:
            return replace(self._compared(asked, asked), has_documents=True)
        words = sum(_words(span) for span, is_known in zip(self._spans, self._known, strict=True) if is_known)
        if words < _TEMPLATE_WORDS:
            return None
        compared = [self._compared(*group) for group in groups if self._is_between(*group)]
        is_known = is_lookup and any(map(self._varies, range(len(self._spans))))
        if is_known or len({one.question for one in compared}) != 1 or not compared[0].question:
            return Parts(b"", "")
        most = max(TEMPLATE_PROMPTS, *self._counts)
        has_documents = any(
            span.kind in _MARKED or (span.kind and some < most)
            for span, some in zip(self._spans, self._counts, strict=True)
        )
        return replace(compared[-1], has_documents=has_documents)

    def _groups(self) -> list[tuple[int, int]]:
        """The first and last lines of what is not known, by paragraph; a known label begins another, but in records."""
        groups: list[tuple[int, int]] = []
        paragraph = -1
        for index, span in enumerate(self._spans):
            if span.kind > PieceKind.QUOTED:
                paragraph = -1  # what follows is not the same
            elif not self._known[index] and _says_something(span):
                if span.paragraph == paragraph and (index in self._records or not self._has_label(index)):
                    groups[-1] = (groups[-1][0], index)
                else:
                    groups.append((index, index))
                paragraph = span.paragraph
        return groups

    def _asked(self, groups: Sequence[tuple[int, int]]) -> int | None:
        """The line at one end of a prompt with a longer text that asks; None where another may be the question."""
        spans = self._spans
        last = next((at for at in range(len(spans) - 1, 0, -1) if spans[at].kind or not _is_end(spans[at].text)), 0)
        ends = [at for at in {0, last} if spans[at].kind is PieceKind.LINE and spans[at].text.rstrip().endswith("?")]
        if len(ends) != 1 or _words(spans[ends[0]]) > LONG_WORDS:
            return None
        asking = ends[0]
        if any(_is_asking(span) for at, span in enumerate(spans) if at != asking):
            return None
        is_own = all(first == last or not first <= asking <= last for first, last in groups)
        is_beside = any(group != (asking, asking) for group in groups) or any(span.kind for span in spans)
        is_long = any(span.kind for span in spans) or sum(map(_words, spans)) - _words(spans[asking]) > LONG_WORDS
        return asking if is_own and is_beside and is_long else None

    def _varies(self, index: int) -> bool:
        """Whether prompts have something else in the place of a known line."""
        span, count = self._spans[index], self._counts[index]
        if span.kind > PieceKind.QUOTED or not self._known[index] or not _says_something(span):
            return False
        is_end = not index or all(_is_end(one.text) for one in self._spans[index + 1 :])
        beside = (*self._counts[max(0, index - 1) : index], *self._counts[index + 1 : index + 2])
        return (is_end and self._labels[index][0] > count) or all(some > count for some in beside)

    def _is_between(self, first: int, last: int) -> bool:
        """Whether what is known, or an end of the prompt, is on both sides of some lines that are no longer text."""
        is_string = self._spans[first].key is not None
        is_after = is_string or first == 0 or self._known[first - 1] or self._has_label(first)
        is_before = is_string or last + 1 == len(self._spans) or self._known[last + 1] or self._has_label(last + 1)
        return is_after and is_before and sum(map(_words, self._spans[first : last + 1])) <= LONG_WORDS

    def _has_label(self, index: int) -> bool:
        return self._labels[index][0] >= TEMPLATE_PROMPTS

    def _compared(self, first: int, last: int) -> Parts:
        """The parts where these lines are compared, but for a known label and marks around them."""
        record = self._records.get(first)
        if record is not None and record == self._records.get(last):
            first, last = record
        lines = [span.text for span in self._spans[first : last + 1]]
        if (first, last) == record:
            text, start = "\n".join(sorted(lines) if _is_unordered(lines) else lines), 0
        else:
            glued = (span.glue + span.text for span in self._spans[first + 1 : last + 1])
            text, start = (
                lines[0] + "".join(glued),
                self._labels[first][1] if self._has_label(first) else _head(lines[0]),
            )
        start, end = _bare(text, start)
        rest, question = (text[:start], text[end:]), text[start:end]
        return Parts(_frame(self._spans, first, last + 1, rest, question), question)


def _records(spans: Sequence[Piece]) -> dict[int, tuple[int, int]]:
    """For each line of a record of three fields or more, which vary together, the first and last of these."""

    def paragraph(index: int) -> int:
        span = spans[index]
        is_value = span.kind is PieceKind.LINE and _FIELD.match(span.text) and span.text.rstrip()[-1] != "?"
        return span.paragraph if is_value and not _is_asking(span) else -1

    ranges: dict[int, tuple[int, int]] = {}
    for number, some in groupby(range(len(spans)), paragraph):
        places = list(some)
        if number >= 0 and len(places) > 2:
            ranges |= dict.fromkeys(places, (places[0], places[-1]))
    return ranges


def _is_unordered(lines: Sequence[str]) -> bool:
    """Whether each field is there once, and none says what is said or done, or when: such lines are turns or steps."""
    names = [line.partition(":")[0].strip().casefold() for line in lines]
    is_said = any(line.rstrip()[-1] in ".!?" for line in lines)
    return len(set(names)) == len(names) and not is_said and not any(map(_ORDINAL.search, names))


@remembered(64)
def split(text: str) -> Split:
    """Split a prompt."""
    whole = Split(Parts(b"", text))
    if "\n" not in text and "<" not in text and ":" not in text:
        return whole
    lines = text.split("\n")
    try:
        spans = _merged(_Reader(lines).read(0, len(lines)))
    except _TooMany:
        return Split(Parts(_digest(text), ""))
    if len(text.split()) <= LONG_WORDS and not any(span.kind in _MARKED for span in spans):
        return whole
    if len(text) > _CHARS_MAX:
        spans = [
            msgspec.structs.replace(span, text="", kind=PieceKind.DOCUMENT) if span.kind is PieceKind.LONG else span
            for span in spans
        ]
    if len(spans) > _SPANS_MAX:
        runs = groupby(spans, lambda span: span.kind is PieceKind.DOCUMENT and not span.chunk)
        spans = [one for is_document, run in runs for one in ([_joined([*run])] if is_document else run)]
    made = Split.of(tuple(spans))
    return made if 2 <= len(spans) <= _SPANS_MAX else replace(made, spans=())


def _question(spans: Sequence[Piece], index: int) -> tuple[Parts, bool] | None:
    """Split a prompt whose question begins with the label in line `index`.

    Returns its parts, and False if a short text around the question may be a document with that
    label, else True. Returns None if the question is not at an end of the prompt, or has no words.
    """
    label = spans[index].text
    if spans[index].key:
        return (Parts(_frame(spans, index, index + 1, ("", ""), label), label), True) if label.strip() else None
    first = last = index
    head = label[: _head(label)].rstrip()
    if head == label.rstrip():  # the label has the line for itself
        first, head = index + 1, ""
    while first < len(spans) and last + 1 < len(spans) and _goes_on(spans[first], spans[last + 1]):
        last += 1
    if last < first or any(span.kind for span in spans[first : last + 1]):
        return None
    text = "\n".join(span.text for span in spans[first : last + 1])
    start, end = _bare(text, len(head) if head[-1:] != ">" else 0)
    is_last = all(not span.kind and _is_end(span.text) for span in spans[last + 1 :])
    is_first = index == 0 or (index == 1 and not spans[0].kind)  # after one line of instruction
    if end == start or not (is_last or is_first):
        return None
    question = text[start:end]
    return Parts(_frame(spans, first, last + 1, (text[:start], text[end:]), question), question), is_last or not index


def _is_asking(span: Piece) -> bool:
    """Whether a span has a question's label or key."""
    if span.key is not None:
        return _QUESTION_KEY.fullmatch(span.key) is not None
    return not span.kind and _head(span.text) > 0


def _is_plain(span: Piece) -> bool:
    """Whether the label asks for no instruction, which many prompts may share."""
    return _PLAIN_QUESTION.search(span.key or span.text[: _head(span.text)]) is not None


def _bare(text: str, start: int) -> tuple[int, int]:
    """The start and end of a text without the marks around it."""
    end, marks_left = len(text.rstrip()), _MARKS_MAX
    while start < end and marks_left:
        tag = _TAGGED.fullmatch(text, start, end)
        if tag is not None:
            start, end = tag.span(2)
            marks_left -= 1
        elif text[start].isspace():
            start += 1
        elif text.startswith("> ", start):
            start, marks_left = start + 1, marks_left - 1
        elif text[end - 1].isspace():
            end -= 1
        else:
            closing = _PAIRS.get(text[start])
            if closing != text[end - 1] or closing in text[start + 1 : end - 1].strip(text[start] + closing):
                break
            start, end, marks_left = start + 1, end - 1, marks_left - 1
    return start, max(start, end)


def _head(line: str) -> int:
    """The length of a question's label at the start of a line, its indent included; 0 without a label."""
    bare = line.lstrip()
    label = _QUESTION_LABEL.match(bare[:_LABEL_CHARS]) if bare[:1] in "#<" or ":" in bare else None
    return 0 if label is None else len(line) - len(bare) + label.end()


def _goes_on(first: Piece, span: Piece) -> bool:
    """Whether a line goes on with the question that begins with `first`."""
    return span is first or (span.paragraph == first.paragraph and not _is_end(span.text))


def _is_end(line: str) -> bool:
    """Whether a line only asks for the answer, such as `Answer:`, or closes a tag or a quotation."""
    line = line.strip()
    is_label = line.endswith(":") and len(line) <= _LABEL_CHARS and _DOCUMENT_LABEL.match(line) is None
    return is_label or _CLOSING.fullmatch(line) is not None or not any(map(str.isalnum, line))


class _TooMany(Exception):
    """Lines or pieces."""


class _Reader:
    """Reads lines into spans. Raises _TooMany."""

    def __init__(self, lines: Sequence[str]) -> None:
        if len(lines) > _LINES_MAX:
            raise _TooMany
        self.spans: list[Piece] = []
        self._lines = lines
        self._closed = _closed(lines)
        self._paragraph = 0
        self._blanks = 0
        self._json_left = _JSON_MAX
        self._is_quoted = False
        shown = [place for place, line in enumerate(lines) if line.strip()]
        self._ends = (shown[0], shown[-1]) if shown else (0, 0)

    def read(self, start_line: int, end: int, is_inside: bool = False) -> list[Piece]:
        """The spans up to here; `is_inside`: those of the lines are inside a document."""
        while start_line < end:
            if not self._lines[start_line].strip():
                self._blanks += 1
                start_line += 1
                continue
            self._paragraph += 1
            json_range = None if is_inside else self._json(start_line, end)
            if json_range is not None:
                self._read_json(json_range[0], (start_line, json_range[1] - 1) == self._ends)
                start_line = json_range[1]
                continue
            region = self._region(start_line, end)
            if region is not None:
                self._read_region(start_line, region, is_inside)
                start_line = region
                continue
            start = start_line
            start_line += 1
            while start_line < end and self._lines[start_line].strip() and self._region(start_line, end) is None:
                start_line += 1
            self._read_paragraph(self._lines[start:start_line], is_inside)
        return self.spans

    def _region(self, first: int, end: int) -> int | None:
        """The end of the fence, or of the tag around a document, that begins in a line; None where
        neither does.
        """
        line = self._lines[first].lstrip()
        if line[:1] not in "`~<":
            return None
        fence = _FENCE.match(line)
        if fence is not None:
            mark = fence.group(1)
            closing = (at for at in range(first + 1, end) if self._lines[at].strip().startswith(mark))
            return next((at + 1 for at in closing if set(self._lines[at].strip()) == {mark[0]}), end)
        closed = self._closed.get(first, end)
        if closed >= end or _head(line) or (first, closed) == self._ends:
            return None
        is_named = _DOCUMENT_TAG.fullmatch(_name(line)) is not None
        is_long = is_named or sum(len(one.split()) for one in self._lines[first : closed + 1]) > LONG_WORDS
        return closed + 1 if is_long else None

    def _read_region(self, first: int, end: int, is_inside: bool) -> None:
        """A document, all documents in a tag or fence around them, or what is only quoted: a short
        fence, one of JSON, a tag that names no document around documents.
        """
        lines, name = self._lines[first:end], _name(self._lines[first].lstrip())
        inner = range(first + 1, end - 1)
        if name:
            has_chunks = any(self._closed.get(at, end) < end - 1 and self._is_named(at) for at in inner)
            is_quoted = has_chunks and not self._is_named(first) and not self._is_quoted
        else:
            heads = {_mark(self._lines[at]) for at in inner if not self._lines[at - 1].strip() or at == first + 1}
            is_plain = not any(map(str.isalnum, lines[0]))  # in a language the order says something
            has_chunks = is_plain and len(heads) == 1 and heads.isdisjoint(("", "##"))
            found = None if has_chunks else self._json(first + 1, end - 1)
            is_json = found is not None and found[1] == end - 1
            is_closed = not any(map(str.isalnum, lines[-1]))
            is_quoted = is_closed and (is_json or sum(len(line.split()) for line in lines) <= LONG_WORDS)
        if is_inside or len(lines) == 1 or not (has_chunks or is_quoted):
            self._add(lines, PieceKind.DOCUMENT, name)
            return
        was_quoted, self._is_quoted = self._is_quoted, is_quoted
        kind = PieceKind.QUOTED if is_quoted else PieceKind.DOCUMENT
        self._add(lines[:1], kind, "")
        self.read(first + 1, end - 1, is_inside=not is_quoted)
        self._add(lines[-1:], kind, "")
        self._is_quoted = was_quoted

    def _json(self, first: int, end: int) -> tuple[str, int] | None:
        """The JSON that begins in a line, and the number of the line after it; None without JSON."""
        if first >= end or self._json_left == 0 or _JSON_START.match(self._lines[first]) is None:
            return None
        self._json_left -= 1
        text = "\n".join(self._lines[first:end])
        try:
            stop = json.JSONDecoder().raw_decode(text, len(text) - len(text.lstrip()))[1]
        except (ValueError, RecursionError):
            return None
        is_alone = not text[stop:].partition("\n")[0].strip()
        return (text[:stop], first + text.count("\n", 0, stop) + 1) if is_alone else None

    def _read_json(self, text: str, is_whole: bool) -> None:
        """The strings of JSON; they have their keys where it `is_whole`, as no document may have made it."""
        glue = "\n" * (self._blanks + bool(self.spans))
        self._blanks = at = 0
        around: list[tuple[str, bool]] = []
        key, is_document = "", False
        for token in _JSON_TOKEN.finditer(text):
            string, colon = token.groups()
            if colon:
                key, is_document = string, around[-1][1] or _DOCUMENT_TAG.fullmatch(string) is not None
            elif string is not None:
                value = json.loads(f'"{string}"') if "\\" in string else string
                kind = (
                    PieceKind.DOCUMENT
                    if is_document
                    else PieceKind.LONG
                    if len(value.split()) > LONG_WORDS
                    else PieceKind.LINE
                )
                shown, name = "" if is_document else value, key if is_whole else ""
                glue += text[at : token.start(1)]
                self._paragraph += 1
                self._add_piece(_digest(string), shown, glue, kind, name)
                glue, at = "", token.end(1)
            elif token.group() in "{[":
                around.append((key, is_document))
            else:
                key, is_document = around.pop()
        self._add_piece(_digest(""), "", glue + text[at:], PieceKind.LINE, "")

    def _is_named(self, number: int) -> bool:
        return _DOCUMENT_TAG.fullmatch(_name(self._lines[number].lstrip())) is not None

    def _read_paragraph(self, lines: Sequence[str], is_inside: bool) -> None:
        """Runs of lines of a document, or of others."""
        run: list[str] = []
        is_document = is_inside
        for line in lines:
            is_label = (
                not (is_inside or self._is_quoted) and _DOCUMENT_LABEL.match(line.strip()[:_LABEL_CHARS]) is not None
            )
            is_asked = not (is_inside or self._is_quoted) and _head(line) > 0
            if is_label or is_asked:
                self._add_run(run, is_document)
                run, is_document = [], is_label
                is_long = len(line.split()) > LONG_WORDS  # a document on the line of its label
                if is_asked or is_long or line.rstrip().endswith(":") or "#" in line[:1]:
                    self._add([line], PieceKind.DOCUMENT if is_label else PieceKind.LINE, "")
                    is_document = is_label and not is_long
                    continue
            run.append(line)
        self._add_run(run, is_document)

    def _add_run(self, run: Sequence[str], is_document: bool) -> None:
        if not run:
            return
        word_count = sum(len(line.split()) for line in run if len(line) > LONG_WORDS or len(run) > 1)
        mark = _mark(run[0]) if len(run) > 1 else ""
        if is_document or (mark and word_count > LONG_WORDS):
            self._add(run, PieceKind.DOCUMENT, _chunk(run[0]))
        elif word_count <= LONG_WORDS:
            for line in run:
                self._add([line], PieceKind.QUOTED if mark in ("[", "**") else PieceKind.LINE, "")
        else:
            for is_long, some in groupby(run, lambda line: len(line.split()) > LONG_WORDS):
                lines = list(some)
                if is_long or len(lines) == len(run):
                    self._add(lines, PieceKind.LONG, _chunk(lines[0]))
                else:
                    self._add_run(lines, is_document=False)

    def _add(self, lines: Sequence[str], kind: PieceKind, chunk: str) -> None:
        text = "\n".join(lines)
        shown = "" if kind is PieceKind.DOCUMENT else text
        kind = PieceKind.QUOTED if kind is PieceKind.LINE and self._is_quoted else kind
        self._add_piece(_digest(text), shown, "\n" * (self._blanks + bool(self.spans)), kind, None, chunk)
        self._blanks = 0

    def _add_piece(
        self, digest: bytes, text: str, glue: str, kind: PieceKind, key: str | None, chunk: str = ""
    ) -> None:
        paragraph = self._paragraph
        span = Piece(digest=digest, text=text, glue=glue, paragraph=paragraph, chunk=chunk, kind=kind, key=key)
        self.spans.append(span)
        if len(self.spans) > _PIECES_MAX:
            raise _TooMany


def _name(line: str) -> str:
    """The name of the tag that a line begins with, or nothing."""
    tag = _TAG.match(line)
    return "" if tag is None else tag.group(1)


def _closed(lines: Sequence[str]) -> dict[int, int]:
    """For the lines that begin with a tag, the line in which it is closed."""
    closings: dict[int, int] = {}
    opened: dict[str, list[tuple[int, bool]]] = {}
    for number, line in enumerate(lines):
        if "<" not in line:
            continue
        is_start = line.lstrip().startswith("<")
        for tag in _TAGS.finditer(line):
            is_closing, name = tag.groups()
            if not is_closing:
                opened.setdefault(name, []).append((number, is_start))
            elif opened.get(name):
                start, is_first = opened[name].pop()
                if is_first:
                    closings[start] = number
            is_start = False
    return closings


def _mark(line: str) -> str:
    """The mark at the start of a heading; empty for any other line."""
    heading = _HEADING.match(line.rstrip())
    return "" if heading is None else next(filter(None, heading.groups()))


def _chunk(line: str) -> str:
    """The kind of a chunk's heading; empty where the line is none, or says the chunk's place."""
    heading = _HEADING.match(line.rstrip()) or _INLINE_HEADING.match(line)
    return "" if heading is None or _ORDINAL.search(heading.group()) else next(filter(None, heading.groups()))


def _merged(spans: Sequence[Piece]) -> list[Piece]:
    """The spans with a heading and the document after it as one chunk."""
    merged: list[Piece] = []
    for span in spans:
        if merged and span.kind > PieceKind.QUOTED and not span.chunk:
            before = merged[-1]
            if not before.kind and before.key is None and _mark(before.text):
                merged[-1] = _joined((before, span), _chunk(before.text))
                continue
        merged.append(span)
    return merged


def _joined(spans: Sequence[Piece], chunk: str = "") -> Piece:
    """Join neighbouring spans into one document."""
    joined = b"".join(_digest(span.glue) + span.digest for span in spans[1:])
    digest = blake2b(spans[0].digest + joined, digest_size=_DIGEST_BYTES).digest()
    return msgspec.structs.replace(spans[0], digest=digest, text="", chunk=chunk, kind=PieceKind.DOCUMENT)


def _frame(spans: Sequence[Piece], first: int, end: int, rest: tuple[str, str] = ("", ""), question: str = "") -> bytes:
    """The digest of all spans but those from `first` to `end`, which are the question, with `rest`
    around it, and of lines that say it once more.
    """
    is_ordered = any(span.chunk for span in spans) and (
        _ORDERED.search(question) is not None or any(_CITED.search(span.text) for span in spans)
    )
    frame = blake2b(digest_size=_DIGEST_BYTES, person=b"sw.frame")
    index = 0
    for chunk, some in groupby(spans, lambda span: span.chunk):
        run = list(some)
        order = sorted(span.digest for span in run) if chunk and not is_ordered else [span.digest for span in run]
        for span, digest in zip(run, order, strict=True):
            if not first <= index < end:
                frame.update(_digest(span.glue) + (_echo(span, question) or digest))
            elif index == first:
                frame.update(_digest(span.glue) + _digest("\0?\0".join(rest), b"sw.asked"))
            index += 1
    return frame.digest()


def _echo(span: Piece, question: str) -> bytes | None:
    """The digest of a line that says the question after a label or alone, without it; else None."""
    if span.kind or " " not in question or span.text.count(question) != 1:
        return None
    before, _, after = span.text.partition(question)
    label = before.rstrip(_OPENING)
    if (label and not label.endswith(":")) or any(map(str.isalnum, after)):
        return None
    return _digest(f"{before}\0?\0{after}", b"sw.asked")


def _digest(text: str, person: bytes = b"sw.span") -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES, person=person).digest()


def _says_something(span: Piece) -> bool:
    return any(map(str.isalnum, span.text))


def _words(span: Piece) -> int:
    """Of a span; of a document, which has no text here, as many as make it long."""
    return LONG_WORDS + 1 if span.kind is PieceKind.DOCUMENT else len(span.text.split())
