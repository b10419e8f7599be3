"""What of a data directory is Danube's own is told by its name."""

from __future__ import annotations

from pathlib import Path

from danube.broker.processes.directories import partition_names, strangers
from danube.wal.stores.directory import LocalStore

OWN = ["0000000000000001-0", "0000000000000001-12", "00000000000000ff-3.removed"]
OTHERS = [".DS_Store", "0000000000000001-0.old", "0000000000000001-01", "1-0", "lost+found", "notes.removed"]


def test_names_of_others_are_no_partitions(tmp_path: Path) -> None:
    assert partition_names(tmp_path) == [] and strangers(tmp_path) == []
    for name in (*OWN, *OTHERS):
        (tmp_path / "partitions" / name).mkdir(parents=True)
    assert partition_names(tmp_path) == OWN
    assert [path.name for path in strangers(tmp_path)] == OTHERS
    (tmp_path / "metadata").mkdir()
    for name in ("metadata.log", "metadata.lock", "metadata.new", "Thumbs.db"):
        (tmp_path / "metadata" / name).write_bytes(b"")
    assert strangers(tmp_path)[-1] == tmp_path / "metadata" / "Thumbs.db"


def test_a_store_on_a_disk_of_its_own_does_not_look_into_lost_and_found(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "partitions"):
        (place / "lost+found" / "x").mkdir(parents=True)
        (place / "lost+found" / "#12").write_bytes(b"x")
    store = LocalStore(tmp_path)
    store.put("partitions/0000000000000001-0/owner-0000000001", b"")
    assert [one.key for one in store.list("")] == ["partitions/0000000000000001-0/owner-0000000001"]
