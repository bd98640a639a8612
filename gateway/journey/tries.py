"""Stages 8 and 9 of the journey: try the deployments of an alias, then those of its fallbacks.

Invariants: failover is possible until the first byte with content has left for a client, and after
it another deployment goes on with the text or the stream ends with an error; no request makes more
than TRIES_MAX tries. Three objects with one method each help, each called from one line: `Race`
asks a second deployment beside a slow first one, `Rescue` goes on with an answer that broke off,
and `Fallbacks` asks the next alias.
"""

import asyncio
import random
import time

import msgspec

from gateway.accounts.row import VERIFY
from gateway.backends.base import (
    BackendDenied,
    BackendError,
    BackendRejected,
    BackendTimeout,
    BackendTooLong,
    BackendUnavailable,
    BackendUnfit,
)
from gateway.backends.refusals import from_backend
from gateway.deployments.alias import OUTPUT_TOO_LONG, Alias, no_route
from gateway.deployments.deployment import Deployment
from gateway.deployments.fleet import Fleet
from gateway.exceptions import fresh
from gateway.journey.attempt import TRIES_MAX, begin, is_translated, reworded
from gateway.journey.flight import Flight
from gateway.journey.hedge import Race
from gateway.journey.outcomes import Rejection
from gateway.journey.queue import note_route, routed
from gateway.journey.rescue import Rescue
from gateway.wire.errors import ApiError, BudgetExceeded, Unavailable, Upstream, UpstreamDenied, last_to_reset
from policies import Demand, Route

_STARTING_POLL_S = 0.1
_STARTING_AWAITED_S = 60.0  # where no other deployment can answer
_ATTEMPTS_MAX = 3  # after so many, no other round over all deployments begins
_PAUSE_BEFORE_RETRY_S = 0.2
_PAUSE_MAX_S = 2.0
_RETRIES_OF_FIRST_MAX = 2
_PAUSE_S = 0.1


class Fallbacks:
    """An alias, and the aliases that answer where it cannot, in their order."""

    def __init__(self, fleet: Fleet, flight: Flight) -> None:
        self._fleet = fleet
        self._flight = flight
        self._left = list(flight.generation.alias.settings.fallbacks)

    async def run(self) -> ApiError | None:
        """Fill the flight. Returns the error, if no alias could.

        A failure that a retry may mend comes before others, the alias' own before its fallbacks'.
        """
        flight, generation, error = self._flight, self._flight.generation, None
        while True:
            try:
                await Tries(flight).run(is_last=not self._left)
                return None
            except ApiError as failure:
                latest = fresh(failure)
            if error is None or (_is_permanent(error) and not _is_permanent(latest)):
                error = latest
            answered = generation.answered
            if flight.chunks or not _may_fall_back(latest):
                return latest if flight.chunks or not answered.fallbacks else error
            alias = self._next()
            if alias is None:
                return error
            rejection = Rejection(answered.serving.name, latest.error_code or latest.type)
            generation.answered = msgspec.structs.replace(
                answered, serving=alias, fallbacks=(*answered.fallbacks, rejection)
            )

    def _next(self) -> Alias | None:
        """The next fallback that may answer this request; None if there is none."""
        identity, turn = self._flight.generation.identity, self._flight.generation.turn
        while self._left:
            name = self._left.pop(0)
            try:
                alias = self._fleet.alias(name)
                alias.allow(identity.key.models, name)
                alias.check(turn.body, turn.demand, turn.kind)
            except ApiError:
                continue
            if not (identity.has_hard_money and alias.unpriced_for(turn.demand)):
                return alias
        return None


class Tries:
    """The tries of one request at the deployments of one alias, in rounds over all of them."""

    def __init__(self, flight: Flight) -> None:
        self._flight = flight
        self._generation = flight.generation
        self._serving = flight.generation.answered.serving
        self._denials: dict[str, str] = {}  # messages of permanent refusals, by the deployment's name
        self._done_with: frozenset[str] = frozenset()  # deployments that a retry cannot help
        self._failed: tuple[Deployment, BackendError] | None = None  # the failure that the client would get
        self._raced: frozenset[str] = frozenset()  # the deployment that was asked beside the first

    async def run(self, *, is_last: bool) -> None:
        """Fill the flight: try each deployment until one answers; after a pause, try again.

        `is_last`: no fallback is left. Raises ApiError if no deployment answers, or if one fails
        whose answer has begun to leave.
        """
        route = await self._first_route(is_last=is_last)
        while route.ranked:
            if await self._round(route):
                return
            turn = self._generation.turn
            is_over = turn.passage is not None or turn.arrival.operation == VERIFY  # may be done; a request waits
            if is_over or self._failed is None or self._done_with.issuperset(self._serving.deployments):
                break
            latest, failure = self._failed
            pause_s = pause_before_retry(failure, len(self._generation.answered.tries))
            if pause_s is None:
                if isinstance(failure, BackendTimeout):
                    latest.note_timeout(self._generation.turn.demand.prompt_tokens)
                break
            await asyncio.sleep(pause_s)
            route = await routed(self._flight, self._done_with)
        raise self._error()

    async def _first_route(self, *, is_last: bool) -> Route:
        """8. The deployments in order; waits for one that is starting if no other can answer.

        Where a fallback is left (`is_last` is false) it waits for none. Raises ApiError.
        """
        generation, alias = self._generation, self._serving
        waits_until = time.perf_counter() + _STARTING_AWAITED_S
        while True:
            route = await routed(self._flight)
            note_route(generation, route)
            if route.ranked or not (is_last and alias.is_starting and time.perf_counter() < waits_until):
                break
            await asyncio.sleep(_STARTING_POLL_S)  # a late answer is better than an error
        if not route.ranked:
            turn, names = generation.turn, ("max_tokens", "max_completion_tokens")
            is_response = turn.arrival.operation == "responses"
            length = "max_output_tokens" if is_response else names["max_tokens" not in turn.body]
            raise no_route(route, turn.kind.prompt, length)
        return route

    async def _round(self, route: Route) -> bool:
        """Try each deployment once; returns True if one answered.

        A failure that a retry may mend comes before a permanent refusal. Raises ApiError if no
        other deployment can take over: the answer has begun to leave, or the request is at fault.
        """
        generation, tried, is_first = self._generation, self._done_with, True
        while route.ranked and len(generation.answered.tries) < TRIES_MAX:
            best = route.ranked[0]
            deployment = self._serving.deployments[best.name]
            is_covered = await generation.holds.cover(generation.answered, deployment)
            if not is_covered:
                self._done_with |= {best.name}
                tried |= {best.name}
            if not is_covered or deployment.slots.is_full:  # since the route was made
                await deployment.slots.ask()
                route = await routed(self._flight, tried)
                continue
            is_alone, waited_s = len(route.ranked) == 1, 0.0
            failure = await self._try(deployment, best.why, is_alone=is_alone)
            while is_first and failure is not None and (pause_s := self._pause_for_first(failure, waited_s)):
                await asyncio.sleep(pause_s)
                waited_s += pause_s
                failure = await self._try(deployment, best.why, is_alone=is_alone)
            if failure is None:
                return True
            is_permanent = isinstance(failure, BackendDenied | BackendUnfit)
            is_over = is_permanent or failure.is_final
            if isinstance(failure, BackendDenied):
                self._denials[best.name] = failure.message
            if is_over or generation.answered.progress.has_begun:
                self._done_with |= {best.name} | self._raced
            if is_first or self._failed is None or not is_permanent:
                self._failed = deployment, failure
            is_first = False
            tried |= {best.name} | self._raced
            route = await routed(self._flight, tried)
        return False

    def _pause_for_first(self, failure: BackendError, waited_s: float) -> float | None:
        """Seconds until the first choice is asked again; None where the next one is asked."""
        answered = self._generation.answered
        is_final = isinstance(failure, BackendDenied | BackendRejected | BackendTimeout) or failure.is_final
        tries = len(answered.tries)
        if is_final or answered.progress.has_begun or tries > _RETRIES_OF_FIRST_MAX:
            return None
        pause_s = failure.retry_after_s if failure.retry_after_s is not None else _PAUSE_S * 2**tries
        pause_s = 1.01 * pause_s + 0.01  # a deployment that named a time rests until it
        return pause_s if waited_s + pause_s <= self._serving.settings.retry_first_ms / 1000.0 else None

    def _error(self) -> ApiError:
        """The client's error, after the last try."""
        if self._failed is None:
            return last_to_reset(self._generation.holds.refusals.values()) or Unavailable(
                "A budget has no room for another deployment", code="no_deployment_available"
            )
        failure = self._failed[1]
        if not isinstance(failure, BackendDenied) or len(self._denials) == 1:
            return from_backend(failure)
        return UpstreamDenied("; ".join(f"{name}: {message}" for name, message in self._denials.items()))

    async def _try(self, deployment: Deployment, why: str, *, is_alone: bool) -> BackendError | None:
        flight, generation = self._flight, self._generation
        demand = generation.answered.demand
        call = await begin(flight, deployment, why, is_alone=is_alone)
        if call is None:
            return BackendUnavailable("Another request is trying whether this deployment is back")
        slow_ms = None
        if self._serving.settings.hedge_cost_max and call.request.is_stream and not is_alone and self._failed is None:
            slow_ms = deployment.estimate.ttft_p95_ms(demand.prompt_tokens + call.progress.ahead_tokens)
        if slow_ms is None:
            failure = await call.run(flight.extend)
        else:
            race = Race(flight, self._done_with)
            call, failure = await race.run(call, slow_ms)
            self._raced = race.beside
        if isinstance(failure, BackendRejected) and (dialect := reworded(call, failure, generation)) is not None:
            again = await begin(flight, call.deployment, why, is_alone=is_alone, dialect=dialect)
            if again is not None:
                call, failure = again, await again.run(flight.extend)
        if failure is None:
            return None
        if isinstance(failure, BackendTooLong):
            window = call.deployment.learn_window(failure, demand)
            if window is not None:
                longer = _longer(generation.answered.demand, window)
                generation.answered = msgspec.structs.replace(generation.answered, demand=longer)
        elif isinstance(failure, BackendRejected) and not isinstance(failure, BackendUnfit):
            if not is_translated(call, generation.turn):
                raise from_backend(failure) from failure
            failure = BackendUnfit(failure.message, detail=failure.detail, status=failure.status, body=failure.body)
        if not call.progress.has_begun:
            return failure
        if flight.has_left and not isinstance(failure, BackendRejected | BackendDenied):
            rescue = Rescue(flight, self._done_with)
            if await rescue.run(call.deployment):
                return None
            self._done_with = rescue.done_with
        if not flight.restart(from_backend(failure)):
            raise from_backend(failure) from failure
        generation.answered = msgspec.structs.replace(generation.answered, seams=())
        return failure


def _longer(demand: Demand, context_tokens: int) -> Demand:
    """`demand` of a request that is longer than a context of `context_tokens`."""
    output = demand.output_tokens_max if demand.is_output_asked else 1
    longer = max(demand.prompt_tokens_min or 0, context_tokens - output + 1)
    return msgspec.structs.replace(demand, prompt_tokens_min=longer)


def pause_before_retry(failure: BackendError, attempts: int) -> float | None:
    """Seconds to wait before another round over all deployments; None where a round is pointless."""
    if attempts >= _ATTEMPTS_MAX or isinstance(failure, BackendTimeout):
        return None
    pause_s = failure.retry_after_s if failure.retry_after_s is not None else _PAUSE_BEFORE_RETRY_S * 2**attempts
    return pause_s * random.uniform(1.0, 1.25) if pause_s <= _PAUSE_MAX_S else None


_FALLS_BACK = frozenset(
    f"""context_length_exceeded {OUTPUT_TOO_LONG} no_deployment_available no_deployment_within_limits
    deployment_full residency_not_allowed""".split()
)


def _may_fall_back(error: ApiError) -> bool:
    """Whether an alias cannot answer: it is down, its contexts are too small, it is too dear, or
    the budgets of its deployments are spent.
    """
    is_upstream = isinstance(error, Upstream) and error.raw_body is None
    return error.error_code in _FALLS_BACK or is_upstream or isinstance(error, BudgetExceeded)


def _is_permanent(error: ApiError) -> bool:
    return error.http_status in (400, 424)
