"""Witness of a partition: a small file outside its directory that records its extent.

A file in a directory cannot show that the directory is lost, and a segment cannot show that an older one is.
Beside ``partitions`` a data directory has ``witnesses`` with one file for each log:

    <CRC32C of the rest, 8 hexadecimal digits> <JSON, see _Content>

Rewritten when a log is opened, has its first segment on disk, seals one, or loses segments from its front
(before they are deleted), and when the names of its subscriptions change: never for a record or a batch.  The
file is renamed into place and not synced.  A file system's journal keeps the order of renames, so after a
power cut the file is at most older, and an older one claims less.  A file that is missing, cannot be read, or
is of another log is ignored.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from danube.core.batch.checksum import crc32c
from danube.host import files, telemetry

DIRECTORY: Final = "witnesses"
_PARTITIONS: Final = "partitions"
_FILE_BYTES_MAX: Final = 64 << 20
_DIGITS: Final = 8
_FORMAT: Final = 1
_log = telemetry.events("witness")


class _Content(msgspec.Struct, frozen=True, kw_only=True):
    """``began``: a segment was on disk.  ``start .. end``: offsets that the log had at least."""

    format: int = _FORMAT
    log_id: str
    began: bool = False
    start: int = 0
    end: int = 0
    subscriptions: tuple[str, ...] = ()


def witness_path(directory: Path) -> Path:
    """Of the partition in ``directory``, which lies below ``partitions``."""
    return directory.parent.parent / DIRECTORY / directory.name


class Witness:
    """The witness of one log.

    ``known`` is False if there was no file at loading; then no loss can be noticed.  ``holds_all``: all
    records are on this host.  Its methods may be called in any thread.
    """

    def __init__(self, path: Path, log_id: bytes, *, holds_all: bool = True) -> None:
        self.holds_all = holds_all
        self.known = False
        self._path = path
        self._content = _Content(log_id=log_id.hex())
        self._stored: _Content | None = None
        self._left = False
        self._lock = threading.Lock()

    @classmethod
    def load(cls, path: Path, log_id: bytes, *, holds_all: bool = True) -> Witness:
        """Load the witness; start it anew if its file is another log's or cannot be read."""
        witness = cls(path, log_id, holds_all=holds_all)
        try:
            content = decode(files.read_bounded(path, _FILE_BYTES_MAX))
        except FileNotFoundError:
            return witness
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            _log.warning("a witness cannot be read and is written anew", file=str(path), why=str(error))
            return witness
        if content.log_id != log_id.hex():
            _log.warning("a witness is of another log and is written anew", file=str(path))
            return witness
        witness.known = True
        witness._content = witness._stored = content
        return witness

    @property
    def began(self) -> bool:
        return self._content.began

    @property
    def start(self) -> int:
        return self._content.start

    @property
    def end(self) -> int:
        return self._content.end

    @property
    def subscriptions(self) -> frozenset[str]:
        return frozenset(self._content.subscriptions)

    def note_log(self, start: int, end: int, *, began: bool) -> None:
        """The log is at least this; written when that is new."""
        with self._lock:
            self._left = False  # a log that was opened anew in this process goes on with the same witness
            known = self._content
            began = began or known.began
            self._content = msgspec.structs.replace(known, start=start, end=end, began=began)
            self._store()

    def reached(self, end: int) -> None:
        """Note in the thread that seals that the log has come to ``end``.

        ext4 takes tens of milliseconds to rename a file over another while much is being written, so the
        loop must not wait for it.  Nothing is written once the log was left: it may be removed by then.
        """
        with self._lock:
            if not self._left and end > self._content.end:
                self._content = msgspec.structs.replace(self._content, end=end)
                self._store()

    def leave(self) -> None:
        """The log is closed: nothing is noted of its end until it is opened anew."""
        with self._lock:
            self._left = True

    def note_subscriptions(self, names: Iterable[str]) -> None:
        """All that have a cursor on disk, and those whose cursor is lost."""
        with self._lock:
            self._content = msgspec.structs.replace(self._content, subscriptions=tuple(sorted(names)))
            self._store()

    def _store(self) -> None:
        """Write the file.  If the disk is full, a loss would not be noticed; the next call tries again."""
        if self._content == self._stored:
            return
        new = self._path.with_name(self._path.name + ".new")
        try:
            files.make_directory(self._path.parent)
            new.unlink(missing_ok=True)
            fd = files.open_new(new)
            try:
                files.write_all(fd, encode(self._content), 0)
            finally:
                files.close(fd)
            files.rename(new, self._path)
        except (OSError, UnicodeError) as error:
            _log.limited("a witness cannot be written", source=str(self._path.parent), why=str(error))
            return
        self._stored = self._content


def load_witness(directory: Path, log_id: bytes, *, holds_all: bool) -> Witness | None:
    """Of the partition in ``directory``; None if that lies elsewhere than in a data directory."""
    if directory.parent.name != _PARTITIONS:
        return None
    return Witness.load(witness_path(directory), log_id, holds_all=holds_all)


def remove_witness(directory: Path) -> None:
    """The partition in ``directory`` is no more; nothing if it lies elsewhere than in a data directory."""
    if directory.parent.name == _PARTITIONS:
        witness_path(directory).unlink(missing_ok=True)


def encode(content: _Content) -> bytes:
    data = msgspec.json.encode(content)
    return f"{crc32c(data):0{_DIGITS}x} ".encode() + data + b"\n"


def decode(data: bytes) -> _Content:
    """Decode the file's bytes; raises ValueError or MsgspecError if they are damaged."""
    digits, content = data[:_DIGITS], data[_DIGITS + 1 :].rstrip(b"\n")
    if int(digits or b"x", 16) != crc32c(content):
        raise ValueError("its checksum differs")
    found = msgspec.json.decode(content, type=_Content)
    if found.format != _FORMAT or not 0 <= found.start <= found.end:
        raise ValueError(f"it has format {found.format} and offsets {found.start} to {found.end}")
    return found
