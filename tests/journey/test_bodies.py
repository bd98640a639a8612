"""What an unfinished request body may hold: time, its team's bytes, and a request of its team's rate limit."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.exceptions import HTTPException

from gateway.api.front import Front
from tests.journey.conftest import OpenWorld
from tests.world import KEY, World

CHAT = "/v1/chat/completions"


class Sending:
    """A request whose body comes in pieces, when the test says so."""

    def __init__(self, front: Any, path: str, key: str, length: int | None = None) -> None:
        self._pieces: asyncio.Queue[tuple[bytes, bool]] = asyncio.Queue()
        self._said = bytearray()
        self.status = 0
        headers = [(b"authorization", f"Bearer {key}".encode()), (b"content-type", b"application/json")]
        if length is not None:
            headers.append((b"content-length", b"%d" % length))
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": headers,
            "client": ("127.0.0.1", 1),
        }
        self.task = asyncio.create_task(front(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        piece, is_last = await self._pieces.get()
        return {"type": "http.request", "body": piece, "more_body": not is_last}

    async def _send(self, message: Any) -> None:
        self.status = message.get("status", self.status)
        self._said += message.get("body", b"")

    async def sends(self, piece: bytes, is_last: bool = False) -> None:
        """The gateway has taken the piece, and waits for another, or has answered."""
        self._pieces.put_nowait((piece, is_last))
        for _ in range(20):
            await asyncio.sleep(0)

    async def answer(self) -> tuple[int, str]:
        async with asyncio.timeout(30):
            await self.task
        return self.status, self._said.decode()


@pytest.fixture
async def world(open_a_world: OpenWorld) -> World:
    return await open_a_world(body_bytes_max=1_000)


@pytest.mark.parametrize("first", [b"", b"{"])
async def test_a_body_that_drips_is_refused(world: World, first: bytes) -> None:
    """One that stops, or never begins, gets a 408 in the API's shape, with the request's id in its record."""
    world.bodies.idle_s = 0.05
    sending = Sending(world.front().app, CHAT, KEY, 900)
    if first:
        await sending.sends(first)
    status, said = await sending.answer()
    assert status == 408
    assert '"code":"request_timeout"' in said
    assert world.records[-1].ended.status == 408


async def test_telemetry_that_drips_or_has_no_end_is_refused(world: World) -> None:
    """OTLP that is dropped is read within the same limits: a 408 for what stops, a 413 for what is too long."""
    world.bodies.idle_s = 0.05
    drips, endless = (Sending(world.front().app, "/v1/metrics", KEY) for _ in range(2))
    await drips.sends(b"x")
    await endless.sends(b"x" * 1_001)
    assert [(await one.answer())[0] for one in (drips, endless)] == [408, 413]


async def test_a_body_that_comes_is_read_though_it_takes_long(world: World) -> None:
    """What counts is the time between two pieces, and the whole's by its size."""
    body = b'{"model":"mock","messages":[{"role":"user","content":"hello"}]}'
    world.bodies.idle_s = 0.4
    sending = Sending(world.front().app, CHAT, KEY, len(body))
    for byte in range(0, len(body), 16):
        await asyncio.sleep(0.05)
        await sending.sends(body[byte : byte + 16])
    assert (await sending.answer())[0] == 200


async def test_a_teams_unfinished_bodies_are_bounded(world: World) -> None:
    """The fifth full one is refused, another team's is not, and what ends makes room."""
    team = await world.team("other")
    held = [Sending(world.front().app, CHAT, KEY, 1_000) for _ in range(4)]
    for one in held:
        await one.sends(b"x" * 999)
    late = Sending(world.front().app, CHAT, KEY, 1_000)
    await late.sends(b"x" * 999)
    status, said = await late.answer()
    assert (status, "unfinished" in said or "not come to their end" in said) == (429, True)
    other = Sending(world.front().app, CHAT, team.key, 1_000)
    await other.sends(b"x" * 999)
    assert not other.task.done()
    for one in (*held, other):
        await one.sends(b"x")
        assert (await one.answer())[0] == 400
    assert not world.bodies.held


async def test_a_body_that_takes_long_is_a_request_before_it_is_read(world: World) -> None:
    """A team with one request a minute holds one unfinished body; the next is refused before its end."""
    team = await world.team("slow", requests_per_min=1)
    first, second = Sending(world.front().app, CHAT, team.key, 900), Sending(world.front().app, CHAT, team.key, 900)
    await first.sends(b"{")
    await second.sends(b"{")
    assert (await second.answer())[0] == 429
    assert not first.task.done()
    await first.sends(b"x" * 899)
    assert (await first.answer())[0] == 400


async def test_a_long_body_counts_as_one_request(world: World) -> None:
    """What was counted while it arrived is not counted again when it is answered."""
    team = await world.team("slow", requests_per_min=1)
    body = b'{"model":"mock","messages":[{"role":"user","content":"hello"}]}'
    sending = Sending(world.front().app, CHAT, team.key, len(body))
    await sending.sends(body[:10])
    await sending.sends(body[10:])
    assert (await sending.answer())[0] == 200


async def test_bodies_of_unknown_callers_are_bounded_together() -> None:
    """The dashboard reads a body before it knows who sends it: all of them hold four full ones at most."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["more_body"]:
            pass
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    front = Front(app, {})
    held = [Sending(front, "/admin/login", "wrong") for _ in range(4)]
    for one in held:
        await one.sends(bytes((1 << 20) - 1))
    late = Sending(front, "/admin/login", "wrong")
    await late.sends(bytes((1 << 20) - 1))
    with pytest.raises(HTTPException) as refused:
        await late.answer()
    assert refused.value.status_code == 429
    for one in held:
        await one.sends(b"x", is_last=True)
        assert (await one.answer())[0] == 204
