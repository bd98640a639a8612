"""Do two answers of several sentences say the same? A judge without a model of language, which
compares an answer with all answers of its namespace.

Knows texts, an encoder's vectors and prompts' vectors; no Redis, no entries and no rule. Two
answers have a score, which adds the cosine of their weighted sentences, the alignment of their
sentences both ways, and their words by weight in the namespace. Scores of answers to near prompts
are a mixture of two distributions, which `Answers` fits without labels: of two wordings of one
answer, and of the rest. It rules "same" above a cut that three quarters of wordings reach, or where
an answer is far nearer to the candidate than to all answers that are apart from it; "different"
where hardly any wording is; nothing between, before the fit, and where the two distributions
overlap. Invariants: answers that state other numbers, names or polarity in a like
sentence are never the same, however near; no ruling rests on a chain over more than one further
answer; a short answer, a refusal and a text longer than a sketch are UNKNOWN.
"""

from __future__ import annotations

import functools
import hashlib
import heapq
import math
import re
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from cache.decision.text_features import TextFeatures, read
from cache.decision.words import NEGATIONS
from cache.stored import reader
from cache.verdicts.judges import EARLY, PROSE, Judgement, Ruling, is_refusal

if TYPE_CHECKING:
    from cache.encoder.types import Encoded

SKETCH_BYTES_MAX = 8_192
ANSWERS_MAX = 4_000  # of a namespace; the oldest go first

_CHARS_MAX, _PARTS_MAX, _SENTENCES = 6_000, 64, 8
_WORDS_MIN, _WORDS_MAX = 8, 600

# Scores of two wordings of one answer, from the answers to 75 intents that this project may use
# (CC0): normal, with 1% below 1.45 and 5% below 1.72. A fit finds the mean anew, as if after so many pairs.
_SAME_MEAN, _SAME_SD, _SAME_PAIRS = 2.33, 0.36, 20
_VERBATIM = 3.2  # the same text but for an opening or a closing; in no mixture
_DIFFERENT = 1.2  # next to no wordings are below it
_SAME_LEAST = 1.75  # a lower cut would be one between answers that are no wordings
_BELOW_LEAST, _BELOW_MOST = 0.25, 0.6  # from the mean of wordings to the cut
_WRONG_SHARE = 0.002  # of the pairs above the cut, by the fit, before rivals and conflicts: where it can be
_WRONG_MAX = 0.05  # the same; more of them say that the namespace can't be judged
# of the two parts, by Ashman's D, which is uncertain where there are few pairs: nearer ones say so, too
_APART_MIN, _APART_FEW = 2.0, 240
_APART_HELD = 0.5  # less is enough while the judge rules: a fit goes by a sample, and one may miss
_NEAR = 0.45  # cosine of prompts from which on their answers are in the mixture
_ANCHORS, _NEAREST, _PAIRS_MIN, _ANSWERS_MIN = 300, 2, 120, 60
_CHANGES_MIN, _GROWTH = 20, 0.15  # of the answers: then it is fitted anew
_PORTION = 12  # pairs
_STEPS = 60
_CUTS = 5  # the latest fits, of whose cuts the median holds
# an answer this much nearer to the candidate than to any that is apart from it, a little under the cut
_MARGIN, _UNDER = 0.45, 0.3
_APART = 1.45  # two answers with a lower score are no wordings of one
_RIVALS, _LISTED = 20, 160  # the nearest answers by the mean of their sentences
_TWIN = 0.98  # cosine of means from which on two texts are one
_VIEWS_MAX = 400
_MEAN_BYTES = 5  # of a number of a mean, with the room for more
_SAMPLE = 1_500  # answers from which the pairs of a fit are drawn
# of the words of both: then the texts are one but for what stands in a few places
_TEMPLATE = 0.45
_COPY = 0.6  # from which on one is a copy of the other, with changes
_LIKE, _VERY_LIKE = 0.5, 0.6  # cosines of sentences
# by how much more of the answers above the cut echo their own prompts than the other ones: by chance as many do
_ECHOES_MOST = 0.035
_USUAL_MIN, _USUAL = 4, 0.01  # of the answers have a sentence that says nothing of its own
_SLOT = 2  # words in the place of others


class _WordKind(IntEnum):
    FUNCTION, CONTENT, NAME, NEGATION, NUMBER, FEW, MEASURE = range(7)
    """NUMBER and FEW are values, beside the words that state them: in digits, and in words, which often
    count nothing ("one of", "at once"). MEASURE is a number with its unit.
    """


class Sketch:
    """A kept answer: its words as hashes, by sentence, and a vector for each of
    up to eight sentences.
    """

    __slots__ = ("hashes", "kinds", "lengths", "scales", "vectors")

    def __init__(
        self,
        hashes: NDArray[np.uint32],
        kinds: NDArray[np.uint8],
        lengths: NDArray[np.uint16],
        vectors: NDArray[np.int8],
        scales: NDArray[np.float32],
    ) -> None:
        self.hashes = hashes
        self.kinds = kinds
        self.lengths = lengths
        self.vectors = vectors
        self.scales = scales

    @property
    def is_empty(self) -> bool:
        return len(self.lengths) == 0

    @property
    def size_bytes(self) -> int:
        return self.hashes.nbytes + self.kinds.nbytes + self.vectors.nbytes + 200

    def encode(self) -> bytes:
        """The stored form, at most `SKETCH_BYTES_MAX`."""
        return _ENCODER.encode(
            _Stored(
                self.hashes.astype("<u4").tobytes(),
                self.kinds.tobytes(),
                self.lengths.astype("<u2").tobytes(),
                self.vectors.tobytes(),
                self.scales.astype("<f4").tobytes(),
            )
        )

    @staticmethod
    def decode(data: bytes) -> Sketch:
        """Raises ValueError for anything but a sketch of this version."""
        try:
            stored = _read(data)
            hashes, kinds = np.frombuffer(stored.hashes, "<u4"), np.frombuffer(stored.kinds, np.uint8)
            lengths, scales = np.frombuffer(stored.lengths, "<u2"), np.frombuffer(stored.scales, "<f4")
            vectors = np.frombuffer(stored.vectors, np.int8)
        except (msgspec.DecodeError, ValueError) as error:  # ValueError: a part of a number
            raise ValueError(f"not a sketch: {error}") from None
        count = len(lengths)
        if (
            len(hashes) != len(kinds)
            or int(lengths.sum()) != len(hashes)
            or len(scales) != count
            or (len(vectors) % count if count else len(vectors))
            or not np.isfinite(scales).all()
            or (len(kinds) and int(kinds.max()) >= len(_WordKind))
        ):
            raise ValueError("not a sketch: its parts differ in length")
        return Sketch(hashes, kinds, lengths, vectors.reshape(count, -1) if count else vectors.reshape(0, 0), scales)


class _Stored(msgspec.Struct, frozen=True, array_like=True, tag="p1"):
    hashes: bytes
    kinds: bytes
    lengths: bytes
    vectors: bytes
    scales: bytes


_ENCODER = msgspec.msgpack.Encoder()
_read = reader(msgspec.msgpack.Decoder(_Stored))

_BULLET = re.compile(r"(?:[-*•#>|]{1,6}|\d{1,3}[.)])[^\S\n]+")
_END = re.compile(r"(?<=[.!?])[\"”’)*]{0,3}\s+(?=[^\sa-z])|(?<=[。！？])")
_WORD = re.compile(r"\w")
_ABBREVIATION = re.compile(r"\b(?:Dr|Mr|Mrs|Ms|Prof|St|No|Nos|vs|approx|e\.g|i\.e|cf|Jan|Feb|Aug|Sept|Oct|Nov|Dec)\.$")


def pieces(answer: str) -> list[str]:
    """The sentences that `sketch` encodes, at most eight: neighbours are joined, the shortest
    first, but for the opening and the closing. None of a text that is too long to be compared.
    """
    if len(answer) > _CHARS_MAX:
        return []
    sentences: list[str] = []
    for line in answer.splitlines():
        bare = line.strip()
        mark = _BULLET.match(bare)
        bare = (bare[mark.end() :] if mark else bare).replace("**", "")
        for part in _END.split(bare):
            if sentences and _ABBREVIATION.search(sentences[-1]):
                sentences[-1] = f"{sentences[-1]} {part.strip()}"
            elif _WORD.search(part):
                sentences.append(part.strip())
        if len(sentences) > _PARTS_MAX:
            return []
    while len(sentences) > _SENTENCES:
        at = min(range(1, len(sentences) - 2), key=lambda place: len(sentences[place]) + len(sentences[place + 1]))
        sentences[at : at + 2] = [f"{sentences[at]} {sentences[at + 1]}"]
    return sentences


def sketch(answer: str, encode: Callable[[Sequence[str]], Encoded]) -> Sketch:
    """Sketch an answer. `encode` is called once, with its `pieces`, unless there is nothing to
    compare: a few words, a refusal, or a text too long.
    """
    texts = pieces(answer)
    readings = [read(text) for text in texts]
    count = sum(len(reading.tokens) for reading in readings)
    if not _WORDS_MIN <= count <= _WORDS_MAX or is_refusal(answer):
        return EMPTY
    encoded = encode(texts)
    if not np.abs(encoded.vectors).max(axis=1).all():
        return EMPTY  # a sentence past the encoder's window has no vector
    tagged = [_tagged(reading) for reading in readings]
    scales = np.abs(encoded.vectors).max(axis=1) / 127
    return Sketch(
        np.array([word for sentence in tagged for word, _ in sentence], dtype=np.uint32),
        np.array([kind for sentence in tagged for _, kind in sentence], dtype=np.uint8),
        np.array([len(sentence) for sentence in tagged], dtype=np.uint16),
        np.round(encoded.vectors / scales[:, None]).astype(np.int8),
        scales.astype(np.float32),
    )


EMPTY = Sketch(
    np.zeros(0, np.uint32),
    np.zeros(0, np.uint8),
    np.zeros(0, np.uint16),
    np.zeros((0, 0), np.int8),
    np.zeros(0, np.float32),
)


def _tagged(sentence: TextFeatures) -> list[tuple[int, int]]:
    """The words of a sentence as hashes with their kinds, then its numbers."""
    hashes = []
    for word in sentence.tokens:
        kind = _WordKind.CONTENT if word in sentence.content_set else _WordKind.FUNCTION
        if (word in sentence.names or word in sentence.dates) and len(word) > 1:
            kind = _WordKind.NAME
        elif word in NEGATIONS:
            kind = _WordKind.NEGATION
        hashes.append((_hash(word), int(kind)))
    figures = [
        (value, _WordKind.NUMBER if value in sentence.tokens else _WordKind.FEW) for value, _ in sentence.numbers
    ]
    hashes += [(_hash("#" + value), int(kind)) for value, kind in figures]
    return hashes + [(_hash(f"#{value} {unit}"), int(_WordKind.MEASURE)) for value, unit in sentence.numbers if unit]


@functools.lru_cache(maxsize=16_384)
def _hash(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=4).digest(), "big")


def _mean(sketch: Sketch) -> NDArray[np.float32]:
    mean = (sketch.vectors * sketch.scales[:, None]).sum(axis=0)
    unit: NDArray[np.float32] = (mean / (np.linalg.norm(mean) + 1e-9)).astype(np.float32)
    return unit


@dataclass(frozen=True, slots=True)
class _Sentence:
    hashes: frozenset[int]
    content: frozenset[int]
    names: frozenset[int]
    numbers: frozenset[int]
    few: frozenset[int]
    measures: frozenset[int]
    negations: int

    @property
    def key(self) -> int:
        return hash(self.hashes)


class _View:
    """A sketch as it is compared: its sets, and its weights by a namespace's words."""

    __slots__ = ("_sentences", "_sketch", "mean", "terms", "vectors", "weights")

    def __init__(self, sketch: Sketch, weight: Callable[[int], float]) -> None:
        self._sketch = sketch
        self._sentences: tuple[_Sentence, ...] = ()
        self.vectors = sketch.vectors * sketch.scales[:, None]
        self.vectors /= np.linalg.norm(self.vectors, axis=1, keepdims=True) + 1e-9
        counts = Counter(sketch.hashes[sketch.kinds < _WordKind.NUMBER].tolist())
        weighed = {word: weight(word) for word in counts}
        sums, start = [], 0
        for length in sketch.lengths.tolist():
            present = set(sketch.hashes[start : start + length].tolist())
            sums.append(sum([weighed.get(word, 0.0) for word in present]) + 1e-6)
            start += length
        self.weights = np.array(sums) / sum(sums)
        self.mean = self.weights @ self.vectors
        self.mean /= np.linalg.norm(self.mean) + 1e-9
        terms = {word: (1 + math.log(count)) * weighed[word] for word, count in counts.items()}
        norm = math.sqrt(sum([term * term for term in terms.values()])) or 1.0
        self.terms = {word: term / norm for word, term in terms.items()}

    @property
    def hashes(self) -> Set[int]:
        return self.terms.keys()

    @property
    def sentences(self) -> tuple[_Sentence, ...]:
        if not self._sentences:
            self._sentences = tuple(_sentences(self._sketch))
        return self._sentences

    @property
    def numbers(self) -> frozenset[int]:
        return frozenset[int]().union(*(sentence.numbers for sentence in self.sentences))

    @property
    def few(self) -> frozenset[int]:
        return frozenset[int]().union(*(sentence.few for sentence in self.sentences))


def _sentences(sketch: Sketch) -> list[_Sentence]:
    sentences, start = [], 0
    for length in sketch.lengths.tolist():
        hashes, kinds = sketch.hashes[start : start + length].tolist(), sketch.kinds[start : start + length].tolist()
        start += length
        of: tuple[set[int], ...] = tuple(set() for _ in _WordKind)
        for word, kind in zip(hashes, kinds, strict=True):
            of[kind].add(word)
        content = of[_WordKind.CONTENT] | of[_WordKind.NAME]
        sentences.append(
            _Sentence(
                hashes=frozenset(content | of[_WordKind.FUNCTION] | of[_WordKind.NEGATION]),
                content=frozenset(content),
                names=frozenset(of[_WordKind.NAME]),
                numbers=frozenset(of[_WordKind.NUMBER]),
                few=frozenset(of[_WordKind.NUMBER] | of[_WordKind.FEW]),
                measures=frozenset(of[_WordKind.MEASURE]),
                negations=kinds.count(_WordKind.NEGATION) % 2,
            )
        )
    return sentences


def _score(first: _View, second: _View) -> float:
    """How alike two answers are, from about 0 to 4."""
    cosines = first.vectors @ second.vectors.T
    aligned = float(cosines.max(axis=1) @ first.weights + cosines.max(axis=0) @ second.weights) / 2
    few, many = (first.terms, second.terms) if len(first.terms) < len(second.terms) else (second.terms, first.terms)
    words = sum(term * many.get(word, 0.0) for word, term in few.items())
    return float(first.mean @ second.mean) + aligned + 2 * words


def conflict(first: _View, second: _View, is_usual: Callable[[_Sentence], bool]) -> str:
    """Name the kind of fact that two answers state differently in a like sentence; empty without one.

    `is_usual` says of a sentence that many answers have it, such as a closing.
    """
    numbers, its_numbers, few, its_few = first.numbers, second.numbers, first.few, second.few
    if numbers and its_numbers and not numbers & its_few and not its_numbers & few:
        return "numbers"
    alike = _share(first.hashes, second.hashes)
    is_template = alike >= _TEMPLATE
    cosines = first.vectors @ second.vectors.T
    pairs = {(first_at, int(row.argmax())) for first_at, row in enumerate(cosines)}
    pairs |= {(int(row.argmax()), first_at) for first_at, row in enumerate(cosines.T)}
    for first_at, second_at in sorted(pairs):
        mine, theirs = first.sentences[first_at], second.sentences[second_at]
        if cosines[first_at, second_at] < _LIKE:
            continue
        if difference := _difference(
            mine, theirs, float(cosines[first_at, second_at]), (few, first.hashes), (its_few, second.hashes)
        ):
            return difference
        first_only, its_own = mine.content - second.hashes, theirs.content - first.hashes
        is_slot = 0 < len(first_only) <= _SLOT and 0 < len(its_own) <= _SLOT
        shared = _share(mine.hashes, theirs.hashes)
        if is_template and ((is_slot and shared >= 0.4) or (shared >= 0.75 and (first_only or its_own))):
            return "words"
    if alike >= _COPY:
        for said, best, other_hashes in (
            *((said, best, second.hashes) for said, best in zip(first.sentences, cosines.max(axis=1), strict=True)),
            *((said, best, first.hashes) for said, best in zip(second.sentences, cosines.max(axis=0), strict=True)),
        ):
            if best < 0.8 and said.hashes - other_hashes and not is_usual(said):
                return "sentences"
    return ""


def _difference(
    mine: _Sentence,
    theirs: _Sentence,
    cosine: float,
    stated: tuple[Set[int], Set[int]],
    its_stated: tuple[Set[int], Set[int]],
) -> str:
    """Name the kind of fact that two like sentences state differently. `stated` are the numbers and the words of the
    whole answer that the first is from, `its_stated` those of the other.
    """
    (numbers, hashes), (its_numbers, its_hashes) = stated, its_stated
    if mine.numbers - its_numbers and theirs.numbers - numbers and cosine >= _VERY_LIKE:
        return "numbers"
    if _share(mine.content, theirs.content) >= 0.3 and mine.names - its_hashes and theirs.names - hashes:
        return "names"
    if _share(mine.hashes, theirs.hashes) < 0.6:
        return ""
    if mine.few - its_numbers or theirs.few - numbers:
        return "numbers"
    if mine.measures - theirs.measures and theirs.measures - mine.measures:
        return "units"
    return "polarity" if mine.negations != theirs.negations else ""


def _share(mine: Set[int], theirs: Set[int]) -> float:
    return len(mine & theirs) / max(1, len(mine | theirs))


@dataclass(frozen=True, slots=True)
class _KnownAnswer:
    sketch: Sketch
    prompt: NDArray[np.float16]
    text: int
    hashes: tuple[int, ...]
    sentences: tuple[int, ...]
    prompt_hashes: tuple[int, ...]  # the content words of the prompt

    @property
    def size_bytes(self) -> int:
        return (
            self.sketch.size_bytes
            + self.prompt.nbytes
            + _MEAN_BYTES * self.prompt.size
            + 36 * len(self.hashes)
            + 36 * len(self.sentences)
            + 36 * len(self.prompt_hashes)
            + 1_000
        )


class Answers:
    """The answers of one namespace, the latest `ANSWERS_MAX`, and the cut that was fitted to them.

    A fit is done in small portions by `judge` and `settle`; rulings use the fit before.
    """

    def __init__(self) -> None:
        self._answers: dict[bytes, _KnownAnswer] = {}
        self._ages: list[tuple[bytes, bytes]] = []
        self._texts: Counter[int] = Counter()
        self._frequencies: Counter[int] = Counter()  # of words, by distinct texts
        self._repeats: Counter[int] = Counter()  # of sentences, likewise
        self._names: list[bytes] = []  # in the order of the rows of `_means`
        self._rows: dict[bytes, int] = {}
        self._means = np.zeros((0, 0), np.float32)  # of their sentences, of unit length, with room for more
        self._weighed: tuple[int, Counter[int]] = (0, Counter())  # as of the last fit
        self._views: OrderedDict[bytes, _View] = OrderedDict()
        self._changes = 0
        self._pairs: list[tuple[bytes, bytes]] = []  # of a fit under way
        self._scores: list[tuple[float, int]] = []  # and how many more echoes of their own prompts they have
        self._cuts: deque[float] = deque(maxlen=_CUTS)
        self._echoes: deque[tuple[int, int]] = deque(maxlen=_CUTS)  # of these fits: such echoes, and answers
        self._same = math.inf
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._answers)

    def add(self, name: bytes, vector: NDArray[np.float32], prompt_words: Set[str], sketch: Sketch) -> None:
        """Take in an answer. `name` is that of `answer_name`, whose end is its time; `vector` is
        the prompt's, `prompt_words` are its content words, which are kept as hashes. A name that is there
        and an empty sketch change nothing.
        """
        if name in self._answers or sketch.is_empty:
            return
        hashes = tuple(set(sketch.hashes[sketch.kinds < _WordKind.NUMBER].tolist()))
        answer = _KnownAnswer(
            sketch=sketch,
            prompt=vector.astype(np.float16),
            text=hash((sketch.hashes.tobytes(), sketch.lengths.tobytes())),
            hashes=hashes,
            sentences=tuple({sentence.key for sentence in _sentences(sketch)}),
            prompt_hashes=tuple(map(_hash, prompt_words)),
        )
        self._answers[name] = answer
        self._keep_mean(name, _mean(sketch))
        self._texts[answer.text] += 1
        if self._texts[answer.text] == 1:
            self._frequencies.update(hashes)
            self._repeats.update(answer.sentences)
        self.size_bytes += answer.size_bytes
        heapq.heappush(self._ages, (name[-8:], name))
        self._changes += 1
        while len(self._answers) > ANSWERS_MAX:
            self.drop(heapq.heappop(self._ages)[1])

    def drop(self, name: bytes) -> None:
        """Forget an answer, if it is there."""
        answer = self._answers.pop(name, None)
        if answer is None:
            return
        self._texts[answer.text] -= 1
        if not self._texts[answer.text]:
            del self._texts[answer.text]
            self._frequencies.subtract(answer.hashes)
            self._repeats.subtract(answer.sentences)
        self.size_bytes -= answer.size_bytes
        self._views.pop(name, None)
        row, last = self._rows.pop(name), self._names.pop()
        if last != name:  # the last row takes the place of this one
            self._names[row], self._rows[last], self._means[row] = last, row, self._means[len(self._names)]
        if len(self._ages) > 2 * len(self._answers) + 64:
            self._ages = sorted((one[-8:], one) for one in self._answers)

    def _keep_mean(self, name: bytes, mean: NDArray[np.float32]) -> None:
        count = len(self._names)
        if count == len(self._means):
            means = np.zeros((count + count // 4 + 64, len(mean)), np.float32)
            if count:
                means[:count] = self._means
            self._means = means
        self._rows[name] = count
        self._names.append(name)
        self._means[count] = mean

    def judge(self, fresh: Sketch, name: bytes, candidates: Sequence[bytes]) -> list[Judgement]:
        """The rulings on a fresh answer, of that name, against each candidate."""
        if fresh.is_empty:
            return [_unknown("too short, too long or a refusal") for _ in candidates]
        if self._same == math.inf:
            return [_unknown(EARLY) for _ in candidates]
        mine = self._view(fresh)
        scores = {other: _score(mine, self._known(other)) for other in self._nearest(fresh, name)}
        return [
            self._ruling(mine, name, one, scores) if one in self._answers and one != name else _unknown("not kept")
            for one in candidates
        ]

    def _nearest(self, fresh: Sketch, name: bytes) -> list[bytes]:
        """The answers with the nearest means, one of each text."""
        cosines = self._means[: len(self._names)] @ _mean(fresh)
        nearest: list[int] = []
        for row in np.argsort(-cosines)[:_LISTED].tolist():
            if self._names[row] != name and (
                not nearest or float((self._means[nearest] @ self._means[row]).max()) < _TWIN
            ):
                nearest.append(row)
                if len(nearest) == _RIVALS:
                    break
        return [self._names[row] for row in nearest]

    def _ruling(self, mine: _View, name: bytes, candidate: bytes, scores: Mapping[bytes, float]) -> Judgement:
        theirs = self._known(candidate)
        direct = scores.get(candidate)
        if direct is None:
            direct = _score(mine, theirs)
        best, rival = direct, None
        for other, score in sorted(scores.items(), key=lambda pair: -pair[1]):
            if other == candidate:
                continue
            if score < min(_APART, best - _MARGIN):
                rival = score  # no answer apart from the candidate is nearer
                break
            known = self._known(other)
            between = _score(known, theirs)
            if between < _APART and score < _VERBATIM:
                rival = score
                break
            through = min(score, between)
            if (
                through > best
                and direct >= _DIFFERENT
                and not self._conflict(mine, known)
                and not self._conflict(known, theirs)
            ):
                best = through
        why = f"score {best:.2f}, of others {rival or 0:.2f}, cut {self._same:.2f}"
        is_near = (
            best >= self._same
            if rival is None
            else best > rival and best >= self._same - (_UNDER if best - rival >= _MARGIN else 0.0)
        )
        if is_near:
            if name in self._answers and self._echoes_of(name, candidate)[0] == 2:
                return _unknown("each says a word of its own prompt")
            stated = self._conflict(mine, theirs)
            return _unknown(f"other {stated}") if stated else Judgement(Ruling.SAME, PROSE, why)
        if best < _DIFFERENT:
            return Judgement(Ruling.DIFFERENT, PROSE, why)
        return _unknown(why)

    def _conflict(self, first: _View, second: _View) -> str:
        least = max(_USUAL_MIN, _USUAL * len(self._texts))
        return conflict(first, second, lambda sentence: self._repeats[sentence.key] >= least)

    # --- weights and the cut

    def settle(self) -> bool:
        """Do a portion of a fit, if one is due. Whether any is left."""
        if not self._pairs and (
            len(self._answers) < _ANSWERS_MIN or self._changes < max(_CHANGES_MIN, len(self._answers) * _GROWTH)
        ):
            return False
        if not self._pairs:
            self._changes = 0
            self._weighed = len(self._texts), +self._frequencies
            self._repeats = +self._repeats
            self._views.clear()
            self._pairs, self._scores = self._near_pairs(), []
        for first, second in self._pairs[:_PORTION]:
            if first in self._answers and second in self._answers:
                score = _score(self._known(first), self._known(second))
                if score < _VERBATIM:
                    own, others = self._echoes_of(first, second)
                    self._scores.append((score, own - others))
        del self._pairs[:_PORTION]
        if not self._pairs:
            cut = math.inf
            if len(self._scores) >= _PAIRS_MIN:
                cut = fitted_cut(np.array([score for score, _ in self._scores]), is_held=self._same < math.inf)
            above = [echoes for score, echoes in self._scores if score >= cut]
            self._cuts.append(cut)
            self._echoes.append((sum(above), 2 * len(above)))
            echoes, answers = map(sum, zip(*self._echoes, strict=True))
            is_free = echoes <= _ECHOES_MOST * answers
            self._same = sorted(self._cuts)[len(self._cuts) // 2] if is_free else math.inf
        return bool(self._pairs)

    def _echoes_of(self, first: bytes, second: bytes) -> tuple[int, int]:
        """Of two answers, how many have a word of their own prompt that neither the other prompt
        nor the other answer has, and how many have such a word of the other's prompt.
        """
        mine, theirs = self._answers[first], self._answers[second]
        said, its = frozenset(mine.hashes), frozenset(theirs.hashes)
        prompt_only, its_asked = frozenset(mine.prompt_hashes), frozenset(theirs.prompt_hashes)
        said, its, prompt_only, its_asked = said - its, its - said, prompt_only - its_asked, its_asked - prompt_only
        own = (not prompt_only.isdisjoint(said)) + (not its_asked.isdisjoint(its))
        return own, (not its_asked.isdisjoint(said)) + (not prompt_only.isdisjoint(its))

    def _near_pairs(self) -> list[tuple[bytes, bytes]]:
        """Answers to the nearest prompts, as a judge gets them; a sample that follows from the names."""
        draw, names = np.random.default_rng(0), sorted(self._answers)
        names = [names[place] for place in draw.permutation(len(names))[:_SAMPLE].tolist()]
        prompts = np.stack([self._answers[name].prompt for name in names]).astype(np.float32)
        anchors = draw.permutation(len(names))[:_ANCHORS]
        cosines = prompts[anchors] @ prompts.T
        cosines[np.arange(len(anchors)), anchors] = -1
        pairs: dict[tuple[int, int], None] = {}
        for anchor, row in zip(anchors.tolist(), cosines, strict=True):
            nearest = np.argpartition(-row, _NEAREST)[:_NEAREST]
            for its in nearest[row[nearest] >= _NEAR].tolist():
                pairs[min(anchor, its), max(anchor, its)] = None
        return [(names[one], names[other]) for one, other in pairs]

    def _view(self, sketch: Sketch) -> _View:
        count, frequencies = self._weighed
        return _View(sketch, lambda word: math.log((count + 1) / (frequencies.get(word, 0) + 0.5)))

    def _known(self, name: bytes) -> _View:
        view = self._views.get(name)
        if view is None:
            view = self._views[name] = self._view(self._answers[name].sketch)
            if len(self._views) > _VIEWS_MAX:
                self._views.popitem(last=False)
        else:
            self._views.move_to_end(name)
        return view


def fitted_cut(scores: NDArray[np.float64], *, is_held: bool = False) -> float:
    """The score from which on two answers to near prompts are the same: a mixture of two normal
    distributions, fitted by expectation maximisation, of which that of wordings has a known
    deviation. Infinity where the two are not apart (Ashman, Bird and Zepf, 1994).
    """
    same, mean, deviation, share = _SAME_MEAN, 1.0, 0.35, 0.5
    for _ in range(_STEPS):
        of_same = share * np.exp(-0.5 * ((scores - same) / _SAME_SD) ** 2) / _SAME_SD
        of_other = (1 - share) * np.exp(-0.5 * ((scores - mean) / deviation) ** 2) / deviation
        of_same /= of_same + of_other + 1e-12
        of_other = 1 - of_same
        wordings, others = float(of_same.sum()), float(of_other.sum()) + 1e-9
        share = wordings / len(scores)
        same = (_SAME_PAIRS * _SAME_MEAN + float(of_same @ scores)) / (_SAME_PAIRS + wordings)
        mean = float(of_other @ scores) / others
        deviation = max(0.2, math.sqrt(float(of_other @ (scores - mean) ** 2) / others))

    def wrong_above(cut: float) -> float:
        """How many pairs of other answers there are above a cut for each pair of wordings."""
        return (1 - share) * _above(cut, mean, deviation) / (share * _above(cut, same, _SAME_SD) + 1e-12)

    most = same - _BELOW_LEAST
    least = _APART_MIN + _APART_FEW / len(scores) - (_APART_HELD if is_held else 0.0)
    is_apart = math.sqrt(2) * (same - mean) >= least * math.hypot(_SAME_SD, deviation)
    if not is_apart or most < _SAME_LEAST or wrong_above(most) > _WRONG_MAX:
        return math.inf
    cuts = np.arange(max(_SAME_LEAST, same - _BELOW_MOST), most, 0.02).tolist()
    return next((cut for cut in cuts if wrong_above(cut) <= _WRONG_SHARE), most)


def _above(least: float, mean: float, deviation: float) -> float:
    return 0.5 * math.erfc((least - mean) / deviation / math.sqrt(2))


def _unknown(why: str) -> Judgement:
    return Judgement(Ruling.UNKNOWN, PROSE, why)
