"""A subscription's durable progress, and its bytes.

The store that keeps the bytes adds the checksum.  Little-endian:

    position  size  field
           0     1  version        1; 2 with wide ranges
           1     1  mode           see grants.Mode
           2     1  form           0: ranges, 1: bitmap; the smaller is written; 2: wide ranges, where
                                   a gap or a range has 2**32 records and more
           3     1  flags          bit 0: a failure policy follows
           4     4  max_unacked    0: the topic's
           8     8  ack_floor
          16     4  policy_size    bytes of the failure policy, MessagePack
          20     4  count          ranges, or bits of the bitmap
          24        policy         padded to 8
                    acked          ranges: uint32[count][2], the gap since the last end (first: since
                                   ack_floor) and the length; bitmap: bit i, least significant first,
                                   says whether ack_floor + i is acked; wide ranges: uint64[count][2]

A range therefore costs 8 bytes at most, a wide one 16.  Only the first ACKED_RANGES_STORED_MAX ranges are
stored: leaving a range out repeats its records after a crash, and loses none.

A gap is never written as 0: a range at the floor raises the floor, and adjacent ranges are joined.  Former
versions wrote such gaps, so they are still read.  An empty range is damage.

Ranges ahead of the window that must not be granted: acked before a restart, or damaged.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec
import numpy as np

from danube.core.dispatch.grants import Mode, Offsets, joined, no_ranges, size_of
from danube.core.partition.policy import FailurePolicy
from danube.errors import Damage, InvalidArgument, StorageIncompatible
from danube.limits import ACKED_RANGES_STORED_MAX, MAX_UNACKED_LIMIT

VERSION: Final = 1
VERSION_WIDE: Final = 2
_HEAD: Final = struct.Struct("<BBBBIQII")
_RANGES: Final = 0
_BITMAP: Final = 1
_WIDE: Final = 2
_POLICY: Final = 1
_FORMS: Final = {VERSION: (_RANGES, _BITMAP), VERSION_WIDE: (_WIDE,)}
_OFFSET_MAX: Final = 1 << 62
_BITS_MAX: Final = MAX_UNACKED_LIMIT * 2
_policy_decoder = msgspec.msgpack.Decoder(FailurePolicy)


@dataclass(frozen=True, eq=False, slots=True)
class CursorState:
    """Everything below ``ack_floor`` is acked, and ``acked`` (int64[n][2], half-open, ascending, apart from
    each other and above the floor) besides.  All other offsets are not acked.  ``settled`` brings other
    ranges into this form.
    """

    mode: Mode
    ack_floor: int = 0
    acked: Offsets = field(default_factory=no_ranges)
    max_unacked: int = 0
    failure: FailurePolicy | None = None

    @classmethod
    def at(
        cls, mode: Mode, offset: int, *, max_unacked: int = 0, failure: FailurePolicy | None = None
    ) -> CursorState:
        """The state of a new subscription whose first record is ``offset``."""
        return cls(mode, offset, no_ranges(), max_unacked, failure)

    def settled(self) -> CursorState:
        """Return this progress in its simplest form: ranges ascend, do not touch, and lie above the floor."""
        edges = np.diff(self.acked.reshape(-1), prepend=self.ack_floor)
        if not len(edges) or int(edges.min()) > 0:
            return self
        floor, acked = self.ack_floor, joined(self.acked)
        acked = acked[acked[:, 1] > floor]
        if len(acked) and int(acked[0, 0]) <= floor:
            floor, acked = int(acked[0, 1]), acked[1:]
        return replace(self, ack_floor=floor, acked=acked)

    def clipped(self, end: int) -> CursorState:
        """Return this progress for a log that ends at ``end``: no offset from there on counts as acked."""
        if self.ack_floor <= end and (not len(self.acked) or int(self.acked[-1, 1]) <= end):
            return self
        acked = np.minimum(self.acked, end)
        return replace(self, ack_floor=min(self.ack_floor, end), acked=acked).settled()

    def encode(self) -> bytes:
        """The bytes above; at most 16 * ACKED_RANGES_STORED_MAX and the policy."""
        return self.settled()._encode()

    def _encode(self) -> bytes:
        policy = b"" if self.failure is None else msgspec.msgpack.encode(self.failure)
        form, count, body = _encode_ranges(self.acked[:ACKED_RANGES_STORED_MAX], self.ack_floor)
        flags = 0 if self.failure is None else _POLICY
        head = _HEAD.pack(
            VERSION_WIDE if form == _WIDE else VERSION,
            self.mode,
            form,
            flags,
            self.max_unacked,
            self.ack_floor,
            len(policy),
            count,
        )
        return head + policy + bytes(-len(policy) % 8) + body

    @classmethod
    def decode(cls, encoded: bytes) -> CursorState:
        """Read what ``encode`` wrote; raises Damage, or StorageIncompatible for a newer version."""
        if len(encoded) < _HEAD.size:
            raise Damage("stored cursor is cut", size=len(encoded))
        version, mode, form, flags, max_unacked, floor, policy_size, count = _HEAD.unpack_from(encoded)
        if version not in (VERSION, VERSION_WIDE):
            raise StorageIncompatible(f"stored cursor has version {version}", hint="start a newer Danube")
        body_start = _HEAD.size + policy_size + (-policy_size % 8)
        if mode > max(Mode) or form not in _FORMS[version] or flags > _POLICY or floor > _OFFSET_MAX:
            raise Damage("stored cursor is malformed", mode=mode, form=form, flags=flags, ack_floor=floor)
        if len(encoded) < body_start:
            raise Damage("stored cursor is cut", size=len(encoded))
        failure = _decode_policy(encoded[_HEAD.size : _HEAD.size + policy_size]) if flags else None
        acked = _decode_ranges(form, count, encoded[body_start:], floor)
        return cls(Mode(mode), floor, acked, max_unacked, failure).settled()


def _encode_ranges(acked: Offsets, floor: int) -> tuple[int, int, bytes]:
    """``(form, count, bytes)`` of the smaller form."""
    if not len(acked):
        return _RANGES, 0, b""
    span = int(acked[-1, 1]) - floor
    if span <= _BITS_MAX and (span + 7) // 8 < 8 * len(acked):
        steps = np.zeros(span + 1, np.int8)
        steps[acked[:, 0] - floor] = 1
        steps[acked[:, 1] - floor] = -1
        bits = np.cumsum(steps[:-1], dtype=np.int8)
        return _BITMAP, span, np.packbits(bits, bitorder="little").tobytes()
    edges = np.diff(acked.reshape(-1), prepend=floor)
    if (edges >= 1 << 32).any():
        return _WIDE, len(acked), edges.astype("<u8").tobytes()
    return _RANGES, len(acked), edges.astype("<u4").tobytes()


def _decode_ranges(form: int, count: int, body: bytes, floor: int) -> Offsets:
    size = {_RANGES: 8 * count, _BITMAP: (count + 7) // 8, _WIDE: 16 * count}[form]
    if size != len(body) or count > (_BITS_MAX if form == _BITMAP else ACKED_RANGES_STORED_MAX):
        raise Damage("stored cursor's ranges have the wrong size", count=count, size=len(body))
    if form == _BITMAP:
        bits = np.unpackbits(np.frombuffer(body, np.uint8), count=count, bitorder="little")
        return ranges_of(bits.view(np.bool_), floor)
    edges = np.frombuffer(body, "<u8" if form == _WIDE else "<u4")
    if count and (not edges[1::2].all() or int(edges.max()) > _OFFSET_MAX):
        raise Damage("stored cursor has a range that cannot be", count=count)
    acked = (np.cumsum(edges.astype(np.int64)) + floor).reshape(-1, 2)
    if len(acked) and (int(acked.min()) < 0 or int(acked.max()) > _OFFSET_MAX):
        raise Damage("stored cursor has ranges that cannot be", count=count)
    return acked


def _decode_policy(encoded: bytes) -> FailurePolicy:
    try:
        policy = _policy_decoder.decode(encoded)
        policy.check()
        return policy
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, InvalidArgument) as error:
        raise Damage("stored cursor's failure policy cannot be read", why=str(error)) from None


def ranges_of(chosen: np.ndarray[tuple[int], np.dtype[np.bool_]], start: int, ranges_max: int = 0) -> Offsets:
    """Runs of True in ``chosen`` (bool[n], its first is offset ``start``) as int64[m][2]."""
    edged = np.zeros(len(chosen) + 2, np.bool_)
    edged[1:-1] = chosen
    edges = np.flatnonzero(edged[1:] != edged[:-1])
    if ranges_max:
        edges = edges[: 2 * ranges_max]
    return (edges + start).astype(np.int64).reshape(-1, 2)


class SkipRanges:
    """Disjoint ascending ranges, int64[n][2]; ``count`` is how many there are."""

    __slots__ = ("_position", "_ranges", "count")

    def __init__(self, ranges: Offsets | None = None) -> None:
        self._ranges = no_ranges() if ranges is None else ranges.copy()
        self._position = 0
        self.count = len(self._ranges)

    @property
    def ranges(self) -> Offsets:
        return self._ranges[self._position :]

    @property
    def first(self) -> tuple[int, int]:
        start, end = self._ranges[self._position].tolist()
        return start, end

    def drop_below(self, offset: int) -> None:
        """Drop ranges below ``offset``."""
        while self.count and int(self._ranges[self._position, 1]) <= offset:
            self._position += 1
            self.count -= 1
        if self.count and int(self._ranges[self._position, 0]) < offset:
            self._ranges[self._position, 0] = offset

    def add(self, added: Offsets) -> int:
        """Add ranges, int64[n][2]; return how many of their offsets were not there."""
        before = size_of(self.ranges)
        self._ranges = joined(np.concatenate((self.ranges, added)))
        self._position, self.count = 0, len(self._ranges)
        return size_of(self._ranges) - before

    def between(self, start: int, end: int) -> Offsets:
        """int64[n]: the offsets of ``start .. end`` that are in no range, ascending."""
        ranges = self.ranges
        ranges = np.clip(ranges[: np.searchsorted(ranges[:, 0], end)], start, end) - start
        steps = np.zeros(end - start + 1, np.int32)
        np.add.at(steps, ranges[:, 0], 1)
        np.add.at(steps, ranges[:, 1], -1)
        return np.flatnonzero(np.cumsum(steps[:-1]) == 0).astype(np.int64, copy=False) + start
