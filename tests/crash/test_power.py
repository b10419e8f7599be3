"""Power cuts on ext4: what was synced stays, what was not is gone, nothing is left over on the machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.broker_process import ROOT, die_with_parent
from tests.crash.main import main
from tests.crash.power import FLAGS, PowerDisk, clear_stale_disks, missing_disk
from tests.crash.run import Plan
from tests.crash.storage_run import SHORT_FAULTS, Storage, missing_storage, storage_run

needs_disk = pytest.mark.skipif(bool(missing_disk()), reason=missing_disk() or "-")
HOLDER = """
import sys, time
from pathlib import Path
from tests.crash.power import PowerDisk
with PowerDisk(Path(sys.argv[1])):
    print("mounted", flush=True)
    time.sleep(600)
"""


@needs_disk
@pytest.mark.parametrize("flag", FLAGS)
def test_what_was_synced_is_there_after_a_power_cut_and_the_rest_is_not(tmp_path: Path, flag: str) -> None:
    with PowerDisk(tmp_path / "data") as disk:
        synced, lost = disk.mount_point / "synced", disk.mount_point / "lost"
        with synced.open("wb") as file:
            file.write(b"s" * 8192)
            os.fsync(file.fileno())
        lost.write_bytes(b"l" * 8192)
        disk.cut(flag)
        disk.back()
        assert synced.read_bytes() == b"s" * 8192
        assert not lost.exists() or lost.stat().st_size == 0
        assert disk.cuts == 1
    assert not os.path.ismount(disk.mount_point) and not disk.image.exists()


@needs_disk
def test_the_disk_of_a_killed_runner_is_taken_away_and_that_of_a_living_one_is_not(tmp_path: Path) -> None:
    with PowerDisk(tmp_path / "living") as living:
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(tmp_path / "killed")],
            stdout=subprocess.PIPE, cwd=ROOT, preexec_fn=die_with_parent,
        )  # fmt: skip
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"mounted\n"
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        holder.stdout.close()
        assert os.path.ismount(tmp_path / "killed")
        clear_stale_disks()
        assert not os.path.ismount(tmp_path / "killed")
        assert [path.name for path in tmp_path.glob("danube-*")] == [living.image.name]
        (living.mount_point / "alive").touch()


def test_who_may_not_cut_power_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(["--power", "--short", "--directory", str(tmp_path)]) == 3
    assert capsys.readouterr().out == "skipped: power cuts need root\n"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("storage", [Storage(power=True, store=True)], ids=["power and store"])
def test_every_subscription_gets_what_was_acknowledged_whatever_storage_does(
    tmp_path: Path, seed: int, storage: Storage
) -> None:
    if reason := missing_storage(storage):
        pytest.skip(reason)
    verdict = storage_run(
        Plan(seed=seed, directory=tmp_path / "run", faults=SHORT_FAULTS[storage], rest_s=(0.5, 1.5)), storage
    )
    assert verdict.passed, f"seed {seed}\n{verdict}\n{verdict.statistics}"
    assert verdict.statistics["cuts"] >= 2 and verdict.statistics["confirmed"]
