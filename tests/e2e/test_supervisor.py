"""The supervisor with small workers that echo over their rings: death, hanging, draining, refusal.

The broker under test is this file run as a program; its workers do what the first argument says.
Everything is found out from outside: pids from danube.json, counters from the shared memory.
"""

from __future__ import annotations

import errno
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import uvloop

from danube.broker.processes.data_dir import BrokerState, DataDir
from danube.broker.processes.supervisor import SupervisorSettings, WorkerContext, run
from danube.errors import AlreadyRunning, DanubeError, StorageIncompatible, broken, exit_code_of
from danube.host import telemetry
from danube.ipc.counters import Counter, snapshot
from danube.ipc.region import Region
from tests.fakes.broker_state import broker_state

WAIT_S = 30.0


def _serve(context: WorkerContext) -> int:
    """Pass a token round the ring of workers and answer clients with the incarnation, until drained."""
    channel = context.channel()
    following = (context.worker + 1) % context.workers
    selector = selectors.DefaultSelector()
    for source in (context.drain, channel, context.listener):
        selector.register(source, selectors.EVENT_READ)
    context.ready()
    while not context.drain.requested:
        context.heartbeat()
        channel.peers_restarted()
        records = channel.poll()
        context.counters.add(Counter.FORWARDED_IN, len(records))
        channel.release()
        if context.workers > 1:
            channel.send(following, 1, [b"token"])
        channel.unblocked()
        channel.flush()
        for key, _ in selector.select(0.01):
            if key.fileobj is context.listener:
                client, _ = context.listener.accept()
                with client:
                    client.sendall(f"{context.worker} {context.incarnation}".encode())
    return 0


def _serve_and_write_a_file(context: WorkerContext) -> int:
    """Drains slowly: what was begun is finished after the signal."""
    _serve(context)
    with selectors.DefaultSelector() as pause:
        pause.select(0.2)
    (context.settings.data_dir / f"finished-{context.worker}").touch()
    return 0


def _serve_on_a_loop(context: WorkerContext) -> int:
    """As a real worker does it: everything is a reader of one event loop, which sleeps in between."""
    loop = uvloop.new_event_loop()
    channel = context.channel()

    def on_bell() -> None:
        channel.disarm()
        channel.peers_restarted()
        records = channel.poll()
        for peer, kind, payload in records:
            channel.send(peer, kind, [payload])
        context.counters.add(Counter.FORWARDED_IN, len(records))
        channel.release()
        channel.unblocked()
        channel.flush()
        if records or not channel.arm():
            loop.call_soon(on_bell)

    def beat() -> None:
        context.heartbeat()
        loop.call_later(0.1, beat)

    def start() -> None:
        if context.worker == 0:
            channel.send(1, 1, [b"ball"])
            channel.flush()
        context.ready()
        on_bell()

    loop.add_reader(channel.fileno(), on_bell)
    loop.add_reader(context.drain.fileno(), loop.stop)
    loop.call_soon(beat)
    loop.call_soon(start)
    loop.run_forever()
    return 0


def _ignore_drain(context: WorkerContext) -> int:
    context.ready()
    while True:
        context.heartbeat()
        select.select([], [], [], 0.05)


def _crash_after_ready(context: WorkerContext) -> int:
    """Worker 1 serves once everything was ready and then dies young again and again."""
    if context.worker == 1:
        with (context.settings.data_dir / "starts").open("a") as starts:
            starts.write(f"{time.monotonic()}\n")
        if (context.settings.data_dir / "crash").exists():
            broken("told to crash")
    return _serve(context)


def _never_ready(context: WorkerContext) -> int:
    raise RuntimeError("cannot serve")


WORKERS = {
    worker.__name__: worker
    for worker in (
        _serve,
        _serve_on_a_loop,
        _serve_and_write_a_file,
        _ignore_drain,
        _crash_after_ready,
        _never_ready,
    )
}


def _refuse_forks_on_request(data_dir: Path) -> None:
    fork = os.fork

    def refusable_fork() -> int:
        if (data_dir / "no-processes").exists():
            (data_dir / "refused-forks").touch()
            raise BlockingIOError(errno.EAGAIN, "no process")
        return fork()

    os.fork = refusable_fork


def _main(behaviour: str, options: dict[str, str | int]) -> int:
    telemetry.configure("info")
    data_dir = Path(str(options.pop("data_dir")))
    _refuse_forks_on_request(data_dir)
    settings = SupervisorSettings(
        data_dir=data_dir,
        ring_bytes=65536,
        on_ready=lambda started: print("ready", flush=True),
        **{"workers": 2, "native_port": 0, **options},  # type: ignore[arg-type]
    )
    try:
        return run(settings, WORKERS[behaviour])
    except DanubeError as error:
        print(f"{type(error).__name__}: {error} ({error.hint})", flush=True)
        return exit_code_of(error)


class Broker:
    """A supervisor in a process of its own."""

    def __init__(self, data_dir: Path, behaviour: str = "_serve", **options: str | int) -> None:
        self.data_dir = data_dir
        text = json.dumps({"data_dir": str(data_dir), **options})
        self.process = subprocess.Popen(
            [sys.executable, __file__, behaviour, text],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "DANUBE_KERNELS": "off", "PYTHONPATH": str(Path(__file__).parents[2])},
            preexec_fn=_die_with_the_test,
        )

    def wait_ready(self) -> Broker:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n", self.end()
        return self

    def state(self) -> BrokerState:
        state = broker_state(self.data_dir)
        assert state is not None
        return state

    def pids(self) -> list[int]:
        return [worker.pid for worker in self.state().workers]

    def counters(self) -> list[dict[str, int]]:
        region = Region.attach(self.state().region)
        try:
            return snapshot(region)
        finally:
            region.close()

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Send a signal; the exit code and everything that was printed."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        out, err = self.process.communicate(timeout=WAIT_S)
        return self.process.returncode, out + err


def _die_with_the_test() -> None:
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Broker]]:
    made: list[Broker] = []

    def make(behaviour: str = "_serve", **options: str | int) -> Broker:
        made.append(Broker(tmp_path / "data", behaviour, **options))
        return made[-1]

    yield make
    for broker in made:
        if broker.process.poll() is None:
            broker.process.kill()
        broker.process.communicate(timeout=WAIT_S)


def wait_until(condition: Callable[[], bool], what: str) -> float:
    """Seconds until ``condition`` holds; fails after WAIT_S."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < WAIT_S, f"waited in vain: {what}"
        time.sleep(0.005)
    return time.monotonic() - began


def gone(pid: int) -> bool:
    """Whether a process has ended (a zombie has: nobody may be there to reap it)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def named_memory(pid: int) -> list[str]:
    """Files in memory that a process maps and that would outlive it."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    assert any("/memfd:" in line for line in lines), "its region is one that would not"
    return [line for line in lines if " /dev/shm/" in line]


def ask(address: str) -> str:
    host, port = address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as connection:
        return connection.recv(100).decode()


def test_workers_share_a_port_and_their_rings(start: Callable[..., Broker]) -> None:
    broker = start().wait_ready()
    assert broker.state().ready
    address = broker.state().addresses["native"]
    wait_until(lambda: {ask(address)[0] for _ in range(8)} == {"0", "1"}, "both workers answer")
    wait_until(lambda: all(one["forwarded_in"] > 3 for one in broker.counters()), "tokens go round")
    assert broker.end()[0] == 0


def test_workers_on_an_event_loop_sleep_wake_and_drain(start: Callable[..., Broker]) -> None:
    broker = start("_serve_on_a_loop").wait_ready()
    wait_until(lambda: all(one["forwarded_in"] > 100 for one in broker.counters()), "the ball flies")
    began = time.monotonic()
    assert broker.end()[0] == 0
    assert time.monotonic() - began < 5


def test_a_killed_worker_is_replaced_within_a_second_and_the_other_goes_on(
    start: Callable[..., Broker],
) -> None:
    broker = start().wait_ready()
    first, second = broker.pids()
    before = broker.counters()
    os.kill(first, signal.SIGKILL)
    took_s = wait_until(
        lambda: (now := broker.counters()[0])["pid"] not in (0, first) and now["state"] == 1,
        "replacement serves",
    )
    assert took_s < 1.0
    after = broker.counters()
    assert after[1]["pid"] == second and after[1]["restarts"] == 0 and after[0]["restarts"] == 1
    assert after[0]["incarnation"] > max(one["incarnation"] for one in before)
    both = broker.counters()
    wait_until(
        lambda: all(
            now["forwarded_in"] > then["forwarded_in"] + 3
            for now, then in zip(broker.counters(), both, strict=True)
        ),
        "tokens go round again",
    )
    assert broker.end()[0] == 0


def test_a_worker_that_is_killed_again_and_again_is_always_back_within_a_second(
    start: Callable[..., Broker],
) -> None:
    broker = start().wait_ready()
    for _ in range(6):
        pid = broker.counters()[0]["pid"]
        os.kill(pid, signal.SIGKILL)
        took_s = wait_until(
            lambda pid=pid: (now := broker.counters()[0])["pid"] not in (0, pid) and now["state"] == 1,
            "it is back",
        )
        assert took_s < 1.0
    assert broker.counters()[0]["restarts"] == 6
    assert broker.end()[0] == 0


def test_a_connection_in_a_dead_workers_backlog_is_served_by_its_replacement(
    start: Callable[..., Broker],
) -> None:
    broker = start(workers=1).wait_ready()
    address = broker.state().addresses["native"]
    (pid,) = broker.pids()
    os.kill(pid, signal.SIGSTOP)
    host, port = address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as connection:
        os.kill(pid, signal.SIGKILL)
        assert connection.recv(100).split()[0] == b"0"
    assert broker.end()[0] == 0


def test_signals_that_come_while_it_ends_do_not_change_how(start: Callable[..., Broker]) -> None:
    broker = start().wait_ready()
    pids = broker.pids()
    broker.process.terminate()
    wait_until(lambda: all(gone(pid) for pid in pids), "workers are gone")
    while broker.process.poll() is None:
        broker.process.terminate()
    assert broker.end()[0] == 0


def test_a_killed_supervisor_takes_its_workers_and_memory_and_the_next_start_works(
    start: Callable[..., Broker],
) -> None:
    broker = start().wait_ready()
    pids, highest = broker.pids(), max(worker.incarnation for worker in broker.state().workers)
    assert not named_memory(broker.process.pid), "what has no name goes with the processes"
    broker.process.kill()
    assert wait_until(lambda: all(gone(pid) for pid in pids), "workers are gone") < 2.0
    assert broker_state(broker.data_dir) is None, "what danube.json says is not believed"
    following = start().wait_ready()
    assert min(worker.incarnation for worker in following.state().workers) > highest
    assert following.end()[0] == 0


def test_a_start_right_after_a_kill_waits_for_the_orphans_instead_of_refusing(
    start: Callable[..., Broker],
) -> None:
    broker = start().wait_ready()
    broker.process.kill()
    broker.process.wait(timeout=WAIT_S)
    assert start().wait_ready().end()[0] == 0


def test_a_stopped_worker_is_dead_before_its_replacement_starts(start: Callable[..., Broker]) -> None:
    broker = start(heartbeat_timeout_ms=600).wait_ready()
    first, second = broker.pids()
    os.kill(first, signal.SIGSTOP)
    wait_until(lambda: broker.counters()[0]["pid"] not in (0, first), "it is replaced")
    assert gone(first)
    assert broker.pids()[1] == second
    code, output = broker.end()
    assert code == 0 and "no heartbeat" in output


def test_a_stopped_supervisor_replaces_nobody_when_it_goes_on(start: Callable[..., Broker]) -> None:
    broker = start(heartbeat_timeout_ms=800).wait_ready()
    pids = broker.pids()
    everyone = [broker.process.pid, *pids]
    for pid in everyone:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(1.2)  # longer than the heartbeat may be silent
    os.kill(broker.process.pid, signal.SIGCONT)
    time.sleep(0.1)  # it looks before the workers move
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    seen = [one["heartbeat_ns"] for one in broker.counters()]
    wait_until(
        lambda: all(now["heartbeat_ns"] > then for now, then in zip(broker.counters(), seen, strict=True)),
        "alive",
    )
    assert broker.pids() == pids
    assert broker.end()[0] == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_lets_workers_finish(start: Callable[..., Broker], number: int) -> None:
    broker = start("_serve_and_write_a_file").wait_ready()
    assert broker.end(number)[0] == 0
    assert sorted(path.name for path in broker.data_dir.glob("finished-*")) == ["finished-0", "finished-1"]
    assert sorted(path.name for path in broker.data_dir.iterdir() if path.name.startswith("danube")) == [
        "danube.lock"
    ]


def test_a_worker_that_does_not_drain_is_killed_at_the_deadline(start: Callable[..., Broker]) -> None:
    broker = start("_ignore_drain", drain_timeout_ms=300).wait_ready()
    pids = broker.pids()
    began = time.monotonic()
    assert broker.end()[0] == 0
    assert 0.3 <= time.monotonic() - began < 5
    assert all(gone(pid) for pid in pids)


def test_a_second_signal_does_not_wait_for_the_deadline(start: Callable[..., Broker]) -> None:
    broker = start("_ignore_drain", drain_timeout_ms=60_000).wait_ready()
    broker.process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        broker.process.wait(timeout=0.3)
    broker.process.send_signal(signal.SIGTERM)
    assert broker.process.wait(timeout=5) == 0


def test_a_second_broker_on_the_data_directory_is_refused_and_changes_nothing(
    start: Callable[..., Broker],
) -> None:
    broker = start().wait_ready()
    before = {path.name: path.read_bytes() for path in broker.data_dir.iterdir()}
    code, output = start().end(signal.SIGCONT)
    assert code == 4
    assert f"AlreadyRunning: a broker is running on {broker.data_dir} (pid {broker.process.pid})" in output
    assert {path.name: path.read_bytes() for path in broker.data_dir.iterdir()} == before
    assert broker.end()[0] == 0


def test_a_taken_port_is_refused_also_when_its_owner_shares_it(start: Callable[..., Broker]) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        code, output = start(native_port=port).end(signal.SIGCONT)
    assert code == 4 and f"port 127.0.0.1:{port} is taken" in output


def test_an_address_of_another_machine_is_refused(start: Callable[..., Broker]) -> None:
    code, output = start(host="203.0.113.7").end(signal.SIGCONT)
    assert code == 11 and "203.0.113.7" in output


def test_a_worker_that_dies_young_waits_longer_each_time_and_the_other_serves(
    start: Callable[..., Broker],
) -> None:
    broker = start("_crash_after_ready").wait_ready()
    first, second = broker.pids()
    (broker.data_dir / "crash").touch()
    os.kill(second, signal.SIGKILL)
    times = broker.data_dir / "starts"
    wait_until(lambda: len(times.read_text().split()) >= 6, "several restarts")
    starts = [float(line) for line in times.read_text().split()][1:]
    pauses = [later - earlier for earlier, later in pairwise(starts)]
    assert all(pause >= expected for pause, expected in zip(pauses, (0.1, 0.2, 0.4, 0.8), strict=False))
    assert broker.pids()[0] == first
    (broker.data_dir / "crash").unlink()
    wait_until(lambda: broker.counters()[1]["state"] == 1 and broker.pids()[1] != 0, "it recovers")
    code, output = broker.end()
    assert code == 0 and "an invariant does not hold (status 70)" in output


def test_a_broker_that_never_serves_gives_up_with_the_reason(start: Callable[..., Broker]) -> None:
    code, output = start("_never_ready").end(signal.SIGCONT)
    assert code == 6
    assert "cannot start" in output and "RuntimeError: cannot serve" in output


def test_when_there_is_no_process_to_be_had_the_rest_serves_and_it_is_tried_again(
    start: Callable[..., Broker],
) -> None:
    broker = start().wait_ready()
    first, second = broker.pids()
    (broker.data_dir / "no-processes").touch()
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: (broker.data_dir / "refused-forks").exists(), "a refused fork")
    address = broker.state().addresses["native"]
    wait_until(lambda: _answer_or_nothing(address).startswith("1"), "the other one answers")
    wait_until(lambda: broker.pids() == [0, second], "the state file tells it")
    (broker.data_dir / "no-processes").unlink()
    wait_until(lambda: broker.counters()[0]["state"] == 1 and broker.pids()[0] != 0, "it is replaced")
    code, output = broker.end()
    assert code == 0 and "worker cannot be started" in output


def _answer_or_nothing(address: str) -> str:
    """A connection may wait in the backlog of the worker that is not there."""
    host, port = address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=0.2) as connection:
        try:
            return connection.recv(100).decode()
        except TimeoutError:
            return ""


def test_a_ready_broker_tells_its_service_manager(
    tmp_path: Path, start: Callable[..., Broker], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as service:
        service.bind(str(tmp_path / "notify"))
        service.settimeout(WAIT_S)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "400000")
        broker = start().wait_ready()
        told = {service.recv(100) for _ in range(3)}
        assert told == {b"READY=1", b"WATCHDOG=1"}
        assert broker.end()[0] == 0
        told.add(b"")
        while b"STOPPING=1" not in told:
            told.add(service.recv(100))


def test_the_data_directory_is_private_and_its_numbers_only_grow(tmp_path: Path) -> None:
    path = tmp_path / "made" / "data"
    data = DataDir(path)
    assert path.stat().st_mode & 0o777 == 0o700
    assert [data.next_incarnations(3), data.next_incarnations(1)] == [1, 4]
    with pytest.raises(AlreadyRunning):
        DataDir(path)
    data.close()
    again = DataDir(path)
    assert again.next_incarnations(1) == 5
    again.close()


def test_a_newer_format_is_refused_untouched(tmp_path: Path) -> None:
    DataDir(tmp_path).close()
    (tmp_path / "format").write_text("2\n")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(StorageIncompatible):
        DataDir(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1], json.loads(sys.argv[2])))
