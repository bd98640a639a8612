"""The layout holds in Redis Cluster: every script's keys are declared and share a slot."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from redis.asyncio import Redis

from cache import CacheLimits, ExactCache, Hit, Purge, fingerprint
from cache.exact.store import EntryStore, Sketched
from cache.redis_client import REDIS_FAILURES, connect
from cache.redis_link import RedisLink
from cache.semantic.cache import SemanticCache
from cache.semantic.follower import Follower
from tests.cache.fakes import ACME, OTHER, FakeEmbedder, ask, entry_for, query
from tests.services import free_cluster_port, run_redis, run_redis_cluster


@pytest.fixture
async def cluster() -> AsyncIterator[Any]:
    """A cluster of one node that owns every slot: it refuses a script across slots as a large one does."""
    port = free_cluster_port()
    with run_redis(extra=("--port", str(port), "--bind", "127.0.0.1", "--cluster-enabled", "yes")) as server:
        node = Redis.from_url(server.url)
        await node.execute_command("CLUSTER", "ADDSLOTS", *range(16_384))
        async with asyncio.timeout(30):
            while (await node.execute_command("CLUSTER INFO"))["cluster_state"] != "ok":  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        await node.aclose()
        client = connect(
            f"redis+cluster://127.0.0.1:{free_cluster_port()},127.0.0.1:{port}", 5.0
        )  # the first one is away
        yield client
        await client.aclose()


async def test_the_whole_life_of_entries_in_a_cluster(cluster: Any) -> None:
    """Store with links, evict, look up, count, follow, keep vectors and sketches, purge."""
    exact = ExactCache(cluster, CacheLimits(size_bytes_max=6_000))
    dialogue = fingerprint({"model": "m", "messages": [{"role": "user", "content": str(i)} for i in range(4)]}, ACME)
    await exact.store(entry_for(dialogue, time.time()), warm="gpu", chain=dialogue.chain)
    for tenant in (ACME, OTHER):
        for number in range(4):
            await exact.store(entry_for(ask(f"text {number}", tenant), time.time()))
    assert (await exact.lookup(ask("text 3"))).entry is not None
    assert (await exact.lookup(dialogue)).warm == "gpu"
    stats = await exact.stats()
    assert len(stats.partitions) == 2
    with ThreadPoolExecutor(1) as thread:
        cache = SemanticCache(FakeEmbedder())
        follower = Follower(cluster, cache, thread, b"fakefake")
        await follower.follow()
        assert follower.is_up, follower.failure
        assert isinstance(cache.lookup([query("TEXT 3")])[0], Hit)
        await follower.follow()
        assert await cluster.exists(f"sameway:{{{ACME.hex()}}}:vectors")
        entry = (await exact.lookup(ask("text 3"))).entry
        assert entry is not None
        await exact.flush_touches()  # entries of one millisecond are evicted in any order
        sketched = Sketched(entry.exact, entry.created_at, b"s" * 3_000)
        await EntryStore(cluster).store_sketches(ACME, b"fakefake", [sketched], 6_000)
        assert await EntryStore(cluster).lookup_sketches(ACME, b"fakefake", [entry.exact]) == [sketched]
        stats = await exact.stats()
        assert max(one.size_bytes for one in stats.partitions) <= 6_000
        assert (await exact.purge(Purge())).count == stats.entries
        await follower.follow()
        assert len(cache) == 0
    assert (await exact.stats()).entries == 0


async def test_a_cluster_sends_its_log(cluster: Any) -> None:
    """A host that listens through our own link has an entry soon after it was stored there."""
    await cluster.initialize()
    url = f"redis+cluster://127.0.0.1:{cluster.get_nodes()[0].port}"
    links = [RedisLink(url, 2.0) for _ in range(2)]
    with ThreadPoolExecutor(1) as thread:
        cache = SemanticCache(FakeEmbedder())
        follower = Follower(links[0], cache, thread, b"fakefake", listening=links[1])
        await follower.follow()
        listening = asyncio.create_task(follower.listen())
        for number in range(3):
            await ExactCache(links[0]).store(entry_for(ask(f"text {number}"), time.time()))
            async with asyncio.timeout(30):
                while not isinstance(cache.lookup([query(f"TEXT {number}")])[0], Hit):
                    await follower.catch_up()
                    await asyncio.sleep(0.001)
        listening.cancel()
    for link in links:
        await link.aclose()


async def test_a_master_that_is_lost_is_replaced() -> None:
    """A link goes on with the replica that has the lost master's slots by then."""
    with run_redis_cluster() as servers:
        key = "sameway:{3}"  # its slot is the first master's
        link = RedisLink(servers.url, 1.0)
        await link.execute_command("SET", key, b"before")
        await asyncio.to_thread(servers.fail_over, key)
        async with asyncio.timeout(20):
            while True:
                try:
                    await link.eval("return redis.call('SET', KEYS[1], ARGV[1])", 1, key, b"after")
                    break
                except REDIS_FAILURES:
                    await asyncio.sleep(0.05)
        assert await link.execute_command("GET", key) == b"after"
        await link.aclose()
