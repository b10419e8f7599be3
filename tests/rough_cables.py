"""Cables that lose, delay and hold back real packets, where the kernel has no queue that would.

A rough cable is a pair of TAP devices, one at the host and one at the bridge, and a process that carries
frames between them.  What a host sends suffers, what it receives has suffered at its sender: each way is
rough once.  ARP passes untouched, as it does under a filter of IP packets.

    python tests/rough_cables.py BRIDGE CABLE=NAMESPACE ...

says "ready" when the cables are there, then reads one JSON object of conditions a line, see ``Conditions``.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import json
import os
import random
import secrets
import select
import struct
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_FRAME_BYTES_MAX = 2_048
_FRAMES_PER_TURN = 64
_ETHERTYPE_IP = b"\x08\x00"


def available() -> bool:
    """Whether TAP devices can be made here."""
    try:
        os.close(_tap(f"dn{secrets.token_hex(3)}"))
    except OSError:
        return False
    return True


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What a sent IP packet meets; the default is a good cable."""

    loss: float = 0.0  # share of packets
    delay_s: float = 0.0
    jitter_s: float = 0.0  # each packet is delayed by up to so much more or less, so packets overtake others
    bits_s: float = 0.0  # 0: as fast as it goes
    queue_bytes: int = 64 * 1024  # what waits for its turn; more is lost


class RoughCables:
    """The process that carries frames; close() takes the cables with it."""

    def __init__(self, bridge: str, cables: dict[str, str]) -> None:
        words = [f"{cable}={namespace}" for cable, namespace in cables.items()]
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), bridge, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._wait("ready")

    def set(self, conditions: Conditions) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(conditions)) + "\n")
        self._process.stdin.flush()
        self._wait("set")

    def _wait(self, word: str) -> None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if line != word:
            self.close()
            raise OSError(f"rough cables: {line or 'their process has ended'}")

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class _Way:
    """Frames that a host sent, on their way to the bridge."""

    def __init__(self, place: int) -> None:
        self._random = random.Random(f"way {place}")
        self._free_s = 0.0  # when the last packet of the queue has been sent

    def arrives_s(self, size: int, now_s: float, conditions: Conditions) -> float | None:
        """When a packet arrives; None: never."""
        if conditions.loss and self._random.random() < conditions.loss:
            return None
        if conditions.bits_s:
            begin_s = max(now_s, self._free_s)
            if (begin_s - now_s) * conditions.bits_s / 8 + size > conditions.queue_bytes:
                return None
            self._free_s = now_s = begin_s + size * 8 / conditions.bits_s
        jitter_s = conditions.jitter_s
        return now_s + max(0.0, conditions.delay_s + self._random.uniform(-jitter_s, jitter_s))


class _Carrier:
    """All cables of a network, in one loop."""

    def __init__(self, cables: list[tuple[int, int]]) -> None:
        self._peers = {fd: peer for pair in cables for fd, peer in (pair, pair[::-1])}
        self._ways = {host: _Way(place) for place, (host, _) in enumerate(cables)}
        self._conditions = Conditions()
        self._waiting: list[tuple[float, int, int, bytes]] = []
        self._sequence = 0

    def run(self) -> None:
        """Carry frames until there is nobody any more who sets conditions."""
        poll = select.poll()
        for fd in (*self._peers, 0):
            poll.register(fd, select.POLLIN)
        while True:
            wait_s = max(0.0, self._waiting[0][0] - time.monotonic()) if self._waiting else 3_600.0
            for fd, _ in poll.poll(wait_s * 1_000):
                if fd:
                    self._take(fd)
                    continue
                line = sys.stdin.readline()
                if not line:
                    return
                self._conditions = Conditions(**json.loads(line))
                print("set", flush=True)
            while self._waiting and self._waiting[0][0] <= time.monotonic():
                _, _, target, frame = heapq.heappop(self._waiting)
                _send(target, frame)

    def _take(self, fd: int) -> None:
        target, way, now_s = self._peers[fd], self._ways.get(fd), time.monotonic()
        for _ in range(_FRAMES_PER_TURN):
            try:
                frame = os.read(fd, _FRAME_BYTES_MAX)
            except OSError:  # nothing more is there, or the cable is cut
                return
            at_s: float | None = now_s
            if way is not None and frame[12:14] == _ETHERTYPE_IP:
                at_s = way.arrives_s(len(frame), now_s, self._conditions)
            if at_s is None:
                continue
            if at_s <= now_s:
                _send(target, frame)
            else:
                self._sequence += 1
                heapq.heappush(self._waiting, (at_s, self._sequence, target, frame))


def _send(fd: int, frame: bytes) -> None:
    with contextlib.suppress(OSError):  # the cable is cut
        os.write(fd, frame)


def _tap(name: str) -> int:
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return fd


def _cable(bridge: str, cable: str, namespace: str) -> tuple[int, int]:
    """(host's end, bridge's end); the host's is ``eth0`` in its namespace."""
    host, other = _tap(f"{cable}h"), _tap(cable)
    for words in (
        ["link", "set", f"{cable}h", "netns", namespace, "name", "eth0"],
        ["link", "set", cable, "master", bridge, "up"],
    ):
        subprocess.run(["ip", *words], check=True, capture_output=True)
    return host, other


def main(arguments: list[str]) -> None:
    """Make the cables and carry frames until standard input ends."""
    bridge, *cables = arguments
    try:
        made = [_cable(bridge, *cable.split("=", 1)) for cable in cables]
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"no TAP devices: {error}", flush=True)
        return
    print("ready", flush=True)
    _Carrier(made).run()


if __name__ == "__main__":
    main(sys.argv[1:])
