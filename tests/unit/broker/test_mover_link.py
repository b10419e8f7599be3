"""Frames between workers and the mover: any cut of the stream, bounds, what is refused."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from danube.broker.links import FIELDS_BY_KIND, FRAME_BYTES_MAX, Frame, FrameReader, encode_frame
from danube.errors import ProtocolError

SAMPLE: dict[type, Any] = {int: 7, str: "text", bytes: b"blob", bool: True}


def sample(kind: str) -> Frame:
    return {name: SAMPLE[wanted] for name, wanted in FIELDS_BY_KIND[kind].items()}


def framed(value: object) -> bytes:
    body = msgspec.msgpack.encode(value)
    return struct.pack("<I", len(body)) + body


@pytest.mark.parametrize("kind", sorted(FIELDS_BY_KIND))
def test_every_kind_comes_back_as_it_was_sent(kind: str) -> None:
    frames = list(FrameReader().feed(encode_frame(kind, **sample(kind))))
    assert frames == [{"kind": kind, **sample(kind)}]


def test_any_cut_of_the_stream_gives_the_same_frames() -> None:
    kinds = sorted(FIELDS_BY_KIND)
    stream = b"".join(encode_frame(kind, **sample(kind)) for kind in kinds)
    for cut in range(len(stream) + 1):
        reader = FrameReader()
        found = [*reader.feed(stream[:cut]), *reader.feed(stream[cut:])]
        assert [frame["kind"] for frame in found] == kinds


@given(st.lists(st.integers(1, 40), max_size=60))
def test_a_stream_in_many_pieces_gives_the_same_frames(sizes: list[int]) -> None:
    stream = b"".join(encode_frame("sealed", topic_id=n, partition=n) for n in range(20))
    reader, found, position = FrameReader(), [], 0
    for size in [*sizes, len(stream)]:
        found += [frame["topic_id"] for frame in reader.feed(stream[position : position + size])]
        position += size
    assert found == list(range(20))


def test_fields_that_are_not_known_are_carried_along() -> None:
    data = framed({"kind": "sealed", "topic_id": 1, "partition": 2, "since": "a later version"})
    assert [frame["partition"] for frame in FrameReader().feed(data)] == [2]


@pytest.mark.parametrize(
    "value",
    [
        [1, 2],
        {"kind": "unheard"},
        {"kind": ["sealed"]},
        {"topic_id": 1},
        {"kind": "sealed", "topic_id": 1},
        {"kind": "sealed", "topic_id": "1", "partition": 0},
        {"kind": "sealed", "topic_id": True, "partition": 0},
        {"kind": "sealed", "topic_id": -1, "partition": 0},
        {"kind": "sealed", "topic_id": 1, "partition": 1 << 32},
        {"kind": "sealed", "topic_id": 1 << 63, "partition": 0},
        {"kind": "delete", "topic_id": 1, "partitions": 1_000_000},
    ],
)
def test_what_no_peer_of_ours_sends_is_refused(value: object) -> None:
    with pytest.raises(ProtocolError):
        list(FrameReader().feed(framed(value)))


def test_a_frame_that_is_no_message_pack_is_refused() -> None:
    with pytest.raises(ProtocolError, match="no MessagePack"):
        list(FrameReader().feed(struct.pack("<I", 3) + b"\xc1\xc1\xc1"))


def test_a_length_beyond_the_bound_is_refused_before_anything_is_kept() -> None:
    with pytest.raises(ProtocolError, match="too large"):
        list(FrameReader().feed(struct.pack("<I", FRAME_BYTES_MAX + 1)))


def test_what_cannot_be_read_is_not_sent() -> None:
    with pytest.raises(ProtocolError, match="unknown kind"):
        encode_frame("unheard")
    with pytest.raises(ProtocolError, match="its partition is wrong or missing"):
        encode_frame("sealed", topic_id=1)


def test_a_frame_that_is_too_large_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("danube.broker.links.FRAME_BYTES_MAX", 100)
    with pytest.raises(ProtocolError, match="too large"):
        encode_frame("metadata", version=1, blob=bytes(200))
