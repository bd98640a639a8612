"""One gateway process: the application behind its HTTP server, on the address that all workers share.

Knows the server, not the application. Invariant: it serves until SIGTERM; the supervisor restarts
it.
"""

import asyncio
import os
import signal
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import uvloop
from fastapi import FastAPI

from cache.event_loop import Loop
from gateway import control
from gateway.app import begin_stop, create_app, served
from gateway.settings import Settings
from gateway.supervisor import WORKER_SETTINGS
from gateway.transport.http_server import HttpServer

_BEAT_S = 1.0


def serve(address: str, port: int, heartbeat: Path) -> int:
    """Serve on `address`, an IP address, until SIGTERM; returns the exit status.

    On the unix socket `heartbeat` it writes a byte a second, as long as the event loop runs, and does
    what the supervisor asks of its configuration.
    """
    return uvloop.run(_serve(Path(os.environ.pop(WORKER_SETTINGS)), address, port, heartbeat), loop_factory=Loop)


async def _serve(handed: Path, address: str, port: int, heartbeat: Path) -> int:
    stop, app = asyncio.Event(), asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)

    async def obey(request: dict[str, Any]) -> dict[str, Any]:
        state = (await asyncio.shield(app)).state
        await state.opened.wait()
        answer: dict[str, Any] = await state.parts.configuration.obey(request)
        return answer

    # before the settings are read: whatever the supervisor hands out later, it also tells this worker
    listening = await control.serve(heartbeat, obey, _BEAT_S)
    try:
        settings = Settings.model_validate_json(handed.read_bytes())
        app.set_result(create_app(settings))
        return await run(app.result(), settings, address, port, stop)
    finally:
        listening.close()


async def run(app: FastAPI, settings: Settings, address: str, port: int, stop: asyncio.Event) -> int:
    """Open `app`, serve it until `stop`, and close it. Returns the exit status: 1 if it did not start."""
    server = HttpServer(served(app), address, port, settings.client_stall_s)
    async with AsyncExitStack() as opened:
        try:
            await opened.enter_async_context(app.router.lifespan_context(app))
            await server.start()
        except Exception:  # logged where it was raised
            return 1
        await stop.wait()
        begin_stop(app, server.requests)
        await server.stop(app.state.settings.shutdown_grace_s)
    return 0
