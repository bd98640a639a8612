"""One call of one deployment, from its admission to its last chunk.

Invariants: the breaker records the outcome of every call that was admitted, exactly once; the
backend's stream is closed on every exit, and the slot given back; a call that was not admitted
leaves no trace in an answer.
"""

import asyncio
import re
from collections.abc import Callable

import msgspec

from gateway.backends.base import BackendBroken, BackendDenied, BackendError, BackendRejected, BackendRequest
from gateway.backends.dialect import ADDED, LENGTHS, Dialect
from gateway.backends.fitting import fitted, restored, with_length
from gateway.deployments.deployment import Deployment
from gateway.deployments.progress import Progress
from gateway.journey.flight import Flight
from gateway.journey.generation import Generation
from gateway.journey.joint import Said, rest_of
from gateway.journey.needs import identity_headers
from gateway.journey.outcomes import Try
from gateway.journey.queue import warm_at
from gateway.journey.semantic import draft_of
from gateway.journey.trace import TraceHeaders, span_of
from gateway.journey.turn import Turn
from gateway.loggers import get_logger
from gateway.reserved import with_calls_bound
from gateway.wire.types import CHAT, Chunk, opened
from policies import Demand
from policies.breaker import Asker
from policies.replicas import Backlog

TRIES_MAX = 8
"""The most tries of one request, at all its deployments."""

# a flight keeps its answer for later readers: an endless one must not take the worker's memory
_ANSWER_BYTES_MAX = 64 << 20
_TRANSLATED = frozenset({"messages", "responses"})  # operations whose requests become chats
_NO_NAMES: dict[str, str] = {}
_UNSTREAMED = frozenset({"best_of", "prompt_logprobs"})  # servers refuse to stream with these

# the codes and words of a server that does not know a field, and not of one that refuses its value: OpenAI, pydantic
# and its users (Mistral, vLLM), serde (DeepSeek)
_UNKNOWN = re.compile(r"unsupported|not supported|unknown|unrecognized|unexpected|extra[ _](?:inputs?|forbidden)", re.I)

_log = get_logger()

Deliver = Callable[[list[Chunk]], bool | None]
"""Gets the chunks of an answer; returns True where these end it."""


async def begin(
    flight: Flight,
    deployment: Deployment,
    why: str,
    *,
    is_alone: bool,
    said: Said | None = None,
    dialect: Dialect | None = None,
) -> "UpstreamCall | None":
    """Begin a try of `flight`'s generation; None where `deployment` has no slot for it, or another
    worker's probe forbids it.

    `is_alone`: no other deployment can take over. `said`: the text that it goes on with. `dialect`
    is spoken in place of the deployment's.
    """
    generation = flight.generation
    near, team = generation.looked.near, generation.identity.team.id
    asker = deployment.asker(generation.answered.demand, generation.turn.arrival.request_id)
    if not deployment.begin(asker, team):
        return None
    is_probe = deployment.health.is_open(asker)
    if is_probe and not await deployment.may_probe(asker, team):
        return None
    if generation.answered.demand.caller not in deployment.lessons.callers:
        deployment.lessons.seen(generation.answered.demand.caller)
    span_id = ""
    if (trace := generation.turn.arrival.trace) is not None and trace.span_id:
        span_id = span_of(generation.turn.arrival.request_id, f"try {len(generation.answered.tries)}")
    try:
        request = _request_to(deployment, generation, span_id, is_alone=is_alone, said=said, dialect=dialect)
    except BaseException:  # a bug must not keep the slot
        deployment.health.cancelled(asker)
        deployment.end(team)
        raise
    draft = near.id if request.draft and near is not None else ""
    progress = Progress(deployment.name, draft, at_ms=generation.turn.elapsed_ms(), span_id=span_id)
    if said is not None:
        progress.prefix_tokens = said.tokens
    if deployment.backlog is not None:
        _queue_up(deployment.backlog, deployment, progress, generation)
    answered = generation.answered  # the other try of a race may have changed it
    tries = (*answered.tries, Try(deployment, progress))
    generation.answered = msgspec.structs.replace(answered, tries=tries, progress=progress, why=why)
    return UpstreamCall(deployment, request, progress, answered.demand, asker, is_probe=is_probe, flight=flight)


def _queue_up(backlog: Backlog, replica: Deployment, progress: Progress, generation: Generation) -> None:
    """Count a request at a replica, which reads what it does not hold of the prompt, and then holds it."""
    serving, tokens, name = generation.answered.serving, generation.answered.demand.prompt_tokens, replica.name
    progress.warm_tokens = warm_at(generation).get(name, 0)
    progress.ahead_tokens = backlog.ahead_tokens(replica.estimate.figures().prefill_ms_per_token)
    progress.queued = backlog.enter(tokens - progress.warm_tokens)
    if serving.prefixes is not None and generation.blocks:
        serving.prefixes.read(name, generation.blocks)


def _request_to(
    deployment: Deployment,
    generation: Generation,
    span_id: str,
    *,
    is_alone: bool,
    said: Said | None,
    dialect: Dialect | None,
) -> BackendRequest:
    turn, serving, holds = generation.turn, generation.answered.serving, generation.holds
    native, kind = turn.native, turn.kind
    # decision: always-stream
    is_stream = not kind.is_plain and (turn.is_stream or (serving.has_choice and _UNSTREAMED.isdisjoint(turn.body)))
    body = turn.marked if turn.marked is not None and "cache_control" in deployment.capabilities else turn.body
    if holds.is_bounded and turn.demand.calls:
        body = with_calls_bound(body)
        native = None if native is None else msgspec.structs.replace(native, are_calls_bound=True)
    tokens = holds.cut_at
    if tokens is None and turn.demand.is_output_bound:
        tokens = turn.shortened_to
    if tokens is not None:
        native = None if native is None else msgspec.structs.replace(native, tokens_max=tokens)
    elif holds.is_bounded:
        tokens = serving.length_held(deployment, turn.demand)
    prefix = ""
    if "prefill" in deployment.capabilities:
        body, prefix = opened(body)
    if said is not None:
        body, prefix = rest_of(body, said), prefix + said.text
    names = _NO_NAMES
    if dialect is None:
        dialect = deployment.spoken() if deployment.lessons.witnesses else deployment.dialect
    body = with_length(body, dialect, kind, tokens)
    trace: TraceHeaders = ()
    if deployment.settings.is_traced and turn.arrival.trace is not None:
        trace = turn.arrival.trace.sent_from(span_id)
    if sources := deployment.settings.identity_headers:
        first_turn = generation.looked.fingerprint.chain[0]
        trace += identity_headers(sources, generation.identity, turn.body, turn.labels, first_turn)
    if kind is CHAT and (native is None or "messages" not in deployment.capabilities):
        body, names = fitted(body, dialect)
    return BackendRequest(
        body=body,
        is_stream=is_stream,
        salt=generation.looked.fingerprint.partition,
        request_id=turn.arrival.request_id,
        ttft_timeout_s=deployment.ttft_timeout_s(turn.demand.prompt_tokens, is_alone=is_alone),
        idle_timeout_s=deployment.idle_timeout_s,
        whole_timeout_s=deployment.whole_timeout_s,
        draft=draft_of(generation.looked.near) if deployment.settings.engine else "",
        kind=kind,
        model=deployment.model if serving.is_pattern else "",
        native=native,
        upload=turn.upload,
        passage=turn.passage,
        prefix=prefix,
        dialect=dialect,
        names=names,
        trace=trace,
    )


def is_translated(call: "UpstreamCall", turn: Turn) -> bool:
    """Whether the server got a request in another shape than the client's, so that a refusal may be of that."""
    deployment = call.deployment
    if turn.kind is not CHAT or (turn.native is not None and "messages" in deployment.capabilities):
        return bool(call.request.names)
    is_other = deployment.settings.backend in ("anthropic", "litellm") or turn.arrival.operation in _TRANSLATED
    return is_other or bool(call.request.names)


def reworded(call: "UpstreamCall", failure: BackendRejected, generation: Generation) -> Dialect | None:
    """Another dialect for a request whose server refused a field of the gateway's own; None: the
    request is at fault, or there is no other way to say it.

    A field that the refusal names by itself teaches; one in its words decides for this request.
    """
    request, dialect, turn = call.request, call.request.dialect, generation.turn
    is_other = request.kind is not CHAT or call.deployment.settings.backend != "openai"
    if is_other or not _UNKNOWN.search(failure.detail):
        return None
    names = [name for name in (dialect.length, *ADDED) if name not in turn.body or name in LENGTHS]
    named = (failure.param or "").partition(".")[0]
    name = named or next((name for name in names if name in failure.message), "")
    if name not in names or (name in LENGTHS and name not in request.body):
        return None
    _log.warning("field_refused", deployment=call.deployment.name, field=name, is_typed=bool(named))
    if named:
        exact = generation.looked.fingerprint.exact
        call.deployment.lessons.refused(call.deployment.model, name, call.demand.caller, exact)
    return dialect.without(name)


class UpstreamCall(msgspec.Struct, frozen=True, eq=False):
    """A call that `deployment` has admitted. `flight` is whose answer it is, if it has one.

    `is_probe`: the deployment rests, and the call tries whether it is back.
    """

    deployment: Deployment
    request: BackendRequest
    progress: Progress
    demand: Demand
    asker: Asker
    is_probe: bool
    flight: Flight | None = None

    async def run(self, deliver: Deliver) -> BackendError | None:
        """Send the request, and deliver the chunks from the first with content on.

        No more is read while all readers of the flight are far behind. Returns the failure, or None
        if the answer is complete; `progress.has_begun` tells whether chunks were delivered before
        it.
        """
        deployment, progress, asker, flight = self.deployment, self.progress, self.asker, self.flight
        answer, names = deployment.backend.stream(self.request), self.request.names
        held: list[Chunk] = []
        deployment.answers.add(answer)
        try:
            async for read in answer:
                chunks = read
                if names:
                    progress.opening = progress.opening or read[0].native
                    chunks = [restored(chunk, names) for chunk in read if chunk.data]
                progress.add(chunks)
                if progress.size_bytes > _ANSWER_BYTES_MAX:
                    raise BackendBroken("The deployment's answer is too long", detail=f"over {_ANSWER_BYTES_MAX} bytes")
                # decision: commit-on-content
                held += chunks
                if progress.has_begun:
                    if self.is_probe:
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
            if progress.has_begun:  # a verifier's question ends with the word that decides
                deployment.health.accepted(asker)
            deployment.health.cancelled(asker)
            progress.abandon()
            raise
        except Exception:
            deployment.health.cancelled(asker)  # a bug here is no failure of the deployment
            progress.leave()
            raise
        else:
            progress.complete()
            deployment.succeeded(progress, self.demand, asker)
        finally:
            try:
                await answer.aclose()
            finally:
                deployment.answers.discard(answer)
                deployment.end(flight.generation.identity.team.id if flight is not None else 0)
        return None
