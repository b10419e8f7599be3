"""A temporary subscription is made anew behind what was acknowledged, and one that is stored is not."""

from __future__ import annotations

import numpy as np
import pytest

from danube.client.machine.session import Session
from danube.client.machine.subscribing import PartitionConsumer
from danube.core.batch.columns import encode
from danube.core.batch.format import stamp
from danube.core.dispatch.consumer_window import WINDOW_FIRST, ConsumerWindow
from danube.core.protocol import native as wire
from danube.core.protocol.native import Kind
from danube.errors import ConnectionFailed


class Reading:
    """A consumer whose subscription began at offset 7; the test speaks for the broker."""

    def __init__(self, *, temporary: bool = True, reliable: bool = True, obeyed: bool = True) -> None:
        self.session = Session(now_ns=lambda: 0)
        self.obeyed = obeyed
        body = wire.Subscribe(
            "/default/t", "s", "c", credit_records=WINDOW_FIRST, credit_bytes=1 << 20, temporary=temporary
        )
        self.consumer = PartitionConsumer(self.session, body, 0, reliable, ConsumerWindow(WINDOW_FIRST))
        self.session.connected()
        self.consumer.start()
        self.asked = [self.subscribe()]

    def subscribe(self) -> tuple[str, int]:
        """Answer the SUBSCRIBE; where it begins."""
        self.feed(wire.control_frame(Kind.WELCOME, wire.Welcome()))
        stream = b"".join(self.session.take_output())
        frames = list(wire.FrameDecoder().frames(stream, 0, len(stream)))
        frame = next(one for one in frames if one.kind == Kind.SUBSCRIBE)
        request = wire.decode_control(stream[frame.start : frame.end], wire.Subscribe)
        self.handle = frame.handle
        answer = wire.Subscribed(ack_floor=7, temporary=request.temporary and self.obeyed)
        self.feed(wire.control_frame(Kind.SUBSCRIBED, answer, frame.correlation, frame.handle))
        return request.start, request.start_value

    def lose(self) -> tuple[str, int]:
        """Lose the connection; where the next subscription begins."""
        self.session.disconnected(ConnectionFailed("it was killed"))
        self.session.connected()
        return self.subscribe()

    def feed(self, data: bytes) -> None:
        self.session.received(memoryview(bytearray(data)), 0, len(data))

    def deliver(self, first: int, count: int) -> None:
        whole = bytearray(encode([b"x"] * count, publish_time_us=0).to_bytes())
        stamp(whole, first, 1, 0)
        self.feed(wire.deliver_header(self.handle, len(whole), 0, count) + whole)
        batch = self.consumer.take()
        assert batch is not None and np.array_equal(batch.offsets, range(first, first + count))


def test_it_goes_on_behind_what_was_acknowledged() -> None:
    reading = Reading()
    assert reading.asked == [("latest", 0)]
    assert reading.lose() == ("offset", 7), "records that came meanwhile are not passed over"
    reading.deliver(7, 3)
    reading.consumer.ack(7)
    reading.consumer.write_acks()
    assert reading.lose() == ("offset", 8)
    reading.deliver(8, 4)
    reading.consumer.ack_ranges([(9, 11), (8, 9)])
    assert reading.lose() == ("offset", 11), "these acks had not left"
    assert reading.lose() == ("offset", 11)


def test_a_seek_forgets_what_was_acknowledged_before() -> None:
    reading = Reading()
    reading.deliver(7, 3)
    reading.consumer.ack_ranges([(7, 10)])
    reading.consumer.write_acks()
    reading.feed(wire.control_frame(Kind.SOUGHT, None, 0, reading.handle))
    assert reading.lose() == ("latest", 0)


@pytest.mark.parametrize("option", ["temporary", "reliable", "obeyed"])
def test_others_say_where_they_began(option: str) -> None:
    reading = Reading(**{option: False})
    reading.deliver(7, 3)
    reading.consumer.ack_ranges([(7, 10)])
    reading.consumer.write_acks()
    assert reading.lose() == ("latest", 0)
