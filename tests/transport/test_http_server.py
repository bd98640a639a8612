"""The server of `/v1` and `/admin`: what a client may do on a connection, and that all bytes are read by one parser."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from gateway.transport.http_server import HEAD_BYTES_MAX, WHEN_GONE, HttpServer, reserve

Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[dict[str, Any]]]


class App:
    """Answers what it was asked, in ways that the path asks for."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()
        self.bodies: list[bytes] = []
        self.seen: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)  # by the port of the client

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path == "/early":
            headers = [(b"content-length", b"2")]
            await send({"type": "http.response.start", "status": 413, "headers": headers})
            await send({"type": "http.response.body", "body": b"no"})
            return
        parts, message = [], await receive()
        while message["type"] == "http.request":
            parts.append(message["body"])
            if not message["more_body"]:
                break
            message = await receive()
        else:
            return
        body = b"".join(parts)
        self.bodies.append(body)
        self.seen[scope["client"][1]].append((path, body.decode("latin-1")))
        if path == "/wait":
            scope["extensions"][WHEN_GONE](self.gone.set)
            await self.gone.wait()
            return
        if path == "/split":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"x-a", b"1\r\nx-b: 2")]})
        elif path in ("/stream", "/cut", "/endless"):
            scope["extensions"][WHEN_GONE](self.gone.set)
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while path == "/endless" and not self.gone.is_set():
                await send({"type": "http.response.body", "body": bytes(100_000), "more_body": True})
            for byte in body:
                await send({"type": "http.response.body", "body": bytes([byte]), "more_body": True})
            if path == "/cut":
                return
            await send({"type": "http.response.body", "body": b""})
        else:
            names = sorted(name.decode() for name, _ in scope["headers"])
            said = json.dumps([scope["method"], path, body.decode("latin-1"), names]).encode()
            headers = [(b"content-length", b"%d" % len(said))]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": said})


class Client:
    """A connection, byte for byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def response(self) -> tuple[bytes, bytes]:
        """The head and the body of the next response."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        if b"transfer-encoding: chunked" not in head:
            length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
            return head, await self.reader.readexactly(length)
        body = b""
        while size := int(await self.reader.readline(), 16):
            body += await self.reader.readexactly(size)
            await self.reader.readexactly(2)
        await self.reader.readexactly(2)
        return head, body


class Serving:
    """A server of `app`, with `stall_s` of one second."""

    def __init__(self, app: App, address: str, port: int) -> None:
        self.app, self.address, self.port = app, address, port
        self._open: list[asyncio.StreamWriter] = []

    async def client(self) -> Client:
        reader, writer = await asyncio.open_connection(self.address, self.port)
        writer.transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._open.append(writer)
        return Client(reader, writer)

    def close(self) -> None:
        for writer in self._open:
            writer.close()


@pytest.fixture
async def serving() -> AsyncIterator[Serving]:
    with reserve("127.0.0.1", 0) as reserved:
        address, port = reserved.getsockname()
        app = App()
        server = HttpServer(app, address, port, stall_s=1)
        await server.start()
        serving = Serving(app, address, port)
        async with asyncio.timeout(120):
            yield serving
        app.gone.set()
        serving.close()
        await server.stop(grace_s=5.0)


@pytest.fixture
async def client(serving: Serving) -> Client:
    return await serving.client()


def post(path: str, body: bytes, *headers: bytes) -> bytes:
    lines = [b"POST %b HTTP/1.1" % path.encode(), b"Host: x", b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def chunked(path: str, body: bytes, *headers: bytes) -> bytes:
    lines = [b"POST %b HTTP/1.1" % path.encode(), b"Host: x", b"Transfer-Encoding: chunked", *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def said(body: bytes) -> tuple[str, str]:
    """The path and the body that the application saw."""
    _, path, sent, _ = json.loads(body)
    return path, sent


INNER = post("/inner", b"!")
UPGRADES = {
    "websocket": (
        b"Connection: Upgrade",
        b"Upgrade: websocket",
        b"Sec-WebSocket-Version: 13",
        b"Sec-WebSocket-Key: eA==",
    ),
    "h2c": (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABk"),
    "other": (b"connection: upgrade", b"UPGRADE: tcp"),
}
TEXT = b"a\nupgrade: b\r\nUpgrade:c\r\n\r\nupgrade: d"
STREAMS = {
    "bodies": (post("/a", b"one") + post("/b", b"two"), [("/a", "one"), ("/b", "two")]),
    "a body with heads": (post("/a", INNER + TEXT) + post("/b", b"2"), [("/a", (INNER + TEXT).decode()), ("/b", "2")]),
    "chunks": (
        chunked("/a", b"5\r\nhello\r\n6;x=y\r\n world\r\n0\r\nx-t: 1\r\nupgrade: u\r\n\r\n") + post("/b", b"2"),
        [("/a", "hello world"), ("/b", "2")],
    ),
    "no body between": (
        post("/a", b"1") + b"GET /g HTTP/1.1\r\nHost: x\r\n\r\n" + post("/b", b"2\r\n\r\n"),
        [("/a", "1"), ("/g", ""), ("/b", "2\r\n\r\n")],
    ),
    "blank lines": (b"\r\n\r\n" + post("/a", b"1") + b"\r\n" + post("/b", b"2"), [("/a", "1"), ("/b", "2")]),
    **{
        f"{name} {how}": (
            build + post("/b", INNER, *fields) + post("/c", b"3"),
            [*first, ("/b", INNER.decode()), ("/c", "3")],
        )
        for name, fields in UPGRADES.items()
        for how, build, first in (
            ("first", post("/a", INNER + TEXT, *fields), [("/a", (INNER + TEXT).decode())]),
            ("chunked", chunked("/a", b"3\r\none\r\n0\r\n\r\n", *fields), [("/a", "one")]),
            ("without a body", b"GET /a HTTP/1.1\r\nHost: x\r\n" + b"\r\n".join(fields) + b"\r\n\r\n", [("/a", "")]),
        )
    },
}
DOUBTFUL = {
    "lines end in LF": (post("/a", b"1") + post("/b", b"2")).replace(b"\r\n", b"\n"),
    "a folded field": post("/a", b"1", b"X-F: a\r\n b") + post("/b", b"2"),
    "two lengths": post("/a", b"12", b"Content-Length: 1") + post("/b", b"2"),
    "length and chunks": chunked("/a", b"0\r\n\r\n", b"Content-Length: 100") + post("/b", b"2"),
    "a length of two forms": post("/a", b"1").replace(b"Length: 1", b"Length: +1") + post("/b", b"2"),
    "a chunk of no size": chunked("/a", b"\r\n\r\n") + INNER,
    "a chunk that is longer": chunked("/a", b"1\r\nhello\r\n0\r\n\r\n") + INNER,
    "a space before a colon": post("/a", b"1", b"X-F : a") + post("/b", b"2"),
}


READINGS = {"lines end in LF": [("/a", "1"), ("/b", "2")], "length and chunks": [("/a", "")]}


async def seen(serving: Serving, stream: bytes, cuts: tuple[int, ...], wanted: int) -> list[tuple[str, str]]:
    """The requests that the application saw until it answered `wanted`, or the connection ended."""
    client = await serving.client()
    port = str(client.writer.get_extra_info("sockname")[1])
    begin = 0
    for end in (*cuts, len(stream)):
        client.send(stream[begin:end])
        begin = end
        await asyncio.sleep(0.002)
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):  # refused, or reset after a refusal
        for _ in range(wanted):
            await asyncio.wait_for(client.response(), 20)
    client.writer.close()
    return serving.app.seen.pop(port, [])


def cuts_of(stream: bytes, seed: str) -> list[tuple[int, ...]]:
    """Each byte alone, and some pairs of bytes."""
    random_ = random.Random(seed)
    pairs = (sorted(random_.sample(range(1, len(stream)), 2)) for _ in range(60))
    return [*((cut,) for cut in range(1, len(stream))), *map(tuple, pairs)]


async def all_seen(serving: Serving, stream: bytes, wanted: int, seed: str) -> list[list[tuple[str, str]]]:
    gate = asyncio.Semaphore(32)

    async def one(cuts: tuple[int, ...]) -> list[tuple[str, str]]:
        async with gate:
            return await seen(serving, stream, cuts, wanted)

    return await asyncio.gather(*map(one, cuts_of(stream, seed)))


@pytest.mark.parametrize("name", STREAMS)
async def test_requests_are_the_same_wherever_their_bytes_are_cut(serving: Serving, name: str) -> None:
    """A cut at any byte, or at two, changes no request, and no body is ever a head."""
    stream, expected = STREAMS[name]
    assert await seen(serving, stream, (), len(expected)) == expected
    for requests in await all_seen(serving, stream, len(expected), name):
        assert requests == expected


@pytest.mark.parametrize("name", DOUBTFUL)
async def test_a_doubtful_request_is_read_in_one_way(serving: Serving, name: str) -> None:
    """What servers and proxies read differently has one reading here, and an inner request is never one."""
    expected = await seen(serving, DOUBTFUL[name], (), 2)
    assert expected == READINGS.get(name, [])
    for requests in await all_seen(serving, DOUBTFUL[name], 2, name):
        assert requests == expected


async def test_a_body_may_come_in_pieces(client: Client, serving: Serving) -> None:
    """A body of a megabyte, and one whose sender waits to be asked for it."""
    large = bytes(range(256)) * 4096
    client.send(post("/a", large))
    assert said((await client.response())[1])[1] == large.decode("latin-1")
    client.send(b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n")
    assert (await client.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 Continue\r\n")
    client.send(b"ok")
    assert said((await client.response())[1])[1] == "ok"


@pytest.mark.parametrize("body", [b"x", bytes(150_000)])
async def test_a_client_that_leaves_is_told_of(client: Client, serving: Serving, body: bytes) -> None:
    """The callback comes when the connection ends, without anybody waiting for it in `receive`."""
    client.send(post("/wait", body))
    await asyncio.sleep(0.2)
    assert not serving.app.gone.is_set()
    client.writer.close()
    await asyncio.wait_for(serving.app.gone.wait(), 20)


async def test_an_answer_without_its_end_is_no_finished_one(client: Client) -> None:
    """The connection ends before the body's end: a client must not take what it has for the whole."""
    client.send(post("/cut", b"half"))
    answer = await client.reader.read()
    assert answer.endswith(b"\r\n1\r\nf\r\n")


async def test_a_response_cannot_be_split(client: Client) -> None:
    """A header that holds a line break never leaves."""
    client.send(post("/split", b"{}"))
    assert (await client.response())[0].startswith(b"HTTP/1.1 500 ")


async def test_a_client_may_ask_for_the_end(client: Client) -> None:
    """`Connection: close` is obeyed and said."""
    client.send(post("/a", b"bye", b"Connection: close"))
    head, _ = await client.response()
    assert b"connection: close" in head
    assert await client.reader.read() == b""


async def test_a_client_of_http_1_0_is_sent_no_chunks(client: Client) -> None:
    """It does not know them (RFC 9112, section 6.1): what is streamed to it ends with the connection."""
    client.send(post("/stream", b"hello").replace(b"HTTP/1.1", b"HTTP/1.0"))
    head, _, body = (await client.reader.read()).partition(b"\r\n\r\n")
    assert (b"chunked" in head, body) == (False, b"hello")


@pytest.mark.parametrize("size_bytes", [2 * HEAD_BYTES_MAX, 2_000_000])
async def test_a_head_that_is_too_long_is_refused(client: Client, size_bytes: int) -> None:
    """A head beyond the bound is answered by 431 and the connection's end, or by its end alone where more comes."""
    client.send(post("/a", b"", b"X-Long: " + b"x" * size_bytes))
    try:
        answer = await client.reader.read()
    except ConnectionError:
        answer = b""
    assert answer.startswith(b"HTTP/1.1 431 ") or (size_bytes == 2_000_000 and not answer)


@pytest.mark.parametrize(
    "more", [b"0\r\n" + b"x-a: b\r\n" * 20_000, b"0\r\nx-a: " + b"b" * 200_000, b"1;" + b"b" * 200_000]
)
async def test_what_is_neither_head_nor_body_is_bounded(client: Client, serving: Serving, more: bytes) -> None:
    """Trailers, a long one and extensions of chunks end the connection before they take a worker's memory."""
    client.send(chunked("/a", more))
    try:
        answer = await client.reader.read()
    except ConnectionError:
        answer = b""
    assert not answer.startswith(b"HTTP/1.1 200")
    assert serving.app.bodies == []


@pytest.mark.parametrize("size_bytes", [100_000, 30_000_000])
async def test_an_answer_before_the_bodys_end_is_seen(client: Client, size_bytes: int) -> None:
    """A client that sends all of its body before it reads gets the answer, not a reset."""
    client.send(post("/early", b"x" * size_bytes))
    await client.writer.drain()
    head, body = await client.response()
    assert head.startswith(b"HTTP/1.1 413 ")
    assert body == b"no"


async def test_a_client_that_takes_nothing_loses_its_connection(client: Client, serving: Serving) -> None:
    """A stream is not held for ever, and holds a bounded part in memory: the application waits, then hears that it ended."""
    client.reader._limit = 1  # type: ignore[attr-defined]  # it stops reading once a byte has come
    client.send(post("/endless", b""))
    await client.reader.readexactly(1)
    await asyncio.wait_for(serving.app.gone.wait(), 60)


async def test_a_client_that_takes_little_is_served(client: Client, serving: Serving) -> None:
    """It takes bytes, though slowly: longer than one that takes none would be served."""
    slow = client.writer.get_extra_info("socket")
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16_384)
    client.reader._limit = 1  # type: ignore[attr-defined]
    client.send(post("/endless", b""))
    for _ in range(30):
        await asyncio.sleep(0.1)
        await client.reader.read(1 << 20)
    assert not serving.app.gone.is_set()


async def test_a_stop_waits_for_what_is_under_way_and_takes_no_more(serving: Serving) -> None:
    """A request that runs is answered; a new connection is refused."""
    with reserve("127.0.0.1", 0) as reserved:
        address, port = reserved.getsockname()
        begun, may_end = asyncio.Event(), asyncio.Event()

        async def app(scope: dict[str, Any], receive: Receive, send: Send) -> None:
            begun.set()
            await may_end.wait()
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body", "body": b""})

        server = HttpServer(app, address, port, stall_s=1)
        await server.start()
        reader, writer = await asyncio.open_connection(address, port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await begun.wait()
        stopping = asyncio.create_task(server.stop(grace_s=30.0))
        async with asyncio.timeout(20):
            while True:
                try:
                    _, other = await asyncio.open_connection(address, port)
                except ConnectionRefusedError:
                    break
                other.close()
                await asyncio.sleep(0.02)
        may_end.set()
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 204 ")
        writer.close()
        await stopping


async def test_an_address_in_use_is_an_error(serving: Serving) -> None:
    """Another program's listener is not shared, and neither is another gateway's."""
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(OSError, match="in use"):
        reserve(*other.getsockname())
    with pytest.raises(OSError, match="in use"):
        reserve(serving.address, serving.port)
