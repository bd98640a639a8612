"""Identical requests in the air share one generation; whoever leaves, leaves alone; the last one cancels."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import httpx

from tests.e2e.gateway import API_KEY, Gateway, wait_for
from tests.e2e.upstream import Upstream

_fresh = itertools.count()
HEADERS = {"authorization": f"Bearer {API_KEY}"}


def body(is_stream: bool = True) -> dict[str, Any]:
    content = f"a slow question {next(_fresh)}"
    return {"model": "slow", "messages": [{"role": "user", "content": content}], "stream": is_stream}


async def read(client: httpx.AsyncClient, request: dict[str, Any]) -> tuple[str, str]:
    """The whole reply's text and what the cache said."""
    async with client.stream("POST", "/chat/completions", json=request) as reply:
        return (await reply.aread()).decode(), reply.headers["x-sameway-cache"]


async def test_streams_and_wholes_share_one_generation(gateway: Gateway, upstream: Upstream) -> None:
    """Four at once, two streamed and two whole, all but one late: one generation, everybody from the first chunk."""
    request = body()
    async with httpx.AsyncClient(base_url=gateway.base_url, headers=HEADERS, timeout=30) as client:
        async with client.stream("POST", "/chat/completions", json=request) as first:
            pieces = first.aiter_bytes()
            start = await anext(pieces)
            others = [
                asyncio.create_task(read(client, {**request, "stream": is_stream}))
                for is_stream in (True, False, False)
            ]
            rest = b"".join([piece async for piece in pieces])
        replies = [((start + rest).decode(), first.headers["x-sameway-cache"]), *await asyncio.gather(*others)]
    assert upstream.seen().generations == 1
    assert sorted(kind for _, kind in replies) == ["coalesced", "coalesced", "coalesced", "miss"]
    assert replies[0][0] == replies[1][0]
    assert all("word0" in text and "word19" in text for text, _ in replies)


async def test_a_reader_who_leaves_takes_nothing_from_the_others(gateway: Gateway, upstream: Upstream) -> None:
    """The client that started the generation leaves; the one that joined gets it whole, and it is cached."""
    request = body()
    async with httpx.AsyncClient(base_url=gateway.base_url, headers=HEADERS, timeout=30) as client:
        async with client.stream("POST", "/chat/completions", json=request) as leaving:
            pieces = leaving.aiter_bytes()  # kept: collecting it would close the stream
            await anext(pieces)
            joined = asyncio.create_task(read(client, request))
            await asyncio.sleep(0.6)
        text, kind = await joined
        assert kind == "coalesced"
        assert text.endswith("data: [DONE]\n\n")
        assert (await read(client, request))[1] == "exact"
    assert upstream.seen().dropped == 0


async def test_the_last_reader_cancels_upstream(gateway: Gateway, upstream: Upstream) -> None:
    """Everybody leaves, streamed or waiting for a whole: the upstream sees its connection close, and nothing is cached."""
    for is_stream in (True, False):
        upstream.reset()
        request = {**body(is_stream), **({} if is_stream else {"model": "late"})}
        async with httpx.AsyncClient(base_url=gateway.base_url, headers=HEADERS) as client:
            reading = [asyncio.create_task(read(client, request)) for _ in range(3)]
            await asyncio.to_thread(wait_for, lambda: upstream.seen().generations == 1)
            await asyncio.sleep(0.25)
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)
        wait_for(lambda: upstream.seen().dropped == 1, 5, lambda: str(upstream.seen()))
        async with httpx.AsyncClient(base_url=gateway.base_url, headers=HEADERS, timeout=30) as client:
            assert (await read(client, request))[1] == "miss"


async def test_a_failure_reaches_every_reader(gateway: Gateway, upstream: Upstream) -> None:
    """When the shared generation breaks, every reader is told, in the way it reads."""
    request = {"model": "cut-three", "messages": [{"role": "user", "content": f"broken {next(_fresh)}"}]}
    async with httpx.AsyncClient(base_url=gateway.base_url, headers=HEADERS, timeout=30) as client:
        replies = await asyncio.gather(
            *(client.post("/chat/completions", json={**request, "stream": s}) for s in (False, True, False, True))
        )
    for reply, is_stream in zip(replies, (False, True, False, True), strict=True):
        if is_stream:
            assert '"error"' in reply.text
            assert "[DONE]" not in reply.text
        else:
            assert reply.status_code == 502


async def test_the_clients_deadline_is_kept(gateway: Gateway, upstream: Upstream) -> None:
    """What cannot finish within the client's own read time-out is given up at it, down to the upstream's connection."""
    headers = {**HEADERS, "x-stainless-read-timeout": "0.3"}
    async with httpx.AsyncClient(base_url=gateway.base_url, headers=headers, timeout=30) as client:
        reply = await client.post("/chat/completions", json={**body(is_stream=False), "model": "later"})
    assert reply.status_code == 504
    assert reply.json()["error"]["code"] == "deadline_exceeded"
    wait_for(lambda: upstream.seen().dropped == 1)


async def test_who_asks_for_more_flies_alone(gateway: Gateway, upstream: Upstream) -> None:
    """A request with its own bound on age or error does not join the flight of one without: it might be given an older answer."""
    request = body()
    async with httpx.AsyncClient(base_url=gateway.base_url, headers=HEADERS, timeout=30) as client:
        stricter = client.post("/chat/completions", json=request, headers={"cache-control": "max-age=1"})
        await asyncio.gather(read(client, request), stricter)
    assert upstream.seen().generations == 2
