"""A cluster's log of metadata in an etcd that the user runs: entries in one order, the leader, the members.

Keys below a prefix (which ends in a slash) that is this cluster's alone:

    head                          MessagePack [format, cluster id, name, index of the last entry, snapshot's
                                  index, directory and chunks, term, leader's node id, 8 random bytes]
    leader                        the leader's node id; hangs on an etcd lease, so it ends with the leader
    members/<node id>             the address where the others reach it
    entries/<index>               8 bytes term, 1 byte: 0 and the entry, or 1 and [directory, pieces] of it
    pieces/<directory>/<n>        pieces of an entry that is too large for one request
    snapshots/<directory>/<n>     chunks of a snapshot of the machine

Order:       a transaction puts an entry and the head where the head is as the writer knows it.  Who is
             elected changes the head, so whoever led before can store nothing more.
Unanswered:  a transaction whose answer was lost is looked for, after the head was moved so that it cannot
             take effect later.  Where even that is impossible: OutcomeUnknown.
Growth:      entries that a snapshot holds are deleted.  What etcd keeps of earlier values is compacted, too.

An object belongs to one thread at a time; it blocks.  Indexes are 20 digits and count entries from 1.
"""

from __future__ import annotations

import secrets
from typing import Final, NamedTuple

import msgspec

from danube.cluster.etcd.calls import EtcdCalls, Guard, KeyValue, Put
from danube.errors import Conflict, Damage, OutcomeUnknown, StorageIncompatible, Unavailable
from danube.limits import KIB, MIB, RAFT_MEMBERS_MAX

INLINE_BYTES_MAX: Final = 1 * MIB  # etcd takes requests up to 1.5 MiB
CHUNK_BYTES: Final = 512 * KIB
PAGE_BYTES: Final = 8 * MIB
_FORMAT: Final = 2  # 1 was tried before a broker could use it
_TERM_BYTES: Final = 8
_INLINE: Final = b"\0"
_IN_PIECES: Final = b"\1"


class Head(msgspec.Struct, frozen=True, array_like=True):
    """Head of the log: its end, the first readable entry, and the node that may write."""

    format: int = _FORMAT
    cluster_id: str = ""
    name: str = ""
    index: int = 0
    snapshot_index: int = 0
    snapshot_directory: str = ""
    snapshot_chunks: int = 0
    term: int = 0
    leader_id: str = ""
    attempt: bytes = b""  # by which a writer recognises its own change


class Known(NamedTuple):
    """The keys that are watched, as of one moment; ``revision`` is that of the head, 0 without one."""

    head: Head
    revision: int
    leader: KeyValue | None
    members: dict[str, str]

    @property
    def leader_id(self) -> str:
        """Return the elected member whose lease still holds; "" without one."""
        if self.leader is None or self.leader.value.decode("ascii", "replace") != self.head.leader_id:
            return ""
        return self.head.leader_id


class Entry(NamedTuple):
    number: int
    term: int
    content: bytes


class EtcdLog:
    """The log of one prefix; see the module.  ``known`` is the state that was read last."""

    def __init__(self, calls: EtcdCalls, prefix: str) -> None:
        self._calls = calls
        self._prefix = prefix
        self.known = Known(Head(), 0, None, {})

    @property
    def watched(self) -> tuple[bytes, bytes]:
        """Keys from the head to the last member; a watch of them misses nothing."""
        return self._key("head"), self._key("members0")

    def close(self) -> None:
        self._calls.close()

    # Reading

    def read(self) -> Known:
        """Read the current head, leader and members, by quorum.

        Raises StorageIncompatible if a newer version has written them.
        """
        found, more = self._calls.get_range(*self.watched, RAFT_MEMBERS_MAX + 2)
        by_name = {one.key.decode("utf-8", "replace").removeprefix(self._prefix): one for one in found}
        head = by_name.get("head")
        members = {
            name.removeprefix("members/"): one.value.decode("utf-8", "replace")
            for name, one in by_name.items()
            if name.startswith("members/")
        }
        if more or (head is None and by_name):
            raise StorageIncompatible(
                f"{self._prefix} in etcd holds what is no cluster's",
                hint="give the cluster a prefix of its own, as cluster.metadata etcd://host:2379/name",
            )
        if head is None:
            return Known(Head(), 0, None, {})
        known = Known(self._decoded(head.value), head.mod_revision, by_name.get("leader"), members)
        self.known = known
        return known

    def _decoded(self, content: bytes) -> Head:
        where = f"{self._prefix}head"
        try:
            first = msgspec.msgpack.decode(content)
        except msgspec.DecodeError:
            first = None
        if not isinstance(first, list) or not first or not isinstance(first[0], int):
            raise StorageIncompatible(
                f"{where} in etcd is not of a cluster of Danube",
                hint="give the cluster a prefix of its own, as cluster.metadata etcd://host:2379/name",
            )
        if first[0] != _FORMAT:
            raise StorageIncompatible(
                f"{where} in etcd has format {first[0]}",
                why=f"this version reads format {_FORMAT}",
                hint="install the version that wrote it, or a newer one",
            )
        try:
            return msgspec.msgpack.decode(content, type=Head)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise Damage(f"{where} in etcd cannot be read", why=str(error)) from None

    def entries_after(self, index: int, end: int) -> list[Entry] | None:
        """Some entries behind ``index`` up to ``end``, one at least; None if they are gone."""
        start, stop = self._entry_key(index + 1), self._entry_key(end + 1)
        entries: list[Entry] = []
        size = 0
        while True:
            page, more = self._calls.get_range(start, stop)
            for one in page:
                if one.key != self._entry_key(index + 1 + len(entries)):
                    return entries or None
                entry = self._entry(index + 1 + len(entries), one.value)
                if entry is None:
                    return entries or None
                entries.append(entry)
                size += len(entry.content)
            if not more or size > PAGE_BYTES:
                return entries or None
            start = self._entry_key(index + 1 + len(entries))

    def _entry(self, index: int, value: bytes) -> Entry | None:
        term = int.from_bytes(value[:_TERM_BYTES], "big")
        kind, content = value[_TERM_BYTES : _TERM_BYTES + 1], value[_TERM_BYTES + 1 :]
        if kind == _INLINE:
            return Entry(index, term, content)
        if kind != _IN_PIECES:
            raise StorageIncompatible(
                f"entry {index} in etcd is of a newer version", hint="install the version that wrote it"
            )
        try:
            directory, count = msgspec.msgpack.decode(content, type=tuple[str, int])
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise Damage(f"entry {index} in etcd cannot be read", why=str(error)) from None
        pieces = self._pieces(f"pieces/{directory}", count)
        return None if pieces is None else Entry(index, term, pieces)

    def snapshot(self, head: Head) -> bytes | None:
        """The snapshot that the head names; None if a newer one has replaced it."""
        return self._pieces(f"snapshots/{head.snapshot_directory}", head.snapshot_chunks)

    # Writing

    def make_cluster(self, cluster_id: str, name: str) -> None:
        """Begin a log where there is none; another node may have been first."""
        head = Head(cluster_id=cluster_id, name=name)
        key = self._key("head")
        self._calls.put_if([Guard(key, 0)], [Put(key, _encode(head))])

    def add_member(self, node_id: str, address: str) -> None:
        """Note the address of a new node; the next read tells whether it is a member.

        Raises Conflict where another node is at that address, and where there are too many.
        """
        members = self.read().members
        for other, taken in members.items():
            if taken == address and other != node_id:
                raise Conflict(
                    f"node {other} is at {address} already",
                    hint=f"give this broker another cluster.raft_addr; if the data of node {other} is gone,"
                    f" `danube cluster remove-node --node-id {other}` at a member",
                )
        if len(members) >= RAFT_MEMBERS_MAX:
            raise Conflict(f"the cluster has {RAFT_MEMBERS_MAX} members, which is the most")
        key = self._member(node_id)
        self._calls.put_if([Guard(key, 0)], [Put(key, address.encode())])

    def move_member(self, node_id: str, address: str) -> None:
        """Note another address of a member; a node that was removed meanwhile stays removed."""
        key = self._member(node_id)
        found = self._calls.get(key)
        if found is not None:
            self._calls.put_if([Guard(key, found.mod_revision)], [Put(key, address.encode())])

    def remove_member(self, node_id: str) -> None:
        self._calls.delete(self._member(node_id))

    def campaign(self, node_id: str, lease_id: int) -> bool:
        """Become the leader if there is none and the head is as known; the next read tells, too."""
        head = msgspec.structs.replace(self.known.head, term=self.known.head.term + 1, leader_id=node_id)
        guards = [Guard(self._key("leader"), 0), Guard(self._key("head"), self.known.revision)]
        puts = [
            Put(self._key("leader"), node_id.encode(), lease_id),
            Put(self._key("head"), _encode(head)),
        ]
        return self._calls.put_if(guards, puts) is not None

    def append(self, term: int, content: bytes) -> bool:
        """Put the next entry; False if another node has changed the head.  Raises OutcomeUnknown."""
        known = self.known
        index = known.head.index + 1
        value = term.to_bytes(_TERM_BYTES, "big") + self._kept(index, content)
        head = msgspec.structs.replace(known.head, index=index)
        return self._change_head(head, Put(self._entry_key(index), value))

    def _kept(self, index: int, content: bytes) -> bytes:
        """Return the value of an entry's key: the whole entry, or the name of its pieces."""
        if len(content) <= INLINE_BYTES_MAX:
            return _INLINE + content
        directory = f"{index:020}-{secrets.token_hex(8)}"
        count = self._put_pieces(self._calls, f"pieces/{directory}", content)
        return _IN_PIECES + msgspec.msgpack.encode((directory, count))

    def adopt_snapshot(self, index: int, directory: str, chunks: int) -> bool:
        """Let the head name a snapshot that was put; False if another node has changed the head."""
        head = msgspec.structs.replace(
            self.known.head, snapshot_index=index, snapshot_directory=directory, snapshot_chunks=chunks
        )
        return self._change_head(head)

    def _change_head(self, head: Head, *puts: Put) -> bool:
        known, key = self.known, self._key("head")
        head = msgspec.structs.replace(head, attempt=secrets.token_bytes(8))
        try:
            revision = self._calls.put_if([Guard(key, known.revision)], [*puts, Put(key, _encode(head))])
        except OutcomeUnknown as error:
            revision = self._look_for(head, error)
        if revision is None:
            return False
        self.known = known._replace(head=head, revision=revision)
        return True

    def _look_for(self, head: Head, error: OutcomeUnknown) -> int | None:
        """Return the result that ``put_if`` would have had; raises OutcomeUnknown."""
        known, key = self.known, self._key("head")
        try:
            # The same head again: from then on the attempt is in, or can never be.
            fenced = self._calls.put_if([Guard(key, known.revision)], [Put(key, _encode(known.head))])
            if fenced is not None:
                self.known = known._replace(revision=fenced)
                return None
            found = self._calls.get(key)
        except Unavailable:
            found = None
        if found is not None and self._decoded(found.value) == head:
            return found.mod_revision
        raise OutcomeUnknown("etcd did not answer, so the outcome is not known", why=str(error))

    def put_snapshot(self, calls: EtcdCalls, index: int, snapshot: bytes) -> tuple[str, int]:
        """Store a snapshot, in another thread; its directory and chunks, for ``adopt_snapshot``."""
        directory = f"{index:020}-{secrets.token_hex(8)}"
        return directory, self._put_pieces(calls, f"snapshots/{directory}", snapshot)

    def delete_before(self, calls: EtcdCalls, head: Head) -> None:
        """Delete entries that the head's snapshot replaces, and leftovers of members that died at it."""
        end = f"{head.snapshot_index + 1:020}"
        calls.delete_range(self._key("entries/"), self._key(f"entries/{end}"))
        calls.delete_range(self._key("pieces/"), self._key(f"pieces/{end}"))
        calls.delete_range(self._key("snapshots/"), self._key(f"snapshots/{head.snapshot_directory}/"))

    # Keys

    def _pieces(self, name: str, count: int) -> bytes | None:
        parts: list[bytes] = []
        for number in range(count):
            found = self._calls.get(self._key(f"{name}/{number:06}"))
            if found is None:
                return None
            parts.append(found.value)
        return b"".join(parts)

    def _put_pieces(self, calls: EtcdCalls, name: str, content: bytes) -> int:
        starts = range(0, len(content), CHUNK_BYTES)
        for number, start in enumerate(starts):
            calls.put(self._key(f"{name}/{number:06}"), content[start : start + CHUNK_BYTES])
        return len(starts)

    def _member(self, node_id: str) -> bytes:
        return self._key(f"members/{node_id}")

    def _entry_key(self, index: int) -> bytes:
        return self._key(f"entries/{index:020}")

    def _key(self, name: str) -> bytes:
        return (self._prefix + name).encode()


def _encode(head: Head) -> bytes:
    return msgspec.msgpack.encode(head)
