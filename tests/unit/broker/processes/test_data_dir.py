"""The files at the top of a data directory: no start needs room, and damage is told with its remedy."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import pytest

from danube.broker.operations.proposals import open_metadata
from danube.broker.processes.data_dir import BrokerState, DataDir
from danube.broker.processes.supervisor import Refusal
from danube.cluster.log.local_log import LocalLog
from danube.core.placement.recovered import INCARNATIONS_AHEAD, LOG_EPOCHS
from danube.errors import Damage, LimitExceeded, StorageFailed, StorageIncompatible
from danube.host import files, telemetry
from tests.fakes.broker_state import broker_state
from tests.unit.store_samples import fill_directory
from tests.unit.wal_samples import open_log

STATE = BrokerState(os.getpid(), True, {"native": "127.0.0.1:6660"}, [], "/proc/self/fd/9", 1)


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """No block is left: new files get none, and files do not grow.  What was refused."""
    refused: list[Path] = []

    def open_new(path: Path) -> int:
        refused.append(path)
        raise OSError(errno.ENOSPC, "no room", str(path))

    monkeypatch.setattr(files, "open_new", open_new)
    return refused


def used(path: Path) -> Path:
    """A directory on which a broker has run, and was stopped."""
    data = DataDir(path)
    data.next_incarnations(3)
    data.write_pid()
    data.write_state(STATE)
    data.close()
    return path


@pytest.fixture
def used_before(tmp_path: Path) -> Path:
    return used(tmp_path)


def test_a_start_on_a_full_disk_needs_no_room(used_before: Path, tmp_path: Path, full: list[Path]) -> None:
    data = DataDir(tmp_path)
    assert data.next_incarnations(2) == 4
    with pytest.raises(StorageFailed):
        data.write_pid()  # it is for scripts, and a start goes on without it
    data.write_state(STATE)
    assert data.next_incarnations(1) == 6 and full
    smaller = BrokerState(os.getpid(), False, {}, [], "", 1)
    data.write_state(smaller)
    assert broker_state(tmp_path) == smaller
    data.write_state(STATE)
    assert broker_state(tmp_path) == STATE
    data.close()
    assert not list(tmp_path.glob("*.new"))
    again = DataDir(tmp_path)
    assert again.next_incarnations(1) == 7
    again.close()


def test_nothing_is_overwritten_where_it_lies_while_there_is_room(tmp_path: Path) -> None:
    path = used(tmp_path) / "incarnation"
    inode = path.stat().st_ino
    data = DataDir(tmp_path)
    data.next_incarnations(1)
    data.close()
    assert path.stat().st_ino != inode


def test_only_a_sector_is_written_where_it_lies(tmp_path: Path, full: list[Path]) -> None:
    path = tmp_path / "file"
    with pytest.raises(OSError):
        files.replace_or_overwrite(path, b"new")  # nothing is there
    path.write_bytes(b"a longer content")
    files.replace_or_overwrite(path, b"short")
    assert path.read_bytes() == b"short           "
    with pytest.raises(OSError):
        files.replace_or_overwrite(path, bytes(files.SECTOR_BYTES + 1))
    assert path.read_bytes() == b"short           "


@pytest.mark.parametrize("content", [None, b"", b"17\n", b"18 00000000\n", b"\xff\xfe", bytes(5_000)])
def test_a_damaged_incarnation_names_its_file_and_a_number_that_is_safe(
    tmp_path: Path, content: bytes | None
) -> None:
    used(tmp_path)
    directory = fill_directory(tmp_path)
    open_log(directory, epoch=700 * 256 + 3).close()
    path = tmp_path / "incarnation"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    data = DataDir(tmp_path)
    with pytest.raises(Damage) as raised:
        data.next_incarnations(1)
    assert str(path) in str(raised.value) and raised.value.facts["position"] == 0
    remedy = raised.value.hint.rpartition(": ")[2]
    subprocess.run(["sh", "-c", remedy], check=True)
    assert data.next_incarnations(1) == 700 + INCARNATIONS_AHEAD + 1
    data.close()


def test_the_last_number_is_one_that_a_log_has_epochs_for(tmp_path: Path) -> None:
    data = DataDir(tmp_path)
    data.advance_incarnation((1 << 24) - 3)
    last = data.next_incarnations(2) + 1
    assert last * LOG_EPOCHS + LOG_EPOCHS - 1 == (1 << 32) - 1
    with pytest.raises(LimitExceeded) as raised:
        data.next_incarnations(1)
    assert "16777215 times" in raised.value.what and str(tmp_path) in raised.value.what and raised.value.hint
    data.close()


@pytest.mark.parametrize("content", [b"", b"x\n", b"\xff", b"-1", b"1" * 20, bytes(3)])
def test_a_damaged_format_names_its_file_and_what_it_was(tmp_path: Path, content: bytes) -> None:
    path = used(tmp_path) / "format"
    path.write_bytes(content)
    with pytest.raises(Damage) as raised:
        DataDir(tmp_path)
    assert str(path) in str(raised.value) and type(raised.value) is Damage
    subprocess.run(["sh", "-c", raised.value.hint.rpartition(": ")[2]], check=True)
    DataDir(tmp_path).close()
    path.write_text("2\n")
    with pytest.raises(StorageIncompatible):
        DataDir(tmp_path)


def test_a_format_that_is_missing_is_named(tmp_path: Path) -> None:
    used(tmp_path)
    LocalLog(tmp_path / "metadata").close()
    (tmp_path / "format").unlink()
    telemetry.configure("info", "text", process="test", descriptor=(output := os.memfd_create("log")))
    DataDir(tmp_path).close()
    told = os.pread(output, 4_096, 0).decode()
    telemetry.configure("info", "text")
    os.close(output)
    assert str(tmp_path / "format") in told and "metadata.log" in told
    assert (tmp_path / "format").read_text() == "1\n"


def test_a_metadata_log_that_partitions_prove_is_missed(tmp_path: Path) -> None:
    with pytest.raises(Damage) as raised:
        open_metadata(tmp_path / "metadata", "", create=False)
    assert str(tmp_path / "metadata" / "metadata.log") in str(raised.value) and raised.value.hint
    open_metadata(tmp_path / "metadata", "", create=True).close()
    open_metadata(tmp_path / "metadata", "", create=False).close()


def test_a_refusal_outlives_the_worker(tmp_path: Path) -> None:
    refusal = Refusal()
    assert refusal.take() is None
    pid = os.fork()
    if not pid:
        refusal.tell(Damage("x is damaged", why="w", hint="h", file="x", position=7))
        os._exit(0)
    os.waitpid(pid, 0)
    told = refusal.take()
    assert type(told) is Damage and (told.what, told.why, told.hint) == ("x is damaged", "w", "h")
    assert told.facts["position"] == 7 and refusal.take() is None
    os.pwrite(refusal._fd, b"\xc1half", 0)
    assert refusal.take() is None
    refusal.close()
