"""The hosts that the cluster checks cut off are cut off as they say: both ways, one way, one link."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests import rough_cables
from tests.network_namespaces import Hosts, available
from tests.rough_cables import Conditions

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not available(), reason="network namespaces need root"),
]

PORT = 7000
# Every host says its number to every other one ten times a second, and tells from whom it hears.
HOST = """
import socket, sys, time
place, addresses = int(sys.argv[1]), sys.argv[2].split(",")
door = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
door.bind((addresses[place], PORT))
door.settimeout(0.02)
while True:
    for address in addresses:
        if address != addresses[place]:
            try:
                door.sendto(b"%d" % place, (address, PORT))
            except OSError:
                pass  # a cable that is cut
    until, heard = time.monotonic() + 0.1, set()
    while time.monotonic() < until:
        try:
            heard.add(int(door.recv(16)))
        except TimeoutError:
            pass
    print(sorted(heard), flush=True)
""".replace("PORT", str(PORT))


class Talk:
    """Three hosts that talk; who hears whom is asked for at a moment."""

    def __init__(self, hosts: Hosts) -> None:
        addresses = ",".join(hosts.host(place) for place in range(hosts.count))
        self._processes = [
            subprocess.Popen(
                [*hosts.prefix(place), sys.executable, "-c", HOST, str(place), addresses],
                stdout=subprocess.PIPE,
                text=True,
            )
            for place in range(hosts.count)
        ]

    def settles(self, *expected: list[int]) -> None:
        """Wait until each host hears just these, three times in a row."""
        for process, wanted in zip(self._processes, expected, strict=True):
            assert process.stdout is not None
            seen: list[str] = []
            for _ in range(100):
                seen.append(process.stdout.readline().strip())
                if seen[-3:] == [str(wanted)] * 3:
                    break
            else:
                raise AssertionError(f"heard {seen[-5:]}, not {wanted}")

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()


needs_tap = pytest.mark.skipif(not rough_cables.available(), reason="rough cables need TAP devices")


@pytest.fixture(params=["good", pytest.param("rough", marks=needs_tap)])
def hosts(request: pytest.FixtureRequest) -> Iterator[Hosts]:
    made = Hosts(3, rough=request.param == "rough")
    yield made
    made.close()


def test_cables_and_ways_are_cut_as_told(hosts: Hosts) -> None:
    talk = Talk(hosts)
    everybody = ([1, 2], [0, 2], [0, 1])
    try:
        talk.settles(*everybody)
        hosts.block(0, 1)
        talk.settles([1, 2], [2], [0, 1])
        hosts.open(0, 1)
        talk.settles(*everybody)
        hosts.separate(1, 2)
        talk.settles([1, 2], [0], [0])
        hosts.cut(0)
        talk.settles([], [], [])
        hosts.block(0, 2)
        hosts.mend_all()
        talk.settles(*everybody)
        hosts.open(0, 1)  # nothing is blocked: nothing happens
        talk.settles(*everybody)
    finally:
        talk.close()


PACKETS = 250
# Sends numbered packets of 1,000 bytes, or says of each that comes: its number and how long it took.
SENDER = """
import socket, sys, time
door = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for number in range(int(sys.argv[2])):
    door.sendto((b"%d %d" % (number, time.monotonic_ns())).ljust(1000), (sys.argv[1], PORT))
    time.sleep(0.002)
""".replace("PORT", str(PORT))
RECEIVER = """
import socket, sys, time
door = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
door.bind((sys.argv[1], PORT))
print("ready", flush=True)
door.settimeout(1)
try:
    while True:
        number, sent_ns = map(int, door.recv(2000).split())
        print(number, (time.monotonic_ns() - sent_ns) / 1e9)
except TimeoutError:
    pass
""".replace("PORT", str(PORT))


def sent_over(hosts: Hosts, conditions: Conditions) -> list[tuple[int, float]]:
    """Number and seconds of each packet that arrived, in the order in which they came."""
    hosts.roughen(conditions)
    receiver = subprocess.Popen(
        [*hosts.prefix(1), sys.executable, "-c", RECEIVER, hosts.host(1)], stdout=subprocess.PIPE, text=True
    )
    assert receiver.stdout is not None and receiver.stdout.readline() == "ready\n"
    sender = [*hosts.prefix(0), sys.executable, "-c", SENDER, hosts.host(1), str(PACKETS)]
    subprocess.run(sender, check=True, timeout=60)
    lines = receiver.communicate(timeout=60)[0].splitlines()
    return [(int(number), float(seconds)) for number, seconds in map(str.split, lines)]


@pytest.fixture
def rough() -> Iterator[Hosts]:
    made = Hosts(2, rough=True)
    yield made
    made.close()


@needs_tap
def test_rough_cables_lose_delay_and_hold_back_as_they_are_told(rough: Hosts) -> None:
    """Row D4's conditions are what they are called; mended, the cables are good again."""
    third = sent_over(rough, Conditions(loss=0.3))
    assert 0.6 < len(third) / PACKETS < 0.8 and third == sorted(third)
    late = sent_over(rough, Conditions(delay_s=0.2, jitter_s=0.1))
    delays_s = [seconds for _, seconds in late]
    assert len(late) == PACKETS and late != sorted(late), "all come, and some overtake others"
    assert min(delays_s) >= 0.1 and 0.18 < sum(delays_s) / PACKETS < 0.3
    thin = sent_over(rough, Conditions(bits_s=1e6))
    assert len(thin) < PACKETS, "half a second of packets waits, the others are lost"
    assert 0.4 < max(seconds for _, seconds in thin) < 1.0
    rough.mend_all()
    good = sent_over(rough, Conditions())
    assert len(good) == PACKETS and sum(seconds for _, seconds in good) / PACKETS < 0.05
