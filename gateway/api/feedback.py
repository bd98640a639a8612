"""`POST /v1/feedback` {"id", "verdict"}: was the answer of a response right?

`id` is the response's `x-request-id` (of a hit by meaning also the `id` in its body), `verdict` is `right` or `wrong`. Knows the
wire; what a report does is `gateway.learning.reports`'.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from redis.exceptions import RedisError

from cache import CacheUnavailable, partition
from gateway.api.headers import JSON, base_headers
from gateway.api.request import (
    Receive,
    Scope,
    Send,
    bearer_of,
    headers_of,
    new_record,
    read_body,
    send_failure,
    send_whole,
)
from gateway.errors import Unavailable
from gateway.learning.reports import Reports
from gateway.pipeline import Pipeline
from gateway.settings import Settings
from gateway.turn import convert, decode_object


class _Feedback(msgspec.Struct, forbid_unknown_fields=True):
    id: Annotated[str, Meta(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9_.:-]+$")]
    verdict: Literal["right", "wrong"]


class Feedback:
    """The endpoint."""

    def __init__(self, settings: Settings, pipeline: Pipeline, reports: Reports) -> None:
        self._settings = settings
        self._pipeline = pipeline
        self._reports = reports

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = headers_of(scope)
        record = new_record("feedback")
        record.cache = "bypass"
        try:
            identity = self._pipeline.authenticate(bearer_of(headers), record)
            body = decode_object(await read_body(receive, headers, self._settings.body_bytes_max))
            limited = await self._pipeline.limits.take_requests(identity)
            asked: _Feedback = convert(body, _Feedback)
            team = identity.team
            own = partition((self._settings.secret or "").encode(), f"team:{team.id}")
            try:
                outcome = await self._reports.report(own, team.id, asked.id, asked.verdict == "right", "caller")
            except (RedisError, CacheUnavailable) as error:
                raise Unavailable("The report can't be kept at the moment; try again shortly") from error
            out = [JSON, *base_headers(record.request_id), *((k.encode(), v.encode()) for k, v in limited.items())]
            await send_whole(send, 200, out, msgspec.json.encode(outcome))
        except Exception as error:
            await send_failure(send, error, record)
        finally:
            self._pipeline.finish(record, None, None)
