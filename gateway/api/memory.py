"""The objects that the Responses API keeps and that later requests name: responses, conversations,
items.

Of an item's fields it knows the id alone; the store knows the teams. Invariants: another team's id,
an expired id and an unknown id get the same refusal; a kept input has no references, so it can be
read without the responses that it referred to.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec

from gateway.accounts import Identity, Team
from gateway.accounts.conversations import Added, Conversation, HistoryTooLong
from gateway.accounts.stored_responses import ResponseStore, StoredResponse
from gateway.journey.bodies import ClientGone
from gateway.journey.turn import new_id
from gateway.settings import Settings
from gateway.wire.carried import is_signed
from gateway.wire.errors import BadRequest, ConversationLocked, Forbidden, NotFound, shown

Item = dict[str, Any]

_ID = re.compile(r"resp_[0-9a-f]{32}")
_ENDED = ("completed", "incomplete")
_LOST = "The gateway's process that generated this response has ended before it was complete: send the request again"
_CONVERSATION_ID = re.compile(r"conv_[0-9a-f]{32}")
ITEM_ID = re.compile(r"([a-z]+_)([0-9a-f]{32})_(in)?\d+(?:_([\w-]{1,200}))?")
_PROVIDERS_ID = re.compile(r"([a-z]+_)([\w-]{1,200})")
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}


class Keeping(msgspec.Struct, frozen=True):
    """The stores of a response: its own row if it `is_stored`, and its conversation, if any.

    A response that `is_background` is also stored before its generation.
    """

    is_stored: bool
    previous_id: str | None = None
    conversation_id: str | None = None
    is_background: bool = False


class Memory:
    """The stored responses and conversations of all teams. One per worker."""

    def __init__(self, store: ResponseStore, settings: Settings) -> None:
        self._store = store
        self.conversations = store.conversations
        self._settings = settings

    def is_kept(self, is_wanted: bool | None, team: Team, alias: str = "") -> bool:
        """Whether a response of `team` from `alias` is kept; `is_wanted` is the request's `store` (OpenAI's
        default: true). One whose request is masked is not: a row would have the values.
        """
        responses = self._settings.responses
        is_allowed = team.is_store_enabled and team.kept_s(responses.retention_s) == responses.retention_s
        is_allowed = is_allowed and not self._settings.is_masked(alias, team.name)
        return is_wanted is not False and responses.store and is_allowed

    # -- conversations

    async def converse(self, identity: Identity, metadata: Mapping[str, str], items: Sequence[Item]) -> Conversation:
        """Create a conversation that begins with `items`. Raises Forbidden."""
        self.check_allowed(identity.team)
        at_s = self._store.clock()
        id = f"conv_{new_id(at_s).removeprefix('req_')}"
        made = Conversation(id, identity.team.id, identity.key.id, at_s, metadata)
        await self.conversations.create(made, _encoded(self.named(items)))
        return made

    async def conversation(self, team: Team, id: str) -> Conversation:
        """The team's conversation. Raises NotFound."""
        row = await self.conversations.find(team.id, id) if _CONVERSATION_ID.fullmatch(id) else None
        if row is None:
            raise NotFound(f"Conversation with id '{shown(id)}' not found.")
        return row

    async def add(self, team: Team, id: str, items: Sequence[Item]) -> list[Item]:
        """Add items to a conversation; returns them as listed. Raises Forbidden, NotFound,
        ConversationLocked.
        """
        self.check_allowed(team)
        named_items = self.named(items)
        if not await self.conversations.add(team.id, id, _encoded(named_items)):
            raise await self._locked(team, id)
        return named_items

    async def remove(self, team: Team, id: str, item_id: str) -> None:
        """Delete an item of a conversation. Raises NotFound, ConversationLocked."""
        if not await self.conversations.remove(team.id, id, item_id):
            raise await self._locked(team, id)

    async def _locked(self, team: Team, id: str) -> ConversationLocked:
        """The error for a conversation that could not be changed. Raises NotFound if it is missing."""
        await self.conversation(team, id)
        return ConversationLocked(id)

    def named(self, items: Sequence[Item]) -> list[Item]:
        """Items with new ids, in the form in which a list shows them."""
        digits = new_id(self._store.clock()).removeprefix("req_")
        return [_kept(item, digits, number, is_new=True) for number, item in enumerate(items)]

    def check_allowed(self, team: Team) -> None:
        """Refuse what would be kept. Raises Forbidden."""
        if not self.is_kept(None, team):
            raise Forbidden(
                "Nothing is kept here for this team: send the whole dialogue with each request",
                code="storing_is_off",
            )

    async def said(self, team: Team, id: str, request_id: str) -> list[Item]:
        """The items of a conversation. If `request_id` is given, that request locks the
        conversation.

        Raises NotFound, BadRequest, Forbidden, ConversationLocked.
        """
        self.check_allowed(team)
        await self.conversation(team, id)
        if request_id and not await self.conversations.lock(team.id, id, request_id):
            raise await self._locked(team, id)
        with self._bounded("conversation") as bytes_max:
            texts = await self.conversations.items(team.id, bytes_max, id=id)
        return [msgspec.json.decode(text) for text in texts]

    # -- responses

    async def find(self, team: Team, id: str) -> StoredResponse:
        """The team's response, with its current status in the body. Raises NotFound."""
        response = await self._store.find(team.id, id) if _ID.fullmatch(id) else None
        if response is None:
            raise no_such_response(id)
        if response.status is None:
            return response
        body = msgspec.json.decode(response.body) | {"status": response.status}
        if response.status == "failed":
            body["error"] = body["error"] or {"code": "server_error", "message": _LOST}
        return replace(response, body=msgspec.json.encode(body))

    async def cancel(self, team: Team, id: str) -> None:
        """Cancel a background response; a completed response stays. Raises NotFound, BadRequest."""
        if not msgspec.json.decode((await self.find(team, id)).body)["background"]:
            raise BadRequest("Only a response with `background: true` can be cancelled", code="invalid_value")
        await self._store.change(id, status="cancelled")

    async def delete(self, team: Team, id: str) -> None:
        """Delete a response. Raises NotFound."""
        if not (_ID.fullmatch(id) and await self._store.delete(team.id, id)):
            raise no_such_response(id)

    async def before(self, team: Team, id: str) -> list[Item]:
        """The items of the response `id` and of all responses that it continues. Raises BadRequest."""
        with self._bounded("previous_response_id") as bytes_max:
            rows, missing_id = await self._store.chain(team.id, id, bytes_max) if _ID.fullmatch(id) else ([], id)
        if missing_id is not None:
            raise BadRequest(
                f"Previous response with id '{shown(missing_id)}' not found.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        items: list[Item] = []
        for row in rows:
            if row.status is not None:
                raise BadRequest(
                    f"The response '{row.id}' has no output to go on from: its status is {row.status}",
                    param="previous_response_id",
                    code="invalid_value",
                )
            items += msgspec.json.decode(row.input)
            items += msgspec.json.decode(row.body)["output"]
        return items

    async def resolved(self, team: Team, items: list[Item]) -> list[Item]:
        """`items`, with each reference replaced by the item that it names.

        Raises NotFound, and BadRequest if the items together exceed the bytes of a request's body.
        """
        references = {str(item["id"]) for item in items if _is_reference(item)}
        if not references:
            return items
        items_by_id: dict[str, Item] = {}
        for is_input in (False, True):
            parts = [found for found in map(ITEM_ID.fullmatch, references) if found and bool(found[3]) is is_input]
            owners = {found[0]: f"resp_{found[2]}" for found in parts}
            with self._bounded("input") as bytes_max:
                ids = set(owners.values())
                texts = await self._store.texts(team.id, ids, bytes_max, is_input=is_input) if ids else {}
            for owner, text in texts.items():
                document = msgspec.json.decode(text)
                items_by_id |= {
                    item["id"]: item
                    for item in (document if is_input else document["output"])
                    if owners.get(item["id"]) == owner
                }
        if others := [id for id in references if id not in items_by_id and ITEM_ID.fullmatch(id)]:
            with self._bounded("input") as bytes_max:
                added = await self.conversations.items(team.id, bytes_max, item_ids=others)
            items_by_id |= {item["id"]: item for item in map(msgspec.json.decode, added)}
        if lacking := [id for id in references if id not in items_by_id]:
            raise NotFound(
                f"Item with id '{shown(lacking[0])}' not found. Items are not persisted when `store` is set to false. Try "
                "again with `store` set to true, or remove this item from your input.",
                param="input",
            )
        sizes = {id: len(msgspec.json.encode(item)) for id, item in items_by_id.items() if id in references}
        with self._bounded("input") as bytes_left:
            for item in items:
                bytes_left -= sizes[str(item["id"])] if _is_reference(item) else len(msgspec.json.encode(item))
                if bytes_left < 0:
                    raise HistoryTooLong
        return [items_by_id[str(item["id"])] if _is_reference(item) else item for item in items]

    @contextmanager
    def _bounded(self, param: str) -> Iterator[int]:
        """The most bytes of a history. Raises BadRequest if the history that `param` names is
        longer.
        """
        bytes_max = self._settings.body_bytes_max
        try:
            yield bytes_max
        except HistoryTooLong:
            raise BadRequest(
                f"What `{param}` refers to has more than {bytes_max} bytes: send what is needed of it in `input`",
                param=param,
                code="context_length_exceeded",
            ) from None

    async def put(self, identity: Identity, keeping: Keeping, input_items: Sequence[Item], response: Item) -> None:
        """Keep a response; `input_items` are its input's items.

        For a background response, raises the database's error when it is queued, and ClientGone at
        its end if it was cancelled or deleted before.
        """
        id, status, conversation_id = response["id"], response["status"], keeping.conversation_id
        digits = id.removeprefix("resp_")
        items = [
            _kept(item, digits, number, is_new=conversation_id is not None) for number, item in enumerate(input_items)
        ]
        row = StoredResponse(
            id=id,
            team_id=identity.team.id,
            key_id=identity.key.id,
            previous_id=keeping.previous_id,
            input=msgspec.json.encode(items),
            body=msgspec.json.encode(response),
            conversation_id=conversation_id,
            added=_encoded([*items, *response["output"]]) if conversation_id is not None and status in _ENDED else (),
            is_stored=keeping.is_stored,
            status=status if keeping.is_background and status not in _ENDED else None,
        )
        if not keeping.is_background:
            await self._store.put(row)
        elif status == "queued":
            await self._store.begin(row)
        elif not await self._store.end(row):
            raise ClientGone


def kept_id(id: str, digits: str) -> str:
    """The gateway's id for an item of a provider's answer; an id of an unknown shape stays."""
    return _PROVIDERS_ID.sub(rf"\g<1>{digits}_0_\g<2>", id) if _PROVIDERS_ID.fullmatch(id) else id


def sendable(items: Sequence[Item]) -> list[Item]:
    """`items` for a provider: with the provider's ids, and without the gateway's ids and textless
    reasoning.
    """
    return [
        _sendable(item) for item in items if item.get("type") != "reasoning" or is_signed(item.get("encrypted_content"))
    ]


def _sendable(item: Item) -> Item:
    for name in ("id", "approval_request_id"):
        match = ITEM_ID.fullmatch(str(item.get(name)))
        if match and match[4]:
            item = {**item, name: match[1] + match[4]}
        elif match and item.get("type") != "local_shell_call_output":  # its id is its call's
            item = {field: value for field, value in item.items() if field != name}
    return item


def _encoded(items: Sequence[Item]) -> Added:
    return [(item["id"], msgspec.json.encode(item)) for item in items]


def no_such_response(id: str) -> NotFound:
    return NotFound(f"Response with id '{shown(id)}' not found.")


def _is_reference(item: Mapping[str, Any]) -> bool:
    return isinstance(item.get("id"), str) and (item.get("type") == "item_reference" or len(item) == 1)


def _kept(item: Item, digits: str, number: int, *, is_new: bool) -> Item:
    """An input item as a list shows it: with type and id, and for a message with status and parts.

    The item keeps its given id unless `is_new`.
    """
    kind = item.get("type") or "message"
    given_id = None if is_new else item.get("id")
    if is_new and kind == "local_shell_call_output" and not item.get("call_id"):
        item = {**item, "call_id": item.get("id")}  # its id is its call's
    own_id = f"{_PREFIXES.get(kind, 'item')}_{digits}_in{number}"
    item = {**item, "type": kind, "id": given_id if isinstance(given_id, str) and given_id else own_id}
    if kind != "message":
        return item
    role, content = item.get("role") or "user", item.get("content")
    if isinstance(content, str):
        part: Item = {"type": "input_text", "text": content}
        if role == "assistant":
            part = {"type": "output_text", "text": content, "annotations": []}
        content = [part]
    return {**item, "role": role, "content": content, "status": item.get("status") or "completed"}
