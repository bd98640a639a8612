"""Callers of /v1 with a token of the OpenID provider: who is taken, as whom, and what it costs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from joserfc import jwt
from redis.asyncio import Redis

from gateway.access.agents import Agents
from gateway.access.people import Bearers
from gateway.access.provider import Provider
from gateway.accounts.accounts import PEOPLE, Accounts
from gateway.accounts.errors import Invalid
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
        self.accounts = Accounts(f"sqlite:///{folder}/sameway.db", clock=lambda: self.now_s)
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
