"""The supervisor: makes what workers share, forks them, watches them and replaces them.

It imports nothing that starts a thread and serves no client.  Order of a start: lock the data directory, load
the kernels (so that all workers share their code), map the shared memory, open the sockets, number the
workers on disk, fork.  Where there are no kernels yet, they are compiled beside the workers
(danube.broker.processes.compiler).  Order of a replacement: the old process is killed and **reaped**, a new
incarnation is written to disk, the peers are informed, and only then the new process is forked.  So at any
time at most one process can append to a worker's partitions.

A worker is replaced when it ends for any reason, and killed when it gives no heartbeat.  The first
replacement is immediate.  If a worker dies soon after its start again and again, the next one is delayed, up
to RESTART_DELAY_MAX_NS.  The delay is shorter if the worker had served, so that killing a healthy worker
never costs a second.

The broker's state is sent to systemd (or another process that set NOTIFY_SOCKET): sd_notify(3) in one
datagram.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from danube.broker.processes import process, unbroken
from danube.broker.processes.compiler import KernelCompiler
from danube.broker.processes.contexts import (
    ControllerContext,
    ControllerMain,
    DrainSignal,
    MetricsContext,
    MetricsMain,
    MoverContext,
    MoverMain,
    Pulse,
    SupervisorSettings,
    WorkerContext,
    WorkerMain,
)
from danube.broker.processes.copied import note_place, settle_place
from danube.broker.processes.data_dir import BrokerState, DataDir, WorkerState
from danube.broker.processes.directories import strangers
from danube.broker.processes.lease import SharedLease
from danube.broker.processes.listeners import address_text, addresses, close_listeners, open_listeners
from danube.broker.processes.process import STABLE_NS, restart_delay_ns
from danube.broker.processes.side_process import SideProcess
from danube.cluster.control.dismissal import EXIT_DISMISSED
from danube.config.loading import Started
from danube.config.sections import NO_PORT
from danube.core.protocol.native import FrameDecoder, decode_error, error_frame
from danube.errors import (
    Damage,
    DanubeError,
    ProtocolError,
    StorageFailed,
    Unavailable,
    WrongState,
    exit_code_of,
)
from danube.host import telemetry
from danube.host.capacity import Amount, workers_wanted
from danube.host.clock import monotonic_ns, wall_us
from danube.ipc import atomics
from danube.ipc.counters import Counter, Counters, State
from danube.ipc.passage import Passage
from danube.ipc.region import Region
from danube.limits import MIB


class ServiceNotifier:
    """Messages to a service manager; none are sent without one."""

    def __init__(self, address: str, watchdog_us: int) -> None:
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._watchdog_ns = watchdog_us * 1000 // 2
        self._next_watchdog_ns = 0

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> ServiceNotifier:
        own_pid = str(os.getpid())
        interval = environ.get("WATCHDOG_USEC", "")
        meant = environ.get("WATCHDOG_PID", own_pid) == own_pid and interval.isdigit()
        return cls(environ.get("NOTIFY_SOCKET", ""), int(interval) if meant else 0)

    def send(self, state: str) -> None:
        """Send ``state`` (READY=1, STOPPING=1 ...); a manager that is gone is no reason to stop."""
        if not self._address:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagram:
            datagram.setblocking(False)
            try:
                datagram.sendto(state.encode(), self._address)
            except OSError:
                pass

    def watchdog(self, now_ns: int) -> None:
        """Send WATCHDOG=1 when half of the manager's interval has passed."""
        if self._watchdog_ns and now_ns >= self._next_watchdog_ns:
            self._next_watchdog_ns = now_ns + self._watchdog_ns
            self.send("WATCHDOG=1")


SECOND_NS: Final = 1_000_000_000
TICK_NS: Final = SECOND_NS // 5
STORE_WORD_NS: Final = 3 * SECOND_NS // 2  # how long the banner waits for an answer of the object store
FIRST_START_ATTEMPTS: Final = 5
REFUSAL_BYTES_MAX: Final = 64 * 1024
METRICS_DRAIN_MS: Final = 1_000
CONTROLLER_DRAIN_MS: Final = 2_000
STRANGERS_SHOWN_MAX: Final = 10

__all__ = ["Supervisor", "SupervisorSettings", "WorkerContext", "run"]
_log = telemetry.events("broker.supervisor")


@dataclass(frozen=True, slots=True)
class ControllerSide:
    """The controller's main function, what opens its door for other members, and the lease that it keeps."""

    main: ControllerMain
    open_door: Callable[[], socket.socket]
    lease: SharedLease = field(default_factory=SharedLease)


class Refusal:
    """A worker's refusal to start, in its own words: memory that it shares with the supervisor.

    Made before the fork, and read over the worker's death.
    """

    def __init__(self) -> None:
        self._fd = os.memfd_create("danube-refusal", os.MFD_CLOEXEC)

    def tell(self, error: DanubeError) -> None:
        """In the child, before it ends."""
        frame = error_frame(error)
        for one in FrameDecoder().frames(frame, 0, len(frame)):
            os.pwrite(self._fd, frame[one.start : one.end], 0)

    def take(self) -> DanubeError | None:
        """In the supervisor, once the child is gone; the next one begins anew."""
        body = os.pread(self._fd, REFUSAL_BYTES_MAX, 0)
        os.ftruncate(self._fd, 0)
        try:
            return decode_error(body) if body else None
        except ProtocolError:  # it was killed while it told
            return None

    def close(self) -> None:
        os.close(self._fd)


class _Worker:
    """The supervisor's view of one worker's place."""

    def __init__(self, index: int, region: Region) -> None:
        self.index = index
        self.counters = Counters(region, index)
        self.refusal = Refusal()
        self.pid = 0  # 0: not running
        self.incarnation = 0
        self.start_ns = 0  # not before
        self.started_ns = 0
        self.deaths = 0  # in a row, each before STABLE_NS
        self.heartbeat_ns = 0
        self.seen_ns = 0  # when heartbeat_ns last changed, by the supervisor's waking time

    @property
    def ready(self) -> bool:
        return self.pid != 0 and self.counters.get(Counter.STATE) == State.READY


class Supervisor:
    """One broker on one data directory; see run()."""

    def __init__(
        self,
        settings: SupervisorSettings,
        worker_main: WorkerMain,
        mover_main: MoverMain | None,
        metrics_main: MetricsMain | None,
        controller: ControllerSide | None = None,
    ) -> None:
        self._settings = settings
        self._worker_main = worker_main
        self._mover_main = mover_main
        self._metrics_main = metrics_main
        self._controller_side = controller
        self._controller: SideProcess | None = None
        self._mover: SideProcess | None = None
        self._warnings: tuple[str, ...] | None = None  # None: not known yet
        self._served_ns = 0  # since when all workers serve
        self._looked_ns = 0  # at the data directory
        self._metrics: SideProcess | None = None
        self._compiler: KernelCompiler | None = None  # None where kernels are there, or never will be
        self._metrics_address = ""
        self._wanted = Amount(settings.workers, "as configured") if settings.workers else workers_wanted()
        self._count = int(self._wanted.value)
        self._started_at_us = wall_us()
        self._notifier = ServiceNotifier.from_environment(os.environ)
        self._stop_signals = 0
        self._reload_signals = 0
        self._stop_deadline_ns = 0
        self._announced_ready = False
        self._state_changed = False
        self._failure: DanubeError | None = None
        self._tick_ns = 0
        self._unbroken_since = unbroken.ALWAYS
        self._data: DataDir
        self._region: Region
        self._listeners: list[dict[str, socket.socket]] = []
        self._workers: list[_Worker] = []
        self._ready_bell = -1
        self._signal_pipe = (-1, -1)

    def run(self) -> int:
        """Serve until told to stop; returns the exit code.  Raises DanubeError when it cannot start."""
        self._data = DataDir(self._settings.data_dir)
        try:
            self._settle_place()
            self._prepare()
            try:
                self._start_first()
                while not self._finished():
                    self._wait()
                    self._turn(monotonic_ns())
            finally:
                self._end_all()
                if self._controller_side is None:
                    note_place(self._data.path)
            unbroken.end(self._data.path)
        finally:
            close_listeners(self._listeners)
            self._data.close()
        if self._failure is not None:
            raise self._failure
        _log.info("stopped")
        return 0

    def _settle_place(self) -> None:
        """Alone on its data, a copy that was put back begins a new history; members have reservations."""
        history = settle_place(self._data) if self._controller_side is None else None
        if history is not None and self._settings.progress is not None:
            self._settings.progress(f"history {history.history_id[:8]} begins: {history.why}")

    def _prepare(self) -> None:
        process.raise_descriptor_limit()
        _log_foreign_files(self._settings.data_dir)
        self._compiler = _load_kernels(self._settings.progress)
        settings = self._settings
        ports = {"native": settings.native_port, **settings.extra_ports}
        self._listeners = open_listeners(settings.host, ports, self._count, settings.local_socket)
        self._region = Region.create(self._count, settings.ring_bytes)
        shared_mib_max = self._region.layout.region_bytes // MIB
        _log.info("workers chosen", workers=self._count, by=self._wanted.whose, shared_mib_max=shared_mib_max)
        self._ready_bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._workers = [_Worker(index, self._region) for index in range(self._count)]
        if self._mover_main is not None:
            self._mover = self._make_mover(self._mover_main)
        if self._metrics_main is not None and settings.metrics_port != NO_PORT:
            self._metrics = self._make_metrics(self._metrics_main)
        if self._controller_side is not None:  # it tells the others where all doors are
            mover = self._mover.pulse if self._mover is not None else None
            self._controller = self._make_controller(self._controller_side, mover)
        self._catch_signals()
        gc.collect()
        gc.freeze()  # a worker's garbage collector ignores existing objects, so their pages stay shared

    @property
    def _sides(self) -> list[SideProcess]:
        return [side for side in (self._controller, self._mover, self._metrics) if side is not None]

    def _make_mover(self, main: MoverMain) -> SideProcess:
        def run(drain: DrainSignal, side: SideProcess) -> int | None:
            begun = side.pulse.start_count - 1
            return main(MoverContext(**side.context(drain), start_count=begun, compiler=self._compiler))

        settings = self._settings
        return SideProcess("mover", settings, run, drain_timeout_ms=settings.mover_drain_timeout_ms)

    def _make_metrics(self, main: MetricsMain) -> SideProcess:
        settings, mover = self._settings, self._mover
        ((door,),) = (
            one.values() for one in open_listeners(settings.host, {"metrics": settings.metrics_port}, 1)
        )
        self._metrics_address = address_text(door)

        def run(drain: DrainSignal, side: SideProcess) -> int | None:
            return main(
                MetricsContext(
                    **side.context(drain), door=door, workers=self._count,
                    region=self._region, started_at_us=self._started_at_us,
                    mover=mover.pulse if mover is not None else None,
                    controller_address=self._controller.address if self._controller is not None else "",
                    lease=self._controller_side.lease if self._controller_side is not None else None,
                )
            )  # fmt: skip

        return SideProcess("metrics", settings, run, drain_timeout_ms=METRICS_DRAIN_MS, door=door)

    def _make_controller(self, parts: ControllerSide, mover: Pulse | None) -> SideProcess:
        """The process, not started yet; raises ConfigInvalid if the address cannot be used."""
        door, addresses = parts.open_door(), self._addresses()

        def run(drain: DrainSignal, side: SideProcess) -> int | None:
            return parts.main(
                ControllerContext(
                    **side.context(drain), door=door, lease=parts.lease, region=self._region,
                    addresses=addresses, mover=mover,
                )
            )  # fmt: skip

        return SideProcess(
            "controller", self._settings, run, drain_timeout_ms=CONTROLLER_DRAIN_MS, door=door,
            final_exit_code=EXIT_DISMISSED,
        )  # fmt: skip

    def _catch_signals(self) -> None:
        """Signals only note themselves; the pipe wakes the loop."""
        self._signal_pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._signal_pipe[1], warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        process.catch_stop_signals(self._on_stop_signal)
        if self._settings.reloads is not None:
            signal.signal(signal.SIGHUP, self._on_reload_signal)

    def _on_stop_signal(self, number: int, frame: Any) -> None:
        self._stop_signals += 1

    def _on_reload_signal(self, number: int, frame: Any) -> None:
        self._reload_signals += 1

    def _reload(self) -> None:
        reloads, self._reload_signals = self._settings.reloads, 0
        if reloads is not None:
            reloads.request()

    def _start_first(self) -> None:
        """Number all workers before any runs, so that none sees another as restarted."""
        first = self._data.next_incarnations(self._count)
        self._unbroken_since = unbroken.begin(self._data.path, first)
        for worker in self._workers:
            worker.incarnation = first + worker.index
            self._region.announce(worker.index, worker.incarnation)
        self._tick_ns = monotonic_ns()
        for worker in self._workers:
            self._start(worker, self._tick_ns)
        self._turn_sides(self._tick_ns)
        if self._compiler is not None:
            self._compiler.start(self._become_child)
        self._write_pid()
        self._write_state()

    def _wait(self) -> None:
        """Wait for a signal, a worker that became ready, or the next thing due."""
        now_ns = monotonic_ns()
        due_ns = now_ns + TICK_NS
        if not self._stop_signals:
            due_ns = min([due_ns, *(worker.start_ns for worker in self._workers if not worker.pid)])
        timeout_ms = max(0, due_ns - now_ns) // 1_000_000 + 1
        poller = select.poll()
        for descriptor in (self._signal_pipe[0], self._ready_bell):
            poller.register(descriptor, select.POLLIN)
        for descriptor, _ in poller.poll(timeout_ms):
            os.read(descriptor, 4096)

    def _turn(self, now_ns: int) -> None:
        """Do everything that may be due; order matters: reap before replace."""
        paused_ns = max(0, now_ns - self._tick_ns - 2 * TICK_NS)
        self._tick_ns = now_ns
        self._reap(now_ns)
        if self._compiler is not None:
            self._compiler.turn()
        if self._stop_signals:
            self._stop(now_ns)
            return
        if self._reload_signals:
            self._reload()
        for worker in self._workers:
            if worker.pid:
                self._check_heartbeat(worker, now_ns, paused_ns)
            elif now_ns >= worker.start_ns:
                self._start(worker, now_ns)
        self._turn_sides(now_ns, paused_ns)
        self._check_directory(now_ns)
        self._check_ready(now_ns)
        if self._state_changed:
            self._write_state()
        self._notifier.watchdog(now_ns)

    def _check_directory(self, now_ns: int) -> None:
        """Stop if the data directory is not ours any more: acknowledged records would be lost."""
        if now_ns < self._looked_ns + SECOND_NS or self._failure is not None:
            return
        self._looked_ns = now_ns
        try:
            self._data.check_there()
        except StorageFailed as error:
            _log.error("the broker stops", why=str(error))
            self._failure = error
            self._stop_signals += 1

    def _turn_sides(self, now_ns: int, paused_ns: int = 0) -> None:
        for side in self._sides:
            side.turn(now_ns, paused_ns, self._become_side)
        if self._controller is not None and self._controller.over and self._failure is None:
            self._failure = WrongState(
                "this broker was removed from its cluster",
                why="the other members do not name it any more",
                hint="to take part again, start it with an empty data directory and cluster.join",
            )
            self._stop_signals += 1

    def _become_side(self, side: SideProcess) -> DrainSignal:
        return self._become_child(side=side)

    def _start(self, worker: _Worker, now_ns: int) -> None:
        """Fork the worker.  Without its incarnation on disk, or without a process, try again later."""
        try:
            if not worker.incarnation:
                self._renumber(worker)
            worker.counters.begin(0, worker.incarnation, now_ns)
            worker.pid = process.fork_child(lambda: self._be_worker(worker), f"danube-worker-{worker.index}")
        except (OSError, DanubeError) as error:
            worker.deaths += 1
            worker.start_ns = now_ns + restart_delay_ns(worker.deaths)
            _log.error("worker cannot be started", worker=worker.index, why=str(error))
            self._give_up_if_never_ready(worker, str(error))
            return
        worker.counters.put(Counter.PID, worker.pid)
        self._state_changed = True
        worker.started_ns = worker.seen_ns = now_ns
        worker.heartbeat_ns = 0
        _log.info("worker started", worker=worker.index, pid=worker.pid, incarnation=worker.incarnation)

    def _renumber(self, worker: _Worker) -> None:
        worker.incarnation = self._data.next_incarnations(1)
        self._region.announce(worker.index, worker.incarnation)

    def _be_worker(self, worker: _Worker) -> int | None:
        """In the child: change the settings that differ from the supervisor's and run the worker."""
        drain = self._become_child(self._listeners[: worker.index] + self._listeners[worker.index + 1 :])
        context = WorkerContext(
            worker=worker.index,
            workers=self._count,
            incarnation=worker.incarnation,
            region=self._region,
            counters=worker.counters,
            listeners=self._listeners[worker.index],
            drain=drain,
            settings=self._settings,
            mover_address=self._mover.address if self._mover is not None else "",
            controller_address=self._controller.address if self._controller is not None else "",
            metrics_link=self._metrics.address if self._metrics is not None else "",
            metrics_address=self._metrics_address,
            lease=self._controller_side.lease if self._controller_side is not None else None,
            unbroken_since=self._unbroken_since,
            passage=Passage(worker.index, self._region.pairs) if self._region.pairs else None,
            compiler=self._compiler,
            _ready_bell=self._ready_bell,
        )
        return self._told(lambda: self._worker_main(context), worker)

    def _told(self, main: Callable[[], int | None], worker: _Worker) -> int | None:
        """Run a worker; report to the supervisor, in words, why it cannot reach its first turn."""
        try:
            return main()
        except DanubeError as error:
            if worker.counters.get(Counter.STATE) == State.READY:
                raise
            worker.refusal.tell(error)
            return exit_code_of(error)

    def _become_child(
        self, others: list[dict[str, socket.socket]] | None = None, side: SideProcess | None = None
    ) -> DrainSignal:
        """In any child: its own signals, and none of the sockets that it has no part in (None: of all)."""
        signal.set_wakeup_fd(-1)
        drain = DrainSignal()
        signal.signal(signal.SIGTERM, drain.request)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the supervisor decides
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        process.unblock_signals()
        for descriptor in self._signal_pipe:
            os.close(descriptor)
        close_listeners(self._listeners if others is None else others)
        for other in self._sides:
            if other is not side:
                other.leave()
        return drain

    def _reap(self, now_ns: int) -> None:
        for worker in self._workers:
            status = process.ended_status(worker.pid) if worker.pid else None
            if status is not None:
                self._on_death(worker, status, now_ns)

    def _on_death(self, worker: _Worker, status: int, now_ns: int) -> None:
        """The process is gone: tell the peers at once and say when to replace it."""
        served = worker.ready
        pid, worker.pid = worker.pid, 0
        worker.counters.put(Counter.PID, 0)
        self._state_changed = True
        ended = process.describe_status(status)
        refused = worker.refusal.take()
        if self._stop_signals:
            if status:
                _log.warning("worker did not drain", worker=worker.index, pid=pid, how=ended)
            return
        facts = {} if refused is None else {"why": str(refused), "hint": refused.hint}
        _log.error(
            "worker ended", worker=worker.index, pid=pid, how=ended, incarnation=worker.incarnation, **facts
        )
        if isinstance(refused, Damage) and not self._announced_ready and self._failure is None:
            self._failure = refused  # another attempt would find the same
            self._stop_signals += 1
            return
        stable = served and now_ns - worker.started_ns >= STABLE_NS
        worker.deaths = 1 if stable else worker.deaths + 1
        worker.counters.add(Counter.RESTARTS)
        worker.start_ns = now_ns + restart_delay_ns(worker.deaths, served)
        worker.incarnation = 0
        try:
            self._renumber(worker)
        except DanubeError as error:
            _log.error("worker cannot be numbered yet", worker=worker.index, why=str(error))
        self._give_up_if_never_ready(worker, ended, refused)

    def _give_up_if_never_ready(self, worker: _Worker, why: str, refused: DanubeError | None = None) -> None:
        """A broker that never served stops instead of trying for ever; one that has served never gives up."""
        if self._announced_ready or worker.deaths < FIRST_START_ATTEMPTS or self._failure is not None:
            return
        self._failure = refused or Unavailable(
            f"worker {worker.index} cannot start",
            why=f"{why}, {worker.deaths} times in a row",
            hint="see the log lines above",
        )
        self._stop_signals += 1

    def _check_heartbeat(self, worker: _Worker, now_ns: int, paused_ns: int) -> None:
        """Kill a worker that hangs or is stopped.  Time in which the supervisor slept does not count."""
        heartbeat_ns = worker.counters.get(Counter.HEARTBEAT_NS)
        if heartbeat_ns != worker.heartbeat_ns:
            worker.heartbeat_ns = heartbeat_ns
            worker.seen_ns = now_ns
            return
        worker.seen_ns += paused_ns
        settings = self._settings
        limit_ms = settings.heartbeat_timeout_ms if heartbeat_ns else settings.start_timeout_ms
        silent_ms = (now_ns - worker.seen_ns) // 1_000_000
        if silent_ms > limit_ms:
            facts = {"worker": worker.index, "pid": worker.pid, "silent_ms": silent_ms}
            _log.error("worker gives no heartbeat and is killed", **facts)
            os.kill(worker.pid, signal.SIGKILL)
            worker.seen_ns = now_ns

    def _check_ready(self, now_ns: int) -> None:
        if self._announced_ready or not all(worker.ready for worker in self._workers):
            return
        self._warnings = self._about_store(now_ns)
        if self._warnings is None:
            return
        self._announced_ready = True
        self._write_state()
        self._notifier.send("READY=1")
        _log.info("ready", workers=self._count, **self._addresses())
        if self._settings.on_ready is not None:
            self._settings.on_ready(
                Started(
                    addresses=self._addresses(),
                    data_dir=self._settings.data_dir,
                    workers=self._count,
                    pid=os.getpid(),
                    warnings=list(self._warnings),
                )
            )

    def _about_store(self, now_ns: int) -> tuple[str, ...] | None:
        """Warnings about the object store; None: its first word is waited for, a moment at most.

        Clients are served meanwhile.  A member of a cluster may use the store only once it has joined.
        """
        self._served_ns = self._served_ns or now_ns
        error = "" if self._mover is None else self._mover.pulse.store_error
        waiting = error is None or (error != "" and self._controller is not None)
        if waiting and now_ns < self._served_ns + STORE_WORD_NS:
            return None
        if error is None:
            error = "" if self._controller is not None else "it has not answered yet"
        if not error:
            return ()
        return (f"the object store cannot be used now, so records stay on this host: {error}",)

    def _addresses(self) -> dict[str, str]:
        metrics = {"metrics": self._metrics_address} if self._metrics_address else {}
        return addresses(self._listeners[0]) | metrics

    def _write_pid(self) -> None:
        try:
            self._data.write_pid()
        except DanubeError as error:
            _log.warning("pid file cannot be written", why=str(error))

    def _write_state(self) -> None:
        self._state_changed = False
        state = BrokerState(
            pid=os.getpid(),
            ready=self._announced_ready,
            addresses=self._addresses(),
            workers=[WorkerState(worker.index, worker.pid, worker.incarnation) for worker in self._workers],
            region=self._region.path,
            started_at_us=self._started_at_us,
            controller=self._controller.address.removeprefix("\0") if self._controller is not None else "",
            identity=process.identity_of(os.getpid()),
            warnings=self._warnings or (),
            reloads=self._settings.reloads is not None,
        )
        try:
            self._data.write_state(state)
        except DanubeError as error:
            _log.warning("state file cannot be written", why=str(error))

    def _stop(self, now_ns: int) -> None:
        """Drain: SIGTERM once, SIGKILL at the deadline or at a second signal."""
        if not self._stop_deadline_ns:
            self._stop_deadline_ns = now_ns + self._settings.drain_timeout_ms * 1_000_000
            _log.info("draining", timeout_ms=self._settings.drain_timeout_ms)
            self._notifier.send("STOPPING=1")
            close_listeners(self._listeners)  # workers close theirs: new clients are refused at once
            self._signal_all(signal.SIGTERM)
        elif self._stop_signals > 1 or now_ns >= self._stop_deadline_ns:
            self._signal_all(signal.SIGKILL)
        # The workers' last segments are sealed when they have ended: now the mover may end, too.
        if not any(worker.pid for worker in self._workers):
            self._stop_sides(now_ns, at_once=self._stop_signals > 1)

    def _stop_sides(self, now_ns: int, *, at_once: bool) -> None:
        """Stop the controller last.

        Other brokers take over when it exits, and continue behind the store's content at that time.
        """
        for side in self._sides:
            if side is not self._controller or at_once or self._mover is None or not self._mover.pid:
                side.stop(now_ns, at_once=at_once)

    def _signal_all(self, number: signal.Signals) -> None:
        for worker in self._workers:
            if worker.pid:
                os.kill(worker.pid, number)

    def _finished(self) -> bool:
        """Told to stop, and every process has ended."""
        beside = any(side.pid for side in self._sides)
        return self._stop_signals > 0 and not beside and not any(worker.pid for worker in self._workers)

    def _end_all(self) -> None:
        """No process outlives the supervisor, also when it fails."""
        self._signal_all(signal.SIGKILL)
        for side in self._sides:
            side.close()
        if self._compiler is not None:
            self._compiler.close()
        for worker in self._workers:
            if worker.pid:
                os.waitpid(worker.pid, 0)
                worker.pid = 0
            worker.refusal.close()
        signal.set_wakeup_fd(-1)
        process.ignore_stop_signals(self._on_stop_signal)
        if self._settings.reloads is not None:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        for descriptor in (*self._signal_pipe, self._ready_bell):
            os.close(descriptor)
        self._region.close()


def run(
    settings: SupervisorSettings,
    worker_main: WorkerMain,
    mover_main: MoverMain | None = None,
    metrics_main: MetricsMain | None = None,
    controller: ControllerSide | None = None,
) -> int:
    """Run a broker in this process (its main thread) and its forks until SIGTERM or SIGINT.

    Each worker runs ``worker_main(context)`` and exits with its result; so do the controller, the mover and
    the process that serves metrics, if there are any.  Returns 0, even if workers had to be killed at the end
    of the drain.  Raises Unavailable when the workers never became ready and, before any worker ran,
    AlreadyRunning, StorageIncompatible, StorageFailed, StorageFull or ConfigInvalid.
    """
    return Supervisor(settings, worker_main, mover_main, metrics_main, controller).run()


def _log_foreign_files(data_dir: Path) -> None:
    """Log files among Danube's that do not belong there; they are not changed."""
    try:
        found = strangers(data_dir)
    except OSError:
        return  # the users of those directories report it
    if found:
        shown = ", ".join(str(path) for path in found[:STRANGERS_SHOWN_MAX])
        _log.warning("not Danube's, and left alone", count=len(found), files=shown)


def _load_kernels(progress: Callable[[str], None] | None) -> KernelCompiler | None:
    """Before the fork, so that all workers share the code; libraries must not start threads meanwhile.

    Where kernels have to be compiled first, return who does it while the workers serve.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from danube.core import kernels

    report = kernels.load_kept()
    compiler = None
    if report.reason:
        _log.warning("running without compiled kernels", why=report.reason)
    elif not report.available:
        compiler = KernelCompiler()
        if progress is not None:
            progress("compiling kernels beside the broker, once on this machine; until then it is slower")
    _log.debug("shared memory", atomics=atomics.choose())
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        _log.debug("threads exist before the fork", threads=threads)
    return compiler
