"""The pieces of a prompt, and how the pieces of two prompts differ.

Pure: takes texts, returns pieces, the question among them and differences. Knows no cache, no
similarity and no language. A piece is a line, or a sentence of a long line, with the place of its
turn. A short last message is the question as a whole. Of a longer one the question is what other
prompts beside it have not: `question_of` gets their counts. All else is the context.

Invariants: two prompts without a difference have the same pieces in the same order, but for their
questions; a piece of over `_PIECE_CHARS` characters is known by its digest alone, and where it
differs nothing may be compared.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
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
_LAST, _FIRST = "\1", 2  # what the pieces of a turn begin with
_LONG = "\0"  # begins a piece that is known by its digest

same_text = lru_cache(100_000)(str)
"""The text, as the one object that other keys have of it."""


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


def split(context: str, text: str) -> Prompt | None:
    """The pieces of a prompt. `context` are the turns before `text`, each as its role, a line feed and
    its text, with a NUL between turns. None where there are too many.
    """
    words = text.count(" ") + text.count("\n")
    is_short = words <= _WHOLE_WORDS or (words <= _WHOLE_LINE_WORDS and "\n" not in text.strip())
    seen: Counter[str] = Counter()
    turns = [turn.partition("\n")[2] for turn in context.split("\0")] if context else []
    before = tuple(piece for place, turn in enumerate(turns) for piece in _cut(turn, chr(_FIRST + place), seen))
    last = () if is_short else tuple(_cut(text, _LAST, seen))
    last = last if len(last) > 1 else ()
    return Prompt("" if last else text, before, last) if len(before) + len(last) <= _PIECES_MAX else None


def _cut(text: str, turn: str, seen: Counter[str]) -> list[str]:
    pieces = []
    for line in text.split("\n"):
        for part in _SENTENCE_END.split(line) if len(line) > _SENTENCES_FROM else (line,):
            if not part or part.isspace():
                continue
            piece = f"{turn}{part.rstrip()}"
            if len(piece) > _PIECE_CHARS:
                piece = _LONG + blake2b(piece.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
            seen[piece] += 1
            # the same line once more is another piece
            pieces.append(same_text(piece if seen[piece] == 1 else f"{piece}\0{seen[piece]}"))
    return pieces


def anchors(prompt: Prompt, count: int) -> tuple[str, ...]:
    """The longest pieces, the longest first; none where the whole context may be shown."""
    pieces = prompt.pieces
    if sum(map(len, pieces)) <= SHOWN_CHARS and not any(piece[0] == _LONG for piece in pieces):
        return ()
    return tuple(sorted(set(pieces), key=lambda piece: (piece[0] != _LONG, -len(piece), piece))[:count])


def question_of(
    prompt: Prompt, keys: Sequence[str], counts: Mapping[str, int], others: int
) -> tuple[str, ...]:
    """The pieces of a long last message that ask: those that few of the `others`, the prompts beside
    it, have. `counts` says how many have each of `keys`, which `counted` gives. Empty where it cannot
    be told.
    """
    having = [counts.get(key, 0) for key in keys] if others else []
    least = max(1.0, _SHARED * others) if others != 2 else 2.0
    least = min(having) + 1 if having and least <= min(having) < others else least
    found = tuple(piece for piece, some in zip(prompt.last, having, strict=False) if some < least)
    if not found:
        asking = [piece for piece in prompt.last if piece.rstrip("\"'”»*`,)>}] ").endswith(("?", "？"))]
        found = (asking[0],) if len(asking) == 1 else ()
    return found if not any(piece[0] == _LONG for piece in found) else ()


def counted(prompt: Prompt) -> list[str]:
    """The pieces of a last message as `question_of` has them counted: a changed figure in a shared line is no question."""
    return [same_text(_FIGURES.sub("0", piece)) for piece in prompt.last]


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
    if prompt.pieces == known.pieces:
        return ()
    mine, theirs = set(prompt.pieces), set(known.pieces)
    lost = [piece for piece in prompt.pieces if piece not in theirs and piece not in asking]
    came = [piece for piece in known.pieces if piece not in mine and piece not in known_asking]
    if len(lost) > SHOWN_PIECES or len(came) > SHOWN_PIECES:
        return None
    if sum(map(len, lost)) + sum(map(len, came)) > SHOWN_CHARS or any(piece[0] == _LONG for piece in lost + came):
        return None
    pairs = _aligned([_plain(piece) for piece in lost], [_plain(piece) for piece in came])
    free = {*asking, *known_asking}
    before = [piece for piece in prompt.pieces if piece in theirs and piece not in free]
    after = [piece for piece in known.pieces if piece in mine and piece not in free]
    moved = next(((one, other) for one, other in zip(before, after, strict=True) if one != other), None)
    if moved is not None:
        one, other = (_plain(piece)[:_ORDER_CHARS] for piece in moved)
        pairs.append((f"{one} … {other}", f"{other} … {one}"))
    return tuple(pairs) if len(pairs) <= SHOWN_PIECES else None


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


def _alike(one: str, other: str) -> float:
    a, b = set(_WORD.findall(one)), set(_WORD.findall(other))
    return len(a & b) / max(1, len(a | b))


def digests(differing: Differing) -> tuple[bytes, ...]:
    """Of each pair 8 bytes of what both sides have in common, or of all of a piece that stands alone,
    and 4 of what they have apart. The order of a pair does not matter.
    """
    return tuple(_digest(one, other) for one, other in differing)


def _digest(one: str, other: str) -> bytes:
    a, b = _WORD.findall(one), _WORD.findall(other)
    common = set(a) & set(b) if a and b else {*a, *b}
    apart = sorted((" ".join(word for word in side if word not in common) for side in (a, b)))
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
