"""``danube cluster adopt``: a broker that was alone becomes the first member of a cluster, in place.

It holds the lock of the data directory, while no broker runs.  Each step can be repeated; before the last one
the broker may also continue alone:

    open    every log, as a start does; that completes the recovery after a power cut or a restored copy, and
            shows where each log ends
    mark    each directory as this broker's, in the file ``owner`` (:mod:`danube.broker.tiers.inheritance`)
    sync    all files, so that a power cut cannot lose data with which the cluster begins
    begin   a cluster whose first snapshot states all this (:mod:`danube.core.placement.adopted`), by a plan
            (:mod:`danube.cluster.control.recovery`); after that, only the same command can complete it

Segments, cursors and producers do not change: a member has the same files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from danube.broker.partition.opening import after_cut, ahead_of, open_log, partition_directory
from danube.broker.processes import unbroken
from danube.broker.processes.copied import settle_place
from danube.broker.processes.data_dir import DataDir
from danube.broker.processes.directories import PARTITIONS
from danube.broker.processes.unbroken import Since
from danube.broker.tiers.inheritance import KeptOwner, write_owner
from danube.broker.tiers.restore import finish_restore
from danube.cluster.control.node import METADATA_DIRECTORY
from danube.cluster.control.recovery import Plan, adopt, finish_adoption
from danube.cluster.control.survey import check_node_file
from danube.cluster.log.local_log import LocalLog
from danube.cluster.log.node_files import NODE_FILE, STAGING, load_node
from danube.core.cluster.ownership import Place
from danube.core.metadata.commands import TopicRecord
from danube.core.metadata.machine import Metadata
from danube.core.placement.adopted import adopted, adoption_epoch, kept_partitions
from danube.core.placement.recovered import LOG_EPOCHS
from danube.errors import NotFound, StorageFailed, WrongState
from danube.host import telemetry
from danube.wal.log.log import LogOptions
from danube.wal.tier.binding import rebind

_log = telemetry.events("adopting")


class Adopted(NamedTuple):
    """The new cluster and its content."""

    plan: Plan
    told: dict[str, Any]


def adopt_directory(data_dir: Path, raft_addr: str) -> Adopted:
    """Make the broker of ``data_dir`` the first member of a new cluster.

    Raises AlreadyRunning, NotFound or WrongState if there is nothing to adopt, Damage for metadata that
    cannot be read, and the errors of opening a log.
    """
    _refuse_others(data_dir)
    if finish_restore(data_dir):
        _log.info("a restore that was cut off has been ended")
    data = DataDir(data_dir)
    try:
        plan = finish_adoption(data_dir, rebind)
        if plan is not None:
            return Adopted(plan, {"finished": True})
        return _adopt(data, raft_addr)
    except OSError as error:
        raise StorageFailed(f"{data_dir} cannot be changed", why=str(error)) from error
    finally:
        data.close()


def _refuse_others(data_dir: Path) -> None:
    """Refuse a member's directory, and one that no broker ever used, before any file is made there."""
    if (data_dir / STAGING).exists():
        return
    if (data_dir / NODE_FILE).exists() and (node := load_node(data_dir)).cluster_id:
        raise WrongState(
            f"{data_dir} belongs to a member of cluster {node.cluster_id} already",
            hint="start it with --metadata, --seed-nodes or --join as before",
        )
    check_node_file(data_dir)
    if not (data_dir / METADATA_DIRECTORY / "metadata.log").exists():
        raise NotFound(
            f"{data_dir} is not the data directory of a broker that was alone",
            why="it holds no metadata",
            hint="a member that begins with nothing needs no adoption: start it with --seed-nodes",
        )


def _adopt(data: DataDir, raft_addr: str) -> Adopted:
    settle_place(data)
    incarnation = data.next_incarnations(1)
    since = unbroken.begin(data.path, incarnation)
    with LocalLog(data.path / METADATA_DIRECTORY, create=False) as log:
        state = log.state.copy()
    broker_id = int(load_node(data.path).node_id)
    epoch = adoption_epoch(state, incarnation)
    log_ends: dict[Place, int] = {}
    for record, index in kept_partitions(state):
        log_ends[record.topic_id, index] = _open(data.path, state, since, record, index, incarnation)
        directory = partition_directory(data.path / PARTITIONS, record.topic_id, index)
        write_owner(directory, KeptOwner(broker_id, epoch, epoch, incarnation))
    unbroken.end(data.path)
    plan = adopt(data.path, adopted(state, broker_id, epoch, log_ends), raft_addr, rebind)
    told = {"topics": state.topic_count, "partitions": state.partition_count, "logs": len(log_ends)}
    return Adopted(plan, told)


def _open(
    data_dir: Path, state: Metadata, since: Since, record: TopicRecord, index: int, incarnation: int
) -> int:
    """Recover a log as a start does; return its end."""
    ahead = after_cut(since, record, ahead_of(state, record.topic_id))
    opened = open_log(
        data_dir / PARTITIONS, record.physical_name(index), record, index, incarnation * LOG_EPOCHS,
        LogOptions(), ahead=ahead,
    )  # fmt: skip
    log_end = opened.log.log_end
    opened.log.close(opened.core.snapshot(log_end))
    return log_end
