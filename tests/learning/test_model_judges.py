"""The judge model that a request's own alias pays for: which deployment, when, and what a question leaves behind."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from cache.verdicts import Judge, QAPair, Ruling
from gateway.learning.llm_judge import NO_ANSWER
from tests.services import RedisServer
from tests.world import MODELS, World, deployment, open_world, unavailable

FRESH, CACHED = QAPair("How?", "Press it."), QAPair("How so?", "A press does it.")
EMBEDS = {"name": "vectors", "backend": "openai", "base_url": "https://api.openai.com/v1"}
NO_CHAT = {"deployments": [{**EMBEDS, "model": "text-embedding-3-small"}]}
CHEAP_LAST = {"deployments": [deployment("dear", usd=(3, 9)), deployment("cheap", usd=(1, 2))]}


@pytest.fixture
async def world(redis_server: RedisServer, tmp_path: Path) -> AsyncIterator[World]:
    models = {name: MODELS[name] for name in ("mock", "pair")} | {"vectors": NO_CHAT, "two": CHEAP_LAST}
    async with open_world(redis_server, tmp_path, models=models) as opened:
        yield opened
        await opened.is_released()


async def ruling(world: World, judge: Judge | None) -> tuple[Ruling, str]:
    assert judge is not None
    judgement = await judge.judge(FRESH, CACHED)
    await world.quiet()
    return judgement.ruling, judgement.why


async def test_the_cheapest_deployment_of_the_alias_is_asked(world: World) -> None:
    """Whatever the alias's policy prefers for its clients; the ledger has the question under the alias."""
    world.backends["cheap"].plays("SAME")
    assert (await ruling(world, world.judge("two", saved=10**9)))[0] is Ruling.SAME
    assert len(world.backends["cheap"].calls) == 2
    assert world.backends["dear"].calls == []
    assert {row.alias for row in await world.ledger()} == {"two"}


async def test_a_question_that_savings_do_not_pay_is_not_asked(world: World) -> None:
    """Two percent of what the cache saved has to hold its worst case; and the team is left alone for a while."""
    assert (await ruling(world, world.judge("mock", saved=0)))[1] == NO_ANSWER
    assert world.backends["plain"].calls == []
    assert [outcome for _, outcome in world.questions] == ["unpaid"]


async def test_a_free_deployment_needs_no_savings(world: World) -> None:
    """A local server of one's own, say."""
    world.backends["first"].plays("DIFFERENT")
    assert (await ruling(world, world.judge("pair", saved=0)))[0] is Ruling.DIFFERENT
    assert [cost for cost, _ in world.questions] == [0, 0]


async def test_failing_questions_leave_clients_alone(world: World) -> None:
    """Twenty failures of a deployment as a judge open no breaker of its clients, and it rests as a judge."""
    world.backends["first"].plays(unavailable())
    for _ in range(20):
        await ruling(world, world.judge("pair"))
    assert len(world.backends["first"].calls) < 20
    world.backends["first"].plays("for a client")
    assert (await world.ask(model="pair")).content == "for a client"


@pytest.mark.parametrize("state", ["down", "breaker", "queue"])
async def test_a_deployment_in_trouble_is_not_asked(world: World, state: str) -> None:
    """Down, resting after its clients' failures, or with a queue: there is no judge for now."""
    if state == "down":
        world.backends["plain"].is_down("away")
    elif state == "queue":
        world.backends["plain"].is_waited_for()
    else:
        world.backends["plain"].plays(unavailable())
        for _ in range(6):
            await world.ask()
    before = len(world.backends["plain"].calls)
    assert world.judge("mock") is None
    assert len(world.backends["plain"].calls) == before


async def test_an_alias_that_cannot_chat_has_no_judge(world: World) -> None:
    """It is said once."""
    with structlog.testing.capture_logs() as events:
        judges = [world.judge("vectors") for _ in range(3)]
    assert judges == [None] * 3
    assert [event["model"] for event in events if event["event"] == "no_judge"] == ["vectors"]


async def test_questions_wait_for_no_place(world: World) -> None:
    """A named judge is asked in the same way: a copy of its deployment, with a breaker of its own."""
    world.backends["plain"].plays("SAME")
    assert (await ruling(world, world.judge("pair", model="mock")))[0] is Ruling.SAME
    calls: list[Any] = world.backends["plain"].calls
    assert [call.body["max_tokens"] for call in calls] == [8, 8]
