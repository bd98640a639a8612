"""Speculation: guess the next tokens from the sequence's own past, verify them all in one step (arXiv:2211.17192).

Drafts are looked up, not computed: where the last few tokens stood before, in the prompt, the answer or a reference text
that came with the request, what followed them then is proposed (prompt lookup decoding). Knows token ids and timings, no
model. Invariants: a draft never changes an answer, only how many steps it takes, because each position's token is drawn
from the model's own distribution and a draft only decides how far one step may go; a sequence whose drafts cost more
time than they save is left alone, and tried again later and later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

_GRAMS = (3, 2)  # longest first: what followed a longer match is likelier to follow again
_PAUSE_TOKENS_MIN, _PAUSE_TOKENS_MAX = 16, 1024


@dataclass(slots=True)
class Lookup:
    """Where each run of tokens ended last, over `reference` and then the sequence; grows as the sequence does."""

    reference: list[int] = field(default_factory=list)
    _ends: dict[tuple[int, ...], int] = field(default_factory=dict)
    _indexed: int = 0

    def propose(self, tokens: list[int], count: int) -> tuple[int, ...]:
        """Up to `count` tokens that may follow; none where the last two never stood together before."""
        text = self.reference + tokens if self.reference else tokens
        for end in range(max(self._indexed, 1), len(text)):  # a run that ends the text has no continuation yet
            for size in _GRAMS:
                if size <= end:
                    self._ends[tuple(text[end - size : end])] = end
        self._indexed = len(text)
        for size in _GRAMS:
            found = self._ends.get(tuple(text[-size:])) if len(text) > size else None
            if found is not None:
                period = len(text) - found  # a loop is taken to go on
                return tuple(text[found + index % period] for index in range(count))
        return ()


@dataclass(slots=True)
class Speculation:
    """One sequence's drafts: how long they are, how they fare, and when the next may be tried.

    `rate` is a moving average of how often a drafted token is accepted where those before it were.
    """

    lookup: Lookup
    tokens_max: int
    rate: float = 0.7
    _pause: int = 0
    _pause_next: int = _PAUSE_TOKENS_MIN

    def draft(self, tokens: list[int], room: int, cost: Callable[[int], float]) -> tuple[int, ...]:
        """The tokens to verify after `tokens`, at most `room`; `cost` is the time of a step with so many more rows, in
        times of one with none."""
        if self._pause > 0:
            self._pause -= 1
            return ()
        counts = [count for count in (1, 2, 4, 8, 16, 32, self.tokens_max) if count <= min(self.tokens_max, room)]
        if not counts:
            return ()
        gain, count = max((self.expected(count) / cost(count), count) for count in counts)
        if gain <= 1.0:
            self._rest()
            return ()
        return self.lookup.propose(tokens, count)

    def expected(self, count: int) -> float:
        """Tokens that a step with a draft of that length is expected to give."""
        return sum(self.rate**accepted for accepted in range(count + 1))

    def observe(self, drafted: int, accepted: int) -> None:
        """Learn from a verified draft."""
        for _ in range(accepted):
            self.rate += 0.1 * (1.0 - self.rate)
        if accepted == drafted:
            self._pause_next = _PAUSE_TOKENS_MIN
            return
        self.rate -= 0.2 * self.rate
        if self.rate < 0.1:
            self._rest()

    def _rest(self) -> None:
        self._pause, self._pause_next = self._pause_next, min(_PAUSE_TOKENS_MAX, 2 * self._pause_next)
        self.rate = max(self.rate, 0.6)  # the next try is judged by what it brings
