"""docs/decisions.md and the code cite each other."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PACKAGES = ("gateway", "cache", "policies", "local_engine", "ipc")
SOURCES = (".py", ".cpp", ".h", ".html")
LABELS = ("Decision", "Why", "Price", "Where")
RECORDS_MAX = 49


class Record(NamedTuple):
    """One record: its lines by their labels, and the paths in backticks of its last line."""

    name: str
    labels: tuple[str, ...]
    files: tuple[str, ...]
    tests: tuple[tuple[str, str], ...]


@cache
def records() -> dict[str, Record]:
    """Every record of docs/decisions.md, by its name."""
    parts = re.split(r"^### (.+)$", (ROOT / "docs/decisions.md").read_text(), flags=re.MULTILINE)[1:]
    found = {}
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        labels = tuple(re.findall(r"^- \*\*(\w+):\*\* ", text, re.MULTILINE))
        paths = re.findall(r"`([^`]+)`", text.rpartition("**Where:**")[2].partition("\n## ")[0])
        tests = tuple(tuple(path.split("::")) for path in paths if "::" in path)
        found[name] = Record(name, labels, tuple(path for path in paths if "::" not in path), tests)
    assert len(found) == len(parts) // 2, "two records of one name"
    return found


@cache
def citations() -> dict[str, set[str]]:
    """The files that cite a record, by its name."""
    found: dict[str, set[str]] = {}
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.suffix in SOURCES):
        for name in re.findall(r"(?:#|//) decision: ([a-z0-9-]+)", path.read_text()):
            found.setdefault(name, set()).add(str(path.relative_to(ROOT)))
    return found


def test_records_have_four_lines() -> None:
    """Each record says what was decided, why, at which price, and where; there are few enough to be read."""
    assert [r.name for r in records().values() if r.labels != LABELS] == []
    assert [name for name in records() if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", name)] == []
    assert len(records()) <= RECORDS_MAX


def test_every_record_is_cited_where_it_says() -> None:
    """The first file that a record names cites it, and no other file that it does not name."""
    missing = {r.name: r.files for r in records().values() if not set(r.files) <= citations().get(r.name, set())}
    assert missing == {}
    assert [r.name for r in records().values() if not r.files] == []
    elsewhere = {
        name: sorted(files - set(records()[name].files)) for name, files in citations().items() if name in records()
    }
    assert {name: files for name, files in elsewhere.items() if files} == {}


def test_every_citation_has_a_record() -> None:
    """No comment cites a record that is gone."""
    assert {name: sorted(files) for name, files in citations().items() if name not in records()} == {}


def test_files_and_tests_of_records_exist() -> None:
    """A test that a record names holds what the record says; it must not be lost by a rename."""
    assert [path for r in records().values() for path in r.files if not (ROOT / path).is_file()] == []
    missing = []
    for record in records().values():
        for path, name in record.tests:
            source = (ROOT / path).read_text() if (ROOT / path).is_file() else ""
            names = {
                n.name for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
            }
            if name not in names:
                missing.append(f"{record.name}: {path}::{name}")
    assert missing == []
