"""Identity of this node and its cluster: the file ``node_id`` of a data directory.

    1234567890123456789          a random number, for good; it is the broker's id as well
    cluster 7f3a... forming      only once it is part of a cluster; "member" once its journal exists,
                                 "etcd" once it is a member and the log is in etcd
    left 52c0...                 one for each cluster that it let go of: it has forgotten its votes there

The file stands apart from the journal, so a journal that was lost is noticed: a member that forgot its
votes must not vote again.  A node that lost this file is a new node, which has never voted.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from danube.cluster.log import log_file
from danube.errors import Damage, InvalidArgument, StorageFailed, WrongState
from danube.host import files

NODE_FILE: Final = "node_id"
STAGING: Final = "recovering"  # while a new cluster is made here (danube.cluster.control.recovery)
FORMING: Final = "forming"
MEMBER: Final = "member"
ETCD: Final = "etcd"
_BYTES_MAX: Final = 4_096
_NODE_ID_END: Final = 1 << 63  # it travels as a signed number in places


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """``cluster_id`` is "" before this node was part of a cluster; ``state`` is forming, member or etcd.

    ``left``: clusters that it must never be part of again.
    """

    node_id: str
    cluster_id: str = ""
    state: str = ""
    left: tuple[str, ...] = ()


def load_node(data_dir: Path) -> NodeRecord:
    """The record of this directory, made where there is none; raises Damage or StorageFailed."""
    path = data_dir / NODE_FILE
    try:
        with path.open("rb") as file:
            text = file.read(_BYTES_MAX).decode("ascii", "replace")
    except FileNotFoundError:
        record = NodeRecord(str(1 + secrets.randbelow(_NODE_ID_END - 1)))
        store_node(data_dir, record)
        return record
    except OSError as error:
        raise log_file.storage_error(error, str(path)) from error
    return _parse(text, path)


def _parse(text: str, path: Path) -> NodeRecord:
    lines = text.split("\n")
    rows = [line.split() for line in lines[1:-1] if line]
    left = tuple(row[1] for row in rows if len(row) == 2 and row[0] == "left")
    words = rows[0] if rows and len(left) < len(rows) else []
    known = len(left) + bool(words) == len(rows) and (
        not words or (len(words) == 3 and words[0] == "cluster" and words[2] in (FORMING, MEMBER, ETCD))
    )
    if not _sound(lines[0]) or not known:
        raise Damage(
            f"{path} is not what was written",
            why="it holds no node id",
            hint="remove this node from the cluster and start it with an empty data directory",
            file=str(path),
        )
    record = NodeRecord(lines[0], left=left)
    return replace(record, cluster_id=words[1], state=words[2]) if words else record


def check_node_id(node_id: str) -> None:
    """Raise InvalidArgument for an impossible node id."""
    if not _sound(node_id):
        raise InvalidArgument(
            f"{node_id[:40]!r} is no node id",
            why=f"it is a number from 1 to {_NODE_ID_END - 1}",
            hint=f"it is the first line of the file {NODE_FILE} in the node's data directory",
        )


def _sound(node_id: str) -> bool:
    digits = node_id.isascii() and node_id.isdecimal() and len(node_id) <= len(str(_NODE_ID_END))
    return digits and str(int(node_id)) == node_id and 0 < int(node_id) < _NODE_ID_END


def store_node(data_dir: Path, record: NodeRecord) -> None:
    """Durable when it returns; raises StorageFailed or StorageFull."""
    path = data_dir / NODE_FILE
    text = record.node_id + "\n"
    if record.cluster_id:
        text += f"cluster {record.cluster_id} {record.state}\n"
    text += "".join(f"left {cluster_id}\n" for cluster_id in record.left)
    with log_file.storage_errors(str(path)):
        files.make_directory(data_dir)
        files.replace_durably(path, text.encode("ascii"))


def check_journal(record: NodeRecord, journal_exists: bool, directory: Path) -> None:
    """Refuse a member whose journal is gone: it may have voted in terms that it no longer knows."""
    refuse_etcd(record, directory.parent)
    if record.state == MEMBER and not journal_exists:
        raise StorageFailed(
            f"the journal of node {record.node_id} is gone from {directory}",
            why="a member that forgot its votes could elect a second leader",
            hint=f"remove node {record.node_id} from the cluster, then start with an empty data directory",
        )


def refuse_etcd(record: NodeRecord, data_dir: Path) -> None:
    """Raise WrongState if the metadata of this node's cluster is in etcd, and not here."""
    if record.state == ETCD:
        raise WrongState(
            f"{data_dir} belongs to a broker whose cluster has its metadata in etcd",
            why=f"it is part of cluster {record.cluster_id} there",
            hint="start it with --metadata as before; etcd's own tools back up and restore its content",
        )
