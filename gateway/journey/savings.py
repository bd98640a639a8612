"""The cost of a generation beside the cost that its alias's baseline would have had for it.

The baseline is one deployment of the alias at its list price, with no cache, neither ours nor the
provider's, for the same prompt and an answer of the same length (docs/savings.md). Pure functions.
Invariants: baseline - cost = prefix_read - prefix_write + the rest, which `mechanism` names; a
price that is not known makes the comparison unknown, never 0.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from gateway.accounts import LedgerRow
from gateway.deployments.deployment import Deployment
from policies import Demand, Usage

TRIES = "tries"
"""Tries beside the one that answered: failed ones, hedges, and streams that another one went on with."""
CHECKS = "checks"
"""Requests of the gateway's own: questions to a verifier, and answers generated to check a hit."""
CHEAPER_ROUTE, DEARER_ROUTE, LOCAL_ENGINE = "cheaper_route", "dearer_route", "local_engine"
_NOTHING: dict[str, int] = {}


def compared(
    row: LedgerRow, baseline: Deployment, answered: Deployment, demand: Demand, used: Usage, whole: Usage | None = None
) -> LedgerRow:
    """`row`, of the try that answered and of its tokens `used`, with its comparison.

    `whole`: the tokens that the client got, where other deployments made some of them.
    """
    if not (baseline.is_price_known and answered.is_price_known) or (
        demand.measure and (baseline.lacks_price(demand) or answered.lacks_price(demand))
    ):
        return row
    cost = read = listed = row.cost_microusd
    if used.cached_tokens or used.cache_write_tokens or used.cache_write_1h_tokens:
        read = answered.cost(demand, used.unread())
        listed = answered.cost(demand, _uncached(used))
    is_listed = baseline is answered and whole is None
    would = listed if is_listed else baseline.cost(demand, _uncached(whole or used))
    if would == cost == listed == read:
        return replace(row, baseline_microusd=would)
    mechanism = TRIES if whole is not None else _mechanism(answered, would - listed)
    return replace(
        row,
        baseline_microusd=would,
        prefix_read_microusd=read - cost,
        prefix_write_microusd=read - listed,
        mechanism=mechanism,
    )


def beside(row: LedgerRow, mechanism: str, *, is_known: bool) -> LedgerRow:
    """`row` as one without a baseline of its own: `mechanism` is TRIES or CHECKS. `is_known`: its price is."""
    return replace(row, baseline_microusd=0, mechanism=mechanism) if is_known else row


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


def _uncached(usage: Usage) -> Usage:
    return replace(usage.unread(), cache_write_tokens=0, cache_write_1h_tokens=0)


def _mechanism(answered: Deployment, rest: int) -> str:
    if rest < 0:
        return DEARER_ROUTE
    return "" if rest == 0 else LOCAL_ENGINE if answered.settings.engine is not None else CHEAPER_ROUTE
