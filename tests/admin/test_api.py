"""The admin API over HTTP: what it makes, what it shows, what it refuses and how."""

from __future__ import annotations

import csv
import io
import re
import sys
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from pyarrow import parquet
from redis.asyncio import Redis
from sqlalchemy.exc import DBAPIError, OperationalError, ProgrammingError

from gateway.accounts import HitsRow, schema
from gateway.admin.guard import COOKIE
from gateway.deployments.progress import Attempt
from gateway.journey.outcomes import Rejection
from gateway.telemetry.parts import GatewayPart, PartHealth
from policies import Hold
from policies.counters import Need
from tests.admin.world import ADMIN_KEY, LOCAL, NOW_S, World, open_world
from tests.services import run_redis
from tests.telemetry.records import hit, miss


@pytest.fixture
async def world(redis: Redis, tmp_path: Path) -> AsyncIterator[World]:
    async with open_world(redis, tmp_path) as opened:
        yield opened


def client_of(world: World, **options: Any) -> httpx.AsyncClient:
    """An HTTP client of the application, by default with the admin's key."""
    options.setdefault("headers", {"authorization": f"Bearer {ADMIN_KEY}"})
    transport = httpx.ASGITransport(app=world.app)
    return httpx.AsyncClient(transport=transport, base_url="http://gateway.test", **options)


@pytest.fixture
async def client(world: World) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(world) as opened:
        yield opened


def error_of(reply: httpx.Response) -> dict[str, Any]:
    """The error object, whose shape is OpenAI's."""
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    return dict(error)


# -- who may


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {ADMIN_KEY}"}])
async def test_nobody_else_gets_in(world: World, headers: dict[str, str]) -> None:
    """Without the admin's key every route of the API answers 401, whether it exists or not."""
    async with client_of(world, headers=headers) as stranger:
        for method, path in _operations(world):
            world.now_s += 60  # the pause after a wrong key
            reply = await stranger.request(method, path)
            assert reply.status_code == 401, (method, path)
            assert error_of(reply)["code"] == "invalid_api_key"


def _operations(world: World) -> list[tuple[str, str]]:
    paths = world.app.openapi()["paths"]
    return [
        (method.upper(), path.replace("{team_id}", "1").replace("{key_id}", "1").replace("{budget_id}", "1"))
        for path, item in paths.items()
        if path.startswith("/admin/api")
        for method in item
    ]


async def test_a_session_reads_and_changes_but_not_for_another_site(world: World) -> None:
    """The dashboard's cookie opens the API; a change that another site's page asks for is refused."""
    async with client_of(world, headers={}, cookies={COOKIE: world.session}) as browser:
        assert (await browser.get("/admin/api/teams")).status_code == 200
        for headers in (
            {},
            {"origin": "https://evil.test"},
            {"sec-fetch-site": "cross-site"},
            {"sec-fetch-site": "same-site"},
        ):
            reply = await browser.post("/admin/api/teams", json={"name": "x"}, headers=headers)
            assert reply.status_code == 403, headers
            assert error_of(reply)["code"] == "cross_site_request"
        same = {"sec-fetch-site": "same-origin"}
        assert (await browser.post("/admin/api/teams", json={"name": "x"}, headers=same)).status_code == 201
        own = {"origin": "http://gateway.test"}
        assert (await browser.post("/admin/api/teams", json={"name": "y"}, headers=own)).status_code == 201
        world.now_s += 13 * 3_600
        assert (await browser.get("/admin/api/teams")).status_code == 401


@pytest.mark.parametrize("cookie", ["", ".", "9999999999.", "9999999999.00", "x.y", "9999999999.é"])
async def test_a_made_up_session_is_none(world: World, cookie: str) -> None:
    """Only what the login gave is a session."""
    async with client_of(world, headers={"cookie": f"{COOKIE}={cookie}".encode()}) as browser:
        assert (await browser.get("/admin/api/teams")).status_code == 401


# -- teams, keys, budgets


async def test_a_team_costs_no_more_where_there_are_many(client: httpx.AsyncClient, world: World) -> None:
    """To read one of 1,500 teams, or its budgets, takes no third of what all of them take: the others are not looked at."""
    team = {"name": "", "created_at_s": NOW_S, "is_active": True, "is_semantic_enabled": True}
    budget = {"window_kind": "month", "limit_microusd": 1_000_000, "is_hard": True}
    ids = range(1_000, 2_500)
    async with world.accounts.database.writing() as connection:
        await connection.execute(sa.insert(schema.teams), [{**team, "id": one, "name": f"team {one}"} for one in ids])
        await connection.execute(sa.insert(schema.budgets), [{**budget, "team_id": one} for one in ids])

    async def took_s(path: str) -> float:
        before_s = time.perf_counter()
        assert (await client.get(f"/admin/api{path}")).status_code == 200
        return time.perf_counter() - before_s

    whole_s = await took_s("/teams")
    for path in ("/teams/1200", "/teams/1200/keys", "/teams/1200/budgets"):
        assert min([await took_s(path) for _ in range(5)]) < whole_s / 3


async def test_a_team_from_birth_to_death(client: httpx.AsyncClient) -> None:
    """Made, found, changed field by field, refused twice under one name, deleted and then unknown."""
    made = await client.post("/admin/api/teams", json={"name": "search", "requests_per_min": 600})
    assert made.status_code == 201
    team = made.json()
    assert (team["name"], team["requests_per_min"], team["is_semantic_enabled"]) == ("search", 600, True)
    path = f"/admin/api/teams/{team['id']}"
    changed = await client.patch(path, json={"requests_per_min": None, "is_semantic_enabled": False})
    assert (changed.json()["requests_per_min"], changed.json()["is_semantic_enabled"]) == (None, False)
    assert changed.json()["name"] == "search"
    again = await client.post("/admin/api/teams", json={"name": "search"})
    assert again.status_code == 409
    assert error_of(again)["code"] == "conflict"
    assert [one["id"] for one in (await client.get("/admin/api/teams")).json()["teams"]] == [team["id"]]
    assert (await client.delete(path)).status_code == 204
    gone = await client.get(path)
    assert gone.status_code == 404
    assert error_of(gone)["code"] == "not_found"


async def test_a_keys_plaintext_is_shown_once_and_works(world: World, client: httpx.AsyncClient) -> None:
    """The answer that makes a key is the only one that has it; revoking it ends it."""
    team = (await client.post("/admin/api/teams", json={"name": "search"})).json()
    made = await client.post(f"/admin/api/teams/{team['id']}/keys", json={"name": "prod", "models": ["small"]})
    assert made.status_code == 201
    assert made.headers["cache-control"] == "no-store"
    plaintext, key = made.json()["plaintext"], made.json()["key"]
    assert plaintext.startswith(key["prefix"])
    identity = await world.accounts.find(plaintext)
    assert identity is not None
    assert identity.team.id == team["id"]
    for path in ("/admin/api/keys", f"/admin/api/teams/{team['id']}/keys", f"/admin/api/teams/{team['id']}"):
        shown = (await client.get(path)).text
        assert key["prefix"] in shown
        assert plaintext not in shown
        assert "digest" not in shown
    renamed = await client.patch(f"/admin/api/keys/{key['id']}", json={"name": "production"})
    assert renamed.json()["name"] == "production"
    assert (await client.delete(f"/admin/api/keys/{key['id']}")).json()["is_active"] is False
    assert await world.accounts.find(plaintext) is None


async def test_a_budget_shows_what_counts_against_it(world: World, client: httpx.AsyncClient) -> None:
    """Spent, held, remaining and the reset are those of the running window."""
    team = (await client.post("/admin/api/teams", json={"name": "search"})).json()
    await world.spend(team["id"], 300_000)
    body = {"window": "month", "limit_microusd": 1_000_000}
    made = await client.post(f"/admin/api/teams/{team['id']}/budgets", json=body)
    assert made.status_code == 201
    budget = made.json()
    assert (budget["spent_microusd"], budget["held_microusd"], budget["remaining_microusd"]) == (300_000, 0, 700_000)
    assert budget["window_id"] == "2040-05"
    assert budget["resets_at_s"] == datetime(2040, 6, 1, tzinfo=UTC).timestamp()
    (kept,) = await world.accounts.list_budgets(team["id"])
    await world.budgets.reserve("hold-9", team["id"], [kept], 200_000, 60)
    (now,) = (await client.get(f"/admin/api/teams/{team['id']}/budgets")).json()["budgets"]
    assert (now["held_microusd"], now["remaining_microusd"]) == (200_000, 500_000)
    changed = await client.patch(f"/admin/api/budgets/{budget['id']}", json={"limit_microusd": 100_000})
    assert (changed.json()["limit_microusd"], changed.json()["remaining_microusd"]) == (100_000, 0)
    assert (await client.delete(f"/admin/api/budgets/{budget['id']}")).status_code == 204
    assert (await client.get("/admin/api/budgets")).json() == {"budgets": []}


async def test_a_team_has_one_budget_of_a_kind(client: httpx.AsyncClient) -> None:
    """A second of the same window and hardness is a 409, made or changed into; another kind and another team's are fine."""
    first = (await client.post("/admin/api/teams", json={"name": "search"})).json()["id"]
    second = (await client.post("/admin/api/teams", json={"name": "support"})).json()["id"]

    async def made(team_id: int, **body: Any) -> httpx.Response:
        return await client.post(f"/admin/api/teams/{team_id}/budgets", json={"limit_microusd": 5, **body})

    assert (await made(first, window="total")).status_code == 201
    again = await made(first, window="total")
    assert again.status_code == 409
    assert error_of(again)["message"] == "A hard total budget of this team exists already"
    soft = await made(first, window="total", is_hard=False)
    assert soft.status_code == 201
    assert [(await made(first, window="day")).status_code, (await made(second, window="total")).status_code] == [
        201,
        201,
    ]
    path = f"/admin/api/budgets/{soft.json()['id']}"
    assert (await client.patch(path, json={"is_hard": True})).status_code == 409
    assert (await client.patch(path, json={"is_hard": False, "limit_microusd": 7})).json()["limit_microusd"] == 7
    assert len((await client.get(f"/admin/api/teams/{first}/budgets")).json()["budgets"]) == 3
    assert (await made(77, window="day")).status_code == 404
    assert (await client.patch("/admin/api/budgets/77", json={"is_hard": True})).status_code == 404


_WRONG: list[tuple[str, str, Any, str, str]] = [
    ("POST", "/teams", {"name": ""}, "name", "invalid_value"),
    ("POST", "/teams", {}, "name", "missing_required_parameter"),
    ("POST", "/teams", {"name": "a", "colour": "red"}, "colour", "unknown_parameter"),
    ("POST", "/teams", {"name": "a", "requests_per_min": 0}, "requests_per_min", "invalid_value"),
    ("POST", "/teams", {"name": " a "}, "name", "invalid_value"),
    ("POST", "/teams/1/budgets", {"window": "year", "limit_microusd": 1}, "window", "invalid_value"),
    ("POST", "/teams/1/budgets", {"window": "day", "limit_microusd": -1}, "limit_microusd", "invalid_value"),
    ("POST", "/teams/1/keys", {"name": "k", "expires_at_s": "soon"}, "expires_at_s", "invalid_value"),
    ("GET", "/stats?window=2y", None, "window", "invalid_value"),
    ("GET", "/routes?limit=0", None, "limit", "invalid_value"),
    ("GET", "/routes?outcome=odd", None, "outcome", "invalid_value"),
    ("GET", "/ledger?cursor=nonsense", None, "cursor", "invalid_value"),
    ("GET", "/ledger?from_s=inf", None, "from_s", "invalid_value"),
    ("GET", "/teams/many", None, "team_id", "invalid_value"),
    ("GET", f"/teams/{2**70}", None, "team_id", "invalid_value"),
    ("POST", "/teams", {"name": "a", "requests_per_min": "5"}, "requests_per_min", "invalid_value"),
    ("POST", "/teams", {"name": "a", "is_active": "yes"}, "is_active", "invalid_value"),
    ("POST", "/teams", {"name": "a", "semantic_error_max": True}, "semantic_error_max", "invalid_value"),
    ("POST", "/teams", {"name": "a", "verify": "now"}, "verify", "invalid_value"),
    ("POST", "/teams", {"name": "a", "tokens_per_min": 10**13}, "tokens_per_min", "invalid_value"),
    ("POST", "/teams/1/keys", {"name": "k", "models": "small"}, "models", "invalid_value"),
    ("POST", "/teams/1/keys", {"name": "k", "models": [5]}, "models.0", "invalid_value"),
    ("POST", "/teams/1/budgets", {"window": "day", "limit_microusd": 1.5}, "limit_microusd", "invalid_value"),
    ("GET", "/routes?cursor=nonsense", None, "cursor", "invalid_value"),
    ("GET", f"/near-misses?cursor=1-{2**65}", None, "cursor", "invalid_value"),
    ("GET", "/ledger?cursor=5-%00", None, "cursor", "invalid_value"),
    ("GET", "/ledger?model=%00", None, "model", "invalid_value"),
    ("GET", "/ledger?team=1", None, "team", "unknown_parameter"),
    ("GET", "/stats?team=1&team=2", None, "team", "invalid_value"),
    ("GET", "/teams?name=a", None, "name", "unknown_parameter"),
    ("GET", "/routes?limit=1_0", None, "limit", "invalid_value"),
    ("POST", "/cache/purge", {"all": "yes", "dry_run": "no"}, "dry_run", "invalid_value"),
    ("POST", "/cache/purge", {"all": 1}, "all", "invalid_value"),
    ("POST", "/cache/purge", {"team_id": "1"}, "team_id", "invalid_value"),
    ("POST", "/feedback", {"id": "a b", "verdict": "right"}, "id", "invalid_value"),
    ("POST", "/cache/purge", {}, "all", "invalid_value"),
    ("POST", "/cache/purge", {"all": True, "model": "small"}, "all", "invalid_value"),
]


async def test_a_wrong_value_is_a_400_that_names_it(client: httpx.AsyncClient) -> None:
    """Validation answers in OpenAI's shape with the field's name, and never with 422 or 500."""
    await client.post("/admin/api/teams", json={"name": "first"})
    for method, path, body, param, code in _WRONG:
        reply = await client.request(method, f"/admin/api{path}", json=body)
        assert reply.status_code == 400, (path, body, reply.text)
        error = error_of(reply)
        assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)


async def test_a_purge_that_is_not_meant_removes_nothing(world: World, client: httpx.AsyncClient) -> None:
    """Words that look like yes and no are no booleans, and a name that stands twice has no value."""
    entry = await world.cache_answer(1, "hello")
    twice = b'{"dry_run": true, "all": true, "dry_run": false}'
    for content in (b'{"all": "yes", "dry_run": "no"}', b'{"all": 1, "dry_run": 0}', twice):
        reply = await client.post(
            "/admin/api/cache/purge", content=content, headers={"content-type": "application/json"}
        )
        assert reply.status_code == 400, content
        error_of(reply)
    assert error_of(reply)["param"] == "dry_run"
    assert (await client.post("/admin/api/cache/purge", json={"id": entry.id})).json()["count"] == 1


async def test_messages_have_the_words_of_json(client: httpx.AsyncClient) -> None:
    """Neither the admin API nor `/v1` names a type of Python's."""
    said = []
    for path, body in (
        ("/teams/1/keys", {"name": "k", "models": "small"}),
        ("/teams/1/keys", {"name": [], "models": None}),
        ("/teams", {"name": {}, "is_active": None}),
        ("/teams", {"name": "a", "requests_per_min": "x"}),
        ("/teams", {"name": " "}),
    ):
        said.append(error_of(await client.post(f"/admin/api{path}", json=body))["message"])
    assert not [words for words in said if re.search(r"\b(tuple|list|dict|dictionary|None|str|int|bool)\b", words)]
    assert "array" in said[0]
    assert '" "' in said[-1]


async def test_what_is_no_json_is_a_400(client: httpx.AsyncClient) -> None:
    """A body that does not parse is the client's fault, in words."""
    for content in (b"{", b"\xff\xfe", b"[]", b"7", b'"x"', b"null", b"", b'{"name": NaN}', b'{"a":' * 9_000):
        reply = await client.post("/admin/api/teams", content=content, headers={"content-type": "application/json"})
        assert reply.status_code == 400, content
        error_of(reply)


async def test_a_body_of_another_type_is_a_400_that_says_so(client: httpx.AsyncClient) -> None:
    """JSON sent as a form, as curl does unless told otherwise, is told what is missing."""
    headers = {"content-type": "application/x-www-form-urlencoded"}
    reply = await client.post("/admin/api/teams", content=b'{"name": "first"}', headers=headers)
    assert reply.status_code == 400
    assert "`Content-Type: application/json`" in error_of(reply)["message"]


_UNKNOWN: list[tuple[str, str, Any]] = [
    ("GET", "/teams/77", None),
    ("PATCH", "/teams/77", {"name": "x"}),
    ("DELETE", "/teams/77", None),
    ("POST", "/teams/77/keys", {"name": "k"}),
    ("GET", "/teams/77/keys", None),
    ("PATCH", "/keys/77", {"name": "x"}),
    ("DELETE", "/keys/77", None),
    ("POST", "/teams/77/budgets", {"window": "day", "limit_microusd": 1}),
    ("GET", "/teams/77/budgets", None),
    ("PATCH", "/budgets/77", {"limit_microusd": 1}),
    ("DELETE", "/budgets/77", None),
    ("POST", "/cache/purge", {"team_id": 77}),
    ("POST", "/cache/try", {"team_id": 77, "model": "small", "prompt": "hello"}),
]


async def test_an_unknown_id_is_a_404(client: httpx.AsyncClient) -> None:
    """Whatever is asked of something that is not there."""
    for method, path, body in _UNKNOWN:
        reply = await client.request(method, f"/admin/api{path}", json=body)
        assert reply.status_code == 404, (path, reply.text)
        assert error_of(reply)["code"] == "not_found"


# -- what happened


async def test_stats_tell_hits_money_and_latency(world: World, client: httpx.AsyncClient) -> None:
    """In total, by team with its name, by model, by deployment and over time; every kind is there, also at 0."""
    team = (await client.post("/admin/api/teams", json={"name": "search"})).json()
    at = {"at_s": NOW_S, "team_id": team["id"]}
    large = hit(cache="coalesced", alias="large", route="messages", **at)
    for record in (miss(**at), hit(**at), hit(cache="semantic", **at), large):
        world.stats.add(record)
    await world.stats.flush()
    stats = (await client.get("/admin/api/stats", params={"window": "1h"})).json()
    total = stats["total"]
    assert total["by_kind"] == {
        "exact": 1, "semantic": 1, "coalesced": 1, "miss": 1, "bypass": 0, "refused": 0, "failed": 0
    }  # fmt: skip
    assert (total["requests"], total["hits"], total["hit_rate"]) == (4, 3, 0.75)
    assert (total["cost_microusd"], total["saved_microusd"]) == (120, 360)
    assert stats["by_team"][0]["team"] == "search"
    assert [one["model"] for one in stats["by_model"]] == ["small", "large"]
    assert {one["surface"]: (one["requests"], one["hits"]) for one in stats["by_surface"]} == {
        "chat": (3, 2),
        "messages": (1, 1),
    }
    assert stats["by_deployment"][0] == {
        "deployment": "local", "ok": 1, "failed": 0, "completion_tokens": 11, "cost_microusd": 120
    }  # fmt: skip
    assert len(stats["series"]) == 60
    assert stats["ttft"]["miss"]["p50_ms"] == pytest.approx(100, rel=0.1)
    narrowed = (await client.get("/admin/api/stats", params={"window": "1h", "model": "large"})).json()
    assert narrowed["total"]["requests"] == 1
    assert [one["surface"] for one in narrowed["by_surface"]] == ["messages"]


async def test_routes_say_why(world: World, client: httpx.AsyncClient) -> None:
    """The winner, why, each rejection and each attempt; filters narrow the list and pages continue it."""
    attempts = (Attempt("api", "timed out", 5_000.0), Attempt("local", "ok", 80.0))
    rejected = (Rejection("tiny", "can't do tools"),)
    world.stats.add(miss(request_id="req_why", why="fastest of 2", attempts=attempts, rejected=rejected))
    for number in range(5):
        world.stats.add(hit(request_id=f"req_{number}"))
    world.stats.add(miss(request_id="req_no", status=429, error="insufficient_quota", attempts=()))
    await world.stats.flush()
    (failover,) = (await client.get("/admin/api/routes?outcome=failover")).json()["routes"]
    assert failover["why"] == "fastest of 2"
    assert failover["rejected"] == [{"name": "tiny", "reason": "can't do tools"}]
    assert [one["outcome"] for one in failover["attempts"]] == ["timed out", "ok"]
    assert [r["request_id"] for r in (await client.get("/admin/api/routes?outcome=refused")).json()["routes"]] == [
        "req_no"
    ]
    assert len((await client.get("/admin/api/routes?deployment=api")).json()["routes"]) == 1
    first = (await client.get("/admin/api/routes?cache=exact&limit=3")).json()
    rest = (await client.get(f"/admin/api/routes?cache=exact&limit=3&cursor={first['cursor']}")).json()
    found = [one["request_id"] for one in first["routes"] + rest["routes"]]
    assert found == ["req_4", "req_3", "req_2", "req_1", "req_0"]
    assert rest["cursor"] is None


async def test_near_misses_say_how_near_and_why_not(world: World, client: httpx.AsyncClient) -> None:
    """A near miss has its similarity and reason; what was about something else is none."""
    world.stats.add(miss(similarity=0.91, miss_reason="numbers"))
    world.stats.add(miss(similarity=0.59, miss_reason="far"))
    world.stats.add(miss())
    await world.stats.flush()
    (near,) = (await client.get("/admin/api/near-misses")).json()["routes"]
    assert (near["similarity"], near["miss_reason"]) == (0.91, "numbers")


async def test_why_prompts_do_not_hit(world: World, client: httpx.AsyncClient) -> None:
    """Shares of each model's misses by cause, the largest first; an example with a text where there is one."""
    world.stats.add(miss(request_id="req_1", alias="a", miss_reason="numbers", similarity=0.9, nearest="a near prompt"))
    for number, reason in enumerate(("marks", "numbers", "documents"), 2):
        world.stats.add(miss(request_id=f"req_{number}", alias="a", miss_reason=reason))
    world.stats.add(miss(request_id="req_5", alias="b", miss_reason="a reason of tomorrow"))
    world.stats.add(miss(request_id="req_6", alias="b", cache="exact", miss_reason=""))
    world.stats.add(miss(request_id="req_7", alias="c", miss_reason="words"))
    await world.stats.flush()
    found = (await client.get("/admin/api/cache/misses")).json()
    assert found["misses"] == 6
    told = [(one["model"], one["cause"], one["count"], one["share"]) for one in found["causes"]]
    assert told == [
        ("a", "vetoes", 3, 0.75),
        ("a", "documents", 1, 0.25),
        ("b", "other", 1, 1.0),
        ("c", "doubt", 1, 1.0),
    ]
    assert found["causes"][0]["example"]["nearest"] == "a near prompt"
    assert found["causes"][0]["example"]["request_id"] == "req_1"
    assert "other questions" in found["causes"][0]["advice"]
    assert "name one in `cache.verifier`" in found["causes"][-1]["advice"]


async def test_what_would_save_most_comes_first(world: World, client: httpx.AsyncClient) -> None:
    """What was asked again, of the same model by the same team, with its cost; the first asking could not be a hit."""
    asked = (("a", 1, "p"), ("a", 1, "p"), ("a", 2, "p"), ("a", 1, "q"), ("b", 1, "p"), ("a", 1, ""), ("a", 1, ""))
    for number, (alias, team_id, prompt_id) in enumerate(asked):
        facts: Any = {"alias": alias, "team_id": team_id, "prompt_id": prompt_id, "miss_reason": "far"}
        world.stats.add(miss(request_id=f"req_{number}", cost_microusd=10, **facts))
    for number in range(3):
        facts = {"alias": "c", "prompt_id": "r", "miss_reason": "documents", "cost_microusd": 100}
        world.stats.add(miss(request_id=f"req_c{number}", **facts))
    await world.stats.flush()
    causes = (await client.get("/admin/api/cache/misses")).json()["causes"]
    told = [(one["model"], one["cause"], one["repeats"], one["repeats_microusd"]) for one in causes]
    assert told == [("c", "documents", 2, 200), ("a", "new", 1, 10), ("b", "new", 0, 0)]


async def test_the_ledger_in_pages_and_as_csv(world: World, client: httpx.AsyncClient) -> None:
    """Pages join without a gap, filters narrow both, and the CSV has every row with its time in ISO form."""
    for number in range(7):
        await world.spend(1, 100 + number, number)
    await world.spend(2, 999, 50, deployment="=cmd()")
    first = (await client.get("/admin/api/ledger?team_id=1&limit=4")).json()
    rest = (await client.get(f"/admin/api/ledger?team_id=1&limit=4&cursor={first['cursor']}")).json()
    assert [row["cost_microusd"] for row in first["rows"] + rest["rows"]] == [100 + number for number in range(7)]
    assert rest["cursor"] is None
    reply = await client.get("/admin/api/ledger.csv")
    assert reply.headers["content-type"].startswith("text/csv")
    assert "attachment" in reply.headers["content-disposition"]
    rows = list(csv.DictReader(io.StringIO(reply.text)))
    assert len(rows) == 8
    assert rows[0]["at"] == "2040-05-17T12:45:00.000+00:00"
    assert {row["deployment"] for row in rows} == {"small@api", "'=cmd()"}  # no spreadsheet runs it
    assert (await client.get(f"/admin/api/ledger?until_s={NOW_S - 10}")).json()["rows"] == []
    days = [
        ("2040-05-17", "2040-05-18", 200, 8),
        ("2040-05-18", "2040-05-19", 200, 0),
        ("2040-05-32", "2040-06-01", 400, 0),
    ]
    for since, until, status, count in days:
        found = await client.get(f"/admin/api/ledger?from_s={since}&until_s={until}")
        assert (found.status_code, len(found.json().get("rows", []))) == (status, count)


async def test_the_ledger_as_parquet(world: World, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the rows of the CSV with their types, also over several groups and none; without the extra it is refused."""
    monkeypatch.setattr("gateway.accounts.parquet.GROUP_ROWS", 3)
    monkeypatch.setattr("gateway.admin.views.SUMS_PAGE", 2)
    for number in range(7):
        await world.spend(1, 100 + number, number, usage_estimated=number == 6, user="=ann", baseline_microusd=None)
    reply = await client.get("/admin/api/ledger.parquet?team_id=1")
    assert reply.headers["content-type"] == "application/vnd.apache.parquet"
    file = parquet.ParquetFile(io.BytesIO(reply.content))
    rows = file.read().to_pylist()
    assert file.num_row_groups == 3
    texts = list(csv.DictReader(io.StringIO((await client.get("/admin/api/ledger.csv?team_id=1")).text)))
    assert [list(row) for row in rows] == [list(text) for text in texts]
    assert [str(row["cost_microusd"]) for row in rows] == [text["cost_microusd"] for text in texts]
    assert rows[0]["at"] == datetime.fromisoformat(texts[0]["at"])
    kinds = {type(row[name]) for row in rows for name in ("at_ms", "cost_microusd", "team_id")}
    assert (kinds, {row["baseline_microusd"] for row in rows}, {row["user"] for row in rows}) == (
        {int},
        {None},
        {"=ann"},
    )
    assert [{row["kind"] for row in found} for found in (rows, texts)] == [{"chat"}, {"chat"}]
    assert sorted(row["usage_estimated"] for row in rows) == [False] * 6 + [True]
    for path in ("ledger", "ledger/sums", "savings"):  # a file has the columns of its view, in either form
        as_text, as_table = [await client.get(f"/admin/api/{path}.{end}") for end in ("csv", "parquet")]
        names = parquet.read_schema(io.BytesIO(as_table.content)).names
        assert as_text.text.splitlines()[0].split(",") == names, path
        assert {"ledger": {"session", "region"}, "ledger/sums": {"session", "hits"}}.get(path, set()) <= set(names)
    for number in range(5):
        await world.spend(1, 1, 10 + number, user=f"u{number}")
    whole = csv.DictReader((await client.get("/admin/api/ledger/sums.csv?by=user,day")).text.splitlines())
    assert [row["user"] for row in whole] == ["'=ann", *(f"u{number}" for number in range(5))]
    assert (await client.get("/admin/api/ledger/sums.csv?by=user,model")).status_code == 400
    none = await client.get("/admin/api/ledger.parquet?team_id=99")
    assert parquet.read_table(io.BytesIO(none.content)).num_rows == 0
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    refused = await client.get("/admin/api/ledger.parquet")
    assert (refused.status_code, "sameway[parquet]" in refused.text) == (400, True)


async def test_the_ledger_is_summed_by_user_and_tag(world: World, client: httpx.AsyncClient) -> None:
    """The groups that cost most come first; a user of a tag's name is not that tag; what cannot go together is refused."""
    for number, (user, tags) in enumerate((("ann", '{"app":"web"}'), ("*", '{"app":"web"}'), ("", ""), ("ann", ""))):
        await world.spend(1, 100 + number, number=number, user=user, tags=tags)
    reply = (await client.get("/admin/api/ledger/sums?by=user,team&limit=2")).json()
    found = [(one["user"], one["is_other"], one["cost_microusd"], one["requests"]) for one in reply["sums"]]
    assert (found, reply["has_more"]) == ([("ann", False, 203, 2), ("", False, 102, 1)], True)
    [star] = (await client.get("/admin/api/ledger/sums?by=user&user=*")).json()["sums"]
    assert (star["user"], star["cost_microusd"], star["tag"]) == ("*", 101, None)
    [name] = (await client.get("/admin/api/ledger/sums?by=tag")).json()["sums"]
    [value] = (await client.get("/admin/api/ledger/sums?by=tag,day&tag=app")).json()["sums"]
    assert (name["tag"], value["tag"], value["cost_microusd"]) == ("app", "web", 201)
    assert value["day"] == datetime.fromtimestamp(NOW_S, UTC).date().isoformat()
    [one] = (await client.get("/admin/api/ledger/sums?tag=app&tag_value=web&team_id=1")).json()["sums"]
    assert one["requests"] == 2
    [by_model] = (await client.get("/admin/api/ledger/sums?by=model,key,deployment")).json()["sums"]
    assert by_model["requests"] == 4
    hits = HitsRow(
        id="h", at_ms=int(NOW_S * 1000), team_id=1, key_id=1, alias="small", source="exact", requests=2, unknown=0,
        baseline_microusd=50, user="ann", tags='{"app":"web"}', session="run-1",
    )  # fmt: skip
    await world.ledger.append_hits([hits])
    [ann] = (await client.get("/admin/api/ledger/sums?by=user&user=ann")).json()["sums"]
    assert (ann["requests"], ann["hits"], ann["saved_microusd"], ann["checks_microusd"]) == (2, 2, 50, 0)
    await world.spend(1, 9, number=9, session="run-1", region="eu")
    [row] = (await client.get("/admin/api/ledger?session=run-1&region=eu")).json()["rows"]
    [region] = (await client.get("/admin/api/ledger/sums?by=region")).json()["sums"]
    assert (row["cost_microusd"], row["session"], region["region"], region["cost_microusd"]) == (9, "run-1", "eu", 9)
    [[rest, run], [own]] = [
        (await client.get(f"/admin/api/ledger/sums?{query}")).json()["sums"]
        for query in ("by=session", "by=day,team,model&session=run-1")
    ]
    assert [(run[n], own[n]) for n in ("session", "requests", "cost_microusd", "hits", "saved_microusd")] == [
        ("run-1", None), (1, 1), (9, 9), (2, 2), (50, 50),
    ]  # fmt: skip
    assert (rest["session"], rest["requests"], own["day"], own["model"]) == ("", 4, "2040-05-17", "small")
    for query in (
        "by=user,model",
        "by=user,tag",
        "by=region,tag",
        "by=session,user",
        "by=tag&key_id=1",
        "by=nothing",
        "by=user,",
        "user=a&tag=b",
    ):
        assert (await client.get(f"/admin/api/ledger/sums?{query}")).status_code == 400, query


async def test_the_ledger_has_names_and_marks_estimates(world: World, client: httpx.AsyncClient) -> None:
    """JSON and CSV name team and key beside their ids, as far as they still exist; no name runs as a formula."""
    team = (await client.post("/admin/api/teams", json={"name": "=1+1"})).json()
    await client.post(f"/admin/api/teams/{team['id']}/keys", json={"name": "@prod"})
    await world.spend(team["id"], 100, 1)
    await world.spend(77, 200, 2, usage_estimated=True, alias="\uff1dcmd")
    first, second = (await client.get("/admin/api/ledger")).json()["rows"]
    assert (first["team"], first["key"], first["usage_estimated"]) == ("=1+1", "@prod", False)
    assert (second["team"], second["key"], second["usage_estimated"]) == (None, "@prod", True)
    one, two = csv.DictReader(io.StringIO((await client.get("/admin/api/ledger.csv")).text))
    assert (one["team_id"], one["team"], one["key_id"], one["key"]) == (str(team["id"]), "'=1+1", "1", "'@prod")
    assert (two["team_id"], two["team"], two["alias"]) == ("77", "", "'\uff1dcmd")
    assert (one["usage_estimated"], two["usage_estimated"]) == ("false", "true")


async def test_a_team_with_its_budget_in_one_request(world: World, client: httpx.AsyncClient) -> None:
    """Both are there or neither; the answer says for which models the budget is too small, the list what a request holds."""
    budget = {"window": "day", "limit_microusd": 1_000}
    wrong = {"name": "poor", "budget": {**budget, "limit_microusd": -1}}
    assert (await client.post("/admin/api/teams", json=wrong)).status_code == 400
    assert (await client.get("/admin/api/teams")).json()["teams"] == []
    team = (await client.post("/admin/api/teams", json={"name": "poor", "budget": budget})).json()
    (made,) = team["budgets"]
    assert (made["limit_microusd"], made["is_hard"], made["too_small_for"]) == (1_000, True, ["small"])
    raised = (await client.patch(f"/admin/api/budgets/{made['id']}", json={"limit_microusd": 2_473})).json()
    assert raised["too_small_for"] == []
    holds = (await client.get("/admin/api/teams")).json()["holds"]
    assert holds == [{"model": "small", "microusd": 2_473, "output_tokens": 4_096}]


async def test_a_look_at_texts_is_audited(world: World, client: httpx.AsyncClient) -> None:
    """An admin who asks gets question and answer, after a row of the audit log is on disk; nothing else writes one."""
    team = (await client.post("/admin/api/teams", json={"name": "search"})).json()
    entry = await world.cache_answer(team["id"], "How tall is it?", answer="330 m")
    world.stats.add(hit(at_s=NOW_S, team_id=team["id"], entry=entry.id, request_id="req_1", question="how tall"))
    world.stats.add(miss(at_s=NOW_S, team_id=team["id"], request_id="req_2"))
    await world.stats.flush()
    assert "how tall" not in (await client.get("/admin/api/routes")).text
    (before,) = (await client.get("/admin/api/audit")).json()["rows"]
    assert before["action"] == "team_created"
    for _ in range(3):
        reply = await client.post("/admin/api/answer", json={"id": "req_1"})
        shown = reply.json()
        assert (shown["question"], shown["answer"], shown["why_no_verdict"]) == ("How tall is it?", "330 m", "")
        assert reply.headers["cache-control"] == "no-store"
    for id in ("req_2", "req_3"):
        reply = await client.post("/admin/api/answer", json={"id": id})
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "response_not_found")
    page = (await client.get("/admin/api/audit?limit=2")).json()
    rest = (await client.get(f"/admin/api/audit?limit=2&cursor={page['cursor']}")).json()
    assert (len(page["rows"]), len(rest["rows"]), rest["cursor"]) == (2, 2, None)
    row = rest["rows"][0]
    assert row == {
        "id": 2, "at_ms": int(NOW_S * 1000), "action": "answer_shown", "team_id": team["id"], "team": "search",
        "request_id": "req_1", "entry": entry.id, "client": "127.0.0.1", "way": "api", "actor": "admin key", "change": "",
    }  # fmt: skip


async def test_what_cannot_be_audited_is_not_shown(
    world: World, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The texts stay hidden while the database does not answer; what it refuses is a bug, and shown as one."""
    team = (await client.post("/admin/api/teams", json={"name": "search"})).json()
    entry = await world.cache_answer(team["id"], "How tall is it?", answer="330 m")
    world.stats.add(hit(at_s=NOW_S, team_id=team["id"], entry=entry.id, request_id="req_1"))
    await world.stats.flush()

    async def refused(error: type[DBAPIError]) -> tuple[int, str]:
        async def fail(_: object) -> None:
            raise error("INSERT", {}, Exception("disk full"))

        monkeypatch.setattr(world.admin.audit, "add", fail)
        reply = await client.post("/admin/api/answer", json={"id": "req_1"})
        assert "330 m" not in reply.text
        return reply.status_code, reply.json()["error"]["code"]

    assert await refused(OperationalError) == (503, "database_unavailable")
    with pytest.raises(ProgrammingError):
        await refused(ProgrammingError)


# -- the machine


async def test_status_names_what_is_wrong(world: World, client: httpx.AsyncClient) -> None:
    """All well is an empty list; a dead part, a dead alias and a spent budget are named, the urgent first."""
    assert (await client.get("/admin/api/status")).json()["problems"] == []
    world.parts.append(GatewayPart("cache worker", PartHealth.STARTING, "loading 40%"))
    world.deployments = [LOCAL.model_copy(update={"is_available": False, "reason": "connection refused"})]
    team = (await client.post("/admin/api/teams", json={"name": "search"})).json()
    await client.post(f"/admin/api/teams/{team['id']}/budgets", json={"window": "day", "limit_microusd": 100})
    await world.spend(team["id"], 100)
    problems = (await client.get("/admin/api/status")).json()["problems"]
    messages = [problem["message"] for problem in problems]
    spent = "search has used up its budget of $0.0001 per day ($0.0001 spent): only cached answers are served"
    assert spent in messages
    assert any("Nobody can answer small" in message and "connection refused" in message for message in messages)
    assert any("cache worker is starting: loading 40%" in message for message in messages)
    assert [problem["is_urgent"] for problem in problems] == sorted(
        (problem["is_urgent"] for problem in problems), reverse=True
    )


async def _failed_traffic(world: World, error: str, status: int) -> None:
    for _ in range(30):
        world.stats.add(miss(at_s=NOW_S, status=status, error=error))
    await world.stats.flush()


@pytest.mark.parametrize(
    ("status", "error", "kind"),
    [
        (504, "not_cached", "refused"),
        (504, "deadline_exceeded", "refused"),
        (429, "insufficient_quota", "refused"),
        (504, "upstream_timeout", "failed"),
        (503, "no_deployment_available", "failed"),
        (500, "internal_error", "failed"),
    ],
)
async def test_only_what_is_our_fault_has_failed(
    world: World, client: httpx.AsyncClient, status: int, error: str, kind: str
) -> None:
    """What the caller ruled out is refused, in the counts, the list, its filter and the alarm alike."""
    await _failed_traffic(world, error, status)
    stats = (await client.get("/admin/api/stats?window=1h")).json()
    assert {name: count for name, count in stats["total"]["by_kind"].items() if count} == {kind: 30}
    routes = (await client.get(f"/admin/api/routes?outcome={kind}")).json()["routes"]
    assert {route["kind"] for route in routes} == {kind}
    problems = (await client.get("/admin/api/status")).json()["problems"]
    assert [problem["message"] for problem in problems] == (
        ["100% of the last hour's requests failed (30 of 30)"] if kind == "failed" else []
    )


async def test_a_team_that_is_masked_or_guarded_by_another_name_is_named(redis: Redis, tmp_path: Path) -> None:
    """A name without a team would let that team's requests pass as they are: it is urgent, until the team has the name."""
    sections: dict[str, Any] = {
        "mask": {"teams": ["help"]},
        "guards": {"dlp": {"url": "http://x", "teams": ["*", "help"]}},
    }
    async with open_world(redis, tmp_path, **sections) as world, client_of(world) as client:
        problems = (await client.get("/admin/api/status")).json()["problems"]
        says = "names the team help, and there is none: it may have another name"
        assert [problem["message"] for problem in problems] == [f"`mask` {says}", f"`guards.dlp` {says}"]
        assert all(problem["is_urgent"] for problem in problems)
        await client.post("/admin/api/teams", json={"name": "help"})
        assert (await client.get("/admin/api/status")).json()["problems"] == []


async def test_a_team_that_is_mostly_turned_away_is_named(world: World, client: httpx.AsyncClient) -> None:
    """A budget that no answer fits into is never used up: what tells is that its requests are refused."""
    team = (await client.post("/admin/api/teams", json={"name": "search"})).json()
    for number in range(30):
        error = {"status": 429, "error": "insufficient_quota", "attempts": ()} if number % 3 else {}
        world.stats.add(miss(at_s=NOW_S, team_id=team["id"], **error))
    await world.stats.flush()
    (problem,) = (await client.get("/admin/api/status")).json()["problems"]
    assert problem["message"] == "20 of search's 30 requests of the last hour were refused"
    assert not problem["is_urgent"]
    found = (await client.get(problem["href"].replace("/admin/requests", "/admin/api/routes"))).json()
    assert {route["kind"] for route in found["routes"]} == {"refused"}


async def test_a_gateway_that_starts_is_no_alarm(world: World, client: httpx.AsyncClient) -> None:
    """While a model is loading its refusals and its absence are no emergency; once it is down they are."""
    await _failed_traffic(world, "no_deployment_available", 503)
    world.deployments = [LOCAL.model_copy(update={"is_available": False, "reason": "the model is loading: 40%"})]
    world.parts.append(GatewayPart(LOCAL.name, PartHealth.STARTING, "the model is loading: 40%"))
    (problem,) = (await client.get("/admin/api/status")).json()["problems"]
    assert problem["message"] == "small can't be answered yet: small@local: the model is loading: 40%"
    assert not problem["is_urgent"]
    world.parts[-1] = GatewayPart(LOCAL.name, PartHealth.DOWN, "it died")
    problems = (await client.get("/admin/api/status")).json()["problems"]
    assert [problem["is_urgent"] for problem in problems] == [True, True]


async def test_deployments_show_what_they_did(world: World, client: httpx.AsyncClient) -> None:
    """Each has its health, its estimates and its last 24 hours."""
    world.stats.add(miss(at_s=NOW_S, deployment="small@local", attempts=(Attempt("small@local", "ok", 200.0),)))
    await world.stats.flush()
    local, remote = (await client.get("/admin/api/deployments")).json()["deployments"]
    assert (local["name"], local["is_available"], local["ttft_ms"]) == ("small@local", True, 180.0)
    assert local["last_24h"]["ok"] == 1
    assert remote["last_24h"] is None
    assert remote["engine"] is None
    engine = local["engine"]
    assert (engine["kv_usage"], engine["cached_tokens_total"], engine["prompt_tokens_total"]) == (0.25, 1_500, 2_000)
    assert engine["drafted_tokens_total"] == {"text": 30, "reference": 10}


async def test_without_redis_the_overview_still_answers(tmp_path: Path) -> None:
    """Health is shown and the counts are null; what is nothing but counts answers 503; money figures are null."""
    with run_redis() as server:
        redis = Redis.from_url(server.url, retry=None)
        async with open_world(redis, tmp_path) as world, client_of(world) as client:
            team = (await client.post("/admin/api/teams", json={"name": "search"})).json()
            body = {"window": "day", "limit_microusd": 100}
            await client.post(f"/admin/api/teams/{team['id']}/budgets", json=body)
            server.stop()
            overview = await client.get("/admin/api/overview")
            assert overview.status_code == 200
            assert overview.json()["stats"] is None
            (budget,) = (await client.get("/admin/api/budgets")).json()["budgets"]
            assert (budget["limit_microusd"], budget["spent_microusd"]) == (100, None)
            for path in ("/stats", "/routes", "/near-misses", "/cache"):
                reply = await client.get(f"/admin/api{path}")
                assert reply.status_code == 503, path
                assert error_of(reply)["code"] == "redis_unavailable"
        await redis.aclose()


# -- the cache


async def test_a_purge_counts_first_and_removes_then(world: World, client: httpx.AsyncClient) -> None:
    """A dry run changes nothing and shows samples; the purge removes exactly what it counted, by every selector."""
    one = (await client.post("/admin/api/teams", json={"name": "one"})).json()["id"]
    two = (await client.post("/admin/api/teams", json={"name": "two"})).json()["id"]
    first = await world.cache_answer(one, "What is the capital of France?")
    await world.cache_answer(one, "How tall is the Eiffel tower?", model="large", created_at_s=NOW_S - 7_200)
    await world.cache_answer(two, "What is the capital of France?", deployment="there", namespace="handbook")
    selectors: list[tuple[dict[str, Any], int]] = [
        ({"text": "what is the capital of france?"}, 2),
        ({"text": "what is the capital of france?", "team_id": two}, 1),
        ({"model": "large"}, 1),
        ({"model": "small"}, 2),
        ({"namespace": "handbook"}, 1),
        ({"namespace": "handbook", "team_id": one}, 0),
        ({"deployment": "here"}, 2),
        ({"deployment": "there", "model": "small"}, 1),
        ({"deployment": "there", "model": "large"}, 0),
        ({"older_than_s": 3_600}, 1),
        ({"team_id": one}, 2),
        ({"id": first.id}, 1),
        ({"id": first.id, "team_id": two}, 0),
        ({"all": True}, 3),
    ]
    for selector, count in selectors:
        dry = (await client.post("/admin/api/cache/purge", json=selector)).json()
        assert (dry["dry_run"], dry["count"]) == (True, count), selector
        assert len(dry["samples"]) == count
    assert (await client.get("/admin/api/cache")).json()["entries"] == 3
    done = (await client.post("/admin/api/cache/purge", json={"team_id": one, "dry_run": False})).json()
    assert (done["dry_run"], done["count"]) == (False, 2)
    cache = (await client.get("/admin/api/cache")).json()
    assert [(part["team"], part["entries"]) for part in cache["partitions"]] == [("two", 1)]
    assert cache["semantic"]["health"] == "ok"


async def test_trying_a_prompt_shows_the_decision_and_the_neighbours(world: World, client: httpx.AsyncClient) -> None:
    """Exact, by meaning, near, and nothing near: each says why, and trying stores and counts nothing."""
    team_id = (await client.post("/admin/api/teams", json={"name": "one"})).json()["id"]
    await world.cache_answer(team_id, "What is the capital of France?")

    async def tried(prompt: str) -> dict[str, Any]:
        body = {"team_id": team_id, "model": "small", "prompt": prompt}
        reply = await client.post("/admin/api/cache/try", json=body)
        assert reply.status_code == 200, reply.text
        return dict(reply.json())

    exact = await tried("What is the capital of France?")
    assert exact["decision"] == "exact"
    same = await tried("what is the capital of france?")
    assert (same["decision"], same["neighbours"][0]["text"]) == ("semantic", "What is the capital of France?")
    near = await tried("What is the population of France?")
    assert (near["decision"], near["reason"]) == ("miss", "far")
    assert near["neighbours"][0]["similarity"] == near["similarity"] == pytest.approx(5 / 7)
    assert (await tried("Sing!"))["reason"] == "empty"
    assert (await client.get("/admin/api/cache")).json()["entries"] == 1


# -- the description


async def test_the_openapi_description_covers_it(world: World) -> None:
    """Every operation has a summary, an example of its error shape and no 422, which is never sent."""
    paths = world.app.openapi()["paths"]
    described = {path: item for path, item in paths.items() if path.startswith("/admin/api")}
    assert len(described) >= 18
    for path, item in described.items():
        for method, operation in item.items():
            assert operation["description"], (method, path)
            assert "422" not in operation["responses"], (method, path)
            assert {"400", "401", "403", "4XX", "503"} <= set(operation["responses"]), (method, path)
            assert [next(iter(one)) for one in operation["security"]] == ["adminKey", "APIKeyCookie"]
    assert list(paths["/admin/api/ledger.csv"]["get"]["responses"]["200"]["content"]) == ["text/csv"]
    assert list(paths["/admin/api/ledger.csv"]["get"]["responses"]["400"]["content"]) == ["application/json"]
    limit = next(one for one in paths["/admin/api/routes"]["get"]["parameters"] if one["name"] == "limit")
    assert (limit["schema"]["minimum"], limit["schema"]["maximum"]) == (1, 500)
    assert not [path for path in paths if path.startswith("/admin") and not path.startswith("/admin/api")]


async def test_a_budget_on_each_user_is_made_raised_and_reset(world: World, client: httpx.AsyncClient) -> None:
    """The API takes every axis and unit, shows the values that used most, and records raises and resets with who did it."""
    team = (await client.post("/admin/api/teams", json={"name": "axes", "time_zone": "Europe/Berlin"})).json()
    path = f"/admin/api/teams/{team['id']}/budgets"
    fields = {"window": "rolling", "rolling_s": 86_400, "limit_tokens": 1000, "axis": "user"}
    made = (await client.post(path, json=fields)).json()
    assert (made["unit"], made["limit"], made["limit_microusd"], made["value"]) == ("tokens", 1000, None, None)
    assert made["time_zone"] == "Europe/Berlin"
    for wrong, param in (
        ({**fields, "limit_microusd": 1}, "limit_microusd"),
        ({**fields, "rolling_s": 0}, "rolling_s"),
        ({**fields, "axis": "planet"}, "axis"),
        ({**fields, "axis": "key", "value": "77"}, "value"),
        ({"window": "day", "limit_requests": 1, "value": "x"}, "value"),
    ):
        reply = await client.post(path, json=wrong)
        assert reply.status_code == 400, wrong
        assert reply.json()["error"]["param"] == param
    assert (await client.post(path, json=fields)).status_code == 409
    assert (await client.patch(f"/admin/api/teams/{team['id']}", json={"time_zone": "Mars/Olympus"})).status_code == 400
    (budget,) = await world.accounts.list_budgets(team["id"])
    need = Need(0, tokens=400, values={"user": "alice"})
    hold = await world.budgets.reserve("h1", team["id"], [budget], need, 60)
    assert isinstance(hold, Hold)
    values = (await client.get(f"/admin/api/budgets/{made['id']}/values")).json()
    assert values == {"values": [{"value": "alice", "spent": 0, "held": 400}], "values_total": 1}
    assert (await client.patch(f"/admin/api/budgets/{made['id']}", json={"limit_microusd": 5})).status_code == 400
    until_s = world.admin.clock() + 3600
    raised = (await client.post(f"/admin/api/budgets/{made['id']}/raise", json={"by": 500, "until_s": until_s})).json()
    assert (raised["limit"], raised["limit_now"], raised["remaining"], raised["fullest"]) == (1000, 1500, 1100, "alice")
    assert (
        await client.post(f"/admin/api/budgets/{made['id']}/raise", json={"by": 1, "until_s": 5})
    ).status_code == 400
    again = (await client.post(f"/admin/api/budgets/{made['id']}/reset")).json()
    assert (again["held"], again["remaining"]) == (0, 1500)
    rows = (await client.get("/admin/api/audit")).json()["rows"]
    assert [row["action"] for row in rows[:2]] == ["budget_reset", "budget_raised"]
    assert "500 tokens more until" in rows[1]["entry"]
    assert (await client.post("/admin/api/budgets/777/reset")).status_code == 404
