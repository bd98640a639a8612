"""Requests between the processes of one `sameway serve`: a line of JSON, answered by a line of JSON.

    supervisor -> worker    prepare, switch, settle, discard, refused: a new configuration, step by step
    worker, commands -> supervisor    reload: read the configuration again; kept: with these models

On unix sockets in the folder of the sockets, which only this user can open. Knows no configuration.
Invariant: a line that cannot be read ends its connection and nothing else.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

_LINE_BYTES_MAX = 16 << 20
_BEAT = b"."  # a worker's heartbeat, on the same socket

Answer = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
"""Answers one request. An error that it raises is answered as `error`."""


async def ask(path: Path, timeout_s: float | None, act: str, **values: Any) -> dict[str, Any]:
    """The answer of the process at the socket `path`, with `error` where it could not.

    Raises OSError where no process is there, or it ends or takes longer than `timeout_s`.
    """
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_unix_connection(path, limit=_LINE_BYTES_MAX)
        try:
            writer.write(msgspec.json.encode({"act": act, **values}) + b"\n")
            line = await reader.readline()
        finally:
            writer.close()
    if not line.endswith(b"\n"):
        raise ConnectionError("it ended before it answered")
    answer: dict[str, Any] = msgspec.json.decode(line.lstrip(_BEAT))
    return answer


async def serve(path: Path, answer: Answer, beat_s: float | None = None) -> asyncio.Server:
    """Listen on a new socket. With `beat_s`, each connection gets a byte so often while it is silent.

    Raises OSError.
    """

    async def attend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        beating = asyncio.create_task(_beat(writer, beat_s)) if beat_s is not None else None
        try:
            while line := await reader.readline():
                writer.write(msgspec.json.encode(await _answered(answer, msgspec.json.decode(line))) + b"\n")
        except (OSError, ValueError):  # it has gone, or is none of ours
            pass
        finally:
            if beating is not None:
                beating.cancel()
            writer.close()

    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    return await asyncio.start_unix_server(attend, path, limit=_LINE_BYTES_MAX)


async def _answered(answer: Answer, request: dict[str, Any]) -> dict[str, Any]:
    try:
        return await answer(request)
    except Exception as error:
        return {"error": str(error) or type(error).__name__}


async def _beat(writer: asyncio.StreamWriter, every_s: float) -> None:
    while not writer.is_closing():
        writer.write(_BEAT)
        await asyncio.sleep(every_s)
