"""Requests whose context differs where the question does not need it: which share an answer, and which answers are shared."""

from __future__ import annotations

from typing import Any

from tests.journey.conftest import OpenWorld
from tests.world import Finish, Reply, Tokens, World

DESK = "You are the desk of Birchwood Clinic. Today is {}. You are talking with {}. A missed visit costs 35 euros."
ANNA, JOHN = ("Monday, 6 October 2025", "Anna Kowalska"), ("Thursday, 9 October 2025", "John Achebe")
FEE, FEE_TOO = "What does a missed visit cost?", "How much does a missed visit cost?"


def desk(text: str, who: tuple[str, str], history: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    told = [{"role": ("user", "assistant")[at % 2], "content": turn} for at, turn in enumerate((*history, text))]
    return [{"role": "system", "content": DESK.format(*who)}, *told]


async def second(world: World, first: list[dict[str, Any]], then: list[dict[str, Any]], **how: Any) -> Reply:
    """The reply to `then`, where the cache worker points at the answer to `first`."""
    generated = await world.record(await world.ask(messages=first, **how))
    world.semantic.hits(generated.cache.entry)
    return await world.ask(messages=then, **how)


async def test_another_date_and_user_share_an_answer_that_needs_neither(world: World) -> None:
    """The question asked again another day for another user is a hit; the same prompt is found exactly as before."""
    hit = await second(world, desk(FEE, ANNA), desk(FEE_TOO, JOHN))
    assert hit.cache == "semantic"
    assert (await world.ask(messages=desk(FEE, ANNA))).cache == "exact"


async def test_a_pointer_never_crosses_what_a_question_needs(world: World) -> None:
    """An index that points at another user's or another day's answer, or another rule's, is not believed."""
    for text in ("What is my name?", "What day is it?", "Greet me"):
        assert (await second(world, desk(text, ANNA), desk(text, JOHN))).cache == "miss"
    other = [{"role": "system", "content": DESK.format(*JOHN).replace("35", "40")}, *desk(FEE, JOHN)[1:]]
    assert (await second(world, desk(FEE, ANNA), other)).cache == "miss"


async def test_an_answer_that_names_its_user_is_for_that_request_alone(world: World) -> None:
    """Where the text shows what others' requests differ in, or calls a tool, no other request gets the answer."""
    backend = world.backends["plain"]
    for text in ("Anna, it is 35 euros.", "From Monday on 35 euros.", "As of 6 October: 35 euros"):
        backend.plays_once(text, Finish(), Tokens())
        assert (
            await second(world, desk(f"{FEE} {text[:2]}", ANNA), desk(f"{FEE_TOO} {text[:2]}", JOHN))
        ).cache == "miss"
        assert (await world.ask(messages=desk(f"{FEE} {text[:2]}", ANNA))).cache == "exact"


async def test_a_question_that_stands_alone_is_shared_across_histories(world: World) -> None:
    """It is a hit after other talk; a turn that leans on its history is none, and the record says why."""
    talk = ("How do I get coffee out of a shirt?", "Soak it in cold water.")
    text = "Who composed The Magic Flute?"
    plain = [{"role": "user", "content": text}]
    history = [{"role": ("user", "assistant")[at], "content": turn} for at, turn in enumerate(talk)]
    assert (await second(world, [*history, *plain], plain)).cache == "semantic"
    world.semantic.misses("empty")
    leaning = await world.ask(messages=[*history, {"role": "user", "content": "And with milk?"}])
    assert (await world.record(leaning)).cache.miss_reason == "history"
    needing = await world.ask(messages=desk("What is my name?", JOHN))
    assert (await world.record(needing)).cache.miss_reason == "volatile"
    assert (await world.record(await world.ask("nothing to lean on"))).cache.miss_reason == "empty"


async def test_an_operators_patterns_are_left_out(open_a_world: OpenWorld) -> None:
    """What `cache.volatile` matches does not keep answers apart."""
    world = await open_a_world(cache={"volatile": [r"Batch [A-Z]{2}-\d{1,9}"]})
    prompts = [
        [{"role": "system", "content": f"Hotel Lark. Batch ZX-{n}."}, {"role": "user", "content": text}]
        for n, text in ((1, "What do beds cost?"), (2, "What does a bed cost?"))
    ]
    assert (await second(world, prompts[0], prompts[1])).cache == "semantic"
