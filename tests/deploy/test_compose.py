"""The compose files: their schema, and their commands on loopback in the place of containers."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

import danube
from tests.broker_process import ROOT, die_with_parent
from tests.deploy.running import (
    Container,
    Front,
    ended,
    everything_is_reached,
    loopback_address,
    sends_and_receives,
)
from tests.s3_server import S3Server

COMPOSE = ROOT / "deploy" / "compose"
FILES = sorted(COMPOSE.glob("*.yml"))


def valid(path: Path) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("check_jsonschema", reason="needs pip install 'danube-broker[test-deploy]'")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_schema_of_compose_accepts_it(path: Path) -> None:
    done = valid(path)
    assert done.returncode == 0, done.stdout


def test_the_schema_finds_a_misspelt_key(tmp_path: Path) -> None:
    broken = tmp_path / "broken.yml"
    broken.write_text(FILES[0].read_text().replace("command:", "comand:", 1))
    assert valid(broken).returncode == 1


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_it_mounts_is_there(path: Path) -> None:
    for name, service in services(path).items():
        for volume in service.get("volumes", []):
            if volume.startswith("."):
                assert (COMPOSE / volume.partition(":")[0]).exists(), (name, volume)
        build = service.get("build")
        if build:
            assert (COMPOSE / build["context"] / build["dockerfile"]).is_file()


def test_quickstart_serves(tmp_path: Path) -> None:
    service = services(COMPOSE / "quickstart.yml")["danube"]
    hosts = {"danube": loopback_address()}
    with ended([started("danube", service, hosts, tmp_path)]) as [container]:
        container.wait_until_healthy()
        sends_and_receives(f"danube://{container.address}:6660", "hello")
        assert container.stop() == 0


@pytest.mark.slow
def test_three_brokers_and_a_store_serve(tmp_path: Path, s3_server: S3Server) -> None:
    found = services(COMPOSE / "cluster.yml")
    brokers = [name for name in found if name.startswith("danube-")]
    store = found["store"]["environment"]
    assert found["bucket"]["environment"]["AWS_SECRET_ACCESS_KEY"] == store["MINIO_ROOT_PASSWORD"]
    hosts = {name: loopback_address() for name in brokers}
    make_bucket(found["bucket"], s3_server)
    advertised = {name: found[name]["environment"]["DANUBE_SERVER__ADVERTISED"] for name in brokers}
    ports = {name: int(text.rpartition(":")[2]) for name, text in advertised.items()}
    started_ones = [started(name, found[name], hosts, tmp_path, s3_server) for name in brokers]
    with ended(started_ones) as containers, front(hosts, ports, tmp_path) as url:
        for container in containers:
            container.wait_until_healthy(ports[container.name])
        everything_is_reached(url, len(brokers))
        for name in brokers:
            sends_and_receives(f"danube://{hosts[name]}:{ports[name]}", f"hello-{name}")
        containers[0].kill()  # whichever broker the next client reaches, it finds all topics
        with danube.sync.connect(url) as client:
            for number in range(2 * len(brokers)):
                with client.producer(f"/default/front-{number}") as producer:
                    producer.send(b"after")


@contextmanager
def front(hosts: dict[str, str], ports: dict[str, int], folder: Path) -> Iterator[str]:
    """The service `danube`: its HAProxy where there is one, else a stand-in."""
    address = loopback_address()
    url = f"danube://{address}:6660"
    haproxy = shutil.which("haproxy")
    if haproxy is None:
        with Front(address, 6660, [(hosts[name], port) for name, port in ports.items()]):
            yield url
        return
    file = folder / "haproxy.cfg"
    text = here((COMPOSE / "haproxy.cfg").read_text(), hosts)
    file.write_text(text.replace("bind :", f"bind {address}:"))
    process = subprocess.Popen([haproxy, "-db", "-f", str(file)], preexec_fn=die_with_parent)
    try:
        yield url
    finally:
        process.terminate()
        process.wait(10)


def test_the_front_forwards_to_what_the_brokers_advertise() -> None:
    """HAProxy reads its file, where it is installed."""
    text = (COMPOSE / "haproxy.cfg").read_text()
    hosts = {}
    for name, service in services(COMPOSE / "cluster.yml").items():
        if name.startswith("danube-"):
            hosts[name] = loopback_address()
            for kind in ("SERVER", "GRPC"):
                assert f"server {name} {service['environment'][f'DANUBE_{kind}__ADVERTISED']}\n" in text
    haproxy = shutil.which("haproxy")
    if haproxy is None:
        pytest.skip("haproxy is not installed")
    command = [haproxy, "-c", "-f", "/dev/stdin"]
    checked = subprocess.run(command, input=here(text, hosts), capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr


def services(path: Path) -> dict[str, Any]:
    """Return the services with variables at their defaults, as `docker compose config` prints them."""
    text = re.sub(r"\$\{\w+:?-([^}]*)\}", r"\1", path.read_text())
    return dict(yaml.safe_load(text)["services"])


def started(
    name: str, service: dict[str, Any], hosts: dict[str, str], folder: Path, store: S3Server | None = None
) -> Container:
    """Start a service: its names of hosts become loopback addresses, its volume a folder."""
    environ = {key: here(str(value), hosts) for key, value in service.get("environment", {}).items()}
    if store is not None:
        environ |= {
            "DANUBE_STORAGE__ENDPOINT": environ["DANUBE_STORAGE__ENDPOINT"].replace(
                "http://store:9000", store.endpoint
            ),
            "AWS_ACCESS_KEY_ID": store.access_key,
            "AWS_SECRET_ACCESS_KEY": store.secret_key,
        }
    words = [here(word, hosts).replace("0.0.0.0", hosts[name]) for word in service["command"]]
    data = folder / name
    command = [sys.executable, "-P", "-m", "danube", *words, "--workers", "1"]
    return Container(name, hosts[name], data, command, {**environ, "DANUBE_DATA_DIR": str(data)})


def make_bucket(service: dict[str, Any], store: S3Server) -> None:
    """Run the program of the service `bucket` against the server of the tests."""
    program = service["command"][0].replace("store:9000", store.endpoint.removeprefix("http://"))
    environ = {"AWS_ACCESS_KEY_ID": store.access_key, "AWS_SECRET_ACCESS_KEY": store.secret_key}
    for _ in range(2):  # a bucket that is there already is none to fail for
        subprocess.run([sys.executable, "-c", program], check=True, env=environ, timeout=60)
    assert store.client().bucket_exists("danube")


def here(text: str, hosts: dict[str, str]) -> str:
    for name, address in hosts.items():
        text = re.sub(rf"\b{re.escape(name)}\b", address, text)
    return text


def test_grafana_asks_for_series_that_exist() -> None:
    board = json.loads((ROOT / "deploy/monitoring/grafana/dashboards/danube.json").read_text())
    asked = {
        name
        for panel in board["panels"]
        for target in panel["targets"]
        for name in re.findall(r"danube_\w+", target["expr"])
    }
    known = set(re.findall(r"`(danube_\w+)`", (ROOT / "docs/metrics.md").read_text()))
    assert asked
    assert asked <= known
