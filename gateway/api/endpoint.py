"""The base of endpoints that take and return one JSON object: `/v1/feedback`, `/tokenize`.

It contains the wire and no shapes. Invariant: every request gets one response and one record.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec

from gateway.accounts import Identity
from gateway.api import asgi
from gateway.api.headers import JSON, base_headers
from gateway.journey.record import record_of
from gateway.journey.turn import Arrival, Ended, arrive, elapsed_ms_since
from gateway.pipeline import Pipeline
from gateway.settings import Settings
from gateway.wire.errors import shown
from gateway.wire.requests import decode_object

Request = TypeVar("Request")


class JsonEndpoint(ABC, Generic[Request]):
    """One endpoint. A subclass defines `operation`, its name in records, `read` and `answer`."""

    operation: str
    send_error = staticmethod(asgi.send_error)

    def __init__(self, settings: Settings, pipeline: Pipeline) -> None:
        self.settings = settings
        self._pipeline = pipeline

    async def body(self, scope: asgi.Scope, receive: asgi.Receive, headers: Mapping[str, str]) -> dict[str, Any]:
        """The decoded body. Raises ApiError."""
        raw = await asgi.read_body(receive, headers, self.settings.body_bytes_max)
        return decode_object(raw, asgi.model_of(scope))

    @abstractmethod
    def read(self, body: dict[str, Any]) -> tuple[Request, str]:
        """The request in the decoded `body`, and its alias; empty for none. Raises ApiError."""

    @abstractmethod
    async def answer(self, request: Request, identity: Identity, arrival: Arrival) -> Any:
        """The reply to `request`. Limits of requests are checked before. Raises ApiError."""

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        headers = asgi.headers_of(scope)
        arrival = arrive(self.operation)
        identity: Identity | None = None
        alias, asked, ended = "", "", Ended()
        try:
            # decision: auth-before-body
            identity = await self._pipeline.authenticate(asgi.key_of(headers))
            body = await self.body(scope, receive, headers)
            asked = shown(model) if isinstance(model := body.get("model"), str) else ""
            limited = await self._pipeline.limits.take_requests(identity)
            request, alias = self.read(body)
            reply = await self.answer(request, identity, arrival)
            out = [JSON, *base_headers(arrival.request_id), *limited.items()]
            await asgi.send_whole(send, 200, out, msgspec.json.encode(reply))
        except (Exception, asyncio.CancelledError) as error:
            ended = await asgi.fail(error, arrival.request_id, partial(self.send_error, send, arrival.request_id))
        finally:
            duration_ms = elapsed_ms_since(arrival.at_s)
            record = record_of(
                arrival,
                ended,
                duration_ms,
                identity=identity,
                alias=alias,
                asked="" if alias else asked,
                cache="bypass",
            )
            self._pipeline.emit(record)
