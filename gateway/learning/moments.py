"""Asks a verifier which stored answers depend on the moment, of many prompts in one question.

No word of "What is the date?" places it in time, and its answer is wrong tomorrow in the exact
cache as in the semantic one. So the prompts of a team's new answers are gathered for a third of
`moving_ttl_s`, as long as any answer may live, and a verifier names those that move. Two prompts
with a known answer stand among them: a word that is wrong about one of them is not
heard. Knows no
verdicts. Invariants: a question holds prompts of one team at one alias; it costs no more than a
share of what the answers cost; without a word an answer lives as long as without a verifier.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from cache import Entry, ExactCache
from gateway.accounts import Identity
from gateway.deployments.alias import Alias
from gateway.journey.generation import Generation
from gateway.learning.verifier import Verifier, is_showable

AT_ONCE = 16
_WAITS_S_MAX = 15.0
_KNOWN_MAX = 10_000
_CHARS_MAX = 1_000  # of a prompt: a longer one is a text with a question about it, which seldom moves
_STAYS, _MOVES = "What is the capital of France?", "What time is it now?"


class Gathered(msgspec.Struct, eq=False):
    """The new answers of one team at one alias; `cost_microusd` is what they cost together."""

    alias: Alias
    payer: Identity
    is_due: asyncio.TimerHandle
    entries: list[Entry] = []
    cost_microusd: int = 0


@dataclass(eq=False)
class Moments:
    """The questions of one worker. `find` gives the verifier that may be asked about answers, with
    so many characters; None where none may be, or none pays. `start` carries out a question.
    """

    _exact: ExactCache
    _find: Callable[[Gathered, int], Verifier | None]
    _start: Callable[[Awaitable[None]], Any]
    _gathered: dict[tuple[int, str], Gathered] = field(default_factory=dict, init=False)
    _known: dict[bytes, None] = field(default_factory=dict, init=False)  # the latest requests that were asked about

    def recorded(self, generation: Generation) -> None:
        """Take the answer of a generation that is recorded, if it was stored for longer than a moment."""
        entry, payer, moving_ttl_s = generation.stored.entry, generation.identity, self._exact.limits.moving_ttl_s
        if entry is None or entry.text is None or entry.exact in self._known or entry.ttl_s <= moving_ttl_s:
            return
        if len(entry.text) > _CHARS_MAX or not is_showable([entry.text]):
            return
        self._known[entry.exact] = None
        if len(self._known) > _KNOWN_MAX:
            del self._known[next(iter(self._known))]
        key = (payer.team.id, generation.alias.name)
        gathered = self._gathered.get(key)
        if gathered is None:
            timer = asyncio.get_running_loop().call_later(min(_WAITS_S_MAX, moving_ttl_s / 3), self._due, key)
            gathered = self._gathered[key] = Gathered(generation.alias, payer, timer)
        gathered.entries.append(entry)
        gathered.cost_microusd += generation.stored.spent.money.cost_microusd
        if len(gathered.entries) >= AT_ONCE:
            self._due(key)

    def all_due(self) -> None:
        """Ask about all that is gathered now."""
        for key in tuple(self._gathered):
            self._due(key)

    def _due(self, key: tuple[int, str]) -> None:
        gathered = self._gathered.pop(key)
        gathered.is_due.cancel()
        self._start(self._ask(gathered))

    async def _ask(self, gathered: Gathered) -> None:
        """Ask which answers move, and let these live a moment. Raises CacheUnavailable."""
        texts = [entry.text or "" for entry in gathered.entries]
        verifier = self._find(gathered, sum(map(len, texts)))
        if verifier is not None:
            for number in await _heard(verifier, texts):
                await self._exact.moves(gathered.entries[number])


async def _heard(verifier: Verifier, texts: list[str]) -> frozenset[int]:
    """The places of the texts that move. A word that is not heard is asked for once more."""
    for _ in range(2):
        moving = await verifier.moving([_STAYS, *texts, _MOVES])
        if moving is not None and 0 not in moving and len(texts) + 1 in moving:
            return frozenset(number - 1 for number in moving) - {len(texts)}
    return frozenset()
