"""The official Python client, unchanged, against a real broker; scenarios are in ``tests/compat/python``.

Its package is called ``danube`` as ours is, so every scenario runs in a process of .venv-official.
"""

from __future__ import annotations

import ast
import asyncio
import json
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import danube
from tests import fork_server
from tests.broker_cluster import BrokerCluster
from tests.broker_process import BrokerProcess
from tests.compat.secured import CERTIFICATES, Secured, secured

SCRIPTS = Path(__file__).parent / "python"
OFFICIAL = Path(__file__).resolve().parents[2] / ".venv-official"
CLIENT = fork_server.Interpreter(
    (str(OFFICIAL / "bin/python"), "-E", "-s", "-W", "error::ResourceWarning"),
    imports=("danube", "grpc.aio"),
    kernels=False,
)
FAST = {"base_redelivery_delay_ms": 10, "max_redelivery_delay_ms": 2_000, "ack_timeout_ms": 30_000}


def scenarios(script: str) -> list[str]:
    """Names of a script's scenarios, read and not imported."""
    body = ast.parse((SCRIPTS / f"{script}.py").read_text()).body
    return [
        node.name
        for node in body
        if isinstance(node, ast.AsyncFunctionDef)
        and [argument.arg for argument in node.args.args] == ["url", "topic"]
    ]


QUIET = [(script, name) for script in ("subscriptions", "messages", "schemas") for name in scenarios(script)]


@pytest.fixture(scope="module", autouse=True)
def official_client() -> None:
    if not (OFFICIAL / ".danube-official").exists():
        failure = OFFICIAL / ".failure"
        why = failure.read_text().strip() if failure.exists() else "run scripts/official-python"
        pytest.skip(f"the official Python client is not installed: {why}")


@pytest.fixture(scope="module", params=[1, 2], ids=["1-worker", "2-workers"])
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BrokerProcess]:
    """A broker that all scenarios share which leave it in peace."""
    with BrokerProcess(tmp_path_factory.mktemp("official") / "data", workers=request.param) as process:
        yield process


class Scenario:
    """One scenario in a process of its own."""

    def __init__(
        self,
        process: BrokerProcess,
        script: str,
        name: str,
        folder: Path,
        certificates: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.output_path = folder / "scenario.output"
        scheme = "http" if certificates is None else "https"
        trusted = {} if certificates is None else {CERTIFICATES: str(certificates)}
        self.broker = process
        topic = f"/default/{script}-{name}".replace("_", "-")
        words = [str(SCRIPTS / f"{script}.py"), name, f"{scheme}://{process.grpc_address}", topic]
        with self.output_path.open("wb") as output:
            self._process = fork_server.popen(
                [*CLIENT.command, *words],
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                environment={**os.environ, **trusted, **(environment or {})},
                interpreter=CLIENT,
            )

    def wait(self, fulfil: Callable[[str], None] | None = None) -> list[str]:
        """Do what the scenario wishes until it ends; its remarks, when it held."""
        remarks = []
        process = self._process
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("the scenario has no pipes")
        for line in process.stdout:
            if line.startswith(b"#"):
                remarks.append(line.decode())
                continue
            if fulfil is None:
                raise AssertionError(f"nobody is there for the wish {line!r}")
            fulfil(json.loads(line)["wish"])
            process.stdin.write(b"{}\n")
        code = process.wait(90)
        assert code == 0, self.output_path.read_text()[-3_000:] + self.broker.output_tail(2_000)
        return remarks

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


@contextmanager
def started(
    process: BrokerProcess,
    script: str,
    name: str,
    folder: Path,
    certificates: Path | None = None,
    **more: str,
) -> Iterator[Scenario]:
    """``more`` is added to the scenario's environment."""
    scenario = Scenario(process, script, name, folder, certificates, more)
    try:
        yield scenario
    finally:
        scenario.end()


def create_topic(process: BrokerProcess, topic: str, failure: dict[str, Any] | None = None) -> None:
    async def create() -> None:
        async with danube.connect(process.address) as client:
            policy = {} if failure is None else {"failure": failure}
            await client.admin.create_topic(topic, **policy)

    asyncio.run(create())


@pytest.mark.parametrize(("script", "name"), QUIET, ids=[f"{script}-{name}" for script, name in QUIET])
def test_scenario(running: BrokerProcess, tmp_path: Path, script: str, name: str) -> None:
    topic = f"/default/{script}-{name}".replace("_", "-")
    if name == "nack":
        create_topic(running, topic, FAST)
    if name == "dead_letters":
        create_topic(running, topic + "-dead")
        letters = {"max_redelivery_count": 1, "poison": "dead_letter", "dead_letter_topic": topic + "-dead"}
        create_topic(running, topic, {**FAST, **letters})
    with started(running, script, name, tmp_path) as scenario:
        scenario.wait()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerCluster]:
    with BrokerCluster(tmp_path_factory.mktemp("cluster"), 3) as cluster:
        yield cluster


# These ask the broker whose address they were given, or expect that address in an answer.
ADDRESSED = [("messages", name) for name in ("refusals", "fields", "health")]
# This sends on the heels of a change of settings; other brokers know it some milliseconds later.
AT_ONCE = [("schemas", "enforced")]
ANYWHERE = [one for one in QUIET if one not in ADDRESSED + AT_ONCE]


@pytest.mark.parametrize(("script", "name"), ANYWHERE, ids=[f"{script}-{name}" for script, name in ANYWHERE])
def test_in_a_cluster(cluster: BrokerCluster, tmp_path: Path, script: str, name: str) -> None:
    """The same by way of a broker of three: lookups send the client to the owner, wherever that is."""
    test_scenario(cluster.brokers[0], tmp_path, script, name)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("name", scenarios("restarts"))
def test_restart(broker: Any, tmp_path: Path, name: str, workers: int) -> None:
    process: BrokerProcess = broker(workers=workers)

    def fulfil(wish: str) -> None:
        if wish == "kill worker":
            process.wait_worker_replaced(process.kill_worker(workers - 1))
        elif wish == "restart":
            process.restart()
        elif wish == "kill broker":
            process.kill()
            process.start()
        else:
            raise AssertionError(f"unknown wish {wish!r}")

    with started(process, "restarts", name, tmp_path) as scenario:
        remarks = scenario.wait(fulfil)
    print(*remarks)


def self_signed(folder: Path) -> tuple[Path, Path]:
    """A certificate of this host by its address and name, and its key."""
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    command += ["-nodes", "-keyout", str(key), "-out", str(certificate), "-days", "2"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


@pytest.fixture(scope="module")
def over_tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[BrokerProcess, Path]]:
    """A broker whose data port speaks TLS, and its certificate."""
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = self_signed(folder)
    environment = {"DANUBE_GRPC__CERT_FILE": str(certificate), "DANUBE_GRPC__KEY_FILE": str(key)}
    with BrokerProcess(folder / "data", environment=environment) as process:
        yield process, certificate


@pytest.mark.parametrize(
    ("script", "name"), [("messages", "fields"), ("messages", "large"), ("subscriptions", "shared")]
)
def test_over_tls(over_tls: tuple[BrokerProcess, Path], tmp_path: Path, script: str, name: str) -> None:
    process, certificate = over_tls
    with started(process, script, name, tmp_path, certificate) as scenario:
        scenario.wait()


# -- upstream's story: roles, bindings, three tokens, and certificates in their place -----------------


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    with secured(tmp_path_factory.mktemp("secured")) as made:
        yield made


@pytest.mark.parametrize("name", scenarios("tokens"))
def test_roles_bindings_and_credentials(story: Secured, tmp_path: Path, name: str) -> None:
    story.give(f"/default/tokens-{name}".replace("_", "-"))
    with started(story.process, "tokens", name, tmp_path, story.authority, **story.credentials()) as scenario:
        scenario.wait()


def test_every_script_has_scenarios() -> None:
    assert len(QUIET) > 15
    assert {script for script, _ in QUIET} | {"restarts", "official", "tokens"} == {
        path.stem for path in SCRIPTS.glob("*.py")
    }
