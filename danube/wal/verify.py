"""An independent look at a partition's directory: what a checker believes about a log.

Shares no code with what writes and recovers logs; it knows the layouts in ``docs/formats`` and
nothing else, so a mistake made twice has to be made by two readers.  It changes nothing and may run
beside a broker, which may then be in the middle of a step.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Final, NamedTuple

from danube.core.checksum import content_hasher, crc32c

_SEGMENT_NAME: Final = re.compile(r"\d{20}\.seg\Z")
_U16: Final = struct.Struct("<H")
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")
_I64: Final = struct.Struct("<q")
_SEGMENT_HEADER: Final = 64
_BATCH_HEADER: Final = 104
_SUMMARY: Final = 144
_BATCH_MAX: Final = 12 * 1024 * 1024
_RECORDS_MAX: Final = 65_536


class VerifiedBatch(NamedTuple):
    position: int
    size: int
    base_offset: int
    end_offset: int
    epoch: int
    append_time_us: int


class VerifiedFile(NamedTuple):
    """One segment file.  ``problems`` say what differs from what the format promises."""

    name: str
    base_offset: int
    end_offset: int
    sealed: bool
    topic_id: int
    partition: int
    epoch: int
    batches: tuple[VerifiedBatch, ...]
    content_hash: bytes
    previous_hash: bytes
    problems: tuple[str, ...]


class Report(NamedTuple):
    """``holes`` are offset ranges between the first and the last record that no intact batch holds."""

    files: tuple[VerifiedFile, ...]
    holes: tuple[tuple[int, int], ...]
    problems: tuple[str, ...]
    other_files: tuple[str, ...]

    @property
    def start(self) -> int:
        return self.files[0].base_offset if self.files else 0

    @property
    def end(self) -> int:
        return max((file.end_offset for file in self.files), default=0)

    @property
    def record_count(self) -> int:
        return sum(batch.end_offset - batch.base_offset for file in self.files for batch in file.batches)

    @property
    def sound(self) -> bool:
        """No hole, no damage, no file out of place."""
        return not self.holes and not self.problems and not any(file.problems for file in self.files)


def verify(directory: Path) -> Report:
    """Read every segment file of one partition's directory."""
    names = sorted(path.name for path in directory.iterdir())
    found = tuple(_verify_file(directory / name) for name in names if _SEGMENT_NAME.match(name))
    others = tuple(name for name in names if not _SEGMENT_NAME.match(name))
    problems: list[str] = []
    holes: list[tuple[int, int]] = []
    if len({(file.topic_id, file.partition) for file in found if file.epoch}) > 1:
        problems.append("the files belong to more than one partition")
    expected = found[0].base_offset if found else 0
    for number, file in enumerate(found):
        before = found[number - 1] if number else None
        if before is not None and file.previous_hash != before.content_hash and any(file.previous_hash):
            problems.append(f"{file.name}: the hash of the segment before it differs")
        if file.base_offset < expected and file.batches:
            problems.append(f"{file.name}: it repeats offsets from {file.base_offset} to {expected}")
        for batch in file.batches:
            if batch.base_offset > expected:
                holes.append((expected, batch.base_offset))
            expected = max(expected, batch.end_offset)
        if file.end_offset > expected:
            holes.append((expected, file.end_offset))
            expected = file.end_offset
    return Report(found, tuple(holes), tuple(problems), others)


def read_batches(directory: Path, file: VerifiedFile) -> list[bytes]:
    """The intact batches of one verified file, as stored."""
    with (directory / file.name).open("rb") as source:
        stored: list[bytes] = []
        for batch in file.batches:
            source.seek(batch.position)
            stored.append(source.read(batch.size))
    return stored


def _verify_file(path: Path) -> VerifiedFile:
    data = path.read_bytes()
    problems: list[str] = []
    base_offset = int(path.name[:20])
    topic_id, partition, epoch = _header(data, base_offset, problems)
    footer = _footer(data, problems)
    data_end = _U64.unpack_from(footer, 64)[0] if footer else len(data)
    batches = tuple(_batches(data, base_offset, data_end, bool(footer), problems))
    end_offset = batches[-1].end_offset if batches else base_offset
    content_hash = previous_hash = bytes(16)
    if footer:
        end_offset = _check_footer(data, footer, (topic_id, partition, base_offset), batches, problems)
        content_hash, previous_hash = footer[72:88], footer[88:104]
    return VerifiedFile(
        path.name, base_offset, end_offset, bool(footer), topic_id, partition, epoch, batches, content_hash,
        previous_hash, tuple(problems),
    )  # fmt: skip


def _header(data: bytes, base_offset: int, problems: list[str]) -> tuple[int, int, int]:
    if len(data) < _SEGMENT_HEADER:
        if data:
            problems.append("the header is cut")
        return 0, 0, 0
    if data[:8] != b"DANUBSEG" or _U32.unpack_from(data, 60)[0] != crc32c(data[:60]):
        problems.append("the header is damaged")
        return 0, 0, 0
    if _U16.unpack_from(data, 8)[0] != 1:
        problems.append("the header has another version")
    if _U64.unpack_from(data, 24)[0] != base_offset:
        problems.append("the file has another segment's name")
    return _U64.unpack_from(data, 16)[0], _U32.unpack_from(data, 12)[0], _U32.unpack_from(data, 40)[0]


def _footer(data: bytes, problems: list[str]) -> bytes:
    """The 144 summary bytes, or none when the file is not sealed."""
    summary = data[-_SUMMARY:]
    if len(data) < _SEGMENT_HEADER + _SUMMARY or summary[-8:] != b"DANUBEND":
        return b""
    if _U32.unpack_from(summary, 128)[0] != crc32c(summary[:128]) or any(summary[132:136]):
        problems.append("the footer is damaged")
        return b""
    size, start = _U32.unpack_from(summary, 120)[0], _U64.unpack_from(summary, 64)[0]
    if (
        start + size != len(data)
        or crc32c(data[start : len(data) - _SUMMARY]) != _U32.unpack_from(summary, 116)[0]
    ):
        problems.append("the footer is damaged")
        return b""
    return summary


def _check_footer(
    data: bytes,
    summary: bytes,
    identity: tuple[int, int, int],
    batches: tuple[VerifiedBatch, ...],
    problems: list[str],
) -> int:
    data_end, end_offset = _U64.unpack_from(summary, 64)[0], int(_U64.unpack_from(summary, 24)[0])
    hasher = content_hasher()
    hasher.update(data[:data_end])
    if hasher.digest() != summary[72:88]:
        problems.append("the content differs from its hash")
    stored = (
        _U64.unpack_from(summary, 0)[0],
        _U32.unpack_from(summary, 8)[0],
        _U64.unpack_from(summary, 16)[0],
    )
    if stored != identity and data[:8] == b"DANUBSEG":
        problems.append("header and footer name different segments")
    records = sum(batch.end_offset - batch.base_offset for batch in batches)
    if records != _U64.unpack_from(summary, 32)[0] or len(batches) != _U64.unpack_from(summary, 40)[0]:
        problems.append("the footer counts other records than the file holds")
    by_position = {batch.position: batch for batch in batches}
    entries = data[data_end + 16 : data_end + 16 + 24 * _U32.unpack_from(summary, 104)[0]]
    for offset, position, time_us in struct.iter_unpack("<QQq", entries):
        batch = by_position.get(position)
        if batch is None or (batch.base_offset, batch.append_time_us) != (offset, time_us):
            problems.append(f"the index entry for offset {offset} leads astray")
    return end_offset


def _batches(data: bytes, expected: int, end: int, sealed: bool, problems: list[str]) -> list[VerifiedBatch]:
    found: list[VerifiedBatch] = []
    position = _SEGMENT_HEADER
    while position < end:
        batch = _batch_at(data, position, end)
        if batch is None and not sealed and not data[position:end].strip(b"\0"):
            break
        if batch is None or batch.base_offset < expected:
            following = data.find(b"DNB1", position + 8, end)
            while following >= 0 and (following & 7 or _batch_at(data, following, end) is None):
                following = data.find(b"DNB1", following + 1, end)
            if following < 0:
                problems.append(f"no batch can be read from position {position} to {end}")
                break
            problems.append(f"no batch can be read from position {position} to {following}")
            position = following
            continue
        found.append(batch)
        expected = batch.end_offset
        position += batch.size
    return found


def _batch_at(data: bytes, position: int, end: int) -> VerifiedBatch | None:
    if end - position < _BATCH_HEADER or data[position : position + 4] != b"DNB1":
        return None
    size, count = _U32.unpack_from(data, position + 4)[0], _U32.unpack_from(data, position + 40)[0]
    if (
        size & 7
        or not _BATCH_HEADER <= size <= min(_BATCH_MAX, end - position)
        or not 0 < count <= _RECORDS_MAX
    ):
        return None
    if crc32c(data[position : position + 32]) != _U32.unpack_from(data, position + 32)[0]:
        return None
    if crc32c(data[position + 36 : position + size]) != _U32.unpack_from(data, position + 28)[0]:
        return None
    base_offset = int(_U64.unpack_from(data, position + 8)[0])
    epoch, time_us = _U32.unpack_from(data, position + 24)[0], _I64.unpack_from(data, position + 16)[0]
    return VerifiedBatch(position, size, base_offset, base_offset + count, epoch, time_us)
