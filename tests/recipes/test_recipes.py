"""CONTRIBUTING's recipes, cooked: the files that each names are enough, and all of them exist."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WATCHERS = ("tidy", "docs", "golden", "settings", "maps", "decisions")
# an example is smaller than what it stands for, and a ceiling is for who adds something to stay
SPARED = ("test_rooms_stay_small", "test_a_small_file_with_one_importer_has_a_reason")
GENERATED = ("docs/", "tests/golden/", "README.md")


@dataclass
class Case:
    """An example of a recipe: its edits as (file, what is there, what is there after), and notes, each a list of files."""

    edits: list[tuple[str, str, str]]
    notes: dict[str, set[str]] = field(default_factory=dict)

    @property
    def files(self) -> set[str]:
        return {path for path, _, _ in self.edits}


def parts(text: str) -> dict[str, str]:
    """The text below each title of the third level."""
    titles = re.split(r"^### (.+)\n", text, flags=re.M)[1:]
    return dict(zip(titles[::2], titles[1::2], strict=True))


def case_of(text: str) -> Case:
    """The case that lines of `cases.txt` describe."""
    head, *edits = re.split(r"^@ ", text.rstrip("\n"), flags=re.M)
    case = Case([], {name: set(files.split()) for name, files in re.findall(r"^(\w+): (.+)$", head, re.M)})
    for edit in edits:
        path, *lines = edit.rstrip("\n").split("\n")
        before, after = ("\n".join([line[1:] for line in lines if line[:1] != sign]) for sign in "+-")
        case.edits.append((path, before, after))
    return case


CASES = {title: case_of(text) for title, text in parts((Path(__file__).parent / "cases.txt").read_text()).items()}


@cache
def recipes() -> dict[str, str]:
    """The text of each recipe by its title."""
    return parts((ROOT / "CONTRIBUTING.md").read_text().partition("\n## Recipes\n")[2])


def steps(title: str) -> str:
    """The numbered steps alone."""
    return "\n".join(re.findall(r"^\d\. .+?(?=^\d\.|^$|\Z)", recipes()[title], re.M | re.S))


def named(title: str) -> set[str]:
    """The files and folders that a recipe's steps name by their whole paths, folders with a slash at their end."""
    return set(re.findall(r"`((?:\w+/)+(?:[\w-]+\.\w+)?|README\.md)`", steps(title)))


def edited(case: Case) -> dict[str, str]:
    """The text of each file of a case after its edits."""
    texts: dict[str, str] = {}
    for path, before, after in case.edits:
        text = texts.get(path) or ((ROOT / path).read_text() if before else "")
        assert before in text, f"{path} has no {before!r} any more: mend tests/recipes/cases.txt"
        texts[path] = text.replace(before, after, 1) if before else f"{after}\n"
    return texts


def test_each_recipe_has_its_case_and_its_files() -> None:
    """Each is run by `./run test long`, and changes or spares each file that it names; all are there, with what it changes."""
    assert CASES.keys() == recipes().keys()
    for title, case in CASES.items():
        assert edited(case).keys() == case.files
        folders = [one for one in named(title) if one.endswith("/")]
        assert [one for one in named(title) if not (ROOT / one).exists()] == [], title
        written = {
            path if (ROOT / path).exists() else next((one for one in folders if path.startswith(one)), path)
            for path in case.files
        }
        beyond, spared = (case.notes.get(name, set()) for name in ("beyond", "spared"))
        assert written - beyond == named(title) - spared, title


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what git knows, with a history of its own."""
    folder = tmp_path_factory.mktemp("recipes") / "tree"
    files = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    for name in files.stdout.splitlines():
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "before")
    return folder


def git(folder: Path, *argv: str) -> str:
    """Run git as somebody without a configuration."""
    person = ("-c", "user.name=t", "-c", "user.email=t@example.com")
    return subprocess.run(["git", *person, *argv], cwd=folder, check=True, capture_output=True, text=True).stdout


def changed(folder: Path) -> set[str]:
    return {line[3:] for line in git(folder, "status", "--porcelain", "-uall").splitlines()}


def call(folder: Path, *argv: str) -> None:
    """Run a module of the copy; what it printed is the failure's text."""
    done = subprocess.run(
        [sys.executable, "-m", *argv],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{argv}\n{done.stdout[-6_000:]}{done.stderr[-3_000:]}"


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("title", CASES)
def test_the_files_of_a_recipe_are_enough(tree: Path, title: str) -> None:
    """With a change in these files and no other, style, types and tests pass."""
    case = CASES[title]
    git(tree, "reset", "-q", "--hard")
    git(tree, "clean", "-qfd")
    for path, text in edited(case).items():
        (tree / path).write_text(text)
    assert changed(tree) == case.files
    call(tree, "ruff", "check", "-q", *(path for path in case.files if path.endswith(".py")))
    if "./run docs" in steps(title):
        call(tree, "tests.documents")
    if "tests.golden" in steps(title):
        call(tree, "tests.golden")
    assert [one for one in changed(tree) - case.files if not one.startswith(GENERATED)] == []
    call(tree, "mypy")
    spared = [f"--deselect=tests/test_tidy.py::{one}" for one in SPARED]
    watchers = [f"tests/test_{one}.py" for one in WATCHERS]
    call(tree, "pytest", "-q", "-p", "no:cacheprovider", *spared, *watchers, *sorted(case.notes["tests"]))
