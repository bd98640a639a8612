"""A wrong configuration stops the start with the setting's name, what was found and what was expected."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from gateway.backends.keys import Keys
from gateway.cli import main
from gateway.config_file import check_settings, load_settings, notes
from gateway.settings import SECRETS, DeploymentSettings, Settings, SettingsError, keys_of

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
        ("models: {yes: 1}", ["models.1: found 1, expected a section"]),
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
        (
            "models: {a: {deployments: [{backend: litellm, model: a/m, base_url: 'http://unix:/s:/v1'}]}}",
            ["base_url: only openai and anthropic deployments reach a unix socket"],
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
            f"cache: {{verifier: x}}\nmodels: {{a: {{deployments: [{LOCAL}, {LOCAL}]}}}}",
            ["cache.verifier: found 'x'", "models.a.deployments.1.name: 'a@default' is used twice"],
        ),
        (
            f"cache: {{verifier: sml, verify: before, verify_share: 5}}\nmodels: {{small: {{deployments: [{LOCAL}]}}}}",
            ["cache.verify_share: found 5, expected"],
        ),
        (
            f"cache: {{verifier: smal}}\nmodels: {{small: {{deployments: [{LOCAL}], verifier: other}}}}",
            [
                "cache.verifier: found 'smal', expected `auto` or one of ['small']; did you mean small?",
                "models.small.verifier: found 'other', expected `auto` or one of ['small']",
            ],
        ),
        (
            f"cache: {{verify: before}}\nmodels: {{small: {{deployments: [{LOCAL}], verify: after}}}}",
            [
                "cache.verify: found 'before' without a verifier, expected `verifier` beside it, or `observe` or `off`",
                "models.small.verify: found 'after' without a verifier, expected `verifier` beside it",
            ],
        ),
        (
            "cache: {verify: sometimes}",
            ["cache.verify: found 'sometimes', expected 'before', 'after', 'observe' or 'off'"],
        ),
        ("redis_url: http://x", ["redis_url: found 'http', expected a URL that begins with one of redis://"]),
        ("database_url: mysql://u:pw@x/y", ["database_url: found 'mysql', expected"]),
        (
            "models: {a: {deployments: [{backend: openai, model: m, base_url: api.openai.com}]}}",
            ["base_url: found 'api.openai.com', expected http"],
        ),
        (
            "access: {issuer: 'https://p', client_id: a, audience: a, public_url: gateway.example}",
            [
                "audience: found the client_id, expected the API's own",
                "public_url: found 'gateway.example', expected https",
            ],
        ),
        ("- a\n- b", ["found a list, expected settings by name"]),
        ("a: [", ["not YAML: line 1, column "]),
        (
            "models: {a: {deployments: [{backend: openai, base_url: 'http://x/v1', model: m, api_key: sk-1}]}}",
            ["deployments.0.api_key: found, but there is no such setting; did you mean api_keys?"],
        ),
        (
            "engines: {default: {device: tpu}}",
            ["engines.default.device: found 'tpu', expected 'auto', 'cpu' or 'cuda'"],
        ),
        ("error_max: 0.1", ["error_max: found, but there is no such setting; did you mean error_max of cache?"]),
        ("cache: 5", ["cache: found 5, expected a section\n"]),
        ("redis_url: redis://h:99999/0", ["redis_url: found a host or port that can't be one, expected host:port"]),
        ("redis_url: 'redis+cluster://a:1,b:x'", ["redis_url: found a host or port that can't be one"]),
        ("redis_url: 'redis+sentinel://a:1,b:2'", ["redis_url: found no service, expected its name at the end"]),
        ("database_url: postgresql://u:pw@h:x/db", ["database_url: found a host or port that can't be one"]),
        ("engines: {a/b: {}}", ["engines.a/b: found 'a/b', expected a name of up to 40 letters"]),
        (
            f"models: {{a: {{deployments: [{LOCAL.replace('default', 'defualt')}]}}}}",
            ["found 'defualt', expected one of ['default']; did you mean default?"],
        ),
        *(
            (
                f"models: {{a: {{deployments: [{{backend: openai, model: m, base_url: '{url}'}}]}}}}",
                [f"base_url: found {url!r}, expected http://... or https://..."],
            )
            for url in ("localhost:8000/v1", "ftp://h/v1", "http://", "http://h:x/v1", "http://a..b/v1")
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


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:p?/#:w@h:5432/db", "postgresql://[::1]:5432/db", "postgresql:///db", "sqlite:///a/b.db",
        "redis://:pw@h:6379/0", "rediss://h", "unix:///run/redis.sock?db=1", "redis+sentinel://u:p@a:1,b:2/service/0",
        "redis+cluster://a:1", "unix://",
    ],
)  # fmt: skip
def test_good_urls_pass(url: str) -> None:
    """Any password, no port, several hosts, no host at all."""
    name = "database_url" if "sql" in url else "redis_url"
    assert getattr(load_settings(None, {f"SAMEWAY_{name.upper()}": url}), name) == url


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
    odd = Settings(data_dir=Path("/user@host/a%41?#"))
    assert odd.redis_target == "unix:///user%40host/a%2541%3F%23/run/redis.sock"
    assert list(settings.models) == ["smollm2-135m-instruct"]


def test_the_command_line_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """check-config and serve refuse the same files, with status 2 and no stack trace."""
    path = tmp_path / "sameway.yaml"
    path.write_text("port: 1")
    assert main(["check-config", "--config", str(path)]) == 0
    path.write_text("prot: 1")
    capsys.readouterr()
    assert main(["check-config", "--config", str(path)]) == 2
    argv = [sys.executable, "-m", "gateway", "serve", "--config", str(path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    for said in (done.stderr, capsys.readouterr().err):
        assert "Traceback" not in said
        assert "prot: found" in said


def test_a_file_is_utf8_whatever_the_locale(tmp_path: Path) -> None:
    """Where the locale has ASCII alone, names in other letters are read, and shown in ASCII."""
    path = tmp_path / "sameway.yaml"
    path.write_text(
        "models: {模型: {deployments: [{backend: openai, model: größe, base_url: 'http://h'}]}}", encoding="utf-8"
    )
    ascii_alone = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    argv = [sys.executable, "-m", "gateway", "check-config", "--config", str(path)]
    done = subprocess.run(argv, capture_output=True, timeout=60, check=False, env={**os.environ, **ascii_alone})
    assert done.returncode == 0
    assert b"\\u6a21\\u578b" in done.stderr


def test_all_that_is_wrong_is_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """check-config names what the file must not hold beside the variable and the file that a deployment waits for."""
    path = tmp_path / "sameway.yaml"
    path.write_text(
        "secret: x\nport: 1\nport: 1\nengines: {default: {model: /not/there.gguf}}\n"
        "models: {a: {deployments: [{backend: openai, base_url: http://x/v1, model: m, api_key_env: NOT_THERE_AT_ALL}]}}"
    )
    assert main(["check-config", "--config", str(path)]) == 2
    said = capsys.readouterr().err
    for part in ("secret: found in the file", "line 2 and again in line 3", "/not/there.gguf", "NOT_THERE_AT_ALL"):
        assert part in said
    load_settings(None, {}, model="/not/there.gguf")  # a start goes on: the deployment says why it can't answer


_MUCH_IS_WRONG = """
port: eighty
secret: x
prot: 1
redis_url: redis://h:99999/0
cache: {ttl: 5}
engines: {gpu: {device: tpu}}
models:
  assistant:
    deployments:
      - {name: p, backend: local, engine: gpuu, priority: high}
      - {name: o, backend: openia, base_url: "http://h/v1", model: m}
      - {backend: openai, engine: gpus}
  other: 5
"""


def test_all_wrong_values_are_named_in_one_round(tmp_path: Path) -> None:
    """What is wrong with a value by itself hides nothing of another; references are checked once all values are right."""
    path = tmp_path / "sameway.yaml"
    path.write_text(_MUCH_IS_WRONG)
    with pytest.raises(SettingsError) as told:
        check_settings(path, {"SAMEWAY_WORKERS": "0", "SAMEWAY_REDIS_URI": "x"})
    first = "models.assistant.deployments"
    *others, last = map(repr, get_args(DeploymentSettings.model_fields["backend"].annotation))
    backends = f"{', '.join(others)} or {last}"
    lines = [
        f"{path}: secret: found in the file",
        "port: found 'eighty', expected integer",
        "workers: found '0', expected greater",
        "prot: found, but there is no such setting; did you mean port?",
        "redis_url: found a host or port",
        "cache.ttl: found, but there is no such setting; did you mean ttl_s?",
        "engines.gpu.device: found 'tpu', expected 'auto', 'cpu' or 'cuda'",
        f"{first}.0.priority: found 'high', expected integer",
        f"{first}.1.backend: found 'openia', expected {backends}; did you mean openai?",
        f"{first}.2: an openai deployment needs `base_url` and `model`",
        "models.other: found 5, expected a section",
        "SAMEWAY_REDIS_URI: found in the environment, but there is no such setting",
    ]
    found = str(told.value).splitlines()
    assert [line for line in lines if sum(one.startswith(line) for one in found) != 1] == []
    assert [one for one in found if not one.startswith(tuple(lines))] == []


_REFERS_WRONG = """
cache: {verifier: asistant}
engines: {gpu: {}, cpu: {}}
models:
  assistant:
    deployments:
      - {name: p, backend: local, engine: gpuu}
      - {name: o, backend: openai, base_url: "http://h/v1", model: m}
      - {name: o, backend: openai, base_url: "http://h/v1", model: n}
"""


def test_all_wrong_references_are_named_in_one_round(tmp_path: Path) -> None:
    """Where each value is right by itself, every name that refers to nothing has its line."""
    path = tmp_path / "sameway.yaml"
    path.write_text(_REFERS_WRONG)
    with pytest.raises(SettingsError) as told:
        check_settings(path, {})
    first = "models.assistant.deployments"
    assert str(told.value).splitlines() == [
        f"{first}.0.engine: found 'gpuu', expected one of ['cpu', 'gpu']; did you mean gpu?",
        f"{first}.2.name: 'o' is used twice; give each deployment its own `name`",
        "cache.verifier: found 'asistant', expected `auto` or one of ['assistant']; did you mean assistant?",
    ]


_VERIFIED = """
cache: {verifier: auto, verify: observe}
models:
  large:
    deployments:
      - {name: dear, backend: openai, base_url: "http://h/v1", model: m, price: {input_usd_per_mtok: 10}}
      - {name: cheap, backend: openai, base_url: "http://h/v1", model: n, price: {input_usd_per_mtok: 0.5}}
  own: {verifier: large, verify: before, deployments: [{name: o, backend: openai, base_url: "http://h/v1", model: o}]}
  deaf: {verifier: texts, deployments: [{name: d, backend: openai, base_url: "http://h/v1", model: d}]}
  unpriced: {deployments: [{name: u, backend: openai, base_url: "http://h/v1", model: u}]}
  texts:
    is_semantic: false
    deployments: [{name: t, backend: openai, base_url: "https://api.openai.com/v1", model: text-embedding-3-small}]
"""


def test_the_check_says_which_verifier_each_alias_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The cheapest deployment that can chat, with a question's cost; and where nothing can be asked."""
    path = tmp_path / "sameway.yaml"
    path.write_text(_VERIFIED)
    assert main(["check-config", "--config", str(path), "--data-dir", str(tmp_path)]) == 0
    told = capsys.readouterr()
    assert told.out.splitlines()[:3] == [
        "verifier of large: cheap, to show what would be served; nothing found by meaning is; questions about $0.000400 each",
        "verifier of own: cheap, before answers that are not certain; questions about $0.000400 each",
        "verifier of unpriced: u, to show what would be served; nothing found by meaning is; questions of unknown price",
    ]
    assert (
        "note: deaf: verify is `observe`, and no deployment of its verifier 'texts' can chat: nothing is asked; name an alias "
        "that can in `verifier`" in told.err
    )


def test_the_check_says_what_a_verifier_would_bring(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where a model could be asked and no verifier is named."""
    path = tmp_path / "sameway.yaml"
    for text, is_told in ((_VERIFIED.replace("verifier: auto, verify: observe", ""), True), (_VERIFIED, False)):
        path.write_text(text if not is_told else re.sub("verifier: [a-z]+, (verify: before, )?", "", text))
        assert main(["check-config", "--config", str(path), "--data-dir", str(tmp_path)]) == 0
        told = capsys.readouterr().out
        assert ("verifier: none: rephrased questions" in told) == is_told


@pytest.mark.parametrize("place", ["api_key_env: KEY", "api_keys: [{env: KEY}]"])
@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("sk-planted-0123", "expected the name of an environment variable"),
        ("skplanted0123", "the environment variable (not shown: it may be a key) is not set"),
        ("SKPLANTED0123", "the environment variable (not shown: it may be a key) is not set"),
        ("SK_PLANTED0123456789ABCDEF", "the environment variable (not shown: it may be a key) is not set"),
    ],
)
def test_a_key_in_the_place_of_its_variable_is_not_shown(tmp_path: Path, place: str, key: str, words: str) -> None:
    """The error says what is expected there, and no word of it."""
    path = tmp_path / "sameway.yaml"
    place = place.replace("KEY", key)
    path.write_text(
        f"models: {{a: {{deployments: [{{backend: openai, base_url: 'http://h/v1', model: m, {place}}}]}}}}"
    )
    with pytest.raises(SettingsError, match=re.escape(words)) as told:
        check_settings(path, {})
    assert "planted" not in str(told.value).casefold()
    if "-" not in key:  # a start goes on, and tells operators no more
        (given,) = load_settings(path, {}).models["a"].deployments
        assert Keys(keys_of(given), {}).names == "(not shown: it may be a key)"


def test_all_that_this_host_lacks_is_named_in_one_round(tmp_path: Path) -> None:
    """Files, variables, capabilities and the data directory, with the notes on what is allowed."""
    path, unreadable = tmp_path / "sameway.yaml", tmp_path / "model.gguf"
    unreadable.touch(mode=0o000)
    is_root = os.access(unreadable, os.R_OK)
    path.write_text(
        f"cache: {{embedder: /not/there}}\nengines: {{gpu: {{model: /not/there.gguf, draft_model: {unreadable}}}}}\n"
        "models: {a: {deployments: [{backend: openai, base_url: 'http://u:pw@h:8000', model: m, api_key_env: NOT_SET_A, "
        "capabilities: [tool]}]}}"
    )
    with pytest.raises(SettingsError) as told:
        check_settings(path, {}, data_dir=path)
    first = "models.a.deployments.0"
    lines = [
        "cache.embedder: there is no /not/there",
        "engines.gpu.model: there is no /not/there.gguf",
        *([] if is_root else [f"engines.gpu.draft_model: {unreadable} can't be read"]),
        f"data_dir: {path}: expected a directory that this user can write",
        f"{first}.api_key_env: the environment variable NOT_SET_A is not set",
        f"{first}.capabilities: found 'tool', expected one of ",
        f"note: {first}.base_url: http://h:8000 has no /v1; most servers' base URL ends in /v1: did you mean http://h:8000/v1?",
    ]
    found = str(told.value).splitlines()
    assert all(given.startswith(line) for given, line in zip(found, lines, strict=True)), found


@pytest.mark.parametrize(
    "text", [None, "a: [", "\0", "- 1", "&a [*a]", "models: {1: 2}", "models: {a: {deployments: {b: 1}}}"]
)
def test_an_unusable_file_hides_nothing_of_the_environment(tmp_path: Path, text: str | None) -> None:
    """A file that is missing, or no YAML, or of another shape is named beside wrong variables."""
    path = tmp_path / "sameway.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SettingsError) as told:
        check_settings(path, {"SAMEWAY_PORT": "x", "SAMEWAY_REDIS_URI": "x"})
    found = str(told.value)
    assert "port: found 'x'" in found
    assert "SAMEWAY_REDIS_URI: found" in found
    assert len(found.splitlines()) >= 3


@pytest.mark.parametrize(
    ("price", "hint"),
    [
        ("output", "output_usd_per_mtok"),
        ("prompt", "input_usd_per_mtok"),
        ("completion_tokens", "output_usd_per_mtok"),
        ("input_cost_per_token", "input_usd_per_mtok"),
        ("cached_input", "cached_input_usd_per_mtok"),
        ("request", "request_usd"),
    ],
)
def test_other_price_lists_words_are_known(tmp_path: Path, price: str, hint: str) -> None:
    """A price under another list's name is told its name here."""
    path = tmp_path / "sameway.yaml"
    path.write_text(f"models: {{a: {{deployments: [{{backend: litellm, model: m, price: {{{price}: 2}}}}]}}}}")
    with pytest.raises(SettingsError, match=rf"price\.{price}: found, .* did you mean {hint}\?"):
        load_settings(path, {})


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("http://localhost:8000", "has no /v1; .* did you mean http://localhost:8000/v1?"),
        ("https://openrouter.ai/api/", "did you mean https://openrouter.ai/api/v1?"),
        ("http://h/v1/chat/completions", "ends in an endpoint"),
        ("http://h/v1", ""),
        ("http://unix:/run/s.sock", "did you mean http://unix:/run/s.sock:/v1?"),
        ("http://unix:/run/s.sock:/v1", ""),
        ("http://h/v1/", ""),
        ("https://generativelanguage.googleapis.com/v1beta/openai/", ""),
        ("https://x.openai.azure.com/openai/deployments/d?api-version=1", ""),
    ],
)
def test_a_base_url_without_a_version_gets_a_hint(tmp_path: Path, url: str, hint: str) -> None:
    """It may be right, so it is a note; none where the path has a version."""
    path = tmp_path / "sameway.yaml"
    path.write_text(f"models: {{a: {{deployments: [{{backend: openai, model: m, base_url: '{url}'}}]}}}}")
    found = notes(check_settings(path, {}))
    assert bool(found) == bool(hint)
    assert all(re.search(hint, note) for note in found)


def test_a_good_configuration_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """check-config says how much there is, one or many."""
    assert main(["check-config"]) == 0
    assert capsys.readouterr().out == "The configuration is good: 1 model, 1 local engine.\n"


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


@pytest.mark.parametrize("name", sorted({*SECRETS} - {"access_secret"}))
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


def test_the_provider_s_secret_may_be_short() -> None:
    """The provider makes it: any length is taken, what no header can carry is not, and the message says whose it is."""
    assert load_settings(None, {"SAMEWAY_ACCESS_SECRET": "short"}).access_secret == "short"
    with pytest.raises(SettingsError, match="as the provider made it") as refusal:
        load_settings(None, {"SAMEWAY_ACCESS_SECRET": "with a space"})
    assert "openssl" not in str(refusal.value)


def test_only_keys_that_are_sent_must_fit_a_header() -> None:
    """`secret` may have spaces and any letters; a key with them could not be sent."""
    for value in ("one secret for every host", "ein Geheimnis für alle Rechner"):
        assert load_settings(None, {"SAMEWAY_SECRET": value}).secret == value
        for variable in ("SAMEWAY_ADMIN_KEY", "SAMEWAY_API_KEY"):
            with pytest.raises(SettingsError, match=f"{variable}: found another character, expected .* without spaces"):
                load_settings(None, {variable: value})


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({}, ["/secret: found another character", "/admin.key: found 3 characters"]),
        ({"SAMEWAY_ADMIN_KEY": _GOOD, "SAMEWAY_SECRET": _GOOD, "SAMEWAY_API_KEY": "sk-short"}, ["SAMEWAY_API_KEY"]),
    ],
)
def test_secrets_of_any_origin_stop_the_start_once(
    environ: dict[str, str],
    named: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """check-config and serve name the weak variable and the weak file of the data directory, with status 78."""
    (tmp_path / "admin.key").write_text("adm\n")
    (tmp_path / "secret").write_bytes(b"\xff" * 20)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    arguments = ["--data-dir", str(tmp_path), "--port", "0"]
    checked = main(["check-config", *arguments])
    said = capsys.readouterr()
    argv = [sys.executable, "-m", "gateway", "serve", *arguments]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert (checked, done.returncode) == (os.EX_CONFIG, os.EX_CONFIG), done.stderr
    for out, err in ((said.out, said.err), (done.stdout, done.stderr)):
        assert out == ""
        assert all(name in line for line, name in zip(err.splitlines()[1:], named, strict=True)), err
