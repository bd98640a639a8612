"""The cost of a generation beside the cost that its alias's baseline would have had for it.

The baseline is one deployment of the alias at its list price, with no cache, neither ours nor the
provider's, for the same prompt and an answer of the same length (docs/savings.md). Pure functions.
Invariants: baseline - cost = prefix_read - prefix_write + the rest, which `mechanism` names; a
price that is not known makes the comparison unknown, never 0.
"""

from collections.abc import Sequence

import msgspec

from gateway.accounts import LedgerRow
from gateway.deployments.deployment import Deployment
from policies import Demand, Tokens

TRIES = "tries"
"""Tries beside the one that answered: failed ones, hedges, and streams that another one went on with."""
CHECKS = "checks"
"""Requests of the gateway's own: a judge's questions, and answers generated afresh to check a hit."""
CHEAPER_ROUTE, DEARER_ROUTE, LOCAL_ENGINE = "cheaper_route", "dearer_route", "local_engine"
CHECKING = "judge"  # the operation of the gateway's own requests


class Compared(msgspec.Struct, frozen=True):
    """What one ledger row would have cost, µUSD; None where it is not known.

    `prefix_read_microusd` was saved by reading the provider's prompt cache, and
    `prefix_write_microusd` paid for writing it. `mechanism` names what explains the rest.
    """

    baseline_microusd: int | None = None
    prefix_read_microusd: int = 0
    prefix_write_microusd: int = 0
    mechanism: str = ""


UNKNOWN = Compared()
_NOTHING: dict[str, int] = {}
_BESIDE = Compared(0, mechanism=TRIES)
_CHECKED = Compared(0, mechanism=CHECKS)


def compare(
    baseline: Deployment,
    answered: Deployment,
    demand: Demand,
    used: Tokens,
    seen: Tokens,
    cost_microusd: int,
    *,
    is_joint: bool = False,
) -> Compared:
    """The comparison of the try that answered.

    `used` are its tokens and `cost_microusd` their cost, `seen` those that the client got, also
    from other deployments (`is_joint`).
    """
    if not (baseline.is_price_known and answered.is_price_known) or (
        demand.measure and (baseline.lacks_price(demand) or answered.lacks_price(demand))
    ):
        return UNKNOWN
    read, listed = cost_microusd, cost_microusd
    if used.cached or used.cache_write or used.cache_write_1h:
        read = answered.cost(demand, used.unread())
        listed = answered.cost(demand, _uncached(used))
    would = listed if baseline is answered and not is_joint else baseline.cost(demand, _uncached(seen))
    if would == cost_microusd == listed == read:
        return Compared(would)
    return Compared(would, read - cost_microusd, read - listed, _mechanism(answered, would - listed, is_joint))


def compare_other(answered: Deployment, operation: str, *, is_known: bool = True) -> Compared:
    """The comparison of a row that has no baseline of its own: a try beside the one that answered,
    or any try of the gateway's own requests.
    """
    if not (is_known and answered.is_price_known):
        return UNKNOWN
    return _CHECKED if operation == CHECKING else _BESIDE


def joined(rows: Sequence[LedgerRow]) -> tuple[int | None, dict[str, int]]:
    """The baseline of a request from all its rows, and what each mechanism saved (below 0: cost);
    None without rows, and where one's is not known.
    """
    row = rows[0] if len(rows) == 1 else None
    if row is not None and row.baseline_microusd == row.cost_microusd and not row.mechanism:
        return row.baseline_microusd, _NOTHING
    baseline, saved = 0, dict[str, int]()
    for row in rows:
        if row.baseline_microusd is None:
            return None, _NOTHING
        baseline += row.baseline_microusd
        for name, amount in row.savings():
            saved[name] = saved.get(name, 0) + amount
    return baseline if rows else None, saved


def _uncached(tokens: Tokens) -> Tokens:
    return msgspec.structs.replace(tokens.unread(), cache_write=0, cache_write_1h=0)


def _mechanism(answered: Deployment, rest: int, is_joint: bool) -> str:
    if is_joint:
        return TRIES
    if rest < 0:
        return DEARER_ROUTE
    return "" if rest == 0 else LOCAL_ENGINE if answered.settings.engine is not None else CHEAPER_ROUTE
