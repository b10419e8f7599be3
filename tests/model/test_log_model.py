"""The log against a list: any order of appends, writes, syncs, rolls, deletions, crashes and reopenings."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from danube.core.batch.columns import encode
from danube.core.batch.format import read_header, stamp
from danube.errors import OffsetOutOfRange
from danube.host import files
from danube.wal.log.log import Log, LogIdentity, LogOptions
from danube.wal.log.syncer import SealJob
from danube.wal.segments.spare import SpareJob
from tests.examples import examples
from tests.log_oracle import verify
from tests.unit.wal_samples import records_in

IDENTITY = LogIdentity(7, 1)
OPTIONS = LogOptions(segment_bytes=3000, preallocate_first=4096, preallocate_step_max=16384)
STEP_US = 1_000_000


class LogMachine(RuleBasedStateMachine):
    """``records`` holds every written payload by offset; ``pending`` those that are only queued."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(
            tempfile.mkdtemp(prefix="danube-model-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
        )
        self.directory = self.root / IDENTITY.directory_name
        self.records: list[bytes] = []
        self.pending: list[bytes] = []
        self.start = 0
        self.now_us = STEP_US
        self.times: list[int] = []
        self.epoch = 0
        self.sealing: list[SealJob] = []
        self.spares: list[SpareJob] = []  # under way in a thread

    @initialize()
    def first_opening(self) -> None:
        self.reopen(None)

    def reopen(self, trusted_end: int | None) -> None:
        self.epoch += 1
        self.log = Log.open(self.directory, IDENTITY, self.epoch, OPTIONS, trusted_end=trusted_end)
        self.sealing.clear()
        self.spares.clear()
        assert self.log.recovery.damaged == ()
        assert not list(self.directory.glob("*.new"))
        assert self.log.log_end == self.log.written_end == self.log.synced_end == len(self.records)
        bases = [header.base_offset for header in self.log.recovery.headers]
        assert bases == sorted(bases)

    @rule(
        counts=st.lists(st.integers(1, 4), min_size=1, max_size=4), size=st.sampled_from([0, 10, 300, 2000])
    )
    def append(self, counts: list[int], size: int) -> None:
        for count in counts:
            end = len(self.records) + len(self.pending)
            payloads = [b"%d:" % (end + number) + bytes(size) for number in range(count)]
            batch = bytearray(encode(payloads, publish_time_us=0).to_bytes())
            self.now_us += STEP_US
            stamp(batch, end, self.epoch, self.now_us)
            self.log.append(memoryview(batch), read_header(batch))
            self.pending += payloads
            self.times += [self.now_us] * count

    @rule()
    def write(self) -> None:
        self.records += self.pending
        self.pending = []
        assert self.log.write() == len(self.records)

    @rule()
    def discard(self) -> None:
        self.log.discard_pending()
        self.pending = []
        del self.times[len(self.records) :]

    @rule()
    def sync(self) -> None:
        job = self.log.sync_job()
        if job is not None:
            job.run(set())
            self.log.synced(job)
        assert self.log.synced_end == self.log.written_end

    @rule()
    def store_mark(self) -> None:
        self.log.store_mark()

    @rule()
    def roll(self) -> None:
        if not self.pending:
            job = self.log.roll(b"producers at %d" % self.log.written_end)
            if job is not None:
                self.sealing.append(job)

    @rule()
    def seal(self) -> None:
        for job in self.sealing:
            job.run(set())
            self.log.sealed(job)
        self.sealing.clear()

    @rule()
    def ask_for_a_spare(self) -> None:
        job = self.log.spare.job(self.log.active)
        if job is not None:
            self.spares.append(job)

    @rule(told=st.booleans())
    def make_spares(self, told: bool) -> None:
        """Without ``told`` the log has not heard of it yet."""
        for job in self.spares:
            job.run(set())
            assert job.made == job.wanted
            if told:
                self.log.spare.done(job, None)
        self.spares.clear()

    @rule(carried_out=st.booleans())
    def drop_the_spare(self, carried_out: bool) -> None:
        dropped = self.log.spare.drop()
        if dropped is not None and carried_out:
            dropped.run()

    @rule(keep=st.integers(0, 6000))
    def retain_by_size(self, keep: int) -> None:
        for deleted in self.log.retain(self.now_us, 0, max(1, keep)):
            assert deleted.start == self.start
            self.start = deleted.end

    @rule(age=st.integers(1, 30))
    def retain_by_time(self, age: int) -> None:
        for deleted in self.log.retain(self.now_us, age * STEP_US // 1000, 0):
            assert deleted.start == self.start
            self.start = deleted.end
            assert all(time < self.now_us - age * STEP_US for time in self.times[: deleted.end])

    @rule()
    def close_and_reopen(self) -> None:
        self.seal()
        self.log.close(b"closed at %d" % len(self.records + self.pending))
        self.records += self.pending
        self.pending = []
        report = verify(self.directory)
        assert report.sound, report
        self.reopen(None)
        if self.start < len(self.records):
            assert self.log.recovery.scanned_bytes == 0

    @rule()
    def crash_and_reopen(self) -> None:
        self.log.abandon()
        self.pending = []
        del self.times[len(self.records) :]
        self.reopen(None)

    @rule()
    def fence_and_reopen_at_the_synced_end(self) -> None:
        end = self.log.synced_end
        self.log.abandon()
        self.pending = []
        del self.records[end:], self.times[end:]
        self.reopen(end)

    @precondition(lambda self: len(self.records) > self.start)
    @rule(data=st.data(), bytes_max=st.sampled_from([1, 200, 5000, 1 << 20]))
    def read(self, data: st.DataObject, bytes_max: int) -> None:
        offset = data.draw(st.integers(self.start, len(self.records)))
        end = data.draw(st.integers(offset, len(self.records) + 3))
        chunk = self.log.read(offset, end, bytes_max)
        found = records_in(chunk.data)
        assert chunk.damage == () and (bool(found) == (offset < min(end, len(self.records))))
        if found:
            assert found[0][0] == chunk.first_offset <= offset
            assert found[-1][0] + 1 == chunk.next_offset > offset
        assert all(self.records[number] == payload for number, payload in found)

    @precondition(lambda self: len(self.records) > self.start)
    @rule(data=st.data())
    def find_a_time(self, data: st.DataObject) -> None:
        time_us = data.draw(st.integers(0, self.now_us + STEP_US))
        wanted = [offset for offset in range(self.start, len(self.records)) if self.times[offset] >= time_us]
        assert self.log.offset_at_time(time_us) == (wanted[0] if wanted else len(self.records))

    @invariant()
    def ends_are_in_order(self) -> None:
        if not hasattr(self, "log"):
            return
        log = self.log
        assert log.start == self.start <= log.synced_end <= log.written_end <= log.log_end
        assert log.written_end == len(self.records)
        assert log.log_end == len(self.records) + len(self.pending)

    def teardown(self) -> None:
        if hasattr(self, "log"):
            self.log.abandon()
            self.epoch += 1
            log = Log.open(self.directory, IDENTITY, self.epoch, OPTIONS)
            offset = log.start
            while offset < len(self.records):
                chunk = log.read(offset, len(self.records))
                assert all(self.records[number] == payload for number, payload in records_in(chunk.data))
                offset = chunk.next_offset
            for outside in (self.start - 1, len(self.records) + 1):
                with pytest.raises(OffsetOutOfRange):
                    log.read(outside, outside + 1)
            log.abandon()
        shutil.rmtree(self.root, ignore_errors=True)


@pytest.fixture(autouse=True)
def no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "fdatasync", lambda fd: None)
    monkeypatch.setattr(files, "fsync_directory", lambda directory: None)


TestLogModel = LogMachine.TestCase
TestLogModel.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)


def test_a_close_without_new_batches_remembers_the_producers_too() -> None:
    """Found by the model: two crashes, then a clean close with nothing to seal."""
    model = LogMachine()
    try:
        model.first_opening()
        model.append([1], 0)
        model.write()
        model.crash_and_reopen()
        model.crash_and_reopen()
        model.close_and_reopen()
    finally:
        model.teardown()
