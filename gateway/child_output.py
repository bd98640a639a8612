"""What the supervisor's children write, as lines of its log: their own JSON, Redis' lines, and text
of libraries, each with the child's name.

Gateway workers write their log themselves. Knows no processes. Invariant: a child never waits for a
slow reader of the log, as the log drops lines instead.
"""

import asyncio
import contextlib
import os
import re
from typing import Any

import msgspec

from gateway.loggers import get_logger

_LINE_MAX = 1 << 20
_LEVELS = {".": "debug", "-": "debug", "*": "info", "#": "warning"}
# "PID:ROLE DAY MONTH YEAR TIME LEVEL MESSAGE", as redis-server and valkey-server write it (server.c, serverLogRaw)
_REDIS = re.compile(r"\d+:[A-Z] \d\d \w{3} \d{4} [\d:.]+ ([.*#-]) (.*)")


class ChildOutput:
    """The output of all children of one supervisor."""

    def __init__(self) -> None:
        self._following: set[asyncio.Task[None]] = set()

    async def pipe(self, child: str) -> int:
        """The end of a pipe for a child to write to; the caller closes it once the child has it.

        Raises OSError.
        """
        reading, writing = os.pipe()
        lines = asyncio.StreamReader(limit=_LINE_MAX)
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), os.fdopen(reading, "rb", 0))
        following = asyncio.create_task(_follow(child, lines))
        self._following.add(following)
        following.add_done_callback(self._following.discard)
        return writing

    async def aclose(self, within_s: float) -> None:
        """Wait until all children have closed their ends."""
        if self._following:
            await asyncio.wait(self._following, timeout=within_s)


async def _follow(child: str, lines: asyncio.StreamReader) -> None:
    while True:
        try:
            if not (line := await lines.readline()):
                return
        except ValueError:  # longer than a line may be: a part of it is left out
            continue
        if text := line.decode("utf-8", "backslashreplace").strip():
            fields = fields_of(text)
            level, event = str(fields.pop("level", "info")), str(fields.pop("event"))
            getattr(get_logger(), level if level in _METHODS else "info")(event, process=child, **fields)


_METHODS = frozenset({"debug", "info", "warning", "error", "critical"})


def fields_of(text: str) -> dict[str, Any]:
    """The fields of one line that a child wrote; of a text that is no JSON, it is the `event`."""
    if text.startswith('{"event"'):
        with contextlib.suppress(msgspec.DecodeError):
            return dict(msgspec.json.decode(text, type=dict[str, Any]))
    if redis := _REDIS.fullmatch(text):
        return {"level": _LEVELS[redis[1]], "event": redis[2]}
    return {"event": text}
