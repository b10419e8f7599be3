"""Reading a metadata log beside its writer."""

from __future__ import annotations

from pathlib import Path

import pytest

from danube.cluster.log import committed
from danube.cluster.log.committed import read_committed
from danube.cluster.log.local_log import LocalLog
from danube.core.metadata.commands import CreateNamespace
from danube.errors import Damage


def test_all_that_was_committed_is_read_while_it_is_written(tmp_path: Path) -> None:
    with LocalLog(tmp_path, compact_bytes_min=1) as log:
        for number in range(50):
            log.propose(CreateNamespace(namespace=f"n{number}"))
            assert read_committed(tmp_path / "metadata.log").snapshot() == log.state.snapshot()
        assert log.compaction_count


def test_a_file_that_is_replaced_meanwhile_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LocalLog(tmp_path) as log:
        log.propose(CreateNamespace(namespace="n"))
    honest, looks = committed.log_file.read_head, []

    def replaced(fd: int, path: str) -> committed.log_file.FileHead:
        looks.append(path)
        if len(looks) == 1:
            raise Damage("between two files")
        return honest(fd, path)

    monkeypatch.setattr(committed.log_file, "read_head", replaced)
    assert read_committed(tmp_path / "metadata.log").version == 1 and len(looks) == 2


def test_damage_and_a_missing_file_are_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_committed(tmp_path / "metadata.log")
    (tmp_path / "metadata.log").write_bytes(b"DNL1" + bytes(100))
    with pytest.raises(Damage):
        read_committed(tmp_path / "metadata.log")
