"""The spans of requests, by OpenTelemetry's own exporter in memory: whose child each is, what it is linked to, and which
traces are sent."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.trace import SpanKind, StatusCode, format_span_id, format_trace_id

from tests.journey.conftest import OpenWorld
from tests.world import MODELS, Finish, Tokens, World, deployment, unavailable

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
FROM_CLIENT = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "theirs=1", "baggage": "user=1"}
ROUNDED_NS = 2_000  # a time since 1970, in milliseconds as a double
OpenTraced = Callable[..., Awaitable[World]]


@pytest.fixture
def open_traced(open_a_world: OpenWorld) -> OpenTraced:
    """A world whose settings name a receiver, which is not called."""

    async def open_one(models: Any = MODELS, **traces: Any) -> World:
        more = {"cache": traces.pop("cache")} if "cache" in traces else {}
        return await open_a_world(
            models=models, traces={"endpoint": "http://localhost:4318/v1/traces", **traces}, **more
        )

    return open_one


def ids(span: ReadableSpan) -> tuple[str, str]:
    assert span.context is not None
    return format_trace_id(span.context.trace_id), format_span_id(span.context.span_id)


def parent(span: ReadableSpan) -> str:
    return format_span_id(span.parent.span_id) if span.parent is not None else ""


def times(span: ReadableSpan) -> tuple[int, int]:
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time, span.end_time


def roots(spans: list[ReadableSpan]) -> list[ReadableSpan]:
    return [span for span in spans if span.kind is SpanKind.SERVER]


def calls(spans: list[ReadableSpan]) -> list[ReadableSpan]:
    return [span for span in spans if span.kind is SpanKind.CLIENT]


async def test_a_miss_is_a_tree_below_the_clients_span(open_traced: OpenTraced) -> None:
    """A span for the request, a child for each stage, and the call's is the one that the deployment was told."""
    world = await open_traced()
    reply = await world.ask(stream=True, headers=FROM_CLIENT)
    spans = world.spans()
    (root,), (call,) = roots(spans), calls(spans)
    assert (ids(root)[0], parent(root)) == (TRACE, SPAN)
    assert {(ids(one)[0], parent(one)) for one in spans if one is not root} == {(TRACE, ids(root)[1])}
    assert {one.name for one in spans} - {"receive"} == {  # a busy machine is slow with a body
        "chat mock",
        "exact lookup",
        "semantic lookup",
        "reserve",
        "chat m",
        "record",
    }
    told = dict(world.backends["plain"].calls[0].trace)
    assert told == {**FROM_CLIENT, "traceparent": f"00-{TRACE}-{ids(call)[1]}-01"}
    assert root.attributes["sameway.request_id"] == reply.id  # type: ignore[index]
    begins, ends = times(root)
    for one in spans:
        first, last = times(one)
        assert begins - ROUNDED_NS <= first <= last
        assert last <= ends + ROUNDED_NS or one.name == "record"


async def test_names_are_those_of_the_conventions_and_tokens_are_counted_once(open_traced: OpenTraced) -> None:
    """Every `gen_ai` name is one of OpenTelemetry's table, only the call has tokens, and nothing has a text."""
    world = await open_traced()
    world.backends["plain"].plays("a secret answer", Finish(), Tokens(7, 3))
    await world.ask("a secret question")
    spans = world.spans()
    known = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}
    named = {name for span in spans for name in span.attributes or {}}
    assert {name for name in named if name.startswith("gen_ai.")} <= known
    (call,) = calls(spans)
    attributes = dict(call.attributes or {})
    assert attributes["gen_ai.usage.input_tokens"] == 7
    assert attributes["gen_ai.usage.output_tokens"] == 3
    assert (attributes["gen_ai.provider.name"], attributes["gen_ai.request.model"]) == ("openai", "m")
    assert [one for one in spans if "gen_ai.usage.input_tokens" in (one.attributes or {})] == [call]
    assert "secret" not in "".join(span.to_json() for span in spans)
    assert call.resource.attributes["service.name"] == "sameway"
    assert call.resource.attributes["service.version"] == "1.2.3"


async def test_a_hit_is_linked_to_the_trace_that_made_its_answer(open_traced: OpenTraced) -> None:
    """The entry keeps it: another client's trace, and another request's span."""
    world = await open_traced()
    await world.ask("once", headers=FROM_CLIENT)
    hit = await world.ask("once")
    assert hit.cache == "exact"
    made, served = roots(world.spans())
    assert ids(served)[0] != TRACE
    (link,) = served.links
    assert (format_trace_id(link.context.trace_id), format_span_id(link.context.span_id)) == ids(made)
    assert (served.attributes or {})["sameway.made_in"] == "-".join(ids(made))
    assert {one.name for one in world.spans() if parent(one) == ids(served)[1]} == {"exact lookup"}


async def test_a_coalesced_request_is_linked_to_the_one_that_it_shares(open_traced: OpenTraced) -> None:
    """Each has its own trace; what it waited for is the other's."""
    world = await open_traced()
    go = asyncio.Event()
    world.backends["plain"].plays(go, "shared", Finish(), Tokens())
    leading, joined = world.begin(headers=FROM_CLIENT), world.begin()
    await world.backends["plain"].called()
    go.set()
    led, shared = await leading.reply(), await joined.reply()
    await world.quiet()
    of = {one.attributes["sameway.request_id"]: one for one in roots(world.spans())}  # type: ignore[index]
    (link,) = of[shared.id].links
    assert (format_trace_id(link.context.trace_id), format_span_id(link.context.span_id)) == ids(of[led.id])
    assert not of[led.id].links
    assert "shared answer" in {one.name for one in world.spans() if parent(one) == ids(of[shared.id])[1]}


async def test_each_try_has_its_span(open_traced: OpenTraced) -> None:
    """The first failed, in its own words, and told its own span to its deployment; so did the second."""
    world = await open_traced()
    world.backends["first"].plays(unavailable("it broke"))
    await world.ask(model="pair")
    first, second = calls(world.spans())
    assert (first.status.status_code, first.status.description) == (StatusCode.ERROR, "it broke")
    assert second.status.status_code is StatusCode.UNSET
    for name, span in (("first", first), ("second", second)):
        assert f"-{ids(span)[1]}-" in dict(world.backends[name].calls[-1].trace)["traceparent"]
    assert ids(first) != ids(second)


async def test_a_verifiers_question_is_a_child_of_the_request(open_traced: OpenTraced) -> None:
    """It is a request of its own, in the trace of the one that it is about."""
    small = {"deployments": [deployment("reader", usd=(0.1, 0.1), capabilities=["json_object"])]}
    large = {"deployments": [deployment("large", usd=(100.0, 100.0))]}
    world = await open_traced({"mock": large, "small": small}, cache={"verifier": "small"})
    entry = (await world.record(await world.ask("the first wording"))).cache.entry
    world.semantic.doubts((entry, "the first wording"))
    world.backends["reader"].plays("1", Tokens(300, 1))
    await world.ask("the second wording", headers=FROM_CLIENT)
    spans = [span for span in world.spans() if ids(span)[0] == TRACE]
    (asking,) = [span for span in roots(spans) if parent(span) == SPAN]
    questions = [span for span in roots(spans) if span is not asking]
    assert questions
    assert {parent(span) for span in questions} == {ids(asking)[1]}


@pytest.mark.parametrize(
    ("how", "flags", "is_sent"),
    [
        ({"sample": 0.0}, "01", True),  # the client's word is above the sample
        ({"sample": 1.0}, "00", False),
        ({"sample": 0.0}, "", False),
        ({"sample": 1.0}, "", True),
        ({"sample": 0.0, "slow_ms": 1}, "00", True),  # slow
        ({"sample": 0.0}, "fails", True),
    ],
)
async def test_which_traces_are_sent(open_traced: OpenTraced, how: dict[str, Any], flags: str, is_sent: bool) -> None:
    """The client decides, else the sample; a slow request and a failed one are sent whole."""
    world = await open_traced(**how)
    delay = asyncio.Event()
    asyncio.get_running_loop().call_later(0.003, delay.set)
    world.backends["plain"].plays(delay, *([unavailable()] if flags == "fails" else ["slow", Finish(), Tokens()]))
    await world.ask(headers={"traceparent": f"00-{TRACE}-{SPAN}-{flags}"} if len(flags) == 2 else {})
    spans = world.spans()
    assert bool(spans) == is_sent
    assert not is_sent or (roots(spans) and calls(spans))
    told = dict(world.backends["plain"].calls[0].trace)["traceparent"]
    assert told.endswith("-01" if flags == "01" or (how["sample"] and not flags) else "-00")


@pytest.mark.parametrize(
    "wrong",
    ["", "00-" + "0" * 32 + f"-{SPAN}-01", f"00-{TRACE}-{'0' * 16}-01", f"ff-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}"],
)
async def test_a_trace_that_cannot_be_read_is_begun_anew(open_traced: OpenTraced, wrong: str) -> None:
    """Its state is not sent on, as it belongs to no trace."""
    world = await open_traced()
    await world.ask(headers={**FROM_CLIENT, "traceparent": wrong})
    (root,) = roots(world.spans())
    assert (ids(root)[0] != TRACE, parent(root)) == (True, "")
    assert set(dict(world.backends["plain"].calls[0].trace)) == {"traceparent", "baggage"}


async def test_without_a_receiver_the_headers_go_on_as_they_came(world: World) -> None:
    """No span is made; the log still says which trace a request belongs to."""
    reply = await world.ask(headers=FROM_CLIENT)
    record = await world.record(reply)
    assert dict(world.backends["plain"].calls[0].trace) == FROM_CLIENT
    assert (record.request.trace_id, record.request.span_id) == (TRACE, "")
    assert world.spans() == []
    other = await world.record(await world.ask("another"))
    assert other.request.trace_id == ""
