"""The routes under `/v1` as OpenAPI path items, for `/docs` and for generators of clients.

Each body's schema is made from the struct that checks it, so that both have the same limits; this
module adds the constraints that no struct expresses. A test compares the paths with the served
routes.
"""

from functools import partial
from typing import Any

import msgspec

from gateway.api import telemetry
from gateway.api.batches import BatchRequest
from gateway.api.endpoint import ID
from gateway.api.feedback import FeedbackRequest
from gateway.api.front import Endpoint, Routes, operation
from gateway.api.message_batches import MessageBatchRequest
from gateway.api.messages import ClientTool, MessageRequest, PromptRequest
from gateway.api.responses import ONLY, InputItem, ResponseRequest
from gateway.api.stored_responses import ConversationRequest, ItemsRequest, MetadataRequest
from gateway.api.tokens import DetokenizeRequest
from gateway.batches.files import EXPIRES_S, INPUT, INPUTS
from gateway.batches.work import ENDPOINTS
from gateway.journey.turn import CacheFields
from gateway.wire.plain import INPUTS_MAX, PLAIN_SHAPES
from gateway.wire.requests import PROMPTS_MAX, SPEAKERS, ChatRequest, CompletionRequest
from gateway.wire.types import KINDS, MEDIA, Kind

_PLAIN = {
    "embeddings": "Create embeddings",
    "rerank": "Rank documents by a query",
    "moderations": "Judge texts and images by a provider's policy",
    "images": "Make images of a description",
    "image_edits": "Edit images",
    "image_variations": "Make images like another",
    "speech": "Speak a text",
    "transcriptions": "Write down what is said",
    "translations": "Write down in English what is said",
}
# fmt: off
_SHAPES = (
    ChatRequest, CompletionRequest, ResponseRequest, InputItem, ConversationRequest, MetadataRequest, ItemsRequest,
    MessageRequest, PromptRequest, ClientTool, MessageBatchRequest, FeedbackRequest, BatchRequest, CacheFields, DetokenizeRequest,
    *(shape for name, shape in PLAIN_SHAPES.items() if name in _PLAIN),
)
# fmt: on
_REF = "#/components/schemas/"


def _object(*needed: str, **fields: Any) -> dict[str, Any]:
    return {"type": "object", "required": [*needed], "properties": fields}


def _list(items: dict[str, Any], **bounds: int) -> dict[str, Any]:
    return {"type": "array", "items": items, **bounds}


def _only(*values: Any) -> dict[str, Any]:
    return {"enum": [*values, None]}


def _closed(**fields: Any) -> dict[str, Any]:
    """An object with these fields alone, or null."""
    return {"type": ["object", "null"], "additionalProperties": False, "properties": fields}


def _where(name: str, *values: str | None, then: dict[str, Any]) -> dict[str, Any]:
    """What holds too `then`, where a field has one of these values."""
    return {"if": {"properties": {name: {"enum": [*values]}}}, "then": then}


_STRING, _NULL = {"type": "string"}, {"type": "null"}
_TEXT: dict[str, Any] = {"type": "string", "minLength": 1}
_TOKENS = _list({"type": "integer", "minimum": 0}, minItems=1)
_OF_EITHER = "a text, token ids, or a list of either"
_PROMPT: dict[str, Any] = {
    "description": _OF_EITHER,
    "anyOf": [_STRING, _TOKENS, *(_list(one, minItems=1, maxItems=PROMPTS_MAX) for one in (_STRING, _TOKENS))],
}
_INPUT: dict[str, Any] = {
    "description": _OF_EITHER,
    "anyOf": [_TEXT, _TOKENS, *(_list(one, minItems=1, maxItems=INPUTS_MAX) for one in (_TEXT, _TOKENS))],
}
_FILE: dict[str, Any] = {"type": "string", "contentMediaType": "application/octet-stream"}
_NAMED: dict[str, Any] = {"not": _only("")}
_CONTINUED: list[dict[str, Any]] = [
    {"required": ["input"], "not": {"required": ["previous_response_id", "conversation"]}},
    {"required": ["previous_response_id"], "properties": {"previous_response_id": _NAMED, "conversation": _NULL}},
    {"required": ["conversation"], "properties": {"conversation": _NAMED, "previous_response_id": _only("")}},
]
# a compaction is whole, of what is there
_COMPACTED: dict[str, Any] = {
    "$ref": f"{_REF}ResponseRequest",
    "properties": {"stream": _only(False), "background": _only(False), "conversation": _NULL},
    "anyOf": [{"required": [name], "properties": {name: _NAMED}} for name in ("input", "previous_response_id")],
}
_TYPED = _object("type", type=_STRING)
_TOOL_CHOICE: dict[str, Any] = {
    "anyOf": [_STRING, _object("type", "name", type={"enum": ["function", "custom"]}, name=_STRING), _NULL]
}
_FORMATS = {"enum": ["text", "json_object", "json_schema"]}


def _schemas() -> dict[str, Any]:
    """The schemas of all bodies, by name."""
    _, components = msgspec.json.schema_components(_SHAPES, ref_template=f"{_REF}{{name}}")
    # private structs are parts of bodies; in the document each has a name like the others
    schemas: dict[str, Any] = msgspec.json.decode(
        msgspec.json.encode({name.lstrip("_"): schema for name, schema in components.items()})
        .replace(f"{_REF}_".encode(), _REF.encode())
        .replace(b'"title":"_', b'"title":"')
    )
    for name in ("ChatRequest", "CompletionRequest", "ResponseRequest"):
        schemas[name]["properties"]["cache"] = {"anyOf": [{"$ref": f"{_REF}CacheFields"}, _NULL]}
    schemas["CompletionRequest"]["properties"]["prompt"] = _PROMPT
    schemas["CompletionRequest"]["properties"]["max_tokens"]["default"] = 16
    schemas["EmbeddingsRequest"]["properties"]["input"] = _INPUT
    # an assistant's message may have tool calls, a refusal or audio instead of content
    content = {"required": ["content"], "properties": {"content": {"type": ["string", "array"]}}}
    schemas["Message"] |= _where("role", *sorted(SPEAKERS), then=content)
    schemas["ResponseFormat"]["properties"]["type"] = _FORMATS
    schemas["Tool"] |= _TYPED | {"properties": schemas["Tool"]["properties"] | _TYPED["properties"]}
    schemas["DetokenizeRequest"]["required"] = ["tokens"]
    schemas["BatchRequest"]["properties"]["endpoint"] = {"enum": [*ENDPOINTS]}
    _describe_responses(schemas)
    _describe_messages(schemas)
    for name in ("ImageEditRequest", "VariationRequest", "TranscriptionRequest", "TranslationRequest"):
        fields = schemas[name]["properties"]
        fields["stream"] = _only(True, False, 1, 0)
        if "file" in fields:
            fields["file"] = _FILE
        if fields.pop("images", None):  # of JSON alone
            fields |= {key: {"not": {"type": "array", "maxItems": 0}} for key in ("image", "mask", "image[]")}
            schemas[name]["anyOf"] = [{"required": ["image"]}, {"required": ["image[]"]}]
    return schemas


def _describe_responses(schemas: dict[str, Any]) -> None:
    chat, response = schemas["ChatRequest"]["properties"], schemas["ResponseRequest"]["properties"]
    response |= {name: chat[name] for name in ("model", "stream", "temperature", "top_p", "user")}
    response |= {name: _only(value) for name, (value, _) in ONLY.items()}
    schemas["ResponseRequest"] |= {"required": ["model"], "anyOf": _CONTINUED}
    for name in ("type", "content", "output"):  # a provider may know further ones
        del schemas["InputItem"]["properties"][name]
    lists = response["input"]["anyOf"] = [one for one in response["input"]["anyOf"] if one["type"] != "null"]
    lists = [*lists, *schemas["ConversationRequest"]["properties"]["items"]["anyOf"]]
    for items in [*lists, schemas["ItemsRequest"]["properties"]["items"]]:
        if items["type"] == "array":
            items["items"] = {"$ref": f"{_REF}InputItem"}
    response["tools"] = {"anyOf": [_list(_TYPED), _NULL]}
    response["tool_choice"] = _TOOL_CHOICE
    known = {"context": _only("auto"), "mode": _only("standard")}
    response["reasoning"] = _closed(effort={}, summary={}, generate_summary={}, **known)
    response["text"] = _closed(verbosity={}, format={"anyOf": [_object("type", type=_FORMATS), _NULL]})


def _describe_messages(schemas: dict[str, Any]) -> None:
    schemas["Choice"] |= _where("type", "tool", then={"required": ["name"], "properties": {"name": _STRING}})
    schemas["Thinking"]["properties"]["type"] = {"enum": ["enabled", "disabled", "adaptive"]}
    tool = _where("type", "custom", None, then={"$ref": f"{_REF}ClientTool"}) | _object(
        type={"type": ["string", "null"]}
    )
    text = _object("type", "text", type={"const": "text"}, text=_STRING)
    for name in ("PromptRequest", "MessageRequest"):
        schemas[name]["properties"]["tools"] = {"anyOf": [_list(tool), _NULL]}
        schemas[name]["properties"]["system"] = {"anyOf": [_STRING, _list(text), _NULL]}


_ERROR = _object("type", "message", type=_STRING, message=_STRING, details={"type": "object"})
_MESSAGE_ERROR = _object("type", "error", "request_id", type={"const": "error"}, error=_ERROR, request_id=_STRING)
_OR_NULL = {"type": ["string", "null"]}
_OPENAI = _object("message", "type", "param", "code", message=_STRING, type=_STRING, param=_OR_NULL, code=_OR_NULL)
SCHEMAS: dict[str, Any] = _schemas() | {"ErrorBody": _object("error", error=_OPENAI), "MessageError": _MESSAGE_ERROR}


def _body(shape: type) -> dict[str, Any]:
    return {"$ref": f"{_REF}{shape.__name__}"}


_IN_PATHS = ("id", "item", "file", "batch", "model")


def _on(summary: str, *names: str, body: dict[str, Any] | None = None, **how: Any) -> dict[str, Any]:
    """An operation with the parameters `names`, in its path or its query."""
    in_path = {"in": "path", "required": True, "schema": _TEXT}
    limit = {"type": "integer", "minimum": 1, "maximum": 1_000 if how.get("errors_of") == "Anthropic" else 100}
    queries: dict[str, Any] = {"limit": limit, "order": {"enum": ["asc", "desc"]}}
    queries |= {key: {"type": "string", "pattern": f"^({ID.pattern})?$"} for key in ("after_id", "before_id")}
    others = {name: {"in": "query", "schema": queries.get(name, {"type": "string"})} for name in names}
    parameters = [{"name": name, **(in_path if name in _IN_PATHS else others[name])} for name in names]
    return {**operation(summary, body, **how), "parameters": parameters}


def _by(summary: str, shape: type, **how: Any) -> dict[str, Any]:
    return operation(summary, _body(shape), **how)


_said_on, _said_by = partial(_on, errors_of="Anthropic"), partial(_by, errors_of="Anthropic")
_TOKENIZE_BODY: dict[str, Any] = {
    "type": "object",
    "additionalProperties": True,
    "oneOf": [{"required": ["prompt"]}, {"required": ["messages"]}],
    "properties": {
        "model": {"type": "string", "description": "may be left out if only one model has a local engine"},
        "prompt": {"type": "string"},
        "messages": SCHEMAS["ChatRequest"]["properties"]["messages"],
        "add_special_tokens": {"type": "boolean", "description": "default: true for a prompt, false for messages"},
        "add_generation_prompt": {"type": "boolean", "default": True},
        "return_token_strs": {"type": "boolean", "default": False},
    },
}

_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"
_EXPIRY: dict[str, Any] = {
    _ANCHOR: {"enum": ["created_at"]},
    _SECONDS: {"type": "integer", "minimum": EXPIRES_S[0], "maximum": EXPIRES_S[1]},
}
_UPLOAD = _object("file", "purpose", file=_FILE, purpose={"enum": [INPUT, *INPUTS]}, **_EXPIRY)
_UPLOAD["dependentRequired"] = {_ANCHOR: [_SECONDS], _SECONDS: [_ANCHOR]}


def _plain(kind: Kind) -> dict[str, Any]:
    """The operation of a plain kind: JSON, or a form whose files are bytes."""
    shape = PLAIN_SHAPES[kind.name]
    described = operation(_PLAIN[kind.name], _body(shape), streams=kind in MEDIA)
    if kind.is_form:
        described["requestBody"]["content"] = {"multipart/form-data": {"schema": _body(shape)}}
    if kind.is_bytes:
        described["responses"]["200"]["content"] = {"audio/*": {}}
    return described


PATHS: dict[str, Any] = {
    "/v1/chat/completions": {
        "post": _by("Create a chat completion", ChatRequest, streams=True),
        "get": _on("List the team's stored chat completions", "limit", "order", "after", "model"),
    },
    "/v1/chat/completions/{id}": {
        "get": _on("A stored chat completion", "id"),
        "post": _on("Change a stored chat completion's metadata", "id", body=_body(MetadataRequest)),
        "delete": _on("Delete a stored chat completion", "id"),
    },
    "/v1/chat/completions/{id}/messages": {
        "get": _on("The messages of a stored chat completion", "id", "limit", "order", "after")
    },
    "/v1/completions": {"post": _by("Create a completion", CompletionRequest, streams=True)},
    "/v1/responses": {
        "post": _by("Create a response, which is kept unless it asks not to be", ResponseRequest, streams=True)
    },
    "/v1/responses/input_tokens": {"post": _by("The tokens of a response's input", ResponseRequest)},
    "/v1/responses/compact": {"post": operation("A summary that replaces a conversation", _COMPACTED)},
    "/v1/responses/{id}": {
        "get": _on("A kept response, or its events", "id", "stream", "starting_after", streams=True),
        "delete": _on("Delete a kept response", "id"),
    },
    "/v1/responses/{id}/cancel": {"post": _on("Cancel a response in the background", "id")},
    "/v1/responses/{id}/input_items": {"get": _on("The input of a kept response", "id", "limit", "order", "after")},
    "/v1/conversations": {"post": _by("Create a conversation", ConversationRequest)},
    "/v1/conversations/{id}": {
        "get": _on("One conversation", "id"),
        "post": _on("Change a conversation's metadata", "id", body=_body(MetadataRequest)),
        "delete": _on("Delete a conversation with its items", "id"),
    },
    "/v1/conversations/{id}/items": {
        "get": _on("The items of a conversation", "id", "limit", "order", "after"),
        "post": _on("Add items to a conversation", "id", body=_body(ItemsRequest)),
    },
    "/v1/conversations/{id}/items/{item}": {
        "get": _on("An item of a conversation", "id", "item"),
        "delete": _on("Delete an item of a conversation", "id", "item"),
    },
    "/v1/messages": {"post": _said_by("Create a message", MessageRequest, streams=True)},
    "/v1/messages/count_tokens": {"post": _said_by("The tokens of a message's prompt", PromptRequest)},
    "/v1/messages/batches": {
        "post": _said_by("Create a batch of messages, in Anthropic's shape", MessageBatchRequest),
        "get": _said_on("List the team's batches of messages", "limit", "after_id", "before_id"),
    },
    "/v1/messages/batches/{batch}": {
        "get": _said_on("One batch of messages", "batch"),
        "delete": _said_on("Delete an ended batch of messages with its results", "batch"),
    },
    "/v1/messages/batches/{batch}/cancel": {"post": _said_on("Cancel a batch of messages", "batch")},
    "/v1/messages/batches/{batch}/results": {"get": _said_on("The results of a batch of messages, by line", "batch")},
    **{f"/v1{kind.path}": {"post": _plain(kind)} for kind in KINDS if kind.name in _PLAIN},
    "/v1/feedback": {"post": _by("Report a response right or wrong", FeedbackRequest)},
    **{
        path: {"post": operation("Telemetry of an agent, which is dropped", None, errors_of="Anthropic")}
        for path in telemetry.PATHS
    },
    "/tokenize": {"post": operation("The tokens of a text or a conversation, by a local engine", _TOKENIZE_BODY)},
    "/detokenize": {"post": _by("The text of tokens, by a local engine", DetokenizeRequest)},
    "/v1/files": {
        "post": {
            **operation("Upload a file", None),
            "requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _UPLOAD}}},
        },
        "get": operation("List the team's files", None),
    },
    "/v1/files/{file}": {"get": _on("One file", "file"), "delete": _on("Delete a file", "file")},
    "/v1/files/{file}/content": {"get": _on("The bytes of a file", "file")},
    "/v1/batches": {
        "post": _by("Create a batch of the requests in a file", BatchRequest),
        "get": operation("List the team's batches", None),
    },
    "/v1/batches/{batch}": {"get": _on("One batch", "batch")},
    "/v1/batches/{batch}/cancel": {"post": _on("Cancel a batch", "batch")},
    "/v1/models": {"get": operation("List the models this key may use", None)},
    "/v1/models/{model}": {"get": _on("One model", "model"), "delete": _on("Is always refused", "model")},
}

PATHS["/v1/conversations"]["post"]["requestBody"]["required"] = False


def routes_of(path: str, endpoint: Endpoint) -> Routes:
    """The routes at and below `path`, with the methods that the document has."""
    below = {known: item for known, item in PATHS.items() if known == path or known.startswith(f"{path}/{{")}
    return {known: dict.fromkeys(map(str.upper, item), endpoint) for known, item in below.items()}
