"""An independent look at a partition's directory: what a checker believes about a log.

Shares no code with what writes and recovers logs; it knows the layouts in ``docs/formats`` and
nothing else, so a mistake made twice has to be made by two readers.  It changes nothing and may run
beside a broker, which may then be in the middle of a step.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, NamedTuple

from danube.wal.verify.bytes import FileSource, FindingKind
from danube.wal.verify.segment import Batch as VerifiedBatch
from danube.wal.verify.segment import read_segment
from danube.wal.verify.walk import Segment

__all__ = ["Report", "VerifiedBatch", "VerifiedFile", "read_batches", "verify"]

_SEGMENT_NAME: Final = re.compile(r"\d{20}\.seg\Z")


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
    chain_hash: bytes
    compacted: bool
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
        if (
            before is not None
            and any(file.previous_hash)
            and file.previous_hash not in (before.content_hash, before.chain_hash)
        ):
            problems.append(f"{file.name}: the hash of the segment before it differs")
        if file.base_offset < expected and file.batches:
            problems.append(f"{file.name}: it repeats offsets from {file.base_offset} to {expected}")
        for batch in file.batches:
            if batch.base_offset > expected and not file.compacted:
                holes.append((expected, batch.base_offset))
            expected = max(expected, batch.end_offset)
        if file.end_offset > expected:
            if not file.compacted:
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
    batches: list[VerifiedBatch] = []
    with FileSource(path) as source:
        segment = read_segment(source, int(path.name[:20]), lambda batch, _: batches.append(batch))
    return VerifiedFile(
        path.name, segment.base_offset, segment.end_offset, segment.sealed, segment.topic_id,
        segment.partition, segment.epoch, tuple(batches), segment.content_hash, segment.previous_hash,
        segment.chain_hash, segment.compacted, tuple(_problems(segment)),
    )  # fmt: skip


def _problems(segment: Segment) -> list[str]:
    """In words; holes are told by the report, since they may also lie between two files."""
    problems = [problem.what for problem in segment.problems if problem.kind is not FindingKind.GAP]
    if segment.tail is not None:
        problems.append(f"no batch can be read from position {segment.tail[0]} to {segment.tail[1]}")
    return problems
