"""The region: its arithmetic, its memory, what it leaves behind, its words and counters."""

from __future__ import annotations

import os
import resource
import signal
import stat
from itertools import pairwise
from pathlib import Path

import pytest

from danube.errors import InvalidArgument, StorageFull, StorageIncompatible
from danube.ipc import atomics, region
from danube.ipc.atomics import WORD_MASK, Words
from danube.ipc.counters import Counter, Counters, State, snapshot
from danube.ipc.layout import (
    COUNTER_BLOCK_BYTES,
    LINE_BYTES,
    PAGE_BYTES,
    TALLY_BLOCK_BYTES,
    USAGE_BLOCK_BYTES,
    Layout,
)
from danube.ipc.region import Region
from danube.limits import KIB, MIB, RING_BYTES, WORKERS_MAX


@pytest.mark.parametrize("workers", [1, 2, 3, 8, 17, WORKERS_MAX])
def test_parts_of_a_region_do_not_overlap(workers: int) -> None:
    plan = Layout.plan(workers)
    parts = [(0, LINE_BYTES)]
    for worker in range(workers):
        parts.append((plan.incarnation_position(worker), LINE_BYTES))
        parts.append((plan.sleeping_position(worker), LINE_BYTES))
        parts.append((plan.counter_block_position(worker), COUNTER_BLOCK_BYTES))
        parts.append((plan.tally_block_position(worker), TALLY_BLOCK_BYTES))
        parts.append((plan.usage_block_position(worker), USAGE_BLOCK_BYTES))
        for other in range(workers):
            if other != worker:
                parts.append((plan.ring_position(worker, other), PAGE_BYTES + plan.ring_bytes))
    parts.sort()
    assert all(start + size <= following for (start, size), (following, _) in pairwise(parts))
    assert plan.region_bytes - PAGE_BYTES < parts[-1][0] + parts[-1][1] <= plan.region_bytes
    assert all(start % LINE_BYTES == 0 for start, _ in parts)


def test_two_workers_get_full_rings_and_many_get_smaller_ones() -> None:
    assert Layout.plan(2).ring_bytes == RING_BYTES
    for workers in range(1, WORKERS_MAX + 1):
        assert Layout.plan(workers).region_bytes < 530 * MIB


@pytest.mark.parametrize("workers", [0, WORKERS_MAX + 1])
def test_a_number_of_workers_that_cannot_be_is_refused(workers: int) -> None:
    with pytest.raises(InvalidArgument):
        Layout.plan(workers)


def test_a_ring_size_that_cannot_be_masked_is_refused() -> None:
    with pytest.raises(InvalidArgument):
        Layout.plan(2, ring_bytes=5000)


def test_the_memory_is_private_sealed_and_nameless_and_taken_as_it_is_used() -> None:
    made = Region.create(2)
    status = os.stat(made.path)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_blocks * 512 <= 64 * KIB < made.layout.region_bytes
    with pytest.raises(PermissionError):
        os.truncate(made.path, 4096)
    assert os.readlink(made.path).startswith("/memfd:") and status.st_nlink == 0
    made.close()


def test_all_pages_are_reserved_where_the_kernel_does_not_overcommit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region, "available_memory_bytes", lambda: None)
    monkeypatch.setattr(region, "_read", lambda path: "2\n" if path.endswith("overcommit_memory") else "")
    made = Region.create(2, ring_bytes=65536)
    assert os.stat(made.path).st_blocks * 512 >= made.layout.region_bytes
    made.close()


def test_too_little_memory_is_refused_before_anything_is_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region, "available_memory_bytes", lambda: 1 << 20)
    descriptors = os.listdir("/proc/self/fd")
    with pytest.raises(StorageFull) as caught:
        Region.create(2)
    assert "1 MiB are available" in caught.value.why and "--workers" in caught.value.hint
    assert os.listdir("/proc/self/fd") == descriptors


def test_a_size_that_the_kernel_refuses_is_a_clear_error() -> None:
    """In a child, because the limit cannot be raised again."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
            try:
                Region.create(2)
            except StorageFull as error:
                status = 0 if "MiB of shared memory" in error.what and error.why else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_status_program_reads_the_counters_of_a_running_broker() -> None:
    made = Region.create(2, ring_bytes=4096)
    Counters(made, 1).add(Counter.RECORDS_IN, 41)
    attached = Region.attach(made.path)
    assert attached.layout == made.layout
    assert snapshot(attached)[1]["records_in"] == 41
    with pytest.raises(TypeError):
        Counters(attached, 1).add(Counter.RECORDS_IN)
    attached.close()
    made.close()


def test_a_file_that_is_no_region_is_refused(tmp_path: Path) -> None:
    for content in (b"", b"x" * 5000):
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(StorageIncompatible):
            Region.attach(tmp_path / "file")


def test_totals_go_on_after_a_restart_and_gauges_start_again() -> None:
    made = Region.create(1)
    counters = Counters(made, 0)
    counters.add(Counter.RECORDS_IN, 5)
    counters.add(Counter.CONNECTIONS, 3)
    counters.put(Counter.STATE, State.READY)
    counters.begin(pid=77, incarnation=9, now_ns=123)
    shown = snapshot(made)[0]
    assert (shown["records_in"], shown["connections"], shown["state"]) == (5, 0, State.STARTING)
    assert (shown["pid"], shown["incarnation"]) == (77, 9)
    made.close()


@pytest.mark.parametrize("plain", [pytest.param(True, marks=pytest.mark.skipif(
    not atomics.TOTAL_STORE_ORDER, reason="plain stores are not in order here")), False])  # fmt: skip
def test_words_hold_all_64_bits_whichever_way_they_are_reached(plain: bool) -> None:
    memory = memoryview(bytearray(64))
    words = Words(memory, plain)
    for value in (0, 1, 2**32, 2**63, WORD_MASK):
        words.store(3, value)
        assert words.load(3) == value
        assert int.from_bytes(memory[24:32], "little") == value
    assert words.add(3, 2) == 1, "sums wrap"
    assert bytes(memory[:24]) == bytes(24) and bytes(memory[32:]) == bytes(32)
    for outside in (8, 1000):
        with pytest.raises(IndexError):
            words.load(outside)
        with pytest.raises(IndexError):
            words.store(outside, 1)
