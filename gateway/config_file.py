"""Reads the operator's settings: a YAML file, then the environment, then the command line's flags.

Does not know what a setting means; `settings` defines that. Invariant: an error lists every wrong
setting, with its name, the value found and the value expected.
"""

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gateway.data_dir import weak_files
from gateway.settings import SECRETS, SECTIONS, Settings, SettingsError, refuse_settings, secret_problem


def load_settings(
    path: Path | None, environ: Mapping[str, str] = os.environ, *, model: str | None = None, **overrides: Any
) -> Settings:
    """Settings from the YAML file at `path`, then `SAMEWAY_<NAME>` variables for top-level scalars,
    then flags.

    `overrides` are the flags; `model` is loaded by the engine named `default`.
    Raises SettingsError naming every wrong setting.
    """
    settings, wrong, weak = _read(path, environ, model, overrides)
    refuse_settings(wrong, weak)
    assert settings is not None
    return settings


def check_settings(
    path: Path | None, environ: Mapping[str, str] = os.environ, *, model: str | None = None, **overrides: Any
) -> Settings:
    """Settings as from `load_settings`, with further checks on this host.

    Model files and the variables of providers' keys must exist, and no `SAMEWAY_` variable may be a
    misspelt setting. Raises SettingsError naming every wrong setting.
    """
    settings, wrong, weak = _read(path, environ, model, overrides)
    if settings is not None:
        wrong += [*_missing_files(settings), *_missing_variables(settings, environ)]
        weak += weak_files(settings)
    wrong += _misspelt_variables(environ)
    refuse_settings(wrong, weak)
    assert settings is not None
    return settings


def _read(
    path: Path | None, environ: Mapping[str, str], model: str | None, overrides: Mapping[str, Any]
) -> tuple[Settings | None, list[str], list[str]]:
    """The settings, None if they are invalid, and two lists of errors, which may also accompany
    valid settings: of all but the secrets, and of secrets that can be guessed.
    """
    values, wrong = ({}, []) if path is None else _read_yaml(path)
    wrong += [
        f"{path}: {secret}: found in the file, expected in the environment as SAMEWAY_{secret.upper()}"
        for secret in SECRETS
        if values.pop(secret, None) is not None
    ]
    scalars = _scalars()
    for variable, value in environ.items():
        name = variable.removeprefix("SAMEWAY_").lower()
        if variable.startswith("SAMEWAY_") and name in scalars and value != "":
            values[name] = value
    problems = {name: secret_problem(name, values[name]) for name in SECRETS if name in values}
    weak = [f"SAMEWAY_{name.upper()}: {problem}" for name, problem in problems.items() if problem]
    values.update({name: value for name, value in overrides.items() if value is not None})
    try:
        settings = Settings.model_validate(values)
    except ValidationError as error:
        return None, [*wrong, *(line for issue in error.errors() for line in _explain(issue))], weak
    if model is None:
        return settings, wrong, weak
    if "default" not in settings.engines:
        return settings, [*wrong, "--model: there is no engine named `default` in this configuration"], weak
    engine = settings.engines["default"].model_copy(update={"model": model})
    return settings.model_copy(update={"engines": {**settings.engines, "default": engine}}), wrong, weak


def _read_yaml(path: Path) -> tuple[dict[str, Any], list[str]]:
    """A file's values, and its duplicate keys: YAML forbids them, but PyYAML keeps the last one.

    Raises SettingsError.
    """
    import yaml  # takes 1 MB, and workers do not need it: they read JSON

    twice: list[str] = []

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            lines: dict[str, int] = {}
            for key, _ in node.value:
                name, line = str(key.value), key.start_mark.line + 1
                if name in lines and name != "<<":
                    twice.append(f"{path}: {name}: found in line {lines[name]} and again in line {line}, expected once")
                lines.setdefault(name, line)
            return super().construct_mapping(node, deep)

    try:
        loaded = yaml.load(path.read_text(), Loader)
    except FileNotFoundError:
        raise SettingsError(f"{path.absolute()}: no such file") from None
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise SettingsError(f"{path}: not YAML: {where}{error.problem or error.context}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if loaded is None:
        return {}, []
    if not isinstance(loaded, dict):
        raise SettingsError(f"{path}: found a {type(loaded).__name__}, expected settings by name")
    return loaded, twice


def _missing_files(settings: Settings) -> list[str]:
    """An error for each model whose path does not exist."""
    named = [(f"engines.{name}.model", engine.model) for name, engine in settings.engines.items()]
    named += [(f"engines.{name}.draft_model", e.draft_model) for name, e in settings.engines.items() if e.draft_model]
    return [
        f"{where}: there is no {model}"
        for where, model in named
        if model.startswith(("/", "./", "../", "~")) and not Path(model).expanduser().exists()
    ]


def _missing_variables(settings: Settings, environ: Mapping[str, str]) -> list[str]:
    """An error for each provider's key whose variable is not set."""
    return [
        f"models.{alias}.deployments.{index}.api_key_env: the environment variable {deployment.api_key_env} is not set"
        for alias, model in settings.models.items()
        for index, deployment in enumerate(model.deployments)
        if deployment.api_key_env and not environ.get(deployment.api_key_env)
    ]


def _misspelt_variables(environ: Mapping[str, str]) -> list[str]:
    """An error for each unknown variable whose name is close to a setting's."""
    names = [f"SAMEWAY_{name.upper()}" for name in _scalars()]
    found = sorted(name for name in environ if name.startswith("SAMEWAY_") and name not in names)
    near = {name: difflib.get_close_matches(name, names, n=1, cutoff=0.92) for name in found}
    return [
        f"{name}: found in the environment, but there is no such setting; did you mean {close[0]}?"
        for name, close in near.items()
        if close
    ]


def _scalars() -> set[str]:
    """The settings that an environment variable may set."""
    return {name for name in Settings.model_fields if name not in ("cache", "budgets", "engines", "models")}


def _explain(issue: Any) -> list[str]:
    """A line for each wrong setting: its path, the value found, the value expected."""
    where = ".".join(str(part) for part in issue["loc"])
    if issue["type"] == "extra_forbidden":
        return [f"{where}: found, but there is no such setting{_nearest(issue['loc'])}"]
    if issue["type"] == "missing":
        return [f"{where}: not found, expected a value"]
    message: str = issue["msg"].removeprefix("Value error, ")
    if issue["type"] == "value_error":
        return [f"{where}: {line}" if where else line for line in message.splitlines()]
    expected = message.removeprefix("Input should be ").removeprefix("a valid ").partition(", unable to parse")[0]
    if issue["type"] == "too_short":
        expected = f"at least {issue['ctx']['min_length']}"
    found = issue["input"]
    shown = "a section" if isinstance(found, dict) else repr(found)
    return [f"{where}: found {shown}, expected {expected}"]


def _nearest(loc: tuple[Any, ...]) -> str:
    names = {name for section in SECTIONS for name in section.model_fields}
    # the name itself may exist in another section
    close = difflib.get_close_matches(str(loc[-1]), names - {loc[-1]}, n=1)
    return f"; did you mean {close[0]}?" if close else ""
