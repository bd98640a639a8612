"""The features of a candidate answer: its neighbours' votes, and how two prompts' words differ.

Pure: takes similarities, answer groups and texts, and returns one vector of numbers. Knows no
model, no threshold and no Redis. Neighbours with equal answers form a group and vote together, each
key with exp((s - s_1) / width). Invariant: a missing neighbour counts as a far one, so a namespace
with one key reads like a full one with unrelated other keys.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from cache.decision.text_features import TextFeatures, is_inverted, is_negated, read, remembered
from cache.decision.words import LIGHT_WORDS

T = TypeVar("T")

NEIGHBOURS = 16
_WIDTH = 0.05  # of the kernel, in cosine
_FAR = 0.2  # the cosine that a missing neighbour is given
_MARGIN_MAX = 0.3
ONE_SIDED_MAX = 8
_DOUBT = 4.0  # verdicts that a word needs to count half
# texts of other words that a namespace is assumed to have had before its first: they smooth
# document frequencies
_UNSEEN = 30

FEATURES = (
    "similarity", "similarity^2", "above 0.9", "margin", "vote share", "fraction", "log keys", "log odds of verdicts",
    "log verdicts", "mean of ten", "last", "similarity x share", "similarity x words shared", "content words shared",
    "words shared", "pairs shared", "trigrams shared", "numbers differ", "negated", "asked otherwise", "names differ",
    "owners, forms or scopes differ", "times differ", "inverted", "log length ratio", "weight asked only", "weight known only",
    "heaviest one-sided", "weight shared", "one-sided words", "same content", "one adds", "guarded", "best of the group",
    "best of others", "unheard", "unheard share", "heaviest unheard", "told", "worst told",
    "in context", "same place", "places alike", "found in context",
)  # fmt: skip

IN_CONTEXT = FEATURES.index("in context")


class Neighbour(msgspec.Struct, frozen=True, gc=False):
    """A cached prompt of the same partition and compat: cosine similarity, text, id, seconds since
    it was answered, the group of its answer (its name, how many keys it has, how many verdicts said
    that it was right or wrong to serve), whether that answer is out of service. `differing` has the
    pieces of both contexts that differ, each as (of the prompt, of the neighbour);
    `is_context_vouched`: there are none, or verdicts say that they do not matter.
    """

    similarity: float
    text: str
    exact: bytes
    age_s: float
    group: bytes = b""
    keys: int = 1
    right: float = 0.0
    wrong: float = 0.0
    is_suspended: bool = False
    differing: tuple[tuple[str, str], ...] = ()
    is_context_vouched: bool = True


class AnswerGroup(msgspec.Struct, frozen=True, gc=False):
    """A group among the neighbours. `index` is that of its nearest key, the witness; `share` of the
    vote; `count` of its keys among the neighbours; `rival` the cosine of the nearest key of any
    other group.
    """

    group: bytes
    index: int
    share: float
    count: int
    rival: float


@dataclass(slots=True)
class WordCounts:
    """In how many of a namespace's texts each stem occurs."""

    texts: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, text: str, sign: int = 1) -> None:
        self.texts += sign
        for word in read(text).content_set:
            self.counts[word] += sign
            if not self.counts[word]:
                del self.counts[word]

    def weight(self, word: str) -> float:
        """Inverse document frequency between 0 and 1; light words weigh little wherever they are
        rare.
        """
        total = self.texts + _UNSEEN
        idf = math.log(total / (1 + self.counts.get(word, 0))) / math.log(total)
        return max(0.0, idf) * (0.3 if word in LIGHT_WORDS else 1.0)


class WordOdds:
    """How often answers were right where only one of two prompts has a word.

    `please` harms nothing, the name of a city does. Words are numbers here, so that a stored
    verdict carries them without a text.
    """

    def __init__(self) -> None:
        self._counts: dict[int, tuple[float, float]] = {}
        self._all = (1.0, 1.0)

    def learn(self, features: NDArray[np.float64], is_right: bool, sign: int = 1) -> None:
        """Count one verdict, or take it back with a `sign` of -1. `features` is a row of
        `features_of`: the words are at its end.
        """
        right, wrong = sign * float(is_right), sign * float(not is_right)
        self._all = (self._all[0] + right, self._all[1] + wrong)
        for word in features[len(FEATURES) : len(FEATURES) + ONE_SIDED_MAX].astype(np.int64).tolist():
            if word:
                before = self._counts.get(word, (0.0, 0.0))
                self._counts[word] = (before[0] + right, before[1] + wrong)

    def copy(self) -> WordOdds:
        made = WordOdds()
        made._counts, made._all = dict(self._counts), self._all
        return made

    def log_odds(self, word: int) -> float:
        """How much likelier than usual an answer is right where one prompt has this word and the
        other lacks it.
        """
        right, wrong = self._counts.get(word, (0.0, 0.0))
        share = self._all[0] / (self._all[0] + self._all[1])
        odds = (right + _DOUBT * share) / (wrong + _DOUBT * (1 - share))
        return math.log(odds * (1 - share) / share)


def candidates(neighbours: Sequence[Neighbour]) -> list[AnswerGroup]:
    """The groups of the (sorted) neighbours by their share of the vote."""
    nearest = neighbours[:NEIGHBOURS]
    places: dict[bytes, list[int]] = {}
    for place, neighbour in enumerate(nearest):
        places.setdefault(neighbour.group or neighbour.exact, []).append(place)
    best = nearest[0].similarity if nearest else 0.0
    weights = [math.exp((neighbour.similarity - best) / _WIDTH) for neighbour in nearest]
    votes = {group: sum(map(weights.__getitem__, members)) for group, members in places.items()}
    total = sum(votes.values())
    # each group's rival is the first one, whose own is the second
    first, second = [*(nearest[members[0]].similarity for members in places.values()), -1.0, -1.0][:2]
    groups = []
    for group, members in places.items():
        rival = first if members[0] else second
        groups.append(AnswerGroup(group, members[0], votes[group] / total, len(members), rival))
    groups.sort(key=lambda one: (-one.share, one.index))
    return groups


def features_of(
    prompt: str,
    neighbours: Sequence[Neighbour],
    candidate: AnswerGroup,
    word_counts: WordCounts,
    word_odds: WordOdds | None,
    is_guarded: bool,
) -> NDArray[np.float64]:
    """The numbers of FEATURES, in their order, for serving `candidate` to the prompt `prompt`.

    The heaviest words that only one of the two prompts has follow as numbers, 0 where there are no
    more. `is_guarded`: the fixed rule would serve it.
    """
    witness = neighbours[candidate.index]
    s = witness.similarity
    cosines = [left.similarity for left in neighbours[:NEIGHBOURS]]
    cosines += [min(_FAR, cosines[-1])] * (NEIGHBOURS - len(cosines))
    verdicts = witness.right + witness.wrong
    left, right = read(prompt), read(witness.text)
    shared_words = _jaccard(left.content_set, right.content_set)
    ids = _one_sided(left, right, word_counts)
    return np.array(
        (
            s, s * s, max(0.0, s - 0.9), max(-_MARGIN_MAX, min(_MARGIN_MAX, s - candidate.rival)), candidate.share,
            candidate.count / NEIGHBOURS, math.log1p(witness.keys),
            math.log((witness.right + 1.0) / (witness.wrong + 1.0)), math.log1p(verdicts), sum(cosines[:10]) / 10,
            cosines[-1], s * candidate.share, s * shared_words, shared_words,
            *_word_features(left, right, prompt, witness.text), *_weights(left, right, word_counts), float(is_guarded),
            *_group_features(left, neighbours, candidate, word_counts), *_odds_features(ids, word_odds),
            0.0, 0.0, 0.0, 0.0, *ids,
        )
    )  # fmt: skip


def _group_features(
    left: TextFeatures, neighbours: Sequence[Neighbour], candidate: AnswerGroup, word_counts: WordCounts
) -> tuple[float, ...]:
    """The features of all near keys of the group. A word of the prompt that none of them has is
    unheard.
    """
    best = {True: 0.0, False: 0.0}
    heard: set[str] = set()
    for near in neighbours[:NEIGHBOURS]:
        is_own = (near.group or near.exact) == candidate.group
        content = read(near.text).content_set
        best[is_own] = max(best[is_own], _jaccard(left.content_set, content))
        if is_own:
            heard |= content
    weights = {word: word_counts.weight(word) for word in left.content_set}
    unheard = [weight for word, weight in weights.items() if word not in heard]
    total = sum(weights.values())
    return (
        best[True],
        best[False],
        min(3.0, sum(unheard)),
        sum(unheard) / total if total else 0.0,
        max(unheard, default=0.0),
    )


def _one_sided(left: TextFeatures, right: TextFeatures, word_counts: WordCounts) -> list[int]:
    some = sorted((-word_counts.weight(word), word) for word in left.content_set ^ right.content_set)[:ONE_SIDED_MAX]
    ids = [_number(word) for _, word in some]
    return ids + [0] * (ONE_SIDED_MAX - len(ids))


@remembered(16_384)
def _number(word: str) -> int:
    """24 bits, so that float32 holds it exactly; never 0."""
    return (zlib.crc32(word.encode("utf-8", "surrogatepass")) & 0xFFFFFF) or 1


def _odds_features(ids: Sequence[int], word_odds: WordOdds | None) -> tuple[float, float]:
    odds = [word_odds.log_odds(one) for one in ids if one] if word_odds is not None else []
    return max(-6.0, min(6.0, sum(odds))), min(odds, default=0.0)


def _word_features(left: TextFeatures, right: TextFeatures, prompt: str, known: str) -> tuple[float, ...]:
    lengths = (len(left.tokens) + 1) / (len(right.tokens) + 1)
    return (
        _jaccard(frozenset(left.tokens), frozenset(right.tokens)),
        _jaccard(_pairs(prompt), _pairs(known)),
        _jaccard(_trigrams(prompt), _trigrams(known)),
        float(left.numbers != right.numbers),
        float(is_negated(left, right)),
        float(left.question != right.question),
        float(not (left.names <= set(right.tokens) and right.names <= set(left.tokens)) or left.quotes != right.quotes),
        float(left.owners != right.owners) + float(left.forms != right.forms) + float(left.scopes != right.scopes),
        float(left.times != right.times),
        float(is_inverted(left, right)),
        abs(math.log(lengths)),
    )


def _weights(left: TextFeatures, right: TextFeatures, word_counts: WordCounts) -> tuple[float, ...]:
    mine, theirs, both = (
        [word_counts.weight(word) for word in some]
        for some in (
            left.content_set - right.content_set,
            right.content_set - left.content_set,
            left.content_set & right.content_set,
        )
    )
    total = sum(mine) + sum(theirs) + sum(both)
    return (
        min(3.0, sum(mine)),
        min(3.0, sum(theirs)),
        max(*mine, *theirs, 0.0, 0.0),
        sum(both) / total if total else 0.0,
        min(6.0, float(len(mine) + len(theirs))),
        float(not mine and not theirs),
        float(bool(mine) != bool(theirs)),
    )


def _jaccard(left: frozenset[T], right: frozenset[T]) -> float:
    both = len(left & right)
    return both / (len(left) + len(right) - both) if left or right else 1.0


@remembered(16_384)
def _trigrams(text: str) -> frozenset[str]:
    padded = f"  {text.casefold()} "
    return frozenset(map("".join, zip(padded, padded[1:], padded[2:], strict=False)))


@remembered(16_384)
def _pairs(text: str) -> frozenset[tuple[str, str]]:
    words = read(text).tokens
    return frozenset(itertools.pairwise(words))
