"""Writing into the active segment: space reserved ahead, vectored writes, errors cut back.

After a failed write the file is cut back to the last good write, so no torn or stale bytes ever lie in front
of a later batch.  Behind the batches there is always room for the footer.  So a segment can be sealed on a
full disk, and then uploaded and evicted.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Final, NamedTuple

from danube.core.batch.checksum import content_hasher
from danube.errors import Fenced, StorageFailed
from danube.host import files
from danube.limits import (
    SEGMENT_BYTES,
    SEGMENT_PREALLOCATE_FIRST,
    SEGMENT_PREALLOCATE_STEP_MAX,
    WRITE_BYTES_MAX,
)
from danube.wal.segments.descriptors import Unsynced, descriptors
from danube.wal.segments.index import ENTRY_EVERY_BYTES
from danube.wal.segments.segment import ENTRY_BYTES, HEADER_BYTES, NO_LOG, SegmentHeader, pack_header
from danube.wal.segments.stored_segment import StoredSegment

_BLOCK_BYTES: Final = 4096
_FOOTER_ROOM: Final = 4096  # for all of a footer but its index; a larger snapshot of producers waits for room
_UNSUPPORTED: Final = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})

Buffer = bytes | bytearray | memoryview


class LogOptions(NamedTuple):
    """Sizes in bytes.  ``preallocate_first`` 0 reserves nothing ahead.  ``log_id``: see segment.py."""

    segment_bytes: int = SEGMENT_BYTES
    preallocate_first: int = SEGMENT_PREALLOCATE_FIRST
    preallocate_step_max: int = SEGMENT_PREALLOCATE_STEP_MAX
    log_id: bytes = NO_LOG


def footer_room(entries: int) -> int:
    """Bytes that the footer of a segment with so many index entries may need."""
    return _FOOTER_ROOM + (entries + 2) * ENTRY_BYTES


class SegmentWriter:
    """Appends to one segment.  ``segment.data_end`` is the good end; the caller moves it."""

    __slots__ = (
        "_allocated", "_headed", "_inode", "_log_id", "_roomy_end", "_step", "_step_max", "_unsynced",
        "segment",
    )  # fmt: skip

    def __init__(
        self, segment: StoredSegment, unsynced: Unsynced, options: LogOptions, *, created: bool
    ) -> None:
        self.segment = segment
        self._unsynced = unsynced
        self._step = options.preallocate_first
        self._step_max = options.preallocate_step_max
        self._log_id = options.log_id
        self._allocate_to(segment.size_bytes)
        self._headed = not created
        self._inode = 0
        if created:
            segment.hasher = content_hasher()

    def write(self, buffers: Sequence[Buffer], size: int, created_us: int) -> None:
        """Write ``size`` bytes at the segment's good end; on OSError nothing of them stays."""
        segment = self.segment
        file = segment.file
        # Pinned since an earlier write, it is the descriptor of the same file still.
        fd = file.fd if self._inode and file in self._unsynced.ends and not file.lost else self._descriptor()
        position = segment.data_end
        if not self._headed:
            header = SegmentHeader(
                segment.identity, segment.epoch, segment.base_offset, created_us, self._log_id
            )
            buffers = [pack_header(header), *buffers]
            position, size = 0, size + HEADER_BYTES
        end = position + size
        if end > self._roomy_end:
            entries = 0 if segment.index is None else len(segment.index.positions)
            self._reserve(fd, end + footer_room(entries + size // ENTRY_EVERY_BYTES))
        try:
            if size <= WRITE_BYTES_MAX and len(buffers) <= files.IOV_MAX:
                _write_whole(fd, buffers, position, size)
            else:
                _write_in_groups(fd, buffers, position)
        except OSError:
            self._cut_back(fd, position)
            raise
        self._headed = True
        segment.size_bytes = max(self._allocated, end)
        if segment.hasher is not None:  # now that the bytes are in the processor's caches
            for buffer in buffers:
                segment.hasher.update(buffer)
            segment.hashed_bytes = end

    def _allocate_to(self, size: int) -> None:
        """The file has ``size`` bytes, up to ``_roomy_end`` with room for any footer behind."""
        self._allocated = size
        self._roomy_end = size - footer_room(size // ENTRY_EVERY_BYTES + 1)

    def _descriptor(self) -> int:
        """The file's descriptor; Fenced where it was closed meanwhile and another owner changed it."""
        file = self.segment.file
        reopened = file.fd < 0
        fd = descriptors.fd(file)
        if reopened or not self._inode:
            inode, size = files.inode_of(fd), files.size_of(fd)
            if self._inode and (inode != self._inode or size != self.segment.size_bytes):
                raise Fenced("the active segment was changed by another owner", file=self.segment.name)
            self._inode = inode
        return fd

    def _reserve(self, fd: int, end: int) -> None:
        """Grow the file up to ``end`` in steps, or only as far as needed where the disk is nearly full."""
        if end <= self._allocated or self._step <= 0:
            return
        wanted = max(end, self._allocated + self._step)
        wanted = -(-wanted // _BLOCK_BYTES) * _BLOCK_BYTES
        needed = -(-end // _BLOCK_BYTES) * _BLOCK_BYTES
        for target in (wanted, needed):
            try:
                files.fallocate(fd, self._allocated, target - self._allocated)
            except OSError as error:
                if error.errno in _UNSUPPORTED:
                    self._step = 0
                    return
                self._cut_back(fd, self._allocated)
                if error.errno not in files.FULL_ERRNOS or target == needed:
                    raise
            else:
                self._allocate_to(target)
                self._step = min(self._step * 2, self._step_max)
                return

    def _cut_back(self, fd: int, position: int) -> None:
        self.segment.size_bytes = position
        self._allocate_to(position)
        try:
            files.ftruncate(fd, position)
        except OSError as error:
            raise StorageFailed(
                "a failed write cannot be cut back", why=str(error), file=self.segment.name
            ) from error


def _write_whole(fd: int, buffers: Sequence[Buffer], position: int, size: int) -> None:
    """Write with one pwritev; after a short write continue with the remaining bytes."""
    taken = files.pwritev(fd, buffers, position)
    if taken < size:
        if taken <= 0:
            raise OSError(errno.ENOSPC, "the file takes no more bytes")
        rest = memoryview(b"".join(buffers))[taken:]
        files.write_all(fd, rest, position + taken)


def _write_in_groups(fd: int, buffers: Sequence[Buffer], position: int) -> None:
    """One pwritev for each group of buffers; a buffer is never cut.

    For a call of 2 MiB the kernel takes page cache in pieces of 2 MiB, and a host that has taken those back
    from its guest gives them anew in 5 to 9 ms each.
    """
    group: list[Buffer] = []
    wanted = 0
    for buffer in buffers:
        if group and (wanted + len(buffer) > WRITE_BYTES_MAX or len(group) == files.IOV_MAX):
            _write_whole(fd, group, position, wanted)
            position += wanted
            group, wanted = [], 0
        group.append(buffer)
        wanted += len(buffer)
    _write_whole(fd, group, position, wanted)
