"""Helpers for raw ASGI: read a request within its limits, and send a response that is no stream.

Formats: ASGI HTTP specification 2.5; gzip (RFC 1952). Knows no routes. Invariant: no more of a body
than the limit is held, whatever its announced length, and no more of its decompressed content.
"""

import asyncio
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from itertools import chain
from typing import Any

import msgspec

from gateway.accounts.database import is_down, name_of
from gateway.api.headers import JSON, Headers, base_headers
from gateway.backends.base import BackendBroken
from gateway.backends.refusals import from_backend
from gateway.journey.turn import Ended
from gateway.loggers import get_logger
from gateway.transport.http_server import ClientStalled
from gateway.wire.errors import (
    ApiError,
    BadRequest,
    ReaderStalled,
    TooLarge,
    Unauthenticated,
    Unavailable,
    UnsupportedMediaType,
)

_KEY_HEADERS = frozenset({"api-key", "x-api-key"})  # of Azure's clients and of Anthropic's
_GZIP_WBITS = 31  # zlib's argument for one gzip member with its checksum
_GZIP_STEP_BYTES = 256 << 10  # one to two milliseconds of work
_GZIP_MEMBERS_MAX = 1_000  # a block compressor makes one for each 64 KiB; each costs time, empty or not

_log = get_logger()

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class ClientGone(Exception):
    """The client left: no response is sent."""


def headers_of(scope: Scope) -> dict[str, str]:
    """The request's headers by lower-case name.

    The values of repeated headers are joined by commas (RFC 9110, section 5.3).
    """
    raw: list[tuple[bytes, bytes]] = scope["headers"]
    if not raw:
        return {}
    # decoded together, which is faster: no header contains a line end
    texts = b"\n".join(chain.from_iterable(raw)).decode("latin-1").split("\n")
    names, values = texts[::2], texts[1::2]
    headers = dict(zip(names, values, strict=True))
    if len(headers) < len(names):
        headers.clear()
        for name, value in zip(names, values, strict=True):
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers


def key_of(headers: Mapping[str, str]) -> str | None:
    """The API key in `Authorization: Bearer ...`, `api-key` or `x-api-key`; None if there is none.

    Raises Unauthenticated if two of them differ: which one is meant cannot be known.
    """
    scheme, _, token = headers.get("authorization", "").partition(" ")
    key = token.strip() if scheme.lower() == "bearer" else ""
    for name in _KEY_HEADERS.intersection(headers):
        other = headers[name]
        if other and key and other != key:
            raise Unauthenticated(
                "The request has two different API keys, in two of the headers `authorization`, `api-key` and "
                "`x-api-key`: send one key"
            )
        key = key or other or ""
    return key or None


def model_of(scope: Scope) -> str | None:
    """The deployment that an Azure path names, which is an alias here; None on other paths."""
    named: str | None = scope.get("path_params", _NO_PARAMS).get("model")
    return named


_NO_PARAMS: Mapping[str, str] = {}


async def read_body(receive: Receive, headers: Mapping[str, str], bytes_max: int) -> bytes:
    """The whole body, of `bytes_max` bytes at most, compressed and decompressed.

    Raises TooLarge, UnsupportedMediaType, BadRequest for invalid gzip, ClientGone.
    """
    announced = headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > bytes_max:
        raise _too_large(bytes_max)
    encoding = headers.get("content-encoding")
    if encoding is None:
        return await _received(receive, bytes_max)
    match encoding.strip().lower():
        case "identity" | "":
            return await _received(receive, bytes_max)
        case "gzip" | "x-gzip":  # RFC 9110, section 8.4.1.3: the same
            return await _decompressed(await _received(receive, bytes_max), bytes_max)
    raise UnsupportedMediaType(
        f"The body has Content-Encoding {encoding[:100]!r}: expected gzip, or none for a plain body"
    )


async def pieces(receive: Receive, headers: Mapping[str, str], bytes_max: int) -> AsyncIterator[bytes]:
    """A body of `bytes_max` bytes at most, as it arrives. Raises TooLarge, UnsupportedMediaType, ClientGone."""
    if headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise UnsupportedMediaType("Files can't be sent with a Content-Encoding: send them as they are")
    announced = headers.get("content-length", "0")
    left = -1 if announced.isdecimal() and int(announced) > bytes_max else bytes_max
    while left >= 0:
        message = await receive()
        if message["type"] != "http.request":
            raise ClientGone
        data: bytes = message.get("body", b"")
        left -= len(data)
        if left >= 0:
            yield data
            if not message.get("more_body"):
                return
    raise _too_large(bytes_max)


async def _received(receive: Receive, bytes_max: int) -> bytes:
    """The whole body as it was sent. Raises TooLarge, ClientGone."""
    parts, size = [], 0
    while (message := await receive())["type"] == "http.request":
        part = message.get("body", b"")
        size += len(part)
        if size > bytes_max:
            raise _too_large(bytes_max)
        parts.append(part)
        if not message.get("more_body"):
            return b"".join(parts)
    raise ClientGone


async def _decompressed(body: bytes, bytes_max: int) -> bytes:
    """The content of all gzip members in `body` (RFC 1952, section 2.2).

    Works in bounded steps, and other requests run between them. Raises TooLarge, BadRequest.
    """
    inflate, members, parts, size = zlib.decompressobj(_GZIP_WBITS), 1, list[bytes](), 0
    for start in range(0, len(body), _GZIP_STEP_BYTES):
        # a member's end returns the rest of its input: a slice bounds what is copied
        rest = body[start : start + _GZIP_STEP_BYTES]
        while rest:
            if inflate.eof:
                inflate, members = zlib.decompressobj(_GZIP_WBITS), members + 1
            if members > _GZIP_MEMBERS_MAX:
                raise _bad_gzip(f"it has more than {_GZIP_MEMBERS_MAX} members")
            try:
                part = inflate.decompress(rest, _GZIP_STEP_BYTES)
            except zlib.error:
                raise _bad_gzip("it is not gzip, or not all of it") from None
            size += len(part)
            if size > bytes_max:
                raise _too_large(bytes_max, "decompressed ")
            parts.append(part)
            rest = inflate.unused_data or inflate.unconsumed_tail
            await asyncio.sleep(0)
    if not inflate.eof:
        raise _bad_gzip("it ends before its data does")
    return b"".join(parts)


def _bad_gzip(why: str) -> BadRequest:
    return BadRequest(f"The body has Content-Encoding gzip, but {why}", code="invalid_encoding")


def _too_large(bytes_max: int, how: str = "") -> TooLarge:
    return TooLarge(
        f"The {how}request body is larger than the limit of {bytes_max} bytes", headers={"connection": "close"}
    )


async def send_whole(send: Send, status: int, headers: Headers, body: bytes) -> None:
    """Send a response in one piece. Adds `content-length` to `headers`."""
    if status != 204:
        headers.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, request_id: str, error: ApiError) -> None:
    """Send an error in OpenAI's shape."""
    headers = [JSON, *base_headers(request_id)]
    headers += [(name.encode(), value.encode("latin-1", "replace")) for name, value in error.headers.items()]
    await send_whole(send, error.http_status, headers, error.body())


async def fail(
    error: BaseException,
    request_id: str,
    respond: Callable[[ApiError], Awaitable[None]],
    note: Callable[[Ended], None] | None = None,
) -> Ended:
    """Send any exception to the client as an ApiError, by `respond`; returns the request's end.

    `note` is called with that end before the response leaves. A client that has left gets no
    response. No frame of the exception's traceback holds the ApiError, so that a refusal leaves no
    reference cycle.
    """
    refusal, ended = _translated(error, request_id)
    if note is not None:
        note(ended)
    if refusal is not None:
        await respond(refusal)
    return ended


def _translated(error: BaseException, request_id: str) -> tuple[ApiError | None, Ended]:
    """The ApiError to send, if any, and the request's end.

    A bug is logged, and never sent. Cancellation only happens at shutdown.
    """
    if isinstance(error, ClientGone):
        return None, Ended(499, is_disconnected=True)
    if isinstance(error, ClientStalled):
        error = ReaderStalled(error.stall_s)
    elif isinstance(error, asyncio.CancelledError):
        error = Unavailable("The gateway was stopped before the answer was complete", code="shutting_down")
    elif isinstance(error, RecursionError):  # decoded, and too deep for what reads it then
        error = BadRequest("The body is nested too deeply", code="invalid_json")
    elif isinstance(error, msgspec.DecodeError):  # the light parse skipped the invalid part
        error = from_backend(BackendBroken("The deployment's answer is not JSON"))
    elif is_down(error):
        _log.warning("database_failed", request_id=request_id, reason=name_of(error))
        error = Unavailable("The database does not answer; try again shortly", code="database_unavailable")
    if not isinstance(error, ApiError):
        _log.error("request_failed", request_id=request_id, exc_info=error)
        error = ApiError("The gateway failed while it handled this request", code="internal_error")
    return error, Ended(error.http_status, error.error_code or error.type, error.own_words)
