"""Compressing a selection that is to be stored: deliveries are not worth it, a compacted segment is."""

from __future__ import annotations

from danube.core.batch.checksum import crc32c
from danube.core.batch.compression import compress
from danube.core.batch.format import (
    BODY_CRC_START,
    COMPRESSION_MASK,
    HEADER_BYTES,
    STAMPED_BYTES,
    Compression,
    pack_header,
    padded,
    read_header,
)


def compressed(batch: bytes, kind: Compression) -> bytes:
    """``batch``, which is stamped and not compressed, with its columns compressed.

    The batch itself where that saves nothing or is not asked for.  InvalidArgument where the
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
