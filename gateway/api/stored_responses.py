"""`/v1/responses/{id}`: read and delete responses that were kept, and list their input.

Shapes: OpenAI API reference, "Get a model response", "Delete a model response" and "List input
items". Invariant: each is the caller's team's own.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import parse_qs, unquote

import msgspec

from gateway.accounts import Identity
from gateway.api import asgi
from gateway.api.endpoint import Answered, JsonEndpoint
from gateway.api.memory import Item, Memory
from gateway.journey.turn import Arrival, Labels
from gateway.pipeline import Pipeline
from gateway.settings import Settings
from gateway.wire.errors import BadRequest, NotFound, shown

_LISTED_MAX, _LISTED = 100, 20

Act = Callable[[Identity], Awaitable[Any]]
"""What a request asks for, done under an identity; returns the reply. Raises ApiError."""


class StoredResponses(JsonEndpoint[Act]):
    """The endpoint for one response. One instance per worker."""

    operation = "stored_responses"

    def __init__(self, settings: Settings, pipeline: Pipeline, memory: Memory) -> None:
        super().__init__(settings, pipeline)
        self._memory = memory

    async def body(self, scope: asgi.Scope, receive: asgi.Receive, headers: Mapping[str, str]) -> dict[str, Any]:
        query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
        last = {name: values[-1] for name, values in query.items()}
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        return {"method": method, "path": scope["path"], "query": last}

    def read(self, body: dict[str, Any]) -> tuple[Act, str]:
        id, *rest = map(unquote, body["path"].removeprefix("/v1/responses/").split("/"))
        query: dict[str, str] = body["query"]
        match body["method"], rest:
            case "GET", []:
                if query.get("stream") == "true":
                    words = "`stream` is not supported here: read the response whole"
                    raise BadRequest(words, param="stream", code="unsupported_parameter")
                return lambda identity: self._retrieve(identity, id), ""
            case "DELETE", []:
                return lambda identity: self._delete(identity, id), ""
            case "GET", ["input_items"]:
                return lambda identity: self._input_items(identity, id, query), ""
        words = f"There is no {body['method']} {shown(body['path'], 200)} here"
        raise NotFound(f"{words}: docs/api.md has the paths of stored responses", code="unknown_url")

    async def answer(self, request: Act, identity: Identity, arrival: Arrival, labels: Labels) -> Answered:
        return Answered(await request(identity))

    async def _retrieve(self, identity: Identity, id: str) -> Any:
        return msgspec.Raw((await self._memory.find(identity.team, id)).body)

    async def _delete(self, identity: Identity, id: str) -> Any:
        await self._memory.delete(identity.team, id)
        return {"id": id, "object": "response", "deleted": True}

    async def _input_items(self, identity: Identity, id: str, query: Mapping[str, str]) -> Any:
        found = await self._memory.find(identity.team, id)
        return page_of(msgspec.json.decode(found.input), query)


def page_of(items: list[Item], query: Mapping[str, str]) -> dict[str, Any]:
    """A page of `items`, which are oldest first, as `query` asks for it. Raises BadRequest."""
    limit, order, after = query.get("limit", str(_LISTED)), query.get("order", "desc"), query.get("after")
    if not (limit.isdecimal() and len(limit) < 4 and 1 <= int(limit) <= _LISTED_MAX):
        raise BadRequest(f"`limit` must be from 1 to {_LISTED_MAX}", param="limit", code="invalid_value")
    if order not in ("asc", "desc"):
        raise BadRequest("`order` must be asc or desc", param="order", code="invalid_value")
    listed = items if order == "asc" else items[::-1]
    if after is not None:
        place = next((number for number, item in enumerate(listed) if item["id"] == after), None)
        if place is None:
            raise BadRequest(f"There is no item `{shown(after)}` here", param="after", code="invalid_value")
        listed = listed[place + 1 :]
    data = listed[: int(limit)]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return {"object": "list", "data": data, **ends, "has_more": len(listed) > len(data)}
