"""Stage 9 of the journey: try deployments in the order of the route, from the request that leaves to the last chunk.

Invariants: failover is free until the first chunk with content has left; the breaker is given the outcome of every call
that was begun, exactly once; the backend's stream is closed on every exit; a try that has not begun leaves no trace in an
answer.
"""

import asyncio
from collections.abc import Callable

from gateway.backends.base import BackendBroken, BackendError, BackendRejected, BackendRequest, BackendTimeout
from gateway.backends.refusals import from_backend
from gateway.deployments.fleet import Deployment, pause_before_retry
from gateway.deployments.progress import Progress
from gateway.journey.flight import Flight
from gateway.wire.types import Chunk
from policies import Route

# a flight keeps its answer for later readers: one that never ends must not take the worker's memory
_ANSWER_BYTES_MAX = 64 << 20


async def stream(flight: Flight, route: Route) -> None:
    """Fill `flight`: try each deployment of `route`, and all of them again after a pause, until one has begun.

    Raises ApiError where none has begun, or where the one that has fails.
    """
    while True:
        latest, failure = await _try_each(flight, route)
        if failure is None:
            return
        pause_s = pause_before_retry(failure, len(flight.generation.attempts))
        if pause_s is None:
            if isinstance(failure, BackendTimeout):
                latest.note_timeout(flight.generation.turn.demand.prompt_tokens)
            raise from_backend(failure)
        await asyncio.sleep(pause_s)
        route = flight.route()
        if not route.ranked:
            raise from_backend(failure)


async def _try_each(flight: Flight, route: Route) -> tuple[Deployment, BackendError | None]:
    """The deployment that was tried last, and why it failed; None where it answered. Raises ApiError where another one can't
    take over: the answer had begun, or the request is at fault."""
    deployments, tried = flight.generation.alias.deployments, frozenset[str]()
    while True:
        best = route.ranked[0]
        deployment = deployments[best.name]
        failure = await _try(flight, deployment, best.why)
        if failure is None:
            return deployment, None
        tried |= {best.name}
        route = flight.route(tried)
        if not route.ranked:
            return deployment, failure


async def _try(flight: Flight, deployment: Deployment, why: str) -> BackendError | None:
    generation = flight.generation
    generation.chosen(why)
    if not deployment.breaker.begin():
        return BackendTimeout("another request is probing this deployment")
    request, progress = generation.begin_try(deployment)
    prompt_tokens = generation.turn.demand.prompt_tokens
    failure = await attempt(deployment, request, progress, flight.extend, prompt_tokens=prompt_tokens)
    if failure is not None and (progress.has_begun or isinstance(failure, BackendRejected)):
        raise from_backend(failure) from failure
    return failure


async def attempt(
    deployment: Deployment,
    request: BackendRequest,
    progress: Progress,
    deliver: Callable[[list[Chunk]], None],
    *,
    prompt_tokens: int,
) -> BackendError | None:
    """Ask `deployment`, whose breaker has let the call begin, and `deliver` its chunks from the first with content on.

    Returns the failure, which `progress.has_begun` says to be before or after that; None where the answer is complete.
    """
    answer = deployment.backend.stream(request)
    held: list[Chunk] = []
    try:
        async for chunks in answer:
            progress.add(chunks)
            if progress.size_bytes > _ANSWER_BYTES_MAX:
                raise BackendBroken("The deployment's answer is too long", detail=f"over {_ANSWER_BYTES_MAX} bytes")
            # decision: commit-on-content
            held += chunks
            if progress.has_begun:
                deliver(held)
                held.clear()
    except BackendError as error:
        deployment.failed(error)
        progress.fail(error.detail[:300], is_refusal=isinstance(error, BackendRejected))
        return error
    except asyncio.CancelledError:
        deployment.breaker.record_cancelled()
        progress.abandon()
        raise
    except Exception:
        deployment.breaker.record_cancelled()  # our own bug says nothing of the deployment
        raise
    finally:
        await answer.aclose()
    progress.complete()
    deployment.succeeded(progress, prompt_tokens)
    return None
