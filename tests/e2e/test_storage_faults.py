"""Disks that fail under a real broker: full, failing syncs, failing writes, damage found at the start."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import danube
from danube import sync as danube_sync
from danube.errors import AlreadyRunning, StorageFailed, StorageFull, Unavailable
from danube.limits import UNSYNCED_RECORDS_MAX
from tests.broker_process import wait_until
from tests.e2e.side_by_side import Bench, beside
from tests.e2e.side_by_side import lanes as lanes

needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 48 MiB; skipped where this user may not mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=48m", "danube-test", str(place)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("a small file system cannot be mounted here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True, capture_output=True)


async def drain(client: Any, topic: str, count: int, subscription: str = "check") -> list[Any]:
    taken: list[Any] = []
    async with client.consumer(topic, subscription=subscription, start="earliest") as consumer:
        async with asyncio.timeout(20):
            async for message in consumer:
                taken.append(message)
                await message.ack()
                if len(taken) == count:
                    return taken
    return taken


def test_a_full_disk_fails_sends_keeps_consumers_and_resumes_by_itself(broker: Any, small_disk: Path) -> None:
    process = broker(data_dir=small_disk / "data", workers=1)
    filler = small_disk / "filler"

    async def scenario() -> None:
        stored: list[bytes] = []
        async with danube.connect(process.address) as client:
            async with client.producer("/default/full") as producer:
                for index in range(100):
                    payload = b"%06d" % index
                    await producer.send(payload)
                    stored.append(payload)
                first = await drain(client, "/default/full", 50)
                with filler.open("wb") as file, pytest.raises(OSError):
                    while True:
                        file.write(bytes(1024 * 1024))
                        file.flush()
                failures = 0
                for index in range(1_000, 1_400):
                    payload = b"%06d" % index + bytes(20_000)
                    try:
                        await producer.send(payload)
                        stored.append(payload)
                    except StorageFull:
                        failures += 1
                        if failures == 3:
                            break
                assert failures == 3, "the disk was never full"
                # Consumers go on reading and acking what is there.
                second = await drain(client, "/default/full", len(stored) - 50)
                filler.unlink()
                async with asyncio.timeout(5):
                    while True:
                        try:
                            await producer.send(b"after")
                            stored.append(b"after")
                            break
                        except StorageFull:
                            await asyncio.sleep(0.05)
                last = await drain(client, "/default/full", 1)
                assert [message.payload for message in first + second + last] == stored
                offsets = [message.offset for message in first + second + last]
                assert offsets == list(range(len(stored)))

    asyncio.run(scenario())
    process.kill()
    process.start()

    async def again() -> None:
        async with danube.connect(process.address) as client:
            async with client.producer("/default/full") as producer:
                ack = await producer.send(b"restart")
            everything = await drain(client, "/default/full", ack.offset + 1, "again")
            assert everything[-1].payload == b"restart"

    asyncio.run(again())


def fill(disk: Path) -> None:
    """Leave not a block."""
    filler = disk / "filler"
    with filler.open("ab", buffering=0) as file:
        for size in (1024 * 1024, 4096, 512, 1):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)):
                    pass


def test_on_a_full_disk_a_worker_is_replaced_and_a_broker_starts(broker: Any, small_disk: Path) -> None:
    """Reading and deleting are what helps there."""
    process = broker(data_dir=small_disk / "data", workers=1)

    async def send(topic: str) -> None:
        async with danube.connect(process.address) as client, client.producer(topic) as producer:
            for index in range(100):
                await producer.send(b"%06d" % index)

    async def read(count: int) -> list[bytes]:
        async with danube.connect(process.address) as client:
            return [one.payload for one in await drain(client, "/default/full", count)]

    asyncio.run(send("/default/full"))
    asyncio.run(send("/default/other"))
    found = asyncio.run(read(25))
    fill(small_disk)
    before = process.worker_pids[0]
    process.kill_worker()
    process.wait_worker_replaced(before)
    found += asyncio.run(read(25))
    assert process.stop() == 0
    process.start()
    found += asyncio.run(read(25))
    process.kill()
    process.start()
    found += asyncio.run(read(25))
    assert found == [b"%06d" % index for index in range(100)]
    with danube_sync.connect(process.address) as client:
        client.admin.delete_topic("/default/other")
    wait_until(lambda: os.statvfs(small_disk).f_bavail > 0, 10, "the deleted topic's room is free")
    asyncio.run(send("/default/full"))


def test_a_killed_broker_goes_on_at_the_next_offset_and_one_whose_machine_ended_behind_a_hole(
    broker: Any,
) -> None:
    process = broker()

    async def publish(count: int) -> list[int]:
        async with danube.connect(process.address) as client, client.producer("/default/cut") as producer:
            return [(await producer.send(b"%d" % number)).offset for number in range(count)]

    assert asyncio.run(publish(3)) == [0, 1, 2]
    process.kill()
    process.start()
    assert asyncio.run(publish(2)) == [3, 4]
    process.kill()
    path = process.data_dir / "host"
    said = path.read_bytes()
    boot = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    assert boot in said
    path.write_bytes(said.replace(boot, boot[::-1]))  # as the next boot would find it
    process.start()
    assert asyncio.run(publish(1)) == [5 + UNSYNCED_RECORDS_MAX]

    async def everything() -> list[int]:
        async with danube.connect(process.address) as client:
            return [message.offset for message in await drain(client, "/default/cut", 6)]

    assert asyncio.run(everything()) == [0, 1, 2, 3, 4, 5 + UNSYNCED_RECORDS_MAX]


@needs_strace
@pytest.mark.parametrize("call", ["fdatasync", "pwritev,pwritev2"])
def test_a_failed_disk_call_fences_the_log_and_service_resumes(
    broker: Any, tmp_path: Path, call: str
) -> None:
    trace = tmp_path / "trace"
    # Only the segment files of the partition fail, from the third call on, four times.
    process = broker(
        prefix=[
            *("strace", "-f", "-y", "-o", str(trace), "-e", f"trace={call},close"),
            *("-e", f"inject={call}:error=EIO:when=12..15"),
        ]
    )

    async def scenario() -> None:
        stored: list[bytes] = []
        failed = 0
        async with danube.connect(process.address) as client:
            async with client.producer("/default/eio", durability="fsync") as producer:
                async with asyncio.timeout(60):
                    for index in range(200):
                        payload = b"%06d" % index
                        try:
                            await producer.send(payload)
                            stored.append(payload)
                        except StorageFailed:
                            failed += 1
                            await asyncio.sleep(0.05)
                        except Unavailable:
                            failed += 1
            assert stored[-1] == b"%06d" % 199
            entry = await client.admin.describe_topic("/default/eio")
            assert entry is not None
            taken: list[bytes] = []
            async with client.consumer("/default/eio", subscription="s", start="earliest") as consumer:
                async with asyncio.timeout(20):
                    async for message in consumer:
                        taken.append(message.payload)
                        await message.ack()
                        if message.payload == stored[-1]:
                            break
        assert set(stored) <= set(taken)
        assert [payload for payload in taken if payload in set(stored)] == stored

    asyncio.run(scenario())
    process.kill()
    text = trace.read_text(errors="replace")
    assert "INJECTED" in text, "the fault was never injected"
    if call == "fdatasync":
        failed: set[str] = set()
        for line in text.splitlines():
            match = re.search(r"(fdatasync|close)\((\d+<[^>]*\.seg>)", line)
            if match is None:
                continue
            if match[1] == "close":
                failed.discard(match[2])
                continue
            assert match[2] not in failed, f"synced again after a failure: {line}"
            if "EIO" in line:
                failed.add(match[2])


def test_damage_in_a_stored_log_is_reported_and_never_served(broker: Any) -> None:
    process = broker()

    async def fill() -> None:
        async with danube.connect(process.address) as client:
            async with client.producer("/default/damaged") as producer:
                for index in range(100):
                    await producer.send(b"%06d" % index + bytes(100))

    asyncio.run(fill())
    process.stop()
    segment = next((process.data_dir / "partitions").glob("*/*.seg"))
    content = bytearray(segment.read_bytes())
    middle = content.find(b"000050")
    content[middle] ^= 0x01
    segment.write_bytes(content)
    process.start()

    async def check() -> None:
        async with danube.connect(process.address) as client:
            taken = await drain(client, "/default/damaged", 99)
            assert [int(message.payload[:6]) for message in taken] == [n for n in range(100) if n != 50]
            entry = await client.admin.describe_topic("/default/damaged")
            assert "50" in str(entry)
            async with client.producer("/default/damaged") as producer:
                assert (await producer.send(b"next")).offset == 100

    asyncio.run(check())


def test_a_second_broker_on_the_same_data_directory_refuses(broker: Any) -> None:
    process = broker()
    second = broker(data_dir=process.data_dir, start=False)
    second.launch()
    assert second._process is not None
    assert second._process.wait(20) == AlreadyRunning.exit_code
    assert "data directory" in second.output_tail() or "already" in second.output_tail()
    with danube.sync.connect(process.address) as client:
        client.admin.list_topics()


def test_a_drain_under_load_loses_and_repeats_nothing(broker: Any) -> None:
    process = broker(workers=2)
    acked: list[bytes] = []

    async def load() -> None:
        async with danube.connect(process.address, reconnect_timeout=30) as client:
            async with client.producer("/default/drain", name="p", partitions=2) as producer:
                for turn in range(300):
                    payloads = [b"%04d-%02d" % (turn, index) for index in range(20)]
                    await producer.send_many(payloads)
                    acked.extend(payloads)
                    if turn == 100:
                        os.kill(process.pid, signal.SIGTERM)
                        restart = asyncio.create_task(again())
                    await asyncio.sleep(0.001)
                await restart

    async def again() -> None:
        assert process._process is not None
        assert await asyncio.to_thread(process._process.wait, 10) == 0
        process.start()

    asyncio.run(load())

    async def check() -> None:
        async with danube.connect(process.address) as client:
            taken = await drain(client, "/default/drain", len(acked))
            assert sorted(message.payload for message in taken) == sorted(acked)

    asyncio.run(check())


@beside  # a worker that does not move is given ten seconds
def test_a_stopped_worker_is_killed_and_replaced_before_another_writes(bench: Bench) -> None:
    process = bench.broker(workers=1)

    async def scenario() -> None:
        async with danube.connect(process.address) as client:
            async with client.producer("/default/zombie", name="p") as producer:
                await producer.send(b"before")
                frozen = process.worker_pids[0]
                os.kill(frozen, signal.SIGSTOP)
                ack = await producer.send(b"after")
                assert ack.offset == 1
                assert not Path(f"/proc/{frozen}").exists()
            taken = await drain(client, "/default/zombie", 2)
            assert [message.payload for message in taken] == [b"before", b"after"]

    asyncio.run(scenario())
