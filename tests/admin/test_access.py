"""People at the dashboard: what each role may do, and who gets in through the OpenID provider."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from fastapi.routing import APIRoute
from msgspec.structs import replace
from redis.asyncio import Redis

from gateway.admin.guard import COOKIE, Principal
from gateway.admin.roles import TABLE
from gateway.settings import AccessSettings, Role
from tests.admin.world import ADMIN_KEY, NOW_S, World, open_world
from tests.provider import CLIENT_ID, StandInProvider, provider_of
from tests.telemetry.records import hit

OWN_PAGE = {"sec-fetch-site": "same-origin"}
GROUPS: dict[str, Any] = {
    "platform": {"role": "admin"},
    "money": {"role": "finance"},
    "lookers": {"role": "viewer"},
    "watch": {"role": "auditor"},
    "leads": {"role": "team_admin", "teams": ["search"]},
    "people": {"role": "member", "teams": ["search"]},
    "ghosts": {"role": "member", "teams": ["no-such-team"]},
}
_ALL_TEAMS = "list_teams list_keys list_budgets teams get_team list_keys_of_team list_budgets_of_team list_values team"
_ONE_TEAM = "get_team list_keys_of_team list_budgets_of_team list_values team"
_SUMS = "stats savings ledger ledger_sums"
_MACHINE = "overview status deployments hosts batches list_models models"
_CACHE = "cache quality cache_misses cache_verifier certificate near_misses wrong"
_BUDGETS = "create_budget update_budget raise_budget reset_budget delete_budget"
_KEYS = "create_key create_own_key rotate_key revoke_key"
MAY = {
    "money": f"me keep_keys playground device {_SUMS} {_ALL_TEAMS}",
    "lookers": f"me keep_keys playground device {_MACHINE} {_SUMS} routes requests {_CACHE} {_ALL_TEAMS}",
    "watch": "me keep_keys playground device audit export_audit",
    "leads": f"me keep_keys playground device {_SUMS} routes requests {_ONE_TEAM} {_KEYS} update_key {_BUDGETS} purge",
    "people": "me keep_keys playground device create_key create_own_key rotate_key revoke_key",
}
"""What a group's people may do, by the names of operations and pages."""


@pytest.fixture
async def place(redis: Redis, tmp_path: Path) -> AsyncIterator[tuple[World, StandInProvider]]:
    worlds: list[World] = []
    async with provider_of(lambda: worlds[0].now_s if worlds else NOW_S) as provider:
        access = AccessSettings(
            issuer=provider.issuer,
            client_id=CLIENT_ID,
            groups=GROUPS,
            algorithms=["ES256", "RS256"],
            user_claim="email",
        )
        async with open_world(redis, tmp_path, access=access) as world:
            worlds.append(world)
            await world.accounts.create_team("search")
            await world.accounts.create_team("rivals")
            yield world, provider
            world.admin.guard.provider.aclose()


@asynccontextmanager
async def visitor(world: World) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=world.app, client=("192.0.2.7", 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway.test", headers=OWN_PAGE) as client:
        yield client


async def session_of(world: World, group: str) -> dict[str, str]:
    """The cookie of someone of a group."""
    mark, facts = world.admin.guard.mark("sign-in"), {"actor": f"{group}@x", "subject": group, "groups": [group]}
    return {COOKIE: await world.admin.guard.sessions.start(mark, 3_600, **facts)}


def names_of(world: World) -> list[tuple[APIRoute, str]]:
    """Each route that has a row in the table, with its name."""
    known = {name for row in TABLE for name in row.of.split()}
    routes = [route for route in world.app.routes if isinstance(route, APIRoute) and route.path.startswith("/admin")]
    return [(route, route.name) for route in routes if set(route.name.split()) <= known]


async def test_each_role_does_what_its_row_says_and_no_more(place: tuple[World, StandInProvider]) -> None:
    """Every route of the API, every page and every form, with each role: what is not the role's is refused with 403;
    texts of requests are nowhere.
    """
    world, _ = place
    routes = names_of(world)
    assert len(routes) > 90
    mine = await world.accounts.create_key(1, "lead's", owner="people@x")
    budget = await world.accounts.create_budget(1, "month", 1_000_000, axis="user")
    world.stats.add(
        hit(at_s=NOW_S, request_id="r1", cache="semantic", nearest="planted", question="planted", entry="ab")
    )
    world.stats.add(hit(at_s=NOW_S, request_id="r2", cache="miss", similarity=0.9, nearest="planted"))
    await world.stats.flush()
    ids = {"team_id": "1", "key_id": str(mine.key.id), "budget_id": str(budget.id), "act": "reset", "batch_id": "b"}
    for group, allowed in MAY.items():
        cookies = await session_of(world, group)
        async with visitor(world) as client:
            client.cookies.update(cookies)
            for route, name in routes:
                path = re.sub(r"\{(\w+)\}", lambda part: ids.get(part[1], "0" * 16), route.path)
                (method,) = route.methods
                if "delete_budget" in name and group == "leads":
                    continue  # it works, which another test shows
                query = {"team_id": "1"} if method == "GET" and "{team_id}" not in route.path else {}
                if name in ("stats",):
                    query = {"team": "1"}
                if path.startswith("/admin/api/") and name not in allowed.split():
                    query = {}
                body = {"team_id": 1} if name == "purge" and group == "leads" and "/api/" in path else None
                reply = await client.request(method, path, params=query, json=body)
                assert "planted" not in reply.text, (group, path)
                is_refused = reply.status_code == 403 and "roles" in reply.text
                is_allowed = set(name.split()) <= set(allowed.split())
                if path == "/admin" and not is_allowed:
                    assert reply.status_code == 303
                else:
                    assert is_refused != is_allowed, (group, method, path, reply.status_code, reply.text[:300])


async def test_no_page_leads_to_what_its_reader_may_not_do(place: tuple[World, StandInProvider]) -> None:
    """Each link of each page in a role's menu opens; forms that the role may not send are gone with their cards."""
    world, _ = place
    world.stats.add(hit(at_s=NOW_S, request_id="r1", team_id=1, team="search"))
    await world.stats.flush()
    async with visitor(world) as admin:
        admin.headers["authorization"] = f"Bearer {ADMIN_KEY}"
        await admin.patch("/admin/api/teams/1", json={"tokens_per_min": 9})
    for group in MAY:
        async with visitor(world) as person:
            person.cookies.update(await session_of(world, group))
            menu = re.findall(r'href="(/admin[^"]*)"', (await person.get("/admin/playground")).text)
            pages = [await person.get(path, follow_redirects=True) for path in menu if "/static/" not in path]
            links = {link for page in pages for link in re.findall(r'<a [^>]*href="(/admin[^"]*)"', page.text)}
            opened = {link: await person.get(link.replace("&amp;", "&"), follow_redirects=True) for link in links}
            assert {link for link, reply in opened.items() if reply.status_code == 403} == set()
            shown = "".join(page.text for page in pages)
            assert len(pages) > 2
            assert not re.search(r'id="(?:import|purge)"|<h2>Try a prompt', shown), group


async def test_a_team_admin_stays_in_the_team(place: tuple[World, StandInProvider]) -> None:
    """Another team's id, anywhere in a request, is refused; so are no team, the team's own budget and another's keys."""
    world, _ = place
    theirs = await world.accounts.create_key(2, "theirs")
    ours = await world.accounts.create_key(1, "ours")
    budget = await world.accounts.create_budget(2, "month", 1_000_000, axis="user")
    own = await world.accounts.create_budget(1, "month", 5_000_000)
    world.stats.add(hit(at_s=NOW_S, request_id="r1", team_id=1, team="search"))
    world.stats.add(hit(at_s=NOW_S, request_id="r2", team_id=2, team="rivals"))
    await world.stats.flush()
    async with visitor(world) as lead:
        lead.cookies.update(await session_of(world, "leads"))
        for method, path, body in (
            ("GET", "/admin/api/ledger", None),
            ("GET", "/admin/api/ledger?team_id=2", None),
            ("GET", "/admin/api/ledger?team_id=1&team_id=2", None),
            ("GET", "/admin/api/routes?team_id=2", None),
            ("GET", "/admin/api/teams/2", None),
            ("GET", "/admin/teams/2", None),
            ("GET", "/admin/requests?team_id=2", None),
            ("DELETE", f"/admin/api/keys/{theirs.key.id}", None),
            ("DELETE", "/admin/api/keys/99999", None),
            ("PATCH", f"/admin/api/budgets/{budget.id}", {"limit_microusd": 1}),
            ("PATCH", f"/admin/api/budgets/{own.id}", {"limit_microusd": 1}),
            ("DELETE", f"/admin/api/budgets/{own.id}", None),
            ("POST", "/admin/api/teams/1/budgets", {"window": "day", "limit_microusd": 1}),
            ("POST", "/admin/api/cache/purge", {"all": True}),
            ("POST", "/admin/api/cache/purge", {"id": "ab" * 32}),
            ("POST", "/admin/api/cache/purge", {"team_id": 2}),
            ("POST", "/admin/api/cache/purge?team_id=1", {"team_id": 2, "dry_run": False}),
        ):
            reply = await lead.request(method, path, json=body)
            assert reply.status_code == 403, (method, path, reply.text[:200])
        crossed = f"/admin/teams/1/keys/{theirs.key.id}/revoke"
        assert (await lead.post(crossed)).status_code == 403
        assert (await lead.post(f"/admin/teams/1/budgets/{budget.id}/delete")).status_code == 403
        requests = await lead.get("/admin/requests", follow_redirects=True)
        assert (requests.status_code, str(requests.url.query)) == (200, "b'team_id=1'")
        assert "rivals" not in requests.text
        ways = ("team=1", f"key_id={ours.key.id}", f"budget_id={own.id}", "team_id=", "team_id=%201", "team_id=%2B1",
                "team_id=00000000001", "team_id=1&team_id=", "team_id=&team_id=1")  # fmt: skip
        for path in ("requests", "ledger", "savings"):
            for way in ways:
                page = await lead.get(f"/admin/{path}?{way}", follow_redirects=True)
                assert "rivals" not in page.text, (path, way)
                assert page.status_code == 403 or "team_id=1" in str(page.url.query), (path, way)
        listed = (await lead.get("/admin/api/routes?team_id=1")).json()["routes"]
        assert [one["team"] for one in listed] == ["search"]
        shouted = {"content-type": "application/JSON"}
        for team_id, status in ((1, 200), (2, 403)):
            purge = json.dumps({"team_id": team_id})
            reply = await lead.post("/admin/api/cache/purge", content=purge, headers=shouted)
            assert reply.status_code == status
        purged = await lead.post("/admin/api/cache/purge", json={"team_id": 1, "dry_run": False})
        assert purged.status_code == 200
        made = await lead.post("/admin/api/teams/1/budgets", json={"window": "day", "limit_microusd": 1, "axis": "key"})
        assert made.status_code == 201
        assert (await lead.delete(f"/admin/api/budgets/{made.json()['id']}")).status_code == 204
        assert "sk-sw-" in (await lead.post("/admin/me/1/keys", data={"name": "lead's"})).text
        assert [key["name"] for key in (await lead.get("/admin/api/me")).json()["keys"]] == ["lead's"]
        page = (await lead.get("/admin/teams/1")).text
        assert "/admin/teams/1/keys" in page
        assert "Delete this team" not in page
        assert f'id="budget-{own.id}"' not in page
        assert '<option value="team"' not in page
    assert all(key.is_active for key in await world.accounts.list_keys())


async def test_a_member_has_own_keys_alone(place: tuple[World, StandInProvider]) -> None:
    """A member makes, sees and revokes keys of their own in their team, and neither sees nor ends another's."""
    world, _ = place
    team_s = await world.accounts.create_key(1, "team's")
    async with visitor(world) as member:
        member.cookies.update(await session_of(world, "people"))
        assert (await member.get("/admin")).headers["location"] == "/admin/me"
        made = await member.post("/admin/me/1/keys", data={"name": "laptop"})
        assert "sk-sw-" in made.text
        assert (await member.post("/admin/me/2/keys", data={"name": "laptop"})).status_code == 403
        assert (await member.post("/admin/teams/1/keys", data={"name": "x"})).status_code == 403
        me = (await member.get("/admin/api/me")).json()
        assert (me["actor"], me["roles"]) == ("people@x", {"member": ["search"]})
        assert [key["name"] for key in me["keys"]] == ["laptop"]
        assert (await member.post(f"/admin/me/keys/{team_s.key.id}/revoke")).status_code == 403
        assert (await member.post(f"/admin/me/keys/{me['keys'][0]['id']}/revoke")).status_code == 303
    keys = {key.name: (key.owner, key.is_active) for key in await world.accounts.list_keys()}
    assert keys == {"team's": ("", True), "laptop": ("people@x", False)}


async def test_a_disabled_person_is_out_and_a_leaver_takes_keys_back(place: tuple[World, StandInProvider]) -> None:
    """Who is disabled on the page has no session, sign-in or key until enabled; a leaver's keys stop, with the date on the
    pages, and one click of the leaver gives them back.
    """
    world, provider = place
    world.admin.settings.access.__dict__["leavers_days"] = 30
    async with visitor(world) as person, visitor(world) as admin:
        admin.headers["authorization"] = f"Bearer {ADMIN_KEY}"
        admin.cookies.update({COOKIE: world.session})

        async def sign_in() -> int:
            asked = await begin(person, provider, groups=["leads"], email="ada@x")
            back = await person.get("/admin/sign-in/callback", params={"code": "c", "state": asked["state"]})
            return back.status_code

        assert await sign_in() == 200
        made = await person.post("/admin/me/1/keys", data={"name": "laptop"})
        (key,) = re.findall(r"sk-sw-[\w-]{43}", made.text)[:1]
        assert world.accounts.identify(key) is not None
        assert (await admin.post("/admin/people/disable", data={"name": "ada@x"})).status_code == 303
        assert "ada@x <span" in (await admin.get("/admin/sessions")).text
        assert (await person.get("/admin/me")).status_code == 303
        assert await sign_in() == 403
        assert world.accounts.identify(key) is None
        assert (await admin.post("/admin/people/enable", data={"name": "ada@x"})).status_code == 303
        assert world.accounts.identify(key) is not None
        world.now_s += 31 * 86_400
        assert await world.accounts.find(key) is None
        admin.cookies.clear()
        await admin.post("/admin/login", data={"key": ADMIN_KEY})
        assert "Give the keys back" in (await admin.get("/admin/sessions")).text
        assert await sign_in() == 200
        assert await world.accounts.find(key) is None
        assert "Your keys have stopped" in (await person.get("/admin/me")).text
        assert (await person.post("/admin/me/keep-keys")).status_code == 303
        assert "Your keys have stopped" not in (await person.get("/admin/me")).text
        assert await world.accounts.find(key) is not None
        rotated = await person.post(
            f"/admin/me/keys/{world.accounts.identify(key).key.id}/rotate", data={"overlap_hours": "1"}
        )
        (other,) = set(re.findall(r"sk-sw-[\w-]{43}", rotated.text))
        assert [await world.accounts.find(one) is not None for one in (key, other)] == [True, True]
        rows = (await admin.get("/admin/api/audit?limit=30")).json()["rows"]
        assert {"person_disabled", "person_enabled", "keys_kept"} < {row["action"] for row in rows}
        people = (await admin.get("/admin/api/people")).json()["people"]
        assert [(one["name"], one["keys"], one["is_disabled"]) for one in people] == [("ada@x", 1, False)]
        for name in ("*", "Admin key", "", "\uff21da@x"):
            assert (await admin.post("/admin/api/people/disable", json={"name": name})).status_code == 400
        assert await sign_in() == 200
        assert (await admin.post("/admin/api/people/disable", json={"name": "ADA@x"})).status_code == 204
        assert await world.admin.guard.sessions.open_ones([world.admin.guard.mark("sign-in")]) == ()
        assert await sign_in() == 403
        people = (await admin.get("/admin/api/people")).json()["people"]
        assert [(one["name"], one["is_disabled"]) for one in people] == [("ADA@x", True), ("ada@x", True)]
        assert (await admin.post("/admin/api/people/enable", json={"name": "ada@x"})).status_code == 204
        assert await sign_in() == 200


async def test_the_audit_log_is_exported_kept_for_days_and_read_by_people(place: tuple[World, StandInProvider]) -> None:
    """The export has every row of a range on a line; old rows go but those that say what holds; values have their units."""
    world, _ = place
    row = world.admin.audit_row("purge", "", Principal("ada@x", "192.0.2.7", "api", {}))
    for days, action in ((0, "cache_purged"), (1, "deployment_drained"), (2, "cache_purged"), (5, "cache_purged")):
        await world.admin.audit.add(replace(row, action=action, at_ms=int((NOW_S - days * 86_400) * 1000)))
    async with visitor(world) as admin:
        admin.headers["authorization"] = f"Bearer {ADMIN_KEY}"

        async def ages(**query: float) -> list[float]:
            reply = await admin.get("/admin/api/audit/export", params=query)
            assert reply.headers["content-type"].startswith("application/x-ndjson")
            return [round(NOW_S - json.loads(line)["at_ms"] / 1000) / 86_400 for line in reply.text.splitlines()]

        assert await ages() == [0, 1, 2, 5]
        assert await ages(from_s=NOW_S - 2 * 86_400, until_s=NOW_S) == [1, 2]
        await world.admin.audit.forget(None, NOW_S)
        assert len(await ages()) == 4
        await world.admin.audit.forget(1, NOW_S + 60)
        assert await ages() == [0, 1]
        budget = {"window": "day", "limit_microusd": 25_000_000, "axis": "user"}
        await admin.post("/admin/api/teams/1/budgets", json=budget)
        await admin.post("/admin/api/teams/1/budgets", json={"window": "day", "limit_tokens": 5_000, "axis": "key"})
        await admin.patch("/admin/api/teams/1", json={"new_keys": {"expires_in_s": 86_400.0, "models": ["small"]}})
        admin.cookies.update({COOKIE: world.session})
        shown = (await admin.get("/admin/audit")).text
    for words in ("limit: $25.00", "limit tokens: 5000", "begun: 2040-05-17", "expires in: 1 d", "models: small"):
        assert words in shown


async def test_the_audit_log_has_who_and_what_changed(place: tuple[World, StandInProvider]) -> None:
    """Each change is a row with its actor, address and values before and after; texts are shown to an admin alone."""
    world, _ = place
    world.stats.add(hit(at_s=NOW_S, request_id="r1", team_id=1, team="search", nearest="a planted question"))
    await world.stats.flush()
    async with visitor(world) as lead, visitor(world) as admin, visitor(world) as looker:
        lead.cookies.update(await session_of(world, "leads"))
        looker.cookies.update(await session_of(world, "lookers"))
        admin.headers["authorization"] = f"Bearer {ADMIN_KEY}"
        key = (await lead.post("/admin/api/teams/1/keys", json={"name": "ci", "requests_per_min": 5})).json()["key"]
        await lead.patch(f"/admin/api/keys/{key['id']}", json={"requests_per_min": 7})
        await admin.patch("/admin/api/teams/1", json={"tokens_per_min": 9})
        assert "planted" not in (await lead.get("/admin/api/routes?team_id=1")).text
        assert (
            "planted" not in (await looker.get("/admin/api/routes")).text + (await looker.get("/admin/requests")).text
        )
        for _ in range(2):
            assert "planted" in (await admin.get("/admin/api/routes")).text
        rows = (await admin.get("/admin/api/audit")).json()["rows"]
        page = await admin.post("/admin/login", data={"key": ADMIN_KEY})
        assert page.status_code == 303
        shown = (await admin.get("/admin/audit")).text
    seen = [(row["action"], row["actor"], row["client"], row["entry"]) for row in reversed(rows)]
    name = f"key {key['id']}: ci"
    assert seen == [
        ("key_created", "leads@x", "192.0.2.7", name),
        ("key_changed", "leads@x", "192.0.2.7", name),
        ("team_changed", "admin key", "192.0.2.7", "team 1: search"),
        ("texts_shown", "admin key", "192.0.2.7", "requests"),
    ]
    assert rows[2]["change"] == '{"requests_per_min":[5,7]}'
    assert rows[1]["change"] == '{"tokens_per_min":[null,9]}'
    assert not any("digest" in row["change"] for row in rows)
    assert "5 → 7" in shown


# -- sign-in


async def begin(client: httpx.AsyncClient, provider: StandInProvider, **claims: Any) -> dict[str, str]:
    """Start at the dashboard; the provider's next ID token is for this browser."""
    begun = await client.get("/admin/sign-in?next=/admin/teams")
    assert begun.status_code == 303
    query = {name: values[0] for name, values in parse_qs(urlsplit(begun.headers["location"]).query).items()}
    now_s = int(provider.clock())
    base: dict[str, Any] = {"iss": provider.issuer, "aud": CLIENT_ID, "sub": "u1", "iat": now_s, "exp": now_s + 300}
    base |= {"nonce": query["nonce"], "email": "ada@x", "groups": ["platform", "unknown"], "sid": "s1"}
    provider.claims = {name: value for name, value in {**base, **claims}.items() if value is not None}
    return query


async def test_a_person_signs_in_and_out(place: tuple[World, StandInProvider]) -> None:
    """Code and PKCE lead to a session with the roles of the groups; logout ends it here and at the provider."""
    world, provider = place
    async with visitor(world) as person, visitor(world) as admin:
        assert "/admin/sign-in" in (await person.get("/admin/login")).text
        asked = await begin(person, provider)
        assert asked["code_challenge_method"] == "S256"
        back = await person.get("/admin/sign-in/callback", params={"code": "c", "state": asked["state"]})
        assert back.status_code == 200
        assert 'content="0;url=/admin/teams"' in back.text
        assert provider.forms[0]["grant_type"] == "authorization_code"
        assert len(provider.forms[0]["code_verifier"]) >= 43
        assert "HttpOnly; Max-Age=43200; Path=/admin; SameSite=strict" in back.headers.get_list("set-cookie")[0]
        assert (await person.get("/admin/teams")).status_code == 200
        admin.headers["authorization"] = f"Bearer {ADMIN_KEY}"
        listed = (await admin.get("/admin/api/sessions")).json()["sessions"]
        assert [(one["actor"], one["groups"]) for one in listed if one["actor"] == "ada@x"] == [("ada@x", ["platform"])]
        out = await person.post("/admin/logout")
        assert f"{provider.issuer}/end?client_id={CLIENT_ID}" in out.text
        assert (await person.get("/admin/teams")).status_code == 303
        assert [row["action"] for row in (await admin.get("/admin/api/audit")).json()["rows"]] == [
            "signed_out",
            "signed_in",
        ]


async def test_a_session_ends_by_an_admin_the_provider_or_the_configuration(
    place: tuple[World, StandInProvider],
) -> None:
    """An ended session opens nothing; a back-channel logout ends the person's; groups count as configured now."""
    world, provider = place
    access = world.admin.settings.access
    async with visitor(world) as person, visitor(world) as admin:
        admin.headers["authorization"] = f"Bearer {ADMIN_KEY}"

        async def sign_in() -> None:
            asked = await begin(person, provider)
            await person.get("/admin/sign-in/callback", params={"code": "c", "state": asked["state"]})
            assert (await person.get("/admin/teams")).status_code == 200

        await sign_in()
        for one in (await admin.get("/admin/api/sessions")).json()["sessions"]:
            assert (await admin.delete(f"/admin/api/sessions/{one['id']}")).status_code == 204
        assert (await person.get("/admin/teams")).status_code == 303
        await sign_in()
        event = {"http://schemas.openid.net/event/backchannel-logout": {}}
        for claims, status in (
            ({"events": event, "sid": "s1", "jti": "1", "nonce": "n"}, 400),
            ({"sid": "s1", "jti": "2"}, 400),
            ({"events": event, "jti": "3", "sub": None}, 400),
            ({"events": event, "sid": "s1", "jti": "4"}, 200),
        ):
            assert (await person.get("/admin/teams")).status_code == 200
            token = provider.token(aud=CLIENT_ID, **claims)
            reply = await admin.post("/admin/sign-in/logout", data={"logout_token": token})
            assert reply.status_code == status, claims
        assert (await person.get("/admin/teams")).status_code == 303
        assert (await admin.post("/admin/sign-in/logout", data={"logout_token": token})).status_code == 400
        await sign_in()
        access.__dict__["groups"] = {name: one for name, one in access.groups.items() if name != "platform"}
        assert (await person.get("/admin/teams")).status_code == 403
        assert (await person.get("/admin")).status_code == 403
        access.__dict__["is_admin_key_taken"] = False
        assert (await admin.get("/admin/api/teams")).status_code == 401
        assert (await admin.post("/admin/login", data={"key": ADMIN_KEY})).status_code == 401


Attack = Callable[[StandInProvider, dict[str, str]], object]


def _claims(**changes: Any) -> Attack:
    return lambda provider, asked: provider.claims.update(changes)


def _without(name: str) -> Attack:
    return lambda provider, asked: provider.claims.pop(name)


def _other_key(provider: StandInProvider, asked: dict[str, str]) -> None:
    stranger = StandInProvider(provider.clock)
    provider.sign = lambda claims: stranger.signed(claims, kid=provider.key.kid)


ATTACKS: dict[str, Attack] = {
    "wrong issuer": _claims(iss="https://evil.example"),
    "issuer with a slash": lambda provider, asked: provider.claims.update(iss=provider.issuer + "/"),
    "wrong audience": _claims(aud="another"),
    "no audience": _without("aud"),
    "several audiences without azp": _claims(aud=[CLIENT_ID, "another"]),
    "another azp": _claims(aud=[CLIENT_ID, "another"], azp="another"),
    "algorithm none": lambda provider, asked: setattr(provider, "sign", provider.unsigned),
    "HS256 with the public key": lambda provider, asked: setattr(provider, "sign", provider.confused),
    "another key, the same kid": _other_key,
    "expired": _claims(exp=int(NOW_S) - 61),
    "no expiry": _without("exp"),
    "expiry as a text": _claims(exp="9999999999"),
    "of the future": _claims(iat=int(NOW_S) + 61),
    "not before": _claims(nbf=int(NOW_S) + 61),
    "missing nonce": _without("nonce"),
    "wrong nonce": _claims(nonce="another"),
    "mixed-up state": lambda provider, asked: asked.update(state="another"),
    "no state": lambda provider, asked: asked.update(state=""),
    "another issuer's answer": lambda provider, asked: asked.update(iss="https://evil.example"),
    "huge token": _claims(padding="x" * 20_000),
    "no subject": _without("sub"),
    "no name": _without("email"),
    "a name of ours": _claims(email="admin key"),
    "no group": _claims(groups=["unknown"]),
    "a group of a team that is not there": _claims(groups=["ghosts"]),
    "groups as an object": _claims(groups={"platform": True}),
    "no ID token": lambda provider, asked: provider.answers.update({"/token": {"error": "invalid_grant"}}),
    "no JSON object": lambda provider, asked: provider.answers.update({"/token": []}),
    "a token of numbers": lambda provider, asked: provider.answers.update({"/token": {"id_token": 7}}),
    "no code": lambda provider, asked: asked.update(code=""),
}


async def test_a_hostile_provider_lets_nobody_in(place: tuple[World, StandInProvider]) -> None:
    """Of each attack nothing comes but a refusal; a browser that did not begin, and one that comes twice, get nothing."""
    world, provider = place
    passed = []
    for name, attack in ATTACKS.items():
        provider.sign, provider.answers = None, {}
        async with visitor(world) as person:
            asked = {"code": "c", "iss": provider.issuer, **await begin(person, provider)}
            attack(provider, asked)
            sent = {key: asked[key] for key in ("code", "state", "iss")}
            reply = await person.get("/admin/sign-in/callback", params=sent)
            if reply.status_code not in (403, 503) or COOKIE in person.cookies:
                passed.append((name, reply.status_code))
    assert not passed
    provider.sign, provider.answers = None, {}
    async with visitor(world) as person, visitor(world) as thief:
        asked = await begin(person, provider)
        sent = {"code": "c", "state": asked["state"]}
        assert (await thief.get("/admin/sign-in/callback", params=sent)).status_code == 403
        kept = dict(person.cookies)
        assert (await person.get("/admin/sign-in/callback", params=sent)).status_code == 200
        thief.cookies.update({name: value for name, value in kept.items() if name != COOKIE})
        assert (await thief.get("/admin/sign-in/callback", params=sent)).status_code == 403
        world.now_s += 601
        late = await begin(person, provider)
        world.now_s += 601
        reply = await person.get("/admin/sign-in/callback", params={"code": "c", "state": late["state"]})
        assert reply.status_code == 403
    assert all("evil" not in path for path in provider.asked)


async def test_the_provider_s_keys_change_and_it_may_be_away(place: tuple[World, StandInProvider]) -> None:
    """A new key is found at once, a flood of unknown ones reads it no more; a lying or silent provider lets nobody in."""
    world, provider = place
    async with visitor(world) as person:

        async def status() -> int:
            asked = await begin(person, provider)
            reply = await person.get("/admin/sign-in/callback", params={"code": "c", "state": asked["state"]})
            return reply.status_code

        assert await status() == 200
        world.now_s += 11
        provider.rotate("second")
        assert await status() == 200
        looks = provider.asked.count("/keys")
        for number in range(5):
            provider.sign = lambda claims, kid=f"k{number}": provider.signed(claims, kid=kid)
            assert await status() == 403
        assert provider.asked.count("/keys") == looks
        provider.sign = None
        assert await status() == 200
        provider.answers["/.well-known/openid-configuration"] = {"issuer": "https://evil.example"}
        world.now_s += 3_700
        assert await status() == 200  # with what it said before
        world.admin.settings.access.__dict__["issuer"] = provider.issuer + "/elsewhere"
        assert (await person.get("/admin/sign-in")).status_code == 503


def test_roles_are_the_table_s() -> None:
    """Each role stands in the table, and an admin may do everything."""
    assert all(Role.ADMIN in row.everywhere for row in TABLE)
    assert {role for row in TABLE for role in row.everywhere + row.in_teams} == set(Role)
