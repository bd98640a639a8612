"""The routes under `/v1` as OpenAPI path items, for `/docs` and for generators of clients.

Knows no endpoints; a test compares it with the routes that are served.
"""

from typing import Any

from gateway.api.front import operation

_CACHE: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "description": "Sameway's own: how this request uses the cache",
    "properties": {
        "ttl": {"type": "integer", "minimum": 1, "description": "seconds"},
        "no-cache": {"type": "boolean"},
        "no-store": {"type": "boolean"},
        "namespace": {"type": "string"},
        "error_max": {"type": "number", "minimum": 0, "maximum": 1},
    },
}

_CHAT_BODY: dict[str, Any] = {
    "type": "object",
    "required": ["model", "messages"],
    "additionalProperties": True,
    "properties": {
        "model": {"type": "string"},
        "messages": {"type": "array", "minItems": 1, "items": {"type": "object", "required": ["role"]}},
        "stream": {"type": "boolean"},
        "cache": _CACHE,
    },
}

_TOKENS: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}

_COMPLETION_BODY: dict[str, Any] = {
    "type": "object",
    "required": ["model", "prompt"],
    "additionalProperties": True,
    "properties": {
        "model": {"type": "string"},
        "prompt": {
            "description": "a text, token ids, or a list of either",
            "oneOf": [
                {"type": "string"},
                _TOKENS,
                {"type": "array", "minItems": 1, "items": {"type": "string"}},
                {"type": "array", "minItems": 1, "items": _TOKENS},
            ],
        },
        "max_tokens": {"type": "integer", "minimum": 0, "default": 16},
        "n": {"type": "integer", "minimum": 1, "maximum": 128},
        "best_of": {"type": "integer", "minimum": 1, "maximum": 128},
        "echo": {"type": "boolean"},
        "suffix": {"type": "string"},
        "logprobs": {"type": "integer", "minimum": 0, "maximum": 5},
        "stream": {"type": "boolean"},
        "cache": _CACHE,
    },
}

_RESPONSE_BODY: dict[str, Any] = {
    "type": "object",
    "required": ["model", "input"],
    "additionalProperties": True,
    "properties": {
        "model": {"type": "string"},
        "input": {"oneOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": {"type": "object"}}]},
        "instructions": {"type": "string"},
        "stream": {"type": "boolean"},
        "cache": _CHAT_BODY["properties"]["cache"],
    },
}

_EMBEDDINGS_BODY: dict[str, Any] = {
    "type": "object",
    "required": ["model", "input"],
    "properties": {
        "model": {"type": "string"},
        "input": {"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
        "encoding_format": {"enum": ["float", "base64"]},
        "dimensions": {"type": "integer"},
    },
}

_FEEDBACK_BODY: dict[str, Any] = {
    "type": "object",
    "required": ["id", "verdict"],
    "additionalProperties": False,
    "properties": {
        "id": {"type": "string", "description": "the response's x-request-id"},
        "verdict": {"enum": ["right", "wrong"]},
    },
}

_TOKENIZE_BODY: dict[str, Any] = {
    "type": "object",
    "additionalProperties": True,
    "oneOf": [{"required": ["prompt"]}, {"required": ["messages"]}],
    "properties": {
        "model": {"type": "string", "description": "may be left out if only one model has a local engine"},
        "prompt": {"type": "string"},
        "messages": _CHAT_BODY["properties"]["messages"],
        "add_special_tokens": {"type": "boolean", "description": "default: true for a prompt, false for messages"},
        "add_generation_prompt": {"type": "boolean", "default": True},
        "return_token_strs": {"type": "boolean", "default": False},
    },
}

_DETOKENIZE_BODY: dict[str, Any] = {
    "type": "object",
    "required": ["tokens"],
    "properties": {
        "model": {"type": "string"},
        "tokens": {"type": "array", "items": {"type": "integer", "minimum": 0}},
    },
}

PATHS: dict[str, Any] = {
    "/v1/chat/completions": {"post": operation("Create a chat completion", _CHAT_BODY, streams=True)},
    "/v1/completions": {"post": operation("Create a completion", _COMPLETION_BODY, streams=True)},
    "/v1/responses": {"post": operation("Create a response, of which nothing is kept", _RESPONSE_BODY, streams=True)},
    "/v1/embeddings": {"post": operation("Create embeddings", _EMBEDDINGS_BODY)},
    "/v1/feedback": {"post": operation("Report a response right or wrong", _FEEDBACK_BODY)},
    "/tokenize": {"post": operation("The tokens of a text or a conversation, by a local engine", _TOKENIZE_BODY)},
    "/detokenize": {"post": operation("The text of tokens, by a local engine", _DETOKENIZE_BODY)},
    "/v1/models": {"get": operation("List the models this key may use", None)},
    "/v1/models/{model}": {
        "get": {
            **operation("One model", None),
            "parameters": [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}],
        }
    },
}
