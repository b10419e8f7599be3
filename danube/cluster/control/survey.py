"""Survey of the metadata that a stopped member still holds; it changes nothing.

There may be two sources: the journal, up to its damage, and the copy that the host's workers read.  The copy
holds applied entries only.  The journal may hold later entries, which may or may not have been agreed on.
Together they give one machine: the further of the copy and the journal's snapshot, and the journal's entries
behind it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from danube.cluster.control.node import JOURNAL_DIRECTORY, JOURNAL_FILE, METADATA_DIRECTORY
from danube.cluster.log import log_file
from danube.cluster.log.applied_log import stamped
from danube.cluster.log.node_files import NODE_FILE, NodeRecord, load_node, refuse_etcd
from danube.cluster.raft.entry import COMMAND
from danube.cluster.raft.journal import Identity, Prefix, read_prefix
from danube.core.metadata.commands import decode_commands
from danube.core.metadata.machine import Metadata
from danube.errors import CallerError, Damage, NotFound, WrongState

COPY_FILE: Final = "metadata.log"
ID_FILE: Final = "raft.id"


@dataclass(frozen=True, slots=True)
class Survey:
    """``prefix`` None: there is no journal.  ``state`` None: nothing can be recovered, for ``why``."""

    node: NodeRecord
    prefix: Prefix | None
    state: Metadata | None
    index: int = 0
    term: int = 0
    applied_index: int = 0  # of the copy, and of the journal's snapshot; later entries may not be agreed
    why: str = ""

    @property
    def address(self) -> str:
        """Former address of this member; empty if it is not known any more."""
        if self.prefix is None:
            return ""
        members = self.prefix.members()
        return (members.voters | members.learners).get(self.node.node_id, "")

    def told(self) -> dict[str, Any]:
        """Return a report for comparing members: the highest term, then the highest index, has the most."""
        damage = self.prefix.damage if self.prefix is not None else None
        state = self.state
        return {
            "node_id": self.node.node_id,
            "cluster_id": self.node.cluster_id,
            "journal": "missing" if self.prefix is None else "damaged" if damage is not None else "whole",
            "damaged_position": damage.facts.get("position") if damage is not None else None,
            "damage": damage.why if damage is not None else "",
            "last_term": self.term,
            "last_index": self.index,
            "undecided_entries": max(0, self.index - self.applied_index),
            "members": self._others(),
            "recoverable": state is not None,
            "version": state.version if state is not None else 0,
            "topics": state.topic_count if state is not None else 0,
            "partitions": state.partition_count if state is not None else 0,
        }

    def _others(self) -> list[str]:
        if self.prefix is None:
            return []
        members = self.prefix.members()
        return [f"{node_id} {address}" for node_id, address in (members.voters | members.learners).items()]


def check_node_file(data_dir: Path) -> None:
    """Raise Damage where the file that names the node is gone from a member's directory.

    Its journal says that there was one.  Without it the directory looks like one of a broker that was alone.
    """
    path, journal = data_dir / NODE_FILE, data_dir / JOURNAL_DIRECTORY
    proofs = [one for one in (journal / ID_FILE, journal / JOURNAL_FILE) if one.exists()]
    if path.exists() or not proofs:
        return
    whose, lines = "a member of a cluster", "what it held"
    found = _identity_in(journal)
    if found is not None:
        whose = f"node {found.node_id} of cluster {found.cluster_id}"
        lines = f"two lines, `{found.node_id}` and `cluster {found.cluster_id} member`"
    raise Damage(
        f"{path} is missing",
        why=f"{proofs[0]} says that this directory is of {whose}, which has voted",
        hint=f"put the file back with {lines}; or remove the node (`danube cluster remove-node`) and start it"
        " with an empty data directory",
        file=str(path),
    )


def _identity_in(journal: Path) -> Identity | None:
    """Return the member whose journal it is, as far as one of its files still tells."""
    try:
        return msgspec.msgpack.decode((journal / ID_FILE).read_bytes(), type=Identity)
    except (FileNotFoundError, msgspec.DecodeError):
        prefix = read_journal(journal / JOURNAL_FILE)
        return prefix.identity if prefix is not None else None


def member(data_dir: Path) -> NodeRecord:
    """Read the member's identity.

    Raises NotFound, WrongState or Damage if the directory is no complete member.
    """
    check_node_file(data_dir)
    if not (data_dir / NODE_FILE).exists():
        raise NotFound(
            f"{data_dir} is not the data directory of a member",
            why=f"it holds no file {NODE_FILE}",
            hint="give the --data-dir that the broker was started with",
        )
    node = load_node(data_dir)
    if not node.cluster_id:
        raise WrongState(
            f"node {node.node_id} is part of no cluster",
            why="it never was, or it has let go of the one that it was part of",
            hint="start it with --join or --seed-nodes",
        )
    refuse_etcd(node, data_dir)
    return node


def survey(data_dir: Path) -> Survey:
    """Survey the directory; raises the errors of ``member``, Damage, StorageIncompatible and OSError."""
    node = member(data_dir)
    prefix = read_journal(data_dir / JOURNAL_DIRECTORY / JOURNAL_FILE)
    if prefix is not None and prefix.identity is not None and prefix.identity.node_id != node.node_id:
        raise WrongState(
            f"the journal is that of node {prefix.identity.node_id}",
            why=f"this is node {node.node_id}",
            hint="give the data directory as the node left it",
        )
    return _put_together(node, prefix, read_copy(data_dir / METADATA_DIRECTORY / COPY_FILE))


def read_journal(path: Path) -> Prefix | None:
    """Return the sound beginning of the journal; None without a file."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    return read_prefix(content, str(path))


def _put_together(node: NodeRecord, prefix: Prefix | None, copy: Metadata | None) -> Survey:
    state, index, term = copy, 0, 0
    if copy is not None:
        index, term = copy.cluster.agreement.index, copy.cluster.agreement.term
    if prefix is not None and prefix.snapshot is not None:
        if state is None or prefix.base.index > index:
            state = Metadata.restore(prefix.snapshot) if prefix.snapshot else Metadata()
            index = prefix.base.index
        term = max(term, prefix.last_term, prefix.promise.term)
    if state is None:
        why = "neither the beginning of the journal nor the copy of the metadata is sound"
        return Survey(node, prefix, None, why=why)
    applied_index = index
    if prefix is not None and prefix.snapshot is not None:
        _apply_entries(state, prefix, index)
        index = max(index, prefix.last_index)
    return Survey(node, prefix, state, index, term, applied_index)


def _apply_entries(state: Metadata, prefix: Prefix, applied_index: int) -> None:
    """Bring the machine up to the last sound entry."""
    for index, entry in enumerate(prefix.entries, prefix.base.log_index + 1):
        if index <= applied_index or entry.kind != COMMAND:
            continue
        try:
            for command in stamped(index, entry.term, entry.content)[1]:
                state.apply(state.version + 1, command)
        except CallerError as error:
            raise Damage(f"entry {index} cannot be applied", why=str(error)) from error


def read_copy(path: Path) -> Metadata | None:
    """The machine as far as the copy is sound; None if there is none, or not even its beginning is."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        head = log_file.read_head(descriptor, str(path))
        state = Metadata.restore(head.snapshot)
        size = os.fstat(descriptor).st_size
        content = log_file.read_all(descriptor, head.entries_start, size, str(path))
        position = 0
        while (entry := log_file.entry_at(content, position, position)) is not None:
            if entry.first_index != state.version + 1:
                break
            for command in decode_commands(entry.content):
                state.apply(state.version + 1, command)
            position = entry.end
    except (Damage, CallerError):
        return None
    finally:
        os.close(descriptor)
    return state
