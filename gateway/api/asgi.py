"""Helpers for raw ASGI: read a request within its limits, and send a response that is no stream.

Format: ASGI HTTP specification 2.5. Knows no routes. Invariant: no more of a body than the limit is
held, whatever its announced length.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from itertools import chain
from typing import Any

import msgspec

from gateway.api.headers import JSON, Headers, base_headers
from gateway.backends.base import BackendBroken
from gateway.backends.refusals import from_backend
from gateway.journey.turn import Ended
from gateway.loggers import get_logger
from gateway.wire.errors import ApiError, TooLarge, Unavailable, UnsupportedMediaType

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


def bearer_of(headers: Mapping[str, str]) -> str | None:
    """The key in `Authorization: Bearer ...`; None if there is none."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token.strip() else None


async def read_body(receive: Receive, headers: Mapping[str, str], bytes_max: int) -> bytes:
    """The whole body, of `bytes_max` bytes at most.

    Raises TooLarge, UnsupportedMediaType for a compressed body, ClientGone.
    """
    announced = headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > bytes_max:
        raise _too_large(bytes_max)
    if headers.get("content-encoding", "identity") != "identity":
        raise UnsupportedMediaType("Compressed request bodies are not supported: send it without Content-Encoding")
    message = await receive()
    if not message.get("more_body") and message["type"] == "http.request":
        body: bytes = message.get("body", b"")
        if len(body) > bytes_max:
            raise _too_large(bytes_max)
        return body
    parts, size = [], 0
    while message["type"] == "http.request":
        part = message.get("body", b"")
        size += len(part)
        if size > bytes_max:
            raise _too_large(bytes_max)
        parts.append(part)
        if not message.get("more_body"):
            return b"".join(parts)
        message = await receive()
    raise ClientGone


def _too_large(bytes_max: int) -> TooLarge:
    return TooLarge(f"The request body is larger than the limit of {bytes_max} bytes", headers={"connection": "close"})


async def send_whole(send: Send, status: int, headers: Headers, body: bytes) -> None:
    """Send a response in one piece. Adds `content-length` to `headers`."""
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
    if isinstance(error, asyncio.CancelledError):
        error = Unavailable("The gateway was stopped before the answer was complete", code="shutting_down")
    elif isinstance(error, msgspec.DecodeError):  # the light parse skipped the invalid part
        error = from_backend(BackendBroken("The deployment's answer is not JSON"))
    if not isinstance(error, ApiError):
        _log.error("request_failed", request_id=request_id, exc_info=error)
        error = ApiError("The gateway failed while it handled this request", code="internal_error")
    return error, Ended(error.http_status, error.error_code or error.type)
