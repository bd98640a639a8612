"""`sameway reconcile` from a file to its exit status, on a real ledger."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.accounts import LedgerRow
from gateway.accounts.accounts import Accounts
from gateway.accounts.audit import Audit
from gateway.accounts.ledger import Ledger, LedgerFilter
from gateway.cli import main
from policies import Usage

NOON_MS = int(datetime(2026, 11, 20, 12, tzinfo=UTC).timestamp() * 1000)
DAY_MS = 86_400_000
PRICE = {"input_usd_per_mtok": 1, "output_usd_per_mtok": 2, "cached_input_usd_per_mtok": 0.1}


def row(number: int, cost: int, **fields: Any) -> LedgerRow:
    known: dict[str, Any] = {
        "alias": "chat",
        "deployment": "openai",
        "at_ms": NOON_MS,
        "team_id": 1 + number % 2,
        "usage": Usage(1000, 100),
    }
    return LedgerRow(
        id=f"r{number}", request_id=f"q{number}", key_id=1, cost_microusd=cost, kind="chat", **(known | fields)
    )


class Host:
    """A data directory with a ledger, and the command on it."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self._capsys = capsys
        deployment = {
            "name": "openai",
            "backend": "openai",
            "base_url": "http://0.0.0.0/v1",
            "model": "gpt-x-2026-01-02",
        }
        models = {"chat": {"deployments": [{**deployment, "price": PRICE}]}}
        (folder / "sameway.yaml").write_text(yaml.safe_dump({"models": models}))
        self.url = f"sqlite:///{folder / 'data' / 'sameway.db'}"

    def ledger(self, use: Callable[[Ledger, Audit], Any]) -> Any:
        async def run() -> Any:
            accounts = Accounts(self.url)
            await accounts.open()
            try:
                return await use(Ledger(accounts.database), Audit(accounts.database))
            finally:
                await accounts.close()

        return asyncio.run(run())

    def rows(self) -> tuple[LedgerRow, ...]:
        found: tuple[LedgerRow, ...] = self.ledger(lambda ledger, _: ledger.rows(LedgerFilter(), 500)).rows
        return found

    def reconcile(self, text: str, *options: str) -> tuple[int, Any, str]:
        """The exit status, the report, and what was written to stderr."""
        (self.folder / "usage.csv").write_text(text)
        where = ["--config", str(self.folder / "sameway.yaml"), "--data-dir", str(self.folder / "data")]
        status = main(["reconcile", str(self.folder / "usage.csv"), "--json", *options, *where])
        said = self._capsys.readouterr()
        return status, json.loads(said.out) if said.out.startswith("{") else said.out, said.err


@pytest.fixture
def host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Host:
    host = Host(tmp_path, capsys)
    host.ledger(lambda ledger, _: ledger.append([row(n, 1200) for n in range(4)]))
    return host


def test_equal_books_are_equal(host: Host) -> None:
    """Within a cent a day and model there is nothing to do, and the status says so."""
    status, report, _ = host.reconcile("date,model,cost\n2026-11-20,gpt-x,0.0051\n")
    assert (status, report["difference_microusd"]) == (0, 300)
    assert [one["reason"] for one in report["days"][0]["reasons"]] == ["rounding"]


def reasons(report: Any) -> dict[str, int]:
    found: dict[str, int] = {}
    for day in report["days"]:
        assert sum(one["microusd"] for one in day["reasons"]) == day["difference_microusd"]
        for one in day["reasons"]:
            found[one["reason"]] = found.get(one["reason"], 0) + one["microusd"]
    return found


PLAIN = "date,model,requests,prompt_tokens,cached_tokens,completion_tokens,cost\n"


@pytest.mark.parametrize(
    ("lines", "wanted"),
    [
        # 3,000 of the 4,000 tokens at 0.1: 2,700 less
        ("2026-11-20,gpt-x,4,4000,3000,400,0.0021", {"cached_tokens": -2700}),
        # six requests more: 6,000 + 1,200
        ("2026-11-20,gpt-x,10,10000,0,1000,0.012", {"not_through_sameway": 7200}),
        # the same tokens for twice the money
        ("2026-11-20,gpt-x,4,4000,0,400,0.0096", {"price": 4800}),
        ("2026-11-21,gpt-x,4,4000,0,400,1\n2026-11-20,gpt-x,4,4000,0,400,0.0048", {"not_through_sameway": 1_000_000}),
        ("2026-11-21,gpt-x,4,4000,0,400,0.0048", {"not_through_sameway": 4800}),
    ],
)
def test_each_difference_has_its_reason(host: Host, lines: str, wanted: dict[str, int]) -> None:
    """The reasons add up to the difference, and are named."""
    status, report, _ = host.reconcile(PLAIN + lines + "\n", "--tolerance-usd", "0.000001")
    assert (status, reasons(report)) == (1, wanted)


def test_estimates_and_zones_are_named(host: Host) -> None:
    """Generations without a count explain other tokens; days that cancel out are of another zone."""
    estimated = [row(n, 1200, usage_estimated=True, at_ms=NOON_MS + 2 * DAY_MS) for n in range(10, 12)]
    moved = [row(20, 50_000, at_ms=NOON_MS + 5 * DAY_MS), row(21, 50_000, at_ms=NOON_MS + 6 * DAY_MS)]
    host.ledger(lambda ledger, _: ledger.append(estimated + moved))
    lines = (
        "2026-11-22,gpt-x,2,2000,0,700,0.0034\n2026-11-25,gpt-x,1,1000,0,100,0.09\n2026-11-26,gpt-x,1,1000,0,100,0.01\n"
    )
    _, report, _ = host.reconcile(PLAIN + lines, "--tolerance-usd", "0.0001")
    found = [[one["reason"] for one in day["reasons"]] for day in report["days"]]
    assert found == [["estimated_usages"], ["time_zone"], ["time_zone"]]


def test_nothing_is_written_unless_asked(host: Host) -> None:
    """A correction adds rows of each team's share and one row of the audit log, once however often it is run."""
    text = "date,model,cost\n2026-11-20,gpt-x,1.0048\n"
    before = host.rows()
    assert host.reconcile(text)[0] == 1
    assert host.rows() == before
    status, report, _ = host.reconcile(text, "--correct")
    assert (status, report["difference_microusd"], len(report["corrections"])) == (0, 0, 2)
    assert [one["cost_microusd"] for one in report["corrections"]] == [500_000, 500_000]
    after = host.rows()
    assert {one.id for one in before} < {one.id for one in after}
    assert sum(one.cost_microusd for one in after) == 1_004_800
    assert host.reconcile(text, "--correct")[1]["corrections"] == []
    [total] = host.ledger(lambda ledger, _: ledger.totals([]))
    assert (total.cost_microusd, total.requests) == (1_004_800, 4)
    [audited] = host.ledger(lambda _, audit: audit.rows(10))
    assert (audited.action, audited.way, audited.entry) == ("ledger_corrected", "command", "2 rows, +1.000000 USD")


def test_a_lower_bill_corrects_downwards(host: Host) -> None:
    """What a provider did not bill is taken back, by a row below 0."""
    assert host.reconcile("date,model,cost\n2026-11-20,gpt-x,0.001\n", "--correct", "--tolerance-usd", "0")[0] == 0
    assert sum(one.cost_microusd for one in host.rows()) == 1_000


def test_what_the_file_lacks_is_named(host: Host) -> None:
    """Deployments that the file does not know are listed with their cost, and tokens without costs are priced by us."""
    host.ledger(lambda ledger, _: ledger.append([row(30, 7, deployment="gone", alias="old")]))
    status, report, _ = host.reconcile("date,model,prompt_tokens,completion_tokens\n2026-11-20,gpt-x,4000,400\n")
    assert (status, report["is_priced_by_us"], report["difference_microusd"]) == (0, True, 0)
    assert report["not_in_export"] == [{"model": "gone", "ledger_microusd": 7}]
    refused = host.reconcile("date,model,prompt_tokens\n2026-11-20,gpt-x,1\n", "--correct")
    assert (refused[0], "no costs" in refused[2]) == (2, True)


def test_what_cannot_be_read_is_status_2(host: Host, tmp_path: Path) -> None:
    """A file that is no export, and a data directory without a ledger, which is not made."""
    status, _, error = host.reconcile("what,ever\n1,2\n")
    assert (status, "no column is the date" in error) == (2, True)
    host.folder = tmp_path / "empty"
    host.folder.mkdir()
    (host.folder / "sameway.yaml").write_text((tmp_path / "sameway.yaml").read_text())
    status, _, error = host.reconcile("date,model,cost\n2026-11-20,gpt-x,1\n")
    assert (status, "no database" in error) == (2, True)
    assert not (host.folder / "data" / "sameway.db").exists()


def test_a_table_for_people(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    """Without --json: a line a day and model with its reasons, and the total."""
    host.reconcile("date,model,cost\n2026-11-20,gpt-x-2026-01-02,1\n")
    where = ["--config", str(host.folder / "sameway.yaml"), "--data-dir", str(host.folder / "data")]
    assert main(["reconcile", str(host.folder / "usage.csv"), *where]) == 1
    said = capsys.readouterr().out
    for words in ("gpt-x ", "$1.000000", "$0.004800", "unexplained", "total", "1 of 1", "gpt-x-2026-01-02"):
        assert words in said
