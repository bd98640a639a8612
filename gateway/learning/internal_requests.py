"""Requests that the gateway makes itself, through its own routes: a judge's questions, and answers
generated afresh to check a hit.

They belong to a team of their own, with a hard daily budget and no key: their cost is in the ledger
and on the team's page like anybody's, and where the money is spent there are none. Knows no judge.
Invariant: nothing of them is read from a cache or stored.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from gateway.accounts import Accounts, AlreadyExists, Identity, Key
from gateway.deployments.alias import Alias
from gateway.journey.flight import Reply
from gateway.journey.turn import Ended, arrive, read_turn
from gateway.loggers import get_logger
from gateway.pipeline import Pipeline
from gateway.settings import CacheSettings
from gateway.wire.errors import ApiError
from gateway.wire.fold import fold
from policies import WindowKind

TEAM = "sameway judge"
Reserve = Callable[[int], Awaitable[bool]]
"""Takes the worst case of a request, in µUSD; False where it may not be spent."""
_TIMEOUT_S = 120.0
_log = get_logger()


async def own_identity(settings: CacheSettings, accounts: Accounts) -> Identity | None:
    """The gateway's own team, with the budget that is configured. Creates both if they are missing.
    None if the gateway may spend nothing, or has nothing to ask.
    """
    if not settings.judge_budget_usd or not settings.judge_model:
        return None
    limit = round(settings.judge_budget_usd * 1e6)
    try:
        team = await accounts.create_team(TEAM, is_semantic_enabled=False)
    except AlreadyExists:  # made at an earlier start, or by another worker just now
        team = next(one for one in await accounts.list_teams() if one.name == TEAM)
    budgets = await accounts.list_budgets(team.id)
    daily = next((one for one in budgets if one.window is WindowKind.DAY and one.is_hard), None)
    if daily is None:
        with contextlib.suppress(AlreadyExists):  # another worker, just now
            await accounts.create_budget(team.id, WindowKind.DAY, limit, True)
    elif daily.limit != limit:
        await accounts.update_budget(daily.id, limit=limit)
    key = Key(id=0, team_id=team.id, name="", prefix="", digest=b"", created_at_s=team.created_at_s)
    return Identity(key, team, tuple(await accounts.list_budgets(team.id)))


class InternalRequests:
    """Asks the pipeline as `identity`."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._pipeline: Pipeline | None = None

    def connect(self, pipeline: Pipeline) -> None:
        """Send requests to `pipeline`. Before this call each request ends without an answer."""
        self._pipeline = pipeline

    def generations(self) -> int:
        """The number of generations under way at the pipeline."""
        return self._pipeline.generations if self._pipeline is not None else 0

    async def ask(
        self,
        body: dict[str, Any],
        alias: Alias | None = None,
        reserve: Reserve | None = None,
        within_s: float = _TIMEOUT_S,
    ) -> tuple[bytes | None, int | None]:
        """The whole `chat.completion` for a body, None where it was refused (no money, no
        deployment) or failed; and its cost in µUSD, None while that is not known.

        `alias` is one of the gateway's own. Nothing is asked of it unless `reserve` takes the worst
        case.
        """
        if self._pipeline is None:
            return None, None
        arrival = arrive("judge")
        replies: list[Reply] = []  # at most one, also where it fails before it begins
        own = {"no-cache": True, "no-store": True}
        turn = read_turn(msgspec.json.encode({**body, "stream": False, "cache": own}), {}, arrival)
        if reserve is not None and alias is not None and not await reserve(alias.worst_case_microusd(turn.demand)):
            return None, None
        try:
            async with asyncio.timeout(within_s):
                reply = await self._pipeline.answer(turn, self._identity, replies.append, alias)
                assert reply.reader is not None
                return fold(await reply.reader.whole()), _cost(reply)
        except (ApiError, TimeoutError, msgspec.DecodeError) as error:
            _log.info("own_request_failed", reason=str(error) or type(error).__name__)
            return None, _cost(replies[0]) if replies else 0
        finally:
            for reply in replies:
                assert reply.reader is not None
                reply.reader.close()
            attended = replies[0] if replies else None
            self._pipeline.finish(arrival, Ended(), identity=self._identity, turn=turn, reply=attended)


def _cost(reply: Reply) -> int | None:
    """The cost of a request in µUSD; None where it has not ended yet."""
    if reply.flight is None or not reply.flight.is_done:
        return None
    return reply.flight.generation.stored.spent.money.cost_microusd
