"""`POST /v1/feedback` {"id", "verdict"}: was the answer of a response right?

`id` is the response's `x-request-id` (of a hit by meaning also the `id` in its body), `verdict` is `right` or `wrong`. Knows the
wire; what a report does is `gateway.learning.reports`'.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from redis.exceptions import RedisError

from cache import CacheUnavailable, partition
from gateway.accounts import Identity
from gateway.api.endpoint import JsonEndpoint
from gateway.journey.record import Record
from gateway.learning.reports import Outcome, Reports
from gateway.pipeline import Pipeline
from gateway.settings import Settings
from gateway.wire.errors import Unavailable
from gateway.wire.requests import convert


class _Feedback(msgspec.Struct, forbid_unknown_fields=True):
    id: Annotated[str, Meta(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9_.:-]+$")]
    verdict: Literal["right", "wrong"]


class Feedback(JsonEndpoint):
    """The endpoint."""

    kind = "feedback"

    def __init__(self, settings: Settings, pipeline: Pipeline, reports: Reports) -> None:
        super().__init__(settings, pipeline)
        self._reports = reports

    async def answer(self, body: dict[str, Any], identity: Identity, record: Record) -> Outcome:
        asked: _Feedback = convert(body, _Feedback)
        team_id = identity.team.id
        own = partition((self.settings.secret or "").encode(), f"team:{team_id}")
        try:
            return await self._reports.report(own, team_id, asked.id, asked.verdict == "right", "caller")
        except (RedisError, CacheUnavailable) as error:
            raise Unavailable("The report can't be kept at the moment; try again shortly") from error
