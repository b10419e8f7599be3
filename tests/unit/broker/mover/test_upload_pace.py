"""What Linux tells of a process, and threads that are held for as long as the pace says."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from danube.broker.mover import threads as upload_pace
from danube.broker.mover.threads import UploadPace, scheduled
from danube.core.partition.pace import PAUSE_MAX_NS, SHARE_MIN, Bounds, Scheduled
from danube.core.partition.pending import NOTHING, Pending
from danube.host import clock

BOUNDS = Bounds(age_s=300.0, size_bytes=1 << 30)
MS = 1_000_000
PARALLEL = 4


class Clock:
    """Time that passes when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns = 1_000 * MS
        monkeypatch.setattr(clock, "monotonic_ns", lambda: self.now_ns)


def told(processes: Path, pid: int, ran_ns: int, waited_ns: int) -> None:
    (processes / str(pid)).mkdir(exist_ok=True)
    (processes / str(pid) / "schedstat").write_text(f"{ran_ns} {waited_ns} 12\n")


def held(monkeypatch: pytest.MonkeyPatch, processes: Path, now: Clock) -> UploadPace:
    """A pace whose one worker has waited for most of a second."""
    monkeypatch.setattr(upload_pace, "PROCESSES", processes)
    pace = UploadPace(BOUNDS, PARALLEL)
    told(processes, 7, 0, 0)
    pace.watch([7], NOTHING)
    for number in range(1, 6):
        now.now_ns += 100 * MS
        told(processes, 7, number * 20 * MS, number * 80 * MS)
        pace.watch([7], NOTHING)
    return pace


def test_this_process_has_run_and_numbers_only_grow() -> None:
    before = scheduled(os.getpid())
    if before is None:
        pytest.skip("this kernel does not tell how long a process waited")
    assert before.ran_ns > 0
    after: Scheduled | None = before
    deadline_s = time.monotonic() + 10
    while after is not None and after.ran_ns == before.ran_ns and time.monotonic() < deadline_s:
        after = scheduled(os.getpid())  # Linux counts when it looks, at the latest at its next tick
    assert after is not None and after.ran_ns > before.ran_ns and after.waited_ns >= before.waited_ns


@pytest.mark.parametrize("text", ["", "1 2", "1 2 3 4", "one two three", None])
def test_what_cannot_be_read_is_not_known(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload_pace, "PROCESSES", tmp_path)
    (tmp_path / "7").mkdir()
    if text is not None:
        (tmp_path / "7" / "schedstat").write_text(text)
    assert scheduled(7) is None


def test_a_worker_that_waits_holds_uploads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    now = Clock(monkeypatch)
    pace = held(monkeypatch, tmp_path, now)
    assert pace.share == SHARE_MIN
    pace.watch([7], Pending(1 << 40, clock.wall_us()))
    assert pace.share == 1.0, "too much waits"
    pace.watch([7], Pending(1, clock.wall_us() - 600_000_000))
    assert pace.share == 1.0, "it has waited for too long"


def test_where_linux_tells_nothing_uploads_are_not_held(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    now = Clock(monkeypatch)
    monkeypatch.setattr(upload_pace, "PROCESSES", tmp_path / "absent")
    pace = UploadPace(BOUNDS, PARALLEL)
    for _ in range(10):
        now.now_ns += 100 * MS
        pace.watch([7, os.getpid()], NOTHING)
    assert pace.share == 1.0


def test_a_rest_is_as_long_as_the_work_demands_and_counts_for_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    now = Clock(monkeypatch)
    pace = held(monkeypatch, tmp_path, now)
    pace.running = PARALLEL
    pauses: list[float] = []

    def wait(seconds: float) -> bool:
        pauses.append(seconds)
        now.now_ns += int(seconds * 1e9)
        return False

    monkeypatch.setattr(pace._released, "wait", wait)
    rest = pace.rests()
    for worked_ns in (10 * MS, 0, 50 * MS, 60_000 * MS):
        now.now_ns += worked_ns
        rest(1)
    assert pauses == pytest.approx([0.09, 0.45, PAUSE_MAX_NS / 1e9])


def test_a_mover_that_ends_holds_nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    now = Clock(monkeypatch)
    pace = held(monkeypatch, tmp_path, now)
    pace.running = PARALLEL
    rest = pace.rests()
    now.now_ns += 60_000 * MS
    resting = threading.Event()
    wait = pace._released.wait

    def waits(seconds: float) -> bool:
        resting.set()
        return wait(60.0)  # longer than the test has

    monkeypatch.setattr(pace._released, "wait", waits)
    with ThreadPoolExecutor(1) as pool:
        thread = pool.submit(rest, 1)
        assert resting.wait(20.0)
        pace.release()
        thread.result(timeout=20.0)
    assert pace.share == 1.0
