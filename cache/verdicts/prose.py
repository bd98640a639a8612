"""Do two answers in free text say the same? A judge without a model of language.

Knows texts, an encoder's vectors and prompts' vectors; no Redis, no entries and no rule. The score
of two answers is the cosine of their means, the mean best match of their sentences both ways, and
twice the cosine of their words, which weigh by their rarity among the answers of the namespace.
Two wordings of one answer score about 2.2, wherever they come from; what differs from namespace to
namespace is how far other answers reach up. So `Answers` keeps the scores of the pairs it is given,
the answers to near prompts, and abstains from all of them where too many lie between the cuts, or
where answers belong to their own prompts alone. Invariants: answers of which each has a number that
the other lacks are never the same; answers with few words have the same numbers, and copies no changed sentence; a refusal, a text
of less than eight words or one longer than a sketch is UNKNOWN.
"""

from __future__ import annotations

import functools
import hashlib
import math
import re
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from cache.stored import reader
from cache.verdicts.judges import PROSE, Judgement, Ruling, is_refusal, normalised

if TYPE_CHECKING:
    from cache.encoder.types import Encoded

Vector = NDArray[np.float32]

_CHARS_MAX, _PARTS_MAX, _SENTENCES = 6_000, 64, 8
_WORDS_MIN, _WORDS_MAX = 8, 600
_FEW_WORDS = 25  # an answer that states a fact; a longer one may leave a number out

# Chosen on answers to 75 intents (CC0): 7% of two wordings score below `_SAME`, under 2% below `_DIFFERENT`.
_DIFFERENT, _SAME = 1.2, 1.7
_COPY, _LIKE, _EQUAL = 2.8, 0.85, 0.995  # a score, and cosines of sentences
_KEPT, _LEAST = 800, 12  # scores; how many on either side of the cuts it takes to rule
_NEAR = 0.45  # cosine of prompts from which on their answers' score counts
_WORDINGS_BETWEEN = 0.15  # of two wordings, between the cuts, for each one above them
_BETWEEN_MOST = 0.6  # of other answers, between the cuts, for each one as far below them
_BELOW_LEAST = 0.04  # as far below the cuts, for each one above them: else too few other answers were seen
_OWN_MOST = 0.7  # of the pairs above the cuts, those nearer to their own prompts than to each other's

_BULLET = re.compile(r"(?:[-*•#>|]{1,6}|\d{1,3}[.)])[^\S\n]+")
# not after a short capitalised word, such as a title
_END = re.compile(r"(?<=[.!?])(?<!\b[A-Z][a-z]\.)(?<!\b[A-Z][a-z]{2}\.)[\"”’)*]{0,3}\s+(?=[^\sa-z])|(?<=[。！？])")


class Sketch(msgspec.Struct, frozen=True, array_like=True, tag="p2"):
    """A kept answer. `hashes` are of its words (uint32, little-endian) in order, odd where the word has a
    digit; `lengths` counts them by sentence; `vectors` has an int8 vector for each sentence. An empty
    one says nothing.
    """

    hashes: bytes = b""
    lengths: tuple[int, ...] = ()
    vectors: bytes = b""

    def encode(self) -> bytes:
        """The stored form, at most 8 kB."""
        return msgspec.msgpack.encode(self)

    @staticmethod
    def decode(data: bytes) -> Sketch:
        """Raises ValueError for anything but a sketch of this version."""
        decoded = _read(data)  # its errors are ValueErrors
        lengths, count = decoded.lengths, max(1, len(decoded.lengths))
        if len(decoded.hashes) != 4 * sum(lengths) or min(lengths, default=1) < 1 or len(decoded.vectors) % count:
            raise ValueError("not a sketch: its parts differ in length")
        return decoded


_read = reader(msgspec.msgpack.Decoder(Sketch))


def pieces(answer: str) -> list[str]:
    """The sentences that `sketch` encodes, at most eight: neighbours are joined, the shortest
    first. None of a text that is too long to be compared.
    """
    if len(answer) > _CHARS_MAX:
        return []
    lines = [_BULLET.sub("", line.strip(), count=1).replace("**", "") for line in answer.splitlines()]
    sentences = [part.strip() for line in lines for part in _END.split(line) if any(map(str.isalnum, part))]
    if len(sentences) > _PARTS_MAX:
        return []
    while len(sentences) > _SENTENCES:
        at = min(range(len(sentences) - 1), key=lambda place: len(sentences[place]) + len(sentences[place + 1]))
        sentences[at : at + 2] = [f"{sentences[at]} {sentences[at + 1]}"]
    return sentences


def sketch(answer: str, encode: Callable[[Sequence[str]], Encoded]) -> Sketch:
    """Sketch an answer. `encode` is called once, with its `pieces`, unless there is nothing to
    compare: a few words, a refusal, or a text too long.
    """
    texts = pieces(answer)
    sentences = [[_hash(word) for word in normalised(text) or (text,)] for text in texts]
    hashes = np.array([word for sentence in sentences for word in sentence], "<u4")
    if not _WORDS_MIN <= len(hashes) <= _WORDS_MAX or is_refusal(answer):
        return Sketch()
    vectors = encode(texts).vectors
    scales = np.abs(vectors).max(axis=1, keepdims=True)
    if not scales.all():
        return Sketch()  # a sentence past the encoder's window has no vector
    return Sketch(
        hashes.tobytes(), tuple(map(len, sentences)), np.round(vectors * (127 / scales)).astype(np.int8).tobytes()
    )


@functools.lru_cache(maxsize=16_384)
def _hash(word: str) -> int:
    digest = hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=4).digest()
    return int.from_bytes(digest, "big") & ~1 | any(map(str.isdigit, word))


class _View:
    """A sketch as it is compared: its words and its sentences weigh by the rarity of the words."""

    def __init__(self, sketch: Sketch, weight: Callable[[int], float]) -> None:
        self.vectors = np.frombuffer(sketch.vectors, np.int8).reshape(len(sketch.lengths), -1).astype(np.float32)
        self.vectors /= np.linalg.norm(self.vectors, axis=1, keepdims=True) + 1e-9
        hashes = np.frombuffer(sketch.hashes, "<u4").tolist()
        left, self.length = iter(hashes), len(hashes)
        counts = Counter(hashes)
        weights = {word: weight(word) for word in counts}
        self.numbers = {word for word in counts if word & 1}
        self.weights = np.array([sum(weights[next(left)] for _ in range(length)) for length in sketch.lengths])
        self.weights /= self.weights.sum() + 1e-9
        self.mean = self.weights @ self.vectors
        self.mean /= np.linalg.norm(self.mean) + 1e-9
        terms = {word: (1 + math.log(count)) * weights[word] for word, count in counts.items()}
        norm = math.sqrt(sum(term * term for term in terms.values())) or 1.0
        self.terms = {word: term / norm for word, term in terms.items()}

    def score(self, other: _View) -> tuple[float, bool]:
        """How alike they are, and whether one is a copy of the other with changed sentences."""
        cosines = self.vectors @ other.vectors.T
        mine, its = cosines.max(axis=1), cosines.max(axis=0)
        shared = sum(term * other.terms.get(word, 0.0) for word, term in self.terms.items())
        score = float(self.mean @ other.mean + (mine @ self.weights + its @ other.weights) / 2) + 2 * shared
        return score, score >= _COPY and bool(((mine > _LIKE) & (mine < _EQUAL)).any())

    def has_other_numbers(self, other: _View) -> bool:
        mine, its, common = self.numbers - other.numbers, other.numbers - self.numbers, self.numbers & other.numbers
        if min(self.length, other.length) <= _FEW_WORDS:
            return bool(mine or its)
        return bool(mine and its) and len(common) <= max(len(mine), len(its))


_NONE = (Sketch(), np.zeros(0, np.float32))


class Answers:
    """The answers of one namespace, by name, each with the vector of its prompt, and the scores of
    pairs that were judged.
    """

    def __init__(self) -> None:
        self.kept: dict[bytes, tuple[Sketch, Vector]] = {}
        self._texts: Counter[bytes] = Counter()
        self._frequencies: Counter[int] = Counter()  # of words, by distinct texts
        self._scores: deque[tuple[float, float]] = deque(maxlen=_KEPT)

    def add(self, name: bytes, vector: Vector, sketch: Sketch) -> None:
        """Take in an answer that is not here."""
        self.kept[name] = sketch, vector
        self._texts[sketch.hashes] += 1
        if self._texts[sketch.hashes] == 1:
            self._frequencies.update(set(np.frombuffer(sketch.hashes, "<u4").tolist()))

    def drop(self, name: bytes) -> None:
        """Forget an answer that is here."""
        hashes = self.kept.pop(name)[0].hashes
        self._texts[hashes] -= 1
        if not self._texts[hashes]:
            del self._texts[hashes]
            self._frequencies.subtract(set(np.frombuffer(hashes, "<u4").tolist()))

    def judge(self, fresh: Sketch, name: bytes, candidates: Sequence[bytes]) -> list[Judgement]:
        """The rulings on a fresh answer, of that name, against each candidate. The scores of near
        prompts' answers tell what scores mean here.
        """
        if not fresh.lengths:
            return [_unknown("too short, too long or a refusal")] * len(candidates)
        mine, rulings = _View(fresh, self._weight), []
        for candidate in candidates:
            theirs = self.kept.get(candidate, _NONE)
            if not theirs[0].lengths or candidate == name:
                rulings.append(_unknown("not kept, or says nothing"))
                continue
            view = _View(theirs[0], self._weight)
            score, is_changed = mine.score(view)
            prompt = self.kept.get(name, _NONE)[1]
            if prompt.size and prompt @ theirs[1] >= _NEAR:
                # above 0: nearer to their own prompts than to each other's
                self._scores.append((score, float((mine.mean - view.mean) @ (prompt - theirs[1]))))
            can_be_same = score >= _SAME and not is_changed and not mine.has_other_numbers(view)
            ruling = Ruling.SAME if can_be_same else Ruling.UNKNOWN if score >= _DIFFERENT else Ruling.DIFFERENT
            rulings.append(
                Judgement(ruling, PROSE, f"score {score:.2f}")
                if self._can_tell()
                else _unknown("too few answers yet, or too alike")
            )
        return rulings

    def _can_tell(self) -> bool:
        """Whether the answers to near prompts fall into wordings of one answer and others."""
        above = [lean for score, lean in self._scores if score >= _SAME]
        below = sum(2 * _DIFFERENT - _SAME <= score < _DIFFERENT for score, _ in self._scores)
        between = sum(_DIFFERENT <= score < _SAME for score, _ in self._scores) - _WORDINGS_BETWEEN * len(above)
        return (
            min(below, len(above)) >= _LEAST
            and below >= max(_BELOW_LEAST * len(above), between / _BETWEEN_MOST)
            and sum(lean > 0 for lean in above) <= _OWN_MOST * sum(lean != 0 for lean in above)
        )

    def _weight(self, word: int) -> float:
        return math.log((len(self._texts) + 1.5) / (self._frequencies[word] + 0.5))


def _unknown(why: str) -> Judgement:
    return Judgement(Ruling.UNKNOWN, PROSE, why)
