"""A partition's directory goes in one step: whatever dies, no reader meets half of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from danube.broker.processes.removing import remove_directory
from danube.wal.verify.tree import Verified, verify_tree
from tests.unit.wal_samples import append, open_log, roll, sync

NAME = f"{7:016x}-0"


@pytest.fixture
def partition(tmp_path: Path) -> Path:
    """Three sealed segments under the name of a partition."""
    directory = tmp_path / "partitions" / NAME
    log = open_log(directory)
    for number in range(3):
        append(log, b"%d" % number)
        log.write()
        sync(log)
        roll(log)
    log.close()
    return directory


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_nothing_is_left(partition: Path) -> None:
    remove_directory(partition)
    assert names(partition.parent) == []
    remove_directory(partition)
    assert names(partition.parent) == []


def test_who_dies_after_some_files_leaves_nothing_that_is_taken_for_a_partition(
    partition: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed_tree = shutil.rmtree

    def die_within(path: Path, **named: bool) -> None:
        if path.exists():
            sorted(path.glob("*.seg"))[1].unlink()
            raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", die_within)
    with pytest.raises(KeyboardInterrupt):
        remove_directory(partition)
    left = partition.with_name(f"{NAME}.removed")
    assert names(partition.parent) == [left.name] and len(names(left)) > 1
    verified = Verified()
    assert verify_tree(tmp_path, verified) == [] and not verified.findings
    assert any(left.name in remark for remark in verified.remarks)
    monkeypatch.setattr(shutil, "rmtree", removed_tree)
    remove_directory(left)
    assert names(partition.parent) == []


def test_a_partition_that_was_made_again_goes_as_well_as_what_was_left_of_the_first(partition: Path) -> None:
    shutil.copytree(partition, partition.with_name(f"{NAME}.removed"))
    remove_directory(partition)
    assert names(partition.parent) == []
