"""Contexts that the supervisor hands to a broker's processes when it forks them."""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from danube.broker.processes.compiler import KernelCompiler
from danube.broker.processes.lease import SharedLease
from danube.broker.processes.reloads import Reloads
from danube.broker.processes.unbroken import ALWAYS, Since
from danube.config.loading import Started
from danube.config.sections import NO_PORT
from danube.host.clock import monotonic_ns
from danube.ipc.channel import Channel
from danube.ipc.counters import Counter, Counters, State
from danube.ipc.passage import Passage
from danube.ipc.region import Region
from danube.ipc.tallies import Tallies
from danube.ipc.usage import Usage

PULSE_FRESH_NS: Final = 5_000_000_000
_BEAT, _PID, _STARTS, _STORE, _SHARE = range(5)  # words of a pulse
_SHARE_UNIT: Final = 1_000_000
_STORE_UNKNOWN, _STORE_ANSWERS, _STORE_FAILED = range(3)
_TEXT_START: Final = 1_024  # in bytes; the words lie before it
_TEXT_BYTES_MAX: Final = 2_048


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorSettings:
    """Settings of a broker's processes; sizes and workers of 0 are chosen for this machine."""

    data_dir: Path
    workers: int = 0
    host: str = "127.0.0.1"
    native_port: int = 6660
    extra_ports: Mapping[str, int] = field(default_factory=dict)  # further doors by name
    local_socket: bool = False  # beside the native port
    metrics_port: int = NO_PORT
    heartbeat_timeout_ms: int = 10_000
    start_timeout_ms: int = 120_000  # from the fork to the first heartbeat
    drain_timeout_ms: int = 9_000
    mover_drain_timeout_ms: int = 2_000  # after the workers have ended
    ring_bytes: int = 0
    reloads: Reloads | None = None  # with certificates or keys; SIGHUP asks for one, else stops the broker
    progress: Callable[[str], None] | None = None  # takes lines about an unusual start
    on_ready: Callable[[Started], None] | None = None  # once, in the supervisor, when all workers serve


class DrainSignal:
    """Tells one process to stop taking, finish and leave; its descriptor is for ``loop.add_reader``."""

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.requested = False

    def fileno(self) -> int:
        """Readable from the first request on, for good."""
        return self._descriptor

    def request(self, *_signal: Any) -> None:
        """The handler of SIGTERM in the process."""
        self.requested = True
        os.eventfd_write(self._descriptor, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """Everything that a worker gets from its supervisor."""

    worker: int
    workers: int
    incarnation: int  # larger than that of any earlier process; epochs of logs begin with it
    region: Region
    counters: Counters
    listeners: dict[str, socket.socket]  # by door; listening, not blocking
    drain: DrainSignal
    settings: SupervisorSettings
    mover_address: str  # of its Unix socket, an abstract name; "" where there is no mover
    controller_address: str = ""  # likewise; "" on a single host
    metrics_link: str = ""  # the same of the process that serves metrics
    metrics_address: str = ""  # host:port of the metrics; "" where they are off
    lease: SharedLease | None = None  # of the cluster; None on a single host
    unbroken_since: Since = ALWAYS
    passage: Passage | None = None  # for connections to other workers; None where there are none
    compiler: KernelCompiler | None = None  # where kernels come from later; None where they are there
    _ready_bell: int

    @property
    def listener(self) -> socket.socket:
        """The native door."""
        return self.listeners["native"]

    def channel(self) -> Channel:
        """The rings to and from all other workers; one per process."""
        return Channel(self.region, self.worker, self.incarnation)

    def tallies(self) -> Tallies:
        """Counts of all workers by name; one per process."""
        return Tallies(self.region, self.worker)

    def usage(self) -> Usage:
        """Return the words in which workers count sums; one per process."""
        return Usage(self.region, self.worker)

    def heartbeat(self) -> None:
        """Note that the worker is alive: every second from the loop, and between slices of recovery."""
        self.counters.put(Counter.HEARTBEAT_NS, monotonic_ns())

    def ready(self) -> None:
        """Recovered and accepting."""
        self.heartbeat()
        self.counters.put(Counter.STATE, State.READY)
        os.eventfd_write(self._ready_bell, 1)


class _Word:
    """One word of a pulse as an attribute."""

    def __init__(self, place: int) -> None:
        self._place = place

    def __get__(self, pulse: Pulse, owner: type) -> int:
        return pulse.words[self._place]

    def __set__(self, pulse: Pulse, value: int) -> None:
        pulse.words[self._place] = value


class Pulse:
    """Heartbeats of a process beside the workers: words of memory shared by a fork.

    Each word has one writer, the process or its supervisor; processes that were forked later may read.  A
    restarted process continues with the same words.
    """

    last_ns = _Word(_BEAT)  # time of the last beat by the monotonic clock; 0 without one since reset()
    pid = _Word(_PID)  # written by the supervisor; 0 while no process runs
    start_count = _Word(_STARTS)  # written by the supervisor: how many it has started, one after the other

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)
        self.words = memoryview(self._memory).cast("q")

    def beat(self) -> None:
        self.last_ns = monotonic_ns()

    @property
    def store_answers(self) -> bool:
        """Whether the object store answered the mover's last request; False before any."""
        return self.words[_STORE] == _STORE_ANSWERS

    @property
    def store_error(self) -> str | None:
        """Error of the store's last answer; empty without one, None before any answer."""
        if self.words[_STORE] == _STORE_UNKNOWN:
            return None
        if self.store_answers:
            return ""
        text = self._memory[_TEXT_START : _TEXT_START + _TEXT_BYTES_MAX]
        return text.rstrip(b"\0").decode(errors="ignore")

    def tell_store(self, error: str) -> None:
        """The object store answered, or did not for this reason; written by the mover alone."""
        if error:
            self.words[_STORE] = _STORE_UNKNOWN  # while the text is being replaced
            text = error.encode()[:_TEXT_BYTES_MAX].ljust(_TEXT_BYTES_MAX, b"\0")
            self._memory[_TEXT_START : _TEXT_START + _TEXT_BYTES_MAX] = text
        self.words[_STORE] = _STORE_FAILED if error else _STORE_ANSWERS

    @property
    def upload_share(self) -> float:
        """Share of their full speed that the mover lets uploads use; 0.0 before it said so."""
        return self.words[_SHARE] / _SHARE_UNIT

    @upload_share.setter
    def upload_share(self, share: float) -> None:
        self.words[_SHARE] = round(share * _SHARE_UNIT)

    def alive(self, now_ns: int) -> bool:
        """Whether a process runs that gave a sign of life within the last PULSE_FRESH_NS."""
        return self.pid != 0 and self.last_ns > 0 and now_ns - self.last_ns < PULSE_FRESH_NS

    def reset(self) -> None:
        """Supervisor, before a process starts."""
        self.words[_BEAT] = self.words[_STORE] = 0

    def close(self) -> None:
        self.words.release()
        self._memory.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class SideContext:
    """Everything that the mover, metrics process or controller gets from the supervisor."""

    listener: socket.socket  # workers connect here; listening, not blocking, kept open by the supervisor
    drain: DrainSignal
    settings: SupervisorSettings
    pulse: Pulse
    compiler: KernelCompiler | None = None  # of the mover, as a worker has it

    def heartbeat(self) -> None:
        """Note that the process is alive: at least every second."""
        self.pulse.beat()
        if self.compiler is not None:
            self.compiler.take()


@dataclass(frozen=True, slots=True, kw_only=True)
class MoverContext(SideContext):
    start_count: int  # movers of this supervisor before this one


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsContext(SideContext):
    """For the process that serves metrics."""

    door: socket.socket  # HTTP; like the listener
    workers: int
    region: Region  # for the workers' counters
    started_at_us: int  # of the broker
    mover: Pulse | None  # None where there is no mover
    controller_address: str = ""  # "" where there is no controller
    lease: SharedLease | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerContext(SideContext):
    """For the controller, the member of a cluster."""

    door: socket.socket  # other members; like the listener
    lease: SharedLease = field(default_factory=SharedLease)  # the workers read it
    region: Region | None = None  # for the workers' counters
    addresses: Mapping[str, str] = field(default_factory=dict)  # of the doors, by name
    mover: Pulse | None = None  # None where there is none


WorkerMain = Callable[[WorkerContext], int | None]
MoverMain = Callable[[MoverContext], int | None]
MetricsMain = Callable[[MetricsContext], int | None]
ControllerMain = Callable[[ControllerContext], int | None]
