"""The pieces of a prompt, and how the pieces of two prompts differ.

Pure: takes texts, returns pieces, the question among them and differences. Knows no cache, no
similarity and no language. A piece is a line, or a sentence of a long line, with the role of its
turn. A short last message is the question as a whole. Of a longer one the question is what other
prompts beside it have not: `question_of` gets their counts. All else is the context.

Invariants: two prompts without a difference have the same pieces in the same order, but for their
questions; a piece of over `_PIECE_CHARS` characters is known by its digest alone, and where it
differs nothing may be compared.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence, Set
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import msgspec

SHOWN_CHARS, SHOWN_PIECES = 600, 6
"""A difference of more characters or pieces is another document."""

ANCHORS = 2
"""Of a prompt with more context than may be shown: its longest pieces. Prompts that share none differ by more."""

_PIECE_CHARS = 300
_SENTENCES_FROM = 100  # characters of a line that is cut at the ends of sentences
_WHOLE_WORDS, _WHOLE_LINE_WORDS = 40, 100  # a last message with no more words, or on one line, is the question
_PIECES_MAX = 2_000
_SHARED = 0.25  # of the prompts beside it that have a piece: it is none of the question
_ALIKE = 0.3  # of the words of two pieces: they are versions of one
_ORDER_CHARS = 80
_SENTENCE_END = re.compile(r"(?<=[.!?;])\s+|(?<=[。！？])")
_FIGURES = re.compile(r"\d+")
_WORD = re.compile(r"\w+|[^\w\s]")
_PATTERNS_S_MAX = 0.05  # of the operator's patterns in one context
_LAST = ">"  # begins the pieces of the last message; those of others begin with a letter of their role
_LONG = "\0"  # begins a piece that is known by its digest


class Prompt(msgspec.Struct, frozen=True, gc=False):
    """`context` are the pieces of the turns before the last. Of the last message, `text` is a short
    one and `last` are the pieces of a longer one; the other is empty.
    """

    text: str
    context: tuple[str, ...] = ()
    last: tuple[str, ...] = ()

    @property
    def pieces(self) -> tuple[str, ...]:
        return self.context + self.last


Differing = tuple[tuple[str, str], ...]
"""The pieces in which two contexts differ, each as (of the first, of the second); one may be empty."""


def split(partition: bytes, context: str, text: str) -> Prompt | None:
    """The pieces of a prompt. `context` are the turns before `text`, each as its role, a line feed and
    its text, with a NUL between turns. None where there are too many.
    """
    words = text.count(" ") + text.count("\n")
    is_short = words <= _WHOLE_WORDS or (words <= _WHOLE_LINE_WORDS and "\n" not in text.strip())
    before = _context(partition, context) if context else ()
    last = () if is_short else _cut(partition, [(_LAST, text)])
    last = last if len(last) > 1 else ()
    return Prompt("" if last else text, before, last) if len(before) + len(last) <= _PIECES_MAX else None


# decision: memos-per-partition
@lru_cache(256)
def _context(partition: bytes, context: str) -> tuple[str, ...]:
    turns = [turn.partition("\n") for turn in context.split("\0")]
    return _cut(partition, [(role[:1], text) for role, _, text in turns])


@lru_cache(100_000)
def _same(partition: bytes, piece: str) -> str:
    """The piece, as the one object that other prompts have of it."""
    return piece


def _cut(partition: bytes, turns: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    pieces: dict[str, int] = {}
    for role, text in turns:
        for line in text.split("\n"):
            for part in _SENTENCE_END.split(line) if len(line) > _SENTENCES_FROM else (line,):
                if not part or part.isspace():
                    continue
                piece = f"{role}{part.rstrip()}"
                if len(piece) > _PIECE_CHARS:
                    piece = _LONG + blake2b(piece.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
                count = pieces.get(piece, 0)
                pieces[piece] = count + 1
                if count:  # the same line once more is another piece
                    pieces[f"{piece}\0{count}"] = 1
    return tuple([_same(partition, piece) for piece in pieces])


def anchors(prompt: Prompt, count: int) -> tuple[str, ...]:
    """The longest pieces, the longest first; none where the whole context may be shown."""
    pieces = prompt.pieces
    if sum(map(len, pieces)) <= SHOWN_CHARS and not any(piece[0] == _LONG for piece in pieces):
        return ()
    return tuple(sorted(set(pieces), key=lambda piece: (piece[0] != _LONG, -len(piece), piece))[:count])


def question_of(prompt: Prompt, keys: Sequence[str], counts: Mapping[str, int], others: int) -> tuple[str, ...]:
    """The pieces of a long last message that ask: those that few of the `others`, the prompts beside
    it, have. `counts` says how many have each of `keys`, which `counted` gives. Empty where it cannot
    be told.
    """
    having = [counts.get(key, 0) for key in keys] if others else []
    least = max(1.0, _SHARED * others) if others != 2 else 2.0
    least = min(having) + 1 if having and least <= min(having) < others else least
    asking = tuple(piece for piece, some in zip(prompt.last, having, strict=False) if some < least)
    if not asking:
        marked = [piece for piece in prompt.last if piece.rstrip("\"'”»*`,)>}] ").endswith(("?", "？"))]
        asking = (marked[0],) if len(marked) == 1 else ()
    return asking if not any(piece[0] == _LONG for piece in asking) else ()


def counted(prompt: Prompt) -> list[str]:
    """The pieces of a last message as `question_of` has them counted: a changed figure in a shared line is no question."""
    return [_FIGURES.sub("0", piece) for piece in prompt.last]


def text_of(question: Sequence[str]) -> str:
    """The text of pieces that are compared by meaning."""
    return "\n".join(_plain(piece) for piece in question)


def _plain(piece: str) -> str:
    return piece[1:].partition("\0")[0].strip()


def difference(
    prompt: Prompt, known: Prompt, asking: Sequence[str] = (), known_asking: Sequence[str] = ()
) -> Differing | None:
    """How the contexts of two prompts differ, apart from their questions; None where they differ by more
    than may be shown.
    """
    is_beside = prompt.context == known.context  # what is equal is not compared once more
    mine, theirs = (prompt.last, known.last) if is_beside else (prompt.pieces, known.pieces)
    if mine == theirs:
        return ()
    mine_set, theirs_set = set(mine), set(theirs)
    slots, known_slots = _places(mine, theirs_set, asking), _places(theirs, mine_set, known_asking)
    # what asks in a place where the other asks nothing is an addition
    shared = set(slots.values()) & set(known_slots.values())
    lost = [piece for piece in mine if piece not in theirs_set and slots.get(piece) not in shared]
    came = [piece for piece in theirs if piece not in mine_set and known_slots.get(piece) not in shared]
    if len(lost) > SHOWN_PIECES or len(came) > SHOWN_PIECES:
        return None
    if sum(map(len, lost)) + sum(map(len, came)) > SHOWN_CHARS or any(piece[0] == _LONG for piece in lost + came):
        return None
    pairs = _aligned([_plain(piece) for piece in lost], [_plain(piece) for piece in came])
    free = {*asking, *known_asking}
    before = [piece for piece in mine if piece in theirs_set and piece not in free]
    after = [piece for piece in theirs if piece in mine_set and piece not in free]
    moved = next(((one, theirs) for one, theirs in zip(before, after, strict=True) if one != theirs), None)
    if moved is not None:
        first, then = (_plain(piece)[:_ORDER_CHARS] for piece in moved)
        pairs.append((f"{first} … {then}", f"{then} … {first}"))
    return tuple(pairs) if len(pairs) <= SHOWN_PIECES else None


def _places(pieces: Sequence[str], others: Set[str], asking: Sequence[str]) -> dict[str, str]:
    """Of the pieces that ask and that the other prompt has not, the last piece before each that both have."""
    places, before = {}, ""
    for piece in pieces:
        if piece in others:
            before = before if piece in asking else piece
        elif piece in asking:
            places[piece] = before
    return places


def _aligned(lost: list[str], came: list[str]) -> list[tuple[str, str]]:
    """Pairs of pieces that share the most words; what is like none stands alone."""
    pairs = []
    left = list(came)
    for piece in lost:
        best = max(left, key=lambda one: _alike(piece, one), default="")
        if best and _alike(piece, best) >= _ALIKE:
            left.remove(best)
            pairs.append((piece, best))
        else:
            pairs.append((piece, ""))
    return [*pairs, *(("", piece) for piece in left)]


def _alike(left: str, right: str) -> float:
    a, b = set(_WORD.findall(left)), set(_WORD.findall(right))
    return len(a & b) / max(1, len(a | b))


def digests(differing: Differing) -> tuple[bytes, ...]:
    """Of each pair 8 bytes of what both sides have in common, or of all of a piece that stands alone,
    and 4 of what they have apart. The order of a pair does not matter.
    """
    return tuple(_digest(one, other) for one, other in differing)


def _digest(left: str, right: str) -> bytes:
    a, b = _WORD.findall(left), _WORD.findall(right)
    common = set(a) & set(b) if a and b else {*a, *b}
    apart = sorted(" ".join(word for word in side if word not in common) for side in (a, b))
    kept = " ".join(word for word in a or b if word in common)
    return _hash(kept, 8) + _hash("\0".join(apart), 4)


def _hash(text: str, size: int) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=size, person=b"sw.differing").digest()


def compile_pattern(text: str) -> re.Pattern[str]:
    """An operator's pattern of what is volatile, compiled. Raises ValueError for one that is no regular
    expression or matches an empty text.
    """
    import regex  # unlike `re`, it can stop a search; few installations have patterns

    try:
        pattern: re.Pattern[str] = regex.compile(text)
    except (regex.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{text!r} is no regular expression: {error}") from None
    if pattern.match(""):
        raise ValueError(f"{text!r} matches an empty text: it has to match what is volatile")
    return pattern


def without(context: str, patterns: Sequence[Any]) -> str:
    """A context without what an operator's patterns match in its system prompts, as far as they end in
    time.
    """
    turns, ends_at = context.split("\0"), time.perf_counter() + _PATTERNS_S_MAX
    for index, turn in enumerate(turns):
        role, _, text = turn.partition("\n")
        for pattern in patterns if role in ("system", "developer") else ():
            try:
                text = pattern.sub("\u00b7", text, timeout=max(0.0, ends_at - time.perf_counter()))
            except TimeoutError:
                return context
        turns[index] = f"{role}\n{text}"
    return "\0".join(turns)
