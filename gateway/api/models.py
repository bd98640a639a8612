"""`GET /v1/models` and `/v1/models/{id}`: the aliases that a key may use, and the embedder.

Shapes: OpenAI API reference, "Models". Invariant: the key may use every listed model.
"""

from typing import Any
from urllib.parse import unquote

import msgspec

from gateway.accounts import Identity
from gateway.api.asgi import Receive, Scope, Send, headers_of, key_of, send_error, send_whole
from gateway.api.headers import JSON, base_headers
from gateway.journey.turn import arrive
from gateway.pipeline import Pipeline
from gateway.settings import Settings, is_pattern
from gateway.wire.errors import ApiError, NotFound, shown


class Models:
    """The endpoint for the list and for one model. One instance per worker."""

    def __init__(self, settings: Settings, pipeline: Pipeline, started_s: float) -> None:
        self._settings = settings
        self._pipeline = pipeline
        self._created = int(started_s)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrival = arrive("models")
        try:
            identity = await self._pipeline.authenticate(key_of(headers_of(scope)))
            asked = unquote(scope["path"].removeprefix("/v1/models").lstrip("/"))
            reply = self._one(identity, asked) if asked else self._all(identity)
        except ApiError as error:
            await send_error(send, arrival.request_id, error)
            return
        await send_whole(send, 200, [JSON, *base_headers(arrival.request_id)], msgspec.json.encode(reply))

    def _names(self, identity: Identity) -> list[str]:
        allowed = identity.key.models
        names = (name for name in self._settings.names if not is_pattern(name))
        return [name for name in names if allowed is None or name in allowed]

    def _all(self, identity: Identity) -> dict[str, Any]:
        return {"object": "list", "data": [self._model(name) for name in self._names(identity)]}

    def _one(self, identity: Identity, name: str) -> dict[str, Any]:
        pattern = self._pipeline.fleet.configured(name)
        allowed = identity.key.models
        is_passed = is_pattern(pattern) and (allowed is None or name in allowed or pattern in allowed)
        if not is_passed and name not in self._names(identity):
            raise NotFound(f"The model `{shown(name)}` does not exist", param="model", code="model_not_found")
        return self._model(name)

    def _model(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._created, "owned_by": "sameway"}
