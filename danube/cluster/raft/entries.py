"""A member's term, vote and entries in memory, each change of them noted in its journal.

The roles use the two classes as their storage and their log.  Indexes count from 1. The snapshot holds
entries up to ``snapshot_index``, the log those behind ``base_index``. ``base_index`` is not larger, because
the last entries of a snapshot are kept for followers that are a little behind.  The caller of a step calls
``Journal.sync`` before any message that reflects these objects leaves the member.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from danube.cluster.raft.engine import Members
from danube.cluster.raft.entry import MEMBERS, Entry, members_of, size_of
from danube.cluster.raft.journal import Base, Journal, Promise, Recovered, Staged
from danube.errors import Damage, broken


class HardState:
    """The term and the vote in it: one vote a term, cleared by a higher term and by nothing else.

    Asked to forget a vote, it does not: the roles ask for that at every start.
    """

    def __init__(self, journal: Journal, promise: Promise) -> None:
        self._journal = journal
        self.term = promise.term
        self.voted_for = promise.voted_for

    def exists(self, name: str) -> bool:
        return name in ("term", "voted_for")

    def update(self, values: Mapping[str, Any]) -> None:
        term, voted_for = self.term, self.voted_for
        wanted = values.get("term", term)
        if wanted > term:
            term, voted_for = wanted, None
        vote = values.get("voted_for")
        if vote is not None:
            if voted_for not in (None, vote):
                broken("a second vote in one term", term=term, voted_for=voted_for, vote=vote)
            voted_for = vote
        if (term, voted_for) != (self.term, self.voted_for):
            self.term, self.voted_for = term, voted_for
            self._journal.promise(term, voted_for)


class RaftLog:
    """Entries behind the snapshot, and the members according to them."""

    def __init__(self, journal: Journal, recovered: Recovered) -> None:
        self._journal = journal
        self._entries = recovered.entries
        base = recovered.base
        self.base_index, self.base_term = base.log_index, base.log_term
        self.snapshot_index, self.snapshot_term = base.index, base.term
        self.commit_index = self.last_applied = base.index
        self._base_members = base.members
        self._changes: list[tuple[int, Members]] = []  # entries that change the members, by index
        self._note_changes(self.base_index + 1, self._entries)
        self.durable_index = self.last_log_index  # up to here the journal has it on disk

    def __len__(self) -> int:
        return self.last_log_index

    def __bool__(self) -> bool:
        return self.last_log_index > 0

    def __getitem__(self, index: int) -> Entry:
        if not self.base_index < index <= self.last_log_index:
            broken("an entry is asked for that is not in the log", index=index, base=self.base_index)
        return self._entries[index - self.base_index - 1]

    @property
    def last_log_index(self) -> int:
        return self.base_index + len(self._entries)

    @property
    def last_log_term(self) -> int:
        return self._entries[-1].term if self._entries else self.base_term

    @property
    def members(self) -> Members:
        """Members as of the last entry, committed or not."""
        return self._changes[-1][1] if self._changes else self._base_members

    @property
    def members_index(self) -> int:
        """Index of the last change of members; 0 if that is not in the log."""
        return self._changes[-1][0] if self._changes else 0

    def electable(self, node_id: str) -> bool:
        """Whether a member may try to lead: as a voter, or as one whose removal is not agreed on yet, which
        may be the only one that can bring it about."""
        if node_id in self.members.voters:
            return True
        before = self._changes[-2][1] if len(self._changes) > 1 else self._base_members
        return self.members_index > self.commit_index and node_id in before.voters

    def term_at(self, index: int) -> int:
        """The term of an entry that is in the log or is the last of the snapshot."""
        return self.base_term if index == self.base_index else self[index].term

    def batch(self, first_index: int, count_max: int, bytes_max: int) -> list[Entry]:
        """Entries from ``first_index`` on: one at least where there is one."""
        start = first_index - self.base_index - 1
        batch: list[Entry] = []
        batch_bytes = 0
        for entry in self._entries[start : start + count_max]:
            batch_bytes += size_of(entry)
            if batch and batch_bytes > bytes_max:
                break
            batch.append(entry)
        return batch

    # Change

    def put_from(self, first_index: int, entries: Sequence[Entry]) -> None:
        """Cut the log before ``first_index`` and append ``entries``."""
        if first_index <= self.commit_index:
            broken("a committed entry would be cut", first_index=first_index, commit=self.commit_index)
        del self._entries[first_index - self.base_index - 1 :]
        self._entries += entries
        self.durable_index = min(self.durable_index, first_index - 1)
        while self._changes and self._changes[-1][0] >= first_index:
            self._changes.pop()
        self._note_changes(first_index, entries)
        self._journal.put(first_index, entries)

    def accept(self, previous_index: int, previous_term: int, entries: Sequence[Entry]) -> int | None:
        """A leader's entries: how far the log is the leader's now; None if they do not fit."""
        skipped = self.base_index - previous_index
        if skipped > 0:  # entries in a snapshot are committed, so the leader has the same ones
            if skipped >= len(entries):
                return previous_index + len(entries)
            previous_index, entries = self.base_index, entries[skipped:]
        elif previous_index > self.last_log_index or self.term_at(previous_index) != previous_term:
            return None
        for number, entry in enumerate(entries):
            index = previous_index + 1 + number
            if index > self.last_log_index or self.term_at(index) != entry.term:
                self.put_from(index, entries[number:])
                break
        return previous_index + len(entries)

    def hint(self, previous_index: int) -> int:
        """Return the index that a refused leader may try next: before the whole term that does not agree."""
        if previous_index > self.last_log_index:
            return self.last_log_index
        term = self.term_at(previous_index)
        index = previous_index - 1
        while index > self.commit_index and self.term_at(index) == term:
            index -= 1
        return index

    def synced(self) -> None:
        """The journal has all of it."""
        self.durable_index = self.last_log_index

    # Snapshots

    @property
    def snapshot_size(self) -> int:
        return self._journal.snapshot_size

    @property
    def snapshot_members(self) -> Members:
        """Members as of the snapshot."""
        return self._members_at(self.snapshot_index)

    def plan_snapshot(self, kept_bytes: int) -> Base:
        """Return the base of a snapshot of now, which stands for all that was applied.

        The last ``kept_bytes`` of entries stay for followers that are a little behind.
        """
        applied = index = self.last_applied
        while index > self.base_index and kept_bytes > 0:
            kept_bytes -= size_of(self[index])
            index -= 1
        return Base(applied, self.term_at(applied), index, self.term_at(index), self._members_at(index), 0)

    def compact(self, staged: Staged, promise: Promise) -> None:
        """Replace entries by a snapshot that was planned here."""
        base = staged.base
        self.snapshot_index, self.snapshot_term = base.index, base.term
        self._begin_at(base.log_index, base.log_term, self._entries[base.log_index - self.base_index :])
        self._complete(staged, promise)

    def install(self, staged: Staged, promise: Promise) -> None:
        """Begin with a leader's snapshot.  Entries behind it stay where the log agrees with it, for they
        may be acknowledged already."""
        index, term = staged.base.index, staged.base.term
        if index <= self.commit_index:
            broken("a snapshot would undo commits", index=index, commit=self.commit_index)
        agreed = index <= self.last_log_index and self.term_at(index) == term
        kept = self._entries[index - self.base_index :] if agreed else []
        self._changes, self._base_members = [], staged.base.members
        self._begin_at(index, term, kept)
        self._note_changes(index + 1, kept)
        self.snapshot_index, self.snapshot_term = index, term
        self.commit_index = self.last_applied = index
        self._complete(staged, promise)

    def _begin_at(self, index: int, term: int, entries: list[Entry]) -> None:
        """Let the log begin behind ``index``."""
        while self._changes and self._changes[0][0] <= index:
            self._base_members = self._changes.pop(0)[1]
        self.base_index, self.base_term, self._entries = index, term, entries

    def _members_at(self, index: int) -> Members:
        known = [members for place, members in self._changes if place <= index]
        return known[-1] if known else self._base_members

    def _complete(self, staged: Staged, promise: Promise) -> None:
        self._journal.complete(staged, promise, self._entries)
        self.durable_index = self.last_log_index

    def _note_changes(self, first_index: int, entries: Sequence[Entry]) -> None:
        for index, entry in enumerate(entries, first_index):
            if entry.kind == MEMBERS:
                try:
                    self._changes.append((index, members_of(entry)))
                except msgspec.MsgspecError as error:
                    raise Damage(f"entry {index} names no members", why=str(error)) from error
