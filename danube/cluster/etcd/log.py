"""The metadata log in an external etcd: the Consensus port for those who run one already.

Keys below a prefix (which ends in a slash):

    head                          MessagePack [format, version, snapshot version, its directory, its chunks]
    entries/<first index>         16 bytes that name the writer's attempt, then a list of commands
    snapshots/<directory>/<n>     chunks of a snapshot of the machine

Writers:  any process, in a race.  A transaction puts an entry and the head where the head is as it was
          read; who loses reads what the others wrote, checks its commands again and tries again.
Readers:  read the head, by quorum, then the entries behind what they have; one that lags behind the last
          snapshot reads that.  ``refresh`` is one such read when nothing is new; with a watch of the head it
          is none, for a second at a time.
Unanswered:  a transaction whose answer was lost is looked for by its attempt, after the head was moved so
          that it cannot take effect later.  Where even that is impossible: OutcomeUnknown.
Growth:   entries are replaced by a snapshot when they have outgrown it.  etcd's own history is bounded by
          its auto-compaction, which is its operator's to set.

Indexes are 20 digits.  etcd takes requests up to 1.5 MiB, so an entry is smaller than in a local log.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from danube.cluster.etcd.calls import EtcdCalls, KeyValue
from danube.cluster.etcd.watch import EtcdWatch
from danube.cluster.log.local_log import Accepted, accept
from danube.core.metadata.commands import (
    Change,
    Command,
    Outcome,
    decode_commands,
    join_commands,
)
from danube.core.metadata.machine import Metadata
from danube.core.metadata.outcomes import outcome_of
from danube.core.metadata.ports import Consensus
from danube.errors import (
    CallerError,
    ClosedError,
    ConfigInvalid,
    Damage,
    OutcomeUnknown,
    Overloaded,
    StorageIncompatible,
    Unavailable,
    broken,
)
from danube.host.clock import monotonic_ns
from danube.limits import KIB, MIB, TOPICS_MAX

ENTRY_BYTES_MAX: Final = 1 * MIB + 256 * KIB
COMPACT_BYTES_MIN: Final = 4 * MIB
COMPACT_RATIO: Final = 4
COMPACT_ENTRIES_MAX: Final = 10_000
CHUNK_BYTES: Final = 512 * KIB
_FORMAT: Final = 1
_TRIES_MAX: Final = 32
_ATTEMPT_BYTES: Final = 16
_CHANGES_WAITING_MAX: Final = 2 * TOPICS_MAX
_LEVEL_NS: Final = 1_000_000_000  # a watch that hangs hides no more than that
_UNKNOWN_REVISION: Final = -1  # no key has it, so whoever compares with it reads again


class _Head(msgspec.Struct, frozen=True, array_like=True):
    format: int = _FORMAT
    version: int = 0
    snapshot_version: int = 0
    snapshot_directory: str = ""
    snapshot_chunks: int = 0


class _Known(NamedTuple):
    """The head as it was read, and etcd's revision of it: 0 where there is none yet."""

    head: _Head
    revision: int


class EtcdLog(Consensus):
    """The Consensus port over etcd; ``prefix`` is this cluster's alone.

    It owns ``calls``, and ``watch_calls``, with which a thread watches.  It is a Leadership, too (see
    danube.cluster.metadata_store): who watches needs its ``read_barrier``.
    """

    def __init__(
        self,
        calls: EtcdCalls,
        prefix: str = "/danube/",
        *,
        watch_calls: EtcdCalls | None = None,
        compact_bytes_min: int = COMPACT_BYTES_MIN,
    ) -> None:
        if not prefix.endswith("/"):
            raise ConfigInvalid(f"etcd prefix {prefix!r} is not valid", why="it ends with '/'")
        self._calls = calls
        self._prefix = prefix
        self._compact_bytes_min = compact_bytes_min
        self._state = Metadata()
        self._changes: list[Change] = []
        self._known = _Known(_Head(), 0)
        self._entry_count = self._entry_bytes = self._snapshot_bytes = 0
        self._closed = False
        self._watch = EtcdWatch(watch_calls, self._key("head")) if watch_calls is not None else None
        self._seen_count = self._read_ns = -1
        try:
            if self._watch is not None:
                self._watch.start()
            self._catch_up()
        except BaseException:
            self.close()
            raise
        self._changes.clear()

    @property
    def state(self) -> Metadata:
        """The machine as of the last propose or refresh; not to be kept, and never changed outside."""
        return self._state

    @property
    def version(self) -> int:
        return self._state.version

    def close(self) -> None:
        """Close the connection; what was answered is in etcd.  May be called twice."""
        self._closed = True
        self._calls.close()
        if self._watch is not None:
            self._watch.stop()

    def __enter__(self) -> EtcdLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Propose

    def propose_many(self, commands: Sequence[Command]) -> list[Outcome]:
        """Like propose for each in turn; a refusal, or why it was not stored, takes its command's place."""
        if len(self._changes) > _CHANGES_WAITING_MAX:
            raise Overloaded("too many metadata changes wait to be taken", hint="call refresh")
        self._check_open()
        results: list[Outcome] = [None] * len(commands)
        start = tries = 0
        while start < len(commands):
            try:
                end = self._propose_from(start, commands, results)
                tries = tries + 1 if end == start else 0
                if tries == _TRIES_MAX:
                    raise Overloaded(
                        "others change the metadata all the time", why=f"{tries} tries were too late"
                    )
            except Unavailable as error:  # what was stored before is told all the same
                results[start:] = [error] * (len(commands) - start)
                return results
            start = end
        self._compact_if_grown()
        return results

    def _propose_from(self, start: int, commands: Sequence[Command], results: list[Outcome]) -> int:
        """Store the commands of one entry; the place after them, or ``start`` where others were first."""
        accepted, end = accept(self._state, commands, start, results, ENTRY_BYTES_MAX)
        if self._propose_entry(accepted, results):
            return end
        self._catch_up()
        return start

    def _propose_entry(self, accepted: list[Accepted], results: list[Outcome]) -> bool:
        """Store and apply one entry; False where another one was first.  Without commands: look whether."""
        if not accepted:
            return not self._behind()
        try:
            stored = self._append(join_commands([one.encoded for one in accepted]))
        except Unavailable as error:
            for one in accepted:
                results[one.place] = error
            return True
        if stored:
            for one in accepted:
                changes = self._state.apply(self._state.version + 1, one.command)
                self._changes += changes
                results[one.place] = outcome_of(self._state, one.command, changes)
            if self._state.version != self._known.head.version:
                broken("the etcd log counts commands otherwise", version=self._state.version)
        return stored

    def _append(self, commands: bytes) -> bool:
        """Put an entry of this content behind the known head, whose version then counts its commands."""
        first_index = self._state.version + 1
        head = msgspec.structs.replace(self._known.head, version=self._state.version + _count(commands))
        content = secrets.token_bytes(_ATTEMPT_BYTES) + commands
        puts = [(self._entry_key(first_index), content), (self._key("head"), _encode(head))]
        try:
            revision = self._calls.put_if(self._key("head"), self._known.revision, puts)
        except OutcomeUnknown as error:
            revision = self._look_for(first_index, content, error)
        if revision is None:
            return False
        self._known = _Known(head, revision)
        self._entry_count += 1
        self._entry_bytes += len(content)
        return True

    def _look_for(self, first_index: int, content: bytes, error: OutcomeUnknown) -> int | None:
        """What ``put_if`` would have answered; raises OutcomeUnknown."""
        head_key, known = self._key("head"), self._known
        try:
            # The same head again: from then on the attempt is in, or can never be.
            fenced = self._calls.put_if(head_key, known.revision, [(head_key, _encode(known.head))])
            if fenced is not None:
                self._known = known._replace(revision=fenced)
                return None
            found = self._calls.get(self._entry_key(first_index))
            moved = self._read_head()
        except Unavailable:
            found, moved = None, _Known(_Head(version=first_index), 0)
        if found is not None:
            return _UNKNOWN_REVISION if found.value == content else None
        if moved.head.version < first_index:
            return None
        raise OutcomeUnknown("etcd did not answer, and what became of it is not known", why=str(error))

    # Leadership: etcd decides, so every writer may do what is for one to do

    @property
    def leading(self) -> bool:
        return True

    @property
    def leader_id(self) -> str:
        return ""

    def read_barrier(self) -> None:
        """Read what was acknowledged before the call, whatever the watch has said."""
        self._check_open()
        self._catch_up()

    # Refresh

    def refresh(self) -> list[Change]:
        """Take in what anyone committed since; return all changes since the last refresh, own ones too."""
        self._check_open()
        if not self._level():
            self._catch_up()
        changes, self._changes = self._changes, []
        return changes

    def _level(self) -> bool:
        """Whether the watch says that there is nothing to read; notes what it has said so far."""
        if self._watch is None:
            return False
        count, now_ns = self._watch.count, monotonic_ns()
        if self._watch.connected and count == self._seen_count and now_ns - self._read_ns < _LEVEL_NS:
            return True
        self._seen_count, self._read_ns = count, now_ns
        return False

    def _behind(self) -> bool:
        return self._read_head().revision != self._known.revision

    def _catch_up(self) -> None:
        """Apply what is committed and not applied yet."""
        former_revision = _UNKNOWN_REVISION
        for _ in range(_TRIES_MAX):
            known = self._read_head()
            if known.revision == former_revision:
                raise Damage(
                    "metadata in etcd is not whole", why=f"{self._prefix}head names what is not there"
                )
            former_revision = known.revision
            if known.head.snapshot_version > self._state.version and not self._take_snapshot(known.head):
                continue  # a newer one has replaced it
            if self._take_entries(known.head.version):
                self._known = known
                return
        raise Overloaded("others change the metadata all the time", hint="try again")

    def _read_head(self) -> _Known:
        found = self._calls.get(self._key("head"))
        if found is None:
            if self._known.revision:
                raise Damage("the metadata has gone from etcd", why=f"{self._prefix}head is not there")
            return _Known(_Head(), 0)
        try:
            head = msgspec.msgpack.decode(found.value, type=_Head)
        except msgspec.DecodeError as error:
            raise Damage("the metadata's head in etcd cannot be read", why=str(error)) from None
        if head.format != _FORMAT:
            raise StorageIncompatible("the metadata in etcd has a newer format", why=f"it is {head.format}")
        if head.version < self._state.version:
            raise Damage("the metadata in etcd went back", why=f"{head.version} after {self._state.version}")
        return _Known(head, found.mod_revision)

    def _take_entries(self, version: int) -> bool:
        """Apply the entries up to ``version``; False where some are not there any more."""
        end = self._key(f"entries/{version:020}") + b"\0"
        more = self._state.version < version
        while more:
            page, more = self._calls.get_range(self._entry_key(self._state.version + 1), end)
            for entry in page:
                if entry.key != self._entry_key(self._state.version + 1):
                    return False
                self._apply_entry(entry)
        return self._state.version == version

    def _apply_entry(self, entry: KeyValue) -> None:
        try:
            for command in decode_commands(entry.value[_ATTEMPT_BYTES:]):
                self._changes += self._state.apply(self._state.version + 1, command)
        except CallerError as error:
            raise Damage("a metadata command in etcd cannot be applied", why=str(error)) from error
        self._entry_count += 1
        self._entry_bytes += len(entry.value)

    def _take_snapshot(self, head: _Head) -> bool:
        """Become the snapshot that the head names; False where it is not there any more."""
        chunks: list[bytes] = []
        for number in range(head.snapshot_chunks):
            found = self._calls.get(self._key(f"snapshots/{head.snapshot_directory}/{number:06}"))
            if found is None:
                return False
            chunks.append(found.value)
        snapshot = b"".join(chunks)
        state = Metadata.restore(snapshot)
        self._changes += state.changes_since(self._state)
        self._state = state
        self._entry_count = self._entry_bytes = 0
        self._snapshot_bytes = len(snapshot)
        return True

    # Compaction

    def _compact_if_grown(self) -> None:
        limit = max(self._compact_bytes_min, COMPACT_RATIO * self._snapshot_bytes)
        if self._entry_bytes <= limit and self._entry_count <= COMPACT_ENTRIES_MAX:
            return
        try:
            self._compact()
        except Unavailable:
            # Everything is safe in the entries at hand; try again when as much has come again.
            self._entry_bytes = self._entry_count = 0

    def _compact(self) -> None:
        """Store a snapshot of what is applied, let the head name it, and delete what it replaces."""
        former, version = self._known.head, self._state.version
        snapshot = self._state.snapshot()
        directory = f"{version:020}-{secrets.token_hex(8)}"
        parts = [snapshot[start : start + CHUNK_BYTES] for start in range(0, len(snapshot), CHUNK_BYTES)]
        for number, part in enumerate(parts):
            self._calls.put(self._key(f"snapshots/{directory}/{number:06}"), part)
        head = msgspec.structs.replace(
            former, snapshot_version=version, snapshot_directory=directory, snapshot_chunks=len(parts)
        )
        revision = self._calls.put_if(
            self._key("head"), self._known.revision, [(self._key("head"), _encode(head))]
        )
        self._entry_count = self._entry_bytes = 0
        if revision is None:
            self._delete_below(f"snapshots/{directory}/")
            return
        self._known, self._snapshot_bytes = _Known(head, revision), len(snapshot)
        self._calls.delete_range(self._entry_key(0), self._entry_key(version + 1))
        # Also what others left that died before their head was moved.
        self._calls.delete_range(self._key("snapshots/"), self._key(f"snapshots/{directory}/"))

    def _delete_below(self, name: str) -> None:
        self._calls.delete_range(self._key(name), self._key(name[:-1] + "0"))  # "0" follows "/"

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the metadata log was closed")

    def _entry_key(self, first_index: int) -> bytes:
        return self._key(f"entries/{first_index:020}")

    def _key(self, name: str) -> bytes:
        return (self._prefix + name).encode()


def _encode(head: _Head) -> bytes:
    return msgspec.msgpack.encode(head)


def _count(commands: bytes) -> int:
    """How many commands a joined list holds."""
    return len(msgspec.msgpack.decode(commands, type=list[msgspec.Raw]))
