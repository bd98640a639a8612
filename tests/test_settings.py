"""A wrong configuration stops the start with the setting's name, what was found and what was expected."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.config_file import check_settings, load_settings
from gateway.settings import SECRETS, Settings, SettingsError

LOCAL = "{backend: local, engine: default}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("prot: 80", ["prot: found, but there is no such setting; did you mean port?"]),
        ("port: eighty", ["port: found 'eighty', expected integer\n"]),
        ("port: 70000", ["port: found 70000, expected less than or equal to 65535"]),
        ("cache: {ttl: 5}", ["cache.ttl: found, but there is no such setting; did you mean ttl_s?"]),
        ("workers: 0\nport: -1", ["workers: found 0", "port: found -1"]),
        ("models: {a: {}}", ["models.a.deployments: not found"]),
        ("models: {a: {deployments: []}}", ["models.a.deployments: found [], expected at least 1\n"]),
        ("models: {a: {deployments: [{backend: openai}]}}", ["needs `base_url` and `model`"]),
        (
            "models: {a: {deployments: [{backend: magic}]}}",
            ["models.a.deployments.0.backend: found 'magic', expected 'local'"],
        ),
        ("models: {a: {deployments: [{backend: local, engine: x}]}}", ["found 'x', expected one of ['default']"]),
        (f"models: {{a: {{deployments: [{LOCAL}, {LOCAL}]}}}}", ["used twice"]),
        (
            "models: {a: {deployments: [{backend: local, engine: default, allow_fields: [prority, other_tools, googleSearch, foo]}]}}",
            ["allow_fields: found 'prority'", "did you mean priority?", "found 'foo'", "`other_tools` allows"],
        ),
        (
            "models: {a: {deployments: [{backend: litellm, model: hosted_vllm/m, is_salted: true}]}}",
            ["is_salted: only an openai deployment can send `cache_salt`"],
        ),
        ("admin_key: secret", ["admin_key: found in the file, expected in the environment as SAMEWAY_ADMIN_KEY"]),
        ("admin_key: secret\nport: -1", ["admin_key: found in the file", "port: found -1"]),
        ("port: 1\nhost: x\nport: 2", ["port: found in line 1 and again in line 3, expected once"]),
        (
            "cache:\n  ttl_s: 1\n  ttl_s: 1\nworkers: 0",
            ["ttl_s: found in line 2 and again in line 3", "workers: found 0"],
        ),
        (
            "models: {a: {deployments: [{backend: openai, base_url: x}]}}",
            ["needs `base_url` and", "base_url: found 'x'"],
        ),
        (
            f"cache: {{judge_model: x}}\nmodels: {{a: {{deployments: [{LOCAL}, {LOCAL}]}}}}",
            ["cache.judge_model: found 'x'", "models.a.deployments.1.name: 'a@default' is used twice"],
        ),
        ("redis_url: http://x", ["redis_url: found 'http', expected a URL that begins with one of redis://"]),
        ("database_url: mysql://u:pw@x/y", ["database_url: found 'mysql', expected"]),
        (
            "models: {a: {deployments: [{backend: openai, model: m, base_url: api.openai.com}]}}",
            ["base_url: found 'api.openai.com', expected http"],
        ),
        ("- a\n- b", ["found a list, expected settings by name"]),
        ("a: [", ["not YAML: line 1, column "]),
        (
            "models: {a: {deployments: [{backend: openai, base_url: 'http://x/v1', model: m, api_key: sk-1}]}}",
            ["deployments.0.api_key: found, but there is no such setting; did you mean api_key_env?"],
        ),
        (
            "engines: {default: {device: tpu}}",
            ["engines.default.device: found 'tpu', expected 'auto', 'cpu' or 'cuda'"],
        ),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, expected: list[str]) -> None:
    """Each wrong setting has a line of its own."""
    path = tmp_path / "sameway.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError) as told:
        load_settings(path, {})
    for part in expected:
        assert part in f"{told.value}\n"


def test_a_misspelt_variable_is_named_by_check_config() -> None:
    """Nearly a setting's name and nobody's; what others put there (Kubernetes, clients) is left alone."""
    others = {"SAMEWAY_SERVICE_HOST": "x", "SAMEWAY_BASE_URL": "x", "SAMEWAY_CONFIG": "x", "SAMEWAY_NATIVE": "0"}
    assert check_settings(None, others) == load_settings(None, others)
    with pytest.raises(SettingsError, match=r"SAMEWAY_REDIS_URI: found .* did you mean SAMEWAY_REDIS_URL"):
        check_settings(None, {**others, "SAMEWAY_REDIS_URI": "redis://there"})


def test_environment_and_flags_override_the_file(tmp_path: Path) -> None:
    """The file, then the environment, then the command line."""
    path = tmp_path / "sameway.yaml"
    path.write_text("port: 1\nhost: 0.0.0.0\nworkers: 3")
    settings = load_settings(path, {"SAMEWAY_PORT": "2", "SAMEWAY_WORKERS": "4", "SAMEWAY_HOST": ""}, workers=5)
    assert (settings.port, settings.workers, settings.host) == (2, 5, "0.0.0.0")


def test_the_default_needs_nothing() -> None:
    """Without a file there is a local model behind one alias."""
    settings = load_settings(None, {})
    assert settings == Settings()
    assert list(settings.models) == ["smollm2-135m-instruct"]


@pytest.mark.parametrize(
    ("command", "text", "status"),
    [("check-config", "port: 1", 0), ("check-config", "prot: 1", 2), ("serve", "prot: 1", 2)],
)
def test_the_command_line_says_so(tmp_path: Path, command: str, text: str, status: int) -> None:
    """check-config and serve refuse the same files, with status 2 and no stack trace."""
    path = tmp_path / "sameway.yaml"
    path.write_text(text)
    argv = [sys.executable, "-m", "gateway", command, "--config", str(path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == status
    assert "Traceback" not in done.stderr
    if status:
        assert "prot: found" in done.stderr


def test_all_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    """check-config names what the file must not hold beside the variable and the file that a deployment waits for."""
    path = tmp_path / "sameway.yaml"
    path.write_text(
        "secret: x\nport: 1\nport: 1\nengines: {default: {model: /not/there.gguf}}\n"
        "models: {a: {deployments: [{backend: openai, base_url: http://x/v1, model: m, api_key_env: NOT_THERE_AT_ALL}]}}"
    )
    argv = [sys.executable, "-m", "gateway", "check-config", "--config", str(path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    for part in ("secret: found in the file", "line 2 and again in line 3", "/not/there.gguf", "NOT_THERE_AT_ALL"):
        assert part in done.stderr
    load_settings(None, {}, model="/not/there.gguf")  # a start goes on: the deployment says why it can't answer


def test_a_good_configuration_is_counted() -> None:
    """check-config says how much there is, one or many."""
    argv = [sys.executable, "-m", "gateway", "check-config"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "The configuration is good: 1 model, 1 local engine.\n"


_GOOD = "sk-0123456789abcd"
_WEAK = (
    "a",
    "short",
    "fifteen-letters",
    "x" * 40,
    "abc" * 20,
    "a line's end is not \n",
    "sixteen\x00-letters",
    " " * 20,
)


@pytest.mark.parametrize("name", SECRETS)
@pytest.mark.parametrize("value", _WEAK)
def test_a_secret_that_can_be_guessed_is_refused(name: str, value: str) -> None:
    """One rule for all secrets: a line names the variable and the rule, never the value; the status is EX_CONFIG."""
    variable = f"SAMEWAY_{name.upper()}"
    for read in (load_settings, check_settings):
        with pytest.raises(SettingsError) as refusal:
            read(None, {variable: value, "SAMEWAY_PORT": "eighty"})
        lines = str(refusal.value).splitlines()
        assert [line.split(": ")[0] for line in lines] == ["port", variable]
        assert "expected at least 16 printable" in lines[1]
        assert len(value) < 6 or value not in lines[1]
        assert refusal.value.status == os.EX_CONFIG
        assert getattr(read(None, {variable: _GOOD}), name) == _GOOD


def test_only_keys_that_are_sent_must_fit_a_header() -> None:
    """`secret` may have spaces and any letters; a key with them could not be sent."""
    for value in ("one secret for every host", "ein Geheimnis für alle Rechner"):
        assert load_settings(None, {"SAMEWAY_SECRET": value}).secret == value
        for variable in ("SAMEWAY_ADMIN_KEY", "SAMEWAY_API_KEY"):
            with pytest.raises(SettingsError, match=f"{variable}: found another character, expected .* without spaces"):
                load_settings(None, {variable: value})


def test_secrets_of_any_origin_stop_the_start_once(tmp_path: Path) -> None:
    """check-config and serve name the weak variable and the weak file of the data directory, with status 78."""
    (tmp_path / "admin.key").write_text("adm\n")
    (tmp_path / "secret").write_bytes(b"\xff" * 20)
    for command in ("check-config", "serve"):
        argv = [sys.executable, "-m", "gateway", command, "--data-dir", str(tmp_path), "--port", "0"]
        for environ, named in (
            ({}, ["/secret: found another character", "/admin.key: found 3 characters"]),
            ({"SAMEWAY_ADMIN_KEY": _GOOD, "SAMEWAY_SECRET": _GOOD, "SAMEWAY_API_KEY": "sk-short"}, ["SAMEWAY_API_KEY"]),
        ):
            done = subprocess.run(
                argv, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, **environ}
            )
            assert (done.returncode, done.stdout) == (os.EX_CONFIG, ""), done.stderr
            lines = done.stderr.splitlines()
            assert all(name in line for line, name in zip(lines[1:], named, strict=True)), lines
