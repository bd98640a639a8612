"""What is not installed is named where it is needed, in one line."""

from __future__ import annotations

import ast
import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest

from gateway.cli import main
from gateway.config_file import load_settings, with_models
from gateway.extras import EXTRAS, lacks
from gateway.settings import SettingsError

ROOT = Path(__file__).parents[1]
SERVER = {"backend": "openai", "base_url": "http://h/v1", "model": "gpt-4o"}
LITELLM = {"backend": "litellm", "model": "gemini/gemini-2.5-flash"}


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Makes extras of the package look as if they were not installed."""

    def forget(*extras: str) -> None:
        for extra in extras:
            monkeypatch.setitem(EXTRAS, extra, ("no_such_module_at_all",))
        lacks.cache_clear()

    yield forget
    monkeypatch.undo()
    lacks.cache_clear()


def file_of(tmp_path: Path, *deployments: Any, **more: Any) -> Path:
    path = tmp_path / "sameway.yaml"
    path.write_text(json.dumps({"models": {"m": {"deployments": list(deployments)}}, **more}))
    return path


def test_every_extra_is_one_of_the_package() -> None:
    """And `all` has each of them."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (everything,) = extras["all"]
    assert EXTRAS.keys() <= set(everything.removeprefix("sameway[").removesuffix("]").split(",")) <= extras.keys()


def test_the_demo_imports_what_a_served_checkout_installs() -> None:
    """By name, not through another package: `./run test` installs more than `./run demo` does."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["semantic"], *extras["engine"], "openai"]
    installed = {re.split(r"[^a-z0-9-]", one.lower())[0] for one in wanted}
    run = (ROOT / "run").read_text()
    assert 'extras="semantic,engine";' in run
    assert '-e ".[$extras]" openai' in run
    imported = set()
    for node in ast.walk(ast.parse((ROOT / "deploy/demo.py").read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            imported |= {name.split(".")[0] for name in names} - sys.stdlib_module_names
    assert {"openai", "yaml"} <= imported
    packages = {name: {one.lower() for one in found} for name, found in packages_distributions().items()}
    assert {name for name in imported if not packages.get(name, set()) & installed} == set()


@pytest.mark.parametrize(
    ("extra", "deployment", "more", "line"),
    [
        ("litellm", LITELLM, {}, "models.m.deployments.0.backend: install `sameway[litellm]`"),
        ("engine", {"backend": "local", "engine": "default"}, {}, "engines.default: install `sameway[engine]`"),
        ("semantic", SERVER, {"cache": {"is_semantic": True}}, "cache.is_semantic: install `sameway[semantic]`"),
        ("semantic", SERVER, {"embedding_alias": "e"}, "embedding_alias: install `sameway[semantic]`"),
        ("s3", SERVER, {"batches": {"files_url": "s3://b/p"}}, "install `sameway[s3]`"),
        ("parquet", SERVER, {"ledger": {"files_url": "file:///f"}}, "install `sameway[parquet]`"),
    ],
)
def test_a_setting_that_needs_a_missing_extra_is_refused(
    without: Callable[..., None], tmp_path: Path, extra: str, deployment: Any, more: Any, line: str
) -> None:
    """At check-config and at the start, by the setting's name and the extra's; with the extra it is good."""
    path = file_of(tmp_path, deployment, **more)
    load_settings(path, {})
    without(extra)
    with pytest.raises(SettingsError) as refused:
        load_settings(path, {})
    assert [shown for shown in str(refused.value).splitlines() if line in shown] == str(refused.value).splitlines()


def test_without_the_semantic_extra_the_defaults_need_no_worker(
    without: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exact cache alone, said once; no embedder is served, and no cache worker started."""
    path = file_of(tmp_path, SERVER)
    assert load_settings(path, {}).needs_cache_worker
    without("semantic")
    settings = load_settings(path, {})
    assert (settings.needs_cache_worker, settings.cache.is_semantic, settings.names) == (False, False, ["m"])
    assert main(["check-config", "--config", str(path), "--data-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().err.count("install `sameway[semantic]`") == 1


def test_a_model_of_the_database_needs_its_extra(without: Callable[..., None], tmp_path: Path) -> None:
    """One that this installation cannot run is refused, as the file's would be."""
    settings = load_settings(file_of(tmp_path, SERVER), {})
    kept = {"other": {"deployments": [{"backend": "litellm", "model": "bedrock/m"}]}}
    assert with_models(settings, kept).names[:2] == ["other", "m"]
    without("litellm")
    with pytest.raises(SettingsError, match=r"models\.other\..*install `sameway\[litellm\]`"):
        with_models(settings, kept)


def test_a_restore_needs_no_extra(
    without: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It starts no engine; what ends it is its file, by name."""
    without(*EXTRAS)
    archive = tmp_path / "none.zip"
    assert main(["restore", str(archive), "--data-dir", str(tmp_path / "new")]) == 1
    assert capsys.readouterr().err == f"sameway: {archive}: No such file or directory\n"


def test_a_file_that_cannot_be_read_is_all_that_is_told(without: Callable[..., None], tmp_path: Path) -> None:
    """Not what the models lack that are there without a file."""
    without(*EXTRAS)
    with pytest.raises(SettingsError, match=r"\A\S+: no such file\Z"):
        load_settings(tmp_path / "none.yaml", {})
    with pytest.raises(SettingsError, match="for the packaged model, or name models of servers in a file"):
        load_settings(None, {})


def test_what_no_deployment_needs_may_be_missing(without: Callable[..., None], tmp_path: Path) -> None:
    """The engines of the file are not started where no deployment names them."""
    without(*EXTRAS)
    assert load_settings(file_of(tmp_path, SERVER), {}).models
