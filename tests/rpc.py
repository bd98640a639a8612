"""A worker's stand-in: an `ipc` server that tells its state as a worker does."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from ipc import RpcServer


class StandIn:
    """Serves by `server` on a socket, until it is stopped."""

    def __init__(self, server: RpcServer[Any]) -> None:
        self.server = server
        self._serving: asyncio.Task[None]

    async def start(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self._serving = asyncio.create_task(self.server.serve(path, lambda: False, 0.02))
        while not path.exists():  # noqa: ASYNC110
            await asyncio.sleep(0)

    async def stop(self) -> None:
        self._serving.cancel()
        await asyncio.gather(self._serving, return_exceptions=True)

    def die(self) -> None:
        """As a process does: every connection ends; the next one is answered, by its successor."""
        for peer in list(self.server.peers):
            peer.transport.abort()
