"""Anthropic's Messages API over HTTP, without litellm.

The connections, time limits and failures are those of an OpenAI-compatible server; this file adds
the address, the headers, and two translations. A request that came in Anthropic's shape is sent as
it came. Format: Anthropic API reference, "Messages", "Versions" and "Beta headers". Knows no teams,
caches or routes. Invariant: only `model` and `stream` of such a request change.
"""

from collections.abc import Mapping
from typing import Any

from gateway.backends.anthropic.answer import AnswerReader
from gateway.backends.anthropic.request import to_message
from gateway.backends.base import BackendRequest
from gateway.backends.openai.backend import OpenAIBackend
from gateway.wire.types import CHAT

BASE_URL = "https://api.anthropic.com"
_VERSION = "2023-06-01"


class AnthropicBackend(OpenAIBackend):
    """One deployment at Anthropic's API, or at a server that speaks it."""

    paths: Mapping[str, str] = {CHAT.path: "/v1/messages"}
    reader = AnswerReader

    def _own_fields(self) -> dict[str, tuple[str, str]]:
        fields = {"anthropic-version": ("anthropic-version", _VERSION)}
        return fields | ({"x-api-key": ("x-api-key", self._api_key)} if self._api_key else {})

    def _fields_of(self, request: BackendRequest) -> str:
        betas = request.native.betas if request.native is not None else ""
        return f"anthropic-beta: {betas}\r\n" if betas else ""

    def _body(self, request: BackendRequest) -> dict[str, Any]:
        body = dict(request.native.body) if request.native is not None else to_message(request.body)
        body["model"] = request.model or self._model
        body.pop("stream", None)
        return body | ({"stream": True} if request.is_stream else {})
