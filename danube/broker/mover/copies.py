"""Work of the mover that belongs to no partition: metadata snapshots, deleted topics, unfinished uploads.

It also writes the copies that a restore needs beside segments: metadata snapshots and cursors.

Blocking; the mover's threads run it.  A copy is read back before an older one is removed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from danube.errors import DanubeError, StoreDamaged
from danube.host import files, telemetry
from danube.wal.log.cursors import HEADER_BYTES
from danube.wal.segments.segment import LogIdentity
from danube.wal.stores.objects import ObjectStore, local_failure
from danube.wal.tier.keys import METADATA_PREFIX, cursors_key, cursors_prefix, metadata_key, parse_key
from danube.wal.tier.orphans import delete_partition, prune_copies
from danube.wal.tier.uploader import Uploader

METADATA_INTERVAL_S: Final = 2.0  # least time between two snapshots


def put_metadata(store: ObjectStore, version: int, blob: bytes) -> None:
    """Store the snapshot of metadata ``version`` and remove all but the newest few."""
    _put(store, metadata_key(version), blob)
    prune_copies(store, METADATA_PREFIX)


def put_cursors(uploader: Uploader, blob: bytes, generation: int) -> int:
    """Store a copy of a partition's cursors; return its generation, which the next call needs.

    ``generation`` 0: not known yet.  The copy of an owner with a higher epoch is the newer one.  Without
    subscriptions and without an earlier copy, none is stored and 0 is returned.
    """
    prefix, epoch = cursors_prefix(uploader.identity), uploader.owner.epoch
    if not generation:
        found = [parse_key(one.key) for one in uploader.store.list(prefix)]
        if not found and len(blob) == HEADER_BYTES:
            return 0
        # The next generation, because a late put of an earlier mover may still overwrite the last one.
        generation = 1 + max((one.generation for one in found if one and one.epoch == epoch), default=0)
        generation += uploader.start_count
    else:
        generation += 1
    _put(uploader.store, cursors_key(uploader.identity, epoch, generation), blob)
    prune_copies(uploader.store, prefix)
    return generation


def _put(store: ObjectStore, key: str, blob: bytes) -> None:
    store.put(key, blob)
    if store.get(key) != blob:
        raise StoreDamaged(f"object {key} is not what was put", why="reading it back differs", key=key)


DELETIONS_NAME: Final = "deletions"
DELETIONS_BYTES_MAX: Final = 16 << 20
RETRY_S: Final = 5.0
CLEAN_UPLOADS_S: Final = 3_600.0

Job = Callable[[], Any]
Ended = Callable[[Any, DanubeError | None], None]

_log = telemetry.events("mover")


class Mover(Protocol):
    """Members of the mover that its parts use."""

    @property
    def store(self) -> ObjectStore: ...
    def block(self, job: Job, ended: Ended) -> None: ...
    def call_later(self, delay_s: float, action: Callable[[], None]) -> None: ...
    def settled(self, topic_id: int) -> bool: ...
    def retire_earlier(self, identity: LogIdentity) -> str: ...


def clean_uploads(mover: Mover, older_us: int) -> None:
    """Remove unfinished multipart uploads now and every hour or sooner: they cost money unseen."""

    def cleaned(count: Any, error: DanubeError | None) -> None:
        if count:
            _log.info("unfinished uploads were dropped", count=count)
        elif error is not None:
            _log.warning("unfinished uploads cannot be dropped", why=str(error))

    mover.block(lambda: mover.store.clean_uploads(older_us), cleaned)
    again_s = min(CLEAN_UPLOADS_S, max(older_us / 1e6, 1.0))
    mover.call_later(again_s, lambda: clean_uploads(mover, older_us))


class MetadataCopies:
    """Puts the newest metadata snapshot into the store, at most one in METADATA_INTERVAL_S."""

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self._newest: tuple[int, bytes] | None = None
        self._stored_version = -1
        self._running = False
        self._scheduled = False
        self._usable = False

    @property
    def idle(self) -> bool:
        return not self._running and (self._newest is None or not self._usable)

    def take(self, version: int, blob: bytes) -> None:
        """Take a snapshot from a worker; one that is older than the last is ignored."""
        if version > max(self._stored_version, self._newest[0] if self._newest else -1):
            self._newest = (version, blob)
            self._schedule(METADATA_INTERVAL_S)

    def begin(self) -> None:
        """Begin to put snapshots; called when the store may be written."""
        self._usable = True
        self._schedule(0.0)

    def hurry(self) -> None:
        """Put the last snapshot without delay, because the mover stops."""
        self._put()

    def _schedule(self, delay_s: float) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._mover.call_later(delay_s, self._due)

    def _due(self) -> None:
        self._scheduled = False
        self._put()

    def _put(self) -> None:
        if self._running or self._newest is None or not self._usable:
            return
        self._running = True
        version, blob = self._newest
        self._mover.block(
            partial(put_metadata, self._mover.store, version, blob), partial(self._ended, version)
        )

    def _ended(self, version: int, _: Any, error: DanubeError | None) -> None:
        self._running = False
        if error is not None:
            _log.limited("metadata cannot be copied", source=self._mover.store.name, why=str(error))
            self._schedule(RETRY_S)
            return
        self._stored_version = version
        if self._newest is not None and self._newest[0] <= version:
            self._newest = None
        else:
            self._schedule(METADATA_INTERVAL_S)


class TopicDeletions:
    """Removes the objects of deleted topics.

    The list of objects to remove is on disk before the removal begins, because after the deletion no process
    would repeat the request.
    """

    def __init__(self, mover: Mover, data_dir: Path) -> None:
        self._mover = mover
        self._path = data_dir / DELETIONS_NAME
        self._partitions_by_topic: dict[int, int] = {}
        self._on_disk: dict[int, int] = {}
        self._usable = False
        self._running = False

    def begin(self) -> None:
        """Continue the removals of an earlier mover; called when the store may be written."""
        self._usable = True
        try:
            stored = msgspec.json.decode(
                files.read_bounded(self._path, DELETIONS_BYTES_MAX), type=dict[int, int]
            )
            self._on_disk = stored
            self._partitions_by_topic = {**stored, **self._partitions_by_topic}
        except FileNotFoundError:
            pass
        except (OSError, msgspec.DecodeError) as error:
            _log.error("deleted topics are not known", file=str(self._path), why=str(error))
        self._next()

    def add(self, topic_id: int, partitions: int) -> None:
        self._partitions_by_topic[topic_id] = partitions
        self._next()

    def retry(self) -> None:
        """Try waiting removals again, after an upload or step of a deleted topic has ended."""
        self._next()

    def _next(self) -> None:
        if self._running or not self._usable or not self._partitions_by_topic:
            return
        topics = dict(self._partitions_by_topic)
        ready = next((one for one in topics if self._mover.settled(one)), None)
        if ready is not None or topics != self._on_disk:
            self._running = True
            self._mover.block(lambda: self._work(topics, ready), self._ended)

    def _work(self, topics: dict[int, int], ready: int | None) -> int | None:
        """Remove some objects of one topic, in a thread; return its id when none are left."""
        self._store_file(topics)
        if ready is None:
            return None
        for number in range(topics[ready]):
            if delete_partition(self._mover.store, LogIdentity(ready, number)):
                return None
        self._store_file({one: count for one, count in topics.items() if one != ready})
        return ready

    def _store_file(self, topics: dict[int, int]) -> None:
        if topics == self._on_disk:
            return
        try:
            files.replace_durably(self._path, msgspec.json.encode(topics))
        except OSError as error:
            raise local_failure(self._path, error) from None
        self._on_disk = topics

    def _ended(self, topic_id: Any, error: DanubeError | None) -> None:
        self._running = False
        if error is not None:
            _log.limited("a deleted topic's objects stay", source=self._mover.store.name, why=str(error))
            self._mover.call_later(RETRY_S, self._next)
            return
        if topic_id is not None:
            self._partitions_by_topic.pop(topic_id, None)
            _log.info("a deleted topic's objects are removed", topic_id=topic_id)
        self._next()
