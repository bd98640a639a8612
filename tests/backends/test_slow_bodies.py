"""Servers that stall or drip inside an answer, on real sockets: none is waited for without an end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable

import pytest

from gateway.backends.base import BackendTimeout
from tests.backends.conftest import ask, collect, make_backend

Told = Callable[[asyncio.StreamWriter], Awaitable[None]]

_WHOLE = json.dumps(
    {
        "id": "c",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "all of it"}, "finish_reason": "stop"}],
    }
).encode()
_JSON_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
_EVENTS_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
_DELTA = b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"content":"hi"}}]}\n\n'
_FINISH = _DELTA.replace(b'{"content":"hi"}', b"{}").replace(b"}]}", b',"finish_reason":"stop"}]}')


async def answered(tell: Told, *, is_stream: bool, idle_s: float = 0.05, whole_s: float = 5.0) -> bytes:
    """The answer of a server that does `tell` after each request, with the data of its chunks joined."""
    done = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            with contextlib.suppress(OSError):  # the client gave up
                await tell(writer)
                await reader.read()  # until the client closes
        finally:
            writer.close()
            done.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    backend = make_backend(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1")
    await backend.start()
    try:
        async with asyncio.timeout(10):
            chunks = await collect(backend.stream(ask(is_stream=is_stream, ttft_s=5.0, idle_s=idle_s, whole_s=whole_s)))
            return b"".join(chunk.data for chunk in chunks)
    except BackendTimeout:
        async with asyncio.timeout(10):
            await done.wait()  # the socket was closed
        raise
    finally:
        assert backend.running == 0
        await backend.aclose()
        server.close()


def drips(piece: bytes) -> Told:
    """Sends `piece` for ever, at a pace that is no silence."""

    async def tell(writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.005)

    return tell


async def test_a_whole_that_stalls() -> None:
    """From the first byte of a whole's body on the idle limit holds, not the long one for the answer to come."""

    async def tell(writer: asyncio.StreamWriter) -> None:
        writer.write(_JSON_HEAD % len(_WHOLE) + _WHOLE[: len(_WHOLE) // 2])

    with pytest.raises(BackendTimeout, match="fell silent"):
        await answered(tell, is_stream=False, whole_s=600.0)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_worker_that_was_held_up_reads_what_came_meanwhile(is_stream: bool) -> None:
    """A pause of the worker is no silence of the server: what waits in the socket is read before it is judged."""
    head, body = (_EVENTS_HEAD, _DELTA + _FINISH) if is_stream else (_JSON_HEAD % len(_WHOLE), _WHOLE)

    async def tell(writer: asyncio.StreamWriter) -> None:
        writer.write(head + body[:-40])
        await asyncio.sleep(0.02)
        time.sleep(0.2)  # noqa: ASYNC251
        writer.write(body[-40:-20])
        await asyncio.sleep(0.02)
        writer.write(body[-20:])

    assert b'"finish_reason":"stop"' in (await answered(tell, is_stream=is_stream)).replace(b" ", b"")


async def test_white_space_before_a_whole_only_keeps_the_connection() -> None:
    """Some servers send white space until the answer is there: it begins no body, and the answer is complete."""

    async def tell(writer: asyncio.StreamWriter) -> None:
        body = b"\n" * 4 + _WHOLE
        writer.write(_JSON_HEAD % len(body))
        for _ in range(4):
            writer.write(b"\n")
            await writer.drain()
            await asyncio.sleep(0.08)
        writer.write(_WHOLE)

    assert await answered(tell, is_stream=False) == b"\n" * 4 + _WHOLE


async def test_white_space_is_not_waited_for_without_an_end() -> None:
    """White space for ever ends at the limit for a whole."""

    async def tell(writer: asyncio.StreamWriter) -> None:
        writer.write(_JSON_HEAD % 1_000_000)
        await drips(b" ")(writer)

    with pytest.raises(BackendTimeout, match="sent nothing within"):
        await answered(tell, is_stream=False, whole_s=-4.8)


async def test_a_whole_that_drips_is_given_up() -> None:
    """A byte now and then ends each silence, and the whole is given up all the same."""

    async def tell(writer: asyncio.StreamWriter) -> None:
        writer.write(_JSON_HEAD % 1_000_000 + b'{"id": "')
        await drips(b"x")(writer)

    with pytest.raises(BackendTimeout, match="sent too little"):
        await answered(tell, is_stream=False)


@pytest.mark.parametrize("piece", [b": keep-alive\n\n", b"x"], ids=["comments", "half an event"])
async def test_a_stream_that_drips(piece: bytes) -> None:
    """Comments, or an event that never ends, keep no stream open for ever."""

    async def tell(writer: asyncio.StreamWriter) -> None:
        writer.write(_EVENTS_HEAD + _DELTA)
        await drips(piece)(writer)

    with pytest.raises(BackendTimeout, match="sent too little"):
        await answered(tell, is_stream=True)


async def test_a_finished_stream_that_drips_is_complete() -> None:
    """After the finish only usage is waited for: comments do not keep a client waiting."""

    async def tell(writer: asyncio.StreamWriter) -> None:
        writer.write(_EVENTS_HEAD + _DELTA + _FINISH)
        await drips(b": keep-alive\n\n")(writer)

    assert b'"finish_reason":"stop"' in await answered(tell, is_stream=True)
