"""Requests and tokens per minute on the journey."""

from __future__ import annotations

import asyncio
import time

from tests.journey.conftest import OpenWorld
from tests.provider import AUDIENCE, provider_of
from tests.services import RedisServer
from tests.world import Finish, Tokens, World


async def test_requests_per_minute(world: World) -> None:
    """A team gets its requests, sees what remains, is refused beyond, and is served again after its wait."""
    team = await world.team(requests_per_min=3)
    replies = [await world.ask(f"question {number}", key=team.key) for number in range(4)]
    assert [reply.status for reply in replies] == [200, 200, 200, 429]
    assert [reply.headers["x-ratelimit-remaining-requests"] for reply in replies] == ["2", "1", "0", "0"]
    assert {reply.headers["x-ratelimit-limit-requests"] for reply in replies} == {"3"}
    assert replies[0].headers["x-ratelimit-reset-requests"] == "20s"
    refused = replies[-1]
    assert (refused.error["type"], refused.error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert refused.headers["retry-after"] == "20"
    assert len(world.backends["plain"].calls) == 3
    record = await world.record(refused)
    assert (record.ended.status, record.ended.error, record.request.team) == (429, "rate_limit_exceeded", "another")
    world.clock.passes(21)
    assert (await world.ask("question 4", key=team.key)).status == 200


async def test_each_person_with_a_token_has_the_key_s_limits(open_a_world: OpenWorld) -> None:
    """The limits of the key of a team's people are each person's own, whatever token the person sends."""
    async with provider_of(time.time) as provider:
        groups = {"all": {"role": "member", "teams": ["people"]}}
        access = {"issuer": provider.issuer, "audience": AUDIENCE, "groups": groups, "algorithms": ["ES256"]}
        world = await open_a_world(access=access)
        await world.team("people", new_keys={"requests_per_min": 2})
        ann, later, ben = (provider.token(sub=sub, jti=jti, groups=["all"]) for sub, jti in ("a1", "a2", "b1"))
        replies = [
            await world.ask(f"question {number}", key=key) for number, key in enumerate([ann, ben, later, ann, ben])
        ]
        assert [reply.status for reply in replies] == [200, 200, 200, 429, 200]
        assert "for this person: 2 requests per minute" in replies[3].error["message"]


async def test_hits_are_requests_and_cost_no_tokens(world: World) -> None:
    """A hit counts against the requests a minute, and against the tokens it does not."""
    team = await world.team(requests_per_min=100, tokens_per_min=2_000)
    await world.ask(key=team.key, max_tokens=100)
    hits = [await world.ask(key=team.key, max_tokens=100) for _ in range(5)]
    assert [hit.cache for hit in hits] == ["exact"] * 5
    assert [hit.headers["x-ratelimit-remaining-requests"] for hit in hits] == ["98", "97", "96", "95", "94"]
    assert {hit.headers["x-ratelimit-remaining-tokens"] for hit in hits} == {"1985"}


async def test_tokens_are_corrected_to_what_was_used(world: World) -> None:
    """A generation is charged what it may need, and gets back what it did not use."""
    team = await world.team(tokens_per_min=2_000)
    go = asyncio.Event()
    world.backends["plain"].plays("one ", go, "two", Finish(), Tokens(prompt=30, completion=20))
    client = world.begin(key=team.key, max_tokens=500, stream=True)
    await client.sees("one ")
    go.set()
    first = await client.reply()
    await world.quiet()
    assert int(first.headers["x-ratelimit-remaining-tokens"]) <= 1_500
    again = await world.ask(key=team.key, max_tokens=500)
    assert again.cache == "exact"
    assert again.headers["x-ratelimit-remaining-tokens"] == "1950"


async def test_a_failed_generation_gives_its_tokens_back(world: World) -> None:
    """What never began used nothing."""
    team = await world.team(tokens_per_min=2_000)
    world.backends["engine"].is_down("gone")
    assert (await world.ask(model="engine", key=team.key, max_tokens=500)).status == 503
    reply = await world.ask(key=team.key, headers={"cache-control": "only-if-cached"})
    assert reply.status == 504
    served = await world.ask(key=team.key, max_tokens=1_900)
    assert served.status == 200


async def test_more_tokens_than_a_minute_has(world: World) -> None:
    """A request that no minute can hold is refused, and told not to try again."""
    team = await world.team(tokens_per_min=200)
    reply = await world.ask(key=team.key, max_tokens=5_000)
    assert (reply.status, reply.headers["x-should-retry"]) == (429, "false")
    assert "needs more tokens than this team may use in a minute (200)" in reply.error["message"]
    assert world.backends["plain"].calls == []
    assert await world.ledger() == []


async def test_refused_tokens_leave_no_hold(world: World) -> None:
    """A request that has money and no tokens is refused, and its hold is released."""
    team = await world.team(tokens_per_min=200)
    await world.budget(team, 1_000_000)
    assert (await world.ask(key=team.key, max_tokens=5_000)).status == 429
    assert await world.money_of(team) == (0, 0)


async def test_a_stream_carries_the_limits_too(world: World) -> None:
    """A streamed answer's headers say what remains."""
    team = await world.team(requests_per_min=10, tokens_per_min=10_000)
    reply = await world.ask(key=team.key, stream=True, max_tokens=100)
    assert reply.headers["x-ratelimit-remaining-requests"] == "9"
    assert int(reply.headers["x-ratelimit-remaining-tokens"]) < 9_900


async def test_a_team_without_limits_sees_none(world: World) -> None:
    """Where nothing is limited no header speaks of it."""
    assert not [name for name in (await world.ask()).headers if name.startswith("x-ratelimit")]


async def test_limits_hold_without_redis(open_a_world: OpenWorld, own_redis: RedisServer) -> None:
    """While Redis is away the worker counts by itself: a limit never fails open."""
    world = await open_a_world(own_redis)
    team = await world.team(requests_per_min=2)
    own_redis.kill()
    replies = [await world.ask(f"question {number}", key=team.key) for number in range(3)]
    assert [reply.status for reply in replies] == [200, 200, 429]
    assert replies[0].headers["x-ratelimit-remaining-requests"] == "1"
