"""Unbroken time of a broker, in the file ``host``: since when no unsynced write can have been lost.

Unsynced bytes survive the end of every process, as long as their kernel and mount live.  So the file states
where the broker ran: the boot, the file system, the mount and the file itself, which a copy does not have.
If a later start finds another place and no orderly stop, a power cut or another fault may have removed
records from the ends of logs.  Consumers may have seen their offsets, so these must not be given again: a
partition whose files are all older than that start continues behind them
(:class:`danube.wal.segments.local_holes.OffsetJump`).

    {"place": ..., "since": first incarnation of the place, "since_us": ..., "clean": stopped in order}

The file has a fixed size and is overwritten in place, so that it needs no room on a full disk.  A missing or
unreadable file proves nothing; only the first start of a directory needs none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from danube.errors import StorageFailed
from danube.host import files, telemetry
from danube.host.clock import wall_us

FILE_NAME: Final = "host"
FILE_BYTES: Final = 512
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_log = telemetry.events("unbroken")


class Since(NamedTuple):
    """Everything from this incarnation, or this moment, on was written where the broker runs now; 0: all."""

    incarnation: int = 0
    moment_us: int = 0


ALWAYS: Final = Since()


class Host(msgspec.Struct, frozen=True):
    """The content of the file."""

    place: str
    since: int = 0
    since_us: int = 0
    clean: bool = False


def begin(data_dir: Path, incarnation: int) -> Since:
    """A broker starts, and ``incarnation`` is its first number; StorageFailed if nothing can be noted."""
    try:
        return _begin(data_dir / FILE_NAME, incarnation)
    except OSError as error:
        where = data_dir / FILE_NAME
        raise StorageFailed(f"{where} cannot be written", why=str(error), hint="look at the disk") from error


def _begin(path: Path, incarnation: int) -> Since:
    known, there = _read(path), True
    if known is None:  # the former place is unknown, unless this is the first start
        known, there = Host("", clean=incarnation <= 1), _make(path)
    place = place_of(path)
    since = Since(known.since, known.since_us)
    if not known.clean and (not place or known.place != place):
        since = Since(incarnation, wall_us())
        _log.warning(
            "the last stop was not in order, and what was not synced then may be lost: offsets are left out",
            file=str(path),
        )
    if there:
        files.overwrite(path, _encoded(Host(place, *since)))
    return since


def end(data_dir: Path) -> None:
    """Sync all writes and record an orderly stop; called when all processes of the broker have ended."""
    path = data_dir / FILE_NAME
    known = _read(path)
    if known is None:
        return
    try:
        files.sync_file_system_of(data_dir)
        files.overwrite(path, _encoded(msgspec.structs.replace(known, clean=True)))
    except OSError as error:
        _log.warning("the stop is not noted: the next start may leave offsets out", why=str(error))


def _read(path: Path) -> Host | None:
    """Return the file's content; None without a file, and no place for one that cannot be read."""
    try:
        data = files.read_bounded(path, FILE_BYTES)
        return msgspec.json.decode(data, type=Host)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError):
        return Host("")


def _make(path: Path) -> bool:
    """Make the file, which its place will name; False if the disk is full: a start needs no room."""
    try:
        files.replace_durably(path, _encoded(Host("")))
    except OSError as error:
        if error.errno not in files.FULL_ERRNOS:
            raise
        _log.warning("the disk is full: nothing is noted of where the broker runs", file=str(path))
        return False
    return True


def _encoded(host: Host) -> bytes:
    return msgspec.json.encode(host).ljust(FILE_BYTES - 1) + b"\n"


def place_of(path: Path) -> str:
    """Return the identity of a file: boot, mount, device and inode; empty if it cannot be read."""
    try:
        status = path.stat()
        boot = _BOOT_ID.read_text("ascii").strip()
    except OSError:
        return ""
    mount = files.mount_of(path)
    return f"{boot} {mount} {status.st_dev} {status.st_ino}" if mount else ""
