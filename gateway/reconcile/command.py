"""The command `sameway reconcile`: reads the file and the ledger, prints a report, and may correct.

Invariant: nothing is written without `--correct`, and then rows are added, never changed.
"""

import argparse
import asyncio
import getpass
import hashlib
import json
import sys
import time
from datetime import UTC, date, datetime
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from gateway.accounts import LedgerRow
from gateway.accounts.audit import LEDGER_CORRECTED, AuditRow
from gateway.accounts.database import Database
from gateway.accounts.errors import AccountsError
from gateway.accounts.ledger import Ledger
from gateway.accounts.rollups import CORRECTION
from gateway.reconcile.compare import Difference, Report, compare, corrections, id_part, models_of
from gateway.reconcile.export import COUNTS, Billed, Export, ExportError, read_export
from gateway.settings import Settings
from policies import Usage

DIFFERS, UNREADABLE = 1, 2


def reconcile(settings: Settings, arguments: argparse.Namespace) -> int:
    """Run the command. Returns 0 if all is within the tolerance, else DIFFERS or UNREADABLE."""
    try:
        return asyncio.run(_run(settings, arguments))
    except (ExportError, OSError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        print(f"sameway: {arguments.file}: {why}", file=sys.stderr)
    except (AccountsError, SQLAlchemyError) as error:
        print(f"sameway: the ledger: {(str(error).splitlines() or [''])[0]}", file=sys.stderr)
    return UNREADABLE


async def _run(settings: Settings, arguments: argparse.Namespace) -> int:
    tolerance = round(arguments.tolerance_usd * 1e6)
    export = read_export(arguments.file, arguments.ignore)
    if arguments.correct and not export.has_cost:
        raise ExportError("the file has no costs to correct the ledger by: expected a column `cost`")
    database = Database(settings.sql_url)
    try:
        await database.check()
        ledger = Ledger(database)
        report = await _report(settings, ledger, export, tolerance)
        booked: list[LedgerRow] = []
        if arguments.correct:
            booked = await _correct(ledger, report, tolerance)
            report = await _report(settings, ledger, export, tolerance) if booked else report
    finally:
        await database.close()
    beyond_tolerance = [difference for difference in report.differences if abs(difference.microusd) > tolerance]
    if arguments.json:
        print(json.dumps(_as_json(report, booked, tolerance), indent=2))
    else:
        _print(report, booked, beyond_tolerance)
    return DIFFERS if beyond_tolerance else 0


async def _report(settings: Settings, ledger: Ledger, export: Export, tolerance: int) -> Report:
    days = [day for day, _ in export.billed]
    spends = await ledger.day_spends(min(days), max(days))
    models, prices = models_of(settings, spends)
    return compare(export, spends, models, prices, tolerance_microusd=tolerance)


async def _correct(ledger: Ledger, report: Report, tolerance: int) -> list[LedgerRow]:
    """Book the past days' differences beyond the tolerance, in proportion to the ledger's own rows."""
    today = datetime.now(UTC).date()
    rows = [
        row
        for difference in report.differences
        if abs(difference.microusd) > tolerance and difference.rows and difference.day < today
        for row in _rows(difference)
    ]
    if not rows:
        return []
    total = sum(row.cost_microusd for row in rows)
    audit = AuditRow(
        at_ms=int(time.time() * 1000),
        action=LEDGER_CORRECTED,
        team_id=0,
        request_id="",
        entry=f"{len(rows)} rows, {total / 1e6:+.6f} USD",
        client=getpass.getuser(),
        way="command",
    )
    return rows if await ledger.correct(rows, audit) else []


def _rows(difference: Difference) -> list[LedgerRow]:
    # a second run beside this one finds the same sums, and makes rows of the same ids
    state = f"{difference.day}|{difference.model}|{difference.provider.cost_microusd}|{difference.ledger.cost_microusd}"
    digest = hashlib.blake2b(state.encode(), digest_size=8).hexdigest()
    at_ms = int(datetime(difference.day.year, difference.day.month, difference.day.day, tzinfo=UTC).timestamp() * 1000)
    return [
        LedgerRow(
            id=f"reconcile:{difference.day}:{id_part(difference.model)}:{digest}:{number}",
            at_ms=at_ms,
            request_id=f"reconcile:{digest}",
            team_id=spend.team_id,
            key_id=spend.key_id,
            alias=spend.alias,
            deployment=spend.deployment,
            usage=Usage(0, 0),
            cost_microusd=microusd,
            kind=CORRECTION,
            baseline_microusd=0,
            mechanism=CORRECTION,
        )
        for number, (spend, microusd) in enumerate(corrections(difference))
    ]


def _as_json(report: Report, booked: list[LedgerRow], tolerance: int) -> dict[str, Any]:
    def counts(billed: Billed) -> dict[str, int]:
        return {name: getattr(billed, name) for name in COUNTS}

    return {
        "provider_microusd": sum(difference.provider.cost_microusd for difference in report.differences),
        "ledger_microusd": sum(difference.ledger.cost_microusd for difference in report.differences),
        "difference_microusd": sum(difference.microusd for difference in report.differences),
        "tolerance_microusd": tolerance,
        "is_priced_by_us": report.is_priced_by_us,
        "notes": report.notes,
        "days": [
            {
                "day": difference.day.isoformat(),
                "model": difference.model,
                "names": sorted(difference.provider.names),
                "provider": counts(difference.provider),
                "ledger": counts(difference.ledger),
                "estimated_requests": difference.total("estimated"),
                "difference_microusd": difference.microusd,
                "is_over_tolerance": abs(difference.microusd) > tolerance,
                "reasons": [
                    {"reason": reason.name, "microusd": reason.microusd, "words": reason.explanation}
                    for reason in difference.reasons
                ],
            }
            for difference in report.differences
        ],
        "not_in_export": [{"model": name, "ledger_microusd": cost} for name, cost in sorted(report.uncompared.items())],
        "corrections": [{"id": row.id, "team_id": row.team_id, "cost_microusd": row.cost_microusd} for row in booked],
    }


def _print(report: Report, booked: list[LedgerRow], beyond_tolerance: list[Difference]) -> None:
    for note in report.notes:
        print(f"note: {note}")
    print(f"{'day':10}  {'model':32} {'provider':>14} {'ledger':>14} {'difference':>14}")
    for difference in report.differences:
        print(
            _line(difference.day, difference.model, difference.provider.cost_microusd, difference.ledger.cost_microusd)
        )
        for reason in difference.reasons:
            print(f"{'':12}{reason.name}: {_usd(reason.microusd)}, {reason.explanation}")
        if difference.provider.names - {difference.model}:
            print(f"{'':12}names in the file: {', '.join(sorted(difference.provider.names))}")
    provider_microusd = sum(difference.provider.cost_microusd for difference in report.differences)
    print(
        _line("total", "", provider_microusd, sum(difference.ledger.cost_microusd for difference in report.differences))
    )
    for model, microusd in sorted(report.uncompared.items()):
        print(f"not in the export: {model}, {_usd(microusd)} in the ledger")
    if booked:
        print(f"booked {len(booked)} correcting rows, {_usd(sum(row.cost_microusd for row in booked))}")
    print(f"{len(beyond_tolerance)} of {len(report.differences)} days and models are over the tolerance")


def _line(day: date | str, model: str, provider: int, ledger: int) -> str:
    return f"{day!s:10}  {model[:32]:32} {_usd(provider):>14} {_usd(ledger):>14} {_usd(provider - ledger):>14}"


def _usd(microusd: int) -> str:
    return f"{'-' if microusd < 0 else ''}${abs(microusd) / 1e6:,.6f}"
