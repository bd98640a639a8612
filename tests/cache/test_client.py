"""Either end of the cache worker's socket, while the process at the other one is killed, on the event loop that both run on."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest
import uvloop

from cache import CacheWorkerUnavailable, Miss, MissReason, SemanticClient
from cache.query import Neighbourhood
from cache.worker import AnswerText, WorkerState, WorkerStatus
from cache.worker import messages as wire
from ipc import CallFrame, IncomingCall, RpcServer
from tests.cache.fakes import ACME, query
from tests.rpc import StandIn

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
        case "judge":
            asked = client.judge(ACME, b"c" * 16, AnswerText(b"", 0.0, "yes"), [])
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
        ("judge", "unavailable"),
        ("near", "unavailable"),
        ("embed", "unavailable"),
    ],
)
async def test_a_worker_that_is_killed_fails_no_request(tmp_path: Path, kind: str, told: str) -> None:
    """Asked in any turn of the event loop from the worker's end on, each request has the outcome of one without a worker."""
    status = WorkerStatus(WorkerState.READY)
    worker = StandIn(
        RpcServer(
            wire.WIRE,
            state=lambda: status,
            on_call=lambda call: call.reply(Neighbourhood(Miss(MissReason.EMPTY), ())),
        )
    )
    await worker.start(tmp_path / "s")
    async with SemanticClient(tmp_path / "s", timeout_s=20) as client, asyncio.timeout(15):
        while await client.lookup(query("x")) != Miss(MissReason.EMPTY):  # noqa: ASYNC110
            await asyncio.sleep(0)
        worker.die()
        await worker.stop()

        async def late(turns: int) -> str:
            for _ in range(turns):
                await asyncio.sleep(0)
            return await ask(client, kind)

        assert Counter(await asyncio.gather(*map(late, range(_TURNS)))) == {told: _TURNS}


async def test_a_gateway_that_is_killed_does_not_harm_the_worker(tmp_path: Path) -> None:
    """An answer to a client that has left is dropped, in any turn of the event loop from its end on."""
    calls = list[IncomingCall[wire.Ask]]()
    worker = StandIn(RpcServer(wire.WIRE, state=lambda: None, on_call=calls.append))
    await worker.start(tmp_path / "s")
    _, writer = await asyncio.open_unix_connection(tmp_path / "s")
    for id in range(1, _TURNS + 1):
        writer.write(wire.WIRE.encode(CallFrame(id, wire.AskEmbed(("x",)))))
    while len(calls) < _TURNS:  # noqa: ASYNC110
        await asyncio.sleep(0)
    writer.transport.abort()
    for call in calls:
        call.reply(wire.Judged(()))
        await asyncio.sleep(0)
    assert not worker.server.has_calls
    assert not worker.server.peers
    await worker.stop()
