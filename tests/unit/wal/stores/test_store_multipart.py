"""Files in parts: continued after any interruption, bounded in memory, cleaned up when given up."""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from danube import limits
from danube.errors import ObjectMissing, StorageFailed, StoreRefused, StoreUnavailable
from danube.wal.stores.multipart import PART_BYTES_LEAST, PARTS_MAX, FileUpload, part_size, run_parallel
from danube.wal.stores.objects import ObjectInfo
from danube.wal.stores.retries import Pauses, Retries, RetryBudget

MIB = limits.MIB


class Parts:
    """The multipart requests of a store in memory; ``fail`` is asked before each request."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.uploads: dict[str, tuple[str, dict[int, bytes]]] = {}
        self.calls: list[str] = []
        self.fail: Callable[[str], None] = lambda call: None
        self.held = self.held_most = 0
        self._lock = threading.Lock()
        self._made = 0

    def _call(self, call: str) -> None:
        with self._lock:
            self.calls.append(call)
            self.fail(call)

    def _upload(self, upload_id: str) -> dict[int, bytes]:
        if upload_id not in self.uploads:
            raise ObjectMissing("no such upload")
        return self.uploads[upload_id][1]

    def find_uploads(self, key: str) -> Sequence[str]:
        self._call("find")
        return [upload_id for upload_id, (name, _) in reversed(self.uploads.items()) if name == key]

    def begin_upload(self, key: str) -> str:
        self._call("begin")
        self._made += 1
        self.uploads[f"u{self._made}"] = (key, {})
        return f"u{self._made}"

    def stored_parts(self, key: str, upload_id: str) -> dict[int, tuple[str, int]]:
        self._call("parts")
        stored = self._upload(upload_id)
        return {number: (hashlib.md5(data).hexdigest(), len(data)) for number, data in stored.items()}

    def put_part(self, key: str, upload_id: str, number: int, data: bytes) -> str:
        with self._lock:
            self.held += len(data)
            self.held_most = max(self.held_most, self.held)
        try:
            self._call(f"put {number}")
            self._upload(upload_id)[number] = data
        finally:
            with self._lock:
                self.held -= len(data)
        return hashlib.md5(data).hexdigest()

    def complete_upload(self, key: str, upload_id: str, etags: Sequence[str]) -> None:
        self._call("complete")
        stored = self._upload(upload_id)
        assert [hashlib.md5(stored[number]).hexdigest() for number in sorted(stored)] == list(etags)
        self.objects[key] = b"".join(stored[number] for number in sorted(stored))
        del self.uploads[upload_id]
        self._call("completed")

    def abort_upload(self, key: str, upload_id: str) -> None:
        self._call("abort")
        self._upload(upload_id)
        del self.uploads[upload_id]

    def head(self, key: str) -> ObjectInfo | None:
        self._call("head")
        data = self.objects.get(key)
        return None if data is None else ObjectInfo(key, len(data), "e", 1)


@pytest.fixture
def parts() -> Parts:
    return Parts()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "file"
    file.write_bytes(random.Random(5).randbytes(23 * MIB + 17))
    return file


def upload(parts: Parts, path: Path, *, parallel: int = 2, tries: int = 1, **options: object) -> None:
    retries = Retries(RetryBudget(), Pauses(tries=tries), sleep=lambda seconds: None)
    FileUpload(parts, retries, "key", path, part_bytes=5 * MIB, parallel=parallel, **options).run()  # type: ignore[arg-type]


def failing_at(call: str, error: Exception, times: int = 1) -> Callable[[str], None]:
    left = [times]

    def fail(found: str) -> None:
        if found == call and left[0]:
            left[0] -= 1
            raise error

    return fail


def test_a_file_goes_up_in_parts(parts: Parts, path: Path) -> None:
    seen: list[int] = []
    upload(parts, path, progress=seen.append)
    assert parts.objects["key"] == path.read_bytes()
    assert sum(seen) == path.stat().st_size
    assert sum(call.startswith("put") for call in parts.calls) == 5
    assert parts.uploads == {}


@pytest.mark.parametrize("parallel", [1, 2, 4])
def test_memory_is_bounded_by_the_parts_in_flight(parts: Parts, path: Path, parallel: int) -> None:
    upload(parts, path, parallel=parallel)
    assert parts.held_most <= parallel * 5 * MIB


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5])
def test_an_upload_that_broke_at_a_part_is_continued(parts: Parts, path: Path, number: int) -> None:
    parts.fail = failing_at(f"put {number}", StoreUnavailable("outage"))
    with pytest.raises(StoreUnavailable):
        upload(parts, path, parallel=1)
    assert "key" not in parts.objects
    assert list(parts.uploads) == ["u1"]
    parts.calls.clear()
    seen: list[int] = []
    upload(parts, path, parallel=1, progress=seen.append)
    assert parts.objects["key"] == path.read_bytes()
    assert [call for call in parts.calls if call.startswith("put")] == [f"put {n}" for n in range(number, 6)]
    assert "begin" not in parts.calls or number == 1
    assert sum(seen) == path.stat().st_size
    assert parts.uploads == {}


@pytest.mark.parametrize("change", ["content", "part size", "shorter"])
def test_parts_of_another_file_are_not_used(parts: Parts, path: Path, change: str) -> None:
    parts.fail = failing_at("put 4", StoreUnavailable("outage"))
    with pytest.raises(StoreUnavailable):
        upload(parts, path, parallel=1)
    data = bytearray(path.read_bytes())
    if change == "content":
        data[6 * MIB] ^= 1
    elif change == "shorter":
        del data[12 * MIB :]
    else:
        parts.uploads["u1"][1][2] = parts.uploads["u1"][1][2][:-1]
    path.write_bytes(data)
    upload(parts, path)
    assert parts.objects["key"] == bytes(data)
    assert parts.uploads == {}, "the one that does not fit was aborted"


def test_older_leftovers_of_the_key_are_aborted(parts: Parts, path: Path) -> None:
    parts.begin_upload("key")
    parts.begin_upload("other")
    upload(parts, path)
    assert [name for name, _ in parts.uploads.values()] == ["other"]


def test_a_lost_answer_to_complete_is_success(parts: Parts, path: Path) -> None:
    parts.fail = failing_at("completed", StoreUnavailable("no answer in time"))
    upload(parts, path, tries=3)
    assert parts.objects["key"] == path.read_bytes()
    assert parts.calls.count("complete") == 2
    assert parts.calls[-1] == "head"


def test_an_upload_that_somebody_aborts_is_tried_again_later(parts: Parts, path: Path) -> None:
    def fail(call: str) -> None:
        if call == "put 3":
            parts.uploads.clear()

    parts.fail = fail
    with pytest.raises(StoreUnavailable, match="ended by somebody else"):
        upload(parts, path, parallel=1)
    parts.fail = lambda call: None
    upload(parts, path)
    assert parts.objects["key"] == path.read_bytes()


def test_an_upload_that_vanished_before_complete_is_no_success(parts: Parts, path: Path) -> None:
    def fail(call: str) -> None:
        if call == "complete":
            parts.uploads.clear()
            parts.objects["key"] = b"another"

    parts.fail = fail
    with pytest.raises(StoreUnavailable, match="ended by somebody else"):
        upload(parts, path)


@pytest.mark.parametrize("call", ["put 2", "complete"])
def test_a_refused_upload_leaves_no_parts(parts: Parts, path: Path, call: str) -> None:
    parts.fail = failing_at(call, StoreRefused("403"))
    with pytest.raises(StoreRefused):
        upload(parts, path)
    assert parts.uploads == {}
    assert "key" not in parts.objects


def test_a_failing_abort_does_not_hide_the_error(parts: Parts, path: Path) -> None:
    def fail(call: str) -> None:
        if call in ("put 2", "abort"):
            raise StoreRefused(call)

    parts.fail = fail
    with pytest.raises(StoreRefused, match="put 2"):
        upload(parts, path)
    assert len(parts.uploads) == 1


def test_an_upload_that_vanishes_while_its_parts_are_listed_begins_anew(parts: Parts, path: Path) -> None:
    parts.begin_upload("key")

    def fail(call: str) -> None:
        if call == "parts":
            parts.uploads.clear()

    parts.fail = fail
    upload(parts, path)
    assert parts.objects["key"] == path.read_bytes()


def test_a_file_that_shrinks_is_told_as_local(parts: Parts, path: Path) -> None:
    def fail(call: str) -> None:
        if call == "begin":
            with path.open("r+b") as file:
                file.truncate(7 * MIB)

    parts.fail = fail
    with pytest.raises(StorageFailed):
        upload(parts, path)
    assert parts.uploads == {}


def test_the_first_failure_stops_what_has_not_begun() -> None:
    ran: list[int] = []

    def call(number: int) -> None:
        ran.append(number)
        if number == 3:
            raise StoreUnavailable("3")

    with pytest.raises(StoreUnavailable, match="3"):
        run_parallel([lambda number=number: call(number) for number in range(100)], 1)  # type: ignore[misc]
    assert ran == [0, 1, 2, 3]


def test_part_sizes_keep_to_what_stores_allow() -> None:
    assert part_size(100, 1) == PART_BYTES_LEAST
    assert part_size(10 * limits.GIB, 16 * MIB) == 16 * MIB
    huge = 5 * 1024 * limits.GIB
    assert part_size(huge, 16 * MIB) * PARTS_MAX >= huge
    assert part_size(huge, 16 * MIB) % MIB == 0
