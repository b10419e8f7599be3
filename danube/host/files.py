"""The one door for file-system calls of everything that must survive a crash.

Callers write ``files.pwritev(...)`` on the module, so a test replaces one function here and every
caller meets the fault: see ``tests/unit/wal/log/test_wal_faults.py``.  Nothing is retried and nothing is
caught; errors leave as OSError and the caller decides what they mean.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})
SECTOR_BYTES = 512
IOV_MAX = min(1024, os.sysconf("SC_IOV_MAX"))

_libc = ctypes.CDLL(None, use_errno=True)
_RENAME_NOREPLACE = 1  # renameat2(2)
_AT_FDCWD = -100
_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE
_PUNCH_HOLE = 3  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, fallocate(2)
_SYNC_FILE_RANGE_WRITE = 2  # sync_file_range(2): begin, do not wait
_STATFS_BYTES = 256  # more than any layout of struct statfs; it begins with the type's magic number
_LOCAL_MAGICS = frozenset(  # statfs(2): ext2 to ext4, XFS, Btrfs, tmpfs, overlay, ZFS, F2FS
    {0xEF53, 0x58465342, 0x9123683E, 0x01021994, 0x794C7630, 0x2FC12FC1, 0xF2F52010}
)
_AT_EMPTY_PATH = 0x1000
_STATX_BTIME = 0x800  # statx(2)
_STATX_MNT_ID = 0x1000
_STATX_MNT_ID_UNIQUE = 0x4000
_STATX_MNT_ID_PLACE = slice(144, 152)
_STATX_BYTES = 256
_STATX_BTIME_POSITION = 80
_CREATE_MODE = 0o600
_DIRECTORY_MODE = 0o700


def open_new(path: Path) -> int:
    """Create ``path`` for reading and writing; FileExistsError when it is there."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _CREATE_MODE)


def open_existing(path: Path, *, writable: bool) -> int:
    """Open a file; for writing only itself, because a link that somebody planted would name another one."""
    return os.open(path, (os.O_RDWR | os.O_NOFOLLOW if writable else os.O_RDONLY) | os.O_CLOEXEC)


def open_directory(directory: Path) -> int:
    return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def close(fd: int) -> None:
    os.close(fd)


def pwritev(fd: int, buffers: Sequence[bytes | bytearray | memoryview], position: int) -> int:
    """Write the buffers with one call (at most IOV_MAX of them); return how many bytes were taken."""
    return os.pwritev(fd, buffers, position)


def pread(fd: int, size: int, position: int) -> bytes:
    """Read up to ``size`` bytes; fewer only at the end of the file."""
    return os.pread(fd, size, position)


def fallocate(fd: int, position: int, size: int) -> None:
    """Reserve blocks for the range and grow the file over it; the new bytes read as zero."""
    os.posix_fallocate(fd, position, size)


def reserve_behind(fd: int, position: int, size: int) -> None:
    """Reserve blocks for the range and leave the file as long as it is; ftruncate gives them back."""
    if _libc.fallocate(fd, _KEEP_SIZE, ctypes.c_int64(position), ctypes.c_int64(size)):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def punch_hole(fd: int, position: int, size: int) -> None:
    """Give the blocks of a range back to the file system; the bytes read as zero, the size stays."""
    if _libc.fallocate(fd, _PUNCH_HOLE, ctypes.c_int64(position), ctypes.c_int64(size)):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def ftruncate(fd: int, size: int) -> None:
    os.ftruncate(fd, size)


def fdatasync(fd: int) -> None:
    os.fdatasync(fd)


def check_there(fd: int, path: Path | None = None) -> None:
    """Raise OSError if the file behind ``fd`` was deleted, or ``path`` is another file now.

    Bytes written to such a file are lost with it, even if they are synced.
    """
    status = os.fstat(fd)
    there = os.stat(path) if path is not None and status.st_nlink else status
    if not status.st_nlink or (there.st_dev, there.st_ino) != (status.st_dev, status.st_ino):
        why = "the file was deleted or replaced while it was in use"
        raise OSError(errno.ENOENT, why, *([] if path is None else [str(path)]))


def start_writing(fd: int) -> None:
    """Start writeback of the file ``fd``, so that a later sync waits for less.

    It promises nothing, and errors are reported by that sync.
    """
    _libc.sync_file_range(fd, ctypes.c_int64(0), ctypes.c_int64(0), _SYNC_FILE_RANGE_WRITE)


def syncfs(fd: int) -> None:
    """Put everything written to the file system of ``fd`` on disk.

    An error of any of its files since this descriptor was opened, or since the last call on it, is
    raised once, so the descriptor must be older than the writes.
    """
    if _libc.syncfs(fd):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def sync_file_system_of(directory: Path) -> None:
    """Put everything written to the file system of a directory on disk.

    Errors of earlier writes are not raised: the descriptor is younger than they are (see syncfs).
    """
    fd = open_directory(directory)
    try:
        syncfs(fd)
    finally:
        close(fd)


def on_local_disk(fd: int) -> bool:
    """Whether the file lies on a file system of this machine, which cannot take a mapping's pages away."""
    status = ctypes.create_string_buffer(_STATFS_BYTES)
    if _libc.fstatfs(fd, status):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return ctypes.c_long.from_buffer(status).value & 0xFFFFFFFF in _LOCAL_MAGICS


def mapped(fd: int, start: int, end: int) -> memoryview:
    """Map bytes ``start`` to ``end`` (above ``start``, and not behind the file's end) read-only.

    Only for a file that is never truncated: an access to truncated bytes would end the process.
    """
    origin = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
    return memoryview(mmap.mmap(fd, end - origin, flags, mmap.PROT_READ, offset=origin))[start - origin :]


def size_of(fd: int) -> int:
    return os.fstat(fd).st_size


def free_bytes(fd: int) -> int:
    """Return the bytes that users other than root may still write to the file system of ``fd``."""
    status = os.fstatvfs(fd)
    return status.f_bavail * status.f_frsize


def next_data(fd: int, position: int) -> int | None:
    """Return where written bytes begin at or behind ``position``; None when there are none.

    All that it skips reads as zero; a file system that does not know skips nothing.
    """
    try:
        return os.lseek(fd, position, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return None
        return position


def inode_of(fd: int) -> int:
    return os.fstat(fd).st_ino


def born_ns_of(fd: int) -> int:
    """Return when the file was made, nanoseconds of 1970, which no copy keeps; 0 if it is not known."""
    found = statx(fd, b"", _STATX_BTIME)
    if not found:
        return 0
    seconds, nanoseconds = struct.unpack_from("<qI", found, _STATX_BTIME_POSITION)
    return int(seconds) * 1_000_000_000 + int(nanoseconds)


def mount_of(path: Path) -> int:
    """The number of a file's mount, 0 if it is not known; before Linux 6.8 it is given again when free."""
    found = statx(_AT_FDCWD, os.fsencode(path), _STATX_MNT_ID | _STATX_MNT_ID_UNIQUE)
    return int.from_bytes(found[_STATX_MNT_ID_PLACE], "little") if found else 0


def statx(fd: int, path: bytes, wanted: int) -> bytes:
    """statx(2), with a path as openat(2) takes it; empty without the call, or any of what is ``wanted``."""
    call = getattr(_libc, "statx", None)
    found = ctypes.create_string_buffer(_STATX_BYTES)
    if call is None or call(fd, path, 0 if path else _AT_EMPTY_PATH, wanted, found):
        return b""
    return found.raw if struct.unpack_from("<I", found)[0] & wanted else b""


def rename(source: Path, target: Path) -> None:
    """Atomically give ``source`` the name ``target``, replacing it; durable after fsync_directory."""
    os.rename(source, target)


def rename_new(source: Path, target: Path) -> None:
    """Like rename, but FileExistsError if there is a ``target``; OSError if that cannot be promised."""
    call = getattr(_libc, "renameat2", None)
    if call is None:
        raise OSError(errno.ENOSYS, "this C library has no renameat2", str(source))
    if call(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), _RENAME_NOREPLACE):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(source), None, str(target))


def unlink(path: Path) -> None:
    os.unlink(path)


def list_names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


def lock(fd: int) -> None:
    """Take the exclusive lock of an open file; BlockingIOError when another open file holds it."""
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def unlock(fd: int) -> None:
    fcntl.flock(fd, fcntl.LOCK_UN)


def fsync_directory(directory: Path) -> None:
    """Make creations, renames and removals in ``directory`` durable."""
    fd = open_directory(directory)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def user_directory(variable: str, below_home: str, environ: Mapping[str, str]) -> Path | None:
    """Return the folder that ``variable`` names (XDG base directories), else ``below_home`` in the home.

    None for a user who has no home: HOME is not set and the system's table of users does not name the user,
    as in many containers.
    """
    chosen = environ.get(variable, "")
    if os.path.isabs(chosen):  # the specification has a relative one ignored
        return Path(chosen)
    try:
        return Path(environ.get("HOME") or Path.home()) / below_home
    except RuntimeError:
        return None


def make_directory(directory: Path) -> None:
    """Create ``directory`` and its missing parents durably; nothing happens when it exists."""
    if directory.is_dir():
        return
    make_directory(directory.parent)
    try:
        os.mkdir(directory, _DIRECTORY_MODE)
    except FileExistsError:
        return
    fsync_directory(directory.parent)


def read_bounded(path: Path, size_max: int) -> bytes:
    """Whole content of a small file; OSError(EFBIG) when it is larger than ``size_max`` bytes."""
    fd = open_existing(path, writable=False)
    try:
        size = size_of(fd)
        if size > size_max:
            raise OSError(errno.EFBIG, f"larger than {size_max} bytes", str(path))
        return pread(fd, size, 0)
    finally:
        close(fd)


def read_start(path: Path, size_max: int) -> tuple[bytes, int]:
    """The first ``size_max`` bytes of a file at most, and its size."""
    fd = open_existing(path, writable=False)
    try:
        size = size_of(fd)
        return pread(fd, min(size, size_max), 0), size
    finally:
        close(fd)


def write_all(fd: int, data: bytes | bytearray | memoryview, position: int) -> None:
    """Write all of ``data``; OSError(ENOSPC) when the file takes no more."""
    view = memoryview(data)
    while view:
        taken = pwritev(fd, [view], position)
        if taken <= 0:
            raise OSError(errno.ENOSPC, "no bytes were taken")
        view = view[taken:]
        position += taken


def overwrite(path: Path, data: bytes) -> None:
    """Overwrite an existing file with ``data`` in place, durably; this works on a full disk.

    ``data`` is at most a sector, which reaches the disk whole or not at all.  Shorter data is padded with
    spaces.
    """
    fd = open_existing(path, writable=True)
    try:
        write_all(fd, data.ljust(size_of(fd)), 0)
        fdatasync(fd)
    finally:
        close(fd)


def replace_or_overwrite(path: Path, data: bytes) -> None:
    """As replace_durably; on a full disk as overwrite, where a file is there and a sector takes ``data``."""
    try:
        replace_durably(path, data)
    except OSError as error:
        path.with_name(path.name + ".new").unlink(missing_ok=True)
        if error.errno not in FULL_ERRNOS or len(data) > SECTOR_BYTES or not path.is_file():
            raise
        overwrite(path, data)


def replace_durably(path: Path, data: bytes) -> None:
    """Give ``path`` the content ``data``: all of it or, after any failure or crash, the old content."""
    temporary = path.with_name(path.name + ".new")
    try:
        unlink(temporary)
    except FileNotFoundError:
        pass
    fd = open_new(temporary)
    try:
        write_all(fd, data, 0)
        fdatasync(fd)
    finally:
        close(fd)
    rename(temporary, path)
    fsync_directory(path.parent)
