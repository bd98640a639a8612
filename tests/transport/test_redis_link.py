"""The link to Redis: batches in order, fails fast, comes back, and speaks to a server, a Cluster and a Sentinel alike."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError

from cache.redis_connection import Pending, open_connection
from cache.redis_link import RedisLink
from tests.services import RedisServer, redis_binary, run_redis
from tests.transport.servers import CERTIFICATE, tls_server

SCRIPT = "return redis.call('INCRBY', KEYS[1], ARGV[1])"


@pytest.fixture
async def link(redis_server: RedisServer) -> AsyncIterator[RedisLink]:
    made = RedisLink(redis_server.url, 0.5)
    await made.execute_command("FLUSHALL")
    yield made
    await made.aclose()


async def test_commands_of_one_tick_share_a_round_trip(link: RedisLink) -> None:
    """A hundred commands asked for together cost one or two round trips and run in the order they were asked for."""
    before = link.round_trips
    replies = await asyncio.gather(*(link.execute_command("RPUSH", "list", number) for number in range(100)))
    assert replies == list(range(1, 101))
    assert link.round_trips - before <= 2
    assert await link.execute_command("LRANGE", "list", 0, -1) == [b"%d" % number for number in range(100)]


async def test_scripts_are_sent_once(link: RedisLink) -> None:
    """A script is sent whole where Redis does not know it, also after Redis forgot it."""
    assert await link.eval(SCRIPT, 1, "counter", 2) == 2
    await link.execute_command("SCRIPT", "FLUSH")
    assert await asyncio.gather(*(link.eval(SCRIPT, 1, "counter", 1) for _ in range(3))) == [3, 4, 5]


async def test_what_may_leave_later_leaves_together(redis_server: RedisServer) -> None:
    """What nobody waits for is sent a few ticks later, all at once, and not forgotten by a close."""
    link = RedisLink(redis_server.url, 0.5)
    await link.execute_command("DEL", "counter")
    before, calls = link.round_trips, []
    link.patience_s = 0.5  # longer than a busy machine holds a command up
    for _ in range(5):
        link.defer(lambda: calls.append(link.execute_command("INCR", "counter")))
        await asyncio.sleep(0)
    assert await link.execute_command("GET", "counter") is None
    async with asyncio.timeout(30):
        while not calls:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert [await call for call in calls] == [1, 2, 3, 4, 5]
    assert link.round_trips - before == 2
    link.defer(lambda: calls.append(link.execute_command("INCR", "counter")))
    await link.aclose()
    assert await calls[-1] == 6


async def test_a_bad_command_fails_alone(link: RedisLink) -> None:
    """One wrong command among good ones raises for its caller only."""
    good, bad, also_good = await asyncio.gather(
        link.execute_command("SET", "a", "1"),
        link.execute_command("INCR", "a", "b", "c"),
        link.execute_command("GET", "a"),
        return_exceptions=True,
    )
    assert good in (True, b"OK", "OK")
    assert isinstance(bad, ResponseError)
    assert also_good == b"1"


async def test_a_caller_who_leaves_still_gets_it_sent(link: RedisLink) -> None:
    """A command whose caller was cancelled in line is sent: it may be a settlement."""
    task = asyncio.ensure_future(link.execute_command("SET", "left", "yes"))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert await link.execute_command("GET", "left") == b"yes"


async def test_a_hanging_redis_costs_little() -> None:
    """While Redis hangs, calls after the first fail at once; when it is back, so are they."""
    with run_redis() as server:
        link = RedisLink(server.url, 0.2)
        await link.execute_command("PING")
        server.pause()
        slow = 0
        for _ in range(200):
            before = time.monotonic()
            with pytest.raises(RedisError):
                await link.execute_command("PING")
            slow += time.monotonic() - before > 0.1
        assert slow <= 3
        assert not link.is_up
        server.resume()
        await until_up(link)
        server.kill()
        server.start()
        await until_up(link)
        assert link.is_up
        await link.aclose()


async def test_no_call_waits_for_a_probe(tmp_path: Path) -> None:
    """A Redis that takes connections and is silent is asked again by the link alone: calls fail at once meanwhile, and are
    answered as soon as the probe was."""
    is_silent, asked, held = False, 0, list[asyncio.StreamWriter]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        while (head := await reader.readline()).startswith(b"*"):
            words = [(await reader.readline(), (await reader.readline()).strip())[1] for _ in range(int(head[1:]))]
            asked += words[0] != b"HELLO"
            if is_silent and words[0] != b"HELLO":
                held.append(writer)
            else:
                writer.write(b"+OK\r\n")
        writer.close()

    server = await asyncio.start_unix_server(serve, tmp_path / "redis.sock")
    link = RedisLink(f"unix://{tmp_path}/redis.sock", 0.2)
    await link.execute_command("SET", "a", "1")
    is_silent = True
    with pytest.raises(RedisError):
        await link.execute_command("SET", "a", "1")
    async with asyncio.timeout(10):
        for _ in range(3):
            before, calls = asked, list[asyncio.Future[object]]()
            while asked == before or len(calls) < 5:
                calls.append(asyncio.ensure_future(link.execute_command("SET", "a", "1")))
                await asyncio.sleep(0.001)
            assert all(call.done() for call in calls)  # the server has what it does not answer
            assert all(isinstance(error, RedisError) for error in await asyncio.gather(*calls, return_exceptions=True))
        is_silent = False
        while not link.is_up:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await link.execute_command("SET", "a", "1")
    await link.aclose()
    server.close()


async def test_a_greeting_that_is_cut_off_is_no_hang(redis_server: RedisServer, tmp_path: Path) -> None:
    """A server that accepts and then dies fails the calls that waited for it, and the next ones find it alive."""
    path = tmp_path / "redis.sock"

    async def die(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    dying = await asyncio.start_unix_server(die, path)
    link = RedisLink(f"unix://{path}", 0.5)
    async with asyncio.timeout(30):
        with pytest.raises(RedisError):
            await link.execute_command("PING")
    dying.close()
    path.unlink(missing_ok=True)
    path.symlink_to(redis_server.url.partition("://")[2].partition("?")[0])
    await until_up(link)
    await link.aclose()


async def test_a_connection_that_is_closed_fails_what_waits(redis_server: RedisServer) -> None:
    """A command without its reply fails as if the connection had been lost, and no callback repeats it."""
    lost: list[object] = []
    wire = await open_connection(redis_server.url, 5.0, lambda *how: lost.append(how), lambda *_: None)
    waiting = Pending(("BLPOP", "nothing-comes", "0"), asyncio.get_running_loop().create_future())
    wire.send([waiting])
    wire.close()
    with pytest.raises(RedisConnectionError, match="closed"):
        await asyncio.wait_for(waiting.future, 30)
    wire.close()
    assert lost == []


async def test_a_restarted_server_is_not_noticed() -> None:
    """A pooled connection to a server that was restarted is replaced without an error."""
    with run_redis() as server:
        link = RedisLink(server.url, 0.5)
        await link.execute_command("PING")
        server.restart()
        assert await link.execute_command("PING") in (True, b"PONG")
        await link.aclose()


async def test_sentinel(tmp_path: Path) -> None:
    """Through a Sentinel the link finds the master, and the new one after a fail-over."""
    ports = free_ports(3)
    with (
        run_redis(extra=("--port", str(ports[0]), "--repl-diskless-sync-delay", "0")) as first,
        run_redis(extra=("--port", str(ports[1]), "--replicaof", "127.0.0.1", str(ports[0]))),
    ):
        config = tmp_path / "sentinel.conf"
        config.write_text(
            f"port {ports[2]}\ndir {tmp_path}\nsentinel monitor main 127.0.0.1 {ports[0]} 1\n"
            "sentinel down-after-milliseconds main 300\nsentinel failover-timeout main 2000\n"
        )
        sentinel = subprocess.Popen([redis_binary(), str(config), "--sentinel"], stdout=subprocess.DEVNULL)  # noqa: ASYNC220
        link = RedisLink(f"redis+sentinel://127.0.0.1:{ports[2]}/main", 0.5)
        try:
            await until_up(link)
            await link.execute_command("SET", "kept", "yes")
            while await link.execute_command("WAIT", 1, 100) != 1:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            await asyncio.sleep(1.5)  # the Sentinel asks its master for replicas now and then
            first.kill()
            await until_up(link, 30)
            assert await link.execute_command("GET", "kept") == b"yes"
        finally:
            await link.aclose()
            sentinel.kill()
            sentinel.wait()


async def until_up(link: RedisLink, within_s: float = 10.0) -> None:
    """Until a write is taken."""
    async with asyncio.timeout(within_s):
        while True:
            try:
                await link.execute_command("SET", "probe", "1")
            except RedisError:
                await asyncio.sleep(0.05)
            else:
                return


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


@pytest.mark.parametrize(
    "command",
    [
        ("HSCAN", "hash", 0),
        ("HGETALL", "hash"),
        ("XRANGE", "stream", "-", "+"),
        ("XREVRANGE", "stream", "+", "-", "COUNT", 1),
        ("ZREVRANGE", "scores", 0, -1, "WITHSCORES"),
        ("XREAD", "COUNT", 5, "STREAMS", "stream", "0"),
        ("ZRANGE", "scores", 0, -1, "WITHSCORES"),
        ("ZSCORE", "scores", "m"),
        ("SET", "key", "value", "NX"),
        ("SET", "key", "value"),
        ("MGET", "key", "missing"),
        ("EXISTS", "key"),
    ],
)
async def test_replies_are_those_of_redis_py(
    redis_server: RedisServer, link: RedisLink, command: tuple[object, ...]
) -> None:
    """What the wire gives is what redis-py's own client gives: whoever works with one works with the other."""
    await link.execute_command("HSET", "hash", "a", 1, "b", 2)
    await link.execute_command("ZADD", "scores", 1, "m")
    await link.execute_command("XADD", "stream", "*", "field", "value")
    theirs = await link.client.execute_command(*command)
    if command[0] == "SET":
        await link.execute_command("DEL", "key")
        theirs = await link.client.execute_command(*command)
        await link.execute_command("DEL", "key")
    assert await link.execute_command(*command) == theirs


async def test_passwords_and_databases(tmp_path: Path) -> None:
    """A URL's password, database and path are those that redis-py reads; a wrong password is an error that says so."""
    with run_redis() as server:
        opener = RedisLink(server.url, 0.5)
        await opener.client.config_set("requirepass", "s3cret")
        (tmp_path / "user@host").symlink_to(server.socket_path)
        right = RedisLink(f"unix://:s3cret@{server.socket_path}?db=2", 0.5)
        await right.execute_command("SET", "here", "1")
        for url in (right.url, f"unix://{tmp_path}/user@host?password=s3cret&db=2"):
            also = RedisLink(url, 0.5)
            assert await also.client.execute_command("GET", "here") == b"1"
            assert await also.execute_command("GET", "here") == b"1"
            await also.aclose()
        wrong = RedisLink(f"unix://:wrong@{server.socket_path}", 0.5)
        with pytest.raises(RedisError):
            await wrong.execute_command("GET", "here")
        for link in (opener, right, wrong):
            await link.aclose()


def carrier(behind: list[RedisServer]) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    """For `asyncio.start_server`: an address that leads to the first of `behind` at the time of the connection."""

    async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            sink.write(data)
        sink.close()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server, ahead = await asyncio.open_unix_connection(behind[0].socket_path)
        await asyncio.gather(copy(reader, ahead), copy(server, writer))

    return carry


async def test_a_certificate_in_the_url_is_trusted(redis_server: RedisServer) -> None:
    """`rediss://` trusts the authorities of `ssl_ca_certs`, and without it those of the machine alone."""
    async with await asyncio.start_server(carrier([redis_server]), "127.0.0.1", 0, ssl=tls_server()) as server:
        url = f"rediss://localhost:{server.sockets[0].getsockname()[1]}"
        trusting, other = RedisLink(f"{url}/1?ssl_ca_certs={CERTIFICATE}", 5.0), RedisLink(url, 5.0)
        assert await trusting.execute_command("ECHO", "here") == b"here"
        with pytest.raises(RedisError, match="certificate"):
            await other.execute_command("ECHO", "here")
        await trusting.aclose()
        await other.aclose()


async def test_while_it_is_away_each_error_says_why() -> None:
    """A password that Redis does not take is told from a Redis that is gone, for as long as it lasts."""
    with run_redis() as server:
        operator = RedisLink(server.url, 5.0)
        await operator.execute_command("CONFIG", "SET", "requirepass", "right")
        await operator.aclose()
        link = RedisLink(f"unix://:wrong@{server.socket_path}", 5.0)
        for _ in range(3):
            with pytest.raises(RedisError, match="WRONGPASS"):
                await link.execute_command("PING")
            await asyncio.sleep(0.1)
        await link.aclose()


async def test_a_server_that_became_a_replica_is_left() -> None:
    """Where the address has become another server's, as after a failover, writes reach that one: by a command or a script."""
    ports = free_ports(2)
    with run_redis(extra=("--port", str(ports[0]))) as old, run_redis() as new:
        for write in ("SET", "k", "v"), ("EVAL", "return redis.call('SET', 'k', 'v')", 0):
            behind = [old]
            async with await asyncio.start_server(carrier(behind), "127.0.0.1", 0) as address:
                link = RedisLink(f"redis://127.0.0.1:{address.sockets[0].getsockname()[1]}", 5.0)
                await link.execute_command("REPLICAOF", "NO", "ONE")
                assert await link.execute_command(*write)
                await link.execute_command("REPLICAOF", "127.0.0.1", "1")
                behind[0] = new
                with pytest.raises(RedisError, match="READONLY"):
                    await link.execute_command(*write)
                async with asyncio.timeout(30):
                    while True:
                        with contextlib.suppress(RedisError):
                            await link.execute_command(*write)
                            break
                await link.aclose()


@pytest.mark.parametrize("scheme", ["redis", "redis+cluster", "redis+sentinel"])
async def test_a_redis_that_is_away_is_an_error(scheme: str) -> None:
    """A Redis of any kind that is not there is an error at once, every time, and never a wait for ever."""
    path = "/main" if "sentinel" in scheme else ""
    link = RedisLink(f"{scheme}://127.0.0.1:{free_ports(1)[0]}{path}", 0.5)
    async with asyncio.timeout(30):
        for _ in range(3):
            with pytest.raises(RedisError):
                await link.execute_command("PING")
            await asyncio.sleep(0.1)
    await link.aclose()


async def test_commands_that_come_while_a_connection_opens_leave_once(tmp_path: Path) -> None:
    """Whichever tick they come in, the first after a failure included: no tick finds nothing to send and stumbles."""
    stumbles: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: stumbles.append(context))
    with run_redis() as server:
        link = RedisLink(server.url, 0.5)
        server.stop()
        with pytest.raises(RedisError):
            await link.execute_command("PING")
        server.start()
        await asyncio.sleep(0.1)
        calls = []

        async def ask() -> None:
            while not (calls and calls[0].done()):
                calls.append(asyncio.ensure_future(link.execute_command("INCR", "n")))
                await asyncio.sleep(0)

        await asyncio.gather(*(ask() for _ in range(3)))
        assert sorted(await asyncio.gather(*calls)) == list(range(1, len(calls) + 1))
        await link.aclose()
    assert stumbles == []
