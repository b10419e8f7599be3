"""Uploading a large file in parts, several at a time, so that an interrupted upload is continued.

The store keeps the parts of an unfinished upload.  Whoever uploads the key next - after an outage, or a
new process after kill -9 - asks for them (``find_uploads``), compares each with the file by its MD5 and
sends only what is missing.  So a store that fails half of all requests still gets ahead, and nothing
needs to be remembered here.  An upload that cannot be continued is aborted; one that nobody asks for
again is an orphan, and :meth:`ObjectStore.clean_uploads` takes it.

The object appears with ``complete`` alone.  When the answer to that is lost, the repeated request finds no
upload; then the object's size tells whether the first one arrived.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, Protocol

from danube import limits
from danube.errors import DanubeError, ObjectMissing, StoreUnavailable
from danube.wal.stores.objects import ObjectInfo, Progress, open_source, read_exactly
from danube.wal.stores.retries import Retries

PARTS_MAX: Final = 10_000
PART_BYTES_LEAST: Final = 5 * limits.MIB  # of every part but the last, says S3


class PartCalls(Protocol):
    """The requests of a multipart upload; an upload that is not there is ObjectMissing."""

    def find_uploads(self, key: str) -> Sequence[str]:
        """Ids of the unfinished uploads of this key, the newest first."""
        ...

    def begin_upload(self, key: str) -> str: ...

    def stored_parts(self, key: str, upload_id: str) -> dict[int, tuple[str, int]]:
        """ETag and size by part number, from 1."""
        ...

    def put_part(self, key: str, upload_id: str, number: int, data: bytes) -> str:
        """Store one part; returns its ETag."""
        ...

    def complete_upload(self, key: str, upload_id: str, etags: Sequence[str]) -> None: ...

    def abort_upload(self, key: str, upload_id: str) -> None: ...

    def head(self, key: str) -> ObjectInfo | None: ...


def run_parallel(calls: Iterable[Callable[[], None]], parallel: int) -> None:
    """Run the calls, ``parallel`` at a time; after one failed no further one begins, and it is raised."""
    waiting = list(calls)
    if len(waiting) <= 1:
        for call in waiting:
            call()
        return
    failed = threading.Event()

    def guarded(call: Callable[[], None]) -> None:
        if failed.is_set():
            return
        try:
            call()
        except BaseException:
            failed.set()
            raise

    with ThreadPoolExecutor(parallel, thread_name_prefix="store") as pool:
        futures = [pool.submit(guarded, call) for call in waiting]
    for future in futures:
        future.result()


class FileUpload:
    """One file on its way to one key."""

    def __init__(
        self,
        calls: PartCalls,
        retries: Retries,
        key: str,
        path: Path,
        *,
        part_bytes: int,
        parallel: int,
        progress: Progress | None = None,
    ) -> None:
        self._calls = calls
        self._retries = retries
        self._key = key
        self._path = path
        self._part_bytes = part_bytes
        self._parallel = parallel
        self._progress = progress
        self._lock = threading.Lock()

    def run(self) -> None:
        """Upload; what is left at the store after StoreUnavailable is continued by the next upload."""
        fd, size = open_source(self._path)
        try:
            self._part_bytes = part_size(size, self._part_bytes)
            upload_id, etags = self._continued(fd, size) or (self._begun(), {})
            try:
                self._send(fd, size, upload_id, etags)
                self._complete(size, upload_id, [etags[number] for number in sorted(etags)])
            except StoreUnavailable:
                raise
            except BaseException:
                self._abort(upload_id)
                raise
        finally:
            os.close(fd)

    def _begun(self) -> str:
        return self._retries.run(lambda: self._calls.begin_upload(self._key))

    def _continued(self, fd: int, size: int) -> tuple[str, dict[int, str]] | None:
        """The newest unfinished upload whose parts are those of this file, with the ETags of its parts."""
        found = self._retries.run(lambda: self._calls.find_uploads(self._key))
        chosen = None
        for upload_id in found:
            parts = self._fitting_parts(fd, size, upload_id) if chosen is None else None
            if parts:
                chosen = (upload_id, parts)
                self._advance(sum(self._length(size, number) for number in parts))
            else:
                self._abort(upload_id)
        return chosen

    def _fitting_parts(self, fd: int, size: int, upload_id: str) -> dict[int, str]:
        """Empty when there is none, or one that does not belong to this file cut into these parts."""
        try:
            stored = self._retries.run(lambda: self._calls.stored_parts(self._key, upload_id))
        except ObjectMissing:
            return {}
        fitting = {}
        for number, (etag, length) in stored.items():
            if length != self._length(size, number):
                return {}
            data = read_exactly(fd, length, (number - 1) * self._part_bytes, self._path)
            if etag != hashlib.md5(data, usedforsecurity=False).hexdigest():
                return {}  # other bytes, or a store whose ETags are not MD5
            fitting[number] = etag
        return fitting

    def _send(self, fd: int, size: int, upload_id: str, etags: dict[int, str]) -> None:
        """Send the parts that ``etags`` does not have; at most ``parallel`` of them are in memory."""

        def send(number: int) -> None:
            length = self._length(size, number)
            data = read_exactly(fd, length, (number - 1) * self._part_bytes, self._path)
            etag = self._retries.run(lambda: self._calls.put_part(self._key, upload_id, number, data))
            with self._lock:
                etags[number] = etag
            self._advance(length)

        numbers = [number for number in range(1, self._count(size) + 1) if number not in etags]
        try:
            run_parallel([lambda number=number: send(number) for number in numbers], self._parallel)  # type: ignore[misc]
        except ObjectMissing as error:
            raise self._ended(error) from None

    def _complete(self, size: int, upload_id: str, etags: list[str]) -> None:
        try:
            self._retries.run(lambda: self._calls.complete_upload(self._key, upload_id, etags))
        except ObjectMissing as error:
            stored = self._retries.run(lambda: self._calls.head(self._key))
            if stored is None or stored.size != size:
                raise self._ended(error) from None

    def _ended(self, error: ObjectMissing) -> StoreUnavailable:
        return StoreUnavailable(
            f"the upload of {self._key} was ended by somebody else", why=error.what, key=self._key
        )

    def _abort(self, upload_id: str) -> None:
        """Drop the parts; a failure leaves them to :meth:`ObjectStore.clean_uploads`."""
        try:
            self._retries.run(lambda: self._calls.abort_upload(self._key, upload_id))
        except DanubeError:
            pass

    def _advance(self, count: int) -> None:
        if self._progress is not None and count:
            with self._lock:
                self._progress(count)

    def _count(self, size: int) -> int:
        return max(1, -(-size // self._part_bytes))

    def _length(self, size: int, number: int) -> int:
        """Bytes of part ``number``; negative when the file has fewer parts."""
        return min(self._part_bytes, size - (number - 1) * self._part_bytes)


def part_size(size: int, wanted: int) -> int:
    """Bytes of a part: as wanted, but within what a store allows for a file of ``size`` bytes."""
    least = -(-size // PARTS_MAX)
    return max(wanted, PART_BYTES_LEAST, -(-least // limits.MIB) * limits.MIB)
