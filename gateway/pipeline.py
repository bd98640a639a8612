"""The journey of a request, top to bottom. Read this file first.

    answer(turn)      raises -> an HTTP status; returns -> the first chunk exists
      1 authenticate    2 rate-limit    3 fingerprint    4 exact lookup    5 join the flight
    generate(job)     once per flight, in a task of its own, because a generation must outlive the client that started it
      6 semantic lookup    7 reserve    8 route    9 stream    10 record, on every exit

It knows the four packages and none of their insides, no HTTP and no SQL. Invariants: a failure of the cache is a miss; money
fails closed; only a complete answer is stored; every hold is settled or released; nothing is shown as finished that is not.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

import structlog

from cache import (
    CacheUnavailable,
    Entry,
    ExactCache,
    Fingerprint,
    HitKind,
    LookupMiss,
    Partition,
    fingerprint,
    partition,
)
from gateway.accounts import Accounts, Identity, LedgerRow
from gateway.backends.base import BackendError, BackendTimeout
from gateway.backends.refusals import from_backend
from gateway.deployments.fleet import Alias, Deployment, Fleet, no_route, pause_before_retry
from gateway.journey import near_answer
from gateway.journey.attempt import attempt
from gateway.journey.budget import Money
from gateway.journey.flight import Flight, Flights, Reader
from gateway.journey.generation import Answer, Facts, Job, Learner, count_saved
from gateway.journey.rate_limits import Limits
from gateway.journey.record import Record, Rejection
from gateway.journey.semantic import ByMeaning
from gateway.journey.storing import refusal_of
from gateway.journey.turn import Turn, elapsed_ms_since
from gateway.settings import Settings
from gateway.transport.eager import Eager
from gateway.wire.errors import ApiError, BadRequest, Forbidden, NotCached, Unauthenticated
from gateway.wire.types import Chunk

_STARTING_AWAITED_S = 60.0
_STARTING_POLL_S = 0.1

_log = structlog.get_logger(__name__)


class Emit(Protocol):
    """Log, measure and count one record. `turn` and `chunks` are for the log, where prompts may be logged."""

    def __call__(self, record: Record, turn: Turn | None, chunks: Sequence[Chunk]) -> None: ...


class Pipeline:
    """The stages, with what they need. One per worker."""

    def __init__(
        self,
        settings: Settings,
        accounts: Accounts,
        limits: Limits,
        exact: ExactCache,
        by_meaning: ByMeaning,
        money: Money,
        fleet: Fleet,
        emit: Emit,
    ) -> None:
        self.settings = settings
        self.accounts = accounts
        self.limits = limits
        self.exact = exact
        self.money = money
        self.fleet = fleet
        self.judging: Learner | None = None  # told of what may be learned from
        self.flights = Flights()
        self._by_meaning = by_meaning
        self._emit = emit
        self._secret = (settings.secret or "").encode()
        self._partitions: dict[int, Partition] = {}  # by team
        self._jobs: set[asyncio.Future[None]] = set()  # under way, until they are recorded

    @property
    def generations(self) -> int:
        """Jobs under way."""
        return len(self._jobs)

    async def drain(self) -> None:
        """Until every job is recorded: nothing more comes after the server has stopped."""
        while self._jobs:
            await asyncio.wait(self._jobs)

    # -- answer: 1 to 5 -----------------------------------------------------------------------------------------

    async def answer(self, turn: Turn, identity: Identity, attend: Callable[[Reader], None]) -> Answer:
        """The reply to `turn`, begun. `attend` is given the reader before anything is awaited on it, so that a client
        who leaves can be taken out at any time. Raises ApiError."""
        alias = self.fleet.alias(turn.alias)
        turn.record.alias = alias.name
        may_use(identity, turn.alias)
        try:
            found = fingerprint(turn.body, self._partition(identity.team.id), turn.controls.namespace)
        except ValueError as error:
            raise BadRequest(f"The body can't be encoded: {error}", code="invalid_json") from None
        entry, warm = await self._look_up(turn, identity, alias, found)
        if entry is not None:
            turn.record.cache, turn.record.deployment = "exact", str(entry.labels.get("deployment", ""))
            turn.record.entry = entry.id
            return Answer(HitKind.EXACT, turn.elapsed_ms(), entry=entry)

        is_shared = not (turn.controls.no_cache or turn.controls.no_store or turn.controls.only_if_cached)
        key = (found.exact, turn.controls.max_age_s, turn.controls.error_max)
        flight = None if turn.controls.no_cache else self.flights.find(key)
        if flight is None:
            turn.is_leading = True
            turn.record.cache = "bypass" if turn.controls.no_cache or turn.controls.no_store else "miss"
            facts = Facts(deadline=turn.deadline)
            flight = Flight(facts)
            if is_shared:
                self.flights.enter(key, flight)
            job = Job(turn, identity, alias, flight, facts, found, warm)
            reader = flight.join()
            flight.take_off(self.generate(job))
        else:
            turn.record.cache = HitKind.COALESCED.value
            reader = flight.join()
            latest = flight.facts.deadline
            flight.facts.deadline = None if None in (latest, turn.deadline) else max(latest, turn.deadline)
        attend(reader)
        try:
            await reader.ready()
        except BaseException:
            reader.close()
            raise
        if not turn.is_leading:
            turn.record.deployment = reader.facts.deployment
            turn.record.entry = reader.facts.entry.id if reader.facts.entry is not None else found.exact.hex()
            return Answer(HitKind.COALESCED, turn.elapsed_ms(), reader=reader)
        return Answer(reader.facts.kind, turn.elapsed_ms(), reader=reader)

    def _partition(self, team_id: int) -> Partition:
        """Whose answers a team may see: its own, and nobody else's."""
        found = self._partitions.get(team_id)
        if found is None:
            found = self._partitions[team_id] = partition(self._secret, f"team:{team_id}")
        return found

    def authenticate(self, bearer: str | None, record: Record) -> Identity:
        """1. Who asks, from memory, before a byte of the body is read. Raises Unauthenticated."""
        identity = self.accounts.identify(bearer) if bearer else None
        if identity is None:
            raise Unauthenticated(
                "Incorrect API key provided"
                if bearer
                else "No API key provided: send it as `Authorization: Bearer ...`"
            )
        record.team_id, record.team = identity.team.id, identity.team.name
        record.key_id, record.key = identity.key.id, identity.key.name
        return identity

    async def _look_up(
        self, turn: Turn, identity: Identity, alias: Alias, found: Fingerprint
    ) -> tuple[Entry | None, dict[str, int]]:
        """2 and 4, in one round trip: limits, the exact entry, and which deployment saw this prefix last."""
        controls = turn.controls
        may_look = self.settings.cache.is_exact and not controls.no_cache
        entry = self.exact.lookup_local(found, controls.max_age_s) if may_look else None
        taking = self.limits.take(identity)
        if entry is not None or not self.settings.cache.is_exact:
            turn.headers = await taking
            return entry, {}
        looked = await self.exact.lookup(found, controls.max_age_s, wants_warm=alias.has_choice)
        turn.headers = await taking
        if looked.miss is LookupMiss.UNAVAILABLE:
            turn.record.survived += ("redis",)
        warm = {looked.warm: turn.ask.prompt_tokens * looked.warm_depth // len(found.chain)} if looked.warm else {}
        return (looked.entry if may_look else None), warm

    # -- generate: 6 to 10 --------------------------------------------------------------------------------------

    async def generate(self, job: Job) -> None:
        """Fill the flight, and account for it whatever happens."""
        under_way = asyncio.get_running_loop().create_future()
        self._jobs.add(under_way)
        record = job.turn.record
        error: BaseException | None = None
        try:
            if not await self._by_meaning.find(job):
                if job.turn.controls.only_if_cached:
                    raise NotCached
                await self._reserve(job)
                await self._stream(job)
        except asyncio.CancelledError:
            error = ApiError("Everyone who waited for this answer has left", code="client_gone")
            if not record.error:  # nobody told the client anything else, as that its deadline had passed
                record.status, record.error, record.is_disconnected = 499, "client_gone", True
        except ApiError as refused:
            error = refused
            record.status, record.error = refused.http_status, refused.error_code or refused.type
        except Exception as bug:
            _log.exception("generation_failed", request_id=record.request_id)
            error = ApiError("The gateway failed while it answered this request", code="internal_error")
            error.__cause__ = bug
            record.status, record.error = 500, "internal_error"
        try:
            await self._record(job, error)
        finally:
            if not job.flight.is_done:
                unrecorded = ApiError("The gateway failed while it recorded this answer", code="internal_error")
                job.flight.finish(error or unrecorded)
            self._jobs.discard(under_way)
            under_way.set_result(None)

    async def _reserve(self, job: Job) -> None:
        """7. The tokens and the money that this generation may need, in one round trip; what is refused leaves nothing taken."""
        turn, identity = job.turn, job.identity
        near = near_answer.begin(job, self.exact)
        taking = self.limits.take_tokens(turn, identity)
        try:
            amount = job.alias.worst_case_microusd(turn.ask)
            job.hold = await self.money.reserve(identity, turn.record.request_id, amount)
        finally:
            turn.headers = turn.headers | await taking
            job.has_taken_tokens = True
        job.near = (await near).entry if near is not None else None

    async def _stream(self, job: Job) -> None:
        """8 and 9. Try deployments in the order of the route until one has begun; failover is free until then."""
        turn = job.turn
        tried: set[str] = set()
        failure: BackendError | None = None
        latest: Deployment | None = None
        waits_until = time.perf_counter() + _STARTING_AWAITED_S
        while True:
            route = job.alias.route(turn.ask, job.warm, job.remaining_ms(), frozenset(tried))
            if failure is None:
                turn.record.policy = job.alias.settings.policy
                turn.record.rejected = tuple(Rejection(r.name, r.reason) for r in route.rejected)
                job.first_choice_model = job.alias.first_choice_model(turn.ask, job.warm, route)
            if route.ranked:
                best = route.ranked[0]
                turn.record.why = best.why
                latest = job.alias.deployments[best.name]
                failure = await attempt(job, latest)
                if failure is None:
                    return
                tried.add(best.name)
            elif failure is None and job.alias.is_starting and time.perf_counter() < waits_until:
                await asyncio.sleep(_STARTING_POLL_S)  # it is on its way: better a late answer than an error
            elif failure is None:
                raise no_route(route, turn.kind.prompt)
            else:
                pause_s = pause_before_retry(failure, len(job.attempts))
                if pause_s is None:
                    if isinstance(failure, BackendTimeout) and latest is not None:
                        latest.kept_waiting(turn.ask.prompt_tokens)
                    raise from_backend(failure)
                await asyncio.sleep(pause_s)
                tried.clear()
                if not job.alias.route(turn.ask, job.warm, job.remaining_ms(), frozenset()).ranked:
                    raise from_backend(failure)

    async def _record(self, job: Job, error: BaseException | None) -> None:
        """10. The last chunk leaves first; then the hold is settled and the answer stored, in one round trip."""
        turn, made, flight, facts = job.turn, job.generated, job.flight, job.facts
        record, usage, row = turn.record, job.usage, job.ledger_row()
        record.attempts = tuple(job.attempts)
        facts.usage = usage
        entry: Entry | None = None
        if facts.entry is None and made.has_begun:
            record.count(usage)
            facts.cost_microusd = record.cost_microusd = row.cost_microusd if row else 0
            cache = self.settings.cache
            refusal = refusal_of(made, turn.kind, turn.controls, cache.entry_bytes_max, is_fallback=job.is_fallback)
            record.store = refusal or "stored"
            if refusal is None and cache.is_exact:
                ttl_s = min(turn.controls.ttl_s or cache.ttl_s, cache.ttl_s_max)
                entry = job.entry(ttl_s, is_by_meaning=self._by_meaning.may_find(job))
                self.exact.store_local(entry)
                record.entry = entry.id
        record.duration_ms = turn.elapsed_ms()
        flight.finish(error)
        spent = usage.prompt_tokens + usage.completion_tokens
        correcting = self.limits.correct(turn, job.identity, spent) if job.has_taken_tokens else None
        works = (self._account(job, row), self._store(entry, job), correcting)
        try:
            with self._by_meaning.storing(job.fingerprint):
                for work in [Eager(work) for work in works if work is not None]:
                    try:
                        await work
                    except Exception:
                        _log.exception("record_failed", request_id=record.request_id)
        finally:
            flight.retire()
            if facts.entry is not None:
                record.ttft_ms = record.duration_ms
                count_saved(record, facts.entry, facts)
            if self.judging is not None and (job.trial is not None or turn.controls.no_cache):
                self.judging.recorded(job, entry if record.store == "stored" else None)
            self._emit(record, turn, flight.chunks)

    def _account(self, job: Job, row: LedgerRow | None) -> Coroutine[Any, Any, None] | None:
        if job.hold is None:
            return None
        return self.money.settle(job.hold, row) if row is not None else self.money.release(job.hold)

    async def _store(self, entry: Entry | None, job: Job) -> None:
        """Store the answer and, even where it is not stored, which deployment has this prefix warm now."""
        record = job.turn.record
        try:
            if entry is not None:
                warm = record.deployment if job.alias.has_choice else None
                result = await self.exact.store(entry, warm=warm, chain=job.fingerprint.chain)
                record.store = result.refusal.value if result.refusal else "stored"
            elif job.generated.has_begun and job.alias.has_choice and self.settings.cache.is_exact:
                await self.exact.store_warm(job.fingerprint, record.deployment)
        except CacheUnavailable:
            record.store = "unavailable"

    def finish(self, record: Record, turn: Turn | None, answer: Answer | None) -> None:
        """Count and log a request whose journey ends at the wire. One that led a flight is recorded by its generation, which
        may outlive it."""
        if turn is not None:
            if turn.is_leading:
                return
            record.duration_ms = turn.elapsed_ms()
            if answer is not None:
                record.ttft_ms = answer.begun_ms
                facts: Facts | None = answer.reader.facts if answer.reader is not None else None
                count_saved(record, answer.entry or (facts.entry if facts else None), facts)
        else:
            record.duration_ms = elapsed_ms_since(record.at_s)
        self._emit(record, turn, ())


def may_use(identity: Identity, alias: str) -> None:
    """Raises Forbidden where the key is limited to other models."""
    if identity.key.models is not None and alias not in identity.key.models:
        raise Forbidden(f"This API key may not use the model `{alias}`", param="model")
