"""`danube verify` of a data directory: every kind of harm is named with file and byte."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from danube.cluster.log.local_log import LocalLog
from danube.core.dispatch.cursor import CursorState
from danube.core.dispatch.grants import Mode
from danube.core.metadata.commands import CreateTopic
from danube.core.partition.policy import FailurePolicy, TopicPolicy
from danube.errors import DanubeError, NotFound, StorageFailed, TopicNotFound
from danube.wal.log.cursors import CursorStore
from danube.wal.segments.key_compaction import LatestKeys, compact
from danube.wal.segments.merge import SealedRange, merge
from danube.wal.segments.segment import LogIdentity, file_name
from danube.wal.verify import tree as module
from danube.wal.verify.bytes import FileSource, Finding, FindingKind
from danube.wal.verify.state import Cursors, state_problems
from danube.wal.verify.tree import Verified, topic_id_of, verify_tree
from tests.examples import examples
from tests.unit.store_samples import fill_directory, partition_directory
from tests.unit.wal_samples import IDENTITY, append, memory_directory, open_log, roll


@pytest.fixture
def data_dir(tmp_path: Path) -> Iterator[Path]:
    with memory_directory(tmp_path) as directory:
        fill_directory(directory)
        with LocalLog(directory / "metadata") as log:
            log.propose(CreateTopic(topic="/default/orders", policy=TopicPolicy(), created_us=1))
        yield directory


def verified(data_dir: Path) -> Verified:
    found = Verified()
    verify_tree(data_dir, found)
    return found


def findings(data_dir: Path) -> list[tuple[FindingKind, str]]:
    return [(finding.kind, Path(finding.where).name) for finding in verified(data_dir).findings]


def only(data_dir: Path) -> Finding:
    (finding,) = verified(data_dir).findings
    return finding


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def test_a_sound_directory_is_clean(data_dir: Path) -> None:
    found = verified(data_dir)
    assert found.findings == [] and found.remarks == []
    assert (found.partitions, found.segments, found.records) == (1, 4, 10)
    assert found.bytes == sum(path.stat().st_size for path in data_dir.rglob("*.seg"))


def test_a_partition_s_own_directory_can_be_named(data_dir: Path) -> None:
    directory = partition_directory(data_dir)
    assert verified(directory).segments == 4
    shutil.move(directory, data_dir / "anything")
    assert verified(data_dir / "anything").findings == []


def test_every_flipped_bit_of_a_sealed_segment_is_found(data_dir: Path) -> None:
    path = partition_directory(data_dir) / file_name(3)
    whole = path.read_bytes()
    for position in range(len(whole)):
        flipped = bytearray(whole)
        flipped[position] ^= 1 << position % 8
        path.write_bytes(flipped)
        assert any(Path(finding.where) == path for finding in verified(data_dir).findings), position


def test_damage_names_the_byte_and_the_offsets(data_dir: Path) -> None:
    path = partition_directory(data_dir) / file_name(3)
    flip(path, 64 + 50)
    found = verified(data_dir).findings
    assert {finding.where for finding in found} == {str(path)}
    kinds = {finding.kind: finding for finding in found}
    assert kinds[FindingKind.CHECKSUM].position in (64, -1)
    assert (kinds[FindingKind.GAP].start, kinds[FindingKind.GAP].end) == (3, 5)


def test_a_missing_segment_is_a_gap_and_a_broken_chain(data_dir: Path) -> None:
    (partition_directory(data_dir) / file_name(3)).unlink()
    found = verified(data_dir).findings
    assert [finding.kind for finding in found] == [FindingKind.GAP, FindingKind.CHAIN]
    assert (found[0].start, found[0].end) == (3, 6)


def test_a_missing_last_segment_is_known_by_the_mark(data_dir: Path) -> None:
    (partition_directory(data_dir) / file_name(9)).unlink()
    finding = only(data_dir)
    assert finding.kind is FindingKind.GAP and finding.where.endswith("mark")
    assert (finding.start, finding.end) == (9, 10)


def test_segments_that_were_swapped_or_come_from_elsewhere(data_dir: Path) -> None:
    directory = partition_directory(data_dir)
    shutil.copy(directory / file_name(3), directory / file_name(6))
    kinds = {kind for kind, name in findings(data_dir) if name == file_name(6)}
    assert FindingKind.IDENTITY in kinds
    other = data_dir / "partitions" / LogIdentity(77, 0).directory_name
    directory.rename(other)
    found = verified(data_dir).findings
    assert sum(finding.kind is FindingKind.IDENTITY for finding in found) >= 5
    assert any("0000000000001234-3" in finding.what for finding in found)


def test_repeated_offsets_are_an_overlap(data_dir: Path) -> None:
    directory = partition_directory(data_dir)
    sources = [SealedRange(directory / file_name(start)) for start in (0, 3)]
    merge(sources, directory / file_name(0))
    finding, chain = verified(data_dir).findings
    assert finding.kind is FindingKind.OVERLAP and (finding.start, finding.end) == (3, 6)
    assert chain.kind is FindingKind.CHAIN
    (directory / file_name(3)).unlink()
    assert verified(data_dir).findings == []


def test_an_owner_s_epoch_never_goes_back(data_dir: Path) -> None:
    open_log(partition_directory(data_dir), epoch=5).close()
    assert verified(data_dir).findings == []
    older = data_dir / "older"
    fill_directory(older)
    shutil.copy(partition_directory(older) / file_name(9), partition_directory(data_dir) / file_name(10))
    kinds = {kind for kind, _ in findings(data_dir)}
    assert FindingKind.IDENTITY in kinds


def test_a_torn_tail_above_the_mark_is_a_remark_and_below_it_a_finding(data_dir: Path) -> None:
    path = partition_directory(data_dir) / file_name(9)
    data = bytearray(path.read_bytes())
    end = len(data.rstrip(b"\0")) + 7 & ~7
    whole = bytes(data)
    data[end + 8 : end + 16] = b"torn...."
    path.write_bytes(data)
    found = verified(data_dir)
    assert found.findings == [] and "never finished" in found.remarks[0]
    path.write_bytes(whole)
    flip(path, 64 + 60)
    finding = next(one for one in verified(data_dir).findings if one.where == str(path))
    assert finding.kind is FindingKind.CHECKSUM and finding.position == 64 and "synced" in finding.what


def test_a_tail_in_front_of_a_sealed_file_was_synced(data_dir: Path) -> None:
    path = partition_directory(data_dir) / file_name(3)
    path.write_bytes(path.read_bytes()[:-8])
    assert any("synced" in finding.what for finding in verified(data_dir).findings)
    last = partition_directory(data_dir) / file_name(6)  # nothing behind it is sealed
    path.write_bytes(path.read_bytes() + b"DANUBEND")
    last.write_bytes(last.read_bytes()[:-8])
    found = verified(data_dir)
    assert found.findings == [] and "never finished" in found.remarks[0]


def test_a_compacted_segment_is_not_damaged(data_dir: Path) -> None:
    directory = partition_directory(data_dir)
    sources = [SealedRange(directory / file_name(start)) for start in (0, 3)]
    latest = LatestKeys()
    latest.add(sources)
    compact(sources, latest, directory / file_name(0))
    (directory / file_name(3)).unlink()
    assert verified(data_dir).findings == []


@pytest.mark.parametrize("name", ["mark", "cursors-a", "cursors-b"])
def test_every_flipped_bit_of_the_small_files_is_found(data_dir: Path, name: str) -> None:
    path = partition_directory(data_dir) / name
    whole = path.read_bytes()
    used = len(whole.rstrip(b"\0")) + 7 & ~7
    for position in range(used):
        if not whole[position // 64 * 64 : position // 64 * 64 + 64].strip(b"\0") and name == "mark":
            continue  # a slot that was never written
        flipped = bytearray(whole)
        flipped[position] ^= 1
        path.write_bytes(flipped)
        assert verified(data_dir).findings or verified(data_dir).remarks, position


def test_cursors_that_fall_back_to_an_older_generation(data_dir: Path) -> None:
    directory = partition_directory(data_dir)
    newest = next(name for name in ("cursors-a", "cursors-b") if (directory / name).read_bytes().strip(b"\0"))
    other = "cursors-a" if newest == "cursors-b" else "cursors-b"
    flip(directory / newest, 64 + 40)
    found = verified(data_dir).findings
    assert found and {Path(finding.where).name for finding in found} == {newest}
    flip(directory / newest, 64 + 40)
    data = bytearray((directory / newest).read_bytes())
    from danube.wal.log.cursors import pack_header

    data[:64] = pack_header(IDENTITY, 0, b"")  # an older generation whose entries are another's
    (directory / other).write_bytes(data)
    assert [Path(one.where).name for one in verified(data_dir).findings] == []
    assert any(other in remark for remark in verified(data_dir).remarks)


def test_a_producer_checkpoint_is_checked(data_dir: Path) -> None:
    from danube.wal.recovery.producers import Checkpoint, write_checkpoint

    directory = partition_directory(data_dir)
    write_checkpoint(directory, IDENTITY, Checkpoint(3, b"snapshot"))
    assert verified(data_dir).findings == []
    path = directory / "producers"
    whole = path.read_bytes()
    for position in range(len(whole)):
        flip(path, position)
        assert only(data_dir).where == str(path)
        path.write_bytes(whole)
    write_checkpoint(directory, LogIdentity(1, 1), Checkpoint(3, b"snapshot"))
    assert only(data_dir).kind is FindingKind.IDENTITY


def test_every_flipped_bit_of_the_metadata_is_found(data_dir: Path) -> None:
    path = data_dir / "metadata" / "metadata.log"
    whole = path.read_bytes()
    for position in range(len(whole)):
        if 36 <= position < 40 or (position > 40 and not any(whole[position - position % 8 : position + 1])):
            continue
        flip(path, position)
        found = verified(data_dir).findings
        path.write_bytes(whole)
        if not found:
            # Padding behind a snapshot or an entry carries nothing.
            assert whole[position] == 0, position
    path.write_bytes(whole[:-8])
    assert {finding.kind for finding in verified(data_dir).findings} & {
        FindingKind.TRUNCATED,
        FindingKind.CHECKSUM,
    }
    path.write_bytes(whole + b"unfinished")
    assert verified(data_dir).findings == []
    path.write_bytes(b"DNL9" + whole[4:])
    assert only(data_dir).kind is FindingKind.VERSION
    path.unlink()
    assert only(data_dir).kind is FindingKind.MISSING
    shutil.rmtree(path.parent)
    assert "there is none" in verified(data_dir).remarks[0]


def test_files_that_are_not_ours_are_remarks(data_dir: Path) -> None:
    directory = partition_directory(data_dir)
    (directory / "notes.txt").write_text("x")
    (directory / (file_name(3) + ".aside")).write_text("x")
    (directory / "cursors-a.new").write_text("x")
    (data_dir / "partitions" / "lost+found").mkdir()
    found = verified(data_dir)
    assert found.findings == [] and len(found.remarks) == 4


def test_newer_formats_are_not_judged(data_dir: Path) -> None:
    import struct

    from danube.core.batch.checksum import crc32c

    directory = partition_directory(data_dir)
    for name, position, crc_at in ((file_name(9), 8, 60), ("mark", 8, 60), ("mark", 72, 124)):
        path = directory / name
        data = bytearray(path.read_bytes())
        data[position] = 2
        begin = crc_at - 60
        data[crc_at : crc_at + 4] = struct.pack("<I", crc32c(bytes(data[begin:crc_at])))
        path.write_bytes(data)
    kinds = [kind for kind, _ in findings(data_dir)]
    assert FindingKind.VERSION in kinds and FindingKind.CHECKSUM not in kinds


def test_what_is_not_there_or_cannot_be_read(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotFound, match="no directory"):
        verify_tree(data_dir / "missing", Verified())

    def refuse(fd: int, size: int, position: int) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", refuse)
    with pytest.raises(StorageFailed, match="cannot be read"):
        verified(data_dir)


def test_files_that_vanish_or_change_meanwhile_are_read_again(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = partition_directory(data_dir)
    whole = (directory / file_name(9)).read_bytes()
    flip(directory / file_name(9), 64 + 60)
    reads = []

    def mending(path: Path) -> FileSource:
        source = FileSource(path)
        reads.append(path.name)
        if path.name == file_name(9) and reads.count(path.name) == 1:
            (directory / file_name(9)).write_bytes(whole)
            return source
        return source

    monkeypatch.setattr(module, "FileSource", mending)
    assert verified(data_dir).findings == []

    def vanishing(path: Path) -> FileSource:
        if path.name == file_name(0):
            path.unlink(missing_ok=True)
        return FileSource(path)

    monkeypatch.setattr(module, "FileSource", vanishing)
    assert verified(data_dir).findings == []


def test_a_front_that_is_evicted_while_it_is_read_leaves_no_gap(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = partition_directory(data_dir)
    first, second, *rest = sorted(directory.glob("*.seg"))

    def evicting(path: Path) -> FileSource:
        if path == second:
            first.unlink(missing_ok=True)
            second.unlink(missing_ok=True)
        return FileSource(path)

    monkeypatch.setattr(module, "FileSource", evicting)
    found = verified(data_dir)
    assert found.findings == [] and found.segments == len(rest) > 0


def test_a_segment_that_rolls_while_the_front_is_evicted_leaves_no_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log(partition_directory(tmp_path))
    append(log, b"first")
    log.write()
    roll(log)
    append(log, b"read before the roll")
    log.write()
    first, inodes = log.directory / file_name(0), module._inodes

    def evicting(path: Path) -> FileSource:
        if path == first:
            path.unlink(missing_ok=True)
        return FileSource(path)

    def rolling(path: Path) -> dict[str, int]:
        if not first.exists() and log.written_end == 2:
            append(log, b"read by the second attempt alone")
            log.write()
            roll(log)
        return inodes(path)

    monkeypatch.setattr(module, "FileSource", evicting)
    monkeypatch.setattr(module, "_inodes", rolling)
    found = verified(log.directory)
    log.abandon()
    assert found.findings == [] and found.records == 2


def test_a_partition_that_is_deleted_while_it_is_read_is_not_missed(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = partition_directory(data_dir)

    def deleting(path: Path) -> FileSource:
        source = FileSource(path)
        if path == directory / "mark":
            shutil.rmtree(directory)
        return source

    monkeypatch.setattr(module, "FileSource", deleting)
    assert (directory / "mark").exists()
    found = verified(data_dir)
    assert found.findings == [] and not directory.exists()


def test_topics_are_found_by_name(data_dir: Path) -> None:
    assert topic_id_of(data_dir, "/default/orders") == 1
    with pytest.raises(TopicNotFound):
        topic_id_of(data_dir, "/default/others")
    flip(data_dir / "metadata" / "metadata.log", 10)
    with pytest.raises(StorageFailed, match="by its name"):
        topic_id_of(data_dir, "/default/orders")


def test_a_state_that_no_broker_could_decode_is_a_finding(data_dir: Path) -> None:
    directory = partition_directory(data_dir)
    store = CursorStore(directory, IDENTITY)
    store.load()
    store.store("writers", CursorState.at(Mode.SHARED, 4).encode() + b"x")
    store.write()
    store.close()
    finding = only(data_dir)
    assert finding.kind is FindingKind.DISAGREEMENT and "'writers'" in finding.what
    store = CursorStore(directory, IDENTITY)
    store.load()
    store.store("writers", CursorState.at(Mode.SHARED, 5).encode())
    store.write()
    store.close()
    assert findings(data_dir) == [], "an older entry is not in force any more"


STATE_SAMPLES = [
    CursorState(Mode.SHARED, 10, np.array([[12, 13], [500, 700]], np.int64), 9),
    CursorState(Mode.EXCLUSIVE, 3, np.array([[4, 5], [7, 9], [11, 12]], np.int64)),
    CursorState(Mode.KEY_SHARED, 1 << 61, np.array([[(1 << 61) + 5, (1 << 61) + (1 << 40)]], np.int64)),
    CursorState.at(Mode.FAILOVER, 7, failure=FailurePolicy(poison="drop")),
]


@settings(deadline=None, max_examples=examples(300))
@given(st.sampled_from(STATE_SAMPLES), st.data())
def test_the_verifier_refuses_the_states_that_a_broker_refuses(
    state: CursorState, data: st.DataObject
) -> None:
    encoded = bytearray(state.encode())
    for _ in range(data.draw(st.integers(0, 3))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    changed = bytes(encoded[: data.draw(st.integers(0, len(encoded) + 1))])
    try:
        CursorState.decode(changed)
        refused = False
    except DanubeError:
        refused = True
    cursors = Cursors(states={"s": changed}, places={"s": 64})
    assert bool(state_problems(cursors)) == refused
