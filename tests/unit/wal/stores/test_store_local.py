"""A store in a directory: crash-safe puts, file systems that vanish, failures in words."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Any

import pytest

from danube.cli.broker.here import Here
from danube.cli.stored.places import store_at
from danube.cli.terminal.services import Services
from danube.config.loading import load
from danube.config.sections import StorageSettings
from danube.errors import (
    ConfigInvalid,
    ObjectMissing,
    StoreDamaged,
    StoreRefused,
    StoreUnavailable,
)
from danube.host import files
from danube.spark.history.places import open_place
from danube.wal.stores.directory import UPLOADS, LocalStore
from danube.wal.stores.opening import open_store


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


@pytest.fixture
def store(root: Path) -> LocalStore:
    return LocalStore(root)


def failing(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, number: int) -> None:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(module, name, fail)


def leftovers(root: Path) -> list[str]:
    return os.listdir(root / UPLOADS) if (root / UPLOADS).exists() else []


def test_bytes_are_synced_before_they_get_their_name_and_the_name_after(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("a/first", b"")
    done: list[str] = []
    plain_sync, plain_rename, plain_directory = os.fsync, files.rename, files.fsync_directory
    monkeypatch.setattr(os, "fsync", lambda fd: done.append("sync") or plain_sync(fd))
    monkeypatch.setattr(files, "rename", lambda *two: done.append("rename") or plain_rename(*two))
    monkeypatch.setattr(
        files, "fsync_directory", lambda path: done.append(f"directory {path.name}") or plain_directory(path)
    )
    store.put("a/b", b"1")
    assert done == ["sync", "rename", "directory a", "sync"]


@pytest.mark.parametrize("step", ["pwritev", "rename", "fsync_directory", "open_new"])
@pytest.mark.parametrize("how", ["put", "put_file"])
def test_a_put_that_fails_leaves_the_old_object(
    store: LocalStore, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, how: str
) -> None:
    store.put("k", b"old")
    (tmp_path / "new").write_bytes(b"new")
    with monkeypatch.context() as patch:
        failing(patch, files, step, errno.EIO)
        with pytest.raises(StoreUnavailable):
            if how == "put":
                store.put("k", b"new")
            else:
                store.put_file("k", tmp_path / "new")
    assert store.get("k") == (b"new" if step == "fsync_directory" else b"old")
    assert leftovers(root) == []


def test_a_full_disk_is_unavailable_and_leaves_nothing(
    store: LocalStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        failing(patch, files, "pwritev", errno.ENOSPC)
        with pytest.raises(StoreUnavailable, match="space"):
            store.put("k", b"1")
    assert leftovers(root) == []
    assert store.head("k") is None


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.EPERM])
def test_what_an_operator_must_change_is_refused(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    failing(monkeypatch, files, "open_new", number)
    with pytest.raises(StoreRefused):
        store.put("k", b"1")


@pytest.mark.parametrize("call", ["get", "get_to", "head", "list", "delete", "clean"])
def test_a_failing_disk_is_unavailable(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    store.put("k", b"123")
    module, name = {
        "get": (files, "pread"), "get_to": (files, "pread"), "head": (os, "stat"),
        "list": (os, "scandir"), "delete": (files, "unlink"), "clean": (os, "scandir"),
    }[call]  # fmt: skip
    fd = os.open(tmp_path / "out", os.O_RDWR | os.O_CREAT)
    try:
        with monkeypatch.context() as patch:
            failing(patch, module, name, errno.EIO)
            with pytest.raises(StoreUnavailable):
                {
                    "get": lambda: store.get("k"),
                    "get_to": lambda: store.get_to("k", 0, 3, fd, 0),
                    "head": lambda: store.head("k"),
                    "list": lambda: list(store.list("")),
                    "delete": lambda: store.delete(["k"]),
                    "clean": lambda: store.clean_uploads(0),
                }[call]()
    finally:
        os.close(fd)
    assert store.get("k") == b"123"


def test_a_root_that_is_not_there_is_refused_and_not_made(tmp_path: Path) -> None:
    with pytest.raises(StoreRefused) as caught:
        LocalStore(tmp_path / "none")
    assert "mkdir" in caught.value.hint
    assert not (tmp_path / "none").exists()
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreRefused):
        LocalStore(tmp_path / "file")


def test_a_file_system_that_was_unmounted_is_not_written_beside(store: LocalStore, root: Path) -> None:
    store.put("k", b"1")
    root.rename(root.with_name("elsewhere"))
    with pytest.raises(StoreUnavailable):
        store.put("k2", b"2")
    root.mkdir()  # the empty mount point
    calls = [
        lambda: store.put("k2", b"2"), lambda: store.get("k"), lambda: store.head("k"),
        lambda: list(store.list("")), lambda: store.delete(["k"]),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(StoreUnavailable):
            call()
    assert os.listdir(root) == []
    root.rmdir()
    root.with_name("elsewhere").rename(root)
    assert store.get("k") == b"1"


def test_what_a_killed_upload_left_is_cleaned_at_its_age(store: LocalStore, root: Path) -> None:
    assert store.clean_uploads(0) == 0
    store.put("k", b"1")
    (root / UPLOADS / "left").write_bytes(b"half")
    assert store.clean_uploads(60_000_000) == 0
    assert [info.key for info in store.list("")] == ["k"], "never listed"
    assert store.clean_uploads(0) == 1
    assert leftovers(root) == []


def test_stray_dot_files_are_no_objects(store: LocalStore, root: Path) -> None:
    store.put("a/k", b"1")
    (root / "a" / ".nfs0001").write_bytes(b"")
    (root / ".snapshot").mkdir()
    (root / ".snapshot" / "old").write_bytes(b"")
    assert [info.key for info in store.list("")] == ["a/k"]


def test_an_object_that_shrinks_while_it_is_read_is_damage(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    from danube.errors import StoreDamaged

    store.put("k", b"123")
    monkeypatch.setattr(files, "pread", lambda *arguments: b"")
    with pytest.raises(StoreDamaged):
        store.get("k")


def test_a_range_is_mapped_and_outlives_its_object(store: LocalStore, root: Path) -> None:
    content = os.urandom(20_000)
    store.put("k", content)
    view = store.mapped("k", 5_000, 19_999)
    assert view is not None and view.readonly
    store.put("k", b"another")
    store.delete(["k"])
    assert view == content[5_000:19_999]


def test_what_cannot_be_mapped_is_told_or_read(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("k", b"12345")
    assert store.mapped("k", 2, 2) is None
    with pytest.raises(StoreDamaged, match="ends at 5"):
        store.mapped("k", 0, 6)
    with pytest.raises(ObjectMissing):
        store.mapped("none", 0, 1)
    with monkeypatch.context() as patch:
        failing(patch, files, "on_local_disk", errno.EIO)
        with pytest.raises(StoreUnavailable):
            store.mapped("k", 0, 5)
    monkeypatch.setattr(files, "on_local_disk", lambda fd: False)
    assert store.mapped("k", 0, 5) is None


def test_a_file_system_of_this_machine_is_known(root: Path) -> None:
    (root / "file").touch()
    with (root / "file").open() as here, Path("/proc/self/status").open() as elsewhere:
        assert files.on_local_disk(here.fileno())
        assert not files.on_local_disk(elsewhere.fileno())
    with pytest.raises(OSError, match="Bad file"):
        files.on_local_disk(-1)


def test_a_url_opens_its_store(root: Path) -> None:
    opened = open_store(StorageSettings(url=f"file://{root}"))
    opened.put("k", b"1")
    assert (root / "k").read_bytes() == b"1"


@pytest.mark.parametrize(
    "url", ["", "file://relative/x", "file://", "ftp://x/y", "s3://", "s3:///prefix", "gs://", "/plain/path"]
)
def test_an_unusable_url_is_told(url: str) -> None:
    with pytest.raises(ConfigInvalid, match="cannot be used"):
        open_store(StorageSettings(url=url))


@pytest.mark.parametrize(
    ("prefix", "why"),
    [
        ("a+b", "'+' in its prefix"),
        ("a%20b", "'%' in its prefix"),
        ("größe", "'ö' in its prefix"),
        ("pre fix", "' ' in its prefix"),
        ("a//b", "an empty part in its prefix (//)"),
        ("/a", "an empty part in its prefix (//)"),
        ("a//", "an empty part in its prefix (//)"),
        ("a/../b", "a part that begins with '.'"),
        ("x" * 256, "a part of more than 255 characters"),
        ("a?versions", "keys and settings are given apart"),
        ("a#b", "keys and settings are given apart"),
        ("/".join(["x" * 200] * 5), "a prefix of 1004 characters; 900 is the limit"),
    ],
)
@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_a_prefix_that_stores_write_differently_is_refused_at_once(
    scheme: str, prefix: str, why: str, tmp_path: Path
) -> None:
    url = f"{scheme}://bucket/{prefix}"
    with pytest.raises(ConfigInvalid) as opened:
        open_store(StorageSettings(url=url))
    assert why in opened.value.why
    with pytest.raises(ConfigInvalid, match=re.escape(why)):
        load(None, {}, {"storage.url": url, "storage.mode": "object_store"})
    with pytest.raises(ConfigInvalid, match=re.escape(why)):
        store_at(Here(Services(environ={}), None, None, ""), url, None)
    with pytest.raises(ConfigInvalid, match=re.escape(why)):
        open_place(url)


@pytest.mark.parametrize("url", ["s3://buck%65t/p", "s3://b+c", "gs://-b", "az://b c/p"])
def test_a_bucket_that_none_can_be_called_is_refused_at_once(url: str) -> None:
    with pytest.raises(ConfigInvalid, match="names no bucket"):
        open_store(StorageSettings(url=url))


def test_a_directory_may_be_called_anything(tmp_path: Path) -> None:
    """Nothing of it is taken for an escape, a query or a fragment."""
    for name in ("a+b%20c", "größe ?x#y@z", "a"):
        (tmp_path / name).mkdir()
        url = f"file://{tmp_path}//{name}/"
        given = load(None, {}, {"storage.url": url, "storage.mode": "shared_fs"}).config.storage
        open_store(given).put("k", name.encode())
        assert (tmp_path / name / "k").read_bytes() == name.encode()


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.delitem(sys.modules, "danube.wal.stores.cloud", raising=False)
    with pytest.raises(ConfigInvalid) as caught:
        open_store(StorageSettings(url="gs://bucket"))
    assert "danube-broker[cloud]" in caught.value.hint
