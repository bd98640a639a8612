"""What Sameway saved, for the page and the API: lines of the ledger's days as a waterfall.

No HTTP and no HTML. Invariant: in each sum the baseline less the steps is what was spent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from gateway.accounts import SavingsLine
from gateway.accounts.ledger import BASELINE, SPENT, UNKNOWN_HITS
from gateway.admin import models
from gateway.admin.parts import WorkerParts
from gateway.admin.queries import Id, Label, Moment, ledger_filter

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
    [all_of_it] = await parts.ledger.totals([], where)
    names = {0: _OPERATOR} | {team.id: team.name for team in await parts.accounts.list_teams()}
    by_team, by_day = _split(lines, "team_id"), _split(lines, "day")
    total = _Sum(lines)
    return models.SavingsOut(
        **total.fields(),
        from_s=from_ms // 1000 // DAY_S * DAY_S,
        until_s=-(-until_ms // 1000 // DAY_S) * DAY_S,
        unknown_requests=all_of_it.requests - total.requests[SPENT] + total.requests[UNKNOWN_HITS],
        unknown_cost_microusd=all_of_it.cost_microusd - total.amounts[SPENT],
        by_team=sorted(
            (
                models.TeamSavingsOut(**one.fields(), team_id=int(team_id), team=names.get(int(team_id), "deleted"))
                for team_id, one in by_team.items()
            ),
            key=lambda one: -one.baseline_microusd,
        ),
        days=[models.DaySavingsOut(**one.fields(), day=str(day)) for day, one in sorted(by_day.items())],
    )


@dataclass(slots=True)
class _Sum:
    """Lines, summed by their name."""

    requests: Mapping[str, int]
    amounts: Mapping[str, int]

    def __init__(self, lines: Iterable[SavingsLine]) -> None:
        requests: dict[str, int] = defaultdict(int)
        amounts: dict[str, int] = defaultdict(int)
        for line in lines:
            requests[line.line] += line.requests
            amounts[line.line] += line.amount_microusd
        self.requests, self.amounts = requests, amounts

    def fields(self) -> dict[str, object]:
        baseline, spent = self.amounts[BASELINE], self.amounts[SPENT]
        known = [*MECHANISMS, *sorted(set(self.amounts) - {*MECHANISMS, BASELINE, SPENT, UNKNOWN_HITS})]
        return {
            "requests": self.requests[BASELINE],
            "baseline_microusd": baseline,
            "spent_microusd": spent,
            "saved_microusd": baseline - spent,
            "factor": baseline / spent if spent > 0 else None,
            "steps": [
                models.SavingsStepOut(
                    mechanism=name,
                    words=MECHANISMS.get(name, name),
                    requests=self.requests[name],
                    amount_microusd=self.amounts[name],
                )
                for name in known
                if self.requests[name] or self.amounts[name]
            ],
        }


def _split(lines: Iterable[SavingsLine], by: str) -> dict[int | str, _Sum]:
    found: dict[int | str, list[SavingsLine]] = defaultdict(list)
    for line in lines:
        found[getattr(line, by)].append(line)
    return {key: _Sum(some) for key, some in found.items()}
