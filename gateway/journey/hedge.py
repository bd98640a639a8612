"""Two deployments at one request: the second is asked where the first is slow, and the quicker
answers.

The first try that brings content gives the answer; the other is cancelled at that moment, down to
its socket. After Dean and Barroso, "The Tail at Scale" (Communications of the ACM 56(2), 2013):
hedged requests. Knows no routes and no budgets. Invariants: chunks of one try alone are delivered;
when `ended` returns, or is cancelled, no try is running.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from gateway.backends.base import BackendError
from gateway.deployments.deployment import Deployment
from gateway.deployments.progress import Progress
from gateway.wire.types import Chunk

Deliver = Callable[[list[Chunk]], bool | None]
Attempt = Callable[[Deliver], Coroutine[Any, Any, BackendError | None]]


class Hedged(msgspec.Struct, frozen=True):
    """A second deployment that was asked beside a slow first one.

    `outcome`: `won` (it answered), `lost`, or `failed` (neither answered). `cost_microusd` is what
    the one that did not answer cost.
    """

    deployment: str
    outcome: str
    cost_microusd: int = 0


class Runner(msgspec.Struct, frozen=True):
    """One try of a race."""

    deployment: Deployment
    progress: Progress
    task: "asyncio.Task[BackendError | None]"


class Race:
    """The tries of one request that run at once.

    `deliver` gets the winner's chunks; before the first of them `won` is called with its progress.
    """

    def __init__(self, deliver: Deliver, won: Callable[[Progress], None]) -> None:
        self.runners: list[Runner] = []
        self.winner: Runner | None = None
        self._deliver = deliver
        self._won = won

    def enter(self, deployment: Deployment, progress: Progress, attempt: Attempt) -> None:
        """Begin a try."""

        def deliver(chunks: list[Chunk]) -> bool | None:
            if self.winner is None:
                self._win(progress)
            elif self.winner.progress is not progress:
                raise asyncio.CancelledError  # as it will be in this tick
            return self._deliver(chunks)

        self.runners.append(Runner(deployment, progress, asyncio.create_task(attempt(deliver))))

    def _win(self, progress: Progress) -> None:
        for runner in self.runners:
            if runner.progress is progress:
                self.winner = runner
            else:
                _cancel(runner.task)
        self._won(progress)

    async def is_slow(self, after_s: float) -> bool:
        """Whether the first try has neither content nor an end after so many seconds."""
        try:
            await asyncio.wait([self.runners[0].task], timeout=after_s)
        except BaseException:
            await self.stop()
            raise
        return self.is_open

    @property
    def is_open(self) -> bool:
        """Whether the first try has neither content nor an end."""
        return self.winner is None and not self.runners[0].task.done()

    async def ended(self) -> tuple[Runner, BackendError | None]:
        """The try that answered, or the first one, with its failure, once no try is running."""
        try:
            await asyncio.wait([runner.task for runner in self.runners])
            succeeded = [one for one in self.runners if not one.task.cancelled() and one.task.result() is None]
            found = self.winner or next(iter(succeeded), self.runners[0])
            return found, found.task.result()
        finally:
            await self.stop()

    async def stop(self) -> None:
        """Cancel what is running."""
        tasks = [runner.task for runner in self.runners]
        self.runners = []
        for task in tasks:
            _cancel(task)
        await asyncio.gather(*tasks, return_exceptions=True)


def _cancel(task: "asyncio.Task[BackendError | None]") -> None:
    """Cancel a task after its first step: before it, its deployment would keep the place."""
    asyncio.get_running_loop().call_soon(task.cancel)
