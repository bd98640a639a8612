"""The guards of a request: a company's own services, which see its texts before the cache, the log and a
provider do, and those of its answer before its readers do.

The form is LiteLLM's generic guardrail API (docs.litellm.ai/docs/adding_provider/generic_guardrail_api, of
October 2026), so that services that exist serve here: a POST of `texts`, answered by `action` NONE, BLOCKED
with `blocked_reason`, or GUARDRAIL_INTERVENED with as many `texts`. Knows no classifiers. Invariants: nothing
of a request leaves, is looked up or stored before its guards allowed it, unless one that fails is `open`; equal
looks under way are one call; a refused answer reaches nobody and is not stored.
"""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from gateway.accounts import Identity
from gateway.accounts.row import VERIFY
from gateway.accounts.teams import Team
from gateway.deployments.alias import Alias
from gateway.deployments.deployment import Deployment
from gateway.journey.flight import Flight
from gateway.journey.outcomes import Looked
from gateway.journey.record import GuardCall, Record
from gateway.journey.storing import chunks_of, rerecorded
from gateway.journey.turn import Turn
from gateway.loggers import get_logger
from gateway.settings import GuardSettings, Settings
from gateway.transport.fetch import Fetcher, signed
from gateway.transport.http_client import TransportError
from gateway.wire.chunks import read
from gateway.wire.errors import ApiError, GuardRefused, Unavailable, shown
from gateway.wire.fold import fold
from gateway.wire.sse import events_in
from gateway.wire.texts import drop_logprobs, swapped, texts_in
from gateway.wire.types import RESPONSE, Chunk
from policies import Demand

_IDLE_MAX, _ANSWER_BYTES_MAX, _REASON_MAX = 32, 32 << 20, 500
_log = get_logger()


Emit = Callable[[Record, Turn | None, Sequence[Chunk]], None]
"""Logs, measures and counts one record. The turn and the chunks are for the log, if prompts may be logged."""


class _Note(msgspec.Struct):
    """Of a request, until it is recorded: the looks of guards, and the turn whose texts may be logged."""

    calls: list[GuardCall] = []
    turn: Turn | None = None


class _Verdict(msgspec.Struct, frozen=True):
    action: Literal["NONE", "BLOCKED", "GUARDRAIL_INTERVENED"]
    blocked_reason: str | None = None
    texts: list[str] | None = None


class _Hook:
    """One guard, and the looks at it that are under way."""

    def __init__(self, name: str, settings: GuardSettings) -> None:
        self.name = name
        self.settings = settings
        self.fetcher = Fetcher(settings.timeout_ms / 1000.0, _IDLE_MAX, _ANSWER_BYTES_MAX)
        self._looks: dict[bytes, asyncio.Task[_Verdict | None]] = {}

    async def verdict(self, look: dict[str, Any], request_id: str) -> _Verdict | None:
        """What the guard says; None if it says nothing that can be read in time."""
        key = msgspec.json.encode(look)
        task = self._looks.get(key)
        if task is None:
            body = msgspec.json.encode({**look, "litellm_call_id": request_id})
            task = self._looks[key] = asyncio.ensure_future(self._ask(body, request_id, len(look["texts"])))
            task.add_done_callback(lambda _: self._looks.pop(key, None))
        return await asyncio.shield(task)

    async def _ask(self, body: bytes, request_id: str, count: int) -> _Verdict | None:
        fields = {"Content-Type": "application/json", **self.settings.headers}
        try:
            if self.settings.secret_env is not None:
                secret = os.environ[self.settings.secret_env]
                fields |= signed(secret, request_id, int(time.time()), body)
            status, answer = await self.fetcher.fetch(self.settings.url, fields, body)
            if status != 200:
                raise ValueError(f"HTTP {status}; redirects are not followed")
            verdict = msgspec.json.decode(answer, type=_Verdict)
            if verdict.action == "GUARDRAIL_INTERVENED" and len(verdict.texts or ()) != count:
                raise ValueError(f"{len(verdict.texts or ())} texts, expected {count}")
            return verdict
        except (TransportError, TimeoutError, ValueError, KeyError) as error:
            _log.warning(
                "guard_failed", guard=self.name, request_id=request_id, reason=f"{type(error).__name__}: {error}"
            )
            return None


class Guards:
    """The guards of `settings`, whose values may change while it serves."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._hooks: dict[str, _Hook] = {}
        self._notes: dict[str, _Note] = {}  # by request

    def aclose(self) -> None:
        """Close the connections."""
        for hook in self._hooks.values():
            hook.fetcher.aclose()

    def _of(self, alias: Alias, team: Team, *, is_after: bool = False) -> list[_Hook]:
        names = _guards_of(self._settings, alias, team, is_after=is_after)
        return [self._hook(name, self._settings.guards[name]) for name in names]

    def _hook(self, name: str, guard: GuardSettings) -> _Hook:
        if name not in self._hooks or self._hooks[name].settings != guard:  # looks at an older one go on
            self._hooks[name] = _Hook(name, guard)
        return self._hooks[name]

    def hold(self, turn: Turn, identity: Identity, alias: Alias) -> bool:
        """Whether an answer's readers wait for a verdict on all of it: a chat, a completion, a message or a response."""
        is_seen = (turn.kind is RESPONSE or not turn.kind.is_plain) and turn.arrival.operation != VERIFY
        return bool(
            self._settings.guards and is_seen and _guards_of(self._settings, alias, identity.team, is_after=True)
        )

    def may_send(self, team: Team, alias: Alias, deployment: Deployment) -> bool:
        """Whether a text may go to `deployment` as it is, such as to count its tokens."""
        return not (
            _guards_of(self._settings, alias, team) or team.residency.objection(deployment.candidate(Demand(0, 0, 0)))
        )

    def unseen(self, turn: Turn | None, identity: Identity | None) -> Turn | None:
        """The turn of a request that ended before `admit`, if its texts may be logged all the same."""
        is_kept = identity is not None and identity.team.store_s_max != 0
        return turn if is_kept and not self._settings.guards else None

    def noting(self, emit: Emit) -> Emit:
        """`emit` with the looks of guards in each record, and with the texts that may be logged."""

        def emit_noted(record: Record, turn: Turn | None, chunks: Sequence[Chunk]) -> None:
            note = self._notes.pop(record.request.id, None)
            if note is not None:
                record = replace(record, request=replace(record.request, guards=tuple(note.calls)))
                turn, chunks = note.turn, chunks if note.turn is not None else ()
            emit(record, turn, chunks)

        return emit_noted

    async def admit(self, turn: Turn, identity: Identity, alias: Alias) -> Turn:
        """`turn` by the rules of its team, with the texts that its guards leave. Raises GuardRefused, Unavailable."""
        team = identity.team
        if not (self._settings.guards or team.rules):
            return turn
        self._notes[turn.arrival.request_id] = _Note()
        if team.rules:
            controls = turn.controls if team.store_s_max != 0 else replace(turn.controls, no_store=True)
            turn = replace(turn, controls=controls, demand=replace(turn.demand, residency=team.residency))
        is_seen = turn.is_guarded or turn.arrival.operation == VERIFY  # a question has texts that were seen
        for hook in [] if is_seen else self._of(alias, team):
            given = turn.native
            native = given and [msgspec.json.decode(given.raw), given.apart]
            forms = [turn.body, turn.marked, turn.labels.metadata, native]
            swap = await self._look(hook, turn, identity, alias, texts_in(forms))
            if swap:
                turn = _with_texts(turn, swapped(forms, swap), swap)
        return replace(turn, is_guarded=True)

    def admitted(self, turn: Turn, team: Team) -> Turn:
        """`turn`, whose texts may be logged as its guards and its mask left them."""
        if (note := self._notes.get(turn.arrival.request_id)) is not None and team.store_s_max != 0:
            note.turn = turn
        return turn

    async def vet(self, flight: Flight, error: ApiError | None) -> None:
        """Let the guards see a complete answer, which its readers get then. Raises GuardRefused, Unavailable."""
        if not flight.is_held or error is not None:
            return
        generation = flight.generation
        try:
            chunks = await self._vetted(flight.chunks, generation.turn, generation.identity, generation.alias)
        except BaseException:
            flight.chunks = []
            raise
        if chunks is not None:
            flight.chunks = chunks
            if generation.looked.entry is not None:
                generation.looked = replace(generation.looked, entry=rerecorded(generation.looked.entry, chunks))
        flight.first_at = time.perf_counter()

    async def vet_hit(self, turn: Turn, identity: Identity, alias: Alias, looked: Looked) -> Looked:
        """The same of a recorded answer."""
        if looked.entry is None or not self.hold(turn, identity, alias):
            return looked
        chunks = await self._vetted(chunks_of(looked.entry), turn, identity, alias)
        return looked if chunks is None else replace(looked, entry=rerecorded(looked.entry, chunks))

    async def _vetted(
        self, chunks: Sequence[Chunk], turn: Turn, identity: Identity, alias: Alias
    ) -> list[Chunk] | None:
        """One whole answer with other texts; None if the guards leave it as it is."""
        data = b"".join([chunk.data for chunk in chunks]) if turn.kind is RESPONSE else fold(chunks)
        answer = msgspec.json.decode((events_in(data) or [data])[-1] if turn.kind is RESPONSE else data)
        if turn.kind is RESPONSE:
            answer = answer.get("response", answer)
        drop_logprobs(answer)
        is_other = False
        for hook in self._of(alias, identity.team, is_after=True):
            swap = await self._look(hook, turn, identity, alias, texts_in(answer), is_after=True)
            if swap:
                answer, is_other = swapped(answer, swap), True
        if not is_other:
            return None
        whole = msgspec.json.encode(answer)
        if turn.kind is RESPONSE:
            return [Chunk(whole, is_whole=True, has_content=True, media=chunks[0].media)]
        return [read(whole, is_whole=True)]

    async def _look(
        self,
        hook: _Hook,
        turn: Turn,
        identity: Identity,
        alias: Alias,
        texts: dict[str, None],
        *,
        is_after: bool = False,
    ) -> dict[str, str]:
        """Texts in place of others, by these; empty if all may stay."""
        if not texts:
            return {}
        team, began = identity.team, time.perf_counter()
        whose: dict[str, str | None] = {"user_api_key_team_id": str(team.id), "user_api_key_team_alias": team.name}
        whose |= {"user_api_key_alias": identity.key.name, "user_api_key_end_user_id": identity.user or None}
        stage = "response" if is_after else "request"
        look = {"input_type": stage, "texts": list(texts), "model": alias.name, "request_data": whose}
        verdict = await hook.verdict(look, turn.arrival.request_id)
        # decision: guards-speak-litellms-form
        action, others = ("", None) if verdict is None else (verdict.action, verdict.texts)
        swap = dict(zip(texts, others or (), strict=False)) if action == "GUARDRAIL_INTERVENED" else {}
        swap = {old: new for old, new in swap.items() if new != old}
        outcome = {"": "failed", "BLOCKED": "refused"}.get(action) or ("replaced" if swap else "allowed")
        call = GuardCall(hook.name, is_after, outcome, round((time.perf_counter() - began) * 1000.0, 3))
        self._notes.setdefault(turn.arrival.request_id, _Note()).calls.append(call)
        if verdict is None and hook.settings.fail == "closed":
            raise Unavailable(
                f"The guard `{hook.name}` gave no verdict on the {stage}: try again later", code="guard_unavailable"
            )
        if verdict is not None and action == "BLOCKED":
            reason = shown(verdict.blocked_reason or "", _REASON_MAX) or "it gave no reason"
            raise GuardRefused(f"The guard `{hook.name}` refused the {stage}: {reason}")
        return swap


def apart_of(settings: Settings, alias: Alias, team: Team, turn: Turn | None = None) -> Any:
    """What divides the cache beside a chat's body: what the body of `turn` lacks, its team's rules, and the guards
    that may change an answer.
    """
    apart = None if turn is None or turn.native is None else turn.native.apart
    if turn is not None and turn.kind.is_plain:  # events and a whole answer are different bytes
        apart = f"{turn.kind.name} stream" if turn.is_stream else turn.kind.name
    rules = team.rules
    for name in _guards_of(settings, alias, team, is_after=True) if settings.guards else ():
        rules += ([name, settings.guards[name].url, settings.guards[name].version],)
    return [apart, rules] if rules else apart


def _guards_of(settings: Settings, alias: Alias, team: Team, *, is_after: bool = False) -> list[str]:
    """The alias's guard, then those of the team; `is_after`: those that see answers."""
    first, whose = alias.settings.guard, {team.name, "*"}
    names = [
        name
        for name, guard in settings.guards.items()
        if (name == first or not whose.isdisjoint(guard.teams)) and (guard.is_after or not is_after)
    ]
    return sorted(names, key=lambda name: name != first)


def _with_texts(turn: Turn, forms: list[Any], swap: dict[str, str]) -> Turn:
    """`turn` with other texts, in each of its forms, which have them already."""
    longer = sum([max(0, len(new.encode()) - len(old.encode())) for old, new in swap.items()])
    tokens_max = turn.demand.prompt_tokens_max + longer if turn.demand.prompt_tokens_max else 0
    body, marked, metadata, native = forms
    given = turn.native
    return replace(
        turn,
        body=body,
        marked=marked,
        labels=replace(turn.labels, metadata=metadata),
        native=given and replace(given, raw=msgspec.json.encode(native[0]), apart=native[1]),
        demand=replace(turn.demand, prompt_tokens_max=tokens_max),
    )
