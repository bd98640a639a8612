"""Converts a dataclass to a process' command line, and back.

A field `kv_size_mb: Annotated[int | None, "memory for KV"] = None` is the option `--kv-size-mb`,
whose help is the annotation; a bool `is_audited` is `--audited` and `--no-audited`; a Literal has
its values as choices. Knows no process.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")


def add_options(parser: argparse.ArgumentParser, kind: type[Any]) -> None:
    """Add an option for each field of the dataclass `kind`. Fields without a default are required."""
    hints = get_type_hints(kind, include_extras=True)
    for field, flag in _flags(kind):
        hint, text = get_args(hints[field.name])
        default = _default(field)
        options: dict[str, Any] = {"dest": field.name, "help": text, "default": default, "required": default is MISSING}
        (plain,) = {hint} if get_origin(hint) is Literal else set(get_args(hint) or [hint]) - {NoneType}
        if plain is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif get_origin(plain) is Literal:
            options["choices"] = get_args(plain)
        else:
            options["type"] = plain
        parser.add_argument(flag, **options)


def options_from(kind: type[T], arguments: argparse.Namespace) -> T:
    """Build the dataclass `kind` from a parsed command line. Raises its constructor's errors."""
    return kind(**{field.name: getattr(arguments, field.name) for field, _ in _flags(kind)})


def argv_of(options: Any) -> list[str]:
    """Return the command line of a dataclass. Fields with their default are left out."""
    argv = []
    for field, flag in _flags(type(options)):
        value = getattr(options, field.name)
        if value == _default(field):
            continue
        argv.append(f"{flag}={value}" if not isinstance(value, bool) else flag if value else f"--no-{flag[2:]}")
    return argv


def _flags(kind: type[Any]) -> Iterator[tuple[Field[Any], str]]:
    for field in fields(kind):
        yield field, "--" + field.name.removeprefix("is_").replace("_", "-")


def _default(field: Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default
