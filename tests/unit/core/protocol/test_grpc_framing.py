"""Length-prefixed messages however they are cut, timeouts and status numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from danube.core.protocol.grpc import (
    STATUS_NUMBERS,
    TIMEOUT_NS_MAX,
    MessageAssembler,
    frame_message,
    timeout_ns,
)


def test_a_message_byte_by_byte() -> None:
    assert frame_message(b"abc") == b"\0\0\0\0\3abc"
    assert frame_message(b"") == b"\0\0\0\0\0"


@given(st.lists(st.binary(max_size=50), max_size=6), st.data())
def test_messages_come_back_whole_wherever_they_are_cut(messages: list[bytes], draw: st.DataObject) -> None:
    stream = b"".join(map(frame_message, messages))
    cuts = sorted(draw.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    assembler, found = MessageAssembler(), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += [bytes(message) for message in assembler.take(memoryview(stream)[start:end])]
    assembler.take(memoryview(b""), ended=True)
    assert found == messages
    assert (assembler.status, assembler.held_bytes, assembler.messages_count) == ("", 0, len(messages))


def test_a_message_that_lies_whole_in_the_data_is_not_copied() -> None:
    (message,) = MessageAssembler().take(memoryview(frame_message(b"abc")))
    assert isinstance(message, memoryview)


@pytest.mark.parametrize(
    ("stream", "status", "unary"),
    [
        (b"\1\0\0\0\1x", "UNIMPLEMENTED", False),
        (b"\2\0\0\0\1x", "INTERNAL", False),
        (b"\0\0\0\0\x65" + bytes(101), "RESOURCE_EXHAUSTED", False),
        (b"\0\xff\xff\xff\xff", "RESOURCE_EXHAUSTED", False),
        (b"\0\0\0", "INTERNAL", False),
        (b"\0\0\0\0\5abc", "INTERNAL", False),
        (frame_message(b"a") * 2, "UNIMPLEMENTED", True),
        (b"", "UNIMPLEMENTED", True),
    ],
)
def test_a_stream_that_is_refused_at_every_cut(stream: bytes, status: str, unary: bool) -> None:
    for cut in range(len(stream) + 1):
        assembler = MessageAssembler(100, unary=unary)
        assembler.take(memoryview(stream)[:cut])
        assembler.take(memoryview(stream)[cut:], ended=True)
        assert assembler.status == status
        assert assembler.problem
        assert assembler.held_bytes == 0
        assert assembler.take(memoryview(frame_message(b"late"))) == []


def test_a_length_is_believed_only_as_far_as_data_has_come() -> None:
    assembler = MessageAssembler(1 << 30)
    assembler.take(memoryview(b"\0\x3f\xff\xff\xff" + b"x" * 10))
    assert assembler.held_bytes == 15


def test_two_messages_of_a_unary_call_are_both_refused_when_they_come_together() -> None:
    assembler = MessageAssembler(unary=True)
    assert assembler.take(memoryview(frame_message(b"a") * 2)) == []
    assert "two" in assembler.problem


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("1H", 3_600_000_000_000),
        ("2M", 120_000_000_000),
        ("10S", 10_000_000_000),
        ("5m", 5_000_000),
        ("7u", 7_000),
        ("99999999n", 99_999_999),
        ("0n", 0),
        ("99999999H", TIMEOUT_NS_MAX),
        ("", -1),
        ("1", -1),
        ("S", -1),
        ("123456789S", -1),
        ("-1S", -1),
        ("1 S", -1),
        ("1s", -1),
        ("1S\n", -1),
        ("١S", -1),
    ],
)
def test_timeouts(value: str, expected: int) -> None:
    assert timeout_ns(value) == expected


def test_status_numbers_are_those_of_grpc() -> None:
    grpc = pytest.importorskip("grpc")
    assert {code.name: code.value[0] for code in grpc.StatusCode} == STATUS_NUMBERS
