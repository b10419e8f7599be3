"""The file of the local metadata log: a snapshot, entries after it, and a mark that says how far.

Little-endian, everything starts at a multiple of 8:

    position  size  field
           0     4  magic          b"DNL1"; the digit is the format version
           4     4  header_crc     CRC32C of bytes 8 .. 24
           8     8  generation     counts the files that have had this name
          16     8  snapshot_size
          24     8  committed_end  the mark: position after the last committed entry
          32     4  mark_crc       CRC32C of bytes 24 .. 32
          36     4  0
          40        snapshot       see danube.core.metadata.machine; padded to 8
                    entries, each padded to 8:
                      u32 crc      CRC32C of bytes 4 .. 16 + size of the entry
                      u32 size     bytes of the content
                      u64 index    of the first command
                      content      MessagePack list of commands, ENTRY_BYTES_MAX at most

The holder of the directory's lock writes in this order: the mark as it is, entry, fdatasync, the mark after
the entry.  All processes read up to the mark, without a lock.  The last mark is made durable by the sync of
the next entry, so after a power cut it may lie one entry behind.  That entry counts if it is whole; otherwise
it is the torn tail of a writer that never answered, and is cut.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final, NamedTuple

from danube.core.batch.checksum import crc32c
from danube.errors import Damage, StorageFailed, StorageFull, StorageIncompatible
from danube.limits import METADATA_ENTRY_BYTES_MAX

# An entry that is larger is damage to every reader, so this bound belongs to the format.
ENTRY_BYTES_MAX: Final = METADATA_ENTRY_BYTES_MAX

_MAGIC: Final = b"DNL1"
_HEADER: Final = struct.Struct("<4sIQQ")
_MARK: Final = struct.Struct("<QII")
_ENTRY: Final = struct.Struct("<IIQ")
_MARK_POSITION: Final = 24
SNAPSHOT_POSITION: Final = 40
_MARK_READS_MAX: Final = 1_000
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


class FileHead(NamedTuple):
    generation: int
    snapshot: bytes
    entries_start: int


class Entry(NamedTuple):
    """An entry that is whole: the index of its first command, its content, the position after it."""

    first_index: int
    content: bytes
    end: int


def new_file(generation: int, snapshot: bytes) -> bytes:
    """The bytes of a file that holds a snapshot and no entry."""
    end = _padded(SNAPSHOT_POSITION + len(snapshot))
    numbers = struct.pack("<QQ", generation, len(snapshot))
    header = _MAGIC + crc32c(numbers).to_bytes(4, "little") + numbers
    return (header + pack_mark(end) + snapshot).ljust(end, b"\0")


def pack_mark(committed_end: int) -> bytes:
    return _MARK.pack(committed_end, crc32c(committed_end.to_bytes(8, "little")), 0)


def pack_entry(index: int, content: bytes) -> bytes:
    checked = struct.pack("<IQ", len(content), index) + content
    entry = crc32c(checked).to_bytes(4, "little") + checked
    return entry.ljust(_padded(len(entry)), b"\0")


def write_mark(descriptor: int, committed_end: int) -> None:
    """Commit everything below ``committed_end``; it must be on disk already."""
    write_all(descriptor, pack_mark(committed_end), _MARK_POSITION)


def write_all(descriptor: int, content: bytes, position: int) -> None:
    """pwrite until everything is written."""
    done = os.pwrite(descriptor, content, position)
    while done < len(content):
        done += os.pwrite(descriptor, content[done:], position + done)


def read_mark(descriptor: int, path: str) -> int:
    """The mark.  A reader may meet a writer half-way through the 16 bytes, so it looks again."""
    for _ in range(_MARK_READS_MAX):
        content = os.pread(descriptor, _MARK.size, _MARK_POSITION)
        if len(content) == _MARK.size:
            committed_end, crc, zero = _MARK.unpack(content)
            if crc == crc32c(content[:8]) and zero == 0:
                return int(committed_end)
    raise damage(path, _MARK_POSITION, "the mark fails its checksum")


def read_head(descriptor: int, path: str) -> FileHead:
    """Read and check the header; raises Damage or StorageIncompatible."""
    content = os.pread(descriptor, _HEADER.size, 0)
    if content[:3] == _MAGIC[:3] and content[:4] != _MAGIC:
        raise StorageIncompatible(
            f"{path} has a newer format",
            why=f"its magic is {content[:4]!r}, this version knows {_MAGIC!r}",
            hint="start the newer version",
            file=path,
        )
    if len(content) < _HEADER.size or content[:4] != _MAGIC:
        raise damage(path, 0, "this is not a metadata log")
    _, crc, generation, snapshot_size = _HEADER.unpack(content)
    if crc != crc32c(content[8:]):
        raise damage(path, 0, "the header fails its checksum")
    entries_start = _padded(SNAPSHOT_POSITION + snapshot_size)
    content = read_all(descriptor, SNAPSHOT_POSITION, entries_start, path)
    if any(content[snapshot_size:]):
        raise damage(path, SNAPSHOT_POSITION + snapshot_size, "the padding is not zero")
    return FileHead(generation, content[:snapshot_size], entries_start)


def read_all(descriptor: int, start: int, end: int, path: str) -> bytes:
    """The bytes start .. end; raises Damage where the file is shorter."""
    parts: list[bytes] = []
    present = os.fstat(descriptor).st_size
    if end > present:
        raise damage(path, present, f"the file is cut; {end} bytes were committed")
    while start < end:
        part = os.pread(descriptor, end - start, start)
        if not part:
            raise damage(path, start, "the file became shorter while it was read")
        parts.append(part)
        start += len(part)
    return b"".join(parts)


def entry_at(content: bytes, start: int, position: int) -> Entry | None:
    """The entry at ``content[start:]``, which lies at ``position`` of the file; None if none is whole."""
    if len(content) - start < _ENTRY.size:
        return None
    crc, size, index = _ENTRY.unpack_from(content, start)
    end = start + _ENTRY.size + size
    if size == 0 or size > ENTRY_BYTES_MAX or _padded(end) > len(content):
        return None
    if crc != crc32c(content[start + 4 : end]) or any(content[end : _padded(end)]):
        return None
    return Entry(index, content[start + _ENTRY.size : end], position + _padded(end) - start)


def committed_entries(content: bytes, position: int, path: str) -> Iterator[Entry]:
    """The entries in ``content``, all of them committed; raises Damage where one is not whole."""
    start = 0
    while start < len(content):
        entry = entry_at(content, start, position + start)
        if entry is None:
            raise damage(path, position + start, "a committed entry fails its checksum")
        yield entry
        start = entry.end - position


def tail_entries(content: bytes, position: int, path: str) -> list[Entry]:
    """Return the whole entries behind the mark; the rest is torn.

    Raises Damage if a whole entry follows a torn one: a writer leaves at most one torn entry, the last.
    """
    entries: list[Entry] = []
    start = 0
    while (entry := entry_at(content, start, position + start)) is not None:
        entries.append(entry)
        start = entry.end - position
    if len(content) - start >= _ENTRY.size:
        _, size, _ = _ENTRY.unpack_from(content, start)
        if entry_at(content, _padded(start + _ENTRY.size + size), position) is not None:
            raise damage(path, position + start, "an entry fails its checksum and a whole one follows it")
    return entries


def damage(path: str, position: int, why: str) -> Damage:
    """Return the error for a damaged log."""
    return Damage(
        f"metadata log {path} is damaged at byte {position}",
        why=why,
        hint=f"nothing was changed; restore {path} from a backup; where an object store holds a copy,"
        " `danube storage restore` fills an empty data directory",
        file=path,
        position=position,
    )


def _padded(size: int) -> int:
    return (size + 7) & ~7


def storage_error(error: OSError, path: str) -> StorageFull | StorageFailed:
    """The error for a system call that failed."""
    cls = StorageFull if error.errno in _FULL else StorageFailed
    hint = "free some space" if cls is StorageFull else "look at the system's log for the device"
    return cls("metadata could not be stored or read", why=str(error), hint=hint, file=path)


@contextmanager
def storage_errors(path: str) -> Iterator[None]:
    """Raise storage_error() in the place of an OSError."""
    try:
        yield
    except OSError as error:
        raise storage_error(error, path) from error


def replaced(path: str, content: bytes, *, synced: bool) -> int:
    """Give ``path`` a new file of ``content``, all of it committed; return its descriptor.  Raises OSError.

    ``synced``: its bytes are on disk before it has the name, which the caller makes durable.
    """
    new_path = path.removesuffix(".log") + ".new"
    with suppress(FileNotFoundError):
        os.unlink(new_path)
    descriptor = os.open(new_path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        write_all(descriptor, content, 0)
        write_mark(descriptor, len(content))
        if synced:
            os.fsync(descriptor)
        os.rename(new_path, path)
    except BaseException:
        os.close(descriptor)
        with suppress(FileNotFoundError):
            os.unlink(new_path)
        raise
    return descriptor


def open_lock(directory: str) -> int:
    """Descriptor of ``metadata.lock`` in a directory, which is made."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    return os.open(os.path.join(directory, "metadata.lock"), flags, 0o600)


def sync_directory(directory: str) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
