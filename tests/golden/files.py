"""Golden files: sorted lines, one file a subject, so that a difference reads as a list of names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

FOLDER = Path(__file__).parent


def write(name: str, lines: Iterable[str]) -> None:
    (FOLDER / f"{name}.txt").write_text("".join(f"{line}\n" for line in sorted(set(lines))))


def changes(name: str, lines: Iterable[str]) -> str:
    """The lines that are gone (-) and the lines that are new (+), or nothing."""
    path = FOLDER / f"{name}.txt"
    known = path.read_text().splitlines() if path.exists() else []
    changed = [line for line in difflib.ndiff(known, sorted(set(lines))) if line[:1] in "+-"]
    if not changed:
        return ""
    return (
        f"what users and operators see has changed ({name}):\n"
        + "\n".join(changed)
        + "\nif this is meant: python -m tests.golden, and say so in CHANGELOG.md"
    )
