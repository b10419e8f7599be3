"""One segment's validation: damage of each kind that a file can have is planted, and named with its byte."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from danube.core import kernels
from danube.core.batch.checksum import content_hash, crc32c
from danube.core.batch.columns import encode
from danube.core.batch.format import Compression, Flag, read_header, stamp, unpack_header
from danube.core.batch.selection import select
from danube.spark.jobs.findings import Damage, Expected, SegmentFacts
from danube.spark.jobs.validate import rows as batch_rows
from danube.spark.jobs.validate.segment import validate_segment
from danube.wal.segments.index import SparseIndex
from danube.wal.segments.segment import (
    HEADER_BYTES,
    NO_HASH,
    SUMMARY_BYTES,
    LogIdentity,
    SegmentHeader,
    Summary,
    pack_footer,
    pack_header,
    read_summary,
)
from danube.wal.verify import walk
from danube.wal.verify.bytes import BytesSource, FileSource
from tests.unit.wal_samples import open_log, roll, sync

IDENTITY = LogIdentity(7, 2)
BASE = 1_000
TIME_US = 1_700_000_000_000_000


@pytest.fixture(params=["kernel", "twin"], autouse=True)
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    """Everything holds for the kernel and for its twin."""
    was = kernels.available
    if request.param == "kernel":
        if not kernels.load().available:
            pytest.skip("no Numba here")
    else:
        kernels.unload()
    yield request.param
    if was:
        kernels.load()
    else:
        kernels.unload()


def batch_of(
    base: int,
    count: int = 5,
    *,
    time_us: int | None = None,
    epoch: int = 3,
    sequence: int = -1,
    **more: object,
) -> bytes:
    values: dict[str, object] = {
        "payloads": [b"payload %d" % (base + n) for n in range(count)],
        "keys": [b"k%d" % n if n % 2 else None for n in range(count)],
        "attributes": [{"n": str(n)} for n in range(count)],
        "publish_time_us": TIME_US,
        "producer_name": "p",
    }
    if sequence >= 0:
        values |= {"producer_id": 77, "producer_epoch": 1, "base_sequence": sequence}
    batch = bytearray(encode(**(values | more)).to_bytes())  # type: ignore[arg-type]
    stamp(batch, base, epoch, TIME_US + base if time_us is None else time_us)
    return bytes(batch)


def rebody(batch: bytes) -> bytes:
    """The batch with checksums that fit what is in it."""
    made = bytearray(batch)
    struct.pack_into("<I", made, 28, crc32c(bytes(made[36:])))
    struct.pack_into("<I", made, 32, crc32c(bytes(made[:32])))
    return bytes(made)


def patched(batch: bytes, position: int, data: bytes) -> bytes:
    return rebody(batch[:position] + data + batch[position + len(data) :])


def segment_of(
    batches: list[bytes], *, end: int | None = None, snapshot: bytes | None = None, **said: object
) -> bytes:
    """A sealed segment, true to its batches unless ``said`` says otherwise."""
    header = pack_header(SegmentHeader(IDENTITY, 3, BASE, TIME_US))
    index = SparseIndex()
    data, offset, records = header, BASE, 0
    for batch in batches:
        head = unpack_header(batch)
        index.add(head.base_offset, len(data), head.append_time_us)
        data += batch
        offset, records = head.end_offset, records + head.record_count
    heads = [unpack_header(batch) for batch in batches]
    values: dict[str, object] = {
        "identity": IDENTITY, "epoch": 3, "base_offset": BASE, "end_offset": offset if end is None else end,
        "record_count": records, "batch_count": len(batches), "first_append_us": heads[0].append_time_us,
        "last_append_us": heads[-1].append_time_us, "data_end": len(data), "content_hash": content_hash(data),
        "previous_hash": NO_HASH, "entry_count": 0, "snapshot_size": 0, "has_snapshot": False,
        "footer_crc": 0, "footer_size": 0,
    }  # fmt: skip
    entries = said.pop("entries", index.pack())
    summary = Summary(**(values | said))  # type: ignore[arg-type]
    return data + pack_footer(summary, entries, snapshot)  # type: ignore[arg-type]


def good_batches() -> list[bytes]:
    return [batch_of(BASE + 5 * n, sequence=5 * n) for n in range(4)]


def judge(data: bytes, *, sealed: bool = True, synced: int = 0, chunk: int = 1 << 20) -> SegmentFacts:
    return validate_segment(BytesSource(data, chunk), Expected("a.seg", *IDENTITY, BASE, sealed, synced))


def kinds(facts: SegmentFacts) -> set[str]:
    return {one.kind for one in facts.findings}


def flip(data: bytes, position: int) -> bytes:
    return data[:position] + bytes([data[position] ^ 0x40]) + data[position + 1 :]


def resealed(data: bytes) -> bytes:
    """The same footer with the hash of the content as it is now."""
    summary = read_summary(data[-SUMMARY_BYTES:], len(data))
    assert summary is not None
    body = data[summary.data_end : -SUMMARY_BYTES]
    content = data[: summary.data_end]
    entries = body[16 : 16 + 24 * summary.entry_count]
    return content + pack_footer(summary._replace(content_hash=content_hash(content)), entries, None)


def place(batches: list[bytes], number: int) -> int:
    return HEADER_BYTES + sum(map(len, batches[:number]))


@pytest.mark.parametrize("chunk", [512, 4096, 1 << 20])
def test_a_sound_segment_shows_its_facts_and_no_finding(chunk: int) -> None:
    data = segment_of(good_batches())
    facts = judge(data, chunk=chunk)
    assert facts.findings == []
    assert (facts.base_offset, facts.end_offset, facts.record_count, facts.batch_count) == (1000, 1020, 20, 4)
    assert (facts.sealed, facts.epoch, facts.tail) == (True, 3, None)
    assert facts.content_hash == content_hash(data[: facts.data_end])
    assert facts.sequences == [(77, 1, 0, 20, 1000)]


def _gap() -> bytes:
    batches = good_batches()
    return segment_of([batches[0], *batches[2:]])


def _repeat() -> bytes:
    batches = good_batches()
    return segment_of([batches[0], batches[1], batch_of(BASE + 7, 8, time_us=TIME_US + BASE + 9)])


def _snapshot(change: Callable[[bytearray], None]) -> bytes:
    from danube.core.partition.dedup import ProducerTable

    snapshot = bytearray(ProducerTable().snapshot(BASE + 20, TIME_US))
    change(snapshot)
    return segment_of(good_batches(), snapshot=bytes(snapshot))


def _selection() -> bytes:
    batch = batch_of(BASE)
    chosen = select(batch, read_header(batch), np.array([0, 2, 4]))
    return segment_of([chosen], end=BASE + 5)


def _columns(column: str) -> bytes:
    batch = batch_of(BASE)
    from danube.core.batch.columns import layout_of

    header = read_header(batch)
    layout = layout_of(header)
    start = header.size - layout.end
    where = {
        "payloads": layout.payload_offsets,
        "keys": layout.key_offsets,
        "attributes": layout.attribute_offsets,
    }
    return segment_of([patched(batch, start + where[column] + 4, struct.pack("<i", 2**30))])


_BATCHES = good_batches()
PLANTED: dict[str, tuple[Callable[[], bytes], Damage, int | None]] = {
    "header bit": (lambda: flip(segment_of(_BATCHES), 33), Damage.SEGMENT_HEADER, 0),
    "header magic": (lambda: b"X" + segment_of(_BATCHES)[1:], Damage.SEGMENT_HEADER, 0),
    "newer header": (
        lambda: _newer(segment_of(_BATCHES)), Damage.SEGMENT_VERSION, 8,
    ),
    "footer bit": (lambda: flip(segment_of(_BATCHES), -20), Damage.FOOTER_DAMAGED, None),
    "footer body": (lambda: flip(segment_of(_BATCHES), -SUMMARY_BYTES - 4), Damage.FOOTER_DAMAGED, None),
    "footer gone": (lambda: segment_of(_BATCHES)[: place(_BATCHES, 4)], Damage.FOOTER_MISSING, None),
    "cut in the footer": (lambda: segment_of(_BATCHES)[:-8], Damage.FOOTER_MISSING, None),
    "bit of a body": (
        lambda: flip(segment_of(_BATCHES), place(_BATCHES, 1) + 120), Damage.BATCH_BODY, place(_BATCHES, 1),
    ),
    "bit of a header": (
        lambda: flip(segment_of(_BATCHES), place(_BATCHES, 1) + 9), Damage.BATCH_HEADER, place(_BATCHES, 1),
    ),
    "zeros over a batch": (
        lambda: segment_of(_BATCHES)[: place(_BATCHES, 2)] + bytes(len(_BATCHES[2]))
        + segment_of(_BATCHES)[place(_BATCHES, 3) :],
        Damage.BATCH_HEADER, place(_BATCHES, 2),
    ),
    "unknown flag": (
        lambda: segment_of([patched(_BATCHES[0], 37, b"\x80")]), Damage.BATCH_SHAPE, HEADER_BYTES,
    ),
    "sizes that do not add up": (
        lambda: segment_of([patched(_BATCHES[0], 84, struct.pack("<I", 8_000))]), Damage.BATCH_SHAPE,
        HEADER_BYTES,
    ),
    "payload offsets": (lambda: _columns("payloads"), Damage.BATCH_COLUMNS, HEADER_BYTES),
    "key offsets": (lambda: _columns("keys"), Damage.BATCH_COLUMNS, HEADER_BYTES),
    "attribute offsets": (lambda: _columns("attributes"), Damage.BATCH_COLUMNS, HEADER_BYTES),
    "attribute that is not text": (
        lambda: segment_of([_text_damaged(_BATCHES[0])]), Damage.BATCH_COLUMNS, HEADER_BYTES,
    ),
    "batch left out": (_gap, Damage.OFFSETS_MISSING, place(_BATCHES, 1)),
    "batch left out at the end": (
        lambda: segment_of(_BATCHES[:3], end=BASE + 20), Damage.OFFSETS_MISSING, None,
    ),
    "offsets twice": (_repeat, Damage.OFFSETS_REPEATED, place(_BATCHES, 2)),
    "older epoch": (
        lambda: segment_of([_BATCHES[0], batch_of(BASE + 5, epoch=2)]), Damage.EPOCH_ORDER,
        place(_BATCHES, 1),
    ),
    "clock that goes back": (
        lambda: segment_of([_BATCHES[0], batch_of(BASE + 5, time_us=TIME_US)]), Damage.TIME_ORDER,
        place(_BATCHES, 1),
    ),
    "sequence twice": (
        lambda: segment_of([_BATCHES[0], batch_of(BASE + 5, sequence=2)]), Damage.SEQUENCE_REPEATED,
        place(_BATCHES, 1),
    ),
    "other bytes, same checksums": (
        lambda: segment_of(_BATCHES, content_hash=b"x" * 16), Damage.CONTENT_HASH, -1,
    ),
    "wrong record count": (lambda: segment_of(_BATCHES, record_count=19), Damage.FOOTER_DIFFERS, None),
    "wrong batch count": (lambda: segment_of(_BATCHES, batch_count=5), Damage.FOOTER_DIFFERS, None),
    "wrong last time": (lambda: segment_of(_BATCHES, last_append_us=5), Damage.FOOTER_DIFFERS, None),
    "wrong end": (lambda: segment_of(_BATCHES, end=BASE + 10, record_count=20), Damage.FOOTER_DIFFERS, None),
    "index astray": (
        lambda: segment_of(_BATCHES, entries=struct.pack("<QQq", BASE, 128, TIME_US)),
        Damage.INDEX_ENTRY, None,
    ),
    "index of another time": (
        lambda: segment_of(_BATCHES, entries=struct.pack("<QQq", BASE, 64, 5)), Damage.INDEX_ENTRY, None,
    ),
    "snapshot bit": (
        lambda: _snapshot(lambda data: data.__setitem__(9, 255)), Damage.PRODUCER_SNAPSHOT, None,
    ),
    "selection": (_selection, Damage.SELECTION_MISPLACED, HEADER_BYTES),
    "other partition": (
        lambda: pack_header(SegmentHeader(LogIdentity(7, 3), 3, BASE, TIME_US)) + segment_of(_BATCHES)[64:],
        Damage.WRONG_PARTITION, 12,
    ),
    "other partition in the footer": (
        lambda: segment_of(_BATCHES, identity=LogIdentity(8, 2)), Damage.WRONG_PARTITION, None,
    ),
    "other name": (
        lambda: pack_header(SegmentHeader(IDENTITY, 3, BASE + 1, TIME_US)) + segment_of(_BATCHES)[64:],
        Damage.WRONG_NAME, 24,
    ),
    "other name in the footer": (lambda: segment_of(_BATCHES, base_offset=5), Damage.WRONG_NAME, None),
    "batch longer than the data": (
        lambda: _overlong(), Damage.BATCH_CUT, place(_BATCHES, 3),
    ),
}  # fmt: skip


def _newer(data: bytes) -> bytes:
    head = bytearray(data[:HEADER_BYTES])
    struct.pack_into("<H", head, 8, 2)
    struct.pack_into("<I", head, 60, crc32c(bytes(head[:60])))
    return bytes(head) + data[HEADER_BYTES:]


def _text_damaged(batch: bytes) -> bytes:
    found = batch.rindex(b"n4")
    return patched(batch, found, b"\xff")


def _overlong() -> bytes:
    """The last batch says that it is longer than what is left in front of the footer."""
    last = bytearray(_BATCHES[3])
    struct.pack_into("<I", last, 4, len(last) + 64)
    struct.pack_into("<I", last, 32, crc32c(bytes(last[:32])))
    data = segment_of(_BATCHES)
    return resealed(data[: place(_BATCHES, 3)] + bytes(last) + data[place(_BATCHES, 4) :])


@pytest.mark.parametrize("name", PLANTED)
def test_planted_damage_is_named_with_its_byte(name: str) -> None:
    make, kind, byte = PLANTED[name]
    for chunk in (1 << 20, 256):
        facts = judge(make(), chunk=chunk)
        found = [one for one in facts.findings if one.kind == kind]
        assert found, f"{kind} not in {facts.findings}"
        if byte is not None:
            assert found[0].byte == byte
        assert found[0].file == "a.seg"


def test_at_least_twenty_kinds_are_planted_here() -> None:
    assert len({kind for _, kind, _ in PLANTED.values()}) >= 20


def test_findings_that_are_not_listed_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walk, "PROBLEMS_MAX", 2)
    data = segment_of(_BATCHES)
    for number in range(4):
        data = flip(data, place(_BATCHES, number) + 120)
    facts = judge(data)
    last = facts.findings[-1]
    assert len(facts.findings) == 3 and last.kind == Damage.FINDINGS_LEFT_OUT
    assert facts.left_out >= 2 and str(facts.left_out) in last.detail


def test_batches_behind_damage_are_judged_too() -> None:
    data = segment_of(_BATCHES)
    data = flip(flip(data, place(_BATCHES, 0) + 120), place(_BATCHES, 2) + 3)
    facts = judge(data)
    assert {(one.kind, one.byte) for one in facts.findings} >= {
        (Damage.BATCH_BODY, place(_BATCHES, 0)),
        (Damage.BATCH_HEADER, place(_BATCHES, 2)),
    }
    assert facts.record_count == 10


def test_compacted_segments_may_miss_offsets() -> None:
    batch = batch_of(BASE + 5, 8)
    chosen = select(batch, read_header(batch), np.array([1, 6]))
    data = segment_of([chosen, batch_of(BASE + 40)], end=BASE + 60, compacted=True)
    assert kinds(judge(data)) == set()


@pytest.mark.parametrize("compression", [Compression.LZ4, Compression.ZSTD])
def test_compressed_batches_are_not_inflated_here(compression: Compression) -> None:
    pytest.importorskip("lz4" if compression is Compression.LZ4 else "zstandard")
    batch = batch_of(BASE, payloads=[b"a" * 500] * 5, compression=compression)
    assert read_header(batch).flags & 7
    assert kinds(judge(segment_of([batch]))) == set()


def test_an_unfinished_write_at_the_end_is_no_finding_above_the_mark() -> None:
    data = pack_header(SegmentHeader(IDENTITY, 3, BASE, TIME_US)) + b"".join(_BATCHES[:3])
    for torn in (_BATCHES[3][:200], flip(_BATCHES[3], 130), _BATCHES[3][:50] + bytes(300)):
        for rest in (b"", bytes(4096)):
            facts = judge(data + torn + rest, sealed=False, synced=len(data))
            assert facts.findings == []
            assert facts.tail is not None and facts.tail[0] == len(data)
            assert facts.end_offset == BASE + 15
            assert kinds(judge(data + torn + rest, sealed=False, synced=len(data) + 8))


def test_reserved_space_and_an_empty_file_are_no_findings() -> None:
    data = pack_header(SegmentHeader(IDENTITY, 3, BASE, TIME_US)) + b"".join(_BATCHES)
    assert judge(data + bytes(1 << 16), sealed=False).findings == []
    assert judge(data, sealed=False).end_offset == BASE + 20
    assert judge(b"", sealed=False).findings == []
    assert judge(bytes(8192), sealed=False).findings == []
    assert kinds(judge(b"")) == {Damage.SEGMENT_HEADER, Damage.FOOTER_MISSING}


def test_real_segments_of_a_log_are_clean(tmp_path: Path) -> None:
    from tests.unit.wal_samples import IDENTITY as LOG
    from tests.unit.wal_samples import append

    log = open_log(tmp_path)
    for number in range(60):
        append(log, *[b"x" * (number % 40)] * (1 + number % 9))
        log.write()
        if number % 7 == 6:
            roll(log, b"snapshot")
    sync(log)
    log.abandon()
    files = sorted(tmp_path.glob("*.seg"))
    assert len(files) > 3
    for path in files:
        with FileSource(path) as source:
            facts = validate_segment(source, Expected(path.name, *LOG, int(path.name[:20])))
        assert facts.findings == []
        assert facts.sealed or path == files[-1]


def test_any_flipped_bit_is_found(source: random.Random) -> None:
    data = segment_of(_BATCHES)
    for _ in range(150):
        position = source.randrange(len(data))
        changed = (
            data[:position] + bytes([data[position] ^ (1 << source.randrange(8))]) + data[position + 1 :]
        )
        assert judge(changed).findings, f"bit at {position}"


def test_schemas_are_noted_once(tmp_path: Path) -> None:
    batches = [batch_of(BASE + 5 * n, schema_id=9, schema_version=1 + n // 2) for n in range(4)]
    assert judge(segment_of(batches)).schemas == [
        (9, 1, HEADER_BYTES, BASE),
        (9, 2, place(batches, 2), BASE + 10),
    ]


def test_kernel_and_twin_see_the_same(source: random.Random) -> None:
    if not kernels.load().available:
        pytest.skip("no Numba here")
    data = b"".join(
        [
            *_BATCHES,
            batch_of(BASE + 20, 3, schema_id=2**63 + 1, request_ids=[1, 2, 3]),
            batch_of(BASE + 23, 1),
        ]
    )
    for _ in range(200):
        changed = bytearray(data)
        for _ in range(source.randrange(3)):
            changed[source.randrange(len(changed))] ^= 1 << source.randrange(8)
        octets = np.frombuffer(bytes(changed), np.uint8)
        one, other = (
            batch_rows.examine(octets, 0, len(octets)),
            batch_rows.examine_twin(octets, 0, len(octets)),
        )
        assert (one.stop, one.reason) == (other.stop, other.reason)
        assert all((left == right).all() for left, right in zip(one.rows, other.rows, strict=True))
        start = 8 * source.randrange(len(octets) // 8)
        assert batch_rows.find(octets, start, len(octets), BASE + 6) == walk.find(
            octets, start, len(octets), BASE + 6
        )
    assert Flag.SCHEMA_ID
