"""A data directory from an object store: metadata, cursors and producers; records stay where they are.

All files are written below ``restoring`` first.  Then a file ``complete`` is put there, and only then the
parts get their names.  So an interrupted restore is begun anew or completed, and a directory with data is
never changed.

    restoring/metadata/metadata.log          the newest metadata snapshot that can be read
    restoring/partitions/<id>/<offset>.seg   an empty log that continues behind the uploaded records
                             /producers      the state of producers at that offset
                             /cursors-*      the newest copy of the cursors, none beyond that offset
    restoring/complete                       the store's identity and the largest epoch

The metadata begins a new history (:mod:`danube.core.placement.recovered`).  Offsets that the lost host gave
but did not upload must not be given again, so each log continues far ahead when it is opened.
"""

from __future__ import annotations

import errno
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import msgspec

from danube.broker.processes.data_dir import DataDir
from danube.broker.processes.directories import partition_names
from danube.cluster.log import log_file
from danube.core.batch.columns import scan
from danube.core.batch.format import BatchHeader, read_header
from danube.core.dispatch.cursor import CursorState
from danube.core.metadata.commands import TopicRecord
from danube.core.metadata.machine import Metadata
from danube.core.partition.partition import Partition
from danube.core.partition.policy import TopicPolicy
from danube.core.placement.recovered import INCARNATIONS_AHEAD, LOG_EPOCHS, History, recovered
from danube.errors import Damage, ObjectMissing, StorageFailed, StoreDamaged, WrongState
from danube.host import files, telemetry
from danube.host.clock import wall_us
from danube.wal.log.cursors import CursorStore, read_cursor_file
from danube.wal.recovery.carry import create_empty
from danube.wal.recovery.producers import Checkpoint, write_checkpoint
from danube.wal.recovery.witness import DIRECTORY as WITNESSES
from danube.wal.segments.segment import (
    HEADER_BYTES,
    SUMMARY_BYTES,
    LogIdentity,
    log_id_of_topic,
    read_summary,
    split_footer,
)
from danube.wal.stores.objects import ObjectStore
from danube.wal.tier.binding import StoreIdentity, bind, stored_identity
from danube.wal.tier.keys import (
    METADATA_PREFIX,
    PARTITIONS_PREFIX,
    cursors_prefix,
    manifest_prefix,
    parse_key,
    segment_key,
)
from danube.wal.tier.manifest import Manifest
from danube.wal.tier.uploader import Ownership

THREADS: Final = 16
STAGING: Final = "restoring"
COMPLETE: Final = "complete"
_Copy = TypeVar("_Copy")
_COMPLETE_BYTES_MAX: Final = 4096
_log = telemetry.events("restore")


class Restored(NamedTuple):
    """Counts of restored parts; ``problems`` are sentences about the others."""

    topics: int
    partitions: int
    objects: int
    bytes: int
    subscriptions: int
    problems: list[str]


class _Complete(msgspec.Struct, frozen=True):
    """Content of the file ``complete``."""

    store: StoreIdentity
    epoch: int


class _Found(NamedTuple):
    """One restored partition."""

    epoch: int = 0
    objects: int = 0
    size_bytes: int = 0
    subscriptions: int = 0
    problems: tuple[str, ...] = ()


def holds_data(data_dir: Path) -> bool:
    """Return whether the directory holds a broker's data."""
    return bool(partition_names(data_dir)) or (data_dir / "metadata" / "metadata.log").exists()


def finish_restore(data_dir: Path) -> bool:
    """Complete a restore that was interrupted after all files were written; False without one."""
    staging = data_dir / STAGING
    try:
        done = msgspec.json.decode(
            files.read_bounded(staging / COMPLETE, _COMPLETE_BYTES_MAX), type=_Complete
        )
    except FileNotFoundError:
        return False
    data = DataDir(data_dir)
    try:
        shutil.rmtree(data_dir / WITNESSES, ignore_errors=True)  # they belong to the lost logs
        data.advance_incarnation(done.epoch // LOG_EPOCHS)
        for name in ("partitions", "metadata"):
            if (staging / name).is_dir():
                _take_over(staging / name, data_dir / name)
        files.fsync_directory(data_dir)
        bind(data_dir, done.store)
        files.unlink(staging / COMPLETE)
        files.fsync_directory(staging)
        shutil.rmtree(staging)
    except OSError as error:
        raise StorageFailed("the restore cannot be ended", why=str(error), hint="run it again") from error
    finally:
        data.close()
    return True


def _take_over(source: Path, target: Path) -> None:
    """Move the files of ``source`` into ``target``, whose other files stay.  May be repeated."""
    files.make_directory(target)
    for name in files.list_names(source):
        try:
            files.rename(source / name, target / name)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            _copy_over(source / name, target / name)  # another disk is mounted at the target
    files.fsync_directory(target)


def _copy_over(source: Path, target: Path) -> None:
    """Copy a file, or a directory of files, to another file system; the name appears with the whole copy."""
    unfinished = target.with_name(target.name + ".new")
    if source.is_dir():
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.rmtree(target, ignore_errors=True)  # the rest of an interrupted attempt
        files.make_directory(unfinished)
        for name in files.list_names(source):
            files.replace_durably(unfinished / name, (source / name).read_bytes())
        files.rename(unfinished, target)
        shutil.rmtree(source)
    else:
        files.replace_durably(target, source.read_bytes())
        files.unlink(source)


def restore_if_empty(store: ObjectStore, data_dir: Path) -> Restored | None:
    """Restore at a start if the directory is empty and the store holds a broker's data."""
    if finish_restore(data_dir) or holds_data(data_dir):
        return None
    if stored_identity(store) is None or not _metadata_keys(store):
        return None
    return restore_from(store, data_dir)


def restore_from(
    store: ObjectStore,
    data_dir: Path,
    *,
    older_metadata: bool = False,
    progress: Callable[[str], None] = lambda line: None,
) -> Restored:
    """Fill ``data_dir`` from ``store``; takes a request or two for each partition.

    Raises WrongState if the directory holds data, AlreadyRunning, ObjectMissing if the store holds no
    broker's data, StoreDamaged if the newest copy of the metadata cannot be read (with ``older_metadata``: no
    copy), StoreUnavailable, StorageFailed.
    """
    if finish_restore(data_dir):
        progress("a restore that was cut off has been ended; nothing was read from the store")
        return Restored(0, 0, 0, 0, 0, [])
    if holds_data(data_dir):
        raise WrongState(
            f"{data_dir} holds data", why="a restore never overwrites", hint="give an empty --data-dir"
        )
    data = DataDir(data_dir)
    try:
        restored = _stage(store, data_dir / STAGING, older_metadata, progress)
    except OSError as error:
        raise StorageFailed(f"{data_dir} cannot be written", why=str(error)) from error
    finally:
        data.close()
    finish_restore(data_dir)
    return restored


def _stage(
    store: ObjectStore, staging: Path, older_metadata: bool, progress: Callable[[str], None]
) -> Restored:
    identity = stored_identity(store)
    if identity is None:
        raise ObjectMissing(f"{store.name} holds no broker's data", hint="check the bucket and the prefix")
    shutil.rmtree(staging, ignore_errors=True)
    files.make_directory(staging / "partitions")
    metadata, problems = _newest_metadata(store)
    if problems and not older_metadata:
        older = f"version {metadata.version} and {metadata.topic_count} topics"
        raise StoreDamaged(
            "the newest copy of the metadata cannot be read, so nothing was restored",
            why=f"{problems[0]}; the next one has {older}",
            hint="`danube storage restore --older-metadata` goes on with that one, without topics,"
            " settings and schemas that are newer",
        )
    problems += _pass_unknown_ids(store, metadata)
    progress(f"metadata version {metadata.version}: {metadata.topic_count} topics")
    records = [record for record in metadata.topics(None) if record.policy.reliable]
    jobs = [(record, index) for record in records for index in range(record.partition_count)]
    with ThreadPoolExecutor(THREADS, thread_name_prefix="danube-restore") as pool:
        found = list(pool.map(lambda job: _restore_partition(store, staging / "partitions", *job), jobs))
    files.fsync_directory(staging / "partitions")
    epoch = max((one.epoch for one in found), default=0) + INCARNATIONS_AHEAD * LOG_EPOCHS
    history = History(
        uuid.uuid4().hex, wall_us(), (epoch // LOG_EPOCHS + 1) * LOG_EPOCHS,
        "restored from the object store",
    )  # fmt: skip
    files.make_directory(staging / "metadata")
    snapshot = recovered(metadata, history).snapshot()
    files.replace_durably(staging / "metadata" / "metadata.log", log_file.new_file(1, snapshot))
    files.fsync_directory(staging)
    files.replace_durably(staging / COMPLETE, msgspec.json.encode(_Complete(identity, epoch)))
    for one in found:
        problems += one.problems
    return Restored(
        metadata.topic_count, len(jobs), sum(one.objects for one in found),
        sum(one.size_bytes for one in found), sum(one.subscriptions for one in found), problems,
    )  # fmt: skip


def _metadata_keys(store: ObjectStore) -> list[str]:
    """Return the keys of all copies of the metadata."""
    return [one.key for one in store.list(METADATA_PREFIX) if parse_key(one.key) is not None]


def _newest_metadata(store: ObjectStore) -> tuple[Metadata, list[str]]:
    metadata, problems = _newest(store, _metadata_keys(store), Metadata.restore)
    if metadata is not None:
        return metadata, problems
    if problems:
        raise StoreDamaged("no copy of the metadata can be read", why=problems[0], hint="see `danube verify`")
    raise ObjectMissing(f"{store.name} holds no metadata", hint="check the bucket and the prefix")


def _pass_unknown_ids(store: ObjectStore, metadata: Metadata) -> list[str]:
    """Advance the topic ids beyond those of topics made after the copy of the metadata; report these."""
    problems: list[str] = []
    after = f"{PARTITIONS_PREFIX}{metadata.next_topic_id - 1:016x}-~"
    while (found := next(iter(store.list(PARTITIONS_PREFIX, after)), None)) is not None:
        parsed = parse_key(found.key)
        if parsed is None or parsed.identity is None:
            after = found.key
            continue
        topic_id = parsed.identity.topic_id
        problems.append(
            f"topic {topic_id:x} is newer than the copy of the metadata; its objects are left alone"
        )
        metadata.next_topic_id = max(metadata.next_topic_id, topic_id + 1)
        after = f"{PARTITIONS_PREFIX}{topic_id:016x}-~"
    return problems


def _restore_partition(store: ObjectStore, root: Path, record: TopicRecord, index: int) -> _Found:
    identity = LogIdentity(record.topic_id, index)
    name = record.physical_name(index)
    manifest, problems = _newest_manifest(store, identity)
    if manifest is None:
        return _Found(problems=tuple(f"{name}: {problem}" for problem in problems))
    directory = root / identity.directory_name
    files.make_directory(directory)
    end = manifest.uploaded_end
    created_us = manifest.entry(len(manifest) - 1).last_append_us if len(manifest) else 0
    log_id = log_id_of_topic(record)
    create_empty(directory, identity, manifest.epoch, end, created_us, log_id)
    owner = Ownership(name, identity, manifest.epoch, directory, log_id)
    try:
        restore_producers(store, owner, manifest, directory)
    except Damage as error:
        problems.append(f"producers are forgotten: {error}")
    subscriptions = 0
    try:
        subscriptions = restore_cursors(store, owner, manifest, directory)
    except Damage as error:
        problems.append(f"cursors are lost: {error}")
    told = tuple(f"{name}: {problem}" for problem in problems)
    return _Found(manifest.epoch, len(manifest), manifest.size_bytes, subscriptions, told)


def _newest_manifest(store: ObjectStore, identity: LogIdentity) -> tuple[Manifest | None, list[str]]:
    def decode(data: bytes) -> Manifest:
        manifest = Manifest.decode(data)
        if manifest.identity != identity:
            raise Damage("it is of another partition")
        return manifest

    return _newest(store, (one.key for one in store.list(manifest_prefix(identity))), decode)


def _newest(
    store: ObjectStore, keys: Iterable[str], decode: Callable[[bytes], _Copy]
) -> tuple[_Copy | None, list[str]]:
    """Return the newest copy that can be read, and the faults of newer ones."""
    problems: list[str] = []
    for key in sorted(keys, reverse=True):
        try:
            return decode(store.get(key)), problems
        except Damage as error:
            problems.append(f"{key} cannot be read: {error}")
    return None, problems


def restore_producers(store: ObjectStore, owner: Ownership, manifest: Manifest, directory: Path) -> None:
    """Write the state of producers at the end of the last object.

    It comes from the newest snapshot in a footer and the headers of the batches behind it.  Raises Damage if
    these cannot be read.
    """
    number, snapshot = len(manifest), None
    while number > 0 and snapshot is None:
        number -= 1
        snapshot = _footer_snapshot(store, manifest, number)
    end = manifest.uploaded_end
    core = Partition(owner.topic, owner.epoch, TopicPolicy(), end)
    first = number + 1 if snapshot is not None else 0
    core.restore(snapshot, _headers(store, manifest, first))
    write_checkpoint(directory, owner.identity, Checkpoint(end, core.snapshot(end)))


def _footer_snapshot(store: ObjectStore, manifest: Manifest, number: int) -> bytes | None:
    entry = manifest.entry(number)
    data = store.get(segment_key(manifest.identity, entry), entry.data_end, entry.size_bytes)
    summary = read_summary(data[-SUMMARY_BYTES:], entry.size_bytes)
    if summary is None:
        raise Damage("an object has no footer")
    return split_footer(data[:-SUMMARY_BYTES], summary)[1]


def _headers(store: ObjectStore, manifest: Manifest, first: int) -> Iterator[BatchHeader]:
    for number in range(first, len(manifest)):
        entry = manifest.entry(number)
        data = store.get(segment_key(manifest.identity, entry), HEADER_BYTES, entry.data_end)
        for position in scan(data).positions.tolist():
            yield read_header(data, position)


def restore_cursors(store: ObjectStore, owner: Ownership, manifest: Manifest, directory: Path) -> int:
    """Write the newest copy that can be read; return the number of subscriptions.

    Cursors beyond the manifest's end are moved back, because they would skip records.  Raises Damage if there
    are copies and none can be read.
    """
    identity, end = owner.identity, manifest.uploaded_end
    keys = sorted((one.key for one in store.list(cursors_prefix(identity))), reverse=True)
    states: dict[str, bytes] = {}
    problem: Damage | None = None
    whole = False
    for key in keys:
        copy = directory / "cursors-copy"
        files.replace_durably(copy, store.get(key))
        held = read_cursor_file(copy, identity, CursorState.decode, owner.log_id)
        files.unlink(copy)
        if held is not None:  # a readable state in a newer copy overrides those of older ones
            states = {**{name: blob for name, blob in held.states.items() if blob is not None}, **states}
            whole = not held.damaged
            if whole:
                break
        problem = Damage(f"{key} cannot be read", why=held.damaged[0][1] if held is not None else "")
        _log.warning("an older copy of cursors is used", topic=owner.topic, key=key, why=problem.why)
    if problem is not None and not whole and not states:
        raise problem
    cursors = CursorStore(directory, identity, log_id=owner.log_id)
    cursors.load()
    for name, blob in states.items():
        cursors.store(name, _clamped(blob, end))
    cursors.write()
    job = cursors.sync_job()
    if job is not None:
        job.run()
    cursors.close()
    return len(states)


def _clamped(blob: bytes, end: int) -> bytes:
    return CursorState.decode(blob).clipped(end).encode()
