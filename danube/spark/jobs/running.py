"""Running a job's tasks: in processes of this machine, or in Spark.  The same functions do the work.

A task is a value that can be pickled; the work is a function of a module, which turns a task into bytes.
Only tasks and those bytes travel, so payload stays where it is read.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol

from danube.errors import DanubeError, Unavailable
from danube.spark.jobs.findings import Report
from danube.spark.jobs.options import Surroundings, parse_arguments

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from danube.spark.history.options import Readers

Work = Callable[[Any], bytes]
Progress = Callable[[str], None]

EXIT_USAGE: Final = 2
_AHEAD: Final = 2  # tasks handed out per process beyond the one it works on


class Runner(Protocol):
    """``slots``: how many tasks run at once."""

    @property
    def slots(self) -> int: ...

    def run(self, work: Work, tasks: Sequence[Any]) -> Iterator[tuple[int, bytes]]:
        """Yield the number of each task and the result of its work, in any order.

        An error of the work ends it.
        """
        ...


def no_progress(_: str) -> None:
    """Drop progress, for callers that do not show it."""


def print_progress(line: str) -> None:
    """One line of progress to stderr."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


@contextmanager
def job_session(job: str, surroundings: Surroundings) -> Iterator[SparkSession | None]:
    """The Spark session of a job's command line, stopped when the block ends; None for a local run."""
    if surroundings.local:
        yield None
        return
    from danube.spark import session

    spark = session(f"danube {job}", surroundings.url, **surroundings.settings)
    try:
        yield spark
    finally:
        spark.stop()


def command(
    job: str,
    description: str,
    readers: Readers,
    run: Callable[[Mapping[str, str], SparkSession | None, Progress], Report],
    told: Callable[[Report], Iterable[str]],
    argv: Sequence[str] | None,
    exit_code_of: Callable[[DanubeError], int] = lambda error: EXIT_USAGE,
) -> int:
    """The command line of a job; returns its exit code.  ``told``: the lines for people when it is done."""
    given, surroundings = parse_arguments(job, description, readers, sys.argv[1:] if argv is None else argv)
    try:
        with job_session(job, surroundings) as spark:
            report = run(given, spark, print_progress)
    except DanubeError as error:
        print_progress(f"error: {error}" + (f"\n  try: {error.hint}" if error.hint else ""))
        return exit_code_of(error)
    for line in told(report):
        print_progress(line)
    return report.exit_code


def frame_of_rows(spark: SparkSession, schema: str, rows: Iterable[Mapping[str, Any]]) -> DataFrame:
    """A DataFrame of the columns that ``schema`` names, ``name type, ...``."""
    names = [column.split()[0] for column in schema.split(", ")]
    return spark.createDataFrame([tuple(row[name] for name in names) for row in rows], schema)


class LocalRunner:
    """Processes of this machine; one process means this one."""

    def __init__(self, processes: int = 0) -> None:
        self.slots = processes or max(1, len(os.sched_getaffinity(0)))

    def run(self, work: Work, tasks: Sequence[Any]) -> Iterator[tuple[int, bytes]]:
        if self.slots == 1 or len(tasks) <= 1:
            for number, task in enumerate(tasks):
                yield number, work(task)
            return
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(min(self.slots, len(tasks)), context) as pool:
            yield from self._results(pool, work, tasks)

    def _results(
        self, pool: ProcessPoolExecutor, work: Work, tasks: Sequence[Any]
    ) -> Iterator[tuple[int, bytes]]:
        waiting: dict[Future[bytes], int] = {}
        handed = 0
        try:
            while handed < len(tasks) or waiting:
                while handed < len(tasks) and len(waiting) < self.slots * (1 + _AHEAD):
                    waiting[pool.submit(work, tasks[handed])] = handed
                    handed += 1
                for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                    yield waiting.pop(future), future.result()
        except BrokenProcessPool:
            raise Unavailable(
                "a process that did part of the job has died",
                why="it was killed, or memory ran out",
                hint="start the job again with fewer processes",
            ) from None
        finally:
            for future in waiting:
                future.cancel()


def runner_for(spark: SparkSession | None, slots: int = 0) -> Runner:
    """Return the runner of a job's tasks: in ``spark``, or in processes of this machine.

    ``slots`` 0: all.
    """
    if spark is None:
        return LocalRunner(slots)
    from danube.spark.jobs.spark_runner import SparkRunner

    return SparkRunner(spark, slots)


class Pace:
    """Lines of progress, at most one in two seconds."""

    INTERVAL_S: Final = 2.0

    def __init__(self, job: str, total: int, progress: Progress) -> None:
        self._job, self._total, self._progress = job, total, progress
        self._start_s = self._said_s = time.monotonic()
        self._done = 0
        self._bytes = 0

    def step(self, size_bytes: int, note: str = "") -> None:
        """A task ended that went through so many bytes."""
        self._done += 1
        self._bytes += size_bytes
        now_s = time.monotonic()
        if now_s - self._said_s < self.INTERVAL_S and self._done < self._total:
            return
        self._said_s = now_s
        rate = self._bytes / max(1e-6, now_s - self._start_s) / 1e9
        text = (
            f"{self._job}: {self._done} of {self._total} tasks, {self._bytes / 1e9:.2f} GB, {rate:.2f} GB/s"
        )
        self._progress(f"{text}, {note}" if note else text)


def packed(sizes: Sequence[int], slots: int, most_bytes: int) -> list[list[int]]:
    """Numbers 0 .. n in runs of about equal bytes: some for each slot, none much above ``most_bytes``."""
    target = max(1, min(most_bytes, sum(sizes) // max(1, slots * 4)))
    runs: list[list[int]] = []
    total = target
    for number, size in enumerate(sizes):
        if total >= target:
            runs.append([])
            total = 0
        runs[-1].append(number)
        total += size
    return runs
