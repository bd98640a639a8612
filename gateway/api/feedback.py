"""`POST /v1/feedback` {"id", "verdict"}: a caller's verdict on the answer of a response.

`id` is the response's `x-request-id`, or the `id` in the body of a semantic hit. `verdict` is
`right` or `wrong`. Parses the request; `gateway.learning.reports` handles the report.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from redis.exceptions import RedisError

from cache import CacheUnavailable
from gateway.accounts import partition_of
from gateway.api.endpoint import Call, ObjectEndpoint
from gateway.learning.reports import Reports
from gateway.pipeline import Pipeline
from gateway.wire.errors import Unavailable
from gateway.wire.requests import convert


class FeedbackRequest(msgspec.Struct, forbid_unknown_fields=True):
    id: Annotated[str, Meta(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9_.:-]+$")]
    verdict: Literal["right", "wrong"]


class Feedback(ObjectEndpoint):
    """The endpoint for feedback. One instance per worker."""

    operation = "feedback"

    def __init__(self, pipeline: Pipeline, reports: Reports) -> None:
        super().__init__(pipeline)
        self._reports = reports

    async def answer(self, call: Call) -> Any:
        request: FeedbackRequest = convert((await self.body(call))[1], FeedbackRequest)
        team = call.identity.team
        partition = partition_of(self._pipeline.settings.secret, team.id)
        try:
            is_right = request.verdict == "right"
            return await self._reports.report(partition, team.id, request.id, is_right, "caller")
        except (RedisError, CacheUnavailable) as error:
            raise Unavailable("The report can't be kept at the moment; try again shortly") from error
