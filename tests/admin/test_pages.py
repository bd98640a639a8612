"""The dashboard without a browser: who gets in, what is escaped, what a page says, and that each has its JSON twin."""

from __future__ import annotations

import csv
import html
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import sqlalchemy as sa
from redis.asyncio import Redis

from gateway.accounts import HitsRow, schema
from gateway.accounts.conversations import Conversation
from gateway.accounts.holdings import ROW_BYTES
from gateway.accounts.stored_responses import ResponseStore, StoredResponse
from gateway.admin import savings_views
from gateway.admin.guard import COOKIE, SESSION_S
from gateway.admin.savings_views import savings_filter
from gateway.deployments.progress import Attempt
from gateway.journey.outcomes import Rejection
from gateway.settings import ResponseSettings, SavingsSettings
from gateway.telemetry.hosts import Hosts
from gateway.telemetry.parts import GatewayPart, PartHealth
from policies import WindowKind
from tests.admin.seed import HOSTILE, seed
from tests.admin.world import ADMIN_KEY, LOCAL, NOW_S, PAGES, REMOTE, World, open_world
from tests.services import run_redis
from tests.telemetry.records import hit, miss

OWN = {"sec-fetch-site": "same-origin"}
_MONTHLY = SavingsSettings(running_usd_per_month=31, target_usd_per_month=40.3)


@pytest.fixture
async def world(redis: Redis, tmp_path: Path) -> AsyncIterator[World]:
    async with open_world(redis, tmp_path) as opened:
        yield opened


def client_of(world: World, *, is_admin: bool = True) -> httpx.AsyncClient:
    cookies = {COOKIE: world.session} if is_admin else {}
    transport = httpx.ASGITransport(app=world.app)
    return httpx.AsyncClient(transport=transport, base_url="http://gateway.test", cookies=cookies)


@pytest.fixture
async def browser(world: World) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(world) as opened:
        yield opened


async def test_strangers_see_the_door_and_nothing_else(world: World) -> None:
    """Without a session every page leads to the login form, no form changes anything, and the static files are public."""
    team_id = (await world.accounts.create_team("search")).id
    async with client_of(world, is_admin=False) as stranger:
        for page in (*PAGES, f"/teams/{team_id}"):
            reply = await stranger.get(f"/admin{page}")
            assert (reply.status_code, reply.headers["location"].split("?")[0]) == (303, "/admin/login")
        for form in (
            "/teams",
            f"/teams/{team_id}/delete",
            f"/teams/{team_id}/keys",
            "/cache/purge",
            "/cache/try",
            "/cache/clear",
            "/cache/report",
            "/answer",
        ):
            reply = await stranger.post(f"/admin{form}", data={"name": "search", "all": "on"}, headers=OWN)
            assert (reply.status_code, reply.headers["location"]) == (303, "/admin/login")
        assert [team.name for team in await world.accounts.list_teams()] == ["search"]
        assert await world.accounts.list_keys() == []
        assert (await stranger.get("/admin/static/admin.css")).headers["content-type"].startswith("text/css")
        assert (await stranger.get("/favicon.ico")).headers["content-type"] == "image/svg+xml"
        for name in ("nothing.css", "..%2Fguard.py", "..%2f..%2fsettings.py"):
            assert (await stranger.get(f"/admin/static/{name}")).status_code == 404
        door = (await stranger.get("/admin/login")).text
        assert str(world.admin.settings.data_dir) not in door


async def test_the_login_sets_a_careful_cookie(world: World) -> None:
    """The right key opens a session of 12 hours that scripts and other sites can't use; the wrong one opens nothing."""
    async with client_of(world, is_admin=False) as stranger:
        wrong = await stranger.post("/admin/login", data={"key": "wrong"}, headers=OWN)
        assert wrong.status_code == 401
        assert "set-cookie" not in wrong.headers
        right = await stranger.post("/admin/login?next=/admin/cache", data={"key": ADMIN_KEY}, headers=OWN)
        assert (right.status_code, right.headers["location"]) == (303, "/admin/cache")
        cookie = right.headers["set-cookie"].lower()
        assert all(word in cookie for word in ("httponly", "samesite=strict", "path=/admin", f"max-age={SESSION_S}"))
        assert ADMIN_KEY not in cookie
        out = await stranger.post("/admin/logout", headers=OWN)
        assert 'sameway_admin=""' in out.headers["set-cookie"]


@pytest.mark.parametrize(
    "target", ["https://evil.test", "//evil.test", "/admin/../v1", "/\\evil.test", "/administer", "/admin/\\\\x"]
)
async def test_the_login_leads_nowhere_else(world: World, target: str) -> None:
    """A `next` that is no page of the dashboard is ignored."""
    async with client_of(world, is_admin=False) as stranger:
        reply = await stranger.post("/admin/login", params={"next": target}, data={"key": ADMIN_KEY}, headers=OWN)
        location = reply.headers["location"]
        assert httpx.URL("http://gateway.test").join(location).host == "gateway.test"
        assert location == "/admin" or target == "/admin/../v1"


async def test_another_sites_form_changes_nothing(world: World, browser: httpx.AsyncClient) -> None:
    """A POST with the session but from elsewhere is refused, on every form."""
    for headers in ({"origin": "https://evil.test"}, {"sec-fetch-site": "cross-site"}, {}, {"origin": "null"}):
        reply = await browser.post("/admin/teams", data={"name": "planted"}, headers=headers)
        assert reply.status_code == 403, headers
    assert await world.accounts.list_teams() == []


async def test_every_page_has_its_headers_its_title_and_its_twin(world: World, browser: httpx.AsyncClient) -> None:
    """Empty and full, each page answers, allows no foreign script, is not cached, and links to JSON that answers too."""
    for fill in (False, True):
        ids = await seed(world) if fill else {}
        for page in (*PAGES, *(f"/teams/{team_id}" for team_id in ids.values())):
            reply = await browser.get(f"/admin{page}")
            assert reply.status_code == 200, page
            policy = reply.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe-inline" not in policy
            assert reply.headers["cache-control"] == "no-store"
            assert re.search(r"<title>[^<]+ · Sameway</title>", reply.text)
            assert 'style="' not in reply.text
            assert not re.search(r"(?:src|href)=\"(?:https?:)?//", reply.text)
            twins = re.findall(r'href="(/admin/api/[^"]+)"[^>]*>[^<]*JSON', reply.text)
            assert twins, page
            for twin in twins:
                assert (await browser.get(twin)).headers["content-type"] == "application/json", twin


async def test_hostile_text_is_text(world: World, browser: httpx.AsyncClient) -> None:
    """A prompt, a team's name, a model's error: whatever they hold is escaped wherever it shows."""
    team_id = (await world.accounts.create_team(f"a{HOSTILE}")).id
    await world.accounts.create_key(team_id, HOSTILE)
    await world.cache_answer(team_id, HOSTILE)
    attempts = (Attempt(HOSTILE, HOSTILE, 1.0), Attempt("local", "ok", 1.0))
    record = miss(
        at_s=NOW_S, team_id=team_id, team=HOSTILE, key=HOSTILE, alias=HOSTILE, error=HOSTILE, why=HOSTILE, attempts=attempts,
        similarity=0.9, miss_reason=HOSTILE, nearest=HOSTILE, store=HOSTILE, deployment=HOSTILE,
    )  # fmt: skip
    world.stats.add(record)
    await world.stats.flush()
    world.parts.append(GatewayPart(HOSTILE, PartHealth.DOWN, HOSTILE))
    tried = {"team_id": str(team_id), "model": "small", "prompt": HOSTILE}
    replies = [await browser.get(f"/admin{page}") for page in (*PAGES, f"/teams/{team_id}")]
    replies.append(await browser.post("/admin/cache/try", data=tried, headers=OWN))
    replies.append(await browser.post("/admin/cache/purge", data={"text": HOSTILE}, headers=OWN))
    replies.append(await browser.post("/admin/teams", data={"name": HOSTILE, "tokens_per_min": HOSTILE}, headers=OWN))
    assert sum("&lt;script&gt;" in reply.text for reply in replies) >= 8
    for reply in replies:
        assert "<script>" not in reply.text
        assert "<img src=x" not in reply.text


async def test_the_overview_says_what_was_saved_and_what_is_wrong(world: World, browser: httpx.AsyncClient) -> None:
    """The answer comes first, in words; problems come before the charts, and good health is said too."""
    assert "Nothing was asked" in (await browser.get("/admin")).text
    assert "Everything works." in (await browser.get("/admin")).text
    for record in (miss(at_s=NOW_S), hit(at_s=NOW_S), hit(at_s=NOW_S), hit(at_s=NOW_S, cache="semantic")):
        world.stats.add(record)
    await world.stats.flush()
    world.parts.append(GatewayPart("cache worker", PartHealth.DOWN, "the worker is away"))
    text = re.sub(r"<[^>]+>", "", (await browser.get("/admin?window=1h")).text)
    assert "75% of answers in the last hour came from the cache." in text
    assert "That saved $0.00036 of $0.00048 and 894 ms of waiting." in text
    assert "cache worker is down: the worker is away" in text
    assert "Everything works." not in text
    world.stats.add(hit(at_s=NOW_S, cache="coalesced"))
    await world.stats.flush()
    text = re.sub(r"<[^>]+>", "", (await browser.get("/admin?window=1h")).text)
    assert "80% of answers in the last hour came from the cache or a shared generation." in text


async def test_the_hit_rates_bar_shows_what_it_counts(world: World, browser: httpx.AsyncClient) -> None:
    """Hits and misses are in the bar and under it, each with its number; the rest is named beside."""
    for fields in ({}, {"cache": "bypass"}, {"status": 400}, {"status": 400}, {"status": 502}):
        world.stats.add(miss(at_s=NOW_S, **fields))
    world.stats.add(hit(at_s=NOW_S))
    await world.stats.flush()
    page = (await browser.get("/admin/cache")).text
    card = page[page.index("Hits, last 24 h") : page.index("Sizes</h2>")]
    assert "<b>50%</b> of 2 answers" in card
    assert set(re.findall(r'<rect class="(\w+)"', card)) == {"exact", "miss"}
    assert set(re.findall(r'class="kind (\w+)"', card)) == {"exact", "semantic", "coalesced", "miss"}
    assert "Not counted here: 1 not asked of the cache, 2 refused, 1 failed." in card


async def test_near_misses_open_and_say_where_the_texts_are(world: World, browser: httpx.AsyncClient) -> None:
    """The page names its bound and the setting that shows texts; the link leads to the one request, open."""
    world.stats.add(miss(at_s=NOW_S, request_id="req_near", similarity=0.91, miss_reason="numbers"))
    world.stats.add(miss(at_s=NOW_S, request_id="req_far", similarity=0.31, miss_reason="far"))
    await world.stats.flush()
    page = (await browser.get("/admin/cache")).text
    assert "a similarity of 0.6 or more" in page
    assert "only where the setting <code>log_prompts</code> is on" in page
    table = page[page.index('id="near-misses"') :]
    assert "req_far" not in table
    (link,) = set(re.findall(r'href="(/admin/requests\?request_id=[^"]+)"', table))
    assert 'id="route-req_near" open' in (await browser.get(link)).text
    assert " open>" not in (await browser.get("/admin/requests")).text


async def test_sameways_own_requests_are_shown_when_asked_for(world: World, browser: httpx.AsyncClient) -> None:
    """Questions to verifiers and checks are no requests of applications; a link to one of them opens it."""
    for route in ("chat", "verify", "check", "refresh"):
        world.stats.add(miss(at_s=NOW_S, request_id=f"req_{route}", route=route))
    await world.stats.flush()

    async def shown(query: str) -> set[str]:
        return set(re.findall('id="route-req_([a-z]+)"', (await browser.get(f"/admin/requests?{query}")).text))

    assert await shown("") == await shown("asked_by=x") == {"chat"}
    assert await shown("asked_by=sameway") == {"verify", "check", "refresh"}
    assert await shown("asked_by=all") == {"chat", "verify", "check", "refresh"}
    assert await shown("request_id=req_verify") == {"verify"}
    api = (await browser.get("/admin/api/routes?asked_by=sameway")).json()["routes"]
    assert {one["route"] for one in api} == {"verify", "check", "refresh"}


async def test_many_teams_are_on_several_pages_and_found_by_name(world: World, browser: httpx.AsyncClient) -> None:
    """Twenty a page, by id; a part of the name in any case finds a team."""
    for number in range(23):
        await world.accounts.create_team(f"Team {number}!")
    page = (await browser.get("/admin/teams")).text
    assert ("Team 19!" in page, "Team 20!" in page) == (True, False)
    (more,) = re.findall(r'href="(/admin/teams\?[^"]*)"', page)
    page = (await browser.get(html.unescape(more))).text
    assert ("Team 19!" in page, "Team 22!" in page, "More teams" in page) == (False, True, False)
    page = (await browser.get("/admin/teams?name=tEAM+2")).text
    assert re.findall(r">(Team \d+!)<", page) == ["Team 2!", "Team 20!", "Team 21!", "Team 22!"]
    assert "No such team" in (await browser.get("/admin/teams?name=none")).text
    assert "No such team after that" in (await browser.get(f"/admin/teams?cursor={2**31 - 1}")).text


async def test_a_key_may_be_for_the_embedder_alone(world: World, browser: httpx.AsyncClient) -> None:
    """Every name that requests may use can be chosen for a key."""
    team = await world.accounts.create_team("readers")
    page = (await browser.get(f"/admin/teams/{team.id}")).text
    for name in world.admin.settings.names:
        assert f'name="models" value="{name}"' in page


async def test_a_host_that_is_behind_shows(world: World, browser: httpx.AsyncClient, tmp_path: Path) -> None:
    """Another version or configuration is a problem on the overview, a host that fell silent is listed, one that
    left or writes otherwise is not.
    """
    changed = world.admin.settings.model_copy(update={"data_dir": tmp_path / "b", "models": {}})
    alike = world.admin.settings.model_copy(update={"data_dir": tmp_path / "c"})
    other, third = Hosts(changed, world.redis), Hosts(alike, world.redis)
    for one in (world.admin.hosts, other, third):
        await one.beat()
    here, behind, same = (await browser.get("/admin/api/hosts")).json()["hosts"]
    assert (here["is_here"], here["workers"], here["configs"]) == (True, 1, same["configs"])
    problems = [one["message"] for one in (await browser.get("/admin/api/status")).json()["problems"]]
    (message,) = [one for one in problems if "another configuration" in one]
    assert behind["name"] in message
    assert behind["configs"][0] in (page := (await browser.get("/admin/deployments")).text)
    assert "this one" in page
    await third.leave()
    for field, value in (await world.redis.hgetall("sameway:hosts")).items():
        if field.startswith(behind["name"].encode()):  # it was killed a minute ago
            at_s, _, state = value.partition(b" ")
            await world.redis.hset("sameway:hosts", field, b"%d %b" % (int(at_s) - 60, state))
    await world.redis.hset("sameway:hosts", "later:/x 1", b'1800000000 {"version": 3}')
    assert [one.is_away for one in await world.admin.hosts.all()] == [False, True]
    assert "another configuration" not in (await browser.get("/admin/api/status")).text


async def test_a_teams_budget_is_projected_at_the_last_days_rate(world: World, browser: httpx.AsyncClient) -> None:
    """The list of teams and the API say what a month's budget comes to, and when it is used up."""
    team_id = (await world.accounts.create_team("search")).id
    await world.accounts.create_budget(team_id, WindowKind.MONTH, 10_000_000)
    await world.spend(team_id, 6_000_000)
    world.stats.add(miss(at_s=NOW_S, team_id=team_id, cost_microusd=2_000_000))
    await world.stats.flush()
    (young,) = (await browser.get("/admin/api/budgets")).json()["budgets"]
    assert young["per_day"] is None
    await world.accounts.database.write(sa.update(schema.teams).values(created_at_s=NOW_S - 86_400))
    (budget,) = (await browser.get("/admin/api/budgets")).json()["budgets"]
    assert budget["per_day"] == 2_000_000
    days_left = (budget["resets_at_s"] - NOW_S) / 86_400
    assert budget["projected"] == pytest.approx(6_000_000 + 2_000_000 * days_left)
    assert budget["used_up_at_s"] == NOW_S + 2 * 86_400
    page = (await browser.get("/admin/teams")).text
    assert "At $2.00 a day" in page
    assert f"{budget['projected'] / 10_000_000:.0%} of it" in page


async def test_a_total_budget_never_starts_over(world: World, browser: httpx.AsyncClient) -> None:
    """A spent budget says until when: its window's end, or, where it has none, until somebody raises it."""
    for window, words in (("month", "only cached answers until then"), ("total", "until the limit is raised")):
        team_id = (await world.accounts.create_team(window)).id
        await world.accounts.create_budget(team_id, WindowKind(window), 100)
        await world.spend(team_id, 100)
        assert words in (await browser.get(f"/admin/teams/{team_id}")).text
    assert '<span class="muted">in total</span>' in (await browser.get("/admin/teams")).text


async def test_a_request_says_why_it_went_where_it_went(world: World, browser: httpx.AsyncClient) -> None:
    """The page shows the reasons, and its filters narrow it."""
    attempts = (Attempt("api", "no first token within 5.0 s", 5_000.0), Attempt("local", "ok", 80.0))
    near = {"similarity": 0.91, "miss_reason": "numbers"}
    world.stats.add(miss(request_id="req_a", why="fastest of 2", attempts=attempts, **near))
    world.stats.add(hit(request_id="req_b"))
    why = "1500 µUSD, TTFT 12 ms, 34 ms in all"
    world.stats.add(miss(request_id="req_d", why=why, rejected=(Rejection("dear", "an expected 90000 µUSD"),)))
    unknown = {"alias": "", "asked": "<b>gpt-9", "status": 404, "error": "model_not_found"}
    world.stats.add(miss(request_id="req_e", refusal="The model `<b>gpt-9` does not exist", **unknown))
    world.stats.add(miss(request_id="req_f", status=429, error="insufficient_quota", refusal="it resets in 8 d 14 h"))
    await world.stats.flush()
    page = (await browser.get("/admin/requests")).text
    for words in (
        "fastest of 2",
        "no first token within 5.0 s",
        "numbers, dates or units differ",
        "2 attempts",
        "$0.0015, TTFT 12 ms",
        "an expected $0.09",
        "<b>&lt;b&gt;gpt-9</b>",
        "The model `&lt;b&gt;gpt-9` does not exist",
        "it resets in 8 d 14 h",
    ):
        assert words in page
    assert "µUSD" not in page
    narrowed = (await browser.get("/admin/requests?outcome=failover")).text
    assert "req_a" in narrowed
    assert "req_b" not in narrowed
    assert "No recent request matches." in (await browser.get("/admin/requests?request_id=req_c")).text


async def test_a_request_says_where_its_time_and_money_went(world: World, browser: httpx.AsyncClient) -> None:
    """Each part of the time, with its share of the whole; the parts of the cost at the deployment's prices; what to do."""
    times = {"received_ms": 40.0, "exact_ms": 2.0, "semantic_ms": 60.0, "reserve_ms": 3.0, "queued_ms": 55.0}
    said = {"verifier": "small", "verdict": "no", "verify_ms": 50.0}
    attempts = (Attempt("small@api", "ok", 200.0, at_ms=120.0, ttft_ms=80.0),)
    asked = {"deployment": "small@api", "prompt_tokens": 1_000, "completion_tokens": 500, "miss_reason": "unsure"}
    asked |= {"user": "<b>ann", "session": "s1", "tags": '{"app":"web"}'}
    world.stats.add(miss(request_id="req_slow", attempts=attempts, duration_ms=320.0, **times, **said, **asked))
    await world.stats.flush()
    (route,) = (await browser.get("/admin/api/routes")).json()["routes"]
    assert [(one["name"], one["at_ms"], one["duration_ms"]) for one in route["stages"]] == [
        ("receive", -40.0, 40.0),
        ("exact lookup", 0.0, 2.0),
        ("semantic lookup", 2.0, 10.0),
        ("verifier", 12.0, 50.0),
        ("reserve", 62.0, 3.0),
        ("queue", 65.0, 55.0),
        ("small@api", 120.0, 200.0),
    ]
    page = (await browser.get("/admin/requests")).text
    for words in (
        "semantic lookup",
        "55 ms",
        "The verifier small: no.",
        "of which 1,000 make",
        "of which 500 make",
        "user &lt;b&gt;ann",
    ):
        assert words in page
    assert "name one in" not in page
    world.stats.add(miss(request_id="req_unasked", miss_reason="words"))
    await world.stats.flush()
    assert "A verifier can: name one in" in (await browser.get("/admin/requests")).text


async def test_deployments_tell_how_they_are(world: World, browser: httpx.AsyncClient) -> None:
    """An engine's memory, what it reused and guessed; a green light only for what answered last."""
    asked = {"small@api": None, "failing": False}
    more = [LOCAL.model_copy(update={"name": name, "is_available": one, "engine": None}) for name, one in asked.items()]
    world.deployments = [LOCAL, *more]
    page = (await browser.get("/admin/deployments")).text
    figures = dict(re.findall(r"<dt>([^<]+)</dt><dd>([^<]+)</dd>", page.split("The engine since its start")[1]))
    assert (figures["KV in use"], figures["KV kept for reuse"], figures["of them reused"]) == ("25%", "50%", "75%")
    assert (figures["Reads"], figures["Guesses right"], figures["Preempted"]) == ("640 tokens/s", "29 of 40", "2")
    assert page.count("The engine since its start") == 1
    assert 'class="health unasked">small@api' in page
    assert 'class="health down">failing' in page
    assert 'class="health ok">small@local' in page


async def test_a_deployment_that_refuses_every_request_is_marked(world: World, browser: httpx.AsyncClient) -> None:
    """A refused key is a tag beside the deployment's name, and a problem on the overview."""
    denial, reason = "key refused (HTTP 401)", "key refused (HTTP 401), the next request tries it"
    world.deployments = [LOCAL.model_copy(update={"is_available": False, "reason": reason, "denial": denial})]
    assert f'<span class="tag bad">{denial}</span>' in (await browser.get("/admin/deployments")).text
    assert reason in (await browser.get("/admin")).text


async def test_forms_show_what_was_wrong_and_keep_what_was_typed(world: World, browser: httpx.AsyncClient) -> None:
    """Each refusal has its status, its words beside the form, and the values as they were."""
    team_id = (await world.accounts.create_team("search")).id
    (budget,) = [await world.accounts.create_budget(team_id, *args) for args in _BUDGETS]
    forms: list[tuple[str, dict[str, str], int, str]] = [
        ("/teams", {"name": "search"}, 409, "exists already"),
        ("/teams", {"name": "x", "requests_per_min": "many"}, 400, "Requests per minute: expected a whole number"),
        ("/teams", {"name": ""}, 400, "Name:"),
        (f"/teams/{team_id}", {"name": "search", "semantic_error_max_percent": "200"}, 400, "Wrong semantic hits"),
        (f"/teams/{team_id}/keys", {"name": "k", "expires_in_days": "soon"}, 400, "Expires in: expected a number"),
        (f"/teams/{team_id}/budgets", {"window": "day", "limit_usd": "1.1234567"}, 400, "at most 6 decimals"),
        (f"/teams/{team_id}/budgets", {"window": "year", "limit_usd": "1"}, 400, "Window:"),
        (f"/teams/{team_id}/budgets/{budget.id}", {"limit_usd": ""}, 400, "expected dollars"),
        (f"/teams/{team_id}/delete", {"name": "Search"}, 400, "to delete it"),
        (
            f"/teams/{team_id}/budgets",
            {"window": "day", "limit_usd": "2"},
            409,
            "a hard day budget of this team exists already",
        ),
        ("/cache/purge", {}, 400, "Fill in at least one field"),
        ("/cache/purge", {"all": "on", "model": "small"}, 400, "not both"),
        ("/cache/purge", {"id": "xyz"}, 400, "Entry id:"),
        ("/cache/purge", {"team_id": "77"}, 404, "There is no team 77"),
        ("/cache/try", {"team_id": str(team_id), "model": "small"}, 400, "Prompt:"),
        ("/teams/77", {"name": "x"}, 404, "There is no team 77"),
        ("/teams/77/keys", {"name": "x"}, 404, "There is no team 77"),
    ]
    for path, data, status, words in forms:
        reply = await browser.post(f"/admin{path}", data=data, headers=OWN)
        assert reply.status_code == status, (path, data, reply.status_code)
        assert words.lower() in reply.text.lower(), (path, data)
        for name, value in data.items():
            is_kept = status != 404 and name != "window" and not path.endswith("/delete")
            assert not is_kept or value in reply.text, (path, value)
    assert (await browser.get("/admin/teams/77")).status_code == 404
    assert (await browser.get(f"/admin/teams/{2**70}")).status_code == 404


_BUDGETS = ((WindowKind.DAY, 1_000_000),)


async def test_a_new_team_takes_its_budget(world: World, browser: httpx.AsyncClient) -> None:
    """One form makes both or neither, says what a request holds, and warns of a budget below that."""
    page = (await browser.get("/admin/teams")).text
    assert "holds <b>$0.00247</b> for <code>small</code> (an answer of up to 4,096 tokens)" in page
    new = {"name": "poor", "window": "day", "limit_usd": "0.001", "kind": "hard"}
    for changes in ({"limit_usd": "1,5"}, {"window": "year"}, {"name": ""}):
        reply = await browser.post("/admin/teams", data={**new, **changes}, headers=OWN)
        assert reply.status_code == 400
        assert await world.accounts.list_teams() == []
    reply = await browser.post("/admin/teams", data=new, headers=OWN)
    assert reply.status_code == 303
    (budget,) = await world.accounts.list_budgets()
    assert (budget.limit, budget.window, budget.is_hard) == (1_000, WindowKind.DAY, True)
    team = (await browser.get(f"/admin/teams/{budget.team_id}")).text
    assert "Too small for one request: a short question to small" in team
    assert "too small for one request to small" in (await browser.get("/admin/teams")).text
    for changes in (
        {"name": "rich", "limit_usd": "0.01"},
        {"name": "soft", "kind": "soft"},
        {"name": "free", "limit_usd": ""},
    ):
        reply = await browser.post("/admin/teams", data={**new, **changes}, headers=OWN)
        assert "Too small" not in (await browser.get(reply.headers["location"])).text
    assert len(await world.accounts.list_budgets()) == 3


async def test_what_is_assumed_is_shown_as_assumed(world: World, browser: httpx.AsyncClient) -> None:
    """Abilities and a price that no table and no setting has are not shown as facts."""
    page = (await browser.get("/admin/deployments")).text
    assert "Assumed to do" not in page
    assert "counted as free" not in page
    world.deployments[1] = REMOTE.model_copy(update={"are_capabilities_assumed": True, "is_price_known": False})
    page = (await browser.get("/admin/deployments")).text
    assert page.count("Assumed to do") == 1
    assert '<span class="tag assumed">json schema</span>' in page
    assert "counted as free" in page


async def test_many_models_are_shown_those_in_trouble_first(world: World, browser: httpx.AsyncClient) -> None:
    """Fifteen models a page, and one by its name, to which its problem leads; what a server said of an error is read from its body;
    the answer to a form is not renewed by a page that has none."""
    why = 'HTTP 500: {"error": {"message": "the model crashed", "type": "server_error"}}'
    named = [{"name": f"m{n:02}@api", "alias": f"m{n:02}"} for n in range(40)]
    away = {"is_available": False, "reason": why}
    world.deployments[:] = [REMOTE.model_copy(update=one | (away if n >= 28 else {})) for n, one in enumerate(named)]
    world.parts[:] = [GatewayPart(one["name"], PartHealth.OK) for one in named]
    page = (await browser.get("/admin/deployments")).text
    assert re.findall(r"<h2>(m\d+)</h2>", page) == [f"m{n}" for n in range(28, 40)] + ["m00", "m01", "m02"]
    assert page.count("HTTP 500: the model crashed</p>") == 12
    overview = (await browser.get("/admin")).text
    assert "2 more problems" in overview
    assert "and 10 more deployments" in overview
    (link,) = re.findall(r'href="([^"]+)">Nobody can answer m28:', overview)
    page = (await browser.get(link)).text
    assert re.findall(r"<h2>(m\d+)</h2>", page) == ["m28"]
    assert " data-live>" in page
    (known,) = [name for alias in world.admin.fleet.aliases.values() for name in alias.deployments][:1]
    world.deployments.append(REMOTE.model_copy(update={"name": known, "alias": "z"}))
    page = (await browser.post("/admin/deployments/try", data={"name": known}, headers=OWN)).text
    assert "It did not answer" in page
    assert " data-live>" not in page


async def test_money_is_read_and_shown_exactly(world: World, browser: httpx.AsyncClient) -> None:
    """What is typed in dollars is the same in µUSD, and the form shows it again as it was."""
    team_id = (await world.accounts.create_team("search")).id
    for text, microusd, shown in (
        ("25", 25_000_000, "25.00"),
        ("$1,000,000", 1_000_000_000_000, "1000000.00"),
        ("0.0005", 500, "0.0005"),
        (".1", 100_000, "0.10"),
        ("0.000001", 1, "0.000001"),
        ("1,000.50", 1_000_500_000, "1000.50"),
        ("$ 12", 12_000_000, "12.00"),
        ("5.", 5_000_000, "5.00"),
    ):
        data = {"window": "month", "limit_usd": text}
        reply = await browser.post(f"/admin/teams/{team_id}/budgets", data=data, headers=OWN)
        assert reply.status_code == 303, text
        (budget,) = await world.accounts.list_budgets(team_id)
        assert budget.limit == microusd
        assert f'value="{shown}"' in (await browser.get(f"/admin/teams/{team_id}")).text
        await world.accounts.delete_budget(budget.id)


_UNCLEAR = (
    "0,05", "1,5", "1.000,50", "12,50", "1,00", "1,0000", "1000,000", "0,500", ",500", "1,,000", "1,000,00", "1.000.000",
    "1.5,000", "1.1234567", "1 000", "-1", "1e3", "$", ".", "٣", "1234567890", "free",
)  # fmt: skip


async def test_unclear_money_is_refused(world: World, browser: httpx.AsyncClient) -> None:
    """A decimal comma is never read as grouping, in a new budget or in a changed one: nothing changes, and the form says why."""
    team_id = (await world.accounts.create_team("search")).id
    budget = await world.accounts.create_budget(team_id, *_BUDGETS[0])
    for text in _UNCLEAR:
        for path in ("", f"/{budget.id}"):
            data = {"window": "month", "limit_usd": text}
            reply = await browser.post(f"/admin/teams/{team_id}/budgets{path}", data=data, headers=OWN)
            assert reply.status_code == 400, (text, path)
            assert "Limit: expected dollars with at most 6 decimals" in reply.text
    assert await world.accounts.list_budgets(team_id) == [budget]


async def test_counts_take_a_comma_only_between_thousands(world: World, browser: httpx.AsyncClient) -> None:
    """`1,200` a minute is 1200; `1,5` or `1.200` is a question, not a number."""
    team_id = (await world.accounts.create_team("search")).id
    for text, count in (("1200", 1_200), ("1,200", 1_200), ("1,200,000", 1_200_000)):
        data = {"name": "search", "tokens_per_min": text}
        reply = await browser.post(f"/admin/teams/{team_id}", data=data, headers=OWN)
        assert reply.status_code == 303, text
        (team,) = await world.accounts.list_teams()
        assert team.tokens_per_min == count
    for text in ("1,5", "12,00", "1.200", "0,500", "1 200", "1,2000", "٣"):
        data = {"name": "search", "tokens_per_min": text}
        reply = await browser.post(f"/admin/teams/{team_id}", data=data, headers=OWN)
        assert reply.status_code == 400, text
        assert "Tokens per minute: expected a whole number" in reply.text
    for text in ("1,5", "0,05"):
        key = {"name": "k", "expires_in_days": text}
        reply = await browser.post(f"/admin/teams/{team_id}/keys", data=key, headers=OWN)
        assert reply.status_code == 400, text


async def test_without_redis_the_pages_say_so(tmp_path: Path) -> None:
    """The overview still opens and names the trouble; pages that are nothing without Redis answer 503 in words."""
    with run_redis() as server:
        redis = Redis.from_url(server.url, retry=None)
        async with open_world(redis, tmp_path) as world, client_of(world) as browser:
            team_id = (await world.accounts.create_team("search")).id
            await world.accounts.create_budget(team_id, *_BUDGETS[0])
            server.stop()
            world.parts[0] = GatewayPart("redis", PartHealth.DOWN, "connection refused")
            overview = await browser.get("/admin")
            assert overview.status_code == 200
            assert "redis is down: connection refused" in overview.text
            team = await browser.get(f"/admin/teams/{team_id}")
            assert team.status_code == 200
            assert "not known while Redis is away" in team.text
            assert ">$0<" not in (await browser.get("/admin/teams")).text
            for page in ("/requests", "/cache"):
                reply = await browser.get(f"/admin{page}")
                assert reply.status_code == 503
                assert "Redis does not answer" in reply.text
        await redis.aclose()


async def test_the_quality_page_shows_what_is_wrong_and_mends_it(world: World, browser: httpx.AsyncClient) -> None:
    """The measured error beside its bound, a banner where it has tightened itself, and what is out of service, with its buttons."""
    ids = await seed(world)
    page = (await browser.get("/admin/quality")).text
    assert "tightened to" in page
    assert "with all answers equal to it" in page
    assert "checked, numbers differ" in page
    assert "it has tightened itself" in (await browser.get("/admin")).text
    card = page.split('id="certificate"')[1].split("</section>")[0]
    assert "equality" not in card
    for text in ("60 checks (agreement 59)", "15 found wrong", "1 that no judge could tell"):
        assert text in card, text
    assert "a verifier allowed 60 hits: 5 of 20 checks wrong" in card
    (tight,) = [one for one in world.admin.truth.live if one.strictness < 1]
    assert (tight.team, tight.alias) == ("support", "small")
    names = re.findall(r'name="name" value="([0-9a-f]{50})"', page)
    assert len(names) == 2
    for name in names:
        reply = await browser.post(
            "/admin/cache/clear", data={"team_id": str(ids["search"]), "name": name}, headers=OWN
        )
        assert (reply.status_code, reply.headers["location"]) == (303, "/admin/quality?done=cleared")
    assert 'name="name"' not in (await browser.get("/admin/quality")).text
    assert (await browser.post("/admin/cache/clear", data={"name": "x"}, headers=OWN)).status_code == 400


async def test_the_quality_page_shows_what_questions_cost(world: World, browser: httpx.AsyncClient) -> None:
    """All questions of each model and their cost, those asked about a request apart; by team it leads to the ledger."""
    await seed(world)
    page = (await browser.get("/admin/quality")).text
    card = re.sub("<[^>]+>", " ", page[page.index('id="verifier"') : page.index('id="wrong"')])
    assert re.search(r"small\s+off\s+\d+\s+\d+% of lookups(\s+\d+){2}\s+3\s+\$0\.000095", card), card
    assert 'href="/admin/ledger?by=team"' in page


async def test_a_certificate_is_started_anew(world: World, browser: httpx.AsyncClient) -> None:
    """By the button; the audit log says so, and the team's page has the new one."""
    ids = await seed(world)
    where = {"team_id": str(ids["search"]), "model": "small"}
    reply = await browser.post("/admin/cache/certificate", data=where, headers=OWN)
    assert (reply.status_code, reply.headers["location"]) == (303, "/admin/quality?done=certified")
    assert "an admin asked for it" in (await browser.get(f"/admin/teams/{ids['search']}")).text
    assert "an admin asked for it" not in (await browser.get(f"/admin/teams/{ids['support']}")).text
    assert "new certificate: small" in (await browser.get("/admin/audit")).text
    assert (await browser.post("/admin/cache/certificate", data={"model": "x"}, headers=OWN)).status_code == 400


async def test_a_verdict_is_asked_for_beside_the_texts(world: World, browser: httpx.AsyncClient) -> None:
    """Right and Wrong stand under question and answer, escaped; not where a text is missing, nor where the answer is another."""
    team_id = (await world.accounts.create_team("search")).id
    entry = await world.cache_answer(team_id, HOSTILE, answer="<i>330 m</i>")
    fields = {"at_s": NOW_S, "team_id": team_id, "entry": entry.id}
    world.stats.add(hit(request_id="req_exact", **fields))
    world.stats.add(
        hit(request_id="req_near", cache="semantic", similarity=0.97, question="How <b>high</b>?", **fields)
    )
    world.stats.add(hit(request_id="req_blind", cache="semantic", similarity=0.97, **fields))
    world.stats.add(miss(request_id="req_old", **{**fields, "at_s": NOW_S - 3_600}))
    await world.stats.flush()

    async def look(id: str) -> httpx.Response:
        return await browser.post("/admin/answer", data={"id": id, "back": "/admin/requests"}, headers=OWN)

    exact, near, blind = [(await look(id)).text for id in ("req_exact", "req_near", "req_blind")]
    for page in (exact, near, blind):
        assert "&lt;i&gt;330 m&lt;/i&gt;" in page
        assert "<i>330" not in page
        assert "<script>document" not in page
    assert exact.count('value="wrong"') == near.count('value="wrong"') == 1
    assert "How &lt;b&gt;high&lt;/b&gt;?" in near
    assert 'value="wrong"' not in blind
    assert "log_prompts" in blind
    assert (await look("req_old")).status_code == 404  # the cache has a later answer there
    audit = (await browser.get("/admin/audit")).text
    assert audit.count("question and answer shown") == 3
    assert "req_near" in audit


async def test_filters_offer_names_of_the_past(world: World, browser: httpx.AsyncClient) -> None:
    """Models, deployments and teams that are gone are found in the records and the ledger that have them, and marked."""
    team_id = (await world.accounts.create_team("closed")).id
    gone = {"alias": "gpt-3", "attempts": (Attempt("davinci", "ok", 9.0),), "deployment": "davinci"}
    world.stats.add(miss(at_s=NOW_S, team_id=team_id, team="closed", **gone))
    await world.stats.flush()
    await world.spend(team_id, 100, alias="gpt-3", deployment="davinci")
    await world.accounts.delete_team(team_id)
    assert '<option value="gpt-3">gpt-3 (retired)</option>' in (await browser.get("/admin/cache")).text
    for page, team in (("requests", "closed (deleted)"), ("ledger", f"team {team_id} (deleted)")):
        text = (await browser.get(f"/admin/{page}")).text
        assert '<option value="gpt-3">gpt-3 (retired)</option>' in text
        assert '<option value="davinci">davinci (retired)</option>' in text
        assert f'<option value="{team_id}">{team}</option>' in text
        narrowed = (await browser.get(f"/admin/{page}?model=small")).text
        assert '<option value="gpt-3">gpt-3 (retired)</option>' in narrowed
        assert '<option value="never" selected>never</option>' in (await browser.get(f"/admin/{page}?model=never")).text


async def test_numbers_in_addresses_are_bounded(world: World, browser: httpx.AsyncClient) -> None:
    """A team or a cursor that no database can hold is no failure of the gateway."""
    for page, status in (("ledger?team_id=", 200), ("requests?team_id=", 200), ("audit?cursor=", 400)):
        assert (await browser.get(f"/admin/{page}{'9' * 30}")).status_code == status


async def test_a_request_that_failed_shows_what_it_cost(world: World, browser: httpx.AsyncClient) -> None:
    """As one that did not: the ledger has the money of a stream that broke off."""
    for status, microusd in ((502, 190), (200, 0)):
        world.stats.add(
            miss(at_s=NOW_S, status=status, error="upstream_broken" if status > 200 else "", cost_microusd=microusd)
        )
    await world.stats.flush()
    assert re.findall(r'class="n money">(.*?)</span>', (await browser.get("/admin/requests")).text) == [
        "free",
        "$0.000190",
    ]


async def test_the_ledger_has_dates_and_marks_estimates(world: World, browser: httpx.AsyncClient) -> None:
    """Each row has its date in UTC; what a deployment did not count is marked, with a word for it."""
    await world.spend(1, 100, 1)
    page = (await browser.get("/admin/ledger")).text
    assert ">2040-05-17 12:44:59</time>" in page
    assert "≈" not in page
    await world.spend(1, 200, 2, usage_estimated=True)
    page = (await browser.get("/admin/ledger")).text
    assert page.count('<abbr title="estimated">≈</abbr>') == 3
    assert "≈ is an estimate" in page


async def test_the_overview_counts_what_was_not_generated(world: World, browser: httpx.AsyncClient) -> None:
    """A hit saves the tokens of its answer from being generated, not those of its prompt."""
    world.stats.add(hit(at_s=NOW_S, prompt_tokens=148, completion_tokens=32))
    world.stats.add(miss(at_s=NOW_S, prompt_tokens=40, completion_tokens=11))
    await world.stats.flush()
    page = (await browser.get("/admin")).text
    assert "32 tokens not generated again" in page
    assert "40 tokens read, 11 generated" in page


async def test_an_admin_says_right_and_wrong(world: World, browser: httpx.AsyncClient) -> None:
    """Of any team's response, from the page where it is shown; a wrong exact answer leaves the cache."""
    team_id = (await world.accounts.create_team("search")).id
    entry = await world.cache_answer(team_id, "How tall is the Eiffel tower?")
    world.stats.add(hit(at_s=NOW_S, team_id=team_id, entry=entry.id, request_id="req_1"))
    await world.stats.flush()
    page = (await browser.get("/admin/requests")).text
    assert 'action="/admin/cache/report"' not in page
    assert 'action="/admin/answer"' in page
    for verdict, done in (("right", "right"), ("wrong", "wrong-purged")):
        said = {"id": "req_1", "verdict": verdict, "back": "/admin/requests"}
        reply = await browser.post("/admin/cache/report", data=said, headers=OWN)
        assert (reply.status_code, reply.headers["location"]) == (303, f"/admin/requests?done={done}")
    assert (await world.exact.stats()).entries == 0
    for data, status in (({"id": "req_2", "verdict": "wrong"}, 404), ({"id": "req_1", "verdict": "x"}, 400)):
        assert (await browser.post("/admin/cache/report", data=data, headers=OWN)).status_code == status
    away = {"id": "req_1", "verdict": "wrong", "back": "//elsewhere.test"}
    assert (
        (await browser.post("/admin/cache/report", data=away, headers=OWN))
        .headers["location"]
        .startswith("/admin/quality")
    )


async def test_the_savings_page_is_the_apis_waterfall(world: World, browser: httpx.AsyncClient) -> None:
    """Each step with its requests and amount, in words and in a bar; the baseline less the steps is what was spent."""
    ids = await seed(world)
    found = await savings_views.savings(world.admin, savings_filter(world.admin))
    assert found.baseline_microusd - sum(step.amount_microusd for step in found.steps) == found.spent_microusd
    assert {step.mechanism for step in found.steps if step.amount_microusd < 0} == {"prefix_write", "dearer_route"}
    assert found.unknown_requests == 15 + 1 + 3
    page = (await browser.get("/admin/savings")).text
    table = page[page.index('id="waterfall"') : page.index("</table>")]
    for step in found.steps:
        assert step.label.replace("'", "&#39;") in table
    assert table.count("<svg") == table.count('aria-hidden="true"') == len(found.steps) + 2
    of_team = await savings_views.savings(world.admin, savings_filter(world.admin, ids["support"]))
    assert [one.team for one in of_team.by_team] == ["support"]
    assert "Exact hits" not in (await browser.get(f"/admin/savings?team_id={ids['support']}")).text
    for query in (
        "from=x&until=0000-00-00",
        "from=2001-01-01&model=big",
        "until=1970-01-01",
        "from=0001-01-01&until=9999-12-31",
        "team_id=999",
        "model=%3Cb%3E",
    ):
        assert (await browser.get(f"/admin/savings?{query}")).status_code == 200


async def test_savings_are_held_against_a_target_by_calendar_month(world: World, browser: httpx.AsyncClient) -> None:
    """What running Sameway costs is taken off by the day, from the first team on and up to today; the page offers calendar months
    and says whether the target was met, of all traffic alone; the file has the lines that the page sums."""
    ids = await seed(world)
    parts = replace(world.admin, settings=world.admin.settings.model_copy(update={"savings": _MONTHLY}))
    may = {"from_s": 2_219_443_200.0, "until_s": 2_222_121_600.0}
    first = await savings_views.savings(parts, savings_filter(parts, **may))
    assert (first.running_microusd, first.target_microusd) == (1_000_000, 1_300_000)
    assert first.net_microusd == first.saved_microusd - 1_000_000
    assert first.is_target_met is True, first.net_microusd
    of_team = await savings_views.savings(parts, savings_filter(parts, ids["search"], **may))
    assert of_team.net_microusd is of_team.is_target_met is None
    page = (await browser.get("/admin/savings?from=2040-05-01&until=2040-05-31")).text
    assert re.search(r'from=2040-05-01&amp;until=2040-05-31" aria-current="true">May 2040<', page)
    assert "from=2040-04-01&amp;until=2040-04-30" in page
    api = "/admin/api/savings.csv?from_s=2219443200&amp;until_s=2222121600"
    assert api in page
    lines = list(csv.DictReader((await browser.get(html.unescape(api))).text.splitlines()))
    spent = sum(int(line["amount_microusd"]) for line in lines if line["line"] == "spent")
    assert spent == first.spent_microusd
    assert {line["day"][:7] for line in lines} == {"2040-05"}
    empty = (await browser.get("/admin/ledger?from=2040-04-01&until=2040-04-30")).text
    assert "No row matches." in empty
    world.now_s += 2 * 86_400
    later = await savings_views.savings(parts, savings_filter(parts, **may))
    assert (later.running_microusd, later.is_target_met) == (3_000_000, False)


async def test_the_ledger_is_summed_by_user_tag_and_others(world: World, browser: httpx.AsyncClient) -> None:
    """Those that cost most first, but days in their order; a tag's name leads to its values of the same days; a key is shown
    with its team; what goes with no model filters by none; text is text."""
    for number, (user, tags) in enumerate((("<b>ann", '{"app":"web"}'), ("", ""), ("<b>ann", '{"app":"cli"}'))):
        await world.spend(1, 1_000_000 * (1 + number), number=number, user=user, tags=tags)
    page = (await browser.get("/admin/ledger?by=user&model=none&team_id=1")).text
    table = page[page.index("<tbody>") : page.index("</tbody>")]
    assert table.index("&lt;b&gt;ann") < table.index("none given")
    assert "$4.00" in table
    assert "/admin/api/ledger/sums?team_id=1&amp;by=user" in page
    names = (await browser.get("/admin/ledger?by=tag&from=2040-05-01&until=2040-05-31")).text
    assert "by=tag&amp;from=2040-05-01&amp;until=2040-05-31&amp;tag=app" in names
    team = await world.accounts.create_team("search")
    made = await world.accounts.create_key(team.id, "prod")
    await world.spend(team.id, 1, 86_400_000, key_id=made.key.id)
    await world.ledger.append_hits(
        [
            HitsRow(
                id="h", at_ms=int(NOW_S * 1000), team_id=7, key_id=77, alias="small", source="exact", requests=2, unknown=0,
                baseline_microusd=50, session="run-1",
            )
        ]
    )  # fmt: skip
    keys = (await browser.get("/admin/ledger?by=key")).text
    assert "<th>prod <small>search</small>" in keys
    assert "<th>deleted key 77<" in keys
    sessions = (await browser.get("/admin/ledger?by=session&team_id=7")).text
    assert sessions.index("<th>run-1") < sessions.index("last 8 days")
    assert '<td class="n good" data-label="Saved">$0.00005<' in sessions
    assert "<th>none given<" in (await browser.get("/admin/ledger?by=session")).text
    days = (await browser.get("/admin/ledger?by=day")).text
    assert days.index("<th>2040-05-16") < days.index("<th>2040-05-17")
    values = (await browser.get("/admin/ledger?by=tag&tag=app")).text
    assert values.index("<th>cli") < values.index("<th>web")
    for query in ("by=key", "by=team", "by=day", "by=model&model=m", "by=deployment&team_id=9", "by=%3Cb%3E", "tag=x"):
        assert (await browser.get(f"/admin/ledger?{query}")).status_code == 200, query


async def test_a_teams_page_says_what_is_kept_for_it(world: World, browser: httpx.AsyncClient) -> None:
    """Responses and conversations with their bytes, as the API says them."""
    team = await world.accounts.create_team("keeper")
    store = ResponseStore(world.accounts.database, lambda: world.now_s, ResponseSettings(), lambda *_: None)
    await store.put(StoredResponse("resp_1", team.id, 1, None, b"x" * 1_000, b"y" * 1_000))
    await store.conversations.create(Conversation("conv_1", team.id, 1, 0.0, {}), [("msg_1", b"z" * 500)])
    page = (await browser.get(f"/admin/teams/{team.id}")).text
    assert re.search(r"Kept now: 1 response and 1 conversation, 3.2 KiB", page)
    found = (await browser.get(f"/admin/api/teams/{team.id}")).json()["stored"]
    assert found == {"responses": 1, "conversations": 1, "size_bytes": 2_500 + 3 * ROW_BYTES}
