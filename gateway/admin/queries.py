"""The parameters of the admin API's paths and queries, and the filters that they make.

The dashboard's pages make the same filters of their own queries. No storage.
"""

import re
from calendar import monthrange
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from typing import Annotated, Any, Literal

from fastapi import Depends
from pydantic import BeforeValidator, Field

from gateway.accounts.ledger import CURSOR, Group, LedgerFilter
from gateway.accounts.row import CHECKING
from gateway.journey.record import Record
from gateway.telemetry.buckets import kind_of


def _digits(text: Any) -> Any:
    """A whole number of a path or a query, where pydantic would take 1_0 and 10.0 too."""
    if isinstance(text, str) and not (text.isascii() and text.isdigit()):
        raise ValueError("expected a whole number, in digits")
    return text


def _day_s(value: Any) -> Any:
    """The start of a UTC day such as 2026-11-28 in unix seconds; another value is as it was."""
    is_day = isinstance(value, str) and re.fullmatch(r"\d{4}-\d\d-\d\d", value, re.ASCII)
    return datetime.fromisoformat(f"{value}T00:00Z").timestamp() if is_day else value


def id_of(value: Any) -> int | None:
    """The id that a request names, as a number or in digits; None where no id can be like that."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 11:
        value = int(value)
    return value if type(value) is int and 0 <= value < 2**31 else None


GROUPS = {
    "team": Group.TEAM, "key": Group.KEY, "user": Group.USER, "model": Group.ALIAS, "deployment": Group.DEPLOYMENT,
    "tag": Group.TAG, "region": Group.REGION, "session": Group.SESSION, "day": Group.DAY,
}  # fmt: skip
"""What sums of the ledger can be grouped by, by the names of the API."""
ROUTES_CURSOR = r"^([0-9]{1,19}-[0-9]{1,19})?$"  # an entry of a Redis stream; 20 digits may be too many

Whole = BeforeValidator(_digits)
Id = Annotated[int, Field(ge=0, le=2**31 - 1), Whole]
Limit = Annotated[int, Field(ge=1, le=500), Whole]
_MOMENT = "unix seconds, or the start of a UTC day: 2026-11-28"
Moment = Annotated[float, Field(ge=0, le=1e11, allow_inf_nan=False, description=_MOMENT), BeforeValidator(_day_s)]
Label = Annotated[str, Field(max_length=256, pattern=r"^[^\x00-\x1f]*$")]
# the views check these, with better words
RoutesCursor = Annotated[str, Field(json_schema_extra={"pattern": ROUTES_CURSOR}, description="of an earlier page")]
RoutesAfter = Annotated[
    str,
    Field(
        json_schema_extra={"pattern": ROUTES_CURSOR}, description="an earlier answer's `newest`: only what came later"
    ),
]
LedgerCursor = Annotated[str, Field(json_schema_extra={"pattern": f"^{CURSOR}$"}, description="of an earlier page")]
_group = f"({'|'.join(GROUPS)})"
Groups = Annotated[str, Field(pattern=f"^({_group}(,{_group}){{0,7}})?$", description="such as `team,user`")]
CacheKind = Literal["", "exact", "semantic", "coalesced", "miss", "bypass"]
RouteOutcome = Literal["", "ok", "refused", "failed", "failover"]
Asker = Literal["", "caller", "sameway"]


@dataclass(frozen=True, slots=True)
class RouteFilter:
    """The requests of a team, model or deployment, with an answer or an outcome of one kind, or one
    by its id; None and empty values select all.
    """

    team_id: Id | None = None
    model: Label = ""
    cache: CacheKind = ""
    deployment: Label = ""
    outcome: RouteOutcome = ""
    request_id: Label = ""
    asked_by: Annotated[Asker, Field(description="`sameway`: questions to verifiers, checks and refreshes")] = ""

    def matches(self, record: Record) -> bool:
        return (
            (self.team_id is None or record.request.team_id == self.team_id)
            and (not self.model or record.request.alias == self.model)
            and (not self.cache or record.cache.source == self.cache)
            and (not self.deployment or any(a.name == self.deployment for a in record.answer.attempts))
            and (not self.request_id or record.request.id == self.request_id)
            and (not self.asked_by or (self.asked_by == "sameway") == (record.request.operation in CHECKING))
            and (not self.outcome or self.outcome in _outcomes(record))
        )


def _outcomes(record: Record) -> tuple[str, ...]:
    kind = kind_of(record.cache.source, record.ended.status, record.ended.error)
    outcome = kind if kind in ("refused", "failed") else "ok"
    return (outcome, "failover") if len(record.answer.attempts) > 1 else (outcome,)


def ledger_filter(
    team_id: Id | None = None,
    key_id: Id | None = None,
    model: Label | None = None,
    deployment: Label | None = None,
    session: Label | None = None,
    region: Label | None = None,
    from_s: Moment | None = None,
    until_s: Moment | None = None,
) -> LedgerFilter:
    """The rows of a team, key, model, deployment, session or region, from `from_s` on and before `until_s`."""
    return LedgerFilter(
        team_id=team_id,
        key_id=key_id,
        alias=model or None,
        deployment=deployment or None,
        session=session or None,
        region=region or None,
        from_ms=int(from_s * 1000) if from_s is not None else None,
        until_ms=int(until_s * 1000) if until_s is not None else None,
    )


LedgerRows = Annotated[LedgerFilter, Depends(ledger_filter)]


def ledger_groups(
    where: LedgerRows,
    by: Groups = "",
    user: Label | None = None,
    tag: Label | None = None,
    tag_value: Label | None = None,
) -> tuple[list[Group], LedgerFilter]:
    """What sums of the ledger are grouped by, and their rows."""
    groups = [GROUPS[name] for name in dict.fromkeys(by.split(",") if by else ())]
    return groups, replace(where, user=user, tag=tag, tag_value=tag_value)


LedgerGroups = Annotated[tuple[list[Group], LedgerFilter], Depends(ledger_groups)]
DAY_S = 86_400


def days_of(query: Mapping[str, str]) -> dict[str, Any]:
    """`from_s` and `until_s` of the days `from` and `until` of a page's query, both included; what is no ISO date says nothing."""
    moments: dict[str, Any] = {}
    for name, more_s in (("from", 0), ("until", DAY_S)):
        with suppress(ValueError, TypeError):
            moments[f"{name}_s"] = _day_s(query.get(name)) + more_s
    return moments


def periods(now_s: float) -> dict[str, tuple[date, date]]:
    """The first and last days of the periods that a page offers: some days up to today, three calendar months, this year."""
    today = datetime.fromtimestamp(now_s, UTC).date()
    offered = {f"{days} days": (today - timedelta(days=days - 1), today) for days in (7, 30)}
    first = today.replace(day=1)
    for _ in range(3):
        offered[f"{first:%b %Y}"] = (first, first.replace(day=monthrange(first.year, first.month)[1]))
        first = (first - timedelta(days=1)).replace(day=1)
    return offered | {f"{today.year}": (date(today.year, 1, 1), date(today.year, 12, 31))}


Routes = Annotated[RouteFilter, Depends()]
