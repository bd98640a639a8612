"""A gateway worker inside the test's own process: the whole application behind its real server, its background loops off."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from cache import ExactCache
from gateway import app as app_module
from gateway.app import WorkerParts, create_app
from gateway.batches.files import MARKER
from gateway.settings import Settings
from gateway.transport.contents import Folder
from gateway.transport.http_server import reserve
from gateway.worker import run
from tests.e2e.gateway import API_KEY


@dataclass(frozen=True)
class OpenWorker:
    """A worker that serves."""

    parts: WorkerParts
    port: int


def keep_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    """An application that opens neither collects nor freezes: this process holds more than the application."""
    idle = SimpleNamespace(
        collect=lambda *_: 0, freeze=lambda: None, set_threshold=lambda *_: None, enable=lambda: None
    )
    monkeypatch.setattr(app_module, "gc", idle)


@asynccontextmanager
async def open_worker(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[OpenWorker]:
    """A worker that serves on a free port."""
    keep_collector(monkeypatch)
    monkeypatch.setattr(app_module, "start_loops", lambda parts, stack: None)
    monkeypatch.setattr(ExactCache, "is_l1_on", True)  # the loop that would say so is off
    app, stop = create_app(settings), asyncio.Event()
    with reserve("127.0.0.1", 0) as reserved:
        address, port = reserved.getsockname()
        serving = asyncio.create_task(run(app, settings, address, port, stop))
        async with asyncio.timeout(90):
            while not await answers(address, port):
                assert not serving.done()
                await asyncio.sleep(0.01)
        try:
            yield OpenWorker(app.state.parts, port)
        finally:
            stop.set()
            await serving


async def answers(address: str, port: int) -> bool:
    """Whether a server listens there."""
    try:
        _, writer = await asyncio.open_connection(address, port)
    except OSError:
        return False
    writer.close()
    return True


class Host:
    """A worker, its files' folder, and clients of its teams."""

    def __init__(self, parts: WorkerParts, port: int) -> None:
        self.parts = parts
        self.url = f"http://127.0.0.1:{port}/v1"
        self.clients: list[AsyncOpenAI] = []
        self.client = self.client_of(API_KEY)

    def client_of(self, key: str) -> AsyncOpenAI:
        self.clients.append(AsyncOpenAI(base_url=self.url, api_key=key, max_retries=0, timeout=20))
        return self.clients[-1]

    async def team(self, name: str = "another") -> tuple[int, AsyncOpenAI]:
        """A new team's id, and its client."""
        team = await self.parts.accounts.create_team(name)
        key = await self.parts.accounts.create_key(team.id, "key")
        return team.id, self.client_of(key.plaintext)

    @property
    def names(self) -> list[str]:
        """What lies in the folder."""
        folder = self.folder
        return sorted(set(os.listdir(folder)) - {MARKER}) if folder.exists() else []

    @property
    def folder(self) -> Path:
        """The folder of the files."""
        contents = self.parts.files.contents
        assert isinstance(contents, Folder)
        return contents.path

    async def aclose(self) -> None:
        for client in self.clients:
            await client.close()

    async def refusal(self, **request: Any) -> tuple[int, str]:
        """The status and code of a plain request."""
        headers = {"authorization": f"Bearer {API_KEY}", **request.pop("headers", {})}
        async with httpx.AsyncClient(timeout=20) as client:
            reply = await client.request(
                request.pop("method", "POST"), self.url + request.pop("path", "/files"), headers=headers, **request
            )
        return reply.status_code, reply.json()["error"]["code"]


NewHost = Callable[..., Awaitable[Host]]
"""Opens a worker with `models`, the deployments of each, and further settings."""
