"""Claims to make an entry, against a real Redis: one process has it, until it stores, releases, or stops renewing."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from cache import ExactCache
from cache.exact.claims import HELD_S_MAX, LEASE_S
from tests.cache.fakes import Clock, ask, entry_for


@pytest.fixture
def clock() -> Clock:
    return Clock()


def process(redis: Redis, clock: Clock) -> ExactCache:
    return ExactCache(redis, clock=clock, monotonic=lambda: clock.now)


async def test_one_process_claims(redis: Redis, clock: Clock) -> None:
    """The first that finds nothing makes the entry; the others see since when; a look without a claim takes none."""
    one, other, fp = process(redis, clock), process(redis, clock), ask("Why?")
    assert not (await other.lookup_shared(fp, claims=False)).is_claimed
    assert (await one.lookup_shared(fp, claims=True)).is_claimed
    for wants in (True, False):
        seen = await other.lookup_shared(fp, claims=wants)
        assert not seen.is_claimed
        assert seen.elsewhere_ms is not None
        assert seen.elsewhere_ms >= 0
    again = await one.lookup_shared(fp, claims=True)
    assert (again.is_claimed, again.elsewhere_ms) == (False, None)
    assert (await other.lookup_shared(ask("How?"), claims=True)).is_claimed
    assert (await other.lookup_shared(fp)).elsewhere_ms is None


async def test_storing_and_releasing_end_a_claim(redis: Redis, clock: Clock) -> None:
    """The entry is there from the moment at which its claim is not; a release lets the next process claim."""
    one, other, fp = process(redis, clock), process(redis, clock), ask("Why?")
    await one.lookup_shared(fp, claims=True)
    await other.release(fp)  # it is not its own
    assert (await other.lookup_shared(fp, claims=True)).elsewhere_ms is not None
    await one.release(fp)
    assert (await other.lookup_shared(fp, claims=True)).is_claimed
    await other.store(entry_for(fp, clock.now))
    assert (await one.lookup_shared(fp, claims=True)).entry is not None
    assert await redis.keys("*claim*") == []


async def test_an_answer_that_is_stored_between_two_looks_is_found(
    redis: Redis, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look that finds an expired entry looks again: what took its place meanwhile is served, and not made again."""
    one, other, fp = process(redis, clock), process(redis, clock), ask("Why?")
    await one.store(entry_for(fp, clock.now))
    clock.now += 1_000_000
    assert (await other.lookup_shared(fp, claims=True)).is_claimed
    sent, looks = redis.eval, []

    async def interrupted(*command: object) -> object:
        looks.append(command)
        if len(looks) == 2:
            monkeypatch.undo()
            await other.store(entry_for(fp, clock.now))
        return await sent(*command)

    monkeypatch.setattr(redis, "eval", interrupted)
    seen = await one.lookup_shared(fp, claims=True)
    assert (seen.entry is not None, seen.is_claimed, len(looks)) == (True, False, 2)
    assert await redis.keys("*claim*") == []


async def test_a_claim_lives_as_long_as_it_is_renewed(redis: Redis, clock: Clock) -> None:
    """Renewed it has its whole lease again, up to a bound; then no other process waits for it."""
    one, fp = process(redis, clock), ask("Why?")
    await one.lookup_shared(fp, claims=True)
    (key,) = await redis.keys("*claim*")
    await redis.pexpire(key, 100)
    await one.renew_claims()
    assert await redis.pttl(key) <= 100  # it is new
    clock.now += 2
    await one.renew_claims()
    assert 100 < await redis.pttl(key) <= LEASE_S * 1000
    clock.now += HELD_S_MAX
    await redis.pexpire(key, 100)
    await one.renew_claims()
    assert await redis.pttl(key) <= 100


@pytest.mark.parametrize("value", [b"", b"nonsense", b"12:", b"\xff:1"])
async def test_what_no_process_wrote_is_replaced(redis: Redis, clock: Clock, value: bytes) -> None:
    """A claim that cannot be read is none, also one of another type."""
    one, fp = process(redis, clock), ask("Why?")
    await one.lookup_shared(fp, claims=True)
    (key,) = await redis.keys("*claim*")
    await redis.set(key, value)
    assert (await process(redis, clock).lookup_shared(fp, claims=True)).is_claimed
    await redis.delete(key)
    await redis.hset(key, "a", "b")
    assert (await process(redis, clock).lookup_shared(fp, claims=True)).is_claimed
