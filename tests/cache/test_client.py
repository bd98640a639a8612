"""Either end of the cache worker's socket, while the process at the other one is killed, on the event loop that both run on."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from pathlib import Path

import pytest
import uvloop

from cache import CacheWorkerUnavailable, Miss, MissReason, SemanticClient
from cache.worker import Answered, Status, WorkerState
from cache.worker.messages import LENGTH_BYTES, Answer, AskLookup, frame, read_ask
from cache.worker.queue import Connection
from tests.cache.fakes import ACME, query

_TURNS = 60  # of the event loop: more than the end of a connection takes to be read


@pytest.fixture
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    return uvloop.EventLoopPolicy()


async def ask(client: SemanticClient, kind: str) -> str:
    """One request of a kind, and what came of it."""
    match kind:
        case "lookup":
            found = await client.lookup(query("x"))
            assert isinstance(found, Miss)
            return found.reason.value
        case "status":
            return (await client.status()).state.value
        case "judge":
            asked = client.judge(ACME, b"c" * 16, Answered(b"", 0.0, "yes"), [])
        case "near":
            asked = client.near(query("x"))  # type: ignore[assignment]
        case _:
            asked = anext(client.embed(["x"]))  # type: ignore[assignment]
    with pytest.raises(CacheWorkerUnavailable):
        await asked
    return "unavailable"


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("lookup", MissReason.UNAVAILABLE.value),
        ("status", WorkerState.AWAY.value),
        ("judge", "unavailable"),
        ("near", "unavailable"),
        ("embed", "unavailable"),
    ],
)
async def test_a_worker_that_is_killed_fails_no_request(tmp_path: Path, kind: str, told: str) -> None:
    """Asked in any turn of the event loop from the worker's end on, each request has the outcome of one without a worker."""
    worker = list[asyncio.StreamWriter]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        worker.append(writer)
        while length := int.from_bytes(await reader.read(LENGTH_BYTES), "big"):
            asked = read_ask(await reader.readexactly(length))
            is_lookup = isinstance(asked, AskLookup)
            writer.write(frame(Answer(asked.id, Miss(MissReason.EMPTY) if is_lookup else Status(WorkerState.READY))))

    server = await asyncio.start_unix_server(serve, tmp_path / "s")
    async with SemanticClient(tmp_path / "s", timeout_s=20) as client, asyncio.timeout(15):
        while await client.lookup(query("x")) != Miss(MissReason.EMPTY):  # noqa: ASYNC110
            await asyncio.sleep(0)
        server.close()
        worker[0].transport.abort()

        async def late(turns: int) -> str:
            for _ in range(turns):
                await asyncio.sleep(0)
            return await ask(client, kind)

        assert Counter(await asyncio.gather(*map(late, range(_TURNS)))) == {told: _TURNS}


async def test_a_gateway_that_is_killed_does_not_harm_the_worker() -> None:
    """An answer to a client that has left is dropped, in any turn of the event loop from its end on."""
    ours, theirs = socket.socketpair()
    _, writer = await asyncio.open_unix_connection(sock=ours)
    connection = Connection(writer)
    theirs.close()
    for id in range(_TURNS):
        connection.answer(id, Status(WorkerState.READY))
        await asyncio.sleep(0)
    assert writer.is_closing()
