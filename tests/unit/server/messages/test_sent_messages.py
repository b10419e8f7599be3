"""Messages of a turn read together say what the generated class reads in each."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from danube.core import kernels
from danube.errors import InvalidArgument
from danube.server.messages.sent_messages import (
    FEW,
    TURN_BYTES_MAX,
    TURN_MESSAGES_MAX,
    Lot,
    parsed,
    read_together,
)
from danube.server.proto.DanubeApi_pb2 import MsgID, StreamMessage

pytestmark = pytest.mark.usefixtures("with_kernels")
U64 = st.integers(0, 2**64 - 1) | st.integers(0, 300)
PLACE = MsgID(producer_id=2**63 + 7, topic_name="/default/t", broker_addr="http://h:1")


def sent(number: int, **fields: object) -> bytes:
    given: dict[str, object] = {
        "request_id": number, "msg_id": PLACE, "payload": b"%d" % number, "publish_time": 1_700_000_000_000,
        "producer_name": "p", **fields,
    }  # fmt: skip
    return StreamMessage(**given).SerializeToString()


def check(lots: list[Lot], datas: list[bytes]) -> None:
    """Each message is in one lot, as the generated class reads it."""
    seen: list[int] = []
    for lot in lots:
        messages = list(lot.columns.one_by_one())
        assert len(lot.indices) == len(messages)
        for index, (payload, time_ms, request_id, key, attributes) in zip(lot.indices, messages, strict=True):
            message = parsed(datas[index])
            assert (payload, time_ms, request_id) == (
                message.payload,
                message.publish_time,
                message.request_id,
            )
            assert key is attributes is None and not message.HasField("routing_key")
            for name in ("msg_id", "producer_name"):
                assert getattr(message, name) == getattr(lot.first, name)
            for name in ("schema_id", "schema_version"):
                assert message.HasField(name) == lot.first.HasField(name)
                assert getattr(message, name) == getattr(lot.first, name)
        sizes = [len(payload) for payload, *_ in messages]
        assert (lot.columns.payloads.total, lot.columns.largest) == (sum(sizes), max(sizes))
        assert lot.columns.latest_ms == max(time_ms for _, time_ms, *_ in messages)
        assert lot.columns.one_time == (len({time_ms for _, time_ms, *_ in messages}) == 1)
        assert lot.columns.identified == any(request_id for _, _, request_id, *_ in messages)
        seen += lot.indices
    assert sorted(seen) == list(range(len(datas)))


@given(
    st.lists(
        st.tuples(U64, st.binary(max_size=300), st.integers(0, 2**63 - 1) | st.just(7)),
        min_size=FEW,
        max_size=40,
    ),
    st.none() | U64,
    st.none() | st.integers(0, 2**32 - 1),
    st.text(max_size=200),
)
@settings(max_examples=200)
def test_every_message_is_what_was_sent(
    own: list[tuple[int, bytes, int]], schema_id: int | None, schema_version: int | None, name: str
) -> None:
    datas = [
        sent(
            number, payload=payload, publish_time=time_ms, producer_name=name, schema_id=schema_id,
            schema_version=schema_version,
        )
        for number, payload, time_ms in own
    ]  # fmt: skip
    lots = read_together(datas)
    assert lots is not None and len(lots) == 1
    check(lots, datas)


def test_producers_are_told_apart() -> None:
    datas = [sent(number, producer_name="pqr"[number // 8 % 3]) for number in range(96)]
    lots = read_together(datas)
    assert lots is not None and [lot.first.producer_name for lot in lots] == ["p", "q", "r"]
    assert lots[1].indices == [number for number in range(96) if number // 8 % 3 == 1]
    check(lots, datas)


def test_a_message_of_another_topic_is_its_own_lot() -> None:
    other = MsgID(producer_id=1, topic_name="/default/u")
    datas = [sent(number, msg_id=other if number > 20 else PLACE) for number in range(30)]
    lots = read_together(datas)
    assert lots is not None and [lot.first.msg_id.topic_name for lot in lots] == ["/default/t", "/default/u"]
    check(lots, datas)


GOOD = sent(5)
UNUSUAL = {
    "attributes": sent(5, attributes={"a": "b"}),
    "a routing key": sent(5, routing_key="k"),
    "a schema of its own": sent(5, schema_id=9),
    "no place": StreamMessage(request_id=5, payload=b"x", producer_name="p").SerializeToString(),
    "nothing": b"",
    "no protobuf": b"\xff\xff",
    "cut off in its place": GOOD[:9],
    "cut off in its payload": GOOD[: GOOD.index(b"\x1a") + 2],
    "cut off in its time": GOOD[: GOOD.index(b"\x20", 40) + 3],
    "cut off in its name": GOOD[:-1],
    "a name that is no text": GOOD[:-1] + b"\xff",
    "an unknown field": GOOD + b"\x78\x01",
    "a payload again behind the name": GOOD + b"\x1a\x01z",
    "a request id again behind the name": GOOD + b"\x08\x07",
    "fields the other way round": b"\x2a\x01p" + GOOD[:-3],
    "a time beyond 2**63": sent(5, publish_time=2**63),
    "a number of eleven bytes": b"\x08" + b"\x80" * 10 + b"\x01" + GOOD[2:],
    "a number beyond 64 bits": b"\x08" + b"\xff" * 9 + b"\x02" + GOOD[2:],
    "a size beyond the end": b"\x08\x05\x12\x7f" + GOOD[4:],
    "a size beyond 63 bits": b"\x08\x05\x12" + b"\xff" * 9 + b"\x01" + GOOD[4:],
}


@pytest.mark.parametrize("name", UNUSUAL)
@pytest.mark.parametrize("place", ["first", "among others", "all"])
def test_the_unusual_is_read_one_by_one(name: str, place: str) -> None:
    others = [sent(number) for number in range(31)]
    datas = {
        "first": [UNUSUAL[name], *others],
        "among others": [*others[:15], UNUSUAL[name], *others[15:]],
        "all": [UNUSUAL[name]] * 32,
    }[place]
    lots = read_together(datas)
    if lots is not None:  # then it is right all the same
        check(lots, datas)


def test_a_run_that_may_mean_something_else_is_not_believed() -> None:
    """All but the first are read by what the first says, so that one must not say it in two places."""
    for unusual in (
        "a payload again behind the name", "a request id again behind the name", "attributes",
        "a routing key", "a name that is no text", "no place", "nothing",
    ):  # fmt: skip
        assert read_together([UNUSUAL[unusual]] * 32) is None


def test_any_bytes_are_read_rightly_or_one_by_one(source: random.Random) -> None:
    together = 0
    for _ in range(3_000):
        datas = [bytearray(sent(source.randrange(2**64), payload=source.randbytes(9))) for _ in range(FEW)]
        one = source.choice(datas)
        for _ in range(source.choice([0, 1, 1, 3])):
            one[source.randrange(len(one))] = source.randrange(256)
        if source.random() < 0.3:
            datas = [one] * FEW
        messages = [bytes(data) for data in datas]
        lots = read_together(messages)
        together += lots is not None
        if lots is not None:
            check(lots, messages)
    assert together > 300


def test_much_is_read_one_by_one() -> None:
    assert read_together([sent(1, payload=bytes(TURN_BYTES_MAX // FEW))] * FEW) is None
    assert read_together([b"\x12\0"] * (TURN_MESSAGES_MAX + 1)) is None
    kernels.unload()
    assert read_together([sent(1)] * FEW) is None


def test_one_message_that_is_none_is_named() -> None:
    with pytest.raises(InvalidArgument, match=r"not a danube\.StreamMessage"):
        parsed(b"\xff")
