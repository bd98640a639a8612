"""What is shipped to run Sameway in containers: it is consistent with itself and with what the gateway really exports and reads.

No container is started here; where docker-compose or promtool is installed, they judge too.
"""

from __future__ import annotations

import configparser
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.cli import command_parser, main
from gateway.config_file import load_settings
from gateway.deployments.alias import ABSENCES
from gateway.telemetry.metric_names import DEFINITIONS, MetricKind

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
_GIVEN = "given-0123456789"


def test_every_service_is_there_and_the_gateway_comes_in_two_flavours() -> None:
    """Redis, Postgres, Prometheus and Grafana run with either profile; a profile starts exactly one gateway."""
    always = {name for name, service in SERVICES.items() if "profiles" not in service}
    assert always == {"redis", "postgres", "prometheus", "grafana"}
    for profile, flavour in (("cpu", "cpu"), ("gpu", "gpu")):
        (gateway,) = [service for service in SERVICES.values() if profile in service.get("profiles", ())]
        assert gateway["build"]["args"]["FLAVOR"] == flavour
        assert "sameway" in gateway["networks"]["default"]["aliases"]
    (device,) = SERVICES["gateway-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    assert "deploy" not in SERVICES["gateway"]


def test_every_mounted_file_and_volume_exists() -> None:
    """A bind mount of a missing file would become an empty folder; a volume must be declared."""
    for name, service in SERVICES.items():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (ROOT / source).exists(), (name, source)
                assert volume.endswith(":ro"), (name, volume)
            else:
                assert source in COMPOSE["volumes"], (name, source)


def test_only_the_gateway_can_be_opened_to_the_network() -> None:
    """Every published port is bound to this machine, and the gateway's by default."""
    published = [port for service in SERVICES.values() for port in service.get("ports", ())]
    assert published
    for port in published:
        assert port.startswith(("127.0.0.1:", "${SAMEWAY_BIND:-127.0.0.1}:")), port
    assert not any("ports" in SERVICES[name] for name in ("redis", "postgres"))


def test_redis_keeps_money() -> None:
    """Append-only, and never evicting: what Redis holds is not a cache alone."""
    command = SERVICES["redis"]["command"]
    options = dict(zip(command[1::2], command[2::2], strict=True))
    assert (options["--appendonly"], options["--maxmemory-policy"]) == ("yes", "noeviction")


def test_the_environment_is_what_the_gateway_reads(tmp_path: Path) -> None:
    """Each SAMEWAY_ variable is a setting, the mounted configuration loads with them, and example.env lists every name used."""
    text = (ROOT / "docker-compose.yml").read_text()
    used = set(re.findall(r"\$\{(\w+)", text))
    offered = set(re.findall(r"^(\w+)=", (DEPLOY / "example.env").read_text(), re.M))
    assert used == offered
    environ = {name: str(value) for name, value in SERVICES["gateway"]["environment"].items()}
    environ = {name: "" if value.startswith("${") else value.replace("${", "$") for name, value in environ.items()}
    config = environ.pop("SAMEWAY_CONFIG")
    (mounted,) = [v.split(":")[0] for v in SERVICES["gateway"]["volumes"] if v.split(":")[1] == config]
    for name in environ:
        if name.startswith("SAMEWAY_"):
            with_it = load_settings(ROOT / mounted, {name: _GIVEN}) if environ[name] == "" else None
            assert with_it is None or getattr(with_it, name.removeprefix("SAMEWAY_").lower()) == _GIVEN
    settings = load_settings(ROOT / mounted, environ)
    assert settings.redis_url == "redis://redis:6379/0"
    assert settings.sql_url.startswith("postgresql://sameway:")
    grace_s = int(SERVICES["gateway"]["stop_grace_period"].removesuffix("s"))
    assert grace_s > settings.shutdown_grace_s


def test_the_commented_configuration_is_one_that_loads(tmp_path: Path) -> None:
    """Taking the comment signs away from deploy/sameway.yaml's example leaves a configuration without a mistake."""
    text = (DEPLOY / "sameway.yaml").read_text()
    start = text.index("# models:")
    path = tmp_path / "sameway.yaml"
    path.write_text(text[:start] + re.sub(r"^# ?", "", text[start:], flags=re.M))
    settings = load_settings(path, {})
    assert [one.backend for one in settings.models["fast"].deployments] == ["local", "openai"]


def test_the_image_runs_as_nobody_and_says_how_it_is() -> None:
    """Not root, with a health check, for each flavour, out of files that exist and that the build is sent."""
    text = (DEPLOY / "Dockerfile").read_text()
    final = text[text.rindex("\nFROM ") :]
    user = re.search(r"^USER (\w+)$", final, re.M)
    assert user is not None
    assert user.group(1) not in ("root", "0")
    assert "HEALTHCHECK" in final
    assert "/healthz" in final
    sent = {line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")}
    sources = [word for line in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.M) for word in line.split()]
    assert {"pyproject.toml", "deploy/sameway_build.py", "gateway", "cache", "policies", "local_engine", "ipc"} <= set(
        sources
    )
    for source in sources:
        assert (ROOT / source).exists(), source
        assert {source, source.partition("/")[0]} & sent, f"{source} is not sent to the build"
    extras = set(re.findall(r"--extra (\w+)", text))
    assert extras == {"semantic", "engine", "gpu"}
    for extra in extras:
        assert re.search(rf"^{extra} = \[", (ROOT / "pyproject.toml").read_text(), re.M), extra
    for flavour in ("gateway", "cpu", "gpu"):
        assert re.search(rf'case "\${{FLAVOR}}" in.* {flavour}\)', text), flavour


def test_an_engine_can_compile_its_kernels_in_the_image() -> None:
    """With a compiler of its own, and where its user may write."""
    text = (DEPLOY / "Dockerfile").read_text()
    final = text[text.rindex("\nFROM ") :]
    assert re.search(r"apt-get install .*\bg\+\+", final)
    assert "install -d -o sameway -g sameway /opt/sameway/lib/sameway" in final
    assert json.loads(re.findall(r"^ENTRYPOINT (.+)$", final, re.M)[0]) == ["sameway"]


def test_grafana_finds_its_datasource_and_its_dashboard() -> None:
    """What is provisioned points at what is mounted, and every panel at the datasource that is provisioned."""
    (source,) = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"]
    (provider,) = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/sameway.yml").read_text())["providers"]
    mounts = {v.split(":")[1] for v in SERVICES["grafana"]["volumes"]}
    assert provider["options"]["path"] in mounts
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (DEPLOY / "grafana/dashboards" / Path(home).name).exists()
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids)) >= 15
    for panel in DASHBOARD["panels"]:
        assert {target["datasource"]["uid"] for target in panel["targets"]} == {source["uid"]}
    (job,) = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    assert target.split(":")[0] in SERVICES["gateway"]["networks"]["default"]["aliases"]


def test_prometheus_has_the_gateways_key() -> None:
    """The file that Prometheus reads is the variable that the gateway reads, and both need it."""
    (job,) = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())["scrape_configs"]
    folder, name = job["authorization"]["credentials_file"].rsplit("/", 1)
    assert folder == "/run/secrets"
    assert name in SERVICES["prometheus"]["secrets"]
    variable = COMPOSE["secrets"][name]["environment"]
    assert f"${{{variable}:?" in SERVICES["gateway"]["environment"]["SAMEWAY_METRICS_KEY"]
    assert load_settings(None, {variable: _GIVEN}).metrics_key == _GIVEN


def test_no_two_panels_overlap() -> None:
    """Every panel has its own place on Grafana's grid of 24 columns."""
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana/dashboards/sameway.json").read_text())
ALERTS: list[dict[str, Any]] = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())["groups"][0]["rules"]


def _expressions() -> Iterator[str]:
    for panel in DASHBOARD["panels"]:
        yield from (target["expr"] for target in panel["targets"])
    yield from (variable["definition"] for variable in DASHBOARD["templating"]["list"])
    yield from (alert["expr"] for alert in ALERTS)


def _exported() -> dict[str, set[str]]:
    """Every name a scrape can hold, with its labels."""
    names: dict[str, set[str]] = {}
    for one in DEFINITIONS:
        if one.kind is MetricKind.HISTOGRAM:
            names[f"{one.name}_bucket"] = {*one.labels, "le"}
            names[f"{one.name}_sum"] = names[f"{one.name}_count"] = set(one.labels)
        else:
            names[one.name] = set(one.labels)
    return names


@pytest.mark.parametrize("expression", sorted(set(_expressions())))
def test_every_metric_and_label_in_use_is_exported(expression: str) -> None:
    """Dashboards and alerts name metrics that exist, select by labels these have, and group by labels some metric has."""
    exported = _exported()
    names = re.findall(
        r"\b((?:sameway|gen_ai)_\w+)\b(?!\s*(?:=|!))", re.sub(r'"[^"]*"|\bby \([^)]*\)|\{\{', "", expression)
    )
    named = [name for name in names if name in exported]
    unknown = [
        name for name in names if name not in exported and not any(name in labels for labels in exported.values())
    ]
    assert unknown == []
    assert named or expression == 'up{job="sameway"} == 0'
    for name, selector in re.findall(r"(\w+)\{([^{}]*)\}", expression):
        if name != "up":
            assert set(re.findall(r"(\w+)\s*[=!]", re.sub(r'"[^"]*"', '""', selector))) <= exported[name], name
    for group in re.findall(r"\bby \(([^)]*)\)", expression):
        for label in re.split(r"\s*,\s*", group):
            assert label == "instance" or any(label in exported[name] for name in named), label


def test_every_alert_says_what_happened_and_how_bad_it_is() -> None:
    """A name, a time it must hold, page or ticket, and words for whoever is woken up; few of them page."""
    for alert in ALERTS:
        assert re.fullmatch(r"Sameway[A-Z]\w+", alert["alert"])
        assert re.fullmatch(r"\d+m", alert["for"])
        assert alert["labels"]["severity"] in ("page", "ticket")
        assert {"summary", "description"} <= set(alert["annotations"])
    assert sum(alert["labels"]["severity"] == "page" for alert in ALERTS) <= 5


def test_a_model_that_cannot_be_answered_pages_within_minutes() -> None:
    """By model and cause, for each cause but an operator's own; the rule's rest is Prometheus' (see below)."""
    (rule,) = [alert for alert in ALERTS if alert["alert"] == "SamewayModelUnanswered"]
    assert rule["expr"] == 'max by (model, cause) (sameway_model_unavailable{cause!="disabled"}) == 1'
    assert (rule["for"], rule["labels"]["severity"]) == ("2m", "page")
    assert set(ABSENCES) == {"denied", "failed", "not_ready", "disabled"}


# series of a scrape every minute, and what must fire at that minute: rule, labels
_SCENES: dict[str, tuple[dict[str, str], list[tuple[str, str, dict[str, str]]]]] = {
    "a refused key pages for its model within minutes": (
        {
            'sameway_model_unavailable{instance="a",model="gpt",cause="denied"}': "0 1x20",
            'sameway_model_unavailable{instance="a",model="gpt",cause="failed"}': "0x21",
            'sameway_model_unavailable{instance="a",model="other",cause="denied"}': "0x21",
            'sameway_deployment_available{instance="a",deployment="d"}': "1 0x20",
        },
        [
            ("3m", "SamewayModelUnanswered", {"model": "gpt", "cause": "denied", "severity": "page"}),
            ("18m", "SamewayDeploymentAway", {"deployment": "d", "severity": "ticket"}),
        ],
    ),
    "what an operator took out of use pages nobody": (
        {'sameway_model_unavailable{instance="a",model="gpt",cause="disabled"}': "1x20"},
        [("10m", "SamewayModelUnanswered", {})],
    ),
    "a deployment that was never asked pages nobody": (
        {'sameway_model_unavailable{instance="a",model="gpt",cause="failed"}': "0x20"},
        [("18m", "SamewayModelUnanswered", {}), ("18m", "SamewayDeploymentAway", {})],
    ),
    "requests that are refused with a 424 are failures": (
        {
            'sameway_requests_total{status="424"}': "0+60x20",
            'sameway_requests_total{status="200"}': "0+600x20",
        },
        [("12m", "SamewayRequestsFail", {"severity": "page"})],
    ),
}


@pytest.mark.parametrize("scene", _SCENES)
def test_prometheus_fires(tmp_path: Path, scene: str) -> None:
    """Where promtool is installed it plays scrapes to the rules."""
    promtool = _tool("promtool")
    if promtool is None:
        pytest.skip("no promtool; the rules' metrics and labels are checked above")
    series, fires = _SCENES[scene]
    texts = {alert["alert"]: alert["annotations"] for alert in ALERTS}

    def expected(rule: str, labels: dict[str, str]) -> list[dict[str, Any]]:
        if not labels:
            return []
        words = {
            name: re.sub(r"{{ \$labels\.(\w+) }}", lambda found: labels[found[1]], text)
            for name, text in texts[rule].items()
        }
        shown = {name: re.sub(r"{{ \$value \| humanizePercentage }}", "9.091%", text) for name, text in words.items()}
        return [{"exp_labels": labels, "exp_annotations": shown}]

    plan = {
        "rule_files": [str(DEPLOY / "prometheus/alerts.yml")],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": name, "values": values} for name, values in series.items()],
                "alert_rule_test": [
                    {"eval_time": at, "alertname": rule, "exp_alerts": expected(rule, labels)}
                    for at, rule, labels in fires
                ],
            }
        ],
    }
    (tmp_path / "plan.yml").write_text(yaml.safe_dump(plan))
    done = subprocess.run(
        [promtool, "test", "rules", str(tmp_path / "plan.yml")], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _tool(*names: str) -> str | None:
    return next(filter(None, map(shutil.which, names)), None)


def test_docker_compose_accepts_it(tmp_path: Path) -> None:
    """Where docker-compose is installed it reads the file with the example's environment, for each profile."""
    compose = _tool("docker-compose")
    command = [compose] if compose else ["docker", "compose"]
    if compose is None and (
        _tool("docker") is None or subprocess.run(["docker", "compose", "version"], capture_output=True).returncode
    ):
        pytest.skip("no docker-compose; the structure is checked above")
    environment = tmp_path / "env"
    lines = (DEPLOY / "example.env").read_text()
    environment.write_text(
        re.sub(r"^(POSTGRES_PASSWORD|GRAFANA_PASSWORD|SAMEWAY_METRICS_KEY)=$", r"\1=secret", lines, flags=re.M)
    )
    for profile in ("cpu", "gpu"):
        done = subprocess.run(
            [*command, "--env-file", str(environment), "--profile", profile, "config", "-q"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
    nothing = tmp_path / "nothing"
    nothing.touch()
    bare = subprocess.run(
        [*command, "--env-file", str(nothing), "config", "-q"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert bare.returncode != 0
    assert "example.env" in bare.stderr


def test_the_unit_of_systemd_starts_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its command parses, its variables are settings, its limit on open files and on the end suffice."""
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DEPLOY / "sameway.service")
    service = unit["Service"]
    program, *arguments = service["ExecStart"].split()
    assert program.endswith("/bin/sameway")
    assert command_parser().parse_args(arguments).config == Path("/etc/sameway/sameway.yaml")
    variables = dict(one.split("=", 1) for one in service["Environment"].split())
    for name in [name for name in os.environ if name.startswith("SAMEWAY_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SAMEWAY_DATA_DIR", variables["SAMEWAY_DATA_DIR"])
    settings = load_settings(None)
    assert settings.data_dir == Path("/var/lib") / service["StateDirectory"]
    assert settings.shutdown_grace_s < int(service["TimeoutStopSec"])
    assert int(service["LimitNOFILE"]) >= 65_536


def test_a_shell_completes_the_commands(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """In bash `sameway re` offers what begins so, and `sameway backup --da` its option."""
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "sameway"
    script.write_text(capsys.readouterr().out)
    (function,) = re.findall(r"complete -o \w+ -F (\w+) sameway", script.read_text())
    ask = f"source {script}; COMP_WORDS=($WORDS); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); {function}; echo ${{COMPREPLY[@]}}"

    def offered(words: str) -> set[str]:
        done = subprocess.run(
            ["bash", "-c", ask], env={**os.environ, "WORDS": words}, capture_output=True, text=True, check=True
        )
        return set(done.stdout.split())

    assert offered("sameway re") >= {"reconcile", "restore"}
    assert offered("sameway backup --da") == {"--data-dir"}
