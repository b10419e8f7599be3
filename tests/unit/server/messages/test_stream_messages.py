"""StreamMessages out of batches and batches out of StreamMessages, against the generated class."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from danube.core.batch.columns import BatchView, encode
from danube.core.batch.format import HEADER_BYTES, Compression, read_header, stamp
from danube.core.batch.selection import select
from danube.errors import InvalidArgument, LimitExceeded, ProtocolError, RecordTooLarge
from danube.limits import KEY_BYTES_MAX
from danube.server.messages.sent_messages import PUBLISH_TIME_MS_MAX, Message, encode_messages, own_fields_of
from danube.server.messages.stream_messages import framed_messages, varint
from danube.server.proto.DanubeApi_pb2 import MsgID, StreamMessage

TOPIC = "/default/orders-part-3"
U64 = st.integers(0, 2**64 - 1) | st.sampled_from([0, 127, 128, 2**14 - 1, 2**14, 2**21, 2**63, 2**64 - 1])
_RECORD = st.fixed_dictionaries(
    {
        "payload": st.binary(max_size=300),
        "key": st.none() | st.binary(max_size=9),
        "attributes": st.dictionaries(st.text(max_size=5), st.text(max_size=200), max_size=3),
        "time": st.integers(-(2**63), 2**63 - 1) | st.integers(0, 2**51),
        "request": U64,
    }
)


def parse(framed: bytes) -> list[StreamMessage]:
    """Messages behind their five bytes; nothing may be left over."""
    messages = []
    position = 0
    while position < len(framed):
        compressed, size = struct.unpack_from(">BI", framed, position)
        assert compressed == 0
        position += 5
        assert position + size <= len(framed)
        messages.append(StreamMessage.FromString(framed[position : position + size]))
        position += size
    return messages


def expected(view: BatchView, topic: str, producer_id: int) -> list[StreamMessage]:
    """The same by the generated class, field by field."""
    request_ids = view.request_ids
    messages = []
    for index in range(view.record_count):
        message = StreamMessage(
            request_id=0 if request_ids is None else int(request_ids[index]),
            msg_id=MsgID(
                producer_id=producer_id,
                topic_name=topic,
                broker_addr=view.origin,
                topic_offset=int(view.offsets[index]),
            ),
            payload=view.payload(index),
            publish_time=max(int(view.publish_times[index]) // 1000, 0),
            producer_name=view.producer_name,
            attributes=view.attributes(index),
            schema_id=view.schema_id,
            schema_version=view.schema_version,
        )
        key = view.key(index)
        if key is not None:
            message.routing_key = key.decode(errors="backslashreplace")
        messages.append(message)
    return messages


@st.composite
def batches(draw: st.DrawFn) -> bytes:
    records = draw(st.lists(_RECORD, min_size=1, max_size=1) | st.lists(_RECORD, min_size=1, max_size=30))
    options: dict[str, Any] = {"payloads": [record["payload"] for record in records]}
    for name, source in (
        ("keys", "key"),
        ("attributes", "attributes"),
        ("publish_times", "time"),
        ("request_ids", "request"),
    ):
        if draw(st.booleans()):
            options[name] = [record[source] for record in records]
    stored = bytearray(
        encode(
            publish_time_us=draw(st.integers(-(2**63), 2**63 - 1)),
            producer_name=draw(st.text(max_size=200)),
            origin=draw(st.text(max_size=200)),
            schema_id=draw(st.none() | U64),
            schema_version=draw(st.none() | st.integers(0, 2**32 - 1)),
            compression=draw(st.sampled_from([Compression.NONE, Compression.LZ4])),
            **options,
        ).to_bytes()
    )
    stamp(stored, draw(st.integers(0, 2**62)), 3, 5)
    if draw(st.booleans()):
        chosen = draw(st.lists(st.integers(0, len(records) - 1), min_size=1, unique=True).map(sorted))
        return select(bytes(stored), read_header(stored), np.array(chosen))
    return bytes(stored)


@given(batches(), U64)
@settings(max_examples=200)
def test_messages_are_those_of_the_generated_class(stored: bytes, producer_id: int) -> None:
    framed = framed_messages(BatchView(stored), TOPIC, producer_id)
    assert parse(framed) == expected(BatchView(stored), TOPIC, producer_id)


@given(U64)
def test_varint_is_the_shortest(number: int) -> None:
    encoded = varint(number)
    assert encoded == (MsgID(topic_offset=number).SerializeToString()[1:] if number else b"\0")


def test_golden_bytes() -> None:
    stored = bytearray(
        encode(
            [b"payload", b""],
            producer_name="p",
            origin="http://h:1",
            publish_time_us=1_700_000_000_123_456,
            request_ids=[1, 0],
            keys=[b"", None],
            schema_id=0,
            schema_version=2,
        ).to_bytes()
    )
    stamp(stored, 300, 0, 0)
    constant = bytes.fromhex("2a0170" "4000" "4802" "20fbd095ffbc31")  # fmt: skip
    place = b"\x08\x07\x12\x04/d/t\x1a\x0ahttp://h:1\x28"
    first = constant + b"\x52\0" + b"\x12\x17" + place + b"\xac\x02" + b"\x08\x01" + b"\x1a\x07payload"
    second = constant + b"\x12\x17" + place + b"\xad\x02"
    assert framed_messages(BatchView(stored), "/d/t", 7) == b"".join(
        b"\0" + len(each).to_bytes(4, "big") + each for each in (first, second)
    )


def test_absent_and_empty_stay_apart() -> None:
    stored = encode([b"a", b"b", b"c"], keys=[None, b"", b"k"], publish_time_us=0).to_bytes()
    messages = parse(framed_messages(BatchView(stored), TOPIC, 1))
    assert [message.HasField("routing_key") for message in messages] == [False, True, True]
    assert [message.routing_key for message in messages] == ["", "", "k"]
    assert not any(
        message.HasField("schema_id") or message.HasField("schema_version") for message in messages
    )
    assert all(message.HasField("msg_id") and message.subscription_name == "" for message in messages)


def test_a_key_that_is_not_text_is_shown_with_its_bytes() -> None:
    stored = encode([b"a"], keys=[b"ok-\xff\xc3\xa9"], publish_time_us=0).to_bytes()
    [message] = parse(framed_messages(BatchView(stored), TOPIC, 1))
    assert message.routing_key == "ok-\\xffé"


@pytest.mark.parametrize("position", [HEADER_BYTES, HEADER_BYTES + 4])
def test_names_that_are_not_text_are_refused(position: int) -> None:
    stored = bytearray(encode([b"a"], producer_name="name", origin="from", publish_time_us=0).to_bytes())
    stored[position] = 0xFF
    with pytest.raises(ProtocolError, match="not UTF-8"):
        framed_messages(BatchView(stored), TOPIC, 1)


def test_columns_that_lie_are_refused() -> None:
    stored = bytearray(encode([b"a", b"b"], publish_time_us=0).to_bytes())
    stored[HEADER_BYTES + 4] = 9  # the end of the first payload
    with pytest.raises(ProtocolError):
        framed_messages(BatchView(stored), TOPIC, 1)


def test_a_key_column_that_lies_is_refused() -> None:
    whole = encode([b"p"], keys=[b"k"], publish_time_us=0).to_bytes()
    layout = BatchView(whole).layout
    for end in (0, 2, -1):
        stored = bytearray(whole)
        struct.pack_into("<i", stored, HEADER_BYTES + layout.key_offsets + 4, end)
        with pytest.raises(ProtocolError):
            framed_messages(BatchView(stored), TOPIC, 1)


# -- the other way ----------------------------------------------------------------------------------


def own(messages: Sequence[StreamMessage]) -> list[Message]:
    return [own_fields_of(one) for one in messages]


_MESSAGE = st.builds(
    StreamMessage,
    request_id=U64,
    payload=st.binary(max_size=60),
    publish_time=st.integers(0, PUBLISH_TIME_MS_MAX) | st.sampled_from([0, 1_700_000_000_000]),
    attributes=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
    routing_key=st.none() | st.text(max_size=9),
)


@given(
    st.lists(_MESSAGE, min_size=1, max_size=20),
    st.none() | U64,
    st.none() | st.integers(0, 2**32 - 1),
)
@settings(max_examples=150)
def test_messages_come_back_as_they_were_sent(
    messages: list[StreamMessage], schema_id: int | None, schema_version: int | None
) -> None:
    batch = encode_messages(
        own(messages),
        producer_name="p",
        origin="http://h:1",
        schema_id=schema_id,
        schema_version=schema_version,
    )
    stored = bytearray(batch.to_bytes())
    stamp(stored, 2**40, 0, 0)
    for index, message in enumerate(messages):
        message.producer_name = "p"
        message.msg_id.producer_id = 5
        message.msg_id.topic_name = TOPIC
        message.msg_id.broker_addr = "http://h:1"
        message.msg_id.topic_offset = 2**40 + index
        if schema_id is not None:
            message.schema_id = schema_id
        if schema_version is not None:
            message.schema_version = schema_version
    assert parse(framed_messages(BatchView(stored), TOPIC, 5)) == messages


def test_columns_that_nobody_needs_are_left_out() -> None:
    messages = [StreamMessage(payload=b"x", publish_time=7) for _ in range(3)]
    for count in (1, 3):
        batch = encode_messages(own(messages[:count]), producer_name="p", origin="o")
        bare = encode([b"x"] * count, producer_name="p", origin="o", publish_time_us=7_000)
        assert batch.to_bytes() == bare.to_bytes()


@pytest.mark.parametrize("count", [1, 3])
def test_a_time_that_does_not_fit_is_refused_with_its_index(count: int) -> None:
    messages = [StreamMessage(payload=b"x", publish_time=7) for _ in range(count)]
    messages[-1].publish_time = PUBLISH_TIME_MS_MAX + 1
    with pytest.raises(InvalidArgument, match="publish_time") as caught:
        encode_messages(own(messages), producer_name="p", origin="o")
    assert caught.value.facts["index"] == count - 1
    messages[-1].publish_time = PUBLISH_TIME_MS_MAX
    encode_messages(own(messages), producer_name="p", origin="o")


@pytest.mark.parametrize("count", [1, 3])
def test_what_the_batch_refuses_names_the_message(count: int) -> None:
    messages = [StreamMessage(payload=b"x") for _ in range(count)]
    messages[-1].routing_key = "k" * (KEY_BYTES_MAX + 1)
    with pytest.raises(RecordTooLarge) as large:
        encode_messages(own(messages), producer_name="p", origin="o")
    assert large.value.facts["index"] == count - 1
    messages[-1].routing_key = "k"
    messages[-1].attributes.update({str(number): "" for number in range(65)})
    with pytest.raises(LimitExceeded) as many:
        encode_messages(own(messages), producer_name="p", origin="o")
    assert many.value.facts["index"] == count - 1
