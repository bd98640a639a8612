"""Stage 9 of the journey: try deployments in the order of the route, from request to last chunk.

Invariants: failover is possible until the first byte with content has left for a client, and after
it another deployment goes on with the text or the stream ends with an error; the
breaker records the outcome of every call that was begun, exactly once; the backend's stream is
closed on every exit; a try that has not begun leaves no trace in an answer; no request makes more
than TRIES_MAX tries.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable

from gateway.backends.base import (
    BackendBroken,
    BackendDenied,
    BackendError,
    BackendRejected,
    BackendRequest,
    BackendTimeout,
    BackendTooLong,
    BackendUnavailable,
    BackendUnfit,
)
from gateway.backends.refusals import from_backend
from gateway.deployments.deployment import Deployment
from gateway.deployments.progress import Progress
from gateway.journey.flight import Flight
from gateway.journey.generation import Generation
from gateway.journey.hedge import Race
from gateway.journey.queue import routed
from gateway.journey.rescue import PREFILL, Joint, Seam, ended_by_length, is_used_up, said_in
from gateway.wire.errors import ApiError, DeploymentFull, Unavailable, UpstreamDenied, last_to_reset
from gateway.wire.types import Chunk
from policies import Demand, Route
from policies.breaker import Asker

# a flight keeps its answer for later readers: an endless one must not take the worker's memory
_ANSWER_BYTES_MAX = 64 << 20

_ATTEMPTS_MAX = 3  # after so many, no other round over all deployments begins
TRIES_MAX = 8
"""The most tries of one request, at all its deployments."""
_PAUSE_BEFORE_RETRY_S = 0.2
_PAUSE_MAX_S = 2.0
_RETRIES_OF_FIRST_MAX = 2
_PAUSE_S = 0.1
_GOES_ON_WITHIN_S = 10.0  # a client in the middle of an answer does not wait for a place as long as one before it

Cover = Callable[[Generation, Deployment], Awaitable[bool]]
"""Holds what a further try at a deployment may cost; False where a budget has no room for it."""


class Tries:
    """The tries of one request at the deployments of its alias."""

    def __init__(self, flight: Flight, cover: Cover) -> None:
        self._flight = flight
        self._generation = flight.generation
        self._cover = cover
        self._denials: dict[str, str] = {}  # messages of permanent refusals, by the deployment's name
        self._done_with: frozenset[str] = frozenset()  # deployments that a retry cannot help
        self._failed: tuple[Deployment, BackendError] | None = None  # the failure that the client would get
        self._raced: frozenset[str] = frozenset()  # the deployment that was asked beside the first

    async def run(self, route: Route) -> None:
        """Fill the flight: try each deployment of `route` until one answers; after a pause, try
        again.

        Raises ApiError if none answers, or if one fails whose answer has begun to leave.
        """
        while route.ranked:
            if await self._round(route):
                return
            if self._generation.turn.passage is not None:  # it may have been done
                break
            if self._failed is None or self._done_with.issuperset(self._generation.serving.deployments):
                break
            latest, failure = self._failed
            pause_s = _pause_before_retry(failure, self._generation.tries)
            if pause_s is None:
                if isinstance(failure, BackendTimeout):
                    latest.note_timeout(self._generation.turn.demand.prompt_tokens)
                break
            await asyncio.sleep(pause_s)
            route = await routed(self._flight, self._done_with)
        raise self._error()

    async def _round(self, route: Route) -> bool:
        """Try each deployment once; returns True if one answered.

        A failure that a retry may mend comes before a permanent refusal. Raises ApiError if no
        other deployment can take over: the answer has begun to leave, or the request is at fault.
        """
        generation, tried, is_first = self._generation, self._done_with, True
        while route.ranked and generation.tries < TRIES_MAX:
            best = route.ranked[0]
            deployment = generation.serving.deployments[best.name]
            if generation.needs_cover:
                is_covered = await self._cover(generation, deployment)
                if not is_covered:
                    self._done_with |= {best.name}
                    tried |= {best.name}
                if not is_covered or deployment.places.is_full:  # since the route was made
                    route = await routed(self._flight, tried)
                    continue
            failure = await self._try(deployment, best.why, is_alone=len(route.ranked) == 1)
            waited_s = 0.0
            while is_first and failure is not None:
                pause_s = self._pause_for_first(failure, waited_s)
                if pause_s is None:
                    break
                await asyncio.sleep(pause_s)
                waited_s += pause_s
                failure = await self._try(deployment, best.why, is_alone=len(route.ranked) == 1)
            if failure is None:
                return True
            is_permanent = isinstance(failure, BackendDenied | BackendUnfit)
            if isinstance(failure, BackendDenied):
                self._denials[best.name] = failure.message
            if is_permanent or generation.progress.has_begun:
                self._done_with |= {best.name} | self._raced
            if is_first or self._failed is None or not is_permanent:
                self._failed = deployment, failure
            is_first = False
            tried |= {best.name} | self._raced
            route = await routed(self._flight, tried)
        return False

    def _pause_for_first(self, failure: BackendError, waited_s: float) -> float | None:
        """Seconds until the first choice is asked again; None where the next one is asked."""
        generation = self._generation
        is_final = (
            isinstance(failure, BackendDenied | BackendRejected | BackendTimeout) or generation.progress.has_begun
        )
        if is_final or generation.tries > _RETRIES_OF_FIRST_MAX:
            return None
        pause_s = failure.retry_after_s if failure.retry_after_s is not None else _PAUSE_S * 2**generation.tries
        pause_s = 1.01 * pause_s + 0.01  # a deployment that named a time rests until it
        return pause_s if waited_s + pause_s <= generation.serving.settings.retry_first_ms / 1000.0 else None

    def _error(self) -> ApiError:
        """The client's error, after the last try."""
        if self._failed is None:
            return last_to_reset(self._generation.no_room.values()) or Unavailable(
                "A budget has no room for another deployment", code="no_deployment_available"
            )
        failure = self._failed[1]
        if not isinstance(failure, BackendDenied) or len(self._denials) == 1:
            return from_backend(failure)
        return UpstreamDenied("; ".join(f"{name}: {message}" for name, message in self._denials.items()))

    async def _try(self, deployment: Deployment, why: str, *, is_alone: bool) -> BackendError | None:
        flight, generation = self._flight, self._generation
        demand = generation.demand
        generation.why = why
        if not await self._is_admitted(deployment):
            return BackendUnavailable("Another request is trying whether this deployment is back")
        request, progress = self._begin(deployment, is_alone=is_alone)
        slow_ms = None
        if generation.serving.settings.hedge_cost_max and request.is_stream and not is_alone and self._failed is None:
            slow_ms = deployment.estimate.ttft_p95_ms(demand.prompt_tokens)
        if slow_ms is not None:
            deployment, progress, failure = await self._raced_with(deployment, request, progress, slow_ms)
        else:
            failure = await attempt(deployment, request, progress, flight.extend, demand=demand, flight=flight)
        if failure is None:
            return None
        if isinstance(failure, BackendTooLong):
            window = deployment.learn_window(failure, demand)
            if window is not None:
                generation.must_fit(window)
        elif isinstance(failure, BackendRejected) and not isinstance(failure, BackendUnfit):
            raise from_backend(failure) from failure
        if not progress.has_begun:
            return failure
        is_kept = isinstance(failure, BackendRejected | BackendDenied)
        if flight.has_left and not is_kept and await self._went_on(deployment):
            return None
        if not flight.restart(from_backend(failure)):
            raise from_backend(failure) from failure
        generation.seams.clear()
        return failure

    def _begin(self, deployment: Deployment, *, is_alone: bool) -> tuple[BackendRequest, Progress]:
        """As `Generation.begin_try`, for a deployment that has a place for the call."""
        try:
            return self._generation.begin_try(deployment, is_alone=is_alone)
        except BaseException:  # a bug must not keep the place
            deployment.health.cancelled(self._asker(deployment))
            deployment.end(self._generation.identity.team.id)
            raise

    def _asker(self, deployment: Deployment) -> Asker:
        return deployment.asker(self._generation.demand, self._generation.turn.arrival.request_id)

    async def _is_admitted(self, deployment: Deployment) -> bool:
        """Whether `deployment` has a place for a call, which no other worker's probe forbids."""
        asker, team = self._asker(deployment), self._generation.identity.team.id
        if not deployment.begin(asker, team):
            return False
        return not deployment.health.is_open(asker) or await deployment.may_probe(asker, team)

    async def _raced_with(
        self, first: Deployment, request: BackendRequest, progress: Progress, slow_ms: float
    ) -> tuple[Deployment, Progress, BackendError | None]:
        """Try `first`, and a second deployment beside it where `first` has no content after
        `slow_ms`.

        Returns the one that answered, or `first`, with its failure.
        """
        flight, generation, serving = self._flight, self._generation, self._generation.serving
        prompt_tokens = generation.turn.demand.prompt_tokens
        race = Race(flight.extend, generation.answers)
        self._enter(race, first, request, progress)
        if not await race.is_slow(slow_ms / 1000.0):
            ended, failure = await race.ended()
            return ended.deployment, ended.progress, failure
        second, expected = None, 0
        try:
            ranked = flight.route(self._done_with | {first.name}).ranked
            if ranked and generation.tries < TRIES_MAX:
                second, expected = serving.deployments[ranked[0].name], ranked[0].cost_microusd
            if second is not None and await self._may_hedge(race, second, expected):
                self._raced = frozenset({second.name})
                self._enter(race, second, *self._begin(second, is_alone=False))
                generation.hedging(second)
            else:
                second = None
            runners = race.runners
            ended, failure = await race.ended()
        except BaseException:
            await race.stop()
            raise
        finally:
            if second is not None:
                serving.hedges.give_back(expected)
        if second is not None:
            others = [one.progress for one in runners if one is not ended]
            generation.hedged(ended.progress if ended.progress.has_begun else None, others)
            if ended.deployment is second and progress.attempt is not None:
                first.estimate.observe_timeout(progress.attempt.duration_ms, prompt_tokens)
        return ended.deployment, ended.progress, failure

    def _enter(self, race: Race, deployment: Deployment, request: BackendRequest, progress: Progress) -> None:
        demand, flight = self._generation.demand, self._flight
        race.enter(
            deployment,
            progress,
            lambda deliver: attempt(deployment, request, progress, deliver, demand=demand, flight=flight),
        )

    async def _may_hedge(self, race: Race, second: Deployment, expected: int) -> bool:
        """Whether `second`, which would cost `expected`, may be asked now; then it has a place for it."""
        generation, hedges = self._generation, self._generation.serving.hedges
        if second.health.is_open(self._asker(second)) or generation.cut_at is not None:  # a budget is nearly used up
            return False
        if not hedges.take(expected, generation.serving.settings.hedge_cost_max):
            return False
        team = generation.identity.team.id
        if await self._cover(generation, second) and race.is_open and second.begin(self._asker(second), team):
            return True
        hedges.give_back(expected)
        return False

    async def _went_on(self, broken: Deployment) -> bool:
        """Whether other deployments went on with an answer that broke off, up to its end."""
        flight, generation, turn = self._flight, self._generation, self._generation.turn
        if generation.serving.settings.rescue != "continue":
            return False
        while generation.tries < TRIES_MAX and (said := await said_in(turn, flight.chunks)) is not None:
            self._done_with |= {broken.name}
            if is_used_up(turn.body, said):
                seam = Seam(broken.name, broken.name, len(said.text))
                flight.extend([ended_by_length(said, seam)])
                generation.seams.append(seam)
                return True
            try:
                route = await routed(flight, self._done_with, PREFILL, _GOES_ON_WITHIN_S)
            except DeploymentFull:
                return False
            if not route.ranked:
                return False
            best = route.ranked[0]
            deployment = generation.serving.deployments[best.name]
            is_covered = await self._cover(generation, deployment)
            if is_covered and deployment.places.is_full:  # since the route was made
                continue
            if not is_covered or not await self._is_admitted(deployment):
                self._done_with |= {best.name}
                continue
            generation.why = best.why
            seam = Seam(broken.name, deployment.name, len(said.text))
            joint = Joint(said, seam, turn.body, is_exact=deployment.settings.engine is not None)

            def deliver(chunks: list[Chunk], joint: Joint = joint) -> bool:
                made, is_over = joint.take(chunks)
                if made:
                    flight.extend(made)
                return is_over

            request, progress = generation.begin_try(deployment, is_alone=len(route.ranked) == 1, said=said)
            generation.seams.append(seam)
            failure = await attempt(deployment, request, progress, deliver, demand=generation.demand, flight=flight)
            if failure is None:
                generation.whole_usage = joint.usage
                return True
            broken = deployment
        return False


def _pause_before_retry(failure: BackendError, attempts: int) -> float | None:
    """Seconds to wait before another round over all deployments; None where a
    round is pointless.
    """
    if attempts >= _ATTEMPTS_MAX or isinstance(failure, BackendTimeout):
        return None
    pause_s = failure.retry_after_s if failure.retry_after_s is not None else _PAUSE_BEFORE_RETRY_S * 2**attempts
    return pause_s * random.uniform(1.0, 1.25) if pause_s <= _PAUSE_MAX_S else None


async def attempt(
    deployment: Deployment,
    request: BackendRequest,
    progress: Progress,
    deliver: Callable[[list[Chunk]], bool | None],
    *,
    demand: Demand,
    flight: Flight | None = None,
) -> BackendError | None:
    """Send `request` to `deployment`, whose `begin` has admitted the call.

    `deliver` gets its chunks from the first with content on, and returns True where these end the
    answer, as a whole one does. No more is read while all readers of `flight` are far behind.
    Returns the failure, or None if the answer is complete; `progress.has_begun` tells whether
    chunks were delivered before it.
    """
    answer, asker = deployment.backend.stream(request), deployment.asker(demand, request.request_id)
    held: list[Chunk] = []
    is_probe = deployment.health.is_open(asker)
    deployment.answers.add(answer)
    try:
        async for chunks in answer:
            progress.add(chunks)
            if progress.size_bytes > _ANSWER_BYTES_MAX:
                raise BackendBroken("The deployment's answer is too long", detail=f"over {_ANSWER_BYTES_MAX} bytes")
            # decision: commit-on-content
            held += chunks
            if progress.has_begun:
                if is_probe:
                    deployment.health.accepted(asker)
                if deliver(held) or progress.is_whole:
                    break
                held.clear()
                if flight is not None and (caught_up := flight.held_up()) is not None:
                    await progress.apart(caught_up)
    except BackendError as error:
        deployment.failed(error, asker)
        is_refusal, is_denial = isinstance(error, BackendRejected), isinstance(error, BackendDenied)
        progress.end(error.detail[:300], is_refusal=is_refusal, is_denial=is_denial)
        return error
    except asyncio.CancelledError:
        deployment.health.cancelled(asker)
        progress.abandon()
        raise
    except Exception:
        deployment.health.cancelled(asker)  # a bug here is no failure of the deployment
        raise
    finally:
        try:
            await answer.aclose()
        finally:
            deployment.answers.discard(answer)
            deployment.end(flight.generation.identity.team.id if flight is not None else 0)
    progress.complete()
    deployment.succeeded(progress, demand, asker)
    return None
