"""One try at one deployment: from the request that leaves to the last chunk in the flight, or why not.

Knows no routes and no other deployments. Invariants: the breaker hears of every call that was begun, exactly once; the backend's
stream is closed on every exit; what has not begun can be tried elsewhere without anybody noticing.
"""

import asyncio

from gateway.backends.base import BackendBroken, BackendError, BackendRejected, BackendRequest, BackendTimeout
from gateway.backends.refusals import from_backend
from gateway.deployments.fleet import Deployment
from gateway.deployments.progress import Generated
from gateway.journey.generation import Job
from gateway.journey.near_answer import text_of
from gateway.journey.record import Attempt
from gateway.wire.types import Chunk

_ANSWER_BYTES_MAX = (
    64 << 20
)  # a flight keeps its answer for whoever joins: one that never ends must not take the worker's memory
_UNSTREAMED = frozenset({"best_of", "prompt_logprobs"})  # asked for these, servers refuse to stream
_WHOLE_TIMEOUT_S = 600.0  # a whole shows nothing until it is there: as long as the official SDKs wait by default


async def attempt(job: Job, deployment: Deployment) -> BackendError | None:
    """One deployment, to the end. Returns why it failed if nothing had left yet; raises ApiError if something had."""
    if not deployment.breaker.begin():
        return BackendTimeout("another request is probing this deployment")
    turn, made = job.turn, Generated()
    job.deployment, job.generated = deployment, made
    prompt_tokens = turn.ask.prompt_tokens
    facts = job.facts
    # where somebody else could take over, a stream tells sooner than a whole that nobody is answering
    is_stream = turn.is_stream or (len(job.alias.deployments) > 1 and _UNSTREAMED.isdisjoint(turn.body))
    is_bounded = job.hold is not None and bool(job.hold.held)
    draft = text_of(job.near) if deployment.settings.engine else ""
    turn.record.draft = job.near.id if draft and job.near is not None else ""
    stream = deployment.backend.stream(
        BackendRequest(
            body=job.alias.bounded(deployment, turn.ask, turn.body) if is_bounded else turn.body,
            is_stream=is_stream,
            salt=job.fingerprint.partition,
            request_id=turn.record.request_id,
            ttft_timeout_s=deployment.ttft_timeout_s(prompt_tokens),
            idle_timeout_s=deployment.settings.idle_timeout_ms / 1000.0 if is_stream else _WHOLE_TIMEOUT_S,
            draft=draft,
            kind=turn.kind,
        )
    )
    held: list[Chunk] = []  # chunks without content don't commit us: the next deployment may still be tried
    try:
        async for chunks in stream:
            made.add(chunks)
            if made.size_bytes > _ANSWER_BYTES_MAX:
                raise BackendBroken("The deployment's answer is too long", detail=f"over {_ANSWER_BYTES_MAX} bytes")
            held += chunks
            if made.has_begun:
                if not facts.deployment:
                    facts.deployment = turn.record.deployment = deployment.name
                    turn.record.ttft_ms = turn.elapsed_ms()
                job.flight.extend(held)
                held.clear()
    except BackendError as error:
        deployment.failed(error)
        is_refusal = isinstance(error, BackendRejected)
        job.attempts.append(Attempt(deployment.name, error.detail[:300], made.elapsed_ms(), is_refusal))
        if made.has_begun or is_refusal:
            raise from_backend(error) from error
        return error
    except asyncio.CancelledError:
        job.is_abandoned = True
        deployment.breaker.record_cancelled()
        job.attempts.append(Attempt(deployment.name, "cancelled", made.elapsed_ms()))
        raise
    except Exception:
        deployment.breaker.record_cancelled()  # our own bug says nothing of the deployment
        raise
    finally:
        await stream.aclose()
    made.is_complete = True
    deployment.succeeded(made, prompt_tokens)
    job.attempts.append(Attempt(deployment.name, "ok", made.elapsed_ms()))
    return None
