"""Files of the supervisor in the data directory.

    danube.lock   held with flock by the supervisor and, inherited, by its workers: one broker at a time.
                  Contains the supervisor's pid and what tells it from others that had this pid
    format        version of everything below; a newer one is refused before anything is touched
    incarnation   the last number given to a worker's start, with a checksum.  It is also the epoch of
                  the partitions that the worker opens, so it only grows, for ever, and is on disk
                  before the worker runs
    place         when the file itself was made, so that a copy of the directory is recognised (copied.py)
    host          the machine that the broker runs on, and whether it stopped in order (unbroken.py)
    danube.pid    the supervisor's pid
    reserve-N     room that worker N keeps for a full disk (host/disk_reserve.py); reserve-mover: the mover,
                  reserve-supervisor: becomes danube.json
    danube.json   BrokerState: addresses and pids, for `danube stop` and `danube status`

The lock alone decides whether a broker runs; danube.pid and danube.json are conveniences.  A start on
a full disk takes no room: the numbers are overwritten in place, and the pid may be missing.

Broker id: the number by which clients and dashboards know this broker.
"""

from __future__ import annotations

import fcntl
import os
import selectors
import socket
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from danube.broker.processes.directories import highest_incarnation, proof_of_use
from danube.broker.processes.process import identity_of
from danube.cluster.log.node_files import NODE_FILE, load_node
from danube.core.batch.checksum import crc32c, key_hash
from danube.core.placement.recovered import INCARNATIONS_AHEAD
from danube.errors import AlreadyRunning, Damage, LimitExceeded, StorageFailed, StorageIncompatible
from danube.host import files, telemetry
from danube.host.clock import monotonic_ns
from danube.host.disk_reserve import Reserve

FORMAT: Final = 1
LOCK_NAME: Final = "danube.lock"
FORMAT_NAME: Final = "format"
INCARNATION_NAME: Final = "incarnation"
PID_NAME: Final = "danube.pid"
STATE_NAME: Final = "danube.json"

RESERVE_NAME: Final = "reserve-supervisor"

_FORMAT_DIGITS_MAX: Final = 9
_log: Final = telemetry.events("broker.data_dir")
_ORPHANS_WAIT_NS: Final = 5_000_000_000
_EPOCHS_END: Final = 1 << 24  # a log has 256 epochs for each, and 32 bits


class WorkerState(msgspec.Struct, frozen=True):
    worker: int
    pid: int  # 0: not running at the moment
    incarnation: int


class BrokerState(msgspec.Struct, frozen=True):
    """A running broker, as told by danube.json."""

    pid: int
    ready: bool
    addresses: dict[str, str]  # "native" -> "127.0.0.1:6660"
    workers: list[WorkerState]
    region: str  # path for Region.attach: counters of the running broker
    started_at_us: int
    controller: str = ""  # its abstract socket without the leading zero byte; "" on a single host
    identity: str = ""  # process.identity_of(pid); empty from a version that did not tell
    warnings: tuple[str, ...] = ()  # of the banner
    reloads: bool = False  # SIGHUP makes it load certificates and keys again; otherwise that stops it


class DataDir:
    """An opened and locked data directory."""

    def __init__(self, path: Path) -> None:
        """Create (mode 0700) and lock ``path``.

        Raises AlreadyRunning, StorageIncompatible (newer format) or StorageFailed; then nothing was changed.
        """
        self.path = path
        try:
            files.make_directory(path)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._lock = os.open(path / LOCK_NAME, flags, 0o600)
        except OSError as error:
            raise _failed(f"data directory {path} cannot be used", error) from error
        try:
            self._take_lock()
            self._check_format()
        except BaseException:
            os.close(self._lock)
            raise
        self._reserve = Reserve()
        self._reserve.keep(path / RESERVE_NAME)
        holder = f"{os.getpid()} {identity_of(os.getpid())}\n".encode()
        with suppress(OSError):  # a full disk: it is for people, the lock is held
            os.pwrite(self._lock, holder.ljust(os.fstat(self._lock).st_size), 0)

    def check_there(self) -> None:
        """StorageFailed if the lock was deleted or replaced: another broker could use the directory."""
        try:
            files.check_there(self._lock, self.path / LOCK_NAME)
        except OSError as error:
            raise StorageFailed(
                f"{self.path} was deleted or replaced under the running broker",
                why=str(error),
                hint="its content is lost; start the broker again on the directory that it is to use",
            ) from error

    def _take_lock(self) -> None:
        """Orphaned workers of a killed supervisor hold the lock until the kernel has ended them: wait."""
        deadline = monotonic_ns() + _ORPHANS_WAIT_NS
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                number, _, identity = os.pread(self._lock, 128, 0).decode("ascii", "replace").partition(" ")
                holder = int(number) if number.isdecimal() and identity.strip() else 0
                if holder and identity_of(holder) != identity.strip():
                    holder = 0  # it has ended, or the pid is one of another namespace
                if holder or monotonic_ns() > deadline:
                    raise AlreadyRunning(
                        f"a broker is running on {self.path}" + (f" (pid {holder})" if holder else ""),
                        why="a data directory belongs to one broker at a time",
                        hint="stop it with `danube stop`, or give this one another --data-dir",
                        pid=holder,
                    ) from None
            with selectors.DefaultSelector() as pause:
                pause.select(0.02)

    def _check_format(self) -> None:
        """Write the format of a new directory; refuse a newer format and an invalid one."""
        path = self.path / FORMAT_NAME
        try:
            text = path.read_text("ascii").strip()
        except FileNotFoundError:
            self._begin()
            return
        except (OSError, UnicodeDecodeError) as error:
            raise _damaged_format(path, str(error)) from error
        if not text.isdecimal() or len(text) > _FORMAT_DIGITS_MAX:
            raise _damaged_format(path, f"it says {text[:20]!r}, which is no format")
        if int(text) > FORMAT:
            raise StorageIncompatible(
                f"data in {self.path} has format {text[:20]!r}",
                why=f"this version of Danube knows formats up to {FORMAT}",
                hint="start it with the version that wrote it; nothing was changed",
            )

    def _begin(self) -> None:
        """Write the files of a directory that has no format; there was only one so far."""
        if (proof := proof_of_use(self.path)) is not None:
            facts = {"file": str(self.path / FORMAT_NAME), "proof": str(proof)}
            _log.warning("a file is missing and is written anew", **facts)
        if not (self.path / INCARNATION_NAME).exists():
            self._store_incarnation(0)
        self._replace(FORMAT_NAME, f"{FORMAT}\n".encode())

    def next_incarnations(self, count: int) -> int:
        """Draw ``count`` fresh numbers and return the first; they are on disk before this returns.

        Raises Damage when the stored number is not readable, StorageFailed when it cannot be stored and
        LimitExceeded when none is left.
        """
        first = self._stored_incarnation() + 1
        if first + count > _EPOCHS_END:
            raise LimitExceeded(
                f"workers were started {first - 1} times on {self.path}, and it has no number for one more",
                why=f"a log has 32 bits for its epoch, 256 times that number: the end is {_EPOCHS_END}",
                hint="replay the object store to a broker with a new data directory: danube spark replay",
                limit=_EPOCHS_END,
            )
        self._store_incarnation(first + count - 1)
        return first

    def advance_incarnation(self, least: int) -> None:
        """From now on all numbers drawn are above ``least``: epochs up to its own are in use elsewhere."""
        if self._stored_incarnation() < least:
            self._store_incarnation(least)

    def skip_incarnations(self, count: int) -> int:
        """Skip ``count`` numbers that may be in use, or the remaining ones; return the last one."""
        last = self._stored_incarnation()
        skipped = last + min(count, max(0, _EPOCHS_END - last - 1) // 2)
        self._store_incarnation(skipped)
        return skipped

    def _stored_incarnation(self) -> int:
        path = self.path / INCARNATION_NAME
        try:
            number, checksum = path.read_text("ascii").split()
            if crc32c(number.encode()) == int(checksum, 16):
                return int(number)
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            raise _damaged_incarnation(path, str(error)) from error
        raise _damaged_incarnation(path, "its checksum differs" if path.exists() else "it is missing")

    def _store_incarnation(self, number: int) -> None:
        self._replace(INCARNATION_NAME, _incarnation_line(number).encode())

    def _replace(self, name: str, content: bytes) -> None:
        try:
            files.replace_or_overwrite(self.path / name, content)
        except OSError as error:
            raise _failed(f"{self.path / name} cannot be written", error) from error

    def write_pid(self) -> None:
        """Write the pid for scripts; Danube itself uses the lock.  A full disk may not take the file."""
        self._replace(PID_NAME, f"{os.getpid()}\n".encode())

    def write_state(self, state: BrokerState) -> None:
        """Write the state for `danube status`."""
        path, content = self.path / STATE_NAME, msgspec.json.encode(state) + b"\n"
        try:
            self._reserve.replace_durably(path, content)
        except OSError as error:
            if error.errno not in files.FULL_ERRNOS or not path.is_file():
                raise _failed(f"{path} cannot be written", error) from error
            files.overwrite(path, content)
        self._reserve.fill()

    def close(self) -> None:
        """Stop cleanly: remove the files of the running broker and unlock."""
        for name in (STATE_NAME, PID_NAME):
            (self.path / name).unlink(missing_ok=True)
        os.close(self._lock)


def _failed(what: str, error: OSError) -> StorageFailed:
    why = os.strerror(error.errno or 0)
    return StorageFailed(what, why=why, hint="check the path, its owner and the disk")


def _incarnation_line(number: int) -> str:
    return f"{number} {crc32c(str(number).encode()):08x}\n"


def _damaged_incarnation(path: Path, why: str) -> Damage:
    line = _incarnation_line(highest_incarnation(path.parent) + INCARNATIONS_AHEAD).strip()
    why = f"{why}; a number used before would let two epochs look alike"
    return _damaged(path, why, f"go far ahead of all that was stored: echo '{line}' > {path}")


def _damaged_format(path: Path, why: str) -> Damage:
    return _damaged(path, why, f"where this version wrote the data: echo {FORMAT} > {path}")


def _damaged(path: Path, why: str, otherwise: str) -> Damage:
    hint, what = f"restore it from a backup, or {otherwise}", f"{path} is damaged at byte 0"
    return Damage(what, why=why, hint=hint, file=str(path), position=0)


def broker_id(data_dir: Path, *, clustered: bool) -> int:
    """Return the broker's id, 1 .. 2**63 - 1, which no restart changes.

    In a cluster it is the id of the node, and 0 until the node has one.
    """
    if clustered:
        return int(load_node(data_dir).node_id) if (data_dir / NODE_FILE).exists() else 0
    place = f"{socket.gethostname()}:{data_dir}".encode()
    return (key_hash(place) >> 1) or 1
