"""`/v1/models` and `/v1/models/{id}`: the aliases that a key may use, and the embedder.

Shapes: OpenAI API reference, "Models"; OpenRouter, "Models", for a model's capabilities. A client
that sends `anthropic-version` gets the shape of Anthropic's API reference, "List Models".
Invariant: the key may use every listed model.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import unquote

import msgspec

from gateway.accounts import Identity
from gateway.api.asgi import Receive, Scope, Send, headers_of, key_of, send_error, send_whole
from gateway.api.endpoint import limit_of, page_of, query_of
from gateway.api.headers import JSON, base_headers
from gateway.api.messages import InAnthropicsShape
from gateway.journey.turn import arrive
from gateway.pipeline import Pipeline
from gateway.settings import Settings, is_pattern
from gateway.wire.errors import ApiError, BadRequest, Forbidden, NotFound, shown
from policies import Demand


class Models:
    """The endpoint for the list and for one model. One instance per worker."""

    def __init__(self, settings: Settings, pipeline: Pipeline, started_s: float) -> None:
        self._settings = settings
        self._pipeline = pipeline
        self._created = int(started_s)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrival, headers = arrive("models"), headers_of(scope)
        is_anthropics = "anthropic-version" in headers
        if is_anthropics:
            send = InAnthropicsShape.named(send)
        try:
            identity = await self._pipeline.authenticate(key_of(headers), scope.get("client"))
            name = unquote(scope["path"].removeprefix("/v1/models").lstrip("/"))
            reply = self._one(identity, name) if name else self._all(identity)
            if scope["method"] == "DELETE":  # at OpenAI, too, a key that does not own a model gets this
                words = "You have insufficient permissions for this operation: models are the operator's to remove"
                raise Forbidden(words, param="model", code="insufficient_permissions")
            if is_anthropics:
                reply = _anthropics(reply) if name else _page(reply["data"], query_of(scope))
        except ApiError as error:
            await (InAnthropicsShape.send_error if is_anthropics else send_error)(send, arrival.request_id, error)
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
        deployments = self._pipeline.fleet.alias(name).deployments.values()
        now = [deployment.candidate(Demand(0, 0, 0)) for deployment in deployments]
        # routing finds the deployment that offers what a request needs
        offers = sorted(frozenset().union(*(candidate.capabilities for candidate in now)))
        assumed = [deployment.are_capabilities_assumed for deployment in deployments]
        outputs = [{} if is_assumed else _OUTPUTS for is_assumed in assumed]
        output_kinds = [
            {known[can] for can in candidate.capabilities & known.keys()}
            for candidate, known in zip(now, outputs, strict=True)
        ]
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "sameway",
            "context_length": max(
                (candidate.context_tokens_max for candidate in now if candidate.context_tokens_max), default=None
            ),
            "architecture": {
                "input_modalities": ["text", *(_INPUTS[offer] for offer in offers if offer in _INPUTS)],
                "output_modalities": sorted(frozenset().union(*(kinds or {"text"} for kinds in output_kinds))),
            },
            "supported_parameters": sorted({field for offer in offers for field in _FIELDS.get(offer, ())}),
            "capabilities": offers,
            "are_capabilities_assumed": any(assumed),
        }


def _anthropics(model: dict[str, Any]) -> dict[str, Any]:
    at = datetime.fromtimestamp(model["created"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    named = {"type": "model", "id": model["id"], "display_name": model["id"], "created_at": at, "lifecycle": "active"}
    return {**named, "max_input_tokens": model["context_length"]}


def _page(models: list[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """A page of Anthropic's list. Raises BadRequest."""
    limit = limit_of(query, _LISTED, _LISTED_MAX)
    names, places = [model["id"] for model in models], {"after_id": -1, "before_id": len(models)}
    for field in places.keys() & query.keys():
        if query[field] not in names:
            raise BadRequest(f"There is no model `{shown(query[field])}` here", param=field, code="invalid_value")
        places[field] = names.index(query[field])
    page = models[places["after_id"] + 1 : places["before_id"]]
    data = [_anthropics(model) for model in (page[-limit:] if "before_id" in query else page[:limit])]
    return page_of(data, len(page) > limit)


_LISTED, _LISTED_MAX = 20, 1_000
_INPUTS = {"vision": "image", "audio": "audio", "files": "file"}
_OUTPUTS = {"embeddings": "embeddings", "rerank": "rerank", "moderations": "moderations", "speech": "audio"}
_OUTPUTS |= dict.fromkeys(("images", "image_edits", "image_variations"), "image")
_FIELDS = {
    "tools": ("tools", "tool_choice", "parallel_tool_calls"),
    "json_object": ("response_format",),
    "json_schema": ("response_format", "structured_outputs"),
    "logprobs": ("logprobs", "top_logprobs"),
    "reasoning": ("reasoning", "reasoning_effort"),
    "n": ("n",),
    "suffix": ("suffix",),
}
