"""The journey of a request, top to bottom. Read this file first.

    authenticate(key)      1 authenticate, from memory, before a byte of the body is read; a key that
                             is not there is looked for in SQL, at a bounded rate
    answer(turn)           raises -> an HTTP status; returns -> the first chunk exists
      2 fingerprint    3 rate-limit    4 exact lookup    5 join the flight
    generate(flight)       once per flight, in a task that outlives the client that began it
      6 semantic lookup    7 reserve    8 route    9 stream    10 record, on every exit

It joins the four packages and contains none of their decisions, no HTTP and no SQL. Invariants: a
failure of the cache is a miss; money fails closed; only a complete answer is stored; every hold is
settled or released; a broken answer is never shown as a finished one.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec

from cache import CacheUnavailable, Controls, Entry, ExactCache, Fingerprint, fingerprint
from cache.decision.normal_form import words_key
from cache.eligibility import Refusal
from cache.exact import LookupMiss
from gateway.accounts import Accounts, Identity, LedgerRow, partition_of
from gateway.deployments.alias import Alias, no_route
from gateway.deployments.deployment import Deployment
from gateway.deployments.fleet import Fleet
from gateway.exceptions import fresh
from gateway.journey.attempt import Tries
from gateway.journey.bill import Spent
from gateway.journey.bodies import Bodies
from gateway.journey.budget import Money
from gateway.journey.flight import Flight, Flights, Reply
from gateway.journey.generation import Generation, generation_of
from gateway.journey.needs import need_at, need_of, values_of
from gateway.journey.queue import routed
from gateway.journey.rate_limits import Headers, Limits
from gateway.journey.record import Record
from gateway.journey.recording import ended_with, record_of
from gateway.journey.semantic import SemanticLookup, SemanticResult
from gateway.journey.storing import chunks_of, shows_left_out
from gateway.journey.turn import Arrival, Ended, Turn, elapsed_ms_since
from gateway.loggers import get_logger
from gateway.settings import Settings
from gateway.transport.eager import Eager
from gateway.wire.errors import (
    ApiError,
    BadRequest,
    BudgetExceeded,
    Forbidden,
    NotCached,
    Unauthenticated,
    Unavailable,
    Upstream,
    shown,
)
from gateway.wire.types import Chunk
from policies import Hold, Route

_STARTING_POLL_S = 0.1
_STARTING_AWAITED_S = 60.0  # where no other deployment can answer
_FOLLOW_POLL_S, _FOLLOW_POLL_S_MAX = 0.01, 0.2

_log = get_logger()

Emit = Callable[[Record, Turn | None, Sequence[Chunk]], None]
"""Logs, measures and counts one record.

The turn and the chunks are for the log, if prompts may be logged.
"""

Learn = Callable[[Flight, Record], None]
"""Takes a recorded flight that had a semantic lookup or no cache. Never awaits or raises."""


class _Looked(msgspec.Struct, frozen=True):
    """The outcome of stages 3 and 4.

    `headers` are the rate limits'. `warm` are the prompt tokens that deployments saw last, by name.
    `is_claimed` and `elsewhere_ms` as in `cache.exact.Lookup`. `words`: the key that they were
    looked for by; `pointed`: what they found, a hit or an audit of one.
    """

    headers: dict[bytes, bytes]
    entry: Entry | None = None
    is_claimed: bool = False
    elsewhere_ms: float | None = None
    warm: dict[str, int] = {}
    degraded: tuple[str, ...] = ()
    words: bytes | None = None
    pointed: SemanticResult | None = None


class Pipeline:
    """The stages and the services that they use. One per worker.

    `emit` and `learn` take each record.
    """

    def __init__(
        self,
        settings: Settings,
        accounts: Accounts,
        limits: Limits,
        exact: ExactCache,
        semantic: SemanticLookup,
        money: Money,
        fleet: Fleet,
        emit: Emit,
        learn: Learn | None = None,
    ) -> None:
        self.settings, self._cache = settings, settings.cache
        self._is_exact = settings.cache.is_exact
        self.accounts = accounts
        self.limits = limits
        self.bodies = Bodies(limits)
        self.exact = exact
        self.money = money
        self.fleet = fleet
        self.flights = Flights()
        self._semantic = semantic
        self._emit = emit
        self._learn = learn
        self._generating: set[asyncio.Task[Any]] = set()  # until they are recorded

    @property
    def generations(self) -> int:
        """The number of generations under way."""
        return len(self._generating)

    async def drain(self) -> None:
        """Wait until every generation is recorded. The server has stopped: none is added."""
        while self._generating:
            await asyncio.wait(self._generating)

    async def authenticate(self, key: str | None) -> Identity:
        """1. The identity of an API key, without awaiting if it is known. Raises Unauthenticated."""
        identity = (self.accounts.identify(key) or await self.accounts.find(key)) if key else None
        if identity is None:
            raise Unauthenticated(
                "Incorrect API key provided"
                if key
                else "No API key provided: send it as `Authorization: Bearer ...`, `api-key` or `x-api-key`"
            )
        return identity

    # -- answer: 2 to 5 ----------------------------------------------------------------------------

    async def answer(
        self,
        turn: Turn,
        identity: Identity,
        attend: Callable[[Reply], None],
        own: Alias | None = None,
        taken: Eager[Headers] | None = None,
    ) -> Reply:
        """The reply to `turn`, begun. `own`: an alias of the gateway's own, for its own requests.
        `taken`: the headers of rate limits, if the request was counted before.

        `attend` is called with the reply before its reader is awaited, so that a client that leaves
        can be removed at any time. Raises ApiError.
        """
        alias = own or self.fleet.alias(turn.alias, identity.key.models)
        if identity.key.models is not None:
            may_use(identity, turn.alias, alias.name)
        alias.check(turn.body, turn.demand, turn.kind)
        found = self._fingerprint(turn, identity)
        looked = await self._look_up(turn, identity, alias, found, taken)
        if looked.entry is not None:
            return Reply(turn, alias.name, looked.headers, entry=looked.entry, looked_up_ms=turn.elapsed_ms())
        if looked.pointed is not None and (entry := looked.pointed.entry) is not None:
            pointed = generation_of(turn, identity, alias, found, {})
            pointed.looked_up(looked.pointed)
            return Reply(turn, alias.name, looked.headers, entry=entry, looked_up_ms=turn.elapsed_ms(), pointed=pointed)
        flight = self._join(turn, identity, alias, found, looked)
        reader = flight.admit(turn.deadline, is_stream=turn.is_stream)
        if reader.is_leader:
            flight.take_off(self.generate(flight))
        elif looked.is_claimed:  # the flight's own claim was lost
            await self._release(found)
        reply = Reply(turn, alias.name, looked.headers, reader=reader, degraded=looked.degraded)
        attend(reply)
        try:
            await reader.ready()
        except BaseException:
            reader.close()
            raise
        return reply

    def _fingerprint(self, turn: Turn, identity: Identity) -> Fingerprint:
        """2. The digests of the request, in the partition of its team. Raises BadRequest."""
        partition = partition_of(self.settings.secret, identity.team.id)
        try:
            apart = None if turn.native is None else turn.native.apart
            if turn.kind.is_plain:  # events and a whole answer are different bytes
                apart = f"{turn.kind.name} stream" if turn.is_stream else turn.kind.name
            return fingerprint(turn.body, partition, turn.controls.namespace, self._cache.key_fields, apart)
        except ValueError as error:
            raise BadRequest(f"The body can't be encoded: {error}", code="invalid_json") from None

    async def _look_up(
        self, turn: Turn, identity: Identity, alias: Alias, found: Fingerprint, taken: Eager[Headers] | None
    ) -> _Looked:
        """3 and 4, in one round trip: limits, exact entry, deployment that saw this prefix last.

        Raises RateLimited.
        """
        controls = turn.controls
        may_look = self._is_exact and not controls.no_cache
        entry = self.exact.lookup_local(found, controls.max_age_s) if may_look else None
        taking = taken or self.limits.take(identity)
        if entry is not None or not self._is_exact:
            return _Looked(await taking, entry)
        team = identity.team
        claims = _may_be_awaited(controls) if may_look and controls.max_age_s != 0 else None
        words = self._semantic.words_key(found, controls, team, alias) if claims is not None else None
        looked = await self.exact.lookup_shared(
            found, controls.max_age_s, wants_warm=alias.has_choice, claims=claims, words=words
        )
        try:
            headers = await taking
        except ApiError:
            if looked.is_claimed:
                await self._release(found)
            raise
        warm: dict[str, int] = {}
        if looked.warm:
            warm[looked.warm] = turn.demand.prompt_tokens * looked.warm_depth // len(found.chain)
        is_pointed = looked.pointer is not None
        return _Looked(
            headers,
            looked.entry if may_look and not is_pointed else None,
            words=words,
            pointed=self._semantic.follow(found, controls, team, alias, looked) if is_pointed else None,
            warm=warm,
            degraded=("redis",) if looked.miss is LookupMiss.UNAVAILABLE else (),
            is_claimed=looked.is_claimed,
            elsewhere_ms=looked.elsewhere_ms,
        )

    async def _release(self, found: Fingerprint) -> None:
        """End the claim to make an entry that does not come."""
        try:
            await self.exact.release(found)
        except CacheUnavailable as error:
            _log.info("claim_left_to_its_lease", entry=found.id, reason=str(error))

    def _join(self, turn: Turn, identity: Identity, alias: Alias, found: Fingerprint, looked: _Looked) -> Flight:
        """5. The flight of an identical request under way, or a new one."""
        controls = turn.controls
        # decision: flights-by-freshness
        key = (found.exact, controls.max_age_s, controls.error_max)
        flight = None if controls.no_cache else self.flights.find(key)
        if flight is None:
            relaxed, unsought = self._semantic.relaxed(found, turn, identity.team, alias)
            generation = generation_of(turn, identity, alias, relaxed, looked.warm, looked.degraded)
            generation.unsought, generation.elsewhere_ms = unsought, looked.elsewhere_ms
            generation.is_claimed = looked.is_claimed
            if relaxed.text is not None and not unsought:
                known = looked.words if relaxed.compat == found.compat else None
                generation.words = known or words_key(relaxed.compat, relaxed.text)
            if looked.pointed is not None:
                generation.looked_up(looked.pointed)
            flight = Flight(generation, turn.deadline)
            if not controls.no_cache and _may_be_awaited(controls):
                self.flights.enter(key, flight)
        return flight

    # -- generate: 6 to 10 -------------------------------------------------------------------------

    async def generate(self, flight: Flight) -> None:
        """Fill `flight`, and account for it on every exit."""
        task = asyncio.current_task()
        assert task is not None
        self._generating.add(task)
        generation = flight.generation
        error: ApiError | None = None
        try:
            is_replayed = generation.elsewhere_ms is not None and await self._follow(flight)
            if not is_replayed and not await self._replay(flight):
                if generation.turn.controls.only_if_cached:
                    raise NotCached
                await self._reserve(generation)
                error = await self._generated(flight)
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
            self._generating.discard(task)

    async def _follow(self, flight: Flight) -> bool:
        """Replay the answer that another worker is making, once it is stored.

        Returns False, and this worker makes it, if that worker ends without storing it and no other
        has begun to make it, if two have so ended, or after `Flight.patience_s`.
        """
        generation, found = flight.generation, flight.generation.fingerprint
        controls, pause_s = generation.turn.controls, _FOLLOW_POLL_S
        age_ms, unstored = generation.elsewhere_ms or 0.0, 0
        until = time.perf_counter() + flight.patience_s()
        while (left_s := until - time.perf_counter()) > 0:
            try:
                await asyncio.sleep(min(pause_s, left_s))
            finally:
                generation.awaited_until = time.perf_counter()
            pause_s = min(1.5 * pause_s, _FOLLOW_POLL_S_MAX)
            looked = await self.exact.lookup_shared(
                found, controls.max_age_s, wants_warm=False, claims=_may_be_awaited(controls)
            )
            generation.is_claimed = generation.is_claimed or looked.is_claimed
            if looked.entry is not None:
                generation.served = looked.entry
                flight.extend(chunks_of(looked.entry))
                return True
            unstored += looked.elsewhere_ms is not None and looked.elsewhere_ms < age_ms
            if looked.elsewhere_ms is None or unstored > 1:
                break
            age_ms = looked.elsewhere_ms
        return False

    async def _replay(self, flight: Flight) -> bool:
        """6. Replay a verified semantic hit; returns False if there is none."""
        generation = flight.generation
        if generation.semantic.miss_reason:  # an audit of what its words found
            return False
        if generation.unsought:
            generation.looked_up(SemanticResult(miss_reason=generation.unsought))
            return False
        turn, team = generation.turn, generation.identity.team
        found = await self._semantic.find(generation.fingerprint, turn.controls, team, generation.alias)
        generation.looked_up(found)
        if found.entry is not None:
            flight.extend(chunks_of(found.entry))
        return found.entry is not None

    async def _reserve(self, generation: Generation) -> None:
        """7. Take the tokens and the money that the generation may need, in one round trip.

        A refusal leaves nothing taken: `_record` releases the hold and returns the tokens. If both
        are refused, the rate limit's refusal is raised. Raises RateLimited, BudgetExceeded,
        Unavailable.
        """
        turn, identity, near = generation.turn, generation.identity, None
        if generation.alias.has_engine:
            near = self._semantic.begin_draft(generation.fingerprint, generation.semantic)
        # decision: hits-cost-no-tokens
        taking = self.limits.take_tokens(turn.demand, identity)
        try:
            if identity.has_hard_money and (unpriced := generation.alias.unpriced_for(turn.demand)):
                raise BadRequest(
                    f"The model `{shown(unpriced)}` has no known price, and team {identity.team.name} "
                    "has a hard budget: ask for another model, or set `price` of its deployment",
                    param="model",
                    code="price_unknown",
                )
            need = need_of(identity, generation.alias, turn.demand, turn.body, turn.labels)
            usual = generation.alias.usual_output(turn.demand) if need.usual_tokens is not None else None
            generation.reserved(await self.money.reserve(identity, turn.arrival.request_id, need), usual)
        finally:
            generation.headers = await taking
        if near is not None:
            generation.near = (await near).entry

    async def _generated(self, flight: Flight) -> ApiError | None:
        """8 and 9, at the alias, then at its fallbacks in their order. Returns the error, if any.

        A failure that a retry may mend comes before others, the alias' own before its fallbacks'.
        """
        generation, error = flight.generation, None
        left = list(generation.alias.settings.fallbacks)
        while True:
            try:
                await Tries(flight, self._cover).run(await self._route(flight, is_last=not left))
                return None
            except ApiError as failure:
                latest = fresh(failure)
            if error is None or (_is_permanent(error) and not _is_permanent(latest)):
                error = latest
            if flight.chunks or not _may_fall_back(latest):
                return latest if flight.chunks or not generation.fallbacks else error
            fallback = self._next(generation, left)
            if fallback is None:
                return error
            generation.fell_back(fallback, latest.error_code or latest.type)

    def _next(self, generation: Generation, left: list[str]) -> Alias | None:
        """The next fallback that may answer this request, taken out of `left`; None if there is none."""
        identity, turn = generation.identity, generation.turn
        while left:
            name = left.pop(0)
            try:
                alias = self.fleet.alias(name)
                may_use(identity, name, alias.name)
                alias.check(turn.body, turn.demand, turn.kind)
            except ApiError:
                continue
            if not (identity.has_hard_money and alias.unpriced_for(turn.demand)):
                return alias
        return None

    async def _cover(self, generation: Generation, deployment: Deployment) -> bool:
        """Hold what a try at `deployment` may cost beyond the holds there are.

        Returns False where a budget has no room for it.
        """
        identity, demand, serving = generation.identity, generation.turn.demand, generation.serving
        request_id, name = generation.turn.arrival.request_id, deployment.name
        try:
            if identity.at_deployments and name not in generation.at_deployments:
                need = need_at(serving, deployment, demand)
                hold_id = f"{request_id}@{len(generation.at_deployments) + 1}"
                generation.covered_at(deployment, await self.money.reserve(identity, hold_id, need, at_deployment=True))
            beyond = generation.beyond_holds(deployment) if generation.is_beyond_first and identity.budgets else 0
            # tokens may be lacking where money is not
            if beyond > 0 or (generation.is_beyond_first and not identity.is_plain):
                turn = generation.turn
                values = {} if identity.is_plain else values_of(identity, generation.alias.name, turn.body, turn.labels)
                more = msgspec.structs.replace(
                    need_at(serving, deployment, demand, max(0, beyond)), values=values, requests=0
                )
                hold_id = f"{request_id}+{len(generation.more_holds) + 1}"
                generation.covered(await self.money.reserve(identity, hold_id, more))
        except (BudgetExceeded, Unavailable) as error:
            generation.no_room[deployment.name] = error
            return False
        return True

    async def _route(self, flight: Flight, *, is_last: bool) -> Route:
        """8. The deployments in order; waits for one that is starting or full if no other can
        answer.

        Where a fallback is left (`is_last` is false) it waits for none that is starting. Raises
        ApiError.
        """
        generation, alias = flight.generation, flight.generation.serving
        waits_until = time.perf_counter() + _STARTING_AWAITED_S
        while True:
            route = await routed(flight)
            generation.routed(route)
            if route.ranked or not (is_last and alias.is_starting and time.perf_counter() < waits_until):
                break
            await asyncio.sleep(_STARTING_POLL_S)  # a late answer is better than an error
        if not route.ranked:
            raise no_route(route, generation.turn.kind.prompt)
        return route

    async def _record(self, flight: Flight, error: ApiError | None) -> None:
        """10. Send the last chunk, then settle the hold and store the answer, in one round trip."""
        generation, turn = flight.generation, flight.generation.turn
        rows, spent = generation.end()
        generation.learn_length(spent)
        if generation.serving.settings.hedge_cost_max:
            hedged = generation.hedge.cost_microusd if generation.hedge is not None else 0
            generation.serving.hedges.spent(spent.cost_microusd, hedged)
        entry, store = self._entry_of(flight, spent)
        duration_ms = turn.elapsed_ms()
        flight.finish(error)
        works = self._account(generation, rows, spent.charged_tokens)
        words, is_kept = generation.words, self._is_exact and not turn.controls.no_store
        if generation.semantic.entry is not None and words is not None and is_kept:  # before it is released
            works.append(self._semantic.point(generation.fingerprint, words, generation.semantic))
        works.append(self._store(generation, entry, store))
        stored = None if generation.unsought else self._semantic.storing(generation.fingerprint)
        try:
            for work in list(map(Eager, works)):
                try:
                    await work
                except Exception:
                    _log.exception("record_failed", request_id=turn.arrival.request_id)
        finally:
            if stored is not None:
                stored()
            flight.retire()
            alias = generation.alias.name
            record = record_of(
                turn.arrival,
                ended_with(error, flight.leader_ended),
                duration_ms,
                identity=generation.identity,
                turn=turn,
                alias=alias,
                model=shown(turn.alias) if turn.alias != alias else "",
                flight=flight,
            )
            if (
                self._learn is not None
                and not generation.seams
                and not generation.fallbacks
                and (generation.semantic.trial is not None or turn.controls.no_cache)
            ):
                self._learn(flight, record)
            self._emit(record, turn, flight.chunks)

    def _entry_of(self, flight: Flight, spent: Spent) -> tuple[Entry | None, str]:
        """The entry to store, with `stored`, or None, with the reason. This worker finds it now."""
        generation, cache = flight.generation, self._cache
        if not generation.progress.has_begun:
            return None, ""
        is_findable = not (
            generation.unsought or generation.is_cut or shows_left_out(generation.fingerprint, flight.chunks)
        )
        refusal = generation.store_refusal(cache.entry_bytes_max, is_servable=cache.is_exact or is_findable)
        if refusal is not None:
            return None, refusal
        ttl_s = min(generation.turn.controls.ttl_s or cache.ttl_s, cache.ttl_s_max)
        entry = generation.entry(flight.chunks, spent, ttl_s, is_findable=is_findable)
        self.exact.store_local(entry)
        return entry, "stored"

    def _account(
        self, generation: Generation, rows: list[LedgerRow], used_tokens: int
    ) -> list[Coroutine[Any, Any, None]]:
        """Settle or release the holds, and correct the tokens that the rate limits took to `used_tokens`."""
        works: list[Coroutine[Any, Any, None]] = []
        for row in rows[:-1]:
            works.append(self.money.settle(Hold(row.id, row.team_id, row.at_ms), row))
        if (hold := generation.hold) is not None:
            works.append(self.money.settle(hold, rows[-1]) if rows else self.money.release(hold))
        if generation.more_holds or generation.at_deployments:
            others = [*generation.more_holds, *generation.at_deployments.values()]
            works = [self._settle_then_release(works, others)]
        if generation.headers is not None:
            correcting = self.limits.correct(generation.turn.demand, generation.identity, used_tokens)
            works += [correcting] if correcting is not None else []
        return works

    async def _settle_then_release(self, works: list[Coroutine[Any, Any, None]], others: list[Hold]) -> None:
        """Count what was spent before the room of further holds is free again."""
        try:
            await asyncio.gather(*works)
        finally:
            await asyncio.gather(*(self.money.release(hold) for hold in others))

    async def _store(self, generation: Generation, entry: Entry | None, store: str) -> None:
        """Store the entry, if there is one, and the deployment that has this prefix warm now."""
        found = generation.fingerprint
        is_hinted = generation.alias.has_choice and self._is_exact  # else no lookup asks for hints
        deployment = generation.answered_by if is_hinted else None
        try:
            if entry is not None:
                words = generation.words if entry.text is not None else None
                result = await self.exact.store(entry, warm=deployment, chain=found.chain, words=words)
                store = result.refusal.value if result.refusal else store
                generation.is_claimed = generation.is_claimed and result.refusal is not None
            elif generation.progress.has_begun and deployment is not None:
                await self.exact.store_warm(found, deployment)
        except CacheUnavailable:
            store = Refusal.UNAVAILABLE.value
        finally:
            generation.stored, generation.store = entry, store
            if generation.is_claimed:
                await self._release(found)

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
        model = turn.alias if turn is not None else ""
        alias = reply.alias if reply is not None else self.fleet.configured(model)
        model = shown(model) if alias != model else ""
        duration_ms = turn.elapsed_ms() if turn is not None else elapsed_ms_since(arrival.at_s)
        record = record_of(
            arrival, ended, duration_ms, identity=identity, turn=turn, alias=alias, model=model, reply=reply
        )
        if reply is not None and reply.pointed is not None and self._learn is not None:
            self._learn(Flight(reply.pointed), record)
        self._emit(record, turn, ())

    def emit(self, record: Record) -> None:
        """Count and log a request that asked for no generation."""
        self._emit(record, None, ())


def _may_be_awaited(controls: Controls) -> bool:
    """Whether other requests may wait for the answer to one with these controls."""
    return not (controls.no_store or controls.only_if_cached)


_FALLS_BACK = frozenset(
    {"context_length_exceeded", "no_deployment_available", "no_deployment_within_limits", "deployment_full"}
)


def _may_fall_back(error: ApiError) -> bool:
    """Whether an alias cannot answer: it is down, its contexts are too small, it is too dear, or
    the budgets of its deployments are spent.
    """
    is_upstream = isinstance(error, Upstream) and error.raw_body is None
    return error.error_code in _FALLS_BACK or is_upstream or isinstance(error, BudgetExceeded)


def _is_permanent(error: ApiError) -> bool:
    return error.http_status in (400, 424)


def may_use(identity: Identity, alias: str, pattern: str = "") -> None:
    """Raises Forbidden if the key is limited to other models.

    `pattern` is the alias that takes the name, where that alias takes every name.
    """
    models = identity.key.models
    if models is not None and alias not in models and pattern not in models:
        raise Forbidden(f"This API key may not use the model `{alias}`", param="model")
