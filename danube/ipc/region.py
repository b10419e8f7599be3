"""The one block of shared memory of a broker, made by the supervisor before it forks.

The block is a memfd: it has no name that could be guessed or left behind, has mode 0600, and the kernel frees
it with the last process that maps it, also after SIGKILL.  Its size is sealed.  A page takes memory from its
first use on, as a page of the heap does; where the kernel refuses pages instead of overcommitting, all are
reserved at the start, so that touching one never raises SIGBUS.  A memfd counts as the broker's memory (and
its cgroup's), not against the mount size of /dev/shm.

The doorbells are made here too, because they must also exist before the fork.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from pathlib import Path
from typing import Final

from danube.errors import StorageFull, StorageIncompatible
from danube.host.capacity import available_memory_bytes
from danube.ipc.atomics import WORD_BYTES, Words
from danube.ipc.layout import LINE_BYTES, RING_WORDS_BYTES, Layout
from danube.ipc.passage import Pair, close_pairs, open_pairs
from danube.limits import MIB

MAGIC: Final = int.from_bytes(b"DNBREG03", "little")
_HEADER_WORDS: Final = ("magic", "workers", "ring_bytes", "region_bytes")
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_NEVER_OVERCOMMITS: Final = "2"  # vm.overcommit_memory


class Region:
    """The mapped memory; forked workers inherit it and use their parts of it."""

    def __init__(
        self,
        layout: Layout,
        descriptor: int,
        mapped: mmap.mmap,
        bells: tuple[int, ...],
        pairs: tuple[Pair, ...],
    ) -> None:
        self.layout = layout
        self.bells = bells
        self.pairs = pairs  # of sockets, one for each worker where there are several; see Passage
        self._descriptor = descriptor
        self._map = mapped
        self.memory = memoryview(mapped)
        self.secret = os.urandom(16)  # for hashes that clients must not foresee

    @classmethod
    def create(cls, workers: int, ring_bytes: int = 0) -> Region:
        """Map a region; a size of 0 is planned by :class:`~danube.ipc.layout.Layout`.

        Raises StorageFull when the memory is not there, before anything else was started.
        """
        layout = Layout.plan(workers, ring_bytes)
        _check_memory(layout.region_bytes)
        descriptor = os.memfd_create("danube-region", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(descriptor, 0o600)
            os.ftruncate(descriptor, layout.region_bytes)
            if _read("/proc/sys/vm/overcommit_memory").strip() == _NEVER_OVERCOMMITS:
                os.posix_fallocate(descriptor, 0, layout.region_bytes)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            mapped = mmap.mmap(descriptor, layout.region_bytes)
        except OSError as error:
            os.close(descriptor)
            raise _no_memory(layout.region_bytes, os.strerror(error.errno or errno.ENOMEM)) from error
        bells = tuple(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(workers))
        region = cls(layout, descriptor, mapped, bells, open_pairs(workers))
        header = Words(region.memory[:LINE_BYTES])
        facts = (MAGIC, layout.workers, layout.ring_bytes, layout.region_bytes)
        for index, value in enumerate(facts):
            header.store(index, value)
        return region

    @classmethod
    def attach(cls, path: str | Path) -> Region:
        """Map a running broker's region, as found in its state file, for reading only.

        Raises OSError when there is none and StorageIncompatible when it is not a region.
        """
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(descriptor).st_size
            header = os.pread(descriptor, LINE_BYTES, 0).ljust(LINE_BYTES, b"\0")
            values = dict(zip(_HEADER_WORDS, memoryview(header).cast("Q"), strict=False))
            if values.get("magic") != MAGIC or values.get("region_bytes") != size:
                raise StorageIncompatible("not a region of this version of Danube", why=str(path))
            mapped = mmap.mmap(descriptor, size, prot=mmap.PROT_READ)
        except BaseException:
            os.close(descriptor)
            raise
        layout = Layout.plan(values["workers"], values["ring_bytes"])
        return cls(layout, descriptor, mapped, (), ())

    @property
    def path(self) -> str:
        """Path at which another process of the same user can open the region while this process lives."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def words(self, position: int, size: int) -> Words:
        """Atomic words over ``size`` bytes from ``position``."""
        return Words(self.memory[position : position + size])

    def ring_memory(self, writer: int, reader: int) -> tuple[Words, memoryview]:
        """The words and the slots of one ring."""
        start = self.layout.ring_position(writer, reader)
        slots = start + RING_WORDS_BYTES
        return self.words(start, RING_WORDS_BYTES), self.memory[slots : slots + self.layout.ring_bytes]

    def incarnation(self, worker: int) -> int:
        """Which start of ``worker`` is the current one; 0 before the first."""
        return self._incarnation_words(worker).load(0)

    def announce(self, worker: int, incarnation: int) -> None:
        """Announce to all workers that ``worker`` is about to run as ``incarnation``.

        The supervisor calls this after the old process was reaped and before the new one is forked.  All
        bells ring, so that no peer waits for an answer of the dead worker.
        """
        self._incarnation_words(worker).store(0, incarnation)
        for bell in self.bells:
            _ring(bell)

    def _incarnation_words(self, worker: int) -> Words:
        return self.words(self.layout.incarnation_position(worker), WORD_BYTES)

    def close(self) -> None:
        """Close the descriptors.  The mapping itself goes with the last view of it."""
        for bell in self.bells:
            os.close(bell)
        close_pairs(self.pairs)
        self.bells = self.pairs = ()
        os.close(self._descriptor)
        self._descriptor = -1


def _ring(bell: int) -> None:
    try:
        os.eventfd_write(bell, 1)
    except BlockingIOError:
        return  # 2**64-2 rings are pending: it rings


def _check_memory(size: int) -> None:
    available = available_memory_bytes()
    if available is not None and size > available:
        raise _no_memory(size, f"only {available // MIB} MiB are available")


def _no_memory(size: int, why: str) -> StorageFull:
    return StorageFull(
        f"no {-(-size // MIB)} MiB of shared memory for the workers",
        why=why,
        hint="start fewer workers (--workers), or give the machine or container more memory",
        size=size,
    )


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
