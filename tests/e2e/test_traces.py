"""Traces as a receiver gets them: OTLP over HTTP from a worker that serves, by the official library; and the log."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.e2e.gateway import Gateway, deployment, wait_for
from tests.e2e.upstream import Upstream
from tests.e2e.worker import Host, NewHost
from tests.world import until


class Receiver(ThreadingHTTPServer):
    """What a collector is to the gateway: it takes spans, and remembers them."""

    daemon_threads = True

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.resource: dict[str, str] = {}
        self.headers: dict[str, str] = {}
        super().__init__(("127.0.0.1", 0), _Taking)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1/traces"

    @property
    def roots(self) -> list[Span]:
        return [span for span in self.spans if span.kind == Span.SPAN_KIND_SERVER]


class _Taking(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        for each in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.server.resource = {one.key: one.value.string_value for one in each.resource.attributes}
            self.server.spans += [span for scope in each.scope_spans for span in scope.spans]
        self.server.headers = {name.lower(): value for name, value in self.headers.items()}
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Basic%20cGs6c2s=")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=tests")
    with Receiver() as made:
        serving = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.05})
        serving.start()
        yield made
        made.shutdown()
        serving.join()


async def opened(new_host: NewHost, upstream: Upstream, endpoint: str) -> Host:
    return await new_host({"mock": [deployment(upstream.url, "plain")]}, traces={"endpoint": endpoint})


async def ask(host: Host, content: str) -> str:
    asked: Any = {"model": "mock", "messages": [{"role": "user", "content": content}]}
    return (await host.client.chat.completions.with_raw_response.create(**asked)).headers["x-request-id"]


def counted(host: Host, outcome: str) -> float:
    text = host.parts.metrics.render().decode()
    lines = [line for line in text.splitlines() if line.startswith("sameway_trace_spans_total")]
    return sum(float(line.split()[-1]) for line in lines if f'"{outcome}"' in line)


async def test_a_receiver_gets_the_spans_of_each_request(
    new_host: NewHost, upstream: Upstream, receiver: Receiver
) -> None:
    """Whole trees, with the headers and the resource that the environment says, and a count of them in the metrics."""
    host = await opened(new_host, upstream, receiver.url)
    asked = {await ask(host, "one"), await ask(host, "two"), await ask(host, "one")}
    await until(lambda: len(receiver.roots) == 3 and counted(host, "made") == counted(host, "sent"))
    spans, roots = list(receiver.spans), receiver.roots
    ids = {one.value.string_value for root in roots for one in root.attributes if one.key == "sameway.request_id"}
    assert ids == asked
    assert {span.parent_span_id for span in spans if span not in roots} == {root.span_id for root in roots}
    assert len({span.trace_id for span in spans}) == 3
    assert len(spans) == counted(host, "made") == counted(host, "sent")
    assert receiver.resource["service.name"] == "sameway"
    assert receiver.resource["deployment.environment.name"] == "tests"
    assert receiver.headers["authorization"] == "Basic cGs6c2s="


async def test_requests_are_answered_where_no_receiver_listens(
    new_host: NewHost, upstream: Upstream, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its spans are lost and counted as such; nothing waits for them, and the worker ends."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")
    receiver.server_close()
    host = await opened(new_host, upstream, receiver.url)
    for number in range(3):
        await ask(host, f"number {number}")
    await until(lambda: counted(host, "failed") > 0)
    assert counted(host, "sent") == 0


def test_a_gateway_without_traces_imports_no_library_for_them() -> None:
    """Off costs nothing: neither spans nor their exporter are loaded with what makes them."""
    loaded = "[name for name in sys.modules if name.startswith(('opentelemetry.sdk.trace', 'opentelemetry.exporter'))]"
    code = f"import sys, gateway.telemetry.traces; print({loaded})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_line_of_a_gateway_has_one_shape(gateway: Gateway) -> None:
    """Those of the supervisor's children, too: JSON with an event, a level and a time; a request's has its trace."""
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    asked = gateway.chat("what is one shape?", headers={"traceparent": f"00-{trace}-00f067aa0ba902b7-01"})
    wait_for(lambda: asked.headers["x-request-id"] in gateway.log.read_text())
    lines = [json.loads(line) for line in gateway.log.read_text().splitlines()]
    assert all({"event", "level", "timestamp"} <= line.keys() for line in lines)
    assert {"redis", "cache"} <= {line.get("process") for line in lines}
    (line,) = [line for line in lines if line.get("request_id") == asked.headers["x-request-id"]]
    assert line["trace_id"] == trace
