"""`/v1/batches`: create, list, retrieve and cancel batches.

Shapes: OpenAI API reference, "Batch". Runs no line of a batch: `gateway/batches/work.py` does.
Invariant: a batch and its files belong to the key's team.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from gateway.api.endpoint import Call, ObjectEndpoint, after_of, limit_of, listed
from gateway.batches.batches import Batches
from gateway.batches.files import EXPIRES_S, kept_s_of
from gateway.batches.lines import v1_of
from gateway.batches.work import ENDPOINTS
from gateway.pipeline import Pipeline
from gateway.wire.errors import BadRequest, shown
from gateway.wire.requests import convert

_LIST_USUAL, _LIST_MAX = 20, 100


Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]


class _Expiry(msgspec.Struct):
    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=EXPIRES_S[0], le=EXPIRES_S[1])]


class BatchRequest(msgspec.Struct):
    """The body of a new batch."""

    input_file_id: Annotated[str, Meta(max_length=100)]
    endpoint: str
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: _Expiry | None = None


class BatchesEndpoint(ObjectEndpoint):
    """The endpoint for batches. One instance per worker; `wake` is called for a new batch."""

    operation = "batches"
    path = "/v1/batches"

    def __init__(self, pipeline: Pipeline, batches: Batches, wake: Callable[[], None]) -> None:
        super().__init__(pipeline)
        self._batches = batches
        self._wake = wake

    async def answer(self, call: Call) -> dict[str, Any] | None:
        team_id = call.identity.team.id
        match call.method, call.object_id, call.action:
            case "POST", "", "":
                return await self._create(call)
            case "GET", "", "":
                limit = limit_of(call.query, _LIST_USUAL, _LIST_MAX)
                page = await self._batches.page(team_id, after_of(call.query), limit)
                return listed([batch.as_json() for batch in page], limit)
            case "GET", batch_id, "":
                return (await self._batches.get(team_id, batch_id)).as_json()
            case _, batch_id, _:  # cancelled
                await self._batches.cancel(team_id, batch_id)
                return (await self._batches.get(team_id, batch_id)).as_json()

    async def _create(self, call: Call) -> dict[str, Any]:
        call.check_has_key()
        request: BatchRequest = convert((await self.body(call))[1], BatchRequest)
        if v1_of(request.endpoint) not in ENDPOINTS:
            raise BadRequest(
                f"Invalid endpoint: expected one of {', '.join(ENDPOINTS)}, got {shown(request.endpoint)}",
                param="endpoint",
                code="invalid_value",
            )
        expiry, key = request.output_expires_after, call.identity.key
        kept_s = kept_s_of(call.identity.team, self._batches.files.settings, None if expiry is None else expiry.seconds)
        batch = await self._batches.create(
            key.team_id, key.id, request.endpoint, request.input_file_id, request.metadata, kept_s
        )
        self._wake()
        return batch.as_json()
