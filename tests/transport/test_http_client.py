"""The HTTP/1.1 client against servers that write whatever a script says, and its parser under every way of cutting the bytes."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.backends.base import BackendBroken, BackendError, BackendTimeout, BackendUnavailable
from gateway.backends.openai.backend import OpenAIBackend
from gateway.transport import http_client
from gateway.transport.http_client import INFLATED_BYTES_MAX, Connection, Disconnected, Exchange
from gateway.transport.http_pool import Origin, Pool
from tests.backends.conftest import ask, collect, make_backend
from tests.transport.loops import Policy
from tests.transport.servers import CERTIFICATE, GOOD, WHOLE, Served, Wire, proxying_to, serve, tls_server


@pytest.fixture(scope="module")
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    """The loop that the gateway runs on: TLS and the ends of connections are its own there."""
    return Policy()


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


@asynccontextmanager
async def started(url: str, **options: Any) -> AsyncIterator[OpenAIBackend]:
    backend = make_backend(url, **options)
    await backend.start()
    yield backend
    assert backend.running == 0, "a stream was not accounted for"
    await backend.aclose()


def always(data: bytes, *, closes: bool = False) -> Callable[[Wire], Any]:
    async def script(wire: Wire) -> bool:
        await wire.send(data)
        return closes

    return script


async def asked(backend: OpenAIBackend, **fields: Any) -> bytes:
    [whole] = await collect(backend.stream(ask(is_stream=False, **fields)))
    return whole.data


# -- bytes, however they are cut -------------------------------------------------------------------------------------


class Transport(asyncio.Transport):
    """Takes what is written, and remembers what was done to it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_aborted = False

    def writelines(self, list_of_data: Any) -> None: ...
    def abort(self) -> None:
        self.is_aborted = True

    def is_closing(self) -> bool:
        return self.is_aborted

    def get_write_buffer_size(self) -> int:
        return 0


class Keeper:
    """Counts what it is told."""

    def __init__(self) -> None:
        self.freed_count = 0

    def opened(self, connection: Connection) -> None: ...
    def freed(self, connection: Connection) -> None:
        self.freed_count += 1

    def lost(self, connection: Connection) -> None: ...


bodies = st.binary(max_size=300)
framings = st.sampled_from(["length", "chunked", "close"])


def response(body: bytes, framing: str, steps: list[int], is_informed: bool, has_trailer: bool) -> bytes:
    """A response with `body`, framed in one of the three ways."""
    hints = b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n" if is_informed else b""
    if framing == "length":
        return hints + HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    if framing == "close":
        return hints + HEAD + b"\r\n" + body
    edges = sorted({0, len(body), *(min(step, len(body)) for step in steps)})
    chunks = [b"%x\r\n%b\r\n" % (end - start, body[start:end]) for start, end in pairwise(edges)]
    end = b"0\r\nX-Sum: 1\r\n\r\n" if has_trailer else b"0\r\n\r\n"
    return hints + HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(chunks) + end


@given(bodies, framings, st.lists(st.integers(0, 300), max_size=6), st.booleans(), st.booleans(), st.data())
@example(b'{"a":1}', "chunked", [3], True, True, None)
async def test_any_cut_gives_the_same_answer(
    body: bytes, framing: str, steps: list[int], is_informed: bool, has_trailer: bool, data: st.DataObject | None
) -> None:
    """However a response is framed and its bytes arrive, also one by one, status, headers and body are the same, twice in a row."""
    raw = response(body, framing, steps, is_informed, has_trailer)
    cuts = range(len(raw)) if data is None else data.draw(st.lists(st.integers(0, len(raw)), max_size=12))
    keeper = Keeper()
    connection = Connection(keeper)
    transport = Transport()
    connection.connection_made(transport)
    for turn in range(1 if framing == "close" else 2):
        exchange = Exchange(b"head", b"body")
        connection.begin(exchange)
        for start, end in pairwise([0, *sorted(cuts), len(raw)]):
            if start != end:
                connection.data_received(raw[start:end])
        if framing == "close":
            connection.eof_received()
        await exchange.answered()
        assert (exchange.status, exchange.headers[b"content-type"]) == (200, b"application/json")
        read = [part async for part in parts_of(exchange)]
        assert b"".join(read) == body
        assert keeper.freed_count == (0 if framing == "close" else turn + 1)


@given(bodies.filter(len), framings, st.data())
async def test_a_cut_body_is_never_a_whole_one(body: bytes, framing: str, data: st.DataObject) -> None:
    """A connection that ends before its response does is an error, after all that came before it, and is not used again."""
    raw = response(body, framing, [5, 50], False, False)
    cut = data.draw(st.integers(0, len(raw) - 1))
    keeper = Keeper()
    connection = Connection(keeper)
    connection.connection_made(Transport())
    exchange = Exchange(b"head")
    connection.begin(exchange)
    if cut:
        connection.data_received(raw[:cut])
    if framing == "close":
        connection.connection_lost(ConnectionResetError())  # an end of the stream would be this body's end
    else:
        connection.eof_received()
        connection.connection_lost(None)
    read: list[bytes] = []

    async def read_all() -> None:
        await exchange.answered()
        async for part in parts_of(exchange):
            read.append(part)

    with pytest.raises(Disconnected):
        await read_all()
    assert body.startswith(b"".join(read))
    assert keeper.freed_count == 0


@given(st.binary(max_size=200), st.integers(0, 60))
async def test_any_bytes_end_in_an_answer_or_an_error(junk: bytes, at: int) -> None:
    """Whatever is thrown in, the connection keeps its head: the exchange is over by the end of the stream, one way or the other."""
    connection = Connection(Keeper())
    connection.connection_made(Transport())
    exchange = Exchange(b"head")
    connection.begin(exchange)
    for piece in (GOOD[:at], junk, GOOD[at:]):
        connection.data_received(piece)
    connection.eof_received()
    connection.connection_lost(None)
    assert exchange.is_over


async def parts_of(exchange: Exchange) -> AsyncIterator[bytes]:
    while part := await exchange.read():
        yield part


# -- servers that misbehave ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n" * 3,
        b"\x15\x03\x01\x00\x02\x02\x16" * 4,
        b"HTTP/1.1 2x0 OK\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n",
        HEAD + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabc",
        HEAD + b"X: " + b"y" * (http_client.HEAD_BYTES_MAX + 300_000),
        b"HTTP/1.1 100 Continue\r\n\r\n" * 20_000,
    ],
    ids=["ssh", "tls", "status", "upgrade", "two lengths", "huge head", "endless interim"],
)
async def test_what_is_no_response_is_an_unavailable_deployment(data: bytes) -> None:
    """Garbage, a head without end, interim responses without end: an error at once, and the connection is closed."""
    async with serve(always(data)) as served, started(served.url) as backend:
        with pytest.raises(BackendUnavailable) as caught:
            await asked(backend)
        assert caught.value.message == "The deployment does not speak HTTP"
        await asyncio.wait_for(served.closed[0].wait(), 30)
        assert len(served.requests) == 1


@pytest.mark.parametrize(
    "body",
    [
        b"Transfer-Encoding: chunked\r\n\r\nzz\r\nhello\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n5;" + b"x" * 600_000,
        b"Transfer-Encoding: chunked\r\n\r\n0\r\nX: " + b"x" * 600_000,
        b"Content-Encoding: br\r\nContent-Length: 5\r\n\r\nhello",
        b"Content-Encoding: gzip\r\nContent-Length: 5\r\n\r\nhello",
        b"Content-Length: 400\r\n\r\n" + WHOLE,
    ],
    ids=["chunk size", "chunk extension", "trailer", "unknown coding", "not gzip", "short"],
)
@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_body_that_is_none_is_a_broken_answer(body: bytes, is_stream: bool) -> None:
    """Framing that makes no sense, a coding nobody asked for, an end before the announced one."""
    head = HEAD.replace(b"application/json", b"text/event-stream") if is_stream else HEAD
    async with serve(always(head + body, closes=True)) as served, started(served.url) as backend:
        with pytest.raises(BackendBroken):
            await collect(backend.stream(ask(is_stream=is_stream)))


async def test_a_small_body_cannot_inflate_without_bound() -> None:
    """What a compressed body may become is bounded, whatever its size on the wire."""
    bomb = gzip.compress(bytes(INFLATED_BYTES_MAX + 1))
    head = HEAD + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(bomb)
    async with serve(always(head + bomb)) as served, started(served.url) as backend:
        with pytest.raises(BackendBroken):
            await asked(backend)


@pytest.mark.parametrize(
    "pieces",
    [[bytes([byte]) for byte in HEAD + b"X: y" * 200], [b"HTTP/1.1 102 Processing\r\n\r\n"] * 500],
    ids=["byte by byte", "always processing"],
)
async def test_a_server_that_never_comes_to_the_point_is_a_timeout(pieces: list[bytes]) -> None:
    """A head that trickles in does not outlive the first chunk's time-out."""

    async def dawdle(wire: Wire) -> None:
        for piece in pieces:
            await wire.send(piece)
            await asyncio.sleep(0.02)

    async with serve(dawdle) as served, started(served.url) as backend:
        with pytest.raises(BackendTimeout):
            await collect(backend.stream(ask(ttft_s=0.3)))
        await asyncio.wait_for(served.closed[0].wait(), 30)


async def test_an_early_refusal_is_heard() -> None:
    """A server that answers before it has read the request, and closes, is understood."""
    refusal = (
        b"HTTP/1.1 413 Too Large\r\nContent-Type: application/json\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"
    )
    async with serve(always(refusal, closes=True)) as served, started(served.url) as backend:
        with pytest.raises(BackendError) as caught:
            await asked(backend, messages=[{"role": "user", "content": "x" * 100_000}])
        assert caught.value.status == 413


async def test_no_chunk_waits_for_the_next() -> None:
    """A server that goes on only when its last chunk was heard, whether an event came in one piece or in three, is heard."""
    heard = asyncio.Event()
    answer = json.loads(WHOLE)

    async def careful(wire: Wire) -> None:
        await wire.send(HEAD.replace(b"application/json", b"text/event-stream") + b"Transfer-Encoding: chunked\r\n\r\n")
        for number in range(8):
            finish = "stop" if number == 7 else None
            choice = {"index": 0, "delta": {"content": str(number)}, "finish_reason": finish}
            event = b"data: " + json.dumps({**answer, "choices": [choice]}).encode() + b"\n\n"
            for piece in (event,) if number % 2 else (event[:9], event[9:30], event[30:]):
                await wire.send(b"%x\r\n%b\r\n" % (len(piece), piece))
                await asyncio.sleep(0)
            await heard.wait()
            heard.clear()
        await wire.send(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    async with serve(careful) as served, started(served.url) as backend:
        told = []
        async for chunks in backend.stream(ask()):
            told += [json.loads(chunk.data)["choices"][0]["delta"]["content"] for chunk in chunks]
            heard.set()
        assert told == list("01234567")


# -- connections -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "connections"),
    [
        (GOOD, 1),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + GOOD, 1),
        (GOOD.replace(b"\r\n", b"\n"), 1),
        (GOOD.replace(b"Content-Length: ", b"Connection: close\r\nContent-Length: "), 2),
        (GOOD.replace(b"HTTP/1.1", b"HTTP/1.0"), 2),
        (GOOD + b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", 2),
        (GOOD + b"surplus", 2),
    ],
    ids=["plain", "interim", "bare line feeds", "close", "HTTP/1.0", "two answers", "surplus"],
)
async def test_a_connection_serves_again_only_where_it_is_clean(data: bytes, connections: int) -> None:
    """Kept where the response allows it; closed where more came than was asked for: it would be the next one's answer."""
    async with serve(always(data)) as served, started(served.url) as backend:
        for _ in range(2):
            assert await asked(backend) == WHOLE
        assert served.connections == connections


async def test_a_kept_connection_that_closes_unanswered_is_tried_once_more() -> None:
    """On a fresh connection, and not a third time; what had begun to answer, or was fresh itself, is not asked again."""

    async def moody(wire: Wire) -> bool:
        if wire.number == 0:
            is_first = len(served.requests) == 1
            await wire.send(GOOD if is_first else b"")
            return not is_first
        await wire.send(b"" if wire.number == 2 else b"HTTP/1.1 " if is_teasing else GOOD)
        return wire.number == 2 or is_teasing

    is_teasing = False
    async with serve(moody) as served, started(served.url) as backend:
        assert await asked(backend) == WHOLE
        assert await asked(backend) == WHOLE  # the kept one closed, a fresh one answered
        assert [number for number, _ in served.requests] == [0, 0, 1]
        is_teasing = True
        with pytest.raises(BackendUnavailable):
            await asked(backend)  # the kept one began to answer
        assert [number for number, _ in served.requests] == [0, 0, 1, 1]
        with pytest.raises(BackendUnavailable):
            await asked(backend)  # a fresh one closed
        assert [number for number, _ in served.requests] == [0, 0, 1, 1, 2]


async def test_what_waits_for_work_is_bounded_and_used_last_first() -> None:
    """Of three connections at once two are kept, the last used serves next, and after a while nothing is left open."""
    gate = asyncio.Event()

    async def gated(wire: Wire) -> None:
        await gate.wait()
        await wire.send(GOOD)

    async with serve(gated) as served:
        pool = Pool(Origin("127.0.0.1", served.port, False), 2.0, idle_max=2, keep_alive_s=0.2)
        exchanges = [Exchange(b"POST / HTTP/1.1\r\n\r\n") for _ in range(3)]
        sent = [asyncio.create_task(pool.send(exchange)) for exchange in exchanges]
        while len(served.requests) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        gate.set()
        await asyncio.gather(*sent)
        while not any(event.is_set() for event in served.closed.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        last = []
        for _ in range(3):
            exchange = Exchange(b"POST / HTTP/1.1\r\n\r\n")
            await pool.send(exchange)
            last.append(served.requests[-1][0])
        assert len(set(last)) == 1
        for event in served.closed.values():
            await asyncio.wait_for(event.wait(), 30)
        assert served.connections == 3
        pool.aclose()


async def test_a_slow_reader_holds_the_server_back() -> None:
    """A body that nobody reads is left in the server, and comes whole once somebody does."""
    size = 64 << 20
    written = 0

    async def flood(wire: Wire) -> None:
        nonlocal written
        await wire.send(HEAD + b"Content-Length: %d\r\n\r\n" % size)
        while written < size:
            await wire.send(b"x" * 65_536)
            written += 65_536

    async with serve(flood) as served:
        pool = Pool(Origin("127.0.0.1", served.port, False), 2.0, idle_max=2, keep_alive_s=0.2)
        exchange = Exchange(b"POST / HTTP/1.1\r\n\r\n")
        await pool.send(exchange)
        before = -1
        while before != written:
            before = written
            await asyncio.sleep(0.1)
        assert written < size
        assert sum([len(part) async for part in parts_of(exchange)]) == size
        again = Exchange(b"POST / HTTP/1.1\r\n\r\n")
        written = size
        await pool.send(again)
        again.close()
        with pytest.raises(Disconnected):
            await again.read()
        await asyncio.wait_for(served.closed[0].wait(), 30)
        assert served.connections == 1
        pool.aclose()


async def test_connecting_can_be_given_up_and_is_bounded() -> None:
    """A handshake that never ends is left at once by `aclose`, and by whichever time-out comes first."""
    silent = await asyncio.start_server(lambda reader, writer: asyncio.sleep(60, writer), "127.0.0.1", 0)
    url = f"https://127.0.0.1:{silent.sockets[0].getsockname()[1]}/v1"
    async with started(url, connect_timeout_s=60.0) as backend:
        stream = backend.stream(ask(ttft_s=60))
        reader = asyncio.create_task(collect(stream))
        await asyncio.sleep(0.05)
        await stream.aclose()
        with pytest.raises(BackendBroken):
            await asyncio.wait_for(reader, 30)
        with pytest.raises(BackendTimeout):
            await collect(backend.stream(ask(ttft_s=0.1)))
    async with started(url, connect_timeout_s=0.1) as backend:
        with pytest.raises(BackendUnavailable) as caught:
            await asked(backend)
        assert caught.value.message == "The deployment cannot be reached"
    silent.close()


# -- addresses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "line"),
    [
        ("http://127.0.0.1:{port}/v1/", b"POST /v1/chat/completions HTTP/1.1"),
        ("http://127.0.0.1:{port}", b"POST /chat/completions HTTP/1.1"),
        (
            "http://127.0.0.1:{port}/a b/é?api-version=1&x=2",
            b"POST /a%20b/%C3%A9/chat/completions?api-version=1&x=2 HTTP/1.1",
        ),
    ],
)
async def test_a_base_url_may_have_a_path_and_a_query(base: str, line: bytes) -> None:
    """The path is continued and the query kept, as Azure wants it."""
    async with serve(always(GOOD)) as served, started(base.format(port=served.port)) as backend:
        await asked(backend)
        head = served.requests[0][1]
        assert head.split(b"\r\n")[0] == line
        assert b"\r\nHost: 127.0.0.1:%d\r\n" % served.port in head


async def test_a_base_url_may_name_a_unix_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request goes to the socket, by no proxy, and its connection is kept; without a server nobody is reached."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    async with started(f"http://unix:{tmp_path}/s.sock:/v1") as backend:
        async with serve(always(GOOD), socket_path=tmp_path / "s.sock") as served:
            for _ in range(2):
                assert b"hi" in await asked(backend)
        assert [number for number, _ in served.requests] == [0, 0]
        head = served.requests[0][1]
        assert head.startswith(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n")
    async with started(f"http://unix:{tmp_path}/none.sock:/v1") as backend:
        with pytest.raises(BackendUnavailable, match="cannot be reached"):
            await asked(backend)


def test_how_hosts_are_named() -> None:
    """A default port is left out, an IPv6 address stands in brackets."""
    assert Origin("api.example", 443, True).authority == "api.example"
    assert Origin("api.example", 443, False).authority == "api.example:443"
    assert Origin("::1", 8000, False).authority == "[::1]:8000"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"api_key": ""}, b"Authorization: Basic dXM6cCBk"),
        ({"api_key": "sk"}, b"Authorization: Bearer sk"),
        ({"api_key": "sk", "headers": {"authorization": "Token t"}}, b"authorization: Token t"),
    ],
)
async def test_there_is_one_authorization(options: dict[str, Any], field: bytes) -> None:
    """A header that is set wins over the key, and the key over what the URL says."""
    async with serve(always(GOOD)) as served, started(served.url.replace("//", "//us:p%20d@"), **options) as backend:
        await asked(backend)
        lines = served.requests[0][1].split(b"\r\n")
        assert [line for line in lines if line.lower().startswith(b"authorization")] == [field]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"api_key": "sk-1\n"}, "the API key holds characters that no header can carry"),
        ({"headers": {"x-team": "a\r\nx-admin: 1"}}, "the header 'x-team' holds characters that no header can carry"),
        ({"headers": {"x team": "a"}}, "the header 'x team' holds characters that no header can carry"),
        (
            {"headers": {"Content-Length": "0"}},
            "the header 'content-length' is not to be set: it belongs to the connection",
        ),
    ],
)
async def test_a_head_that_cannot_be_is_no_request(options: dict[str, Any], reason: str) -> None:
    """Line ends in a key or a header, and headers that are the connection's: the deployment is unready and says why."""
    async with serve(always(GOOD)) as served, started(served.url, **options) as backend:
        assert backend.load(1).reason == reason
        with pytest.raises(BackendUnavailable):
            await asked(backend)
        assert served.requests == []


# -- TLS and proxies -------------------------------------------------------------------------------------------------


async def test_a_server_is_trusted_by_its_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unknown to the machine, or for another name: nothing is sent. Trusted: answers come, and a new connection resumes."""
    async with serve(always(GOOD.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1)), tls_server()) as served:
        url = f"https://localhost:{served.port}/v1"
        async with started(url) as backend:
            with pytest.raises(BackendUnavailable) as caught:
                await asked(backend)
            assert caught.value.message == "The deployment cannot be reached"
            assert "certificate" in caught.value.detail
        monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
        async with started(url.replace("localhost", "127.0.0.2")) as backend:
            with pytest.raises(BackendUnavailable, match="cannot be reached"):
                await asked(backend)
        assert served.requests == []
    async with serve(always(GOOD), tls_server()) as served, started(f"https://localhost:{served.port}/v1") as backend:
        assert await asked(backend) == WHOLE
        assert await asked(backend) == WHOLE
        await asyncio.gather(asked(backend), asked(backend))
        assert served.connections == 2
        assert served.is_resumed == [False, True]


@pytest.fixture
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("http_proxy", "https_proxy", "no_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    return monkeypatch


async def test_a_proxy_forwards_what_is_plain(no_proxies: pytest.MonkeyPatch) -> None:
    """It is told the whole URL and given its credentials; what NO_PROXY names goes its own way."""
    seen: list[bytes] = []
    async with serve(proxying_to(Served(0), seen)) as proxy:
        no_proxies.setenv("http_proxy", f"http://us:er@127.0.0.1:{proxy.port}")
        async with started("http://upstream.test/v1") as backend:
            assert await asked(backend) == WHOLE
        lines = seen[0].split(b"\r\n")
        assert lines[0] == b"POST http://upstream.test/v1/chat/completions HTTP/1.1"
        assert b"Host: upstream.test" in lines
        assert b"Proxy-Authorization: Basic dXM6ZXI=" in lines
        no_proxies.setenv("no_proxy", "upstream.invalid")
        async with started("http://upstream.invalid/v1") as backend:
            with pytest.raises(BackendUnavailable):
                await asked(backend)
        assert len(seen) == 1


async def test_a_proxy_tunnels_what_is_secret(no_proxies: pytest.MonkeyPatch) -> None:
    """TLS runs through it to the server itself, on connections that are kept; its refusal is an unreachable deployment."""
    no_proxies.setenv("SSL_CERT_FILE", str(CERTIFICATE))
    seen: list[bytes] = []
    async with serve(always(GOOD), tls_server()) as served, serve(proxying_to(served, seen)) as proxy:
        no_proxies.setenv("https_proxy", f"127.0.0.1:{proxy.port}")
        async with started("https://upstream.test/v1") as backend:
            assert await asked(backend) == WHOLE
            assert await asked(backend) == WHOLE
        assert [line.split(b"\r\n")[0] for line in seen] == [b"CONNECT upstream.test:443 HTTP/1.1"]
        assert b"Proxy-Authorization" not in served.requests[0][1]
    async with serve(proxying_to(served, seen, b"407 Authenticate")) as proxy:
        no_proxies.setenv("https_proxy", f"http://127.0.0.1:{proxy.port}")
        async with started("https://upstream.test/v1") as backend:
            with pytest.raises(BackendUnavailable) as caught:
                await asked(backend)
        assert caught.value.message == "The deployment cannot be reached"
        assert "407" in caught.value.detail
    no_proxies.setenv("https_proxy", "socks5://127.0.0.1:1080")
    async with started("https://upstream.test/v1") as backend:
        with pytest.raises(BackendUnavailable) as caught:
            await asked(backend)
    assert "socks5" in caught.value.detail
