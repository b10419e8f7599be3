"""Starting, finding and stopping a broker from the command line."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from danube.broker.processes.process import identity_of
from danube.cli.broker import detached, running, surroundings
from danube.cli.main import root
from danube.cli.terminal.services import Services
from danube.config.loading import BrokerConfig, LimitsConfig, ServerConfig, Started
from danube.errors import OperationTimeout, Unavailable
from danube.host import telemetry
from tests.broker_process import ROOT
from tests.unit.cli_stub import StubBroker

# Holds the lock as a supervisor does, tells about itself, and ends at SIGTERM unless told otherwise.
IMPOSTOR = """
import fcntl, json, os, signal, sys, time
data_dir, stubborn, port = sys.argv[1], sys.argv[2] == "stubborn", sys.argv[3]
lock = os.open(data_dir + "/danube.lock", os.O_RDWR | os.O_CREAT)
fcntl.flock(lock, fcntl.LOCK_EX)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
workers = [{"worker": 0, "pid": os.getpid(), "incarnation": 1}]
state = {"pid": os.getpid(), "ready": True, "addresses": {"native": "0.0.0.0:" + port}, "workers": workers,
         "region": "", "started_at_us": 1000001}
open(data_dir + "/danube.json", "w").write(json.dumps(state))
print("ready", flush=True)
signal.sigwait({signal.SIGUSR1 if stubborn else signal.SIGTERM})
"""


@pytest.fixture
def impostor(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    made: list[subprocess.Popen[bytes]] = []

    def start(behaviour: str = "") -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", IMPOSTOR, str(tmp_path), behaviour, "7000"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        made.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        return process

    yield start
    for process in made:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def invoke(*words: str, exit_code: int = 0, **services: Any) -> Result:
    services.setdefault("environ", {})
    result = CliRunner().invoke(root, list(words), obj=Services(**services), prog_name="danube")
    assert result.exit_code == exit_code, result.output
    return result


# -- stop and status -----------------------------------------------------------------------------


def test_a_directory_without_a_broker_is_told_so(tmp_path: Path) -> None:
    for command in ("stop", "status"):
        assert "no broker runs on" in invoke(command, "--data-dir", str(tmp_path), exit_code=3).stderr


def test_a_file_left_by_a_crash_is_no_running_broker(tmp_path: Path) -> None:
    (tmp_path / running.LOCK_FILE).touch()
    (tmp_path / running.STATE_FILE).write_text(json.dumps({"pid": os.getpid()}))
    assert running.read_running(tmp_path) is None


def test_an_unreadable_state_file_is_told(tmp_path: Path) -> None:
    with (tmp_path / running.LOCK_FILE).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for text in ("", "{", "[]", '{"pid": 1}', '{"pid": {}}'):
            (tmp_path / running.STATE_FILE).write_text(text)
            said = invoke("status", "--data-dir", str(tmp_path), exit_code=1).stderr
            assert "danube.json cannot be read" in said


def test_status_shows_the_supervisor_and_what_the_broker_says(
    tmp_path: Path, impostor: Callable[..., subprocess.Popen[bytes]]
) -> None:
    process = impostor()
    broker = StubBroker()
    result = invoke("status", "--data-dir", str(tmp_path), "-o", "json", connect=broker.connect)
    found = json.loads(result.stdout)
    assert broker.urls == ["danube://127.0.0.1:7000"], "a wildcard address is reached on loopback"
    assert (found["pid"], found["broker"], found["ready"]) == (process.pid, "stub", True)
    assert found["started_at"] == "1970-01-01T00:00:01.000001Z"
    assert "WORKER" in invoke("status", "--data-dir", str(tmp_path), connect=broker.connect).stdout


def test_status_of_an_address_needs_no_directory() -> None:
    broker = StubBroker()
    found = json.loads(invoke("status", "-s", "h:1", "-o", "json", connect=broker.connect).stdout)
    assert found == {"address": "danube://h:1", "broker": "stub", "connections": 1}


def test_stop_waits_for_the_end(tmp_path: Path, impostor: Callable[..., subprocess.Popen[bytes]]) -> None:
    process = impostor()
    found = json.loads(invoke("stop", "--data-dir", str(tmp_path), "-o", "json").stdout)
    assert (found["stopped"], found["pid"]) == (True, process.pid)
    assert process.wait(5) == 0


def test_a_broker_that_does_not_stop_is_told_and_left(
    tmp_path: Path, impostor: Callable[..., subprocess.Popen[bytes]]
) -> None:
    process = impostor("stubborn")
    said = invoke("stop", "--data-dir", str(tmp_path), "--timeout", "0.1", exit_code=7).stderr
    assert f"kill -9 {process.pid}" in said
    assert process.poll() is None


@pytest.fixture
def innocent() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has nothing to do with any broker."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def tell(tmp_path: Path, **fields: Any) -> None:
    """Let danube.json say something else."""
    state = json.loads((tmp_path / running.STATE_FILE).read_text())
    (tmp_path / running.STATE_FILE).write_text(json.dumps(state | fields))


def test_a_pid_that_belongs_to_somebody_else_by_now_gets_no_signal(
    tmp_path: Path,
    impostor: Callable[..., subprocess.Popen[bytes]],
    innocent: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    holder = impostor()  # stands for the workers that outlive their supervisor for a moment
    namespace, _, ticks = identity_of(innocent.pid).partition(" ")
    tell(tmp_path, pid=innocent.pid, identity=f"{namespace} {int(ticks) - 1}")
    said = invoke("stop", "--data-dir", str(tmp_path), "--timeout", "0.1", exit_code=7).stderr
    assert "did not stop" in said, "the lock is held, so nothing has stopped"
    assert innocent.poll() is None
    find = running.require_running

    def ends_when_found(data_dir: Path) -> running.RunningBroker:
        found = find(data_dir)
        holder.terminate()
        return found

    monkeypatch.setattr(running, "require_running", ends_when_found)
    found = invoke("stop", "--data-dir", str(tmp_path), "-o", "json", exit_code=0)
    assert json.loads(found.stdout)["stopped"] and innocent.poll() is None


def test_a_pid_of_another_namespace_gets_no_signal(
    tmp_path: Path, impostor: Callable[..., subprocess.Popen[bytes]], innocent: subprocess.Popen[bytes]
) -> None:
    impostor()
    ticks = identity_of(innocent.pid).partition(" ")[2]
    tell(tmp_path, pid=innocent.pid, identity=f"pid:[1] {ticks}")
    said = invoke("stop", "--data-dir", str(tmp_path), exit_code=6).stderr
    assert "another pid namespace" in said
    assert innocent.poll() is None


def test_stopped_means_that_the_directory_is_free(
    tmp_path: Path, impostor: Callable[..., subprocess.Popen[bytes]]
) -> None:
    process = impostor()
    tell(tmp_path, identity=identity_of(process.pid))
    # A worker has inherited the lock and outlives its supervisor.
    with (tmp_path / running.LOCK_FILE).open() as lock:
        process.terminate()
        process.wait()
        fcntl.flock(lock, fcntl.LOCK_EX)
        said = invoke("stop", "--data-dir", str(tmp_path), "--timeout", "0.1", exit_code=7).stderr
        assert "did not stop" in said
    assert "no broker runs" in invoke("stop", "--data-dir", str(tmp_path), exit_code=3).stderr


@pytest.mark.skipif(
    subprocess.run(["unshare", "--pid", "--fork", "true"], capture_output=True, check=False).returncode != 0
    if shutil.which("unshare")
    else True,
    reason="a pid namespace cannot be made here (unshare, as root)",
)
def test_a_stop_in_another_pid_namespace_signals_nobody(
    tmp_path: Path, impostor: Callable[..., subprocess.Popen[bytes]]
) -> None:
    process = impostor()
    tell(tmp_path, identity=identity_of(process.pid))
    inside = ["unshare", "--pid", "--fork", "--mount-proc", *(sys.executable, "-m", "danube", "stop")]
    ended = subprocess.run([*inside, "--data-dir", str(tmp_path)], capture_output=True, text=True, cwd=ROOT)
    assert ended.returncode == 6 and "another pid namespace" in ended.stderr, ended
    assert process.poll() is None


# -- start ---------------------------------------------------------------------------------------


def starting(config: list[BrokerConfig], exit_code: int = 0) -> Callable[..., int]:
    def start(given: BrokerConfig, announce: Callable[[str | Started], None], again: object) -> int:
        config.append(given)
        announce("compiling kernels ...")
        announce(
            Started(
                addresses={"native": "127.0.0.1:7001"},
                data_dir=given.data_dir,
                workers=2,
                pid=42,
                warnings=["an \x1b[2J odd one"],
            )
        )
        return exit_code

    return start


@pytest.fixture
def root_logger() -> Iterator[None]:
    import logging

    handlers, level = list(logging.getLogger().handlers), logging.getLogger().level
    yield
    logging.getLogger().handlers[:] = handlers
    logging.getLogger().setLevel(level)


@pytest.mark.usefixtures("root_logger")
def test_start_passes_the_configuration_and_prints_the_banner(tmp_path: Path) -> None:
    got: list[BrokerConfig] = []
    result = invoke(
        *(
            "start",
            "--workers",
            "2",
            "--data-dir",
            str(tmp_path),
            "--native-port",
            "7001",
            "--log-level",
            "error",
        ),
        environ={"DANUBE_TOPICS__DURABILITY": "fsync", "DANUBE_WORKERS": "5"},
        start_broker=starting(got),
    )
    assert (got[0].workers, got[0].data_dir, got[0].server.native_port) == (2, tmp_path, 7001)
    for wanted in (
        "danube://127.0.0.1:7001",
        str(tmp_path),
        "workers    2",
        "survives kill -9",
        "survives a power cut (default)",
        "warning: an \\x1b[2J odd one",
        "-s danube://127.0.0.1:7001",
    ):
        assert wanted in result.stdout
    assert result.stderr == "compiling kernels ...\n"


@pytest.mark.usefixtures("root_logger")
def test_with_json_logs_the_banner_is_json(tmp_path: Path) -> None:
    words = ("start", "--data-dir", str(tmp_path), "--log-format", "json")
    found = json.loads(invoke(*words, start_broker=starting([])).stdout)
    assert (found["event"], found["pid"], found["addresses"]) == ("started", 42, {"native": "127.0.0.1:7001"})


@pytest.mark.usefixtures("root_logger")
def test_the_brokers_exit_code_is_the_commands(tmp_path: Path) -> None:
    invoke("start", "--data-dir", str(tmp_path), start_broker=starting([], 70), exit_code=70)


def test_an_end_of_file_while_starting_is_no_silent_interrupt(tmp_path: Path) -> None:
    def cut(config: BrokerConfig, announce: Callable[..., None], again: object) -> int:
        raise EOFError("Ran out of input")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(telemetry, "configure", lambda *rest, **more: None)
        said = invoke("start", "--data-dir", str(tmp_path), start_broker=cut, exit_code=1).stderr
    assert "EOFError: Ran out of input" in said


def test_a_wrong_configuration_starts_nothing(tmp_path: Path) -> None:
    file = tmp_path / "danube.yml"
    file.write_text("server:\n  hots: x\n  native_prot: 1\n")
    got: list[BrokerConfig] = []
    said = invoke("start", "--config", str(file), exit_code=11, start_broker=starting(got)).stderr
    assert f"{file}:2" in said
    assert "did you mean native_port?" in said
    assert got == []


def test_a_detached_start_that_fails_tells_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detached, "_flags", lambda config, file: ["--no-such-flag"])
    said = invoke("start", "--detach", "--data-dir", str(tmp_path / "d"), exit_code=6).stderr
    assert "ended with exit code 2" in said
    assert "--no-such-flag" in said


def test_a_second_detached_broker_is_refused(
    tmp_path: Path, impostor: Callable[..., subprocess.Popen[bytes]]
) -> None:
    process = impostor()
    said = invoke("start", "--detach", "--data-dir", str(tmp_path), exit_code=4).stderr
    assert f"pid {process.pid}" in said


def test_a_detached_broker_gets_the_whole_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    from danube.config.loading import load

    monkeypatch.setenv("DANUBE_CONFIG", "/gone.yml")
    given = load(None, {}, {"data_dir": "/d", "server.native_port": 7, "topics.reliable": False}).config
    environ = detached._environment(given)
    assert load(None, environ, {}).config == given
    assert "DANUBE_CONFIG" not in environ


def test_a_detached_broker_leaves_to_the_file_what_a_reload_reads_again(tmp_path: Path) -> None:
    from danube.config.loading import load

    file = tmp_path / "danube.yml"
    file.write_text("workers: 2\nauth: {mode: token, jwt: {keys: 'kid=a alg=HS256 file=/a'}}\n")
    loaded = load(file, {}, {"data_dir": "/d"})
    kept = detached._kept(loaded.file)
    assert kept == file and detached._flags(loaded.config, kept)[2:4] == ["--config", str(file)]
    environ = detached._environment(loaded.config, kept)
    assert load(file, environ, {}).config == loaded.config
    file.write_text("workers: 3\nauth: {mode: token, jwt: {keys: 'kid=b alg=HS256 file=/b'}}\n")
    again = load(file, environ, {}).config
    assert again.workers == 2 and again.auth.jwt_keys == "kid=b alg=HS256 file=/b"
    assert detached._kept(None) is None and detached._kept(Path("/dev/null")) is None, "no regular file"


def test_a_detached_start_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detached, "SILENCE_MAX_S", 0.1)
    config = BrokerConfig(data_dir=tmp_path)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    with pytest.raises(OperationTimeout, match="was told to stop"):
        detached._wait_ready(config, process, detached.Spoken(tmp_path / "danube.out", 0))
    assert process.wait(5) == -signal.SIGTERM


BUSY = """
import time
end = time.monotonic() + 3
while time.monotonic() < end: pass
raise SystemExit(3)
"""


def test_a_detached_start_that_works_in_silence_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detached, "SILENCE_MAX_S", 1.5)
    monkeypatch.setattr(detached, "WORK_MIN_S", 0.02)  # so little even on a busy machine
    config = BrokerConfig(data_dir=tmp_path)
    with pytest.raises(Unavailable, match="exit code 3"):
        process = subprocess.Popen([sys.executable, "-c", BUSY])
        detached._wait_ready(config, process, detached.Spoken(tmp_path / "danube.out", 0))
    monkeypatch.setattr(detached, "START_MAX_S", 0.2)
    process = subprocess.Popen([sys.executable, "-c", BUSY])
    with pytest.raises(OperationTimeout, match="was told to stop"):
        detached._wait_ready(config, process, detached.Spoken(tmp_path / "danube.out", 0))
    assert process.wait(5) == -signal.SIGTERM


# Says something each 0.25 s, twelve times: longer in all than it may be silent.
SLOW = """
import sys, time
for number in range(12):
    time.sleep(0.25)
    print(f"compiled kernel {number}", flush=True)
    print("2026-11-21T10:25:03.123Z INFO a line of the log", flush=True)
print("Danube 1 serves", flush=True)
print("  data  /d", flush=True)
sys.exit(3)
"""


def test_a_slow_detached_start_tells_its_progress_and_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(detached, "SILENCE_MAX_S", 2.5)
    config = BrokerConfig(data_dir=tmp_path)
    output = tmp_path / "danube.out"
    output.write_text("of an earlier start\n")
    before = output.stat().st_size
    with output.open("ab") as sink:
        process = subprocess.Popen([sys.executable, "-c", SLOW], stdout=sink)
    with pytest.raises(Unavailable, match="exit code 3"):
        detached._wait_ready(config, process, detached.Spoken(output, before))
    assert capsys.readouterr().err.splitlines() == [f"compiled kernel {number}" for number in range(12)]


def test_output_that_nobody_rotates_is_bounded(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path / "out", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    handler = telemetry._DescriptorHandler(descriptor)
    handler.setFormatter(telemetry.TextFormatter(""))
    import logging

    record = logging.LogRecord("danube.x", logging.INFO, "", 0, "y" * 500, None, None)
    telemetry.bound_file(10_000)
    try:
        for _ in range(2_000):
            handler.emit(record)
        assert os.fstat(descriptor).st_size <= 10_000 + telemetry.FILE_CHECK_LINES * 600
    finally:
        telemetry.bound_file(0)
        os.close(descriptor)


# -- configuration commands ----------------------------------------------------------------------


def test_the_shown_configuration_is_one_that_is_accepted(tmp_path: Path) -> None:
    environ = {"DANUBE_WAL__SEGMENT_SIZE": "32MiB", "DANUBE_DATA_DIR": str(tmp_path / "a b: #c")}
    shown = invoke("config", "show", "--origin", environ=environ).stdout
    assert "# environment DANUBE_WAL__SEGMENT_SIZE" in shown
    file = tmp_path / "shown.yml"
    file.write_text(shown)
    again = invoke("config", "show", "-o", "json", "--config", str(file)).stdout
    assert json.loads(again) == json.loads(invoke("config", "show", "-o", "json", environ=environ).stdout)


def test_check_lists_every_problem(tmp_path: Path) -> None:
    assert json.loads(invoke("config", "check", "-o", "json").stdout)["valid"] is True
    file = tmp_path / "danube.yml"
    file.write_text("a: 1\nb: 2\n")
    error = json.loads(invoke("config", "check", "--config", str(file), "-o", "json", exit_code=11).stderr)[
        "error"
    ]
    assert [one["where"] for one in error["details"]] == [f"{file}:1", f"{file}:2"]


# -- surroundings --------------------------------------------------------------------------------


def test_a_volatile_or_remote_directory_is_warned_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text("root / ext4 rw 0 0\ntmpfs /mnt/a tmpfs rw 0 0\nx /mnt/a\\040b nfs4 rw 0 0\n")
    assert surroundings.file_system_of(Path("/mnt/a/x"), mounts) == "ext4", (
        "it does not exist, so its parent holds"
    )
    monkeypatch.setattr(surroundings, "_existing", lambda path: path)
    assert surroundings.file_system_of(Path("/mnt/a/x"), mounts) == "tmpfs"
    assert surroundings.file_system_of(Path("/mnt/a b"), mounts) == "nfs4"
    assert surroundings.file_system_of(Path("/mnt/ab"), mounts) == "ext4"
    assert surroundings.file_system_of(Path("/mnt/ab"), tmp_path / "absent") == ""
    monkeypatch.setattr(surroundings, "file_system_of", lambda path: "tmpfs")
    assert "a reboot loses everything" in " ".join(
        surroundings.warnings_about(BrokerConfig(data_dir=tmp_path))
    )


@pytest.mark.parametrize(
    ("host", "warned"),
    [("127.0.0.1", False), ("localhost", False), ("::1", False), ("0.0.0.0", True), ("h", True)],
)
def test_listening_for_others_is_warned_about(host: str, warned: bool) -> None:
    said = surroundings.warnings_about(BrokerConfig(server=ServerConfig(host=host)))
    assert any("without encryption" in one for one in said) is warned


def test_too_few_descriptors_are_warned_about() -> None:
    limits = LimitsConfig(connections_max=1_000_000_000)
    import resource

    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] == resource.RLIM_INFINITY:
        pytest.skip("no limit here")
    assert any("ulimit" in one for one in surroundings.warnings_about(BrokerConfig(workers=1, limits=limits)))


# -- signals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_closes_what_is_open_and_leaves_with_its_code(
    number: signal.Signals, exit_code: int
) -> None:
    code = (
        "import sys\n"
        "from danube.cli.main import root\nfrom danube.cli.terminal.services import Services\n"
        "from tests.unit.cli_stub import StubBroker\n"
        "broker = StubBroker()\nbroker.put('/default/t', b'one')\n"
        "services = Services(connect_async=broker.connect_async)\n"
        "try: root(['consume', 't', '--from', 'earliest'], obj=services)\n"
        "finally: print(broker.subscriptions)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=Path(__file__).parents[4],
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"0:0  one\n"
        process.send_signal(number)
        rest, said = process.communicate(timeout=10)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, rest, said.strip()) == (exit_code, b"{}\n", b"")
