"""The metadata store's history: what a watch is told when it fell behind, or the log skipped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from danube.cluster import metadata_store
from danube.cluster.log.local_log import LocalLog
from danube.cluster.metadata_store import ConsensusStore, Event, Resync, Watch
from danube.core.cluster.commands import DeletePrefix, KeyPut, PutKey
from tests.fakes.memory_log import MemoryLog, Order


def keys(watch: Watch) -> list[str]:
    found = []
    for event in watch.take():
        assert isinstance(event, KeyPut)
        found.append(event.record.key)
    return found


def skipping(
    tmp_path: Path, kind: str
) -> tuple[MemoryLog | LocalLog, MemoryLog | LocalLog, Callable[[], None]]:
    """Two logs of one order, and what makes the second skip commands of the first."""
    if kind == "memory":
        order = Order()
        first = MemoryLog(order)
        return first, MemoryLog(order), first.compact
    log = LocalLog(tmp_path, compact_bytes_min=2_000)

    def grow() -> None:  # twice, as a reader finishes the file that it has open before it changes over
        before = log.statistics().compaction_count
        while log.statistics().compaction_count < before + 2:
            log.propose(PutKey(key="/filler", value=bytes(500)))

    return log, LocalLog(tmp_path), grow


@pytest.mark.parametrize("kind", ["memory", "local"])
def test_watches_are_told_to_read_again_when_the_log_skipped(tmp_path: Path, kind: str) -> None:
    first, second, compact = skipping(tmp_path, kind)
    writer, reader = ConsensusStore(first), ConsensusStore(second)
    watch = reader.watch("/w/")
    writer.put("/w/a", b"1")
    reader.poll()
    assert keys(watch) == ["/w/a"]
    level, revision = reader.watch("/w/"), reader.revision
    writer.put("/w/b", b"2")
    compact()
    reader.poll()
    assert watch.take() == level.take() == [Resync(reader.revision)]
    assert reader.get_children("/w/") == ["/w/a", "/w/b"]
    assert reader.watch("/w/", revision + 1).take() == [Resync(reader.revision)]
    writer.put("/w/c", b"3")
    reader.poll()
    assert keys(watch) == keys(level) == ["/w/c"]
    first.close()
    second.close()


def test_the_history_is_bounded_by_bytes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata_store, "HISTORY_BYTES_MAX", 10_000)
    store = ConsensusStore(MemoryLog())
    late, prompt = store.watch("/"), store.watch("/")
    for number in range(20):
        store.put("/a", bytes(900 + number))
        assert keys(prompt) == ["/a"]
    assert late.take() == [Resync(store.revision)]
    store.put("/big", bytes(50_000))
    assert keys(prompt) == ["/big"]


def test_events_of_one_command_share_its_revision_and_go_together() -> None:
    log = MemoryLog()
    store = ConsensusStore(log, history_events_max=5)
    for number in range(4):
        log.propose(PutKey(key=f"/a/{number}", value=b""))
    log.propose(DeletePrefix(prefix="/a/"))
    store.poll()
    events: list[Event] = store.watch("/a/", 5).take()
    assert [event.revision for event in events if not isinstance(event, KeyPut | Resync)] == [5] * 4
    log.propose(PutKey(key="/b", value=b""))
    log.propose(PutKey(key="/b", value=b""))
    store.poll()
    assert store.watch("/", 5).take() == [Resync(7)], "one event of revision 5 is gone"
    assert len(store.watch("/", 6).take()) == 2
