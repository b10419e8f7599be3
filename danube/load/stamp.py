"""Stamp of a load test's record: its producer, its number, when it was due.

    position  size  field
           0     4  magic DLT1
           4     4  clock: which machine's monotonic clock
           8     8  run
          16     8  producer
          24     8  number, from 0, of this producer
          32     4  key, an index
          36     4  size of the whole payload
          40     8  due, monotonic ns
          48     8  due, wall clock us, for a consumer on another machine
          56     4  CRC-32 of the 56 bytes before

Behind it the payload is filled with bytes that both ends know, so that a cut or foreign byte is noticed.
"""

from __future__ import annotations

import random
import struct
import zlib
from functools import cache, lru_cache
from pathlib import Path
from typing import Final, NamedTuple

from danube.host.clock import monotonic_ns, wall_us

_FIELDS: Final = struct.Struct("<4sIQQQIIqq")
_CHECK: Final = struct.Struct("<I")
MAGIC: Final = b"DLT1"
STAMP_BYTES: Final = _FIELDS.size + _CHECK.size


class Stamp(NamedTuple):
    """The fields of a record that arrived whole."""

    run: int
    producer: int
    number: int
    key: int
    clock: int
    due_ns: int
    due_wall_us: int

    def age_ms(self, now_ns: int) -> float:
        """Milliseconds since the record was due; by the wall clocks if it comes from another machine."""
        if self.clock == machine_clock():
            return (now_ns - self.due_ns) / 1e6
        return (wall_us() - self.due_wall_us) / 1e3


class Damaged(NamedTuple):
    """A payload that begins like ours and differs from the sent one."""

    why: str


@cache
def machine_clock() -> int:
    """A number for this start of this machine; its processes share one monotonic clock."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text()
        text += str(Path("/proc/self/ns/time").readlink())  # a container may have a clock of its own
    except OSError:
        text = str(random.SystemRandom().getrandbits(64))  # of this host alone: wall clocks are compared
    return zlib.crc32(text.encode())


@lru_cache(maxsize=64)
def fill_of(size: int) -> bytes:
    """The bytes behind the stamp of a payload of ``size`` bytes; they do not compress."""
    return random.Random(size).randbytes(size - STAMP_BYTES)  # noqa: S311 - a filler guards nothing


def write(run: int, producer: int, number: int, key: int, size: int, due_ns: int) -> bytes:
    """A payload of ``size`` bytes, at least STAMP_BYTES."""
    late_us = (monotonic_ns() - due_ns) // 1_000
    fields = _FIELDS.pack(
        MAGIC, machine_clock(), run, producer, number, key, size, due_ns, wall_us() - late_us
    )
    return fields + _CHECK.pack(zlib.crc32(fields)) + fill_of(size)


def read(payload: bytes) -> Stamp | Damaged | None:
    """Read the stamp of a payload; None for a record that no load test sent."""
    if not payload.startswith(MAGIC):
        return None
    if len(payload) < STAMP_BYTES:
        return Damaged("it is cut inside its stamp")
    _, clock, run, producer, number, key, size, due_ns, due_wall_us = _FIELDS.unpack_from(payload)
    if _CHECK.unpack_from(payload, _FIELDS.size)[0] != zlib.crc32(payload[: _FIELDS.size]):
        return Damaged("its stamp differs from its checksum")
    if len(payload) != size:
        return Damaged("its size is not what it was sent with")
    if not payload.endswith(fill_of(size)):
        return Damaged("its bytes are not those that were sent")
    return Stamp(run, producer, number, key, clock, due_ns, due_wall_us)
