"""vCache's rule (Schroeder et al., arXiv 2502.03771), from its mathematics: each entry learns its own threshold.

Entry e has observations (s, c): the similarity at which it was nearest, and whether its answer was right. P(c | s) is modelled as
sigmoid(g (s - t)), with t and g unknown. For any e, with q the level that P(c | s) reaches with confidence 1 - e, a = (1 - e) q is a
lower bound of the chance that serving is right, and generating with probability at least 1 - error_max / (1 - a) keeps the error of
each request within error_max. The e that asks for the least exploration is taken. The paper takes the band from the asymptotic
normal distribution of t's estimate; an entry's few observations are mostly all right or all wrong, where that estimate does not
exist, so here it is the posterior over a grid of t and g, from a flat prior of t and of log g.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

_EPSILONS = np.geomspace(0.0005, 0.5, 16)
_T, _G = (one.ravel() for one in np.meshgrid(np.linspace(0.0, 1.0, 81), np.geomspace(5.0, 200.0, 10), indexing="ij"))


@dataclass(frozen=True, slots=True)
class Found:
    """The nearest entry (None: there is none), its similarity and answer, and whether it is served."""

    entry: int | None
    similarity: float
    answer: str
    is_served: bool


@dataclass(slots=True)
class _Entry:
    answer: str
    likelihood: NDArray[np.float64] = field(default_factory=lambda: np.zeros(len(_T)))  # its logarithm, over the grid
    seen: int = 0


class VCache:
    """One cache. `draw` decides what is explored."""

    def __init__(self, error_max: float, dims: int, draw: random.Random) -> None:
        self._error_max = error_max
        self._draw = draw
        self._vectors = np.zeros((16, dims), dtype=np.float32)
        self._entries: list[_Entry] = []

    def lookup(self, vector: NDArray[np.float32]) -> Found:
        if not self._entries:
            return Found(None, 0.0, "", False)
        similarities = self._vectors[: len(self._entries)] @ vector
        nearest = int(similarities.argmax())
        similarity, entry = float(similarities[nearest]), self._entries[nearest]
        return Found(nearest, similarity, entry.answer, self._draw.random() > self._exploration(entry, similarity))

    def learn(self, vector: NDArray[np.float32], found: Found, answer: str, is_flipped: bool) -> None:
        """What a generation told: the nearest entry gets an observation; a new answer becomes an entry."""
        if found.entry is not None:
            entry = self._entries[found.entry]
            is_right = (entry.answer == answer) is not is_flipped
            entry.seen += 1
            entry.likelihood = entry.likelihood - np.logaddexp(
                0.0, _G * (found.similarity - _T) * (-1 if is_right else 1)
            )
            if is_right:
                return
        if len(self._entries) == len(self._vectors):
            self._vectors = np.concatenate([self._vectors, np.zeros_like(self._vectors)])
        self._vectors[len(self._entries)] = vector
        self._entries.append(_Entry(answer))

    def _exploration(self, entry: _Entry, similarity: float) -> float:
        if not entry.seen:
            return 1.0
        chances = 1 / (1 + np.exp(-np.clip(_G * (similarity - _T), -30, 30)))
        weights = np.exp(entry.likelihood - entry.likelihood.max())
        order = np.argsort(chances)
        below = np.cumsum(weights[order]) / weights.sum()
        levels = chances[order][np.searchsorted(below, _EPSILONS)]
        best = float(((1 - _EPSILONS) * levels).max())
        return 1 - self._error_max / max(1 - best, 1e-9)
