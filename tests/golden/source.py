"""Names collected from the code without starting anything.

Looks nothing up by a module's path: it reads all sources of the four packages, or imports all
modules of one and picks objects by what they are. Only `gateway.app.create_app`, `gateway.cli.main`,
`gateway.settings.Settings`, `gateway.admin.forms.FORMS` and the record of a request have names here.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import json
import pkgutil
import re
import types
from collections.abc import Callable, Iterator
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs
from sqlalchemy import MetaData
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.schema import CreateIndex, CreateTable

from gateway import cli
from gateway.admin.forms import FORMS
from gateway.app import create_app
from gateway.journey.record import FIELDS, Record
from gateway.settings import Settings

ROOT = Path(__file__).parents[2]
PACKAGES = ("gateway", "cache", "policies", "local_engine", "ipc")
_LEVELS = ("debug", "info", "warning", "error", "exception", "critical")
_STORED_TAGS = ("e1", "a1", "f3", "s1", "r2", "p2", "+", "-", "a", "v")


@cache
def _trees() -> tuple[ast.Module, ...]:
    """All sources of the product, parsed, without their docstrings."""
    trees = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            tree = ast.parse(path.read_text())
            for node in ast.walk(tree):
                body = getattr(node, "body", None)
                if isinstance(body, list):  # a string on a line of its own is prose
                    node.body = [  # type: ignore[attr-defined]
                        n for n in body if not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))
                    ]
            trees.append(tree)
    return tuple(trees)


@cache
def _nodes() -> tuple[ast.AST, ...]:
    return tuple(node for tree in _trees() for node in ast.walk(tree))


@cache
def _strings() -> tuple[str, ...]:
    """All constants of text or bytes, and f-strings with {} for their values."""
    found = list[str]()
    for node in _nodes():
        if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
            found.append(node.value if isinstance(node.value, str) else node.value.decode("latin-1"))
        elif isinstance(node, ast.JoinedStr):
            found.append("".join(str(p.value) if isinstance(p, ast.Constant) else "{}" for p in node.values))
    return tuple(found)


@cache
def _modules(package: str) -> tuple[types.ModuleType, ...]:
    root = importlib.import_module(package)
    names = [info.name for info in pkgutil.walk_packages(root.__path__, f"{package}.")]
    wanted = [name for name in names if not name.endswith("__main__") and ".migrations" not in name]
    return (root, *(importlib.import_module(name) for name in wanted))


def _objects(*packages: str) -> Iterator[Any]:
    """Everything that stands at the top of a module, once."""
    seen: set[int] = set()
    for package in packages:
        for module in _modules(package):
            for value in vars(module).values():
                if id(value) not in seen:
                    seen.add(id(value))
                    yield value


def shape(schema: Any, defs: dict[str, Any]) -> Any:
    """A JSON schema without its words and the names of classes."""
    if isinstance(schema, list):
        return [shape(one, defs) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return shape(defs[schema["$ref"].rpartition("/")[2]], defs)
    dropped = {"title", "description", "$defs", "examples", "discriminator"}
    return {key: shape(value, defs) for key, value in sorted(schema.items()) if key not in dropped}


def _properties(schema: dict[str, Any], path: str, named: bool) -> Iterator[str]:
    """One line for each property at any depth."""
    if named and set(schema) == {"additionalProperties"}:
        named = False
    for name, inner in schema.get("properties", {}).items():
        flat = {k: v for k, v in inner.items() if k not in ("properties", "required")}
        required = " required" if name in schema.get("required", ()) else ""
        if not inner.get("properties") and not _has_properties(inner):
            yield f"{path}{name}{required} {json.dumps(flat, sort_keys=True)}"
            continue
        yield f"{path}{name}{required}"
        for deeper in _with_properties(inner):
            yield from _properties(deeper, f"{path}{name}.", named)


def _has_properties(schema: Any) -> bool:
    return next(_with_properties(schema), None) is not None


def _with_properties(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        if isinstance(schema.get("properties"), dict):
            yield schema
            return
        for value in schema.values():
            yield from _with_properties(value)
    elif isinstance(schema, list):
        for one in schema:
            yield from _with_properties(one)


def settings() -> Iterator[str]:
    """Each setting: its path, type, bounds and default; and the environment's variables."""
    whole = Settings.model_json_schema()
    yield from _properties(shape(whole, whole.get("$defs", {})), "", True)
    yield from (f"${name}" for text in _strings() for name in re.findall(r"\bSAMEWAY_[A-Z_]*[A-Z]", text))


def command_line() -> Iterator[str]:
    """Each command of `sameway` and each of its options.

    The worker's command is the supervisor's own.
    """
    caught: list[argparse.ArgumentParser] = []

    def catch(parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        caught.append(parser)
        raise KeyboardInterrupt

    original = argparse.ArgumentParser.parse_args
    argparse.ArgumentParser.parse_args = catch  # type: ignore[method-assign,assignment]
    try:
        cli.main([])
    except KeyboardInterrupt:
        pass
    finally:
        argparse.ArgumentParser.parse_args = original  # type: ignore[method-assign]
    (parser,) = caught
    yield f"{parser.prog}: {parser.description}"
    yield from _commands(parser, parser.prog)


def _commands(parser: argparse.ArgumentParser, said: str) -> Iterator[str]:
    """The commands below what was `said` so far, and theirs."""
    for action in parser._actions:
        if not isinstance(action, argparse._SubParsersAction):
            continue
        for words in action._choices_actions:
            command = action.choices[words.dest]
            yield f"{said} {words.dest}: {words.help}"
            for option in command._actions:
                kind = getattr(option.type, "__name__", "") or type(option).__name__.strip("_")
                yield f"{said} {words.dest} {' '.join(option.option_strings)} ({kind}): {option.help}"
            yield from _commands(command, f"{said} {words.dest}")


def metrics() -> Iterator[str]:
    """Each metric as it is defined: name, kind, labels, how workers are merged, bounds and words."""
    for one in _objects("gateway"):
        if isinstance(one, msgspec.Struct) and {"name", "kind", "help", "labels", "bounds", "merge"} <= set(
            one.__struct_fields__
        ):
            fields = msgspec.to_builtins(one)
            bounds = f" {fields['bounds']}" if fields["bounds"] else ""
            yield f"{fields['name']} {fields['kind']} {fields['merge']} {fields['labels']}{bounds}: {fields['help']}"


def log_events() -> Iterator[str]:
    """Each event with its level and the fields given where it is logged."""
    for node in _nodes():
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _LEVELS):
            continue
        event = node.args[0] if len(node.args) == 1 else None
        if isinstance(event, ast.Constant) and isinstance(event.value, str) and re.fullmatch(r"[a-z_]+", event.value):
            fields = sorted(keyword.arg or "**" for keyword in node.keywords)
            yield " ".join((event.value, node.func.attr, *fields))


def errors() -> Iterator[str]:
    """Each error a client can get: status, type, code; and all codes."""
    for one in _objects("gateway"):
        if inspect.isclass(one) and issubclass(one, Exception) and {"status", "type", "code"} <= set(dir(one)):
            yield f"{one.status} {one.type} {one.code}"
    for node in _nodes():
        if isinstance(node, ast.keyword) and node.arg in ("code", "error", "error_code"):
            for inner in ast.walk(node.value):
                if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
                    yield f"code {inner.value}"


def words() -> Iterator[str]:
    """The words of each enumeration: reasons of misses, refusals, causes, sources, policies ..."""
    for one in _objects(*PACKAGES):
        if inspect.isclass(one) and issubclass(one, StrEnum) and one.__module__.split(".")[0] in PACKAGES:
            yield ", ".join(sorted(one)).lstrip(", ")


def tables() -> Iterator[str]:
    """SQL's tables and indexes, for SQLite and PostgreSQL."""
    for one in _objects("gateway"):
        if isinstance(one, MetaData):
            for dialect in (sqlite.dialect(), postgresql.dialect()):  # type: ignore[no-untyped-call]
                for table in one.sorted_tables:
                    for statement in (CreateTable(table), *(CreateIndex(index) for index in table.indexes)):
                        text = re.sub(r"\s+", " ", str(statement.compile(dialect=dialect))).strip()
                        yield f"{dialect.name}: {text}"


def stored() -> Iterator[str]:
    """What is stored in Redis, by its tag: the types in their order.

    And the record of a request, by its fields.
    """
    for one in _objects("cache", "gateway"):
        if not (inspect.isclass(one) and issubclass(one, msgspec.Struct) and one is not msgspec.Struct):
            continue
        tag = one.__struct_config__.tag
        if tag in _STORED_TAGS and one.__struct_config__.array_like:
            (schema,), defs = msgspec.json.schema_components([one])
            yield f"{tag} {json.dumps(shape(schema, defs)['prefixItems'])}"
    for part in [field.type for field in structs.fields(Record)]:
        (schema,), defs = msgspec.json.schema_components([part])
        fields = shape(schema, defs)["properties"].items()
        yield from (f"record {name} {json.dumps(inner)}" for name, inner in fields if name in FIELDS)


def headers() -> Iterator[str]:
    """The names of headers that the gateway reads or writes."""
    standard = "age|cache-control|cache-status|server-timing|retry-after|authorization|www-authenticate|accept-encoding"
    pattern = re.compile(
        rf"x-[a-z0-9-]*([a-z0-9]|-{{}}.*)|{standard}|retry-after-ms|content-encoding|content-type|set-cookie"
    )
    yield from (text for text in _strings() if pattern.fullmatch(text))


def redis_names() -> Iterator[str]:
    """Channels, and the beginnings of keys."""
    yield from (text for text in _strings() if re.match(r"sameway:[a-z{]", text) and " " not in text)


def routes() -> Iterator[str]:
    """The OpenAPI description's paths without the admin plane's, and the pages and the admin API by
    their decorators, or the dashboard's table of forms.
    """
    yield from (f"decorated POST {form.path}" for form in FORMS)
    for path, methods in create_app(Settings()).openapi()["paths"].items():
        yield from (f"{method.upper()} {path}" for method in methods)
    for node in _nodes():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            verb, path = node.func.attr, _text(node.args[0]) if node.args else None
            if verb in ("get", "post", "patch", "delete", "put") and path is not None and path[:1] in ("", "/"):
                yield f"decorated {verb.upper()} {path}".rstrip()
        if isinstance(node, ast.keyword) and node.arg == "prefix" and (_text(node.value) or "").startswith("/"):
            yield f"prefix {_text(node.value)}"


def _text(node: ast.AST) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


COLLECTORS: dict[str, Callable[[], Iterator[str]]] = {
    "settings": settings,
    "command_line": command_line,
    "metrics": metrics,
    "log_events": log_events,
    "errors": errors,
    "words": words,
    "tables": tables,
    "stored": stored,
    "headers": headers,
    "redis_names": redis_names,
    "routes": routes,
}
