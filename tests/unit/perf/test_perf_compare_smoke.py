"""The comparison does not rot: everything that can run here measures once with next to nothing to do.

Danube always does; a peer, its clients and its tools where they are installed, else the reason is the skip's.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from perf.compare import places
from perf.compare.model import Client, Product, Running, Setting, Turn, Work
from perf.compare.products import products
from perf.compare.run import WORKLOADS as ALL
from tests.broker_process import ROOT, alive

pytestmark = pytest.mark.e2e

DANUBE = products(workers=2)[0]
PEERS = {
    setting.name: (product, setting)
    for product in products()[1:]
    for setting in product.settings
    if product.name != "danube-rust"
}
COUNT = 400
WORKLOADS = [name for name in ALL if name != "lone"]  # a release build takes minutes
PEER_TIMEOUT_S = 900  # servers on Java or Erlang take their time to start


def work(workload: str, number: int = 0, size: int = 100) -> Work:
    topic = "replay-100" if workload == "replay" else f"{workload}-{number}"
    count = 50 if workload == "latency" else COUNT
    return Work(workload=workload, size=size, count=count, topic=topic, stored=2 * COUNT)


def believable(turn: Turn, workload: str) -> None:
    assert turn.rate > 0
    assert turn.seconds > 0
    assert turn.records > 0
    assert (turn.p50_us is not None) == (workload == "latency")
    if turn.p50_us is not None and turn.p99_us is not None:
        assert 0 < turn.p50_us <= turn.p99_us
    if turn.spent is not None:
        assert turn.spent.server >= 0 and turn.spent.client >= 0


def named(product: Product, setting: Setting) -> dict[str, Client]:
    return {client.name: client for client in product.clients(setting)}


# --- Danube ---


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running = DANUBE.start(DANUBE.settings[1], tmp_path_factory.mktemp("compare"))
    yield running
    pids = running.pids()
    running.stop()
    assert not any(map(alive, pids))


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("name", [client.name for client in DANUBE.clients(DANUBE.settings[1])[:-1]])
def test_danube_measures_something(own: Running, name: str, workload: str) -> None:
    client = named(DANUBE, own.setting)[name]
    if reason := client.missing(own.setting, workload):
        pytest.skip(reason)
    turn = client.turn(own, work(workload))
    believable(turn, workload)
    assert turn.lost == 0


def test_danube_is_charged_with_cpu_time(own: Running) -> None:
    chosen = Work(workload="publish", size=1_024, count=40_000, topic="charged")
    turn = named(DANUBE, own.setting)["danube, batches"].turn(own, chosen)
    assert turn.spent is not None
    assert turn.spent.server > 0
    assert turn.spent.client > 0
    assert turn.records == chosen.count


def test_a_comparison_from_the_command_line_is_one_line_for_each_row(tmp_path: Path) -> None:
    result = subprocess.run(
        [
            *(sys.executable, "-m", "perf.compare", "--only", "danube fsync,danube memory", "--rounds", "0"),
            *("--workload", "publish", "--size", "100", "--scale", "0.001", "-o", "json"),
            *("--directory", str(tmp_path), "--network", "machine"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    run: dict[str, Any] = json.loads(result.stdout)
    rows = run["rows"]
    assert {line["level"] for line in rows} == {"taken", "fsync"}
    assert {line["product"] for line in rows} == {"danube"}
    for line in rows:
        assert line["workload"] == "publish"
        assert line["rate"][1] <= line["rate"][0] <= line["rate"][2]
    assert run["network"].startswith("the machine's loopback") and run["machine"]["cores"] >= 1
    assert not list(tmp_path.iterdir())


# --- peers ---


@pytest.fixture(scope="module", params=sorted(PEERS))
def peer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Product, Running]]:
    product, setting = PEERS[request.param]
    if reason := product.missing(setting):
        pytest.skip(reason)
    running = product.start(setting, tmp_path_factory.mktemp("compare"))
    yield product, running
    pids = running.pids()
    running.stop()
    assert not any(map(alive, pids))


@pytest.mark.slow
@pytest.mark.timeout(PEER_TIMEOUT_S)
@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("kind", ["python", "tool"])
def test_a_peer_measures_something(peer: tuple[Product, Running], kind: str, workload: str) -> None:
    product, running = peer
    assert product.version()
    chosen = [client for client in product.clients(running.setting) if client.kind == kind]
    reasons = [reason for client in chosen if (reason := client.missing(running.setting, workload))]
    if len(reasons) == len(chosen):
        pytest.skip("; ".join(reasons) or f"no {kind} for it")
    for number, client in enumerate(chosen):
        if not client.missing(running.setting, workload):
            believable(client.turn(running, work(workload, number)), workload)


STAND_IN = """#!{python}
import os, sys
flags = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
assert flags.pop("--mode") == "standalone"
ports = [flags.pop(name).rpartition(":")[2] for name in ("--broker-addr", "--admin-addr", "--raft-addr")]
os.environ["PYTHONPATH"] = {root!r}
os.execv(sys.executable, [sys.executable, "-m", "danube", "start", "--data-dir", flags.pop("--data-dir"),
    "--native-port", ports[2], "--grpc-port", ports[0], "--admin-port", ports[1]])
"""


@pytest.fixture(scope="module", params=[0, 1], ids=["non-reliable", "reliable"])
def rust(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Nobody builds it for a test: a stand-in takes its flags and speaks its protocol."""
    directory = tmp_path_factory.mktemp("rust")
    program = directory / "danube-broker-rust"
    program.write_text(STAND_IN.format(python=sys.executable, root=str(ROOT)))
    program.chmod(0o755)
    product = products()[-1]
    setting = product.settings[request.param]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{directory}{os.pathsep}{os.environ['PATH']}")
        assert product.missing(setting) == ""
        running = product.start(setting, directory)
        yield running
        running.stop()


@pytest.mark.parametrize("workload", [name for name in WORKLOADS if name != "replay"])
def test_the_broker_in_rust_is_driven_as_its_command_line_says(rust: Running, workload: str) -> None:
    client = products()[-1].clients(rust.setting)[0]
    if reason := client.missing(rust.setting, workload):
        pytest.skip(reason)
    believable(client.turn(rust, work(workload)), workload)


def test_the_broker_in_rust_cannot_replay() -> None:
    product = products()[-1]
    client = product.clients(product.settings[1])[0]
    assert "no way to begin" in client.missing(product.settings[1], "replay")


def test_the_setup_says_what_it_takes() -> None:
    script = str(places.ROOT / "scripts" / "compare-setup")
    result = subprocess.run([script, "--help"], capture_output=True, text=True, check=True)
    assert "--kafka" in result.stdout


@pytest.mark.slow
def test_what_the_setup_cannot_fetch_is_noted_and_no_failure(tmp_path: Path) -> None:
    """On a machine without Go, Java and a package registry; nothing outside the copy is touched."""
    for name in ("scripts/compare-setup", "perf/compare/requirements.txt"):
        copy = tmp_path / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy)
    (tmp_path / "scripts" / "setup").write_text("#!/bin/sh\n")
    (tmp_path / "scripts" / "setup").chmod(0o755)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / "bin").mkdir()
    for tool in (
        "bash",
        "cat",
        "cksum",
        "cut",
        "dirname",
        "env",
        "grep",
        "mkdir",
        "mktemp",
        "rm",
        "sh",
        "tail",
        "tr",
    ):
        (tmp_path / "bin" / tool).symlink_to(str(shutil.which(tool)))
    environment = {**os.environ, "PATH": str(tmp_path / "bin"), "PIP_INDEX_URL": "http://127.0.0.1:9/none"}
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        environment.pop(name, None)
    result = subprocess.run(
        [str(tmp_path / "scripts" / "compare-setup")], capture_output=True, text=True, env=environment
    )
    assert result.returncode == 0, result.stderr
    missing = {path.name: path.read_text() for path in (tmp_path / ".venv-compare" / "missing").iterdir()}
    assert set(missing) == {"clients", "kafka", "nats", "nats-server", "perf-test", "stream-perf-test"}
    assert missing["nats"] == "scripts/compare-setup could not fetch it: go is not installed\n"
    assert missing["perf-test"].endswith("java is not installed\n")
    assert missing["kafka"] == "scripts/compare-setup --kafka fetches it\n"
