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

from cache import Entry
from gateway.accounts import Identity
from gateway.accounts.row import VERIFY
from gateway.accounts.teams import Team
from gateway.deployments.alias import Alias
from gateway.deployments.deployment import Deployment
from gateway.journey.flight import Flight
from gateway.journey.outcomes import Looked
from gateway.journey.record import GuardCall, Record
from gateway.journey.storing import chunks_of, recorded
from gateway.journey.turn import Turn
from gateway.loggers import get_logger
from gateway.settings import GuardSettings, Settings
from gateway.transport.fetch import Fetcher, signed
from gateway.transport.http_client import TransportError
from gateway.wire.chunks import read
from gateway.wire.errors import BadRequest, GuardRefused, Unavailable, shown
from gateway.wire.fold import fold
from gateway.wire.sse import events_in
from gateway.wire.types import RESPONSE, Chunk
from policies import Demand

_IDLE_MAX, _ANSWER_BYTES_MAX, _REASON_MAX = 32, 32 << 20, 500
_PARTS = """
    arguments content documents input instructions output prompt query reasoning reasoning_content refusal suffix
    summary system text thinking
"""
_TEXTS = frozenset(_PARTS.split())
_VALUES = frozenset({"arguments", "input", "output"})  # of a tool's call: an object has texts under any name
_log = get_logger()


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
        self._asked: dict[bytes, asyncio.Task[_Verdict | None]] = {}

    async def verdict(self, look: dict[str, Any], request_id: str) -> _Verdict | None:
        """What the guard says; None if it says nothing that can be read in time."""
        key = msgspec.json.encode(look)
        task = self._asked.get(key)
        if task is None:
            body = msgspec.json.encode({**look, "litellm_call_id": request_id})
            task = self._asked[key] = asyncio.ensure_future(self._ask(body, request_id, len(look["texts"])))
            task.add_done_callback(lambda _: self._asked.pop(key, None))
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
        self._calls: dict[str, list[GuardCall]] = {}  # by request, until it is recorded

    def aclose(self) -> None:
        """Close the connections."""
        for hook in self._hooks.values():
            hook.fetcher.aclose()

    def _of(self, alias: Alias, team: Team, *, is_after: bool = False) -> list[_Hook]:
        names = _guards_of(self._settings, alias, team, is_after=is_after)
        return [self._hook(name, self._settings.guards[name]) for name in names]

    def _hook(self, name: str, guard: GuardSettings) -> _Hook:
        hook = self._hooks.get(name)
        if hook is None or hook.settings != guard:
            if hook is not None:
                hook.fetcher.aclose()
            hook = self._hooks[name] = _Hook(name, guard)
        return hook

    def holds(self, turn: Turn, alias: Alias, team: Team) -> bool:
        """Whether an answer's readers wait for a verdict on all of it."""
        return _has_texts(turn) and bool(_guards_of(self._settings, alias, team, is_after=True))

    def may_send(self, team: Team, alias: Alias, deployment: Deployment) -> bool:
        """Whether a text may go to `deployment` as it is, such as to count its tokens."""
        return not (
            _guards_of(self._settings, alias, team) or team.residency.objection(deployment.candidate(Demand(0, 0, 0)))
        )

    def noted(self, record: Record) -> Record:
        """`record` with the looks of guards."""
        calls = self._calls.pop(record.request.id, None)
        return record if calls is None else replace(record, request=replace(record.request, guards=tuple(calls)))

    async def admit(self, turn: Turn, identity: Identity, alias: Alias) -> Turn:
        """`turn` by the rules of its team, with the texts that its guards leave. Raises GuardRefused, Unavailable."""
        team = identity.team
        if team.rules:
            controls = turn.controls if team.store_s_max != 0 else replace(turn.controls, no_store=True)
            turn = replace(turn, controls=controls, demand=replace(turn.demand, residency=team.residency))
        if turn.is_guarded or turn.arrival.operation == VERIFY:  # a question has texts that were seen
            return turn
        for hook in self._of(alias, team):
            texts = _texts_in(turn.body)
            native = None if turn.native is None else msgspec.json.decode(turn.native.raw)
            swap = await self._look(hook, turn, identity, alias, texts | _texts_in(native))
            if swap:
                turn = _with_texts(turn, native, swap)
        return replace(turn, is_guarded=True)

    async def vet(self, flight: Flight) -> None:
        """Let the guards see a complete answer, which its readers get then. Raises GuardRefused, Unavailable."""
        generation = flight.generation
        try:
            chunks = await self._vetted(flight.chunks, generation.turn, generation.identity, generation.alias)
        except BaseException:
            flight.chunks = []
            raise
        if chunks is not None:
            flight.chunks = chunks
            if generation.looked.entry is not None:
                generation.looked = replace(generation.looked, entry=_recording(generation.looked.entry, chunks))
        flight.first_at = time.perf_counter()

    async def vet_hit(self, turn: Turn, identity: Identity, alias: Alias, looked: Looked) -> Looked:
        """The same of a recorded answer."""
        if looked.entry is None or not self.holds(turn, alias, identity.team):
            return looked
        chunks = await self._vetted(chunks_of(looked.entry), turn, identity, alias)
        return looked if chunks is None else replace(looked, entry=_recording(looked.entry, chunks))

    async def _vetted(
        self, chunks: Sequence[Chunk], turn: Turn, identity: Identity, alias: Alias
    ) -> list[Chunk] | None:
        """One whole answer with other texts; None if the guards leave it as it is."""
        data = b"".join([chunk.data for chunk in chunks]) if turn.kind is RESPONSE else fold(chunks)
        answer = msgspec.json.decode((events_in(data) or [data])[-1] if turn.kind is RESPONSE else data)
        if turn.kind is RESPONSE:
            answer = answer.get("response", answer)
        is_other = False
        for hook in self._of(alias, identity.team, is_after=True):
            swap = await self._look(hook, turn, identity, alias, _texts_in(answer), is_after=True)
            if swap:
                answer, is_other = _swapped(answer, swap), True
        if not is_other:
            return None
        for choice in answer.get("choices") or ():
            choice["logprobs"] = None  # they spell the text that was replaced
        whole = msgspec.json.encode(answer)
        return (
            [Chunk(whole, is_whole=True, has_content=True)] if turn.kind is RESPONSE else [read(whole, is_whole=True)]
        )

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
        swap = dict(zip(texts, verdict.texts or (), strict=False)) if verdict is not None else {}
        swap = {old: new for old, new in swap.items() if new != old}
        is_refused = verdict is not None and verdict.action == "BLOCKED"
        word = "failed" if verdict is None else "refused" if is_refused else "replaced" if swap else "allowed"
        call = GuardCall(hook.name, is_after, word, round((time.perf_counter() - began) * 1000.0, 3))
        self._calls.setdefault(turn.arrival.request_id, []).append(call)
        if verdict is None and hook.settings.fail == "closed":
            words = f"The guard `{hook.name}` gave no verdict on the {stage}, which is refused then: try again later"
            raise Unavailable(words, code="guard_unavailable")
        if is_refused and verdict is not None:
            reason = shown(verdict.blocked_reason or "", _REASON_MAX) or "it gave no reason"
            raise GuardRefused(f"The guard `{hook.name}` refused the {stage}: {reason}")
        return swap


def apart_of(settings: Settings, alias: Alias, team: Team, apart: Any = None) -> Any:
    """`apart`, which divides the cache, with the team's rules and the guards that may change an answer."""
    after = [(name, settings.guards[name]) for name in _guards_of(settings, alias, team, is_after=True)]
    rules = [*team.rules, *([name, guard.url, guard.version] for name, guard in after)]
    return [apart, rules] if rules else apart


def _guards_of(settings: Settings, alias: Alias, team: Team, *, is_after: bool = False) -> list[str]:
    """The alias's guard, then those of the team; `is_after`: those that see answers."""
    own, whose = alias.settings.guard, {team.name, "*"}
    names = [name for name, guard in settings.guards.items() if name == own or not whose.isdisjoint(guard.teams)]
    names = [name for name in names if settings.guards[name].is_after or not is_after]
    return sorted(names, key=lambda name: name != own)


def _has_texts(turn: Turn) -> bool:
    """Whether its answer is one of words."""
    return not turn.kind.is_plain or turn.kind is RESPONSE


def _walked(node: Any, visit: Callable[[str], str], *, is_text: bool = False, is_value: bool = False) -> Any:
    """`node` with what `visit` makes of each text in it."""
    if isinstance(node, str):
        return visit(node) if node and (is_text or is_value) else node
    if isinstance(node, list):
        return [_walked(item, visit, is_text=is_text, is_value=is_value) for item in node]
    if not isinstance(node, dict):
        return node
    return {
        name: _walked(
            item, visit, is_text=name in _TEXTS, is_value=is_value or (name in _VALUES and isinstance(item, dict))
        )
        for name, item in node.items()
    }


def _texts_in(node: Any) -> dict[str, None]:
    """The texts in a body, each once. Raises BadRequest."""
    texts: dict[str, None] = {}
    try:
        _walked(node, lambda text: texts.setdefault(text) or text)
    except RecursionError:
        raise BadRequest("The body is nested too deeply", code="invalid_json") from None
    return texts


def _swapped(node: Any, swap: dict[str, str]) -> Any:
    return _walked(node, lambda text: swap.get(text, text))


def _with_texts(turn: Turn, native: Any, swap: dict[str, str]) -> Turn:
    """`turn` with other texts, in each form that it has."""
    longer = sum([max(0, len(new.encode()) - len(old.encode())) for old, new in swap.items()])
    tokens_max = turn.demand.prompt_tokens_max + longer if turn.demand.prompt_tokens_max else 0
    turn = replace(turn, body=_swapped(turn.body, swap), demand=replace(turn.demand, prompt_tokens_max=tokens_max))
    if turn.marked is not None:
        turn = replace(turn, marked=_swapped(turn.marked, swap))
    if turn.native is None:
        return turn
    apart = _walked(turn.native.apart, lambda text: swap.get(text, text), is_value=True)
    return replace(turn, native=replace(turn.native, raw=msgspec.json.encode(_swapped(native, swap)), apart=apart))


def _recording(entry: Entry, chunks: Sequence[Chunk]) -> Entry:
    """`entry` with another answer, to be sent in its place; it is stored nowhere."""
    pieces, labels = recorded(chunks)
    kept = {
        name: label for name, label in entry.labels.items() if name not in ("native_at", "media", "has_usage_chunk")
    }
    return replace(entry, chunks=pieces, labels={**kept, **labels})
