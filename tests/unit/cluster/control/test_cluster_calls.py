"""What members ask each other: bytes that nobody sound sends are refused, and end nothing."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from danube.cluster.control.calls import SentOutcome, decode_answer, decode_outcomes, decode_request
from danube.cluster.links.frames import MAGIC, GreetingReader, Refused
from danube.core.metadata.commands import decode_commands
from danube.errors import DanubeError, ProtocolError

NO_TEXT = b"\xa1\xff"  # a string of MessagePack that is not UTF-8
DEEP = b"\x91" * 5_000  # a list in a list in a list


def tagged(tag: bytes, rest: bytes) -> bytes:
    """A struct of this tag with one more field, whose name and value are given."""
    return b"\x82\xa4type" + bytes([0xA0 | len(tag)]) + tag + rest


UNREADABLE = [
    b"",
    b"\xc1",
    b"\x80",
    tagged(b"join", b"\xa7node_id" + NO_TEXT),
    tagged(b"join", NO_TEXT + b"\x01"),
    tagged(b"status", b"\xa1x" + DEEP),
    tagged(b"introduction", b"\xa7node_id" + NO_TEXT),
    tagged(b"failed", b"\xa5error" + DEEP),
]


@pytest.mark.parametrize("decode", [decode_request, decode_answer])
@pytest.mark.parametrize("body", UNREADABLE)
def test_what_no_member_sends_is_a_protocol_error(decode: Callable[[bytes], object], body: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(body)


@pytest.mark.parametrize("record", [NO_TEXT, DEEP, b"\x82\xa5topic" + NO_TEXT])
def test_an_outcome_that_cannot_be_read_is_a_protocol_error(record: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_outcomes([SentOutcome("TopicRecord", msgspec.Raw(record))])


@pytest.mark.parametrize("command", [NO_TEXT, DEEP, b"\x81\xa4kind" + NO_TEXT])
def test_commands_that_cannot_be_read_are_an_error_of_ours(command: bytes) -> None:
    with pytest.raises(DanubeError):
        decode_commands(b"\x91" + command)


@pytest.mark.parametrize("body", [b"\x81\xa7cluster" + NO_TEXT, b"\x81\xa1x" + b"\x91" * 1_020])
def test_a_greeting_that_cannot_be_read_is_garbage(body: bytes) -> None:
    with pytest.raises(Refused, match="garbage"):
        GreetingReader().feed(MAGIC + len(body).to_bytes(2, "little") + body)
