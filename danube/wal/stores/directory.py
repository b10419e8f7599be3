"""An object store in a directory: a second disk, or a file system that several hosts share.

A key is a path below the root.  An object is written under another name in ``.uploads``, synced, renamed
to its key and its directory synced; so a reader on any host sees all of it or nothing, and it survives
a power cut once ``put`` has returned.  A name that begins with a dot is never a key.

The root is not created: a directory that is missing, or is another one than when the store was
opened, is taken for a file system that is not mounted, and nothing is written under its name.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NoReturn

from danube.errors import ObjectMissing, StoreDamaged, StoreRefused, StoreUnavailable
from danube.host import files
from danube.host.clock import wall_us
from danube.wal.stores.objects import (
    AS_USUAL,
    COPY_BYTES,
    ObjectInfo,
    Putting,
    check_key,
    check_range,
    open_source,
    read_exactly,
    write_exactly,
)

UPLOADS: Final = ".uploads"
_REFUSED: Final = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG}
)
_MISSING: Final = frozenset({errno.ENOENT, errno.ENOTDIR})


class LocalStore:
    """Objects as files below ``root``, which must exist."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        self.name = f"file://{self._root}"
        try:
            self._identity = self._look()
        except OSError as error:
            raise StoreRefused(
                f"store {self.name} cannot be opened",
                why=error.strerror or str(error),
                hint=f"mount it, or make it: mkdir -p {self._root}",
                store=self.name,
            ) from None

    def put(self, key: str, data: bytes) -> None:
        temporary, fd = self._begin(check_key(key))
        try:
            files.write_all(fd, data, 0)
            self._finish(temporary, fd, key)
        except OSError as error:
            self._failed(error, key)
        finally:
            self._end(temporary, fd)

    def put_file(self, key: str, path: Path, how: Putting = AS_USUAL) -> None:
        source, size = open_source(path)
        try:
            temporary, fd = self._begin(check_key(key))
            try:
                for position in range(0, size, COPY_BYTES):
                    data = read_exactly(source, min(COPY_BYTES, size - position), position, path)
                    files.write_all(fd, data, position)
                    how.progress(len(data))
                self._finish(temporary, fd, key)
            except OSError as error:
                self._failed(error, key)
            finally:
                self._end(temporary, fd)
        finally:
            os.close(source)

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        check_range(start, end)
        fd = self._open(key)
        try:
            end = files.size_of(fd) if end is None else end
            return b"".join(self._pieces(fd, key, start, end, end - start))
        except OSError as error:
            self._failed(error, key)
        finally:
            os.close(fd)

    def mapped(self, key: str, start: int, end: int) -> memoryview | None:
        """Return the object's bytes mapped in place, without a copy; None on a network file system.

        An object never changes.  A replaced or deleted object stays readable as long as it is mapped.
        """
        check_range(start, end)
        fd = self._open(key)
        try:
            if start == end or not files.on_local_disk(fd):
                return None
            self._check_end(fd, key, end)
            return files.mapped(fd, start, end)
        except OSError as error:
            self._failed(error, key)
        finally:
            os.close(fd)

    def get_to(self, key: str, start: int, end: int, fd: int, position: int) -> None:
        check_range(start, end)
        source = self._open(key)
        try:
            for data in self._pieces(source, key, start, end, COPY_BYTES):
                write_exactly(fd, data, position)
                position += len(data)
        except OSError as error:
            self._failed(error, key)
        finally:
            os.close(source)

    def head(self, key: str) -> ObjectInfo | None:
        try:
            status = os.stat(self._root / check_key(key))
        except OSError as error:
            if error.errno in _MISSING:
                self._check_root(key)
                return None
            self._failed(error, key)
        return _info(key, status) if stat.S_ISREG(status.st_mode) else None

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        self._check_root(prefix)
        yield from self._walk("", prefix, after)

    def delete(self, keys: Iterable[str]) -> None:
        touched = set()
        try:
            for key in keys:
                path = self._root / check_key(key)
                try:
                    files.unlink(path)
                    touched.add(path.parent)
                except OSError as error:
                    if error.errno not in _MISSING:
                        raise
            self._check_root("")
            for directory in touched:
                files.fsync_directory(directory)
        except OSError as error:
            self._failed(error, "")

    def clean_uploads(self, older_than_us: int) -> int:
        bound_us = wall_us() - older_than_us
        count = 0
        try:
            for entry in os.scandir(self._root / UPLOADS):
                if entry.stat().st_mtime_ns // 1000 <= bound_us:
                    files.unlink(Path(entry.path))
                    count += 1
        except FileNotFoundError:
            pass  # nothing was ever put, or another host was quicker
        except OSError as error:
            self._failed(error, UPLOADS)
        return count

    def _look(self) -> tuple[int, int]:
        status = os.stat(self._root)
        if not os.path.isdir(self._root):
            raise NotADirectoryError(errno.ENOTDIR, "is not a directory")
        return status.st_dev, status.st_ino

    def _check_root(self, key: str) -> None:
        """StoreUnavailable when the root is not the directory that was opened."""
        try:
            same = self._look() == self._identity
        except OSError as error:
            self._failed(error, key)
        if not same:
            raise StoreUnavailable(
                f"{self._root} is another directory than at the start",
                why="a file system was mounted or unmounted there",
                hint="mount it again, or restart the broker if the change is meant",
                store=self.name,
            )

    def _begin(self, key: str) -> tuple[Path, int]:
        """A new file to write an object to, on the root's file system."""
        self._check_root(key)
        try:
            files.make_directory(self._root / UPLOADS)
            temporary = self._root / UPLOADS / secrets.token_hex(12)
            return temporary, files.open_new(temporary)
        except OSError as error:
            self._failed(error, key)

    def _finish(self, temporary: Path, fd: int, key: str) -> None:
        path = self._root / key
        os.fsync(fd)
        files.make_directory(path.parent)
        files.rename(temporary, path)
        files.fsync_directory(path.parent)

    @staticmethod
    def _end(temporary: Path, fd: int) -> None:
        os.close(fd)
        try:
            files.unlink(temporary)
        except OSError:
            pass  # renamed: the usual case; else clean_uploads takes it

    def _open(self, key: str) -> int:
        try:
            fd = files.open_existing(self._root / check_key(key), writable=False)
            if stat.S_ISREG(os.fstat(fd).st_mode):
                return fd
            os.close(fd)
            raise IsADirectoryError(errno.ENOENT, "is a folder of other keys")
        except OSError as error:
            if error.errno in _MISSING:
                self._check_root(key)
                raise ObjectMissing(f"there is no object {key}", store=self.name, key=key) from None
            self._failed(error, key)

    def _check_end(self, fd: int, key: str, end: int) -> None:
        size = files.size_of(fd)
        if end > size:
            raise StoreDamaged(
                f"object {key} ends at {size}", why=f"{end} was asked for", store=self.name, key=key
            )

    def _pieces(self, fd: int, key: str, start: int, end: int, piece_bytes: int) -> Iterator[bytes]:
        self._check_end(fd, key, max(start, end))
        while start < end:
            data = files.pread(fd, min(piece_bytes, end - start), start)
            if not data:
                raise StoreDamaged(f"object {key} became shorter", store=self.name, key=key)
            yield data
            start += len(data)

    def _walk(self, folder: str, prefix: str, after: str) -> Iterator[ObjectInfo]:
        """Files below ``folder`` (empty or ending in a slash) in the order of their keys."""
        try:
            with os.scandir(self._root / folder) as entries:
                names = sorted(
                    entry.name + "/" if entry.is_dir() else entry.name
                    for entry in entries
                    if not entry.name.startswith(".") and entry.name != "lost+found"
                )
        except FileNotFoundError:
            return
        except OSError as error:
            self._failed(error, folder)
        for name in names:
            key = folder + name
            if name.endswith("/"):
                if key.startswith(prefix[: len(key)]) and key + "\x7f" > after:
                    yield from self._walk(key, prefix, after)
            elif key.startswith(prefix) and key > after:
                info = self.head(key)
                if info is not None:
                    yield info

    def _failed(self, error: OSError, key: str) -> NoReturn:
        kind = StoreRefused if error.errno in _REFUSED else StoreUnavailable
        raise kind(
            f"store {self.name} failed", why=error.strerror or str(error), store=self.name, key=key
        ) from None


def _info(key: str, status: os.stat_result) -> ObjectInfo:
    etag = f"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"
    return ObjectInfo(key, status.st_size, etag, status.st_mtime_ns // 1000)
