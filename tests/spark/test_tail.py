"""What only the broker has: positions beyond the end, holes, and offsets below the end without a record."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")

import danube.sync
from danube.cluster.log import log_file
from danube.core.metadata.commands import CreateTopic
from danube.core.partition.policy import TopicPolicy
from danube.errors import InvalidArgument, OffsetOutOfRange, OperationTimeout, Unavailable
from danube.spark.history import tail as tail_module
from danube.spark.history.decode import Decoder, Losses
from danube.spark.history.offsets import PartitionKey
from danube.spark.history.options import ReadOptions, read_options
from danube.spark.history.plan import EXPIRED, GIVEN_UP, WAITING, Lost, Split, refuse_lost
from danube.spark.history.reading import read_split
from danube.spark.history.selecting import ENDED, Catalogue, Known, tail_runs
from danube.spark.history.tail import PartitionEnds, Tail
from danube.spark.jobs.replay.plan import plan_lanes
from danube.wal.segments.holes import Hole, HoleKind
from danube.wal.segments.segment import LogIdentity
from tests.fakes.broker import FakeBroker
from tests.spark.stored_history import metadata_of, write_history

TOPIC = "/default/t"


@pytest.fixture
def broker() -> Iterator[FakeBroker]:
    with FakeBroker() as running:
        with danube.sync.connect(running.url) as client, client.producer(TOPIC) as producer:
            producer.send_many([b"%d" % number for number in range(10)])
        yield running


@pytest.fixture
def directory(tmp_path: Path) -> str:
    """Records 0 to 400 in a data directory."""
    metadata = metadata_of(CreateTopic(topic=TOPIC, policy=TopicPolicy(), created_us=1))
    (tmp_path / "metadata").mkdir()
    (tmp_path / "metadata" / "metadata.log").write_bytes(log_file.new_file(1, metadata.snapshot()))
    write_history(tmp_path, LogIdentity(1, 0))
    return str(tmp_path)


def at(offset: int) -> str:
    return f'{{"{TOPIC}": {{"0": {offset}}}}}'


def options(place: Mapping[str, str], **given: str) -> ReadOptions:
    return read_options({"topic": TOPIC, **place, **given}, streaming=None if "stream" in given else False)


def bounds(place: Mapping[str, str], **given: str) -> tuple[int, int]:
    asked = options(place, **given)
    catalogue = Catalogue(asked)
    try:
        known = catalogue.partitions(unsynced=True)
        (start,) = catalogue.resolve(asked.starting, known, ending=False).values()
        (end,) = catalogue.resolve(asked.ending, known, ending=True).values()
        return start, end
    finally:
        catalogue.close()


# -- positions beyond the end ------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["startingOffsets", "endingOffsets"])
@pytest.mark.parametrize("where", ["broker", "directory"])
def test_a_position_beyond_the_end_is_refused_at_once_with_both_numbers(
    broker: FakeBroker, directory: str, where: str, side: str
) -> None:
    place, end = ({"broker": broker.url}, 10) if where == "broker" else ({"storage": directory}, 400)
    began_s = time.monotonic()
    for read in (bounds, lambda *names, **given: plan_lanes(options(*names, **given))):
        with pytest.raises(OffsetOutOfRange, match=rf"{side} is at offset 500 .* ends at {end}") as raised:
            read(place, **{side: at(500)})  # type: ignore[operator]
        assert "failOnDataLoss=false" in raised.value.hint
    assert time.monotonic() - began_s < 20, "nothing is waited for"


@pytest.mark.parametrize("where", ["broker", "directory"])
def test_where_losses_are_allowed_it_means_the_end(broker: FakeBroker, directory: str, where: str) -> None:
    """Else a read would wait for what is not there, and a stream would pass over what comes."""
    place, end = ({"broker": broker.url}, 10) if where == "broker" else ({"storage": directory}, 400)
    assert bounds(place, endingOffsets=at(500), failOnDataLoss="false") == (0, end)
    assert bounds(place, startingOffsets=at(500), failOnDataLoss="false") == (end, end)


def test_the_end_itself_is_not_beyond_it(broker: FakeBroker) -> None:
    assert bounds({"broker": broker.url}, startingOffsets=at(10), endingOffsets=at(10)) == (10, 10)


@pytest.mark.parametrize(
    "given",
    [
        {"startingOffsets": at(7), "endingOffsets": at(3)},
        {"startingTimestamp": "2000", "endingTimestamp": "1000"},
    ],
)
def test_a_start_behind_the_end_is_refused(given: dict[str, str]) -> None:
    with pytest.raises(InvalidArgument, match="ending"):
        options({"broker": "danube://127.0.0.1:1"}, **given)


# -- holes -------------------------------------------------------------------------------------------


def known(end: int, *holes: Hole, start: int = 0) -> Known:
    return Known(PartitionKey(TOPIC, 1, 0), (), PartitionEnds(start, end, holes), "t-0")


def hole(start: int, end: int, kind: HoleKind) -> Hole:
    return Hole(start, end, 0, 1, kind, 1, 1)


def test_the_broker_is_not_asked_for_what_lies_in_a_hole() -> None:
    part = known(
        100, hole(80, 100, HoleKind.UNUSED), hole(20, 30, HoleKind.OPEN), hole(30, 40, HoleKind.GIVEN_UP)
    )
    lost: list[Lost] = []
    runs = tail_runs(part, 10, 100, lost)
    assert [(run.start, run.end, run.physical) for run in runs] == [(10, 20, "t-0"), (40, 80, "t-0")]
    assert [(one.start, one.end, one.why) for one in lost] == [(20, 30, WAITING), (30, 40, GIVEN_UP)]
    with pytest.raises(Unavailable, match="records 20 to 30"):
        refuse_lost(lost)
    assert tail_runs(part, 85, 95, []) == []


def test_what_lies_before_the_broker_s_start_or_behind_its_end_is_lost() -> None:
    lost: list[Lost] = []
    (run,) = tail_runs(known(50, start=30), 10, 60, lost)
    assert (run.start, run.end) == (30, 50)
    assert [(one.start, one.end, one.why) for one in lost] == [(50, 60, ENDED), (10, 30, EXPIRED)]
    lost.clear()
    assert tail_runs(known(50)._replace(told=None), 10, 60, lost) == []
    assert [(one.start, one.end) for one in lost] == [(10, 60)]


# -- offsets below the end that have no record -------------------------------------------------------


def quiet(monkeypatch: pytest.MonkeyPatch, broker: FakeBroker, **state: int) -> None:
    """The partition goes on to 15, and the last five have no record."""
    monkeypatch.setattr(tail_module, "_QUIET_S", 0.05)
    admin = broker._admin_of_partition

    def answered(call: Any) -> Any:
        found = admin(call)
        return {**found, **state} if call.op == "describe_subscription" else found

    monkeypatch.setattr(broker, "_admin_of_partition", answered)


def rows(broker: FakeBroker, *, allowed: bool) -> tuple[list[int], Losses]:
    part = known(15)._replace(physical=TOPIC)
    losses = Losses(allowed=allowed)
    split = Split(tuple(tail_runs(part, 0, 15, [])))
    found = read_split(split, (), Decoder(("offset",)), losses, broker.url)
    return [offset for batch in found for offset in batch.column(0).to_pylist()], losses


def test_a_read_ends_when_nothing_is_left_below_its_end(
    broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet(monkeypatch, broker, ack_floor=15, compacted=5)
    found, losses = rows(broker, allowed=False)
    assert found == list(range(10)) and not losses.skipped


def test_what_the_broker_passed_over_is_lost(broker: FakeBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet(monkeypatch, broker, ack_floor=15, damaged=3, expired=2)
    with pytest.raises(OffsetOutOfRange, match="3 of the records 0 to 15 of /default/t partition 0"):
        rows(broker, allowed=False)
    found, losses = rows(broker, allowed=True)
    assert found == list(range(10))
    assert [loss.why.partition(":")[0] for loss in losses.skipped] == ["3 of these", "2 of these"]


def test_a_broker_that_is_silent_while_something_is_left_is_an_error(
    broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet(monkeypatch, broker, ack_floor=10)
    monkeypatch.setattr(tail_module, "_WAIT_S", 2.0)
    tail = Tail(broker.url)
    try:
        with pytest.raises(OperationTimeout, match="sends nothing from offset 10"):
            list(tail.read(TOPIC, 0, 15))
    finally:
        tail.close()
