"""Identical requests under way share one generation; each reader leaves alone, and the last one cancels it."""

from __future__ import annotations

import asyncio

import pytest

from tests.world import Call, Finish, Tokens, Whole, World, broken, timed_out


@pytest.mark.parametrize("is_whole", [False, True])
async def test_streams_and_wholes_share_one_generation(world: World, is_whole: bool) -> None:
    """Four at once, however they read and however the answer comes: one generation, and all of it for each."""
    go = asyncio.Event()
    answer = (go, Whole("one two")) if is_whole else ("one ", go, "two", Finish(), Tokens())
    world.backends["plain"].plays(*answer)
    clients = [world.begin(stream=is_stream) for is_stream in (True, False, True, False)]
    await world.backends["plain"].called()
    await asyncio.sleep(0.005)
    assert world.flights == 1
    go.set()
    replies = [await client.reply() for client in clients]
    assert [reply.content for reply in replies] == ["one two"] * 4
    assert [reply.cache for reply in replies] == ["miss", "coalesced", "coalesced", "coalesced"]
    assert all(reply.is_done for reply in replies if reply.is_stream)
    assert len(world.backends["plain"].calls) == 1
    assert len(await world.ledger()) == 1


async def test_a_late_reader_gets_all_of_it(world: World) -> None:
    """Joining in the middle of an answer gives it from its first chunk."""
    go = asyncio.Event()
    world.backends["plain"].plays("one ", go, "two", Finish(), Tokens())
    first = world.begin(stream=True)
    await first.sees("one ")
    late = world.begin(stream=True)
    await late.sees("one ")
    go.set()
    replies = [await first.reply(), await late.reply()]
    assert [reply.content for reply in replies] == ["one two"] * 2
    assert replies[1].headers["cache-status"] == "sameway; fwd=miss; collapsed"
    assert replies[1].headers["x-sameway-backend"] == "plain"


async def test_a_coalesced_reader_pays_nothing(world: World) -> None:
    """The one that joined has a record of its own: what it saved, and no cost."""
    go = asyncio.Event()
    world.backends["plain"].plays(go, "shared", Finish(), Tokens())
    leading, joined = world.begin(), world.begin()
    await world.backends["plain"].called()
    go.set()
    led, shared = await leading.reply(), await joined.reply()
    assert (shared.cache, led.cache) == ("coalesced", "miss")
    assert shared.headers["x-sameway-cost-usd"] == "0"
    assert shared.headers["x-sameway-saved-usd"] == led.headers["x-sameway-cost-usd"] == "0.000020"
    record, generated = await world.record(shared), await world.record(led)
    assert (record.cache.source, record.answer.deployment, record.cache.entry) == (
        "coalesced",
        "plain",
        generated.cache.entry,
    )
    assert (record.money.cost_microusd, record.money.saved_microusd) == (0, 20)
    assert (record.usage.prompt_tokens, record.usage.completion_tokens) == (10, 5)
    assert record.answer.attempts == ()


async def test_the_leader_leaves_and_the_others_stay(world: World) -> None:
    """The client that began a generation takes nothing from those that joined, and the answer is cached."""
    go = asyncio.Event()
    world.backends["plain"].plays("one ", go, "two", Finish(), Tokens())
    leader = world.begin(stream=True)
    await leader.sees("one ")
    joined = world.begin(stream=True)
    await joined.sees("one ")
    leader.leave()
    await leader.reply()
    assert world.generations == 1
    go.set()
    assert (await joined.reply()).content == "one two"
    await world.quiet()
    assert (await world.ask()).cache == "exact"
    assert not world.backends["plain"].calls[0].is_cancelled
    assert len(world.records) == 3


@pytest.mark.parametrize("is_stream", [False, True])
async def test_the_last_reader_cancels(world: World, is_stream: bool) -> None:
    """When every client has left the deployment is cancelled, nothing is cached, and what was read is paid."""
    never = asyncio.Event()
    backend = world.backends["plain"]
    backend.plays_once("one ", "two ", never)
    clients = [world.begin(stream=is_stream) for _ in range(3)]
    call = await backend.called()
    await asyncio.sleep(0.01)
    for client in clients:
        client.leave()
    await asyncio.gather(*(client.reply() for client in clients))
    await world.quiet()
    assert call.is_cancelled
    assert call.is_closed
    (row,) = await world.ledger()
    assert row.usage.completion_tokens >= 2
    assert row.cost_microusd == row.usage.prompt_tokens + 2 * row.usage.completion_tokens
    record = next(one for one in world.records if one.answer.attempts)
    assert (record.ended.status, record.ended.error, record.ended.is_disconnected) == (499, "client_gone", True)
    assert (record.cache.store, record.answer.attempts[0].outcome) == ("incomplete", "cancelled")
    assert record.money.cost_microusd == row.cost_microusd
    assert (await world.ask()).cache == "miss"


async def test_a_prompt_that_was_read_is_paid(world: World) -> None:
    """All clients leave before the first chunk: the prompt is on the books and in the record, estimated."""
    never = asyncio.Event()
    world.backends["plain"].plays_once(never)
    client = world.begin()
    await world.backends["plain"].called()
    client.leave()
    await client.reply()
    (row,) = await world.ledger()
    assert row.usage.prompt_tokens > 0
    assert row.usage.completion_tokens == 0
    assert row.cost_microusd == row.usage.prompt_tokens
    assert world.records[0].money.cost_microusd == row.cost_microusd


async def test_nothing_is_joined_that_is_being_cancelled(world: World) -> None:
    """A request that comes right after the last reader left is generated anew."""
    never = asyncio.Event()
    world.backends["plain"].plays_once("old ", never)
    leaving = world.begin(stream=True)
    await leaving.sees("old ")
    leaving.leave()
    await leaving.reply()
    reply = await world.ask()
    assert (reply.cache, reply.content) == ("miss", "answer of plain")


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_failure_reaches_every_reader(world: World, is_stream: bool) -> None:
    """A generation that breaks after its first chunk fails for all its readers, each in its own form."""
    go = asyncio.Event()
    world.backends["plain"].plays("one ", go, broken())
    clients = [world.begin(stream=is_stream) for _ in range(2)]
    await world.backends["plain"].called()
    await asyncio.sleep(0.005)
    go.set()
    for reply in [await client.reply() for client in clients]:
        assert reply.error["code"] == "upstream_broken"
        assert reply.status == (200 if is_stream else 502)
        assert not reply.is_done
        record = await world.record(reply)
        assert (record.ended.status, record.ended.error) == (502, "upstream_broken")


async def test_a_generation_that_never_begins_fails_for_all(world: World) -> None:
    """Every reader gets the same error response where no deployment began to answer."""
    go = asyncio.Event()
    world.backends["plain"].plays(go, timed_out())
    clients = [world.begin() for _ in range(2)]
    await world.backends["plain"].called()
    go.set()
    assert [(await client.reply()).status for client in clients] == [504, 504]


async def test_an_answer_that_is_being_stored_is_joined(world: World) -> None:
    """What is asked again before the cache has the answer is not generated again."""
    first = await world.begin().reply()
    again = await world.begin().reply()
    assert (first.cache, again.cache, again.content) == ("miss", "coalesced", "answer of plain")
    assert len(world.backends["plain"].calls) == 1


@pytest.mark.parametrize("is_stream", [False, True])
async def test_the_clients_deadline_is_kept(world: World, is_stream: bool) -> None:
    """What is not begun within the client's own read time-out is given up at it, down to the deployment."""
    world.backends["plain"].plays(asyncio.Event())
    reply = await world.ask(headers={"x-stainless-read-timeout": "0.05"}, stream=is_stream)
    assert (reply.status, reply.error["code"], reply.headers["x-should-retry"]) == (504, "deadline_exceeded", "false")
    assert world.backends["plain"].calls[0].is_cancelled
    record = await world.record(reply)
    assert (record.ended.status, record.ended.error, record.ended.is_disconnected) == (504, "deadline_exceeded", False)


async def test_the_latest_deadline_of_all_readers_counts(world: World) -> None:
    """A reader in a hurry gives up alone: the generation goes on for the one that has time."""
    go = asyncio.Event()
    world.backends["plain"].plays(go, "late", Finish(), Tokens())
    hurried = world.begin(headers={"x-stainless-read-timeout": "0.05"})
    patient = world.begin()
    assert (await hurried.reply()).status == 504
    go.set()
    reply = await patient.reply()
    assert (reply.status, reply.cache, reply.content) == (200, "coalesced", "late")
    assert not world.backends["plain"].calls[0].is_cancelled


async def test_a_deadline_ends_with_the_first_chunk(world: World) -> None:
    """A read time-out starts anew with every byte: a stream that has begun may take longer."""
    go = asyncio.Event()
    world.backends["plain"].plays("one ", go, "two", Finish(), Tokens())
    client = world.begin(stream=True, headers={"x-stainless-read-timeout": "0.05"})
    await client.sees("one ")
    await asyncio.sleep(0.08)
    go.set()
    assert (await client.reply()).content == "one two"


@pytest.mark.parametrize(
    "stricter",
    [
        {"headers": {"cache-control": "max-age=1"}},
        {"cache": {"error_max": 0.0}},
        {"cache": {"verify": "off"}},
        {"cache": {"no-cache": True}},
    ],
)
async def test_a_stricter_request_flies_alone(world: World, stricter: dict[str, object]) -> None:
    """A request with bounds of its own does not join the flight of one without: it might get an older answer."""
    go = asyncio.Event()
    world.backends["plain"].plays(go, "fresh", Finish(), Tokens())
    clients = [world.begin(), world.begin(**stricter)]  # type: ignore[arg-type]
    await world.backends["plain"].called(2)
    go.set()
    assert "coalesced" not in [(await client.reply()).cache for client in clients]


@pytest.mark.parametrize("alone", ["no-cache", "no-store"])
async def test_what_must_not_be_shared_is_not_joined(world: World, alone: str) -> None:
    """Nothing joins the generation of a request that goes past the cache or must leave nothing there."""
    go = asyncio.Event()
    world.backends["plain"].plays(go, "own", Finish(), Tokens())
    clients = [world.begin(cache={alone: True}), world.begin()]
    await world.backends["plain"].called(2)
    assert world.flights == 1
    go.set()
    assert [(await client.reply()).cache for client in clients] == ["bypass", "miss"]


async def test_teams_do_not_share_flights(world: World) -> None:
    """The same request of two teams at once is generated for each."""
    other = await world.team()
    go = asyncio.Event()
    world.backends["plain"].plays(go, "own", Finish(), Tokens())
    clients = [world.begin(), world.begin(key=other.key)]
    await world.backends["plain"].called(2)
    go.set()
    assert [(await client.reply()).cache for client in clients] == ["miss", "miss"]


# 4 MB in pieces of 10 KB: more than every buffer on the way
LONG = (*["x" * 10_000] * 400, Finish(), Tokens())


async def settled(call: Call) -> int:
    """The steps that a deployment was asked for, once it is asked for no more."""
    before = -1
    while call.steps != before:
        before = call.steps
        for _ in range(500):
            await asyncio.sleep(0)
    return before


async def test_a_deployment_waits_for_the_clients(world: World) -> None:
    """While every client of an answer takes nothing, a bounded part of it is taken from the deployment; then the rest."""
    world.backends["plain"].plays(*LONG)
    clients = [world.begin(stream=True) for _ in range(2)]
    for client in clients:
        client.stops()
    call = await world.backends["plain"].called()
    assert await settled(call) * 10_000 < 300_000
    for client in clients:
        client.goes_on()
    replies = [await client.reply() for client in clients]
    assert [(reply.is_done, len(reply.content)) for reply in replies] == [(True, 4_000_000)] * 2
    assert len(world.backends["plain"].calls) == 1


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_slow_reader_holds_up_no_other(world: World, is_stream: bool) -> None:
    """A client that takes all of a shared answer has it while another one takes nothing, whether it joins early or late."""
    world.backends["plain"].plays(*LONG)
    slow = world.begin(stream=True)
    slow.stops()
    await settled(await world.backends["plain"].called())
    quick = await world.begin(stream=is_stream).reply()
    assert (quick.cache, len(quick.content)) == ("coalesced", 4_000_000)
    slow.goes_on()
    assert len((await slow.reply()).content) == 4_000_000


async def test_a_quick_reader_that_leaves_leaves_a_slow_one(world: World) -> None:
    """What the quick one had taken does not count for the slow one: the deployment waits again, and then for no client."""
    world.backends["plain"].plays(*LONG)
    quick, slow = world.begin(stream=True), world.begin(stream=True)
    slow.stops()
    call = await world.backends["plain"].called()
    while call.steps < 100:  # noqa: ASYNC110
        await asyncio.sleep(0)
    quick.leave()
    await quick.reply()
    assert await settled(call) < 400
    slow.leave()
    await slow.reply()
    await world.quiet()
    assert call.is_closed
    assert len(await world.ledger()) == 1
