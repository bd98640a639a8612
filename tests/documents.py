"""The parts of the documents that list what the code has: settings, admin routes, metrics, reserved fields.

`./run docs` writes them between their marks, `<!-- generated: NAME -->` and `<!-- end -->`; tests/test_docs.py compares.
Knows no prose: sentences come from the code.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import types
from collections.abc import Callable, Iterable, Mapping
from enum import EnumType
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le
from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from gateway.admin.roles import TABLE
from gateway.admin.routes import api_routes
from gateway.reserved import FIELDS, TOOLS
from gateway.settings import SECTIONS, Role
from gateway.telemetry.metric_names import DEFINITIONS
from tests import surfaces
from tests.dialects import player

ROOT = Path(__file__).parent.parent
DOCUMENTS = (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")))

_BLOCK = re.compile(r"(<!-- generated: (?P<name>.+?) -->\n)(?P<lines>.*?)(<!-- end -->)", re.DOTALL)
_NAMES: dict[Any, str] = {bool: "bool", int: "int", float: "number", str: "text", Path: "path"}
_SECTIONS: dict[Any, str] = {section: section.__name__ for section in SECTIONS}


@functools.cache
def generated() -> dict[str, str]:
    """The lines of each generated part by its name."""
    parts: dict[str, Callable[[], Iterable[str]]] = {
        "admin routes": _admin_routes,
        "roles": _roles,
        "metrics": _metrics,
        "features": surfaces.table,
        "providers": player.table,
        "reserved fields": lambda: _reserved("field", FIELDS),
        "reserved tools": lambda: _reserved("tool", TOOLS),
        **{f"settings {section.__name__}": lambda section=section: _settings(section) for section in SECTIONS},
    }
    return {name: "".join(f"{line}\n" for line in lines()) for name, lines in parts.items()}


def with_generated(text: str, parts: dict[str, str]) -> str:
    """`text` with the current lines between its marks. Raises KeyError for a mark that names no part."""
    return _BLOCK.sub(lambda found: found[1] + parts[found["name"]] + found[4], text)


def without_generated(text: str) -> str:
    """`text` without the lines between its marks."""
    return _BLOCK.sub(lambda found: found[1] + found[4], text)


def _settings(section: type[BaseModel]) -> Iterable[str]:
    meanings = meanings_of(section)
    yield "| setting | type | default | meaning |"
    yield "| --- | --- | --- | --- |"
    for name, field in section.model_fields.items():
        yield f"| `{name}` | {_type(field)} | {_default(field)} | {meanings.get(name, '')} |"


@functools.cache
def meanings_of(section: type[BaseModel]) -> dict[str, str]:
    """The sentence of each setting of a section: the text below it."""
    (body,) = (node.body for node in ast.parse(inspect.getsource(section)).body if isinstance(node, ast.ClassDef))
    return {
        ast.unparse(field.target): " ".join(inspect.cleandoc(ast.literal_eval(text.value)).split())
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


def _type(field: FieldInfo) -> str:
    bounds = [f"> {bound.gt}" for bound in field.metadata if isinstance(bound, Gt)]
    bounds += [f"≥ {bound.ge}" for bound in field.metadata if isinstance(bound, Ge)]
    bounds += [f"≤ {bound.le}" for bound in field.metadata if isinstance(bound, Le)]
    return " ".join([_annotation(field.annotation), ", ".join(bounds)]).rstrip()


def _annotation(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), [a for a in get_args(annotation) if a is not types.NoneType]
    if origin in (Union, types.UnionType):
        return " or ".join(map(_annotation, arguments))
    if isinstance(annotation, EnumType):
        return ", ".join(f"`{one.value}`" for one in annotation)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin is Annotated:
        return _annotation(arguments[0])
    if origin is list:
        return f"list of {_annotation(arguments[0])}s"
    if origin is dict:
        return f"{_annotation(arguments[1])}s by name"
    return _NAMES.get(annotation, "section")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel) or (isinstance(value, dict) and value):
        return "see below"
    if value is None:
        return "–"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _admin_routes() -> Iterable[str]:
    yield "| route | purpose |"
    yield "| --- | --- |"
    for path, methods in admin_paths().items():
        for method, operation in methods.items():
            yield f"| `{method.upper()} {path}` | {_sentences(operation['description'])} |"


def _roles() -> Iterable[str]:
    yield f"| may | {' | '.join(f'`{role}`' for role in Role)} |"
    yield f"| --- |{' --- |' * len(Role)}"
    for row in TABLE:
        words = ["yes" if role in row.everywhere else "own" if role in row.in_teams else "–" for role in Role]
        yield f"| {row.what} | {' | '.join(words)} |"


def admin_paths() -> dict[str, Any]:
    """The paths under /admin/api with their operations, as `/docs` lists them."""
    paths: dict[str, Any] = FastAPI(routes=api_routes()).openapi()["paths"]
    return paths


def _sentences(text: str) -> str:
    """All before the errors: `Raises` with a class. A sentence may begin with the verb."""
    return re.split(r"\bRaises (?=[A-Z])", " ".join(text.split()))[0].strip()


def _metrics() -> Iterable[str]:
    yield "| name | kind | labels | meaning |"
    yield "| --- | --- | --- | --- |"
    for one in DEFINITIONS:
        yield f"| `{one.name}` | {one.kind} | {', '.join(f'`{label}`' for label in one.labels)} | {one.help} |"


def _reserved(kind: str, effects: Mapping[str, str]) -> Iterable[str]:
    yield f"| {kind} | effect |"
    yield "| --- | --- |"
    for name, effect in effects.items():
        yield f"| `{name}` | {effect} |"


def main() -> None:
    parts = generated()
    for path in DOCUMENTS:
        text = path.read_text()
        written = with_generated(text, parts)
        if written != text:
            path.write_text(written)
            print(f"written: {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
