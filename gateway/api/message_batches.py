"""`/v1/messages/batches`: batches of messages in Anthropic's shapes, run as batches of `/v1/messages`.

The requests of a batch become a file of the team, as a client of `/v1/batches` uploads it; results
are read from its output and error files. Shapes: Anthropic API reference, "Message Batches".
Invariants: a batch and its results belong to the key's team; each request has one result.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from itertools import islice
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from gateway.api.endpoint import Call, ObjectEndpoint, after_of, limit_of, page_of
from gateway.api.messages import InAnthropicsShape
from gateway.batches.batches import Batch, Batches
from gateway.batches.files import INPUT, LIVE, kept_s_of, key_of, storage_error
from gateway.batches.lines import CANCELLED, EXPIRED
from gateway.pipeline import Pipeline
from gateway.wire.errors import ApiError, BadRequest, InUse, NotFound, shown
from gateway.wire.requests import convert

_MESSAGES = "/v1/messages"
_INPUT_NAME = "message_batch.jsonl"
_LIST_USUAL, _LIST_MAX = 20, 1_000
_LINES_AT_ONCE = 50
_KINDS = {CANCELLED: "canceled", EXPIRED: "expired"}
_COUNTED = ("succeeded", "errored", "canceled", "expired")


class _BatchedMessage(msgspec.Struct):
    custom_id: Annotated[str, Meta(min_length=1, max_length=64)]
    params: dict[str, Any]


class MessageBatchRequest(msgspec.Struct):
    """The body of a new batch."""

    requests: Annotated[list[_BatchedMessage], Meta(min_length=1, max_length=100_000)]


class MessageBatches(InAnthropicsShape, ObjectEndpoint):
    """The endpoint for batches of messages. One instance per worker; `wake` is called for a new
    batch.
    """

    operation = "message_batches"
    path = "/v1/messages/batches"

    def __init__(self, pipeline: Pipeline, batches: Batches, wake: Callable[[], None]) -> None:
        super().__init__(pipeline)
        self._batches, self._files = batches, batches.files
        self._wake = wake

    async def answer(self, call: Call) -> dict[str, Any] | None:
        if not call.object_id:
            return await (self._create(call) if call.method == "POST" else self._list(call))
        team_id, batch = call.identity.team.id, await self._find(call)
        match call.method, call.action:
            case "POST", _:
                await self._batches.cancel(team_id, batch.id)
            case "DELETE", _:
                await self._delete(batch)
                return {"id": call.object_id, "type": "message_batch_deleted"}
            case _, "results":
                await self._send_results(call, batch)
                return None
        return await self._shown(await self._find(call))

    async def _find(self, call: Call) -> Batch:
        """The batch that the path names. Raises NotFound."""
        with suppress(NotFound):
            batch = await self._batches.get(call.identity.team.id, call.object_id.removeprefix("msg"))
            if batch.endpoint == _MESSAGES and call.object_id == f"msg{batch.id}":
                return batch
        raise NotFound(f"No message batch found with id '{shown(call.object_id)}'.", code="batch_not_found")

    async def _create(self, call: Call) -> dict[str, Any]:
        call.check_has_key()
        request: MessageBatchRequest = convert((await self.body(call))[1], MessageBatchRequest)
        custom_ids = Counter(each.custom_id for each in request.requests)
        lines_max = self._files.settings.lines_max
        if len(custom_ids) < len(request.requests):
            repeated = shown(max(custom_ids, key=custom_ids.__getitem__))
            raise BadRequest(
                f"requests: the `custom_id` {repeated} is not unique", param="requests", code="invalid_value"
            )
        if len(request.requests) > lines_max:
            raise BadRequest(f"requests: a batch has at most {lines_max:,}", param="requests", code="invalid_value")
        lines = [
            msgspec.json.encode({"custom_id": sent.custom_id, "method": "POST", "url": _MESSAGES, "body": sent.params})
            for sent in request.requests
        ]
        key, kept_s = call.identity.key, kept_s_of(call.identity.team, self._files.settings)
        upload = await self._files.begin(key.team_id, sum(map(len, lines)) + len(lines))
        try:
            for line in lines:
                await upload.write(line + b"\n")
            file = await upload.keep(INPUT, _INPUT_NAME, kept_s)
        except BaseException:
            await upload.drop()
            raise
        try:
            batch = await self._batches.create(key.team_id, key.id, _MESSAGES, file.id, None, kept_s, len(lines))
        except ApiError:
            await self._files.delete(key.team_id, file.id)
            raise
        self._wake()
        return await self._shown(batch)

    async def _list(self, call: Call) -> dict[str, Any]:
        limit = limit_of(call.query, _LIST_USUAL, _LIST_MAX)
        after, before = (after_of(call.query, name).removeprefix("msg") for name in ("after_id", "before_id"))
        page = await self._batches.page(call.identity.team.id, after, limit, before=before, endpoint=_MESSAGES)
        nearest = [await self._shown(batch) for batch in page[:limit]]
        return page_of(nearest[::-1] if before else nearest, len(page) > limit)

    async def _delete(self, batch: Batch) -> None:
        """Delete an ended batch with its files. Raises InUse."""
        if batch.status in LIVE:
            raise InUse("The batch has not ended: cancel it first, and delete it when it has ended")
        await self._batches.delete(batch)
        for file_id in (batch.output_file_id, batch.error_file_id, batch.input_file_id):
            with suppress(NotFound, InUse):
                if file_id != batch.input_file_id or (await self._input_name(batch)) == _INPUT_NAME:
                    await self._files.delete(batch.team_id, str(file_id))

    async def _input_name(self, batch: Batch) -> str:
        """The name of the input; that of another name is a client's own. Raises NotFound."""
        return (await self._files.get(batch.team_id, batch.input_file_id)).filename

    # -- results

    async def _shown(self, batch: Batch) -> dict[str, Any]:
        """Anthropic's batch object. Requests are counted at the end, as there."""
        id, has_ended = f"msg{batch.id}", batch.status not in LIVE
        counts = dict.fromkeys(_COUNTED, 0) | {"processing": 0 if has_ended else batch.total}
        if has_ended:
            errored = batch.failed or batch.total - batch.completed
            counts |= {"succeeded": batch.completed, "errored": errored}
            if batch.status in ("cancelled", "expired") and errored:
                with suppress(OSError):  # a file that is gone has no kinds
                    counts |= {"errored": 0} | await asyncio.to_thread(lambda: Counter(_kinds(self._results(batch))))
        is_cancelling = "canceling" if batch.status == "cancelling" else "in_progress"
        return {
            "id": id,
            "type": "message_batch",
            "processing_status": "ended" if has_ended else is_cancelling,
            "request_counts": counts,
            "created_at": _moment(batch.created_at_s),
            "expires_at": _moment(batch.expires_at_s),
            "cancel_initiated_at": _moment(batch.cancelling_at_s),
            "ended_at": _moment(batch.ended_at_s),
            "archived_at": None,
            # without a host: the SDKs put their base URL before it, which is right behind a proxy, too
            "results_url": f"{self.path}/{id}/results" if has_ended else None,
        }

    def _results(self, batch: Batch) -> Iterator[dict[str, Any]]:
        """The result of each request. Blocks. Raises OSError."""
        file_ids = [one for one in (batch.output_file_id, batch.error_file_id) if one is not None]
        refusal = batch.errors["data"][0] if batch.errors is not None else {}
        for file_id in file_ids or [batch.input_file_id]:  # without an output no request was run
            with self._files.contents.open(key_of(batch.team_id, file_id)) as file:
                for line in file:
                    ended = {"error": refusal, **msgspec.json.decode(line)}
                    yield {"custom_id": ended["custom_id"], "result": _result(ended.get("response"), ended["error"])}

    async def _send_results(self, call: Call, batch: Batch) -> None:
        if batch.status in LIVE:
            raise InUse("The batch has not ended, so it has no results: `processing_status` says when it has")
        results = self._results(batch)

        def piece() -> bytes:
            return b"".join([msgspec.json.encode(one) + b"\n" for one in islice(results, _LINES_AT_ONCE)])

        try:
            body = await asyncio.to_thread(piece)
        except FileNotFoundError:
            raise NotFound("The results of this batch are gone", code="file_not_found") from None
        except OSError as error:
            raise storage_error(error) from None
        headers = [(b"content-type", b"application/x-jsonl"), *call.out]
        await call.send({"type": "http.response.start", "status": 200, "headers": headers})
        while body:
            await call.send({"type": "http.response.body", "body": body, "more_body": True})
            body = await asyncio.to_thread(piece)
        await call.send({"type": "http.response.body", "body": b""})


def _result(response: dict[str, Any] | None, error: dict[str, Any] | None) -> dict[str, Any]:
    """A result of a request: from its response, which has Anthropic's shape, or its line's error."""
    if response is not None:
        is_ok = response["status_code"] == 200
        return {"type": "succeeded", "message": response["body"]} if is_ok else _errored(response["body"])
    code, message = (error or {}).get("code"), (error or {}).get("message", "The request was not run")
    if code in _KINDS:
        return {"type": _KINDS[code]}
    return _errored(
        {"type": "error", "error": {"type": "invalid_request_error", "message": message}, "request_id": None}
    )


def _errored(error: Any) -> dict[str, Any]:
    return {"type": "errored", "error": error}


def _kinds(results: Iterator[dict[str, Any]]) -> Iterator[str]:
    return (one["result"]["type"] for one in results)


def _moment(at_s: float | None) -> str | None:
    """A time as RFC 3339 writes it."""
    return None if at_s is None else datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
