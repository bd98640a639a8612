"""The journey of a request, top to bottom, which joins the four packages. Read this file first.

    authenticate(key)      1 authenticate, from memory, before a byte of the body is read; a key that
                             is not there is looked for in SQL, at a bounded rate
    answer(turn)           raises -> an HTTP status; returns -> the first chunk exists
      guards, masks    2 fingerprint    loops    3 rate-limit    4 exact lookup    5 join the flight
    generate(flight)       once per flight, in a task that outlives the client that began it
      6 semantic lookup    7 reserve    8 route    9 stream    10 record, on every exit

Each stage from 4 on sets an outcome of the `Generation` (`journey/outcomes.py`): 4, 5 and 6
`looked`, 8 and 9 `answered`, 10 `stored`. `holds` is the one that changes: 7 fills it, 9 adds to it
and 10 settles it. 5 sets the context that 6 and 10 use. What becomes of a request on each exit:

    hit                    4: its entry is the reply; `finish` records it, no flight begins
    hit by its words       4: the same, where another request's answer was found to fit its prompt
    stale hit              4: the same; beside it a request of the gateway's own makes the answer anew
    follower               5: reads the flight of an identical request; `finish` records it
    other worker's answer  6: `await_other_worker` waits until that worker has stored it, and replays it
    semantic hit           6: the entry is replayed through the flight; nothing is reserved
    miss                   7, 8, 9, and 10 settles the hold and stores the answer, if it is eligible
    refusal in 1 to 5      `answer` raises, the endpoint calls `finish` to record it; `look` releases
                           the claim of stage 4
    refusal in 6 to 8      the flight ends with the error, and 10 releases the hold and the claim
    failure before a chunk the next deployment, round or fallback (9); else the error's HTTP status
    failure after it       another deployment goes on with the text, or the stream ends with an error
    client gone            its reader leaves; the last to leave cancels the task of 6 to 9, and 10
                           settles what the answer has cost so far
    store refused          the reply is complete; 10 records the reason and releases the claim

    undecided              6: a verifier is asked, if that pays, by a request of the gateway's own: it
                           has its own hold and record. Yes: a semantic hit; else a miss
    checked hit            10: as any hit; beside it a request of the gateway's own asks the same anew
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from msgspec.structs import replace

from cache import ExactCache, Fingerprint, fingerprint
from gateway.access.people import Bearers, check_address
from gateway.accounts import Identity, partition_of
from gateway.accounts.accounts import Accounts
from gateway.deployments.alias import Alias
from gateway.deployments.fleet import Fleet
from gateway.exceptions import fresh
from gateway.journey.bodies import Bodies
from gateway.journey.budget import Money
from gateway.journey.flight import Flight, Flights, Reply
from gateway.journey.generation import Generation, generation_of
from gateway.journey.guards import Emit, Guards, apart_of
from gateway.journey.holds import Holds
from gateway.journey.loops import LoopDetector
from gateway.journey.masks import Masks
from gateway.journey.outcomes import Looked, SemanticResult
from gateway.journey.rate_limits import LimitHeaders, Limits
from gateway.journey.record import Record
from gateway.journey.recorded_answers import RecordedAnswers, may_be_awaited
from gateway.journey.recording import ended_with, record_of
from gateway.journey.semantic import AsksVerifier, SemanticLookup
from gateway.journey.storing import chunks_of
from gateway.journey.tries import Fallbacks
from gateway.journey.turn import Arrival, Ended, Turn, elapsed_ms_since
from gateway.loggers import get_logger
from gateway.settings import Settings
from gateway.transport.eager import Eager
from gateway.wire.errors import ApiError, BadRequest, NotCached, Unauthenticated

_log = get_logger()

Learn = Callable[[Flight, Record], None]
"""Takes a recorded flight, or one of a hit found by words. Never awaits or raises."""


@dataclass(eq=False)
class Pipeline:
    """The stages and the services that they use. One per worker. `observe` and `learn` take each record."""

    settings: Settings
    accounts: Accounts
    limits: Limits
    exact: ExactCache
    semantic: SemanticLookup
    _: KW_ONLY
    money: Money
    fleet: Fleet
    bearers: Bearers
    observe: Emit
    learn: Learn | None = None

    def __post_init__(self) -> None:
        self.bodies = Bodies(self.limits)
        self.guards = Guards(self.settings)
        self.flights = Flights()
        self.verifier: AsksVerifier | None = None  # its questions are requests to this pipeline
        self.renew: Callable[[Turn, Identity, Alias, Looked], object] = lambda *_: None  # begins it, of a stale answer
        self._loops = LoopDetector()
        self._masks = Masks(self.settings)
        self._answers = RecordedAnswers(self.settings.cache, self.exact, self.semantic, self.limits)
        self._emit = self.guards.noting(self.observe)
        self.generating: set[asyncio.Task[Any]] = set()  # until they are recorded

    @property
    def generations(self) -> int:
        """The number of generations under way."""
        return len(self.generating)

    async def drain(self) -> None:
        """Wait until every generation is recorded. The server has stopped: none is added."""
        while self.generating:
            await asyncio.wait(self.generating)
        self.guards.aclose()

    async def authenticate(self, key: str | None, client: Sequence[Any] | None) -> Identity:
        """1. The identity of a key or token of the scope's `client`; a known key awaits nothing. Raises ApiError."""
        identity = self.accounts.identify(key) if key else None
        if identity is None and key:
            identity = await self.bearers.identify(key) or await self.accounts.find(key)
        if identity is None:
            raise Unauthenticated(self.accounts.why_not(key))
        if identity.networks:
            check_address(identity, client[0] if client else "")
        return identity

    # -- answer: 2 to 5 ----------------------------------------------------------------------------

    async def answer(
        self,
        turn: Turn,
        identity: Identity,
        attend: Callable[[Reply], None],
        own_alias: Alias | None = None,
        taken: Eager[LimitHeaders] | None = None,
    ) -> Reply:
        """The reply to `turn`, begun. `own_alias`: an alias of the gateway's own, for its own
        requests. `taken`: the headers of rate limits, if the request was counted before.

        `attend` is called with the reply before its reader is awaited, so that a client that leaves
        can be removed at any time. Raises ApiError.
        """
        models = identity.key.models
        alias = own_alias or self.fleet.alias(turn.alias, models)
        alias.allow(models, turn.alias)
        alias.check(turn.body, turn.demand, turn.kind)
        turn = await self.guards.admit(turn, identity, alias)
        if turn.demand.is_output_bound:
            turn = replace(turn, demand=alias.within_reach(turn.demand))
        turn = self.guards.admitted(await self._masks.masked(turn, identity, alias), identity.team)
        digests = self._fingerprint(turn, identity, alias)
        loop = self._loops.seen(self.settings.loops, turn, identity, digests)
        looked = replace(await self._answers.look(turn, identity, alias, digests, taken), loop=loop)
        looked = self._masks.fitting(looked, turn, identity, alias)
        looked_up_ms = turn.elapsed_ms()
        if looked.entry is not None:
            self.renew(turn, identity, alias, looked)
            looked = await self.guards.vet_hit(turn, identity, alias, looked)
            return Reply(turn, alias, looked, looked_up_ms=turn.elapsed_ms())
        flight = self._join(turn, identity, alias, looked)
        reader = flight.admit(turn.deadline, is_stream=turn.is_stream, vault=turn.vault)
        if reader.is_leader:
            flight.generation.exact_ms = looked_up_ms
            flight.take_off(self.generate(flight))
        reply = Reply(turn, alias, looked, flight, reader=reader, looked_up_ms=looked_up_ms)
        attend(reply)
        try:
            if looked.is_claimed and not reader.is_leader:  # the leader lost its claim, and this one makes no entry
                await self._answers.release(looked.fingerprint)
            await reader.ready()
        except BaseException:
            reader.close()
            raise
        return reply

    def _fingerprint(self, turn: Turn, identity: Identity, alias: Alias) -> Fingerprint:
        """2. The digests of the request, in the partition of its team. Raises BadRequest."""
        partition, keyed = partition_of(self.settings.secret, identity.team.id), self.settings.cache.key_fields
        body = turn.body | dict.fromkeys(keyed, identity.user) if identity.user and keyed else turn.body
        try:
            apart = apart_of(self.settings, alias, identity.team, turn)
            return fingerprint(body, partition, turn.controls.namespace, keyed, apart)
        except ValueError as error:
            raise BadRequest(f"The body can't be encoded: {error}", code="invalid_json") from None

    def _join(self, turn: Turn, identity: Identity, alias: Alias, looked: Looked) -> Flight:
        """5. The flight of an identical request under way, or a new one."""
        controls = turn.controls
        # decision: flights-by-freshness
        key = (looked.fingerprint.exact, controls.max_age_s, controls.error_max, controls.verify)
        flight = None if controls.no_cache else self.flights.find(key)
        if flight is None:
            looked = self.semantic.relaxed(looked, identity.team, alias)
            flight = self._flight(turn, identity, alias, looked)
            if not controls.no_cache and may_be_awaited(controls):
                self.flights.enter(key, flight)
        return flight

    def _flight(self, turn: Turn, identity: Identity, alias: Alias, looked: Looked) -> Flight:
        generation = generation_of(turn, identity, alias, looked, Holds(self.money, self.limits, turn, identity, alias))
        return Flight(generation=generation, deadline=turn.deadline, is_held=self.guards.hold(turn, identity, alias))

    # -- generate: 6 to 10 -------------------------------------------------------------------------

    async def generate(self, flight: Flight) -> None:
        """Fill `flight`, and account for it on every exit."""
        task = asyncio.current_task()
        assert task is not None
        self.generating.add(task)
        generation = flight.generation
        error: ApiError | None = None
        try:
            await self._look(flight)
            if (entry := generation.looked.entry) is not None:
                flight.extend(chunks_of(entry))
            elif generation.turn.controls.only_if_cached:
                raise NotCached
            else:
                await self._reserve(generation)
                error = await Fallbacks(self.fleet, flight).run()  # 8 and 9
            await self.guards.vet(flight, error)
        except asyncio.CancelledError:
            error = ApiError("Everyone who waited for this answer has left", code="client_gone")
        except ApiError as refusal:
            error = fresh(refusal)
        except Exception:
            _log.exception("generation_failed", request_id=generation.turn.arrival.request_id)
            error = ApiError("The gateway failed while it answered this request", code="internal_error")
        try:
            await self._record(flight, error)
        except Exception:  # a task that kept it would keep the flight
            _log.exception("record_failed", request_id=generation.turn.arrival.request_id)
        finally:
            if generation.turn.upload is not None:
                generation.turn.upload.parcel.close()
            if not flight.is_done:
                unrecorded = ApiError("The gateway failed while it recorded this answer", code="internal_error")
                flight.finish(error or unrecorded)
            self.generating.discard(task)

    async def _look(self, flight: Flight) -> None:
        """6. Set the recorded answer to replay: another worker's, or a semantic hit, certain or verified."""
        generation = flight.generation
        if generation.looked.claimed_for_ms is not None:
            await self._answers.await_other_worker(flight)
        looked, since_ms = generation.looked, generation.turn.elapsed_ms()
        if looked.entry is not None:
            return
        if looked.no_lookup_reason:
            generation.looked = replace(looked, semantic=SemanticResult(miss_reason=looked.no_lookup_reason))
            return
        controls, team = generation.turn.controls, generation.identity.team
        semantic = await self.semantic.find(looked.fingerprint, controls, team, generation.alias)
        if semantic.undecided is not None and self.verifier is not None:
            semantic = await self.verifier.look(flight, semantic)
        generation.semantic_ms = generation.turn.elapsed_ms() - since_ms
        degraded = looked.degraded + semantic.degraded
        looked = replace(looked, semantic=semantic, entry=semantic.entry, degraded=degraded)
        generation.looked = self._masks.fitting(looked, generation.turn, generation.identity, generation.alias)

    async def _reserve(self, generation: Generation) -> None:
        """7. Take tokens and money; beside it, read the draft that a local engine may use.

        Raises RateLimited, BudgetExceeded, Unavailable, BadRequest.
        """
        drafting, since_ms = None, generation.turn.elapsed_ms()
        if generation.alias.has_engine:
            drafting = self.semantic.begin_draft(generation.looked.fingerprint, generation.looked.semantic)
        await generation.holds.reserve()
        if drafting is not None:
            near = (await drafting).entry
            generation.looked = replace(generation.looked, near=near)
        generation.reserve_ms = generation.turn.elapsed_ms() - since_ms

    async def _record(self, flight: Flight, error: ApiError | None) -> None:
        """10. End the flight, settle or release the hold, and store the answer or release the claim, in
        one round trip. No reader waits for it. The record is made when it is over.
        """
        generation, turn = flight.generation, flight.generation.turn
        spent = generation.holds.book(generation.answered)
        generation.stored = self._answers.store_local(flight, spent)
        duration_ms = turn.elapsed_ms()
        flight.finish(error)
        looked = generation.looked
        works = [*generation.holds.settle(spent.charged_tokens), *self._answers.store_shared(generation)]
        end_storing = None if looked.no_lookup_reason else self.semantic.begin_storing(looked.fingerprint)
        try:
            for work in list(map(Eager, works)):
                try:
                    await work
                except Exception:
                    _log.exception("record_failed", request_id=turn.arrival.request_id)
        finally:
            if end_storing is not None:
                end_storing()
            flight.retire()
            generation.record_ms = turn.elapsed_ms() - duration_ms
            record = record_of(
                turn.arrival,
                ended_with(error, flight.leader_ended),
                duration_ms,
                identity=generation.identity,
                turn=turn,
                alias=generation.alias.name,
                model=turn.alias,
                flight=flight,
            )
            if self.learn is not None:
                self.learn(flight, record)
            self._emit(record, turn, flight.chunks)

    # -- what led no flight ------------------------------------------------------------------------

    def finish(
        self,
        arrival: Arrival,
        ended: Ended,
        *,
        identity: Identity | None = None,
        turn: Turn | None = None,
        reply: Reply | None = None,
    ) -> None:
        """Count and log a request when its reply has ended.

        The generation records the request that led its flight, because it may outlive that request.
        """
        if reply is not None and reply.is_leading:
            return
        turn, ended = self._masks.shown(turn, reply.turn if reply is not None else None, identity, ended)
        model = turn.alias if turn is not None else ""
        alias = reply.alias.name if reply is not None else self.fleet.configured(model)
        duration_ms = turn.elapsed_ms() if turn is not None else elapsed_ms_since(arrival.at_s)
        record = record_of(
            arrival, ended, duration_ms, identity=identity, turn=turn, alias=alias, model=model, reply=reply
        )
        is_hit_by_words = reply is not None and reply.flight is None and reply.looked.semantic.entry is not None
        if is_hit_by_words and self.learn is not None and reply is not None and identity is not None:
            self.learn(self._flight(reply.turn, identity, reply.alias, reply.looked), record)
        self._emit(record, self.guards.unseen(turn, identity), ())

    def emit(self, record: Record) -> None:
        """Count and log a request that asked for no generation."""
        self._emit(record, None, ())
