"""A thousand connections that speak or end in one moment cost a running worker little memory and time."""

from __future__ import annotations

import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from danube.core.protocol import native as wire
from danube.core.protocol.native import FrameDecoder, Hello, Kind
from tests.broker_process import BrokerProcess, wait_until
from tests.e2e.test_grpc_hostile import PING, PREFACE, SETTINGS, frame

COUNT = 1_000
GROWN_BYTES_MAX = 50 << 20
PROCESSOR_S_MAX = 0.5  # 0.02 measured; clearing a large buffer for each connection took more than a second
GREETINGS = {
    "native": wire.control_frame(Kind.HELLO, Hello(), 1),
    "grpc": PREFACE + frame(SETTINGS),
}
WORDS = {"native": wire.control_frame(Kind.PING, None, 9), "grpc": frame(PING, body=bytes(8))}
ACCEPTED, PONG = frame(SETTINGS, 1), frame(PING, 1, body=bytes(8))


@pytest.fixture
def many_files() -> Iterator[None]:
    """Descriptors for this end of all connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4 * COUNT:
        pytest.skip(f"a process may have {hard} descriptors here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4 * COUNT), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def resident_bytes(pid: int, line: str) -> int:
    for found in Path(f"/proc/{pid}/status").read_text().splitlines():
        if found.startswith(line):
            return int(found.split()[1]) * 1024
    raise AssertionError(line)


def processor_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def answered(door: str, peer: socket.socket, kind: Kind, correlation: int, wanted: bytes) -> bool:
    """Read until the answer has come: a frame of ``kind``, or ``wanted``; False if the connection ends."""
    data = bytearray()
    while True:
        if door == "grpc":
            if wanted in data:
                return True
        elif frames := list(FrameDecoder().frames(bytes(data), 0, len(data))):
            return [(one.kind, one.correlation) for one in frames] == [(kind, correlation)]
        more = peer.recv(65_536)
        if not more:
            return False
        data += more


@pytest.mark.usefixtures("many_files")
@pytest.mark.parametrize("end", [False, True])
@pytest.mark.parametrize("door", ["native", "grpc"])
def test_a_crowd_costs_little(broker: Callable[..., BrokerProcess], door: str, end: bool) -> None:
    process = broker(workers=1)
    (pid,) = process.worker_pids
    place = ("127.0.0.1", process.port if door == "native" else process.grpc_port)
    worker = psutil.Process(pid)
    with ExitStack() as stack:
        peers = [stack.enter_context(socket.create_connection(place, timeout=60)) for _ in range(COUNT)]
        for peer in peers:
            peer.sendall(GREETINGS[door])
        assert all(answered(door, peer, Kind.WELCOME, 1, ACCEPTED) for peer in peers)
        connected = worker.num_fds()
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak begins here
        before, begun_s = resident_bytes(pid, "VmRSS"), processor_s(pid)
        os.kill(pid, signal.SIGSTOP)  # so that the worker meets them all in one turn
        try:
            for peer in peers:
                if end:
                    peer.close()
                else:
                    peer.sendall(WORDS[door])
        finally:
            os.kill(pid, signal.SIGCONT)
        if end:
            wait_until(lambda: worker.num_fds() <= connected - COUNT + 20, 60, "all have ended")
        else:
            assert all(answered(door, peer, Kind.PONG, 9, PONG) for peer in peers)
        taken_s, peak = processor_s(pid) - begun_s, resident_bytes(pid, "VmHWM")
    assert process.worker_pids == [pid], "it is the same worker"
    assert peak - before < GROWN_BYTES_MAX, f"{(peak - before) >> 20} MiB for {COUNT} connections"
    assert taken_s < PROCESSOR_S_MAX, f"{taken_s} s of the processor"
