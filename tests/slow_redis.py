"""A proxy before a Redis that hands on replies late, or when it is told to.

Knows no protocol. Late replies overlap: one that comes while another is late is no later for it. Invariant: bytes of a
connection keep their order.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(eq=False)
class SlowRedis:
    """The proxy of the Redis at `socket_path`, on `port` or a free one. `delay_s` may change at any time."""

    socket_path: Path
    port: int = 0
    delay_s: float = 0.0
    _is_holding: bool = False
    _held: list[Callable[[], None]] = field(default_factory=list)
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def hold(self) -> None:
        """Keep all replies from now on."""
        self._loop.call_soon_threadsafe(setattr, self, "_is_holding", True)

    def release(self, *, is_last: bool = False) -> None:
        """Hand on what is held; with `is_last` also what comes from now on."""

        def hand_on() -> None:
            self._is_holding = not is_last
            held, self._held = self._held, []
            for one in held:
                one()

        self._loop.call_soon_threadsafe(hand_on)

    async def _serve(self, started: threading.Event, stop: asyncio.Event) -> None:
        server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = server.sockets[0].getsockname()[1]
        started.set()
        await stop.wait()
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind_reader, behind = await asyncio.open_unix_connection(self.socket_path)
        back = asyncio.create_task(self._hand_back(behind_reader, writer))
        try:
            with contextlib.suppress(OSError):
                while data := await reader.read(1 << 16):
                    behind.write(data)
        finally:
            back.cancel()
            behind.close()
            writer.close()

    async def _hand_back(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def come(data: bytes) -> None:
            if self._is_holding:
                self._held.append(lambda: writer.write(data))
            else:
                writer.write(data)

        while data := await reader.read(1 << 16):
            self._loop.call_later(self.delay_s, come, data)
        writer.close()


@contextlib.contextmanager
def run_slow_redis(socket_path: Path, port: int = 0) -> Iterator[SlowRedis]:
    """A proxy in a thread of its own."""
    proxy, started, stop = SlowRedis(socket_path, port), threading.Event(), asyncio.Event()
    serving = proxy._serve(started, stop)
    thread = threading.Thread(target=proxy._loop.run_until_complete, args=(serving,), daemon=True)
    thread.start()
    assert started.wait(10)
    try:
        yield proxy
    finally:
        proxy._loop.call_soon_threadsafe(stop.set)
        thread.join(10)
