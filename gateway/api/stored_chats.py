"""Chat completions with `store: true`, and `/v1/chat/completions/{id}`: read, listed, changed, deleted.

They are rows among the stored responses, with the same limits and the same end. Shapes: OpenAI API
reference, "Chat Completions". Invariants: a request reaches only completions of its key's team; a
stored completion has an id of the gateway's own, because cached answers share the provider's.
"""

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from cache import Entry, ExactCache
from gateway.accounts.stored_responses import ResponseStore, StoredResponse
from gateway.api.chat import AnswerEndpoint, CompletionRenderer, Renderer
from gateway.api.endpoint import Call, ObjectEndpoint, listed
from gateway.api.memory import Memory
from gateway.api.stored_responses import MetadataRequest, no_item, page_asked, page_of
from gateway.journey.storing import chunks_of
from gateway.journey.turn import Turn
from gateway.pipeline import Pipeline
from gateway.wire.errors import NotFound, shown
from gateway.wire.fold import fold
from gateway.wire.requests import convert
from gateway.wire.types import Chunk

_ID = re.compile(r"chatcmpl-[0-9a-f]{32}")
_FILTER = re.compile(r"metadata\[(.{1,64})\]")
_READ_AT_ONCE = 100
# what a stored completion repeats of its request
_REPEATED = """
    temperature top_p presence_penalty frequency_penalty seed tools tool_choice response_format service_tier
"""


class StoringChat(AnswerEndpoint):
    """The endpoint for chat completions, which stores those that ask for it. One instance per
    worker.
    """

    def __init__(self, pipeline: Pipeline, body_bytes_max: int, memory: Memory, store: ResponseStore) -> None:
        super().__init__(pipeline, body_bytes_max)
        self._memory, self._store = memory, store

    def renderer(self, turn: Turn, call: Call) -> Renderer:
        alias = self._pipeline.fleet.configured(turn.alias)
        if turn.body.get("store") is True and self._memory.is_kept(True, call.identity.team, alias):
            id = f"chatcmpl-{call.arrival.request_id.removeprefix('req_')}"
            put = partial(self._put, call, turn.body)
            return _StoredCompletion(self._pipeline.exact, turn.wants_usage, id, put)
        return super().renderer(turn, call)

    async def _put(self, call: Call, body: Mapping[str, Any], whole: bytes) -> None:
        completion = {name: body.get(name) for name in _REPEATED.split()} | msgspec.json.decode(whole)
        metadata = body.get("metadata")
        completion |= {
            "request_id": call.arrival.request_id,
            "metadata": metadata if isinstance(metadata, dict) else {},
        }
        row = StoredResponse(
            id=completion["id"],
            team_id=call.identity.team.id,
            key_id=call.identity.key.id,
            previous_id=None,
            input=msgspec.json.encode(body["messages"]),
            body=msgspec.json.encode(completion),
        )
        await self._store.put(row)


class _StoredCompletion(CompletionRenderer):
    """The renderer of a completion that is stored, under its `id`, before its last byte leaves."""

    __slots__ = ("_id", "_named", "_put")
    is_kept = True

    def __init__(self, exact: ExactCache, wants_usage: bool, id: str, put: Callable[[bytes], Awaitable[None]]) -> None:
        super().__init__(exact, wants_usage)
        self._id, self._put = id, put
        self._named: list[Chunk] = []

    async def keep(self) -> None:
        await self._put(fold(self._named))

    def whole(self, chunks: Sequence[Chunk], entry: Entry | None) -> bytes:
        self._name(chunks if entry is None else chunks_of(entry))
        return fold(self._named)

    def replay(self, entry: Entry) -> bytes:
        return self.events(chunks_of(entry)) + self.end()

    def events(self, chunks: Sequence[Chunk]) -> bytes:
        return super().events(self._name(chunks))

    def _name(self, chunks: Iterable[Chunk]) -> list[Chunk]:
        """Give chunks the own id, and keep them. What they hold else is not read."""
        named = []
        for chunk in chunks:
            fields = [msgspec.json.decode(one, type=dict[str, msgspec.Raw]) for one in chunk.each()]
            lines = [msgspec.json.encode(one | {"id": self._id}) for one in fields]
            named.append(msgspec.structs.replace(chunk, data=b"\n".join(lines)))
        self._named += named
        return named


class StoredChats(ObjectEndpoint):
    """The endpoint for stored chat completions. One instance per worker."""

    operation = "stored_chats"
    path = "/v1/chat/completions"

    def __init__(self, pipeline: Pipeline, memory: Memory, store: ResponseStore) -> None:
        super().__init__(pipeline)
        self._memory, self._store = memory, store

    async def answer(self, call: Call) -> Any:
        team_id, id = call.identity.team.id, call.object_id
        if not id:
            return await self._list(call)
        row = await self._store.find(team_id, id) if _ID.fullmatch(id) else None
        if row is None:
            raise NotFound(f"Chat completion with id '{shown(id)}' not found.")
        match call.method, call.action:
            case "POST", _:
                metadata = convert((await self.body(call))[1], MetadataRequest).metadata or {}
                self._memory.check_allowed(call.identity.team)
                body = msgspec.json.encode(msgspec.json.decode(row.body) | {"metadata": metadata})
                await self._store.rewrite(row, body)
                return msgspec.Raw(body)
            case "DELETE", _:
                await self._store.delete(team_id, id)
                return {"id": id, "object": "chat.completion.deleted", "deleted": True}
            case _, "":
                return msgspec.Raw(row.body)
        messages = [_message(id, number, one) for number, one in enumerate(msgspec.json.decode(row.input))]
        return page_of(messages, *page_asked(call.query, "asc"))

    async def _list(self, call: Call) -> dict[str, Any]:
        """The completions of the team, of the model and with the metadata that the query names."""
        after, limit, is_ascending = page_asked(call.query, "asc")
        if after and not _ID.fullmatch(after):
            raise no_item(after)
        wanted = {match[1]: value for name, value in call.query.items() if (match := _FILTER.fullmatch(name))}
        model, chosen = call.query.get("model", ""), list[dict[str, Any]]()
        while len(chosen) <= limit:
            rows = await self._store.page(
                call.identity.team.id, "chatcmpl-", after, _READ_AT_ONCE, is_ascending=is_ascending
            )
            for completion in map(msgspec.json.decode, rows.values()):
                if model in ("", completion["model"]) and wanted.items() <= completion["metadata"].items():
                    chosen.append(completion)
            if len(rows) < _READ_AT_ONCE:
                break
            after = list(rows)[-1]
        return listed(chosen, limit)


def _message(id: str, number: int, message: dict[str, Any]) -> dict[str, Any]:
    """A message of a request as a list shows it: parts beside a content that is a text alone."""
    content = message.get("content")
    parts = content if isinstance(content, list) else None
    return {
        "name": None,
        **message,
        "id": f"{id}-{number}",
        "content": None if parts else content,
        "content_parts": parts,
    }
