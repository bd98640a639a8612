"""A backup of one database restored into another: all that an installation is, of one moment, whole or not at all."""

from __future__ import annotations

import asyncio
import json
import stat
import zipfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from gateway.accounts import HitsRow, Invalid, SchemaUnknown, schema
from gateway.accounts.accounts import Accounts
from gateway.accounts.backup import back_up, restore
from gateway.accounts.database import Database
from gateway.accounts.ledger import Ledger
from gateway.cli import main
from tests.accounts.test_ledger import make_rows


@pytest.fixture
async def other(database_url: str, request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Accounts]:
    """Closed accounts on a database of the other kind, which nobody has opened."""
    is_sqlite = database_url.startswith("sqlite")
    url = request.getfixturevalue("postgres_url") if is_sqlite else f"sqlite:///{tmp_path / 'other' / 'sameway.db'}"
    accounts = Accounts(url)
    yield accounts
    await accounts.close()


async def _everything(database: Database) -> dict[str, list[Any]]:
    tables = [table for table in schema.metadata.sorted_tables if table is not schema.sessions]
    return {
        table.name: [tuple(row) for row in await database.rows(sa.select(table).order_by(*table.primary_key))]
        for table in tables
    }


def _edited(path: Path, name: str, edit: Callable[[str], str | None]) -> None:
    """Change the text of an archive's member; None removes it."""
    with zipfile.ZipFile(path) as archive:
        texts = {one: archive.read(one).decode() for one in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for one, text in texts.items():
            changed = edit(text) if one == name else text
            if changed is not None:
                archive.writestr(one, changed)


async def test_the_other_kind_of_database_gets_every_row(accounts: Accounts, other: Accounts, tmp_path: Path) -> None:
    """SQLite's rows in PostgreSQL and the other way round are the same, a key opens, no id is given twice, and the files
    are the first one's still.
    """
    team = await accounts.create_team("acme", budget={"window": "month", "limit": 5_000_000})
    key = await accounts.create_key(team.id, "ci", models=["small", "large"])
    gone = await accounts.create_team("gone")
    await accounts.delete_team(gone.id)
    await Ledger(accounts.database).append(make_rows(1_200))
    before = await _everything(accounts.database)
    await accounts.database.write(sa.update(schema.installation).values(files_id="of the first"))
    manifest = await back_up(accounts.database, tmp_path / "none", None, tmp_path / "all.zip")
    assert manifest.rows["ledger"] == 1_200
    assert await restore(other.database, tmp_path / "new", tmp_path / "all.zip") == manifest
    await other.open()
    assert await _everything(other.database) == before
    found = other.identify(key.plaintext)
    assert found is not None
    assert found.team.name == "acme"
    assert (await other.create_team("next")).id > gone.id
    assert await Ledger(other.database).append(make_rows(1_200)) == 0


async def test_a_place_with_rows_is_left_alone(accounts: Accounts, tmp_path: Path) -> None:
    """A restore over a database with a team, or a data directory with a secret, changes neither."""
    await accounts.create_team("acme")
    await back_up(accounts.database, tmp_path / "none", None, tmp_path / "all.zip")
    before = await _everything(accounts.database)
    with pytest.raises(Invalid, match="table teams has rows already: expected an empty database"):
        await restore(accounts.database, tmp_path / "new", tmp_path / "all.zip")
    assert await _everything(accounts.database) == before
    with pytest.raises(Invalid, match=r"all\.zip exists already"):
        await back_up(accounts.database, tmp_path / "none", None, tmp_path / "all.zip")


async def test_a_backup_of_another_version(accounts: Accounts, other: Accounts, tmp_path: Path) -> None:
    """A later version's is refused; one that lacks a table and a column gets no rows and the column's default."""
    team_id = (await accounts.create_team("acme")).id
    figures = {"requests": 3, "unknown": 0, "baseline_microusd": 9}
    hits = HitsRow(id="h", at_ms=1_790_000_000_000, team_id=team_id, key_id=1, alias="m", source="exact", **figures)
    await Ledger(accounts.database).append_hits([hits])
    path = tmp_path / "all.zip"
    await back_up(accounts.database, tmp_path / "none", None, path)
    _edited(path, "manifest.json", lambda text: text.replace(schema.VERSION, "99991231"))
    with pytest.raises(SchemaUnknown, match="a later version of Sameway"):
        await restore(other.database, tmp_path / "new", path)

    def without_columns(text: str) -> str:
        row = json.loads(text)
        for name in ("is_store_enabled", "key_id", "user", "tags", "session"):
            row.pop(name, None)
        return json.dumps(row) + "\n"

    _edited(path, "manifest.json", lambda text: text.replace("99991231", "20260101"))
    for name in ("teams", "ledger_hits"):
        _edited(path, f"tables/{name}.jsonl", without_columns)
    _edited(path, "tables/ledger_rollups.jsonl", lambda text: None)
    await restore(other.database, tmp_path / "new", path)
    (team,) = await other.list_teams()
    assert team.is_store_enabled
    assert (await _everything(other.database))["ledger_hits"] == [
        ("h", 1_790_000_000_000, team.id, 0, "m", "exact", "", "", "", 3, 0, 9)
    ]


def test_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Secrets, files and configuration come back beside the rows, for their owner alone; what is no backup is refused."""
    first, second, path = tmp_path / "first", tmp_path / "second", tmp_path / "all.zip"
    (first / "files" / "1").mkdir(parents=True)
    (first / "files" / "1" / "file-1").write_bytes(b"\0lines")
    (first / "files" / schema.MARKER).write_text("of the first")
    (first / "secret").write_text("ab" * 32)
    config = tmp_path / "sameway.yaml"
    config.write_text("workers: 2\n")
    assert main(["backup", str(path), "--data-dir", str(first)]) == 1
    assert "there is no database" in capsys.readouterr().err
    assert not path.exists()

    async def make() -> None:
        accounts = Accounts(f"sqlite:///{first / 'sameway.db'}")
        await accounts.open()
        await accounts.create_team("acme")
        await accounts.close()

    asyncio.run(make())
    assert main(["backup", str(path), "--data-dir", str(first), "--config", str(config)]) == 0
    assert f"Backed up 1 team, 0 keys, 0 budgets, 0 ledger rows: {path}" in capsys.readouterr().out
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert main(["restore", str(path), "--data-dir", str(second)]) == 0
    assert (second / "secret").read_text() == "ab" * 32
    assert (second / "files" / "1" / "file-1").read_bytes() == b"\0lines"
    assert not (second / "files" / schema.MARKER).exists()
    assert (second / "sameway.yaml").read_text() == "workers: 2\n"
    assert {stat.S_IMODE((second / name).stat().st_mode) for name in ("secret", "sameway.db")} == {0o600}
    assert main(["restore", str(path), "--data-dir", str(second)]) == 1
    assert "expected an empty data directory" in capsys.readouterr().err
    assert main(["restore", str(config), "--data-dir", str(tmp_path / "third")]) == 1
    assert "is not what `sameway backup` wrote" in capsys.readouterr().err
    monkeypatch.setenv("SAMEWAY_DATABASE_URL", f"sqlite:///{first / 'sameway.db'}")
    assert main(["backup", str(tmp_path / "rows.zip"), "--data-dir", str(tmp_path / "elsewhere")]) == 0
    assert "elsewhere has none of secret, admin.key, files: name the gateway's" in capsys.readouterr().err


def test_no_member_leads_out_of_the_data_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An archive with a path of `..` is refused before anything is written."""
    path = tmp_path / "evil.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("manifest.json", json.dumps({"version": schema.VERSION, "at_s": 0, "rows": {}, "ids": {}}))
        archive.writestr("data/../../out", "x")
    assert main(["restore", str(path), "--data-dir", str(tmp_path / "new")]) == 1
    assert "leads out of the data directory" in capsys.readouterr().err
    assert [one.name for one in tmp_path.iterdir()] == ["evil.zip"]
