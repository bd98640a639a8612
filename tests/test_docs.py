"""The documents agree with the code: what they list is all there is, their samples work, their links and paths resolve."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib.metadata
import json
import re
import shlex
import textwrap
from pathlib import Path
from typing import Any, get_args
from urllib.parse import parse_qs

import pytest
import yaml

from cache.fingerprint import FIELDS, FieldKind
from cache.worker.options import WorkerOptions
from gateway.app import create_app
from gateway.cli import command_parser, main
from gateway.settings import SECTIONS, DeploymentSettings, EngineSettings, PriceSettings, Settings
from gateway.telemetry.metric_names import DEFINITIONS
from gateway.version import VERSION
from policies import Price
from tests.documents import DOCUMENTS, ROOT, admin_paths, generated, meanings_of, with_generated, without_generated
from tests.golden.source import COLLECTORS, PACKAGES

TEXTS = {str(path.relative_to(ROOT)): path.read_text() for path in DOCUMENTS}
README, API, REASONS, OPERATIONS, CONFIGURATION, LOG = (
    TEXTS[name]
    for name in (
        "README.md",
        "docs/api.md",
        "docs/reasons.md",
        "docs/operations.md",
        "docs/configuration.md",
        "docs/log.md",
    )
)

# HTTP's own, and those between the gateway and a provider
_HEADERS_UNDOCUMENTED = {"content-type", "x-gzip"}
_OLD_VOICE = re.compile(r"\b(nobody|somebody|whoever|whom)\b", re.IGNORECASE)
_COLUMNS_MAX = 100
_README_LINES_MAX = 120


@functools.cache
def _openapi() -> dict[str, Any]:
    """The document of the API, with the admin's paths."""
    document: dict[str, Any] = create_app(Settings()).openapi()
    return {**document, "paths": {**document["paths"], **admin_paths()}}


def _cells(text: str, heading: str) -> list[list[str]]:
    """The rows of the first table under `heading`, without its head."""
    _, _, rest = f"\n{text}".partition(f"\n{heading}\n")
    assert rest, f"there is no heading {heading!r}"
    table = re.search(r"^\|.*?\n(?!\|)", rest, re.DOTALL | re.MULTILINE)
    assert table is not None, f"there is no table under {heading!r}"
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[0].splitlines()[2:]]


def _names(text: str, heading: str, column: int = 0) -> list[str]:
    """The names in backticks of one column, in order."""
    return [name for row in _cells(text, heading) for name in re.findall(r"`([^`]+)`", row[column])]


def _words(member: str) -> set[str]:
    """The enumeration with this member."""
    (found,) = [one.split(", ") for one in COLLECTORS["words"]() if member in one.split(", ")]
    return set(found)


def _fences(text: str, language: str) -> list[str]:
    return [textwrap.dedent(found) for found in re.findall(rf"^ *```{language}\n(.*?)^ *```$", text, re.M | re.S)]


@functools.cache
def _trees() -> tuple[ast.AST, ...]:
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    read = (path.read_text() for path in paths if path.name not in ("settings.py", "config_file.py"))
    return tuple(node for text in read for node in ast.walk(ast.parse(text)))


# -- lists ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TEXTS)
def test_generated_parts_are_current(name: str) -> None:
    """Names, types, defaults and sentences of settings, admin routes and metrics are the code's; `./run docs` writes them."""
    assert with_generated(TEXTS[name], generated()) == TEXTS[name]


def test_every_generated_part_is_shown_once() -> None:
    """No list of settings, routes or metrics is left out."""
    marks = [mark for text in TEXTS.values() for mark in re.findall(r"<!-- generated: (.+?) -->", text)]
    assert sorted(marks) == sorted(generated())


def test_every_setting_has_a_sentence() -> None:
    """But for sections, which have a table of their own."""
    without = [name for section in SECTIONS for name in section.model_fields if not meanings_of(section).get(name)]
    assert without == [
        "access",
        "cache",
        "budgets",
        "loops",
        "mask",
        "alerts",
        "batches",
        "ledger",
        "responses",
        "savings",
        "traces",
    ]


def test_every_setting_is_read() -> None:
    """A setting that no code reads has no effect. It is read from a name like `settings`, or like its section; handed to a
    process under its name (tests/processes/test_supervisor.py); or an amount of a price, by the name of the price's field.
    """
    read = {("engine", name) for name in EngineSettings.model_fields}
    read |= {("cache", option.name) for option in dataclasses.fields(WorkerOptions)}
    read |= {("price", field.name.replace("microusd", "usd")) for field in dataclasses.fields(Price)}
    for node in (*_trees(), *ast.walk(ast.parse((ROOT / "gateway/settings.py").read_text()))):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = node.value.value if isinstance(node.value, ast.Subscript) else node.value
            name = getattr(owner, "attr", getattr(owner, "id", ""))
            read.add((name.strip("_").removesuffix("s"), node.attr))
    unread = []
    for section in SECTIONS:
        owners = {"setting", section.__name__.removesuffix("Settings").lower().removesuffix("s")} | (
            {"self"} if section is Settings else set()
        )
        unread += [f"{section.__name__}.{n}" for n in section.model_fields if not any((o, n) in read for o in owners)]
    assert unread == []


def test_every_variable_is_documented() -> None:
    """A variable is a setting of the top level, or has a row; but for what the supervisor hands to its children."""
    found = {name[1:] for name in COLLECTORS["settings"]() if name.startswith("$")}
    settings = {f"SAMEWAY_{name.upper()}" for name in Settings.model_fields}
    documented = set(_names(CONFIGURATION, "## Environment variables that are not settings"))
    assert found - settings - documented == {"SAMEWAY_WORKER_SETTINGS", "SAMEWAY_INDEX_URL", "SAMEWAY_LOG_AS_JSON"}


def test_every_header_is_documented() -> None:
    """docs/api.md has all headers that the code reads or sends."""
    documented = {*_names(API, "## Request headers"), *_names(API, "## Response headers")}
    patterns = [re.escape(name).replace(r"\{\}", "[a-z]+") for name in COLLECTORS["headers"]()]
    missing = {p for p in patterns if not any(re.fullmatch(p, name) for name in documented)}
    assert missing <= {re.escape(name) for name in _HEADERS_UNDOCUMENTED}
    assert [
        name for name in documented if name.startswith("x-") and not any(re.fullmatch(p, name) for p in patterns)
    ] == []


def test_every_route_is_documented() -> None:
    """docs/api.md has each path outside the admin plane with its method. (Admin routes are generated.)"""
    documented = set(_names(API, "## Endpoints"))
    served = {one for one in COLLECTORS["routes"]() if not one.startswith(("decorated", "prefix"))}
    assert served - documented == set()
    families = {"/admin/api/...", "/passthrough/{deployment}/..."}
    assert documented - served == {"GET /docs", "GET /openapi.json", "GET /admin", *families}


def test_every_error_code_is_documented() -> None:
    """docs/api.md has each code with its status, and none that the code does not have."""
    rows = {(row[0], code) for row in _cells(API, "## Errors") for code in re.findall(r"`([^`]+)`", row[1])}
    for line in COLLECTORS["errors"]():
        first, *_, code = line.split()
        if code == "None":
            continue
        assert any(known == code and (first in ("code", status)) for status, known in rows), line
    strings = {node.value for node in _trees() if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    strings |= {"headers_too_large", "request_timeout"}  # stand inside the bytes of ready responses
    assert [code for _, code in rows if code not in strings] == []


def test_every_reason_is_documented() -> None:
    """docs/reasons.md has each store refusal, each miss and each rejection's cause; the dashboard has words for all misses."""
    assert set(_names(REASONS, "## Why an answer was not stored")) == _words("no_store") | {"stored"}
    assert set(_names(REASONS, "## Why the exact cache did not answer")) == _words("too_old")
    misses = set(_names(REASONS, "## Why the semantic cache did not answer"))
    assert _words("marks") <= misses
    dashboard = (ROOT / "gateway/admin/templates/parts.html").read_text()
    shown = re.search(r"set reasons = \{(.*?)\}", dashboard, re.DOTALL)
    assert shown is not None
    assert misses == set(re.findall(r'^  "([a-z_-]+)":', shown[1], re.MULTILINE))
    assert set(_names(REASONS, "## Why a deployment was not used")) >= _words("capability")
    assert set(_names(API, "## Feedback")) == _words("counted")


def test_fields_outside_the_cache_key_are_documented() -> None:
    """docs/api.md names each field of a request that does not change the answer."""
    delivery = {name for name, kind in FIELDS.items() if kind is FieldKind.DELIVERY}
    (named,) = re.findall(r"These fields may differ, because.*?`user`", API, re.DOTALL)
    assert set(re.findall(r"`([a-z_]+)`", named)) == delivery


def test_every_log_event_is_documented() -> None:
    """docs/log.md has each event of a gateway worker, and each field of a request's line."""
    fields, events = set(_names(LOG, "## Requests")), set(_names(LOG, "## Other events"))
    logged = {line.split()[0] for line in COLLECTORS["log_events"]()} - {
        "stopping"
    }  # the cache worker's, in plain text
    assert logged <= events
    record = {line.split()[1] for line in COLLECTORS["stored"]() if line.startswith("record ")}
    assert record - {"at_s"} <= fields


def test_every_alert_is_documented() -> None:
    """docs/operations.md has each alert with its severity."""
    rules = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())["groups"][0]["rules"]
    assert [row[:2] for row in _cells(OPERATIONS, "## Metrics and alerts")] == [
        [f"`{rule['alert']}`", rule["labels"]["severity"]] for rule in rules
    ]


def test_the_proxies_wait_for_the_longest_answer() -> None:
    """nginx's lines, Envoy's and Traefik's files wait longer than a deployment may take for a whole answer."""
    envoy, traefik = ((ROOT / "deploy" / name).read_text() for name in ("envoy.yaml", "traefik.yaml"))
    assert yaml.safe_load(traefik)["http"]["services"]
    assert yaml.safe_load(envoy)["static_resources"]["listeners"]
    limits = re.findall(
        r"(?:proxy_read_timeout |stream_idle_timeout: |readTimeout=)(\d+)s",
        OPERATIONS.partition("```nginx")[2].partition("```")[0] + envoy + traefik,
    )
    assert len(limits) == 3
    longest_ms = DeploymentSettings.model_fields["whole_timeout_ms"].default
    assert all(int(limit) * 1_000 > longest_ms for limit in limits)


def test_readme_has_the_figures_of_the_benchmarks() -> None:
    """Its first table rounds docs/benchmarks.md and docs/semantic-measurements.md."""
    rows = {tuple(row[:2]): row for row in _cells(TEXTS["docs/benchmarks.md"], "### Figures")}
    shown = [row[1:] for row in _cells(README, "# Sameway")]
    for place, scenario in enumerate(("miss", "hit-memory")):
        ours, theirs = (float(rows[scenario, system][5]) for system in ("Sameway", "LiteLLM 1.106.2"))
        assert shown[place] == [f"{ours:.2f} ms", f"LiteLLM: {theirs:.1f} ms, {theirs / ours:.0f} times as much"]
    assert shown[2] == [f"{rows['miss', 'Sameway'][7]} MB", f"LiteLLM: {rows['miss', 'LiteLLM 1.106.2'][7]} MB"]
    (numbers,) = [
        row for row in _cells(TEXTS["docs/semantic-measurements.md"], "## Labelled sets") if "word problems" in row[0]
    ]
    assert shown[3] == [f"{numbers[2].split(', ')[1][:3]}%", f"cosine over 0.9: {numbers[4].split(', ')[1]}%"]


# -- samples --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, text in TEXTS.items() if _fences(text, "yaml")])
def test_sample_configurations_pass_the_check(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`check-config` finds nothing wrong with any configuration that a document shows."""
    for number, sample in enumerate(_fences(TEXTS[name], "yaml")):
        for variable in re.findall(r"api_key_env: ([A-Z_]+)", sample):
            monkeypatch.setenv(variable, "sk-1")
        if "webhook_url" in sample:
            monkeypatch.setenv("SAMEWAY_ALERTS_SECRET", "sk-0123456789abcdef")
        path = tmp_path / f"{number}.yaml"
        path.write_text(sample)
        assert main(["check-config", "--config", str(path)]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("name", TEXTS)
def test_sample_commands_can_run(name: str) -> None:
    """What a document calls on a command line is there: commands with their options, benches, a request's route and fields."""
    for line in "\n".join(_fences(TEXTS[name], "console")).replace("\\\n", " ").splitlines():
        match shlex.split(line.partition("$ ")[2], comments=True):
            case ["./run", "bench", bench, *_]:
                assert (ROOT / f"bench/{bench}.py").exists(), line
            case ["./run", ("serve" | "sameway") as command, *given]:
                command_parser().parse_args(
                    [command, *given] if command == "serve" else given
                )  # SystemExit where it is wrong
            case ["./run", command, *_]:
                assert f"\n  {command}) " in (ROOT / "run").read_text(), line
            case ["curl", url, *options]:
                path = re.sub(r"^\$BASE_URL", "/v1", url.partition("?")[0]).removeprefix("$HOST").removeprefix("$ROOT")
                operation = _openapi()["paths"][path]["post" if "-d" in options else "get"]
                if "-d" in options:
                    body = operation["requestBody"]["content"]["application/json"]["schema"]
                    schema = (
                        _openapi()["components"]["schemas"][body["$ref"].rpartition("/")[2]] if "$ref" in body else body
                    )
                    assert json.loads(options[options.index("-d") + 1]).keys() <= schema["properties"].keys(), line
                else:
                    asked = {one["name"] for one in operation["parameters"]}
                    assert parse_qs(url.partition("?")[2]).keys() <= asked, line


@pytest.mark.parametrize("name", TEXTS)
def test_names_exist(name: str) -> None:
    """A metric, a section's setting, and a path of the API, wherever a text names one, is one that there is."""
    metrics = {one.name for one in DEFINITIONS}
    shown = {re.sub(r"_(bucket|sum|count)$", "", one) for one in re.findall(r"\bsameway_[a-z_]+[a-z]\b", TEXTS[name])}
    assert shown <= metrics
    types = {name: (one.annotation, *get_args(one.annotation)) for name, one in Settings.model_fields.items()}
    known = {name: section for name, found in types.items() for section in SECTIONS if section in found}
    known["price"] = PriceSettings
    for section, field in re.findall(rf"`({'|'.join(known)})\.(?:[A-Z]+\.)?([a-z]\w+)(?:: [^`]*)?`", TEXTS[name]):
        assert field in known[section].model_fields, f"{section}.{field}"
    served = {re.sub(r"\{\w+\}", "{}", path) for path in _openapi()["paths"]} | {"/v1", "/admin/api"}
    for path in re.findall(
        r"`(?:[A-Z]+ )?(/(?:v1|admin/api|healthz|metrics|readyz|tokenize)[^`\s.?]*)[`?]", TEXTS[name]
    ):
        assert re.sub(r"\{\w+\}", "{}", path.rstrip("/")) in served, path


def test_sample_programs_compile() -> None:
    """What a document shows as Python is Python, and as JSON is JSON. tests/e2e/test_local.py runs README's program."""
    for name, text in TEXTS.items():
        for sample in _fences(text, "python"):
            compile(sample, name, "exec")
        for sample in _fences(text, "json"):
            json.loads(sample)


# -- form -----------------------------------------------------------------------------------------------------------------


def _anchors(text: str) -> set[str]:
    """The anchors of headings as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", TEXTS)
def test_links_resolve(name: str) -> None:
    """Each link to a file of this repository has its file, and its heading."""
    folder = (ROOT / name).parent
    for target in re.findall(r"\]\((?!https?://)([^)\s]+)\)", TEXTS[name]):
        path, _, anchor = target.partition("#")
        file = (folder / path).resolve() if path else ROOT / name
        assert file.exists(), f"{name}: {target}"
        assert not anchor or anchor in _anchors(file.read_text()), f"{name}: {target}"


@pytest.mark.parametrize("name", TEXTS)
def test_paths_exist(name: str) -> None:
    """Each file that a document names is there, and so is each test in it."""
    folders = "gateway|cache|policies|local_engine|ipc|tests|bench|deploy|docs"
    for path, test in re.findall(rf"`((?:{folders})/[\w./-]+)(?:::(\w+))?`", TEXTS[name]):
        assert (ROOT / path).exists(), f"{name}: {path}"
        assert not test or f"def {test}(" in (ROOT / path).read_text(), f"{name}: {path}::{test}"


@pytest.mark.parametrize("name", TEXTS)
def test_prose_is_narrow_and_plain(name: str) -> None:
    """100 columns but for tables; none of the words of an older voice. Lists from the code have the code's words."""
    wide = [line for line in TEXTS[name].splitlines() if len(line) > _COLUMNS_MAX and not line.startswith("|")]
    assert wide == []
    assert _OLD_VOICE.findall(without_generated(TEXTS[name])) == []


def test_the_newest_release_is_the_version() -> None:
    """The first heading of the changelog, the installed package and the running gateway name one version."""
    package = importlib.metadata.version("sameway")
    (newest, *_) = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest == package == VERSION


def test_readme_is_short() -> None:
    """It is a first page; docs/ has the rest."""
    assert len(README.splitlines()) <= _README_LINES_MAX


def test_each_generated_row_says_what_it_is_for() -> None:
    """No row of a generated table ends in an empty cell (its purpose, its meaning), but a section's, which has a table."""
    rows = [row for part in generated().values() for row in part.splitlines() if "| see below |" not in row]
    assert rows
    assert [row for row in rows if not row.rpartition(" | ")[2].strip("| ")] == []
