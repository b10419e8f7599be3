"""Journal of one member, an append-only file: its term and vote, its entries, a snapshot.

The file is one of danube.cluster.log.log_file without a snapshot of its own: header, mark, entries.  Each
entry is one step, a MessagePack list of records, and the "index" of the first is 1, of the next 2, ...

    record    fields                                                    where
    Identity  cluster_id, node_id                                       first in step 1
    Base      index, term, log_index, log_term, members, snapshot_size  second in step 1
    Part      content                                                   snapshot_size bytes, from step 2 on
    Promise   term, voted_for                                           anywhere after
    Put       first_index, entries; what was there from it on is cut    anywhere after

Order:   ``promise`` and ``put`` only note; ``sync`` writes all notes as one step, syncs it, and
         then moves the mark behind it.  Nothing that reflects a step may leave the member before.
Full:    any storage error is final: the journal is closed for good and never synced again.
Crash:   everything up to the mark must be whole, or it is Damage.  The mark itself is synced with the next
         step, so after a power cut one whole step may follow it, which counts; a torn one was never
         promised to anybody and is cut.  A step taken over from behind the mark is written and synced
         anew: a sync that failed may have left it in memory only.
Growth:  ``stage`` writes the next file, which starts with a snapshot, in any thread, and meanwhile this one
         goes on; ``complete`` adds what came since and renames it into place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple, TypeVar

import msgspec

from danube.cluster.log import log_file
from danube.cluster.raft.disk import Disk
from danube.cluster.raft.engine import Members
from danube.cluster.raft.entry import MEMBERS, Entry, members_of, size_of
from danube.errors import ClosedError, Damage, StorageIncompatible
from danube.limits import RAFT_ENTRY_BYTES_MAX, RAFT_SNAPSHOT_PART_BYTES

_HEADER_BYTES: Final = 40
_MARK_POSITION: Final = 24
_GENERATION: Final = 1  # of log_file's header; no reader follows this file by its name
_STEP_BYTES_MAX: Final = RAFT_ENTRY_BYTES_MAX + 1_024
_RECORD_BYTES: Final = 64  # maximum size of a record beside entries and names

Result = TypeVar("Result")


class Identity(msgspec.Struct, frozen=True, array_like=True, tag=1, forbid_unknown_fields=True):
    cluster_id: str
    node_id: str


class Base(msgspec.Struct, frozen=True, array_like=True, tag=2, forbid_unknown_fields=True):
    """The snapshot holds entries up to ``index``, the log those behind ``log_index``; members as of that."""

    index: int
    term: int
    log_index: int
    log_term: int
    members: Members
    snapshot_size: int


class Part(msgspec.Struct, frozen=True, array_like=True, tag=3, forbid_unknown_fields=True):
    content: bytes


class Promise(msgspec.Struct, frozen=True, array_like=True, tag=4, forbid_unknown_fields=True):
    term: int
    voted_for: str | None


class Put(msgspec.Struct, frozen=True, array_like=True, tag=5, forbid_unknown_fields=True):
    first_index: int
    entries: list[Entry]


Record = Identity | Base | Part | Promise | Put

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Record])


class Recovered(NamedTuple):
    """Content of the file: the member as it was after its last step."""

    identity: Identity
    base: Base
    promise: Promise
    entries: list[Entry]


class Journal:
    """The file of one member.  ``recover`` or ``create`` comes first."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._identity = Identity("", "")
        self._noted: list[Record] = []
        self._noted_bytes = 0
        self._step = 0
        self._end = self._entries_start = 0
        self._part_positions: list[int] = []
        self._snapshot_size = 0
        self._closed = False
        self.sync_count = 0

    @property
    def identity(self) -> Identity:
        return self._identity

    @property
    def entries_bytes(self) -> int:
        """Return the bytes of the file behind the snapshot."""
        return self._end - self._entries_start

    @property
    def snapshot_size(self) -> int:
        return self._snapshot_size

    @property
    def dirty(self) -> bool:
        return bool(self._noted)

    @property
    def promise_noted(self) -> bool:
        """Whether a term or a vote waits for ``sync``."""
        return any(isinstance(record, Promise) for record in self._noted)

    @property
    def closed(self) -> bool:
        """Whether the journal was closed, by ``close`` or by a storage error."""
        return self._closed

    # Steps

    def promise(self, term: int, voted_for: str | None) -> None:
        """Note the term and the vote in it."""
        self._note(Promise(term, voted_for), _RECORD_BYTES + len((voted_for or "").encode()))

    def put(self, first_index: int, entries: Sequence[Entry]) -> None:
        """Note that the log has ``entries`` from ``first_index`` on, and nothing after them."""
        for record, size in _puts(first_index, entries):
            self._note(record, size)

    def sync(self) -> None:
        """Make all notes durable; raises StorageFailed or StorageFull, and ClosedError from then on."""
        self._check_open()
        if self._noted:
            self._guarded(self._write_step)

    def _note(self, record: Record, size: int) -> None:
        if self._noted_bytes + size > _STEP_BYTES_MAX:
            self.sync()
        self._noted.append(record)
        self._noted_bytes += size

    def _write_step(self) -> None:
        step = log_file.pack_entry(self._step + 1, _encoder.encode(self._noted))
        self._disk.write(step, self._end)
        self._disk.sync()
        self._disk.write(log_file.pack_mark(self._end + len(step)), _MARK_POSITION)
        self._end += len(step)
        self._step += 1
        self._noted, self._noted_bytes = [], 0
        self.sync_count += 1

    # Whole files

    def create(self, identity: Identity, members: Members) -> Recovered:
        """Create the first journal of a new member, which must never have voted."""
        self._identity = identity
        base, promise = Base(0, 0, 0, 0, members, 0), Promise(0, None)
        self.complete(self._guarded(lambda: self.stage(base, b"")), promise, [])
        return Recovered(identity, base, promise, [])

    def stage(self, base: Base, snapshot: bytes) -> Staged:
        """Write the beginning of the next file; in any thread, one at a time.  Raises OSError."""
        file = _File(self._identity, msgspec.structs.replace(base, snapshot_size=len(snapshot)), snapshot)
        self._disk.stage(file.take())
        return Staged(file.base, file)

    def unstage(self) -> None:
        """Discard the staged file."""
        self._guarded(self._disk.unstage)

    def complete(self, staged: Staged, promise: Promise, entries: Sequence[Entry]) -> None:
        """Replace the file; the arguments must include all notes."""
        self._check_open()
        file = staged.file
        file.add([promise])
        for record, _ in _puts(staged.base.log_index + 1, entries):
            file.add([record])
        identity = _encoder.encode(self._identity)
        self._guarded(lambda: self._disk.complete(file.head, file.take(), identity))
        self._end, self._step = file.end, file.step_count
        self._entries_start, self._part_positions = file.entries_start, file.part_positions
        self._snapshot_size = staged.base.snapshot_size
        self._noted, self._noted_bytes = [], 0

    def snapshot_part(self, position: int) -> bytes:
        """The snapshot's bytes from ``position`` to the end of the part in which it lies."""
        self._check_open()
        number, skipped = divmod(position, RAFT_SNAPSHOT_PART_BYTES)
        if not 0 <= position < self._snapshot_size:
            return b""
        start = self._part_positions[number]
        content = self._guarded(lambda: self._disk.read(RAFT_SNAPSHOT_PART_BYTES + 64, start))
        step = log_file.entry_at(content, 0, start)
        if step is None:
            raise _damage(self._disk.path, start, "a part of the snapshot fails its checksum")
        (part,) = _records(step, start, self._disk.path)
        if not isinstance(part, Part):
            raise _damage(self._disk.path, start, "a part of the snapshot is missing")
        return part.content[skipped:]

    def snapshot(self) -> bytes:
        """All of it."""
        parts, position = [], 0
        while part := self.snapshot_part(position):
            parts.append(part)
            position += len(part)
        return b"".join(parts)

    # Recovery

    def recover(self) -> Recovered | None:
        """Read the file; None if there never was one.  Raises Damage, StorageFailed and the like."""
        content = self._guarded(self._disk.load)
        if content is None:
            return None
        replay, taken_over = _replayed(content, self._disk.path)
        recovered = replay.recovered()
        self._identity = recovered.identity
        self._snapshot_size = recovered.base.snapshot_size
        self._part_positions, self._entries_start = replay.part_positions, replay.entries_start
        self._step, self._end = replay.step_count, replay.end
        self._guarded(lambda: self._mend(content, taken_over))
        return recovered

    def _mend(self, content: bytes, taken_over: int) -> None:
        mark = int.from_bytes(content[24:32], "little")
        if len(content) > self._end:
            self._disk.truncate(self._end)
        if taken_over or len(content) > self._end:
            self._disk.write(content[mark : self._end], mark)
            self._disk.sync()
            self._disk.write(log_file.pack_mark(self._end), _MARK_POSITION)
            self._disk.sync()

    # Errors

    def failed(self, error: BaseException) -> BaseException:
        """End the journal after a failure in another thread; return the error to report."""
        self._end_now()
        if not isinstance(error, OSError):
            return error
        told = log_file.storage_error(error, self._disk.path)
        told.__cause__ = error
        return told

    def close(self) -> None:
        """Drop the notes, make the mark durable, close.  May be called twice."""
        if not self._closed:
            try:
                if self._end:
                    self._disk.sync()
            except OSError as error:
                raise log_file.storage_error(error, self._disk.path) from error
            finally:
                self._end_now()

    def _end_now(self) -> None:
        self._closed = True
        self._disk.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the member's journal was closed")

    def _guarded(self, action: Callable[[], Result]) -> Result:
        """Do it; whatever interrupts it ends the journal."""
        try:
            return action()
        except OSError as error:
            self._end_now()
            raise log_file.storage_error(error, self._disk.path) from error
        except BaseException:
            self._end_now()
            raise


def _puts(first_index: int, entries: Sequence[Entry]) -> Iterator[tuple[Put, int]]:
    """Records that hold the entries, each with its size at most; one without any where there are none."""
    batch: list[Entry] = []
    batch_bytes = _RECORD_BYTES
    for entry in entries:
        if batch and batch_bytes + size_of(entry) > _STEP_BYTES_MAX:
            yield Put(first_index, batch), batch_bytes
            first_index += len(batch)
            batch, batch_bytes = [], _RECORD_BYTES
        batch.append(entry)
        batch_bytes += size_of(entry)
    yield Put(first_index, batch), batch_bytes


class _File:
    """A new file as pieces, and where things lie in it."""

    def __init__(self, identity: Identity, base: Base, snapshot: bytes) -> None:
        self.base = base
        self._pieces = [bytes(_HEADER_BYTES)]
        self.end, self.step_count = _HEADER_BYTES, 0
        self.part_positions: list[int] = []
        self.add([identity, base])
        for position in range(0, len(snapshot), RAFT_SNAPSHOT_PART_BYTES):
            self.part_positions.append(self.end)
            self.add([Part(snapshot[position : position + RAFT_SNAPSHOT_PART_BYTES])])
        self.entries_start = self.end

    def add(self, records: list[Record]) -> None:
        self.step_count += 1
        step = log_file.pack_entry(self.step_count, _encoder.encode(records))
        self._pieces.append(step)
        self.end += len(step)

    def take(self) -> list[bytes]:
        """Return the pieces to write that were not taken before."""
        pieces, self._pieces = self._pieces, []
        return pieces

    @property
    def head(self) -> bytes:
        """Header and mark, for all that was added."""
        return log_file.new_file(_GENERATION, b"")[:_MARK_POSITION] + log_file.pack_mark(self.end)


class Staged(NamedTuple):
    """The next file as far as it is written."""

    base: Base
    file: _File


class _Replay:
    """Takes step after step and refuses what a journal never holds."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.identity: Identity | None = None
        self.base = Base(0, 0, 0, 0, Members({}), 0)
        self.promise = Promise(0, None)
        self.entries: list[Entry] = []
        self.snapshot_size = 0
        self.part_positions: list[int] = []
        self.entries_start = 0
        self.step_count, self.end = 0, _HEADER_BYTES

    def take(self, step: log_file.Entry) -> None:
        """Take the next step; raises Damage, and then nothing more counts."""
        position, number = self.end, self.step_count + 1
        if step.first_index != number:
            raise _damage(self._path, position, f"step {step.first_index} comes where {number} is due")
        self._apply(_records(step, position, self._path), position, step.end)
        self.step_count, self.end = number, step.end

    def _apply(self, records: list[Record], position: int, end: int) -> None:
        if self.identity is None:
            if [type(record) for record in records] != [Identity, Base]:
                raise _damage(self._path, position, "the first step does not say whose journal this is")
            self.identity, self.base = records  # type: ignore[assignment]
            self.entries_start = end
            return
        for record in records:
            if isinstance(record, Put):
                self._put(record, position)
            elif isinstance(record, Promise):
                if record.term < self.promise.term:
                    why = f"term {record.term} follows term {self.promise.term}"
                    raise _damage(self._path, position, why)
                self.promise = record
            elif isinstance(record, Part) and self.entries_start == position:
                self.part_positions.append(position)
                self.snapshot_size += len(record.content)
                self.entries_start = end
            else:
                raise _damage(self._path, position, "a record lies where it is never written")

    def _put(self, record: Put, position: int) -> None:
        start = record.first_index - self.base.log_index - 1
        if not 0 <= start <= len(self.entries):
            why = f"entry {record.first_index} does not follow what is there"
            raise _damage(self._path, position, why)
        del self.entries[start:]
        self.entries += record.entries

    def recovered(self) -> Recovered:
        if self.identity is None or self.snapshot_size != self.base.snapshot_size:
            raise _damage(self._path, _HEADER_BYTES, "the snapshot is not whole")
        if self.base.log_index + len(self.entries) < self.base.index:
            raise _damage(self._path, _HEADER_BYTES, "entries of the snapshot are missing")
        return Recovered(self.identity, self.base, self.promise, self.entries)


def _replayed(content: bytes, path: str) -> tuple[_Replay, int]:
    """The steps that count, and how many of them lie behind the mark.  Raises Damage."""
    mark = _checked_mark(content, path)
    try:
        steps = list(log_file.committed_entries(content[_HEADER_BYTES:mark], _HEADER_BYTES, path))
        behind = log_file.tail_entries(content[mark:], mark, path)
    except Damage as error:
        raise _damage(path, error.facts["position"], error.why) from error
    if not steps:
        raise _damage(path, _HEADER_BYTES, "there is no step below the mark")
    replay = _Replay(path)
    for step in steps + behind:
        replay.take(step)
    return replay, len(behind)


def _checked_mark(content: bytes, path: str) -> int:
    header = content[:_MARK_POSITION]
    generation = int.from_bytes(header[8:16], "little")
    expected = log_file.new_file(generation, b"")
    if header[:3] == expected[:3] and header[:4] != expected[:4] and header[4:] == expected[4:24]:
        raise StorageIncompatible(
            f"{path} has another format",
            why=f"its magic is {header[:4]!r}",
            hint="start the version that wrote it",
        )
    if len(content) < _HEADER_BYTES or header != expected[:_MARK_POSITION]:
        raise _damage(path, 0, "the header is not one")
    mark = int.from_bytes(content[24:32], "little")
    if content[_MARK_POSITION:_HEADER_BYTES] != log_file.pack_mark(mark):
        raise _damage(path, _MARK_POSITION, "the mark fails its checksum")
    if not _HEADER_BYTES <= mark <= len(content):
        raise _damage(path, len(content), f"the file is cut; {mark} bytes were synced")
    return mark


def _records(step: log_file.Entry, position: int, path: str) -> list[Record]:
    try:
        return _decoder.decode(step.content)
    except msgspec.MsgspecError as error:
        raise _damage(path, position, f"a step cannot be read: {error}") from error


def _damage(path: str, position: int, why: str) -> Damage:
    return Damage(
        f"the member's journal is damaged at position {position}",
        why=why,
        hint="nothing was changed; remove this member and let a new one join in its place;"
        " when most are damaged, see `danube cluster recover --help`",
        file=path,
        position=position,
    )


class Prefix(NamedTuple):
    """The member as of its journal's last sound step.

    ``identity`` None: not even the first one is.  ``snapshot`` None: it is not whole, and there is no entry.
    ``damage`` None: the journal is whole.
    """

    identity: Identity | None
    base: Base
    promise: Promise
    entries: list[Entry]
    snapshot: bytes | None
    damage: Damage | None

    @property
    def last_index(self) -> int:
        return max(self.base.index, self.base.log_index + len(self.entries))

    @property
    def last_term(self) -> int:
        return max(self.base.term, self.entries[-1].term if self.entries else 0)

    def members(self) -> Members:
        """Members as of the last sound entry that changed them."""
        changes = [entry for entry in self.entries if entry.kind == MEMBERS]
        return members_of(changes[-1]) if changes else self.base.members


def read_prefix(content: bytes, path: str) -> Prefix:
    """Read the sound beginning of a journal's bytes, for an operator who has no whole one left.

    Each step has a checksum and a number, so the steps before the damage are as they were written.  Steps
    behind it are not read, for it is unknown what is missing in between.  The header and the mark state
    nothing that the steps do not: if only they are damaged, no step is lost.  Raises StorageIncompatible for
    a newer version.
    """
    replay, damage = _Replay(path), None
    try:
        _replayed(content, path)[0].recovered()
    except Damage as error:
        damage = error
    while (step := log_file.entry_at(content, replay.end, replay.end)) is not None:
        try:
            replay.take(step)
        except Damage:
            break
    snapshot: bytes | None = None
    if replay.identity is not None and replay.snapshot_size == replay.base.snapshot_size:
        steps = [log_file.entry_at(content, start, start) for start in replay.part_positions]
        records = [record for step in steps if step is not None for record in _decoder.decode(step.content)]
        snapshot = b"".join(record.content for record in records if isinstance(record, Part))
    return Prefix(replay.identity, replay.base, replay.promise, replay.entries, snapshot, damage)
