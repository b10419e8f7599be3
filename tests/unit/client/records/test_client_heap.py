"""What payloads of one batch leave in a heap, those of the next have: no fresh pages from the kernel."""

import resource
import subprocess
import sys
from typing import Any

import pytest

from danube.client.machine.received import ReceivedBatch
from danube.client.records import heap
from danube.client.records.message import BaseBatch, Part, messages_of
from danube.core.batch.builder import encode
from danube.core.batch.format import BODY_CRC_START, read_header

PARTITION: Any = None
ROUNDS = 8


def received(size: int, count: int) -> ReceivedBatch:
    whole = encode([bytes(size)] * count, publish_time_us=1).to_bytes()
    return ReceivedBatch(whole[BODY_CRC_START:], read_header(whole), 0)


def read_batches(parts: list[Part]) -> int:
    return len(BaseBatch("/default/t", PARTITION, parts).payloads)


def read_messages(parts: list[Part]) -> int:
    return sum(len(list(messages_of(payload_of, "/default/t", PARTITION, part))) for part in parts)


def payload_of(payload: bytes, *_: object) -> bytes:
    return payload


def faults(read: str, size: int, count: int, part_count: int) -> None:
    """Print the page faults of a round, which drops its payloads before the next one's are made."""
    one = {"batches": read_batches, "messages": read_messages}[read]
    parts = [Part(received(size, count), 0, count) for _ in range(part_count)]
    for _ in range(4):
        one(parts)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(ROUNDS):
        assert one(parts) == count * part_count
    print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // ROUNDS)


def test_what_stays_of_a_batch_is_little() -> None:
    """Of small payloads one in each half MiB; of larger ones the last; of little and of huge ones nothing."""
    heap._anchors.clear()
    small = [bytes([number]) * 95 for number in range(200)] * 100
    assert heap.anchored(small, 95 * len(small)) is small
    assert len(heap._anchors[-1]) == 5
    large = [bytes(100_000) for _ in range(10)]
    assert heap.anchored(large, 1_000_000) is large
    assert heap._anchors[-1] == large[-1:]
    heap.anchored([b"x" * 1000] * 100, 100_000)
    heap.anchored([b"", bytes((1 << 20) + 1)], (1 << 20) + 1)
    assert len(heap._anchors) == 2
    for _ in range(10):
        heap.anchored(large, 1_000_000)
    assert len(heap._anchors) == 4


@pytest.mark.skipif(sys.platform != "linux", reason="counts the page faults of glibc's heap")
@pytest.mark.parametrize(
    ("read", "size", "count", "part_count"),
    [
        ("batches", 400, 1024, 16),
        ("batches", 1024, 512, 16),
        ("batches", 65_536, 8, 16),
        ("messages", 100, 65_536, 1),
    ],
)
def test_payloads_of_the_next_batch_take_no_fresh_pages(
    read: str, size: int, count: int, part_count: int
) -> None:
    code = f"from {__name__} import faults; faults({read!r}, {size}, {count}, {part_count})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert not done.stderr
    pages = (size + sys.getsizeof(b"")) * count * part_count // 4096
    assert int(done.stdout) < pages / 10
