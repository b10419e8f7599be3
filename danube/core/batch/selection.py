"""Choosing records out of a batch: deliveries of some records, and the ring hash of keys.

The ring hash places a key on a key-shared subscription's ring: FNV-1a of 64 bits, its halves
folded by exclusive or to 32 bits, and MurmurHash3's 32-bit finaliser.

Compressing a selection that is to be stored: deliveries are not worth it, a compacted segment is.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from danube.core import kernels
from danube.core.batch.checksum import crc32c
from danube.core.batch.columns import BatchView, Data, place_columns
from danube.core.batch.compression import compress
from danube.core.batch.format import (
    BODY_CRC_START,
    COMPRESSION_MASK,
    HEADER_BYTES,
    STAMPED_BYTES,
    BatchHeader,
    Compression,
    Flag,
    pack_header,
    padded,
    read_header,
)
from danube.errors import InvalidArgument, ProtocolError

_SIZE: Final = struct.Struct("<I")  # at 4
_SHAPE: Final = struct.Struct("<HHI")  # at 36: flags, name_size, record_count
_TOTALS: Final = struct.Struct("<IIII")  # at 84: payload, key and attribute bytes, columns_size

_FNV_BASIS: Final = 0xCBF29CE484222325
_FNV_PRIME: Final = 0x100000001B3
_MASK_64: Final = (1 << 64) - 1
_MASK_32: Final = (1 << 32) - 1


def select(batch: Data, header: BatchHeader, indexes: NDArray[np.int64]) -> bytes:
    """A batch of only the records at ``indexes`` (ascending, within the batch), with Flag.SELECTED.

    Each record keeps its offset, as a delta from the unchanged base offset.  The result is never
    compressed; both checksums are its own.  Raises ProtocolError if the batch is malformed.
    """
    indexes = np.asarray(indexes, np.int64)
    count = header.record_count
    if not len(indexes) or indexes[0] < 0 or indexes[-1] >= count or not (indexes[1:] > indexes[:-1]).all():
        raise InvalidArgument("records to select must ascend within the batch", records=count)
    if not kernels.available:
        return select_twin(batch, header, indexes)
    view = BatchView(batch, header)
    if header.flags & Flag.SELECTED:
        _ = view.offset_deltas  # raises where they do not ascend
    return _select_with_kernels(kernels.compiled, view, indexes)


def _select_with_kernels(batch: Any, view: BatchView, indexes: NDArray[np.int64]) -> bytes:
    header, source = view.header, view.layout
    columns = np.frombuffer(view.columns, np.uint8)
    variable = [
        (source.payload_offsets, source.payloads, header.payload_bytes),
        (source.key_offsets, source.keys, header.key_bytes),
        (source.attribute_offsets, source.attributes, header.attribute_bytes),
    ]
    measure = batch.measure
    totals = [
        measure(columns, offsets, total, indexes) if offsets >= 0 else 0 for offsets, _, total in variable
    ]
    if min(totals) < 0:
        raise ProtocolError("offsets of a column do not ascend from 0 to its size")
    flags = header.flags & ~COMPRESSION_MASK | Flag.SELECTED
    target = place_columns(flags, len(indexes), *totals)
    start = HEADER_BYTES + padded(header.name_size + header.origin_size)
    chosen = bytearray(start + target.end)
    chosen[:start] = view.data[:start]
    _SIZE.pack_into(chosen, 4, len(chosen))
    _SHAPE.pack_into(chosen, 36, flags, header.name_size, len(indexes))
    _TOTALS.pack_into(chosen, 84, *totals, target.end)
    octets = np.frombuffer(chosen, np.uint8)
    if source.times >= 0:
        batch.gather_words(columns, source.times, indexes, octets, start + target.times)
    if source.request_ids >= 0:
        batch.gather_words(columns, source.request_ids, indexes, octets, start + target.request_ids)
    batch.gather_deltas(columns, source.selected, indexes, octets, start + target.selected)
    if source.key_validity >= 0:
        batch.gather_bits(columns, source.key_validity, indexes, octets, start + target.key_validity)
    for (offsets, position, _), new_offsets, new_position in zip(
        variable,
        (target.payload_offsets, target.key_offsets, target.attribute_offsets),
        (target.payloads, target.keys, target.attributes),
        strict=True,
    ):
        if offsets >= 0:
            into = (octets, start + new_offsets, start + new_position)
            batch.gather_variable(columns, offsets, position, indexes, *into)
    batch.seal(octets)
    return bytes(chosen)


def select_twin(batch: Data, header: BatchHeader, indexes: NDArray[np.int64]) -> bytes:
    """select() by numpy and bytes.join, for indexes that were checked."""
    view = BatchView(batch, header)
    pieces: list[bytes] = []
    if header.flags & Flag.TIMES:
        pieces.append(view.publish_times[indexes].tobytes())
    request_ids = view.request_ids
    if request_ids is not None:
        pieces.append(request_ids[indexes].tobytes())
    pieces.append(_padded(view.offset_deltas[indexes].astype("<u4").tobytes()))
    payload_bytes = _gather(pieces, view._payload_column(), indexes)
    key_bytes = attribute_bytes = 0
    if header.flags & Flag.KEYS:
        validity = view.key_validity
        if validity is not None:
            pieces.append(_padded(np.packbits(validity[indexes], bitorder="little").tobytes()))
        key_bytes = _gather(pieces, view._key_column(), indexes)
    if header.flags & Flag.ATTRIBUTES:
        attribute_bytes = _gather(pieces, view._attribute_column(), indexes)
    names = view.data[HEADER_BYTES : HEADER_BYTES + padded(header.name_size + header.origin_size)]
    columns = b"".join(pieces)
    chosen = header._replace(
        size=HEADER_BYTES + len(names) + len(columns),
        flags=header.flags & ~COMPRESSION_MASK | Flag.SELECTED,
        record_count=len(indexes),
        payload_bytes=payload_bytes,
        key_bytes=key_bytes,
        attribute_bytes=attribute_bytes,
        columns_size=len(columns),
    )
    body = b"".join((pack_header(chosen)[BODY_CRC_START:], names, columns))
    head = pack_header(chosen._replace(body_crc=crc32c(body)))[:STAMPED_BYTES]
    return b"".join((head, crc32c(head).to_bytes(4, "little"), body))


def _gather(
    pieces: list[bytes], column: tuple[NDArray[np.int32], memoryview], indexes: NDArray[np.int64]
) -> int:
    """Append the chosen entries of a variable-length column; return their byte total."""
    offsets, data = column
    starts, ends = offsets[indexes], offsets[indexes + 1]
    chosen = np.zeros(len(indexes) + 1, "<i4")
    np.cumsum(ends - starts, out=chosen[1:])
    pieces.append(_padded(chosen.tobytes()))
    whole = bytes(data)
    pieces += [whole[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
    total = int(chosen[-1])
    pieces.append(bytes(-total % 8))
    return total


def _padded(piece: bytes) -> bytes:
    return piece + bytes(-len(piece) % 8)


def ring_hash(data: bytes) -> int:
    """Place of one key on the ring, 0 .. 2**32 - 1."""
    hashed = _FNV_BASIS
    for octet in data:
        hashed = (hashed ^ octet) * _FNV_PRIME & _MASK_64
    hashed = (hashed >> 32) ^ (hashed & _MASK_32)
    hashed ^= hashed >> 16
    hashed = hashed * 0x85EBCA6B & _MASK_32
    hashed ^= hashed >> 13
    hashed = hashed * 0xC2B2AE35 & _MASK_32
    return hashed ^ hashed >> 16


def ring_hashes(batch: Data, header: BatchHeader) -> NDArray[np.uint64]:
    """uint64[n]: ring hash of each record's key, or of the producer's name where it has no key."""
    view = BatchView(batch, header)
    if not kernels.available or not header.flags & Flag.KEYS:
        return ring_hashes_twin(view)
    layout = view.layout
    hashes = np.empty(header.record_count, np.uint64)
    found = kernels.compiled.ring_hashes(
        np.frombuffer(view.columns, np.uint8),
        layout.key_validity,
        layout.key_offsets,
        layout.keys,
        header.key_bytes,
        _name_hash(bytes(view.data[HEADER_BYTES : HEADER_BYTES + header.name_size])),
        hashes,
    )
    if found != kernels.WELL_FORMED:
        raise ProtocolError("offsets of a column do not ascend from 0 to its size")
    return hashes


@lru_cache(maxsize=1024)
def _name_hash(name: bytes) -> int:
    return ring_hash(name)


def ring_hashes_twin(view: BatchView) -> NDArray[np.uint64]:
    """ring_hashes() in Python, once for each distinct key."""
    header = view.header
    name = bytes(view.data[HEADER_BYTES : HEADER_BYTES + header.name_size])
    if not header.flags & Flag.KEYS:
        return np.full(header.record_count, _name_hash(name), np.uint64)
    keys = [name if key is None else key for key in view.keys()]  # noqa: SIM118
    hash_by_key = {key: ring_hash(key) for key in set(keys)}
    return np.fromiter(map(hash_by_key.__getitem__, keys), np.uint64, len(keys))


def compressed(batch: bytes, kind: Compression) -> bytes:
    """``batch``, which is stamped and not compressed, with its columns compressed.

    The batch itself where that saves nothing or is not asked for.  InvalidArgument if the
    library is not installed.
    """
    header = read_header(batch)
    if kind is Compression.NONE or header.flags & COMPRESSION_MASK:
        return batch
    start = HEADER_BYTES + padded(header.name_size + header.origin_size)
    block = compress(kind, batch[start:])
    if block is None or padded(len(block)) >= len(batch) - start:
        return batch
    size = start + padded(len(block))
    changed = header._replace(size=size, flags=header.flags | kind)
    body = pack_header(changed)[BODY_CRC_START:] + batch[HEADER_BYTES:start] + block + bytes(-len(block) % 8)
    head = pack_header(changed._replace(body_crc=crc32c(body)))[:STAMPED_BYTES]
    return head + crc32c(head).to_bytes(4, "little") + body
