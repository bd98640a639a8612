"""How the operator's settings are read: a YAML file, then the environment, then the command line's flags.

Knows where values come from and how to say what is wrong with them; what each means is in `settings`. Invariant: whatever is
wrong is told at once, each with its name, what was found and what was expected.
"""

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gateway.settings import SECTIONS, Settings, SettingsError

_SECRETS = ("admin_key", "api_key", "secret")  # from the environment alone: they have no place in a file


def load_settings(path: Path | None, environ: Mapping[str, str] = os.environ, **overrides: Any) -> Settings:
    """Settings from a YAML file, then `SAMEWAY_<NAME>` variables for top-level scalars, then `overrides` (a command line's flags).

    Raises SettingsError naming every wrong setting.
    """
    values: dict[str, Any] = {} if path is None else _read_yaml(path)
    wrong = [
        f"{path}: {secret}: found in the file, expected in the environment as SAMEWAY_{secret.upper()}"
        for secret in _SECRETS
        if values.pop(secret, None) is not None
    ]
    scalars = {
        name for name, field in Settings.model_fields.items() if name not in ("cache", "budgets", "engines", "models")
    }
    for variable, value in environ.items():
        name = variable.removeprefix("SAMEWAY_").lower()
        if variable.startswith("SAMEWAY_") and name in scalars and value != "":
            values[name] = value
    values.update({name: value for name, value in overrides.items() if value is not None})
    try:
        settings = Settings.model_validate(values)
    except ValidationError as error:
        raise SettingsError("\n".join([*wrong, *(_explain(issue) for issue in error.errors())])) from None
    if wrong:
        raise SettingsError("\n".join(wrong))
    return settings


def _read_yaml(path: Path) -> dict[str, Any]:
    import yaml  # a megabyte of each worker, and a worker is handed JSON

    try:
        loaded = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise SettingsError(f"{path.absolute()}: no such file") from None
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise SettingsError(f"{path}: found a {type(loaded).__name__}, expected settings by name")
    return loaded


def _explain(issue: Any) -> str:
    """One line for one wrong setting: its path, what was found, what was expected."""
    where = ".".join(str(part) for part in issue["loc"])
    if issue["type"] == "extra_forbidden":
        return f"{where}: found, but there is no such setting{_nearest(issue['loc'])}"
    if issue["type"] == "missing":
        return f"{where}: not found, expected a value"
    message: str = issue["msg"].removeprefix("Value error, ")
    if not where:
        return message
    expected = message.removeprefix("Input should be ").removeprefix("a valid ")
    found = issue["input"]
    shown = "a section" if isinstance(found, dict) else repr(found)
    return f"{where}: found {shown}, expected {expected}" if issue["type"] != "value_error" else f"{where}: {message}"


def _nearest(loc: tuple[Any, ...]) -> str:
    names = {name for section in SECTIONS for name in section.model_fields}
    close = difflib.get_close_matches(str(loc[-1]), names, n=1)
    return f"; did you mean {close[0]}?" if close else ""
