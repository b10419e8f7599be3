"""Servers and tools of a comparison: accounted for, gone afterwards, with a reason when missing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from perf.compare import peers, places, processes
from perf.compare.driving import number, steady
from perf.compare.model import Failed, Product, Running, Setting, Spent, Work
from perf.compare.peers import KAFKA, NATS, NATS_BATCHES, RABBITMQ, REDIS, started
from perf.compare.places import Jars, Program
from perf.compare.processes import Server, Tool, cpu_seconds, listens
from perf.compare.products import products, read_bench
from tests.broker_process import ROOT, alive, die_with_parent, free_port, wait_until

BURN = "import time\nwhile time.process_time() < {}: pass\n"
DAEMON = (  # a child of a child with a session of its own, as epmd is one
    "import os, sys, time\n"
    "if not os.fork():\n"
    "    os.setsid()\n"
    "    if os.fork(): os._exit(0)\n"
    "    open(sys.argv[1], 'w').write(str(os.getpid()))\n"
    "    time.sleep(600)\n"
    "time.sleep(600)\n"
)


def python(code: str, *words: str) -> list[str]:
    return [sys.executable, "-S", "-E", "-c", code, *words]


def written_pid(path: Path) -> int:
    wait_until(lambda: path.exists() and bool(path.read_text()), 30, "the daemon wrote its id")
    return int(path.read_text())


# --- CPU time ---


def test_cpu_time_is_of_the_whole_tree_with_what_was_reaped(tmp_path: Path) -> None:
    burn = repr(BURN.format(0.3))
    code = (
        "import subprocess, sys, time\n"
        f"subprocess.run([sys.executable, '-S', '-c', {burn}])\n"  # ended and reaped
        f"{BURN.format(0.3)}"
        "open('burnt', 'w').close()\n"
        "time.sleep(600)\n"
    )
    server = Server(python(code), tmp_path)
    try:
        server.wait(lambda: (tmp_path / "burnt").exists())
        spent = cpu_seconds(server.pids())
        assert spent + 2 / processes.TICKS >= 0.6
        assert spent < 3
        assert cpu_seconds(server.pids()) - spent < 0.2  # it sleeps now
    finally:
        server.stop()


def test_less_than_a_tick_is_counted() -> None:
    before = cpu_seconds([os.getpid()])
    while cpu_seconds([os.getpid()]) == before:
        pass
    assert 0 < cpu_seconds([os.getpid()]) - before < 1 / processes.TICKS


def test_what_is_gone_costs_nothing(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert cpu_seconds([ended.pid]) == 0


def test_a_tool_is_charged_with_its_children(tmp_path: Path) -> None:
    burn = repr(BURN.format(0.3))
    code = f"import subprocess, sys\nsubprocess.run([sys.executable, '-S', '-c', {burn}])\nprint('done')"
    found = Tool(python(code), tmp_path).finish()
    assert found.output == "done\n"
    assert 0.25 <= found.cpu_seconds < 3
    assert not list(tmp_path.iterdir())


# --- servers ---


def test_stopping_a_server_ends_its_daemons_too(tmp_path: Path) -> None:
    server = Server(python(DAEMON, str(tmp_path / "pid")), tmp_path)
    daemon = written_pid(tmp_path / "pid")
    everything = server.pids()
    assert daemon in everything
    server.stop()
    assert not any(map(alive, everything))


def test_a_server_that_ignores_the_polite_signal_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = tmp_path / "impatient.py"
    guard.write_text(processes.GUARD.read_text().replace("GRACE_S = 10.0", "GRACE_S = 0.3"))
    monkeypatch.setattr(Server, "under", (*Server.under[:-1], str(guard)))
    code = (
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nopen('up', 'w')\ntime.sleep(600)"
    )
    server = Server(python(code), tmp_path)
    server.wait(lambda: (tmp_path / "up").exists())
    everything = server.pids()
    server.stop()
    assert not any(map(alive, everything))


def test_nothing_is_left_when_the_comparison_itself_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from perf.compare.processes import Server\n"
        f"server = Server({python(DAEMON, str(tmp_path / 'pid'))!r}, Path(sys.argv[1]))\n"
        "server.wait(lambda: Path(sys.argv[1], 'pid').exists())\n"
        "print(*server.pids(), flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=die_with_parent,
    )
    assert parent.stdout is not None
    try:
        everything = [written_pid(tmp_path / "pid"), *map(int, parent.stdout.readline().split())]
        guard, daemon = everything[1], everything[0]
        assert alive(guard) and alive(daemon)
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        parent.stdout.close()
    wait_until(lambda: not any(map(alive, everything)), 60, "all that the killed process had started is gone")


def test_a_server_that_ends_by_itself_says_what_it_printed(tmp_path: Path) -> None:
    command = python("print('no licence', flush=True); raise SystemExit(3)")
    with pytest.raises(Failed, match=r"ended with 3: no licence"):
        started(NATS.settings[0], tmp_path, command, {}, free_port())


def test_a_server_that_is_never_ready_is_ended(tmp_path: Path) -> None:
    server = Server(python("import time; time.sleep(600)"), tmp_path)
    everything = server.pids()
    with pytest.raises(Failed, match=r"was not ready within 0\.2 s"):
        server.wait(lambda: False, timeout_s=0.2)
    server.stop()
    assert not any(map(alive, everything))


def test_a_port_listens_or_does_not() -> None:
    assert not listens(free_port())


# --- tools ---


def test_a_tool_that_fails_says_what_it_printed(tmp_path: Path) -> None:
    with pytest.raises(Failed, match="ended with 1: no such server"):
        Tool(python("print('no such server'); raise SystemExit(1)"), tmp_path).finish()
    assert not list(tmp_path.iterdir())


def test_a_tool_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(Failed, match=r"was not done within 0\.2 s"):
        Tool(python("import time; time.sleep(600)"), tmp_path).finish(0.2)
    assert time.monotonic() - began < 60


def test_a_tool_is_waited_for_until_it_says_a_word(tmp_path: Path) -> None:
    tool = Tool(python("print('expecting 5', flush=True)\nimport time; time.sleep(600)"), tmp_path)
    tool.wait(lambda: "expecting" in tool.said())
    tool.kill()
    assert not list(tmp_path.iterdir())


def test_a_tool_that_ends_without_the_word_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(Failed, match="ended with 0: hello"):
        Tool(python("print('hello')"), tmp_path).wait(lambda: False)


# --- the network ---


def test_the_own_network_is_another_one_and_takes_nothing_away(tmp_path: Path) -> None:
    code = (
        "import os, socket\n"
        "from perf.compare.processes import enter_own_network\n"
        "before = os.stat('/proc/self/ns/net').st_ino\n"
        "said = enter_own_network()\n"
        "server = socket.create_server(('127.0.0.1', 6650))\n"
        "socket.create_connection(server.getsockname()).close()\n"
        "print(before != os.stat('/proc/self/ns/net').st_ino, said, sep='|')\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    moved, said = result.stdout.strip().split("|")
    if moved != "True":
        pytest.skip(f"no network namespace may be made here: {said}")
    assert said.startswith("a loopback of its own, ")
    assert said.rsplit(" ", 1)[1] in {"cubic", "reno", "bbr"}


def test_without_a_network_of_its_own_the_reason_is_said() -> None:
    code = (
        "import ctypes\n"
        "class Refusing:\n"
        "    def unshare(self, spaces):\n"
        "        ctypes.set_errno(1)\n"
        "        return -1\n"
        "ctypes.CDLL = lambda *words, **more: Refusing()\n"
        "from perf.compare.processes import enter_own_network\n"
        "print(enter_own_network())\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.startswith("the machine's loopback, ")
    assert "Operation not permitted" in result.stdout


# --- what is missing ---


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with nothing on it."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv(places.TOOLS_VARIABLE, str(tmp_path / "tools"))
    monkeypatch.setattr(places, "SYSTEM_FOLDER", str(tmp_path))
    monkeypatch.setattr(places, "RABBIT_FOLDER", str(tmp_path))
    return tmp_path


def test_what_peers_clients_share_needs_nothing_of_danube(tmp_path: Path) -> None:
    """In their Python ``danube`` is the official client, and the repository's modules come behind it."""
    theirs, script = tmp_path / "theirs", tmp_path / "script.py"
    theirs.mkdir()
    (theirs / "danube.py").write_text("official = True\n")
    script.write_text("import danube, perf.compare.clients.roles\nprint(danube.official)\n")
    found = subprocess.run(
        [sys.executable, *places.peers_python()[1:], str(script)], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(theirs)},
    )  # fmt: skip
    assert found.stdout == "True\n", found.stderr


def test_on_a_bare_machine_every_peer_has_a_reason_and_danube_runs(bare: Path) -> None:
    for product in products():
        reasons = [product.missing(setting) for setting in product.settings]
        assert all(reasons) is not product.ours
        for setting in product.settings:
            for client in product.clients(setting):
                assert isinstance(client.missing(setting, "publish"), str)


def test_danube_measures_itself_on_a_bare_machine(bare: Path) -> None:
    danube = products()[0]
    for setting in danube.settings:
        found = {client.name: client.missing(setting, "publish") for client in danube.clients(setting)}
        assert "run scripts/compare-setup" in found.pop("danube-client, gRPC")
        assert "cargo is not installed" in found.pop("danube-client, Rust", "cargo is not installed")
        assert set(found.values()) == {""}


def test_reasons_tell_what_to_do(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Program("nats").path() == ""
    assert Program("nats").missing() == "nats is not installed (run scripts/compare-setup)"
    assert Program("x", "install the package x").missing() == "x is not installed (install the package x)"
    assert Jars("j").missing() == "no Java runtime"
    monkeypatch.setattr(places.shutil, "which", lambda *names, **more: "/bin/java")
    assert Jars("j").missing() == "j is not here (run scripts/compare-setup)"


def test_what_the_setup_could_not_fetch_is_the_reason(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places.shutil, "which", lambda *names, **more: "/bin/java")
    missing = bare / "tools" / "missing"
    missing.mkdir(parents=True)
    (missing / "perf-test").write_text("scripts/compare-setup could not fetch it: mvn is not installed\n")
    assert "mvn is not installed" in peers.PERF_TEST.missing()


def test_programs_and_jars_are_found_in_the_folder_of_the_setup(bare: Path) -> None:
    program = bare / "tools" / "bin" / "nats"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert Program("nats").path() == str(program)
    jars = bare / "kafka" / "libs"
    jars.mkdir(parents=True)
    (jars / "kafka_2.13-4.1.0.jar").touch()
    (bare / "tools" / "java").mkdir()
    (bare / "tools" / "java" / "kafka").symlink_to(bare / "kafka")
    assert peers.KAFKA_JARS.path() == f"{bare}/tools/java/kafka/libs/*"
    assert KAFKA.version() == "4.1.0"


def setting_of(product: Product, name: str) -> Setting:
    return next(setting for setting in product.settings if setting.name == name)


def test_an_old_server_is_not_asked_for_what_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Program, "path", lambda program: f"/{program.name}")
    monkeypatch.setattr(peers, "nats_version", lambda: (2, 9, 10))
    assert "no sync_interval: always" in NATS.missing(setting_of(NATS, "jetstream file sync-always"))
    assert NATS.missing(setting_of(NATS, "jetstream file")) == ""
    assert "2.12" in NATS_BATCHES.missing(setting_of(NATS, "jetstream file"), "publish")


@pytest.mark.parametrize(
    ("product", "setting", "workload", "reason"),
    [
        (NATS, "jetstream file", "latency", "no percentiles"),
        (REDIS, "redis streams no", "e2e", "at the same time"),
        (REDIS, "redis streams no", "replay", "to its end"),
        (RABBITMQ, "rabbitmq quorum queue", "replay", "keeps nothing"),
        (RABBITMQ, "rabbitmq stream", "latency", "whole milliseconds"),
        (KAFKA, "kafka", "latency", "whole milliseconds"),
    ],
)
def test_what_a_tool_cannot_measure_is_said(
    product: Product, setting: str, workload: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Program, "path", lambda program: f"/{program.name}")
    chosen = setting_of(product, setting)
    tool = next(client for client in product.clients(chosen) if client.kind == "tool")
    assert reason in tool.missing(chosen, workload)


@pytest.mark.parametrize("product", [NATS, REDIS, RABBITMQ, KAFKA], ids=lambda product: product.name)
def test_every_setting_of_a_peer_has_a_client_and_a_tool(product: Product) -> None:
    for setting in product.settings:
        assert {client.kind for client in product.clients(setting)} == {"python", "tool"}


# --- what tools print ---

SPENT = Spent(server=1.0, client=2.0)


def work(workload: str, **more: object) -> Work:
    known: dict[str, object] = {"size": 100, "count": 1_000, "topic": "t"}
    return Work(workload=workload, **{**known, **more})  # type: ignore[arg-type]


RUNNING = Running(
    setting=NATS.settings[0], directory=Path(), pids=list, stop=lambda: None,
    address={"durability": "fsync"},
)  # fmt: skip


def test_numbers_are_read_from_what_tools_print() -> None:
    nats = "NATS JetStream asynchronous publisher stats: 98,980 msgs/sec ~ 9.4 MiB/sec ~ 10.10us"
    assert number(peers.NATS_RATE, nats) == 98_980
    redis = '"test","rps","avg_latency_ms"\n"XADD t * p a,""b","277777.78","1.488"\n'
    assert peers.requests_per_second(redis, 1_000) == 277_777.78
    assert peers.requests_per_second('"PUBLISH t a","inf","0.1"\n', 400) == 400_000
    head = (
        "start.time, end.time, data.consumed.in.MB, MB.sec, rebalance.time.ms, fetch.MB.sec, fetch.nMsg.sec"
    )
    values = "2026-11-21 23:33:49:778, 2026-11-21 23:33:52:178, 4.7684, 1.9868, 1245, 4.1285, 43290.0433"
    read = peers.read_kafka_perf(f"{head}\n{values}\n", RUNNING, work("replay"), SPENT)
    assert read.rate == 43_290.0433


@pytest.mark.parametrize(
    "read",
    [
        lambda: number(peers.NATS_RATE, "panic: nothing"),
        lambda: peers.requests_per_second("Could not connect\n", 1),
        lambda: peers.read_kafka_perf("WARN no messages\n", RUNNING, work("replay"), SPENT),
        lambda: steady(0.0, work("publish"), SPENT),
        lambda: peers.read_stream_perf_test("usage:", RUNNING, work("publish"), SPENT),
    ],
)
def test_a_tool_without_a_result_is_a_failure(read: Callable[[], object]) -> None:
    with pytest.raises(Failed):
        read()


def test_the_stream_tool_is_charged_for_what_it_sent() -> None:
    printed = "4, published 1 msg/s\nSummary: published 9 msg/s, confirmed 8 msg/s, consumed 2000 msg/s"
    turn = peers.read_stream_perf_test(printed, RUNNING, work("e2e", seconds=4.0), SPENT)
    assert (turn.rate, turn.records) == (2_000, 8_000)


def test_perf_test_is_read_at_the_end_of_what_it_prints() -> None:
    printed = (
        "id: t, time 1.0 s, min/median/75th/95th/99th confirm latency: 1/2/3/4/5 µs\n"
        "id: t, sending rate avg: 990 msg/s\n"
        "id: t, receiving rate avg: 0 msg/s\n"
        "id: t, confirm latency min/median/75th/95th/99th 375/1641/5290/13708/24323 µs\n"
    )
    turn = peers.read_perf_test(printed, RUNNING, work("latency"), SPENT)
    assert (turn.p50_us, turn.p99_us, turn.rate) == (1_641, 24_323, 990)
    turn = peers.read_perf_test(printed, RUNNING, work("publish"), SPENT)
    assert (turn.rate, turn.records, turn.spent) == (990, 1_000, SPENT)


def test_danube_bench_at_another_level_is_a_failure() -> None:
    with pytest.raises(Failed, match="'written' instead of 'fsync'"):
        read_bench('{"durability": "written"}', RUNNING, work("publish"), SPENT)


def test_a_redis_without_the_level_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "ask", lambda port, *words: "*4\r\n")
    with pytest.raises(Failed, match="did not take appendfsync always"):
        peers.redis_obeys(6379, "always")
    assert peers.redis_obeys(6379, "")
