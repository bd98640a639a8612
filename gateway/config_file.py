"""Reads the operator's settings: a YAML file, then the environment, then the command line's flags.

Does not know what a setting means; `settings` defines that. Invariant: an error lists every value
that is wrong by itself, with its name and the value expected; or, where there is none, every name
that refers to nothing, and all that this host lacks.
"""

import difflib
import os
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_origin
from urllib.parse import urlsplit

from pydantic import BaseModel, ValidationError

from gateway.data_dir import weak_files
from gateway.extras import lacks
from gateway.settings import (
    CAPABILITIES,
    SECRETS,
    SECTIONS,
    DeploymentSettings,
    Settings,
    SettingsError,
    did_you_mean,
    keys_of,
    refuse_settings,
    secret_problem,
    shown_variable,
)

WITHOUT_VERIFIER = (
    "none: rephrased questions are hits only by what was learned; `cache.verifier: auto` asks a model, where that pays"
)
_VERSION = re.compile(r"/v\d|/openai\b", re.IGNORECASE)  # in the paths of base URLs
# words of other price lists, for hints
_OTHER_WORDS = {"prompt": "input", "completion": "output"}

_NAME, _INDEX = "<name>", "[]"  # in paths: any name, any place in a list

_Loc = tuple[int | str, ...]


def load_settings(
    path: Path | None,
    environ: Mapping[str, str] = os.environ,
    *,
    model: str | None = None,
    is_checked: bool = False,
    serves: bool = True,
    **overrides: Any,
) -> Settings:
    """Settings from the YAML file at `path`, then `SAMEWAY_<NAME>` variables for top-level scalars,
    then flags.

    `overrides` are the flags; `model` is loaded by the engine named `default`. With `is_checked`, model
    files must be readable, the data directory writable and the variables of providers' keys set,
    capabilities must be known, and no `SAMEWAY_` variable may be a misspelt setting. Who `serves` needs
    the extras of what is configured. Raises SettingsError with a line for each wrong setting, and then
    for each of `notes`, too.
    """
    settings, wrong, weak = _read(path, environ, model, overrides)
    noted: list[str] = []
    if settings is not None:
        settings, lacking = _as_installed(settings)
        wrong += lacking if serves and not wrong else []
    if settings is not None and is_checked:
        wrong += [*_unusable_files(settings), *_missing_variables(settings, environ), *_unknown_capabilities(settings)]
        weak += weak_files(settings)
        noted = [f"note: {note}" for note in notes(settings)]
    wrong += _misspelt_variables(environ) if is_checked else []
    refuse_settings([*wrong, *noted] if wrong or weak else [], weak)
    assert settings is not None
    return settings


check_settings = partial(load_settings, is_checked=True)


def with_models(settings: Settings, kept: Mapping[str, Any]) -> Settings:
    """The file's settings with the models that are `kept` in the database; where both name one, the
    file's counts.

    A kept model takes its keys from where a deployment of the file takes one, and has no credentials,
    as pages show it. Raises SettingsError.
    """
    if not kept:
        return settings
    places = {(key.env, key.file) for _, deployment in _deployments(settings) for key in keys_of(deployment)}
    values = settings.model_dump(mode="json", exclude_unset=True)
    values["models"] = {
        **kept,
        **{alias: m.model_dump(mode="json", exclude_unset=True) for alias, m in settings.models.items()},
    }
    try:
        merged = Settings.model_validate(values)
    except ValidationError as error:
        raise SettingsError(
            "\n".join(dict.fromkeys(line for issue in error.errors() for line in _explain(issue)))
        ) from None
    wrong = [line for line in _unknown_capabilities(merged) if line.startswith(tuple(f"models.{one}." for one in kept))]
    wrong += _as_installed(merged)[1]
    for where, deployment in _deployments(merged):
        if where.split(".deployments.")[0].removeprefix("models.") in settings.models:
            continue
        urls = [deployment.base_url or "", *deployment.replicas]
        if deployment.headers or any("@" in urlsplit(url).netloc for url in urls):
            wrong.append(f"{where}: `headers` and credentials in a URL may be secret: only the file can have them")
        if any((key.env, key.file) not in places for key in keys_of(deployment)):
            wrong.append(
                f"{where}: its key is none that a deployment of the file has; only the file can name a new one"
            )
    refuse_settings(wrong, [])
    return merged


def notes(settings: Settings) -> list[str]:
    """A note where the semantic cache is not installed, and for each base URL that is allowed but
    probably wrong: without a version, or with an endpoint.
    """
    noted = []
    if remedy := lacks("semantic"):
        noted.append(f"answers are found by their words alone, not by meaning: {remedy}")
    for deployment_path, deployment in _deployments(settings):
        url = deployment.base_url
        if deployment.backend != "openai" or url is None:
            continue
        where, path = f"{deployment_path}.base_url: {_shown(url)}", urlsplit(url).path.rstrip("/")
        if path.endswith("completions"):
            noted.append(f"{where} ends in an endpoint; the gateway adds /chat/completions itself")
        elif not _VERSION.search(path):
            noted.append(f"{where} has no /v1; most servers' base URL ends in /v1: did you mean {_shown(url, '/v1')}?")
    return noted


def lacks_verifier(settings: Settings) -> bool:
    """Whether answers of a model behind an address are looked up by meaning, and no verifier is named anywhere."""
    return (
        settings.cache.is_semantic
        and not any(settings.verification(alias)[1] for alias in settings.models)
        and any(
            model.is_semantic and any(deployment.engine is None for deployment in model.deployments)
            for model in settings.models.values()
        )
    )


def _deployments(settings: Settings) -> Iterator[tuple[str, DeploymentSettings]]:
    """Each deployment with its path in the file."""
    for alias, model in settings.models.items():
        for index, deployment in enumerate(model.deployments):
            yield f"models.{alias}.deployments.{index}", deployment


def _shown(url: str, more: str = "") -> str:
    """A URL without its credentials and its query, and with `more` at the end."""
    parts = urlsplit(url)
    if more and parts.netloc == "unix:" and ":" not in parts.path:  # between the socket's path and the server's
        more = f":{more}"
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.rstrip('/') if more else parts.path}{more}"


def _read(
    path: Path | None, environ: Mapping[str, str], model: str | None, overrides: Mapping[str, Any]
) -> tuple[Settings | None, list[str], list[str]]:
    """The settings, None where the document is wrong, and two lists of errors: of secrets that can
    be guessed, and before it of all else.
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
        return None, [*wrong, *dict.fromkeys(line for issue in error.errors() for line in _explain(issue))], weak
    if model is None:
        return settings, wrong, weak
    if "default" not in settings.engines:
        return settings, [*wrong, "--model: there is no engine named `default` in this configuration"], weak
    engine = settings.engines["default"].model_copy(update={"model": model})
    return settings.model_copy(update={"engines": {**settings.engines, "default": engine}}), wrong, weak


def _read_yaml(path: Path) -> tuple[dict[str, Any], list[str]]:
    """A file's values, and its errors.

    Duplicate keys are among them: YAML forbids them, but PyYAML keeps the last one.
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
        loaded = yaml.load(path.read_text(encoding="utf-8"), Loader)
    except FileNotFoundError:
        return {}, [f"{path.absolute()}: no such file"]
    except OSError as error:
        return {}, [f"{path}: {error.strerror}"]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        return {}, [f"{path}: not YAML: {where}{error.problem or error.context}"]
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        return {}, [f"{path}: not YAML: {' '.join(str(error).split())}"]
    if loaded is None:
        return {}, []
    if not isinstance(loaded, dict):
        return {}, [f"{path}: found a {type(loaded).__name__}, expected settings by name"]
    return loaded, twice


# -- this host -------------------------------------------------------------------------------------


def _as_installed(settings: Settings) -> tuple[Settings, list[str]]:
    """The settings, without the semantic cache where only the default asks for it and its extra is
    not installed; and an error for each one that needs another extra.
    """
    engines = {deployment.engine for _, deployment in _deployments(settings) if deployment.engine}
    needs = {f"engines.{name}": "engine" for name in sorted(engines)}
    needs |= {f"{path}.backend": "litellm" for path, one in _deployments(settings) if one.backend == "litellm"}
    by_default = {
        "cache.is_semantic": (settings.cache, "is_semantic"),
        "embedding_alias": (settings, "embedding_alias"),
    }
    for setting, (section, name) in by_default.items():
        if name in section.model_fields_set and getattr(section, name):
            needs[setting] = "semantic"
    wrong = [f"{setting}: {remedy}" for setting, extra in needs.items() if (remedy := lacks(extra))]
    if "models" not in settings.model_fields_set:
        wrong = [f"{line} for the packaged model, or name models of servers in a file (--config)" for line in wrong]
    if lacks("semantic"):
        cache = settings.cache.model_copy(update={"is_semantic": False})
        settings = settings.model_copy(update={"cache": cache, "embedding_alias": ""})
    return settings, wrong


def _unusable_files(settings: Settings) -> list[str]:
    """An error for each path that is not there, or cannot be used."""
    named = [("cache.embedder", settings.cache.embedder)]
    for name, engine in settings.engines.items():
        named += [(f"engines.{name}.model", engine.model), (f"engines.{name}.draft_model", engine.draft_model or "")]
    wrong = []
    for where, model in named:
        path = Path(model).expanduser()
        if not model.startswith(("/", "./", "../", "~")):
            continue  # a name
        if not path.exists():
            wrong.append(f"{where}: there is no {model}")
        elif not os.access(path, os.R_OK | (os.X_OK if path.is_dir() else 0)):
            wrong.append(f"{where}: {model} can't be read by this user")
    folder = settings.data_dir.absolute()
    existing = next(one for one in (folder, *folder.parents) if one.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        wrong.append(f"data_dir: {existing}: expected a directory that this user can write")
    return wrong


def _unknown_capabilities(settings: Settings) -> list[str]:
    """An error for each capability that no request asks for."""
    return [
        f"{place}.capabilities: found {name!r}, expected one of "
        f"{', '.join(sorted(CAPABILITIES))}{did_you_mean(name, CAPABILITIES)}"
        for place, deployment in _deployments(settings)
        for name in deployment.capabilities or ()
        if name not in CAPABILITIES
    ]


def _missing_variables(settings: Settings, environ: Mapping[str, str]) -> list[str]:
    """An error for each provider's key that cannot be read."""
    return [
        f"{where}.{'api_key_env' if deployment.api_key_env else 'api_key_file' if deployment.api_key_file else 'api_keys'}: "
        + (
            f"the environment variable {shown_variable(key.env, environ)} is not set"
            if key.env
            else f"{key.file} can't be read by this user"
        )
        for where, deployment in _deployments(settings)
        for key in keys_of(deployment)
        if not (environ.get(key.env) if key.env else os.access(key.file or "", os.R_OK))
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
    return {name for name in Settings.model_fields if name not in ("cache", "budgets", "alerts", "engines", "models")}


# -- words -----------------------------------------------------------------------------------------


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
    if issue["type"] in ("model_type", "dict_type"):
        expected = "a section"
    found = issue["input"]
    shown = "a section" if isinstance(found, dict) else repr(found)
    hint = did_you_mean(str(found), re.findall(r"'([^']+)'", expected)) if issue["type"] == "literal_error" else ""
    return [f"{where}: found {shown}, expected {expected}{hint}"]


def _nearest(loc: _Loc) -> str:
    """The end of the message about an unknown setting: the settings that may be meant, if any.

    The section's own come first: the nearest one, or those that share a word. Then those of others.
    """
    name, section = str(loc[-1]), _section_of(loc)
    if hint := did_you_mean(name, section.model_fields):
        return hint
    terms = {_OTHER_WORDS.get(word, word) for word in name.lower().split("_")}
    shared = {
        field: sum(len(word) > 3 for word in terms.intersection(field.split("_"))) for field in section.model_fields
    }
    best = max(shared.values())
    if best:
        meant = [field for field, count in shared.items() if count == best]
        return f"; did you mean {' or '.join([field for field in meant if field.split('_')[0] in terms] or meant)}?"
    elsewhere = {
        field: ".".join(path).replace(".[]", "[]") for path, section in _sections() for field in section.model_fields
    }
    close = difflib.get_close_matches(name, elsewhere, n=1)
    return f"; did you mean {close[0]} of {elsewhere[close[0]] or 'the top level'}?" if close else ""


def _section_of(loc: _Loc) -> type[BaseModel]:
    """The section that holds the setting at `loc`."""
    for path, section in _sections():
        pairs = zip(path, loc, strict=False)
        if len(path) == len(loc) - 1 and all(name in (part, _NAME, _INDEX) for name, part in pairs):
            return section
    return Settings


def _sections(
    section: type[BaseModel] = Settings, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], type[BaseModel]]]:
    """Each section with its path in a document."""
    yield path, section
    for name, field in section.model_fields.items():
        kind: Any = field.annotation
        many = {dict: (_NAME,), list: (_INDEX,)}.get(get_origin(kind), ())
        for inner in {kind, *get_args(kind)}.intersection(SECTIONS):
            yield from _sections(inner, (*path, name, *many))
