"""`POST /v1/responses/compact`: a conversation, made shorter by a summary that stands for it.

Any deployment writes the summary: the request is a response to the conversation and a last message
that asks for it. The client gets the user's messages and an item `compaction`, which it sends back
in place of the conversation; `as_sent` turns that item into a message again. Shapes: OpenAI API
reference, "Compact a response". Invariant: a summary that was cut off is an error, because what it
lacks would be lost.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from cache import Entry
from gateway.api import asgi
from gateway.api.chat import PlainRenderer, Renderer
from gateway.api.endpoint import Call
from gateway.api.memory import Item
from gateway.api.response_events import PassedResponseRenderer, ResponseRenderer
from gateway.api.responses import ResponseRequest, Responses, as_sent
from gateway.backends.base import BackendBroken
from gateway.journey.turn import Turn, read_turn
from gateway.wire.carried import seal
from gateway.wire.errors import BeyondChat, MissingField
from gateway.wire.requests import convert, decode_object
from gateway.wire.types import CHAT, Chunk

_ASK = (
    "Write a summary of this conversation that will replace it: whoever goes on from here reads the user's messages "
    "and your summary, and nothing else. State the task, the user's wishes and limits, what was decided and why, what "
    "was done and found (names, paths, values and results exactly as they are), and what remains to be done. Answer "
    "with the summary alone."
)
_NO_USAGE: dict[str, Any] = {
    "input_tokens": 0,
    "input_tokens_details": {"cached_tokens": 0},
    "output_tokens": 0,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 0,
}
# a compaction has no such parts, or is told by the gateway; a form of the answer would be the summary's
_LEFT_OUT = frozenset({"input", "previous_response_id", "text", "stream_options", "include", "store"})


class Compact(Responses):
    """The endpoint for compactions. One instance per worker."""

    operation = "compact"

    async def read(self, call: Call) -> tuple[Turn, Renderer]:
        body = decode_object(await self.body(call), asgi.model_of(call.scope))
        for name in ("stream", "background", "conversation"):
            if body.get(name):
                raise BeyondChat(name, f"`{name}` is not supported here: a compaction is whole and of its input")
        request: ResponseRequest = convert(body, ResponseRequest)
        given, team, previous_id = request.input, call.identity.team, request.previous_response_id
        if not given and not previous_id:
            raise MissingField("input", body)
        inputs: list[Item] = [{"role": "user", "content": given}] if isinstance(given, str) else given or []
        items = await self._memory.before(team, previous_id) if previous_id else []
        items += await self._memory.resolved(team, inputs)
        summed = {name: value for name, value in body.items() if name not in _LEFT_OUT}
        summed |= {"input": [*items, {"role": "user", "content": _ASK}], "tool_choice": "none"}
        if not request.tools:
            del summed["tool_choice"]
        _, _, sent, kind = await as_sent(summed, self._memory, call.identity, self._pipeline)
        turn = read_turn(sent, call.headers, call.arrival, kind, metadata=body.get("metadata"))
        # every compaction asks the same, so that only an equal conversation may have its answer
        controls = msgspec.structs.replace(turn.controls, error_max=0.0)
        shown = self._memory.named([item for item in items if item.get("role") == "user"])
        return msgspec.structs.replace(turn, controls=controls), _Compacted(
            (ResponseRenderer if kind is CHAT else PassedResponseRenderer)(summed, call.arrival), shown
        )


class _Compacted(PlainRenderer):
    """The renderer of a compaction: the summary comes as a whole response."""

    __slots__ = ("_response", "_shown")

    def __init__(self, response: ResponseRenderer, shown: Sequence[Item]) -> None:
        super().__init__()
        self._response, self._shown = response, shown

    def whole(self, chunks: Sequence[Chunk], entry: Entry | None) -> bytes:
        response = msgspec.json.decode(self._response.whole(chunks, entry))
        parts = [part for item in response["output"] if item.get("type") == "message" for part in item["content"]]
        summary = "".join([part["text"] for part in parts if part.get("type") == "output_text"])
        if response.get("status") != "completed" or not summary.strip():
            raise BackendBroken("The deployment wrote no whole summary: send the request again")
        digits = self._response.id.removeprefix("resp_")
        compaction = {"id": f"cmp_{digits}_0", "type": "compaction", "encrypted_content": seal(summary)}
        return msgspec.json.encode(
            {
                "id": self._response.id,
                "object": "response.compaction",
                "created_at": response["created_at"],
                "output": [*self._shown, compaction],
                "usage": response.get("usage") or _NO_USAGE,
            }
        )
