"""The manifest format is pinned byte for byte, in both directions."""

from __future__ import annotations

import json

import pytest

from danube.wal.segments.holes import HoleKind
from danube.wal.tier.keys import KeyKind, parse_key
from danube.wal.tier.manifest import EntryFlag, Manifest
from tests.golden.tiered_cases import FOLDER, describe, vectors

NAMES = sorted(path.stem for path in FOLDER.glob("*.bin"))


def test_every_case_has_a_vector_and_every_vector_a_case() -> None:
    assert sorted(vectors()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_encoding_gives_the_pinned_bytes(name: str) -> None:
    assert vectors()[name].hex() == (FOLDER / f"{name}.bin").read_bytes().hex()


@pytest.mark.parametrize("name", NAMES)
def test_pinned_bytes_decode_to_the_pinned_values(name: str) -> None:
    data = (FOLDER / f"{name}.bin").read_bytes()
    described = describe(data)
    assert described == json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    assert Manifest.decode(data).encode() == data
    key = parse_key(described["key"])
    assert key is not None and (key.kind, key.epoch) == (KeyKind.MANIFEST, described["epoch"])


def test_every_flag_is_pinned() -> None:
    seen = 0
    for name in NAMES:
        for entry in describe((FOLDER / f"{name}.bin").read_bytes())["entries"]:
            seen |= entry["flags"]
    assert all(seen & flag for flag in EntryFlag)


def test_only_what_has_holes_is_of_the_later_version_and_every_kind_is_pinned() -> None:
    kinds = set()
    for name in NAMES:
        data = (FOLDER / f"{name}.bin").read_bytes()
        holes = Manifest.decode(data).all_holes()
        assert int.from_bytes(data[8:10], "little") == (2 if holes else 1), name
        kinds |= {hole.kind for hole in holes}
    assert kinds == set(HoleKind)
