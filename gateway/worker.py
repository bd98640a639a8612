"""One gateway process: uvicorn around the application, on the socket that the supervisor bound.

Knows the server, not the application. Invariant: it serves one socket until SIGTERM; the supervisor
restarts it.
"""

import asyncio
import os
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path

import uvicorn
import uvloop
from fastapi import FastAPI

from cache.event_loop import Loop
from gateway.api.front import Front
from gateway.app import begin_stop, create_app
from gateway.settings import Settings
from gateway.supervisor import WORKER_SETTINGS
from gateway.transport.http_server import ServerProtocol

_KEEP_ALIVE_S = 75  # longer than the SDKs keep an idle connection, so that the client closes it first
_BACKLOG = 2048
_BEAT_S = 1.0


def serve_fd(fd: int, heartbeat: Path) -> int:
    """Serve on the listening socket `fd` until SIGTERM; returns the exit status.

    Writes a byte a second to each client of the unix socket `heartbeat`, as long as the event loop
    runs.
    """
    settings = Settings.model_validate_json(Path(os.environ.pop(WORKER_SETTINGS)).read_bytes())
    server = server_of(create_app(settings), settings)
    uvloop.run(_serve(server, socket.socket(fileno=fd), heartbeat), loop_factory=Loop)
    return 0 if server.started else 1


async def _serve(server: uvicorn.Server, listener: socket.socket, heartbeat: Path) -> None:
    beating = await asyncio.start_unix_server(_beat, heartbeat)
    try:
        await server.serve([listener])
    finally:
        beating.close()


async def _beat(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while not writer.is_closing():
        writer.write(b".")
        await asyncio.sleep(_BEAT_S)


def server_of(app: FastAPI, settings: Settings) -> uvicorn.Server:
    """The server around `app`, with all limits on its connections."""
    config = uvicorn.Config(
        Front(app, app.state.routes),  # before FastAPI's middleware, for speed
        loop="uvloop",
        http=partial(ServerProtocol, stall_s=float(settings.client_stall_s)),  # type: ignore[arg-type]
        ws="none",
        lifespan="on",
        interface="asgi3",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=_BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(settings.shutdown_grace_s),
    )
    return _Server(config, partial(begin_stop, app))


class _Server(uvicorn.Server):
    """uvicorn's, which calls `on_stop` before it waits for its clients."""

    def __init__(self, config: uvicorn.Config, on_stop: Callable[[set[asyncio.Task[None]]], None]) -> None:
        super().__init__(config)
        self._on_stop = on_stop

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._on_stop(self.server_state.tasks)
        await super().shutdown(sockets)
