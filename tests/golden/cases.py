"""The batches that the golden vectors pin: what goes in, and what must come out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from danube.core.batch.columns import BatchView, encode, key_partitions
from danube.core.batch.format import Compression, read_header, stamp
from danube.core.batch.selection import ring_hash, select

FOLDER = Path(__file__).resolve().parent
TIME_US = 1_700_000_000_000_000
STAMP = {"base_offset": 4_294_967_296, "epoch": 7, "append_time_us": TIME_US + 5}
HASHED_KEYS = [b"", b"a", b"key", "clé".encode(), bytes(range(64)), b"x" * 300]

_TEXT = [b"alpha", b"", b"gamma-gamma"]
CASES: dict[str, dict[str, Any]] = {
    "one": {"payloads": [b"hello"]},
    "one-empty": {"payloads": [b""]},
    "three": {"payloads": _TEXT},
    "binary": {"payloads": [bytes(range(256)), bytes(8)]},
    "names": {"payloads": _TEXT, "producer_name": "produktør-1", "origin": "127.0.0.1:50051"},
    "keys": {"payloads": _TEXT, "keys": [b"k1", b"", b"key-3"]},
    "null-keys": {"payloads": [b"%d" % i for i in range(10)], "keys": [None, b"k"] * 5},
    "attributes": {"payloads": _TEXT, "attributes": [{"a": "1", "größe": "§"}, {}, {"empty": ""}]},
    "times": {"payloads": _TEXT, "publish_times": [TIME_US, TIME_US + 1, -1]},
    "request-ids": {"payloads": _TEXT, "request_ids": [1, 2**64 - 1, 0]},
    "schema": {"payloads": _TEXT, "schema_id": 2**63, "schema_version": 3},
    "schema-id": {"payloads": _TEXT, "schema_id": 0},
    "idempotent": {"payloads": _TEXT, "producer_id": 2**40, "producer_epoch": 9, "base_sequence": 2**33},
    "everything": {
        "payloads": [*_TEXT, b"last"],
        "producer_name": "p",
        "origin": "o",
        "keys": [b"k", None, b"", b"z" * 9],
        "attributes": [{"n": "v"}, {}, {"x": "y", "z": ""}, {"l": "last"}],
        "publish_times": [1, 2, 3, 4],
        "request_ids": [5, 6, 7, 8],
        "schema_id": 11,
        "schema_version": 12,
        "producer_id": 13,
        "producer_epoch": 14,
        "base_sequence": 15,
    },
}
#: A selection of records of another case.
SELECTIONS = {"selected": ("everything", [0, 2, 3]), "selected-one": ("null-keys", [9])}
#: Read only: another version of the library may compress to other bytes.
COMPRESSED = {"lz4": Compression.LZ4, "zstd": Compression.ZSTD}
COMPRESSED_CASE: dict[str, Any] = {"payloads": [b"abcdefgh" * 32] * 20, "keys": [b"key"] * 20}


def stored(case: dict[str, Any], compression: Compression = Compression.NONE) -> bytes:
    """Bytes of a case as they lie in a log."""
    batch = bytearray(encode(publish_time_us=TIME_US, compression=compression, **case).to_bytes())
    stamp(batch, **STAMP)
    return bytes(batch)


def vectors() -> dict[str, bytes]:
    """All vectors that encoding must reproduce byte for byte."""
    made = {name: stored(case) for name, case in CASES.items()}
    for name, (source, indexes) in SELECTIONS.items():
        made[name] = select(made[source], read_header(made[source]), np.array(indexes))
    return made


def describe(batch: bytes) -> dict[str, Any]:
    """Everything that a reader sees, as JSON; bytes are in hexadecimal."""
    view = BatchView(batch)
    request_ids = view.request_ids
    header = view.header._asdict() | {"magic": view.header.magic.decode()}
    return {
        "header": header,
        "producer_name": view.producer_name,
        "origin": view.origin,
        "offsets": view.offsets.tolist(),
        "payloads": [payload.hex() for payload in view.payloads()],
        "keys": [None if key is None else key.hex() for key in view.keys()],  # noqa: SIM118
        "attributes": view.attributes_list(),
        "publish_times": view.publish_times.tolist(),
        "request_ids": None if request_ids is None else request_ids.tolist(),
        "schema_id": view.schema_id,
        "schema_version": view.schema_version,
    }


def hashes() -> dict[str, Any]:
    """Partition and ring hash of some keys, by the key in hexadecimal."""
    partitions = {count: key_partitions(HASHED_KEYS, count).tolist() for count in (1, 3, 16, 1024)}
    return {
        key.hex(): {
            "ring_hash": ring_hash(key),
            "partition": {str(count): found[index] for count, found in partitions.items()},
        }
        for index, key in enumerate(HASHED_KEYS)
    }
