"""Sealed, merged and compacted segments are pinned byte for byte, and read by the independent reader."""

from __future__ import annotations

import json

import pytest

from danube.wal.segments.segment import HEADER_BYTES, NO_LOG, read_header
from tests.golden.segment_cases import FOLDER, LOG_ID, describe, vectors
from tests.unit.merge_samples import stored_records

NAMES = sorted(path.stem for path in FOLDER.glob("*.seg"))


def test_the_log_writes_the_pinned_bytes() -> None:
    made = vectors()
    assert sorted(made) == NAMES
    for name, data in made.items():
        assert data.hex() == (FOLDER / f"{name}.seg").read_bytes().hex(), name


@pytest.mark.parametrize("name", NAMES)
def test_pinned_bytes_are_read_as_the_pinned_values(name: str) -> None:
    described = describe((FOLDER / f"{name}.seg").read_bytes())
    assert json.loads(json.dumps(described)) == json.loads(
        (FOLDER / f"{name}.json").read_text(encoding="utf-8")
    )
    assert described["problems"] == []


def test_segments_name_their_log_or_leave_it_open() -> None:
    for name in NAMES:
        data = (FOLDER / f"{name}.seg").read_bytes()
        log_id = read_header(data[:HEADER_BYTES]).log_id
        assert data[44:60] == log_id == (LOG_ID if name.startswith("named") else NO_LOG), name


def test_compacted_segments_hold_what_is_left() -> None:
    held = {}
    for name in ("compacted", "emptied"):
        data = (FOLDER / f"{name}.seg").read_bytes()
        held[name] = stored_records(data[64 : int.from_bytes(data[-80:-72], "little")])
    assert held["compacted"] == {2: (None, b"3"), 3: (b"a", b"4"), 4: (b"b", b"5"), 5: (b"c", b"")}
    assert held["emptied"] == {2: (None, b"3"), 3: (b"a", b"4"), 4: (b"b", b"5")}
