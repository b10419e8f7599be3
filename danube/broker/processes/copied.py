"""Detection of a data directory that is a copy in the original's place; it begins a new history.

The file ``place`` holds its own time of creation by the file system.  A copy (``cp``, ``tar``, ``rsync``) was
made at another time and still contains the old one.  The file is made anew at each start and each stop, so a
directory that an older copy overwrites differs, too.  A restored snapshot of the whole file system looks
unchanged; only positions of readers can show it.

Only for one host: offsets of a cluster's member are reserved with the others.
"""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Final

from danube.broker.processes.data_dir import DataDir
from danube.broker.processes.directories import METADATA
from danube.cluster.log import log_file
from danube.cluster.log.local_log import LocalLog
from danube.core.placement.recovered import INCARNATIONS_AHEAD, LOG_EPOCHS, History, recovered
from danube.errors import StorageFailed
from danube.host import files, telemetry
from danube.host.clock import wall_us

FILE_NAME: Final = "place"
_BYTES_MAX: Final = 256
_log = telemetry.events("copied")


def copied(data_dir: Path) -> bool:
    """Whether the directory was copied since a broker last started or stopped on it; False for a new one."""
    path = data_dir / FILE_NAME
    try:
        fd = files.open_existing(path, writable=False)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise StorageFailed(f"{path} cannot be read", why=str(error)) from None
    try:
        return not _same(files.pread(fd, _BYTES_MAX, 0), _seal(fd))
    except OSError as error:
        raise StorageFailed(f"{path} cannot be read", why=str(error)) from None
    finally:
        files.close(fd)


def note_place(data_dir: Path) -> None:
    """Write the current place and time; on a full disk the earlier ones stay, which are still true."""
    path = data_dir / FILE_NAME
    temporary = path.with_name(f"{FILE_NAME}.new")
    try:
        temporary.unlink(missing_ok=True)
        fd = files.open_new(temporary)
        try:
            files.write_all(fd, _seal(fd), 0)
            files.fdatasync(fd)
        finally:
            files.close(fd)
        files.rename(temporary, path)
        files.fsync_directory(data_dir)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        _log.warning("the file place is not written", why=str(error))


def begin_history(data: DataDir, why: str) -> History:
    """Write metadata that goes on in a new history; the logs go ahead when they are opened.

    Can be repeated after a crash.  Raises Damage for metadata that cannot be read, StorageFailed.
    """
    path = data.path / METADATA / "metadata.log"
    with LocalLog(path.parent, create=False) as log:
        state = log.state.copy()
    try:
        first = data.skip_incarnations(INCARNATIONS_AHEAD) + 1
        history = History(uuid.uuid4().hex, wall_us(), first * LOG_EPOCHS, why)
        files.replace_durably(path, log_file.new_file(1, recovered(state, history).snapshot()))
    except OSError as error:
        raise StorageFailed(f"{path} cannot be written", why=str(error)) from error
    return history


def settle_place(data: DataDir) -> History | None:
    """Return the history that begins because the directory is a copy, or None; at a start, under the lock."""
    history = None
    if copied(data.path) and (data.path / METADATA / "metadata.log").exists():
        history = begin_history(data, "the data directory was put back from a copy")
        _log.warning(
            "this data directory is a copy: offsets go on far ahead, so that none is given twice",
            history=history.history_id,
        )
    note_place(data.path)
    return history


def _seal(fd: int) -> bytes:
    """``<inode> <made, nanoseconds>``: the second alone counts where both times are known."""
    return b"%d %d\n" % (files.inode_of(fd), files.born_ns_of(fd))


def _same(said: bytes, found: bytes) -> bool:
    """Whether a file is still the one that it was; one that a power cut has emptied says nothing."""
    before, after = said.split(), found.split()
    if len(before) != len(after):
        return not said.strip(b"\0")
    if b"0" in (before[1], after[1]):
        return before[0] == after[0]
    return before[1] == after[1]
