"""Which tests start a Redis or a PostgreSQL, read from the tests' own code.

A function touches a server when it names the server's program, or names a function that does. Names
are followed through the modules of `tests` and `bench`, and a test's fixtures count as it does.
Runs nothing. Invariant: a test that starts a server by `tests/services.py` is found.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable
from pathlib import Path

_ROOT = Path(__file__).parents[1]
# `serve` starts a gateway, which starts a Redis where it is given none
_PROGRAMS = {"redis-server": "redis", "serve": "redis", "postgres": "postgres"}
SERVICES = frozenset(_PROGRAMS.values())


def services_of(path: Path, name: str, fixtures: Iterable[str]) -> frozenset[str]:
    """The services that a test touches: the one called `name` in `path`, with `fixtures` in its closure."""
    folders = [folder for folder in path.parents if folder.is_relative_to(_ROOT / "tests")]
    places = [path, *(folder / "conftest.py" for folder in folders if (folder / "conftest.py").exists())]
    found = set(_touched(path, name, frozenset()))
    for fixture in fixtures:
        place = next((place for place in places if fixture in _module(place)[0]), None)
        found |= _touched(place, fixture, frozenset()) if place else frozenset()
    return frozenset(found)


@functools.cache
def _touched(path: Path, name: str, asking: frozenset[tuple[Path, str]]) -> frozenset[str]:
    """What the definition `name` in the module at `path` touches; all of the module's where `name` is empty."""
    definitions, imports = _module(path)
    if (path, name) in asking:
        return frozenset()
    asking |= {(path, name)}
    if not name:
        return frozenset().union(*(_touched(path, one, asking) for one in definitions))
    if name in imports:
        return _touched(*imports[name], asking)
    found = set[str]()
    for node in (node for one in definitions.get(name, ()) for node in ast.walk(one)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in _PROGRAMS:
            found.add(_PROGRAMS[node.value])
        elif isinstance(node, ast.Name) and (node.id in definitions or node.id in imports):
            found |= _touched(path, node.id, asking)
    return frozenset(found)


@functools.cache
def _module(path: Path) -> tuple[dict[str, list[ast.stmt]], dict[str, tuple[Path, str]]]:
    """A module's top-level definitions by name, and where the names come from that it imports from tests and benches."""
    definitions: dict[str, list[ast.stmt]] = {}
    imports: dict[str, tuple[Path, str]] = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("tests", "bench"):
            assert node.module is not None
            for alias in node.names:
                whole, source = _file(f"{node.module}.{alias.name}"), _file(node.module)
                if whole or source:
                    imports[alias.asname or alias.name] = (whole, "") if whole else (source, alias.name)  # type: ignore[assignment]
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                for name in (one.id for one in ast.walk(target) if isinstance(one, ast.Name)):
                    definitions.setdefault(name, []).append(node)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            definitions.setdefault(node.name, []).append(node)
    return definitions, imports


def _file(module: str) -> Path | None:
    place = _ROOT.joinpath(*module.split("."))
    return next((one for one in (place.with_suffix(".py"), place / "__init__.py") if one.exists()), None)
