"""Reports on answers, and their effects.

Knows no HTTP. A wrong semantic response takes its answer, and all answers found equal to it, out of
service until an admin clears it. Any other wrong response is removed from the cache, and the next
request is answered anew. A right report counts for the answer and no more: clients choose what to
report, so a report is no sample. Invariants: a response is found only among those of the team that
asks; the same verdict twice counts once.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from cache import ExactCache, Partition, Purge
from cache.verdicts import AnswerRef, Ruling, Scope, ServedReply, Source, Suspension, Verdict, VerdictStore
from gateway.journey.record import Record
from gateway.journey.turn import arrived_at
from gateway.telemetry.measured_error import reported
from gateway.telemetry.stats import Stats
from gateway.wire.errors import ApiError, NotFound

_FLUSHED_S = 1.2  # workers hand the latest requests over once a second
# no answer takes longer: a request that came before that was handed over, or never was
_ANSWERED_S = 3_600.0


class AlreadyWrong(ApiError):
    """409: this response was reported wrong before; only an admin takes that back."""

    status = 409
    type = "invalid_request_error"
    code = "already_reported_wrong"


class Effect(StrEnum):
    SUSPENDED = "suspended"  # the answer is out of service by meaning until an admin clears it
    PURGED = "purged"  # the answer is removed from the cache
    COUNTED = "counted"
    NONE = "none"  # nothing of it is in the cache, or the same was said before


class ReportOutcome(msgspec.Struct, frozen=True):
    """The effect of a report."""

    id: str
    verdict: str
    effect: Effect


@dataclass(eq=False)
class Reports:
    """Takes reports on answers. `count` gets every verdict."""

    _verdicts: VerdictStore
    _exact: ExactCache
    _stats: Stats
    _count: Callable[[Source, Ruling, str], None]
    flushed_s: float = _FLUSHED_S

    async def report(self, partition: Partition, team_id: int, id: str, is_right: bool, who: str) -> ReportOutcome:
        """Take a report on response `id` of a team: its x-request-id or, for a semantic hit, the
        `id` in its body.

        `who` names the reporter. Raises NotFound, AlreadyWrong, redis.exceptions.RedisError,
        CacheUnavailable.
        """
        verdict = "right" if is_right else "wrong"
        reply = await self._verdicts.reply(partition, id)
        if reply is not None:
            id = reply.id
            effect = await self._on_hit(partition, team_id, reply, is_right, who)
        else:
            effect = await self._on_other(partition, team_id, id, is_right)
        return ReportOutcome(id, verdict, effect)

    async def _on_hit(self, partition: Partition, team_id: int, reply: ServedReply, is_right: bool, who: str) -> Effect:
        id = reply.id
        if is_right and await self._verdicts.was_taken(partition, f"{id}:wrong"):
            raise AlreadyWrong("This response was reported wrong before; an admin can clear that")
        verdict = Verdict(
            source=Source.FEEDBACK,
            compat=reply.compat,
            is_right=is_right,
            trial=msgspec.structs.replace(reply.trial, features=b"") if is_right else reply.trial,
            at=time.time(),
            judge=who,
            why="reported",
            alias=reply.alias,
        )
        out = Suspension(
            exact=reply.exact,
            source=Source.FEEDBACK,
            at=verdict.at,
            judge=who,
            why="reported wrong",
            request_id=id,
            alias=reply.alias,
        )
        scope, ruling = (Scope.NOTHING, "right") if is_right else (Scope.GROUP, "wrong")
        answer = AnswerRef(reply.exact, reply.created_at)
        is_new = await self._verdicts.take(
            partition, f"{id}:{ruling}", verdict, answer, None, scope, None if is_right else out
        )
        if is_new:
            self._stats.add_checks(team_id, reply.alias, reported(is_wrong=not is_right))
            self._count(Source.FEEDBACK, Ruling.SAME if is_right else Ruling.DIFFERENT, who)
        if not is_right:
            return Effect.SUSPENDED
        return Effect.COUNTED if is_new else Effect.NONE

    async def _on_other(self, partition: Partition, team_id: int, id: str, is_right: bool) -> Effect:
        record = await self.find(id, team_id)
        if record is None:
            raise NotFound(
                "There is no such response of this team, or it was too long ago; `id` is its x-request-id",
                param="id",
                code="response_not_found",
            )
        if not record.cache.entry:
            return Effect.NONE
        if not await self._verdicts.take_once(partition, f"{id}:{'right' if is_right else 'wrong'}"):
            return Effect.NONE if is_right else Effect.PURGED
        self._count(Source.FEEDBACK, Ruling.SAME if is_right else Ruling.DIFFERENT, record.cache.source)
        if is_right:
            return Effect.COUNTED
        await self._exact.purge(Purge(partition=partition, id=record.cache.entry))
        return Effect.PURGED

    async def find(self, id: str, team_id: int | None = None) -> Record | None:
        """A request among the latest. Its worker may hand it over a second after its end."""

        def is_it(record: Record) -> bool:
            return record.request.id == id and team_id in (None, record.request.team_id)

        mine = self._stats.unsent(is_it)
        if mine is not None:
            return mine
        came = arrived_at(id)
        # of another host, whose clock may be ahead
        may_be_new = came is not None and abs(time.time() - came) < _ANSWERED_S
        for pause_s in (0.0, self.flushed_s) if may_be_new else (0.0,):
            await asyncio.sleep(pause_s)
            page = await self._stats.routes(is_it, limit=1)
            if page.records:
                return page.records[0]
        return None
