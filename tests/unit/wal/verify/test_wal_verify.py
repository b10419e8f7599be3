"""The independent reader agrees with the log about what is there, and finds what was changed."""

from __future__ import annotations

from pathlib import Path

from danube.wal.segments.segment import HEADER_BYTES, file_name
from tests.log_oracle import read_batches, verify
from tests.unit.wal_samples import IDENTITY, append, open_log, read_all, records_in, roll, sync


def build(directory: Path) -> dict[int, bytes]:
    log = open_log(directory)
    for number in range(9):
        append(log, b"record %d" % number, bytes(number))
        log.write()
        if number in (2, 5):
            roll(log, b"snapshot")
    sync(log)
    records = read_all(log)[0]
    log.abandon()
    return records


def test_it_reads_the_same_records_as_the_log(tmp_path: Path) -> None:
    records = build(tmp_path)
    report = verify(tmp_path)
    assert report.sound and (report.start, report.end, report.record_count) == (0, 18, 18)
    assert [(file.base_offset, file.end_offset, file.sealed) for file in report.files] == [
        (0, 6, True),
        (6, 12, True),
        (12, 18, False),
    ]
    assert {(file.topic_id, file.partition) for file in report.files} == {IDENTITY}
    stored = [batch for file in report.files for batch in read_batches(tmp_path, file)]
    assert dict(record for batch in stored for record in records_in(batch)) == records
    assert report.files[1].previous_hash == report.files[0].content_hash != bytes(16)


def test_every_flipped_bit_of_a_sealed_segment_is_a_problem(tmp_path: Path) -> None:
    build(tmp_path)
    path = tmp_path / file_name(6)
    whole = path.read_bytes()
    assert verify(tmp_path).sound
    for position in range(len(whole)):
        flipped = bytearray(whole)
        flipped[position] ^= 1 << position % 8
        path.write_bytes(flipped)
        assert not verify(tmp_path).sound, position


def test_damage_holes_repeats_and_a_broken_chain_are_named(tmp_path: Path) -> None:
    build(tmp_path)
    first, second = tmp_path / file_name(0), tmp_path / file_name(6)
    whole = second.read_bytes()
    damaged = bytearray(whole)
    damaged[HEADER_BYTES + 50] ^= 1
    second.write_bytes(damaged)
    report = verify(tmp_path)
    assert report.holes == ((6, 8),) and "no batch can be read" in report.files[1].problems[0]
    second.unlink()
    assert verify(tmp_path).holes == ((6, 12),)
    second.write_bytes(first.read_bytes())
    assert "another segment's name" in " ".join(verify(tmp_path).files[1].problems)
    second.write_bytes(whole)
    assert verify(tmp_path).sound
    first.write_bytes(first.read_bytes()[:-8])
    assert not verify(tmp_path).files[0].sealed


def test_a_torn_tail_is_a_problem_until_recovery_has_cut_it(tmp_path: Path) -> None:
    build(tmp_path)
    path = tmp_path / file_name(12)
    data = path.read_bytes()
    end = verify(tmp_path).files[2].batches[-1]
    path.write_bytes(data[: end.position + end.size] + b"torn bytes" + data[end.position + end.size + 10 :])
    assert verify(tmp_path).files[2].problems
    log = open_log(tmp_path, epoch=2)
    assert log.recovery.torn_bytes == 10 and log.recovery.damaged == ()
    log.close()
    report = verify(tmp_path)
    assert report.sound and report.end == 18


def test_a_footer_has_the_hash_of_what_was_written_also_over_restarts(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    append(log, b"one")
    log.write()
    assert log.active is not None and log.active.hasher is not None
    path = tmp_path / log.active.name
    log.abandon()
    log = open_log(tmp_path, epoch=2)
    assert log.active is None or log.active.hasher is None, "what another process wrote must be read"
    append(log, b"two")
    log.write()
    log.close()
    assert path.exists() and verify(tmp_path).sound
    damaged = open_log(tmp_path, epoch=3)
    append(damaged, b"three")
    damaged.write()
    assert damaged.active is not None
    with (tmp_path / damaged.active.name).open("r+b") as file:
        file.seek(HEADER_BYTES + 60)
        file.write(b"\xff\xfe\xfd")
    damaged.close()
    assert not verify(tmp_path).sound, "damage before the seal is not sealed in"
