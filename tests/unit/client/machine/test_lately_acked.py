"""A redelivery that crossed its ack: what this client acked is not handed out again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from danube.client.machine.reply import Reply
from danube.client.machine.sent_acks import KEPT_NS, RANGES_MAX, LatelyAcked
from danube.client.machine.session import Session
from danube.client.machine.subscribing import PartitionConsumer
from danube.client.records.inbox import Inbox
from danube.client.records.message import Batch, Message
from danube.core.batch.columns import encode
from danube.core.batch.format import read_header, stamp
from danube.core.batch.selection import select
from danube.core.dispatch.consumer_window import WINDOW_FIRST, ConsumerWindow
from danube.core.protocol import native as wire
from danube.core.protocol.native import FrameFlag, Kind
from danube.errors import ConnectionFailed

SECOND = 1_000_000_000


class Line:
    """A consumer of one partition with its inbox; the test speaks for the broker."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.session = Session(now_ns=lambda: self.now_ns)
        self.session.connected()
        body = wire.Subscribe("/default/t", "s", "c", credit_records=WINDOW_FIRST, credit_bytes=1 << 20)
        self.consumer = PartitionConsumer(self.session, body, 0, True, ConsumerWindow(WINDOW_FIRST))
        self.inbox: Inbox[Any, Any] = Inbox("/default/t", [self.consumer], Message, Batch)
        self.consumer.start()
        self.subscribe()

    def subscribe(self) -> None:
        self.feed(wire.control_frame(Kind.WELCOME, wire.Welcome()))
        frame = next(frame for frame, _ in self.sent() if frame.kind == Kind.SUBSCRIBE)
        self.handle = frame.handle
        answer = wire.Subscribed(ack_timeout_ms=800)
        self.feed(wire.control_frame(Kind.SUBSCRIBED, answer, frame.correlation, frame.handle))

    def reconnect(self) -> None:
        """The broker was killed: it knows neither the last acks nor what it had delivered."""
        self.session.disconnected(ConnectionFailed("it was killed"))
        self.session.connected()
        self.subscribe()

    def confirm(self, correlation: int) -> None:
        self.feed(wire.result_frame(None, correlation))

    def feed(self, data: bytes) -> None:
        self.session.received(memoryview(bytearray(data)), 0, len(data))

    def sent(self) -> list[tuple[wire.Frame, bytes]]:
        stream = b"".join(self.session.take_output())
        return [
            (one, stream[one.start : one.end]) for one in wire.FrameDecoder().frames(stream, 0, len(stream))
        ]

    def acks(self) -> list[tuple[int, int]]:
        return [
            (int(start), int(end))
            for frame, body in self.sent()
            if frame.kind == Kind.ACK
            for start, end in np.frombuffer(body, "<u8").reshape(-1, 2)
        ]

    def deliver(self, *offsets: int, again: int = 0) -> None:
        """Offsets of one batch, ascending."""
        count = offsets[-1] - offsets[0] + 1
        payloads = [b"%d" % (offsets[0] + one) for one in range(count)]
        whole = bytearray(encode(payloads, publish_time_us=0).to_bytes())
        stamp(whole, offsets[0], 1, 0)
        chosen = np.array(offsets, np.int64) - offsets[0]
        data = whole if len(offsets) == count else select(whole, read_header(whole), chosen)
        self.feed(wire.deliver_header(self.handle, len(data), again, len(offsets)) + data)

    def seek(self) -> None:
        self.feed(wire.control_frame(Kind.SOUGHT, None, 0, self.handle))

    def batch(self) -> Any:
        return self.inbox.next_batch(None, 0)[0]

    def messages(self) -> Iterator[Message]:
        while True:
            yield from self.inbox.messages
            if not self.inbox.advance():
                return


def test_what_was_acked_is_not_handed_out_again() -> None:
    line = Line()
    line.deliver(0, 1, 2, 3)
    line.deliver(1, 2, 3, again=1)  # it came late: all three wait here twice
    seen = []
    for message in line.messages():
        seen.append(message.offset)
        message.ack_nowait()
    assert seen == [0, 1, 2, 3]
    assert line.acks() == [(0, 4), (1, 4)], "the first ack may have come too late"


def test_what_of_a_redelivery_was_not_acked_is_handed_out() -> None:
    line = Line()
    line.deliver(0, 1, 2, 3)
    messages = line.messages()
    first = [next(messages) for _ in range(4)]
    first[1].ack_nowait()
    first[3].nack_nowait()
    line.deliver(0, 1, 3, again=1)
    assert [(message.offset, message.payload) for message in messages] == [(0, b"0"), (3, b"3")]


def test_batches_leave_out_what_was_acked() -> None:
    line = Line()
    line.deliver(0, 1, 2)
    line.batch().ack_nowait()
    line.deliver(0, 1, 2, again=1)
    assert line.inbox.next_batch(None, 0) == (None, None)
    line.deliver(1, 2, again=2)
    line.deliver(3)
    assert line.batch().offsets.tolist() == [3]
    line.deliver(2, again=3)
    assert line.inbox.next_batch(10, SECOND) == (None, line.now_ns + SECOND)
    line.now_ns += 2 * SECOND
    assert line.inbox.next_batch(10, SECOND) == (None, None)


def test_records_that_somebody_wants_to_see_again_are_handed_out() -> None:
    line = Line()
    line.deliver(0, 1, 2)
    for message in line.messages():
        message.ack_nowait()
    line.seek()
    line.deliver(0)
    line.deliver(1, 2, again=1)
    assert [message.offset for message in line.messages()] == [0, 1, 2]


def asked_to_store(line: Line) -> tuple[Reply, int]:
    """Ask for a sync; its reply, and the number that the broker answers to."""
    (reply,) = line.inbox.synced()
    (correlation,) = [frame.correlation for frame, _ in line.sent() if frame.flags & FrameFlag.SYNC]
    return reply, correlation


def test_what_was_acked_before_a_broker_was_killed_does_not_come_after_the_ack_is_confirmed() -> None:
    line = Line()
    line.deliver(0, 1, 2, 3, 4)
    messages = line.messages()
    for _ in range(3):
        next(messages).ack_nowait()
    line.acks()  # they left, and nobody stored them
    line.reconnect()
    line.deliver(0, 1)
    line.deliver(2, 3, 4)
    again = line.messages()
    assert next(again).offset == 0, "no ack was confirmed yet"
    reply, correlation = asked_to_store(line)
    line.deliver(5, 6)
    line.confirm(correlation)
    assert reply.value is None and reply.settled
    assert [message.offset for message in again] == [3, 4, 5, 6]


def test_batches_leave_out_what_was_acked_before_a_broker_was_killed() -> None:
    line = Line()
    line.deliver(0, 1, 2, 3)
    line.inbox.next_batch(3, 0)[0].ack_nowait()
    line.acks()
    line.reconnect()
    line.deliver(0, 1, 2, 3)
    assert line.inbox.next_batch(1, 0)[0].offsets.tolist() == [0]
    _, correlation = asked_to_store(line)
    line.confirm(correlation)
    assert line.inbox.next_batch(10, 0)[0].offsets.tolist() == [3]


def test_no_empty_batch_is_made_of_what_was_acked_before_a_broker_was_killed() -> None:
    line = Line()
    line.deliver(0, 1, 2)
    line.batch().ack_nowait()
    line.acks()
    line.reconnect()
    line.deliver(1, 2)
    _, correlation = asked_to_store(line)
    line.confirm(correlation)
    assert line.inbox.next_batch(10, 0) == (None, None)


def test_what_was_acked_while_there_was_no_connection_does_not_come_again() -> None:
    line = Line()
    line.deliver(0, 1, 2, 3)
    handed = [next(line.messages()) for _ in range(4)]
    line.session.disconnected(ConnectionFailed("it was killed"))
    handed[2].ack_nowait()
    handed[0].ack_nowait()
    line.session.connected()
    line.subscribe()
    line.deliver(0, 1, 2, 3)
    assert [message.offset for message in line.messages()] == [1, 3]


def test_acks_that_were_sent_late_do_not_answer_for_ever() -> None:
    line = Line()
    line.deliver(0, 1, 2)
    message = next(line.messages())
    line.session.disconnected(ConnectionFailed("it was killed"))
    message.ack_nowait()
    line.session.connected()
    line.subscribe()
    line.acks()
    line.now_ns += KEPT_NS + 1
    line.deliver(0, 1, 2)
    assert [message.offset for message in line.messages()] == [0, 1, 2]


def test_what_is_sought_back_to_after_acks_were_sent_again_is_handed_out() -> None:
    line = Line()
    line.deliver(0, 1, 2)
    line.batch().ack_nowait()
    line.acks()
    line.reconnect()
    _, correlation = asked_to_store(line)
    line.seek()
    line.deliver(0, 1, 2)
    line.confirm(correlation)
    assert line.batch().offsets.tolist() == [0, 1, 2]


def test_records_of_waiting_keys_change_nothing_though_they_come_behind_higher_ones() -> None:
    line = Line()
    line.deliver(0, 1, 2, 3, 4)
    for message in line.messages():
        if message.offset != 3:
            message.ack_nowait()
    line.acks()
    line.reconnect()
    line.deliver(5)
    line.deliver(0, 1, 2, 3, 4)
    _, correlation = asked_to_store(line)
    line.deliver(3, 4)
    line.confirm(correlation)
    assert [message.offset for message in line.messages()] == [5, 3, 3]


def test_only_a_moment_is_kept() -> None:
    lately = LatelyAcked()
    lately.acked([(0, 5)], 0)
    lately.acked([(7, 8)], KEPT_NS + 1)
    assert lately._among(np.arange(9)).tolist() == [False] * 7 + [True, False]
    for start in range(0, 4 * RANGES_MAX, 4):
        lately.acked([(start, start + 1), (start + 2, start + 3)], KEPT_NS + 2)
    assert lately._range_count <= RANGES_MAX
    lately.clear()
    assert not lately._among(np.arange(9)).any()


def test_credit_goes_back_when_the_application_asks_for_more() -> None:
    line = Line()
    line.deliver(*range(WINDOW_FIRST))
    messages = line.messages()
    for _ in range(WINDOW_FIRST):
        next(messages).ack_nowait()
    assert [frame.kind for frame, _ in line.sent()] == [Kind.ACK]
    line.now_ns += SECOND // 100
    assert next(messages, None) is None
    given = [wire.decode_credit(body)[0] for frame, body in line.sent() if frame.kind == Kind.CREDIT]
    assert given == [2 * WINDOW_FIRST], "its records, and as many more"


def test_a_slow_application_has_one_record_at_a_time() -> None:
    """The window is worth an eighth of the ack timeout: 100 ms; each record takes a second."""
    line = Line()
    sent, given, handled = 0, WINDOW_FIRST, 0
    while handled < 60:
        if given > 0:
            line.deliver(*range(sent, sent + given))
            sent, given = sent + given, 0
        for message in line.messages():
            line.now_ns += SECOND
            handled += 1
            message.ack_nowait()
        given += sum(wire.decode_credit(body)[0] for frame, body in line.sent() if frame.kind == Kind.CREDIT)
    assert line.consumer._window.records == 1 and sent - handled <= 1
