"""Header blocks both ways: what we send byte by byte, what we understand against hpack itself."""

from __future__ import annotations

from base64 import b64decode
from urllib.parse import unquote

import pytest
from hpack import Decoder, Encoder
from hypothesis import given, settings
from hypothesis import strategies as st

from danube.core.http2.frames import Http2Settings
from danube.core.http2.headers import (
    GRPC_DETAILS_BYTES_MAX,
    GRPC_MESSAGE_BYTES_MAX,
    MEMORY_HEADS_MAX,
    OK_TRAILERS,
    RESPONSE_HEAD,
    RequestDecoder,
    percent_encoded,
    refusal_block,
    response_block,
    trailers_block,
)
from danube.core.http2.request import request_head
from danube.errors import ProtocolError
from tests.examples import examples
from tests.unit.http2_parts import FIELDS


def read(block: bytes) -> list[tuple[str, str]]:
    return [(name, value) for name, value in Decoder().decode(block)]


# -- what we send


def test_the_head_of_an_answer_byte_by_byte() -> None:
    assert RESPONSE_HEAD == (
        b"\x88"  # :status 200 of the static table
        b"\x1f\x10\x10application/grpc"  # content-type by its static name, never indexed
        b"\x10\x14grpc-accept-encoding\x08identity"
    )
    assert OK_TRAILERS == b"\x10\x0bgrpc-status\x010"


def test_blocks_leave_no_trace_in_a_decoder() -> None:
    decoder = Decoder()
    for block in (RESPONSE_HEAD, OK_TRAILERS, trailers_block(5, "no such topic", b"\x08\x05")):
        decoder.decode(block)
    assert not decoder.header_table.dynamic_entries


def test_trailers_carry_status_message_and_details() -> None:
    details = bytes(range(7))
    fields = dict(read(trailers_block(3, "50% of ü\n", details)))
    assert fields["grpc-status"] == "3"
    assert fields["grpc-message"] == "50%25 of %C3%BC%0A"
    assert b64decode(fields["grpc-status-details-bin"] + "==") == details


def test_details_that_clients_would_not_take_are_left_out() -> None:
    assert "grpc-status-details-bin" in dict(read(trailers_block(3, "", bytes(GRPC_DETAILS_BYTES_MAX))))
    assert "grpc-status-details-bin" not in dict(
        read(trailers_block(3, "", bytes(GRPC_DETAILS_BYTES_MAX + 1)))
    )


def test_a_refusal_is_an_http_answer_that_grpc_clients_understand() -> None:
    fields = dict(read(refusal_block(415, "the content-type is text/html")))
    assert fields[":status"] == "415"
    assert fields["grpc-status"] == "13"


@given(st.text(max_size=3000))
def test_a_message_is_printable_bounded_and_comes_back(text: str) -> None:
    if any(0xD800 <= ord(letter) < 0xE000 for letter in text):
        text = text.encode("utf-8", "replace").decode()
    encoded = percent_encoded(text)
    assert len(encoded) <= GRPC_MESSAGE_BYTES_MAX
    assert all(0x20 <= ord(letter) < 0x7F for letter in encoded)
    assert encoded == encoded.strip(" ")
    back = unquote(encoded, errors="strict") if len(encoded) < GRPC_MESSAGE_BYTES_MAX - 12 else None
    assert back is None or back == text.strip(" ")


def test_a_message_with_lone_surrogates_is_no_error() -> None:
    assert percent_encoded("\ud800") == "?"


@pytest.mark.parametrize("letter", ["a", "ü", "€", "\U0001f30a"])
@pytest.mark.parametrize("start", ["", "x", "xy"])
def test_a_long_message_is_cut_between_letters(letter: str, start: str) -> None:
    encoded = percent_encoded(start + letter * 3000)
    size = len(percent_encoded(letter))
    assert unquote(encoded, errors="strict") == start + letter * (
        (GRPC_MESSAGE_BYTES_MAX - len(start)) // size
    )


@given(
    st.lists(
        st.tuples(
            st.sampled_from([":status", "content-type", "x-a", "a" * 300]), st.text("abc \xff", max_size=400)
        )
    )
)
def test_any_field_that_we_encode_is_read_back(fields: list[tuple[str, str]]) -> None:
    decoded = Decoder(max_header_list_size=1 << 20).decode(response_block(fields), raw=True)
    assert [(name.decode(), value.decode("latin-1")) for name, value in decoded] == fields


# -- what we understand


@pytest.mark.parametrize(
    "block",
    [
        b"\x80",  # index 0
        b"\xbe",  # index 62 of an empty table
        b"\x7f",  # ends inside an integer
        b"\xff\xff\xff\xff\xff\xff\x01",  # longer than any index
        b"\x40",  # no name
        b"\x40\x01",  # half a name
        b"\x40\x01a",  # no value
        b"\x40\x01a\x05ab",  # half a value
        b"\x00\x81\xff\x00",  # padding of more than 7 bits
        b"\x00\x81\x00\x00",  # padding of zeros
        b"\x00\x84\xff\xff\xff\xff\x00",  # the end of string
        b"\x82\x20",  # a size update after a field
        b"\x3f\xe2\x1f",  # one above what we announced
    ],
)
def test_a_damaged_block_is_refused(block: bytes) -> None:
    with pytest.raises(ProtocolError):
        RequestDecoder(Http2Settings()).fields(block)


def test_fields_above_the_bounds_are_named_and_the_table_stays_right() -> None:
    requests = RequestDecoder(Http2Settings(header_fields_max=2))
    head = requests.head(b"\x82" * 2 + b"\x40\x01a\x01b")
    assert "more than 2" in head.problem and head.http_status == 431
    assert requests.fields(b"\xbe") == [("a", "b")]
    assert "more than 2" not in requests.head(b"\xbe").problem


def test_a_list_above_the_bound_is_named() -> None:
    requests = RequestDecoder(Http2Settings(header_list_bytes_max=1024))
    head = requests.head(response_block([*FIELDS, ("x-a", "a" * 3000)]))
    assert "more than 1024 bytes" in head.problem and head.http_status == 431
    assert not requests.heads and not requests._heads_by_fields


@pytest.mark.parametrize("block", [b"\xbe" * 10_000, b"\x82" * 1000])
def test_a_bomb_ends_the_connection_before_it_is_unpacked(block: bytes) -> None:
    requests = RequestDecoder(Http2Settings())
    requests.fields(b"\x40\x01a" + b"\x7f\x81\x1e" + b"v" * 3968)  # one entry that fills the table
    with pytest.raises(ProtocolError, match="header") as caught:
        requests.fields(block)
    assert caught.value.facts["code"] == 11


def test_a_block_that_resizes_the_table_forgets_what_blocks_meant() -> None:
    requests = RequestDecoder(Http2Settings())
    requests.head(response_block(FIELDS))
    requests.fields(b"\x20" + response_block([("x-a", "b")]))
    assert requests.heads == {}


# -- the memory of heads


def plain(fields: list[tuple[str, str]]) -> list[object]:
    head = request_head(fields)
    return [head.path, head.fields, head.malformed, head.problem, head.content_length]


REQUESTS = st.lists(
    st.tuples(
        st.lists(
            st.sampled_from(
                [("x-a", "1"), ("x-b", "2"), ("grpc-timeout", "5S"), ("grpc-timeout", "7m"),
                 ("grpc-timeout", "?"), (":path", "/other"), ("content-length", "4")]
            ),
            max_size=3,
        ),
        st.booleans(),
        st.booleans(),
        st.integers(0, 6),
    ),
    max_size=30,
)  # fmt: skip


@settings(max_examples=examples(300))
@given(REQUESTS)
def test_a_remembered_head_is_the_head_that_decoding_gives(
    requests: list[tuple[list[tuple[str, str]], bool, bool, int]],
) -> None:
    encoder, theirs, ours = Encoder(), Decoder(), RequestDecoder(Http2Settings())
    for more, indexed, resize, place in requests:
        if resize:
            encoder.header_table_size = 4096 - encoder.header_table_size or 100
        fields = FIELDS[:place] + more + FIELDS[place:]
        block = encoder.encode([(name, value, not indexed) for name, value in fields])
        expected = plain([(name, value) for name, value in theirs.decode(block)])
        head = ours.head(block)
        assert [head.path, head.fields, head.malformed, head.problem, head.content_length] == expected


def test_equal_blocks_share_one_head_until_the_table_changes() -> None:
    requests = RequestDecoder(Http2Settings())
    block = response_block(FIELDS)
    head = requests.head(block)
    assert requests.head(block) is head
    requests.head(response_block(FIELDS) + b"\x40\x01a\x01b")
    assert requests.heads == {}
    again = requests.head(block)
    assert again is head, "known by its fields"


def test_heads_that_differ_only_in_their_deadline_share_what_was_judged() -> None:
    requests, encoder = RequestDecoder(Http2Settings()), Encoder()
    heads = [requests.head(encoder.encode([*FIELDS, ("grpc-timeout", f"{1000 + at}m")])) for at in range(3)]
    assert [head.fields["grpc-timeout"] for head in heads] == ["1000m", "1001m", "1002m"]
    assert all(head.path == "/danube.Topic/Ask" and not head.malformed for head in heads)
    assert len(requests._heads_by_fields) == 1


def test_the_memory_is_bounded_and_can_be_given_back() -> None:
    requests = RequestDecoder(Http2Settings())
    for at in range(MEMORY_HEADS_MAX * 3):
        requests.head(response_block([*FIELDS, ("x-a", str(at))]))
    assert 0 < len(requests.heads) <= MEMORY_HEADS_MAX
    assert len(requests._heads_by_fields) <= MEMORY_HEADS_MAX
    before = len(requests.heads)
    requests.head(response_block([*FIELDS, ("x-a", "long" * 1000)]))
    assert len(requests.heads) == before, "what is large is not remembered"
    requests.forget()
    assert not requests.heads and not requests._heads_by_fields
