"""The dashboard in Chromium: pages render clean at three widths and in both colour schemes, axe-core finds nothing in them,
and forms do what they say."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from cache import Purge
from gateway.journey.record import Record
from gateway.telemetry import measured_error
from gateway.telemetry.parts import GatewayPart, PartHealth
from tests.admin.browser import Visitor, chromium, serving, visiting
from tests.admin.seed import seed
from tests.admin.world import NOW_S, PAGES, World, open_world
from tests.services import run_redis
from tests.telemetry.records import hit, miss


@pytest.fixture
async def world(redis: Redis, tmp_path: Path) -> AsyncIterator[World]:
    async with open_world(redis, tmp_path) as opened:
        yield opened


async def test_pages_render_clean_at_three_widths_and_in_both_schemes(world: World) -> None:
    """No console error, no failed or foreign request, nothing outside its card, also where things are broken; a hostile prompt
    did not run; axe-core, with all its rules of WCAG 2 and of good practice, finds nothing, wide and light or narrow and dark."""
    pages = await _busy(world)
    async with (
        serving(world) as base,
        chromium() as browser,
        visiting(browser, base, reduced_motion="reduce") as visitor,
    ):
        await visitor.log_in()
        for page in (*pages, "/login"):
            await visitor.page.emulate_media(color_scheme="light")
            await visitor.page.set_viewport_size({"width": 1280, "height": 900})
            assert await visitor.open(f"/admin{page}") == 200
            assert await visitor.misfits(page) == []
            await visitor.page.evaluate("document.querySelectorAll('details').forEach((one) => one.open = true)")
            assert await visitor.barriers() == [], page
            assert await visitor.misfits(page) == []
            if page in (
                "",
                "/quality",
                "/deployments",
                "/savings",
            ):  # with all kinds of marks; axe takes a second a page
                await visitor.page.emulate_media(color_scheme="dark")
                assert await visitor.barriers("color-contrast") == [], (page, "dark")
            assert await visitor.page.title() != "owned"
        why = "Unreachable: ConnectionRefusedError: [Errno 111] Connect call failed ('203.0.113.254', 41987)"
        away = {"is_available": False, "reason": why, "denial": "its key was refused"}
        world.deployments[:] = [one.model_copy(update=away) for one in world.deployments]
        world.parts[:] = [GatewayPart(part.name, PartHealth.DOWN, why) for part in world.parts]
        for page in ("", "/deployments", "/teams/999"):
            await visitor.open(f"/admin{page}")
            assert await visitor.misfits(page) == []
            assert await visitor.barriers() == [], (page, "broken")
        assert [one for one in visitor.complaints if "404" not in one] == []


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_every_page_fits_and_excludes_nobody_in_every_state(tmp_path: Path) -> None:
    """Empty, busy and without Redis; narrow and dark, wide and light: nothing outside its card, and nothing for axe-core."""
    with run_redis() as server:
        redis = Redis.from_url(server.url, retry=None)
        async with (
            open_world(redis, tmp_path) as world,
            serving(world) as base,
            chromium() as browser,
            visiting(browser, base, reduced_motion="reduce") as visitor,
        ):
            await visitor.log_in()
            await _look_at(visitor, PAGES, "empty")
            pages = await _busy(world)
            await _look_at(visitor, pages, "busy")
            server.stop()
            world.parts[0] = GatewayPart("redis", PartHealth.DOWN, _AWAY)
            await _look_at(visitor, pages, "broken")
        await redis.aclose()


_AWAY = "ConnectionError: Redis is away: no connection: [Errno 111] Connect call failed ('203.0.113.254', 41987)"
_LONG = "accounts/fireworks/models/llama-v3p1-405b-instruct-with-a-long-context"


async def _busy(world: World) -> tuple[str, ...]:
    """Fills the world, also with names as long as real ones; answers its pages."""
    ids = await seed(world)
    at = {"at_s": NOW_S, "team_id": ids["search"], "team": "search", "alias": _LONG}
    world.stats.add(miss(**at, deployment=_LONG, cost_microusd=1_234, miss_reason="numbers", similarity=0.9))
    world.stats.add(miss(**at, route="verify"))
    world.stats.add_checks(ids["search"], _LONG, measured_error.checked(0.3, True, "agreement", is_verified=False))
    await world.stats.flush()
    teams = await world.accounts.list_teams()
    await world.admin.certificates.update(teams, "all-MiniLM-L6-v2", "f3a9")
    await world.spend(ids["search"], 1_234, 901, alias=_LONG, deployment=_LONG)
    world.deployments.append(world.deployments[-1].model_copy(update={"name": _LONG, "alias": _LONG, "model": _LONG}))
    return (*PAGES, f"/teams/{ids['search']}", f"/teams/{ids['batch jobs']}", "/ledger?by=day", "/ledger?by=model")


async def _look_at(visitor: Visitor, pages: tuple[str, ...], state: str) -> None:
    for page in pages:
        await visitor.open(f"/admin{page}")
        assert await visitor.misfits(page) == [], state
        await visitor.page.evaluate("document.querySelectorAll('details').forEach((one) => one.open = true)")
        assert await visitor.misfits(page) == [], state
        for scheme, width in (("dark", 420), ("light", 1280)):
            await visitor.page.emulate_media(color_scheme=scheme)
            await visitor.page.set_viewport_size({"width": width, "height": 900})
            assert await visitor.barriers() == [], (page, state, scheme, width)


async def test_a_new_admin_makes_a_team_a_budget_and_a_key(world: World) -> None:
    """From the empty dashboard to a working key, by clicking; the key is shown once and is gone after a reload."""
    async with serving(world) as base, chromium() as browser, visiting(browser, base) as visitor:
        page = visitor.page
        await visitor.log_in()
        await page.get_by_role("link", name="make a team and a key").click()
        await page.get_by_label("Name").fill("search")
        await page.get_by_label("Requests per minute").fill("1,200")
        await page.get_by_role("button", name="Make the team").click()
        await page.get_by_text("The team is there.").wait_for()
        (team,) = await world.accounts.list_teams()
        assert (team.name, team.requests_per_min) == ("search", 1200)

        await page.locator("#budgets").get_by_label("Limit, $").fill("12.50")
        await page.get_by_role("button", name="Add a budget").click()
        await page.get_by_text("$12.50 left").wait_for()
        (budget,) = await world.accounts.list_budgets()
        assert (budget.limit, budget.is_hard) == (12_500_000, True)

        await page.locator("#keys").get_by_label("Name").fill("production")
        await page.get_by_role("button", name="Make a key").click()
        plaintext = await page.locator("#plaintext").inner_text()
        identity = await world.accounts.find(plaintext)
        assert identity is not None
        assert identity.key.name == "production"
        await page.goto(f"{base}/admin/teams/{team.id}")
        assert plaintext not in await page.content()

        await page.get_by_text("Revoke", exact=True).click()
        await page.get_by_role("button", name="Revoke production now").click()
        await page.get_by_text("The key has stopped working.").wait_for()
        assert await world.accounts.find(plaintext) is None
        assert visitor.complaints == []


async def test_a_purge_asks_first_and_an_import_shows_its_result(world: World) -> None:
    """What would go is shown, nothing goes before the second button, and then exactly that is gone."""
    team_id = (await world.accounts.create_team("search")).id
    await world.cache_answer(team_id, "What is the capital of France?")
    await world.cache_answer(team_id, "How tall is the Eiffel tower?")
    async with serving(world) as base, chromium() as browser, visiting(browser, base) as visitor:
        page = visitor.page
        await visitor.log_in()
        await page.get_by_role("link", name="Cache").click()
        purge = page.locator("#purge")
        await purge.get_by_label("Prompt").fill("what is the CAPITAL of France?")
        await purge.get_by_role("button", name="Show what would go").click()
        await purge.get_by_text("1 answer matches").wait_for()
        assert (await world.exact.stats()).entries == 2
        await purge.get_by_role("button", name="Purge it").click()
        await purge.get_by_text("1 answer is gone").wait_for()
        assert (await world.exact.stats()).entries == 1

        await page.locator("#try").get_by_label("Prompt").fill("How tall is the Eiffel bridge?")
        await page.get_by_role("button", name="Try", exact=True).click()
        await page.locator("#try").get_by_text("not similar enough").first.wait_for()
        assert "How tall is the Eiffel tower?" in await page.locator("#try").inner_text()

        asked = {"model": world.admin.settings.names[0], "messages": [{"role": "user", "content": "When do you open?"}]}
        blank = b" " * (100 << 10)  # so many of them are two portions
        lines = [*([blank] * 60), json.dumps({"request": asked, "answer": "At nine."}).encode(), b"{}"]
        await page.get_by_text("Import answers").click()
        await page.get_by_label("File").set_input_files(
            {"name": "answers.jsonl", "mimeType": "application/x-ndjson", "buffer": b"\n".join(lines)}
        )
        await page.get_by_role("button", name="Import").click()
        await page.get_by_text("62 lines: 1 stored, 0 there already, 1 refused.").wait_for()
        assert "Line 62: expected `entry`" in await page.locator("#import").inner_text()
        stored = [entry async for entries in world.exact.entries(Purge()) for entry in entries]
        assert sorted(entry.is_curated for entry in stored) == [False, True]
        assert visitor.complaints == []


async def test_requests_come_by_themselves_and_disturb_nothing(world: World) -> None:
    """A new request is in front at once if the filters match; what is open, focused and selected stays; a pause holds what comes;
    a lost session leads to the door."""
    async with serving(world) as base, chromium() as browser, visiting(browser, base) as visitor:
        page = visitor.page
        await visitor.log_in()
        await visitor.open("/admin/requests?cache=exact")
        await page.get_by_text("No recent request matches.").wait_for()
        await _count_one(world, "req_first")
        await page.locator("#route-req_first summary").click()
        await page.evaluate("getSelection().selectAllChildren(document.querySelector('#route-req_first code'))")
        await _count_one(world, "req_other", miss(at_s=NOW_S, request_id="req_other"))
        await _count_one(world, "req_second")
        await page.locator("#route-req_second").wait_for()
        assert await page.locator("#routes > *").evaluate_all("(rows) => rows.map((row) => row.id)") == [
            "route-req_second",
            "route-req_first",
        ]
        assert await page.locator("#route-req_first").get_attribute("open") is not None
        assert await page.evaluate("document.activeElement.closest('details').id") == "route-req_first"
        assert await page.evaluate("getSelection().toString()") == "req_first"
        await page.get_by_role("button", name="Pause").click()
        await _count_one(world, "req_third")
        await page.evaluate("tail()")
        assert await page.locator("#route-req_third").count() == 0
        await page.get_by_role("button", name="Go on").click()
        await page.locator("#route-req_third").wait_for()
        world.now_s += 13 * 3_600
        await page.wait_for_url(re.compile("/admin/login"))


async def test_empty_pages_fit_and_a_refresh_disturbs_nobody(world: World) -> None:
    """Without teams and requests each page fits and excludes nobody; at 420 px a request shows how long it took; a refresh of
    the overview keeps what is focused, selected and open, and shows what changed."""
    async with serving(world) as base, chromium() as browser, visiting(browser, base, width=420) as visitor:
        await visitor.log_in()
        for page in PAGES:
            await visitor.open(f"/admin{page}")
            assert await visitor.misfits(page) == []
            if page in ("", "/requests"):
                assert await visitor.barriers() == [], page
        await visitor.open("/admin/requests")
        world.stats.add(hit(at_s=NOW_S, request_id="req_first", duration_ms=1_234.0))
        await world.stats.flush()
        await visitor.page.locator("#route-req_first").wait_for()
        assert await visitor.page.locator("#route-req_first summary").get_by_text("1.2 s", exact=True).is_visible()
        assert await visitor.overflow_px() <= 0
        await visitor.page.emulate_media(media="print", color_scheme="dark")  # on light paper, without menu and forms
        seen = "[...document.querySelectorAll('nav, form')].map((one) => one.checkVisibility())"
        shown = f"[getComputedStyle(document.body).backgroundColor, ...{seen}]"
        paper, *controls = await visitor.page.evaluate(shown)
        assert (paper, set(controls)) == ("rgb(250, 249, 246)", {False})
        await visitor.page.emulate_media(media="screen", color_scheme="light")
        await visitor.open("/admin")
        await visitor.page.locator("#numbers-money summary").focus()
        await visitor.page.keyboard.press("Enter")
        assert "saved $0.00012" in await visitor.page.locator("#numbers-money").inner_text()
        await visitor.page.evaluate(
            "getSelection().selectAllChildren(document.querySelector('#live-overview .tiles h2'))"
        )
        await _count_one(world, "req_second")
        await visitor.page.evaluate("refresh()")
        assert await visitor.page.locator("#live-overview .tiles p").first.inner_text() == "2"
        assert await visitor.page.evaluate("document.activeElement.parentElement.id") == "numbers-money"
        assert await visitor.page.locator("#numbers-money").get_attribute("open") is not None
        assert await visitor.page.evaluate("getSelection().toString()") == "Requests"


async def _count_one(world: World, request_id: str, record: Record | None = None) -> None:
    world.stats.add(record or hit(at_s=NOW_S, request_id=request_id))
    await world.stats.flush()


async def test_the_filters_work_with_and_without_script(world: World) -> None:
    """Choosing a filter is enough where scripts run; where they don't there is a button."""
    await _count_one(world, "req_first")
    async with serving(world) as base, chromium() as browser:
        async with visiting(browser, base) as visitor:
            await visitor.log_in()
            await visitor.open("/admin/requests")
            await visitor.page.get_by_label("Outcome").select_option("failed")
            await visitor.page.wait_for_url(re.compile("outcome=failed"))
            await visitor.page.get_by_text("No recent request matches.").wait_for()
        async with visiting(browser, base, java_script_enabled=False) as plain:
            await plain.log_in()
            await plain.open("/admin/requests")
            await plain.page.get_by_label("Outcome").select_option("failed")
            await plain.page.get_by_role("button", name="Filter").click()
            await plain.page.get_by_text("No recent request matches.").wait_for()
            await _finish(plain)


async def _finish(visitor: Visitor) -> None:
    """Logging out closes the door behind."""
    await visitor.page.get_by_role("button", name="Log out").click()
    await visitor.page.wait_for_url("**/admin/login")
    await visitor.open("/admin/teams")
    assert "/admin/login" in visitor.page.url
