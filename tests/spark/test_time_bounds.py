"""Bounds in time hold for every record, in a segment, in an object or with the broker alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")

import danube.sync
from danube.cluster.log import log_file
from danube.core.metadata.commands import CreateTopic
from danube.core.partition.policy import TopicPolicy
from danube.host.clock import wall_us
from danube.spark.history.options import Bound, read_options
from danube.spark.history.selecting import Catalogue
from danube.spark.jobs.replay import replay
from danube.wal.segments.segment import LogIdentity
from danube.wal.stores.directory import LocalStore
from tests.broker_process import BrokerProcess, wait_until
from tests.spark.stored_history import START_US, metadata_of, put_history, write_history

TOPIC = "/default/times"
FUTURE_US = 32_503_680_000_000_000  # the year 3000


def resolved(time_us: int, **given: str) -> tuple[int, int]:
    """The offset that a time means as a start and as an end."""
    catalogue = Catalogue(read_options({"topic": TOPIC, **given}, streaming=False))
    try:
        known = catalogue.partitions(unsynced=True)
        bound = Bound("", time_us)
        (start,) = catalogue.resolve(bound, known, ending=False).values()
        (end,) = catalogue.resolve(bound, known, ending=True).values()
        return start, end
    finally:
        catalogue.close()


Parted = tuple[BrokerProcess, str, list[int]]


@pytest.fixture
def parted(broker: Callable[..., BrokerProcess], tmp_path: Path) -> Parted:
    """Three parts of 50 records, the first in a store, the others with the broker alone; when each began."""
    store = tmp_path / "store"
    store.mkdir()
    process = broker(arguments=["--storage", f"file://{store}"])
    moments = []
    with danube.sync.connect(process.address) as client, client.producer(TOPIC) as producer:
        for part in range(3):
            moments.append(wall_us())
            producer.send_many([b"%d" % part] * 50)
            if part == 0:
                client.admin.seal(TOPIC)
            before_us = wall_us()
            while wall_us() < before_us + 2_000:  # the broker's clock is this one
                time.sleep(0.001)
    url = f"file://{store}"

    def uploaded() -> bool:
        if not any(store.glob("metadata/*")):
            return False
        catalogue = Catalogue(read_options({"topic": TOPIC, "storage": url}, streaming=False))
        return [part.stored_end for part in catalogue.partitions(unsynced=True)] == [50]

    wait_until(uploaded, 60, "the first part is uploaded")
    return process, url, moments


@pytest.mark.e2e
def test_records_that_only_the_broker_has_are_bounded_as_all_others(parted: Parted) -> None:
    process, url, (first, second, third) = parted
    for given in ({"broker": process.address}, {"broker": process.address, "storage": url}):
        for time_us, offset in ((0, 0), (-5, 0), (first, 0), (second, 50), (third, 100), (FUTURE_US, 150)):
            assert resolved(time_us, **given) == (offset, offset), (given, time_us)
    assert resolved(FUTURE_US, storage=url) == (50, 50)


@pytest.mark.e2e
def test_a_replay_ends_at_its_time_among_records_that_only_the_broker_has(
    parted: Parted, tmp_path: Path
) -> None:
    process, url, (_, _, third) = parted
    for number, (end_us, count, more) in enumerate(
        ((third, 100, {"storage": url}), (FUTURE_US, 150, {"storage": url}), (third, 100, {}))
    ):
        target = f"{TOPIC}-{number}"
        given = {"topic": TOPIC, "broker": process.address, "to": process.address, "toTopic": target, **more}
        moment = datetime.fromtimestamp(end_us / 1e6, UTC).isoformat()
        state = str(tmp_path / f"{number}.json")
        report = replay.run({**given, "endingTimestamp": moment, "state": state, "processes": "1"})
        assert report.counts["records"] == count, given
        with danube.sync.connect(process.address) as client:
            (part,) = client.admin.describe_topic(target).partitions
            assert part["log_end"] == count


def test_a_place_that_begins_later_does_not_hide_what_another_has(tmp_path: Path) -> None:
    """A directory holds what was not evicted; the store has all that is older."""
    identity, data, store = LogIdentity(1, 0), tmp_path / "data", tmp_path / "store"
    metadata = metadata_of(CreateTopic(topic=TOPIC, policy=TopicPolicy(), created_us=1))
    store.mkdir()
    (data / "metadata").mkdir(parents=True)
    (data / "metadata" / "metadata.log").write_bytes(log_file.new_file(1, metadata.snapshot()))
    write_history(data, identity)
    put_history(LocalStore(store), data, metadata, TOPIC)
    for path in sorted((data / "partitions" / identity.directory_name).glob("*.seg"))[:2]:
        path.unlink()
    for storage in (f"{data},file://{store}", f"file://{store},{data}"):
        for time_us, offset in (
            (0, 0),
            (START_US + 120_000, 120),
            (START_US + 300_000, 300),
            (FUTURE_US, 400),
        ):
            assert resolved(time_us, storage=storage) == (offset, offset)
