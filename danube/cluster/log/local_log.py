"""Metadata of one host: a durable log in one directory, shared by all worker processes.

Writers:  any process, one at a time: ``propose`` takes an exclusive flock, reads what others appended,
          checks the command, appends, syncs, marks it committed, and only then answers.
Readers:  all processes, without the lock, up to the mark.  ``refresh`` reads one word of shared memory when
          nothing is new (see danube.cluster.log.local_log).
Full:     a failed write is cut off again and raised; nothing of it is applied or visible.  Room for some
          more entries is reserved behind the last, so a topic can be deleted on a full disk.
Crash:    the lock goes with its holder.  What a dead writer left behind the mark is taken over by the
          next one where it is whole (its sync may have happened) and cut where it is not.  Damage below
          the mark is an error that names the position, and nothing is touched.
Growth:   a log that has outgrown its snapshot is written anew under another name and renamed into place.
          A reader that holds the old file sees that its last link is gone, and changes over.

Files: ``metadata.log`` (see danube.cluster.log.log_file), ``metadata.lock`` (a number, never replaced) and,
during a compaction, ``metadata.new``.  An object belongs to the process that made it, and to one
thread at a time; one that an exception interrupted while it stored something is closed.

Lock count: a number that shows readers without the lock whether the lock was held since.

The number is the first eight bytes of the lock file, mapped by all, in the host's order: odd while the lock
is held, another even number afterwards.  A holder that dies leaves an odd one; then every reader reads the
file until the next holder is done.  The number is written by system calls, so that a full disk is an error
and no signal.

``accepted`` selects the commands of the next entry; every log calls it before it stores anything.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import sleep
from typing import Final, NamedTuple

from danube.cluster.log import log_file
from danube.cluster.log.log_file import ENTRY_BYTES_MAX
from danube.core.metadata.commands import (
    Change,
    Command,
    Outcome,
    decode_commands,
    encode_command,
    join_commands,
)
from danube.core.metadata.machine import Metadata
from danube.core.metadata.outcomes import outcome_of
from danube.core.metadata.ports import Consensus
from danube.core.metadata.snapshot import version_of
from danube.errors import (
    CallerError,
    ClosedError,
    Damage,
    DanubeError,
    LimitExceeded,
    NotFound,
    OperationTimeout,
    Overloaded,
    StorageFailed,
    StorageFull,
    StorageIncompatible,
    broken,
)
from danube.host import files
from danube.host.clock import monotonic_ns
from danube.limits import KIB, METADATA_COMMANDS_PER_ENTRY_MAX, MIB, TOPICS_MAX

_LIST_BYTES: Final = 5  # size of a MessagePack list besides its elements


class Accepted(NamedTuple):
    """A command on its way into an entry, and the place of its result."""

    place: int
    command: Command
    encoded: bytes


def accept(
    state: Metadata, commands: Sequence[Command], start: int, results: list[Outcome], entry_bytes_max: int
) -> tuple[list[Accepted], int]:
    """The commands of one entry that would change something, and the place after the last one looked at.

    The results of all others are filled in.  ``state`` is not changed.
    """
    end = min(start + METADATA_COMMANDS_PER_ENTRY_MAX, len(commands))
    # Later commands may depend on earlier ones that are not stored yet, so a copy runs ahead.
    ahead = state if end - start == 1 else state.copy()
    accepted: list[Accepted] = []
    free_bytes = entry_bytes_max - _LIST_BYTES
    for place in range(start, end):
        command = commands[place]
        try:
            if not ahead.check(command):
                results[place] = outcome_of(ahead, command, [])
                continue
            encoded = encode_command(command)
            _check_size(encoded, entry_bytes_max)
        except CallerError as error:
            results[place] = error
            continue
        if len(encoded) > free_bytes:
            return accepted, place
        if ahead is not state:
            ahead.apply(ahead.version + 1, command)
        free_bytes -= len(encoded)
        accepted.append(Accepted(place, command, encoded))
    return accepted, end


def _check_size(encoded: bytes, entry_bytes_max: int) -> None:
    if len(encoded) > entry_bytes_max - _LIST_BYTES:
        why = f"it has {len(encoded)} bytes, and an entry of this log {entry_bytes_max} at most"
        raise LimitExceeded("metadata command is too large", why=why, limit=entry_bytes_max)


_BYTES: Final = 8
_END: Final = 1 << 64


class LockCount:
    """The number in the lock file at ``descriptor``, which belongs to the caller; raises OSError."""

    def __init__(self, descriptor: int) -> None:
        if os.fstat(descriptor).st_size < _BYTES:
            os.ftruncate(descriptor, _BYTES)  # another process that does the same changes nothing
        self._descriptor = descriptor
        self._memory = mmap.mmap(descriptor, _BYTES, mmap.MAP_SHARED, mmap.PROT_READ)
        self.words = memoryview(self._memory).cast("Q")

    def close(self) -> None:
        """Unmap it."""
        self.words.release()
        self._memory.close()

    @property
    def number(self) -> int:
        """Return the current number; a read under an even number is valid as long as the number stays."""
        return self.words[0]

    def begin(self) -> None:
        """The caller holds the lock and has changed nothing yet."""
        number = self.words[0]
        self._write(number + 2 if number & 1 else number + 1)

    def end(self) -> None:
        """End the change; the caller still holds the lock."""
        with suppress(OSError):  # it stays odd
            self._write(self.words[0] + 1)

    def _write(self, number: int) -> None:
        os.pwrite(self._descriptor, (number % _END).to_bytes(_BYTES, sys.byteorder), 0)


COMPACT_BYTES_MIN: Final = 4 * MIB
COMPACT_RATIO: Final = 4
RESERVE_BYTES: Final = 64 * KIB
LOCK_TIMEOUT_S: Final = 10.0
_LOCK_POLL_S: Final = 0.001
_CHANGES_WAITING_MAX: Final = 2 * TOPICS_MAX


class LocalLog(Consensus):
    """The Consensus port over files in ``directory``, which is made (0700) where it is missing.

    With ``create`` False a missing log is NotFound; use it where losing the log would be noticed too
    late.  Raises Damage, StorageIncompatible, StorageFailed.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        create: bool = True,
        lock_timeout_s: float = LOCK_TIMEOUT_S,
        compact_bytes_min: int = COMPACT_BYTES_MIN,
    ) -> None:
        self._directory = str(directory)
        self._path = os.path.join(self._directory, "metadata.log")
        self._lock_timeout_s = lock_timeout_s
        self._compact_bytes_min = compact_bytes_min
        self._process_id = os.getpid()
        self._state = Metadata()
        self._changes: list[Change] = []
        self._descriptor = self._lock_descriptor = -1
        self._locks: LockCount | None = None
        self._looked_at = 1  # the lock count when this object last read the entries of others
        self._generation = self._entries_start = self._position = 0
        self._directory_synced = False  # since the file that is open here got its name
        self._descriptor_failed = False  # a sync failed on it; it is never synced again
        self._compact_after = 0
        self._reserved_end = 0
        self.compaction_count = self.compaction_failure_count = 0
        try:
            self._open(create)
        except BaseException:
            self.close()
            raise

    @property
    def state(self) -> Metadata:
        """The machine as of the last propose or refresh; not to be kept, and never changed outside."""
        return self._state

    @property
    def version(self) -> int:
        return self._state.version

    def close(self) -> None:
        """Close the files; answered commands are on disk already.  May be called twice."""
        if self._locks is not None:
            self._locks.close()
            self._locks = None
        for descriptor in (self._descriptor, self._lock_descriptor):
            if descriptor >= 0:
                os.close(descriptor)
        self._descriptor = self._lock_descriptor = -1

    def __enter__(self) -> LocalLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Propose

    def propose_many(self, commands: Sequence[Command]) -> list[Outcome]:
        """Like propose for each in turn, with one sync for as many of them as one entry holds.

        Where a command is refused, or its entry could not be stored, the error stands in its place.
        """
        if len(self._changes) > _CHANGES_WAITING_MAX:
            raise Overloaded("too many metadata changes wait to be taken", hint="call refresh")
        results: list[Outcome] = [None] * len(commands)
        with log_file.storage_errors(self._path), self._locked():
            self._catch_up()
            self._mend_tail()
            start = 0
            while start < len(commands):
                start = self._propose_entry(commands, start, results)
            self._compact_if_grown()
        return results

    def _propose_entry(self, commands: Sequence[Command], start: int, results: list[Outcome]) -> int:
        """Check, store and apply the commands from ``start`` on that make up one entry; return their end."""
        accepted, end = accept(self._state, commands, start, results, ENTRY_BYTES_MAX)
        if not accepted:
            return end
        completed = False
        try:
            error = self._append_or_forget(join_commands([entry.encoded for entry in accepted]))
            if error is None:
                for entry in accepted:
                    results[entry.place] = self._apply(entry.command)
            else:
                for place in range(start, end):
                    if not isinstance(results[place], DanubeError):
                        results[place] = error
            completed = True
        finally:
            # Interrupted between storing and applying, this object no longer knows where it is.
            if not completed:
                self.close()
        return end

    def _append_or_forget(self, content: bytes) -> StorageFull | StorageFailed | None:
        try:
            self._append(content)
        except OSError as error:
            self._forget_append()
            return log_file.storage_error(error, self._path)
        return None

    def _append(self, content: bytes) -> None:
        """Store one entry and commit it; raises OSError."""
        if self._descriptor_failed:
            self._reopen()
        if not self._directory_synced:
            self._sync_directory()
        entry = log_file.pack_entry(self._state.version + 1, content)
        # A sync that failed earlier, here or elsewhere, may have dropped the page with the mark.
        log_file.write_mark(self._descriptor, self._position)
        log_file.write_all(self._descriptor, entry, self._position)
        self._sync()
        log_file.write_mark(self._descriptor, self._position + len(entry))
        self._position += len(entry)
        self._reserve_room(RESERVE_BYTES // 2)

    def _forget_append(self) -> None:
        """Cut the remains of a failed append.  If that fails, the next holder of the lock does it."""
        try:
            if self._descriptor_failed:
                self._reopen()
            os.ftruncate(self._descriptor, self._position)
        except OSError:
            self._descriptor_failed = True
        self._reserved_end = 0
        self._reserve_room(RESERVE_BYTES)

    def _reserve_room(self, least: int) -> None:
        """Have blocks for ``least`` bytes more, where the disk has room and the file system can reserve."""
        if self._reserved_end < self._position + least:
            with suppress(OSError):
                files.reserve_behind(self._descriptor, self._position, RESERVE_BYTES)
                self._reserved_end = self._position + RESERVE_BYTES

    def _sync(self) -> None:
        try:
            os.fdatasync(self._descriptor)
            files.check_there(self._descriptor, Path(self._path))
        except OSError:
            self._descriptor_failed = True
            raise

    def _apply(self, command: Command) -> Outcome:
        changes = self._state.apply(self._state.version + 1, command)
        self._changes.extend(changes)
        return outcome_of(self._state, command, changes)

    # Refresh

    @property
    def changed(self) -> bool:
        """Whether refresh() may find something; without changes of this object, whether the lock was held."""
        locks, looked_at = self._locks, self._looked_at
        if locks is None or self._changes:
            return True
        return locks.words[0] != looked_at or looked_at & 1 != 0

    def refresh(self) -> list[Change]:
        """Apply commands that any process committed; return all changes since the last refresh.

        Each change comes once, in order, own ones too.  Cheap (no system call) when there is none.
        """
        if self.changed:
            number = 1 if self._locks is None else self._locks.number
            self._look()
            self._looked_at = number
        if not self._changes:
            return []
        changes, self._changes = self._changes, []
        return changes

    def _look(self) -> None:
        """Apply newly committed commands; this costs one system call if there are none."""
        if self._descriptor < 0:
            raise ClosedError("the metadata log was closed")
        with log_file.storage_errors(self._path):
            status = os.fstat(self._descriptor)
            if status.st_size != self._position or not status.st_nlink:
                self._catch_up()

    def _catch_up(self) -> None:
        """Apply newly committed commands; change to a newer file as often as needed."""
        while True:
            committed_end = log_file.read_mark(self._descriptor, self._path)
            if committed_end != self._position:
                self._apply_committed(committed_end)
            if os.fstat(self._descriptor).st_nlink:
                return
            self._change_over()

    def _apply_committed(self, committed_end: int) -> None:
        if committed_end < self._position:
            broken("the metadata log went back", committed_end=committed_end, position=self._position)
        content = log_file.read_all(self._descriptor, self._position, committed_end, self._path)
        for entry in log_file.committed_entries(content, self._position, self._path):
            self._apply_entry(entry)

    def _apply_entry(self, entry: log_file.Entry) -> None:
        index = self._state.version + 1
        if entry.first_index != index:
            raise self._damage(f"command {entry.first_index} comes where {index} is due")
        try:
            for command in decode_commands(entry.content):
                self._changes += self._state.apply(index, command)
                index += 1
        except CallerError as error:
            raise self._damage(f"command {index} cannot be applied: {error}") from error
        self._position = entry.end

    def _change_over(self) -> None:
        """Open the file that has replaced the one at hand."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            head = log_file.read_head(descriptor, self._path)
            if self._descriptor < 0 or version_of(head.snapshot) > self._state.version:
                state, position = self._restored(head.snapshot), head.entries_start
            else:  # the state stays; only the position in the new file is needed
                state, position = self._state, self._place_in(descriptor, head)
        except BaseException:
            os.close(descriptor)
            raise
        if state is not self._state:
            self._changes += state.changes_since(self._state)
            self._state = state
        self._install(descriptor, head.generation, head.entries_start)
        self._position = position

    def _restored(self, snapshot: bytes) -> Metadata:
        """Return the machine of a file's snapshot; the error names the file, the position and the remedy."""
        try:
            return Metadata.restore(snapshot)
        except StorageIncompatible as error:
            raise StorageIncompatible(
                f"{self._path}: {error.what}", why=error.why, hint=error.hint or "start the newer version",
                file=self._path,
            ) from None  # fmt: skip
        except Damage as error:
            raise log_file.damage(self._path, log_file.SNAPSHOT_POSITION, str(error)) from None

    def _place_in(self, descriptor: int, head: log_file.FileHead) -> int:
        """Where the first command lies in another file that is not applied here yet."""
        committed_end = log_file.read_mark(descriptor, self._path)
        content = log_file.read_all(descriptor, head.entries_start, committed_end, self._path)
        version, position = version_of(head.snapshot), head.entries_start
        for entry in log_file.committed_entries(content, head.entries_start, self._path):
            if version >= self._state.version:
                break
            version += len(decode_commands(entry.content))
            position = entry.end
        if version != self._state.version:
            raise self._damage("the file was replaced by an older one")
        return position

    def _install(self, descriptor: int, generation: int, entries_start: int) -> None:
        former, self._descriptor = self._descriptor, descriptor
        self._generation = generation
        self._entries_start = self._position = entries_start
        self._directory_synced = self._descriptor_failed = False
        self._reserved_end = 0  # behind the blocks that this object has reserved
        self._compact_after = max(self._compact_bytes_min, COMPACT_RATIO * entries_start)
        if former >= 0:
            os.close(former)

    # Under the lock

    @contextmanager
    def _locked(self) -> Iterator[None]:
        if os.getpid() != self._process_id:
            broken("a metadata log is used by a process that did not open it", directory=self._directory)
        locks = self._locks
        if locks is None:
            raise ClosedError("the metadata log was closed")
        deadline_ns = monotonic_ns() + int(self._lock_timeout_s * 1e9)
        while True:
            try:
                fcntl.flock(self._lock_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if monotonic_ns() >= deadline_ns:
                    raise OperationTimeout(
                        "metadata is locked by another process",
                        why=f"it was not released within {self._lock_timeout_s} s",
                        hint="look for a stopped process of this broker",
                    ) from None
                sleep(_LOCK_POLL_S)
        try:
            locks.begin()
            yield
            locks.end()
        finally:
            if self._lock_descriptor >= 0:
                fcntl.flock(self._lock_descriptor, fcntl.LOCK_UN)

    def _mend_tail(self) -> None:
        """Keep or cut bytes behind the mark that a dead writer left."""
        size = os.fstat(self._descriptor).st_size
        if size < self._position:
            raise self._damage(f"the file is cut to {size} bytes")
        if size == self._position:
            return
        if self._descriptor_failed:
            self._reopen()
        read_end = min(size, self._position + 2 * (ENTRY_BYTES_MAX + 64))
        tail = log_file.read_all(self._descriptor, self._position, read_end, self._path)
        entries = log_file.tail_entries(tail, self._position, self._path)
        end = entries[-1].end if entries else self._position
        if end != size:
            os.ftruncate(self._descriptor, end)
            self._reserved_end = 0
        if entries:
            # Written again, because pages whose sync has failed count as clean without being on disk.
            log_file.write_mark(self._descriptor, self._position)
            log_file.write_all(self._descriptor, tail[: end - self._position], self._position)
            self._sync()
            log_file.write_mark(self._descriptor, end)
        for entry in entries:
            self._apply_entry(entry)

    def _reopen(self) -> None:
        """Go on with a fresh descriptor of the same file."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        former, self._descriptor = self._descriptor, descriptor
        self._descriptor_failed = False
        os.close(former)

    def _compact_if_grown(self) -> None:
        log_bytes = self._position - self._entries_start
        if log_bytes <= self._compact_after:
            return
        try:
            self._write_new(self._state, self._generation + 1)
            self.compaction_count += 1
        except OSError:
            # Everything is safe in the file at hand; try again when it has doubled.
            self.compaction_failure_count += 1
            self._compact_after = 2 * log_bytes

    def _write_new(self, state: Metadata, generation: int) -> None:
        """Replace the file by one that holds only a snapshot of ``state``; raises OSError."""
        content = log_file.new_file(generation, state.snapshot())
        descriptor = log_file.replaced(self._path, content, synced=True)
        self._install(descriptor, generation, len(content))
        self._sync_directory()

    def _sync_directory(self) -> None:
        """Make the name of the open file durable; no entry is stored in it before."""
        log_file.sync_directory(self._directory)
        self._directory_synced = True

    def _sync_parent(self) -> None:
        try:
            log_file.sync_directory(os.path.dirname(os.path.abspath(self._directory)))
        except PermissionError:
            # The directory was made, and made durable, by a process that may write there.
            pass

    # Open

    def _open(self, create: bool) -> None:
        with log_file.storage_errors(self._path):
            if create:
                os.makedirs(self._directory, 0o700, exist_ok=True)
                self._sync_parent()
            elif not os.path.exists(self._path):
                raise NotFound(f"there is no metadata log in {self._directory}")
            self._lock_descriptor = log_file.open_lock(self._directory)
            self._locks = LockCount(self._lock_descriptor)
            with self._locked():
                if create and not os.path.lexists(self._path):
                    self._write_new(Metadata(), 1)
                else:
                    self._change_over()
                self._catch_up()
                self._mend_tail()
                self._reserve_room(RESERVE_BYTES)
        self._changes.clear()

    def _damage(self, why: str) -> Damage:
        return log_file.damage(self._path, self._position, why)
