"""Power cuts on a real file system: ext4 in a file, on a loop device, that is shut down under load.

After EXT4_IOC_SHUTDOWN nothing more is written: what lies in the page cache alone is lost, as with a machine
that loses its power.  Mounted again, ext4 replays its journal.  It needs root and loop devices.

A runner holds a lock on the file of each disk that it made.  Disks whose lock is free are left over from a
runner that was killed: the next start takes them away, known by their names alone.
"""

from __future__ import annotations

import fcntl
import os
import random
import secrets
import shutil
import struct
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from tests.broker_process import BrokerProcess, wait_until

NAME: Final = "danube-crash-disk-"
DISK_BYTES: Final = 4 << 30  # of a sparse file
_SHUTDOWN: Final = 2 << 30 | 4 << 16 | ord("X") << 8 | 125  # _IOR('X', 125, __u32)
FLAGS: Final = {"journal written": 1, "journal lost": 2}  # LOGFLUSH, NOLOGFLUSH
_UNMOUNT_S: Final = 20.0


def missing_disk() -> str:
    """Why no power can be cut here; empty where it can."""
    if os.geteuid() != 0:
        return "power cuts need root"
    lacking = [tool for tool in ("mkfs.ext4", "losetup", "mount", "umount") if shutil.which(tool) is None]
    if lacking:
        return f"power cuts need {', '.join(lacking)}"
    if subprocess.run(["losetup", "-f"], capture_output=True).returncode:
        return "power cuts need a loop device, and there is none here"
    return ""


class PowerDisk:
    """An ext4 file system at ``mount_point`` whose power can be cut; use it in ``with``."""

    def __init__(self, mount_point: Path) -> None:
        self.mount_point = mount_point
        self.cuts = 0
        self.image = mount_point.parent / f"{NAME}{mount_point.name}-{secrets.token_hex(4)}"
        self._device = ""
        self._lock = -1

    def __enter__(self) -> PowerDisk:
        clear_stale_disks()
        self.mount_point.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.image, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            os.ftruncate(self._lock, DISK_BYTES)
            _run("mkfs.ext4", "-q", "-F", str(self.image))
            self._device = _run("losetup", "-f", "--show", str(self.image))
            self._mount()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmount; the file is removed.  Who still uses the disk keeps it, so end brokers before."""
        if self._device:
            self._unmount()
            _run("losetup", "-d", self._device)
            self._device = ""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
            self.image.unlink()

    def _mount(self) -> None:
        _run("mount", "-t", "ext4", self._device, str(self.mount_point))

    def _unmount(self) -> None:
        """Wait for whoever has a file of it open: clients that look for a broker close theirs soon."""

        def unmounted() -> bool:
            return subprocess.run(["umount", str(self.mount_point)], capture_output=True).returncode == 0

        if os.path.ismount(self.mount_point):
            wait_until(unmounted, _UNMOUNT_S, f"{self.mount_point} unmounted")

    def cut(self, flag: str) -> int:
        """Nothing more reaches the disk; the monotonic moment (ns) before that."""
        directory = os.open(self.mount_point, os.O_RDONLY | os.O_DIRECTORY)
        moment_ns = time.monotonic_ns()
        try:
            fcntl.ioctl(directory, _SHUTDOWN, struct.pack("I", FLAGS[flag]))
        finally:
            os.close(directory)
        with suppress(OSError):
            (self.mount_point / "still-alive").touch()
            raise AssertionError(f"{self.mount_point} takes files after its power was cut")
        self.cuts += 1
        return moment_ns

    def back(self) -> None:
        """Mount what the disk kept, once all processes on it have ended."""
        self._unmount()
        self._mount()


def cut_power(disk: PowerDisk, broker: BrokerProcess, source: random.Random) -> dict[str, Any]:
    """Cut, end what ran on it, mount again: the broker is left ended.  The facts are for the journal.

    A host stops with its disk, so the broker is stopped before.  Else ext4 answers an fdatasync that the cut
    overtakes with success although the journal dropped it (jbd2_complete_transaction()), up to 0.1 s after
    the cut, and clients are told of records that no broker on a host without power could have acknowledged.
    """
    flag = source.choice(list(FLAGS))
    broker.pause()
    cut_ns = disk.cut(flag)
    broker.kill()
    disk.back()
    return {"cut_ns": [cut_ns], "flag": flag}


def clear_stale_disks() -> None:
    """Unmount and detach the disks of runners that were killed."""
    for line in _run("losetup", "-l", "-n", "-O", "NAME,BACK-FILE").splitlines():
        device, _, name = line.strip().partition(" ")
        path = name.strip().removesuffix(" (deleted)")
        if not Path(path).name.startswith(NAME) or _held(path):
            continue
        for mounted in Path("/proc/self/mounts").read_text().splitlines():
            if mounted.split()[0] == device:
                subprocess.run(["umount", "-l", _unescaped(mounted.split()[1])], capture_output=True)
        subprocess.run(["losetup", "-d", device], capture_output=True)
        Path(path).unlink(missing_ok=True)


def _held(path: str) -> bool:
    """Whether a living runner has the disk."""
    try:
        lock = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(lock)


def _unescaped(path: str) -> str:
    """A path as /proc/mounts writes it, with its blanks again."""
    return path.encode().decode("unicode_escape")


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout.strip()
