"""A start on a data directory that others touched: it serves, or says what is wrong and how to mend it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from danube import sync

pytestmark = pytest.mark.e2e


def send_one(process: Any, topic: str = "/default/t") -> None:
    with sync.connect(process.address) as client, client.producer(topic) as producer:
        producer.send(b"one")


def test_strangers_in_a_fresh_directory_are_named_and_left_alone(broker: Any, tmp_path: Path) -> None:
    data = tmp_path / "data"
    for place in ("partitions", "metadata", "cache", "."):
        (data / place / "lost+found").mkdir(parents=True)
        (data / place / ".DS_Store").write_bytes(bytes(100))
    process = broker(data_dir=data)
    send_one(process)
    told = process.output_tail()
    assert str(data / "partitions" / "lost+found") in told and "left alone" in told
    assert process.stop() == 0
    process.start()
    send_one(process)
    assert (data / "partitions" / "lost+found").is_dir() and (data / "partitions" / ".DS_Store").exists()
