"""How many replies of Redis a request waits for, one after the other.

All replies are held back until nothing goes on without them, and then handed on together: the number of times is that of the
longest chain, however long a reply takes and whatever the gateway's loops ask meanwhile.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.e2e.gateway import API_KEY, Gateway, deployment, run_gateway
from tests.e2e.upstream import run_upstream
from tests.services import run_redis
from tests.slow_redis import SlowRedis, run_slow_redis

_STILL_S = 0.25  # after which nothing goes on
_TRIES = 6  # on a machine that stood still for longer
_TRIPS_MAX = 20
_THINGS = ("a violin", "a glacier", "a satellite", "bread", "a tiger", "a rose")
_COUNTRIES = ("France", "Spain", "Norway", "Chile", "Japan", "Kenya")


@dataclass(frozen=True)
class Trips:
    """The replies that a request waited for before its first byte, and until it was recorded."""

    source: str
    before_first_byte: int
    before_record: int


class Slow:
    """A gateway whose requests wait for Redis, behind a proxy."""

    def __init__(self, gateway: Gateway, redis: SlowRedis) -> None:
        self.gateway = gateway
        self._redis = redis
        self._url = f"{gateway.base_url}/chat/completions"

    def _ask(self, content: str, begun: list[httpx.Headers], *, is_stream: bool) -> None:
        """One request, to its end, on a connection of its own: the kernel chooses the worker. `begun` gets its headers."""
        body = {"model": "mock", "stream": is_stream, "messages": [{"role": "user", "content": content}]}
        headers = {"authorization": f"Bearer {API_KEY}"}
        with httpx.stream("POST", self._url, json=body, headers=headers, timeout=60) as reply:
            assert reply.status_code == 200, reply.read()
            begun.append(reply.headers)
            reply.read()

    def _is_recorded(self, begun: list[httpx.Headers]) -> bool:
        return any(record["request_id"] == begun[0]["x-request-id"] for record in self.gateway.records() if begun)

    def trips(self, content: str, *, is_stream: bool = False) -> Trips:
        """What one request waits for, on a gateway that is idle otherwise."""
        begun, first_byte, record = list[httpx.Headers](), 0, 0
        self._redis.hold()
        try:
            with ThreadPoolExecutor(1) as pool:
                asking = pool.submit(self._ask, content, begun, is_stream=is_stream)
                time.sleep(_STILL_S)
                while not self._is_recorded(begun):
                    assert record < _TRIPS_MAX
                    first_byte += not begun
                    record += 1
                    self._redis.release()
                    time.sleep(_STILL_S)
                asking.result()
                return Trips(begun[0]["x-sameway-cache"], first_byte, record)
        finally:
            self._redis.release(is_last=True)


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slow]:
    """Two workers, two deployments to choose from, a hard budget, limits too small to lease, and the semantic cache."""
    folder: Path = tmp_path_factory.mktemp("slow")
    with run_redis() as server, run_slow_redis(server.socket_path) as redis, run_upstream() as upstream:
        config = {
            "workers": 2,
            "models": {"mock": {"deployments": [deployment(upstream.url, name) for name in ("first", "second")]}},
            "redis_url": redis.url,
            "redis_timeout_ms": 60_000,
            "cache": {"is_semantic": True, "semantic_timeout_ms": 60_000},
        }
        with run_gateway(folder, config) as gateway:
            gateway.wait_ready()
            hard = {"window": "day", "limit_microusd": 10**12, "is_hard": True}
            gateway.admin("POST", "/teams/1/budgets", json=hard)
            gateway.admin("PATCH", "/teams/1", json={"requests_per_min": 400, "tokens_per_min": 400_000})
            for number in range(12):  # both workers know their scripts then
                gateway.chat(f"Which year was number {number}?", stream=bool(number % 2))
            yield Slow(gateway, redis)


def least(slow: Slow, contents: Iterable[str], expected: Trips, **how: bool) -> Trips:
    """The least of some tries, each with a text of its own, until one is as expected."""
    least = Trips(expected.source, _TRIPS_MAX, _TRIPS_MAX)
    for content in contents:
        trips = slow.trips(content, **how)
        assert trips.source == expected.source
        least = min(least, trips, key=lambda one: one.before_record)
        if least.before_record <= expected.before_record:
            break
        time.sleep(random.random())  # the cache worker's wait for the log is renewed at another moment
    return least


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_miss_waits_for_three(slow: Slow, is_stream: bool) -> None:
    """The lookup and the hold before the generation, the settlement with the store and its announcement after it."""
    expected = Trips("miss", 2, 3)
    texts = (f"What is {thing} made of, {is_stream}?" for thing in _THINGS)
    assert least(slow, texts, expected, is_stream=is_stream) == expected


def test_a_hit_waits_for_one(slow: Slow) -> None:
    """At most: the worker that generated it has it in memory."""
    slow.gateway.chat("Who painted it?")
    trips = least(slow, ["Who painted it?"] * _TRIES, Trips("exact", 1, 1))
    assert trips.before_record <= 1


def test_a_hit_by_meaning_waits_for_two(slow: Slow) -> None:
    """At most: the lookup, and the entry, which the worker may have. Its words point at the entry after the reply."""
    for country in _COUNTRIES:
        slow.gateway.chat(f"What is the capital of {country}?")
    time.sleep(1.0)
    trips = least(slow, (f"What's the capital of {country}?" for country in _COUNTRIES), Trips("semantic", 2, 3))
    assert trips.before_first_byte <= 2
    assert trips.before_record <= 3
