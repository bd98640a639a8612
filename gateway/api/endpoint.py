"""An endpoint that takes one JSON object and answers with one: what `/v1/embeddings` and `/v1/feedback` have in common.

Knows the wire and no shapes. Invariant: whatever happens a request gets one response and one record.
"""

import asyncio
from abc import ABC, abstractmethod
from typing import Any

import msgspec

from gateway.accounts import Identity
from gateway.api.asgi import Receive, Scope, Send, bearer_of, headers_of, read_body, send_failure, send_whole
from gateway.api.headers import JSON, base_headers
from gateway.journey.record import Record, new_record
from gateway.pipeline import Pipeline
from gateway.settings import Settings
from gateway.wire.requests import decode_object


class JsonEndpoint(ABC):
    """What is left to say is `kind`, the name in records, and `answer`."""

    kind: str

    def __init__(self, settings: Settings, pipeline: Pipeline) -> None:
        self.settings = settings
        self._pipeline = pipeline

    @abstractmethod
    async def answer(self, body: dict[str, Any], identity: Identity, record: Record) -> Any:
        """The reply to the decoded body of a caller who is known and within the limits. Raises ApiError."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = headers_of(scope)
        record = new_record(self.kind)
        record.cache = "bypass"
        try:
            identity = self._pipeline.authenticate(bearer_of(headers), record)
            body = decode_object(await read_body(receive, headers, self.settings.body_bytes_max))
            limited = await self._pipeline.limits.take_requests(identity)
            reply = await self.answer(body, identity, record)
            out = [JSON, *base_headers(record.request_id), *limited.items()]
            await send_whole(send, 200, out, msgspec.json.encode(reply))
        except (Exception, asyncio.CancelledError) as error:
            await send_failure(send, error, record)
        finally:
            self._pipeline.finish(record, None, None)
