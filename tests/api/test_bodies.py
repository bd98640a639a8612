"""A request's key and body as they are read: three headers for a key, and gzip, whatever it expands to."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
from typing import Any

import pytest

from gateway.api.asgi import key_of
from gateway.journey.bodies import Bodies
from gateway.wire.errors import ApiError, Unauthenticated

_MAX = 1 << 20
_JSON = json.dumps({"model": "mock", "text": "abc" * 1000}).encode()


async def read(body: bytes, *, pieces: int = 1, **headers: str) -> bytes:
    """The body as the gateway reads it, sent in some pieces without an announced length."""
    size = -(-len(body) // pieces) or 1
    sent = [body[start : start + size] for start in range(0, len(body), size)] or [b""]

    async def receive() -> dict[str, Any]:
        piece = sent.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(sent)}

    return await Bodies().of(receive, {"content-encoding": "gzip", **headers}, None).whole(_MAX)


async def refusal(body: bytes, **how: Any) -> tuple[int, str | None, str]:
    with pytest.raises(ApiError) as refused:
        await read(body, **how)
    return refused.value.http_status, refused.value.error_code, refused.value.message


@pytest.mark.parametrize("pieces", [1, 7])
@pytest.mark.parametrize("coding", ["gzip", "GZIP", " x-gzip "])
async def test_a_compressed_body_is_read(pieces: int, coding: str) -> None:
    """In one piece or several, by either name of the coding."""
    assert await read(gzip.compress(_JSON), pieces=pieces, **{"content-encoding": coding}) == _JSON


async def test_members_are_joined() -> None:
    """A body of several gzip members is their contents one after the other; `identity` and no coding are plain."""
    noise = os.urandom(_MAX - len(_JSON))
    assert await read(gzip.compress(_JSON) + gzip.compress(b"") + gzip.compress(noise), pieces=3) == _JSON + noise
    for coding in ("identity", ""):
        assert await read(_JSON, **{"content-encoding": coding}) == _JSON


@pytest.mark.parametrize(
    ("body", "status", "code", "words"),
    [
        (b"", 400, "invalid_encoding", "ends before"),
        (_JSON, 400, "invalid_encoding", "or not all of it"),
        (gzip.compress(_JSON)[:-1], 400, "invalid_encoding", "ends before"),
        (gzip.compress(_JSON)[:-8] + bytes(8), 400, "invalid_encoding", "or not all of it"),
        (gzip.compress(_JSON) + b"trailing", 400, "invalid_encoding", "or not all of it"),
        (gzip.compress(_JSON) + bytes(100), 400, "invalid_encoding", "or not all of it"),
        (gzip.compress(_JSON) + b"\x1f", 400, "invalid_encoding", "ends before"),
        (gzip.compress(bytes(_MAX + 1)), 413, "request_too_large", "decompressed"),
        (gzip.compress(bytes(1 << 26)), 413, "request_too_large", "decompressed"),
        (gzip.compress(bytes(_MAX)) + gzip.compress(b"x"), 413, "request_too_large", "decompressed"),
        (gzip.compress(b"") * 1001, 400, "invalid_encoding", "1000 members"),
        (os.urandom(_MAX + 1), 413, "request_too_large", "request body is larger"),
    ],
    ids=[
        "empty",
        "plain",
        "cut",
        "checksum",
        "text after",
        "zeros after",
        "cut member",
        "a byte over",
        "bomb",
        "over in two",
        "many members",
        "over as sent",
    ],
)
async def test_what_is_no_gzip_or_too_much_is_refused(body: bytes, status: int, code: str | None, words: str) -> None:
    """Damage of any kind is 400; what expands beyond the limit is 413, and is not expanded further."""
    found = await refusal(body, pieces=2)
    assert found[:2] == (status, code)
    assert words in found[2]


@pytest.mark.parametrize("coding", ["deflate", "br", "gzip, gzip", "zstd", "gzip;q=1"])
async def test_other_codings_are_named_in_the_refusal(coding: str) -> None:
    """415 says which coding came, and which one is expected."""
    status, code, message = await refusal(b"x", **{"content-encoding": coding})
    assert (status, code) == (415, "unsupported_content_encoding")
    assert f"{coding!r}: expected gzip" in message


async def test_other_requests_run_while_a_body_expands() -> None:
    """Each step of the work is bounded: the event loop gets to run between them."""
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    running = asyncio.create_task(others())
    await read(gzip.compress(bytes(_MAX)))
    running.cancel()
    assert turns >= 4


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({}, None),
        ({"authorization": "Bearer k"}, "k"),
        ({"authorization": "bearer  k "}, "k"),
        ({"api-key": "k"}, "k"),
        ({"x-api-key": "k"}, "k"),
        ({"authorization": "Bearer k", "api-key": "k", "x-api-key": "k"}, "k"),
        ({"authorization": "Basic dTpw", "api-key": "k"}, "k"),
        ({"authorization": "Bearer ", "x-api-key": "k"}, "k"),
        ({"authorization": "Bearer k", "api-key": ""}, "k"),
    ],
)
def test_a_key_has_three_headers(headers: dict[str, str], key: str | None) -> None:
    """OpenAI's, Azure's or Anthropic's; an empty one is none."""
    assert key_of(headers) == key


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer a", "api-key": "b"},
        {"authorization": "Bearer a", "x-api-key": "b"},
        {"api-key": "a", "x-api-key": "b"},
        {"authorization": "Bearer a", "api-key": "a", "x-api-key": "b"},
    ],
)
def test_two_different_keys_are_no_key(headers: dict[str, str]) -> None:
    """Whose request it is cannot be known: 401 that says so, and shows neither key."""
    with pytest.raises(Unauthenticated, match="two different API keys") as refused:
        key_of(headers)
    assert "`a`" not in refused.value.message.replace("`api-key`", "")
