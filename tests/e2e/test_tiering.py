"""A real broker with an object store: one stream from any offset, and a new broker on the store alone."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from danube import sync
from danube.core.dispatch.cursor import CursorState
from danube.core.placement.recovered import OFFSETS_AHEAD
from danube.errors import WrongState
from danube.server.proto import DanubeApi_pb2 as pb
from danube.wal.log.cursors import read_cursor_file
from danube.wal.segments.segment import LogIdentity
from tests import fork_server
from tests.broker_process import ROOT, BrokerProcess, wait_until
from tests.e2e.grpc_parts import DanubeCalls

TOPIC = "/default/tiered"
TIERED = {
    "DANUBE_STORAGE__LOCAL_RETENTION_TIME": "1ms",
    "DANUBE_STORAGE__SEAL_AFTER": "1s",
    "DANUBE_STORAGE__CACHE_SIZE": "32MiB",
}


def cli(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = fork_server.run([sys.executable, "-m", "danube", *words], cwd=ROOT)
    assert done.returncode == 0 or not check, done.stderr
    return done


def publish(address: str, start: int, count: int, size: int = 2_000, topic: str = TOPIC) -> None:
    with sync.connect(address) as client, client.producer(topic, name="writer") as producer:
        for number in range(start, start + count):
            producer.send_nowait(payload(number, size))
        producer.flush()


def payload(number: int, size: int = 2_000) -> bytes:
    return b"%08d" % number + b"." * (size - 8)


def read(
    address: str, start: Any, count: int, subscription: str, topic: str = TOPIC
) -> list[tuple[int, bytes]]:
    found = []
    with sync.connect(address) as client:
        with client.consumer(topic, subscription=subscription, start=start) as consumer:
            while len(found) < count:
                message = consumer.receive(timeout=20)
                found.append((message.offset, bytes(message.payload)))
                message.ack()
    return found


def described(address: str, topic: str = TOPIC) -> dict[str, Any]:
    with sync.connect(address) as client:
        return dict(client.admin.describe_topic(topic).partitions[0])


def wait_evicted(address: str, end: int) -> None:
    """Until all records below ``end`` are only in the store."""
    wait_until(lambda: described(address)["local_start"] >= end, 40, f"everything below {end} evicted")


def test_a_consumer_reads_objects_files_and_the_tail_as_one_stream(broker: Any, tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    process = broker(
        workers=2,
        arguments=["--storage", f"file://{store}"],
        environment=TIERED | {"DANUBE_STORAGE__SEAL_AFTER": "1h"},  # the last records stay on the host
        data_dir=tmp_path / "data",
    )
    for round_number in range(3):
        publish(process.address, round_number * 500, 500)
        cli("topics", "seal", TOPIC, "-s", process.address, "--wait")
    wait_evicted(process.address, 1_500)
    publish(process.address, 1_500, 250)
    assert list(store.rglob("*.seg")), "objects are files here"
    expected = [(number, payload(number)) for number in range(1_750)]
    assert read(process.address, "earliest", 1_750, "all") == expected
    assert read(process.address, 777, 10, "middle") == expected[777:787]
    status = json.loads(cli("storage", "status", "-s", process.address, "-o", "json").stdout)
    assert status["tiered"] and status["errors"] == 0
    (row,) = [row for row in status["topics"] if row["topic"] == TOPIC]
    assert row["objects"] >= 3 and row["pending_bytes"] > 0, "the last records are not off the host yet"
    cli("topics", "seal", TOPIC, "-s", process.address, "--wait")
    assert listed(process.grpc_address, 0)[0] == (0, 499)
    assert [last for _, last in listed(process.grpc_address, 499)] == [999, 1_499, 1_749]
    assert listed(process.grpc_address, 1_749) == []
    with sync.connect(process.address) as client:  # a cursor in the middle, to be found again
        with client.consumer(TOPIC, subscription="half", start="earliest") as consumer:
            for _ in range(600):
                consumer.receive(timeout=20).ack()
            consumer.flush()
    wait_until(lambda: copied_floor(store, "half") == 600, 40, "the cursor copied")
    process.kill()
    restored = tmp_path / "restored"
    told = json.loads(
        cli("storage", "restore", f"file://{store}", "--data-dir", str(restored), "-o", "json").stdout
    )
    assert told["problems"] == [] and told["topics"] >= 1 and told["objects"] >= 4
    refused = cli("storage", "restore", f"file://{store}", "--data-dir", str(restored), check=False)
    assert refused.returncode == WrongState.exit_code and "holds data" in refused.stderr
    again = broker(
        workers=1, arguments=["--storage", f"file://{store}"], environment=TIERED, data_dir=restored
    )
    assert read(again.address, "earliest", 1_750, "new") == expected
    assert read(again.address, "earliest", 10, "half")[0] == expected[600], "its cursor came back"
    publish(again.address, 1_750, 100)
    found = read(again.address, 1_745, 105, "after")
    assert [data for _, data in found] == [payload(n) for n in range(1_745, 1_850)]
    ahead = found[5][0]
    assert [n for n, _ in found] == [*range(1_745, 1_750), *range(ahead, ahead + 100)]
    assert ahead > 1_750 + OFFSETS_AHEAD, "the lost host may have given what follows 1,750"
    assert described(again.address)["epoch"] > described_epoch(process)


def listed(address: str, after_offset: int) -> list[tuple[int, int]]:
    """First and last offset of the segments that the gRPC API lists."""
    request = pb.ListSegmentDescriptorsRequest(topic=TOPIC, after_offset=after_offset)
    with DanubeCalls(address) as calls:
        found = calls.unary("StorageService/ListSegmentDescriptors", request).segments
    return [(one.start_offset, one.end_offset) for one in found]


def copied_floor(store: Path, subscription: str) -> int:
    """Where a subscription stands in the newest copy of the cursors; -1 while there is none."""
    copies = sorted(store.rglob("cursors-*"))
    if not copies:
        return -1
    number = int(copies[-1].parent.name.split("-")[0], 16)
    held = read_cursor_file(copies[-1], LogIdentity(number, 0))
    blob = held.states.get(subscription) if held is not None else None
    return CursorState.decode(blob).ack_floor if blob else -1


def described_epoch(process: Any) -> int:
    """The largest epoch that a killed broker can have used."""
    return int((process.data_dir / "incarnation").read_text().split()[0]) * 256 - 1


def test_an_empty_broker_restores_itself_when_it_is_told_to(broker: Any, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    arguments = ["--storage", f"file://{tmp_path / 'store'}"]
    environment = {**TIERED, "DANUBE_STORAGE__RESTORE": "if_empty"}
    process = broker(arguments=arguments, environment=environment, data_dir=tmp_path / "data")
    publish(process.address, 0, 300)
    cli("topics", "seal", TOPIC, "-s", process.address, "--wait")
    wait_until(lambda: any((tmp_path / "store").rglob("metadata/*")), 20, "metadata copied")
    assert process.stop() == 0
    shutil.rmtree(tmp_path / "data")
    again = broker(arguments=arguments, environment=environment, data_dir=tmp_path / "data")
    assert read(again.address, "earliest", 300, "all") == [(n, payload(n)) for n in range(300)]


def test_workers_and_the_mover_may_die_at_any_time(broker: Any, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    process = broker(
        workers=2, arguments=["--storage", f"file://{tmp_path / 'store'}"], environment=TIERED,
        data_dir=tmp_path / "data",
    )  # fmt: skip
    expected = []
    for round_number in range(6):
        publish(process.address, round_number * 100, 100)
        expected += [
            (number, payload(number)) for number in range(round_number * 100, round_number * 100 + 100)
        ]
        cli("topics", "seal", TOPIC, "-s", process.address)
        for pid in process.pids:
            if pid != process.pid:
                os.kill(pid, signal.SIGKILL)
        process.running_workers()
    cli("topics", "seal", TOPIC, "-s", process.address, "--wait")
    wait_evicted(process.address, 600)
    assert read(process.address, "earliest", 600, "all") == expected


def test_a_store_that_cannot_be_used_stops_the_start(
    broker: Callable[..., BrokerProcess], tmp_path: Path
) -> None:
    process = broker(start=False, arguments=["--storage", f"file://{tmp_path}/none"])
    with pytest.raises(Exception, match="cannot be opened"):
        process.start()
