"""Answers found by a prompt's words alone: respelled prompts, and prompts that the cache worker once found to mean the same."""

from __future__ import annotations

from typing import Any

import pytest

from cache import Partition
from cache.verdicts import AnswerRef, Scope, Source, Suspension, Verdict, VerdictStore
from tests.journey.conftest import OpenWorld
from tests.world import Finish, Tokens, World

ASKED = "What is the capital of France?"
RESPELLED = "  What is  the capital of France?\n"
OTHER = "Tell me, what is France's capital?"


async def test_the_same_words_are_found_without_the_worker(world: World) -> None:
    """A respelled prompt is a semantic hit of similarity 1, learned from like others, and no lookup is asked for."""
    miss = await world.ask(ASKED)
    world.semantic.asked.clear()
    hit = await world.ask(RESPELLED)
    assert (hit.status, hit.cache, hit.content) == (200, "semantic", miss.content)
    assert hit.headers["x-sameway-similarity"] == "1.0000"
    assert hit.headers["cache-status"].endswith("; detail=semantic")
    assert world.semantic.asked == []
    record, generated = await world.record(hit), await world.record(miss)
    assert (record.cache.source, record.cache.similarity, record.cache.entry) == (
        "semantic",
        1.0,
        generated.cache.entry,
    )
    assert (record.answer.deployment, record.money.cost_microusd, record.cache.store) == ("plain", 0, "")
    assert [lesson.request_id for lesson in world.lessons][-1] == hit.id
    streamed = await world.ask(RESPELLED, stream=True)
    assert (streamed.cache, streamed.content, streamed.is_done) == ("semantic", miss.content, True)


async def test_a_paraphrase_is_looked_up_once(world: World) -> None:
    """What the worker once found to mean the same is a hit again with the same facts, respelled too, and not asked."""
    entry = await verified(world)
    world.semantic.asked.clear()
    for text in (OTHER, OTHER + " "):
        hit = await world.ask(text)
        assert (hit.cache, hit.headers["x-sameway-similarity"]) == ("semantic", "0.9712")
        assert (await world.record(hit)).cache.entry == entry
    assert world.semantic.asked == []


@pytest.mark.parametrize(
    "how",
    [
        {"cache": {"error_max": 0}},
        {"cache": {"error_max": 0.001}},
        {"cache": {"no-cache": True}},
        {"headers": {"cache-control": "no-cache"}},
        {"cache": {"namespace": "other"}},
        {"temperature": 0.5},
        {"model": "exact-only"},
    ],
)
async def test_where_words_find_nothing(world: World, how: dict[str, Any]) -> None:
    """Off, past the cache, or another context: neither the same words nor a paraphrase of them are served."""
    await verified(world)
    world.semantic.misses("far")
    for text in (RESPELLED, OTHER + " "):
        assert (await world.ask(text, **how)).cache in ("miss", "bypass")


async def test_another_system_prompt_finds_nothing(world: World) -> None:
    """Words are those of the last user text; all else is equal byte for byte."""
    await verified(world)
    world.semantic.misses("far")
    for text in (RESPELLED, OTHER):
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
        assert (await world.ask(messages=messages)).cache == "miss"


async def test_another_team_finds_nothing(world: World) -> None:
    """Words lead to entries of their own team, and a team without the semantic cache has none."""
    await verified(world)
    world.semantic.misses("far")
    for team in (await world.team("second"), await world.team("third", is_semantic_enabled=False)):
        assert (await world.ask(RESPELLED, key=team.key)).cache == "miss"
        assert (await world.ask(OTHER, key=team.key)).cache == "miss"


async def test_a_bound_of_zero_turns_words_off(open_a_world: OpenWorld) -> None:
    """By the configuration, too."""
    world = await open_a_world(cache={"error_max": 0.0})
    await world.ask(ASKED)
    assert (await world.ask(RESPELLED)).cache == "miss"
    await world.is_released()


async def test_a_prompt_about_now_is_never_found_by_words(world: World) -> None:
    """Its answer may have aged: the rule decides each time."""
    await world.ask("What is the weather today?")
    world.semantic.asked.clear()
    assert (await world.ask("what is the weather today")).cache == "miss"
    assert len(world.semantic.asked) == 1


async def test_what_is_purged_is_not_found(world: World) -> None:
    """Nothing points at a purged answer, and an answer made anew is found by its own words alone."""
    entry = await verified(world)
    keys = await world.redis.keys("sameway:*:words")
    assert len(keys) == 1
    await world.purge(entry)
    assert await world.redis.keys("sameway:*:words") == []
    world.semantic.misses("far")
    world.backends["plain"].plays("anew", Finish(), Tokens())
    assert (await world.ask(OTHER, cache={"no-store": True})).cache in ("miss", "bypass")
    assert (await world.ask(ASKED)).cache == "miss"
    assert (await world.ask(RESPELLED)).content == "anew"
    assert (await world.ask(OTHER + " ", cache={"no-store": True})).cache == "bypass"


@pytest.mark.parametrize("is_purged_by_the_other", [False, True])
async def test_what_one_worker_verified_another_serves_until_either_purges_it(
    world: World, is_purged_by_the_other: bool
) -> None:
    """The pointer is in Redis, as its entry is: no worker keeps one of its own. What it may be wrong was paid before."""
    other = await world.another()
    entry = await verified(world)
    for number in range(50):
        await other.ask(f"What is the capital of country {number}?")
    for worker, text in ((other, OTHER + " "), (other, RESPELLED), (world, OTHER)):
        worker.semantic.asked.clear()
        assert (await worker.ask(text)).cache == "semantic"
        assert worker.semantic.asked == []
    await (other if is_purged_by_the_other else world).purge(entry)
    for worker in (world, other):
        worker.semantic.misses("far")
        for text in (OTHER, RESPELLED):
            assert (await worker.ask(text, cache={"no-store": True})).cache == "bypass"


async def test_an_answer_made_anew_is_no_paraphrase_s(world: World) -> None:
    """A prompt that was found to mean the same was so for another answer."""
    await verified(world)
    world.clock.passes(5)
    await world.ask(ASKED, cache={"no-cache": True})
    world.semantic.misses("far")
    assert (await world.ask(OTHER)).cache == "miss"
    assert (await world.ask(RESPELLED)).cache == "semantic"


async def test_no_store_leaves_no_pointer(world: World) -> None:
    """A request that is to leave nothing behind leaves no pointer either."""
    world.semantic.hits((await world.record(await world.ask(ASKED))).cache.entry)
    assert (await world.ask(OTHER, cache={"no-store": True})).cache == "semantic"
    world.semantic.misses("far")
    assert (await world.ask(OTHER)).cache == "miss"


async def test_an_old_answer_is_not_found_by_who_wants_a_younger(world: World) -> None:
    """max-age bounds hits by words as it bounds all others; what has expired is none."""
    await verified(world)
    world.semantic.misses("far")
    world.clock.passes(60)
    young = {"headers": {"cache-control": "max-age=5"}}
    assert (await world.ask(RESPELLED, **young)).cache == "miss"
    assert (await world.ask(OTHER, **young)).cache == "miss"


@pytest.mark.parametrize("scope", [Scope.ANSWER, Scope.GROUP])
async def test_what_is_out_of_service_is_not_found(world: World, scope: Scope) -> None:
    """A suspended answer is not served by its words until it is cleared; a paraphrase is decided anew."""
    entry = await verified(world)
    partition, verdicts = await suspended(world, entry, scope)
    world.semantic.misses("suspended")
    assert (await world.ask(RESPELLED, cache={"no-store": True})).cache == "bypass"
    assert (await world.ask(OTHER, cache={"no-store": True})).cache == "bypass"
    for name in await verdicts.suspended(partition):
        await verdicts.clear(partition, name)
    assert (await world.ask(RESPELLED)).cache == "semantic"
    assert (await world.ask(OTHER, cache={"no-store": True})).cache == "bypass"


async def test_a_wrong_verdict_ends_what_other_prompts_point_at(world: World) -> None:
    """Also one that suspends nothing: the rule decides again, by what it has learned."""
    entry = await verified(world)
    await suspended(world, entry, Scope.NOTHING)
    world.semantic.misses("unsure")
    assert (await world.ask(OTHER)).cache == "miss"
    assert (await world.ask(RESPELLED)).cache == "semantic"


async def test_a_regrouped_answer_is_decided_anew(world: World) -> None:
    """A pointer says that a prompt means what one group answers; the answer's own words stay its own."""
    entry = await verified(world)
    world.semantic.misses("far")
    other = (await world.record(await world.ask("Another question"))).cache.entry
    partition, verdicts, ref = await judged(world, entry)
    trial = world.semantic.trial(other)
    verdict = Verdict(
        source=Source.MISS,
        compat=b"c" * 16,
        is_right=True,
        trial=trial,
        at=0.0,
        exact=ref.exact,
        created_at=ref.created_at,
    )
    peer = await reference(world, other)
    assert await verdicts.take(partition, "joined", verdict, peer, peer)
    world.semantic.misses("unsure")
    assert (await world.ask(OTHER)).cache == "miss"
    assert (await world.ask(RESPELLED)).cache == "semantic"


async def test_a_tighter_bound_is_decided_anew(world: World) -> None:
    """What was verified at one bound is not what a caller with a tighter one asked for."""
    await verified(world)
    world.semantic.misses("unsure")
    assert (await world.ask(OTHER, cache={"error_max": 0.005})).cache == "miss"


async def test_hits_that_nothing_vouches_for_are_not_repeated_without_end(world: World) -> None:
    """Each is charged its risk; beyond what the requests paid in the worker is asked, whose rule has a share of its own."""
    entry = (await world.record(await world.ask(ASKED))).cache.entry
    world.semantic.hits(entry)
    await world.ask(OTHER)
    world.semantic.asked.clear()
    for _ in range(30):
        assert (await world.ask(OTHER)).cache == "semantic"
    assert 15 <= len(world.semantic.asked) <= 28


async def test_hits_by_words_are_checked(world: World) -> None:
    """A fresh answer is generated beside a drawn one, stored, and given to the judges with the answer that was served and its share;
    not so beside the first three of a namespace, or a request for the cache alone."""
    entry = await verified(world)
    world.semantic.hits(entry)
    world.draws_checks()
    assert [(await world.ask(text)).cache for text in (RESPELLED, RESPELLED)] == ["semantic"] * 2
    world.semantic.asked.clear()
    lessons = len(world.lessons)
    for text in (RESPELLED, OTHER):
        assert (await world.ask(text, headers={"cache-control": "only-if-cached"})).cache == "semantic"
        reply = await world.ask(text)
        assert reply.cache == "semantic"
        await world.quiet()
        lesson = world.lessons[-1]
        assert lesson.trial is not None
        assert (lesson.checks, lesson.trial.ranked, lesson.trial.chance) == (reply.id, (bytes.fromhex(entry),), 0.3)
        assert (await world.ask(text)).cache == "exact"
        assert len(world.lessons) == lessons + 3
        lessons += 3
    assert world.semantic.asked == []


async def verified(world: World) -> str:
    """An answer, and a paraphrase that was found to mean the same; the id of the entry."""
    entry = (await world.record(await world.ask(ASKED))).cache.entry
    world.semantic.hits(entry, similarity=0.9712)
    assert (await world.ask(OTHER)).cache == "semantic"
    return entry


async def judged(world: World, entry: str) -> tuple[Partition, VerdictStore, AnswerRef]:
    return await world.partition(), VerdictStore(world.redis), await reference(world, entry)


async def reference(world: World, entry: str) -> AnswerRef:
    about = await world.about(entry)
    return AnswerRef(bytes.fromhex(entry), about.created_at)


async def suspended(world: World, entry: str, scope: Scope) -> tuple[Partition, VerdictStore]:
    """A wrong verdict on an answer, with its effect."""
    partition, verdicts, ref = await judged(world, entry)
    verdict = Verdict(
        source=Source.FEEDBACK, compat=b"c" * 16, is_right=False, trial=world.semantic.trial(entry), at=0.0
    )
    out = Suspension(exact=ref.exact, source=Source.FEEDBACK, at=0.0) if scope is not Scope.NOTHING else None
    assert await verdicts.take(partition, "wrong", verdict, ref, None, scope, out)
    return partition, verdicts
