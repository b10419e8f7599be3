"""A real broker with a compacting topic: published, compacted, consumed, verified; on disk and in a store."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from danube import sync
from danube.server.proto import DanubeApi_pb2 as pb
from tests import fork_server
from tests.broker_process import ROOT, wait_until
from tests.e2e.grpc_parts import DanubeCalls

TOPIC = "/default/states"
QUICK = {
    "DANUBE_STORAGE__COMPACT_AFTER": "0s",
    "DANUBE_STORAGE__COMPACT_MIN_SIZE": "0",
    "DANUBE_STORAGE__COMPACT_DIRTY_PERCENT": "1",
}
TIERED = {
    **QUICK,
    "DANUBE_STORAGE__LOCAL_RETENTION_TIME": "1ms",
    "DANUBE_STORAGE__SEAL_AFTER": "1s",
    "DANUBE_STORAGE__CACHE_SIZE": "32MiB",
}
KEYS = 7
ROUNDS = 4
PER_ROUND = 100
KEYS_LEFT = len({number * number % KEYS for number in range(KEYS)})
COMPACTED_END = (ROUNDS - 1) * PER_ROUND  # the newest sealed segment is left alone

Record = tuple[int, str, bytes]


def cli(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = fork_server.run([sys.executable, "-m", "danube", *words], cwd=ROOT)
    assert done.returncode == 0 or not check, done.stderr + done.stdout
    return done


def fill(address: str) -> list[Record]:
    """Four sealed segments and some records behind them; what a reader would get without compaction."""
    cli("topics", "create", TOPIC, "--cleanup", "compact", "--tombstone-retention", "1d", "-s", address)
    records: list[Record] = []
    for _ in range(ROUNDS):
        records += publish(address, len(records), PER_ROUND)
        cli("topics", "seal", TOPIC, "-s", address)
    return records + publish(address, len(records), 10)


def publish(address: str, start: int, count: int) -> list[Record]:
    records = []
    with sync.connect(address) as client, client.producer(TOPIC, name="writer") as producer:
        for number in range(start, start + count):
            key = f"k{number * number % KEYS}"
            producer.send_nowait(b"v%d" % number, key=key)
            records.append((number, key, b"v%d" % number))
        producer.flush()
    return records


def read(address: str, last: int, subscription: str, **options: Any) -> list[Record]:
    """From the start up to the offset ``last``."""
    found: list[Record] = []
    with sync.connect(address) as client:
        with client.consumer(TOPIC, subscription=subscription, start="earliest", **options) as consumer:
            while not found or found[-1][0] < last:
                message = consumer.receive(timeout=20)
                found.append((message.offset, message.key or "", bytes(message.payload)))
                message.ack()
            consumer.flush()
    return found


def check_compacted(found: list[Record], records: list[Record], end: int) -> None:
    """Below ``end`` the latest of each key at its own offset, from there on everything."""
    latest = {key: offset for offset, key, _ in records[:end]}
    assert found == [one for one in records if one[0] >= end or latest[one[1]] == one[0]]


def figures(address: str, subscription: str) -> dict[str, Any]:
    with sync.connect(address) as client:
        (partition,) = client.admin.describe_subscription(TOPIC, subscription).partitions
        return dict(partition)


def over_grpc(process: Any, last: int) -> list[Record]:
    """What an official client's consumer gets, from the start."""
    with sync.connect(process.address) as client:
        with client.consumer(TOPIC, subscription="over-grpc", start="earliest", mode="shared") as consumer:
            consumer.receive(timeout=20)  # not acked: it comes again
    found: list[Record] = []
    with DanubeCalls(process.grpc_address) as calls:
        stream = calls.receive(calls.subscribe(TOPIC, "over-grpc"))
        while not found or found[-1][0] < last:
            message = stream.next()
            found.append((message.msg_id.topic_offset, message.routing_key, message.payload))
            calls.ack(message, "over-grpc")
    return found


def check_readers(process: Any, records: list[Record], end: int, run: int = 0) -> None:
    address, last = process.address, records[-1][0]
    for mode in ("exclusive", "shared", "failover", "key_shared"):
        name = f"late-{mode}-{run}"
        check_compacted(sorted(read(address, last, name, mode=mode)), records, end)
        told = figures(address, name)
        assert (told["damaged"], told["compacted"], told["lag"]) == (0, end - KEYS_LEFT, 0)


def local_start(address: str) -> int:
    with sync.connect(address) as client:
        return int(client.admin.describe_topic(TOPIC).partitions[0]["local_start"])


def listed(grpc_address: str) -> list[tuple[int, int]]:
    """First and last offset of each object."""
    request = pb.ListSegmentDescriptorsRequest(topic=TOPIC, after_offset=0)
    with DanubeCalls(grpc_address) as calls:
        found = calls.unary("StorageService/ListSegmentDescriptors", request).segments
    return [(one.start_offset, one.end_offset) for one in found]


def local_files(data: Path) -> list[str]:
    return sorted(path.name for path in data.glob("partitions/*/*.seg"))


def test_a_local_log_is_compacted_under_its_consumers(broker: Any, tmp_path: Path) -> None:
    data = tmp_path / "data"
    process = broker(workers=2, environment=QUICK, data_dir=data)
    records = fill(process.address)
    wait_until(lambda: len(local_files(data)) == 3, 30, "one compacted, one sealed and the active segment")
    check_readers(process, records, COMPACTED_END)
    check_compacted(over_grpc(process, records[-1][0]), records, COMPACTED_END)
    process.kill()
    again = broker(workers=1, environment=QUICK, data_dir=data)
    check_readers(again, records, COMPACTED_END, run=1)
    more = publish(again.address, len(records), 10)
    assert read(again.address, more[-1][0], "late-shared-0") == more, "cursors and numbering go on"
    assert again.stop() == 0
    cli("verify", str(data))


def test_objects_are_compacted_under_their_consumers(broker: Any, tmp_path: Path) -> None:
    store, data = tmp_path / "store", tmp_path / "data"
    store.mkdir()
    arguments = ["--storage", f"file://{store}"]
    process = broker(workers=2, arguments=arguments, environment=TIERED, data_dir=data)
    records = fill(process.address)
    cli("topics", "seal", TOPIC, "-s", process.address, "--wait")
    wait_until(lambda: local_start(process.address) >= len(records), 60, "all is in the store")
    wait_until(lambda: len(listed(process.grpc_address)) == 2, 60, "one compacted object and the newest")
    end = ROUNDS * PER_ROUND
    assert listed(process.grpc_address)[0] == (0, end - 1)
    check_readers(process, records, end)
    check_compacted(over_grpc(process, records[-1][0]), records, end)
    assert process.stop() == 0
    cli("verify", str(data), f"file://{store}")
    restored = tmp_path / "restored"
    cli("storage", "restore", f"file://{store}", "--data-dir", str(restored))
    again = broker(workers=1, arguments=arguments, environment=TIERED, data_dir=restored)
    check_compacted(read(again.address, records[-1][0], "new"), records, end)
