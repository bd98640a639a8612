"""vCache's rule (Schroeder et al., arXiv 2502.03771), from its mathematics: each entry learns its own threshold.

Entry e has observations (s, c): the similarity at which it was nearest, and whether its answer was right. P(c | s) is modelled as
sigmoid(g (s - t)), fitted by maximum likelihood; with t' an upper confidence bound of t at level 1 - e, a = (1 - e) sigmoid(g (s - t'))
is a lower bound of it, and generating with probability at least 1 - error_max / (1 - a) keeps the error of each request within
error_max. The e that asks for the least exploration is taken. Its prior: none, so an entry is explored until it has been seen.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

_SEEN_MIN = 6
_EPSILONS = tuple((e, NormalDist().inv_cdf(1 - e)) for e in (0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5))
_RIDGE = 0.01


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
    seen: list[tuple[float, bool]] = field(default_factory=list)
    fitted: tuple[float, float, float] | None = None  # threshold, slope, standard deviation of the threshold


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
            entry.seen.append((found.similarity, is_right))
            entry.fitted = _fit(entry.seen) if len(entry.seen) >= _SEEN_MIN else None
            if is_right:
                return
        if len(self._entries) == len(self._vectors):
            self._vectors = np.concatenate([self._vectors, np.zeros_like(self._vectors)])
        self._vectors[len(self._entries)] = vector
        self._entries.append(_Entry(answer))

    def _exploration(self, entry: _Entry, similarity: float) -> float:
        if entry.fitted is None:
            return 1.0
        threshold, slope, deviation = entry.fitted
        best = max((1 - e) * _sigmoid(slope * (similarity - threshold - z * deviation)) for e, z in _EPSILONS)
        return 1 - self._error_max / max(1 - best, 1e-9)


def _fit(seen: list[tuple[float, bool]]) -> tuple[float, float, float] | None:
    """Threshold, slope and the threshold's standard deviation by the delta method; None where similarity says nothing."""
    x = np.array([(s, 1.0) for s, _ in seen])
    y = np.array([float(c) for _, c in seen])
    b = np.array([5.0, -3.5])
    ridge = np.array([_RIDGE, _RIDGE])
    for _ in range(25):
        p = 1 / (1 + np.exp(-np.clip(x @ b, -30, 30)))
        hessian = (x * (p * (1 - p))[:, None]).T @ x + np.diag(ridge)
        step = np.linalg.solve(hessian, x.T @ (p - y) + ridge * b)
        b -= step * min(1.0, 5.0 / max(1e-9, float(np.abs(step).max())))
        if np.abs(step).max() < 1e-4:
            break
    slope, offset = float(b[0]), float(b[1])
    if slope <= 0:
        return None
    gradient = np.array([offset / slope**2, -1 / slope])
    variance = float(gradient @ np.linalg.inv(hessian) @ gradient)
    return -offset / slope, slope, math.sqrt(max(0.0, variance))


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-max(-30.0, min(30.0, x))))
