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
        self._telling: asyncio.Task[None]

    async def start(self, path: Path) -> None:
        await self.server.listen(path)
        self._telling = asyncio.create_task(self._tell())

    async def stop(self) -> None:
        self._telling.cancel()
        await self.server.close()

    def die(self) -> None:
        """As a process does: every connection ends; the next one is answered, by its successor."""
        for peer in list(self.server.peers):
            peer.transport.abort()

    async def _tell(self) -> None:
        while True:
            self.server.push_state()
            await asyncio.sleep(0.02)
