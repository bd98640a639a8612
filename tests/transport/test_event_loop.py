"""Connections while the host's resolver is silent, or while the host has no descriptor left."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from gateway.backends.base import BackendNotAsked, BackendUnavailable
from gateway.transport.http_client import Exchange, NotAsked, Unreachable
from gateway.transport.http_pool import Origin, Pool
from tests.backends.conftest import ask, collect, make_backend
from tests.transport.loops import Policy, Resolver, current
from tests.transport.servers import GOOD, Served, Wire, serve


@pytest.fixture(scope="module")
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    return Policy()


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Resolver]:
    made = Resolver(monkeypatch)
    yield made
    made.answers.set()


async def answers(wire: Wire) -> None:
    await wire.send(GOOD)


async def reach(host: str, served: Served, within_s: float = 5.0) -> int:
    """The status that a server at `host` answers on a new connection. Raises TransportError."""
    pool = Pool(Origin(host, served.port, False), within_s, idle_max=1)
    exchange = Exchange(b"POST / HTTP/1.1\r\n\r\n")
    try:
        await pool.send(exchange)
    finally:
        pool.aclose()
    return exchange.status


def waiting(count: int, served: Served, within_s: float = 60.0) -> list[asyncio.Task[int]]:
    """So many connections to names of their own."""
    return [asyncio.create_task(reach(f"silent-{number}.test", served, within_s)) for number in range(count)]


async def no_lookups() -> None:
    """Wait until each lookup has ended, and is told of."""
    while any(thread.name.startswith("lookup") for thread in threading.enumerate()):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.01)


async def given_up(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_silent_resolver_is_in_no_other_connections_way(resolver: Resolver) -> None:
    """While lookups of many names hang, a literal address and a name that is answered are reached."""
    resolver.known["answered.test"] = ["127.0.0.1"]
    async with serve(answers) as served:
        tasks = waiting(40, served)
        while len(resolver.lookups) < 40:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for host in ("127.0.0.1", "answered.test", "127.0.0.1"):
            assert await reach(host, served) == 200
        await given_up(tasks)


async def test_lookups_are_bounded(resolver: Resolver) -> None:
    """However many names the resolver is silent about, so many threads wait; more names fail at once, as this host's want."""
    async with serve(answers) as served:
        tasks = waiting(64, served)
        while len(resolver.lookups) < 64:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        with pytest.raises(NotAsked):
            await reach("one-more.test", served, 60.0)
        assert len(resolver.lookups) == 64
        await given_up(tasks)


async def test_a_lookup_is_shared_and_left_by_none(resolver: Resolver) -> None:
    """Those who ask for a name, for any port, share one lookup; that they give up begins no other, and its answer is kept."""
    async with serve(answers) as served, serve(answers) as other:
        tasks = [asyncio.create_task(reach("slow.test", at, 60.0)) for at in (served, other) * 10]
        for _ in range(3):
            with pytest.raises(NotAsked, match="resolver"):
                await reach("slow.test", served, 0.05)
        await given_up(tasks)
        assert resolver.lookups == {"slow.test": 1}


async def test_a_known_address_serves_while_the_resolver_is_silent(resolver: Resolver) -> None:
    """After its time the address is looked up anew, and serves on until an answer comes."""
    resolver.known["known.test"] = ["127.0.0.1"]
    async with serve(answers) as served:
        assert await reach("known.test", served) == await reach("known.test", served) == 200
        assert resolver.lookups["known.test"] == 1
        del resolver.known["known.test"]
        current().ahead_s = 31.0
        for _ in range(5):
            assert await reach("known.test", served) == 200
        assert resolver.lookups["known.test"] == 2
        resolver.answers.set()  # a failure is no answer
        await no_lookups()
        current().ahead_s = 62.0
        assert await reach("known.test", served) == 200
        await no_lookups()
        resolver.gone.add("known.test")
        current().ahead_s = 93.0
        with pytest.raises(Unreachable) as caught:
            await reach("known.test", served)
        assert not isinstance(caught.value, NotAsked)


async def test_a_name_the_resolver_is_silent_about_fails_soon(resolver: Resolver) -> None:
    """Once no answer has come for seconds, others wait for that name no longer; an answer serves them again."""
    async with serve(answers) as served:
        first = asyncio.create_task(reach("silent.test", served, 60.0))
        while not resolver.lookups:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        current().ahead_s = 10.0
        with pytest.raises(NotAsked, match="does not answer about"):
            await reach("silent.test", served, 60.0)
        assert not first.done()
        resolver.known["silent.test"] = ["127.0.0.1"]
        resolver.answers.set()
        with pytest.raises(NotAsked):
            await first
        assert await reach("silent.test", served) == 200


async def test_addresses_take_turns_and_a_dead_one_is_passed_over(resolver: Resolver) -> None:
    """Connections are spread over a name's addresses; after a failure the name is looked up again."""
    resolver.known["two.test"] = ["127.0.0.1", "127.0.0.2"]
    async with serve(answers) as served:  # at the first address alone
        assert [await reach("two.test", served) for _ in range(4)] == [200] * 4
        assert resolver.lookups["two.test"] == 1
        resolver.known["two.test"] = ["127.0.0.2"]
        current().ahead_s = 31.0
        with pytest.raises(Unreachable):
            await reach("two.test", served)
        resolver.known["two.test"] = ["127.0.0.1"]
        assert await reach("two.test", served) == 200


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.EADDRNOTAVAIL])
async def test_what_this_host_lacks_is_told_apart(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No descriptor, buffer or port for a connection is an error of its own; a server that refuses is none of them."""
    async with serve(answers) as served:
        backend = make_backend(served.url)
        await backend.start()

        def none_left(*_: Any, **__: Any) -> socket.socket:
            raise OSError(number, "none left")

        with monkeypatch.context() as patched:
            patched.setattr("aiohappyeyeballs.impl.socket.socket", none_left)
            with pytest.raises(BackendNotAsked):
                await collect(backend.stream(ask()))
        port = served.port
        await backend.aclose()
    backend = make_backend(f"http://127.0.0.1:{port}/v1")
    await backend.start()
    with pytest.raises(BackendUnavailable) as caught:
        await collect(backend.stream(ask()))
    assert not isinstance(caught.value, BackendNotAsked)
    await backend.aclose()


async def test_a_first_chunks_time_limit_blames_no_deployment_for_the_resolver(resolver: Resolver) -> None:
    """Where the time for a first chunk ends inside a lookup, the deployment was not asked."""
    backend = make_backend("http://silent.test:1/v1", connect_timeout_s=60.0)
    await backend.start()
    with pytest.raises(BackendNotAsked):
        await collect(backend.stream(ask(ttft_s=0.1)))
    await backend.aclose()


async def test_other_libraries_connect_by_the_same_rules(resolver: Resolver) -> None:
    """`asyncio.open_connection`, by which Redis' and PostgreSQL's drivers connect, keeps a known address, too."""
    resolver.known["store.test"] = ["127.0.0.1"]
    async with serve(answers) as served:
        for ahead_s in (0.0, 31.0):
            current().ahead_s = ahead_s
            _, writer = await asyncio.open_connection("store.test", served.port)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
            resolver.known.clear()
        assert resolver.lookups["store.test"] == 2


async def test_too_many_lookups_cost_no_known_address(resolver: Resolver) -> None:
    """Where so many lookups wait that none can begin, an address that was known before serves on."""
    resolver.known["known.test"] = ["127.0.0.1"]
    async with serve(answers) as served:
        assert await reach("known.test", served) == 200
        tasks = waiting(64, served)
        while len(resolver.lookups) < 65:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        current().ahead_s = 31.0
        assert await reach("known.test", served) == 200
        assert resolver.lookups["known.test"] == 1
        await given_up(tasks)
