"""The features of a candidate answer: its neighbours' votes, the verdicts near by, and how the prompt
differs from its wordings.

Pure: takes similarities, answer groups and texts, and returns one vector of numbers. Knows no
model, no threshold and no Redis. Neighbours with equal answers form a group and vote together, each
key with exp((s - s_1) / width). Invariant: a missing neighbour counts as a far one, so a namespace
with one key reads like a full one with unrelated other keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from cache.decision.differences import KINDS_MAX, Freed, WordCounts, WordDifference, from_all
from cache.decision.exact_marks import veto
from cache.decision.texts import trigrams_of, words_of
from cache.query import MissReason

NEIGHBOURS = 16
_WIDTH = 0.05  # of the kernel, in cosine
_FAR = 0.2  # the cosine that a missing neighbour is given
_MARGIN_MAX = 0.3
_NEAR, _NEAR_WIDTH = 0.45, 0.3  # of the verdicts on a neighbour's answer count none from here down, all from the sum up

# each with the sign that its weight may have: verdicts cannot teach that a difference is a good sign
_SIGNED = (
    ("similarity", 1), ("above 0.9", 1), ("margin", 1), ("vote share", 1), ("fraction", 0), ("log keys", 0),
    ("log odds of verdicts", 1), ("mean of ten", 0), ("last", 0), ("similarity x share", 1), ("words shared", 1),
    ("trigrams shared", 1), ("best of the group", 1), ("best of others", -1), ("weight asked only", -1),
    ("weight known only", -1), ("heaviest asked only", -1), ("heaviest known only", -1), ("differences", -1),
    ("additions", -1), ("moved", -1), ("told", 1), ("worst told", 1), ("log length ratio", -1), ("same", 1),
    ("evidence", 0),
)  # fmt: skip
FEATURES = tuple(name for name, _ in _SIGNED)
SIGNS = np.array([sign for _, sign in _SIGNED] + [0])
SIMILARITY, EVIDENCE = FEATURES.index("similarity"), FEATURES.index("evidence")


class Neighbour(msgspec.Struct, frozen=True, gc=False):
    """A cached prompt of the same partition and compat: cosine similarity, text, id, seconds since
    it was answered, the group of its answer (its name, how many keys it has, how many verdicts said
    that it was right or wrong to serve), and whether that answer is out of service. `differing` has
    the pieces of both contexts that differ, as (of the prompt, of the neighbour);
    `is_context_vouched`: there are none, or verdicts say that they do not matter. `wording` as in
    `cache.query.Asked`; `stored` is the prompt that has the answer, where `text` is such a wording.
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
    wording: bytes = b""
    stored: str = ""

    @property
    def answer(self) -> bytes:
        """The name of its group."""
        return self.group or self.exact


@dataclass(frozen=True, slots=True)
class AnswerGroup:
    """A group among the neighbours. `index` is that of its witness: the nearest key that no exact
    check stops, the nearest of all where each is stopped, by `vetoed`. `share` of the vote; `count`
    of its keys among the neighbours; `rival` the cosine of the nearest key of any other group.
    `differences` are those from all its wordings.
    """

    group: bytes
    index: int
    share: float
    count: int
    rival: float
    vetoed: MissReason | None
    differences: tuple[WordDifference, ...] = ()


def candidates(prompt: str, neighbours: Sequence[Neighbour], count: int) -> list[AnswerGroup]:
    """The first groups of the (sorted) neighbours by their share of the vote; those with a witness
    come first.
    """
    nearest = neighbours[:NEIGHBOURS]
    places: dict[bytes, list[int]] = {}
    for place, neighbour in enumerate(nearest):
        places.setdefault(neighbour.answer, []).append(place)
    weights = [math.exp((neighbour.similarity - nearest[0].similarity) / _WIDTH) for neighbour in nearest]
    votes = {group: sum(map(weights.__getitem__, members)) for group, members in places.items()}
    total = sum(votes.values())
    # each group's rival is the first one, whose own is the second
    first, second = [*(nearest[members[0]].similarity for members in places.values()), -1.0, -1.0][:2]
    groups: list[AnswerGroup] = []
    for group in sorted(places, key=lambda name: (-votes[name], places[name])):
        members = places[group]
        vetoes = [veto(prompt, nearest[at].text) for at in members]
        free = [at for at, vetoed in zip(members, vetoes, strict=True) if vetoed is None]
        texts = [nearest[at].text for at in free]
        groups.append(
            AnswerGroup(
                group=group,
                index=(free or members)[0],
                share=votes[group] / total,
                count=len(members),
                rival=first if members[0] else second,
                vetoed=None if free else vetoes[0],
                differences=tuple(from_all(prompt, texts)) if free else (),
            )
        )
        if sum(one.vetoed is None for one in groups) == count:
            break
    return sorted(groups, key=lambda one: one.vetoed is not None)


def features_of(
    prompt: str, neighbours: Sequence[Neighbour], candidate: AnswerGroup, word_counts: WordCounts, freed: Freed
) -> NDArray[np.float64]:
    """The numbers of FEATURES, in their order, for serving `candidate`. The kinds of its heaviest
    differences follow as numbers, 0 where there are no more.
    """
    witness = neighbours[candidate.index]
    s = witness.similarity
    cosines = [near.similarity for near in neighbours[:NEIGHBOURS]]
    cosines += [min(_FAR, cosines[-1])] * (NEIGHBOURS - len(cosines))
    left, right = words_of(prompt), words_of(witness.text)
    best = {True: 0.0, False: 0.0}
    for near in neighbours[:NEIGHBOURS]:
        is_own = near.answer == candidate.group
        best[is_own] = max(best[is_own], _jaccard(left.word_set, words_of(near.text).word_set))
    weighed = sorted(
        ((word_counts.weight(difference.word), difference) for difference in candidate.differences),
        key=lambda pair: -pair[0],
    )
    mine, theirs = ([weight for weight, difference in weighed if difference.is_asked is side] for side in (True, False))
    kinds = [difference.kind for _, difference in weighed[:KINDS_MAX]]
    odds = [freed.log_odds(kind) for kind in kinds]
    return np.array(
        (
            s, max(0.0, s - 0.9), max(-_MARGIN_MAX, min(_MARGIN_MAX, s - candidate.rival)), candidate.share,
            candidate.count / NEIGHBOURS, math.log1p(witness.keys),
            math.log((witness.right + 1.0) / (witness.wrong + 1.0)), sum(cosines[:10]) / 10, cosines[-1],
            s * candidate.share, _jaccard(left.word_set, right.word_set),
            _jaccard(trigrams_of(prompt), trigrams_of(witness.text)),
            best[True], best[False], min(3.0, sum(mine)), min(3.0, sum(theirs)), max(mine, default=0.0),
            max(theirs, default=0.0), min(6.0, float(len(weighed))),
            min(4.0, float(sum(one.is_addition for one in candidate.differences))),
            min(4.0, float(sum(one.form == "~" for one in candidate.differences))),
            max(-6.0, min(6.0, sum(odds))), min(odds, default=0.0),
            abs(math.log((len(left.core) + 1) / (len(right.core) + 1))), float(not weighed),
            math.log1p(verdicts_near(neighbours)), *kinds, *[0] * (KINDS_MAX - len(kinds)),
        )
    )  # fmt: skip


def verdicts_near(neighbours: Sequence[Neighbour]) -> float:
    """How many verdicts there are on the answers of the neighbours, each by how near it is."""
    seen: dict[bytes, float] = {}
    for near in neighbours[:NEIGHBOURS]:
        weight = max(0.0, min(1.0, (near.similarity - _NEAR) / _NEAR_WIDTH))
        seen.setdefault(near.answer, weight * (near.right + near.wrong))
    return sum(seen.values())


def _jaccard(left: Set[object], right: Set[object]) -> float:
    both = len(left & right)
    return both / (len(left) + len(right) - both) if left or right else 1.0
