"""A planted leak is found in a sampled process; an honest one and one that is killed now and then pass."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from perf.soak.growth import BOUNDS, Bound, Finding, Growth, Rules, findings, over_capacity
from perf.soak.watch import (
    EXCUSED_S,
    METRICS,
    Faults,
    Reading,
    Record,
    Sample,
    Watch,
    disk_bytes,
    read_process,
    take,
)
from tests.broker_process import die_with_parent, wait_until

MIB = 1 << 20
LEAK = """
import os, sys, time
kept, files = [], []
print("ready", flush=True)
while True:
    if "memory" in sys.argv: kept.append(bytes(range(256)) * 512)
    if "descriptors" in sys.argv and len(files) < 900: files.append(os.open("/dev/null", 0))
    time.sleep(0.01)
"""


@contextmanager
def process(*leaks: str) -> Iterator[int]:
    """A process that leaks what is named, a hundred times a second; its id."""
    command = [sys.executable, "-c", LEAK, *leaks]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, preexec_fn=die_with_parent)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        yield child.pid
    finally:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def watched(folder: Path, *leaks: str, points: int = 60) -> list[Finding]:
    """What is found of a real process after so many samples of it, with the bounds of a short run."""
    record = Record(folder / "samples.jsonl")
    with process(*leaks) as pid:
        watch = Watch(record, Faults(), lambda: {"worker-0": pid}, {}, every_s=0.03, settle_s=0.0)
        with watch:
            wait_until(lambda: len(record.samples) >= points, 60, "enough samples")
        watch.check()
        assert not watch.died
    record.close()
    memory, count = Bound(per_hour=0, slack=0.5 * MIB), Bound(per_hour=0, slack=5)
    bounds = {"private_bytes": memory, "descriptors": count, "threads": count}
    rules = Rules(
        life_warm_up_s=0.2, young_s=1e9, settled_s=0.2, long_life_s=0.5, block_s_min=0.05,
        bounds=dict.fromkeys(BOUNDS, bounds),
    )  # fmt: skip
    return findings(record, rules)


def states(found: list[Finding], metric: str) -> set[Growth]:
    return {one.growth for one in found if one.metric == metric and one.when != "within lives"}


def test_a_planted_leak_of_memory_is_found(tmp_path: Path) -> None:
    found = watched(tmp_path, "memory")
    assert states(found, "private_bytes") == {Growth.BEYOND}
    assert states(found, "descriptors") == states(found, "threads") == {Growth.WITHIN}


def test_a_planted_leak_of_descriptors_is_found(tmp_path: Path) -> None:
    found = watched(tmp_path, "descriptors")
    assert states(found, "descriptors") == {Growth.BEYOND}
    assert states(found, "private_bytes") == {Growth.WITHIN}


def test_an_honest_process_is_within_its_bounds(tmp_path: Path) -> None:
    found = watched(tmp_path)
    assert {one.growth for one in found if one.when != "within lives"} == {Growth.WITHIN}


# -- hours, made up ---------------------------------------------------------------------------------


class Hours:
    """A record of hours with a fault every 45 s, sampled every 5 s, with the faults that kill."""

    def __init__(self, folder: Path, source: random.Random) -> None:
        self.record = Record(folder / "samples.jsonl")
        self.source = source
        self.now_s = 0.0
        self.born_s, self.life = 0.0, 0

    def run(
        self,
        hours: float,
        leak: dict[str, float],
        *,
        kept: dict[str, float] | None = None,
        young_mib: float = 0.0,
        killed_every: int = 3,
    ) -> None:
        """Go on until so many hours; every so many faults kill the process.

        ``leak`` grows by so much an hour in the life of a process, ``kept`` also over its end.  A young
        process grows by ``young_mib``, nearly all of it in its first five minutes.
        """
        interval = int(self.now_s // 45)
        while self.now_s < hours * 3600:
            self.now_s += 5
            if self.now_s // 45 > interval:
                interval += 1
                if interval % killed_every == 0:
                    self.life, self.born_s = self.life + 1, self.now_s
            age_s = self.now_s - self.born_s
            values = {name: self._level(name) + leak.get(name, 0.0) * age_s / 3600 for name in METRICS}
            for name, amount in (kept or {}).items():
                values[name] += amount * self.now_s / 3600
            values["private_bytes"] += young_mib * MIB * (1 - math.exp(-age_s / 100))
            counts = {name: int(value) for name, value in values.items()}
            reading = Reading(life=str(self.life), age_s=age_s, **counts)
            quiet = self.now_s % 45 >= 10
            self.record.add(self.now_s, interval, quiet, Sample({"worker-0": reading}, {"data": 10 * MIB}))

    def _level(self, name: str) -> float:
        if name == "data_files":
            return 0
        if name in ("descriptors", "threads"):
            return 60 + (self.source.random() < 0.1)
        return 130 * MIB + self.source.gauss(0, 0.2 * MIB)

    def growth(self) -> dict[tuple[str, str], Growth]:
        rules = Rules(warm_up_s=600)
        return {(one.metric, one.when): one.growth for one in findings(self.record, rules)}


@pytest.fixture
def hours(tmp_path: Path, source: random.Random) -> Iterator[Hours]:
    made = Hours(tmp_path, source)
    yield made
    made.record.close()


def test_hours_of_noise_and_kills_are_within_all_bounds(hours: Hours) -> None:
    hours.run(3, {}, killed_every=24)
    assert set(hours.growth().values()) == {Growth.WITHIN}


def test_a_leak_that_every_kill_undoes_is_found_between_faults(hours: Hours) -> None:
    hours.run(2, {"private_bytes": 1_000 * MIB})
    found = hours.growth()
    assert found["private_bytes", "between faults"] is Growth.BEYOND
    assert found["private_bytes", "long run"] is not Growth.BEYOND
    assert found["descriptors", "between faults"] is Growth.WITHIN


def test_a_slow_leak_is_found_when_nobody_kills(hours: Hours) -> None:
    hours.run(4, {"private_bytes": 12 * MIB, "descriptors": 6}, killed_every=10_000)
    found = hours.growth()
    for metric in ("private_bytes", "descriptors"):
        assert found[metric, "within lives"] is Growth.BEYOND
        assert found[metric, "long run"] is Growth.OPEN, "there were no young processes after the first"


def test_growth_that_restarts_do_not_undo_is_found_over_the_long_run(hours: Hours) -> None:
    hours.run(4, {}, kept={"private_bytes": 12 * MIB, "descriptors": 6})
    found = hours.growth()
    for metric in ("private_bytes", "descriptors"):
        assert found[metric, "long run"] is Growth.BEYOND
        assert found[metric, "between faults"] is Growth.WITHIN


def test_processes_that_grow_while_they_are_young_are_within_all_bounds(hours: Hours) -> None:
    """The first hours end no process, the others do: old processes must not be compared with young ones."""
    hours.run(3, {}, young_mib=25, killed_every=10_000)
    hours.run(6, {}, young_mib=25, killed_every=2)
    found = hours.growth()
    assert Growth.BEYOND not in found.values()
    assert found["private_bytes", "within lives"] is found["private_bytes", "long run"] is Growth.WITHIN


def test_more_data_files_than_there_may_be_are_told(hours: Hours) -> None:
    hours.run(0.1, {})
    assert over_capacity(hours.record) == []
    hours.run(0.2, {}, kept={"data_files": 100_000})
    (sentence,) = over_capacity(hours.record)
    assert "worker-0 had" in sentence and "data_files" in sentence


def test_the_bounds_of_long_runs_are_those_that_were_promised() -> None:
    assert BOUNDS["long run"]["private_bytes"].limit(72 * 3600) == MIB
    assert BOUNDS["long run"]["descriptors"].limit(72 * 3600) < 0.1
    assert all(set(bounds) <= set(METRICS) for bounds in BOUNDS.values())


# -- samples ----------------------------------------------------------------------------------------


def test_a_reading_is_of_this_process_and_its_threads() -> None:
    before = read_process(os.getpid())
    assert before is not None and before.threads >= 1 and before.descriptors > 2
    assert before.private_bytes > MIB
    release = threading.Event()
    with ExitStack() as stack:
        thread = threading.Thread(target=release.wait)
        thread.start()
        stack.callback(thread.join)
        stack.callback(release.set)
        stack.enter_context(Path("/dev/null").open())
        after = read_process(os.getpid())
    assert after is not None and after.life == before.life
    assert (after.threads, after.descriptors) == (before.threads + 1, before.descriptors + 1)


def test_files_of_the_data_directory_are_counted_apart(tmp_path: Path) -> None:
    def growth() -> tuple[int, int]:
        now = read_process(os.getpid(), f"{tmp_path}/data/")
        assert now is not None and before is not None
        return now.data_files, now.descriptors - before.descriptors

    before = read_process(os.getpid(), f"{tmp_path}/data/")
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / "a"
    with path.open("w"):
        assert growth() == (1, 0)
        with (tmp_path / "elsewhere").open("w"):
            assert growth() == (1, 1)
        with path.open():
            assert growth() == (1, 1), "a second descriptor of one file is one too many"
        path.unlink()
        assert growth() == (0, 1), "and so is one of a file that nobody can find any more"


def test_what_is_gone_is_not_read() -> None:
    with process() as pid:
        assert read_process(pid) is not None
    assert read_process(pid) is None
    assert take(lambda: {"worker-0": pid}, {"data": lambda: 7}) == Sample({}, {"data": 7})


def test_disk_bytes_are_those_of_all_files_below(tmp_path: Path) -> None:
    assert disk_bytes(tmp_path) == 0
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "file").write_bytes(bytes(100_000))
    assert 100_000 <= disk_bytes(tmp_path) <= 200_000
    assert disk_bytes(tmp_path / "nowhere") == 0


def test_a_folder_that_goes_away_meanwhile_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scandir = os.scandir

    def gone(path: str) -> object:
        if str(path).endswith("gone"):
            raise FileNotFoundError(path)
        return scandir(path)

    (tmp_path / "gone").mkdir()
    (tmp_path / "file").write_bytes(bytes(100_000))
    monkeypatch.setattr(os, "scandir", gone)
    assert disk_bytes(tmp_path) >= 100_000


def test_a_record_is_read_back_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    sample = Sample({"mover": read_self()}, {"data": 5})
    record = Record(path)
    record.add(1.0, 0, True, sample)
    record.add(2.0, 1, False, sample)
    record.close()
    path.write_bytes(path.read_bytes() + b'{"at_s": 3.0, "inter')  # the process was killed
    again = Record(path)
    assert again.latest.at_s == 2.0 and again.places["at_s"].tolist() == [1.0, 2.0]
    assert again.processes["quiet"].tolist() == [True, False]
    again.add(3.0, 1, True, sample)
    again.close()
    assert [json.loads(line)["at_s"] for line in path.read_text().splitlines()] == [1.0, 2.0, 3.0]
    third = Record(path)
    third.close()
    assert third.largest["places"] == {"data": 5.0} and third.latest.at_s == 3.0


def read_self() -> Reading:
    found = read_process(os.getpid())
    assert found is not None
    return found


# -- what ends by itself ----------------------------------------------------------------------------


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def watch_of(folder: Path, faults: Faults, pids: dict[str, int]) -> Watch:
    return Watch(Record(folder / "samples.jsonl"), faults, lambda: pids, {})


def test_a_process_that_ended_by_itself_is_noticed(tmp_path: Path, clock: Clock) -> None:
    faults = Faults(clock)
    with process() as first:
        pids = {"worker-0": first}
        watch = watch_of(tmp_path, faults, pids)
        watch.sample()
        clock.now_s += 5
        watch.sample()
        assert not watch.died
    with process() as second:
        pids["worker-0"] = second
        clock.now_s += 5
        watch.sample()
    (sentence,) = watch.take_died()
    assert f"worker-0 (process {first})" in sentence and "nothing had been done" in sentence
    assert not watch.died
    watch.record.close()


@pytest.mark.parametrize("while_running", [True, False])
def test_a_process_that_a_fault_ended_is_excused(tmp_path: Path, clock: Clock, while_running: bool) -> None:
    faults = Faults(clock)
    with process() as pid:
        pids = {"worker-0": pid}
        watch = watch_of(tmp_path, faults, pids)
        watch.sample()
    faults.begin()
    if not while_running:
        faults.end()
        clock.now_s += EXCUSED_S - 1
    watch.sample()
    assert not watch.died
    watch.record.close()


def test_samples_near_a_fault_do_not_count(tmp_path: Path, clock: Clock) -> None:
    faults = Faults(clock)
    with process() as pid:
        watch = watch_of(tmp_path, faults, {"worker-0": pid})
        watch.sample()
        faults.begin()
        watch.sample()
        faults.end()
        clock.now_s += 1
        watch.sample()
        clock.now_s += 10
        watch.sample()
    readings = watch.record.processes
    assert readings["quiet"].tolist() == [True, False, False, True]
    assert readings["interval"].tolist() == [0, 1, 1, 1]
    watch.record.close()


def test_an_error_of_the_thread_is_raised_where_the_run_can_end(tmp_path: Path) -> None:
    def broken() -> dict[str, int]:
        raise OSError("no /proc")

    record = Record(tmp_path / "samples.jsonl")
    with Watch(record, Faults(), broken, {}, every_s=0.01) as watch:
        wait_until(lambda: watch._sampling.done(), 30, "the thread ended")
    with pytest.raises(OSError, match="no /proc"):
        watch.check()
    record.close()
