"""Aliases that answer for one that cannot: in order, within keys and budgets, and never in its place in the cache."""

from __future__ import annotations

import pytest

from gateway.settings import Settings
from tests.world import World, broken, denied, deployment, overloaded, rejected, timed_out, unavailable


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("failure", [unavailable(), timed_out(), denied(401), overloaded(7), broken()])
async def test_the_next_alias_answers(world: World, failure: Exception, is_stream: bool) -> None:
    """An alias that is down is answered for; header and record name the step, and the answer is not stored."""
    world.backends["p"].plays(failure)
    reply = await world.ask(model="primary", stream=is_stream)
    assert (reply.status, reply.content) == (200, "answer of s")
    assert (reply.headers["x-sameway-fallback"], reply.headers["x-sameway-backend"]) == ("secondary", "s")
    record = await world.record(reply)
    assert [one.name for one in record.answer.fallbacks] == ["primary"]
    assert record.answer.fallbacks[0].reason
    assert (record.request.alias, record.answer.answered_alias, record.cache.store) == (
        "primary",
        "secondary",
        "fallback",
    )
    assert (await world.ask(model="secondary")).cache == "miss"
    assert [row.deployment for row in await world.ledger()] == ["s", "s"]


async def test_a_context_that_is_too_small_falls_back(world: World) -> None:
    """A prompt that does not fit the alias goes to the next one."""
    reply = await world.ask("word " * 3000, model="primary")
    assert (reply.status, reply.headers["x-sameway-fallback"]) == (200, "secondary")
    assert (await world.record(reply)).answer.fallbacks[0].reason == "context_length_exceeded"
    assert world.backends["p"].calls == []


async def test_the_fallbacks_are_asked_in_order(world: World) -> None:
    """The second fallback is asked where the first cannot answer either; where none can, the alias' own failure is told."""
    world.backends["p"].plays(timed_out())
    world.backends["s"].plays(denied(401))
    reply = await world.ask(model="primary")
    assert (reply.status, reply.headers["x-sameway-fallback"]) == (200, "tertiary")
    assert [one.name for one in (await world.record(reply)).answer.fallbacks] == ["primary", "secondary"]
    world.backends["t"].plays(denied(401))
    reply = await world.ask("another", model="primary")
    assert (reply.status, reply.error["code"]) == (504, "upstream_timeout")


async def test_an_answer_of_the_alias_itself_is_stored(world: World) -> None:
    """Fallbacks that are not needed change nothing."""
    reply = await world.ask(model="primary")
    assert "x-sameway-fallback" not in reply.headers
    assert (await world.record(reply)).cache.store == "stored"


async def test_a_request_at_fault_falls_back_nowhere(world: World) -> None:
    """What the request got wrong is passed on."""
    world.backends["p"].plays(rejected(400))
    assert (await world.ask(model="primary")).status == 400
    assert world.backends["s"].calls == []


async def test_an_answer_that_has_begun_keeps_its_alias(world: World) -> None:
    """A stream that broke off goes on nowhere else."""
    world.backends["p"].plays("half ", broken())
    reply = await world.ask(model="primary", stream=True)
    assert reply.error["code"] == "upstream_broken"
    assert world.backends["s"].calls == []


async def test_a_key_holds_for_the_fallback(world: World) -> None:
    """A key that may not use a fallback gets the next one that it may use."""
    team = await world.team("limited", models=("primary", "tertiary"))
    world.backends["p"].plays(timed_out())
    reply = await world.ask(model="primary", key=team.key)
    assert (reply.status, reply.headers["x-sameway-fallback"]) == (200, "tertiary")
    only = await world.team("one model", models=("primary",))
    assert (await world.ask(model="primary", key=only.key)).status == 504
    assert world.backends["s"].calls == []


async def test_a_budget_holds_for_the_fallback(world: World) -> None:
    """A fallback that may cost more than the budget has left is not asked; one that fits is held for and settled."""
    team = await world.team("with money")
    await world.budget(team, 700)
    world.backends["p"].plays(timed_out())
    world.backends["s"].plays(timed_out())
    reply = await world.ask(model="primary", key=team.key)
    assert reply.status == 504
    assert len(world.backends["s"].calls) == 1
    assert world.backends["t"].calls == []
    assert await world.money_of(team) == (0, 0)


def test_fallbacks_form_no_cycle() -> None:
    """check-config refuses fallbacks that lead back, stand twice or are no alias."""

    def refused(**fallbacks: list[str]) -> str:
        models = {
            name: {"deployments": [deployment(f"of {name}")], "fallbacks": fallbacks.get(name, [])}
            for name in ("a", "b", "c")
        }
        with pytest.raises(ValueError, match="fallbacks") as caught:
            Settings(models=models)
        return str(caught.value)

    assert "lead back to 'a'" in refused(a=["b"], b=["c"], c=["a"])
    assert "lead back to 'a'" in refused(a=["a"])
    assert "stands twice" in refused(a=["b", "b"])
    assert "expected an alias" in refused(a=["d"])
