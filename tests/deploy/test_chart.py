"""The Helm chart: rendered by Helm's own library, checked against Kubernetes' schemas, its command run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.broker_process import ROOT, free_port
from tests.deploy.running import (
    Container,
    Front,
    ended,
    everything_is_reached,
    loopback_address,
    sends_and_receives,
)

helm = pytest.importorskip("helm_python", reason="needs pip install 'danube-broker[test-deploy]'")
kubernetes = pytest.importorskip(
    "kubernetes_validate", reason="needs pip install 'danube-broker[test-deploy]'"
)

CHART = ROOT / "deploy" / "helm" / "danube"
VALUES = sorted((Path(__file__).parent / "values").glob("*.yaml"))
VERSIONS = ("1.28", "1.31", "1.34", "1.37")


@pytest.fixture(scope="module")
def chart() -> Iterator[Any]:
    with helm.Chart.load(str(CHART)) as loaded:
        yield loaded


def rendered(chart: Any, values: dict[str, Any]) -> list[dict[str, Any]]:
    texts = chart.render(values, name="demo", namespace="prod")
    return [
        document
        for name, text in texts.items()
        if name.endswith(".yaml")
        for document in yaml.safe_load_all(text)
        if document
    ]


def values_of(path: Path) -> dict[str, Any]:
    return dict(yaml.safe_load(path.read_text()))


def one(documents: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    return next(document for document in documents if document["kind"] == kind)


def broker_of(documents: list[dict[str, Any]]) -> dict[str, Any]:
    (container,) = one(documents, "StatefulSet")["spec"]["template"]["spec"]["containers"]
    assert isinstance(container, dict)
    return container


def test_lint_finds_no_error() -> None:
    assert helm.lint(str(CHART))["errors"] == []


def test_there_are_eight_sets_of_values() -> None:
    assert len(VALUES) == 8


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("path", VALUES, ids=lambda path: path.stem)
def test_kubernetes_accepts_it(chart: Any, path: Path, version: str) -> None:
    documents = rendered(chart, values_of(path))
    assert {"ConfigMap", "Service", "StatefulSet"} <= {document["kind"] for document in documents}
    for document in documents:
        if document["kind"] != "ServiceMonitor":  # a custom resource of Prometheus' operator
            kubernetes.validate(document, version, strict=True)


def test_a_misspelt_probe_is_found(chart: Any) -> None:
    documents = rendered(chart, {})
    broker = broker_of(documents)
    broker["readynessProbe"] = broker.pop("readinessProbe")
    with pytest.raises(kubernetes.ValidationError):
        kubernetes.validate(one(documents, "StatefulSet"), VERSIONS[0], strict=True)


def test_what_each_set_of_values_is_for(chart: Any) -> None:
    shown = {path.stem: rendered(chart, values_of(path)) for path in VALUES}
    kinds = {name: [document["kind"] for document in documents] for name, documents in shown.items()}
    assert "NetworkPolicy" in kinds["guarded"]
    assert "NetworkPolicy" not in kinds["defaults"]
    assert "ServiceMonitor" in kinds["watched"]
    assert "PodDisruptionBudget" not in kinds["outside"]
    assert broker_of(shown["single"])["args"][0] == "start"
    assert one(shown["grown"], "StatefulSet")["spec"]["replicas"] == 5
    assert "demo-danube-3." not in broker_of(shown["grown"])["args"][0]  # the founders are three
    assert broker_of(shown["apart"])["image"] == "mirror/danube:1"


def test_from_outside_each_pod_has_a_name_of_its_own(chart: Any) -> None:
    documents = rendered(chart, values_of(Path(__file__).parent / "values" / "outside.yaml"))
    services = {one["metadata"]["name"]: one for one in documents if one["kind"] == "Service"}
    ordinals = [f"demo-danube-{number}" for number in range(3)]
    assert set(services) == {"demo-danube", "demo-danube-members", *ordinals}
    second = services["demo-danube-1"]
    assert second["spec"]["selector"]["statefulset.kubernetes.io/pod-name"] == "demo-danube-1"
    assert list(second["metadata"]["annotations"].values()) == ["broker-1.danube.example.org"]
    broker = broker_of(documents)
    assert 'host="broker-${POD_NAME##*-}.danube.example.org"' in broker["args"][0]
    assert not any(one["name"].endswith("ADVERTISED") for one in broker["env"])


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"replicas": 2}, "initialMembers is 3, but replicas is 2"),
        ({"replicas": 0}, "replicas"),
        ({"replica": 3}, "replica"),
        ({"ports": {"native": 70_000}}, "native"),
        ({"storage": {"size": "much"}}, "size"),
    ],
)
def test_values_that_cannot_be_are_refused(chart: Any, values: dict[str, Any], said: str) -> None:
    with pytest.raises(helm.HelmError, match=said):
        chart.render(values, name="demo", namespace="prod")


def test_no_data_lies_in_an_empty_directory(chart: Any) -> None:
    broker = broker_of(rendered(chart, {}))
    mounts = {mount["name"]: mount["mountPath"] for mount in broker["volumeMounts"]}
    assert mounts["data"] == "/var/lib/danube"
    assert mounts["tmp"] == "/tmp"
    assert broker["securityContext"]["readOnlyRootFilesystem"]


def test_the_command_of_one_broker_serves(chart: Any, tmp_path: Path) -> None:
    ports = {name: free_port() for name in ("native", "grpc", "admin", "metrics", "raft")}
    documents = rendered(chart, {"replicas": 1, "initialMembers": 1, "ports": ports})
    broker = broker_of(documents)
    address = loopback_address()
    words = [here(word, tmp_path, documents).replace("0.0.0.0", address) for word in broker["args"]]
    container = Container(
        "demo", address, tmp_path / "demo", ["danube", *words], environ(broker, tmp_path / "demo", "")
    )
    with ended([container]):
        container.wait_until_healthy(ports["native"])
        sends_and_receives(f"danube://{address}:{ports['native']}", "hello")
        assert container.stop() == 0


@pytest.mark.slow
@pytest.mark.parametrize("outside", [False, True], ids=["inside", "outside"])
def test_the_commands_of_three_pods_make_a_cluster(chart: Any, tmp_path: Path, outside: bool) -> None:
    """Clients know one address, the Service's, whatever pod it leads to."""
    external = {"enabled": outside, "host": "danube-%d.example.org"}
    documents = rendered(chart, {"external": external})
    broker = broker_of(documents)
    (script,) = broker["args"]
    pods = {f"demo-danube-{number}": loopback_address() for number in range(3)}
    containers: list[Container] = []
    service = loopback_address()
    with ended(containers), Front(service, 6660, [(address, 6660) for address in pods.values()]):
        for pod, address in pods.items():
            variables = environ(broker, tmp_path / pod, pod)
            # DNS of the cluster: the name of each pod is its address.
            text = here(script, tmp_path, documents).replace("0.0.0.0", address)
            text = text.replace("${POD_NAME}.demo-danube-members.prod.svc", address)
            text = text.replace("danube-${POD_NAME##*-}.example.org", address)
            named = {key: resolved(value, pods) for key, value in variables.items()}
            command = ["/bin/sh", "-euc", resolved(text, pods)]
            containers.append(Container(pod, address, tmp_path / pod, command, named))
        for container in containers:
            container.wait_until_healthy()
        everything_is_reached(f"danube://{service}:6660", 3)
        sends_and_receives(f"danube://{containers[1].address}:6660", "hello")


def here(text: str, folder: Path, documents: list[dict[str, Any]]) -> str:
    """Put the ConfigMap into a file, and name it in the place of the pod's."""
    path = folder / "danube.yml"
    path.write_text(one(documents, "ConfigMap")["data"]["danube.yml"])
    return text.replace("/etc/danube/danube.yml", str(path))


def environ(broker: dict[str, Any], data: Path, pod: str) -> dict[str, str]:
    """Return the variables of the pod, with what Kubernetes puts in for $(POD_NAME)."""
    given = {one["name"]: one.get("value", pod).replace("$(POD_NAME)", pod) for one in broker["env"]}
    return {**given, "DANUBE_DATA_DIR": str(data), "DANUBE_WORKERS": "1"}


def resolved(text: str, pods: dict[str, str]) -> str:
    return re.sub(r"(demo-danube-\d)\.demo-danube-members\.prod\.svc", lambda found: pods[found[1]], text)
