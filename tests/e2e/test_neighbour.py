"""A neighbour at ten times its quota: it is held there, and the other tenant's load is delivered whole.

What it costs the other tenant's rate is measured by ``scripts/bench neighbour``.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from danube import sync
from perf.native import resident_bytes
from tests.child_process import Child

QUOTA = 400  # records/s of the neighbour
SIZE = 8_192
TIMES = 10
PACED = 160  # batches of the other tenant, one each 50 ms
BATCH = 20
GROWTH_MAX = 48 << 20  # of about 150 MiB that are offered meanwhile and not taken
TOPIC = "/paced/orders"
SENT = [b"%06d" % number for number in range(PACED * BATCH)]


def paced(producer: Any, batches: range) -> None:
    """Publish far below what the broker could take, one acknowledged batch after the other."""
    due_s = time.monotonic()
    for start in (number * BATCH for number in batches):
        producer.send_many(SENT[start : start + BATCH])
        due_s += 0.05
        time.sleep(max(0.0, due_s - time.monotonic()))


@pytest.mark.timeout(300)
def test_a_neighbour_at_ten_times_its_quota_is_held_to_it_and_the_others_lose_nothing(broker: Any) -> None:
    process = broker(workers=1)
    got: list[bytes] = []

    def read() -> None:
        with sync.connect(process.address) as client, client.consumer(TOPIC, "s", start="earliest") as one:
            while len(got) < len(SENT):
                record = one.receive(timeout=120)
                got.append(record.payload)
                record.ack()

    with sync.connect(process.address) as client:
        client.admin.create_namespace("paced")
        client.admin.create_topic(TOPIC)
    load = Child(
        "perf/loads.py",
        "neighbour",
        {
            "url": process.address, "topic": "/loud/orders", "durability": "written", "quota": QUOTA,
            "rate": TIMES * QUOTA, "clients": 10, "size": SIZE, "batch": BATCH,
        },
    )  # fmt: skip
    reader = threading.Thread(target=read)
    try:
        load.wait_ready().go()
        reader.start()
        with sync.connect(process.address) as client, client.producer(TOPIC, timeout=60) as producer:
            paced(producer, range(PACED // 4))  # all buffers are there by then
            resident = resident_bytes(process)
            paced(producer, range(PACED // 4, PACED))
        grown = resident_bytes(process) - resident
        load.go()
        found = load.result()
        reader.join(120)
    finally:
        load.close()
    assert got == SENT, "nothing is lost, twice or out of order"
    allowed = QUOTA * found["seconds"]
    assert found["offered"] >= 5 * allowed, "it asks for far more than it may have"
    # A second is saved at the beginning, and one is owed at the end.
    assert 0.9 * allowed <= found["taken"] <= 1.1 * allowed + 2 * QUOTA
    assert grown < GROWTH_MAX < (found["offered"] - found["taken"]) * SIZE, "what is refused stays nowhere"
