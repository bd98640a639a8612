"""Callers of /v1 with a token of the OpenID provider: who is taken, as whom, and what it costs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from joserfc import jwt
from redis.asyncio import Redis

from gateway.access.agents import Agents
from gateway.access.people import Bearers
from gateway.access.provider import Provider
from gateway.accounts import schema
from gateway.accounts.accounts import OWN_KEYS_MAX, PEOPLE, Accounts
from gateway.accounts.errors import AlreadyExists, Invalid
from gateway.accounts.persons import ends_of
from gateway.accounts.sessions import Sessions
from gateway.settings import AccessSettings, Settings
from gateway.wire.errors import ApiError
from tests.provider import AUDIENCE, CLIENT_ID, StandInProvider, provider_of

NOW_S = 1_800_000_000.0


class Place:
    """The accounts, a provider and what takes its tokens, with a clock."""

    now_s = NOW_S

    def __init__(self, provider: StandInProvider, folder: Path, redis: Any) -> None:
        self.provider = provider
        access = AccessSettings(
            issuer=provider.issuer,
            audience=AUDIENCE,
            client_id=CLIENT_ID,
            algorithms=["ES256"],
            groups={
                "watch": {"role": "auditor"},  # type: ignore[dict-item]
                "people": {"role": "member", "teams": ["gone", "search"]},  # type: ignore[dict-item]
            },
            groups_claim="realm.groups",
            required_claims={"scope": "llm"},
        )
        settings = Settings(data_dir=folder, access=access)
        self.url = f"sqlite:///{folder}/sameway.db"
        self.accounts = Accounts(self.url, clock=lambda: self.now_s, leavers_days=lambda: settings.access.leavers_days)
        self.of_provider = Provider(settings, lambda: self.now_s)
        self.access = settings.access
        sessions = Sessions(self.accounts.database, lambda: self.now_s)
        self.agents = Agents(sessions, lambda kind: kind.encode() * 8, redis, lambda: self.now_s)
        self.bearers = Bearers(settings, self.of_provider, self.accounts, self.agents, lambda: self.now_s)

    def token(self, **claims: Any) -> str:
        return self.provider.token(**{"realm": {"groups": ["people"]}, "scope": "a llm", **claims})

    async def status(self, token: str) -> int:
        try:
            return 200 if await self.bearers.identify(token) is not None else 0
        except ApiError as error:
            return error.http_status


@pytest.fixture
async def place(tmp_path: Path, redis: Redis) -> AsyncIterator[Place]:
    async with provider_of(lambda: Place.now_s) as provider:
        place = Place(provider, tmp_path, redis)
        provider.clock = lambda: place.now_s
        await place.accounts.open()
        await place.accounts.create_team("search")
        yield place
        place.of_provider.aclose()
        await place.accounts.close()


async def test_a_token_is_a_user_of_its_group_s_team(place: Place) -> None:
    """The caller is the team's key of all people, as the user `sub`; its row has their models and limits, and ends them."""
    identity = await place.bearers.identify(place.token())
    assert identity is not None
    assert (identity.team.name, identity.key.name, identity.user) == ("search", PEOPLE, "alice")
    other = await place.bearers.identify(place.token(sub="bob"))
    assert other is not None
    assert (other.key.id, other.user) == (identity.key.id, "bob")
    budget = await place.accounts.create_budget(identity.team.id, "day", 5, axis="user")
    again = await place.bearers.identify(token := place.token())
    assert again is not None
    assert [one.id for one in again.budgets] == [budget.id]
    await place.accounts.revoke_key(identity.key.id)
    assert await place.status(token) == 401
    await place.accounts.update_key(identity.key.id, is_active=True)
    assert await place.status(token) == 200
    assert await place.status("sk-sw-no-token") == 0


async def test_no_key_takes_the_name_of_the_people_s(place: Place) -> None:
    """A key that anyone made or renamed can't stand in the way of the first token."""
    team_id = place.accounts.team_ids["search"]
    mine = await place.accounts.create_key(team_id, "mine", owner="alice")
    for squat in (
        place.accounts.create_key(team_id, PEOPLE, owner="alice"),
        place.accounts.update_key(mine.key.id, name=PEOPLE),
    ):
        with pytest.raises(Invalid, match="another name"):
            await squat
    assert await place.status(place.token()) == 200


async def test_no_other_token_is_taken(place: Place) -> None:
    """A wrong signature, issuer, audience, time, claim or group is refused; so is a token once its time is over."""
    good = place.token()
    said = jwt.decode(good, place.provider.key).claims
    refused = {
        "issuer": place.token(iss="https://evil.example"),
        "audience": place.token(aud="sameway-dashboard"),
        "expired": place.token(exp=int(NOW_S) - 61),
        "issued long ago": place.token(iat=int(NOW_S) - 3_601),
        "not issued": place.token(iat=None),
        "future": place.token(iat=int(NOW_S) + 61),
        "not before": place.token(nbf=int(NOW_S) + 61),
        "no claim": place.token(scope=None),
        "another claim": place.token(scope="llms"),
        "no user": place.token(sub=None),
        "all people": place.token(sub="*"),
        "the admin key": place.token(sub="Admin Key"),
        "alice in full width": place.token(sub="\uff41lice"),
        "none": place.provider.unsigned(said),
        "HS256": place.provider.confused(said),
        "huge": place.token(padding="x" * 20_000),
        "changed": good[:-6] + "AAAAAA",
        "three parts": "a.b.c",
    }
    statuses = {name: await place.status(token) for name, token in refused.items()}
    assert {name: status for name, status in statuses.items() if status != 401} == {}
    for groups in (["unknown"], ["watch"], "people!", {"people": 1}):
        assert await place.status(place.token(realm={"groups": groups})) == 403
    assert await place.status(good) == 200
    place.now_s += 300 + 59
    assert await place.status(good) == 200
    place.now_s += 2
    assert await place.status(good) == 401
    place.access.__dict__["audience"] = ""
    assert await place.status(place.token()) == 0


async def test_the_provider_is_asked_once_and_may_be_away(place: Place) -> None:
    """A token that was seen needs neither provider nor signature, at most 60 µs; without keys it is a 503;
    a stranger's token, for which a slow provider is asked anew, holds up nobody's.
    """
    place.provider.answers["/keys"] = []
    assert await place.status(place.token()) == 503
    assert await place.status(place.token()) == 503
    assert place.provider.asked.count("/keys") == 1
    del place.provider.answers["/keys"]
    place.now_s += 2
    token = place.token()
    assert await place.status(token) == 200
    asked = len(place.provider.asked)
    costs = []
    for _ in range(5):
        begun = time.thread_time()
        for _ in range(200):
            await place.bearers.identify(token)
        costs.append((time.thread_time() - begun) / 200)
    assert min(costs) < 60e-6
    assert len(place.provider.asked) == asked
    place.now_s += 11
    place.provider.is_open.clear()
    stranger = asyncio.create_task(place.status(place.provider.signed({}, kid="unknown")))
    await asyncio.sleep(0)
    assert await place.status(place.token()) == 200
    assert not stranger.done()
    place.provider.is_open.set()
    assert await stranger == 401


async def test_who_was_logged_out_or_disabled_is_out(place: Place) -> None:
    """Tokens issued up to a logout are refused, by session where they name one, and newer ones taken; a disabled person's
    never are. Another process sees it with its next look; what no token can outlive is forgotten.
    """
    with_sid, other_sid = place.token(sid="s1"), place.token(sid="s2")
    alone, bobs = place.token(), place.token(sub="bob")
    everyone = {"s1": with_sid, "s2": other_sid, "alone": alone, "bob": bobs}

    async def out() -> set[str]:
        return {name for name, token in everyone.items() if await place.status(token) == 401}

    assert await out() == set()
    await place.accounts.end_tokens(ends_of({"alice"}, "s1"), NOW_S + 1, 3_660)
    assert await out() == {"s1", "alone"}
    place.now_s += 2
    assert await place.status(place.token(sid="s1")) == 200
    assert await place.status(place.token()) == 200
    await place.accounts.end_tokens(ends_of({"alice"}, ""), NOW_S + 1, 3_660)
    await place.accounts.end_tokens(ends_of({"alice"}, ""), NOW_S - 9, 3_660)
    assert await out() == {"s1", "s2", "alone"}
    other = Accounts(place.url, clock=lambda: place.now_s)
    await other.open()
    await other.disable("bob")
    assert await place.accounts.refresh()
    assert await out() == set(everyone)
    assert await place.status(place.token(sub="bob")) == 401
    await other.let_in("bob")
    await place.accounts.refresh()
    assert await place.status(bobs) == 200
    place.now_s += 3_700
    await other.end_tokens(["sub x"], place.now_s, 3_660)
    assert await other.database.scalars(sa.select(schema.ended_tokens.c.name)) == ["sub x"]
    await other.close()


async def test_a_leaver_s_keys_stop_until_they_are_given_back(place: Place) -> None:
    """After `leavers_days` without a sign-in or a token a person's own keys are refused with the reason; a token alone does
    not give them back; a team's keys and an earlier token's owner go on.
    """
    team_id = place.accounts.team_ids["search"]
    mine = await place.accounts.create_key(team_id, "mine", owner="alice")
    team_s = await place.accounts.create_key(team_id, "team's")
    place.access.__dict__["leavers_days"] = 30
    assert await place.status(place.token()) == 200
    await place.accounts.save_last_used()
    place.now_s += 29 * 86_400
    assert await place.status(place.token()) == 200
    await place.accounts.save_last_used()
    place.now_s += 29 * 86_400
    assert await place.accounts.find(mine.plaintext) is not None
    place.now_s += 1.1 * 86_400
    assert await place.accounts.find(mine.plaintext) is None
    assert await place.accounts.of_key(mine.key.id) is None
    assert "alice, whose key this is, has not signed in for 30 days" in place.accounts.why_not(mine.plaintext)
    assert await place.accounts.find(team_s.plaintext) is not None
    assert await place.status(place.token()) == 200
    await place.accounts.save_last_used()
    assert await place.accounts.find(mine.plaintext) is None
    await place.accounts.let_in("alice")
    assert await place.accounts.find(mine.plaintext) is not None
    await place.accounts.disable("alice")
    assert "disabled" in place.accounts.why_not(mine.plaintext)


async def test_a_rotated_key_has_two_secrets_for_a_while(place: Place) -> None:
    """The old secret works until its time, never longer than the key; a second rotation ends it; a revocation ends both."""
    team_id = place.accounts.team_ids["search"]
    first = await place.accounts.create_key(team_id, "ci", expires_at_s=NOW_S + 5_000)

    async def taken(*keys: str) -> list[bool]:
        return [await place.accounts.find(key) is not None for key in keys]

    second = await place.accounts.rotate_key(first.key.id, 60)
    assert (second.key.id, second.key.prefix == first.key.prefix) == (first.key.id, False)
    assert await taken(first.plaintext, second.plaintext) == [True, True]
    place.now_s += 61
    assert await taken(first.plaintext, second.plaintext) == [False, True]
    third = await place.accounts.rotate_key(first.key.id, 9_000)
    fourth = await place.accounts.rotate_key(first.key.id, 9_000)
    keys = [second.plaintext, third.plaintext, fourth.plaintext]
    assert await taken(*keys) == [False, True, True]
    found = await place.accounts.of_key(first.key.id)
    assert found is not None
    assert found.key.expires_at_s == NOW_S + 5_000
    place.now_s = NOW_S + 5_001
    assert await taken(*keys) == [False, False, False]
    await place.accounts.update_key(first.key.id, expires_at_s=None)
    assert await taken(*keys) == [False, True, True]
    await place.accounts.revoke_key(first.key.id)
    assert await taken(*keys) == [False, False, False]
    await place.status(place.token())
    (shared,) = [key for key in await place.accounts.list_keys() if key.name == PEOPLE]
    with pytest.raises(Invalid, match="signed-in people"):
        await place.accounts.rotate_key(shared.id, 60)


async def test_new_keys_follow_the_team_s_template(place: Place) -> None:
    """What is not said of a new key is of the template; a bound one gets no more than it, and an owner has 20 of them; all
    people's key never expires.
    """
    team_id = place.accounts.team_ids["search"]
    template = {"models": ["small"], "requests_per_min": 5, "addresses": ["10.0.0.0/8"], "expires_in_s": 100.0}
    await place.accounts.update_team(team_id, new_keys=template)
    plain = (await place.accounts.create_key(team_id, "plain", models=None)).key
    assert (plain.models, plain.requests_per_min, plain.tokens_per_min) == (("small",), 5, None)
    assert (plain.addresses, plain.expires_at_s) == (("10.0.0.0/8",), NOW_S + 100)
    more = (await place.accounts.create_key(team_id, "more", requests_per_min=9, models=["big"])).key
    assert (more.models, more.requests_per_min) == (("big",), 9)
    bound = {"requests_per_min": 9, "tokens_per_min": 7, "expires_at_s": NOW_S + 50}
    own = (await place.accounts.create_key(team_id, "own", is_bound=True, owner="alice", **bound)).key
    assert (own.models, own.requests_per_min, own.tokens_per_min, own.expires_at_s) == (("small",), 5, 7, NOW_S + 50)
    for number in range(OWN_KEYS_MAX - 1):
        last = await place.accounts.create_key(team_id, f"own {number}", is_bound=True, owner="alice")
    with pytest.raises(AlreadyExists, match="revoke one first"):
        await place.accounts.create_key(team_id, "too many", is_bound=True, owner="alice")
    await place.accounts.revoke_key(last.key.id)
    await place.accounts.create_key(team_id, "in its place", is_bound=True, owner="alice")
    identity = await place.bearers.identify(place.token())
    assert identity is not None
    assert (identity.key.requests_per_min, identity.key.expires_at_s) == (5, None)
    assert [identity.is_taken_from(one) for one in ("10.9.9.9", "::ffff:10.9.9.9", "11.0.0.1", "")] == [
        True,
        True,
        False,
        False,
    ]
    with pytest.raises(Invalid, match="addresses"):
        await place.accounts.update_team(team_id, new_keys={"addresses": ["10.0.0.1/8"]})
