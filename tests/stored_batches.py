"""Whole stored batches, judged by the checks that readers make one by one."""

from __future__ import annotations

from danube.core.batch.format import BatchHeader, body_intact, header_intact, read_header
from danube.errors import Damage, LimitExceeded, ProtocolError


def check_stored(batch: bytes | bytearray | memoryview, expected_offset: int | None = None) -> BatchHeader:
    """Check a stored batch wholly; raise Damage with the facts where anything differs."""
    try:
        header = read_header(batch)
    except (ProtocolError, LimitExceeded) as error:
        raise Damage("stored batch has no valid header", why=str(error)) from error
    if len(batch) < header.size:
        raise Damage("stored batch is cut", size=header.size, present=len(batch))
    if not header_intact(batch, header) or not body_intact(batch, header):
        raise Damage("stored batch fails its checksum", base_offset=header.base_offset)
    if expected_offset is not None and header.base_offset != expected_offset:
        raise Damage(
            "stored batch has the wrong offset", base_offset=header.base_offset, expected=expected_offset
        )
    return header
