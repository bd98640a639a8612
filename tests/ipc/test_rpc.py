"""Calls and replies between two ends of a socket: what is lost, cancelled, too big or answered too late."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ipc import (
    TRACE_ID,
    CallFrame,
    IncomingCall,
    ReplyFrame,
    RpcClient,
    RpcServer,
    Wire,
)  # fmt: skip
from ipc.logs import JsonFormatter
from tests.rpc import StandIn


class Gone(Exception):
    """There is no connection."""


class Refused(Exception):
    """A call that was wrong: `count` things of it."""

    def __init__(self, count: int) -> None:
        super().__init__(f"{count} things were wrong")
        self.count = count


class TooBig(Exception):
    """A call that fits in no frame."""


WIRE: Wire[str, str] = Wire(
    calls=msgspec.msgpack.Decoder(CallFrame[str]),
    replies=msgspec.msgpack.Decoder(ReplyFrame[str]),
    errors=(Gone, Refused, TooBig),
    unsendable=TooBig,
    bytes_max=1_000,
)


class Ends:
    """A client and the stand-in of a worker: its calls, those that were cancelled, and the states that the client was told."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.calls: asyncio.Queue[IncomingCall[str]] = asyncio.Queue()
        self.cancelled: asyncio.Queue[str] = asyncio.Queue()
        self.states: list[str | None] = []
        self.worker = StandIn(
            RpcServer(
                WIRE,
                state=lambda: "well",
                on_call=self.calls.put_nowait,
                on_cancel=lambda call: self.cancelled.put_nowait(call.body),
                slow_s=0.05,
            )
        )
        self.client = RpcClient(path, WIRE, on_state=self.states.append, lost=Gone, look_s=0.05)

    async def until_told(self, state: str | None) -> None:
        async with asyncio.timeout(10):
            while self.states[-1:] != [state]:  # noqa: ASYNC110
                await asyncio.sleep(0.005)


@asynccontextmanager
async def ends(tmp_path: Path) -> AsyncIterator[Ends]:
    both = Ends(tmp_path / "s")
    await both.worker.start(both.path)
    both.client.start()
    await both.until_told("well")
    yield both
    await both.client.aclose()
    await both.worker.stop()


async def test_replies_come_in_order_and_errors_as_they_were(tmp_path: Path) -> None:
    """A stream of replies, then the error with its attributes; an error that is a bug arrives as the first kind."""
    async with ends(tmp_path) as both:
        stream = both.client.call("a")
        call = await both.calls.get()
        for reply in ("one", "two"):
            call.reply(reply, is_last=False)
        call.fail(Refused(3))
        call.reply("too late")
        assert [await anext(stream), await anext(stream)] == ["one", "two"]
        with pytest.raises(Refused, match="3 things") as caught:
            await anext(stream)
        assert caught.value.count == 3
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        stream = both.client.call("b")
        (await both.calls.get()).fail(ValueError("odd"))
        with pytest.raises(Gone, match="ValueError: odd"):
            await stream.only()


async def test_what_no_client_waits_for_is_cancelled(tmp_path: Path) -> None:
    """By a time-out, by a stream that is closed before its first reply, and by a client that leaves; a reply to it goes nowhere."""
    async with ends(tmp_path) as both:
        with pytest.raises(TimeoutError):
            await both.client.call("late").only(0.02)
        await both.client.call("closed").aclose()
        assert [await both.cancelled.get() for _ in range(2)] == ["late", "closed"]
        left = both.client.call("left")
        calls = [await both.calls.get() for _ in range(3)]
        await both.client.aclose()
        assert await both.cancelled.get() == "left"
        with pytest.raises(Gone, match="was left"):
            await left.only()
        for call in calls:
            call.reply("well")
        assert not both.worker.server.has_calls


async def test_a_call_of_one_connection_gets_no_reply_on_the_next(tmp_path: Path) -> None:
    """Where the connection ends its calls fail at once, and ids are not used again: no reply reaches another call."""
    async with ends(tmp_path) as both:
        lost = both.client.call("first")
        call = await both.calls.get()
        both.worker.die()
        with pytest.raises(Gone, match="went away"):
            await lost.only()
        with pytest.raises(Gone, match="is not there"):
            await both.client.call("between").only()
        await both.until_told("well")
        again = both.client.call("second")
        call.reply("to the first")
        (await both.calls.get()).reply("to the second")
        assert await again.only(5) == "to the second"


async def test_too_big_a_message_fails_its_own_call(tmp_path: Path) -> None:
    """Either way, and no other one on the connection."""
    async with ends(tmp_path) as both:
        other = both.client.call("other")
        kept = await both.calls.get()
        with pytest.raises(TooBig, match="at most 1000"):
            await both.client.call("x" * 1_000).only()
        asked = both.client.call("much")
        (await both.calls.get()).reply("y" * 1_000)
        with pytest.raises(TooBig):
            await asked.only(5)
        stream = both.client.call("part")
        (await both.calls.get()).reply("y" * 1_000, is_last=False)
        with pytest.raises(TooBig):
            await stream.only(5)
        assert await asyncio.wait_for(both.cancelled.get(), 5) == "part"  # no more is made of it
        kept.reply("well")
        assert await other.only(5) == "well"


async def test_a_slow_or_failed_call_is_logged_with_the_trace_of_its_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each such call has a line without its texts, also one that was left; a good one, and one without a trace, has none."""
    caplog.set_level("INFO", "ipc")
    async with ends(tmp_path) as both:

        def call(body: str, trace_id: str) -> Any:
            TRACE_ID.set(trace_id)
            return both.client.call(body)

        asked = {body: call(body, trace_id) for body, trace_id in (("good", "a"), ("wrong", "b"), ("odd", "c"))}
        asked |= {body: call(body, trace_id) for body, trace_id in (("slow", "d"), ("left", "e"), ("untraced", ""))}
        calls = {call.body: call for call in [await both.calls.get() for _ in asked]}
        calls["good"].reply("well")
        calls["wrong"].fail(Refused(3))
        calls["odd"].fail(ValueError("a text"))
        await asyncio.sleep(0.06)
        await asked["left"].aclose()
        assert await both.cancelled.get() == "left"
        calls["slow"].reply("late")
        calls["untraced"].reply("late")
    lines = [json.loads(JsonFormatter().format(record)) for record in caplog.records]
    assert [(line["trace_id"], line["event"].partition(" after ")[0]) for line in lines] == [
        ("b", "str: Refused"),
        ("c", "a call failed"),
        ("c", "str: Gone"),
        ("e", "str: cancelled"),
        ("d", "str: answered"),
    ]


async def test_an_id_that_is_in_use_ends_its_connection(tmp_path: Path) -> None:
    """No call is answered twice: a client that uses an id twice is left, and its calls are cancelled."""
    async with ends(tmp_path) as both:
        reader, writer = await asyncio.open_unix_connection(both.path)
        writer.write(WIRE.encode(CallFrame(7, "a")) + WIRE.encode(CallFrame(7, "b")))
        await reader.read()
        writer.close()
        assert await both.cancelled.get() == "a"


async def test_a_server_that_falls_silent_is_left(tmp_path: Path) -> None:
    """Its calls fail, the state is unknown, and the client connects anew."""

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    both = Ends(tmp_path / "s")
    server = await asyncio.start_unix_server(say_nothing, both.path)
    both.client.start()
    async with asyncio.timeout(10):
        while not both.client.is_connected:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        with pytest.raises(Gone, match="fell silent"):
            await both.client.call("a").only()
    await both.until_told(None)
    server.close()
    await both.client.aclose()
