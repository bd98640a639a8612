"""The same request at several workers: one makes the answer, the others wait for it and replay it, within a bound."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis

from tests.services import RedisServer
from tests.world import Call, Client, Finish, Tokens, World, unavailable, until


@pytest.fixture(autouse=True)
def _patience(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may stall a test for seconds: leases and waits end only where the test is about that."""
    if "longer_than" not in request.node.name and "never_stored" not in request.node.name:
        monkeypatch.setattr("gateway.journey.flight._PATIENCE_TIMES", 100.0)
        monkeypatch.setattr("cache.exact.claims._LEASE_MS", 60_000)


async def _claims(redis: Redis) -> list[bytes]:
    return await redis.keys("sameway:*:claim:*")


async def _leading(world: World, go: asyncio.Event, *end: object, **how: object) -> Client:
    """A request whose answer is under way at this worker until `go`."""
    world.backends["plain"].plays_once("one ", go, *(end or ("two", Finish(), Tokens())))  # type: ignore[arg-type]
    client = world.begin(**how)  # type: ignore[arg-type]
    await world.backends["plain"].called(len(world.backends["plain"].calls) + 1)
    return client


async def _waits(world: World, calls: list[Call]) -> None:
    await until(lambda: world.generations > 0)
    await asyncio.sleep(0.03)
    assert calls == []


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("leader_streams", [False, True])
async def test_one_worker_makes_the_answer(world: World, is_stream: bool, leader_streams: bool) -> None:
    """A request that another worker is answering waits for that answer, gets all of it, and pays nothing."""
    other, go = await world.another(), asyncio.Event()
    leading = await _leading(world, go, stream=leader_streams)
    following = [other.begin(stream=is_stream) for _ in range(3)]
    await _waits(other, other.backends["plain"].calls)
    go.set()
    led, *replies = [await leading.reply(), *[await one.reply() for one in following]]
    assert [reply.content for reply in replies] == ["one two"] * 3
    assert [reply.cache for reply in (led, *replies)] == ["miss", *["coalesced"] * 3]
    assert all(reply.headers["x-sameway-cost-usd"] == "0" for reply in replies)
    assert "x-sameway-similarity" not in replies[0].headers
    record = await other.record(replies[0])
    assert (record.cache.source, record.money.cost_microusd, record.money.saved_microusd, record.answer.deployment) == (
        "coalesced",
        0,
        20,
        "plain",
    )
    records = [await other.record(one) for one in replies]
    assert [one.cache.awaited for one in records] == ["served"] * 3
    assert all(0 < one.cache.awaited_ms <= one.times.duration_ms for one in records)
    assert (await world.record(led)).cache.awaited == ""
    assert len(await world.ledger()) == 1
    assert other.backends["plain"].calls == []
    await world.quiet()
    assert await _claims(world.redis) == []


@pytest.mark.parametrize("how", ["error", "cut", "left"])
async def test_an_answer_that_is_not_stored_is_made_again_once(world: World, how: str) -> None:
    """The leader fails, is cut off, or is left: one of those that waited makes the answer, and the others get that one."""
    others, go = [await world.another() for _ in range(3)], asyncio.Event()
    end = {"error": (unavailable(),), "cut": ("two", Finish("length"), Tokens()), "left": ()}[how]
    leading = await _leading(world, go, *end)
    following = [one.begin() for one in others]
    for one in others:
        await _waits(one, one.backends["plain"].calls)
    if how == "left":
        leading.leave()
    go.set()
    replies = [await client.reply() for client in following]
    await leading.reply()
    assert [reply.content for reply in replies] == ["answer of plain"] * 3
    assert sorted(reply.cache for reply in replies) == ["coalesced", "coalesced", "miss"]
    assert sum(len(one.backends["plain"].calls) for one in others) == 1
    for one in (world, *others):
        await one.quiet()
    assert await _claims(world.redis) == []


async def test_answers_that_are_never_stored_are_not_made_one_after_the_other(world: World) -> None:
    """Of those that wait for a second answer which is not stored either, none waits for a third."""
    others, gates = [await world.another() for _ in range(4)], [asyncio.Event() for _ in range(5)]
    unstored = ("two", Finish("length"), Tokens())
    leading = await _leading(world, gates[0], *unstored)
    for one, go in zip(others, gates[1:], strict=True):
        one.backends["plain"].plays("one ", go, *unstored)
    following = [one.begin() for one in others]
    for one in others:
        await _waits(one, one.backends["plain"].calls)
    gates[0].set()

    def begun() -> list[int]:
        return [place for place, one in enumerate(others) if one.backends["plain"].calls]

    await until(lambda: len(begun()) == 1)
    gates[1 + begun()[0]].set()
    await until(lambda: len(begun()) == 4)
    for go in gates:
        go.set()
    replies = [await client.reply() for client in (leading, *following)]
    assert [reply.cache for reply in replies] == ["miss"] * 5


async def test_a_leader_that_was_killed_is_not_awaited_longer_than_its_lease(world: World) -> None:
    """A claim that its worker does not renew ends by itself; one that is renewed goes on."""
    other, never = await world.another(), asyncio.Event()
    leading = await _leading(world, never)
    (claim,) = await _claims(world.redis)
    await world.redis.pexpire(claim, 50)
    world.clock.passes(2)
    world.never_comes_back()
    await world.renews()
    reply = await other.ask()
    assert (reply.cache, reply.content) == ("miss", "answer of plain")
    leading.leave()
    await leading.reply()


async def test_a_slow_leader_is_not_awaited_longer_than_it_may_take(world: World) -> None:
    """A worker that knows its deployment as quick makes the answer itself before the slow leader has it."""
    other, never = await world.another(), asyncio.Event()
    for number in range(30):
        await other.ask(f"quick {number}")
    leading = await _leading(world, never)
    reply = await other.ask(stream=True)
    assert (reply.cache, reply.content) == ("miss", "answer of plain")
    record = await other.record(reply)
    assert (record.cache.awaited, record.cache.awaited_ms > 0) == ("made", True)
    leading.leave()
    await leading.reply()


async def test_a_client_that_leaves_while_it_waits_is_counted(world: World) -> None:
    """It waited for another worker and got nothing."""
    other, go = await world.another(), asyncio.Event()
    leading = await _leading(world, go)
    following = other.begin()
    await _waits(other, other.backends["plain"].calls)
    following.leave()
    await other.quiet()
    (record,) = other.records
    assert (record.cache.awaited, record.ended.error, record.cache.awaited_ms > 0) == ("ended", "client_gone", True)
    go.set()
    await leading.reply()


@pytest.mark.parametrize("control", ["no-cache", "no-store", "max-age=0", "only-if-cached"])
async def test_what_is_not_for_others_is_not_awaited(world: World, control: str) -> None:
    """A request whose answer may not serve others has no claim; one that wants a fresh answer does not wait."""
    other, go = await world.another(), asyncio.Event()
    if control != "only-if-cached":
        leading = await _leading(world, go, headers={"cache-control": control})
        assert await _claims(world.redis) == []
        assert (await other.ask()).cache == "miss"
        go.set()
        await leading.reply()
    await world.redis.flushdb()
    go.clear()
    leading = await _leading(world, go, content="anew")
    following = other.begin("anew", headers={"cache-control": control})
    if control in ("no-cache", "max-age=0"):
        assert (await following.reply()).content == "answer of plain"
    else:
        await _waits(other, other.backends["plain"].calls[1:])
    go.set()
    await leading.reply()
    if control not in ("no-cache", "max-age=0"):
        assert (await following.reply()).cache == "coalesced"


async def test_teams_never_share_a_claim(world: World) -> None:
    """The same words of another team are another request."""
    other, go = await world.another(), asyncio.Event()
    team = await world.team()
    await other._accounts.refresh()
    leading = await _leading(world, go)
    assert (await other.ask(key=team.key)).cache == "miss"
    go.set()
    await leading.reply()


async def test_a_refused_request_leaves_no_claim(world: World) -> None:
    """A request over its rate limit claims nothing that others would wait for."""
    team = await world.team(requests_per_min=1)
    assert (await world.ask("first", key=team.key)).status == 200
    assert (await world.ask("second", key=team.key)).status == 429
    assert await _claims(world.redis) == []


async def test_an_expired_answer_is_made_once(world: World) -> None:
    """When an answer expires, one worker makes it anew and the others wait."""
    other, go = await world.another(), asyncio.Event()
    await world.ask(cache={"ttl": 10})
    for one in (world, other):
        one.clock.passes(20)
    leading = await _leading(world, go)
    following = other.begin()
    await _waits(other, other.backends["plain"].calls)
    go.set()
    await leading.reply()
    assert (await following.reply()).cache == "coalesced"


async def test_without_redis_no_request_waits(open_a_world: object, own_redis: RedisServer) -> None:
    """Redis ends while a request waits for another worker: the answer is made here."""
    world: World = await open_a_world(own_redis)  # type: ignore[operator]
    other, never = await world.another(), asyncio.Event()
    leading = await _leading(world, never)
    following = other.begin()
    await _waits(other, other.backends["plain"].calls)
    own_redis.kill()
    assert (await following.reply()).content == "answer of plain"
    leading.leave()
    await leading.reply()
