"""What Sameway saved, for the page and the API: lines of the ledger's days as a waterfall.

No HTTP and no HTML. Invariant: in each sum the baseline less the steps is what was spent.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TypeVar

from gateway.accounts.ledger import BASELINE, SPENT, UNKNOWN_HITS, SavingsLine
from gateway.admin import models
from gateway.admin.parts import WorkerParts
from gateway.admin.queries import Id, Label, Moment, ledger_filter

_Sums = TypeVar("_Sums", bound=models.SavingsSumOut)
DAY_S = 86_400
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


async def savings(
    parts: WorkerParts,
    team_id: Id | None = None,
    model: Label | None = None,
    from_s: Moment | None = None,
    until_s: Moment | None = None,
) -> models.SavingsOut:
    """What Sameway saved, by mechanism, team and UTC day, with what cost more; at first of the last 30 days."""
    where = ledger_filter(team_id=team_id, model=model, from_s=from_s, until_s=until_s)
    now_ms = int(parts.clock() * 1000)
    until_ms = where.until_ms if where.until_ms is not None else now_ms + 1
    from_ms = where.from_ms if where.from_ms is not None else until_ms - 1 - (DAYS - 1) * DAY_S * 1000
    where = replace(where, from_ms=from_ms, until_ms=until_ms)
    lines = await parts.ledger.savings(where)
    [total] = await parts.ledger.totals([], where)
    names = {0: _OPERATOR} | {team.id: team.name for team in await parts.accounts.list_teams()}
    by_team, by_day = defaultdict[int, list[SavingsLine]](list), defaultdict[str, list[SavingsLine]](list)
    for line in lines:
        by_team[line.team_id].append(line)
        by_day[line.day].append(line)
    of_teams = [
        _waterfall(models.TeamSavingsOut, of_team, team_id=team_id, team=names.get(team_id, "deleted"))
        for team_id, of_team in by_team.items()
    ]
    requests, amounts = _summed(lines)
    return _waterfall(
        models.SavingsOut,
        lines,
        from_s=from_ms // 1000 // DAY_S * DAY_S,
        until_s=-(-until_ms // 1000 // DAY_S) * DAY_S,
        unknown_requests=total.requests - requests[SPENT] + requests[UNKNOWN_HITS],
        unknown_cost_microusd=total.cost_microusd - amounts[SPENT],
        by_team=sorted(of_teams, key=lambda sums: -sums.baseline_microusd),
        days=[_waterfall(models.DaySavingsOut, of_day, day=day) for day, of_day in sorted(by_day.items())],
    )


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
