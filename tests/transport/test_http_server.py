"""The server's protocol: what a client may do on one connection, and that it is answered as HTTP/1.1 has it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import uvicorn

from gateway.transport import http_server
from gateway.transport.http_server import WHEN_GONE, ClientStalled, ServerProtocol

Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[dict[str, Any]]]


class App:
    """Echoes what it is sent, whole or streamed, in ways that the path asks for."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()
        self.bodies: list[bytes] = []
        self.large = b""
        self.stalls: list[ClientStalled] = []
        self.headers: list[tuple[bytes, bytes]] = []

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return
        if scope["path"] == "/v1/wait":
            scope["extensions"][WHEN_GONE](self.gone.set)
            await self.gone.wait()
            return
        if scope["path"].endswith("/large"):
            await self.send_large(scope["path"], send)
            return
        if scope["path"].endswith("/early"):
            headers = [(b"content-length", b"2"), (b"connection", b"close")]
            await send({"type": "http.response.start", "status": 413, "headers": headers})
            await send({"type": "http.response.body", "body": b"no"})
            return
        parts, message = [], await receive()
        while message["type"] == "http.request":
            parts.append(message["body"])
            if not message["more_body"]:
                break
            message = await receive()
        body = b"".join(parts)
        self.bodies.append(body)
        self.headers = scope["headers"]
        if scope["path"] == "/v1/read-and-wait":
            scope["extensions"][WHEN_GONE](self.gone.set)
            await self.gone.wait()
        elif scope["path"] == "/v1/start-again":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": body, "more_body": True})
            await send({"type": "http.response.start", "status": 500, "headers": []})
        elif scope["path"] == "/v1/split":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"x-a", b"1\r\nx-b: 2")]})
            await send({"type": "http.response.body", "body": b""})
        elif scope["path"] == "/v1/stream":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for byte in body:
                await send({"type": "http.response.body", "body": bytes([byte]), "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        else:
            headers = [(b"content-length", b"%d" % len(body))]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": body})

    async def send_large(self, path: str, send: Send) -> None:
        """`large`, as events until the client stalls, in one chunk, or with its length."""
        headers = [] if "chunk" in path or "events" in path else [(b"content-length", b"%d" % len(self.large))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            if "events" in path:
                for start in range(0, len(self.large), 10_000):
                    piece = self.large[start : start + 10_000]
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"" if "events" in path else self.large})
        except ClientStalled as error:
            self.stalls.append(error)
            await send({"type": "http.response.body", "body": b"too slow"})
        finally:
            self.gone.set()


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


@pytest.fixture
async def app() -> App:
    return App()


@asynccontextmanager
async def connected(app: App, http: type[ServerProtocol] = ServerProtocol) -> AsyncIterator[Client]:
    """A client of a server of its own."""
    config = uvicorn.Config(
        app,  # type: ignore[arg-type]
        http=http,
        port=0,
        lifespan="off",
        log_config=None,
        server_header=False,
        timeout_keep_alive=1,
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    async with asyncio.timeout(10):
        while not server.started:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    client = Client(*await asyncio.open_connection("127.0.0.1", port))
    async with asyncio.timeout(20):
        yield client
    app.gone.set()  # where nobody told it
    client.writer.close()
    server.should_exit = True
    await serving


@pytest.fixture
async def client(app: App) -> AsyncIterator[Client]:
    async with connected(app) as made:
        yield made


def post(path: str, body: bytes, *headers: bytes) -> bytes:
    lines = [b"POST %b HTTP/1.1" % path.encode(), b"Host: x", b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


async def test_requests_follow_each_other_on_one_connection(client: Client) -> None:
    """Whole and streamed, short and long, under /v1 and elsewhere."""
    for path in ("/v1/echo", "/v1/stream", "/other", "/v1/echo?query=1", "/v1/a%20b"):
        for body in (b"hello", b"", b"x" * 300):
            client.send(post(path, body))
            head, answer = await client.response()
            assert head.startswith(b"HTTP/1.1 200 OK\r\ndate: ")
            assert answer == body


async def test_pipelined_requests_are_answered_in_order(client: Client) -> None:
    """What is sent before the answer to the one before has come waits its turn."""
    client.send(b"".join(post("/v1/echo", b"%d" % number) for number in range(5)) + post("/other", b"last"))
    assert [(await client.response())[1] for _ in range(6)] == [b"0", b"1", b"2", b"3", b"4", b"last"]


async def test_a_body_may_come_in_pieces_and_in_chunks(client: Client, app: App) -> None:
    """A body of a megabyte, one in chunks, and one whose sender waits to be asked for it."""
    large = bytes(range(256)) * 4096
    client.send(post("/v1/echo", large))
    assert (await client.response())[1] == large
    client.send(b"POST /v1/echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
    await asyncio.sleep(0.05)
    client.send(b"6\r\n world\r\n0\r\n\r\n")
    assert (await client.response())[1] == b"hello world"
    client.send(b"POST /v1/echo HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n")
    assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    client.send(b"ok")
    assert (await client.response())[1] == b"ok"
    assert app.bodies == [large, b"hello world", b"ok"]


async def test_a_client_that_leaves_is_told_of(client: Client, app: App) -> None:
    """The callback comes when the connection ends, without anybody waiting for it in `receive`."""
    client.send(post("/v1/wait", b"{}"))
    await asyncio.sleep(0.05)
    assert not app.gone.is_set()
    client.writer.close()
    await app.gone.wait()


@pytest.mark.parametrize("size_bytes", [1, 70_000, 150_000, 1_000_000])
async def test_a_client_that_leaves_after_a_large_body_is_told_of(client: Client, app: App, size_bytes: int) -> None:
    """However many bytes a request had, and however they came: nothing is left paused once they are read."""
    client.send(post("/v1/read-and-wait", b"x" * size_bytes))
    while not app.bodies:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    client.writer.close()
    await asyncio.wait_for(app.gone.wait(), 10)


async def test_a_client_that_leaves_with_requests_in_line_is_told_of(client: Client, app: App) -> None:
    """It is the request under way that hears of it, not the last one that came."""
    client.send(post("/v1/read-and-wait", b"1") + post("/v1/echo", b"2") + post("/v1/echo", b"3"))
    while not app.bodies:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    client.writer.close()
    await asyncio.wait_for(app.gone.wait(), 10)
    assert app.bodies == [b"1"]


async def test_a_response_that_begins_twice_is_no_finished_one(client: Client) -> None:
    """The connection ends before the body's end: a client must not take what it has for the whole."""
    client.send(post("/v1/start-again", b"half"))
    assert (await client.reader.read()).endswith(b"\r\n4\r\nhalf\r\n")


async def test_a_response_cannot_be_split(client: Client) -> None:
    """A header that holds a line break never leaves: the connection ends instead."""
    client.send(post("/v1/split", b"{}"))
    assert await client.reader.read() == b""


async def test_a_client_may_ask_for_the_end(client: Client) -> None:
    """`Connection: close` is obeyed and said."""
    client.send(post("/v1/echo", b"bye", b"Connection: close"))
    head, body = await client.response()
    assert (b"connection: close" in head, body) == (True, b"bye")
    assert await client.reader.read() == b""


async def test_an_idle_connection_is_closed_and_a_used_one_is_not(client: Client) -> None:
    """Idle time counts from the last answer."""
    for _ in range(4):
        client.send(post("/v1/echo", b"x"))
        await client.response()
        await asyncio.sleep(0.4)
    assert await client.reader.read() == b""


class Hasty(ServerProtocol):
    head_within_s = 0.2


async def test_a_head_is_bounded_in_time(app: App) -> None:
    """A second head that never ends is cut off."""
    async with connected(app, Hasty) as client:
        client.send(post("/v1/echo", b"x"))
        await client.response()
        client.send(b"POST /v1/echo HTTP/1.1\r\nX-Slow: ")
        assert await client.reader.read() == b""


async def test_a_head_that_is_too_long_is_refused(client: Client) -> None:
    """A head beyond the bound is answered by 431 and the connection's end."""
    client.send(post("/v1/echo", b"", b"X-Long: " + b"x" * http_server.HEAD_BYTES_MAX))
    assert (await client.reader.read()).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("path", ["/v1/early", "/other/early"])
@pytest.mark.parametrize("size_bytes", [100_000, 30_000_000])
async def test_an_answer_before_the_bodys_end_is_seen(client: Client, path: str, size_bytes: int) -> None:
    """A client that sends all of its body before it reads gets the answer and the connection's end, not a reset."""
    client.send(post(path, b"x" * size_bytes))
    await client.writer.drain()
    head, body = await client.response()
    assert head.startswith(b"HTTP/1.1 413 ")
    assert (body, await client.reader.read()) == (b"no", b"")


async def test_a_refusal_of_a_head_is_seen(client: Client) -> None:
    """Also if the client sends more after it."""
    client.send(post("/v1/echo", b"", b"X-Long: " + b"x" * 5_000_000))
    await client.writer.drain()
    assert (await client.reader.read()).startswith(b"HTTP/1.1 431 ")


class Observed(ServerProtocol):
    """Keeps the most bytes that waited in a worker for a client."""

    unsent_bytes_max = 0

    def pause_writing(self) -> None:
        super().pause_writing()
        Observed.unsent_bytes_max = max(Observed.unsent_bytes_max, self.transport.get_write_buffer_size())


@pytest.mark.parametrize("path", ["/v1/large", "/v1/chunk/large"])
@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
async def test_a_large_body_is_written_as_the_socket_takes_it(app: App, path: str, version: bytes) -> None:
    """However long a recorded answer is, a client that is slow to take it has a small part of it in a worker's memory."""
    app.large = bytes(range(256)) * 100_000
    Observed.unsent_bytes_max = 0
    async with connected(app, Observed) as client:
        client.send(post(path, b"").replace(b"HTTP/1.1", b"HTTP/" + version))
        head = await client.reader.readuntil(b"\r\n\r\n")
        if b"chunked" in head:
            size = int(await client.reader.readline(), 16)
            assert await client.reader.readexactly(size) == app.large
            assert await client.reader.readexactly(7) == b"\r\n0\r\n\r\n"
        else:
            assert await client.reader.readexactly(len(app.large)) == app.large
    assert 0 < Observed.unsent_bytes_max < 1_000_000


@pytest.mark.parametrize(("path", "end"), [("/v1/events/large", b"8\r\ntoo slow\r\n0\r\n\r\n"), ("/v1/large", b"")])
async def test_a_client_that_takes_nothing_is_cut_with_a_reason(app: App, path: str, end: bytes) -> None:
    """The endpoint learns of it; a stream may be ended in its own words, which follow what was sent; a body of known length
    ends before its length."""
    app.large = bytes(60_000_000)
    async with connected(app, partial(ServerProtocol, stall_s=0.05)) as client:  # type: ignore[arg-type]
        client.reader._limit = 1  # type: ignore[attr-defined]  # it stops reading once a byte has come
        client.send(post(path, b""))
        await client.reader.readexactly(1)
        await app.gone.wait()
        assert [error.stall_s for error in app.stalls] == [0.05]
        taken, last = 0, b""
        with contextlib.suppress(ConnectionResetError):
            while piece := await client.reader.read(1 << 20):
                taken, last = taken + len(piece), (last + piece)[-1000:]
        assert taken < 60_000_000
        assert last.endswith(end)


async def test_a_client_that_takes_little_is_served(app: App) -> None:
    """It takes bytes, though fewer in `stall_s` than the kernel waits for before it asks for more."""
    app.large = bytes(60_000_000)
    async with connected(app, partial(ServerProtocol, stall_s=0.3)) as client:  # type: ignore[arg-type]
        slow = client.writer.get_extra_info("socket")
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16_384)
        client.reader._limit = 1  # type: ignore[attr-defined]  # it reads as often as it is asked for a byte
        client.send(post("/v1/events/large", b""))
        for _ in range(10):
            await asyncio.sleep(0.1)
            await client.reader.read(1 << 20)
        assert app.stalls == []


class Brief(ServerProtocol):
    linger_idle_s = 0.05
    lost = 0

    def connection_lost(self, exc: Exception | None) -> None:
        Brief.lost += 1
        super().connection_lost(exc)


@pytest.mark.parametrize("is_endless", [False, True])
async def test_a_body_is_not_taken_for_ever(app: App, is_endless: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that was answered, and neither ends its body nor closes, is cut off: whether it sends or not."""
    monkeypatch.setattr(http_server, "LINGER_S_MAX", 0.2)
    async with connected(app, Brief) as client:
        client.send(b"POST /v1/early HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n\r\nx")
        assert (await client.response())[1] == b"no"
        before = Brief.lost
        while Brief.lost == before:
            client.send(b"x" if is_endless else b"")
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("name", [b"Upgrade", b"upgrade", b"UPGRADE"])
async def test_an_offer_to_upgrade_is_ignored_however_it_comes(client: Client, name: bytes) -> None:
    """Whole, or cut anywhere: a client that would speak HTTP/2 is answered in HTTP/1.1, its body read."""
    request = post("/v1/echo", b"body", b"Connection: Upgrade", name + b": h2c", b"X-Up: u")
    start = request.index(name + b":")
    for cut in range(start - 3, start + len(name) + 4):
        client.send(request[:cut])
        await asyncio.sleep(0.01)
        client.send(request[cut:])
        assert (await asyncio.wait_for(client.response(), 10))[1] == b"body"


async def test_a_head_may_be_cut_anywhere_before_a_large_body(client: Client) -> None:
    """Also inside the line breaks that end it: what follows them is no head, and is not counted as one."""
    body = b"x" * (2 * http_server.HEAD_BYTES_MAX)
    request = post("/v1/echo", body)
    end = request.index(b"\r\n\r\n")
    for cut in range(end, end + 5):
        client.send(request[:cut])
        await asyncio.sleep(0.01)
        client.send(request[cut:])
        assert (await asyncio.wait_for(client.response(), 10))[1] == body


async def test_a_request_may_come_byte_by_byte(client: Client) -> None:
    """Every byte a read of its own, with and without headers."""
    for request in (post("/v1/echo", b"hi", b"Upgrade: h2c", b"X: upgrade: u"), b"POST /v1/echo HTTP/1.1\r\n\r\n"):
        for byte in request:
            client.send(bytes([byte]))
            await asyncio.sleep(0)
        head, _ = await asyncio.wait_for(client.response(), 10)
        assert head.startswith(b"HTTP/1.1 200 ")


async def test_a_client_of_http_1_0_is_sent_no_chunks(client: Client) -> None:
    """It does not know them (RFC 9112, section 6.1): what is streamed to it ends with the connection."""
    client.send(post("/v1/stream", b"hello").replace(b"HTTP/1.1", b"HTTP/1.0"))
    head, _, body = (await client.reader.read()).partition(b"\r\n\r\n")
    assert (b"connection: close" in head, body) == (True, b"hello")


CHUNKED = b"POST %b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("path", [b"/v1/echo", b"/other"])
async def test_trailers_are_no_headers(client: Client, app: App, path: bytes) -> None:
    """Fields after a body are read and dropped, also where the whole request arrives at once; the next one has its own."""
    for _ in range(2):
        client.send(CHUNKED % path + b"5\r\nhello\r\n0\r\nAuthorization: Bearer other\r\n\r\n")
        assert (await client.response())[1] == b"hello"
        assert [name for name, _ in app.headers] == [b"host", b"transfer-encoding"]


@pytest.mark.parametrize("path", [b"/v1/echo", b"/other"])
@pytest.mark.parametrize(
    "more", [b"0\r\n" + b"x-a: b\r\n" * 20_000, b"0\r\nx-a: " + b"b" * 200_000, b"1;" + b"b" * 200_000]
)
async def test_what_is_neither_head_nor_body_is_bounded(client: Client, path: bytes, more: bytes) -> None:
    """Trailers, a long one and extensions of chunks take no more of a worker's memory than a head may."""
    client.send(CHUNKED % path)
    await asyncio.sleep(0.02)  # one read is not looked at in parts
    client.send(more)
    assert (await client.reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 431 ")
    assert b'"code":"headers_too_large"' in await client.reader.read()


class Impatient(ServerProtocol):
    """A server that waits a twentieth of a second for a body."""

    body_within_s = 0.05


@pytest.mark.parametrize("path", ["/v1/echo", "/other"])
async def test_a_body_that_drips_is_refused(app: App, path: str) -> None:
    """A body that comes slower than the least rate gets 408, and its connection ends."""
    async with connected(app, Impatient) as client:
        client.send(b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n" % path.encode())
        for _ in range(3):
            client.send(b"x")
            await asyncio.sleep(0.001)
        head = await client.reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ")
        assert b'"code":"request_timeout"' in await client.reader.read()


async def test_a_large_body_has_time_by_its_size(app: App) -> None:
    """Each 500 bytes that came give a sender a second more."""
    async with connected(app, Impatient) as client:
        body = b"x" * 20_000
        client.send(post("/v1/echo", body)[:-1])
        await asyncio.sleep(0.2)
        client.send(body[-1:])
        assert (await client.response())[1] == body
