"""Speculation: guess the next tokens, verify them all in one step (arXiv:2211.17192).

Guesses come from three sources. `TEXT` and `REFERENCE` are looked up: where the last few tokens stood before, in the prompt
and the answer or in a text that came with the request, what followed them then is proposed (prompt lookup decoding).
`MODEL` is asked of a smaller model (see `draft_model`). Knows token ids and timings, no model. Invariants: a draft never
changes an answer, only how many steps it takes, because each position's token is drawn from the model's own distribution
and a draft only decides how far one step may go; a source whose drafts cost one sequence more time than they save is left
alone there, and tried again later and later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum

_GRAMS = (3, 2)  # longest first: what followed a longer match is likelier to follow again
_PAUSE_TOKENS_MIN, _PAUSE_TOKENS_MAX = 16, 1024
_LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
RATE_AT_FIRST = 0.7


class Source(StrEnum):
    """Where a draft comes from."""

    TEXT = "text"
    REFERENCE = "reference"
    MODEL = "model"


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens to verify; of the draft model only how many are `wanted` of it."""

    source: Source
    tokens: tuple[int, ...] = ()
    wanted: int = 0

    def after(self, count: int) -> Draft | None:
        """What is left without the first `count` tokens."""
        return replace(self, tokens=self.tokens[count:]) if len(self.tokens) > count else None


Cost = Callable[[int], float]
"""The time of a step with so many guessed tokens (making them included), in times of one with none; infinite where that is
not known and the next step should tell."""


@dataclass(slots=True)
class Lookup:
    """Where each run of tokens ended last, over `reference` and then the sequence; grows as the sequence does."""

    reference: list[int] = field(default_factory=list)
    _ends: dict[tuple[int, ...], int] = field(default_factory=dict)
    _indexed: int = 0

    def find(self, tokens: list[int]) -> int | None:
        """Where, in the reference and `tokens`, what may follow `tokens` begins; None where the last two never stood
        together before."""
        text = self._text(tokens)
        for end in range(max(self._indexed, 1), len(text)):  # a run that ends the text has no continuation yet
            for size in _GRAMS:
                if size <= end:
                    self._ends[tuple(text[end - size : end])] = end
        self._indexed = len(text)
        for size in _GRAMS:
            found = self._ends.get(tuple(text[-size:])) if len(text) > size else None
            if found is not None:
                return found
        return None

    def follow(self, tokens: list[int], found: int, count: int) -> tuple[int, ...]:
        """The `count` tokens from there on."""
        text = self._text(tokens)
        period = len(text) - found  # a loop is taken to go on
        return tuple(text[found + index % period] for index in range(count))

    def _text(self, tokens: list[int]) -> list[int]:
        return self.reference + tokens if self.reference else tokens


@dataclass(slots=True)
class Fortune:
    """How one source's drafts fare in one sequence. `rate` is a moving average of how often a drafted token is accepted
    where those before it were."""

    rate: float = RATE_AT_FIRST
    _pause: int = 0
    _pause_next: int = _PAUSE_TOKENS_MIN

    @property
    def rests(self) -> bool:
        """Whether it is to be left alone for now; asked once for each step."""
        self._pause = max(0, self._pause - 1)
        return self._pause > 0

    def best(self, room: int, cost: Cost) -> tuple[float, int]:
        """The length at which a draft gains most, and the gain: tokens per time, in times of plain decoding's."""
        return max((self.expected(count) / cost(count), count) for count in (*_LENGTHS, room) if count <= room)

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
            self.rest()

    def rest(self) -> None:
        """Leave it alone, for longer than last time."""
        self._pause, self._pause_next = self._pause_next, min(_PAUSE_TOKENS_MAX, 2 * self._pause_next)
        self.rate = max(self.rate, 0.6)  # the next try is judged by what it brings


@dataclass(slots=True)
class Speculation:
    """One sequence's drafts: what is proposed next, from where, and how much of it."""

    lookup: Lookup
    tokens_max: int
    fortunes: dict[Source, Fortune] = field(default_factory=lambda: {source: Fortune() for source in Source})

    def draft(
        self, tokens: list[int], room: int, cost: Cost, model_room: int = 0, model_cost: Cost = float
    ) -> Draft | None:
        """What to verify after `tokens`: the best of what is on offer, at most `room` tokens, `model_room` of the draft
        model's; None where nothing is worth its `cost`."""
        best, gain = None, 1.0
        found = self.lookup.find(tokens)
        if found is not None and min(room, self.tokens_max) > 0:
            source = Source.REFERENCE if found < len(self.lookup.reference) else Source.TEXT
            offered = self._weigh(source, min(room, self.tokens_max), cost)
            if offered is not None and offered[0] > gain:
                gain = offered[0]
                best = Draft(source, self.lookup.follow(tokens, found, offered[1]))
        if min(room, model_room, self.tokens_max) > 0:
            offered = self._weigh(Source.MODEL, min(room, model_room, self.tokens_max), model_cost)
            if offered is not None and offered[0] > gain:
                best = Draft(Source.MODEL, wanted=offered[1])
        return best

    def observe(self, source: Source, drafted: int, accepted: int) -> None:
        """Learn from a verified draft."""
        self.fortunes[source].observe(drafted, accepted)

    def _weigh(self, source: Source, room: int, cost: Cost) -> tuple[float, int] | None:
        """What a draft of that source gains, at which length; a source that would lose rests."""
        fortune = self.fortunes[source]
        if fortune.rests:
            return None
        gain, count = fortune.best(room, cost)
        if 0.0 < gain <= 1.0:
            fortune.rest()
        return gain, count
