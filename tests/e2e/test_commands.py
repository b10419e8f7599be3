"""Whole commands beside a real broker: what their own processes import, and where bounded reads end."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

import danube
from danube.cli.terminal.own_process import own_command
from tests.broker_process import ROOT, free_port

FAILURE = {"poison": "drop", "max_redelivery_count": 0}


def run(folder: Path, *words: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    """Run `danube` with its words in a folder; an error if it does not end."""
    return subprocess.run(
        own_command("danube", *words),
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A folder whose files have the names of ours and of the standard library's."""
    folder = tmp_path / "hostile"
    (folder / "danube").mkdir(parents=True)
    for file in ("uuid.py", "json.py", "danube/__init__.py"):
        (folder / file).write_text("raise SystemExit('a file of the current folder was executed')\n")
    return folder


def test_a_detached_start_executes_no_file_of_the_current_folder(hostile: Path, tmp_path: Path) -> None:
    place = ("--data-dir", str(tmp_path / "data"))
    ports = (
        "--native-port",
        str(free_port()),
        "--grpc-port",
        "0",
        "--admin-port",
        "0",
        "--metrics-port",
        "0",
    )
    started = run(hostile, "start", "--detach", *place, *ports, "--workers", "1")
    try:
        assert started.returncode == 0, started.stdout + started.stderr
    finally:
        ended = run(hostile, "stop", *place)
    assert ended.returncode == 0, ended.stderr


def test_a_benchmark_executes_no_file_of_the_current_folder(hostile: Path, shared_broker: Any) -> None:
    words = ("bench", "publish", "--count", "1000", "-s", shared_broker().address)
    measured = run(hostile, *words)
    assert measured.returncode == 0, measured.stdout + measured.stderr


@pytest.mark.parametrize("case", ["filtered", "acked ahead", "dropped", "dead-lettered"])
def test_a_read_to_the_end_leaves_when_the_last_records_are_not_for_it(
    case: str, shared_broker: Any, topic: str, tmp_path: Path
) -> None:
    address = shared_broker().address
    failure: dict[str, Any] | None = {"dropped": FAILURE, "dead-lettered": None}.get(case)
    if case == "dead-lettered":
        failure = FAILURE | {"poison": "dead_letter", "dead_letter_topic": f"{topic}-dead"}

    async def fill() -> None:
        async with danube.connect(address) as client:
            if case == "dead-lettered":
                await client.admin.create_topic(f"{topic}-dead")
            async with client.producer(topic) as producer:
                for number in range(4):
                    await producer.send(b"%d" % number, key="a" if number < 2 else "b")
            if case == "filtered":
                return
            async with client.consumer(topic, "s", "shared", start="earliest", failure=failure) as consumer:
                messages = [await consumer.receive(30) for _ in range(4)]
                for one in messages[2:]:
                    assert one is not None
                    one.ack_nowait() if failure is None else one.nack_nowait()
                await consumer.flush()
                async with asyncio.timeout(60):
                    while not await settled(client):
                        await asyncio.sleep(0.05)

    async def settled(client: Any) -> bool:
        [told] = (await client.admin.describe_subscription(topic, "s")).partitions
        return bool(told["acked_above_floor"] == 2)  # dropped and copied records count as acked

    asyncio.run(fill())
    mode = ["key-shared", "--filter", "a"] if case == "filtered" else ["shared"]
    bounds = ("-m", "s", "--from", "earliest", "--until-end", "--no-ack", "-o", "raw")
    read = run(tmp_path, "consume", topic, "-s", address, *bounds, "--sub-type", *mode)
    assert (read.returncode, read.stdout.split()) == (0, ["0", "1"]), read.stderr
