"""The clauses of contexts as vectors: where in its documents, system prompt or talk a question
points.

Two questions about the same text mean the same more often where they are near to the same of its
clauses. Knows no keys and no rule. A context is embedded once, when a second question comes to it:
a short one at once, a longer one where no lookup waits. Invariants: a context of which a clause has
no vector yet says nothing, and a decision without it is the stricter one; the latest
`_CONTEXTS_MAX` are kept.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cache.decision.text_features import read
from cache.decision.words import FORMS, FUNCTION_WORDS, TURNING
from cache.encoder.embedder import Memo
from cache.encoder.types import Tokens
from cache.fingerprint import CONTEXT_CHARS_MAX, Partition

_CONTEXTS_MAX = 400
_WAITING_MAX = 16
_CLAUSES_MAX, _SENTENCE_WORDS, _SENTENCE_CHARS = 192, 3, 600
_AT_ONCE_CHARS = 600  # some 0.1 s of the embedder, in which other lookups wait
_ENGLISH = 0.125  # of the words of a context are English function words, at least
_WIDTH = 0.05  # of the kernel, in cosine: as that of votes

_CARRIED = 0.08  # of cosine, that a text loses without a word
_KEPT = 0.02  # of cosine: more a text may not gain without a word that is near to one of the other
_ALIKE = 0.4  # of tokens in their texts: less is as near as an instruction comes
_CARRIED_MAX = 8  # words, each of which costs an embedding

_END = re.compile(r"(?<=[.!?;:])\s+|\n+")
_CLAUSE_END = re.compile(r",|[()]|\s(?:and|but|or|while|whereas)\s|\s[–—-]\s")

Places = tuple[float, float, float]
"""Of two questions in a context: the overlap of the clauses that they are near to (Bhattacharyya's
coefficient), the correlation of their cosines to all of them, and how near the nearest is.
"""


@dataclass(slots=True)
class _Context:
    partition: Partition
    stems: frozenset[str]  # its content words, as stems
    waiting: list[str]  # clauses without a vector, the first last
    vectors: list[NDArray[np.float32]] = field(default_factory=list)
    matrix: NDArray[np.float16] | None = None


class Contexts:
    """The contexts of one semantic cache, by room."""

    def __init__(self, encoder: Memo) -> None:
        self._encoder = encoder
        self._known: OrderedDict[bytes, _Context] = OrderedDict()
        self._waiting: dict[bytes, None] = {}

    @property
    def is_settled(self) -> bool:
        return not self._waiting

    def want(self, room: bytes, partition: Partition, text: str) -> None:
        """Embed the context of a room, at once or later."""
        known = self._known.get(room)
        if known is None:
            if len(text) > CONTEXT_CHARS_MAX or len(self._waiting) >= _WAITING_MAX:
                return
            has, words = read(text).content_set, read(text).tokens
            # the prior and the guards are of English
            is_english = _ENGLISH * len(words) <= sum(word in FUNCTION_WORDS for word in words)
            known = self._known[room] = _Context(partition, has, clauses(text)[::-1] if is_english else [])
            if len(self._known) > _CONTEXTS_MAX:
                oldest, _ = self._known.popitem(last=False)
                self._waiting.pop(oldest, None)
            if sum(map(len, known.waiting)) <= _AT_ONCE_CHARS:
                self._embed(room, known, _AT_ONCE_CHARS)
            else:
                self._waiting[room] = None
        self._known.move_to_end(room)

    def settle(self, chars_max: int) -> None:
        """Embed some clauses of a context that waits."""
        room = next(iter(self._waiting), None)
        if room is not None:
            self._embed(room, self._known[room], chars_max)

    def matrix(self, room: bytes) -> NDArray[np.float32] | None:
        """The vectors of the clauses of a room's context; None until all are embedded."""
        known = self._known.get(room)
        return None if known is None or known.matrix is None else known.matrix.astype(np.float32)

    def words(self, room: bytes) -> frozenset[str]:
        """The content words of a room's context, as stems; none where it is not known."""
        known = self._known.get(room)
        return frozenset() if known is None else known.stems

    def are_names(
        self,
        partition: Partition,
        pair: tuple[str, str],
        candidates: frozenset[str],
        other: NDArray[np.float32],
    ) -> bool:
        """Whether each of some words of the first question of a pair is another name of what the
        second, of vector `other`, says: without it the questions are less near, or they are as near
        and a word of the second is near to it in both questions.
        """
        text, beside = pair
        rests = {word: _without(text, word) for word in candidates if word.isalpha() and word not in TURNING}
        if len(rests) < len(candidates) or len(rests) > _CARRIED_MAX or not all(rests.values()):
            return False
        if not rests:
            return True
        made = self._encoder.encode([(partition, one) for one in (text, *rests.values())]).vectors @ other
        lost = dict(zip(rests, (made[0] - made[1:]).tolist(), strict=True))
        named = {word for word, cosine in lost.items() if cosine < _CARRIED}
        if not named:
            return True
        if any(lost[word] < -_KEPT for word in named) or not FORMS.isdisjoint(named):
            return False
        mine, theirs = self._encoder.encode_tokens(text), self._encoder.encode_tokens(beside)
        if mine is None or theirs is None:
            return False
        vectors = theirs[1][[beside[start:end].isalnum() for start, end in theirs[0]]]
        return all(_nearest(text, mine, word, vectors) >= _ALIKE for word in named)

    def _embed(self, room: bytes, known: _Context, chars_max: int) -> None:
        texts: list[str] = []
        while known.waiting and (not texts or chars_max >= len(known.waiting[-1])):
            texts.append(known.waiting.pop())
            chars_max -= len(texts[-1])
        if texts:
            encoded = self._encoder.encode([(known.partition, text) for text in texts])
            known.vectors += [
                vector
                for vector, tokens in zip(encoded.vectors, encoded.tokens.tolist(), strict=True)
                if tokens <= self._encoder.info.tokens_max
            ]
        if not known.waiting:
            known.matrix = np.stack(known.vectors).astype(np.float16) if known.vectors else None
            known.vectors = []
            self._waiting.pop(room, None)


def _nearest(text: str, tokens: Tokens, word: str, others: NDArray[np.float32]) -> float:
    """The largest cosine of a token of a word to other tokens; -1 where the text has no such word."""
    spans = [match.span() for match in re.finditer(r"\S+", text) if word in read(match.group()).content_set]
    rows = [
        text[start:end].isalnum() and any(first <= start and end <= last for first, last in spans)
        for start, end in tokens[0]
    ]
    return float((tokens[1][rows] @ others.T).max(initial=-1.0))


def _without(text: str, word: str) -> str:
    return " ".join(token for token in text.split() if word not in read(token).content_set)


def clauses(text: str) -> list[str]:
    """The clauses of a text that have content: two questions may be about two things in one sentence."""
    clause_texts: list[str] = []
    for sentence in _END.split(text):
        sentence_text = sentence.strip()[:_SENTENCE_CHARS]
        if sentence_text.count(" ") + 1 >= _SENTENCE_WORDS:
            parts = [part.strip() for part in _CLAUSE_END.split(sentence_text)]
            some = [part for part in parts if " " in part]
            clause_texts += some if len(some) > 1 else [sentence_text]
    return list(dict.fromkeys(clause_texts))[:_CLAUSES_MAX]


def places(matrix: NDArray[np.float32], prompt: NDArray[np.float32], known: NDArray[np.float32]) -> list[Places]:
    """Compare where a question points in its context with where each of the others points."""
    cosines = np.concatenate((prompt[None], known)) @ matrix.T
    weights = np.exp((cosines - cosines.max(axis=1, keepdims=True)) / _WIDTH)
    roots = np.sqrt(weights / weights.sum(axis=1, keepdims=True))
    centred = cosines - cosines.mean(axis=1, keepdims=True)
    lengths = np.linalg.norm(centred, axis=1) + 1e-6
    overlap, alike = roots[1:] @ roots[0], centred[1:] @ centred[0] / lengths[1:] / lengths[0]
    nearest = cosines.max(axis=1)
    found = (nearest[1:] + nearest[0]) / 2
    return [(float(a), float(b), float(c)) for a, b, c in zip(overlap, alike, found, strict=True)]
