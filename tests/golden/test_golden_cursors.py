"""Cursor files are pinned byte for byte, with and without the id of their log, and go on being read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from danube.wal.log.cursors import FILE_NAMES, CursorStore
from danube.wal.segments.segment import NO_LOG
from tests.golden.cursor_cases import FOLDER, LOG_IDS, describe, vectors
from tests.unit.wal_samples import IDENTITY


def test_the_store_writes_the_pinned_bytes() -> None:
    made = vectors()
    assert sorted(made) == sorted(path.stem for path in FOLDER.glob("*.bin"))
    for name, data in made.items():
        assert data.hex() == (FOLDER / f"{name}.bin").read_bytes().hex(), name


@pytest.mark.parametrize("name", LOG_IDS)
def test_pinned_bytes_are_read_as_the_pinned_values(name: str, tmp_path: Path) -> None:
    data = (FOLDER / f"{name}.bin").read_bytes()
    assert json.loads(json.dumps(describe(data))) == json.loads(
        (FOLDER / f"{name}.json").read_text(encoding="utf-8")
    )
    assert data[40:56] == LOG_IDS[name]
    for log_id in (LOG_IDS["named"], NO_LOG):
        (tmp_path / FILE_NAMES[0]).write_bytes(data)
        (tmp_path / FILE_NAMES[1]).write_bytes(b"")
        store = CursorStore(tmp_path, IDENTITY, log_id=log_id)
        assert store.load() == {"a": b"state 2"} and not store.damage
        store.close()
