"""What workers measure and what it says together: nothing that is not known is told."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from danube.broker.worker.housekeeping import Housekeeping
from danube.broker.worker.measuring import PARTITIONS_AT_ONCE, Measuring
from danube.core.metadata.commands import CreateTopic, DeleteTopic
from danube.core.metadata.machine import Metadata
from danube.core.partition.pending import NOTHING, OTHER, Measured, Pending, TopicRow, host_of
from danube.core.partition.policy import TopicPolicy
from danube.core.placement.workers import owner_of


def row(topic: str, partitions: int = 1, unknown: int = 0, size: int = 0, oldest: int = 0) -> TopicRow:
    return TopicRow(topic, partitions, unknown, size, oldest)


def answer(*rows: TopicRow, topics: int = 5, tiered: bool = True) -> Measured:
    return Measured(topics, tiered, list(rows))


def test_the_partitions_of_a_topic_are_summed_over_their_owners() -> None:
    found = host_of(
        [
            answer(row("/a/b", 2, size=10, oldest=7), row(OTHER, 0, size=1, oldest=9)),
            answer(row("/a/b", 2, size=5, oldest=3), row("/a/c"), row(OTHER, 0, size=2, oldest=8)),
        ],
        2,
    )
    assert found.pending_by_topic == {"/a/b": Pending(15, 3), "/a/c": NOTHING, OTHER: Pending(3, 8)}
    assert (found.pending, found.topic_count, found.tiered) == (Pending(18, 3), 5, True)


def test_without_an_owners_answer_only_what_others_cannot_have_is_told() -> None:
    found = host_of([answer(row("/a/b", 2, size=10), row("/a/c", size=4), row(OTHER, 0, size=1))], 2)
    assert found.pending_by_topic == {"/a/c": Pending(4, 0)}
    assert found.pending is None and found.topic_count == 5 and found.tiered


def test_a_topic_that_is_not_open_everywhere_has_no_numbers_and_neither_has_the_host() -> None:
    found = host_of(
        [answer(row("/a/b", 2, size=9), row("/a/c", size=4)), answer(row("/a/b", 2, unknown=1))], 2
    )
    assert found.pending_by_topic == {"/a/c": Pending(4, 0)}
    assert found.pending is None and found.unknown_partitions == 1


def test_nobody_answers_and_local_storage_tells_nothing_pending() -> None:
    silent = host_of([], 2)
    assert (silent.topic_count, silent.tiered, silent.pending) == (None, None, None)
    local = host_of([answer(tiered=False), answer(tiered=False)], 2)
    assert (local.tiered, local.pending, local.pending_by_topic) == (False, None, {})


class Tier:
    """As much of a partition's tier as is measured."""

    def __init__(self, record: Any, pending: Pending) -> None:
        self.hosted = self
        self.record = record
        self._pending = pending

    def pending(self) -> Pending:
        return self._pending


class Bench:
    """A worker that is measured, whose loop is stepped by hand."""

    def __init__(self, workers: int = 1, index: int = 0) -> None:
        self.metadata = Metadata()
        self.tiers: list[Tier] | None = []
        self.unopened: list[Any] = []
        self.soon: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self.sent: list[dict[str, Any]] = []
        self.measuring = Measuring(
            (index, workers),
            metadata=lambda: self.metadata,
            tiers=lambda: self.tiers,  # type: ignore[arg-type,return-value]
            unopened=lambda: self.unopened,
            call_soon=lambda call, *arguments: self.soon.append((call, arguments)),
            send=lambda kind, **fields: self.sent.append({"kind": kind, **fields}),
        )

    def create(self, topic: str, partitions: int = 0, **policy: Any) -> Any:
        command = CreateTopic(topic=topic, partitions=partitions, policy=TopicPolicy(**policy), created_us=1)
        self.metadata.apply(self.metadata.version + 1, command)
        return self.metadata.topic(topic)

    def ask(self, question: int = 1, topics_max: int = 1_000) -> Measured:
        self.measuring.on_frame({"kind": "measure", "id": question, "topics_max": topics_max})
        while self.soon:
            call, arguments = self.soon.popleft()
            call(*arguments)
        (frame,) = [one for one in self.sent if one["id"] == question]
        assert frame["kind"] == "measured"
        return msgspec.msgpack.decode(frame["answer"], type=Measured)


def rows(measured: Measured) -> dict[str, TopicRow]:
    return {one.topic: one for one in measured.rows}


def test_a_worker_answers_for_its_partitions_and_for_empty_topics_that_it_speaks_for() -> None:
    bench = Bench()
    first, second = bench.create("/default/one", 2), bench.create("/default/two")
    bench.create("/default/memory", reliable=False, durability="memory")
    assert bench.tiers is not None
    bench.tiers += [Tier(first, Pending(5, 30)), Tier(first, Pending(6, 20)), Tier(second, NOTHING)]
    found = bench.ask()
    assert rows(found) == {
        "/default/one": row("/default/one", 2, size=11, oldest=20), "/default/two": row("/default/two")
    }  # fmt: skip
    assert found.topic_count == 3 and found.tiered


def test_an_empty_topic_is_told_by_one_worker_only() -> None:
    benches = [Bench(3, index) for index in range(3)]
    records = [[bench.create(f"/default/t{number}", 3) for number in range(9)] for bench in benches]
    told = [set(rows(bench.ask())) for bench in benches]
    assert set().union(*told) == {record.topic for record in records[0]}
    assert sum(map(len, told)) == 9
    assert all(record.topic in told[owner_of(record.topic_id, 0, 3)] for record in records[0])


def test_the_oldest_topics_have_labels_of_their_own_and_the_others_are_one_together() -> None:
    bench = Bench()
    records = [bench.create(f"/default/{name}") for name in "dcba"]
    assert bench.tiers is not None
    bench.tiers += [Tier(record, Pending(number, number)) for number, record in enumerate(records, 1)]
    bench.unopened.append(records[3])
    assert rows(bench.ask(1, 2)) == {
        "/default/d": row("/default/d", size=1, oldest=1), "/default/c": row("/default/c", size=2, oldest=2),
        OTHER: row(OTHER, 0, unknown=1, size=7, oldest=3),
    }  # fmt: skip
    bench.metadata.apply(bench.metadata.version + 1, DeleteTopic(topic="/default/d"))
    assert set(rows(bench.ask(2, 2))) >= {"/default/c", "/default/b", OTHER}, "the next one has its place"
    assert set(rows(bench.ask(3, 0))) == {OTHER}


def test_local_storage_measures_nothing() -> None:
    bench = Bench()
    bench.create("/default/one")
    bench.tiers = None
    found = bench.ask()
    assert (found.rows, found.tiered, found.topic_count) == ([], False, 1)


@pytest.mark.parametrize("count", [PARTITIONS_AT_ONCE, 3 * PARTITIONS_AT_ONCE + 7])
def test_the_loop_runs_between_slices_and_a_newer_question_ends_an_older_one(count: int) -> None:
    bench = Bench()
    record = bench.create("/default/one", 1_024)
    assert bench.tiers is not None
    bench.tiers += [Tier(record, Pending(1, 5)) for _ in range(count)]
    bench.measuring.on_frame({"kind": "measure", "id": 7, "topics_max": 10})
    assert not bench.sent and len(bench.soon) == 1, "the rest comes in later turns of the loop"
    assert rows(bench.ask(8))["/default/one"].pending_bytes == count
    assert [frame["id"] for frame in bench.sent] == [8]


def test_what_the_start_found_and_did_not_open_is_remembered_until_it_is_open_or_gone() -> None:
    bench = Bench()
    records = [bench.create(f"/default/{name}") for name in "abc"]

    opened: dict[str, object] = {}
    shell = SimpleNamespace(
        config=SimpleNamespace(wal=SimpleNamespace(sync_interval_ms=20)),
        shard=SimpleNamespace(partitions=opened),
        metadata=SimpleNamespace(state=bench.metadata),
    )
    housekeeping = Housekeeping(shell)  # type: ignore[arg-type]
    housekeeping._found = {record.topic: record.topic_id for record in records}
    assert housekeeping.unopened() == records
    opened["/default/a"] = object()
    bench.metadata.apply(bench.metadata.version + 1, DeleteTopic(topic="/default/b"))
    bench.create("/default/b")
    assert housekeeping.unopened() == [records[2]], "b is another topic now"
    opened.clear()
    assert housekeeping.unopened() == [records[2]]
