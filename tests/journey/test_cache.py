"""The exact cache on the journey: hits, misses, and the caller's controls."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from gateway.wire.types import Chunk
from tests.journey.conftest import OpenWorld
from tests.provider import AUDIENCE, provider_of
from tests.world import Finish, Tokens, Whole, World


async def test_a_miss_is_generated_and_says_so(world: World) -> None:
    """A miss carries its deployment and its cost, and its record says what was tried, taken and stored."""
    reply = await world.ask()
    assert (reply.status, reply.cache, reply.content) == (200, "miss", "answer of plain")
    assert reply.headers["x-sameway-backend"] == "plain"
    assert reply.headers["x-sameway-cost-usd"] == "0.000020"
    assert reply.headers["cache-status"] == "sameway; fwd=uri-miss"
    assert "age" not in reply.headers
    record = await world.record(reply)
    assert (record.ended.status, record.ended.error, record.cache.source, record.cache.store) == (
        200,
        "",
        "miss",
        "stored",
    )
    assert (record.request.alias, record.answer.deployment, record.answer.policy) == ("mock", "plain", "balanced")
    assert (record.request.team, record.request.key) == ("default", "first")
    assert (record.usage.prompt_tokens, record.usage.completion_tokens, record.money.cost_microusd) == (10, 5, 20)
    assert [(one.name, one.outcome) for one in record.answer.attempts] == [("plain", "ok")]
    assert record.times.ttft_ms is not None
    assert 0 < record.times.ttft_ms <= record.times.duration_ms
    assert record.cache.miss_reason == "empty"
    assert record.answer.why


async def test_an_exact_hit_is_the_same_answer(world: World) -> None:
    """A hit repeats the answer byte for byte, costs nothing, and says what it saved and how old it is."""
    miss, hit = await world.ask(), await world.ask()
    assert (hit.cache, hit.body) == ("exact", miss.body)
    assert hit.headers["x-sameway-backend"] == "plain"
    assert hit.headers["x-sameway-cost-usd"] == "0"
    assert hit.headers["x-sameway-saved-usd"] == miss.headers["x-sameway-cost-usd"]
    assert hit.headers["cache-status"].startswith("sameway; hit; ttl=")
    assert hit.headers["cache-status"].endswith("; detail=exact")
    assert hit.headers["age"] == "0"
    assert len(world.backends["plain"].calls) == 1


async def test_the_record_of_a_hit_says_what_it_saved(world: World) -> None:
    """A hit's record has the tokens and the cost of the answer it repeats, and none of its own."""
    miss, hit = await world.ask(), await world.ask()
    generated, record = await world.record(miss), await world.record(hit)
    assert (record.cache.source, record.answer.deployment, record.cache.entry) == (
        "exact",
        "plain",
        generated.cache.entry,
    )
    assert (record.money.saved_microusd, record.money.cost_microusd) == (20, 0)
    assert (record.usage.prompt_tokens, record.usage.completion_tokens) == (10, 5)
    assert record.times.ttft_ms is not None
    assert record.answer.attempts == ()
    assert record.cache.store == ""


@pytest.mark.parametrize(("first", "again"), [(False, True), (True, False), (True, True)])
async def test_a_stream_and_a_whole_are_one_answer(world: World, first: bool, again: bool) -> None:
    """How an answer was read when it was generated says nothing of how a hit is read."""
    miss, hit = await world.ask(stream=first), await world.ask(stream=again)
    assert (miss.cache, hit.cache) == ("miss", "exact")
    assert (miss.is_stream, hit.is_stream) == (first, again)
    assert miss.content == hit.content == "answer of plain"
    assert all(reply.is_done for reply in (miss, hit) if reply.is_stream)


async def test_an_answer_that_came_whole_is_replayed_either_way(world: World) -> None:
    """A backend that answers in one piece fills the cache for streams as well."""
    world.backends["plain"].plays(Whole("all at once"))
    miss, streamed, whole = await world.ask(), await world.ask(stream=True), await world.ask()
    assert [reply.content for reply in (miss, streamed, whole)] == ["all at once"] * 3
    assert [reply.cache for reply in (miss, streamed, whole)] == ["miss", "exact", "exact"]
    assert whole.body == miss.body


@pytest.mark.parametrize("is_asked", [False, True])
async def test_a_stream_has_a_usage_of_null_where_openai_has_it(world: World, is_asked: bool) -> None:
    """In each chunk before the last one, if the client asked for usage; of a stream, and of a stored whole."""
    delta = {"id": "c", "choices": [{"index": 0, "delta": {"content": "a word"}, "finish_reason": None}], "usage": None}
    chunk = Chunk(json.dumps(delta, separators=(",", ":")).encode(), has_content=True)
    options = {"stream_options": {"include_usage": True}} if is_asked else {}
    for number, steps in enumerate([(chunk, Finish(), Tokens()), (Whole("a word"),)]):
        world.backends["plain"].plays(*steps)
        await world.ask(f"hello {number}", stream=number == 0, **options)
        reply = await world.ask(f"hello {number}", stream=True, **options)
        assert reply.cache == "exact"
        told = [event for event in reply.events[:-1] if event["choices"]]
        has_null = ["usage" in event for event in told if event["choices"][0]["delta"].get("content")]
        assert has_null == [is_asked] * len(has_null)
        assert has_null


@pytest.mark.parametrize("is_asked", [False, True])
async def test_usage_in_a_stream_is_for_those_who_ask(world: World, is_asked: bool) -> None:
    """The chunk with the usage leaves only to clients that want it, from a generation and from the cache alike."""
    options = {"stream_options": {"include_usage": True}} if is_asked else {}
    for _ in range(2):
        reply = await world.ask(stream=True, **options)
        assert any(event != "[DONE]" and event.get("usage") for event in reply.events) is is_asked


@pytest.mark.parametrize(
    ("first", "again", "expected"),
    [
        ({}, {"stream": True, "user": "somebody", "metadata": {"trace": "1"}}, "exact"),
        ({"temperature": 1}, {"temperature": 1.0}, "exact"),
        ({}, {"temperature": None}, "exact"),
        ({}, {"temperature": 0.5}, "miss"),
        ({}, {"a_field_of_tomorrow": 1}, "miss"),
        ({}, {"cache": {"namespace": "other"}}, "miss"),
        ({"cache": {"tags": ["a"]}}, {"cache": {"tags": ["b"]}}, "exact"),
        ({"cache": {"namespace": "own"}}, {"cache": {"namespace": "own"}}, "exact"),
        ({}, {"headers": {"cache-control": "max-age=600"}}, "exact"),
        ({}, {"headers": {"cache-control": "only-if-cached"}}, "exact"),
    ],
)
async def test_what_makes_two_requests_the_same(
    world: World, first: dict[str, Any], again: dict[str, Any], expected: str
) -> None:
    """Delivery does not change the key; meaning and namespace do."""
    await world.ask(**first)
    assert (await world.ask(**again)).cache == expected


@pytest.mark.parametrize("how", [{"cache": {"no-cache": True}}, {"headers": {"cache-control": "no-cache"}}])
async def test_no_cache_generates_and_stores(world: World, how: dict[str, Any]) -> None:
    """no-cache goes past the cache and refreshes it for those who come after."""
    await world.ask()
    world.backends["plain"].plays("a newer answer", Finish(), Tokens())
    fresh = await world.ask(**how)
    assert (fresh.cache, fresh.headers["cache-status"]) == ("bypass", "sameway; fwd=request")
    assert (await world.record(fresh)).cache.miss_reason == "no-cache"
    again = await world.ask()
    assert (again.cache, again.content) == ("exact", "a newer answer")


@pytest.mark.parametrize("how", [{"cache": {"no-store": True}}, {"headers": {"cache-control": "No-Store"}}])
async def test_no_store_leaves_nothing(world: World, how: dict[str, Any]) -> None:
    """no-store may read the cache and leaves nothing in it."""
    first = await world.ask(**how)
    assert (first.cache, (await world.record(first)).cache.store) == ("bypass", "no_store")
    assert (await world.ask()).cache == "miss"
    assert (await world.ask(**how)).cache == "exact"


async def test_only_if_cached_never_generates(world: World) -> None:
    """only-if-cached answers 504 where nothing is cached, and asks no deployment."""
    reply = await world.ask(headers={"cache-control": "only-if-cached"})
    assert (reply.status, reply.error["code"], reply.headers["x-should-retry"]) == (504, "not_cached", "false")
    assert world.backends["plain"].calls == []
    record = await world.record(reply)
    assert (record.ended.status, record.ended.error, record.cache.source) == (504, "not_cached", "miss")
    assert await world.ledger() == []


async def test_max_age_bounds_how_old_an_answer_may_be(world: World) -> None:
    """An answer is too old for a request that asks for a fresher one, and good enough for all others."""
    await world.ask()
    world.clock.passes(10)
    assert (await world.ask()).cache == "exact"
    assert (await world.ask(headers={"cache-control": "max-age=60"})).cache == "exact"
    assert (await world.ask(headers={"cache-control": "max-age=5"})).cache == "miss"


async def test_a_ttl_ends(world: World) -> None:
    """An entry is gone after the time to live that its request asked for; a hit does not prolong it."""
    await world.ask(cache={"ttl": 30})
    world.clock.passes(20)
    assert (await world.ask()).cache == "exact"
    world.clock.passes(20)
    assert (await world.ask()).cache == "miss"


async def test_teams_do_not_see_each_other(world: World) -> None:
    """The same request of another team is generated for that team, in a partition of its own."""
    other = await world.team()
    assert [(await world.ask()).cache, (await world.ask(key=other.key)).cache] == ["miss", "miss"]
    assert (await world.ask(key=other.key)).cache == "exact"
    mine, theirs = world.backends["plain"].calls
    assert mine.partition != theirs.partition


async def test_users_of_a_team_can_be_kept_apart(open_a_world: OpenWorld) -> None:
    """A field of `key_fields` with another value is another request, exactly and by meaning; other fields of delivery are not."""
    world = await open_a_world(cache={"key_fields": ["user"]})
    for user, kind in (("ann", "miss"), ("ben", "miss"), ("ann", "exact")):
        assert (await world.ask(user=user)).cache == kind
    assert (await world.ask(user="ann", safety_identifier="x")).cache == "exact"


async def test_a_person_with_a_token_gets_no_answers_of_a_user_that_the_body_names(open_a_world: OpenWorld) -> None:
    """The user of `key_fields` is the one of the token, whatever the request says."""
    async with provider_of(time.time) as provider:
        group = {"role": "member", "teams": ["people"]}
        access = {"issuer": provider.issuer, "audience": AUDIENCE, "groups": {"all": group}, "algorithms": ["ES256"]}
        world = await open_a_world(cache={"key_fields": ["user"]}, access=access)
        await world.team("people")
        ann, ben = (provider.token(sub=name, groups=["all"]) for name in ("ann", "ben"))
        for token, user, kind in ((ann, "ann", "miss"), (ben, "ann", "miss"), (ben, "ben", "exact")):
            assert (await world.ask(key=token, user=user)).cache == kind


async def test_a_cache_that_is_off_stores_nothing_and_says_so(open_a_world: OpenWorld) -> None:
    """Without the exact and the semantic cache every request is generated, and no answer is said to be stored."""
    world = await open_a_world(cache={"is_exact": False, "is_semantic": False})
    first, again = await world.ask(), await world.ask()
    assert (first.cache, again.cache) == ("miss", "miss")
    record = await world.record(again)
    assert (record.cache.miss_reason, record.cache.store, record.cache.entry) == ("off", "off", "")
    await world.is_released()


async def test_without_the_exact_cache_answers_are_found_by_meaning_alone(open_a_world: OpenWorld) -> None:
    """The answer is stored for semantic lookups; the very same request asks them too. What they can't find is not stored."""
    world = await open_a_world(cache={"is_exact": False})
    first = await world.record(await world.ask())
    assert (first.cache.store, bool(first.cache.entry)) == ("stored", True)
    assert (await world.ask()).cache == "miss"
    world.semantic.hits(first.cache.entry)
    assert [(await world.ask(text)).cache for text in ("in other words", "in the same words")] == [
        "semantic",
        "semantic",
    ]
    assert (await world.record(await world.ask(model="exact-only"))).cache.store == "off"
    completion = await world.ask(path="/v1/completions", prompt="Once upon a time")
    assert (await world.record(completion)).cache.store == "off"
    assert (await world.ask(path="/v1/completions", prompt="Once upon a time")).cache == "miss"


async def test_a_dialogue_goes_on_where_it_is_warm(world: World) -> None:
    """Of two equal deployments the one that has read a dialogue so far goes on with it, and the record says why."""
    left, right = world.backends["left"], world.backends["right"]
    dialogue = [{"role": "user", "content": "a long story " * 400}]
    left.is_down("restarting")
    assert (await world.ask(model="twins", messages=dialogue)).headers["x-sameway-backend"] == "right"
    left.is_up()
    assert (await world.ask("another matter", model="twins")).headers["x-sameway-backend"] == "left"
    dialogue += [{"role": "assistant", "content": "answer of right"}, {"role": "user", "content": "and then?"}]
    record = await world.record(await world.ask(model="twins", messages=dialogue))
    assert record.answer.deployment == "right"
    assert "warm" in record.answer.why
    assert len(right.calls) == 2


@pytest.mark.parametrize(("model", "finish"), [("mock", "stop"), ("exact-only", "stop"), ("mock", "length")])
async def test_a_prompt_is_purged_whatever_is_kept_of_it(world: World, model: str, finish: str) -> None:
    """An answer that is never found by meaning keeps no prompt, and goes with it all the same."""
    asked = {"model": model, "max_tokens": 5}
    world.backends["plain"].plays("there was", Finish(finish), Tokens())
    assert [(await world.ask("Who was THERE?", **asked)).cache for _ in range(2)] == ["miss", "exact"]
    await world.ask("Who was here?", **asked)
    await world.purge(text="who was  there?")
    assert [(await world.ask(text, **asked)).cache for text in ("Who was here?", "Who was THERE?")] == ["exact", "miss"]


async def test_a_completion_has_its_length_spelled_out(world: World) -> None:
    """A text completion is generated with OpenAI's default length, and cached like a chat."""
    asked = {"path": "/v1/completions", "prompt": "Once upon a time"}
    world.backends["plain"].plays("there was", Finish("length"), Tokens())
    miss, hit = await world.ask(**asked), await world.ask(**asked)
    assert (miss.cache, hit.cache, hit.content) == ("miss", "exact", "there was")
    assert world.backends["plain"].calls[0].body["max_tokens"] == 16
    assert (await world.record(miss)).request.operation == "text_completion"


async def test_the_same_last_words_are_known_again(world: World) -> None:
    """A miss has a digest of them, the same in another context, and another one at another team; a hit has none."""
    asked = {"role": "user", "content": "what is known again?"}
    ids = []
    for today in ("Monday", "Tuesday"):
        reply = await world.ask(messages=[{"role": "system", "content": f"Today is {today}"}, asked])
        ids.append((await world.record(reply)).cache.prompt_id)
    team = await world.team()
    others = await world.record(await world.ask(asked["content"], key=team.key))
    hit = await world.record(await world.ask(asked["content"], key=team.key))
    assert ids[0] == ids[1] != ""
    assert others.cache.prompt_id not in ("", ids[0])
    assert (hit.cache.source, hit.cache.prompt_id) == ("exact", "")
