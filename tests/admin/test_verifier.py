"""The verifier in the admin plane: its counts by model, what would be served where it only observes, and the card that shows it."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from gateway.admin import views
from gateway.admin.guard import COOKIE
from tests.admin.browser import chromium, serving, visiting
from tests.admin.seed import HOSTILE
from tests.admin.world import NOW_S, World, open_world
from tests.telemetry.records import hit, miss

_PLACE = {"backend": "openai", "base_url": "http://h/v1", "model": "m"}
_SETTINGS: dict[str, Any] = {
    "cache": {"verifier": "auto"},
    "models": {
        "small": {"deployments": [{**_PLACE, "name": "cheap", "price": {"input_usd_per_mtok": 0.1}}]},
        "big": {"verify": "observe", "deployments": [{**_PLACE, "name": "dear", "price": {"input_usd_per_mtok": 5}}]},
    },
}


@asynccontextmanager
async def _observed(redis: Redis, folder: Path, *, log_prompts: bool = True) -> AsyncIterator[World]:
    """Traffic of an hour: `small` asks before it serves, `big` only observes."""
    async with open_world(redis, folder, **_SETTINGS, log_prompts=log_prompts) as world:
        team = await world.accounts.create_team("search")
        entry = await world.cache_answer(team.id, "How do I reset my password?", model="big")
        now: dict[str, Any] = {"at_s": NOW_S - 1_800, "team_id": team.id}
        yes = {"cache": "semantic", "verifier": "cheap", "verdict": "yes", "verify_ms": 400.0, "saved_microusd": 300}
        for number in range(6):
            world.stats.add(hit(**now, **yes))
            world.stats.add(miss(**now, verifier="cheap", verdict="no", verify_ms=400.0))
            world.stats.add(miss(**now, alias="big"))
            would = {"would_serve": entry.exact.hex(), "would_save_microusd": 500, "question": f"{HOSTILE} {number}"}
            world.stats.add(
                miss(
                    **now,
                    **would,
                    alias="big",
                    request_id=f"req_{number}",
                    verifier="dear",
                    verdict="yes",
                    verify_ms=0.0,
                )
            )
        world.stats.add(hit(**now, **{**yes, "verdict": "remembered", "verify_ms": None}))
        world.stats.add(miss(**now, alias="a name that no model has"))
        for alias in ("small", "big", "big"):
            world.stats.add_question(team.id, alias, 80)
        await world.stats.flush()
        yield world


async def _read(world: World) -> dict[str, Any]:
    transport = httpx.ASGITransport(app=world.app)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://gateway.test", cookies={COOKIE: world.session}
    ) as client:
        found: dict[str, Any] = (await client.get("/admin/api/cache/verifier")).json()
        assert (await client.get("/admin/quality")).status_code == 200
        return found


async def test_counts_by_model_say_what_asking_brings(redis: Redis, tmp_path: Path) -> None:
    """Asked, yes, hits and savings of the model that is served; what would be, scaled to a day, of the one that observes."""
    async with _observed(redis, tmp_path) as world:
        small, big = (await _read(world))["models"]
    assert {name: small[name] for name in ("model", "verify", "deployment", "question_microusd")} == {
        "model": "small", "verify": "before", "deployment": "cheap", "question_microusd": 80,
    }  # fmt: skip
    counts = ("lookups", "asked_requests", "yes", "questions", "cost_microusd", "hits", "saved_microusd", "would_hits")
    assert [small[name] for name in counts] == [13, 12, 6, 1, 80, 7, 2_100, 0]
    assert small["asked_share"] == pytest.approx(12 / 13)
    assert small["wait_p50_ms"] == pytest.approx(400, rel=0.1)
    assert [big[name] for name in counts] == [12, 6, 6, 2, 160, 0, 0, 6]
    assert (big["verify"], big["would_share"], big["wait_p50_ms"]) == ("observe", 0.5, None)
    assert big["would_save_microusd_a_day"] == 6 * 500 * 24  # an hour at least


@pytest.mark.parametrize("log_prompts", [True, False])
async def test_examples_have_texts_only_where_prompts_may_be_logged(
    redis: Redis, tmp_path: Path, log_prompts: bool
) -> None:
    """The latest requests that would be served, with the verifier's word; their texts only with `log_prompts`."""
    async with _observed(redis, tmp_path, log_prompts=log_prompts) as world:
        examples = (await _read(world))["examples"]
    assert [one["request_id"] for one in examples] == [f"req_{number}" for number in reversed(range(6))]
    assert {(one["verifier"], one["verdict"], one["model"]) for one in examples} == {("dear", "yes", "big")}
    texts = {(one["question"][:8], one["made_for"]) for one in examples}
    assert texts == {("<script>", "How do I reset my password?") if log_prompts else ("", "")}


async def test_a_gateway_without_a_verifier_shows_no_card(redis: Redis, tmp_path: Path) -> None:
    """No verifier and no counts of one: nothing to show."""
    async with open_world(redis, tmp_path) as world:
        assert await _read(world) == {"models": [], "examples": []}


async def test_a_verifier_that_can_not_be_asked_is_a_problem(redis: Redis, tmp_path: Path) -> None:
    """Where no deployment of the verifier can chat, the overview says which alias nothing is asked about, and what helps."""
    vectors = {**_PLACE, "name": "v", "base_url": "https://api.openai.com/v1", "model": "text-embedding-3-small"}
    models = {**_SETTINGS["models"], "vectors": {"is_semantic": False, "deployments": [vectors]}}
    async with open_world(redis, tmp_path, cache={"verifier": "vectors"}, models=models) as world:
        found = await views.status(world.admin)
    expected = "verify is `{}`, and no deployment of its verifier 'vectors' can chat: nothing is asked"
    messages = [problem.message.split(";")[0] for problem in found.problems]
    assert messages == [f"small: {expected.format('before')}", f"big: {expected.format('observe')}"]


async def test_the_card_shows_what_would_be_served(redis: Redis, tmp_path: Path) -> None:
    """In Chromium: the card's figures, an example with its texts as text, and the overview's tile that leads to it."""
    async with (
        _observed(redis, tmp_path) as world,
        serving(world) as base,
        chromium() as browser,
        visiting(browser, base) as visitor,
    ):
        await visitor.log_in()
        await visitor.page.get_by_role("link", name="Verifier, 24 h").click()
        cards = [await visitor.page.locator(id).inner_text() for id in ("#verifier", "#possible")]
        text = re.sub(r"\s+", " ", " ".join(cards))
        assert "cheap before 12 92% of lookups 6 7 1 $0.00008 $0.0021" in text
        assert "big 6 50% $0.072" in text
        assert f"{HOSTILE} 5 would get the answer to How do I reset my password?" in text
        assert await visitor.page.title() != "owned"
        assert visitor.complaints == []
