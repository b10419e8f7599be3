"""Directories of partitions at a start: what is removed, and when."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from danube.broker.worker import housekeeping
from danube.broker.worker.housekeeping import Housekeeping
from danube.broker.worker.worker import Worker
from danube.core.metadata.commands import CreateTopic, DeleteTopic
from danube.core.metadata.machine import Metadata
from danube.core.partition.policy import TopicPolicy
from danube.core.placement.recovered import History, recovered


class Site:
    """A worker, as far as its housekeeping looks at it; timers are run by hand."""

    def __init__(self, root: Path, cluster: Any = None) -> None:
        self.data_dir, self.index = root, 0
        self.context = SimpleNamespace(worker=0, workers=1)
        self.config = SimpleNamespace(wal=SimpleNamespace(sync_interval_ms=10))
        self.metadata = SimpleNamespace(state=Metadata())
        self.shard = SimpleNamespace(serves=lambda topic_id, index: False)
        self.executor = SimpleNamespace(submit=lambda function, *args, **named: function(*args, **named))
        self.loop = SimpleNamespace(call_later=lambda delay_s, function, *args: self.later(function, args))
        self.cluster = cluster
        self.waiting: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.housekeeping = Housekeeping(cast(Worker, self))

    def later(self, function: Callable[..., None], args: tuple[Any, ...]) -> None:
        self.waiting.append((function, args))

    def run_later(self) -> None:
        waiting, self.waiting = self.waiting, []
        for function, args in waiting:
            function(*args)

    def directory(self, topic_id: int) -> Path:
        made = self.data_dir / "partitions" / f"{topic_id:016x}-0"
        made.mkdir(parents=True)
        return made

    def create(self) -> int:
        state = self.metadata.state
        state.apply(state.version + 1, CreateTopic(topic="/default/t", policy=TopicPolicy(), created_us=1))
        return state.topic("/default/t").topic_id

    def give_ids(self, count: int) -> None:
        """So many topics were made and deleted."""
        for _ in range(count):
            self.create_and_delete()

    def create_and_delete(self) -> int:
        state = self.metadata.state
        state.apply(state.version + 1, CreateTopic(topic="/default/d", policy=TopicPolicy(), created_us=1))
        topic_id: int = state.topic("/default/d").topic_id
        state.apply(state.version + 1, DeleteTopic(topic="/default/d"))
        return topic_id


@pytest.fixture
def removed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    found: list[Path] = []
    monkeypatch.setattr(housekeeping, "remove_directory", found.append)
    return found


def test_what_belongs_to_a_deleted_topic_is_removed(tmp_path: Path, removed: list[Path]) -> None:
    site = Site(tmp_path)
    site.give_ids(9)
    directory = site.directory(9)
    site.housekeeping._sweep_directories()
    assert removed == [directory]


@pytest.mark.parametrize("clustered", [False, True])
def test_what_the_metadata_never_knew_is_kept_out_of_the_way(
    tmp_path: Path, removed: list[Path], clustered: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Metadata that lost its end, or a new one: that it knows no such topic says nothing of the records."""
    site = Site(tmp_path, SimpleNamespace(metadata_whole=True) if clustered else None)
    site.give_ids(3)
    (site.directory(4) / "segment").write_bytes(b"records")
    site.housekeeping._sweep_directories()
    assert not removed and not (tmp_path / "partitions" / f"{4:016x}-0").exists(), "no new topic 4 opens it"
    assert (tmp_path / "unknown" / f"{4:016x}-0" / "segment").read_bytes() == b"records"
    assert "put aside" in caplog.text
    site.directory(4)
    site.housekeeping._sweep_directories()
    assert (tmp_path / "unknown" / f"{4:016x}-0-1").is_dir(), "a second one takes no place"


def test_what_cannot_be_put_aside_stays_and_is_told(
    tmp_path: Path, removed: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    site = Site(tmp_path)
    (tmp_path / "unknown").write_text("a file in the way")
    kept = site.directory(4)
    site.housekeeping._sweep_directories()
    assert kept.is_dir() and not removed and "cannot be put aside" in caplog.text


def test_what_a_process_that_died_left_half_removed_is_removed_also_where_nobody_knows_what_was_deleted(
    tmp_path: Path, removed: list[Path]
) -> None:
    site = Site(tmp_path, SimpleNamespace(metadata_whole=False))
    left = site.directory(9).rename(tmp_path / "partitions" / f"{9:016x}-0.removed")
    site.housekeeping._sweep_directories()
    assert removed == [left]


def test_a_cluster_s_metadata_that_lost_its_end_removes_nothing(tmp_path: Path, removed: list[Path]) -> None:
    """A power cut: the records are on the disk, and the copy of the metadata is from before their topic."""
    cluster = SimpleNamespace(metadata_whole=False)
    site = Site(tmp_path, cluster)
    kept, gone = site.directory(1), site.directory(9)
    site.housekeeping._sweep_directories()
    site.run_later()
    assert not removed, "it is not known yet"
    assert site.create() == 1
    site.give_ids(8)
    cluster.metadata_whole = True
    site.run_later()
    assert removed == [gone] and kept not in removed and not site.waiting


def test_what_was_set_aside_of_a_deleted_topic_is_removed(tmp_path: Path, removed: list[Path]) -> None:
    site = Site(tmp_path, SimpleNamespace(metadata_whole=True))
    site.directory(site.create())
    site.give_ids(8)
    for name in (f"{1:016x}-0-0000000003", f"{9:016x}-0-0000000003", f"{9:016x}-0-0000000003-1", "notes"):
        (tmp_path / "returning" / name).mkdir(parents=True)
    site.housekeeping._sweep_directories()
    assert [path.name for path in removed] == [f"{9:016x}-0-0000000003", f"{9:016x}-0-0000000003-1"]


def test_what_a_lost_command_may_have_made_stays(tmp_path: Path, removed: list[Path]) -> None:
    """Metadata was recovered without its end: a topic that it does not know may have records here."""
    site = Site(tmp_path, SimpleNamespace(metadata_whole=True))
    site.create()
    deleted = site.create_and_delete()
    made_later = site.metadata.state.next_topic_id
    site.metadata.state = recovered(site.metadata.state, History("h", 0))
    gone = site.directory(deleted)
    site.directory(made_later)
    site.housekeeping._sweep_directories()
    assert removed == [gone]


def test_a_round_of_retention_leaves_the_loop_to_others_between_its_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(tmp_path)
    seen: list[int] = []
    backlogs: list[int] = []

    def partition(number: int, **changed: Any) -> Any:
        subscription = SimpleNamespace(core=SimpleNamespace(ack_floor=4))
        fields = {"log": True, "failure": None, "deleted": False, "number": number}
        fields["lag_from"] = lambda offset: 10 - offset
        return SimpleNamespace(subscriptions={"s": subscription}, **{**fields, **changed})

    hosted = [partition(number) for number in range(5)]
    gone = [partition(5, log=None), partition(6, failure="broken"), partition(7, deleted=True)]
    site.shard.partitions = {one.number: one for one in [*hosted, *gone]}
    site.shard.storage = SimpleNamespace(drop_spares=lambda now_us: None)
    site.counters = SimpleNamespace(block=SimpleNamespace(put=lambda name, value: backlogs.append(value)))
    monkeypatch.setattr(housekeeping, "RETAINED_AT_ONCE", 3)
    monkeypatch.setattr(site.housekeeping, "_retain", lambda one, now_us: seen.append(one.number))
    site.housekeeping._retention()
    assert seen == [] and backlogs == []
    site.run_later()
    assert sorted(seen) == [2, 3, 4] and backlogs == []
    site.run_later()
    assert sorted(seen) == [0, 1, 2, 3, 4] and backlogs == [5 * 6] and site.waiting == []
    site.housekeeping._retention()
    site.housekeeping.stop()
    site.run_later()
    assert site.waiting == [] and backlogs == [30]


def test_connections_end_once_where_rights_are_no_longer_known(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    site, known, ended, told = Site(tmp_path), [True], [], []
    worker = cast(Any, site)
    worker.admission = SimpleNamespace(rights_known=lambda: known[0])
    worker.doors = {"native": SimpleNamespace(abort_entered=lambda: ended.append("native"))}
    worker.counters = SimpleNamespace(block=SimpleNamespace(put=lambda counter, value: told.append(value)))
    for now in (True, False, False, True, False):
        known[0] = now
        site.housekeeping._look_at_rights()
    assert told == [0, 1, 1, 0, 1] and ended == ["native", "native"]
    assert "nobody but super admins is let in" in caplog.text
    worker.admission = None
    site.housekeeping._look_at_rights()
    assert len(told) == 5
