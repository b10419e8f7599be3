"""Register of a partition's damage: kept beside the log, reported once, never served.

``damage.json`` in the partition's directory is a list of records for people and tools; the log
itself never depends on it.  Damaged bytes stay where they are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from danube.host import files

FILE_NAME: Final = "damage.json"
_RECORDS_MAX: Final = 1_000
_FILE_BYTES_MAX: Final = 1024 * 1024


class DamagedRange(NamedTuple):
    """``start .. end`` are offsets, ``position`` is a byte place in ``file``."""

    file: str
    position: int
    start: int
    end: int
    why: str


class DamageRegister:
    """Damage known of one partition, oldest first; at most _RECORDS_MAX are kept, all are counted."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE_NAME
        self._known: dict[tuple[str, int, int], DamagedRange] = {}
        self._stored = True
        self.count = 0
        self._load()

    def _load(self) -> None:
        try:
            rows = json.loads(files.read_bounded(self._path, _FILE_BYTES_MAX))
            for row in rows:
                record = DamagedRange(row["file"], row["position"], row["start"], row["end"], row["why"])
                self._known[record.file, record.position, record.start] = record
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError):
            # It is a report, not state: remaining damage is found again by the next read.
            self._known.clear()
        self.count = len(self._known)

    def __iter__(self) -> Iterator[DamagedRange]:
        return iter(self._known.values())

    def note(self, record: DamagedRange) -> bool:
        """Remember a range; True when it was not known yet."""
        key = (record.file, record.position, record.start)
        if key in self._known:
            return False
        self.count += 1
        if len(self._known) < _RECORDS_MAX:
            self._known[key] = record
            self._stored = False
        return True

    def forget_below(self, offset: int) -> None:
        """Drop damage in segments that retention has deleted."""
        gone = [key for key, record in self._known.items() if record.start < record.end <= offset]
        for key in gone:
            del self._known[key]
            self._stored = False

    def store(self) -> bool:
        """Write the file when something is new; False if the disk refuses (tried again next time)."""
        if self._stored:
            return True
        rows = [record._asdict() for record in self._known.values()]
        try:
            files.replace_durably(self._path, json.dumps(rows, indent=1).encode())
        except OSError:
            return False
        self._stored = True
        return True
