"""The dashboard's playground in Chromium, on a gateway in processes of its own."""

from __future__ import annotations

from tests.admin.browser import chromium, visiting
from tests.e2e.gateway import ADMIN_KEY, API_KEY, Gateway
from tests.e2e.upstream import Upstream


async def test_the_playground_shows_an_answer_and_why_it_came(gateway: Gateway, upstream: Upstream) -> None:
    """The words as they stream, what the cache decided, the route's reasons and the parts of the time; then a hit; then a
    refusal in the gateway's words. The key stays in its field."""
    async with chromium() as browser, visiting(browser, gateway.root) as visitor:
        page = visitor.page
        await visitor.open("/admin/login")
        await page.get_by_label("Admin key").fill(ADMIN_KEY)
        await page.get_by_role("button", name="Log in").click()
        await page.get_by_role("link", name="Playground").click()
        await page.get_by_label("API key").fill(API_KEY)
        await page.get_by_role("combobox", name="Model").select_option("mock")
        await page.get_by_label("Prompt").fill("What does a playground show?")
        facts = page.locator("#facts")
        for decided in ("miss", "exact"):
            await page.get_by_role("button", name="Ask").click()
            await facts.get_by_text("exact lookup", exact=True).wait_for()
            assert await facts.get_by_text(decided, exact=True).count() == 1
            assert await facts.get_by_text("plain", exact=True).count() >= 1
            assert len(await page.locator("#answer").inner_text()) > 5
        assert visitor.complaints == []
        await page.get_by_label("API key").fill("sk-sw-nobody-0123456789abcdef")
        await page.get_by_role("button", name="Ask").click()
        await page.locator("#answer").get_by_text("Incorrect API key provided").wait_for()
        assert API_KEY not in await page.content()
