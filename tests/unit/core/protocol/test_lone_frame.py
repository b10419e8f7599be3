"""A frame that came alone is taken as the loop over all frames would take it, or left to that."""

from __future__ import annotations

import struct
from collections.abc import Generator, Iterator

from hypothesis import given
from hypothesis import strategies as st

from danube.core.protocol.native import FRAME_HEADER_BYTES, Frame, FrameDecoder, frame_header
from danube.errors import DanubeError

BODIES = st.binary(max_size=64).map(lambda body: body + bytes(-len(body) % 8))


def result_of(frames: Iterator[Frame]) -> list[Frame] | type[DanubeError]:
    try:
        return list(frames)
    except DanubeError as error:
        return type(error)


def state(decoder: FrameDecoder) -> tuple[int, int, int]:
    return decoder.position, decoder.wanted, decoder.size_max


@given(
    before=st.binary(max_size=9), bodies=st.lists(BODIES, max_size=3), cut=st.integers(0, 40),
    size_max=st.sampled_from((FRAME_HEADER_BYTES, 48, 1 << 20)), kind=st.integers(0, 255),
)  # fmt: skip
def test_it_is_the_same_frame_with_and_without_the_loop(
    before: bytes, bodies: list[bytes], cut: int, size_max: int, kind: int
) -> None:
    data = before + b"".join(frame_header(kind, len(body), 7, kind, 3) + body for body in bodies)
    data = data[: max(len(before), len(data) - cut)]
    check(data, len(before), size_max)


@given(data=st.binary(max_size=80), size=st.integers(0, 80), tail=st.integers(0, 16))
def test_no_header_is_believed(data: bytes, size: int, tail: int) -> None:
    data = struct.pack("<I", size) + data
    check(data, 0, 1 << 20)
    good = bytearray(frame_header(6, 16, 1, 2) + bytes(16))
    for place in range(FRAME_HEADER_BYTES):
        changed = bytes(good[:place] + bytes([good[place] ^ (tail or 1)]) + good[place + 1 :])
        check(changed, 0, 1 << 20)


def check(data: bytes, start: int, size_max: int) -> None:
    decoder, other = FrameDecoder(size_max), FrameDecoder(size_max)
    found = decoder.frames(data, start, len(data))
    expected = result_of(other._cut(data, start, len(data)))
    whole = isinstance(expected, list) and len(expected) == 1 and expected[0].end == len(data)
    assert isinstance(found, Generator) != whole, (
        "alone are frames without a tail and with nothing behind them"
    )
    assert result_of(found) == expected
    assert state(decoder) == state(other)


def test_a_lone_frame_ends_what_was_wanted_for_a_larger_one() -> None:
    frame = frame_header(6, 8, 1, 2) + bytes(8)
    decoder = FrameDecoder()
    assert list(decoder.frames(frame[:-1], 0, len(frame) - 1)) == [] and decoder.wanted == len(frame)
    assert len(list(decoder.frames(frame, 0, len(frame)))) == 1 and decoder.wanted == FRAME_HEADER_BYTES


def test_one_with_a_tail_is_left_to_the_others() -> None:
    data = bytearray(frame_header(6, 8, 1, 2) + bytes(8))
    data[6] = 3
    found = FrameDecoder().frames(bytes(data), 0, len(data))
    assert isinstance(found, Generator) and [frame.end for frame in found] == [len(data) - 3]
