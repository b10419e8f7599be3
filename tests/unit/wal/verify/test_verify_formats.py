"""Each format that the broker writes is known to the independent reader, and damage in it is found."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from danube.broker.tiers.inheritance import KeptOwner, write_owner
from danube.cluster.log.local_log import LocalLog
from danube.cluster.log.log_file import new_file
from danube.cluster.raft.disk import DirectoryDisk
from danube.cluster.raft.engine import Members
from danube.cluster.raft.entry import COMMAND, Entry
from danube.cluster.raft.journal import Base, Identity, Journal, Promise
from danube.core.batch.checksum import crc32c
from danube.core.partition.dedup import ProducerTable
from danube.wal.inspection import inspect_bytes
from danube.wal.recovery.producers import Checkpoint, write_checkpoint
from danube.wal.verify.bytes import FindingKind
from danube.wal.verify.journal import read_member_identity, read_member_journal
from danube.wal.verify.segment import flaw_of_producers
from danube.wal.verify.state import read_producers, read_snapshot
from danube.wal.verify.store import verify_store
from danube.wal.verify.tree import Verified, verify_tree
from tests.fakes.memory_store import MemoryStore
from tests.golden.metadata_cases import FOLDER
from tests.unit.store_samples import NOW_US, fill_directory
from tests.unit.wal_samples import IDENTITY

SNAPSHOTS = sorted(FOLDER.glob("*.snapshot"))


def member(directory: Path) -> None:
    """A journal that was replaced once, so that it begins with a snapshot, and went on."""
    journal = Journal(DirectoryDisk(directory))
    members = Members({"7": "127.0.0.1:1"})
    journal.create(Identity("cluster", "7"), members)
    snapshot = (FOLDER / "cluster.snapshot").read_bytes()
    staged = journal.stage(Base(9, 2, 9, 2, members, 0), snapshot)
    journal.complete(staged, Promise(3, "7"), [Entry(3, COMMAND, b"one")])
    journal.put(11, [Entry(3, COMMAND, b"two"), Entry(3, COMMAND, b"three")])
    journal.sync()
    journal.put(12, [Entry(4, COMMAND, b"instead of three")])
    journal.promise(4, None)
    journal.sync()
    journal.close()


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """The directory of a member that has no topic."""
    (tmp_path / "metadata").mkdir()
    snapshot = (FOLDER / "reserved.snapshot").read_bytes()
    (tmp_path / "metadata" / "metadata.log").write_bytes(new_file(1, snapshot))
    member(tmp_path / "raft")
    (tmp_path / "node_id").write_bytes(b"1\ncluster c member\n")
    return tmp_path


def verified(data_dir: Path) -> Verified:
    found = Verified()
    verify_tree(data_dir, found)
    return found


@pytest.mark.parametrize("path", SNAPSHOTS, ids=lambda path: path.stem)
def test_every_snapshot_s_format_is_known(path: Path, tmp_path: Path) -> None:
    data = path.read_bytes()
    version, problems = read_snapshot(data)
    assert version is not None and not problems
    assert not inspect_bytes(f"metadata/{version:020d}", data).problems
    store = MemoryStore()
    store.put("store.json", b'{"format": 1, "store_id": "x", "created_us": 1}')
    store.put(f"metadata/{version:020d}", data)
    found = Verified()
    verify_store(store, NOW_US, found)
    assert found.findings == [] and found.remarks == []
    (tmp_path / "metadata").mkdir()
    (tmp_path / "metadata" / "metadata.log").write_bytes(new_file(3, data))
    assert verified(tmp_path).findings == []


def test_a_snapshot_that_is_damaged_cut_or_newer_is_told_as_that() -> None:
    data = (FOLDER / "cluster.snapshot").read_bytes()
    for position in range(len(data)):
        harmed = bytearray(data)
        harmed[position] ^= 1
        assert read_snapshot(bytes(harmed)).problems, position
    for size in range(len(data)):
        assert read_snapshot(data[:size]).problems, size
    (problem,) = read_snapshot(b"DNM9" + data[4:]).problems
    assert problem.kind is FindingKind.VERSION
    parts = (FOLDER / "topics.snapshot").read_bytes()
    assert read_snapshot(b"DNM3" + parts[4:]).problems  # without the fields that its magic promises


def test_a_member_s_journal_is_read(data_dir: Path) -> None:
    journal = read_member_journal((data_dir / "raft" / "raft.log").read_bytes())
    assert (journal.identity, journal.last_index) == (("cluster", "7"), 12)
    assert journal.snapshot == (FOLDER / "cluster.snapshot").read_bytes() and not journal.problems
    assert read_member_identity((data_dir / "raft" / "raft.id").read_bytes()) == ("cluster", "7")
    found = inspect_bytes("raft.log", (data_dir / "raft" / "raft.log").read_bytes())
    assert found.kind == "journal" and not found.problems and found.facts["node_id"] == "7"
    assert verified(data_dir).findings == [] and verified(data_dir).remarks == []


def test_every_flipped_bit_and_every_cut_of_a_journal_is_found(data_dir: Path) -> None:
    path = data_dir / "raft" / "raft.log"
    whole = path.read_bytes()
    for position in range(len(whole)):
        harmed = bytearray(whole)
        harmed[position] ^= 1 << position % 8
        if not read_member_journal(bytes(harmed)).problems:
            assert whole[position] == 0, position  # padding behind a step carries nothing
    for size in range(len(whole)):
        assert read_member_journal(whole[:size]).problems, size
    path.write_bytes(whole + b"a step that was never finished")
    assert verified(data_dir).findings == []
    path.write_bytes(b"DNL9" + whole[4:])
    (finding,) = verified(data_dir).findings
    assert finding.kind is FindingKind.VERSION and finding.where == str(path)


@pytest.mark.parametrize(
    "steps",
    [
        [[1, "c", "7"]],  # not a list of records
        [[[2, 0, 0, 0, 0, {}, 0], [1, "c", "7"], [4, 1, None], [9]]],
        [[[1, "c", "7"], [2, 0, 0, 0, 0, {}, 0]], [[1, "c", "7"]]],  # again whose it is
        [[[1, "c", "7"], [2, 0, 0, 0, 0, {}, 0]], [[5, 3, [[1, 0, b""]]]]],  # entry 3 behind none
        [[[1, "c", "7"], [2, 0, 0, 0, 0, {}, 0]], [[5, 1, [[1, 8, b""]]]]],  # an unknown kind
        [[[1, "c", "7"], [2, 0, 0, 0, 0, {}, 0]], [[5, "1", []]]],
        [[[1, "c", "7"], [2, 0, 0, 0, 0, {}, 5]], [[3, b"DNM1"]]],  # a snapshot that is too short
    ],
    ids=range(7),
)
def test_steps_that_no_journal_holds(steps: list[object]) -> None:
    import msgspec

    from danube.cluster.log.log_file import pack_entry, pack_mark

    packed = b"".join(pack_entry(number, msgspec.msgpack.encode(one)) for number, one in enumerate(steps, 1))
    data = new_file(1, b"")[:24] + pack_mark(40 + len(packed)) + packed
    assert read_member_journal(data).problems


def test_a_journal_that_is_gone_or_another_s(data_dir: Path) -> None:
    name = data_dir / "raft" / "raft.id"
    whole = name.read_bytes()
    name.write_bytes(b"x")
    assert [one.kind for one in verified(data_dir).findings] == [FindingKind.CHECKSUM]
    name.write_bytes(whole.replace(b"7", b"8"))
    assert [one.kind for one in verified(data_dir).findings] == [FindingKind.IDENTITY]
    name.unlink()
    assert verified(data_dir).findings == [] and "raft.id" in verified(data_dir).remarks[0]
    name.write_bytes(whole)
    (data_dir / "raft" / "raft.log").unlink()
    (finding,) = verified(data_dir).findings
    assert finding.kind is FindingKind.MISSING and "votes" in finding.what
    name.unlink()
    assert verified(data_dir).findings == []


def test_what_is_remembered_of_producers_is_read(tmp_path: Path) -> None:
    table = ProducerTable()
    table.open_name("writer", 1, 0)
    snapshot = table.snapshot(0, 0)
    assert flaw_of_producers(snapshot) is None and flaw_of_producers(b"") is None
    kinds = {
        snapshot[:20]: FindingKind.TRUNCATED,
        b"DND9" + snapshot[4:]: FindingKind.VERSION,
        snapshot[:-1] + bytes([snapshot[-1] ^ 1]): FindingKind.CHECKSUM,
    }
    many = bytearray(snapshot)
    many[28:32] = struct.pack("<I", 1_000)
    many[4:8] = struct.pack("<I", crc32c(bytes(many[8:])))
    kinds[bytes(many)] = FindingKind.TRUNCATED
    for data, kind in kinds.items():
        flaw = flaw_of_producers(data)
        assert flaw is not None and flaw[0] is kind
        write_checkpoint(tmp_path, IDENTITY, Checkpoint(7, data))
        assert [one.kind for one in read_producers((tmp_path / "producers").read_bytes()).problems] == [kind]


def test_the_log_of_a_single_host_is_no_journal(tmp_path: Path) -> None:
    LocalLog(tmp_path / "metadata").close()
    found = inspect_bytes("metadata.log", (tmp_path / "metadata" / "metadata.log").read_bytes())
    assert found.kind == "metadata log" and not found.problems


SOUND = {
    "format": b"1\n",
    "incarnation": b"12 %08x\n" % crc32c(b"12"),
    "node_id": b"17\ncluster abc member\nleft def\n",
    "store": b'{"format":1,"store_id":"x","created_us":1,"holder":""}\n',
    "deletions": b'{"7":2}',
    "place": b"123 456\n",
    "host": b'{"place":"boot 1 2 3","since":0,"since_us":0,"clean":true}'.ljust(511) + b"\n",
    "recovering/plan": b'{"node_id":"1","cluster_id":"a","left":"b","kept":"left-b"}',
}


@pytest.mark.parametrize("name", SOUND)
def test_the_small_files_that_a_start_reads_are_checked(data_dir: Path, name: str) -> None:
    (data_dir / "recovering").mkdir()
    for sound, content in SOUND.items():
        (data_dir / sound).write_bytes(content)
    assert verified(data_dir).findings == []
    path = data_dir / name
    for content in (b"", b"x", b"\xff\xfe", b"[1]", SOUND[name][:-2] + b"?"):
        path.write_bytes(content)
        if name == "place" and not content:
            continue  # a power cut may empty it, which says nothing
        (finding,) = verified(data_dir).findings
        assert (finding.where, finding.position, finding.kind) == (str(path), 0, FindingKind.CHECKSUM)
    path.unlink()
    found = verified(data_dir).findings
    assert [(one.kind, one.where) for one in found] == (
        [(FindingKind.MISSING, str(path))] if name in ("format", "incarnation", "node_id") else []
    )


def test_a_node_id_that_a_journal_proves_is_missed(data_dir: Path) -> None:
    (data_dir / "node_id").unlink()
    for name in ("raft.log", "raft.id"):  # either of them proves it
        missing = [one.where for one in verified(data_dir).findings if one.kind is FindingKind.MISSING]
        assert str(data_dir / "node_id") in missing
        (data_dir / "raft" / name).unlink()
    assert not verified(data_dir).findings


@pytest.mark.parametrize("place", ["partitions/{}", "returning/{}-0000000003"])
def test_owner_files_are_read_wherever_a_partition_lies(tmp_path: Path, place: str) -> None:
    directory = fill_directory(tmp_path)
    LocalLog(tmp_path / "metadata").close()
    target = tmp_path / place.format(directory.name)
    target.parent.mkdir(exist_ok=True)
    directory.rename(target)
    write_owner(target, KeptOwner(7, 2, 3))
    assert not (whole := verified(tmp_path)).findings and whole.segments == 4
    for content in (b"", b"{}", b'{"broker_id":7,"first_epoch":3,"last_epoch":2}', b'{"broker_id":"7"}'):
        (target / "owner").write_bytes(content)
        (found,) = verified(tmp_path).findings
        assert (found.kind, found.where) == (FindingKind.CHECKSUM, str(target / "owner"))


def test_newer_small_files_are_not_judged(data_dir: Path) -> None:
    (data_dir / "incarnation").write_bytes(SOUND["incarnation"])
    (data_dir / "format").write_bytes(b"2\n")
    (data_dir / "store").write_bytes(b'{"format":2,"store_id":"x"}')
    assert [one.kind for one in verified(data_dir).findings] == [FindingKind.VERSION] * 2


def test_cursor_files_that_vanished_and_a_mark_that_is_too_long_are_named(tmp_path: Path) -> None:
    directory = fill_directory(tmp_path)
    for names in (("cursors-a",), ("cursors-a", "cursors-b")):
        for name in names:
            (directory / name).unlink(missing_ok=True)
        found = Verified()
        verify_tree(tmp_path, found)
        missing = [Path(one.where).name for one in found.findings if one.kind is FindingKind.MISSING]
        assert sorted(missing) == sorted(names)
    (directory / "cursors-a").mkdir()  # no file either, and verify goes on
    verify_tree(tmp_path, found := Verified())
    assert str(directory / "cursors-a") in {one.where for one in found.findings}
    with (directory / "mark").open("ab") as file:
        file.write(bytes(1))
    found = Verified()
    verify_tree(tmp_path, found)
    assert any(Path(one.where).name == "mark" and one.position == 128 for one in found.findings)


def test_an_overlong_cursor_file_is_named_and_needs_no_memory(tmp_path: Path) -> None:
    directory = fill_directory(tmp_path)
    os.truncate(directory / "cursors-a", 9 << 30)
    found = Verified()
    verify_tree(tmp_path, found)
    (one,) = found.findings
    assert Path(one.where).name == "cursors-a" and one.position == 8 << 30 and "9663676416 bytes" in one.what
