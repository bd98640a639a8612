"""Workers and hosts share one state of health of each deployment, through a real Redis."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from cache.redis_link import RedisLink
from gateway.backends.keys import Keys
from gateway.deployments.deployment import Deployment
from gateway.deployments.fleet import build_fleet
from gateway.deployments.shared_health import SharedHealth, identity
from gateway.settings import ApiKeySettings, Settings
from policies.breaker import Asker
from tests.services import RedisServer

_fresh = itertools.count()


def asker(caller: str = "a") -> Asker:
    """Another request of a caller."""
    return Asker("chat:", caller, "", f"r{next(_fresh)}")


class Worker:
    """The deployments of one worker, with a clock of its own."""

    def __init__(self, url: str, folder: Path, host: str = "a", **more: Any) -> None:
        self.now_s = 5_000.0
        deployment = {"name": "one", "backend": "openai", "base_url": "http://10.0.0.1/v1", "model": "m", **more}
        models: Any = {"mock": {"deployments": [deployment]}}
        settings = Settings(data_dir=folder, redis_url=url, secret="of the tests", models=models)
        no_embedder: Any = None
        fleet = build_fleet(settings, lambda: self.now_s, no_embedder)
        self.link = RedisLink(url, 1.0)
        self.health = SharedHealth(settings, fleet.deployments, self.link, lambda: self.now_s, host)
        self.settings = settings

    @property
    def one(self) -> Deployment:
        (found,) = (shared.deployment for shared in self.health.exchanged)
        return found

    def allows(self, caller: str = "a", *, is_alone: bool = False) -> bool:
        return self.one.health.allows(asker(caller), is_alone=is_alone)

    def fails(self, caller: str = "a", retry_after_s: float | None = None, denial: str = "") -> None:
        """A request of its own fails."""
        self.one.health.failed(asker(caller), retry_after_s, denial)

    def succeeds(self, caller: str = "a") -> None:
        """A request of its own succeeds."""
        self.one.health.succeeded(asker(caller))

    @property
    def key(self) -> str:
        return self.health.exchanged[0].key


@pytest.fixture
async def workers(redis_server: RedisServer, redis: Redis, tmp_path: Path) -> AsyncIterator[list[Worker]]:
    made = [Worker(redis_server.url, tmp_path, host) for host in "abc"]
    yield made
    for worker in made:
        await worker.link.aclose()


async def exchange(*workers: Worker) -> None:
    """Twice each: what the last one sent has reached the first one."""
    for _ in range(2):
        for worker in workers:
            await worker.health.exchange()


async def test_an_outage_is_learned_once(workers: list[Worker]) -> None:
    """One worker's failures close a deployment to all, and one's answer opens it to all."""
    first, second, third = workers
    await exchange(*workers)
    first.fails(retry_after_s=600)
    await exchange(*workers)
    assert [worker.allows() for worker in workers] == [False] * 3
    assert third.one.health.trouble[0].startswith("it is full and asked to be left alone, next try in ")
    assert not second.allows(is_alone=True)
    for worker in workers:
        worker.now_s += 601
    probe = asker()
    assert second.one.begin(probe)
    second.one.health.succeeded(probe)
    await exchange(*workers)
    assert [worker.one.is_available is False for worker in workers] == [False] * 3


async def test_failures_add_up(workers: list[Worker]) -> None:
    """Three of a caller's requests in a row rest it for that caller, wherever they were seen; a success counts as well."""
    first, second, third = workers
    for worker in (first, second):
        worker.fails("a")
    await exchange(*workers)
    first.succeeds("a")
    await exchange(*workers)
    third.fails("a")
    assert third.allows("a")
    for worker in (first, second):
        worker.fails("a")
    await exchange(*workers)
    assert [worker.allows("b") for worker in workers] == [True] * 3
    third.fails("a")
    await exchange(*workers)
    assert [worker.allows("a") for worker in workers] == [False] * 3
    assert [worker.allows("b") for worker in workers] == [True] * 3


async def test_callers_add_up(workers: list[Worker]) -> None:
    """One request each of three callers rests it for all; the success of one, on any worker, ends the rest of each."""
    _, second, third = workers
    for worker, caller in zip(workers, "abc", strict=True):
        worker.fails(caller)
        await exchange(*workers)
    third.fails("c")
    await exchange(*workers)
    assert [worker.allows("d") for worker in workers] == [False] * 3
    assert [worker.one.is_available for worker in workers] == [False] * 3
    for worker in workers:
        worker.now_s += 3
    assert second.one.begin(asker("d"))
    second.succeeds("d")
    await exchange(*workers)
    assert [worker.allows(one) for worker in workers for one in "abcd"] == [True] * 12
    assert [worker.one.is_available for worker in workers] == [True] * 3


async def test_failures_that_reached_no_exchange_count_once(workers: list[Worker]) -> None:
    """An exchange that fails keeps them for the next one."""
    first, second, _ = workers
    for _ in range(2):
        first.fails("a")
    for one in first.one.health.breakers.values():
        one.put_back(one.news())
    await exchange(first, second)
    await exchange(first, second)
    assert second.allows("a")
    second.fails("a")
    assert not second.allows("a")


async def test_many_breakers_are_bounded(workers: list[Worker]) -> None:
    """However many callers failed, the state that workers share stays small."""
    first, second, _ = workers
    for number in range(100):
        first.fails(f"caller-{number}")
        if number % 10 == 9:
            await exchange(first)
    await exchange(second)
    assert 32 <= len(second.one.health.breakers) <= 80


async def test_one_worker_probes(workers: list[Worker]) -> None:
    """Where the rest is over for all, the first one probes; the others have another try at the next state."""
    first, second, third = workers
    for _ in range(3):
        first.fails(denial="key refused (HTTP 401)")
    await exchange(*workers)
    assert third.one.health.trouble[1] == "key refused (HTTP 401)"
    for worker in workers:
        worker.now_s += 61
    probes = [asker() for _ in workers]
    assert [worker.one.begin(probe) for worker, probe in zip(workers, probes, strict=True)] == [True] * 3
    found = [await worker.one.may_probe(probe) for worker, probe in zip(workers, probes, strict=True)]
    assert found == [True, False, False]
    assert [worker.one.slots.taken for worker in workers] == [1, 0, 0]
    assert not second.allows()
    first.one.health.failed(probes[0], denial="key refused (HTTP 401)")
    await exchange(*workers)
    for worker in workers:
        worker.now_s += 61
    probe = asker()
    assert second.one.begin(probe)
    assert await second.one.may_probe(probe)


async def test_estimates_are_those_of_all(workers: list[Worker], redis_server: RedisServer, tmp_path: Path) -> None:
    """What several workers learned by turns is what one would have learned, and a worker that starts has it."""
    first, second, third = workers
    for number in range(20):
        worker = workers[number % 2]
        worker.one.estimate.observe(200.0 + 10 * number, 20.0, 100 * number)
        third.one.estimate.observe(200.0 + 10 * number, 20.0, 100 * number)
        await worker.health.exchange()
    await exchange(first, second)
    alone = third.one.estimate.figures()
    later = Worker(redis_server.url, tmp_path, "later")
    await later.health.exchange()
    for worker in (first, second, later):
        assert worker.one.estimate.figures().ttft_ms(500) == pytest.approx(alone.ttft_ms(500), rel=0.05)
        assert worker.one.estimate.figures().weight == pytest.approx(alone.weight, rel=0.02)
        assert worker.one.ttft_timeout_s(500) == pytest.approx(third.one.ttft_timeout_s(500), rel=0.05)
    await later.link.aclose()


async def test_exchanges_at_once_count_nothing_twice(workers: list[Worker]) -> None:
    """A reset exchanges beside the loop: each takes its turn."""
    first, second, _ = workers
    for _ in range(4):
        first.one.estimate.observe(200.0, 20.0, 100)
    await asyncio.gather(*(first.health.exchange() for _ in range(5)))
    await exchange(second)
    assert second.one.estimate.figures().weight == pytest.approx(first.one.estimate.figures().weight, rel=0.01)
    assert second.one.estimate.figures().weight < 4.0


async def test_another_configuration_begins_anew(redis_server: RedisServer, tmp_path: Path, redis: Redis) -> None:
    """A changed address or key has none of the marks of the one before; an address of one host is that host's."""
    names = set()
    for host, more in (
        ("a", {}),
        ("a", {"base_url": "http://10.0.0.2/v1"}),
        ("a", {"headers": {"x": "y"}}),
        ("a", {"base_url": "http://127.0.0.1/v1"}),
        ("b", {"base_url": "http://127.0.0.1/v1"}),
        ("a", {"base_url": "http://localhost/v1"}),
        ("a", {"base_url": "http://unix:/run/s.sock:/v1"}),
        ("b", {"base_url": "http://unix:/run/s.sock:/v1"}),
    ):
        worker = Worker(redis_server.url, tmp_path, host, **more)
        names.add(worker.key)
        await worker.link.aclose()
    assert len(names) == 8
    worker = Worker(redis_server.url, tmp_path)
    assert identity(worker.one, worker.settings, "a") == identity(worker.one, worker.settings, "b")
    await worker.link.aclose()


async def test_another_key_in_its_file_begins_anew(redis_server: RedisServer, tmp_path: Path, redis: Redis) -> None:
    """What was said of the old key is forgotten, in the worker that sees the new one first and in one that starts later."""
    file = tmp_path / "key"
    file.write_text("sk-old")
    worker = Worker(redis_server.url, tmp_path, api_key_file=str(file))
    worker.one.keys = Keys([ApiKeySettings(file=file)], {}, lambda: worker.now_s)
    worker.succeeds()
    worker.fails(retry_after_s=600)
    await exchange(worker)
    before = worker.key
    assert not worker.allows()
    file.write_text("sk-the-new-one")
    worker.now_s += 2
    await exchange(worker)
    assert worker.key != before
    assert worker.allows()
    later = Worker(redis_server.url, tmp_path, api_key_file=str(file))
    await exchange(later)
    assert (later.key, later.allows()) == (worker.key, True)
    for one in (worker, later):
        await one.link.aclose()


@pytest.mark.parametrize(
    "value",
    [
        b"no JSON",
        b"[1]",
        b'{"sums": "x", "version": "y", "cause": 7}',
        b'{"sums": [1e300, -5, "a"], "version": 3, "until_ms": 1e14, "at": 1e14}',
        b'{"sums": [500, 1, 1, 1, 1, 500, 1, 1, 1, 1], "at": 1, "version": 2}',
        b'{"cause": "\\u0007", "version": 9, "sums": []}',
    ],
)
async def test_a_value_that_no_worker_wrote_is_ignored(workers: list[Worker], redis: Redis, value: bytes) -> None:
    """Whatever is found there, each worker goes on, and they share again."""
    first, second, _ = workers
    await redis.set(first.key, value)
    await exchange(first, second)
    assert first.allows()
    first.fails(retry_after_s=600)
    await exchange(first, second)
    await exchange(first, second)
    assert not second.allows()


async def test_a_key_of_another_type_is_replaced(workers: list[Worker], redis: Redis) -> None:
    """A list under the key of the state stops no worker."""
    first, second, _ = workers
    await redis.rpush(first.key, b"x")
    first.fails(retry_after_s=600)
    await exchange(first, second)
    assert not second.allows()


async def test_without_redis_a_worker_goes_on_alone(workers: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    """What it learned meanwhile reaches the others later; its probes need no leave."""
    first, second, _ = workers
    evaluate, execute = first.link.eval, first.link.execute_command

    async def away(*_: Any) -> Any:
        raise RedisError("away")

    monkeypatch.setattr(first.link, "eval", away)
    monkeypatch.setattr(first.link, "execute_command", away)
    first.fails(retry_after_s=600)
    first.one.estimate.observe(100.0, 10.0, 100)
    with pytest.raises(RedisError):
        await first.health.exchange()
    assert not first.allows()
    first.now_s += 20
    probe = asker()
    assert first.one.begin(probe)
    assert await first.one.may_probe(probe)
    first.one.end()
    monkeypatch.setattr(first.link, "eval", evaluate)
    monkeypatch.setattr(first.link, "execute_command", execute)
    await exchange(first, second)
    assert not second.allows()
    assert second.one.estimate.figures().weight > 0


async def test_a_redis_that_lost_its_data_closes_no_breaker(workers: list[Worker], redis: Redis) -> None:
    """The state is sent again."""
    first, second, third = workers
    first.fails(retry_after_s=600)
    await exchange(first, second)
    await redis.flushall()
    await exchange(first, second, third)
    await exchange(first, second, third)
    assert [worker.allows() for worker in workers] == [False] * 3
