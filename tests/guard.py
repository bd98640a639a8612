"""A company's guard in process, which speaks LiteLLM's generic guardrail API on a port of its own, as a test says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class StandInGuard:
    """It masks `secret` and refuses `forbidden` in texts, while `is_open`; `says` replaces its answers, byte for byte."""

    url: str = ""
    says: bytes | None = None
    looks: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    is_open: asyncio.Event = field(default_factory=asyncio.Event)
    decide: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    connected: set[asyncio.StreamWriter] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.is_open.set()

    def texts(self, stage: str = "request") -> list[list[str]]:
        """What it was shown."""
        return [look["texts"] for look in self.looks if look["input_type"] == stage]

    def _of(self, look: dict[str, Any]) -> dict[str, Any]:
        if self.decide is not None:
            return self.decide(look)
        if any("forbidden" in text for text in look["texts"]):
            return {"action": "BLOCKED", "blocked_reason": "The policy 7 forbids it."}
        masked = [text.replace("secret", "[MASKED]") for text in look["texts"]]
        return {"action": "NONE"} if masked == look["texts"] else {"action": "GUARDRAIL_INTERVENED", "texts": masked}

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connected.add(writer)
        try:
            while await reader.readline():
                fields: dict[str, str] = {}
                while (line := await reader.readline()) not in (b"\r\n", b""):
                    name, _, value = line.decode().partition(":")
                    fields[name.lower()] = value.strip()
                body = await reader.readexactly(int(fields["content-length"]))
                self.headers.append(fields)
                self.bodies.append(body)
                self.looks.append(json.loads(body))
                said = json.dumps(self._of(self.looks[-1])).encode()
                await self.is_open.wait()
                head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
                writer.write(head % len(said) + said if self.says is None else self.says)
        finally:
            writer.close()


@asynccontextmanager
async def guard_of() -> AsyncIterator[StandInGuard]:
    """A guard that listens."""
    guard = StandInGuard()
    server = await asyncio.start_server(guard.answer, "127.0.0.1", 0)
    guard.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/beta/litellm_basic_guardrail_api"
    try:
        yield guard
    finally:
        guard.is_open.set()
        server.close()
        for writer in guard.connected:
            writer.close()
        await asyncio.sleep(0)
