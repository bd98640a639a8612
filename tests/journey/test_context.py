"""Requests whose context differs: which may share an answer, and which answers are shared."""

from __future__ import annotations

from typing import Any

from tests.journey.conftest import OpenWorld
from tests.world import Finish, Reply, Tokens, World

DESK = "You are the desk of Birchwood Clinic. Today is {}. You are talking with {}. A missed visit costs 35 euros."
ANNA, JOHN = ("Monday, 6 October 2025", "Anna Kowalska"), ("Thursday, 9 October 2025", "John Achebe")
FEE, FEE_TOO = "What does a missed visit cost?", "How much does a missed visit cost?"
DIFFERING = tuple((f"Today is {one}.", f"Today is {other}.") for one, other in zip(JOHN, ANNA, strict=True))


def desk(text: str, who: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": "system", "content": DESK.format(*who)}, {"role": "user", "content": text}]


async def second(world: World, first: list[dict[str, Any]], then: list[dict[str, Any]], **how: Any) -> Reply:
    """The reply to `then`, where the cache worker points at the answer to `first`, in a context that differs."""
    world.semantic.misses("empty")
    generated = await world.record(await world.ask(messages=first, **how))
    world.semantic.hits(generated.cache.entry, differing=DIFFERING)
    return await world.ask(messages=then, **how)


async def test_another_date_and_user_share_an_answer_that_shows_neither(world: World) -> None:
    """Where the cache worker finds that the difference does not matter; the same prompt is found exactly as before."""
    hit = await second(world, desk(FEE, ANNA), desk(FEE_TOO, JOHN))
    assert hit.cache == "semantic"
    assert (await world.ask(messages=desk(FEE, ANNA))).cache == "exact"


async def test_an_answer_that_shows_another_context_is_not_served(world: World) -> None:
    """Where the text has a word by which the contexts differ, or calls a tool, the request is generated."""
    for text in ("Anna, it is 35 euros.", "From Monday on 35 euros.", "As of 6 October: 35 euros"):
        world.backends["plain"].plays_once(text, Finish(), Tokens())
        reply = await second(world, desk(f"{FEE} {text[:2]}", ANNA), desk(f"{FEE_TOO} {text[:2]}", JOHN))
        assert reply.cache == "miss"
        assert (await world.record(reply)).cache.miss_reason == "documents"
        assert (await world.ask(messages=desk(f"{FEE} {text[:2]}", ANNA))).cache == "exact"


async def test_the_same_words_in_another_context_are_another_prompt(world: World) -> None:
    """A pointer by words does not lead from one system prompt to another's answer."""
    await world.record(await world.ask(messages=desk(FEE, ANNA)))
    world.semantic.misses("empty")
    assert (await world.ask(messages=desk(FEE.replace(" ", "  ", 1), ANNA))).cache == "semantic"
    assert (await world.ask(messages=desk(FEE.replace(" ", "  ", 1), JOHN))).cache == "miss"


async def test_an_operators_patterns_are_left_out(open_a_world: OpenWorld) -> None:
    """What `cache.volatile` matches is in no context that the cache worker compares."""
    world = await open_a_world(cache={"volatile": [r"Batch [A-Z]{2}-\d{1,9}"]})
    for n in (1, 2):
        system = {"role": "system", "content": f"Hotel Lark. Batch ZX-{n}."}
        await world.record(await world.ask(messages=[system, {"role": "user", "content": "What does a bed cost?"}]))
    assert world.semantic.contexts == ["system\nHotel Lark. ·."] * 2
