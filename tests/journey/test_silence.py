"""A stream is never silent for long: what comes through where nothing comes from its deployment."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from gateway.api import chat
from tests.journey.conftest import OpenWorld
from tests.world import Finish, Tokens, World, unavailable

_ASKS = [{"role": "user", "content": "Hi"}]
_PING = {"/v1/messages": 'event: ping\ndata: {"type":"ping"}\n\n'}
SURFACES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": _ASKS},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": _ASKS, "max_tokens": 9},
}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence is short here."""
    monkeypatch.setattr(chat, "SILENCE_S", 0.005)


@pytest.mark.parametrize("path", SURFACES)
async def test_a_silent_stream_sends_what_clients_skip(world: World, path: str) -> None:
    """A comment, or Anthropic's `ping`, between the events of the answer."""
    go = asyncio.Event()
    world.backends["plain"].plays("first", go, "last", Finish(), Tokens())
    client = world.begin(None, path=path, stream=True, **SURFACES[path])
    await client.sees("first")
    await client.sees(_PING.get(path, ": ping\n\n"))
    go.set()
    reply = await client.reply()
    told = [line.removeprefix("data: ") for line in reply.text.split("\n") if line.startswith("data: ")]
    assert "last" in reply.text
    assert all(json.loads(line) for line in told if line != "[DONE]")


@pytest.mark.parametrize("path", SURFACES)
async def test_a_stream_may_begin_before_its_answer(open_a_world: OpenWorld, path: str) -> None:
    """Where the operator allows it; a failure is then an event, and without that permission a status."""
    world, go = await open_a_world(is_pinged_early=True), asyncio.Event()
    world.backends["plain"].plays(go, "word", Finish(), Tokens())
    client = world.begin(None, path=path, stream=True, **SURFACES[path])
    await client.sees("ping")
    go.set()
    reply = await client.reply()
    assert (reply.status, reply.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    assert "word" in reply.text
    go.clear()
    world.backends["plain"].plays(go, unavailable())
    client = world.begin(None, path=path, stream=True, model="mock", **{**SURFACES[path], "user": "other", "seed": 1})
    await client.sees("ping")
    go.set()
    failed = await client.reply()
    assert failed.status == 200
    assert '"error"' in failed.text.rstrip().split("\n")[-1]
