"""What requests of the Responses API refer to, and what is kept of them: earlier responses and items.

Knows the items' ids and no other field; the store knows the teams. Invariants: an id of another
team, one that is over and one that never was have the same refusal; what is kept of an input has no
references, so that it stands without the responses that it referred to.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gateway.accounts import Identity, Team
from gateway.accounts.stored_responses import HistoryTooLong, ResponseStore, StoredResponse
from gateway.settings import Settings
from gateway.wire.errors import BadRequest, NotFound, shown

Item = dict[str, Any]

_ID = re.compile(r"resp_[0-9a-f]{32}")
_ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{32})_(in)?\d+")
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}


class Memory:
    """The stored responses of all teams. One per worker."""

    def __init__(self, store: ResponseStore, settings: Settings) -> None:
        self._store = store
        self._settings = settings

    def is_kept(self, asked: bool | None, team: Team) -> bool:
        """Whether a response of `team` is kept; `asked` is the request's `store`, which OpenAI takes for true."""
        return asked is not False and self._settings.responses.store and team.is_store_enabled

    async def find(self, team: Team, id: str) -> StoredResponse:
        """The team's response. Raises NotFound."""
        found = await self._store.find(team.id, id) if _ID.fullmatch(id) else None
        if found is None:
            raise no_such_response(id)
        return found

    async def delete(self, team: Team, id: str) -> None:
        """Raises NotFound."""
        if not (_ID.fullmatch(id) and await self._store.delete(team.id, id)):
            raise no_such_response(id)

    async def before(self, team: Team, id: str) -> list[Item]:
        """The items of the response with this id and of all that it continues. Raises BadRequest."""
        bytes_max = self._settings.body_bytes_max
        try:
            rows, lacking = await self._store.chain(team.id, id, bytes_max) if _ID.fullmatch(id) else ([], id)
        except HistoryTooLong:
            raise _too_long("previous_response_id", bytes_max) from None
        if lacking is not None:
            raise BadRequest(
                f"Previous response with id '{shown(lacking)}' not found.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        items: list[Item] = []
        for row in rows:
            items += msgspec.json.decode(row.input)
            items += msgspec.json.decode(row.body)["output"]
        return items

    async def resolved(self, team: Team, items: list[Item]) -> list[Item]:
        """`items` with the items that references among them stand for. Raises NotFound, BadRequest."""
        asked = {str(item["id"]) for item in items if _is_reference(item)}
        if not asked:
            return items
        known: dict[str, Item] = {}
        for is_input in (False, True):
            parts = [found for found in map(_ITEM_ID.fullmatch, asked) if found and bool(found[2]) is is_input]
            owners = {found[0]: f"resp_{found[1]}" for found in parts}
            bytes_max = self._settings.body_bytes_max
            try:
                ids = set(owners.values())
                texts = await self._store.texts(team.id, ids, bytes_max, is_input=is_input) if ids else {}
            except HistoryTooLong:
                raise _too_long("input", bytes_max) from None
            for owner, text in texts.items():
                listed = msgspec.json.decode(text)
                known |= {
                    item["id"]: item
                    for item in (listed if is_input else listed["output"])
                    if owners.get(item["id"]) == owner
                }
        if lacking := [id for id in asked if id not in known]:
            raise NotFound(
                f"Item with id '{shown(lacking[0])}' not found. Items are not persisted when `store` is set to false. Try "
                "again with `store` set to true, or remove this item from your input.",
                param="input",
            )
        return [known[str(item["id"])] if _is_reference(item) else item for item in items]

    async def put(self, identity: Identity, previous_id: str | None, own: Sequence[Item], id: str, body: bytes) -> None:
        """Keep a response; `own` are its input's items. Never raises."""
        items = msgspec.json.encode([_kept(item, id, number) for number, item in enumerate(own)])
        row = StoredResponse(
            id=id,
            team_id=identity.team.id,
            key_id=identity.key.id,
            previous_id=previous_id,
            input=items,
            body=body,
        )
        await self._store.put(row)


def no_such_response(id: str) -> NotFound:
    return NotFound(f"Response with id '{shown(id)}' not found.")


def _too_long(param: str, bytes_max: int) -> BadRequest:
    return BadRequest(
        f"The stored responses that `{param}` refers to have more than {bytes_max} bytes: send what is needed of them in "
        "`input`",
        param=param,
        code="context_length_exceeded",
    )


def _is_reference(item: Mapping[str, Any]) -> bool:
    return isinstance(item.get("id"), str) and (item.get("type") == "item_reference" or len(item) == 1)


def _kept(item: Item, id: str, number: int) -> Item:
    """An input item as it is listed: with its type and an id, a message with a status and parts."""
    kind = item.get("type") or "message"
    given = item.get("id")
    own_id = f"{_PREFIXES.get(kind, 'item')}_{id.removeprefix('resp_')}_in{number}"
    item = {**item, "type": kind, "id": given if isinstance(given, str) and given else own_id}
    if kind != "message":
        return item
    role, content = item.get("role") or "user", item.get("content")
    if isinstance(content, str):
        part: Item = {"type": "input_text", "text": content}
        if role == "assistant":
            part = {"type": "output_text", "text": content, "annotations": []}
        content = [part]
    return {**item, "role": role, "content": content, "status": item.get("status") or "completed"}
