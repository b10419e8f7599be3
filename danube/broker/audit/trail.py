"""Reading audit files: names, tails, the merged trail, and whether anything was changed."""

from __future__ import annotations

import heapq
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from danube.broker.audit.lines import BEGIN, REMOVED, START, Line, Place, decode, follows
from danube.errors import NotFound, StorageFailed
from danube.host import files

FOLDER: Final = "audit"
HEAD_BYTES: Final = 128
PART_BYTES: Final = 256 * 1024  # of a file, read at once
END_BYTES: Final = 128 * 1024  # of a file: more than a line and a part of another one
_FILE: Final = re.compile(r"worker-(\d{1,6})-(\d{6,12})\.jsonl\Z")
_HEAD: Final = re.compile(r"worker-(\d{1,6})\.head\Z")
_TORN_SHOWN: Final = "the last line is not whole"


class AuditFile(NamedTuple):
    """One file of a worker's chain; they are in the order of their numbers."""

    worker: int
    number: int
    path: Path


class Finding(NamedTuple):
    """A change that verification found: the file, the line in it (0: none in particular), and what it is."""

    path: Path
    line: int
    what: str


@dataclass(slots=True)
class Verified:
    """Result of a verification: what was read, what is wrong, and what is worth knowing."""

    lines: int = 0
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    heads: dict[int, Place] = field(default_factory=dict)  # by worker: the last line that was read


def name_of(worker: int, number: int) -> str:
    return f"worker-{worker}-{number:06d}.jsonl"


def head_name(worker: int) -> str:
    return f"worker-{worker}.head"


def list_files(directory: Path) -> list[AuditFile]:
    """The audit files of a directory by worker and number; empty where there is none."""
    try:
        names = files.list_names(directory)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _unreadable(directory, error) from None
    found = [
        AuditFile(int(match[1]), int(match[2]), directory / name)
        for name in names
        if (match := _FILE.match(name))
    ]
    return sorted(found)


def encode_head(place: Place) -> bytes:
    """A head of always the same length, so that it is overwritten in place."""
    text = json.dumps({"seq": place.number, "hash": place.hash}, separators=(",", ":"))
    return text.ljust(HEAD_BYTES - 1).encode("ascii") + b"\n"


def read_head(directory: Path, worker: int) -> Place | None:
    """The last line that a worker acknowledged; None where no head can be read."""
    try:
        fields = json.loads(files.read_bounded(directory / head_name(worker), HEAD_BYTES))
        return Place(int(fields["seq"]), str(fields["hash"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_end(path: Path) -> tuple[Line | None, int]:
    """The last whole line of a file, None if none can be read, and how many bytes are behind it."""
    raw = _read(path, END_BYTES)
    whole = raw.rfind(b"\n") + 1
    start = raw.rfind(b"\n", 0, max(0, whole - 1)) + 1
    try:
        return decode(raw[start:whole]), len(raw) - whole
    except ValueError:
        return None, len(raw) - whole


def trail(directory: Path) -> Iterator[dict[str, Any]]:
    """The fields of every line that can be read, of all workers, by time; ``worker`` is added."""
    return TrailReader(directory).lines()


class TrailReader:
    """Lines of all workers by time, each once: a look reads what was written since the one before.

    ``places``: behind the last line that was given of each worker, as a file's number and a position in it;
    a reader that gets them goes on there.  ``read_bytes``: how much was read from all files.
    """

    def __init__(self, directory: Path, places: dict[int, tuple[int, int]] | None = None) -> None:
        self._directory = directory
        self.places = {} if places is None else places
        self.read_bytes = 0

    def lines(self) -> Iterator[dict[str, Any]]:
        """The lines that no earlier iterator has given; ``places`` is right whenever one was given."""
        listed = list_files(self._directory)
        workers = sorted({one.worker for one in listed})
        each = (self._lines_of([file for file in listed if file.worker == one]) for one in workers)
        for fields, worker, place in heapq.merge(*each, key=lambda one: str(one[0]["time"])):
            self.places[worker] = place
            yield fields

    def _lines_of(self, own: list[AuditFile]) -> Iterator[tuple[dict[str, Any], int, tuple[int, int]]]:
        number, position = self.places.get(own[0].worker, (0, 0))
        # A file is done once the next one has lines; so that is seen before it is read.
        left = [one for one in own if one.number == number or (one.number > number and size_of(one.path))]
        for file in left:
            start = position if file.number == number else 0
            while raw := self._part(file.path, start):
                for text in raw.splitlines(keepends=True):
                    start += len(text)
                    try:
                        fields = json.loads(text)
                        given = {"worker": file.worker, **fields, "time": str(fields["time"])}
                    except (ValueError, TypeError, KeyError, RecursionError):
                        continue  # verify tells about it; a search shows what there is
                    yield given, file.worker, (file.number, start)

    def _part(self, path: Path, start: int) -> bytes:
        """Whole lines from a position on; none if no line ends behind it."""
        raw = read_part(path, start, PART_BYTES)
        self.read_bytes += len(raw)
        whole = raw.rfind(b"\n") + 1
        # No line is as long as a part: verify tells what it is.
        return raw if not whole and len(raw) == PART_BYTES else raw[:whole]


def verify(
    directory: Path,
    anchors: Mapping[int, Sequence[Place]] | None = None,
    kept: Mapping[int, Sequence[Place]] | None = None,
) -> Verified:
    """Read every chain from its beginning to its head.

    ``anchors``, by worker: places that must be there.  ``kept``: those that the metadata knows, oldest first;
    the older ones may be of files that retention removed.  Both are to be read before this, because a broker
    may be writing.
    """
    anchors, kept = anchors or {}, kept or {}
    found = Verified()
    listed = list_files(directory)
    workers = {one.worker for one in listed} | set(anchors) | set(kept) | _heads(directory)
    if not workers:
        raise NotFound(
            f"{directory} has no audit files",
            why="the broker was started without audit.mode, or it is another directory",
            hint="give --data-dir, or set audit.mode: on",
        )
    for worker in sorted(workers):
        own = [one for one in listed if one.worker == worker]
        _Chain(directory, worker, found).run(own, anchors.get(worker, ()), kept.get(worker, ()))
    return found


def _heads(directory: Path) -> set[int]:
    try:
        names = files.list_names(directory)
    except FileNotFoundError:
        return set()
    return {int(match[1]) for name in names if (match := _HEAD.match(name))}


class _Chain:
    """One worker's chain while it is read."""

    def __init__(self, directory: Path, worker: int, found: Verified) -> None:
        self._directory = directory
        self._worker = worker
        self._found = found
        self._place = START
        self._hashes: dict[int, str] = {0: START.hash}
        self._removed: set[Place] = {START}
        self._torn: tuple[Path, int] | None = None
        self._beginning: tuple[Path, Place] | None = None

    def run(self, own: list[AuditFile], anchors: Sequence[Place], kept: Sequence[Place]) -> None:
        head = read_head(self._directory, self._worker)  # before the lines: a broker may be writing
        for before, file in zip([None, *own], own, strict=False):
            if before is not None and file.number != before.number + 1:
                self._tell(
                    file.path, 0, f"files {before.number + 1} to {file.number - 1} are missing before it"
                )
            self._read_file(file)
        self._check_torn(None)
        self._check_beginning()
        head_path = self._directory / head_name(self._worker)
        if head is None:
            self._tell(head_path, 0, "the head cannot be read, so a cut end would not be seen")
        end_path = own[-1].path if own else head_path
        for name, place in (("the head", head), *(("the place given", one) for one in anchors)):
            if place is not None and self._differs(place):
                what = f"line {place.number}, which {name} names, is missing or another one: the end was cut"
                self._tell(end_path, 0, what)
        self._check_kept(end_path, kept)
        self._found.heads[self._worker] = self._place

    def _differs(self, place: Place) -> bool:
        return self._hashes.get(place.number) != place.hash

    def _check_kept(self, path: Path, kept: Sequence[Place]) -> None:
        """Compare with the heads of the metadata that are not older than the files; one must be there."""
        first = self._beginning[1].number if self._beginning is not None else 0
        comparable = [place for place in kept if place.number >= first and place.number]
        wrong = next((place for place in comparable if self._differs(place)), None)
        if wrong is not None:
            self._tell(
                path, 0, f"line {wrong.number}, which the metadata names, is missing or another one: "
                "the end was cut, or the chain was made anew",
            )  # fmt: skip
        elif kept and not comparable:
            what = f"the files begin behind line {kept[-1].number}, the last that the metadata names"
            self._tell(path, 0, what)

    def _read_file(self, file: AuditFile) -> None:
        raw = _read(file.path)
        whole = raw.rfind(b"\n") + 1
        for number, text in enumerate(raw[:whole].split(b"\n")[:-1], 1):
            try:
                line = decode(text + b"\n")
            except ValueError as error:
                self._tell(file.path, number, str(error))
                self._torn = None
                continue
            if number == 1:
                self._check_torn(line)
            self._take(file.path, number, line)
        if whole < len(raw):
            self._torn = (file.path, len(raw) - whole)

    def _take(self, path: Path, number: int, line: Line) -> None:
        if self._beginning is None:
            self._beginning = (path, Place(line.place.number - 1, line.prev))
            self._place = self._beginning[1]
            self._hashes = {self._place.number: self._place.hash}
        if problem := follows(line, self._place):
            self._tell(path, number, problem)
        self._place = line.place
        self._hashes[line.place.number] = line.place.hash
        self._found.lines += 1
        if line.fields.get("operation") == REMOVED:
            for number, digest in line.fields["details"].get("places", []):
                self._removed.add(Place(int(number), str(digest)))

    def _check_torn(self, following: Line | None) -> None:
        """A line that is not whole was never acknowledged, if the writer says so or had no time to."""
        if self._torn is None:
            return
        path, size = self._torn
        self._torn = None
        if following is None:
            self._found.notes.append(f"{path}: {_TORN_SHOWN}; a writer was killed, or is writing now")
        elif (
            following.fields.get("operation") != BEGIN
            or following.fields["details"].get("torn_bytes") != size
        ):
            self._tell(path, 0, f"{_TORN_SHOWN}, and the file behind it does not know of that")

    def _check_beginning(self) -> None:
        """A chain begins with line 1, or behind files that retention removed and named."""
        if self._beginning is not None and self._beginning[1] not in self._removed:
            path, place = self._beginning
            self._tell(path, 1, f"lines 1 to {place.number} are missing, and no retention removed them")

    def _tell(self, path: Path, line: int, what: str) -> None:
        self._found.findings.append(Finding(path, line, what))


def size_of(path: Path) -> int:
    """Bytes of a file; 1 if that cannot be told: reading it says why."""
    try:
        return path.stat().st_size
    except OSError:
        return 1


def _read(path: Path, end_bytes: int = 0) -> bytes:
    """The bytes of a file, or so many of its end."""
    return read_part(path, max(0, size_of(path) - end_bytes) if end_bytes else 0)


def read_part(path: Path, position: int, size: int = -1) -> bytes:
    """The bytes from a position on, at most ``size``; none of a file that retention has removed."""
    try:
        with path.open("rb") as file:
            file.seek(position)
            return file.read(size)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: OSError) -> StorageFailed:
    return StorageFailed(
        f"{path} cannot be read",
        why=error.strerror or str(error),
        hint="audit files belong to the broker's user",
    )
