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

    `accepted` is a moving average of the tokens a draft gained.
    """

    lookup: Lookup
    tokens_max: int
    length: int = 4
    accepted: float = 1.0
    _pause: int = 0
    _pause_next: int = _PAUSE_TOKENS_MIN

    def draft(self, tokens: list[int], room: int, cost: Callable[[int], float]) -> tuple[int, ...]:
        """The tokens to verify after `tokens`, at most `room`; `cost` is the time of a step with so many more rows, in
        times of one with none."""
        if self._pause > 0:
            self._pause -= 1
            return ()
        count = min(self.length, self.tokens_max, room)
        if count < 1:
            return ()
        if 1.0 + self.accepted < cost(count):
            self._rest()
            return ()
        return self.lookup.propose(tokens, count)

    def observe(self, drafted: int, accepted: int) -> None:
        """Learn from a verified draft: longer after a full success, shorter after a failure, none after many."""
        self.accepted += 0.3 * (accepted - self.accepted)
        if accepted == drafted:
            self.length = min(self.tokens_max, 2 * self.length)
            self._pause_next = _PAUSE_TOKENS_MIN
        else:
            self.length = max(1, accepted + 1)
            if self.accepted < 0.25:
                self._rest()

    def _rest(self) -> None:
        self._pause, self._pause_next = self._pause_next, min(_PAUSE_TOKENS_MAX, 2 * self._pause_next)
        self.accepted = max(self.accepted, 1.0)  # the next try is judged by what it brings
