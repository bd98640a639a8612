"""A gateway worker inside the test's own process: the whole application behind its real server, its background loops off."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from cache import ExactCache
from gateway import app as app_module
from gateway.app import Parts, create_app
from gateway.settings import Settings
from gateway.worker import server_of


@dataclass(frozen=True)
class OpenWorker:
    """A worker that serves."""

    parts: Parts
    port: int


@asynccontextmanager
async def open_worker(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[OpenWorker]:
    """A worker that serves on a free port."""
    monkeypatch.setattr(app_module, "_start_loops", lambda parts, stack: None)
    monkeypatch.setattr(ExactCache, "is_l1_on", True)  # the loop that would say so is off
    app = create_app(settings)
    server = server_of(app, settings)
    server.config.port = 0
    serving = asyncio.create_task(server.serve())
    async with asyncio.timeout(90):
        while not server.started:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    try:
        yield OpenWorker(app.state.parts, server.servers[0].sockets[0].getsockname()[1])
    finally:
        server.should_exit = True
        await serving
        gc.unfreeze()
