"""`/v1/responses/{id}` and `/v1/conversations`: kept responses, and conversations of items.

Shapes: OpenAI API reference, "Responses" and "Conversations". Invariant: a request reaches only
objects of its key's team.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from gateway.accounts.conversations import Conversation
from gateway.api.background import Background, send_events
from gateway.api.batches import Metadata
from gateway.api.endpoint import Call, ObjectEndpoint, limit_of, listed, one_of
from gateway.api.memory import ITEM_ID, Memory
from gateway.api.responses import checked_items
from gateway.pipeline import Pipeline
from gateway.wire.errors import BadRequest, NotFound, shown
from gateway.wire.requests import convert

_LISTED, _LISTED_MAX = 20, 100
_ADDED_MAX = 20


class StoredResponses(ObjectEndpoint):
    """The endpoint for one response. One instance per worker."""

    operation = "stored_responses"
    path = "/v1/responses"

    def __init__(self, pipeline: Pipeline, memory: Memory, background: Background) -> None:
        super().__init__(pipeline)
        self._memory = memory
        self._background = background

    async def answer(self, call: Call) -> Any:
        team, id = call.identity.team, call.object_id
        match call.method, call.action:
            case "GET", "":
                if call.query.get("stream") == "true":
                    await self._follow(call)
                    return None
                return msgspec.Raw((await self._memory.find(team, id)).body)
            case "DELETE", "":
                await self._memory.delete(team, id)
                return {"id": id, "object": "response", "deleted": True}
            case "POST", "cancel":
                await self._memory.cancel(team, id)
                self._background.leave(id)
                return msgspec.Raw((await self._memory.find(team, id)).body)
            case _:  # its input's items
                items = msgspec.json.decode((await self._memory.find(team, id)).input)
                return page_of(items, *page_asked(call.query))

    async def _follow(self, call: Call) -> None:
        """Send the events of a background response that follow the event `starting_after`."""
        response, after = await self._memory.find(call.identity.team, call.object_id), call.query.get("starting_after")
        if after is not None and not (after.isascii() and after.isdecimal() and len(after) < 10):
            message = f"Invalid starting_after: expected a number, got {shown(after)}"
            raise BadRequest(message, param="starting_after", code="invalid_value")
        if not await self._background.has_events(call.identity.team, response.id):
            message = "This response has no stream (any more), as only one with `background` and `stream` has"
            message = f"{message}, until ten minutes after its end: read it whole"
            raise BadRequest(message, param="stream", code="unsupported_parameter")
        events = self._background.events(call.identity.team, response.id, -1 if after is None else int(after))
        await send_events(call.scope, call.send, call.out, events)


_Items = Annotated[list[dict[str, Any]], Meta(max_length=_ADDED_MAX)]


class ConversationRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a new conversation."""

    metadata: Metadata | None = None
    items: _Items | None = None


class MetadataRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body that changes a conversation's metadata."""

    metadata: Metadata | None


class ItemsRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body that adds items to a conversation."""

    items: Annotated[_Items, Meta(min_length=1)]


class ConversationsEndpoint(ObjectEndpoint):
    """The endpoint for conversations and their items. One instance per worker."""

    operation = "conversations"
    path = "/v1/conversations"

    def __init__(self, pipeline: Pipeline, memory: Memory) -> None:
        super().__init__(pipeline)
        self._memory = memory

    async def answer(self, call: Call) -> Any:
        team, id, conversations = call.identity.team, call.object_id, self._memory.conversations
        if (call.method, id) == ("POST", ""):
            request = await self._read(call, ConversationRequest)
            checked_items(request.items or [])
            return _shown(await self._memory.converse(call.identity, request.metadata or {}, request.items or ()))
        conversation = await self._memory.conversation(team, id)
        match call.method, *call.action.split("/", 1):
            case "GET", "":
                return _shown(conversation)
            case "POST", "":
                metadata = (await self._read(call, MetadataRequest)).metadata or {}
                self._memory.check_allowed(team)
                await conversations.change(team.id, id, metadata)
                return _shown(replace(conversation, metadata=metadata))
            case "DELETE", "":
                await conversations.delete(team.id, id)
                return {"id": id, "object": "conversation.deleted", "deleted": True}
            case "POST", "items":
                items = checked_items((await self._read(call, ItemsRequest)).items)
                return listed(await self._memory.add(team, id, items), _LISTED_MAX)
            case "GET", "items":
                after, limit, is_ascending = page_asked(call.query)
                page = None
                if not after or ITEM_ID.fullmatch(after):
                    page = await conversations.page(id, after, limit + 1, is_ascending=is_ascending)
                if page is None:
                    raise no_item(after)
                return listed([msgspec.json.decode(item) for item in page], limit)
            case _, _, item_id:
                item = await conversations.item(id, item_id) if ITEM_ID.fullmatch(item_id) else None
                if item is None:
                    raise NotFound(f"Item with id '{shown(item_id)}' not found in conversation with id '{id}'.")
                if call.method == "GET":
                    return msgspec.Raw(item)
                await self._memory.remove(team, id, item_id)
                return _shown(conversation)

    async def _read(self, call: Call, shape: type[Any]) -> Any:
        return convert((await self.body(call))[1], shape)


def _shown(conversation: Conversation) -> dict[str, Any]:
    """OpenAI's conversation object."""
    id, at_s = conversation.id, conversation.created_at_s
    return {"id": id, "object": "conversation", "created_at": int(at_s), "metadata": conversation.metadata}


def page_of(items: list[dict[str, Any]], after: str, limit: int, is_ascending: bool) -> dict[str, Any]:
    """The page of `items`, which are in their order, that follows the item `after`. Raises NotFound."""
    ordered = items if is_ascending else items[::-1]
    start = next((place for place, item in enumerate(ordered, 1) if item["id"] == after), None)
    if after and start is None:
        raise no_item(after)
    return listed(ordered[start or 0 :], limit)


def page_asked(query: Mapping[str, str], usual_order: str = "desc") -> tuple[str, int, bool]:
    """The item before the page of `query`, the page's size, and whether the oldest come first.
    Raises BadRequest.
    """
    is_ascending = (one_of(query, "order", ("asc", "desc")) or usual_order) == "asc"
    return query.get("after", ""), limit_of(query, _LISTED, _LISTED_MAX), is_ascending


def no_item(id: str) -> NotFound:
    return NotFound(f"There is no item `{shown(id)}` in this list", param="after")
