"""Validation of what real brokers wrote, through kills and uploads: clean is clean, and damage is named."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from danube import sync
from danube.cli.topics.topics import wait_uploaded
from danube.core.dispatch.cursor import CursorState
from danube.core.dispatch.grants import Mode
from danube.errors import InvalidArgument, NotFound, StoreUnavailable
from danube.spark.history import places
from danube.spark.jobs.findings import Damage, Report
from danube.spark.jobs.validate import task as validate_task
from danube.spark.jobs.validate import validate
from danube.wal.log.cursors import CursorStore
from danube.wal.recovery.mark import Mark, pack_slot
from danube.wal.stores.directory import LocalStore
from danube.wal.tier.keys import manifest_key, parse_partition, segment_key
from danube.wal.tier.manifest import EntryFlag, Manifest
from tests.broker_process import ROOT, BrokerProcess, wait_until

pytestmark = pytest.mark.e2e

TOPIC = "/default/validated"
PARTS = "/default/parts"
TIERED = {"DANUBE_STORAGE__SEAL_AFTER": "1s", "DANUBE_STORAGE__MERGE_BELOW": "0"}


class History(NamedTuple):
    """What a broker left when it was stopped."""

    data: Path
    store: Path
    records: int


def publish(address: str, topic: str, count: int, start: int = 0, size: int = 1_000) -> None:
    with sync.connect(address) as client, client.producer(topic, name="writer") as producer:
        for number in range(start, start + count):
            producer.send_nowait(b"%08d" % number + b"." * (size - 8), key=b"k%d" % (number % 50))
        producer.flush()


def seal(process: BrokerProcess, topic: str) -> None:
    """Until it is in the store, too."""
    with sync.connect(process.address) as client:
        wait_uploaded(client, topic, client.admin.seal(topic), 60_000)


def acknowledge(address: str, topic: str, count: int) -> None:
    with sync.connect(address) as client:
        with client.consumer(topic, subscription="reader", start="earliest") as consumer:
            for _ in range(count):
                consumer.receive(timeout=20).ack()
            consumer.flush()


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Iterator[History]:
    """Two topics of a broker with a store that was killed twice and stopped at last."""
    folder = tmp_path_factory.mktemp("validate")
    store = folder / "store"
    store.mkdir()
    process = BrokerProcess(
        folder / "data", workers=2, arguments=["--storage", f"file://{store}"], environment=TIERED
    )
    try:
        process.start()
        with sync.connect(process.address) as client:
            client.admin.create_topic(PARTS, partitions=3)
        for number in range(3):
            publish(process.address, TOPIC, 800, number * 800)
            publish(process.address, PARTS, 300, number * 300)
            seal(process, TOPIC)
            seal(process, PARTS)
            if number < 2:
                process.kill()
                process.start()
        acknowledge(process.address, TOPIC, 500)
        publish(process.address, TOPIC, 100, 2_400)
        wait_until(lambda: len(list(store.rglob("*.seg"))) >= 6, 40, "segments uploaded")
        wait_until(lambda: list((store / "metadata").glob("*")), 40, "metadata copied")
        process.stop()
        yield History(folder / "data", store, 2_500 + 900)
    finally:
        process.kill()


@pytest.fixture
def copy(history: History, tmp_path: Path) -> History:
    """The same history, to be damaged."""
    shutil.copytree(history.data, tmp_path / "data")
    shutil.copytree(history.store, tmp_path / "store")
    return History(tmp_path / "data", tmp_path / "store", history.records)


def run(storage: Path | str, **options: str) -> Report:
    return validate.run({"storage": str(storage), "processes": "1", **options})


def partition_of(root: Path) -> Path:
    """The folder of TOPIC, which has the largest segments."""
    folders = {path.parent for path in root.rglob("*.seg")}
    return max(folders, key=lambda folder: sum(path.stat().st_size for path in folder.glob("*.seg")))


def segments_of(root: Path) -> list[Path]:
    return sorted(partition_of(root).glob("*.seg"))


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def test_what_a_killed_broker_left_is_clean(history: History) -> None:
    report = run(history.data, store=f"file://{history.store}", payloads="true")
    assert report.findings == [] and report.exit_code == 0
    stored = run(f"file://{history.store}")
    assert stored.findings == [] and stored.exit_code == 0
    local = run(history.data)
    assert local.counts["records"] >= history.records
    assert local.counts["partitions"] >= 4


def test_nothing_is_changed(history: History) -> None:
    before = {path: path.stat().st_mtime_ns for path in sorted(history.data.parent.rglob("*"))}
    run(history.data, store=f"file://{history.store}")
    assert {path: path.stat().st_mtime_ns for path in sorted(history.data.parent.rglob("*"))} == before


def test_topics_are_chosen_by_name_and_pattern(history: History) -> None:
    assert run(history.data, topic=TOPIC).counts["partitions"] == 1
    assert run(history.data, topic="/default/par*").counts["partitions"] == 3
    assert (
        run(f"file://{history.store}", topic=TOPIC).counts["records"]
        == run(history.data, topic=TOPIC).counts["records"]
        or run(f"file://{history.store}", topic=TOPIC).counts["records"] >= 2_400
    )
    with pytest.raises(NotFound, match="/default/other"):
        run(history.data, topic="/default/other")


def _remove_segment(copy: History) -> None:
    segments_of(copy.data)[1].unlink()


def _swap_segments(copy: History) -> None:
    first, second = segments_of(copy.data)[:2]
    data = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(data)


def _foreign_segment(copy: History) -> None:
    """The first segment of another partition in the place of this one's."""
    other = next(
        path for path in sorted(copy.data.rglob(f"{0:020d}.seg")) if path.parent != partition_of(copy.data)
    )
    segments_of(copy.data)[0].write_bytes(other.read_bytes())


def _lose_synced(copy: History) -> None:
    folder = partition_of(copy.data)
    identity = parse_partition(folder.name)
    assert identity is not None
    last = segments_of(copy.data)[-1]
    mark = Mark(10**6, 10**6, int(last.name[:20]), 64, 1)
    (folder / "mark").write_bytes(bytes(64) + pack_slot(identity, mark))


def _cut_below_mark(copy: History) -> None:
    folder = partition_of(copy.data)
    path = next(path for path in segments_of(copy.data) if path.read_bytes()[-8:] == b"DANUBEND")
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    assert folder.is_dir()


def _cursor_ahead(copy: History) -> None:
    folder = partition_of(copy.data)
    identity = parse_partition(folder.name)
    assert identity is not None
    store = CursorStore(folder, identity)
    store.load()
    store.store("reader", CursorState.at(Mode.EXCLUSIVE, 10**7).encode())
    store.write()
    store.close()


def _cursor_bit(copy: History) -> None:
    for name in ("cursors-a", "cursors-b"):
        path = partition_of(copy.data) / name
        if path.exists():
            data = bytearray(path.read_bytes())
            place = data.find(b"CUR1")
            while place >= 0:
                data[place + 33] ^= 1
                place = data.find(b"CUR1", place + 4)
            path.write_bytes(data)


def _metadata_bit(copy: History) -> None:
    flip(copy.data / "metadata" / "metadata.log", 45)


LOCAL: dict[str, tuple[Callable[[History], None], Damage]] = {
    "a bit of a batch": (lambda copy: flip(segments_of(copy.data)[0], 5_000), Damage.BATCH_BODY),
    "a bit of a footer": (lambda copy: flip(segments_of(copy.data)[0], -30), Damage.FOOTER_DAMAGED),
    "a segment that is gone": (_remove_segment, Damage.OFFSETS_MISSING),
    "segments changed places": (_swap_segments, Damage.WRONG_NAME),
    "a segment of another partition": (_foreign_segment, Damage.WRONG_PARTITION),
    "records below the mark": (_lose_synced, Damage.SYNCED_LOST),
    "a file cut short": (_cut_below_mark, Damage.BATCH_CUT),
    "a mark of noise": (
        lambda copy: (partition_of(copy.data) / "mark").write_bytes(b"noise" * 20), Damage.MARK_DAMAGED,
    ),
    "a cursor ahead of the log": (_cursor_ahead, Damage.CURSOR_BEYOND_END),
    "cursors with flipped bits": (_cursor_bit, Damage.CURSOR_DAMAGED),
    "metadata with a flipped bit": (_metadata_bit, Damage.METADATA_DAMAGED),
}  # fmt: skip


@pytest.mark.parametrize("name", LOCAL)
def test_damage_in_a_data_directory_is_named(name: str, copy: History) -> None:
    plant, kind = LOCAL[name]
    plant(copy)
    report = run(copy.data)
    assert report.exit_code == 10
    found = [one for one in report.findings if one.kind == kind]
    assert found, report.findings
    assert str(copy.data) in found[0].file


def _manifest(copy: History) -> tuple[Path, Manifest]:
    path = sorted(partition_of(copy.store).glob("manifest-*"))[-1]
    return path, Manifest.decode(path.read_bytes())


def _next(copy: History, change: Callable[[Any], None], generation: int = 1) -> None:
    """A further manifest with changed entries."""
    _, manifest = _manifest(copy)
    entries = manifest.entries.copy()
    change(entries)
    made = Manifest(
        manifest.topic, manifest.topic_id, manifest.partition, manifest.epoch,
        manifest.generation + generation, manifest.start_offset, entries,
    )  # fmt: skip
    key = manifest_key(manifest.identity, made.epoch, made.generation)
    (copy.store / key).write_bytes(made.encode())


def _object(copy: History, number: int = 0) -> Path:
    _, manifest = _manifest(copy)
    return copy.store / segment_key(manifest.identity, manifest.entry(number))


def _regress(copy: History) -> None:
    _, manifest = _manifest(copy)
    made = Manifest(
        manifest.topic, manifest.topic_id, manifest.partition, manifest.epoch, manifest.generation + 1,
        manifest.start_offset, manifest.entries[:1],
    )  # fmt: skip
    (copy.store / manifest_key(manifest.identity, made.epoch, made.generation)).write_bytes(made.encode())


def _begin_later(copy: History) -> None:
    """A manifest that lacks its first object and states no hole there."""
    _, manifest = _manifest(copy)
    made = Manifest(
        manifest.topic, manifest.topic_id, manifest.partition, manifest.epoch, manifest.generation + 1,
        manifest.start_offset, manifest.entries[1:],
    )  # fmt: skip
    (copy.store / manifest_key(manifest.identity, made.epoch, made.generation)).write_bytes(made.encode())


def _orphan(copy: History, age_s: float = 90_000) -> None:
    path = _object(copy)
    other = path.with_name(path.name.replace(path.name[-20:-4], "0" * 16))
    shutil.copy(path, other)
    os.utime(other, (time.time() - age_s,) * 2)


def _chain(entries: Any) -> None:
    entries["previous_hash"][1] = b"x" * 16


STORED: dict[str, tuple[Callable[[History], Any], Damage]] = {
    "an object that is gone": (lambda copy: _object(copy, 1).unlink(), Damage.OBJECT_MISSING),
    "an object cut short": (
        lambda copy: _object(copy).write_bytes(_object(copy).read_bytes()[:-64]), Damage.OBJECT_SIZE,
    ),
    "an object with a flipped bit": (lambda copy: flip(_object(copy), 4_000), Damage.BATCH_BODY),
    "an object of other content": (
        lambda copy: _object(copy, 1).write_bytes(_object(copy, 0).read_bytes()), Damage.WRONG_NAME,
    ),
    "a manifest with a flipped bit": (lambda copy: flip(_manifest(copy)[0], 100), Damage.MANIFEST_DAMAGED),
    "a manifest of another partition": (
        lambda copy: shutil.copy(_manifest(copy)[0], next(
            folder for folder in (copy.store / "partitions").iterdir() if folder != partition_of(copy.store)
        ) / "manifest-0000000099-0000000001"),
        Damage.MANIFEST_DAMAGED,
    ),
    "a manifest that names less": (_regress, Damage.MANIFEST_REGRESSED),
    "a manifest that begins behind its start": (_begin_later, Damage.MANIFEST_DAMAGED),
    "a manifest with another record count": (
        lambda copy: _next(copy, lambda rows: rows["batch_count"].__setitem__(0, 1)),
        Damage.MANIFEST_DIFFERS,
    ),
    "a manifest with another hash before": (lambda copy: _next(copy, _chain), Damage.MANIFEST_DIFFERS),
    "an old object that nobody names": (_orphan, Damage.OBJECT_ORPHAN),
    "a name that is nobody's": (
        lambda copy: (copy.store / "notes.txt").write_text("hello"), Damage.OBJECT_UNKNOWN,
    ),
    "a name that is nobody's in a partition": (
        lambda copy: (partition_of(copy.store) / "notes.txt").write_text("hello"), Damage.OBJECT_UNKNOWN,
    ),
    "a snapshot with a flipped bit": (
        lambda copy: flip(sorted((copy.store / "metadata").iterdir())[-1], 20), Damage.METADATA_DAMAGED,
    ),
    "a store without its identity": (
        lambda copy: (copy.store / "store.json").write_text("{}"), Damage.STORE_IDENTITY,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STORED)
def test_damage_in_a_store_is_named(name: str, copy: History) -> None:
    plant, kind = STORED[name]
    plant(copy)
    report = run(f"file://{copy.store}")
    assert report.exit_code == 10
    assert kind in {one.kind for one in report.findings}, report.findings


def test_a_young_object_that_nobody_names_is_an_upload(copy: History) -> None:
    _orphan(copy, age_s=60)
    report = run(f"file://{copy.store}")
    assert report.findings == [] and any("not in a manifest yet" in remark for remark in report.remarks)


def test_copies_that_differ_are_found(copy: History) -> None:
    """A sound local segment of other bytes: the same records, sealed with another hash before it."""
    from danube.wal.segments.segment import SUMMARY_BYTES, pack_footer, read_summary

    path = segments_of(copy.data)[0]
    data = bytearray(path.read_bytes())
    summary = read_summary(bytes(data[-SUMMARY_BYTES:]), len(data))
    assert summary is not None
    from danube.core.batch.checksum import content_hash
    from danube.core.batch.format import read_header, stamp

    batch = read_header(data, 64)
    view = bytearray(data[64 : 64 + batch.size])
    stamp(view, batch.base_offset, batch.epoch, batch.append_time_us - 1)
    data[64 : 64 + batch.size] = view
    content = bytes(data[: summary.data_end])
    changed = summary._replace(content_hash=content_hash(content), first_append_us=batch.append_time_us - 1)
    path.write_bytes(content + pack_footer(changed, b"", None))
    found = {one.kind for one in run(copy.data, store=f"file://{copy.store}").findings}
    assert {Damage.COPIES_DIFFER, Damage.CHAIN} <= found


def test_a_gap_between_store_and_disk_is_found(copy: History) -> None:
    local = segments_of(copy.data)
    for path in local[:-1]:
        path.unlink()
    _, manifest = _manifest(copy)
    _regress(copy)
    report = run(copy.data, store=f"file://{copy.store}")
    assert Damage.OFFSETS_MISSING in {one.kind for one in report.findings}
    assert manifest.uploaded_end > 0 and EntryFlag.HOLE_BEFORE


def test_what_cannot_be_read_is_no_damage_and_not_clean(copy: History) -> None:
    path = segments_of(copy.data)[1]
    path.unlink()
    path.mkdir()
    report = run(copy.data)
    (found,) = [one for one in report.findings if one.kind == Damage.UNREADABLE]
    assert found.file == str(path)
    rest = {one.kind for one in report.findings} - {Damage.UNREADABLE}
    assert report.exit_code == (10 if rest else 11)


def test_a_store_that_fails_meanwhile_is_not_clean(copy: History, monkeypatch: pytest.MonkeyPatch) -> None:
    """All segments but one were read, and nothing was found: that is not the same as sound."""
    key = segment_key(_manifest(copy)[1].identity, _manifest(copy)[1].entry(0))
    store = LocalStore(copy.store)

    class Failing(LocalStore):
        def get(self, wanted: str, start: int = 0, end: int | None = None) -> bytes:
            if wanted == key:
                raise StoreUnavailable("the store is away")
            return store.get(wanted, start, end)

    monkeypatch.setattr(places, "_opened", lambda settings: Failing(copy.store))
    monkeypatch.setattr(validate_task, "local_path", lambda place, name: None)  # as of any other store
    report = run(f"file://{copy.store}")
    assert {(one.kind, one.file) for one in report.findings} == {(Damage.UNREADABLE, key)}
    assert report.exit_code == 11


def test_severity_decides_the_exit_code(copy: History) -> None:
    _orphan(copy)
    assert run(f"file://{copy.store}").exit_code == 10
    assert run(f"file://{copy.store}", failOn="error").exit_code == 0


def test_a_report_names_every_finding(copy: History, tmp_path: Path) -> None:
    flip(segments_of(copy.data)[0], 5_000)
    run(copy.data, report=str(tmp_path / "report.json"))
    told = json.loads((tmp_path / "report.json").read_text())
    assert told["exit_code"] == 10 and told["job"] == "validate" and told["counts"]["records"] > 0
    first = next(one for one in told["findings"] if one["kind"] == "batch_body")
    assert set(first) == {"file", "byte", "offset", "kind", "detail", "severity"} and first["byte"] > 0


def test_options_that_cannot_be_meant_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="storage is missing"):
        validate.run({})
    with pytest.raises(InvalidArgument, match="did you mean storage"):
        validate.run({"storge": "/x"})
    with pytest.raises(InvalidArgument, match="failOn"):
        validate.run({"storage": "/x", "failOn": "never"})
    with pytest.raises(NotFound):
        validate.run({"storage": "/nowhere/at/all"})


def test_the_command_without_java_works_in_several_processes(copy: History, tmp_path: Path) -> None:
    """As a user starts it: exit codes, findings and progress; JAVA_HOME leads nowhere."""
    command = [
        sys.executable,
        "-m",
        "danube.spark.jobs.validate.validate",
        "--local",
        "--storage",
        str(copy.data),
    ]
    environment = {**os.environ, "JAVA_HOME": "/nowhere", "PYTHONPATH": str(ROOT), "PATH": "/nowhere"}

    def start() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, "--processes", "2"], capture_output=True, text=True, env=environment, timeout=100
        )

    done = start()
    assert done.returncode == 0, done.stderr
    assert " 0 findings" in done.stderr and "tasks" in done.stderr
    flip(segments_of(copy.data)[0], 5_000)
    done = start()
    assert done.returncode == 10 and "batch_body" in done.stderr
    usage = subprocess.run(
        [*command[:4], "--storage", "/nowhere/at/all"], capture_output=True, text=True, env=environment
    )
    assert usage.returncode == 2 and "there is no directory" in usage.stderr


def test_no_false_alarm_beside_a_broker_that_writes_seals_and_is_killed(
    broker: Callable[..., BrokerProcess], tmp_path: Path
) -> None:
    store = tmp_path / "store"
    store.mkdir()
    environment = {**TIERED, "DANUBE_STORAGE__LOCAL_RETENTION_TIME": "1s"}
    process = broker(
        workers=2,
        arguments=["--storage", f"file://{store}"],
        environment=environment,
        data_dir=tmp_path / "d",
    )
    stopping = threading.Event()
    failed: list[BaseException] = []

    def write() -> None:
        start = 0
        while not stopping.is_set():
            try:
                publish(process.address, TOPIC, 200, start, 4_000)
            except Exception:
                continue  # killed under it
            start += 200
        return

    def disturb() -> None:
        try:
            while not stopping.wait(1.5):
                process.kill()
                process.start()
            writer.join(60)  # a broker dies with the thread that started it: a client would wait for it
        except BaseException as error:  # told by the test
            failed.append(error)

    writer = threading.Thread(target=write)
    threads = [writer, threading.Thread(target=disturb)]
    publish(process.address, TOPIC, 200)
    for thread in threads:
        thread.start()
    try:
        end = time.monotonic() + 8
        while time.monotonic() < end:
            report = run(process.data_dir, store=f"file://{store}")
            assert report.findings == []
            assert run(f"file://{store}").findings == []
    finally:
        stopping.set()
        for thread in threads:
            thread.join(60)
    assert not failed
