"""The sketches of cached answers, by namespace: what a judge of prose compares a fresh answer with.

Knows no entries, no Redis and no texts: names (`cache.verdicts.records`), the vectors of prompts,
and sketches (`cache.verdicts.prose`). Invariants: nothing crosses a namespace, so nothing crosses a
partition; all of them together stay within a bound, from which those that came first go.
"""

from __future__ import annotations

from collections.abc import Sequence

from cache.verdicts.judges import PROSE, Judgement, Ruling
from cache.verdicts.prose import Answers, Sketch, Vector

_BYTES_MAX = 128 << 20
_WORD_BYTES, _NAME_BYTES = 10, 500  # what a byte of the words takes with their counts, and an answer beside its sketch


class AnswerSketches:
    """All namespaces' sketches. `bytes_max` bounds what they take together."""

    def __init__(self, bytes_max: int = _BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._namespaces: dict[bytes, Answers] = {}
        self._sizes: dict[tuple[bytes, bytes], int] = {}  # by namespace and name, as they came
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._sizes)

    def has(self, namespace: bytes, name: bytes) -> bool:
        """Whether the answer has a sketch here. Safe beside the thread that uses the cache."""
        return (namespace, name) in self._sizes

    def add(self, namespace: bytes, name: bytes, vector: Vector, sketch: Sketch) -> None:
        """Keep an answer's sketch, with the vector of its prompt."""
        if self.has(namespace, name):
            return
        self._namespaces.setdefault(namespace, Answers()).add(name, vector, sketch)
        size = _WORD_BYTES * len(sketch.hashes) + len(sketch.vectors) + vector.nbytes + _NAME_BYTES
        self._sizes[namespace, name] = size
        self.size_bytes += size
        while self.size_bytes > self._bytes_max:
            self.drop(*next(iter(self._sizes)))

    def drop(self, namespace: bytes, name: bytes) -> None:
        """Forget an answer, if it is here."""
        size = self._sizes.pop((namespace, name), None)
        if size is None:
            return
        self.size_bytes -= size
        self._namespaces[namespace].drop(name)
        if not self._namespaces[namespace].kept:
            del self._namespaces[namespace]

    def judge(self, namespace: bytes, fresh: Sketch, name: bytes, others: Sequence[bytes]) -> list[Judgement]:
        """The rulings on a fresh answer against others of its namespace, in order. `name` is its
        own.
        """
        state = self._namespaces.get(namespace)
        if state is None:
            return [Judgement(Ruling.UNKNOWN, PROSE, "no sketch")] * len(others)
        return state.judge(fresh, name, others)
