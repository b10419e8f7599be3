"""An object store in this process's memory."""

from __future__ import annotations

import hashlib
import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from pathlib import Path

from danube.errors import ObjectMissing, StoreDamaged
from danube.host.clock import wall_us
from danube.wal.stores.objects import (
    AS_USUAL,
    ObjectInfo,
    Putting,
    check_key,
    check_range,
    open_source,
    read_exactly,
    write_exactly,
)


class MemoryStore:
    name = "memory://"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._objects: dict[str, tuple[bytes, ObjectInfo]] = {}

    def put(self, key: str, data: bytes) -> None:
        kept = bytes(data)
        etag = hashlib.blake2b(kept, digest_size=16).hexdigest()
        info = ObjectInfo(check_key(key), len(kept), etag, wall_us())
        with self._lock:
            self._objects[key] = (kept, info)

    def put_file(self, key: str, path: Path, how: Putting = AS_USUAL) -> None:
        import os

        fd, size = open_source(path)
        try:
            data = read_exactly(fd, size, 0, path)
        finally:
            os.close(fd)
        self.put(key, data)
        how.progress(size)

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        check_range(start, end)
        with self._lock:
            found = self._objects.get(check_key(key))
        if found is None:
            raise ObjectMissing(f"there is no object {key}", store=self.name, key=key)
        data = found[0]
        end = len(data) if end is None else end
        if start > len(data) or end > len(data):
            raise StoreDamaged(
                f"object {key} ends at {len(data)}", why=f"{end} was asked for", store=self.name, key=key
            )
        return data[start:end]

    def get_to(self, key: str, start: int, end: int, fd: int, position: int) -> None:
        write_exactly(fd, self.get(key, start, end), position)

    def head(self, key: str) -> ObjectInfo | None:
        with self._lock:
            found = self._objects.get(check_key(key))
        return found[1] if found is not None else None

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        with self._lock:
            keys = sorted(key for key in self._objects if key.startswith(prefix))
        for key in keys[bisect_right(keys, after) :]:
            info = self.head(key)
            if info is not None:
                yield info

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            with self._lock:
                self._objects.pop(check_key(key), None)

    def clean_uploads(self, older_than_us: int) -> int:
        return 0  # a put is one step here
