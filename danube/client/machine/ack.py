"""Ack: partition, offsets and durability of published records."""

from __future__ import annotations

import msgspec


class Ack(msgspec.Struct, frozen=True):
    """The broker's answer to one batch, or to one record of it.

    ``durability`` is the level that was reached: ``memory`` (accepted), ``written`` (survives any crash of
    processes) or ``fsync`` (survives a power cut).
    """

    offset: int  # of the first record
    partition: int  # 0 for a topic that is not partitioned
    durability: str
    epoch: int = 0  # of the partition's owner
    duplicate: bool = False  # stored by an earlier attempt; the offset is that one's
    record_count: int = 1

    @property
    def end_offset(self) -> int:
        """Offset after the last record."""
        return self.offset + self.record_count
