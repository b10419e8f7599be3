"""Stored cursors of one partition: the newest state of each subscription, as opaque bytes.

    two files, ``cursors-a`` and ``cursors-b``; the one with the larger generation is in force

    position  size  field
           0     8  magic        b"DANUBCUR"
           8     2  version      1
          10     2  zero
          12     4  partition
          16     8  topic_id
          24     8  generation
          32     4  base_size    bytes of entries that the file began with
          36     4  base_crc     CRC32C of those
          40    16  log id       of danube.wal.segments.segment; zeros if it is not known
          56     4  zero
          60     4  CRC32C of bytes 0 .. 60
          64        entries, each 8-aligned; zeros behind the last one

    entry
           0     4  magic        b"CUR1"
           4     4  size         of the entry, padding included
           8     4  CRC32C of the entry from byte 12 to its size
          12     2  name size
          14     2  kind         1: state, 2: removed
          16     4  blob size
          20     4  zero
          24     8  generation of the file
          32        name (UTF-8), blob, padding to 8

Entries are appended, so the last one of a name is its state.  The file's space is reserved in advance, so
acks are stored even while the disk is full.  When the file is used up, the live states are written into the
*other* file with the next generation, and appending continues there.  No rename and no new space is needed.
The file in force is synced before the other one is overwritten, so one of them is always whole on disk.  The
older file is the fallback for a damaged entry.  An entry whose state cannot be decoded (``decode``) is
damaged too, even if its checksum is right.  A cursor that falls back is older, never ahead of its acks.  A
file whose sync failed is replaced by a new one (write, sync, rename). Both files are made at once, and then
an empty file ``subscribed``. It proves that the files existed, so their loss is noticed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from danube.core.batch.checksum import crc32c
from danube.core.batch.format import padded
from danube.errors import DanubeError, StorageFailed, StorageFull, StorageIncompatible, broken
from danube.host import files
from danube.limits import KIB, MIB
from danube.wal.log.syncer import sync_file
from danube.wal.recovery.damage import DamagedRange
from danube.wal.recovery.inventory import name_aside
from danube.wal.recovery.witness import Witness
from danube.wal.segments.descriptors import LogFile, descriptors
from danube.wal.segments.segment import NO_LOG, STRANGER, LogIdentity, stranger

FILE_NAMES: Final = ("cursors-a", "cursors-b")
PROOF_NAME: Final = "subscribed"
HEADER_BYTES: Final = 64
RESERVE_FIRST: Final = 8 * KIB
RESERVE_GROWN: Final = 256 * KIB
FILE_BYTES_MAX: Final = 8192 * MIB  # what the largest states need, and as much again behind them
_WINDOW_BYTES: Final = 8 * MIB  # more than the longest entry
_LIVE_FACTOR: Final = 4
_SHRUNK_ABOVE: Final = 4
_VERSION: Final = 1
_MAGIC: Final = b"DANUBCUR"
_ENTRY_MAGIC: Final = b"CUR1"
_HEADER: Final = struct.Struct("<8sHHIQQII16s4s")
_ENTRY: Final = struct.Struct("<4sIIHHIIQ")
_CRC: Final = struct.Struct("<I")
_CRC_START: Final = 12
_STATE: Final = 1
_REMOVED: Final = 2
_DAMAGED: Final = "cursor entry is damaged"

if (_HEADER.size, _ENTRY.size) != (HEADER_BYTES - 4, 32):
    raise ImportError("the tables above are the format")

Decode = Callable[[bytes], object]  # raises DanubeError for a state that cannot be used


def pack_entry(name: bytes, blob: bytes | None, generation: int) -> bytes:
    """One entry; a blob of None removes the name."""
    data = blob or b""
    size = padded(_ENTRY.size + len(name) + len(data))
    kind = _REMOVED if blob is None else _STATE
    packed = bytearray(size)
    _ENTRY.pack_into(packed, 0, _ENTRY_MAGIC, size, 0, len(name), kind, len(data), 0, generation)
    packed[_ENTRY.size : _ENTRY.size + len(name) + len(data)] = name + data
    _CRC.pack_into(packed, 8, crc32c(bytes(packed[_CRC_START:])))
    return bytes(packed)


def pack_header(identity: LogIdentity, generation: int, base: bytes, log_id: bytes = NO_LOG) -> bytes:
    topic_id, partition = identity
    packed = _HEADER.pack(
        _MAGIC, _VERSION, 0, partition, topic_id, generation, len(base), crc32c(base), log_id, b""
    )
    return packed + _CRC.pack(crc32c(packed))


class CursorFile(NamedTuple):
    """Content of one of the two files.  ``states`` maps names to blobs, None for removed ones.

    ``end`` is behind the last intact entry; ``clean`` says that only zeros follow it.  ``damaged`` lists
    positions of faults with their descriptions.
    """

    generation: int
    states: dict[str, bytes | None]
    end: int
    clean: bool
    size: int
    damaged: tuple[tuple[int, str], ...]
    log_id: bytes = NO_LOG


class _Header(NamedTuple):
    identity: LogIdentity
    generation: int
    base_size: int
    base_crc: int
    log_id: bytes


def _read_header(data: bytes) -> _Header | None:
    """Return the header; None for other bytes, StorageIncompatible for a newer version."""
    if len(data) < HEADER_BYTES or _CRC.unpack_from(data, HEADER_BYTES - 4)[0] != crc32c(
        data[: HEADER_BYTES - 4]
    ):
        return None
    magic, version, _, partition, topic_id, generation, base_size, base_crc, log_id, _ = _HEADER.unpack_from(
        data
    )
    if magic == _MAGIC and version != _VERSION:
        raise StorageIncompatible(
            f"cursor file has format version {version}", hint="start the newer Danube; nothing was touched"
        )
    if magic != _MAGIC:
        return None
    return _Header(LogIdentity(topic_id, partition), generation, base_size, base_crc, log_id)


def _why_foreign(header: _Header, identity: LogIdentity, log_id: bytes) -> str:
    """Return why a file with this header is not this log's; empty if it is."""
    if header.identity != identity:
        return "the file belongs to another partition"
    return STRANGER if stranger(header.log_id, log_id) else ""


def read_cursor_file(
    path: Path, identity: LogIdentity, decode: Decode | None = None, log_id: bytes = NO_LOG
) -> CursorFile | None:
    """None when the file is missing, was never begun, is not of this log, or its header or first entries are
    damaged.

    A state that ``decode`` refuses is damaged: the one before it counts.
    """
    try:
        data, size, flaw = _read_front(path)
    except FileNotFoundError:
        return None
    header = _read_header(data)
    if header is None or _why_foreign(header, identity, log_id):
        return None
    _, generation, base_size, base_crc, written = header
    found = _read_entries(data, generation, None)
    if decode is not None and any(_refusal(blob, decode) for blob in found.states.values()):
        found = _read_entries(data, generation, decode)  # only now: each older state costs a decoding
    if flaw:
        found = found._replace(clean=False, damaged=(*found.damaged, (len(data), flaw)))
    found = found._replace(size=size, log_id=written)
    whole = crc32c(data[HEADER_BYTES : HEADER_BYTES + base_size]) == base_crc
    if not whole and not found.damaged and found.end < HEADER_BYTES + base_size:
        # The header reached the disk before the entries did: the switch to this file never ended.
        return found._replace(damaged=((found.end, _DAMAGED),))
    return found


def _read_front(path: Path) -> tuple[bytes, int, str]:
    """Read a file but for the zeros at its end, which are not taken into memory.

    Returns the bytes, the file's size and the fault behind the bytes, if any: data behind a long run of
    zeros, where no entry can begin, or a file above the maximum size.
    """
    fd = files.open_existing(path, writable=False)
    try:
        size = files.size_of(fd)
        flaw = f"the file has {size} bytes, more than cursors can need" if size > FILE_BYTES_MAX else ""
        size_read, data = min(size, FILE_BYTES_MAX), bytearray()
        position = files.next_data(fd, 0)
        while position is not None and position < size_read:
            start = position - position % _WINDOW_BYTES
            window = files.pread(fd, min(_WINDOW_BYTES, size_read - start), start)
            if window.count(0) != len(window):
                if start > len(data) + _WINDOW_BYTES:
                    flaw = flaw or "other bytes follow behind zeros"
                    break
                data += bytes(start - len(data)) + window
            position = files.next_data(fd, start + _WINDOW_BYTES)
        room = min(size_read - len(data), _WINDOW_BYTES) if data else 0
        return bytes(data) + bytes(room), size, flaw
    finally:
        files.close(fd)


def _refusal(blob: bytes | None, decode: Decode) -> str:
    """Why ``decode`` refuses a state; empty when it takes it."""
    try:
        if blob is not None:
            decode(blob)
    except DanubeError as error:
        return str(error)
    return ""


def _read_entries(data: bytes, generation: int, decode: Decode | None) -> CursorFile:
    states: dict[str, bytes | None] = {}
    damaged: list[tuple[int, str]] = []
    position = end = HEADER_BYTES
    while position < len(data):
        entry = _entry_at(data, position, generation)
        if entry is None:
            following = _next_entry(data, position + 8, generation)
            if following is None:
                break
            damaged.append((position, _DAMAGED))
            position = following
            continue
        name, blob, size = entry
        refusal = _refusal(blob, decode) if decode is not None else ""
        if refusal:
            damaged.append((position, f"the state of subscription {name!r} cannot be read: {refusal}"))
        else:
            states[name] = blob
        position = end = position + size
    clean = not data[end:].strip(b"\0")
    if not clean:
        damaged.append((end, _DAMAGED))
    return CursorFile(generation, states, end, clean, len(data), tuple(damaged))


def _entry_at(data: bytes, position: int, generation: int) -> tuple[str, bytes | None, int] | None:
    """``(name, blob, size)`` of the intact entry at ``position``, or None."""
    if len(data) - position < _ENTRY.size:
        return None
    magic, size, crc, name_size, kind, blob_size, _, written = _ENTRY.unpack_from(data, position)
    if magic != _ENTRY_MAGIC or written != generation or not _ENTRY.size <= size <= len(data) - position:
        return None
    if size != padded(_ENTRY.size + name_size + blob_size) or kind not in (_STATE, _REMOVED):
        return None
    if crc32c(data[position + _CRC_START : position + size]) != crc:
        return None
    start = position + _ENTRY.size
    name = data[start : start + name_size].decode("utf-8", "surrogatepass")
    blob = data[start + name_size : start + name_size + blob_size]
    return name, blob if kind == _STATE else None, size


def _next_entry(data: bytes, position: int, generation: int) -> int | None:
    found = data.find(_ENTRY_MAGIC, position)
    while found >= 0:
        if found & 7 == 0 and _entry_at(data, found, generation) is not None:
            return found
        found = data.find(_ENTRY_MAGIC, found + 1)
    return None


class CursorSyncJob:
    """Syncs the file that is appended to, and the directory once after the files were made.

    ``behind``: files of the log with records that the cursors may have passed.  They are synced first, so
    that no cursor is on the disk without the records below it.
    """

    __slots__ = ("_behind", "_fd", "_file", "_pinned", "directory", "succeeded", "version")

    def __init__(
        self, file: LogFile, directory: Path | None, version: int, behind: Sequence[LogFile] = ()
    ) -> None:
        self._file = file
        self._fd = descriptors.pin(file)
        self._behind = [(each, descriptors.pin(each)) for each in behind]
        self._pinned = True
        self.directory = directory
        self.succeeded = False
        self.version = version

    def run(self, synced: set[object] | None = None) -> None:
        done = set() if synced is None else synced
        try:
            for file, fd in self._behind:
                self._sync(file, fd, done)
            if self.directory is not None and self.directory not in done:
                files.fsync_directory(self.directory)
                done.add(self.directory)
            self._sync(self._file, self._fd, done)
            self.succeeded = True
        finally:
            if self._pinned:
                self._pinned = False
                for file, _ in self._behind:
                    descriptors.unpin(file)
                descriptors.unpin(self._file)

    @staticmethod
    def _sync(file: LogFile, fd: int, done: set[object]) -> None:
        if file not in done or file.failed:
            sync_file(file, fd)
            done.add(file)


class CursorStore:
    """``store`` and ``remove`` are noted; ``write`` appends them; ``sync_job`` makes them durable.

    The store is used by one thread; jobs run in another.  ``damage`` lists the entries that ``load`` could
    not read.  An existing subscription that ``load`` does not return was lost, and must start at the earliest
    offset that is kept, never at the latest.  ``lost``: subscriptions that the ``witness`` knows and no file
    has.  They stay in ``lost`` until they are stored or removed, also when files are made anew.
    """

    def __init__(
        self, directory: Path, identity: LogIdentity, decode: Decode | None = None,
        witness: Witness | None = None, log_id: bytes = NO_LOG,
    ) -> None:  # fmt: skip
        self.directory = directory
        self.log_id = log_id
        self.lost: set[str] = set()
        self._witness = witness
        self._names_version = 0  # when the set of names changed last; 0: the witness knows it
        self.identity = identity
        self._decode = decode
        self.damage: tuple[DamagedRange, ...] = ()
        self._files = [LogFile(directory / name, locked=True) for name in FILE_NAMES]
        self._states: dict[str, bytes] = {}
        self._changed: dict[str, bytes | None] = {}
        self._generation = 0
        self._end = 0
        self._capacity = 0
        self._live_bytes = 0
        self._switch = True
        self._loaded = False
        self._directory_dirty = False
        self._version = self._requested = 0
        self._job: CursorSyncJob | None = None

    def load(self) -> dict[str, bytes]:
        """Subscription name -> state, as last written.  StorageIncompatible for a newer format."""
        try:
            return self._load()
        except OSError as error:
            raise StorageFailed(
                "cursors cannot be read",
                why=str(error),
                hint="the partition opens once the disk reads its cursor files.  If it never"
                " will, move them away: subscriptions that only they know begin at the earliest record",
                directory=self.directory.name,
            ) from error

    def _load(self) -> dict[str, bytes]:
        damage = [
            self._put_aside(path)
            for path in (self.directory / name for name in FILE_NAMES)
            if path.exists() and not path.is_file()
        ]
        found = [
            read_cursor_file(self.directory / name, self.identity, self._decode, self.log_id)
            for name in FILE_NAMES
        ]
        present = [(self.directory / name).exists() for name in FILE_NAMES]
        held = sorted((file for file in found if file is not None), key=lambda file: file.generation)
        proven = bool(held) or (self.directory / PROOF_NAME).exists()
        for name, file, exists in zip(FILE_NAMES, found, present, strict=True):
            if not exists and proven and all(one.file != name for one in damage):
                damage.append(DamagedRange(name, 0, 0, 0, "cursor file is missing"))
            if exists and file is None and not self._blank(name):
                damage.append(DamagedRange(name, 0, 0, 0, self._why_unread(name)))
            for position, why in file.damaged if file is not None else ():
                damage.append(DamagedRange(name, position, 0, 0, why))
        states: dict[str, bytes | None] = dict(held[-1].states) if held else {}
        if held and held[-1].damaged:
            for name, blob in held[0].states.items():
                states.setdefault(name, blob)
        self._take(held[-1] if held else None, states)
        self.damage = tuple(damage)
        if held:
            self._prove()
            self._switch |= not all(present)  # the next write makes the file that is missing
        if self._witness is not None:
            removed = {name for file in held for name, blob in file.states.items() if blob is None}
            self.lost = set(self._witness.subscriptions - removed - self._states.keys())
            self._tell_witness()
        return dict(self._states)

    @staticmethod
    def _put_aside(path: Path) -> DamagedRange:
        """A directory, or whatever else is no file, makes room for one under its name."""
        aside = name_aside(path)
        files.rename(path, aside)
        return DamagedRange(path.name, 0, 0, 0, f"this is no file; it is kept as {aside.name}")

    def _tell_witness(self) -> None:
        self._names_version = 0
        if self._witness is not None:
            self._witness.note_subscriptions(self.lost | self._states.keys())

    def _prove(self) -> None:
        """Say that there are cursor files; where that cannot be written they are only not missed."""
        path = self.directory / PROOF_NAME
        with suppress(OSError):
            if not path.exists():
                files.close(files.open_new(path))

    def _blank(self, name: str) -> bool:
        data, _, flaw = _read_front(self.directory / name)
        return not flaw and not data.strip(b"\0")

    def _why_unread(self, name: str) -> str:
        data, _ = files.read_start(self.directory / name, HEADER_BYTES)
        header = _read_header(data)
        foreign = _why_foreign(header, self.identity, self.log_id) if header is not None else ""
        return f"cursor file cannot be used: {foreign}" if foreign else "cursor file cannot be read"

    def _take(self, file: CursorFile | None, states: dict[str, bytes | None]) -> None:
        self._states = {name: blob for name, blob in states.items() if blob is not None}
        self._live_bytes = sum(_size_of(name, blob) for name, blob in self._states.items())
        self._loaded = True
        if file is None:
            return
        self._generation = file.generation
        room = max(file.end, _SHRUNK_ABOVE * _capacity_max(self._live_bytes))
        self._end, self._capacity = file.end, min(file.size, room)
        # Torn or damaged bytes are never appended behind: the next write moves to the other file.
        # One of before gets its log's id so, too.
        self._switch = not file.clean or bool(file.damaged) or file.log_id != self.log_id

    def store(self, name: str, blob: bytes) -> None:
        """Note the state of a subscription; kept in memory until write()."""
        self._changed[name] = bytes(blob)

    def remove(self, name: str) -> None:
        """Note that a subscription is no more.  The witness hears of it first: it must not be missed."""
        self._changed[name] = None
        self.lost.discard(name)
        if self._witness is not None:
            self._witness.note_subscriptions(self._witness.subscriptions - {name})

    @property
    def version(self) -> int:
        """Grows whenever something was written."""
        return self._version

    def copy(self) -> bytes:
        """Return all written states as the bytes of a new cursor file."""
        generation = self._generation + 1
        base = b"".join(pack_entry(_encode(name), blob, generation) for name, blob in self._states.items())
        return pack_header(self.identity, generation, base, self.log_id) + base

    @property
    def dirty(self) -> bool:
        """Something was noted and not written, or written and not synced."""
        return bool(self._changed) or self._version > self._requested

    def write(self) -> None:
        """Append the noted states.  After StorageFull and StorageFailed they stay noted for the next call."""
        if not self._loaded:
            broken("cursors are written before they were loaded", directory=self.directory.name)
        if not self._changed:
            return
        try:
            self._write_changed()
        except OSError as error:
            self._switch = True
            if error.errno in files.FULL_ERRNOS:
                raise StorageFull("cursors cannot be stored: the disk is full", why=str(error)) from error
            raise StorageFailed("cursors cannot be stored", why=str(error)) from error

    def _write_changed(self) -> None:
        changed = self._changed
        current = self._files[self._generation % 2]
        entries = b"".join(
            pack_entry(_encode(name), blob, self._generation) for name, blob in changed.items()
        )
        states = dict(self._states)
        for name, blob in changed.items():
            if blob is None:
                states.pop(name, None)
            else:
                states[name] = blob
        live_bytes = sum(_size_of(name, blob) for name, blob in states.items())
        if self._switch or current.failed or not self._make_room(len(entries), live_bytes):
            self._switch_files(states, [name for name, blob in changed.items() if blob is None])
        else:
            files.write_all(descriptors.fd(current), entries, self._end)
            self._end += len(entries)
        self._version += 1
        if states.keys() != self._states.keys():
            self._names_version = self._version
            self.lost -= states.keys()
        self._states, self._live_bytes = states, live_bytes
        self._changed = {}

    def _make_room(self, size: int, live_bytes: int) -> bool:
        """Whether ``size`` more bytes fit the file in force, grown where that is worth it."""
        needed = self._end + size
        if needed <= self._capacity:
            return True
        capacity = min(max(self._capacity * 2, RESERVE_FIRST), _capacity_max(live_bytes))
        if needed > capacity:
            return False
        fd = descriptors.fd(self._files[self._generation % 2])
        try:
            files.fallocate(fd, self._capacity, capacity - self._capacity)
        except OSError as error:
            if error.errno not in files.FULL_ERRNOS:
                raise
            files.ftruncate(fd, self._capacity)
            return False
        self._capacity = capacity
        return True

    def _switch_files(self, states: dict[str, bytes], removed: list[str]) -> None:
        """Write all live states into the other file under the next generation."""
        current = self._files[self._generation % 2]
        if self._generation and not current.failed and not self._durable:
            sync_file(current, descriptors.fd(current))
        # A failed file is replaced under its own name: the other one is all that is surely on disk.
        generation = self._generation + (2 if current.failed else 1)
        base = b"".join(pack_entry(_encode(name), blob, generation) for name, blob in states.items())
        base += b"".join(pack_entry(_encode(name), None, generation) for name in removed)
        needed = HEADER_BYTES + len(base)
        capacity = max(RESERVE_FIRST, min(self._capacity, _capacity_max(len(base))))
        while capacity < needed:
            capacity *= 2
        header = pack_header(self.identity, generation, base, self.log_id)
        if current.failed:
            files.replace_durably(current.path, header + base + bytes(capacity - needed))
            descriptors.close(current)
            self._files[generation % 2] = LogFile(current.path, locked=True)
        else:
            fd = self._open(self._files[generation % 2])
            capacity = self._reserve(fd, capacity, needed)
            files.write_all(fd, base + bytes(capacity - needed), HEADER_BYTES)
            files.write_all(fd, header, 0)
        self._generation, self._end, self._capacity = generation, needed, capacity
        self._switch = False

    @property
    def _durable(self) -> bool:
        """Everything written so far is on disk."""
        job = self._job
        return job is not None and job.succeeded and job.version == self._version

    def _reserve(self, fd: int, capacity: int, needed: int) -> int:
        size = files.size_of(fd)
        if size > max(_SHRUNK_ABOVE * capacity, _WINDOW_BYTES):
            files.ftruncate(fd, capacity)  # never that large: zeros are written over all of it
            size = capacity
        if size >= capacity:
            return size
        try:
            files.fallocate(fd, size, capacity - size)
        except OSError as error:
            if error.errno not in files.FULL_ERRNOS or size < needed:
                raise
            files.ftruncate(fd, size)
            return size
        return capacity

    def _open(self, file: LogFile) -> int:
        try:
            return descriptors.fd(file)
        except FileNotFoundError:
            pass
        self._directory_dirty = True
        for other in self._files:  # both at once: the second must not need space when the disk is full
            fd = descriptors.fd(other) if other.path.exists() else descriptors.create(other)
            size = files.size_of(fd)
            if size < RESERVE_FIRST:  # also one that a full disk left empty at an earlier attempt
                files.fallocate(fd, size, RESERVE_FIRST - size)
        self._prove()
        return descriptors.fd(file)

    def sync_job(self, behind: Sequence[LogFile] = (), *, made: bool = False) -> CursorSyncJob | None:
        """Return the work of a thread that makes all that write() appended durable; None if none is left.

        ``behind``: files of the log that must be durable before; ``made``: some of them are new.
        """
        current = self._files[self._generation % 2]
        if current.failed and not self._changed:
            self._changed = dict(self._states)  # the next write() must replace the failed file
        if self._version <= self._requested or self._switch or current.failed:
            return None
        if self._job is not None and self._job.succeeded and self._job.directory is not None:
            self._directory_dirty = False
        directory = self.directory if self._directory_dirty or made else None
        self._job = CursorSyncJob(current, directory, self._version, behind)
        self._requested = self._version
        return self._job

    def synced(self, job: CursorSyncJob) -> None:
        """``job`` succeeded.  Optional: a job keeps its own outcome; new names are missed from now on."""
        if 0 < self._names_version <= job.version:
            self._tell_witness()

    def sync_failed(self, job: CursorSyncJob, error: Exception) -> None:
        """``job`` failed: the next write replaces the file, which is never synced again."""
        self._switch = True
        self._requested = min(self._requested, job.version - 1)
        self._changed = {**self._states, **self._changed}

    def close(self) -> None:
        """Release the files; states that were not written are dropped."""
        for file in self._files:
            descriptors.close(file)


def _encode(name: str) -> bytes:
    return name.encode("utf-8", "surrogatepass")


def _size_of(name: str, blob: bytes) -> int:
    return padded(_ENTRY.size + len(_encode(name)) + len(blob))


def _capacity_max(live_bytes: int) -> int:
    """How large the file may grow before its live states are written anew."""
    return max(RESERVE_GROWN, min(_LIVE_FACTOR * live_bytes, MIB), 2 * live_bytes)
