"""The independent reader of a data directory: every partition's files and the metadata log.

It changes no file and may run beside a broker.  A file that changes meanwhile is read again.  Leftovers of a
crash (a torn tail above the mark, an unfinished replacement) are remarks, not findings.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from danube.errors import DanubeError, NotFound, StorageFailed
from danube.wal.verify.broker import TOP_FILES, Flaw, WitnessFacts, flaw_of_owner, read_witness
from danube.wal.verify.bytes import Content, Damage, FileSource, Finding, FindingKind, Judged, outside
from danube.wal.verify.journal import read_member_identity, read_member_journal
from danube.wal.verify.objects import ManifestFacts, read_manifest
from danube.wal.verify.segment import OnBatch, read_segment
from danube.wal.verify.state import (
    Cursors,
    Identity,
    Mark,
    log_ids_of,
    read_cursors,
    read_holes,
    read_mark,
    read_metadata_log,
    read_producers,
    state_problems,
)
from danube.wal.verify.walk import HEADER_BYTES, Segment

if TYPE_CHECKING:
    from danube.core.metadata.machine import Metadata

ATTEMPTS: Final = 5
_STATE_BYTES_MAX: Final = 2 << 30
_CURSORS_BYTES_MAX: Final = 8 << 30
_SEGMENT: Final = re.compile(r"(\d{20})\.seg\Z")
_PARTITION: Final = re.compile(r"([0-9a-f]{16})-(0|[1-9]\d{0,9})\Z")
_SET_ASIDE: Final = re.compile(r"([0-9a-f]{16})-(0|[1-9]\d{0,9})-\d{10}(-\d+)?\Z")
_SPARE: Final = re.compile(r"next-\d+\.seg\.new\Z")  # room for the next segment, beside a live broker
_STRANGE: Final = "of another broker's log, whose topic has the same id"
_CURSOR_FILES: Final = ("cursors-a", "cursors-b")
_KNOWN_FILES: Final = {
    "mark",
    "producers",
    "damage.json",
    *_CURSOR_FILES,
    "subscribed",
    "manifest",
    "owner",
    "holes",
}

_Read = TypeVar("_Read", bound=Content)
Progress = Callable[[str], None]
Wanted = Callable[[Identity], bool]


@dataclass
class LocalPartition(Judged):
    """One partition's directory.  ``segments`` by base offset."""

    identity: Identity
    directory: Path
    mark: Mark = field(default_factory=Mark)
    segments: list[Segment] = field(default_factory=list)
    damaged: set[str] = field(default_factory=set)  # files with findings
    manifest: ManifestFacts | None = None  # the copy of the last one that this host installed
    holes: list[tuple[int, int]] = field(default_factory=list)  # offsets that the log passed over, by offset
    cursors: Cursors = field(default_factory=Cursors)  # in force
    subscriptions: set[str] = field(default_factory=set)  # that cursors name, also removed ones
    log_ids: dict[str, bytes] = field(default_factory=dict)  # of cursor files that say whose they are

    @property
    def start(self) -> int:
        return self.segments[0].base_offset if self.segments else 0

    @property
    def end(self) -> int:
        return max((segment.end_offset for segment in self.segments), default=0)

    def missing(self, start: int, end: int) -> list[tuple[int, int]]:
        """The parts of ``start .. end`` that lie in no hole."""
        return outside(self.holes, start, end)

    def check_identity(self, found: Identity | None, path: Path, fault: str = Damage.WRONG_PARTITION) -> None:
        if found is not None and self.identity[0] >= 0 and found != self.identity:
            what = f"it is of partition {found[0]:016x}-{found[1]}"
            self.note(FindingKind.IDENTITY, path, what, 12, fault=fault)


@dataclass
class Verified(Judged):
    """Result of a verification.

    ``records`` counts a record in a directory and in its store once; ``bytes`` are all that were read.
    """

    partitions: int = 0
    segments: int = 0
    objects: int = 0
    records: int = 0
    bytes: int = 0


def every_partition(_: Identity) -> bool:
    return True


def verify_broker(directory: Path, verified: Verified) -> None:
    """The small files at the top of a data directory."""
    used = (directory / "metadata" / "metadata.log").exists()
    for name, (flaw_of, expected) in TOP_FILES.items():
        path = directory / name
        data = _content(path)
        begun = (directory / "incarnation").exists() or (directory / "format").exists()
        if data is None and expected and used and begun:
            verified.note(FindingKind.MISSING, path, "a broker ran here, and the file is missing", 0)
        _add_flaw(flaw_of(data) if data is not None else None, path, verified)
    for proof in (directory / "raft" / "raft.id", directory / "raft" / "raft.log"):
        if proof.exists() and not (directory / "node_id").exists():
            what = f"{proof} says that this is a member of a cluster, and the file that names it is missing"
            verified.note(FindingKind.MISSING, directory / "node_id", what, 0)
            break


def _add_flaw(flaw: Flaw | None, path: Path, judged: Judged) -> None:
    if flaw is not None:
        kind, what = flaw
        judged.note(kind, path, what, 0)


def partitions_in(
    directory: Path, folder: str = "partitions", named: re.Pattern[str] = _PARTITION
) -> Iterator[tuple[Identity, Path]]:
    """The partitions of a data directory, by name."""
    try:
        paths = sorted((directory / folder).iterdir())
    except FileNotFoundError:
        return
    except OSError as error:
        raise StorageFailed(f"{directory} cannot be read", why=str(error)) from error
    for path in paths:
        match = named.match(path.name)
        if match and path.is_dir():
            yield (int(match[1], 16), int(match[2])), path


def verify_tree(
    directory: Path,
    verified: Verified,
    wanted: Wanted = every_partition,
    progress: Progress = lambda _: None,
) -> list[LocalPartition]:
    """Check a data directory; NotFound where there is none, StorageFailed if it cannot be read."""
    if not directory.is_dir():
        raise NotFound(f"there is no directory {directory}", hint="name a broker's data directory")
    if (directory / "metadata").is_dir() or (directory / "partitions").is_dir():
        whole = (directory / "format").exists() or (directory / "metadata").is_dir()
        _verify_metadata(directory / "metadata" / "metadata.log", verified, whole)
        _verify_member(directory / "raft", verified)
        verify_broker(directory, verified)
        found = list(partitions_in(directory))
        for name in sorted(path.name for path in (directory / "partitions").glob("*")):
            if not _PARTITION.match(name):
                verified.remarks.append(f"partitions/{name}: not a partition's directory")
    else:
        match = _PARTITION.match(directory.name)
        identity = (int(match[1], 16), int(match[2])) if match else (-1, -1)
        found = [(identity, directory)]
    locals_: list[LocalPartition] = []
    log_ids = _log_ids(directory)
    witnesses = _witnesses_in(directory, verified)
    for identity, path in found:
        if wanted(identity):
            progress(path.name)
            partition = verify_partition(path, identity, verified)
            judge_log_ids(partition.segments, partition.log_ids, log_ids.get(identity[0]), verified)
            if (witness := witnesses.pop(path.name, None)) is not None:
                _verify_witnessed(partition, witness, directory / "witnesses" / path.name, verified)
            locals_.append(partition)
    for name, witness in witnesses.items():
        _verify_gone(directory, name, witness, log_ids, wanted, verified)
    # Partitions that went on elsewhere: their records are on their way back.
    for identity, path in partitions_in(directory, "returning", _SET_ASIDE):
        if wanted(identity):
            progress(path.name)
            verify_partition(path, identity, verified)
    return locals_


def _witnesses_in(directory: Path, verified: Verified) -> dict[str, WitnessFacts]:
    """Read all witnesses, before the partitions that they speak of."""
    found: dict[str, WitnessFacts] = {}
    if (directory / "raft").is_dir():
        return found  # a cluster moves partitions, and has none
    for path in sorted((directory / "witnesses").glob("*")):
        data = _content(path)
        if _PARTITION.match(path.name) and data is not None:
            found[path.name], flaw = read_witness(data)
            _add_flaw(flaw, path, verified)
    return found


def _verify_witnessed(
    partition: LocalPartition, before: WitnessFacts, path: Path, verified: Verified
) -> None:
    """A log begins where its witness says, and its subscriptions have cursors.

    A running broker updates its witness before it deletes anything.  So a loss is reported only if the
    witness, read again afterwards, still names it.
    """
    now, _ = read_witness(_content(path) or b"")
    if not before.log_id or now.log_id != before.log_id:
        return
    start = max(before.start, now.start)
    if now.began and not partition.segments:
        end = max(now.end, start)
        what = "all segments of the log, which its witness saw, are gone"
        verified.note(FindingKind.MISSING, partition.directory, what, -1, start, end)
    elif partition.segments and start < partition.start:
        what = f"its witness saw the log from offset {start} on"
        verified.note(FindingKind.MISSING, partition.directory, what, -1, start, partition.start)
    for name in sorted((before.subscriptions & now.subscriptions) - partition.subscriptions):
        what = f"subscription {name!r} had a cursor, and there is none"
        verified.note(FindingKind.MISSING, partition.directory, what)


def _verify_gone(
    directory: Path, name: str, witness: WitnessFacts, log_ids: dict[int, bytes], wanted: Wanted,
    verified: Verified,
) -> None:  # fmt: skip
    """A log whose directory is not there, of a topic that is."""
    match, path = _PARTITION.match(name), directory / "partitions" / name
    identity = (int(match[1], 16), int(match[2])) if match else (-1, -1)
    if not witness.log_id or not wanted(identity) or path.exists():
        return
    if log_ids.get(identity[0], b"").hex() != witness.log_id:
        verified.remarks.append(f"{directory / 'witnesses' / name}: of a topic that is not known")
        return
    what = "the directory of the log, which its witness saw, is gone"
    verified.note(FindingKind.MISSING, path, what, -1, witness.start, witness.end)


def _log_ids(directory: Path) -> dict[int, bytes]:
    """By topic id, as far as the metadata can be read."""
    try:
        state = metadata_of(directory)
    except DanubeError:
        return {}  # its faults were found before
    return log_ids_of((one.topic, one.topic_id, one.created_us) for one in state.topics())


def judge_log_ids(
    segments: Iterable[Segment], cursors: Mapping[str, bytes], log_id: bytes | None, judged: Judged
) -> None:
    """No segment, and no cursors, are of another log, whose topic has the same id; ``log_id`` if known."""
    for segment in segments:
        if any(segment.log_id):
            log_id = log_id or segment.log_id
            if segment.log_id != log_id:
                what, span = f"it is {_STRANGE}", (segment.base_offset, segment.end_offset)
                judged.note(FindingKind.IDENTITY, segment.where, what, 44, *span, Damage.WRONG_PARTITION)
    for where, found in cursors.items():
        log_id = log_id or found
        if found != log_id:
            what = f"its cursors are {_STRANGE}"
            judged.note(FindingKind.IDENTITY, where, what, 40, fault=Damage.WRONG_PARTITION)


def _verify_metadata(path: Path, verified: Verified, expected: bool) -> None:
    log = _settled(path, read_metadata_log)
    if log is not None:
        verified.add(path, log.problems)
    elif expected:
        verified.note(FindingKind.MISSING, path, "without it nobody knows which topics there are")
    else:
        verified.remarks.append(f"{path}: there is none")


def _verify_member(directory: Path, verified: Verified) -> None:
    """The journal of a cluster's member, and that it is the journal which was there before."""
    path, name = directory / "raft.log", directory / "raft.id"
    journal = _settled(path, read_member_journal)
    if journal is None:
        if _content(name) is not None:
            what = f"{name} says that there was one, and with it the member's votes"
            verified.note(FindingKind.MISSING, path, what)
        return
    verified.add(path, journal.problems)
    data = _content(name)
    if data is None:
        verified.remarks.append(f"{name}: there is none; it is written with the next journal")
    elif (identity := read_member_identity(data)) is None:
        verified.note(FindingKind.CHECKSUM, name, "it names no cluster and node")
    elif journal.identity[0] and identity != journal.identity:
        what = (
            f"it is of node {identity[1]} in cluster {identity[0]}, the journal is of {journal.identity[1]}"
        )
        verified.note(FindingKind.IDENTITY, name, what)


def _content(path: Path) -> bytes | None:
    """A small file; None if it is not there (any more)."""
    try:
        with FileSource(path) as source:
            return source.read_front(_STATE_BYTES_MAX)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageFailed(f"{path} cannot be read", why=str(error)) from error


def _settled(path: Path, read: Callable[[bytes], _Read]) -> _Read | None:
    """Content of a small file, read again while a broker may be writing it; None if it is not there."""
    found: _Read | None = None
    for _ in range(ATTEMPTS):
        data = _content(path)
        found = read(data) if data is not None else None
        if found is None or not found.problems:
            break
    return found


def verify_partition(path: Path, identity: Identity, verified: Verified) -> LocalPartition:
    """Check one partition's directory."""
    partition = LocalPartition(identity, path)
    verified.partitions += 1
    read_mark_of(partition)
    try:
        names = _read_segments(partition)
    except FileNotFoundError:
        names = []
    else:
        verified.segments += len(partition.segments)
        verified.records += sum(segment.record_count for segment in partition.segments)
        verified.bytes += sum(segment.size for segment in partition.segments)
        _judge(partition)
    for name in names:
        if ".seg.aside" in name:
            partition.remarks.append(f"{path / name}: set aside at an opening, never read")
        elif name.endswith(".new") and not _SPARE.match(name):
            partition.remarks.append(f"{path / name}: an unfinished replacement")
        elif name not in _KNOWN_FILES and not _SEGMENT.match(name) and not _SPARE.match(name):
            partition.remarks.append(f"{path / name}: not one of Danube's files")
    verified.findings += partition.findings
    verified.remarks += partition.remarks
    return partition


def _judge(partition: LocalPartition) -> None:
    """Judge the segments that were read, and read and judge the small files beside them."""
    path = partition.directory
    judge_segments(partition)
    partition.damaged = {finding.where for finding in partition.findings}
    read_holes_of(partition)
    for one in (each for pair in pairwise(partition.segments) for each in neighbours(*pair)):
        if one.fault == Damage.OFFSETS_MISSING:
            gaps = partition.missing(one.start, one.end)
            partition.findings += [one._replace(start=start, end=end) for start, end in gaps]
        else:
            partition.findings.append(one)
    judge_mark(partition)
    read_cursors_of(partition)
    _verify_producers(partition)
    if (owner := _content(path / "owner")) is not None:
        _add_flaw(flaw_of_owner(owner), path / "owner", partition)
    _verify_copy(partition)


def _read_segments(partition: LocalPartition) -> list[str]:
    """Read the segments of one moment, though a broker evicts or merges files meanwhile; returns all names.

    If a file is gone before it was read, the results of the files in front of it are discarded.  Raises
    FileNotFoundError if the directory itself is gone.
    """
    path = partition.directory
    known: dict[tuple[str, int], Segment] = {}
    names: list[str] = []
    for _ in range(ATTEMPTS):
        inodes = _inodes(path)
        names, complete = sorted(inodes), True
        partition.segments.clear()
        for name in names:
            match = _SEGMENT.match(name)
            if match is None:
                continue
            key = (name, inodes[name])
            segment = known.get(key)
            if segment is None:
                segment = read_file(path / name, int(match[1]), partition.identity)
            if segment is None:
                complete = False
                partition.segments.clear()
            else:
                if segment.sealed:  # any other grows, and one that rolled would seem to end where it was read
                    known[key] = segment
                partition.segments.append(segment)
        if complete:
            break
    return names


def _inodes(path: Path) -> dict[str, int]:
    try:
        with os.scandir(path) as entries:
            return {entry.name: entry.inode() for entry in entries}
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StorageFailed(f"{path} cannot be read", why=str(error)) from error


def read_mark_of(partition: LocalPartition) -> None:
    """Read the mark, before what it speaks of."""
    path = partition.directory / "mark"
    partition.mark = mark = _settled(path, read_mark) or Mark()
    partition.add(path, mark.problems, Damage.MARK_DAMAGED)
    partition.check_identity(mark.identity if mark.number else None, path, Damage.MARK_DAMAGED)


def read_file(
    path: Path, base_offset: int, identity: Identity = (-1, -1), on_batch: OnBatch | None = None
) -> Segment | None:
    """A segment file, read anew while it changes and looks wrong; None if it was deleted meanwhile."""
    segment: Segment | None = None
    expected = identity if identity[0] >= 0 else None
    try:
        for _ in range(ATTEMPTS):
            with FileSource(path) as source:
                segment = read_segment(source, base_offset, on_batch, where=str(path), identity=expected)
            status = path.stat()
            clean = not segment.problems and segment.tail is None
            if clean or (status.st_size == segment.size and segment.sealed):
                break
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageFailed(f"{path} cannot be read", why=str(error)) from error
    return segment


def judge_segments(partition: LocalPartition) -> None:
    """Note the faults of each file, and judge the bytes behind the last batch of each unsealed one."""
    mark, segments = partition.mark, partition.segments
    sealed_end = max((one.end_offset for one in segments if one.sealed), default=0)
    followings = [one.base_offset for one in segments[1:]]
    for segment, following in zip_longest(segments, followings):
        path, sealed_behind = segment.where, segment.base_offset < sealed_end
        begun = segment.begun_seal and not sealed_behind  # a power cut may have left the footer unfinished
        if _never_written(segment) and mark.base_offset < segment.base_offset:
            partition.remarks.append(f"{path}: room for a segment whose first record was never written")
        else:
            faults = segment.faults
            partition.add(path, [one for one in faults if not begun or one.fault != Damage.FOOTER_DAMAGED])
        position, end = segment.tail or (0, 0)
        synced = mark.position if mark.base_offset == segment.base_offset else 0
        if mark.base_offset > segment.base_offset and (sealed_behind or following != segment.end_offset):
            synced = end  # an unfinished footer would be behind all others, and no offset be missing
        if position < min(end, synced):
            what = f"no batch can be read from position {position} to {end}, which was synced"
            offset = segment.end_offset
            partition.note(FindingKind.CHECKSUM, path, what, position, offset, offset, Damage.BATCH_HEADER)
        elif begun:
            partition.remarks.append(f"{path}: its seal was never finished; the next start seals it")
        elif segment.tail is not None:
            partition.remarks.append(f"{path}: {end - position} bytes from {position} on were never finished")


def _never_written(segment: Segment) -> bool:
    """Whether all of the file is zeros; records that are missing for it are found by their offsets."""
    unheaded = [(problem.kind, problem.position) for problem in segment.problems]
    return (
        unheaded == [(FindingKind.TRUNCATED, HEADER_BYTES)]
        and segment.tail is None
        and not segment.batch_count
    )


def read_holes_of(partition: LocalPartition) -> None:
    """Read and check the offsets that the log says it passed over."""
    path = partition.directory / "holes"
    data = _content(path)
    if data is None:
        return
    partition.holes, problems = read_holes(data)
    partition.add(path, problems, Damage.HOLES_DAMAGED)
    for start, end in partition.holes:
        if any(one.base_offset < end and start < one.end_offset for one in partition.segments):
            what = "the log has records at offsets that it says to have passed over"
            partition.note(FindingKind.OVERLAP, path, what, -1, start, end, Damage.HOLES_DAMAGED)


def neighbours(before: Segment, after: Segment) -> Iterator[Finding]:
    """How a segment follows the one before it."""
    where, name, start = after.where, Path(before.where).name, after.base_offset
    span = (start, after.end_offset)
    if start < before.end_offset and after.batch_count:
        what, end = f"it repeats offsets that {name} holds", min(before.end_offset, after.end_offset)
        yield Finding(FindingKind.OVERLAP, where, what, -1, start, end, Damage.OFFSETS_REPEATED)
    elif start > before.end_offset:
        what = f"offsets are missing between {name} and this file"
        yield Finding(FindingKind.GAP, where, what, -1, before.end_offset, start, Damage.OFFSETS_MISSING)
    hashes = (before.content_hash, before.chain_hash)
    if after.sealed and any(after.previous_hash) and after.previous_hash not in hashes and before.sealed:
        what = f"its previous hash is not the content hash of {name}"
        yield Finding(FindingKind.CHAIN, where, what, after.data_end, *span, Damage.CHAIN)
    if 0 <= after.first_epoch < before.epoch:
        what = f"its epoch {after.first_epoch} is lower than that of {name}"
        yield Finding(FindingKind.IDENTITY, where, what, 40, *span, Damage.EPOCH_ORDER)


def judge_mark(partition: LocalPartition) -> None:
    """All that was synced is there."""
    mark = partition.mark
    if mark.number and partition.end < mark.synced_end:
        what = f"records below offset {mark.synced_end} were synced, and are not there"
        for span in partition.missing(partition.end, mark.synced_end):
            path = partition.directory / "mark"
            partition.note(FindingKind.GAP, path, what, 32, *span, Damage.SYNCED_LOST)


def read_cursors_of(partition: LocalPartition) -> None:
    """Read and check both files; the older one may be in the middle of being overwritten."""
    path, fault = partition.directory, Damage.CURSOR_DAMAGED
    found: list[tuple[str, Cursors]] = []
    for name in _CURSOR_FILES:
        _verify_size(path / name, partition)
    for _ in range(ATTEMPTS):
        found = [
            (name, read_cursors(data))
            for name in _CURSOR_FILES
            if (path / name).is_file() and (data := _content(path / name)) is not None
        ]
        if not any(cursors.problems for _, cursors in found):
            break
    newest = max((cursors.generation for _, cursors in found), default=0)
    proven = newest or (path / "subscribed").exists()
    for name in sorted({*_CURSOR_FILES} - {name for name, _ in found}):
        if proven or ((path / name).exists() and not (path / name).is_file()):
            what = "cursors of subscriptions were here, and the file is missing"
            partition.note(FindingKind.MISSING, path / name, what, fault=fault)
    for name, cursors in found:
        if cursors.generation == newest or not any(
            other.generation == newest and not other.problems for _, other in found
        ):
            partition.add(path / name, cursors.problems + state_problems(cursors), fault)
        elif cursors.problems:
            partition.remarks.append(f"{path / name}: an older generation, which is not whole")
        partition.check_identity(cursors.identity if cursors.generation else None, path / name)
    for name, cursors in sorted(found, key=lambda one: one[1].generation):
        partition.cursors = cursors
        partition.subscriptions |= cursors.states.keys()
        if any(cursors.log_id):
            partition.log_ids[str(path / name)] = cursors.log_id


def _verify_size(path: Path, partition: LocalPartition) -> None:
    """Report cursors that are longer than any that were written: an opening would not read all of them."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return
    if size > _CURSORS_BYTES_MAX:
        what, fault = f"it has {size} bytes, more than any that was written", Damage.CURSOR_DAMAGED
        partition.note(FindingKind.CHECKSUM, path, what, _CURSORS_BYTES_MAX, fault=fault)


def _verify_producers(partition: LocalPartition) -> None:
    path = partition.directory
    data = _content(path / "producers")
    if data is not None:
        producers = read_producers(data)
        partition.add(path / "producers", producers.problems)
        partition.check_identity(None if producers.problems else producers.identity, path)


def _verify_copy(partition: LocalPartition) -> None:
    """The manifest that this host installed last."""
    path = partition.directory / "manifest"
    data = _content(path)
    if data is None:
        return
    facts = read_manifest(data)
    problems = [problem for problem in facts.problems if problem.kind is not FindingKind.GAP]
    partition.add(path, problems)
    if not problems:
        partition.manifest = facts
        partition.check_identity(facts.identity, path)
        _verify_named(partition, facts, path)


def _verify_named(partition: LocalPartition, facts: ManifestFacts, path: Path) -> None:
    """A manifest does not say whose log it is of; the segments that it names do."""
    hashes = facts.originals
    for segment in partition.segments:
        span = (segment.base_offset, segment.end_offset)
        if (
            segment.sealed
            and not segment.compacted
            and hashes.get(span, segment.content_hash) != segment.content_hash
        ):
            what = f"it names other records than {Path(segment.where).name} holds: it is of another log"
            partition.note(FindingKind.IDENTITY, path, what, -1, *span)
            return


def topic_id_of(directory: Path, topic: str) -> int:
    """Id of a topic in a data directory's metadata.

    TopicNotFound if it has none of that name; StorageFailed if the metadata cannot be read.
    """
    return metadata_of(directory).topic(topic).topic_id


def metadata_of(directory: Path) -> Metadata:
    """The machine that a data directory's metadata holds; StorageFailed if that cannot be read."""
    from danube.core.metadata.commands import decode_commands
    from danube.core.metadata.machine import Metadata

    log = read_metadata_log(_content(directory / "metadata" / "metadata.log") or b"")
    if log.problems:
        raise StorageFailed(
            "no topic can be found by its name",
            why=f"{directory / 'metadata' / 'metadata.log'}: {log.problems[0].what}",
            hint="verify without --topic",
        )
    state = Metadata.restore(log.snapshot)
    index = log.snapshot_version
    for entry in log.entries:
        for command in decode_commands(entry.content):
            index += 1
            state.apply(index, command)
    return state
