"""Stage 8 of the journey: the ranking of the deployments, and the wait where every one is full.

A request waits in the queues of all that could answer, and takes the first slot. Invariants: a
request that stops waiting leaves every queue, and passes a call on that it does not use; no request
waits longer than `wait_max_s`, or where a deployment has room.
"""

import asyncio
import time
from collections.abc import Mapping

import msgspec

from gateway.deployments.replicas import blocks_of
from gateway.deployments.slots import Slots, Ticket
from gateway.journey.flight import Flight
from gateway.journey.generation import Generation
from gateway.wire.errors import DeploymentFull, sentence
from policies import Cause, Route

WAIT_MAX_S = 60.0
_SAID_FULL_S = 2.0  # as long as a request pauses that was refused itself
_POLL_S = 0.1
_NAMES: frozenset[str] = frozenset()


def ranking(flight: Flight, tried: frozenset[str] = _NAMES, needs: frozenset[str] = _NAMES) -> Route:
    """The current ranking of the deployments for a generation, without those in `tried`.

    `needs` are further capabilities that a deployment needs for it.
    """
    generation, answered = flight.generation, flight.generation.answered
    demand = answered.demand
    if needs:
        demand = msgspec.structs.replace(demand, needs=demand.needs | needs)
    serving = answered.serving
    warm: Mapping[str, int] = generation.looked.warm
    if serving.prefixes is not None:
        warm = warm_at(generation)
        shared = serving.prefixes.shared(generation.blocks or (), demand.prompt_tokens, warm, serving.deployments)
        demand = msgspec.structs.replace(demand, shared=shared)
    return serving.route(demand, warm, flight.remaining_ms(), tried)


def warm_at(generation: Generation) -> Mapping[str, int]:
    """The tokens of the prompt that each deployment has read of late, by its name."""
    serving, looked = generation.answered.serving, generation.looked
    if serving.prefixes is None:
        return looked.warm
    if generation.blocks is None:
        is_salted = any(deployment.settings.is_salted for deployment in serving.deployments.values())
        generation.blocks = blocks_of(generation.turn.body, looked.fingerprint.partition if is_salted else b"")
    return serving.prefixes.warm(generation.blocks, generation.answered.demand.prompt_tokens)


def note_route(generation: Generation, route: Route) -> None:
    """Set the route before the first try, for the record."""
    answered = generation.answered
    model = answered.serving.first_choice_model(generation.turn.demand, warm_at(generation), route)
    generation.answered = msgspec.structs.replace(answered, route=route, first_choice_model=model)


async def routed(
    flight: Flight,
    tried: frozenset[str] = _NAMES,
    needs: frozenset[str] = _NAMES,
    wait_max_s: float = WAIT_MAX_S,
) -> Route:
    """As `ranking`; it waits where all that are left are full.

    Raises DeploymentFull if a queue is full, or the wait too long.
    """
    route = ranking(flight, tried, needs)
    if route.ranked or not _full(route):
        return route
    generation = flight.generation
    deployments = generation.answered.serving.deployments
    began, called = time.perf_counter(), None
    try:
        while not route.ranked and (full := _full(route)):
            left_s = began + wait_max_s - time.perf_counter()
            names = [name for name in full if deployments[name].slots.is_full]
            if not names:  # they said so themselves, and when they will have room
                demand = generation.answered.demand
                rest_s = min([deployments[name].health.rest_s(deployments[name].asker(demand)) for name in full])
                if rest_s > left_s - wait_max_s + _SAID_FULL_S:
                    return route
                await asyncio.sleep(max(rest_s, _POLL_S))
                route = ranking(flight, tried, needs)
                continue
            slots = [deployments[name].slots for name in names]
            called = await _call(generation.identity.team.id, slots, left_s, called) if left_s > 0 else None
            if called is None:
                if generation.answered.route is None:
                    note_route(generation, route)
                words = f"{sentence(route.refusal)}; the queue for a place is full or did not move: try again later"
                raise DeploymentFull(words)
            route = ranking(flight, tried, needs)
        return route
    finally:
        answered = generation.answered
        queued_ms = answered.queued_ms + (time.perf_counter() - began) * 1000.0
        generation.answered = msgspec.structs.replace(answered, queued_ms=queued_ms)
        if called is not None and not (route.ranked and deployments[route.ranked[0].name].slots is called):
            called.call()


def _full(route: Route) -> list[str]:
    return [rejected.name for rejected in route.rejected if rejected.cause is Cause.FULL]


async def _call(team: int, slots: list[Slots], within_s: float, missed: Slots | None) -> Slots | None:
    """The slots that call first; None if no queue has room, or none calls `within_s`."""
    ticket = Ticket(team, asyncio.get_running_loop().create_future())
    joined = [queue for queue in slots if queue.join(ticket, is_first=queue is missed)]
    try:
        if joined:
            await asyncio.wait([ticket.called], timeout=within_s)
        return ticket.called.result() if ticket.called.done() else None
    except asyncio.CancelledError:
        if ticket.called.done() and (called := ticket.called.result()) is not None:
            called.call()
        raise
    finally:
        for queue in joined:
            queue.leave(ticket)
