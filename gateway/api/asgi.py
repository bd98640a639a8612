"""Helpers for raw ASGI: read a request's headers, and send a response that is not a stream.

Format: ASGI HTTP specification 2.3. Knows no routes. Invariant: the response to an exception tells
the client nothing internal.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from itertools import chain
from typing import Any

import msgspec

from gateway.accounts.database import is_down, name_of
from gateway.api.headers import Headers, error_headers
from gateway.backends.base import BackendBroken, BackendError
from gateway.backends.refusals import from_backend
from gateway.journey.bodies import BodyBroken, ClientGone
from gateway.journey.turn import Ended
from gateway.loggers import get_logger
from gateway.wire.errors import ApiError, BadRequest, Unauthenticated, Unavailable

_PIECE_BYTES = 64 << 10
_KEY_HEADERS = frozenset({"api-key", "x-api-key"})  # of Azure's clients and of Anthropic's

_log = get_logger()

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


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
    """The API key in `Authorization: Bearer ...`, `api-key` or `x-api-key`; None without a key.

    Raises Unauthenticated if two headers have different keys.
    """
    scheme, _, token = headers.get("authorization", "").partition(" ")
    key = token.strip() if scheme.lower() == "bearer" else ""
    for name in _KEY_HEADERS.intersection(headers):
        header_key = headers[name]
        if header_key and key and header_key != key:
            raise Unauthenticated(
                "The request has two different API keys, in two of the headers `authorization`, `api-key` and "
                "`x-api-key`: send one key"
            )
        key = key or header_key or ""
    return key or None


def model_of(scope: Scope) -> str | None:
    """The deployment that an Azure path names, which is an alias here; None on other paths."""
    named: str | None = scope.get("path_params", _NO_PARAMS).get("model")
    return named


_NO_PARAMS: Mapping[str, str] = {}


async def send_whole(send: Send, status: int, headers: Headers, body: bytes) -> None:
    """Send a response in one piece. Adds `content-length` to `headers`."""
    if status != 204:
        headers.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    if len(body) > _PIECE_BYTES:
        await send_body(send, body)
    else:
        await send({"type": "http.response.body", "body": body})


async def send_body(send: Send, body: bytes) -> None:
    """Send a body. A body over 64 KiB leaves in slices as its client takes them, without a whole
    copy.
    """
    unsent = memoryview(body)
    while len(unsent) > _PIECE_BYTES:
        await send({"type": "http.response.body", "body": bytes(unsent[:_PIECE_BYTES]), "more_body": True})
        unsent = unsent[_PIECE_BYTES:]
    await send({"type": "http.response.body", "body": bytes(unsent)})


def with_own_headers(send: Send, of: Callable[[Message], Iterable[tuple[bytes, bytes]]]) -> Send:
    """Wrap `send` so that a response has the headers that `of` makes of its start."""

    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*of(message)]}
        await send(message)

    return sent


def with_headers(send: Send, more_of: Callable[[Message], Iterable[tuple[bytes, bytes]]]) -> Send:
    """Wrap `send` so that it adds the headers that `more_of` returns for the start of a response."""
    return with_own_headers(send, lambda start: [*start["headers"], *more_of(start)])


async def send_error(send: Send, request_id: str, error: ApiError) -> None:
    """Send an error in OpenAI's shape."""
    await send_whole(send, error.http_status, error_headers(request_id, error), error.body())


async def fail(
    error: BaseException,
    request_id: str,
    respond: Callable[[ApiError], Awaitable[None]],
    note: Callable[[Ended], None] | None = None,
) -> Ended:
    """Send any exception to the client as an ApiError, through `respond`; returns the request's
    end.

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
    """The ApiError to send, or None, and the request's end.

    A bug is logged, and its text is not sent. Cancellation only happens at shutdown.
    """
    if isinstance(error, ClientGone):
        broken = BadRequest(
            "The request's body ended before its end, or is not valid: send it again", code="body_broken"
        )
        return broken if isinstance(error, BodyBroken) else None, Ended(499, is_disconnected=True)
    if isinstance(error, asyncio.CancelledError):
        error = Unavailable("The gateway was stopped before the answer was complete", code="shutting_down")
    elif isinstance(error, RecursionError):  # decoded, and too deep for what reads it then
        error = BadRequest("The body is nested too deeply", code="invalid_json")
    elif isinstance(error, msgspec.DecodeError):  # the light parse skipped the invalid part
        error = from_backend(BackendBroken("The deployment's answer is not JSON"))
    elif isinstance(error, BackendError):
        error = from_backend(error)
    elif is_down(error):
        _log.warning("database_failed", request_id=request_id, reason=name_of(error))
        error = Unavailable("The database does not answer; try again shortly", code="database_unavailable")
    if not isinstance(error, ApiError):
        _log.error("request_failed", request_id=request_id, exc_info=error)
        error = ApiError("The gateway failed while it handled this request", code="internal_error")
    return error, Ended(error.http_status, error.error_code or error.type, error.own_words)
