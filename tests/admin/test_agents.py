"""Agents that people sign in: codes, tokens and the page, by the rules of RFC 8628, RFC 9700 and RFC 7009."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from sqlalchemy.exc import OperationalError

from gateway.access.agents import ACCESS_S, CODE_S, SIGN_IN_S, Agents
from gateway.access.people import Bearers
from gateway.accounts import Identity
from gateway.wire.errors import Unauthenticated
from tests.admin.test_access import place, session_of, visitor
from tests.admin.world import World
from tests.provider import StandInProvider

__all__ = ["place"]
_DEVICE = "urn:ietf:params:oauth:grant-type:device_code"
Place = tuple[World, StandInProvider]


@pytest.fixture
async def client(place: Place) -> AsyncIterator[httpx.AsyncClient]:
    async with visitor(place[0]) as client:
        yield client


async def begun(client: httpx.AsyncClient) -> dict[str, Any]:
    reply = await client.post("/oauth/device_authorization")
    assert reply.status_code == 200
    return dict(reply.json())


async def decided(world: World, code: str, decision: str = "allow", group: str = "people") -> httpx.Response:
    """What the page answers to a person who gives a code."""
    async with visitor(world) as browser:
        browser.cookies.update(await session_of(world, group))
        return await browser.post("/admin/device", data={"user_code": code, "decision": decision})


async def polled(client: httpx.AsyncClient, code: str) -> tuple[int, dict[str, Any]]:
    reply = await client.post("/oauth/token", data={"grant_type": _DEVICE, "device_code": code})
    assert reply.headers["cache-control"] == "no-store"
    return reply.status_code, reply.json()


async def refreshed(client: httpx.AsyncClient, token: str) -> tuple[int, dict[str, Any]]:
    reply = await client.post("/oauth/token", data={"grant_type": "refresh_token", "refresh_token": token})
    return reply.status_code, reply.json()


async def signed_in(world: World, client: httpx.AsyncClient) -> dict[str, Any]:
    codes = await begun(client)
    assert (await decided(world, codes["user_code"])).status_code == 200
    status, tokens = await polled(client, codes["device_code"])
    assert status == 200
    return tokens


def change(world: World, **access: Any) -> None:
    """Reload the configuration with other values of `access`."""
    settings = world.admin.settings
    object.__setattr__(settings, "access", settings.access.model_copy(update=access))


def bearers_of(world: World) -> Bearers:
    """What takes tokens in another worker."""
    guard = world.admin.guard
    agents = Agents(guard.sessions, guard.mark, world.redis, lambda: world.now_s)
    return Bearers(world.admin.settings, guard.provider, world.accounts, agents, lambda: world.now_s)


async def who(bearers: Bearers, token: str) -> Identity | None:
    """The caller; None of a token that is refused."""
    try:
        return await bearers.identify(token)
    except Unauthenticated:
        return None


async def test_an_agent_asks_as_the_person_who_allowed_its_code(place: Place, client: httpx.AsyncClient) -> None:
    """By discovery, a code, the page and a poll; the token is of the person's team in every worker until its end,
    and the refresh token gives the next one.
    """
    world, _ = place
    metadata = (await client.get("/.well-known/oauth-authorization-server")).json()
    assert metadata["token_endpoint"] == "http://gateway.test/oauth/token"
    assert metadata["device_authorization_endpoint"] == "http://gateway.test/oauth/device_authorization"
    codes = await begun(client)
    assert codes["verification_uri_complete"].endswith(f"/admin/device?user_code={codes['user_code']}")
    async with visitor(world) as browser:
        login = await browser.get(codes["verification_uri_complete"])
        assert login.headers["location"].startswith("/admin/login?next=/admin/device%3Fuser_code")
        browser.cookies.update(await session_of(world, "people"))
        assert codes["user_code"] in (await browser.get(codes["verification_uri_complete"])).text
    assert (await polled(client, codes["device_code"]))[1]["error"] == "authorization_pending"
    lowered = codes["user_code"].lower().replace("-", " ")
    assert "asks as people@x" in (await decided(world, lowered)).text
    status, tokens = await polled(client, codes["device_code"])
    assert (status, tokens["token_type"], tokens["expires_in"]) == (200, "Bearer", ACCESS_S)
    bearers = bearers_of(world)
    identity = await who(bearers, tokens["access_token"])
    assert identity is not None
    assert (identity.team.name, identity.user) == ("search", "people@x")
    assert await who(bearers, tokens["refresh_token"]) is None
    world.now_s += ACCESS_S + 1
    assert await who(bearers, tokens["access_token"]) is None
    status, later = await refreshed(client, tokens["refresh_token"])
    assert status == 200
    assert await who(bearers, later["access_token"]) is not None
    (row,) = [row for row in await world.admin.audit.rows(9) if row.action == "agent_signed_in"]
    assert (row.actor, row.entry) == ("people@x", "192.0.2.7")


async def test_a_device_code_gives_tokens_once(place: Place, client: httpx.AsyncClient) -> None:
    """Ten polls at once, of two workers, get tokens once; later ones, unknown codes and old ones get `expired_token`."""
    world, _ = place
    codes = await begun(client)
    await decided(world, codes["user_code"])
    replies = await asyncio.gather(*(polled(client, codes["device_code"]) for _ in range(10)))
    assert sorted(status for status, _ in replies) == [200] + [400] * 9
    assert (await polled(client, codes["device_code"]))[1]["error"] == "expired_token"
    assert (await polled(client, "unknown"))[1]["error"] == "expired_token"
    assert 0 < await world.redis.ttl(_asked(await begun(client))) <= CODE_S
    assert "No sign-in waits" in (await decided(world, codes["user_code"])).text


def _asked(codes: dict[str, Any]) -> str:
    """Where a code waits."""
    return f"sameway:{{device}}:asked:{codes['user_code'].replace('-', '')}"


async def test_who_denies_or_polls_too_fast_is_told(place: Place, client: httpx.AsyncClient) -> None:
    """A second poll within the interval gets `slow_down`, a denied code `access_denied` and no tokens."""
    world, _ = place
    codes = await begun(client)
    assert (await polled(client, codes["device_code"]))[1]["error"] == "authorization_pending"
    assert (await polled(client, codes["device_code"]))[1]["error"] == "slow_down"
    assert "was not let in" in (await decided(world, codes["user_code"], "deny")).text
    assert (await polled(client, codes["device_code"]))[1]["error"] == "access_denied"
    wrong = await client.post("/oauth/token", data={"grant_type": "password"})
    assert (wrong.status_code, wrong.json()["error"]) == (400, "unsupported_grant_type")
    assert (await client.post("/oauth/token")).json()["error"] == "invalid_request"


async def test_only_a_person_with_a_team_lets_an_agent_in(place: Place, client: httpx.AsyncClient) -> None:
    """The admin key, a role without a team and a page of another site do not; wrong codes soon have to wait."""
    world, _ = place
    code = (await begun(client))["user_code"]
    assert (await decided(world, code, group="watch")).status_code == 403
    async with visitor(world) as browser:
        browser.cookies.set("sameway_admin", world.session)
        assert (await browser.post("/admin/device", data={"user_code": code})).status_code == 403
        browser.cookies.clear()
        browser.cookies.update(await session_of(world, "people"))
        foreign = await browser.post(
            "/admin/device", data={"user_code": code, "decision": "allow"}, headers={"sec-fetch-site": "cross-site"}
        )
        assert foreign.status_code == 403
    statuses = [(await decided(world, "BBBB-BBBB")).status_code for _ in range(8)]
    assert statuses == [400] * 6 + [429] * 2
    world.now_s += 5
    assert (await decided(world, code)).status_code == 200


async def test_a_refresh_token_that_comes_again_ends_its_sign_in(place: Place, client: httpx.AsyncClient) -> None:
    """Of two at once one is exchanged and the sign-in lasts; a minute later the old one ends it for all (RFC 9700)."""
    world, _ = place
    tokens = await signed_in(world, client)
    replies = await asyncio.gather(*(refreshed(client, tokens["refresh_token"]) for _ in range(2)))
    assert sorted(status for status, _ in replies) == [200, 400]
    new = next(body for status, body in replies if status == 200)
    status, newer = await refreshed(client, new["refresh_token"])
    assert status == 200
    world.now_s += 61
    assert (await refreshed(client, tokens["refresh_token"]))[1]["error"] == "invalid_grant"
    assert (await refreshed(client, newer["refresh_token"]))[1]["error"] == "invalid_grant"
    assert await who(bearers_of(world), newer["access_token"]) is None


@pytest.mark.parametrize("end", ["revoke", "page", "person"])
async def test_an_ended_sign_in_is_over_within_a_minute(place: Place, client: httpx.AsyncClient, end: str) -> None:
    """By a revocation (RFC 7009), on the page Sessions, and with the person's own sessions at the provider."""
    world, _ = place
    tokens, bearers = await signed_in(world, client), bearers_of(world)
    assert await who(bearers, tokens["access_token"]) is not None
    sessions, guard = world.admin.guard.sessions, world.admin.guard
    if end == "revoke":
        assert (await client.post("/oauth/revoke", data={"token": "unknown"})).status_code == 200
        assert (await client.post("/oauth/revoke", data={"token": tokens["refresh_token"]})).status_code == 200
    elif end == "page":
        (mine,) = await sessions.open_ones([guard.mark("agent")])
        key = {"authorization": f"Bearer {world.admin.settings.admin_key}"}
        assert (await client.delete(f"/admin/api/sessions/{mine.id}", headers=key)).status_code == 204
    else:
        assert await sessions.end_all([guard.mark("agent")], subject="people") == 1
    world.now_s += 61
    assert await who(bearers, tokens["access_token"]) is None
    assert (await refreshed(client, tokens["refresh_token"]))[1]["error"] == "invalid_grant"


async def test_managed_settings_are_asked_for_again_only_if_they_changed(
    place: Place, client: httpx.AsyncClient
) -> None:
    """401 without a token, 404 without a policy, then the policy with an ETag, and 304 for it until it changes."""
    world, _ = place
    assert (await client.get("/managed/settings")).json()["error"]["type"] == "authentication_error"
    signed = {"authorization": f"Bearer {(await signed_in(world, client))['access_token']}"}
    assert (await client.get("/managed/settings", headers=signed)).status_code == 404
    change(world, claude_settings={"env": {"A": "1"}})
    first = await client.get("/managed/settings", headers=signed)
    assert first.json()["settings"] == {"env": {"A": "1"}}
    assert first.headers["etag"] == f'"{first.json()["checksum"]}"'
    again = await client.get("/managed/settings", headers={**signed, "if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    change(world, claude_settings={"env": {"A": "2"}})
    assert (
        await client.get("/managed/settings", headers={**signed, "if-none-match": first.headers["etag"]})
    ).status_code == 200


async def test_without_a_sign_in_there_is_no_protocol(place: Place, client: httpx.AsyncClient) -> None:
    """Without `client_id` discovery, codes and tokens are 404, and a token of before is no key."""
    world, _ = place
    token = (await signed_in(world, client))["access_token"]
    change(world, client_id="")
    paths = ("/.well-known/oauth-authorization-server", "/managed/settings")
    assert {(await client.get(path)).status_code for path in paths} == {404}
    assert {(await client.post(f"/oauth/{path}")).status_code for path in ("token", "revoke")} == {404}
    assert await bearers_of(world).identify(token) is None


async def test_a_sign_in_lasts_a_week_and_survives_the_database(
    place: Place, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token that a worker has taken stays good while the database is away; after a week nothing refreshes."""
    world, _ = place
    tokens, bearers = await signed_in(world, client), bearers_of(world)
    assert await who(bearers, tokens["access_token"]) is not None

    async def away(*_: Any) -> Any:
        raise OperationalError("select", {}, OSError("away"))

    with monkeypatch.context() as broken:
        broken.setattr(world.accounts.database, "rows", away)
        world.now_s += 61
        assert await who(bearers, tokens["access_token"]) is not None
    world.now_s += SIGN_IN_S
    assert (await refreshed(client, tokens["refresh_token"]))[1]["error"] == "invalid_grant"


async def test_the_page_says_who_asks_before_a_code_is_allowed(place: Place, client: httpx.AsyncClient) -> None:
    """The address and the time, and whether it is another network than the browser's; a look at wrong codes soon waits."""
    world, _ = place
    near = (await begun(client))["verification_uri_complete"]
    transport = httpx.ASGITransport(app=world.app, client=("203.0.113.9", 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway.test") as stranger:
        far = (await begun(stranger))["verification_uri_complete"]
    async with visitor(world) as browser:
        browser.cookies.update(await session_of(world, "people"))
        page = (await browser.get("/admin/device")).text
        assert 'value="allow"' not in page
        page = (await browser.get(near)).text
        assert "192.0.2.7" in page
        assert "another network" not in page
        page = (await browser.get(far)).text
        assert "203.0.113.9" in page
        assert "another network" in page
        allowed = await browser.post("/admin/device", data={"user_code": far[-9:], "decision": "allow"})
        assert "asks as people@x" in allowed.text
        guard = world.admin.guard
        assert [one.client for one in await guard.sessions.open_ones([guard.mark("agent")])] == ["203.0.113.9"]
        looks = [(await browser.get("/admin/device?user_code=BBBB-BBBB")).status_code for _ in range(8)]
        assert looks == [400] * 6 + [429] * 2


@pytest.mark.parametrize("end", ["disabled", "logged out"])
async def test_who_is_out_before_the_poll_signs_no_agent_in(place: Place, client: httpx.AsyncClient, end: str) -> None:
    """A code that a person allowed gives nothing once the person is disabled or was logged out, also after an enable."""
    world, _ = place
    codes = await begun(client)
    assert (await decided(world, codes["user_code"])).status_code == 200
    async with visitor(world) as admin:
        admin.headers["authorization"] = f"Bearer {world.admin.settings.admin_key}"
        if end == "disabled":
            for act in ("disable", "enable"):
                reply = await admin.post(f"/admin/api/people/{act}", json={"name": "people@x"})
                assert reply.status_code == 204
        else:
            marks = world.admin.guard.all_marks
            assert await world.admin.guard.sessions.end_all(marks, subject="people") == 2
    assert (await polled(client, codes["device_code"]))[1]["error"] == "access_denied"


async def test_a_user_code_is_no_device_code(place: Place, client: httpx.AsyncClient) -> None:
    """Another device code with the same user code, of which there are few, gives nothing, and takes nothing from the right one."""
    world, _ = place
    right, guessed = await begun(client), await begun(client)
    await world.redis.copy(_asked(right), _asked(guessed), replace=True)
    assert (await polled(client, guessed["device_code"]))[1]["error"] == "expired_token"
    assert (await decided(world, right["user_code"])).status_code == 200
    assert (await polled(client, guessed["device_code"]))[1]["error"] == "expired_token"
    assert (await polled(client, right["device_code"]))[0] == 200


@pytest.mark.parametrize(
    "header", [{"alg": "HS256", "crit": 3}, {"alg": "none"}, {"alg": ["HS256"]}, {"alg": "RS256", "kid": {}}, [], 3]
)
async def test_what_only_looks_like_a_token_is_none(place: Place, client: httpx.AsyncClient, header: Any) -> None:
    """A header of any JSON is an unknown key at /v1, and nothing to refresh, to revoke or to get settings with."""
    world, _ = place
    _, claims, signature = (await signed_in(world, client))["refresh_token"].split(".")
    token = f"{base64.urlsafe_b64encode(json.dumps(header).encode()).decode().rstrip('=')}.{claims}.{signature}"
    assert await who(bearers_of(world), token) is None
    assert (await refreshed(client, token))[1]["error"] == "invalid_grant"
    assert (await client.post("/oauth/revoke", data={"token": token})).status_code == 200
    settings = await client.get("/managed/settings", headers={"authorization": f"Bearer {token}"})
    assert settings.status_code == 401
