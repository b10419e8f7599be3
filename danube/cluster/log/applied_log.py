"""The machine of one member, and ``metadata.log``, the copy of it that the host's workers read.

Order:     an entry is applied here, then written to the file, then visible by the file's mark.
Durable:   not by itself.  The engine's journal is; what a power cut leaves of this file is read as far
           as it is whole, and made anew from the journal where it is not.
Forward:   a reader never sees it go back.  What has to be rebuilt becomes visible when it has caught up.
Growth:    a snapshot of the engine's is the beginning of the next file, too, with what was applied since.
Restart:   it goes on after the last entry that the file holds, whose index is in the machine (Agreed).

Each Agreed of an entry gets the entry's index and term here, because they are certain only now.
"""

from __future__ import annotations

import fcntl
import gc
import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from danube.cluster.log import log_file
from danube.core.cluster.commands import Agreed
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
from danube.errors import AlreadyRunning, CallerError, Damage, StorageFailed, StorageFull, broken
from danube.host import telemetry
from danube.limits import MIB

ORIGINS_REMEMBERED_MAX: Final = 256
REMEMBERED_BYTES_MAX: Final = 32 * MIB

_log = telemetry.events("cluster.applied")
_raw_list: Final = msgspec.msgpack.Decoder(list[msgspec.Raw])


class Stored(NamedTuple):
    """An applied command and its outcome."""

    command: Command
    size_bytes: int
    outcome: Outcome


class Remembered(NamedTuple):
    """The last proposal of an origin that was stored."""

    sequence: int
    commands: list[Stored]

    @property
    def size_bytes(self) -> int:
        return sum(one.size_bytes for one in self.commands)


class AppliedLog:
    """The engine's Machine over the files in ``directory``; one object and one process at a time.

    ``applied`` is called after each entry.  Raises AlreadyRunning, StorageFailed.
    """

    def __init__(self, directory: Path, applied: Callable[[], None] = lambda: None) -> None:
        self._directory = str(directory)
        self._path = os.path.join(self._directory, "metadata.log")
        self._applied = applied
        self._state = Metadata()
        self._descriptor = self._lock_descriptor = -1
        self._generation = self._position = 0
        self._restored_index = 0
        self._since: list[bytes] | None = None  # entries of the file since the last freeze
        self._remembered: OrderedDict[str, Remembered] = OrderedDict()
        self._remembered_bytes = 0
        self.visible = False  # whether the file equals the machine
        self.damaged = False  # whether there was a file that could not be read
        self.changed: Callable[[list[Change]], None] | None = None  # gets the changes of each command
        try:
            with log_file.storage_errors(self._path):
                self._open()
        except BaseException:
            self.close()
            raise

    @property
    def state(self) -> Metadata:
        """The machine; not to be kept, and never changed outside."""
        return self._state

    @property
    def version(self) -> int:
        return self._state.version

    @property
    def applied_index(self) -> int:
        """Index of the last entry that is part of the state, see Machine."""
        return max(self._restored_index, self._state.cluster.agreement.index)

    def close(self) -> None:
        for descriptor in (self._descriptor, self._lock_descriptor):
            if descriptor >= 0:
                os.close(descriptor)
        self._descriptor = self._lock_descriptor = -1

    # Machine

    def apply(self, index: int, term: int, entry: bytes) -> list[Outcome]:
        """Take one committed entry, see Machine; the outcomes of its commands without the Agreed."""
        if index <= self.applied_index:
            broken("an entry is applied again", index=index, applied_index=self.applied_index)
        encoded, commands = stamped(index, term, entry)
        first_version = self._state.version + 1
        try:
            outcomes = self._apply_commands(encoded, commands)
        except CallerError as error:
            raise Damage(f"entry {index} cannot be applied", why=str(error)) from error
        self._restored_index = index
        if self.visible:
            with log_file.storage_errors(self._path):
                self._append(first_version, join_commands(encoded))
        self._applied()
        return outcomes

    def freeze(self) -> Callable[[], bytes]:
        """The whole machine as it is now, see Machine."""
        self._since = [] if self.visible else None
        return self._state.copy().snapshot

    def stored(self, snapshot: bytes) -> None:
        """Begin the next file with the result of ``freeze``, see Machine."""
        since, self._since = self._since, None
        if since is None:
            return
        try:
            self._replace(snapshot, since)
        except (StorageFull, StorageFailed) as error:
            # Everything is in the file at hand; the next snapshot tries again.
            _log.warning("metadata copy cannot be compacted", why=str(error))

    def thaw(self, snapshot: bytes) -> Metadata:
        """The machine that a snapshot holds, see Machine."""
        collecting = gc.isenabled()
        gc.disable()  # it would look at all that was made so far, again and again, and hold up every thread
        try:
            return Metadata.restore(snapshot)
        finally:
            if collecting:
                gc.enable()

    def restore(self, index: int, snapshot: bytes, thawed: object) -> None:
        """Become the state of ``snapshot``, see Machine."""
        state = thawed if isinstance(thawed, Metadata) else self.thaw(snapshot)
        if state.version < self._state.version:
            broken("a snapshot leads back", index=index, version=state.version, here=self._state.version)
        changed = state.version != self._state.version
        self._state = state
        self._restored_index = index
        self._remembered.clear()
        self._remembered_bytes = 0
        self._since = None
        if changed and self.visible:
            self._replace(snapshot, [])
        self._applied()

    # Outcomes of repeated proposals

    def remembered(self, origin: str, sequence: int) -> list[Stored] | None:
        """Return the stored commands of this proposal; None if they are not known here (any more)."""
        found = self._remembered.get(origin)
        return found.commands if found is not None and found.sequence == sequence else None

    def _remember(self, origin: str, sequence: int, commands: list[Stored]) -> None:
        """Keep a bounded number of origins and bytes, the newest."""
        remembered = self._remembered
        if origin in remembered:
            self._remembered_bytes -= remembered.pop(origin).size_bytes
        remembered[origin] = Remembered(sequence, commands)
        self._remembered_bytes += remembered[origin].size_bytes
        while len(remembered) > ORIGINS_REMEMBERED_MAX or (
            self._remembered_bytes > REMEMBERED_BYTES_MAX and len(remembered) > 1
        ):
            self._remembered_bytes -= remembered.popitem(last=False)[1].size_bytes

    def _apply_commands(self, encoded: list[bytes], commands: list[Command]) -> list[Outcome]:
        """The commands of one entry; their outcomes, which are remembered, but of the Agreed."""
        outcomes: list[Outcome] = []
        stored: list[Stored] = []
        by_origin: dict[str, tuple[int, list[Stored]]] = {}
        state = self._state
        for one, command in zip(encoded, commands, strict=True):
            changes = state.apply(state.version + 1, command)
            if self.changed is not None:
                self.changed(changes)
            if isinstance(command, Agreed):
                stored = []
                if command.origin:
                    by_origin[command.origin] = (command.sequence, stored)
                continue
            outcome = outcome_of(state, command, changes)
            outcomes.append(outcome)
            stored.append(Stored(command, len(one), outcome))
        for origin, (sequence, remembered) in by_origin.items():
            self._remember(origin, sequence, remembered)
        return outcomes

    # File

    def publish(self) -> None:
        """Replace the file by one that holds the machine as it is now; from then on it follows."""
        self._replace(self._state.snapshot(), [])
        self.visible = True

    def _replace(self, snapshot: bytes, entries: list[bytes]) -> None:
        """The next file: a snapshot and packed entries behind it."""
        generation = self._generation + 1
        content = log_file.new_file(generation, snapshot) + b"".join(entries)
        with log_file.storage_errors(self._path):
            descriptor = log_file.replaced(self._path, content, synced=False)
        former, self._descriptor = self._descriptor, descriptor
        if former >= 0:
            os.close(former)
        self._generation, self._position = generation, len(content)

    def _append(self, first_version: int, content: bytes) -> None:
        entry = log_file.pack_entry(first_version, content)
        log_file.write_all(self._descriptor, entry, self._position)
        self._position += len(entry)
        log_file.write_mark(self._descriptor, self._position)
        if self._since is not None:
            self._since.append(entry)

    def _open(self) -> None:
        os.makedirs(self._directory, 0o700, exist_ok=True)
        self._lock_descriptor = log_file.open_lock(self._directory)
        try:
            fcntl.flock(self._lock_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AlreadyRunning("another controller runs on this data directory") from None
        if not os.path.lexists(self._path):
            return
        try:
            self._load()
            self.visible = True
        except Damage as error:
            # It is a copy: it stays as it is until the journal has made a newer one.
            _log.warning("metadata copy is made anew from the journal", why=str(error))
            self.damaged = True
            self._state = Metadata()
            self._restored_index = 0

    def _load(self) -> None:
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        head = log_file.read_head(self._descriptor, self._path)
        self._generation = head.generation
        self._state = Metadata.restore(head.snapshot)
        committed_end = log_file.read_mark(self._descriptor, self._path)
        content = log_file.read_all(self._descriptor, head.entries_start, committed_end, self._path)
        for entry in log_file.committed_entries(content, head.entries_start, self._path):
            try:
                self._apply_commands(*_decoded(entry.content))
            except CallerError as error:
                raise log_file.damage(self._path, entry.end, str(error)) from error
        self._generation, self._position = head.generation, committed_end
        os.ftruncate(self._descriptor, committed_end)  # entries that a dead controller had not marked


def stamped(index: int, term: int, entry: bytes) -> tuple[list[bytes], list[Command]]:
    """The commands of an entry, each Agreed with the index and term that the entry has come to."""
    encoded, commands = _decoded(entry)
    for place, command in enumerate(commands):
        if isinstance(command, Agreed):
            stamped = msgspec.structs.replace(command, index=index, term=term)
            encoded[place], commands[place] = encode_command(stamped), stamped
    return encoded, commands


def _decoded(content: bytes) -> tuple[list[bytes], list[Command]]:
    """The commands of an entry, as bytes and as values."""
    commands: list[Command] = list(decode_commands(content))
    return [bytes(raw) for raw in _raw_list.decode(content)], commands
