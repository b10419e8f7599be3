"""Places of history: a broker's data directory, or an object store with its manifests.

Both tell which topics there are and which segments a partition has, from names, headers, footers and
manifests alone; records are read by :mod:`danube.spark.history.fetch`.  Nothing is ever changed.  A place is
pickled into tasks, so it holds no open file and no connection.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

from danube.cluster.log.committed import read_committed
from danube.config.sections import StorageSettings
from danube.core.metadata.machine import Metadata
from danube.errors import InvalidArgument, NotFound, ObjectMissing, StorageFailed
from danube.spark.history.local_segments import LocalSegments
from danube.spark.history.segments import PartitionHistory, SegmentRef
from danube.wal.segments.local_holes import holes_in
from danube.wal.segments.segment import LogIdentity
from danube.wal.stores.objects import ObjectStore
from danube.wal.stores.opening import check_store_url, open_store
from danube.wal.tier.keys import METADATA_PREFIX, PARTITIONS_PREFIX, manifest_prefix, segment_key
from danube.wal.tier.manifest import EntryFlag, Manifest, SegmentEntry

_ATTEMPTS: Final = 3


@dataclass(frozen=True)
class DataDirectory:
    """A broker's data directory, read beside the running broker or without one."""

    path: str

    @property
    def name(self) -> str:
        return self.path

    def metadata(self) -> Metadata:
        path = Path(self.path) / "metadata" / "metadata.log"
        try:
            return read_committed(path)
        except FileNotFoundError:
            raise NotFound(
                f"there is no metadata log in {self.path}",
                hint="name a broker's data directory, or a store's URL",
            ) from None
        except OSError as error:
            raise StorageFailed(f"{path} cannot be read", why=str(error)) from None

    def history(self, identity: LogIdentity, *, unsynced: bool = True) -> PartitionHistory:
        directory = Path(self.path) / PARTITIONS_PREFIX / identity.directory_name
        segments = LocalSegments(directory, identity).found(unsynced=unsynced)
        holes = holes_in(directory)
        return PartitionHistory(identity, segments[0].start if segments else 0, segments, holes)

    def segment_path(self, identity: LogIdentity, key: str) -> Path:
        return Path(self.path) / PARTITIONS_PREFIX / identity.directory_name / key


@dataclass(frozen=True)
class StorePlace:
    """An object store.  ``settings`` may hold secrets, which no ``repr`` shows."""

    settings: StorageSettings

    @property
    def name(self) -> str:
        return self.settings.url.rpartition("@")[2]

    def __repr__(self) -> str:
        return f"StorePlace({self.name!r})"

    def store(self) -> ObjectStore:
        """The connection of this process."""
        return _opened(self.settings)

    def metadata(self) -> Metadata:
        """Topics and schemas as the store's copy has them; NotFound where there is none."""
        newest = self._newest(METADATA_PREFIX)
        if newest is None:
            raise NotFound(f"{self.name} holds no metadata", hint="check the URL and its prefix")
        return Metadata.restore(newest)

    def history(self, identity: LogIdentity, *, unsynced: bool = True) -> PartitionHistory:
        manifest = self.manifest(identity)
        if manifest is None:
            return PartitionHistory(identity, 0, [])
        segments, holes = list(_segments_of(manifest)), tuple(manifest.all_holes())
        return PartitionHistory(identity, manifest.start_offset, segments, holes)

    def manifest(self, identity: LogIdentity) -> Manifest | None:
        """The manifest in force; None if nothing was uploaded."""
        newest = self._newest(manifest_prefix(identity))
        return None if newest is None else Manifest.decode(newest)

    def _newest(self, prefix: str) -> bytes | None:
        """The object that comes last below ``prefix``; None if there is none."""
        store = self.store()
        for _ in range(_ATTEMPTS):
            keys = [info.key for info in store.list(prefix)]
            if not keys:
                return None
            with suppress(ObjectMissing):  # a few are kept, and newer ones came while this one was fetched
                return store.get(keys[-1])
        raise NotFound(f"what lies below {prefix} in {self.name} changes too fast")


AnyPlace = DataDirectory | StorePlace


def open_place(storage: str, settings: StorageSettings | None = None) -> AnyPlace:
    """The place that ``storage`` names: a directory or a URL (``s3://``, ``file://``, ``gs://``, ``az://``).

    A ``file://`` URL or directory with a broker's metadata log is a data directory, any other directory a
    store.  NotFound where there is no such directory, InvalidArgument for a URL that is not known.
    """
    scheme, found, rest = storage.partition("://")
    if found and scheme != "file":
        check_store_url(storage)
        return StorePlace(_with_url(settings, storage))
    path = Path(os.path.expanduser(rest if found else storage)).absolute()
    if not path.is_dir():
        raise NotFound(f"there is no directory {path}", hint="name a broker's data directory or a store")
    if (path / "metadata" / "metadata.log").exists():
        return DataDirectory(str(path))
    return StorePlace(_with_url(settings, f"file://{path}"))


def _with_url(settings: StorageSettings | None, url: str) -> StorageSettings:
    if settings is None:
        return StorageSettings(url=url)
    if settings.url not in ("", url):
        raise InvalidArgument(f"settings for {settings.url} cannot open {url}")
    values = {name: getattr(settings, name) for name in StorageSettings.__slots__}
    return StorageSettings(**{**values, "url": url})


@lru_cache(maxsize=16)
def _opened(settings: StorageSettings) -> ObjectStore:
    return open_store(settings)


def _segments_of(manifest: Manifest) -> Iterator[SegmentRef]:
    """The entries as segments; plain values come out of numpy all at once."""
    start, identity = manifest.start_offset, manifest.identity
    for one in map(SegmentEntry._make, manifest.entries.tolist()):
        yield SegmentRef(
            segment_key(identity, one), one.base_offset, one.end_offset, max(one.base_offset, start),
            one.end_offset, one.size_bytes, one.data_end, one.record_count, one.first_append_us,
            one.last_append_us, one.epoch, True, bool(one.flags & EntryFlag.COMPACTED),
            bool(one.flags & EntryFlag.HOLE_BEFORE),
        )  # fmt: skip
