"""Two deployments at one request: the second is asked where the first is slow, and the quicker
answers.

The first try that brings content gives the answer; the other is cancelled at that moment, down to
its socket. After Dean and Barroso, "The Tail at Scale" (Communications of the ACM 56(2), 2013):
hedged requests. Invariants: chunks of one try alone are delivered; when `Race.run` returns, or is
cancelled, no try is running, and the share of hedges that it took is given back.
"""

import asyncio

import msgspec

from gateway.backends.base import BackendError
from gateway.journey.attempt import TRIES_MAX, UpstreamCall, begin
from gateway.journey.flight import Flight
from gateway.journey.outcomes import Hedged
from gateway.journey.queue import ranking
from gateway.wire.types import Chunk


class Race:
    """A slow call, and one at another deployment than those in `excluded` beside it.

    `beside` is the name of that deployment, once it was asked.
    """

    def __init__(self, flight: Flight, excluded: frozenset[str]) -> None:
        self._flight = flight
        self._generation = flight.generation
        self._excluded = excluded
        self._running: dict[UpstreamCall, asyncio.Task[BackendError | None]] = {}
        self._winner: UpstreamCall | None = None
        self._expected_microusd = 0  # of the second call, taken from the share of hedges
        self.beside: frozenset[str] = frozenset()

    async def run(self, first: UpstreamCall, slow_ms: float) -> tuple[UpstreamCall, BackendError | None]:
        """Run `first`, and where it has no content after `slow_ms` a second call beside it.

        Returns the call that answered, or `first`, with its failure.
        """
        try:
            self._enter(first)
            await asyncio.wait([self._running[first]], timeout=slow_ms / 1000.0)
            if self._is_open(first):
                await self._ask_second(first)
            await asyncio.wait(self._running.values())
            complete = [call for call, task in self._running.items() if not task.cancelled() and task.result() is None]
            ended = self._winner or next(iter(complete), first)
            if self.beside:
                self._note_end(first, ended)
            return ended, self._running[ended].result()
        finally:
            for task in self._running.values():
                _cancel(task)
            await asyncio.gather(*self._running.values(), return_exceptions=True)
            self._running = {}
            self._give_back()

    def _give_back(self) -> None:
        """Give back what this race has taken of the share of hedges."""
        self._generation.answered.serving.hedges.give_back(self._expected_microusd)
        self._expected_microusd = 0

    def _is_open(self, first: UpstreamCall) -> bool:
        """Whether the first try has neither content nor an end."""
        return self._winner is None and not self._running[first].done()

    async def _ask_second(self, first: UpstreamCall) -> None:
        """Ask the next deployment, where budgets and the share of hedges have room for it."""
        generation, answered = self._generation, self._generation.answered
        ranked = ranking(self._flight, self._excluded | {first.deployment.name}).ranked
        if not ranked or len(answered.tries) >= TRIES_MAX or generation.holds.cut_at is not None:
            return  # the last: a budget is nearly used up
        second, expected = answered.serving.deployments[ranked[0].name], ranked[0].cost_microusd
        if second.health.is_open(second.asker(answered.demand, first.request.request_id)):
            return
        if not answered.serving.hedges.take(expected, answered.serving.settings.hedge_cost_max):
            return
        self._expected_microusd, call = expected, None
        await second.slots.ask()
        if await generation.holds.cover(answered, second) and self._is_open(first):
            call = await begin(self._flight, second, answered.why, is_alone=False)
        if call is None:
            self._give_back()
            return
        self.beside = frozenset({second.name})
        self._enter(call)
        generation.answered = msgspec.structs.replace(
            generation.answered, hedge=Hedged(second.name, "failed"), beside=(call.progress,)
        )

    def _enter(self, call: UpstreamCall) -> None:
        def deliver(chunks: list[Chunk]) -> None:
            if self._winner is None:
                self._win(call)
            elif self._winner is not call:
                raise asyncio.CancelledError  # as it will be in this tick
            self._flight.extend(chunks)

        self._running[call] = asyncio.create_task(call.run(deliver))

    def _win(self, winner: UpstreamCall) -> None:
        """Cancel the other call; that of `winner` counts as the last try."""
        self._winner = winner
        for call, task in self._running.items():
            if call is not winner:
                _cancel(task)
        answered = self._generation.answered
        tries = tuple(sorted(answered.tries, key=lambda tried: tried.progress is winner.progress))
        self._generation.answered = msgspec.structs.replace(answered, tries=tries, progress=winner.progress)

    def _note_end(self, first: UpstreamCall, ended: UpstreamCall) -> None:
        answered = self._generation.answered
        assert answered.hedge is not None
        is_second, outcome = ended is not first, "failed"
        if ended.progress.has_begun:
            outcome = "won" if is_second else "lost"
        self._generation.answered = msgspec.structs.replace(
            answered,
            hedge=Hedged(answered.hedge.deployment, outcome),
            beside=tuple([call.progress for call in self._running if call is not ended]),
        )
        if is_second and first.progress.attempt is not None:
            prompt_tokens = self._generation.turn.demand.prompt_tokens
            first.deployment.estimate.observe_timeout(first.progress.attempt.duration_ms, prompt_tokens)


def _cancel(task: "asyncio.Task[BackendError | None]") -> None:
    """Cancel a task after its first step: before it, its deployment would keep the slot."""
    asyncio.get_running_loop().call_soon(task.cancel)
