"""A store in memory that fails, lies, crashes its caller or is late at chosen calls, and sealed segments."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from danube.core.batch.checksum import content_hash
from danube.errors import StoreUnavailable
from danube.wal.segments.segment import LogIdentity, base_offset_of
from danube.wal.stores.objects import ObjectInfo, ObjectStore
from danube.wal.tier.keys import manifest_prefix, segment_key
from danube.wal.tier.manifest import Manifest
from tests.fakes.memory_store import MemoryStore
from tests.unit.wal_samples import IDENTITY, append, open_log, roll, sync

TOPIC = "/default/orders"


class Crash(BaseException):
    """The process ends here."""


Fault = Callable[[str, tuple[Any, ...], Callable[[], Any]], Any]


def fail_before(name: str, arguments: tuple[Any, ...], call: Callable[[], Any]) -> Any:
    raise StoreUnavailable("the store is away")


def fail_after(name: str, arguments: tuple[Any, ...], call: Callable[[], Any]) -> Any:
    call()
    raise StoreUnavailable("the answer was lost")


def crash_before(name: str, arguments: tuple[Any, ...], call: Callable[[], Any]) -> Any:
    raise Crash


def crash_after(name: str, arguments: tuple[Any, ...], call: Callable[[], Any]) -> Any:
    call()
    raise Crash


class FaultyStore:
    """Every call goes through ``faults``: by number (from 0), else by ``always``."""

    def __init__(self) -> None:
        self.memory = MemoryStore()
        self.name = self.memory.name
        self.calls: list[str] = []
        self.faults: dict[int, Fault] = {}
        self.always: Fault | None = None

    def _call(self, name: str, arguments: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        fault = self.faults.pop(len(self.calls), self.always)
        self.calls.append(name)
        return call() if fault is None else fault(name, arguments, call)

    def put(self, key: str, data: bytes) -> None:
        self._call("put", (key, data), lambda: self.memory.put(key, data))

    def put_file(self, key: str, path: Path, *how: Any) -> None:
        self._call("put_file", (key, path), lambda: self.memory.put_file(key, path, *how))

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        found: bytes = self._call("get", (key,), lambda: self.memory.get(key, start, end))
        return found

    def get_to(self, key: str, start: int, end: int, fd: int, position: int) -> None:
        self._call("get_to", (key,), lambda: self.memory.get_to(key, start, end, fd, position))

    def head(self, key: str) -> ObjectInfo | None:
        found: ObjectInfo | None = self._call("head", (key,), lambda: self.memory.head(key))
        return found

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        return iter(self._call("list", (prefix,), lambda: [*self.memory.list(prefix, after)]))

    def delete(self, keys: Iterable[str]) -> None:
        doomed = [*keys]
        self._call("delete", (doomed,), lambda: self.memory.delete(doomed))

    def clean_uploads(self, older_than_us: int) -> int:
        return 0


def make_segments(directory: Path, count: int, batches: int = 2, epoch: int = 1) -> list[Path]:
    """``count`` sealed segments of a real log, and an active one behind them."""
    log = open_log(directory, epoch)
    for number in range(count):
        for batch in range(batches):
            append(log, b"%d/%d" % (number, batch) * 10, b"second")
        log.write()
        sync(log)
        roll(log, b"snapshot")
    append(log, b"active")
    log.write()
    sync(log)
    log.abandon()
    return sorted(path for path in directory.iterdir() if base_offset_of(path.name) is not None)[:count]


def copy_segments(paths: Iterable[Path], directory: Path) -> list[Path]:
    directory.mkdir(parents=True, exist_ok=True)
    return [Path(shutil.copy(path, directory)) for path in paths]


def newest_manifest(store: ObjectStore, identity: LogIdentity = IDENTITY) -> Manifest | None:
    """As a reader that shares nothing with the uploader finds it."""
    keys = [found.key for found in store.list(manifest_prefix(identity))]
    return Manifest.decode(store.get(keys[-1])) if keys else None


def check_store(store: MemoryStore, originals: dict[int, bytes], present: set[int]) -> None:
    """The invariant: no manifest names a missing or different object; every segment is local or named.

    ``originals``: file contents by base offset; ``present``: base offsets of the files that are still local.
    """
    manifest = newest_manifest(store)
    covered: set[int] = set()
    for index in range(len(manifest) if manifest is not None else 0):
        assert manifest is not None
        entry = manifest.entry(index)
        data = store.get(segment_key(IDENTITY, entry))
        assert len(data) == entry.size_bytes
        assert content_hash(data[: entry.data_end]) == entry.content_hash
        inside = [base for base in originals if entry.base_offset <= base < entry.end_offset]
        if len(inside) == 1:
            assert data == originals[inside[0]]
        covered |= set(inside)
    lost = set(originals) - covered - present
    assert not lost, f"segments {lost} are neither local nor in the store"
