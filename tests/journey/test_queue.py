"""The gateway's own bound on the requests at a deployment: others answer, else a request waits for its place."""

from __future__ import annotations

import asyncio

from tests.journey.conftest import OpenWorld
from tests.world import Finish, Tokens, World, deployment, overloaded, unavailable, until


async def test_beyond_the_bound_requests_wait_in_order(world: World) -> None:
    """Two run, three wait, the next is refused in words of its own; each place goes to the one that waited longest."""
    backend, more = world.backends["small-room"], asyncio.Event()
    backend.plays(more, "answer", Finish(), Tokens())
    running = [world.begin(f"running {number}", model="small-room") for number in range(2)]
    await backend.called(2)
    waiting = []
    for number in range(3):
        waiting.append(world.begin(f"waiting {number}", model="small-room"))
        await until(lambda: world.waiting("small-room") == len(waiting))
    refused = await world.begin("refused", model="small-room").reply()
    assert (refused.status, refused.error["code"]) == (503, "deployment_full")
    assert (refused.headers["x-sameway-reason"], refused.headers["retry-after"]) == ("full", "1")
    assert "`concurrency_max` of 2" in refused.error["message"]
    more.set()
    for client in [*running, *waiting]:
        assert (await client.reply()).status == 200
    asked = [call.body["messages"][0]["content"] for call in backend.calls[2:]]
    assert asked == ["waiting 0", "waiting 1", "waiting 2"]
    assert "x-sameway-queued-ms" not in (await running[0].reply()).headers
    reply = await waiting[0].reply()
    assert float(reply.headers["x-sameway-queued-ms"]) >= 0
    assert (await world.record(reply)).answer.queued_ms > 0
    record = await world.record(refused)
    assert (record.ended.error, record.answer.rejected[0].reason) == (
        "deployment_full",
        "is full: its `concurrency_max` of 2 requests run there",
    )
    await world.is_released()


async def test_the_bound_is_no_failure(world: World) -> None:
    """However many requests are refused, the deployment does not rest."""
    backend, more = world.backends["small-room"], asyncio.Event()
    backend.plays(more, "answer", Finish(), Tokens())
    clients = [world.begin(f"first {number}", model="small-room") for number in range(5)]
    await until(lambda: world.waiting("small-room") == 3)
    for number in range(20):
        assert (await world.begin(f"refused {number}", model="small-room").reply()).status == 503
    more.set()
    assert [(await client.reply()).status for client in clients] == [200] * 5
    assert (await world.ask("another", model="small-room")).status == 200


async def test_another_deployment_answers_at_once_where_one_is_full(world: World) -> None:
    """No request waits while a deployment has room; an answer of another model is not kept for the first choice."""
    near, more = world.backends["near"], asyncio.Event()
    near.plays_once(more, "late", Finish(), Tokens())
    first = world.begin("one", model="rooms")
    await near.called()
    reply = await world.begin("two", model="rooms").reply()
    assert reply.headers["x-sameway-backend"] == "far"
    more.set()
    assert (await first.reply()).status == 200
    record = await world.record(reply)
    assert (record.cache.store, record.answer.rejected[0].name) == ("fallback", "near")
    assert record.answer.queued_ms == 0


async def test_the_first_place_is_taken_wherever_it_is(world: World) -> None:
    """A request waits for all deployments that could answer, and takes the place that is free first."""
    events = {name: asyncio.Event() for name in ("near", "far")}
    for name, event in events.items():
        world.backends[name].plays_once(event, name, Finish(), Tokens())
    running = [world.begin("one", model="rooms")]
    await world.backends["near"].called()
    running.append(world.begin("two", model="rooms"))
    await world.backends["far"].called()
    waiting = world.begin("three", model="rooms")
    await until(lambda: world.waiting("near") == world.waiting("far") == 1)
    events["far"].set()
    assert (await waiting.reply()).headers["x-sameway-backend"] == "far"
    assert (world.waiting("near"), world.waiting("far")) == (0, 0)
    events["near"].set()
    assert [(await client.reply()).status for client in running] == [200, 200]


async def test_a_client_that_leaves_the_queue_leaves_nothing_there(world: World) -> None:
    """Its turn goes to the next one."""
    backend, more = world.backends["small-room"], asyncio.Event()
    backend.plays(more, "answer", Finish(), Tokens())
    clients = [world.begin(f"question {number}", model="small-room") for number in range(4)]
    await until(lambda: world.waiting("small-room") == 2)
    clients[2].leave()
    await until(lambda: world.waiting("small-room") == 1)
    more.set()
    for client in (clients[0], clients[1], clients[3]):
        assert (await client.reply()).status == 200
    await world.is_released()


async def test_a_queue_at_a_deployment_that_fails_ends(world: World) -> None:
    """Where the deployment rests meanwhile, each that waited gets that answer at once: none waits for a place that no call frees."""
    backend, more = world.backends["small-room"], asyncio.Event()
    backend.plays(more, unavailable())
    clients = [world.begin(f"question {number}", model="small-room") for number in range(5)]
    await until(lambda: world.waiting("small-room") == 3)
    more.set()
    assert {(await client.reply()).status for client in clients} == {503}
    assert world.waiting("small-room") == 0
    await world.is_released()


async def test_a_place_goes_to_the_team_that_holds_the_fewest(world: World) -> None:
    """A team that was there first with all its requests waits for itself: another's two come after the first place that is free."""
    one, other = await world.team("many"), await world.team("few")
    backend, gates = world.backends["small-room"], [asyncio.Event() for _ in range(5)]
    for gate in gates:
        backend.plays_once(gate, "answer", Finish(), Tokens())
    clients = [world.begin(f"many {number}", model="small-room", key=one.key) for number in range(2)]
    await backend.called(2)
    for number in range(2):
        clients.append(world.begin(f"many {number + 2}", model="small-room", key=one.key))
        await until(lambda: world.waiting("small-room") == len(clients) - 2)
    clients.append(world.begin("few", model="small-room", key=other.key))
    await until(lambda: world.waiting("small-room") == 3)
    gates[0].set()
    await backend.called(3)
    assert backend.calls[2].body["messages"][0]["content"] == "few"
    for gate in gates:
        gate.set()
    assert [(await client.reply()).status for client in clients] == [200] * 5
    await world.is_released()


async def test_a_full_queue_has_room_for_who_has_less_there(world: World) -> None:
    """What a team has too much of is refused, its latest first, and never another team's only request; each team has its share."""
    one, other, third = [await world.team(name) for name in ("hog", "second", "third")]
    backend, more = world.backends["small-room"], asyncio.Event()
    backend.plays(more, "answer", Finish(), Tokens())
    hogs = [world.begin(f"hog {number}", model="small-room", key=one.key) for number in range(2)]
    await backend.called(2)
    for number in range(2, 5):
        hogs.append(world.begin(f"hog {number}", model="small-room", key=one.key))
        await until(lambda: world.waiting("small-room") == len(hogs) - 2)
    others = []
    for team in (other, third):
        others.append(world.begin("another's", model="small-room", key=team.key))
        refused = await hogs.pop().reply()
        assert (refused.status, refused.error["code"]) == (503, "deployment_full")
        assert world.waiting("small-room") == 3
    for key in (one.key, other.key, third.key):
        assert (await world.begin("one more", model="small-room", key=key).reply()).status == 503
    more.set()
    assert [(await client.reply()).status for client in (*hogs, *others)] == [200] * 5
    await world.is_released()


async def test_one_place_goes_round(open_a_world: OpenWorld) -> None:
    """Of a single place each team has its turn, however many requests of others wait."""
    world = await open_a_world(models={"one": {"deployments": [deployment("one", concurrency_max=1, queue_max=20)]}})
    teams = [await world.team(name) for name in "abc"]
    backend, more = world.backends["one"], asyncio.Event()
    backend.plays(more, "answer", Finish(), Tokens())
    clients = []
    for team, count in zip(teams, (5, 3, 1), strict=True):
        for number in range(count):
            clients.append(world.begin(f"{team.id} {number}", model="one", key=team.key))
            await until(lambda: len(backend.calls) + world.waiting("one") == len(clients))
    more.set()
    assert [(await client.reply()).status for client in clients] == [200] * 9
    asked = [int(call.body["messages"][0]["content"].split()[0]) for call in backend.calls]
    order = [teams.index(next(team for team in teams if team.id == one)) for one in asked]
    assert order == [0, 0, 1, 2, 0, 1, 0, 1, 0]


async def test_what_one_queue_pushed_out_waits_in_another(open_a_world: OpenWorld) -> None:
    """A request that waits for two deployments is refused only where neither queue keeps it."""
    both = [deployment("left", concurrency_max=1, queue_max=2), deployment("right", concurrency_max=1, queue_max=9)]
    world = await open_a_world(models={"both": {"deployments": both}})
    one, other = await world.team("hog"), await world.team("other")
    events = {name: asyncio.Event() for name in ("left", "right")}
    for name, event in events.items():
        world.backends[name].plays(event, name, Finish(), Tokens())
    clients = [world.begin(f"hog {number}", model="both", key=one.key) for number in range(4)]
    await until(lambda: (world.waiting("left"), world.waiting("right")) == (2, 2))
    last = world.begin("other", model="both", key=other.key)
    await until(lambda: (world.waiting("left"), world.waiting("right")) == (2, 3))
    for event in events.values():
        event.set()
    assert [(await client.reply()).status for client in (*clients, last)] == [200] * 5
    await world.is_released()


async def test_a_deployment_that_says_it_is_full_is_not_broken(world: World) -> None:
    """A short pause is waited out, also by requests that come meanwhile; after a long one 503 tells so; it stays available."""
    plain = world.backends["plain"]
    plain.plays_once(overloaded(retry_after_s=0.3))
    first = world.begin("first")
    await plain.called()
    await until(lambda: world.is_resting("plain"))
    second = world.begin("second")
    assert [(await client.reply()).status for client in (first, second)] == [200, 200]
    assert world.is_available("plain") is True
    plain.plays_once(overloaded(retry_after_s=3_600))
    assert (await world.ask("third")).status == 429
    refused = await world.ask("fourth")
    assert (refused.status, refused.error["code"]) == (503, "deployment_full")
    assert (await world.record(refused)).answer.rejected[0].reason.startswith("is resting: it is full")
    assert world.is_available("plain") is True
