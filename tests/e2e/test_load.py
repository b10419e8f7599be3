"""``danube load`` against a real broker: every record is accounted for, whatever happens meanwhile."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import danube.sync
from tests.broker_process import (
    ROOT,
    BrokerProcess,
    alive,
    descendants,
    die_with_parent,
    free_port,
    wait_until,
)
from tests.e2e.side_by_side import Bench, beside
from tests.e2e.side_by_side import lanes as lanes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("locust") is None, reason="Locust is not installed: pip install 'danube-broker[load]'"
    ),
]
MODES = ("exclusive", "shared", "failover", "key_shared")
ENDING_S = 100.0


class Load:
    """One ``danube load`` in a process group of its own."""

    def __init__(
        self, folder: Path, *words: str, command: tuple[str, ...] = ("-m", "danube", "load")
    ) -> None:
        self.output = folder / "stdout"
        self.errors = folder / "stderr"
        if command == ("-m", "danube", "load"):  # a file of the current folder is never executed
            (folder / "uuid.py").write_text("raise SystemExit('executed')\n")
        with self.output.open("wb") as output, self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, *command, *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                cwd=folder,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    def end(self, exit_code: int) -> str:
        """Wait for the end; standard output."""
        found = self.process.wait(ENDING_S)
        told = f"{self.output.read_text()}\n{self.errors.read_text()}"
        assert found == exit_code, told
        return self.output.read_text()

    def interrupt(self) -> None:
        """Ctrl-C: SIGINT to everything that the terminal holds."""
        os.killpg(self.process.pid, signal.SIGINT)

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@contextmanager
def loads(place: Path) -> Iterator[Callable[..., Load]]:
    """Start ``danube load``; whatever is left of it is killed at the end."""
    made: list[Load] = []

    def start(*words: str, **options: Any) -> Load:
        made.append(Load(_folder(place, len(made)), *words, **options))
        return made[-1]

    try:
        yield start
    finally:
        for one in made:
            one.kill()


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Callable[..., Load]]:
    with loads(tmp_path) as start:
        yield start


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """One broker for the runs that come to their end: each takes its topic away."""
    with BrokerProcess(tmp_path_factory.mktemp("served") / "data", workers=2) as process:
        yield process


def _folder(tmp_path: Path, number: int) -> Path:
    folder = tmp_path / f"load-{number}"
    folder.mkdir()
    return folder


def addresses(broker: BrokerProcess) -> list[str]:
    return ["-s", broker.address, "--grpc-broker", broker.grpc_address]


def run_topics(broker: BrokerProcess) -> list[str]:
    with danube.sync.connect(broker.address) as client:
        return [one.topic for one in client.admin.list_topics() if one.topic.startswith("/default/load-")]


def wait_records(broker: BrokerProcess, count: int = 20) -> str:
    """Wait until the one run has published; its topic."""
    found: list[str] = []

    def published() -> bool:
        found[:] = run_topics(broker)
        if not found:
            return False
        with danube.sync.connect(broker.address) as client:
            described = client.admin.describe_topic(found[0])
        return sum(int(one["high_watermark"]) for one in described.partitions) >= count

    wait_until(published, 60, "records of the run")
    return found[0]


def requests_of(report: dict[str, Any], kind: str) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in report["requests"] if row["type"] == kind}


def check_passed(report: dict[str, Any], protocols: tuple[str, ...]) -> None:
    """Nothing was lost, and every subscription of every mode had all of it."""
    assert report["passed"] and report["findings"] == [], report["findings"]
    records = report["records"]
    assert records["sent"] == records["acknowledged"] > 0 == records["not_known"]
    found = {(one["protocol"], one["mode"]) for one in report["subscriptions"]}
    assert found == {(protocol, mode) for protocol in protocols for mode in MODES}
    for one in report["subscriptions"]:
        assert one["expected"] == one["received"] == records["acknowledged"]
        assert (one["lost"], one["reordered"], one["unexpected"], one["damaged"]) == (0, 0, 0, 0)


def check_latencies(report: dict[str, Any], protocols: tuple[str, ...], level: str = "written") -> None:
    """End-to-end latency is a request type of its own, for each size and mode."""
    for protocol in protocols:
        sizes = {
            name.rpartition(" ")[2] for name in requests_of(report, "publish") if name.startswith(protocol)
        }
        assert {"100B", "1KiB"} <= sizes
        for mode in MODES:
            row = requests_of(report, "e2e")[f"{protocol} {mode} {level} 100B"]
            assert 0 < row["p50_ms"] <= row["p99_ms"] <= row["max_ms"] * 1.01
            assert row["failures"] == 0 and row["count"] > 0


# -- runs that pass -------------------------------------------------------------------------------


def test_native_load_with_all_its_results(
    served: BrokerProcess, load: Callable[..., Load], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    words = [*addresses(served), "--run-time", "2s", "-u", "9", "--consumers", "2", "--partitions", "2"]
    text = load(*words, "--out", str(out)).end(0)
    report = json.loads((out / "load.json").read_text())
    check_passed(report, ("native",))
    check_latencies(report, ("native",))
    assert report["run"]["partitions"] == 2 and report["run"]["durability"] == "written"
    assert text.endswith("passed: every acknowledged record arrived, in order\n")
    check_csv(out, report)
    page = (out / "load.html").read_text()
    assert page.lstrip().lower().startswith("<!doctype html") and "native exclusive written" in page
    assert run_topics(served) == []


def check_csv(out: Path, report: dict[str, Any]) -> None:
    """The CSV files say what the JSON says, to the microsecond."""
    with (out / "load_stats.csv").open() as file:
        rows = {(row["Type"], row["Name"]): row for row in csv.DictReader(file)}
    for one in report["requests"]:
        row = rows[one["type"], one["name"]]
        assert (int(row["Request Count"]), int(row["Failure Count"])) == (one["count"], one["failures"])
        assert row["50%"] == "N/A" if one["p50_ms"] is None else float(row["50%"]) == one["p50_ms"]
    assert int(rows["", "Aggregated"]["Request Count"]) == sum(one["count"] for one in report["requests"])
    assert (out / "load_failures.csv").read_text().splitlines() == [
        "Method,Name,Error,Occurrences,First Seen,Last Seen"
    ]
    with (out / "load_stats_history.csv").open() as file:
        history = list(csv.DictReader(file))
    assert {"e2e", "publish"} <= {row["Type"] for row in history}


def test_grpc_load(served: BrokerProcess, load: Callable[..., Load]) -> None:
    words = [*addresses(served), "--protocol", "grpc", "--run-time", "2s", "-u", "6", "--partitions", "2"]
    report = json.loads(load(*words, "-o", "json").end(0))
    check_passed(report, ("grpc",))
    check_latencies(report, ("grpc",))


def test_both_protocols_meet_on_a_topic_in_several_processes(
    served: BrokerProcess, load: Callable[..., Load], tmp_path: Path
) -> None:
    words = [*addresses(served), "--protocol", "both", "--run-time", "6s", "-u", "12", "--processes", "2"]
    out = tmp_path / "out"
    text = load(*words, "--out", str(out), "-o", "json").end(0)
    report = json.loads(text)
    assert json.loads((out / "load.json").read_text()) == report
    check_passed(report, ("native", "grpc"))
    check_latencies(report, ("native", "grpc"))
    check_csv(out, report)
    assert report["run"]["processes"] == 2
    senders = {name.split()[0] for name in requests_of(report, "publish")}
    assert senders == {"native", "grpc"}


def test_closed_loop_fsync_and_a_topic_that_stays(served: BrokerProcess, load: Callable[..., Load]) -> None:
    with danube.sync.connect(served.address) as client:
        client.admin.create_topic("/default/kept", durability="fsync")
        with client.producer("/default/kept") as producer:
            producer.send(b"of somebody else")
    words = [*addresses(served), "-t", "kept", "--rate", "0", "--run-time", "2s", "-u", "5", "-o", "json"]
    report = json.loads(load(*words).end(0))
    check_passed(report, ("native",))
    assert report["run"]["durability"] == "fsync"
    assert all("fsync" in name for name in requests_of(report, "publish"))
    with danube.sync.connect(served.address) as client:
        assert client.admin.list_subscriptions("/default/kept") == []
        assert client.admin.describe_topic("/default/kept").partitions[0]["high_watermark"] > 1


def test_a_topic_in_memory_promises_order_and_no_more(
    served: BrokerProcess, load: Callable[..., Load]
) -> None:
    words = [*addresses(served), "--durability", "memory", "--run-time", "2s", "-o", "json"]
    report = json.loads(load(*words).end(0))
    assert report["passed"] and report["run"]["durability"] == "memory"
    assert all(row["lost"] == 0 for row in report["subscriptions"])


def test_a_master_with_workers_of_their_own(served: BrokerProcess, load: Callable[..., Load]) -> None:
    """As on several hosts: a worker is told nothing but where the master is."""
    port = str(free_port())
    master = load(
        *addresses(served),
        *("--master", "--master-bind-host", "127.0.0.1", "--master-port", port, "--expect-workers", "2"),
        *("--run-time", "2s", "--modes", "shared,key-shared", "--rate", "20", "-o", "json"),
    )
    workers = [load("--worker", "--master-port", port) for _ in range(2)]
    report = json.loads(master.end(0))
    assert report["passed"] and report["run"]["processes"] == 2 and report["run"]["rate"] == 20
    assert {row["mode"] for row in report["subscriptions"]} == {"shared", "key_shared"}
    for worker in workers:
        worker.end(0)


def test_locust_runs_the_file_of_perf(
    served: BrokerProcess, load: Callable[..., Load], tmp_path: Path
) -> None:
    words = [
        *("-f", str(ROOT / "perf" / "locustfile.py"), "--headless", "-u", "5", "-r", "5", "-t", "2"),
        *("--broker", served.address, "--report-json", str(tmp_path / "load.json"), "--only-summary"),
    ]
    load(*words, command=("-m", "locust")).end(0)
    check_passed(json.loads((tmp_path / "load.json").read_text()), ("native",))


HELD_UP = f"""
import time
import gevent
from locust import events
from locust.runners import WorkerRunner

@events.init.add_listener  # before Danube's own
def hold_up(runner, **_):
    end_s = time.monotonic() + 20
    while isinstance(runner, WorkerRunner) and not runner.user_count and time.monotonic() < end_s:
        gevent.sleep(0.01)

exec(open({str(ROOT / "perf" / "locustfile.py")!r}).read())
"""


def test_a_process_that_is_told_to_make_users_before_it_is_set_up(
    served: BrokerProcess, load: Callable[..., Load], tmp_path: Path
) -> None:
    """Locust takes its master's orders while it sets a process up: users wait until the run is known."""
    (tmp_path / "held_up.py").write_text(HELD_UP)
    words = [
        *("-f", str(tmp_path / "held_up.py"), "--headless", "-u", "6", "-r", "10", "-t", "2"),
        *("--processes", "2", "--broker", served.address, "--report-json", str(tmp_path / "load.json")),
    ]
    load(*words, command=("-m", "locust")).end(0)
    check_passed(json.loads((tmp_path / "load.json").read_text()), ("native",))


def test_the_page_starts_and_stops_runs(
    served: BrokerProcess, load: Callable[..., Load], tmp_path: Path
) -> None:
    port = free_port()
    page = f"http://127.0.0.1:{port}"
    words = [*addresses(served), "--web", "--web-port", str(port), "--json", str(tmp_path / "load.json")]
    running = load(*words)
    wait_until(lambda: answers(page), 60, "Locust's page")
    assert b"locust" in ask(page).lower()
    post(f"{page}/swarm", user_count="6", spawn_rate="10", rate="fast")
    wait_until(lambda: "--rate fast is not valid" in running.errors.read_text(), 30, "a bad rate is told")
    topics = set()
    for _ in range(2):  # each start is a run of its own
        assert json.loads(post(f"{page}/swarm", user_count="6", spawn_rate="10", rate="20"))["success"]
        topics.add(wait_records(served))
        assert json.loads(post(f"{page}/stop"))["success"]
        assert run_topics(served) == []
    assert len(topics) == 2
    running.interrupt()
    running.end(0)
    report = json.loads((tmp_path / "load.json").read_text())
    check_passed(report, ("native",))
    assert report["run"]["rate"] == 20


def ask(url: str, data: bytes | None = None) -> bytes:
    with urllib.request.urlopen(url, data, timeout=60) as response:
        return bytes(response.read())


def post(url: str, **form: str) -> bytes:
    return ask(url, urllib.parse.urlencode(form).encode())


def answers(url: str) -> bool:
    try:
        ask(url)
    except OSError:
        return False
    return True


# -- faults ---------------------------------------------------------------------------------------


@pytest.mark.crash
def test_a_broker_that_is_killed_loses_nothing_that_was_acknowledged(
    broker: Callable[..., BrokerProcess], load: Callable[..., Load]
) -> None:
    one = broker(workers=2)
    words = [*addresses(one), "--protocol", "both", "--processes", "2", "--partitions", "2", "-u", "12"]
    running = load(*words, "--send-timeout", "60s", "-o", "json")
    wait_records(one, 200)
    one.kill()
    one.start()
    wait_records(one, 600)
    running.interrupt()
    report = json.loads(running.end(0))
    check_passed(report, ("native", "grpc"))
    assert report["records"]["reconnects"] > 0
    worst_ms = max(row["max_ms"] for row in requests_of(report, "publish").values())
    assert worst_ms > 200  # what was due while there was no broker waited for it, and was counted


def test_a_record_that_somebody_takes_away_is_lost(
    served: BrokerProcess, load: Callable[..., Load], tmp_path: Path
) -> None:
    words = [*addresses(served), "--drain-timeout", "2s", "--out", str(tmp_path / "out")]
    running = load(*words)
    topic = wait_records(served)
    stolen = steal(served, topic, f"load-{topic.rpartition('-')[2]}-native-shared", 5)
    running.interrupt()
    text = running.end(10)
    report = json.loads((tmp_path / "out" / "load.json").read_text())
    (finding,) = report["findings"]
    assert (finding["kind"], finding["count"]) == ("lost", stolen)
    assert "native-shared" in finding["where"] and finding["examples"]
    assert [row["lost"] for row in report["subscriptions"]] == [0, stolen, 0, 0]
    assert requests_of(report, "check")["native shared written"]["failures"] == 1
    assert f"lost: {finding['where']}" in text and text.endswith("failed: 1 findings\n")
    failures = (tmp_path / "out" / "load_failures.csv").read_text()
    assert f"{stolen} acknowledged records did not arrive" in failures
    assert f"{stolen} acknowledged records did not arrive" in (tmp_path / "out" / "load.html").read_text()


def steal(broker: BrokerProcess, topic: str, subscription: str, count: int) -> int:
    """Join the run's shared subscription, and acknowledge what it was not meant to have."""
    with danube.sync.connect(broker.address) as client:
        with client.consumer(topic, subscription, "shared", prefetch_records=1) as thief:
            for _ in range(count):
                thief.receive(timeout=30).ack()
            thief.flush()
    return count


def test_a_foreign_record_on_the_topic_of_a_run_is_told(
    served: BrokerProcess, load: Callable[..., Load]
) -> None:
    running = load(*addresses(served), "--modes", "shared", "-o", "json")
    topic = wait_records(served)
    with danube.sync.connect(served.address) as client, client.producer(topic) as producer:
        foreign = producer.send(b"of somebody else").offset
    wait_records(served, foreign + 200)  # what follows it in the log was delivered after it
    running.interrupt()
    report = json.loads(running.end(10))
    assert [(one["kind"], one["count"]) for one in report["findings"]] == [("foreign", 1)]


@beside
def test_a_failed_send_fails_the_run(bench: Bench) -> None:
    one = bench.broker(workers=1)
    with loads(bench.tmp_path) as load:
        running = load(*addresses(one), "--modes", "shared", "--send-timeout", "1s", "-o", "json")
        wait_records(one)
        one.kill()
        time.sleep(3)  # a send fails a second after it was due
        running.interrupt()
        report = json.loads(running.end(10))
        assert "requests" in {finding["kind"] for finding in report["findings"]}
        assert report["records"]["not_known"] > 0
        assert not any(re.search(r"[0-9a-f]{8}", finding["what"]) for finding in report["findings"])


@beside
def test_a_load_process_that_dies_fails_the_run(bench: Bench) -> None:
    one = bench.broker(workers=1)
    with loads(bench.tmp_path) as load:
        running = load(*addresses(one), "--processes", "2", "--drain-timeout", "2s", "-o", "json")
        wait_records(one)
        os.kill(descendants(running.process.pid)[-1], signal.SIGKILL)
        running.interrupt()
        report = json.loads(running.end(10))
        assert "incomplete" in {finding["kind"] for finding in report["findings"]}


# -- ends -----------------------------------------------------------------------------------------


def test_ctrl_c_ends_a_run_without_a_time_and_judges_it(
    served: BrokerProcess, load: Callable[..., Load]
) -> None:
    running = load(*addresses(served), "--processes", "2", "-o", "json")
    wait_records(served)
    running.interrupt()
    check_passed(json.loads(running.end(0)), ("native",))
    assert run_topics(served) == []


def test_sigterm_ends_a_run_and_judges_it(served: BrokerProcess, load: Callable[..., Load]) -> None:
    running = load(*addresses(served), "-o", "json")
    wait_records(served)
    running.process.terminate()
    check_passed(json.loads(running.end(0)), ("native",))


@beside
def test_a_second_ctrl_c_does_not_wait(bench: Bench) -> None:
    one = bench.broker(workers=1)
    with loads(bench.tmp_path) as load:
        running = load(*addresses(one), "--drain-timeout", "1h", "--send-timeout", "1h", "-o", "json")
        wait_records(one)
        one.kill()
        running.interrupt()
        time.sleep(1)
        running.interrupt()
        report = json.loads(running.end(10))
        assert "incomplete" in {finding["kind"] for finding in report["findings"]}


def test_nothing_is_left_of_a_run_that_is_killed(
    broker: Callable[..., BrokerProcess], load: Callable[..., Load]
) -> None:
    one = broker(workers=1)
    running = load(*addresses(one), "--processes", "2")
    wait_records(one)
    children = descendants(running.process.pid)
    assert len(children) >= 2
    running.process.kill()
    wait_until(lambda: not any(map(alive, children)), 30, "the load processes are gone")


def test_a_broker_that_is_not_there(load: Callable[..., Load]) -> None:
    found = load("-s", f"danube://127.0.0.1:{free_port()}")
    found.end(6)
    assert "cannot reach the broker" in found.errors.read_text()
    found = load(
        *("-f", str(ROOT / "perf" / "locustfile.py"), "--headless"),
        *("--broker", f"danube://127.0.0.1:{free_port()}"),
        *("-u", "5"),
        command=("-m", "locust"),
    )
    found.end(6)
    assert "nothing listens there" in found.errors.read_text()


def test_the_file_of_perf_refuses_users_one_by_one(load: Callable[..., Load]) -> None:
    found = load(
        *("-f", str(ROOT / "perf" / "locustfile.py"), "--headless", "NativeShared"),
        command=("-m", "locust"),
    )
    found.end(2)
    assert "--protocol and --modes" in found.errors.read_text()


# -- greenlets ------------------------------------------------------------------------------------

WAITING = """
import sys, threading, time
import locust
import gevent
from danube.load.collector import Collector
from danube.load.plan import Plan
from danube.load.topic import prepare, new_run, subscription_name
protocol, broker, grpc_broker = sys.argv[1:]
plan = Plan.parse({"broker": broker, "grpc_broker": grpc_broker, "protocol": protocol})
run = new_run()
place, collector = prepare(plan, run), Collector(run)
name = subscription_name(run, protocol, "shared")
if protocol == "native":
    from danube.load.links.native import NativeReceiver
    links = [NativeReceiver(plan, collector, place, name, "shared") for _ in range(20)]
else:
    from danube.load.links.grpc import GrpcReceiver
    links = [GrpcReceiver(plan, collector, place, name, "shared", f"c{one}") for one in range(20)]
for link in links:
    link.open()
waiting = [gevent.spawn(link.receive, 4.0) for link in links]
ticks = 0
until = time.monotonic() + 3
while time.monotonic() < until:
    gevent.sleep(0.01)
    ticks += 1
print(ticks, sum(not one.ready() for one in waiting), flush=True)
for link in links:
    link.close()
"""


@pytest.mark.parametrize("protocol", ["native", "grpc"])
def test_a_greenlet_that_waits_for_records_holds_up_no_other(
    broker: Callable[..., BrokerProcess], protocol: str
) -> None:
    """Twenty consumers wait, each with a connection; a ticker goes on.  Blocked, it would stand still."""
    one = broker(workers=1)
    ran = subprocess.run(
        [sys.executable, "-c", WAITING, protocol, one.address, one.grpc_address],
        capture_output=True,
        text=True,
        timeout=90,
        cwd=ROOT,
        check=False,
        preexec_fn=die_with_parent,
    )
    assert ran.returncode == 0, ran.stderr
    ticks, waiting = map(int, ran.stdout.split())
    assert waiting == 20 and ticks > 60  # 300 on a machine with nothing else to do
