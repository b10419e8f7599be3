"""``danube load``: what it hands to Locust, and what it refuses before Locust starts."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import danube.sync
from danube.cli.main import root
from danube.cli.records import load as command
from danube.cli.terminal.services import Services
from danube.errors import ConnectionFailed
from tests.broker_process import free_port
from tests.fakes.broker import FakeBroker
from tests.unit.cli_stub import StubBroker


class Line:
    """Runs ``danube load`` against the stub and keeps what would have been started."""

    def __init__(self) -> None:
        self.broker = StubBroker()
        self.connect: Callable[..., Any] = self.broker.connect
        self.started: list[str] = []
        self.progress = False

    def __call__(self, *words: str, exit_code: int = 0) -> Result:
        services = Services(
            connect=self.connect,
            execute=self.started.extend,
            environ={},
            shows_progress=lambda: self.progress,
        )
        result = CliRunner().invoke(root, ["load", *words], obj=services, prog_name="danube")
        assert result.exit_code == exit_code, result.output
        assert bool(self.started) == (exit_code == 0)
        return result

    @property
    def words(self) -> dict[str, str]:
        """Options of the started command by name."""
        assert self.started[:4] == [sys.executable, "-P", "-m", "danube.load"]
        pairs = (word.partition("=") for word in self.started[4:] if word.startswith("--"))
        return {name: value for name, _, value in pairs}


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> Line:
    monkeypatch.delenv("DANUBE_SERVICE_URL", raising=False)
    monkeypatch.setattr(command, "find_spec", lambda name: object())
    return Line()


def test_defaults(line: Line) -> None:
    line()
    words = line.words
    assert words["--users"] == "8"  # four consumers and four producers
    assert words["--spawn-rate"] == "10"
    assert words["--broker"] == "danube://127.0.0.1:6660"
    assert words["--report-form"] == "table"
    assert {"--headless", "--only-summary"} <= set(words)
    assert not {"--run-time", "--processes", "--master", "--worker", "--topic", "--rate"} & set(words)
    assert line.started[line.started.index("--loglevel") + 1] == "WARNING"


def test_everything_reaches_locust(line: Line, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        line(
            *("-s", "http://broker:7000", "-u", "40", "-r", "2.5", "--run-time", "2m"),
            *("--protocol", "both", "--grpc-broker", address, "--modes", "shared,key-shared"),
            *("--consumers", "3", "--sizes", "100:2,1KiB", "--rate", "10", "--ramp", "5s", "--keys", "3"),
            *("--partitions", "2", "--durability", "fsync", "--send-timeout", "3s", "--drain-timeout", "4s"),
            *("-o", "json", "-v", "--csv", str(tmp_path / "a" / "x")),
            *("--html", str(tmp_path / "x.html"), "--json", str(tmp_path / "x.json"), "--processes", "2"),
        )
    words = line.words
    expected = {
        "--broker": "danube://broker:7000",
        "--users": "40",
        "--spawn-rate": "2.5",
        "--run-time": "120",
        "--protocol": "both",
        "--grpc-broker": address,
        "--modes": "shared,key-shared",
        "--consumers": "3",
        "--sizes": "100:2,1KiB",
        "--rate": "10",
        "--ramp": "5s",
        "--keys": "3",
        "--partitions": "2",
        "--durability": "fsync",
        "--send-timeout": "3s",
        "--drain-timeout": "4s",
        "--report-form": "json",
        "--report-csv": str(tmp_path / "a" / "x"),
        "--report-html": str(tmp_path / "x.html"),
        "--report-json": str(tmp_path / "x.json"),
        "--processes": "2",
        "--master-bind-host": "127.0.0.1",
    }
    assert {name: words.get(name) for name in expected} == expected
    assert words["--master-bind-port"] == words["--master-port"] != "5557"
    assert line.started[line.started.index("--loglevel") + 1] == "INFO"
    assert "--only-summary" not in words


def test_one_directory_for_all_results(line: Line, tmp_path: Path) -> None:
    line("--out", str(tmp_path / "new"), "--json", str(tmp_path / "other.json"))
    words = line.words
    assert words["--report-csv"] == str(tmp_path / "new" / "load")
    assert words["--report-html"] == str(tmp_path / "new" / "load.html")
    assert words["--report-json"] == str(tmp_path / "other.json")
    assert list((tmp_path / "new").iterdir()) == []


def test_tables_on_the_way_are_for_terminals(line: Line) -> None:
    line.progress = True
    line()
    assert "--only-summary" not in line.words


def test_the_page_listens_on_loopback(line: Line) -> None:
    port = str(free_port())
    line("--web", "--web-port", port)
    assert line.words["--web-host"] == "127.0.0.1" and line.words["--web-port"] == port
    assert "--headless" not in line.words


def test_a_master_waits_for_workers_of_other_hosts(line: Line) -> None:
    port = str(free_port())
    line("--master", "--expect-workers", "3", "--master-port", port)
    words = line.words
    assert (words["--master-bind-host"], words["--master-bind-port"]) == ("*", port)
    assert words["--expect-workers"] == "3" and "--master" in words


def test_a_worker_asks_the_master_for_everything_else(line: Line) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a worker learns the address from the master")

    line.connect = refuse
    with socket.create_server(("127.0.0.1", 0)) as master:
        port = str(master.getsockname()[1])
        found = line("--worker", "--master-port", port, "--processes", "4")
    words = line.words
    assert (words["--master-host"], words["--master-port"]) == ("127.0.0.1", port)
    assert words["--processes"] == "4" and "--broker" not in words and "--headless" not in words
    assert not found.stderr


def test_a_worker_without_a_master_says_that_it_waits(line: Line) -> None:
    found = line("--worker", "--master-port", str(free_port()))
    assert "no master answers at 127.0.0.1:" in found.stderr and "5 minutes" in found.stderr


@pytest.mark.parametrize("words", [["--web", "--web-port"], ["--master", "--master-port"]])
def test_a_port_that_is_taken_is_told_before_locust_starts(line: Line, words: list[str]) -> None:
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        found = line(*words, port, exit_code=4)
    assert f":{port}" in found.stderr and words[1] in found.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--users", "3"], "3 users are too few"),
        (["--users", "0"], "0 is not in the range"),
        (["--spawn-rate", "0"], "not in the range"),
        (["--run-time", "10"], "is not a duration"),
        (["--rate", "x"], "--rate x is not valid"),
        (["--sizes", "10"], "sizes from 60"),
        (["--modes", "topic"], "exclusive,shared,failover,key-shared"),
        (["--protocol", "http"], "native, grpc or both"),
        (["--durability", "quorum"], "written, fsync or memory"),
        (["--drain-timeout", "1"], "a duration such as"),
        (["-t", "/bad name/x"], "/namespace/name"),
        (["-t", "/default/x-part-3"], "ends like a partition"),
        (["-s", "ftp://x:1"], "danube+tls://host:port"),
        (["--master", "--worker"], "not both"),
        (["--master", "--processes", "2"], "leave --master out"),
        (["--expect-workers", "2"], "goes with --master"),
        (["--unknown"], "No such option"),
        (["extra"], "unexpected extra argument"),
    ],
)
def test_bad_flags_are_refused_before_anything_is_started(line: Line, words: list[str], said: str) -> None:
    assert said in line(*words, exit_code=2).stderr
    assert line.broker.calls == []


def test_results_that_cannot_be_written_are_refused_before_the_run(line: Line, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    found = line("--out", str(tmp_path / "file" / "in"), exit_code=2)
    assert "results cannot be written to" in found.stderr
    found = line("--json", str(tmp_path), exit_code=2)
    assert "it is a directory" in found.stderr


def test_without_locust_the_error_names_the_extra(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    found = line(exit_code=11)
    assert "danube load needs Locust" in found.stderr
    assert "pip install 'danube-broker[load]'" in found.stderr


def test_an_unreachable_broker_is_told_with_its_address(line: Line) -> None:
    def refuse(address: str, **_: object) -> None:
        raise ConnectionFailed("cannot connect", why="nothing listens there")

    line.connect = refuse
    found = line("-s", "danube://127.0.0.1:7", exit_code=6)
    assert "cannot reach the broker at danube://127.0.0.1:7" in found.stderr
    assert "--service-addr" in found.stderr
    assert json.loads(line("-o", "json", exit_code=6).stderr)["error"]["reason"] == "ConnectionFailed"


def test_an_unreachable_grpc_port_is_told_with_the_flag(line: Line) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: refused
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        found = line("--protocol", "grpc", "--grpc-broker", address, exit_code=6)
    assert f"gRPC port at {address}" in found.stderr and "--grpc-broker" in found.stderr


def test_a_topic_that_does_not_fit_is_refused(line: Line) -> None:
    line.connect = danube.sync.connect
    with FakeBroker() as fake:
        with danube.sync.connect(fake.url) as client:
            client.admin.create_topic("/default/kept", durability="fsync", max_record_bytes=65_536)
        found = line("-s", fake.url, "-t", "kept", "--durability", "written", exit_code=4)
        assert "has durability fsync" in found.stderr
        found = line("-s", fake.url, "-t", "kept", "--sizes", "2MiB", exit_code=2)
        assert "records of 2MiB are too large for topic /default/kept" in found.stderr
        line("-s", fake.url, "-t", "kept")
        assert line.words["--topic"] == "/default/kept"


def test_a_named_topic_that_is_missing_is_made_and_one_of_the_run_is_not(line: Line) -> None:
    line.connect = danube.sync.connect
    with FakeBroker() as fake:
        line("-s", fake.url)
        assert not fake.topics
        line("-s", fake.url, "-t", "new", "--partitions", "2")
        assert list(fake.topics) == ["/default/new"]


def test_help_loads_neither_locust_nor_the_client() -> None:
    code = (
        "import sys\nfrom danube.cli.main import root\n"
        "try:\n    root(['load', '--help'])\nexcept SystemExit:\n    pass\n"
        "sys.exit(bool({'locust', 'gevent', 'grpc', 'numpy', 'numba', 'logging'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--drain-timeout" in done.stdout
