"""Deleting large files: the name goes at once, the blocks in a thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from danube.host import files
from danube.wal.log import retention as module
from danube.wal.log.retention import WAITING_MAX, Freeing


class HeldThread:
    """What closes descriptors waits until it may; then which thread closed what is known."""

    def __init__(self) -> None:
        self.may = threading.Event()
        self.closed: list[tuple[str, int]] = []
        self.done = threading.Semaphore(0)

    def close(self, fd: int) -> None:
        self.may.wait(10)
        os.fstat(fd)  # it is one
        self.closed.append((threading.current_thread().name, os.fstat(fd).st_nlink))
        real_close(fd)
        self.done.release()


real_close = os.close


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldThread]:
    made = HeldThread()
    monkeypatch.setattr(module.os, "close", made.close)
    yield made
    made.may.set()


def a_file(directory: Path, name: str = "1.seg") -> Path:
    path = directory / name
    path.write_bytes(b"x" * 8192)
    return path


def test_the_name_goes_at_once_and_the_blocks_in_a_thread(tmp_path: Path, held: HeldThread) -> None:
    freeing, path = Freeing(), a_file(tmp_path)
    freeing.delete(path)
    assert not path.exists() and not held.closed, "the caller waits for no disk"
    held.may.set()
    assert held.done.acquire(timeout=10)
    assert held.closed == [("danube-freeing", 0)], "its last descriptor, after its last name"


def test_who_deletes_faster_than_the_disk_frees_waits_for_it(tmp_path: Path, held: HeldThread) -> None:
    freeing = Freeing()
    paths = [a_file(tmp_path, f"{number}.seg") for number in range(WAITING_MAX + 5)]
    for path in paths:
        freeing.delete(path)
    assert not any(path.exists() for path in paths)
    held.may.set()
    for _ in range(WAITING_MAX):
        assert held.done.acquire(timeout=10)
    assert len(held.closed) <= WAITING_MAX + 1, "the others were freed where they were deleted"


def test_a_file_that_cannot_be_deleted_is_an_error_and_its_descriptor_is_closed(
    tmp_path: Path, held: HeldThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    freeing, path = Freeing(), a_file(tmp_path)

    def refused(path: Path) -> None:
        raise PermissionError(path)

    monkeypatch.setattr(files, "unlink", refused)
    held.may.set()
    with pytest.raises(PermissionError):
        freeing.delete(path)
    assert held.done.acquire(timeout=10)
    assert path.exists() and held.closed == [("danube-freeing", 1)]


def test_a_file_that_cannot_be_opened_is_deleted_all_the_same(
    tmp_path: Path, held: HeldThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    freeing, path = Freeing(), a_file(tmp_path)

    def no_descriptors(path: Path, *, writable: bool) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(files, "open_existing", no_descriptors)
    freeing.delete(path)
    assert not path.exists() and freeing._thread is None
    with pytest.raises(FileNotFoundError):
        freeing.delete(path)


def test_a_process_that_was_forked_starts_its_own_thread(tmp_path: Path, held: HeldThread) -> None:
    freeing = Freeing()
    freeing._thread = ended = threading.Thread(target=lambda: None)  # what a fork leaves of its parent's
    ended.start()
    ended.join()
    held.may.set()
    freeing.delete(a_file(tmp_path))
    assert held.done.acquire(timeout=10) and freeing._thread is not ended
