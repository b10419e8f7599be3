"""Opening a partition: recover its log, its producers and its subscriptions.  Runs in a thread."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

import msgspec

from danube.broker.partition.hosted import HostedPartition, OpenedStorage
from danube.broker.processes.unbroken import Since
from danube.broker.traffic import Traffic
from danube.core.dispatch.cursor import CursorState
from danube.core.metadata.commands import TopicRecord
from danube.core.metadata.machine import Metadata
from danube.core.partition.partition import OffsetBudget, Partition, ReservedPartition
from danube.core.partition.policy import Durability
from danube.core.placement.recovered import LOG_EPOCHS, recovery_of
from danube.errors import DanubeError, StorageFailed
from danube.host import telemetry
from danube.limits import UNSYNCED_RECORDS_MAX
from danube.wal.log.cursors import CursorStore
from danube.wal.log.log import Log, LogIdentity, LogOptions
from danube.wal.recovery.witness import Witness, load_witness, remove_witness
from danube.wal.segments.local_holes import OffsetJump
from danube.wal.segments.segment import log_id_of_topic

_log = telemetry.events("opening")
ANY_EPOCH = 1 << 32  # above all epochs of logs
CHECKPOINT_SCANNED_BYTES = 8 * 1024 * 1024


def partition_directory(root: Path, topic_id: int, index: int) -> Path:
    """Directory of a partition: ids only, never text that a user chose."""
    return root / f"{topic_id:016x}-{index}"


def open_log(
    root: Path, name: str, record: TopicRecord, index: int, epoch: int, options: LogOptions,
    trusted_end: int | None = None, budget: OffsetBudget | None = None, ahead: OffsetJump | None = None,
    witness: Witness | None = None,
) -> OpenedStorage:  # fmt: skip
    """Recover the log and rebuild the partition's state of producers.

    ``budget``: in a cluster, the offsets that this owner has reserved.  On one host: ``ahead``, the jump of a
    log of a former history, and ``witness``, the record of which data must exist.
    """
    directory = partition_directory(root, record.topic_id, index)
    identity = LogIdentity(record.topic_id, index)
    options = options._replace(log_id=log_id_of_topic(record))
    log = Log.open(directory, identity, epoch, options, trusted_end=trusted_end, ahead=ahead, witness=witness)
    core = (
        Partition(name, epoch, record.policy, log.log_end)
        if budget is None
        else ReservedPartition(name, epoch, record.policy, log.log_end, budget)
    )
    core.restore(log.recovery.producer_snapshot, log.recovery.headers)
    return OpenedStorage(log, core)


def open_partition(
    root: Path,
    name: str,
    record: TopicRecord,
    index: int,
    epoch: int,
    options: LogOptions,
    counters: Traffic,
    budget: OffsetBudget | None = None,
    ahead: OffsetJump | None = None,
    *,
    tiered: bool = False,
) -> HostedPartition:
    """Open a partition of either kind; blocks on the disk for a reliable one."""
    if not record.policy.reliable:
        return HostedPartition(name, record, index, Partition(name, epoch, record.policy, 0), counters)
    directory = partition_directory(root, record.topic_id, index)
    log_id = log_id_of_topic(record)
    witness: Witness | None = None
    if budget is None:  # in a cluster a partition's directory comes and goes
        witness = load_witness(directory, log_id, holds_all=not tiered)
    else:
        remove_witness(directory)  # from the time before this broker was in a cluster
    opened = open_log(root, name, record, index, epoch, options, budget=budget, ahead=ahead, witness=witness)
    identity = LogIdentity(record.topic_id, index)
    cursors = CursorStore(directory, identity, CursorState.decode, witness, log_id)
    hosted = HostedPartition(
        name, record, index, opened.core, counters, directory=directory, log=opened.log, cursors=cursors
    )
    hosted.load_subscriptions(cursors.load())
    return hosted


def ahead_of(state: Metadata, topic_id: int) -> OffsetJump | None:
    """Return the jump of offsets for logs from before the topic's current history; None without one."""
    history = recovery_of(state).history_of(topic_id)
    if history is None or not history.first_epoch:
        return None
    return OffsetJump(history.first_epoch, history.since_us, history.why)


def lost_before(since: Since, record: TopicRecord) -> int:
    """Return the incarnation before which unsynced records of this topic may be lost; 0: none are."""
    return 0 if record.policy.level >= Durability.FSYNC else since.incarnation


def after_cut(
    since: Since, record: TopicRecord, ahead: OffsetJump | None, *, first_epoch: int = 0
) -> OffsetJump | None:
    """Return ``ahead`` with the jump of offsets for logs that were last written before the machine crashed.

    At most UNSYNCED_RECORDS_MAX records above the synced end were delivered or acknowledged; at fsync none.
    ``first_epoch`` is the lowest epoch of logs opened since then; 0, as on one host, derives it from the
    incarnation.
    """
    incarnation = lost_before(since, record)
    if not incarnation or record.created_us >= since.moment_us:
        return ahead
    first_epoch = first_epoch or incarnation * LOG_EPOCHS
    cut = OffsetJump(
        first_epoch, since.moment_us, "the machine ended before all was synced", UNSYNCED_RECORDS_MAX
    )
    return cut if ahead is None else msgspec.structs.replace(ahead, also=cut)


def outcome_of(name: str, done: Future[HostedPartition]) -> HostedPartition | DanubeError:
    """Return the partition that a thread has opened, or its expected error; raise any other error."""
    error = done.exception()
    if error is None:
        return done.result()
    if isinstance(error, DanubeError):
        return error
    if isinstance(error, OSError):
        return StorageFailed(f"{name} cannot be opened", why=str(error), hint="see the broker's log")
    raise error


def follow_recovery(hosted: HostedPartition) -> None:
    """On the loop: store the result of a long recovery, so that no other repeats it; report damage."""
    log = hosted.log
    if log is None:
        return
    if log.recovery.scanned_bytes > CHECKPOINT_SCANNED_BYTES:
        log.checkpoint(hosted.core.snapshot(log.synced_end))
    hosted.damaged = [(found.start, found.end) for found in log.damage if found.start < found.end]
    for found in log.recovery.damaged:
        _log.error("damage found", partition=hosted.name, damage=str(found))
    for file in log.recovery.unfinished_seals:
        _log.info(
            "a seal was unfinished and is done anew; no record is missing for it",
            partition=hosted.name,
            file=file,
        )
    _tell_of_cursors(hosted)
    if log.recovery.damaged:
        hosted.counters.add("damaged_records", len(log.recovery.damaged))


def _tell_of_cursors(hosted: HostedPartition) -> None:
    damage = hosted.cursors.damage if hosted.cursors is not None else ()
    for found in damage:
        _log.error(
            "stored cursor is damaged: an older one counts, or else the earliest record",
            partition=hosted.name, file=found.file, position=found.position, why=found.why,
        )  # fmt: skip
    for name in sorted(hosted.cursors.lost) if hosted.cursors is not None else ():
        _log.error(
            "the cursor of a subscription is gone: it begins at the earliest record when it comes back",
            partition=hosted.name, subscription=name,
        )  # fmt: skip
    if damage:
        hosted.counters.add("damaged_records", len(damage))
