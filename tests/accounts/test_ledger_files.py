"""The ledger's files: an hour's rows once, whatever happens between the file and its mark, read by others' libraries."""

from __future__ import annotations

import asyncio
import os
import signal
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, cast

import duckdb
import msgspec
import pyarrow.dataset
import pytest
import sqlalchemy as sa
from redis.asyncio import Redis

from gateway.accounts import LedgerRow, schema
from gateway.accounts.accounts import Accounts
from gateway.accounts.database import Database
from gateway.accounts.ledger import COLUMNS, Ledger, LedgerFilter, flat_row
from gateway.accounts.ledger_files import LedgerFiles
from gateway.accounts.months import forget
from gateway.transport.contents import contents_at
from tests.accounts.conftest import fork
from tests.accounts.test_ledger import hits_of, make_rows
from tests.services import run_s3

START_MS = int(datetime(2026, 11, 21, 12, tzinfo=UTC).timestamp() * 1000)
HOUR_MS = 3_600_000
NOW_S = (START_MS + 3 * HOUR_MS + 400_000) / 1000
FOCUS = Path(__file__).parents[2] / "docs/focus.sql"


@pytest.fixture
def ledger(accounts: Accounts) -> Ledger:
    return Ledger(accounts.database)


def files_of(ledger: Ledger, url: str, redis: Any = None) -> LedgerFiles:
    return LedgerFiles(ledger, contents_at(url), redis, lambda: NOW_S)


def rows_of_hours() -> list[LedgerRow]:
    """A row each ten minutes of three hours and a bit."""
    return [
        msgspec.structs.replace(row, at_ms=START_MS + number * 600_000, user=f"u{number % 3}", tags='{"a":"b"}')
        for number, row in enumerate(make_rows(20))
    ]


async def write_all(files: LedgerFiles) -> int:
    hours = 0
    while await files.step():
        hours += 1
    return hours


def table_of(folder: Path, kind: str = "ledger") -> Any:
    return pyarrow.dataset.dataset(folder / kind / "v1", format="parquet", partitioning="hive").to_table()


async def test_each_hour_is_a_file(ledger: Ledger, tmp_path: Path) -> None:
    """Of hours that are over each row is in its hour's file, with every column; hits have their own; a late row makes its
    hour's file anew, and no other."""
    rows = rows_of_hours()
    await ledger.append(rows)
    await ledger.append_hits([hits_of(START_MS + 7)])
    files = files_of(ledger, tmp_path.as_uri())
    assert await write_all(files) == 3
    names = sorted(str(path.relative_to(tmp_path)) for path in (tmp_path / "ledger").rglob("*") if path.is_file())
    assert names == [f"ledger/v1/day=2026-11-21/{hour}.parquet" for hour in (12, 13, 14)]
    found = table_of(tmp_path)
    assert found.schema.metadata[b"sameway.ledger"] == b"1"
    wanted = {row.id: flat_row(row) for row in rows[:18]}
    assert {row["id"]: {name: row[name] for name in COLUMNS} for row in found.to_pylist()} == wanted
    assert found.column("at").to_pylist()[0].tzinfo is not None
    assert [row["requests"] for row in table_of(tmp_path, "hits").to_pylist()] == [2]
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.parquet")}
    await ledger.append([msgspec.structs.replace(rows[7], id="late")])
    assert await write_all(files) == 1
    changed = {path.name for path in tmp_path.rglob("*.parquet") if path.stat().st_mtime_ns != before[path]}
    assert changed == {"13.parquet"}
    assert sorted(table_of(tmp_path).column("id").to_pylist()) == sorted([*wanted, "late"])


def _killed_between(url: str, folder: str) -> None:
    """A process that writes the first hour's file, and dies before its mark."""

    async def run() -> None:
        database = Database(url)

        async def dead(*_: object) -> int:
            os.kill(os.getpid(), signal.SIGKILL)
            return 0

        database.write = dead  # type: ignore[method-assign,assignment]
        await files_of(Ledger(database), folder).step()

    asyncio.run(run())


async def test_a_kill_between_the_file_and_its_mark_doubles_nothing(
    ledger: Ledger, database_url: str, tmp_path: Path
) -> None:
    """The next writer makes the same file again: each row is there once, and the sums are the ledger's."""
    rows = rows_of_hours()
    await ledger.append(rows)
    process = fork(_killed_between, database_url, tmp_path.as_uri())
    await asyncio.to_thread(process.join, 60)
    assert process.exitcode == -signal.SIGKILL
    assert table_of(tmp_path).num_rows == 6
    await ledger.append([msgspec.structs.replace(rows[0], id="meanwhile")])
    assert await write_all(files_of(ledger, tmp_path.as_uri())) == 3
    found = table_of(tmp_path).to_pylist()
    assert sorted(row["id"] for row in found) == sorted(["meanwhile", *(row.id for row in rows[:18])])
    booked = (await ledger.rows(LedgerFilter(until_ms=START_MS + 3 * HOUR_MS), limit=100)).rows
    assert sum(row["cost_microusd"] for row in found) == sum(row.cost_microusd for row in booked)


async def test_a_reader_sees_the_columns_of_focus(ledger: Ledger, tmp_path: Path) -> None:
    """The view of docs/focus.sql, by DuckDB, over files that a bucket had: its costs are the ledger's, and none is null."""
    await ledger.append(rows_of_hours())
    with run_s3() as store, pytest.MonkeyPatch.context() as patch:
        for name, value in store.env.items():
            patch.setenv(name, value)
        await write_all(files_of(ledger, store.url))
        kept = contents_at(store.url)
        for key in kept.keys("ledger/"):
            (tmp_path / key).parent.mkdir(parents=True, exist_ok=True)
            with kept.open(key) as file:
                (tmp_path / key).write_bytes(file.read())
    with duckdb.connect() as connection:
        connection.execute(FOCUS.read_text().replace("FOLDER", str(tmp_path)))
        found = connection.sql("SELECT * FROM focus").arrow().read_all().to_pylist()
    booked = (await ledger.rows(LedgerFilter(until_ms=START_MS + 3 * HOUR_MS), limit=100)).rows
    assert len(found) == len(booked) == 18
    assert round(sum(row["BilledCost"] for row in found) * 1_000_000) == sum(row.cost_microusd for row in booked)
    nullable = {
        "RegionId",
        "RegionName",
        "ChargeClass",
        "BillingAccountName",
        "PricingQuantity",
        "PricingUnit",
        "SubAccountName",
    }
    assert {name for row in found for name, value in row.items() if value is None} <= nullable
    assert {row["ChargePeriodStart"].hour for row in found} == {12, 13, 14}


async def test_a_month_stays_until_its_files_are_written(ledger: Ledger, tmp_path: Path) -> None:
    """A month whose hours changed after their files is not removed, however old it is; a row that comes after its removal
    leaves its complete files alone."""
    rows, much_later_ms = rows_of_hours(), START_MS + 100 * 86_400_000
    await ledger.append(rows)
    files = LedgerFiles(ledger, contents_at(tmp_path.as_uri()), cast(Any, None), lambda: much_later_ms / 1000)
    look = partial(forget, ledger.database, much_later_ms, 32, must_be_in_files=True)
    assert await files.step()
    assert await look() == []
    assert await write_all(files) == 3
    assert await look() == ["2026_11"]
    await ledger.append([msgspec.structs.replace(rows[0], id="late")])
    assert await write_all(files) == 0
    assert table_of(tmp_path).num_rows == 20
    assert await look() == ["2026_11"]


async def test_one_worker_writes_at_a_time(ledger: Ledger, redis: Redis, tmp_path: Path) -> None:
    """Of two workers that run, the files are written once by one of them, and each hour is marked."""
    await ledger.append(rows_of_hours())
    tasks = [asyncio.create_task(files_of(ledger, tmp_path.as_uri(), redis).run()) for _ in range(2)]
    async with asyncio.timeout(30):
        marks = schema.ledger_exports
        is_unmarked = sa.select(marks.c.hour).where(marks.c.exported < marks.c.changes)
        while len(await ledger.database.rows(is_unmarked)) > 1:  # noqa: ASYNC110 - but the hour that is not over
            await asyncio.sleep(0.02)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert table_of(tmp_path).num_rows == 18
    assert not [path for path in tmp_path.rglob(".*") if path.is_file()]
