"""ARCHITECTURE.md and CONTRIBUTING.md name what is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.test_tidy import ROOMS

ROOT = Path(__file__).parent.parent
MAP = (ROOT / "ARCHITECTURE.md").read_text()
LINES_MAX, COLUMNS_MAX = 120, 100
PACKAGES = ("gateway", "cache", "policies", "local_engine", "ipc")
FOLDERS = "|".join((*PACKAGES, "tests", "docs", "bench", "deploy"))


def expanded(path: str) -> list[str]:
    """`a/{b,c}.py` as `a/b.py` and `a/c.py`."""
    found = re.fullmatch(r"(.*)\{(.+)\}(.*)", path)
    return [found[1] + name + found[3] for name in found[2].split(",")] if found else [path]


@pytest.mark.parametrize("name", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_named_paths_exist(name: str) -> None:
    """Each file and folder that is named with its package is there, and no line is wide."""
    text = (ROOT / name).read_text()
    named = re.findall(rf"(?<![\w/.])((?:{FOLDERS})/[\w./{{}},-]*[\w}}/])", text)
    assert len(named) > 5
    assert [path for found in named for path in expanded(found) if not (ROOT / path).exists()] == []
    assert [line for line in text.splitlines() if len(line) > COLUMNS_MAX] == []


def test_paths_in_sources_exist() -> None:
    """A docstring or comment that names a file of the repository names one that is there."""
    wrong = {}
    for path in (p for name in (*PACKAGES, "tests", "bench") for p in (ROOT / name).rglob("*.py")):
        named = re.findall(rf"`((?:{FOLDERS})/[\w/]+\.(?:py|md|html))(?=[`:])", path.read_text())
        if gone := [name for name in named if not (ROOT / name).exists()]:
            wrong[str(path.relative_to(ROOT))] = gone
    assert wrong == {}


def test_the_tree_is_the_packages() -> None:
    """ARCHITECTURE.md's tree has every room of the four packages in their order, and nothing that is not there."""
    tree = MAP.partition("\n## Rooms\n")[2].partition("\n## ")[0]
    named: list[str] = []
    package = ""
    for line in re.findall(r"^    (.+)$", tree, re.MULTILINE):
        if not line.startswith(" "):
            package = line.split("/")[0]
        else:
            named += (f"{package}/{word}" for word in re.findall(r"(?<!\S)(\w+(?:\.py|/))(?=[ ,;]|$)", line))
    assert [path for path in named if not (ROOT / path).exists()] == []
    for package in PACKAGES:
        floors = [ROOMS[package].index(Path(path).stem) for path in named if path.startswith(f"{package}/")]
        assert floors == sorted(floors), package
    rooms = {str(p.parent.relative_to(ROOT)) + "/" for name in PACKAGES for p in (ROOT / name).glob("*/__init__.py")}
    assert rooms - set(named) == set()


def test_each_room_says_what_to_read_first() -> None:
    """A room's docstring is short, and names a file of the room."""
    for path in (p for name in PACKAGES for p in (ROOT / name).rglob("__init__.py") if p.parent.name != "versions"):
        said = ast.get_docstring(ast.parse(path.read_text())) or ""
        first = re.search(r"[Rr]ead\s+`([\w./]+)`", said)
        assert first is not None, path
        assert any((path.parent / f"{first[1]}{ending}").is_file() for ending in ("", ".py")), (path, first[1])


def test_the_map_is_short() -> None:
    """It is read in one sitting; what is to be read first has about as many lines as it says."""
    assert len(MAP.splitlines()) <= LINES_MAX
    heading, _, listed = MAP.rpartition("\n## ")[2].partition("\n")
    promised = int(re.sub(r"\D", "", heading))
    total = 0
    for count, paths in re.findall(r"^ +([\d,]+)  (.+)$", listed, re.MULTILINE):
        lines = sum(len((ROOT / p).read_text().splitlines()) for path in paths.split() for p in expanded(path))
        assert abs(lines - int(count.replace(",", ""))) <= 0.2 * lines, (lines, paths)
        total += lines
    assert 0.8 * promised <= total <= 1.2 * promised
