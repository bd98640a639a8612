"""The OpenAPI document of `/v1`: its bodies have the limits of the structs that check them."""

from __future__ import annotations

from typing import Any

from gateway.app import create_app
from gateway.settings import Settings

DOCUMENT: dict[str, Any] = create_app(Settings()).openapi()
SCHEMAS: dict[str, Any] = DOCUMENT["components"]["schemas"]


def _inner(schema: str, field: str) -> dict[str, Any]:
    """The schema of a field's values other than null."""
    given: dict[str, Any] = SCHEMAS[schema]["properties"][field]
    return next((one for one in given.get("anyOf", ()) if one != {"type": "null"}), given)


def test_bodies_state_their_limits() -> None:
    """Ranges, lengths, values and required fields, for all five bodies and the `cache` object."""
    assert {"minimum": 1, "maximum": 128}.items() <= _inner("ChatRequest", "n").items()
    assert {"minimum": 0, "maximum": 2}.items() <= _inner("ChatRequest", "temperature").items()
    assert {"minimum": 0, "maximum": 5}.items() <= _inner("CompletionRequest", "logprobs").items()
    assert _inner("ChatRequest", "messages")["minItems"] == 1
    assert _inner("Message", "role")["enum"] == ["assistant", "developer", "function", "system", "tool", "user"]
    assert _inner("ResponseRequest", "truncation")["enum"] == ["auto", "disabled"]
    assert _inner("EmbeddingsRequest", "encoding_format")["enum"] == ["base64", "float"]
    assert _inner("FeedbackRequest", "id")["pattern"] == "^[A-Za-z0-9_.:-]+$"
    assert SCHEMAS["CacheFields"]["additionalProperties"] is False
    assert SCHEMAS["ResponseRequest"]["required"] == ["model"]  # `input`, or what it continues


def test_tools_items_and_tokens_state_their_limits() -> None:
    """A tool's type is required, an item is an object, and a token has a largest id."""
    assert SCHEMAS["Tool"]["required"] == ["type"]
    assert next(iter(SCHEMAS["ResponseRequest"]["properties"]["tools"]["anyOf"]))["items"]["required"] == ["type"]
    items = SCHEMAS["ResponseRequest"]["properties"]["input"]["anyOf"][1]
    assert items["items"] == {"$ref": "#/components/schemas/InputItem"}
    assert "type" not in SCHEMAS["InputItem"]["properties"]  # what a provider knows may pass
    assert _inner("DetokenizeRequest", "tokens")["items"] == {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
    assert SCHEMAS["DetokenizeRequest"]["required"] == ["tokens"]


def test_every_operation_states_its_key_its_errors_and_its_types() -> None:
    """Each of `/v1`, and a stream beside a whole answer."""
    for path, item in DOCUMENT["paths"].items():
        for operation in item.values() if path.startswith("/v1") else ():
            assert operation["security"] == [{"apiKey": []}]
            assert {"401", "4XX", "5XX"} <= operation["responses"].keys()
    chat = DOCUMENT["paths"]["/v1/chat/completions"]["post"]["responses"]
    assert list(chat["200"]["content"]) == ["application/json", "text/event-stream"]
    assert {"400", "403", "404", "413", "415", "429", "503"} <= chat.keys()
    assert list(DOCUMENT["paths"]["/metrics"]["get"]["responses"]["200"]["content"]) == ["text/plain"]


def test_each_surface_states_its_own_errors() -> None:
    """Anthropic's for messages, OpenAI's for the others."""
    for path, schema in (("/v1/messages", "MessageError"), ("/v1/chat/completions", "ErrorBody")):
        for status, told in DOCUMENT["paths"][path]["post"]["responses"].items():
            if status != "200":
                assert told["content"]["application/json"]["schema"]["$ref"].endswith(schema)
