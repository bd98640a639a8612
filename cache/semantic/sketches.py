"""The sketches of cached answers, by namespace: what a judge of prose compares a fresh answer with.

Knows no entries, no Redis and no texts: names (`cache.verdicts.records`), the vectors of prompts,
and sketches (`cache.verdicts.prose`). Invariants: nothing crosses a namespace, so
nothing crosses a partition; all of them together stay within a bound, from which the oldest answers
go; the same answers give the same rulings, whatever the order in which they came.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence, Set
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cache.verdicts.judges import PROSE, Judgement, Ruling
from cache.verdicts.prose import Answers, Sketch

_BYTES_MAX = 128 << 20
_NAME_BYTES = 300  # what keeping an answer takes beside its sketch, about
_TIME_BYTES = 8  # at the end of an answer's name: when it was made


@dataclass(slots=True)
class _Sketches:
    """The answers of a namespace; `names` has those, too, whose sketch says nothing."""

    answers: Answers = field(default_factory=Answers)
    names: set[bytes] = field(default_factory=set)


class AnswerSketches:
    """All namespaces' sketches. `bytes_max` bounds what they take together."""

    def __init__(self, bytes_max: int = _BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._namespaces: dict[bytes, _Sketches] = {}
        self._oldest: list[tuple[bytes, bytes, bytes]] = []  # time, namespace, name
        self._count = 0
        self.size_bytes = 0

    def has(self, namespace: bytes, name: bytes) -> bool:
        """Whether the answer has a sketch here. Safe beside the thread that uses the cache."""
        one = self._namespaces.get(namespace)
        return one is not None and name in one.names

    def add(
        self, namespace: bytes, name: bytes, vector: NDArray[np.float32], prompt_words: Set[str], sketch: Sketch
    ) -> None:
        """Keep an answer's sketch, with the vector and the content words of its prompt."""
        state = self._namespaces.setdefault(namespace, _Sketches())
        if name in state.names:
            return
        before = state.answers.size_bytes
        state.answers.add(name, vector, prompt_words, sketch)
        state.names.add(name)
        self._count += 1
        self.size_bytes += _NAME_BYTES + state.answers.size_bytes - before
        heapq.heappush(self._oldest, (name[-_TIME_BYTES:], namespace, name))
        while self.size_bytes > self._bytes_max and self._oldest:
            _, *oldest = heapq.heappop(self._oldest)
            self.drop(*oldest)
        if len(self._oldest) > 2 * self._count + 64:  # most of them are gone
            known = ((namespace, name) for namespace, state in self._namespaces.items() for name in state.names)
            self._oldest = [(name[-_TIME_BYTES:], namespace, name) for namespace, name in known]
            heapq.heapify(self._oldest)

    def drop(self, namespace: bytes, name: bytes) -> None:
        """Forget an answer, if it is here."""
        state = self._namespaces.get(namespace)
        if state is None or name not in state.names:
            return
        before = state.answers.size_bytes
        state.answers.drop(name)
        state.names.remove(name)
        self._count -= 1
        self.size_bytes -= _NAME_BYTES + before - state.answers.size_bytes
        if not state.names:
            self.size_bytes -= state.answers.size_bytes
            del self._namespaces[namespace]

    def settle(self, namespace: bytes) -> bool:
        """A small part of what the next ruling in a namespace needs. Whether more is left."""
        one = self._namespaces.get(namespace)
        return one is not None and one.answers.settle()

    def judge(self, namespace: bytes, fresh: Sketch, name: bytes, others: Sequence[bytes]) -> list[Judgement]:
        """The rulings on a fresh answer against others of its namespace, in order. `name` is its
        own.
        """
        state = self._namespaces.get(namespace)
        if state is None:
            return [Judgement(Ruling.UNKNOWN, PROSE, "no sketch")] * len(others)
        return state.answers.judge(fresh, name, others)
