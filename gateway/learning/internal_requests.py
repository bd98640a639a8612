"""Requests that the gateway makes itself, through its own routes, at the expense of the team whose
request they are about: questions to a verifier, fresh answers that check a hit, and those that take
the place of a stale answer.

Each has its own hold on the team's budgets, and its cost is in the ledger and on the team's page
like any other request's; where the money is spent there are none. The key's `models` do not bind
questions: the operator chose the verifier. Knows no verifier. Invariant: nothing of them
is read from a cache; no question's answer is stored; over all workers, one request at a time makes
a stale answer anew.
"""

import asyncio
import dataclasses
import time
from typing import Any

import msgspec
from msgspec.structs import replace

from cache import CacheUnavailable
from gateway.accounts import Identity
from gateway.accounts.row import CHECK, REFRESH, VERIFY
from gateway.deployments.alias import Alias
from gateway.journey.flight import Reply
from gateway.journey.generation import Compared, Generation
from gateway.journey.outcomes import Looked
from gateway.journey.rate_limits import LimitHeaders
from gateway.journey.recorded_answers import may_be_awaited
from gateway.journey.turn import Ended, Turn, arrive, read_turn
from gateway.loggers import get_logger
from gateway.pipeline import Pipeline
from gateway.transport.eager import Eager
from gateway.wire.errors import ApiError
from gateway.wire.fold import fold

BUSY = 64
"""The generations under way from which on none begins that no request waits for."""
_RENEWED_AGAIN_S = 10.0  # after an attempt, so that a deployment that is down is not asked by each request
_UNCOUNTED: Eager[LimitHeaders] = Eager.done({})  # no request of a client, so none that its limits count
_log = get_logger()


class OwnReply(msgspec.Struct, frozen=True):
    """What came of a request of the gateway's own: the whole `chat.completion`, None where it was
    refused (no money, no deployment) or failed; its cost in µUSD, 0 while that is not known; and the
    deployment that answered.
    """

    whole: bytes | None = None
    cost_microusd: int = 0
    deployment: str = ""


class InternalRequests:
    """Asks the pipeline that `connect` names; before, each request ends without an answer."""

    def __init__(self) -> None:
        self._pipeline: Pipeline | None = None
        self._renewing: dict[bytes, asyncio.Task[None]] = {}  # by entry, until another attempt may be made

    def connect(self, pipeline: Pipeline) -> None:
        """Send requests to `pipeline`."""
        self._pipeline = pipeline
        pipeline.renew = self.renew

    def generations(self) -> int:
        """The number of generations under way at the pipeline."""
        return self._pipeline.generations if self._pipeline is not None else 0

    async def ask(
        self, body: dict[str, Any], payer: Identity, alias: Alias, within_s: float, labels: dict[str, str] | None = None
    ) -> OwnReply:
        """The reply to a body. `alias` is one of the gateway's own; the team of `payer` pays. `labels`
        are those of the request that it is about (`booked_labels`).
        """
        identity = dataclasses.replace(payer, key=dataclasses.replace(payer.key, models=None))
        own = {"no-cache": True, "no-store": True}
        turn = read_turn(msgspec.json.encode({**body, "stream": False, "cache": own}), {}, arrive(VERIFY))
        turn = replace(turn, booked=labels)
        return await self._answered(turn, identity, alias, within_s)

    async def check(self, hit: Generation, checks: Compared) -> None:
        """Generate an answer to the request of a hit, past the cache and with all that its client asked for."""
        turn, now = hit.turn, time.perf_counter()
        deadline = None if turn.deadline is None else now + turn.deadline - turn.started
        controls = replace(turn.controls, no_cache=True)
        turn = replace(turn, arrival=arrive(CHECK), controls=controls, started=now, deadline=deadline)
        await self._answered(turn, hit.identity, hit.alias, None, checks)

    def renew(self, turn: Turn, identity: Identity, alias: Alias, looked: Looked) -> None:
        """Begin to make a stale answer to `turn` anew, unless a request does or lately did."""
        exact = looked.fingerprint.exact
        if (
            not looked.is_stale
            or exact in self._renewing
            or not may_be_awaited(turn.controls)
            or turn.upload is not None
        ):
            return
        if self.generations() <= BUSY:
            self._renewing[exact] = asyncio.ensure_future(self._renew(turn, identity, alias, looked))

    async def _renew(self, turn: Turn, identity: Identity, alias: Alias, looked: Looked) -> None:
        fingerprint, entry = looked.fingerprint, looked.entry
        assert self._pipeline is not None
        assert entry is not None
        try:
            if await self._pipeline.exact.claim(fingerprint, entry):
                controls = replace(turn.controls, no_cache=True)
                turn = replace(
                    turn, arrival=arrive(REFRESH), controls=controls, started=time.perf_counter(), deadline=None
                )
                await self._answered(turn, identity, alias, None)
                await self._pipeline.exact.release(fingerprint)  # where no answer was stored
        except CacheUnavailable as error:
            _log.info("own_request_failed", reason=str(error))
        finally:
            asyncio.get_running_loop().call_later(_RENEWED_AGAIN_S, self._renewing.pop, fingerprint.exact, None)

    async def aclose(self) -> None:
        """Cancel the requests that make stale answers anew."""
        if self._pipeline is not None:
            self._pipeline.renew = lambda *_: None
        for task in self._renewing.values():
            task.cancel()
        await asyncio.gather(*self._renewing.values(), return_exceptions=True)

    async def _answered(
        self, turn: Turn, identity: Identity, alias: Alias, within_s: float | None, checks: Compared | None = None
    ) -> OwnReply:
        replies: list[Reply] = []  # at most one, also where it fails before it begins

        def attend(reply: Reply) -> None:
            assert reply.flight is not None
            reply.flight.generation.checks = checks
            replies.append(reply)

        if self._pipeline is None:
            return OwnReply()
        try:
            async with asyncio.timeout(within_s):
                reply = await self._pipeline.answer(turn, identity, attend, alias, _UNCOUNTED)
                assert reply.reader is not None
                while turn.is_stream and await reply.reader.next():
                    pass  # a stream that nobody reads is held up
                chunks = await reply.reader.whole()
                return _reply(reply, None if turn.kind.is_plain else fold(chunks))
        except (ApiError, TimeoutError, msgspec.DecodeError) as error:
            _log.info("own_request_failed", reason=getattr(error, "error_code", "") or type(error).__name__)
            return _reply(replies[0], None) if replies else OwnReply()
        finally:
            for reply in replies:
                assert reply.reader is not None
                reply.reader.close()
            attended = replies[0] if replies else None
            self._pipeline.finish(turn.arrival, Ended(), identity=identity, turn=turn, reply=attended)


def _reply(reply: Reply, whole: bytes | None) -> OwnReply:
    assert reply.flight is not None
    generation = reply.flight.generation
    return OwnReply(whole, generation.stored.spent.money.cost_microusd, generation.deployment)
