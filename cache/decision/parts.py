"""The parts of a prompt: what must be equal, and the one span that is compared by meaning.

Pure: takes a text and returns digests and that span. Knows no cache and no similarity, and of a
namespace only which lines are a template's. Lines are read one by one. Tags that name documents,
fences, and paragraphs of over `LONG_WORDS` words are documents. The question is the one line with a
question's label, at the start or the end of the prompt. Where a prompt has neither, the slot is the
one paragraph that is no line of a known template, or a line that asks after a longer text.

Invariants: all of a text but its question is in its frame, so it is equal where frames are, byte for
byte, but for the order of chunks that have the same tag or kind of heading; a text of which the
question can't be told has either no question, or no frame and all of it is compared.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from hashlib import blake2b
from itertools import groupby

from cache.decision.guards import LONG_WORDS
from cache.decision.text_features import remembered

_DIGEST_BYTES = 12
_SPANS_MAX, _CHARS_MAX = 48, 3_000  # a prompt with more has no slot
_LABEL_CHARS = 100  # of a line in which a label may be: patterns read no more
_TEMPLATE_WORDS = 12  # fewer, and what prompts share is no template

_DOCUMENTS = (
    "articles?|attachments?|background|chunks?|contents?|contexts?|data|documents?|docs?|evidence|excerpts?|facts|files?|"
    "knowledge|memor(?:y|ies)|notes|pages?|passages?|polic(?:y|ies)|references?|records?|reports?|results?|snippets?|"
    "sources?|tables?|transcripts?"
)
_QUESTIONS = "(?:(?:user|customer|client|human)(?:'s)?[ _-]?)?(?:question|query|request|instruction|task)"
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
    rf"(?:#{{1,6}} *{_QUESTIONS}:?\s*$|[*_]{{0,2}}{_QUESTIONS}[*_]{{0,2}}:[*_]{{0,2}}[ \t]*|<({_QUESTIONS})>[ \t]*)",
    re.IGNORECASE,
)
_HEADING = re.compile(r"(?:(\[)[^\[\]]+\]|(\*\*)[^*]+\*\*:?)$")
_ORDINAL = re.compile(
    r"\b(?:step|part|chapter|section|phase|day|turn|example|page)\b|^\W*\d|\b(?:first|then|last)\b", re.I
)
_LABEL = re.compile(r"[^\W\d][\w '-]{0,30}:\s+")
_FIELD = re.compile(r"[^\W\d][^:\n\d]{0,30}: +\S")


@dataclass(frozen=True, slots=True)
class Parts:
    """`frame` digests all that must be equal, or is empty where the whole text is compared;
    `question` is compared by meaning, or is empty where nothing is. `has_documents`: the frame has
    what the question may be about.
    """

    frame: bytes
    question: str
    has_documents: bool = False


class Kind(IntEnum):
    """Of a span."""

    LINE = 0
    LONG = 1  # a paragraph that nothing names a document: it may be an instruction
    DOCUMENT = 2


@dataclass(frozen=True, slots=True)
class Piece:
    """A line or paragraph, or a document whose `text` is left out. `blanks` are the blank lines before it,
    `paragraph` is the number of its paragraph, `chunk` the tag or heading of a chunk whose order
    among its like is free.
    """

    digest: bytes
    text: str
    blanks: int
    paragraph: int
    chunk: str
    kind: Kind


@dataclass(frozen=True, slots=True)
class Split:
    """A prompt as far as its own text shows it. Where it has `spans`, a template may show a slot:
    then `slot` has its parts.
    """

    parts: Parts
    spans: tuple[Piece, ...] = ()

    @classmethod
    def of(cls, spans: tuple[Piece, ...]) -> Split:
        """That of a prompt of these spans, of which no template is known."""
        return cls(Parts(b"", "\n".join("\n" * span.blanks + span.text for span in spans)), spans)

    @property
    def lines(self) -> list[bytes]:
        """What may be lines of a template, and labels at their starts."""
        labels = (_LABEL.match(span.text) for span in self.spans)
        return [*(span.digest for span in self.spans), *(_digest(match.group()) for match in labels if match)]

    def slot(self, is_template: Callable[[bytes], bool]) -> Parts:
        """The parts where these lines are a template's; one paragraph of others is the slot. After a longer
        text that no template has, which may be a document, a last line that asks is the slot.
        """
        free = [place for place, span in enumerate(self.spans) if not is_template(span.digest)]
        if not free:
            return self.parts
        paragraph = self.spans[free[-1]].paragraph
        own = [place for place in free if self.spans[place].paragraph == paragraph]
        if any(self.spans[place].kind for place in own):
            return self.parts
        first, last = self._record(own[0], own[-1])
        inside = self.spans[first : last + 1]
        words = _words(self.spans) - _words(inside)
        if words < _TEMPLATE_WORDS or _words(inside) > LONG_WORDS:
            return self.parts
        if own != free and (words <= LONG_WORDS or len(inside) > 1 or not inside[0].text.rstrip().endswith("?")):
            return self.parts
        lines = [span.text for span in inside]
        is_record = len(lines) > 2 and all(map(_FIELD.match, lines))
        text = "\n".join(sorted(lines) if is_record else lines)
        label = _LABEL.match(text) if not is_record else None
        start = label.end() if label is not None and is_template(_digest(label.group())) else 0
        end = len(text.rstrip())
        if not text[start:end]:
            return self.parts
        frame = _frame(self.spans, first, last + 1, (text[:start], text[end:]))
        return Parts(frame, text[start:end], has_documents=any(self.spans[place].kind for place in free))

    def _record(self, first: int, last: int) -> tuple[int, int]:
        """The whole run of fields that begins or ends within: a record's fields vary together."""

        def is_field(place: int) -> bool:
            return not self.spans[place].kind and _FIELD.match(self.spans[place].text) is not None

        if all(map(is_field, range(first, last + 1))):
            paragraph = self.spans[first].paragraph
            while first and self.spans[first - 1].paragraph == paragraph and is_field(first - 1):
                first -= 1
            while last + 1 < len(self.spans) and self.spans[last + 1].paragraph == paragraph and is_field(last + 1):
                last += 1
        return first, last


@remembered(64)
def split(text: str) -> Split:
    """Split a prompt."""
    whole = Split(Parts(b"", text))
    if "\n" not in text and "<" not in text and ":" not in text:
        return whole
    lines = text.split("\n")
    spans = _merged(_Reader(lines).read(0, len(lines)))
    is_marked = any(span.kind is Kind.DOCUMENT for span in spans)
    if not is_marked and len(text.split()) <= LONG_WORDS:
        return whole
    labels = [place for place, span in enumerate(spans) if not span.kind and _asked(span.text)]
    asked = _question(spans, labels[0]) if len(labels) == 1 else None
    if asked is not None:
        # a paragraph of one line at the start is the instruction
        is_told = any(span.kind and (place > 0 or "\n" in span.text) for place, span in enumerate(spans))
        return Split(replace(asked, has_documents=is_marked or is_told))
    if is_marked or labels:
        return Split(Parts(_frame(spans, 0, 0), ""))
    if not 2 <= len(spans) <= _SPANS_MAX or len(text) > _CHARS_MAX:
        return whole
    return Split.of(tuple(spans))


def _question(spans: Sequence[Piece], place: int) -> Parts | None:
    """The parts of a prompt whose question begins with the label in line `place`; None where it is
    not at an end of the prompt, or has no words.
    """
    label = spans[place].text
    match = _asked(label)
    assert match is not None, place
    first = last = place
    head = label[: len(label) - len(label.lstrip()) + match.end()]
    if not label[len(head) :].strip():  # the label has the line for itself
        first, head = place + 1, ""
    while first < len(spans) and last + 1 < len(spans) and _goes_on(spans[first], spans[last + 1]):
        last += 1
    if last < first or any(span.kind for span in spans[first : last + 1]):
        return None
    text = "\n".join(span.text for span in spans[first : last + 1])
    end = len(text.rstrip())
    closing = text.rfind("</", 0, end)
    if closing >= 0 and _CLOSING.fullmatch(text, closing, end):
        end = len(text[:closing].rstrip())
    is_last = all(not span.kind and _is_end(span.text) for span in spans[last + 1 :])
    is_first = not any(span.kind for span in spans[:first])
    if end <= len(head) or not (is_last or is_first):
        return None
    return Parts(_frame(spans, first, last + 1, (head, text[end:])), text[len(head) : end])


def _asked(line: str) -> re.Match[str] | None:
    """The label of a question at the start of a line, its indent aside."""
    return _QUESTION_LABEL.match(line.lstrip()[:_LABEL_CHARS])


def _goes_on(first: Piece, span: Piece) -> bool:
    """Whether a line goes on with the question that begins with `first`."""
    return span is first or (span.paragraph == first.paragraph and not _is_end(span.text))


def _is_end(line: str) -> bool:
    """Whether a line only asks for the answer, such as `Answer:`, or closes a tag or a quotation."""
    line = line.strip()
    is_label = line.endswith(":") and len(line) <= _LABEL_CHARS and _DOCUMENT_LABEL.match(line) is None
    return is_label or _CLOSING.fullmatch(line) is not None or not any(map(str.isalnum, line))


class _Reader:
    """Reads lines into spans."""

    def __init__(self, lines: Sequence[str]) -> None:
        self.spans: list[Piece] = []
        self._lines = lines
        self._closed = _closed(lines)
        self._paragraph = 0
        self._blanks = 0

    def read(self, place: int, end: int, is_inside: bool = False) -> list[Piece]:
        """The spans up to here; `is_inside`: those of the lines are inside a document."""
        while place < end:
            if not self._lines[place].strip():
                self._blanks += 1
                place += 1
                continue
            self._paragraph += 1
            region = self._region(place, end)
            if region is not None:
                self._read_region(place, region, is_inside)
                place = region
                continue
            start = place
            place += 1
            while place < end and self._lines[place].strip() and self._region(place, end) is None:
                place += 1
            self._read_paragraph(self._lines[start:place], is_inside)
        return self.spans

    def _region(self, place: int, end: int) -> int | None:
        """The end of the fence, or of the tag around a document, that begins in a line; None where
        neither does.
        """
        line = self._lines[place].lstrip()
        fence = _FENCE.match(line)
        if fence is not None:
            mark = fence.group(1)
            closing = (at for at in range(place + 1, end) if self._lines[at].strip().startswith(mark))
            return next((at + 1 for at in closing if set(self._lines[at].strip()) == {mark[0]}), end)
        closed = self._closed.get(place, end)
        if closed >= end or _asked(line) is not None:
            return None
        is_named = _DOCUMENT_TAG.fullmatch(_name(line)) is not None
        is_long = is_named or sum(len(one.split()) for one in self._lines[place : closed + 1]) > LONG_WORDS
        return closed + 1 if is_long else None

    def _read_region(self, place: int, end: int, is_inside: bool) -> None:
        """A document, or all documents in a tag around them."""
        lines, name = self._lines[place:end], _name(self._lines[place].lstrip())
        inner = range(place + 1, end - 1)
        if not is_inside and name and any(self._closed.get(at, end) < end - 1 and self._is_named(at) for at in inner):
            self._add(lines[:1], Kind.DOCUMENT, "")
            self.read(place + 1, end - 1, is_inside=True)
            self._add(lines[-1:], Kind.DOCUMENT, "")
        else:
            self._add(lines, Kind.DOCUMENT, name)

    def _is_named(self, place: int) -> bool:
        return _DOCUMENT_TAG.fullmatch(_name(self._lines[place].lstrip())) is not None

    def _read_paragraph(self, lines: Sequence[str], is_inside: bool) -> None:
        """Runs of lines of a document, or of others."""
        run: list[str] = []
        is_document = is_inside
        for line in lines:
            is_label = not is_inside and _DOCUMENT_LABEL.match(line.strip()[:_LABEL_CHARS]) is not None
            is_asked = not is_inside and _asked(line) is not None
            if is_label or is_asked:
                self._add_run(run, is_document)
                run, is_document = [], is_label
                if is_asked or line.rstrip().endswith(":") or "#" in line[:1]:
                    self._add([line], Kind.DOCUMENT if is_label else Kind.LINE, "")
                    continue
            run.append(line)
        self._add_run(run, is_document)

    def _add_run(self, run: Sequence[str], is_document: bool) -> None:
        if not run:
            return
        heading = _HEADING.match(run[0].rstrip()) if len(run) > 1 else None
        if is_document or heading is not None:
            self._add(run, Kind.DOCUMENT, _chunk(run[0]))
        elif sum(len(line.split()) for line in run) > LONG_WORDS:
            self._add(run, Kind.LONG, "")
        else:
            for line in run:
                self._add([line], Kind.LINE, "")

    def _add(self, lines: Sequence[str], kind: Kind, chunk: str) -> None:
        text = "\n".join(lines)
        shown = "" if kind is Kind.DOCUMENT else text
        span = Piece(
            digest=_digest(text),
            text=shown,
            blanks=self._blanks,
            paragraph=self._paragraph,
            chunk=chunk,
            kind=kind,
        )
        self.spans.append(span)
        self._blanks = 0


def _name(line: str) -> str:
    """The name of the tag that a line begins with, or nothing."""
    tag = _TAG.match(line)
    return "" if tag is None else tag.group(1)


def _closed(lines: Sequence[str]) -> dict[int, int]:
    """For the lines that begin with a tag, the line in which it is closed."""
    found: dict[int, int] = {}
    opened: dict[str, list[tuple[int, bool]]] = {}
    for place, line in enumerate(lines):
        if "<" not in line:
            continue
        is_start = line.lstrip().startswith("<")
        for tag in _TAGS.finditer(line):
            is_closing, name = tag.groups()
            if not is_closing:
                opened.setdefault(name, []).append((place, is_start))
            elif opened.get(name):
                start, is_first = opened[name].pop()
                if is_first:
                    found[start] = place
            is_start = False
    return found


def _chunk(line: str) -> str:
    """The kind of a chunk's heading; empty where the line is none, or says the chunk's place."""
    heading = _HEADING.match(line.rstrip())
    return "" if heading is None or _ORDINAL.search(line) else heading.group(1) or heading.group(2)


def _merged(spans: Sequence[Piece]) -> list[Piece]:
    """The spans with a heading and the document after it as one chunk."""
    made: list[Piece] = []
    for span in spans:
        before = made[-1] if made else None
        if (
            before is not None
            and span.kind
            and not before.kind
            and not span.chunk
            and _HEADING.match(before.text.rstrip())
        ):
            joined = blake2b(before.digest + b"%d " % span.blanks + span.digest, digest_size=_DIGEST_BYTES).digest()
            chunk = _chunk(before.text)
            made[-1] = replace(before, digest=joined, text="", chunk=chunk, kind=Kind.DOCUMENT)
        else:
            made.append(span)
    return made


def _frame(spans: Sequence[Piece], first: int, end: int, rest: Sequence[str] = ()) -> bytes:
    """The digest of all spans but those from `first` to `end`, of which `rest` is what is left."""
    made = blake2b(digest_size=_DIGEST_BYTES, person=b"sw.frame")
    place = 0
    for chunk, some in groupby(spans, lambda span: span.chunk):
        run = list(some)
        order = sorted(span.digest for span in run) if chunk else [span.digest for span in run]
        for span, digest in zip(run, order, strict=True):
            if not first <= place < end:
                made.update(b"%d " % span.blanks + digest)
            elif place == first:
                made.update(b"%d ?" % span.blanks + b"".join(map(_digest, rest)))
            place += 1
    return made.digest()


def _digest(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES, person=b"sw.span").digest()


def _words(spans: Iterable[Piece]) -> int:
    return sum(len(span.text.split()) for span in spans)
