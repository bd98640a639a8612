"""Anthropic's Messages API over HTTP, without litellm.

Connections, time limits and failures are handled as for an OpenAI-compatible server; this file adds
the address, the headers, and two translations. A request in Anthropic's shape is sent unchanged.
Format: Anthropic API reference, "Messages", "Versions" and "Beta headers". Knows no teams, caches
or routes. Invariant: in such a request only `model`, `stream`, the gateway's own `cache`, and a
length and tool calls that a budget cuts are changed; if none applies, its bytes are sent as
received.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.backends.anthropic.answer import MessageReader
from gateway.backends.anthropic.request import to_message
from gateway.backends.base import BackendRejected, BackendRequest, Native
from gateway.backends.openai.backend import OpenAIBackend
from gateway.reserved import with_calls_bound
from gateway.wire.errors import BadRequest
from gateway.wire.requests import decode_strictly
from gateway.wire.types import CHAT, Kind

_VERSION = "2023-06-01"
_COUNT = Kind("count_tokens", "/messages/count_tokens", "messages", is_plain=True)
_COUNT_S = 10.0


class AnthropicBackend(OpenAIBackend):
    """One deployment at Anthropic's API, or at a server with the same API."""

    paths: Mapping[str, str] = {CHAT.path: "/v1/messages", _COUNT.path: "/v1/messages/count_tokens"}
    reader = MessageReader

    def __init__(self, name: str, *, headers: Mapping[str, str] | None = None, **options: Any) -> None:
        self._has_version = "anthropic-version" in map(str.lower, headers or ())
        super().__init__(name, headers=headers, **options)

    async def count_tokens(self, native: Native, request_id: str, model: str = "") -> int:
        """Ask the server for the number of a prompt's tokens. Raises BackendError, KeyError."""
        request = BackendRequest(
            body={},
            is_stream=False,
            salt=b"",
            request_id=request_id,
            ttft_timeout_s=_COUNT_S,
            idle_timeout_s=_COUNT_S,
            whole_timeout_s=_COUNT_S,
            kind=_COUNT,
            model=model,
            native=native,
        )
        (chunks,) = [chunks async for chunks in self.stream(request)]
        counted = msgspec.json.decode(chunks[0].data)["input_tokens"]
        if type(counted) is not int or counted < 0:
            raise KeyError("input_tokens")
        return counted

    def _own_fields(self, api_key: str) -> dict[str, tuple[str, str]]:
        return {"x-api-key": ("x-api-key", api_key)}

    def _fields_of(self, request: BackendRequest) -> str:
        native = request.native
        version, betas = (native.version, native.betas) if native is not None else ("", "")
        has_version = self._has_version or (
            request.passage is not None and "anthropic-version" in dict(request.passage.headers)
        )
        lines = "" if has_version else f"anthropic-version: {version or _VERSION}\r\n"
        return f"{lines}anthropic-beta: {betas}\r\n" if betas else lines

    def payload(self, request: BackendRequest) -> bytes:
        native = request.native
        if native is None:
            return super().payload(request)
        changes: dict[str, Any] = {"model": request.model or self._model}
        try:
            client_body = decode_strictly(native.raw)  # a second field of one name was not checked
        except BadRequest as error:
            raise BackendRejected(error.message, status=400, body=error.body()) from None
        if bool(client_body.get("stream")) is not request.is_stream:
            changes["stream"] = request.is_stream
        if native.tokens_max is not None:
            changes["max_tokens"] = native.tokens_max
        if native.are_calls_bound and "tools" in client_body:
            changes["tools"] = with_calls_bound(client_body)["tools"]
        if "cache" not in client_body and client_body | changes == client_body:
            return native.raw
        fields: dict[str, Any] = msgspec.json.decode(native.raw, type=dict[str, msgspec.Raw])
        fields.pop("cache", None)
        return msgspec.json.encode(fields | changes)

    def _body(self, request: BackendRequest) -> dict[str, Any]:
        body = to_message(request.body, request.dialect) | {"model": request.model or self._model}
        body.pop("stream", None)
        return body | ({"stream": True} if request.is_stream else {})
