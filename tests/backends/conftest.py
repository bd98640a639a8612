"""One upstream process for the session, and requests to send to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from gateway.backends.base import BackendRequest, ChunkStream
from gateway.backends.openai.backend import OpenAIBackend
from gateway.wire.types import Chunk
from tests.e2e.upstream import Seen, Upstream, run_upstream


@pytest.fixture(scope="session")
def upstream_process() -> Iterator[Upstream]:
    with run_upstream() as upstream:
        yield upstream


@pytest.fixture
def upstream(upstream_process: Upstream) -> Upstream:
    """The session's upstream with a clean record and no plan: do not stop this one, run your own."""
    upstream_process.reset()
    return upstream_process


SECRET = "sk-upstream-secret"


@pytest.fixture
async def backend(upstream: Upstream) -> AsyncIterator[OpenAIBackend]:
    backend = make_backend(upstream.url)
    await backend.start()
    yield backend
    assert backend.running == 0, "a stream was not accounted for"
    await backend.aclose()


def make_backend(url: str, **options: Any) -> OpenAIBackend:
    options = {"model": "mock", "capabilities": frozenset[str](), "api_key": SECRET, **options}
    return OpenAIBackend("d", base_url=url, **options)


def ask(
    *, is_stream: bool = True, ttft_s: float = 5.0, idle_s: float = 5.0, whole_s: float | None = None, **body: Any
) -> BackendRequest:
    """A request as the gateway hands it to a backend."""
    body = {"model": "alias", "messages": [{"role": "user", "content": "Say héllo 😀"}], **body}
    if is_stream:
        body["stream"] = True
    return BackendRequest(
        body=body,
        is_stream=is_stream,
        salt=b"salt",
        request_id="req-1",
        ttft_timeout_s=ttft_s,
        idle_timeout_s=idle_s,
        whole_timeout_s=ttft_s + (idle_s if whole_s is None else whole_s),
    )


async def collect(stream: ChunkStream) -> list[Chunk]:
    """All chunks; the stream is closed whatever happens."""
    try:
        return [chunk async for chunks in stream for chunk in chunks]
    finally:
        await stream.aclose()


async def collect_into(seen: list[Chunk], stream: ChunkStream) -> None:
    """The same, keeping what came before an error; the stream is not closed."""
    async for chunks in stream:
        seen += chunks


async def until(upstream: Upstream, is_true: Callable[[Seen], bool]) -> Seen:
    """Wait for something the upstream is about to notice; bounded by the test's own time-out."""
    async with asyncio.timeout(10):
        while not is_true(seen := upstream.seen()):  # noqa: ASYNC110 - another process has no events for us
            await asyncio.sleep(0.01)
    return seen
