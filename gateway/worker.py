"""One gateway process: the application behind its HTTP server, on the address that all workers share.

Knows the server, not the application. Invariant: it serves until SIGTERM; the supervisor restarts
it.
"""

import asyncio
import os
import signal
from contextlib import AsyncExitStack
from pathlib import Path

import uvloop
from fastapi import FastAPI

from cache.event_loop import Loop
from gateway.api.front import Front
from gateway.app import begin_stop, create_app
from gateway.settings import Settings
from gateway.supervisor import WORKER_SETTINGS
from gateway.transport.http_server import HttpServer

_BEAT_S = 1.0


def serve(address: str, port: int, heartbeat: Path) -> int:
    """Serve on `address`, an IP address, until SIGTERM; returns the exit status.

    Writes a byte a second to each client of the unix socket `heartbeat`, as long as the event loop
    runs.
    """
    settings = Settings.model_validate_json(Path(os.environ.pop(WORKER_SETTINGS)).read_bytes())
    return uvloop.run(_serve(settings, address, port, heartbeat), loop_factory=Loop)


async def _serve(settings: Settings, address: str, port: int, heartbeat: Path) -> int:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    beating = await asyncio.start_unix_server(_beat, heartbeat)
    try:
        return await run(create_app(settings), settings, address, port, stop)
    finally:
        beating.close()


async def run(app: FastAPI, settings: Settings, address: str, port: int, stop: asyncio.Event) -> int:
    """Open `app`, serve it until `stop`, and close it. Returns the exit status: 1 if it did not start."""
    server = HttpServer(Front(app, app.state.routes), address, port, settings.client_stall_s)
    async with AsyncExitStack() as opened:
        try:
            await opened.enter_async_context(app.router.lifespan_context(app))
            await server.start()
        except Exception:  # logged where it was raised
            return 1
        await stop.wait()
        begin_stop(app, server.requests)
        await server.stop(settings.shutdown_grace_s)
    return 0


async def _beat(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while not writer.is_closing():
        writer.write(b".")
        await asyncio.sleep(_BEAT_S)
