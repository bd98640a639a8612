"""`POST /v1/metrics`, `/v1/logs` and `/v1/traces`: what a signed-in Claude Code tells of itself.

Source: the gateway protocol of Claude Code 2.1.197, "Telemetry", which wants a 200 also from a gateway
that drops it. The ledger and the traces of this gateway have the same usage, as it was paid.
"""

import asyncio
from functools import partial

from gateway.api.asgi import Receive, Scope, Send, fail, headers_of, key_of, send_whole
from gateway.api.headers import JSON, base_headers
from gateway.api.messages import InAnthropicsShape
from gateway.journey.turn import arrive
from gateway.pipeline import Pipeline

PATHS = ("/v1/metrics", "/v1/logs", "/v1/traces")


class Telemetry:
    """The endpoint for OTLP over HTTP: keeps nothing of it, and takes it of callers alone, within the limits of bodies."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrival = arrive("telemetry")
        send = InAnthropicsShape.named(send)
        headers, settings = headers_of(scope), self._pipeline.settings
        try:
            identity = await self._pipeline.authenticate(key_of(headers), scope.get("client"))
            body = self._pipeline.bodies.of(receive, headers, identity)
            body.is_counted = True
            async for _ in body.read(settings.body_bytes_max):
                pass
            await send_whole(send, 200, [JSON, *base_headers(arrival.request_id)], b"{}")
        except (Exception, asyncio.CancelledError) as error:
            await fail(error, arrival.request_id, partial(InAnthropicsShape.send_error, send, arrival.request_id))
