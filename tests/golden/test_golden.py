"""The batch format is pinned byte for byte, in both directions."""

from __future__ import annotations

import json
from typing import Any

import pytest

from danube.core.batch.columns import BatchView
from danube.core.batch.format import Flag
from tests.golden.cases import COMPRESSED, COMPRESSED_CASE, FOLDER, describe, hashes, vectors
from tests.stored_batches import check_stored

NAMES = sorted(path.stem for path in FOLDER.glob("*.bin"))


def _description(name: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return value


def test_every_case_has_a_vector_and_every_vector_a_case() -> None:
    assert sorted([*vectors(), *COMPRESSED]) == NAMES


@pytest.mark.parametrize("name", sorted(vectors()))
def test_encoding_gives_the_pinned_bytes(name: str) -> None:
    assert vectors()[name].hex() == (FOLDER / f"{name}.bin").read_bytes().hex()


@pytest.mark.parametrize("name", NAMES)
def test_pinned_bytes_decode_to_the_pinned_values(name: str) -> None:
    if name in COMPRESSED:
        pytest.importorskip("lz4.frame" if name == "lz4" else "zstandard")
    batch = (FOLDER / f"{name}.bin").read_bytes()
    check_stored(batch)
    BatchView(batch).check()
    assert describe(batch) == _description(name)


@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_vectors_are_compressed_and_hold_the_case(name: str) -> None:
    described = _description(name)
    assert described["header"]["flags"] & 7 == COMPRESSED[name]
    assert described["header"]["size"] < described["header"]["columns_size"]
    assert described["payloads"] == [payload.hex() for payload in COMPRESSED_CASE["payloads"]]


def test_every_flag_is_pinned() -> None:
    seen = 0
    for name in NAMES:
        seen |= _description(name)["header"]["flags"]
    assert all(seen & flag for name, flag in vars(Flag).items() if name.isupper())


def test_hashes_of_keys_are_pinned() -> None:
    assert hashes() == _description("hashes")


def test_a_key_goes_to_its_xxh3_modulo_the_partitions() -> None:
    empty = _description("hashes")[""]["partition"]
    assert empty == {str(count): 0x2D06800538D394C2 % count for count in (1, 3, 16, 1024)}
