"""Answers found by the semantic cache: hits, the reasons of misses, and drafts for a local engine."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from cache.query import ERROR_MAX
from gateway.learning.checks import check_share
from gateway.settings import CacheSettings
from tests.journey.conftest import OpenWorld
from tests.world import Finish, Tokens, World

ABSENT = "00" * 16


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_semantic_hit_is_replayed(world: World, is_stream: bool) -> None:
    """A hit gives the recorded answer to other words, says how similar they were, and costs nothing."""
    miss = await world.ask("the first wording")
    generated = await world.record(miss)
    world.semantic.hits(generated.cache.entry, similarity=0.9712)
    hit = await world.ask("the second wording", stream=is_stream)
    assert (hit.status, hit.cache, hit.content) == (200, "semantic", miss.content)
    assert hit.headers["x-sameway-similarity"] == "0.9712"
    assert hit.headers["x-sameway-cost-usd"] == "0"
    assert hit.headers["x-sameway-saved-usd"] == "0.000020"
    assert hit.headers["x-sameway-backend"] == "plain"
    assert hit.headers["cache-status"].endswith("; detail=semantic")
    assert hit.is_done or not is_stream
    assert len(world.backends["plain"].calls) == 1
    record = await world.record(hit)
    assert (record.cache.source, record.cache.similarity, record.cache.entry) == (
        "semantic",
        0.9712,
        generated.cache.entry,
    )
    assert (record.answer.deployment, record.money.saved_microusd, record.money.cost_microusd) == ("plain", 20, 0)
    assert (record.usage.prompt_tokens, record.usage.completion_tokens) == (10, 5)
    assert (record.cache.store, record.cache.miss_reason, record.answer.attempts) == ("", "", ())
    assert record.times.ttft_ms is not None
    assert len(await world.ledger()) == 1


async def test_readers_of_a_semantic_hit_share_it(world: World) -> None:
    """Two at once: one lookup, one replay, and both have the entry's headers."""
    entry = (await world.record(await world.ask("the first wording"))).cache.entry
    world.semantic.hits(entry)
    world.semantic.asked.clear()
    clients = [world.begin("the second wording") for _ in range(2)]
    first, second = [await client.reply() for client in clients]
    assert (first.cache, second.cache) == ("semantic", "coalesced")
    assert second.headers["x-sameway-similarity"] == first.headers["x-sameway-similarity"]
    assert second.headers["x-sameway-saved-usd"] == "0.000020"
    assert len(world.semantic.asked) == 1
    record = await world.record(second)
    assert (record.cache.source, record.cache.entry, record.money.saved_microusd) == ("coalesced", entry, 20)


async def test_only_if_cached_takes_a_semantic_hit(world: World) -> None:
    """only-if-cached is served by meaning as well."""
    world.semantic.hits((await world.record(await world.ask("the first wording"))).cache.entry)
    hit = await world.ask("the second wording", headers={"cache-control": "only-if-cached"})
    assert (hit.status, hit.cache) == (200, "semantic")


async def test_a_hit_whose_answer_is_gone_is_a_miss(world: World) -> None:
    """What the semantic cache points at may have been dropped: the request is generated, and says why."""
    world.semantic.hits(ABSENT)
    reply = await world.ask()
    assert (reply.cache, reply.content) == ("miss", "answer of plain")
    record = await world.record(reply)
    assert (record.cache.miss_reason, record.cache.similarity, record.cache.store) == ("absent", 0.97, "stored")
    assert world.lessons == []


async def test_an_answer_cut_by_its_own_limit_is_found_by_meaning_under_the_same_limit(world: World) -> None:
    """It answers its very request and one in other words; the limit is a part of what must be equal."""
    entry = (await world.record(await world.ask("the first wording", max_tokens=7))).cache.entry
    world.backends["plain"].plays("cut", Finish("length"), Tokens(completion=7))
    reply = await world.ask("the first wording", max_tokens=7, cache={"no-cache": True})
    assert (await world.record(reply)).cache.store == "stored"
    world.semantic.hits(entry)
    other = await world.ask("the second wording", max_tokens=7)
    assert (other.cache, other.content) == ("semantic", "cut")
    assert (await world.ask("the first wording", max_tokens=7)).content == "cut"


async def test_cut_answers_are_a_reason_of_their_own(world: World) -> None:
    """Where the last answer was cut by another limit than the request's, a miss says so, in the header as well."""
    world.backends["plain"].plays("cut", Finish("length"), Tokens(completion=5))
    first = await world.ask("the first wording", max_tokens=7)
    second = await world.ask("the second wording", max_tokens=7)
    reasons = [(await world.record(reply)).cache.miss_reason for reply in (first, second)]
    assert reasons == ["empty", "cut"]
    assert second.headers["x-sameway-miss-reason"] == "cut"


async def test_an_answer_that_depends_on_the_moment_lives_a_minute(world: World) -> None:
    """By the words of its question; another one lives as long as the setting says."""
    lives = []
    for text in ("is the ferry running right now?", "what is a ferry?"):
        await world.record(await world.ask(text))
        status = (await world.ask(text)).headers["cache-status"]
        lives.append(int(status.partition("ttl=")[2].partition(";")[0]))
    assert 0 <= lives[0] <= 60
    assert lives[1] > 60


async def test_a_hit_that_is_too_old_is_a_miss(world: World) -> None:
    """max-age bounds a semantic hit as it bounds an exact one."""
    world.semantic.hits((await world.record(await world.ask("the first wording"))).cache.entry)
    world.clock.passes(60)
    reply = await world.ask("the second wording", headers={"cache-control": "max-age=5"})
    assert (reply.cache, (await world.record(reply)).cache.miss_reason) == ("miss", "too_old")


@pytest.mark.parametrize(
    ("reason", "degraded"),
    [("far", ()), ("numbers", ()), ("timeout", ("cache_worker",)), ("unavailable", ("cache_worker",))],
)
async def test_a_miss_has_its_reason(world: World, reason: str, degraded: tuple[str, ...]) -> None:
    """Why the semantic cache did not answer is in the record; a worker that is away or slow is named as well."""
    world.semantic.misses(reason)
    reply = await world.ask()
    assert (reply.status, reply.cache) == (200, "miss")
    record = await world.record(reply)
    assert (record.cache.miss_reason, record.cache.degraded, record.cache.store) == (reason, degraded, "stored")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"model": "exact-only"}, "off"),
        ({"cache": {"no-cache": True}}, "no-cache"),
        ({"messages": [{"role": "assistant", "content": "not a question"}]}, "not_eligible"),
    ],
)
async def test_what_is_not_looked_up(world: World, fields: dict[str, object], reason: str) -> None:
    """Where a semantic answer is not wanted the worker is not asked, and the record says why."""
    reply = await world.ask(**fields)
    assert world.semantic.asked == []
    assert (await world.record(reply)).cache.miss_reason == reason


async def test_a_team_may_have_it_off(world: World) -> None:
    """A team without the semantic cache is never served by meaning."""
    team = await world.team(is_semantic_enabled=False)
    reply = await world.ask(key=team.key)
    assert world.semantic.asked == []
    assert (await world.record(reply)).cache.miss_reason == "off_for_team"


async def test_the_strictest_error_bound_is_asked_for(world: World) -> None:
    """Of the gateway's, the team's and the request's bounds the lowest goes to the worker."""
    team = await world.team(semantic_error_max=0.005)
    await world.ask("one")
    await world.ask("two", key=team.key)
    await world.ask("three", key=team.key, cache={"error_max": 0.001})
    await world.ask("four", key=team.key, cache={"error_max": 0.5})
    assert [one.error_max for one in world.semantic.asked] == [ERROR_MAX, 0.005, 0.001, 0.005]


async def test_the_nearest_prompt_is_kept_only_where_prompts_may_be_logged(
    open_a_world: OpenWorld, world: World, tmp_path: Path
) -> None:
    """The text of the nearest entry is another user's prompt: it is recorded only where the operator allows it."""
    entry = (await world.record(await world.ask("the first wording"))).cache.entry
    world.semantic.misses("marks", near=entry, similarity=0.93)
    record = await world.record(await world.ask("the second wording"))
    assert (record.cache.similarity, record.cache.nearest) == (0.93, "")
    told = await open_a_world(log_prompts=True)
    told.semantic.misses("marks", near=entry, similarity=0.93)
    assert (await told.record(await told.ask("the second wording"))).cache.nearest == "a near prompt"
    await told.is_released()


async def test_what_can_be_learned_is_reported(world: World) -> None:
    """A generation beside a near entry and a hit are lessons; a plain miss and a generation past the cache are none."""
    first = await world.ask("the first wording")
    assert world.lessons == []
    entry = (await world.record(first)).cache.entry
    world.semantic.misses("marks", near=entry)
    miss = await world.ask("the second wording")
    world.semantic.hits(entry)
    hit = await world.ask("the third wording")
    await world.record(await world.ask("the third wording", cache={"no-cache": True}))
    assert [one.request_id for one in world.lessons] == [miss.id, hit.id]
    assert [one.stored for one in world.lessons] == [(await world.record(miss)).cache.entry, None]


# -- drafts ----------------------------------------------------------------------------------------------------------------


async def test_a_near_answer_is_a_draft_for_an_engine(world: World) -> None:
    """An engine gets the answer to the nearest prompt, which was not served; the record names it."""
    entry = (await world.record(await world.ask("the first wording", model="engine"))).cache.entry
    world.semantic.misses("marks", near=entry, similarity=0.95)
    reply = await world.ask("the second wording", model="engine")
    assert [call.draft for call in world.backends["engine"].calls] == ["", "answer of engine"]
    record = await world.record(reply)
    assert (record.answer.draft, record.cache.similarity) == (entry, 0.95)


async def test_a_managed_deployment_gets_no_draft(world: World) -> None:
    """Only an engine can verify a guess: others are not given any, and no answer is fetched for one."""
    entry = (await world.record(await world.ask("the first wording"))).cache.entry
    world.semantic.misses("marks", near=entry, similarity=0.95)
    reply = await world.ask("the second wording")
    assert [call.draft for call in world.backends["plain"].calls] == ["", ""]
    assert (await world.record(reply)).answer.draft == ""


@pytest.mark.parametrize("gone", [False, True])
async def test_what_is_far_or_gone_is_no_draft(world: World, gone: bool) -> None:
    """An answer that is not near enough, or that was dropped, is none."""
    entry = (await world.record(await world.ask("the first wording", model="engine"))).cache.entry
    world.semantic.misses("far", near=ABSENT if gone else entry, similarity=0.95 if gone else 0.3)
    assert (await world.ask("the second wording", model="engine")).status == 200
    assert world.backends["engine"].calls[-1].draft == ""


async def test_a_lookup_waits_for_an_answer_that_is_being_stored(world: World) -> None:
    """What this worker is storing right now may be what is asked for: the lookup comes after the store."""
    go = asyncio.Event()
    world.backends["plain"].plays("an answer", go, Finish(), Tokens())
    first = world.begin("the first wording", stream=True)
    await first.sees("an answer")
    go.set()
    await first.reply()
    before = len(world.semantic.asked)
    second = await world.ask("the second wording")
    assert len(world.semantic.asked) == before + 1
    assert second.status == 200


@pytest.mark.parametrize("hits", [0, 3, 299, 300, 999, 1_000])
async def test_a_check_is_drawn_by_the_hits_of_the_namespace(open_a_world: OpenWorld, hits: int) -> None:
    """Those that the cache worker counted, or this worker; the check names the answer that was served."""
    world = await open_a_world()
    entry = (await world.record(await world.ask("the first wording"))).cache.entry
    world.semantic.hits(entry, hits=hits)
    world.draws_checks()
    reply = await world.ask("the second wording")
    share = check_share(hits, 0.03)
    assert reply.cache == "semantic"
    await world.quiet()
    assert len(world.lessons) == (2 if share else 1)
    if share:
        trial = world.lessons[-1].trial
        assert trial is not None
        assert world.lessons[-1].checks == reply.id
        assert (trial.ranked[0], trial.chance) == (bytes.fromhex(entry), share)
    await world.is_released()


async def test_as_many_hits_are_checked_as_are_meant_to_be(world: World) -> None:
    """Counted over the hits of one namespace, but for its first three."""
    entry = (await world.record(await world.ask("the first wording"))).cache.entry
    world.semantic.hits(entry)
    world.draws_checks(random.Random(3).random)
    kinds = [(await world.ask(f"wording {number}")).cache for number in range(300)]
    await world.quiet()
    assert kinds == ["semantic"] * 300
    assert sum(one.checks != "" for one in world.lessons) == pytest.approx(297 * 0.3, rel=0.35)


async def test_without_a_share_nothing_is_checked(open_a_world: OpenWorld) -> None:
    """An operator may turn checks off."""
    world = await open_a_world(cache=CacheSettings(check_share=0))
    world.semantic.hits((await world.record(await world.ask("the first wording"))).cache.entry, hits=100)
    world.draws_checks()
    assert (await world.ask("the second wording")).cache == "semantic"
    await world.quiet()
    assert [one.checks for one in world.lessons] == [""]
    await world.is_released()
