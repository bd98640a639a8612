"""What an operator does with a deployment or a batch by hand, through the API and the dashboard."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
from httpx import ASGITransport, AsyncClient
from redis.asyncio import Redis

from gateway.accounts import decode_row
from gateway.accounts.accounts import Accounts
from gateway.admin import views
from gateway.admin.guard import COOKIE
from gateway.batches.lines import LineRefused
from gateway.deployments.deployment import Deployment
from policies import Price
from policies.breaker import Asker
from policies.holds import LEDGER_STREAM
from tests.admin.seed import seed_batch
from tests.admin.world import ADMIN_KEY, World, open_world
from tests.world import Finish, ScriptedBackend, Tokens, broken, denied

ASKER = Asker("chat:")


@pytest.fixture
async def world(redis: Redis, tmp_path: Path) -> AsyncIterator[World]:
    async with open_world(redis, tmp_path) as opened:
        yield opened


@pytest.fixture
async def client(world: World) -> AsyncIterator[AsyncClient]:
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    async with AsyncClient(transport=ASGITransport(world.app), base_url="http://127.0.0.1", headers=headers) as made:
        yield made


def only(world: World) -> tuple[Deployment, ScriptedBackend]:
    """The one deployment, with a script behind it."""
    (one,) = world.admin.fleet.deployments
    one.backend = backend = ScriptedBackend(one.name)
    return one, backend


async def test_each_act_holds_is_audited_and_survives(world: World, client: AsyncClient) -> None:
    """Drained and disabled deployments stay so for every other worker and after a restart; enabling ends it."""
    one, _ = only(world)
    for act, use in (("drain", "drained"), ("disable", "disabled"), ("enable", ""), ("disable", "disabled")):
        reply = await client.post(f"/admin/api/deployments/{act}", json={"name": one.name})
        assert (reply.status_code, reply.json()["use"]) == (200, use)
        assert reply.json()["is_available"] is not bool(use)
        restarted = Accounts(world.admin.settings.sql_url)
        await restarted.open()
        seen: list[Mapping[str, str]] = []
        restarted.follow_uses(seen.append)
        assert seen == [{one.name: use}]
        await restarted.close()
    rows = (await client.get("/admin/api/audit")).json()["rows"]
    assert [row["action"] for row in rows] == [
        "deployment_disabled", "deployment_enabled", "deployment_disabled", "deployment_drained",
    ]  # fmt: skip
    assert {(row["entry"], row["team_id"], row["way"]) for row in rows} == {(one.name, 0, "api")}


async def test_an_act_on_a_deployment_means_its_replicas(world: World, client: AsyncClient) -> None:
    """The deployment's name drains, resets and enables all replicas; the latest act decides on one that had its own."""
    one, _ = only(world)
    one.group = "pool"
    one.health.failed(ASKER, retry_after_s=600)
    for name, act, use in (
        ("pool", "drain", "drained"),
        (one.name, "enable", ""),
        ("pool", "drain", "drained"),
        ("pool", "reset", "drained"),
        ("pool", "enable", ""),
    ):
        reply = await client.post(f"/admin/api/deployments/{act}", json={"name": name})
        assert (reply.status_code, reply.json()["name"], reply.json()["use"]) == (200, one.name, use)
    assert one.health.allows(ASKER)
    world.deployments = views.deployments_of(world.admin.fleet)
    assert "Drain all replicas" in (await client.get("/admin/deployments", cookies={COOKIE: world.session})).text


async def test_a_reset_forgets_failures_and_figures(world: World, client: AsyncClient) -> None:
    """Here at once, and on other hosts with their next exchange."""
    one, _ = only(world)
    one.health.failed(ASKER, retry_after_s=600)
    one.estimate.observe(900.0, 20.0, 100)
    await world.admin.shared_health.exchange()
    assert (await client.post("/admin/api/deployments/reset", json={"name": one.name})).json()["is_available"]
    assert (one.health.allows(ASKER), one.estimate.figures().weight) == (True, 0)
    for _ in range(2):
        await world.admin.shared_health.exchange()
    assert (one.health.allows(ASKER), one.estimate.figures().weight) == (True, 0)


async def test_a_try_tells_what_came_and_closes_the_breaker(world: World, client: AsyncClient) -> None:
    """A try asks even a resting deployment that is out of use; an answer ends the rest, and not what an operator set."""
    one, backend = only(world)
    for number in range(3):
        one.health.failed(Asker("chat:", request=f"r{number}"), denial="key refused (HTTP 401)")
    backend.plays(denied(401, "No such key"))
    tried = (await client.post("/admin/api/deployments/try", json={"name": one.name})).json()
    assert (tried["is_ok"], "No such key" in tried["problem"]) == (False, True)
    await client.post("/admin/api/deployments/drain", json={"name": one.name})
    backend.plays("o", "k", Finish(), Tokens(3, 2))
    tried = (await client.post("/admin/api/deployments/try", json={"name": one.name})).json()
    assert (tried["is_ok"], tried["answer"], tried["prompt_tokens"], tried["completion_tokens"]) == (True, "ok", 3, 2)
    assert (one.health.trouble[1], one.use, one.slots.taken) == ("", "drained", 0)
    assert backend.calls[-1].body["max_tokens"] == 16


@pytest.mark.parametrize("how", ["ok", "uncounted", "cut", "refused"])
async def test_a_try_that_generated_has_a_row_in_the_books(world: World, client: AsyncClient, how: str) -> None:
    """What the provider bills is in the ledger, of no team, once; a refused try costs nothing."""
    one, backend = only(world)
    one.price = Price(1_000_000, 2_000_000)
    ends = {"ok": (Finish(), Tokens(30, 2)), "uncounted": (Finish(),), "cut": (broken(),)}
    backend.plays(*(("o", "k", *ends[how]) if how != "refused" else (denied(401, "No such key"),)))
    tried = (await client.post("/admin/api/deployments/try", json={"name": one.name})).json()
    booked = [decode_row(fields[b"row"]) for _, fields in await world.redis.xrange(LEDGER_STREAM)]
    await world.ledger.append(booked)
    rows = (await client.get("/admin/api/ledger")).json()["rows"]
    if how == "refused":
        assert (rows, tried["cost_microusd"]) == ([], 0)
        return
    (row,) = rows
    assert [one.kind for one in booked] == ["try"]
    assert (row["team_id"], row["key_id"], row["deployment"]) == (0, 0, one.name)
    assert row["usage_estimated"] is (how != "ok")
    assert row["cost_microusd"] == tried["cost_microusd"] == (34 if how == "ok" else 14)
    page = (await client.get("/admin/ledger", cookies={COOKIE: world.session})).text
    assert "the operator" in page


async def test_an_unknown_deployment_or_act_is_refused(world: World, client: AsyncClient) -> None:
    """In words, and without a row."""
    for path in ("drain", "disable", "enable", "reset", "try"):
        assert (await client.post(f"/admin/api/deployments/{path}", json={"name": "none"})).status_code == 404
    assert (await client.post("/admin/api/deployments/drop", json={"name": "none"})).status_code == 400
    assert (await client.get("/admin/api/audit")).json()["rows"] == []


async def test_a_batch_is_cancelled_by_an_operator(world: World, client: AsyncClient) -> None:
    """Of any team, on the page and by the API; each is audited once, and one that has ended is refused without a row."""
    batches, ids = world.admin.batches, []
    for name in ("one", "two"):
        team = await world.admin.accounts.create_team(name)
        ids.append(await seed_batch(world, team.id))
    assert await batches.left() == (2, 2)
    reply = await client.post(f"/admin/api/batches/{ids[0]}/cancel")
    assert (reply.status_code, reply.json()["status"], reply.json()["team"]) == (200, "cancelling", "one")
    again = await client.post(f"/admin/api/batches/{ids[0]}/cancel")
    assert (again.status_code, again.json()["status"]) == (200, "cancelling")
    cookies, own = {COOKIE: world.session}, {"origin": "http://127.0.0.1"}
    page = (await client.get("/admin/batches", cookies=cookies)).text
    assert f"/admin/batches/{ids[1]}/cancel" in page
    assert f"/admin/batches/{ids[0]}/cancel" not in page
    form = await client.post(f"/admin/batches/{ids[1]}/cancel", cookies=cookies, headers=own)
    assert (form.status_code, (await batches.get(None, ids[1])).status) == (303, "cancelling")
    for left, work in ((1, await batches.claim("tests", ())), (0, await batches.claim("tests", ()))):
        assert work is not None
        await batches.chunk_done(work, (0, 1))
        assert await batches.left() == (2, left)
    work = await batches.claim("tests", ())
    assert work is not None
    await batches.refuse(work, LineRefused("over", "It is over"))
    assert await batches.left() == (1, 0)
    for batch_id, status in (("batch_none", 404), (work.batch.id, 409)):
        assert (await client.post(f"/admin/api/batches/{batch_id}/cancel")).status_code == status
    rows = (await client.get("/admin/api/audit")).json()["rows"]
    assert [(row["action"], row["entry"], row["way"]) for row in rows] == [
        ("batch_cancelled", ids[1], "dashboard"),
        ("batch_cancelled", ids[0], "api"),
    ]
