"""The independent reader of the small files: sync mark, cursors, producer checkpoint, metadata log.

Each function takes the file's bytes and returns their content and faults.  It knows the layouts in
``docs/formats`` and shares no code with what writes them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import msgspec

from danube.core.batch.checksum import content_hasher, crc32c
from danube.core.partition.policy import FailurePolicy
from danube.errors import InvalidArgument
from danube.wal.verify.bytes import Content, Damage, FindingKind, Problem
from danube.wal.verify.segment import flaw_of_producers

_U32: Final = struct.Struct("<I")
_MARK: Final = struct.Struct("<8sHHIQQQQQII")
_CURSORS: Final = struct.Struct("<8sHHIQQII16s4sI")
_CURSOR: Final = struct.Struct("<4sIIHHIIQ")
_STATE: Final = struct.Struct("<BBBBIQII")
_PRODUCERS: Final = struct.Struct("<8sHHIQQIIII")
LOG_HEAD_BYTES: Final = 40
_ENTRY: Final = struct.Struct("<IIQ")
_SLOT: Final = 64
_DIGITS: Final = 8
_OFFSET_MAX: Final = 1 << 62
_RANGES_MAX: Final = 65_536
_BITS_MAX: Final = 8_388_608
CURSORS_MAGIC: Final = b"DANUBCUR"
MARK_MAGIC: Final = b"DANUBMRK"
PRODUCERS_MAGIC: Final = b"DANUBPRD"
METADATA_MAGIC: Final = b"DNL"
SNAPSHOT_MAGIC: Final = b"DNM"
_SNAPSHOT_FIELDS: Final = {
    b"DNM1": range(5, 12), b"DNM2": range(12, 16), b"DNM3": range(16, 23), b"DNM4": range(23, 1 << 16),
}  # fmt: skip

Identity = tuple[int, int]  # topic id, partition


@dataclass
class Mark(Content):
    """The mark in force; ``number`` 0 if there is none."""

    identity: Identity = (0, 0)
    number: int = 0
    synced_end: int = 0
    base_offset: int = 0
    position: int = 0
    epoch: int = 0


@dataclass
class Cursors(Content):
    """One cursor file.  ``states``: by subscription, None for one that was removed."""

    identity: Identity = (0, 0)
    log_id: bytes = bytes(16)
    generation: int = 0
    states: dict[str, bytes | None] = field(default_factory=dict)
    places: dict[str, int] = field(default_factory=dict)  # of the entries that the states are from
    end: int = 0


@dataclass
class Producers(Content):
    identity: Identity = (0, 0)
    end_offset: int = 0
    snapshot_size: int = 0


class Snapshot(NamedTuple):
    """``version``: the last command that a metadata snapshot holds; None if that cannot be read."""

    version: int | None
    problems: list[Problem]


class MetadataEntry(NamedTuple):
    """One entry of the log: its commands as MessagePack."""

    first_index: int
    content: bytes


@dataclass
class MetadataLog(Content):
    """``version``: the last committed command; ``unfinished``: bytes behind the mark."""

    generation: int = 0
    snapshot: bytes = b""
    snapshot_version: int = 0
    version: int = 0
    committed_end: int = 0
    unfinished: int = 0
    entries: list[MetadataEntry] = field(default_factory=list)


def _version_problem(version: int, position: int) -> Problem:
    return Problem(FindingKind.VERSION, f"it has version {version}, which is not known here", position)


def read_holes(data: bytes) -> tuple[list[tuple[int, int]], list[Problem]]:
    """The offsets that a log passed over, by offset: a checksum in front of JSON."""
    digits, _, content = data.rstrip(b"\n").partition(b" ")
    try:
        if len(digits) != _DIGITS or int(digits, 16) != crc32c(content):
            raise ValueError("its checksum differs")
        holes = [(int(row["start"]), int(row["end"])) for row in msgspec.json.decode(content)]
    except (ValueError, TypeError, KeyError, msgspec.MsgspecError) as error:
        return [], [Problem(FindingKind.CHECKSUM, f"the holes cannot be read: {error}", 0)]
    ends = [end for hole in holes for end in hole]
    if sorted(ends) != ends or any(start >= end for start, end in holes):
        return [], [Problem(FindingKind.OVERLAP, "the holes overlap", 0)]
    return holes, []


def read_mark(data: bytes) -> Mark:
    """Two slots; the valid one with the larger number is in force."""
    mark = Mark()
    if len(data) > 2 * _SLOT:
        mark.note(FindingKind.CHECKSUM, f"it has {len(data)} bytes", 2 * _SLOT)
    for position in (0, _SLOT):
        slot = data[position : position + _SLOT]
        if not slot.strip(b"\0"):
            continue
        if len(slot) < _SLOT or _U32.unpack_from(slot, 60)[0] != crc32c(slot[:60]) or slot[:8] != MARK_MAGIC:
            mark.note(FindingKind.CHECKSUM, "a slot of the mark is damaged", position)
            continue
        _, version, _, partition, topic_id, number, end, base, place, epoch, _ = _MARK.unpack(slot)
        if version != 1:
            problem = _version_problem(version, position + 8)
            mark.problems.append(problem._replace(fault=Damage.SEGMENT_VERSION))
        elif number > mark.number:
            mark.identity, mark.number, mark.synced_end = (topic_id, partition), number, end
            mark.base_offset, mark.position, mark.epoch = base, place, epoch
    return mark


def read_cursors(data: bytes) -> Cursors:
    """Entries behind a header; zeros behind the last one."""
    cursors = Cursors()
    if not data.strip(b"\0"):
        return cursors
    if len(data) < _SLOT or data[:8] != CURSORS_MAGIC or _U32.unpack_from(data, 60)[0] != crc32c(data[:60]):
        cursors.note(FindingKind.CHECKSUM, "the header of the cursors is damaged", 0)
        return cursors
    _, version, _, partition, topic_id, generation, base_size, base_crc, log_id, _, _ = _CURSORS.unpack_from(
        data
    )
    if version != 1:
        cursors.problems.append(_version_problem(version, 8))
        return cursors
    cursors.identity, cursors.generation, cursors.log_id = (topic_id, partition), generation, log_id
    if crc32c(data[_SLOT : _SLOT + base_size]) != base_crc:
        what = "the states that this generation began with are damaged"
        cursors.note(FindingKind.CHECKSUM, what, _SLOT)
    _read_cursor_entries(data, cursors)
    return cursors


def _read_cursor_entries(data: bytes, cursors: Cursors) -> None:
    position = _SLOT
    while position < len(data):
        entry = _cursor_at(data, position, cursors.generation)
        if entry is not None:
            name, state, size = entry
            cursors.states[name], cursors.places[name] = state, position
            position += size
            cursors.end = position
            continue
        following = data.find(b"CUR1", position + 8)
        while following >= 0 and (following & 7 or _cursor_at(data, following, cursors.generation) is None):
            following = data.find(b"CUR1", following + 1)
        if following < 0:
            break
        cursors.note(FindingKind.CHECKSUM, "a cursor entry is damaged", position)
        position = following
    if data[position:].strip(b"\0"):
        what = "what follows the last cursor entry is not one"
        cursors.note(FindingKind.CHECKSUM, what, position)


def _cursor_at(data: bytes, position: int, generation: int) -> tuple[str, bytes | None, int] | None:
    if len(data) - position < _CURSOR.size:
        return None
    magic, size, crc, name_size, kind, state_size, _, written = _CURSOR.unpack_from(data, position)
    needed = _CURSOR.size + name_size + state_size + 7 & ~7
    if magic != b"CUR1" or size != needed or position + size > len(data) or written != generation:
        return None
    if crc32c(data[position + 12 : position + size]) != crc or kind not in (1, 2):
        return None
    begin = position + _CURSOR.size
    name = data[begin : begin + name_size].decode("utf-8", "surrogatepass")
    state = data[begin + name_size : begin + name_size + state_size]
    return name, state if kind == 1 else None, size


def state_problems(cursors: Cursors) -> list[Problem]:
    """Return the faults of the states in force: with one, a broker would go back to older states."""
    found: list[Problem] = []
    for name, state in cursors.states.items():
        flaw = _flaw_in_state(state) if state is not None else ""
        if flaw:
            what = f"the state of subscription {name!r} cannot be read: {flaw}"
            found.append(Problem(FindingKind.DISAGREEMENT, what, cursors.places[name]))
    return found


def _flaw_in_state(state: bytes) -> str:
    """Return the fault of a subscription's state, by the section on it in docs/formats/cursors.md."""
    if len(state) < _STATE.size:
        return "it is cut"
    version, mode, form, flags, _, floor, policy_size, count = _STATE.unpack_from(state)
    if form not in {1: (0, 1), 2: (2,)}.get(version, ()):
        return f"it has version {version} and form {form}, which are not known here"
    if mode > 3 or flags > 1 or floor > _OFFSET_MAX:
        return f"its mode is {mode}, its flags are {flags}, its floor is {floor}"
    begin = _STATE.size + (policy_size + 7 & ~7)
    size = (8 * count, count + 7 >> 3, 16 * count)[form]
    if len(state) != begin + size or count > (_BITS_MAX if form == 1 else _RANGES_MAX):
        return f"{count} ranges or bits do not fit {len(state)} bytes"
    if flags:
        try:
            policy = state[_STATE.size : _STATE.size + policy_size]
            msgspec.msgpack.decode(policy, type=FailurePolicy).check()
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, InvalidArgument) as error:
            return f"its failure policy: {error}"
    if form == 1:
        return ""
    edges = struct.unpack_from(f"<{2 * count}{'Q' if form else 'I'}", state, begin)
    if not all(edges[1::2]) or floor + sum(edges) > _OFFSET_MAX:
        return "a range is empty or ends beyond every log"
    return ""


def reached(cursors: Cursors) -> dict[str, int]:
    """The offset that each subscription has acknowledged up to, by the states that can be read."""
    return {
        name: _reach(state)
        for name, state in cursors.states.items()
        if state is not None and not _flaw_in_state(state)
    }


def _reach(state: bytes) -> int:
    _, _, form, _, _, floor, policy_size, count = _STATE.unpack_from(state)
    ranges = state[_STATE.size + (policy_size + 7 & ~7) :]
    if form == 1:
        return int(floor + int.from_bytes(ranges, "little").bit_length())
    return int(floor + sum(struct.unpack(f"<{2 * count}{'Q' if form else 'I'}", ranges)))


def read_producers(data: bytes) -> Producers:
    producers = Producers()
    if len(data) < _PRODUCERS.size or data[:8] != PRODUCERS_MAGIC:
        producers.note(FindingKind.CHECKSUM, "this is not a producer checkpoint", 0)
        return producers
    _, version, _, partition, topic_id, end, size, crc, head_crc, zero = _PRODUCERS.unpack_from(data)
    if (head_crc, zero) != (crc32c(data[:40]), 0):
        producers.note(FindingKind.CHECKSUM, "the checkpoint's header is damaged", 0)
        return producers
    if version != 1:
        producers.problems.append(_version_problem(version, 8))
        return producers
    snapshot = data[_PRODUCERS.size :]
    if len(snapshot) != size or crc32c(snapshot) != crc:
        what = "the producer snapshot is damaged"
        producers.note(FindingKind.CHECKSUM, what, _PRODUCERS.size)
    elif flaw := flaw_of_producers(snapshot):
        producers.note(*flaw, _PRODUCERS.size)
    producers.identity, producers.end_offset = (topic_id, partition), end
    producers.snapshot_size = len(snapshot)
    return producers


def read_log_head(data: bytes, log: Content) -> tuple[int, int, int] | None:
    """Generation, size of the snapshot and end of what is committed, of a metadata log or a journal."""
    if data[:3] == METADATA_MAGIC and data[3:4] != b"1":
        log.note(FindingKind.VERSION, f"it has the format {data[:4]!r}", 0)
        return None
    if len(data) < LOG_HEAD_BYTES or data[:4] != b"DNL1":
        log.note(FindingKind.CHECKSUM, "this is not a metadata log", 0)
        return None
    crc, generation, size, committed_end, mark_crc, zero = struct.unpack_from("<IQQQII", data, 4)
    if crc32c(data[8:24]) != crc:
        log.note(FindingKind.CHECKSUM, "the header fails its checksum", 0)
        return None
    if mark_crc != crc32c(data[24:32]) or zero:
        log.note(FindingKind.CHECKSUM, "the mark fails its checksum", 24)
        return None
    return generation, size, committed_end


def entry_at(data: bytes, position: int) -> tuple[int, bytes, int] | None:
    """Number and content of the log's entry at ``position``, and where it ends; None if it is not whole."""
    head = data[position : position + _ENTRY.size]
    if len(head) < _ENTRY.size:
        return None
    crc, size, number = _ENTRY.unpack(head)
    end = position + _ENTRY.size + size
    if end > len(data) or crc32c(data[position + 4 : end]) != crc:
        return None
    return number, data[position + _ENTRY.size : end], end + 7 & ~7


def read_metadata_log(data: bytes) -> MetadataLog:
    """Return header, snapshot and entries up to the mark; bytes behind the mark are unfinished writes."""
    log = MetadataLog()
    head = read_log_head(data, log)
    if head is None:
        return log
    log.generation, size, log.committed_end = head
    log.snapshot = data[LOG_HEAD_BYTES : LOG_HEAD_BYTES + size]
    begin = LOG_HEAD_BYTES + size + 7 & ~7
    version, problems = read_snapshot(log.snapshot, LOG_HEAD_BYTES)
    if log.committed_end > len(data) or len(data) < begin or log.committed_end < begin:
        what = f"bytes up to {log.committed_end} were committed, the file has {len(data)}"
        log.note(FindingKind.TRUNCATED, what, min(len(data), log.committed_end))
    log.problems += problems
    if version is None:
        return log
    log.snapshot_version = log.version = version
    log.unfinished = max(0, len(data) - log.committed_end)
    _read_metadata_entries(data[: log.committed_end], begin, log)
    return log


def read_snapshot(data: bytes, position: int = 0) -> Snapshot:
    """Read a metadata snapshot that lies at ``position`` of its file."""
    lengths = _SNAPSHOT_FIELDS.get(data[:4])
    if data[:3] == SNAPSHOT_MAGIC and lengths is None and len(data) >= 8:
        what = f"the snapshot has the format {data[:4]!r}, which is not known here"
        return Snapshot(None, [Problem(FindingKind.VERSION, what, position)])
    fields = (
        list_in(data[8:]) if len(data) >= 8 and _U32.unpack_from(data, 4)[0] == crc32c(data[8:]) else None
    )
    if not fields or lengths is None or len(fields) not in lengths or not isinstance(fields[0], int):
        return Snapshot(None, [Problem(FindingKind.CHECKSUM, "the snapshot is damaged", position)])
    return Snapshot(fields[0], [])


def topics_in(snapshot: bytes) -> list[tuple[str, int, int]]:
    """Name, id and creation time of each topic; none where the snapshot cannot be read."""
    if read_snapshot(snapshot).problems:
        return []
    topics = (list_in(snapshot[8:]) or [])[4:5]
    return [(name, topic_id, created_us) for name, topic_id, _, _, created_us in topics[0]] if topics else []


def log_ids_of(topics: Iterable[tuple[str, int, int]]) -> dict[int, bytes]:
    """Return log ids by topic id; ``topics`` are names, ids and creation times."""
    ids: dict[int, bytes] = {}
    for name, topic_id, created_us in topics:
        hasher = content_hasher()
        hasher.update(b"\0".join((name.encode(), b"%d" % topic_id, b"%d" % created_us)))
        ids[topic_id] = bytes(hasher.digest())
    return ids


def list_in(content: bytes) -> list[Any] | None:
    """Return the list that the bytes are as MessagePack; None for anything else."""
    try:
        value = msgspec.msgpack.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return value if isinstance(value, list) else None


def _read_metadata_entries(data: bytes, position: int, log: MetadataLog) -> None:
    while position < len(data):
        entry = entry_at(data, position)
        if entry is None:
            what = f"the entry behind command {log.version} fails its checksum"
            log.note(FindingKind.CHECKSUM, what, position)
            return
        index, content, end = entry
        commands = list_in(content)
        if not commands or index != log.version + 1:
            what = f"an entry of command {index} where {log.version + 1} is due, or without commands"
            log.note(FindingKind.DISAGREEMENT, what, position)
            return
        log.entries.append(MetadataEntry(index, content))
        log.version += len(commands)
        position = end
