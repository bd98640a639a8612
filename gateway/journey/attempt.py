"""Stage 9 of the journey: try deployments in the order of the route, from request to last chunk.

Invariants: failover is possible until the first chunk with content has left; the breaker records
the outcome of every call that was begun, exactly once; the backend's stream is closed on every
exit; a try that has not begun leaves no trace in an answer.
"""

import asyncio
from collections.abc import Callable

from gateway.backends.base import (
    BackendBroken,
    BackendDenied,
    BackendError,
    BackendRejected,
    BackendRequest,
    BackendTimeout,
)
from gateway.backends.refusals import from_backend
from gateway.deployments.fleet import Deployment, pause_before_retry
from gateway.deployments.progress import Progress
from gateway.journey.flight import Flight
from gateway.wire.errors import UpstreamDenied
from gateway.wire.types import Chunk
from policies import Route

# a flight keeps its answer for later readers: an endless one must not take the worker's memory
_ANSWER_BYTES_MAX = 64 << 20


async def stream(flight: Flight, route: Route) -> None:
    """Fill `flight`: try each deployment of `route` until one begins; after a pause, try again.

    Raises ApiError if none begins, or if the one that began fails.
    """
    denials: dict[str, str] = {}
    while True:
        latest, failure = await _try_each(flight, route, denials)
        if failure is None:
            return
        if isinstance(failure, BackendDenied):
            raise UpstreamDenied(_all_of(denials))
        pause_s = pause_before_retry(failure, len(flight.generation.attempts))
        if pause_s is None:
            if isinstance(failure, BackendTimeout):
                latest.note_timeout(flight.generation.turn.demand.prompt_tokens)
            raise from_backend(failure)
        await asyncio.sleep(pause_s)
        route = flight.route(frozenset(denials))
        if not route.ranked:
            raise from_backend(failure)


async def _try_each(flight: Flight, route: Route, denials: dict[str, str]) -> tuple[Deployment, BackendError | None]:
    """The deployment that was tried last, and its failure; None if it answered.

    A failure that a retry may mend comes before a permanent refusal. Each of these is added to
    `denials`: its message, by the deployment's name. Raises ApiError if no other deployment can
    take over: the answer had begun, or the request is at fault.
    """
    deployments, tried = flight.generation.alias.deployments, frozenset(denials)
    failed: tuple[Deployment, BackendError] | None = None
    while True:
        best = route.ranked[0]
        deployment = deployments[best.name]
        failure = await _try(flight, deployment, best.why, is_alone=len(route.ranked) == 1)
        if failure is None:
            return deployment, None
        if isinstance(failure, BackendDenied):
            denials[best.name] = failure.message
        if failed is None or not isinstance(failure, BackendDenied):
            failed = deployment, failure
        tried |= {best.name}
        route = flight.route(tried)
        if not route.ranked:
            return failed


def _all_of(denials: dict[str, str]) -> str:
    """One message of permanent refusals."""
    if len(denials) == 1:
        return next(iter(denials.values()))
    return "; ".join(f"{name}: {message}" for name, message in denials.items())


async def _try(flight: Flight, deployment: Deployment, why: str, *, is_alone: bool) -> BackendError | None:
    generation = flight.generation
    generation.chosen(why)
    if not deployment.breaker.begin():
        return BackendTimeout("another request is probing this deployment")
    request, progress = generation.begin_try(deployment, is_alone=is_alone)
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
    """Send `request` to `deployment`, whose breaker has admitted the call.

    `deliver` gets its chunks from the first with content on. Returns the failure, or None if the
    answer is complete; `progress.has_begun` tells whether chunks were delivered before it.
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
                if deployment.breaker.denial:
                    deployment.breaker.record_accepted()
                deliver(held)
                held.clear()
    except BackendError as error:
        deployment.failed(error)
        is_refusal, is_denial = isinstance(error, BackendRejected), isinstance(error, BackendDenied)
        progress.fail(error.detail[:300], is_refusal=is_refusal, is_denial=is_denial)
        return error
    except asyncio.CancelledError:
        deployment.breaker.record_cancelled()
        progress.abandon()
        raise
    except Exception:
        deployment.breaker.record_cancelled()  # a bug here is no failure of the deployment
        raise
    finally:
        await answer.aclose()
    progress.complete()
    deployment.succeeded(progress, prompt_tokens)
    return None
