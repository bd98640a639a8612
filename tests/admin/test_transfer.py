"""Answers that an operator puts into the cache, and those that leave it as a file."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from httpx import ASGITransport, AsyncClient
from redis.asyncio import Redis

from cache import Entry, fingerprint
from tests.admin.world import ADMIN_KEY, World, open_world

MODEL = "smollm2-135m-instruct"


@pytest.fixture
async def world(redis: Redis, tmp_path: Path) -> AsyncIterator[World]:
    async with open_world(redis, tmp_path) as opened:
        yield opened


@pytest.fixture
async def client(world: World) -> AsyncIterator[AsyncClient]:
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    async with AsyncClient(transport=ASGITransport(world.app), base_url="http://127.0.0.1", headers=headers) as made:
        yield made


def _asked(text: str, **cache: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}]} | ({"cache": cache} if cache else {})


async def _import(client: AsyncClient, *lines: Any, **query: Any) -> dict[str, Any]:
    content = "\n".join(one if isinstance(one, str) else json.dumps(one) for one in lines)
    reply = await client.post("/admin/api/cache/import", content=content, params=query)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


async def _export(client: AsyncClient, **chosen: Any) -> list[dict[str, Any]]:
    reply = await client.post("/admin/api/cache/export", json=chosen)
    assert reply.status_code == 200, reply.text
    return [json.loads(line) for line in reply.text.splitlines()]


async def _team(client: AsyncClient, name: str = "one") -> int:
    return int((await client.post("/admin/api/teams", json={"name": name})).json()["id"])


async def _found(world: World, team_id: int, text: str, namespace: str = "") -> Entry | None:
    asked = fingerprint(_asked(text), world.admin.partition_of(team_id), namespace)
    return (await world.exact.lookup(asked)).entry


async def test_curated_answers_stay_and_the_same_lines_again_change_nothing(world: World, client: AsyncClient) -> None:
    """A text or a whole chat completion; with a time, tags and a namespace where the request has them."""
    team = await _team(client)
    said = {"object": "chat.completion", "choices": [{"index": 0, "message": {"role": "assistant", "content": "Six."}}]}
    lines = [
        {"request": _asked("When do you open?"), "answer": "At nine."},
        {"request": _asked("When do you close?", tags=["hours"], namespace="v2"), "response": said},
        {"request": _asked("Are you open on Friday?", ttl=60), "answer": "Yes."},
    ]
    assert await _import(client, *lines, team_id=team) == {
        "lines": 3, "stored": 3, "unchanged": 0, "refused": 0, "problems": [],
    }  # fmt: skip
    assert await _import(client, *lines, "", *lines[:1], team_id=team) == {
        "lines": 5, "stored": 0, "unchanged": 4, "refused": 0, "problems": [],
    }  # fmt: skip
    assert (await _import(client, {**lines[0], "answer": "At ten."}, team_id=team))["stored"] == 1
    assert (await client.get("/admin/api/cache")).json()["entries"] == 3
    world.now_s += 400 * 86_400
    first = await _found(world, team, "When do you open?")
    assert first is not None
    assert json.loads(first.chunks[0].data)["choices"][0]["message"]["content"] == "At ten."
    assert await _found(world, team, "When do you close?", "v2") is not None
    assert await _found(world, team, "Are you open on Friday?") is None
    purged = (await client.post("/admin/api/cache/purge", json={"tag": "hours", "dry_run": False})).json()
    assert purged["count"] == 1
    actions = [row["action"] for row in (await client.get("/admin/api/audit")).json()["rows"]]
    assert actions == ["texts_shown", "cache_purged", *["cache_imported"] * 3, "team_created"]


async def test_an_import_is_audited_before_its_first_line(client: AsyncClient) -> None:
    """A client that leaves amid its lines may have stored some: the audit log has it."""

    async def broken() -> AsyncIterator[bytes]:
        yield b"{"
        raise RuntimeError

    with suppress(RuntimeError):
        await client.post("/admin/api/cache/import", content=broken(), params={"team_id": await _team(client)})
    assert (await client.get("/admin/api/audit")).json()["rows"][0]["action"] == "cache_imported"


async def test_an_entry_of_no_real_time_fails_no_import(world: World, client: AsyncClient) -> None:
    """One that is to stay for ever stays for as long as any; one of no time at all is refused with its line."""
    exported = await world.cache_answer(await _team(client), "What is the capital of France?", answer="Paris")
    await client.post("/admin/api/cache/purge", json={"all": True, "dry_run": False})
    lines = [
        {"entry": base64.b64encode(msgspec.msgpack.encode(msgspec.structs.replace(exported, ttl_s=ttl_s))).decode()}
        for ttl_s in (float("nan"), float("inf"))
    ]
    said = await _import(client, *lines)
    assert (said["stored"], said["refused"], said["problems"][0]["line"]) == (1, 1, 1)


async def test_an_import_obeys_the_rule_of_its_team(world: World, client: AsyncClient) -> None:
    """Answers that are put in are kept no longer than a team's `store_s_max`; none of a team that keeps none."""
    team, line = await _team(client), {"request": _asked("When do you open?"), "answer": "At nine."}
    exported = await world.cache_answer(team, "What is the capital of France?", answer="Paris")
    for seconds in (600, 0):
        assert (await client.patch(f"/admin/api/teams/{team}", json={"store_s_max": seconds})).status_code == 200
        entry = {"entry": base64.b64encode(msgspec.msgpack.encode(exported)).decode()}
        await client.post("/admin/api/cache/purge", json={"all": True, "dry_run": False})
        said = await _import(client, line, entry, team_id=team)
        assert (said["stored"], said["refused"]) == ((2, 0) if seconds else (0, 2))
        if seconds:
            lines = await _export(client, curated=False)
            assert [round(one["expires_at_s"] - one["created_at_s"]) for one in lines] == [600]
        else:
            assert "`store_s_max` of 0" in said["problems"][0]["message"]


async def test_an_export_is_an_import_elsewhere(world: World, client: AsyncClient) -> None:
    """Everything is there again, with its time, labels and context; curated answers by their requests, for any team."""
    one, two = await _team(client), await _team(client, "two")
    kept = await world.cache_answer(one, "What is the capital of France?", answer="Paris")
    await world.cache_answer(two, "What is the capital of Peru?", answer="Lima")
    await _import(client, {"request": _asked("When do you open?"), "answer": "At nine."}, team_id=one)
    lines = await _export(client)
    assert len(lines) == 3
    assert [line["team_id"] for line in await _export(client, team_id=two)] == [two]
    (curated,) = await _export(client, curated=True)
    assert (curated["request"], curated["team_id"]) == (_asked("When do you open?"), one)
    assert [line["text"] for line in await _export(client, curated=False, team_id=one)] == [kept.text]
    await client.post("/admin/api/cache/purge", json={"all": True, "dry_run": False})
    assert (await _import(client, *lines))["stored"] == 3
    assert await world.exact.lookup_many(kept.partition, kept.compat, [kept.exact]) == [kept]
    assert (await _import(client, *lines))["unchanged"] == 3
    assert (await _import(client, {**curated, "team_id": two}))["stored"] == 1
    assert await _found(world, two, "When do you open?") is not None
    actions = [row["action"] for row in (await client.get("/admin/api/audit")).json()["rows"]]
    assert actions.count("cache_exported") == 4


async def test_each_line_that_is_refused_says_why(world: World, client: AsyncClient) -> None:
    """The others are stored all the same."""
    team = await _team(client)
    asked = _asked("When do you open?")
    foreign = await world.cache_answer(team, "What is the capital of France?", answer="Paris")
    foreign = msgspec.structs.replace(foreign, partition=b"\0" * 16)
    wrong = [
        ("not JSON", "malformed"),
        ({"request": asked}, "expected `entry`, or `request` with one of"),
        ({"request": asked, "answer": "a", "response": {}}, "expected `entry`, or `request` with one of"),
        ({"request": asked, "answer": "a", "team_id": 99}, "no such team"),
        ({"request": asked, "answer": "a", "ttl": 1}, "unknown field `ttl`"),
        ({"request": {**asked, "model": "nobody"}, "answer": "a"}, "does not exist"),
        ({"request": {"model": MODEL}, "answer": "a"}, "messages"),
        ({"request": asked, "response": {"choices": []}}, "expected a chat.completion"),
        ({"entry": "!"}, "base64"),
        ({"entry": base64.b64encode(b"x").decode()}, "Expected"),
        ({"entry": base64.b64encode(msgspec.msgpack.encode(foreign)).decode()}, "another secret"),
    ]
    made = await _import(client, *(line for line, _ in wrong), {"request": asked, "answer": "At nine."}, team_id=team)
    assert (made["lines"], made["stored"], made["refused"]) == (len(wrong) + 1, 1, len(wrong))
    for number, (problem, (_, words)) in enumerate(zip(made["problems"], wrong, strict=True), 1):
        assert problem["line"] == number
        assert words.lower() in problem["message"].lower(), problem
    reply = await client.post("/admin/api/cache/import", content="", params={"team_id": 99})
    assert (reply.status_code, reply.json()["error"]["param"]) == (404, "team_id")
