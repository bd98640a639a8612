"""The HTTP client and the Redis connection by servers' bytes, which arrive cut at each byte and each pair of bytes."""

from __future__ import annotations

import asyncio
import gzip
import socket
import threading
from collections.abc import Iterator
from itertools import combinations, pairwise
from typing import Any

import pytest
import uvloop
from redis.exceptions import RedisError

from cache.event_loop import Loop
from cache.redis_connection import Pending, RedisWire
from gateway.transport.http_client import HEAD_BYTES_MAX, Connection, Exchange, TransportError
from gateway.transport.http_pool import Origin, Pool
from tests.transport.loops import Policy
from tests.transport.test_http_client import Keeper, Transport


@pytest.fixture(scope="module")
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    return Policy()


OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
EVIL = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil"
RESPONSES = {
    "length": OK + b"Content-Length: 3\r\n\r\nabc",
    "empty": OK + b"Content-Length: 0\r\n\r\n",
    "no content": b"HTTP/1.1 204 No Content\r\n\r\n",
    "not modified": b"HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n",
    "chunked": CHUNKED + b"2\r\nab\r\n1\r\nc\r\n0\r\n\r\n",
    "extension": CHUNKED + b"2;x=1\r\nab\r\n0\r\n\r\n",
    "trailer": CHUNKED + b"2\r\nab\r\n0\r\nStatus: 500\r\n\r\n",
    "until the end": OK + b"\r\nabc",
    "interim": b"HTTP/1.1 103 Early\r\nA: 1\r\n\r\nHTTP/1.1 100 Go\r\n\r\n" + OK + b"Content-Length: 1\r\n\r\na",
    "bare line feeds": b"HTTP/1.1 200 OK\nContent-Length: 3\n\nabc",
    "folded": OK + b"A: b\r\n c\r\nContent-Length: 2\r\n\r\nab",
    "closes": OK + b"Connection: close\r\nContent-Length: 1\r\n\r\na",
    "1.0": b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\na",
    "upgrade": OK + b"Connection: upgrade\r\nUpgrade: h2c\r\nContent-Length: 1\r\n\r\na",
    "switching": b"HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\nabc",
    "gzip": OK + b"Content-Encoding: gzip\r\nContent-Length: 21\r\n\r\n" + gzip.compress(b"a", mtime=0),
    "unknown coding": OK + b"Content-Encoding: br\r\nContent-Length: 1\r\n\r\na",
    "surplus": OK + b"Content-Length: 1\r\n\r\naX",
    "another answer": OK + b"Content-Length: 1\r\n\r\na" + EVIL,
    "another after chunks": CHUNKED + b"1\r\na\r\n0\r\n\r\n" + EVIL,
    "another after none": b"HTTP/1.1 204 No\r\n\r\n" + EVIL,
    "two lengths": OK + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    "length and chunks": OK + b"Content-Length: 9\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n",
    "chunks twice": OK + b"Transfer-Encoding: chunked, chunked\r\n\r\n1\r\na\r\n0\r\n\r\n",
    "not chunked last": OK + b"Transfer-Encoding: chunked, gzip\r\n\r\n1\r\na\r\n0\r\n\r\n",
    "negative": OK + b"Content-Length: -1\r\n\r\na",
    "chunk size": CHUNKED + b"g\r\na\r\n0\r\n\r\n",
    "long chunk": CHUNKED + b"1\r\nabc\r\n0\r\n\r\n",
    "short": OK + b"Content-Length: 9\r\n\r\nab",
    "short chunk": CHUNKED + b"9\r\nab",
    "half a head": OK + b"Content-Len",
    "nothing": b"",
    "space before colon": OK + b"Content-Length : 1\r\n\r\na",
    "no status": b"HELLO\r\n\r\n",
}


def pieces(raw: bytes, cuts: tuple[int, ...]) -> Iterator[bytes]:
    yield from (raw[start:end] for start, end in pairwise((0, *cuts, len(raw))) if start != end)


async def outcome(raw: bytes, cuts: tuple[int, ...]) -> tuple[Any, ...]:
    """What the client makes of a response: status, headers, body, error, and whether the connection serves again in the end."""
    keeper = Keeper()
    connection, transport, exchange = Connection(keeper), Transport(), Exchange(b"head")
    connection.connection_made(transport)
    connection.begin(exchange)
    for piece in pieces(raw, cuts):
        if not transport.is_aborted:
            connection.data_received(piece)
    serves = keeper.freed_count == 1 and not transport.is_aborted
    connection.eof_received()
    connection.connection_lost(None)
    body, error = b"", ""
    try:
        await exchange.answered()
        while part := await exchange.read():
            body += part
    except TransportError as failed:
        error = type(failed).__name__
    return exchange.status, dict(exchange.headers), body, error, serves


@pytest.mark.parametrize("name", RESPONSES)
async def test_a_cut_changes_no_answer(name: str) -> None:
    """However the bytes of a response arrive, the answer is the same, whole or broken; what follows it ends the connection."""
    raw = RESPONSES[name]
    expected = await outcome(raw, ())
    assert b"evil" not in expected[2]
    places = range(1, len(raw))
    for cuts in [*((one,) for one in places), *combinations(places, 2), tuple(places)]:
        assert await outcome(raw, cuts) == expected, cuts


@pytest.mark.parametrize("size", [HEAD_BYTES_MAX - 1_000, HEAD_BYTES_MAX + 1_000])
@pytest.mark.parametrize("fields", [1, 50])
async def test_the_bound_of_a_head_is_the_same_in_one_piece(size: int, fields: int) -> None:
    """A head that is too large is refused also where it comes with its body in one read; one below the bound never is."""
    head = b"".join(b"X-%d: %b\r\n" % (number, b"y" * (size // fields - 20)) for number in range(fields))
    raw = OK + head + b"Content-Length: 1\r\n\r\na"
    expected = await outcome(raw, ())
    assert (expected[3] == "NotHTTP") == (size > HEAD_BYTES_MAX)
    for cuts in ((len(raw) - 1,), (len(raw) // 2,), tuple(range(1, len(raw), 1_000))):
        assert await outcome(raw, cuts) == expected


def test_bytes_after_a_response_answer_no_other_request() -> None:
    """An answer that nobody asked for, which lies in the socket when the connection is taken again, is nobody's."""
    may_send, has_sent = threading.Event(), threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        for is_first in (True, False):
            line, _ = listener.accept()
            line.recv(1_000)
            line.sendall(OK + b"Content-Length: 4\r\n\r\n" + (b"good" if is_first else b"next"))
            may_send.wait(60)
            line.sendall(EVIL)
            has_sent.set()

    async def ask() -> None:
        pool = Pool(Origin("127.0.0.1", listener.getsockname()[1], False), 5.0, idle_max=2)
        told = []
        for _ in range(2):
            exchange = Exchange(b"POST / HTTP/1.1\r\n\r\n")
            await pool.send(exchange)
            told.append(await body_of(exchange))
            may_send.set()
            has_sent.wait(60)  # the event loop is busy, and reads nothing
        assert told == [b"good", b"next"]
        pool.aclose()

    server = threading.Thread(target=answer, daemon=True)
    server.start()
    with listener:
        uvloop.run(ask(), loop_factory=Loop)
        server.join(10)


async def body_of(exchange: Exchange) -> bytes:
    return b"".join([part async for part in parts(exchange)])


async def parts(exchange: Exchange) -> Any:
    while part := await exchange.read():
        yield part


REPLIES = {
    "plain": b"+OK\r\n:7\r\n$3\r\na\r\n\r\n",
    "of all kinds": b"*2\r\n$1\r\na\r\n_\r\n%1\r\n+k\r\n,1.5\r\n-ERR no\r\n",
    "a push between": b"+OK\r\n>2\r\n+invalidate\r\n*1\r\n$1\r\nk\r\n:7\r\n+c\r\n",
    "one too many": b"+a\r\n+b\r\n+c\r\n+evil\r\n",
    "too few": b"+a\r\n+b\r\n$9\r\nabc",
    "no protocol": b"+a\r\n!!\r\n+c\r\n",
    "HTTP": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "negative": b"$-5\r\n+b\r\n+c\r\n",
    "deep": b"*1\r\n" * 12 + b"+a\r\n",
    "long number": b":99999999999999999999999\r\n+b\r\n+c\r\n",
}


class Wired(asyncio.Transport):
    """Takes what is written."""

    is_aborted = False

    def write(self, data: Any) -> None: ...
    def abort(self) -> None:
        self.is_aborted = True


async def replied(raw: bytes, cuts: tuple[int, ...]) -> list[str]:
    """What three commands got, and whether the connection lasts."""
    lost: list[RedisError] = []

    def end(error: RedisError, unanswered: list[Pending]) -> None:
        lost.append(error)
        for pending in unanswered:
            pending.future.set_exception(error)

    loop, transport = asyncio.get_running_loop(), Wired()
    wire = RedisWire(60.0, end, lambda pending, error: pending.future.set_exception(error))
    wire.connection_made(transport)
    batch = [Pending(("GET", key), loop.create_future()) for key in "abc"]
    wire.send(batch)
    for piece in pieces(raw, cuts):
        if not transport.is_aborted:
            wire.data_received(piece)
    is_up = not lost
    wire.connection_lost(None)
    told = await asyncio.gather(*(pending.future for pending in batch), return_exceptions=True)
    assert len(lost) == 1
    return [f"{type(one).__name__} {'' if isinstance(one, RedisError) else one}" for one in told] + [str(is_up)]


@pytest.mark.parametrize("name", REPLIES)
async def test_a_cut_changes_no_reply_of_redis(name: str) -> None:
    """However replies arrive, each command gets its own; a reply that no command asked for ends the connection, a push does not."""
    raw = REPLIES[name]
    expected = await replied(raw, ())
    if name == "a push between":
        assert expected == ["bytes b'OK'", "int 7", "bytes b'c'", "True"]
    if name == "one too many":
        assert expected == ["bytes b'a'", "bytes b'b'", "bytes b'c'", "False"]
    places = range(1, len(raw))
    for cuts in [*((one,) for one in places), *combinations(places, 2), tuple(places)]:
        assert await replied(raw, cuts) == expected, cuts
