"""Every object store keeps the same promises: one suite for memory, directory, clouds and obstore's own."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from danube import limits
from danube.errors import InvalidArgument, ObjectMissing, StorageFailed, StoreDamaged
from danube.wal.stores.directory import LocalStore
from danube.wal.stores.objects import ObjectStore, Putting
from tests.fakes.memory_store import MemoryStore

MIB = limits.MIB
# Azurite takes 8 ms for an object, and a page of it holds 5,000; one of the Google server here has 200.
COUNTS = {"azure": 403, "google": 603}
STORES = ("memory", "file", "s3", "obstore-memory", "azure", "google")


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ObjectStore]:
    kind = request.param
    if kind == "memory":
        yield MemoryStore()
    elif kind == "file":
        (tmp_path / "objects").mkdir()
        yield LocalStore(tmp_path / "objects")
    elif kind == "s3":
        pytest.importorskip("minio")
        from danube.wal.stores.opening import open_store

        server = request.getfixturevalue("s3_server")
        yield open_store(server.settings(server.make_bucket(), "some/prefix", part_bytes=5 * MIB))
    elif kind in ("azure", "google"):
        from danube.wal.stores.opening import open_store

        server = request.getfixturevalue(f"{kind}_server")
        yield open_store(server.settings(server.make_bucket(), "some/prefix", part_bytes=5 * MIB))
    else:
        obstore = pytest.importorskip("obstore.store")
        from danube.wal.stores.cloud import CloudStore

        yield CloudStore(obstore.MemoryStore(), "obstore-memory://")


def keys_of(store: ObjectStore, *arguments: str) -> list[str]:
    return [info.key for info in store.list(*(arguments or ("",)))]


def random_file(folder: Path, size: int, seed: int = 1) -> Path:
    path = folder / f"file-{size}-{seed}"
    path.write_bytes(random.Random(seed).randbytes(size))
    return path


@pytest.mark.parametrize("size", [0, 1, 4095, 70_000])
def test_what_is_put_is_got(store: ObjectStore, size: int) -> None:
    data = random.Random(size).randbytes(size)
    store.put("a/b", data)
    assert store.get("a/b") == data
    info = store.head("a/b")
    assert info is not None
    assert (info.key, info.size) == ("a/b", size)
    assert info.etag
    assert info.modified_us > 1_600_000_000_000_000


def test_ranges_are_exact(store: ObjectStore) -> None:
    data = bytes(range(256)) * 40
    store.put("k", data)
    for start, end in [(0, 1), (0, len(data)), (5, 5), (17, 9_999), (len(data) - 1, len(data))]:
        assert store.get("k", start, end) == data[start:end], (start, end)
    assert store.get("k", 100) == data[100:]
    assert store.get("k", len(data)) == b""


@pytest.mark.parametrize(("start", "end"), [(0, 101), (99, 101), (100, 101), (200, 300), (101, None)])
def test_a_range_beyond_the_end_is_damage(store: ObjectStore, start: int, end: int | None) -> None:
    store.put("k", bytes(100))
    with pytest.raises(StoreDamaged):
        store.get("k", start, end)


@pytest.mark.parametrize(("start", "end"), [(-1, 5), (5, 4)])
def test_an_impossible_range_is_refused(store: ObjectStore, start: int, end: int) -> None:
    store.put("k", bytes(100))
    with pytest.raises(InvalidArgument):
        store.get("k", start, end)


@pytest.mark.parametrize(
    "key",
    ["", "/a", "a/", "a//b", "../a", "a/../b", ".hidden", "a b", "a\nb", "ä", "a" * 901, "a?b", "a%2fb"],
)
def test_keys_that_are_not_ours_are_refused(store: ObjectStore, key: str) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: store.put(key, b""),
        lambda: store.get(key),
        lambda: store.head(key),
        lambda: store.delete([key]),
    ]
    for call in calls:
        with pytest.raises(InvalidArgument):
            call()


def test_what_is_not_there_is_missing(store: ObjectStore, tmp_path: Path) -> None:
    assert store.head("no/such") is None
    with pytest.raises(ObjectMissing):
        store.get("no/such")
    with pytest.raises(ObjectMissing):
        store.get("no/such", 0, 10)
    with (tmp_path / "out").open("wb") as file, pytest.raises(ObjectMissing):
        store.get_to("no/such", 0, 10, file.fileno(), 0)
    assert keys_of(store) == []


def test_a_key_that_is_a_folder_of_others_is_missing(store: ObjectStore) -> None:
    store.put("a/b/c", b"1")
    assert store.head("a/b") is None
    with pytest.raises(ObjectMissing):
        store.get("a/b")


def test_a_put_replaces(store: ObjectStore) -> None:
    store.put("k", b"old and long")
    before = store.head("k")
    store.put("k", b"new")
    after = store.head("k")
    assert store.get("k") == b"new"
    assert before is not None and after is not None
    assert before.etag != after.etag


def test_lists_are_ascending_and_bounded_by_prefix_and_after(store: ObjectStore) -> None:
    keys = ["a-b/1", "a.b/1", "a/1", "a/10", "a/2", "a/2-x", "a/3/deep", "ab", "b/1", "m-0000000001"]
    for key in random.Random(3).sample(keys, len(keys)):
        store.put(key, key.encode())
    assert keys_of(store) == sorted(keys)
    assert keys_of(store, "a/") == ["a/1", "a/10", "a/2", "a/2-x", "a/3/deep"]
    assert keys_of(store, "a/2") == ["a/2", "a/2-x"]
    assert keys_of(store, "a") == sorted(key for key in keys if key.startswith("a"))
    assert keys_of(store, "", "a/2") == [key for key in sorted(keys) if key > "a/2"]
    assert keys_of(store, "a/", "a/10") == ["a/2", "a/2-x", "a/3/deep"]
    assert keys_of(store, "", "zzz") == []
    assert keys_of(store, "nothing/here") == []
    assert [info.size for info in store.list("a/")] == [3, 4, 3, 5, 8]


def test_a_list_of_more_than_one_page_is_whole(store: ObjectStore, request: pytest.FixtureRequest) -> None:
    count = COUNTS.get(request.node.callspec.params["store"], 2_003)
    keys = [f"pages/{number:05d}" for number in range(count)]
    work = iter(keys)
    lock = threading.Lock()

    def put() -> None:
        while True:
            with lock:
                key = next(work, None)
            if key is None:
                return
            store.put(key, b"x")

    threads = [threading.Thread(target=put) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert keys_of(store, "pages/") == keys
    assert keys_of(store, "pages/", keys[count // 2]) == keys[count // 2 + 1 :]
    store.delete(keys[3:])
    assert keys_of(store) == keys[:3]


def test_deleting_what_is_not_there_is_no_error(store: ObjectStore) -> None:
    store.put("a", b"1")
    store.put("b/c", b"2")
    store.delete(["a", "none", "b/none"])
    store.delete(["a"])
    store.delete([])
    assert keys_of(store) == ["b/c"]


@pytest.mark.parametrize("size", [0, 1, 5 * MIB, 5 * MIB + 1, 12 * MIB + 12_345])
def test_files_go_up_and_down(store: ObjectStore, tmp_path: Path, size: int) -> None:
    path = random_file(tmp_path, size)
    seen: list[int] = []
    store.put_file("dir/file", path, Putting(part_bytes=5 * MIB, parallel=3, progress=seen.append))
    assert sum(seen) == size
    info = store.head("dir/file")
    assert info is not None and info.size == size
    target = tmp_path / "copy"
    fd = os.open(target, os.O_RDWR | os.O_CREAT)
    try:
        store.get_to("dir/file", 0, size, fd, 3)
    finally:
        os.close(fd)
    assert target.read_bytes()[3:] == path.read_bytes()


def test_a_range_lands_at_its_position(store: ObjectStore, tmp_path: Path) -> None:
    path = random_file(tmp_path, 11 * MIB)
    store.put_file("f", path, Putting(part_bytes=5 * MIB))
    data = path.read_bytes()
    fd = os.open(tmp_path / "sparse", os.O_RDWR | os.O_CREAT)
    try:
        store.get_to("f", 1_000, 10 * MIB + 7, fd, 8 * MIB)
        assert os.pread(fd, 10 * MIB + 7 - 1_000, 8 * MIB) == data[1_000 : 10 * MIB + 7]
        assert os.fstat(fd).st_size == 8 * MIB + 10 * MIB + 7 - 1_000
        with pytest.raises(StoreDamaged):
            store.get_to("f", 0, 11 * MIB + 1, fd, 0)
    finally:
        os.close(fd)


def test_putting_a_file_twice_is_the_same_as_once(store: ObjectStore, tmp_path: Path) -> None:
    path = random_file(tmp_path, 6 * MIB)
    store.put_file("f", path, Putting(part_bytes=5 * MIB))
    store.put_file("f", path, Putting(part_bytes=5 * MIB))
    assert keys_of(store) == ["f"]
    assert store.get("f") == path.read_bytes()
    assert store.clean_uploads(0) == 0


def test_a_local_file_that_is_not_there_is_told_as_local(store: ObjectStore, tmp_path: Path) -> None:
    with pytest.raises(StorageFailed):
        store.put_file("f", tmp_path / "none")
    assert store.head("f") is None


def test_a_local_file_that_cannot_be_written_is_told_as_local(store: ObjectStore, tmp_path: Path) -> None:
    store.put("k", bytes(1_000))
    (tmp_path / "read-only").write_bytes(b"")
    fd = os.open(tmp_path / "read-only", os.O_RDONLY)
    try:
        with pytest.raises(StorageFailed):
            store.get_to("k", 0, 1_000, fd, 0)
    finally:
        os.close(fd)


def test_many_threads_may_ask_at_once(store: ObjectStore) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for step in range(20):
                key = f"t{number}/{step}"
                store.put(key, key.encode() * 100)
                assert store.get(key, 2, 50) == (key.encode() * 100)[2:50]
            assert len(keys_of(store, f"t{number}/")) == 20
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_name_is_for_people(store: ObjectStore) -> None:
    assert "://" in store.name
    assert "secret" not in store.name
