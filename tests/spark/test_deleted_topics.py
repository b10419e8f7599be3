"""A topic that was deleted: an error, or left out where losses are allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("pyspark")

from danube.cluster.log import log_file
from danube.core.metadata.commands import CreateTopic, DeleteTopic
from danube.core.partition.policy import TopicPolicy
from danube.errors import DanubeError, InvalidArgument, TopicNotFound
from danube.spark.history.decode import Decoder, Losses
from danube.spark.history.options import read_options
from danube.spark.history.plan import Run, Split
from danube.spark.history.reading import read_split
from danube.spark.history.selecting import Catalogue
from danube.spark.history.tail import Tail
from danube.spark.jobs.replay.plan import plan_lanes
from danube.spark.jobs.replay.target import LaneRange
from danube.spark.source.schema import columns_of
from danube.spark.source.source import DanubeReader
from danube.spark.source.splits import SplitPartition
from danube.spark.source.stream import DanubeStreamReader
from danube.wal.segments.segment import LogIdentity
from tests.fakes.broker import FakeBroker
from tests.spark.stored_history import metadata_of, write_history

KEPT, GONE = "/default/kept", "/default/gone"
BOTH = f"{KEPT},{GONE}"
MADE = [CreateTopic(topic=one, policy=TopicPolicy(), created_us=1) for one in (KEPT, GONE)]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Two topics of 400 records each."""
    (tmp_path / "metadata").mkdir()
    for topic_id in (1, 2):
        write_history(tmp_path, LogIdentity(topic_id, 0))
    knows(tmp_path, *MADE)
    return tmp_path


def knows(directory: Path, *commands: Any) -> None:
    snapshot = metadata_of(*commands).snapshot()
    (directory / "metadata" / "metadata.log").write_bytes(log_file.new_file(1, snapshot))


def delete(directory: Path) -> None:
    knows(directory, *MADE, DeleteTopic(topic=GONE))


def given(directory: Path, topic: str, *, strict: bool = False, **more: str) -> dict[str, str]:
    return {"storage": str(directory), "topic": topic, "failOnDataLoss": str(strict).lower(), **more}


def stream(directory: Path, topic: str, **more: Any) -> DanubeStreamReader:
    return DanubeStreamReader(read_options(given(directory, topic, **more), streaming=True), columns_of())


def batch(directory: Path, topic: str, **more: Any) -> DanubeReader:
    return DanubeReader(read_options(given(directory, topic, **more), streaming=False), columns_of())


def records(partitions: Any) -> dict[str, int]:
    found: dict[str, int] = {}
    for one in partitions:
        assert isinstance(one, SplitPartition)
        for run in one.split.runs:
            found[run.topic] = found.get(run.topic, 0) + run.end - run.start
    return found


EARLIEST = {"startingOffsets": "earliest"}


@pytest.mark.parametrize("topic", [GONE, BOTH])
def test_a_stream_goes_on_without_it(directory: Path, topic: str, caplog: pytest.LogCaptureFixture) -> None:
    reader = stream(directory, topic, **EARLIEST)
    start = reader.initialOffset()
    end = reader.latestOffset(start, reader.getDefaultReadLimit())
    delete(directory)
    again = stream(directory, topic)
    again.prepareForTriggerAvailableNow()
    assert again.latestOffset(end, again.getDefaultReadLimit()) == end, "nothing is new"
    # A batch that was planned before: what is there of it.
    expected = {KEPT: 400} if topic == BOTH else {}
    assert records(again.partitions(start, end)) == expected
    assert caplog.text.count("a topic is not there") == 1, "told once"


def test_a_stream_that_allows_no_loss_ends(directory: Path) -> None:
    reader = stream(directory, BOTH, strict=True, **EARLIEST)
    start = reader.initialOffset()
    delete(directory)
    with pytest.raises(TopicNotFound, match=GONE):
        stream(directory, BOTH, strict=True).latestOffset(start, reader.getDefaultReadLimit())


@pytest.mark.parametrize("topic", [GONE, "/default/kpet"])
def test_a_read_that_begins_with_nothing_is_a_mistake(directory: Path, topic: str) -> None:
    delete(directory)
    with pytest.raises(TopicNotFound, match=topic):
        stream(directory, topic).initialOffset()
    with pytest.raises(TopicNotFound, match=topic):
        batch(directory, topic).partitions()


def test_a_batch_reads_what_is_left(directory: Path) -> None:
    delete(directory)
    offsets = f'{{"{GONE}": {{"0": 7}}, "{KEPT}": {{"0": 100}}}}'
    assert records(batch(directory, BOTH, startingOffsets=offsets).partitions()) == {KEPT: 300}
    with pytest.raises(TopicNotFound, match=GONE):
        batch(directory, BOTH, strict=True).partitions()
    with pytest.raises(InvalidArgument, match="/default/other"):
        batch(directory, BOTH, startingOffsets='{"/default/other": {"0": 7}}').partitions()


def test_a_place_may_know_a_topic_longer_than_the_broker(directory: Path) -> None:
    with FakeBroker() as broker:
        broker._topic_ids = 0
        broker.create(KEPT, 0, TopicPolicy())
        broker.create(GONE, 0, TopicPolicy())

        def ends(lenient: bool) -> dict[str, int]:
            options = given(directory, BOTH, strict=not lenient, broker=broker.url)
            catalogue = Catalogue(read_options(options, streaming=False))
            try:
                return {part.key.topic: part.end for part in catalogue.partitions(unsynced=True)}
            finally:
                catalogue.close()

        assert ends(True) == {KEPT: 0, GONE: 0}, "the broker's word counts"
        del broker.topics[GONE]
        assert ends(True) == {KEPT: 0, GONE: 400}
        with pytest.raises(TopicNotFound):
            ends(False)


def test_a_topic_that_goes_while_it_is_read_is_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: Any) -> Any:
        raise TopicNotFound("topic was deleted")

    monkeypatch.setattr(Tail, "read", read)
    split = Split((Run(KEPT, 1, 0, 3, 9, (), KEPT),))
    losses = Losses(allowed=True)
    assert list(read_split(split, (), Decoder(("offset",)), losses, "danube://127.0.0.1:1")) == []
    assert [(loss.start, loss.end) for loss in losses.skipped] == [(3, 9)]
    with pytest.raises(DanubeError, match="was deleted"):
        list(read_split(split, (), Decoder(("offset",)), Losses(), "danube://127.0.0.1:1"))


def test_a_replay_that_goes_on_ends_without_it(directory: Path) -> None:
    delete(directory)
    pinned = [LaneRange(0, GONE, 2, 0, 0, 400)]
    (lane,) = plan_lanes(read_options(given(directory, GONE), streaming=False), pinned)
    assert lane.split == Split(())
