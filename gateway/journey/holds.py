"""Stage 7 of the journey, and the money of 9 and 10: all that one generation holds.

Knows no routes and no chunks. Invariants: each hold is settled or released once, after what was
spent is counted; a refusal leaves nothing taken once `settle` has run; a deployment whose budgets
have no room is not asked.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

import msgspec

from gateway.accounts import Identity, LedgerRow
from gateway.deployments.alias import Alias
from gateway.deployments.deployment import Deployment
from gateway.journey.bill import book, charged, cost_of, with_charges
from gateway.journey.budget import Money
from gateway.journey.needs import need_at, need_of, values_of
from gateway.journey.outcomes import Answered, Spent
from gateway.journey.rate_limits import Limits, expected_tokens
from gateway.journey.turn import Turn
from gateway.wire.errors import ApiError, BadRequest, BudgetExceeded, Unavailable, shown
from policies import Hold


class Holds(msgspec.Struct, eq=False):
    """The tokens and the money of one generation, from before its first try until it is recorded."""

    _money: Money
    _limits: Limits
    _turn: Turn
    _identity: Identity
    _alias: Alias
    _first: Hold | None = None
    _more: list[Hold] = []  # for what tries may cost beyond the first
    _at_deployments: dict[str, Hold] = {}  # of the budgets on deployments, by the deployment's name
    _rows: list[LedgerRow] = []
    _expected_tokens: int = 0  # that the rate limits took
    cut_at: int | None = None  # the answer's tokens at most, as a budget has no room for more
    is_bounded: bool = False  # by a budget
    limit_headers: dict[bytes, bytes] | None = None  # of the limits on tokens, once taken
    refusals: dict[str, ApiError] = {}  # by deployments whose budgets have no room

    async def reserve(self) -> None:
        """7. Take the tokens and the money that the generation may need, in one round trip.

        A refusal leaves nothing taken: `settle` releases the hold and returns the tokens. If both
        are refused, the rate limit's refusal is raised. Raises RateLimited, BudgetExceeded,
        Unavailable, BadRequest where a hard budget cannot count the cost.
        """
        turn, identity, alias = self._turn, self._identity, self._alias
        # decision: hits-cost-no-tokens
        self._expected_tokens = expected_tokens(turn.demand)
        taking = self._limits.take_tokens(self._expected_tokens, identity)
        try:
            if identity.has_hard_money and (unpriced := alias.unpriced_for(turn.demand)):
                raise BadRequest(
                    f"The model `{shown(unpriced)}` has no known price, and team {identity.team.name} "
                    "has a hard budget: ask for another model, or set `price` of its deployment",
                    param="model",
                    code="price_unknown",
                )
            need = need_of(identity, alias, turn.demand, turn.body, turn.labels)
            usual = alias.usual_output(turn.demand) if need.usual_tokens is not None else None
            hold = self._first = await self._money.reserve(identity, turn.arrival.request_id, need)
            self.cut_at = usual if hold.is_cut else None
            self.is_bounded = hold.is_held
        finally:
            self.limit_headers = await taking

    async def cover(self, answered: Answered, deployment: Deployment) -> bool:
        """9. Hold what a try at `deployment` may cost beyond the holds there are.

        Returns False where a budget has no room for it.
        """
        identity, turn, serving = self._identity, self._turn, answered.serving
        if not (answered.tries or identity.at_deployments) and serving is self._alias:
            return True
        request_id, name = turn.arrival.request_id, deployment.group
        try:
            if identity.at_deployments and name not in self._at_deployments:
                need = need_at(serving, deployment, turn.demand)
                hold_id = f"{request_id}@{len(self._at_deployments) + 1}"
                hold = await self._money.reserve(identity, hold_id, need, at_deployment=True)
                self._at_deployments[name] = hold
                self.is_bounded |= hold.is_held
            is_beyond = self._may_be_beyond(answered)
            beyond = self._beyond(answered, deployment) if is_beyond and identity.budgets else 0
            # tokens may be lacking where money is not
            if beyond > 0 or (is_beyond and not identity.is_plain):
                values = {} if identity.is_plain else values_of(identity, self._alias.name, turn.body, turn.labels)
                need = need_at(serving, deployment, turn.demand, max(0, beyond))
                need = msgspec.structs.replace(need, values=values, requests=0)
                hold = await self._money.reserve(identity, f"{request_id}+{len(self._more) + 1}", need)
                self._more.append(hold)
                self.is_bounded |= hold.is_held
        except (BudgetExceeded, Unavailable) as error:
            self.refusals[name] = error
            return False
        return True

    def _may_be_beyond(self, answered: Answered) -> bool:
        """Whether the first hold may be too small for one more try."""
        return answered.serving is not self._alias or any(
            tried.progress.has_begun or tried.progress.attempt is None for tried in answered.tries
        )

    def _beyond(self, answered: Answered, deployment: Deployment) -> int:
        """The µUSD that a try at `deployment` may cost beyond all holds, after what is charged."""
        demand, serving, tries = self._turn.demand, answered.serving, answered.tries
        ended = [tried for tried in charged(tries) if tried.progress.attempt is not None]
        used = sum(cost_of(tried, self._alias, demand, self.cut_at) for tried in ended)
        running = [tried for tried in tries if tried.progress.attempt is None]
        used += sum(serving.worst_case_at(tried.deployment, demand) for tried in running)
        held = sum(hold.microusd for hold in (self._first, *self._more) if hold is not None)
        return used + serving.worst_case_at(deployment, demand) - held

    def book(self, answered: Answered) -> Spent:
        """10. Fix the tokens and the cost of all tries, and the rows that `settle` books; and learn of them."""
        if self._first is None:
            return Spent()
        rows, spent = book(answered, self._first, self._turn, self._identity, self._alias, self.cut_at)
        self._learn(answered, spent)
        if self._first.more or self._at_deployments:
            rows = with_charges(rows, self._first, self._at_deployments)
        self._rows = rows
        return spent

    def _learn(self, answered: Answered, spent: Spent) -> None:
        """Learn which counts of tokens are wrong, how long answers are, and what hedges cost."""
        demand, progress, serving = self._turn.demand, answered.progress, answered.serving
        for tried in answered.tries if spent.money.claims else ():
            if any(claim.is_cut and claim.deployment == tried.deployment.name for claim in spent.money.claims):
                tried.deployment.overcounted(demand)
        if serving.settings.hedge_cost_max:
            serving.hedges.spent(spent.money.cost_microusd, spent.hedge_microusd)
        is_counted = not (spent.money.usage_estimated or self._turn.kind.is_plain)
        if is_counted and progress.is_complete and self.cut_at is None:
            self._alias.lengths.add(-(-spent.usage.completion_tokens // demand.choices))

    def settle(self, used_tokens: int) -> list[Coroutine[Any, Any, None]]:
        """10. Settle the hold by the rows of `book`, or release it; release the other holds; and
        correct the tokens that the rate limits took to `used_tokens`. To be awaited together.
        """
        rows, money = self._rows, self._money
        works = [money.settle(Hold(row.id, row.team_id, row.at_ms), row) for row in rows[:-1]]
        if self._first is not None:
            works.append(money.settle(self._first, rows[-1]) if rows else money.release(self._first))
        if self._more or self._at_deployments:
            works = [self._settle_then_release(works)]
        if self.limit_headers is not None:
            correcting = self._limits.correct(self._expected_tokens, self._identity, used_tokens)
            if correcting is not None:
                works.append(correcting)
        return works

    async def _settle_then_release(self, settling: list[Coroutine[Any, Any, None]]) -> None:
        """Count what was spent before the room of further holds is free again."""
        others = [*self._more, *self._at_deployments.values()]
        try:
            await asyncio.gather(*settling)
        finally:
            await asyncio.gather(*(self._money.release(hold) for hold in others))
