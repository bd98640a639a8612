"""What Sameway saved, for the page and the API: lines of the ledger's days as a waterfall.

No HTTP and no HTML. Invariant: in each sum the baseline less the steps is what was spent.
"""

import math
from calendar import monthrange
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Any, TypeVar

from fastapi import Depends

from gateway.accounts.ledger import BASELINE, SPENT, UNKNOWN_HITS, LedgerFilter, SavingsLine
from gateway.admin import models
from gateway.admin.parts import WorkerParts
from gateway.admin.queries import DAY_S, Id, Label, Moment, ledger_filter

_Sums = TypeVar("_Sums", bound=models.SavingsSumOut)
DAYS = 30
_OPERATOR = "the operator"  # of tries of deployments
MECHANISMS = {
    "exact": "Exact hits",
    "semantic": "Semantic hits",
    "coalesced": "Shared generations",
    "prefix_read": "Provider's prompt cache read",
    "cheaper_route": "Cheaper route",
    "local_engine": "Local engine",
    "other": "Other",
    "prefix_write": "Provider's prompt cache written",
    "dearer_route": "Dearer route",
    "tries": "Further tries",
    "checks": "Judges and checks",
    "correction": "Corrections of the ledger",
}
"""The steps of a waterfall in their order, with the dashboard's words."""


def savings_filter(
    parts: WorkerParts,
    team_id: Id | None = None,
    model: Label | None = None,
    from_s: Moment | None = None,
    until_s: Moment | None = None,
) -> LedgerFilter:
    """Whole UTC days of a team and a model; at first the last DAYS."""
    until_s = parts.clock() + 0.001 if until_s is None else until_s
    from_s = until_s - 0.001 - (DAYS - 1) * DAY_S if from_s is None else from_s
    end_s = -int(-until_s // DAY_S) * DAY_S
    return ledger_filter(team_id, model=model, from_s=from_s // DAY_S * DAY_S, until_s=end_s)


Saved = Annotated[LedgerFilter, Depends(savings_filter)]


async def savings(parts: WorkerParts, where: Saved) -> models.SavingsOut:
    """What Sameway saved, by mechanism, team and UTC day, with what cost more; at first of the last 30 days."""
    first_s, end_s = (where.from_ms or 0) // 1000, (where.until_ms or 0) // 1000
    lines, teams = await parts.ledger.savings(where), await parts.accounts.list_teams()
    [total] = await parts.ledger.totals([], where)
    names = {0: _OPERATOR} | {team.id: team.name for team in teams}
    by_team, by_day = defaultdict[int, list[SavingsLine]](list), defaultdict[str, list[SavingsLine]](list)
    for line in lines:
        by_team[line.team_id].append(line)
        by_day[line.day].append(line)
    of_teams = [
        _waterfall(models.TeamSavingsOut, of_team, team_id=team_id, team=names.get(team_id, "deleted"))
        for team_id, of_team in by_team.items()
    ]
    requests, amounts = _summed(lines)
    running = target = None
    if where.team_id is None and where.alias is None:  # from the first team on, up to now
        began_s = max(first_s, min((team.created_at_s for team in teams), default=end_s))
        until_now_s, settings = min(end_s, parts.clock()), parts.settings
        running = _of_months(settings.savings.running_usd_per_month, began_s, until_now_s)
        target = _of_months(settings.savings.target_usd_per_month or 0, began_s, until_now_s) or None
    net = None if running is None else amounts[BASELINE] - amounts[SPENT] - running
    return _waterfall(
        models.SavingsOut,
        lines,
        from_s=first_s,
        until_s=end_s,
        running_microusd=running,
        net_microusd=net,
        target_microusd=target,
        is_target_met=None if net is None or target is None else net >= target,
        unknown_requests=total.requests - requests[SPENT] + requests[UNKNOWN_HITS],
        unknown_cost_microusd=total.cost_microusd - amounts[SPENT],
        by_team=sorted(of_teams, key=lambda sums: -sums.baseline_microusd),
        days=[_waterfall(models.DaySavingsOut, of_day, day=day) for day, of_day in sorted(by_day.items())],
    )


async def savings_rows(parts: WorkerParts, where: LedgerFilter) -> AsyncIterator[dict[str, Any]]:
    """The lines that `savings` sums up, by day, team and line."""
    names = {0: _OPERATOR} | {team.id: team.name for team in await parts.accounts.list_teams()}
    for line in await parts.ledger.savings(where):
        yield {**asdict(line), "team": names.get(line.team_id, "deleted")}


def _of_months(usd: float, from_s: float, until_s: float) -> int:
    """The share in µUSD that the UTC days with a part in this time have of an amount a calendar month."""
    days = (datetime.fromtimestamp(at, UTC) for at in range(int(from_s // DAY_S) * DAY_S, math.ceil(until_s), DAY_S))
    return round(sum(usd * 1e6 / monthrange(day.year, day.month)[1] for day in days))


def _summed(lines: Iterable[SavingsLine]) -> tuple[Counter[str], Counter[str]]:
    """The requests and the amounts of lines, by their name."""
    requests, amounts = Counter[str](), Counter[str]()
    for line in lines:
        requests[line.line] += line.requests
        amounts[line.line] += line.amount_microusd
    return requests, amounts


def _waterfall(kind: type[_Sums], lines: Iterable[SavingsLine], **labels: Any) -> _Sums:
    requests, amounts = _summed(lines)
    baseline, spent = amounts[BASELINE], amounts[SPENT]
    steps = [*MECHANISMS, *sorted(set(amounts) - {*MECHANISMS, BASELINE, SPENT, UNKNOWN_HITS})]
    return kind(
        requests=requests[BASELINE],
        baseline_microusd=baseline,
        spent_microusd=spent,
        saved_microusd=baseline - spent,
        factor=baseline / spent if spent > 0 else None,
        steps=[
            models.SavingsStepOut(
                mechanism=name,
                label=MECHANISMS.get(name, name),
                requests=requests[name],
                amount_microusd=amounts[name],
            )
            for name in steps
            if requests[name] or amounts[name]
        ],
        **labels,
    )
