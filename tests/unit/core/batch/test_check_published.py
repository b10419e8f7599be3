"""What the owner makes of a producer's bytes: one kernel accepts, everything else says what is wrong."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from danube.core import kernels
from danube.core.batch.checksum import crc32c
from danube.core.batch.columns import check_published, encode
from danube.core.batch.format import BODY_CRC_START, HEADER_BYTES, BatchHeader, Compression
from danube.errors import DanubeError

LARGEST = 9  # bytes of a record
KINDS: dict[str, dict[str, Any]] = {
    "one": {"payloads": [b"a payload"], "producer_name": "p"},
    "one of many columns": {
        "payloads": [b"x"], "keys": [b"k"], "attributes": [{"a": "b"}], "publish_times": [5],
        "request_ids": [6],
    },
    "many": {"payloads": [b"", b"one", b"another"] * 30, "producer_name": "name", "origin": "origin"},
    "times": {"payloads": [b"x", b"yz"] * 4, "publish_times": list(range(8)), "request_ids": list(range(8))},
    "keys": {"payloads": [b"x"] * 70, "keys": [b"k", None] * 35, "schema_id": 7, "schema_version": 1},
    "attributes": {
        "payloads": [b"", b"xyz"], "keys": [b"k", b"l"], "attributes": [{"é": "1", "b": ""}, {}],
        "origin": "é",
    },
}  # fmt: skip
STRUCTURE = [4, 5, 6, 7, *range(36, 44), *range(84, HEADER_BYTES)]  # places in the header


def batch_of(kind: str) -> bytearray:
    return bytearray(encode(publish_time_us=1, producer_id=1, **KINDS[kind]).to_bytes())


def sealed(data: bytearray) -> bytearray:
    """With the checksum that belongs to the bytes, so that they are looked at."""
    if len(data) >= HEADER_BYTES:
        struct.pack_into("<I", data, 28, crc32c(bytes(data[BODY_CRC_START:])))
    return data


def verdict(check: Callable[[], BatchHeader]) -> object:
    """The header, or what the refusal says."""
    try:
        return check()
    except DanubeError as error:
        return type(error), str(error)


@pytest.fixture
def both(with_kernels: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[bytearray], object]:
    """The verdict on a batch, which is the same without kernels."""

    def judge(data: bytearray) -> object:
        batch = memoryview(data)
        found = verdict(lambda: check_published(batch, LARGEST))
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "available", False)
            assert verdict(lambda: check_published(batch, LARGEST)) == found
        return found

    return judge


@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_accepts_what_producers_make(with_kernels: None, kind: str) -> None:
    """And all else is asked only where it does not."""
    data = sealed(batch_of(kind))
    octets = np.frombuffer(data, np.uint8)
    assert kernels.compiled.batch_is_sound(octets, LARGEST)
    data[-1] ^= 1
    assert not kernels.compiled.batch_is_sound(octets, LARGEST), "the checksum"


@pytest.mark.parametrize("kind", KINDS)
def test_changed_batches_get_the_same_verdict_without_kernels(
    kind: str, both: Callable[[bytearray], object], source: random.Random
) -> None:
    honest = batch_of(kind)
    places = [*STRUCTURE, *range(HEADER_BYTES, len(honest))]
    accepted = 0
    for _ in range(1_500):
        data = bytearray(honest)
        for _ in range(source.choice([1, 1, 2, 4])):
            data[source.choice(places)] = source.choice([0, 1, 2, 3, 8, 0x10, 0x7F, 0x80, 0xC3, 0xFF])
        accepted += isinstance(both(sealed(data)), BatchHeader)
    assert 0 < accepted < 1_500


@pytest.mark.parametrize("kind", KINDS)
def test_cut_and_longer_batches_are_refused(kind: str, both: Callable[[bytearray], object]) -> None:
    honest = batch_of(kind)
    for size in range(len(honest)):
        assert not isinstance(both(sealed(honest[:size])), BatchHeader)
    assert not isinstance(both(sealed(honest + bytes(8))), BatchHeader)


def test_a_compressed_batch_is_inflated_before_it_is_taken(both: Callable[[bytearray], object]) -> None:
    pytest.importorskip("lz4")
    made = encode([b"x" * 9] * 100, publish_time_us=1, compression=Compression.LZ4)
    data = bytearray(made.to_bytes())
    assert isinstance(both(data), BatchHeader)
    data[HEADER_BYTES + 8 : HEADER_BYTES + 40] = b"\xff" * 32
    assert not isinstance(both(sealed(data)), BatchHeader)
