"""The gateway's end of the cache worker's socket.

Knows no torch, FAISS or Redis. Invariant: a lookup never raises and never outlives its time-out:
without the worker it is a miss with that reason.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from cache.entry import CacheWorkerUnavailable
from cache.fingerprint import Partition
from cache.query import LookupResult, Miss, MissReason, Neighbourhood, Query
from cache.verdicts.judges import Judgement
from cache.worker import messages as wire
from cache.worker.queue import EMBED_CHARS, EMBED_TEXTS, fitting
from ipc import RpcClient

_EMBED_TIMEOUT_S = 60.0
_EMBED_CHARS_MAX = 1 << 18  # of one text: no encoder's window holds a longer one
_NEAR_TIMEOUT_S = 5.0
_JUDGE_TIMEOUT_S = 10.0

T = TypeVar("T")


class SemanticClient:
    """Asks the cache worker at `socket_path`. `timeout_s` bounds a lookup. It is an async context
    manager; `start` and `aclose` do the same.
    """

    def __init__(self, socket_path: Path | str, timeout_s: float = 0.5) -> None:
        self.timeout_s = timeout_s
        self._status = wire.WorkerStatus(wire.WorkerState.AWAY)
        # why no lookup should wait: the worker has said nothing since
        self._silent_for: MissReason | None = MissReason.LOADING
        self._rpc = RpcClient(socket_path, wire.WIRE, on_state=self._learn, lost=_lost)
        self.start = self._rpc.start
        self.aclose = self._rpc.aclose

    async def __aenter__(self) -> SemanticClient:
        self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    @property
    def is_connected(self) -> bool:
        return self._rpc.is_connected

    @property
    def status(self) -> wire.WorkerStatus:
        """The worker's state, at most a second old. Its state is AWAY without a connection."""
        return self._status

    async def lookup(self, query: Query, timeout_s: float | None = None) -> LookupResult:
        """Return the decision on a prompt. If the worker is away, loads or is late, this is a Miss
        with UNAVAILABLE, LOADING or TIMEOUT.

        After a lookup that was late, others return at once until the worker has sent anything.
        `timeout_s` can only shorten the client's.
        """
        timeout_s = min(self.timeout_s, timeout_s) if timeout_s is not None else self.timeout_s
        if self._silent_for is not None and self.is_connected:
            return Miss(self._silent_for)
        try:
            reply = await self._ask(wire.AskLookup(query), Neighbourhood, timeout_s)
        except TimeoutError:
            self._silent_for = MissReason.TIMEOUT
            self._rpc.ask_state()
            return Miss(MissReason.TIMEOUT)
        except CacheWorkerUnavailable:
            return Miss(MissReason.UNAVAILABLE)
        self._silent_for = None
        return reply.decision

    async def near(self, query: Query, count: int = 8) -> Neighbourhood:
        """Return the decision on a prompt with its neighbours in the same partition and compat. The
        worker does not learn from it. Raises CacheWorkerUnavailable.
        """
        shown = msgspec.structs.replace(query, is_try=True)
        return await self._ask_or_raise(wire.AskLookup(shown, count), Neighbourhood, _NEAR_TIMEOUT_S)

    async def embed(self, texts: Sequence[str], timeout_s: float = _EMBED_TIMEOUT_S) -> AsyncIterator[wire.Embedded]:
        """Yield unit vectors and token counts of the texts, in order, a few texts at a time. The
        worker answers lookups and other callers in between. `timeout_s` bounds the wait for each
        few. Raises TextTooLong, or CacheWorkerUnavailable.
        """
        for index, text in enumerate(texts):
            if len(text) > _EMBED_CHARS_MAX:
                raise wire.TextTooLong(index, len(text), _EMBED_CHARS_MAX, "characters")
        start = 0
        while start < len(texts):
            count = fitting(map(len, itertools.islice(texts, start, None)), EMBED_TEXTS, EMBED_CHARS)
            ask = wire.AskEmbed(tuple(texts[start : start + count]))
            try:
                yield await self._ask_or_raise(ask, wire.Embedded, timeout_s)
            except wire.TextTooLong as error:
                raise wire.TextTooLong(start + error.index, error.length, error.length_max, error.unit) from None
            start += count

    async def judge(
        self, partition: Partition, compat: bytes, fresh: wire.AnswerText, others: Sequence[wire.AnswerText]
    ) -> list[Judgement]:
        """Return for each of `others`, in order, whether it says the same as the fresh answer. All
        are of this partition and compat. The worker keeps a sketch of a stored fresh answer, for
        later comparisons. Raises CacheWorkerUnavailable, also where the worker has no time.
        """
        ask = wire.AskJudge(partition, compat, fresh, tuple(others))
        return list((await self._ask_or_raise(ask, wire.Judged, _JUDGE_TIMEOUT_S)).judgements)

    async def _ask_or_raise(self, ask: wire.Ask, kind: type[T], timeout_s: float) -> T:
        try:
            return await self._ask(ask, kind, timeout_s)
        except TimeoutError:
            raise CacheWorkerUnavailable(f"the cache worker did not answer within {timeout_s:g} s") from None

    async def _ask(self, ask: wire.Ask, kind: type[T], timeout_s: float) -> T:
        reply = await self._rpc.call(ask).only(timeout_s)
        if isinstance(reply, kind):
            return reply
        raise CacheWorkerUnavailable(f"unexpected {type(reply).__name__}")

    def _learn(self, state: wire.AskReply | None) -> None:
        if isinstance(state, wire.WorkerStatus):
            self._status, self._silent_for = state, None
        else:
            self._status = wire.WorkerStatus(wire.WorkerState.AWAY)
            self._silent_for = self._silent_for or MissReason.LOADING


def _lost(how: str) -> CacheWorkerUnavailable:
    return CacheWorkerUnavailable(f"the cache worker {how}")
