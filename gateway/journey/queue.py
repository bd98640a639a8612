"""Before stage 9 of the journey: wait for a place where every deployment that could answer is full.

A request waits in the queues of all of these, and takes the first place. Invariants: a request that
stops waiting leaves every queue, and passes a call on that it does not use; none waits longer than
`wait_max_s`, and none where a deployment has room.
"""

import asyncio
import time

from gateway.deployments.places import Places, Ticket
from gateway.journey.flight import Flight
from gateway.wire.errors import DeploymentFull, sentence
from policies import Cause, Route

WAIT_MAX_S = 60.0


async def routed(
    flight: Flight,
    tried: frozenset[str] = frozenset(),
    needs: frozenset[str] = frozenset(),
    wait_max_s: float = WAIT_MAX_S,
) -> Route:
    """The ranking of the deployments without those in `tried`; `needs` as in `Flight.route`.

    It waits where all that are left are full. Raises DeploymentFull if a queue is full, or the wait
    too long.
    """
    route = flight.route(tried, needs)
    if route.ranked or not _full(route):
        return route
    began, called = time.perf_counter(), None
    try:
        while not route.ranked and (names := _full(route)):
            left_s = began + wait_max_s - time.perf_counter()
            places = [flight.generation.serving.deployments[name].places for name in names]
            called = await _call(flight.generation.identity.team.id, places, left_s, called) if left_s > 0 else None
            if called is None:
                if flight.generation.route is None:
                    flight.generation.routed(route)
                raise _too_many(route)
            route = flight.route(tried, needs)
        return route
    finally:
        flight.generation.queued_ms += (time.perf_counter() - began) * 1000.0
        if called is not None and not (route.ranked and _of(flight, route.ranked[0].name) is called):
            called.call()


def _full(route: Route) -> list[str]:
    return [rejected.name for rejected in route.rejected if rejected.cause is Cause.FULL]


def _of(flight: Flight, name: str) -> Places:
    return flight.generation.serving.deployments[name].places


async def _call(team: int, places: list[Places], within_s: float, missed: Places | None) -> Places | None:
    """The place that calls first; None if no queue has room, or none calls `within_s`."""
    ticket = Ticket(team, asyncio.get_running_loop().create_future())
    joined = [one for one in places if one.join(ticket, is_first=one is missed)]
    try:
        if joined:
            await asyncio.wait([ticket.called], timeout=within_s)
        return ticket.called.result() if ticket.called.done() else None
    except asyncio.CancelledError:
        if ticket.called.done() and (place := ticket.called.result()) is not None:
            place.call()
        raise
    finally:
        for one in joined:
            one.leave(ticket)


def _too_many(route: Route) -> DeploymentFull:
    words = f"{sentence(route.refusal)}; the queue for a place is full or did not move: try again later"
    return DeploymentFull(words)
