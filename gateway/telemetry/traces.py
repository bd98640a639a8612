"""Traces: the spans of a finished request, made of its record alone and sent by OpenTelemetry's SDK.

A span is made when it is over, so which traces are sent is known: what the client or the sample
chose, and each request that failed or was slow. Names are those of OpenTelemetry's semantic
conventions 1.41 for generative AI (https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/)
where they exist, else `sameway.*`. Calls of deployments alone have tokens, so no reader counts them
twice. No span has a prompt, an answer, or the name of a key.

Invariant: without `traces.endpoint` no library is imported and nothing is done.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from gateway.deployments.deployment import Deployment
from gateway.journey.record import PATHS, Record, Stage, stages_of
from gateway.journey.trace import span_of
from gateway.settings import TraceSettings
from gateway.telemetry import metric_names as names
from gateway.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
    from opentelemetry.sdk.trace.export import SpanExportResult
    from opentelemetry.trace import SpanContext

_QUEUE_MAX = 16_384  # spans, some 20 MB, where the receiver is slow or down
_BATCH_MAX = 512
_CLOSE_S = 3.0
_OPERATIONS = {"messages": "chat", "responses": "chat"}
# the values of `gen_ai.provider.name` for backends; of litellm's it is the model's first part
_PROVIDERS = {"openai": "openai", "anthropic": "anthropic", "local": "sameway"}
# of a request's span: fields of its record
_SHOWN = (
    *("request_id", "team", "alias", "cache", "similarity", "miss_reason", "store", "deployment", "why"),
    *("verifier", "verdict", "cost_microusd", "saved_microusd", "made_in"),
)
_ATTRIBUTES = {
    **{f"sameway.{name}": attrgetter(PATHS[name]) for name in _SHOWN},
    "http.response.status_code": attrgetter("ended.status"),
    "error.type": attrgetter("ended.error"),
    "gen_ai.conversation.id": attrgetter("request.session"),
}


class Traces:
    """Makes and sends the spans of requests. `deployments` are those of this worker, now."""

    def __init__(
        self,
        settings: TraceSettings,
        deployments: Callable[[], Sequence[Deployment]],
        metrics: Metrics,
        version: str,
        processor: "SpanProcessor | None" = None,
    ) -> None:
        from opentelemetry import trace
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self._settings = settings
        self._deployments = deployments
        self._known: dict[str, dict[str, Any]] = {}  # attributes of calls by the deployment's name
        self._count = partial(metrics.add, names.SPANS, 1, "made")
        self._processor = processor or _sending(settings, metrics)
        self._api = trace
        resource = Resource({"service.name": "sameway", "service.version": version})
        # decision: spans-from-records
        self._span: Callable[..., ReadableSpan] = partial(
            ReadableSpan,
            resource=resource.merge(OTELResourceDetector().detect()),
            instrumentation_scope=InstrumentationScope("sameway", version),
        )

    def add(self, record: Record) -> None:
        """Send the spans of one finished request, if its trace is to be sent."""
        request, ended, times, api = record.request, record.ended, record.times, self._api
        is_failed = ended.status >= 500 or (bool(ended.error) and ended.status < 400)
        is_sent = request.trace_flags or is_failed or times.duration_ms >= self._settings.slow_ms
        if not request.span_id or not is_sent:
            return
        start_ms = request.at_s * 1e3 + times.received_ms
        root, parent, made_in = self._context(request.trace_id, request.span_id), None, record.cache.made_in
        if request.parent_span_id:
            parent = self._context(request.trace_id, request.parent_span_id)
        self._end(
            name=f"{request.operation} {request.alias}".rstrip(),
            context=root,
            parent=parent,
            kind=api.SpanKind.SERVER,
            links=[api.Link(self._context(*made_in.split("-")))] if made_in else (),
            attributes={name: value for name, get in _ATTRIBUTES.items() if (value := get(record)) not in ("", None)},
            status=self._status(ended.error if is_failed else ""),
            start_time=int(request.at_s * 1e3 * 1e6),
            end_time=int((start_ms + times.duration_ms) * 1e6),
        )
        for stage in stages_of(record):
            span: dict[str, Any] = {"name": stage.name}
            span_id = span_of(request.id, stage.name)
            if (called := stage.attempt) is not None:
                attributes = self._call(stage, record)
                name = f"{attributes['gen_ai.operation.name']} {attributes.get('gen_ai.request.model', stage.name)}"
                error = "" if called.verdict in ("ok", "cancelled") else called.outcome
                status, kind = self._status(error), api.SpanKind.CLIENT
                span = {"name": name, "attributes": attributes, "status": status, "kind": kind}
                span_id = called.span_id
            self._end(
                context=self._context(request.trace_id, span_id),
                parent=root,
                start_time=int((start_ms + stage.at_ms) * 1e6),
                end_time=int((start_ms + stage.at_ms + stage.duration_ms) * 1e6),
                **span,
            )

    def _end(self, **fields: Any) -> None:
        self._count()
        self._processor.on_end(self._span(**fields))

    def _status(self, error: str) -> Any:
        return self._api.Status(self._api.StatusCode.ERROR, error) if error else self._api.Status()

    def _context(self, trace_id: str, span_id: str) -> "SpanContext":
        # sampled, whatever was said before: what comes here is sent
        return self._api.SpanContext(int(trace_id, 16), int(span_id, 16), False, self._api.TraceFlags(1))

    def _call(self, stage: Stage, record: Record) -> dict[str, Any]:
        """The attributes of a call of a deployment; the one that answered has the tokens."""
        attempt, usage, operation = stage.attempt, record.usage, record.request.operation
        assert attempt is not None
        if attempt.name not in self._known:
            self._known = {one.name: _facts_of(one) for one in self._deployments()}
        facts = {**self._known.get(attempt.name, {}), "sameway.deployment": attempt.name}
        facts["gen_ai.operation.name"] = _OPERATIONS.get(operation, operation)
        facts["gen_ai.request.stream"] = record.request.is_stream
        if attempt.ttft_ms is not None:
            facts["gen_ai.response.time_to_first_chunk"] = attempt.ttft_ms / 1e3
        if attempt is record.answer.attempts[-1] and attempt.verdict in ("ok", "cancelled"):
            facts["gen_ai.usage.input_tokens"] = usage.prompt_tokens
            facts["gen_ai.usage.output_tokens"] = usage.completion_tokens
            facts["gen_ai.usage.cache_read.input_tokens"] = usage.cached_tokens or 0
        if attempt.verdict != "ok":
            facts["error.type"] = attempt.verdict
        return facts

    async def aclose(self) -> None:
        """Send what is left, for `_CLOSE_S` at most: the library would try for half a minute."""
        thread = threading.Thread(target=self._processor.shutdown, daemon=True)
        thread.start()
        ends_at = time.monotonic() + _CLOSE_S
        while thread.is_alive() and time.monotonic() < ends_at:  # noqa: ASYNC110 - a thread has no event
            await asyncio.sleep(0.02)


def _facts_of(deployment: Deployment) -> dict[str, Any]:
    settings, model = deployment.settings, deployment.model
    address = urlsplit(settings.base_url or "")
    facts = {
        "gen_ai.provider.name": _PROVIDERS.get(settings.backend) or model.partition("/")[0],
        "gen_ai.request.model": model,
        "server.address": address.hostname,
        "server.port": address.port,
    }
    return {name: value for name, value in facts.items() if value}


def _sending(settings: TraceSettings, metrics: Metrics) -> "SpanProcessor":
    """What sends spans from a thread, in batches; spans that find its queue full are dropped."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult

    for outcome in ("sent", "failed"):
        metrics.add(names.SPANS, 0, outcome)  # so the thread finds their places made

    class CountedExporter(OTLPSpanExporter):
        def export(self, spans: "Sequence[ReadableSpan]") -> "SpanExportResult":
            result = super().export(spans)
            metrics.add(names.SPANS, len(spans), "sent" if result is SpanExportResult.SUCCESS else "failed")
            return result

    exporter = CountedExporter(endpoint=settings.endpoint)
    return BatchSpanProcessor(exporter, max_queue_size=_QUEUE_MAX, max_export_batch_size=_BATCH_MAX)
