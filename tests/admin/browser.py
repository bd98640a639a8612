"""A real browser on a real server on the world: pages are driven as a person drives them."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any

from playwright.async_api import Browser, BrowserContext, Page, async_playwright

from gateway.transport.http_server import HttpServer, reserve
from tests.admin.world import ADMIN_KEY, World

_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@asynccontextmanager
async def serving(world: World) -> AsyncIterator[str]:
    """The application on a free port; answers its base URL."""
    with reserve("127.0.0.1", 0) as reserved:
        address, port = reserved.getsockname()
        server = HttpServer(world.app, address, port, stall_s=60)
        await server.start()
        try:
            yield f"http://{address}:{port}"
        finally:
            await server.stop(grace_s=1.0)


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """The machine's Chromium, else playwright's own."""
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=_FLAGS)
        try:
            yield browser
        finally:
            await browser.close()


_OUTSIDE = """[...document.querySelectorAll(".card, .tiles > div, .routes, nav")].flatMap((card) => {
  const box = card.getBoundingClientRect();
  const leaves = (one) => one.width && (one.right > box.right + 1 || one.left < box.left - 1);
  const found = [...card.querySelectorAll("*")].filter((one) => leaves(one.getBoundingClientRect()));
  const shown = found.filter((one) => !one.closest(".visually-hidden, pre, details:not([open]) > :not(summary), svg"));
  return shown.slice(0, 1).map((one) => one.outerHTML.slice(0, 150));
})"""


class Visitor:
    """One window. Whatever the pages complain about on the console or fail to load is in `complaints`."""

    def __init__(self, context: BrowserContext, page: Page, base: str) -> None:
        self.context = context
        self.page = page
        self.base = base
        self.complaints: list[str] = []
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("requestfailed", self._on_failure)
        page.on("response", self._on_response)

    def _on_console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def _on_failure(self, request: Any) -> None:
        if request.failure != "net::ERR_ABORTED":  # by the way to another page
            self.complaints.append(f"failed: {request.url}")

    def _on_response(self, response: Any) -> None:
        if not response.url.startswith(self.base):
            self.complaints.append(f"elsewhere: {response.url}")

    async def open(self, path: str) -> int:
        """Goes to a page; answers its status."""
        response = await self.page.goto(self.base + path)
        assert response is not None
        return response.status

    async def log_in(self) -> None:
        await self.open("/admin/login")
        await self.page.get_by_label("Admin key").fill(ADMIN_KEY)
        await self.page.get_by_role("button", name="Log in").click()
        await self.page.wait_for_url("**/admin")

    async def text(self) -> str:
        return await self.page.locator("main").inner_text()

    async def overflow_px(self) -> int:
        """How much wider the page is than its window."""
        return int(
            await self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        )

    async def misfits(self, page: str, widths: tuple[int, ...] = (1280, 768, 420)) -> list[tuple[str, int, str]]:
        """What does not fit at these widths of the window: the page itself, or the first element that leaves its card."""
        found = []
        for width in widths:
            await self.page.set_viewport_size({"width": width, "height": 900})
            if over := await self.overflow_px():
                found.append((page, width, f"{over} px"))
            found += [(page, width, one) for one in await self.page.evaluate(_OUTSIDE)]
        return found

    async def barriers(self, *rules: str) -> list[str]:
        """What axe-core finds that keeps people out, by all its rules or these: the rule, and the first element that breaks it."""
        if not await self.page.evaluate("'axe' in window"):
            await self.page.evaluate(files("axe_playwright_python").joinpath("axe.min.js").read_text())
        options = {"resultTypes": ["violations"], **({"runOnly": rules} if rules else {})}
        found = await self.page.evaluate("(options) => axe.run(options)", options)
        return [f"{one['id']}: {one['nodes'][0]['html']}" for one in found["violations"]]


@asynccontextmanager
async def visiting(browser: Browser, base: str, width: int = 1280, **options: Any) -> AsyncIterator[Visitor]:
    context = await browser.new_context(viewport={"width": width, "height": 900}, **options)
    context.set_default_timeout(60_000)  # on a busy machine a renderer's start alone took over 15 s
    try:
        yield Visitor(context, await context.new_page(), base)
    finally:
        await context.close()
