"""The client's protocol machine, driven by hand: no socket, no clock, no loop."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from danube.client.machine.address import Address, parse_url
from danube.client.machine.paging import WHOLE, Page, page_of, whole_list
from danube.client.machine.publishing import UNACKED_BATCHES_MAX, Outgoing, PartitionProducer
from danube.client.machine.session import REFUSALS_MAX, Session
from danube.core.batch.columns import BatchView, encode
from danube.core.batch.format import body_intact
from danube.core.protocol import native as wire
from danube.core.protocol.native import Frame, Kind
from danube.errors import (
    ClosedError,
    ConnectionFailed,
    Draining,
    Fenced,
    InvalidArgument,
    LimitExceeded,
    OperationTimeout,
    OwnerMoved,
    ProtocolError,
    SequenceGap,
    StorageFull,
    TopicNotFound,
)

SECOND_NS = 1_000_000_000


class Peer:
    """The broker's end, by hand: reads what the session wrote and feeds it frames."""

    def __init__(self, **options: Any) -> None:
        self.time_ns = 0
        self.session = Session(now_ns=lambda: self.time_ns, jitter=lambda: 1.0, **options)

    def sent(self) -> list[tuple[Frame, bytes]]:
        stream = b"".join(self.session.take_output())
        decoder = wire.FrameDecoder()
        frames = [(one, stream[one.start : one.end]) for one in decoder.frames(stream, 0, len(stream))]
        assert decoder.position == len(stream)
        return frames

    def feed(self, *frames: bytes) -> None:
        stream = b"".join(frames)
        assert self.session.received(memoryview(bytearray(stream)), 0, len(stream)) == len(stream)

    def connect(self, publish_credit_bytes: int = 0) -> None:
        self.session.connected()
        assert [one.kind for one, _ in self.sent()] == [Kind.HELLO]
        welcome = wire.Welcome(publish_credit_bytes=publish_credit_bytes)
        self.feed(wire.control_frame(Kind.WELCOME, welcome))

    def lose(self) -> None:
        self.session.disconnected(ConnectionFailed("lost"))

    def pass_time(self, seconds: float) -> None:
        self.time_ns += int(seconds * SECOND_NS)
        self.session.on_time()

    def producer(self, timeout_s: int = 30) -> PartitionProducer:
        producer = PartitionProducer(self.session, "p", "/default/t", 0, timeout_s * SECOND_NS)
        producer.start()
        return producer

    def open(self, producer_id: int, epoch: int, next_sequence: int = 0) -> wire.OpenProducer:
        """Answer the OPEN_PRODUCER that was sent last; return what it asked."""
        frame, body = next(one for one in reversed(self.sent()) if one[0].kind == Kind.OPEN_PRODUCER)
        opened = wire.ProducerOpened(producer_id, epoch, next_sequence)
        self.feed(wire.control_frame(Kind.PRODUCER_OPENED, opened, frame.correlation, frame.handle))
        return wire.decode_control(body, wire.OpenProducer)

    def published(self) -> list[tuple[int, Frame, BatchView]]:
        """The PUBLISH frames that were sent: base sequence, frame, batch."""
        found = []
        for frame, body in self.sent():
            if frame.kind == Kind.PUBLISH:
                view = BatchView(body)
                assert body_intact(body, view.header)
                found.append((view.header.base_sequence, frame, view))
        return found

    def acknowledge(self, frame: Frame, offset: int, count: int = 1) -> None:
        self.feed(wire.published_frame(frame.correlation, frame.handle, offset, 5, count, 1))

    def refuse(self, frame: Frame, error: Any) -> None:
        self.feed(wire.error_frame(error, frame.correlation, frame.handle))


def send(producer: PartitionProducer, payload: bytes, count: int = 1) -> Outgoing:
    sequence = producer.next_sequence
    encoded = encode(
        [payload] * count,
        producer_name="p",
        publish_time_us=1,
        producer_id=producer.producer_id,
        producer_epoch=producer.epoch,
        base_sequence=sequence,
    )
    outgoing = Outgoing(producer, encoded)
    producer.send(outgoing, producer.producer_id, producer.epoch, sequence)
    return outgoing


def open_pair() -> tuple[Peer, PartitionProducer]:
    peer = Peer()
    return peer, opened_at(peer)


def opened_at(peer: Peer) -> PartitionProducer:
    """Connect and open a producer there."""
    peer.connect()
    producer = peer.producer()
    peer.open(7, 3)
    return producer


# -- handshake, requests, time ----------------------------------------------------------------------


def test_requests_made_before_the_welcome_are_sent_after_it() -> None:
    peer = Peer()
    request = peer.session.request(Kind.LOOKUP, wire.Lookup("/default/t"))
    peer.session.connected()
    assert [one.kind for one, _ in peer.sent()] == [Kind.HELLO]
    peer.feed(wire.control_frame(Kind.WELCOME, wire.Welcome()))
    [(frame, body)] = peer.sent()
    assert wire.decode_control(body, wire.Lookup).topic == "/default/t"
    peer.feed(wire.result_frame({"a": 1}, frame.correlation))
    assert request.result() == {"a": 1}


def test_a_refused_greeting_is_raised_as_the_brokers_error() -> None:
    peer = Peer()
    peer.session.connected()
    with pytest.raises(Draining):
        peer.feed(wire.error_frame(Draining("stopping")))


@pytest.mark.parametrize(
    "frame",
    [
        wire.control_frame(Kind.PONG),
        wire.control_frame(Kind.WELCOME, wire.Welcome(version=9)),
        b"HTTP/1.1 400 Bad Request\r\nServer",
    ],
)
def test_a_peer_that_does_not_greet_is_refused(frame: bytes) -> None:
    peer = Peer()
    peer.session.connected()
    with pytest.raises((ProtocolError, LimitExceeded)):
        peer.feed(frame)


@given(st.lists(st.integers(1, 40), max_size=12))
def test_any_cut_of_the_stream_settles_the_same_requests(cuts: list[int]) -> None:
    peer = Peer()
    peer.connect()
    requests = [peer.session.request(Kind.ADMIN, wire.Admin("status")) for _ in range(4)]
    correlations = [frame.correlation for frame, _ in peer.sent()]
    stream = b"".join(wire.result_frame("x" * one, one) for one in correlations)
    buffer = memoryview(bytearray(stream))
    start = end = 0
    for cut in [*cuts, len(stream)]:
        end = min(end + cut, len(stream))
        start = peer.session.received(buffer, start, end)
    assert start == len(stream)
    assert [one.result() for one in requests] == ["x" * one for one in correlations]


def test_an_answer_that_does_not_fit_its_request_breaks_the_connection() -> None:
    peer = Peer()
    peer.connect()
    peer.session.request(Kind.LOOKUP, wire.Lookup("/default/t"))
    [(frame, _)] = peer.sent()
    with pytest.raises(ProtocolError):
        peer.feed(wire.control_frame(Kind.SUBSCRIBED, wire.Subscribed(), frame.correlation))


def test_a_request_without_an_answer_times_out_and_its_late_answer_is_ignored() -> None:
    peer = Peer()
    peer.connect()
    request = peer.session.request(Kind.ADMIN, wire.Admin("status"), timeout_ns=SECOND_NS)
    [(frame, _)] = peer.sent()
    peer.pass_time(1.1)
    with pytest.raises(OperationTimeout):
        request.result()
    peer.feed(wire.result_frame(1, frame.correlation))


def test_a_request_that_only_ends_connections_is_not_repeated_for_ever() -> None:
    peer = Peer()
    peer.connect()
    status = peer.session.admin("status")
    for _ in range(REFUSALS_MAX):
        assert not status.settled
        assert len(peer.sent()) == 1
        peer.session.disconnected(LimitExceeded("frame of 17000000 bytes is too large"))
        peer.connect()
    assert isinstance(status.error, LimitExceeded)
    assert peer.sent() == []


def test_an_answer_that_cannot_be_read_fails_its_request() -> None:
    peer = Peer()
    peer.connect()
    status = peer.session.admin("status")
    ((frame, _),) = peer.sent()
    with pytest.raises(ProtocolError):
        peer.feed(wire.control_frame(Kind.PONG, None, frame.correlation))
    assert isinstance(status.error, ProtocolError)


def test_a_list_is_asked_for_in_pages() -> None:
    peer = Peer()
    peer.connect()

    def run(page: Page, *answers: dict[str, Any] | list[str]) -> tuple[list[Any], list[dict[str, Any]]]:
        plan, asked = whole_list(peer.session, "namespaces", page), []
        next(plan)
        for answer in answers:
            ((_, body),) = peer.sent()
            asked.append(wire.decode_control(body, wire.Admin).args)
            try:
                plan.send(answer)
            except StopIteration as stop:
                return stop.value, asked
        raise AssertionError("it asks for more")

    first, last = {"entries": ["a", "b"], "after": "b"}, {"entries": ["c"], "after": None}
    found, asked = run(WHOLE, first, last)
    assert found == ["a", "b", "c"] and [one["after"] for one in asked] == ["", "b"]
    found, asked = run(page_of("0", 2, "x"), first)
    assert found == ["a", "b"] and asked == [{"after": "0", "limit": 2, "prefix": "x"}]
    found, asked = run(page_of("", 3, ""), first, last)
    assert found == ["a", "b", "c"] and asked[1] == {"after": "b", "limit": 1, "prefix": ""}
    assert run(WHOLE, ["old", "broker"])[0] == ["old", "broker"]
    with pytest.raises(InvalidArgument):
        page_of("", 0, "")


def test_only_repeatable_requests_survive_a_lost_connection() -> None:
    peer = Peer()
    peer.connect()
    lookup = peer.session.request(Kind.LOOKUP, wire.Lookup("/default/t"))
    create = peer.session.admin("create_topic", repeatable=False)
    peer.sent()
    peer.lose()
    assert isinstance(create.error, ConnectionFailed)
    assert not lookup.settled
    peer.connect()
    [(frame, _)] = peer.sent()
    assert frame.kind == Kind.LOOKUP


def test_pauses_between_attempts_grow_to_two_seconds_and_end_at_the_limit() -> None:
    peer = Peer(reconnect_timeout_ns=60 * SECOND_NS)
    peer.connect()
    peer.lose()
    pauses = [peer.session.backoff_ns() // 1_000_000 for _ in range(8)]
    assert pauses == [50, 100, 200, 400, 800, 1600, 2000, 2000]
    peer.time_ns += 60 * SECOND_NS
    with pytest.raises(ConnectionFailed, match="60 s"):
        peer.session.backoff_ns()


def test_time_in_which_nobody_tried_does_not_count() -> None:
    peer = Peer(reconnect_timeout_ns=60 * SECOND_NS)
    peer.session.not_tried(SECOND_NS)  # nothing was lost: nothing changes
    peer.connect()
    peer.lose()
    peer.time_ns += 100 * SECOND_NS
    peer.session.not_tried(70 * SECOND_NS)
    assert peer.session.backoff_ns()
    peer.time_ns += 30 * SECOND_NS
    with pytest.raises(ConnectionFailed, match="60 s"):
        peer.session.backoff_ns()
    peer.session.not_tried(500 * SECOND_NS)  # more than passed: it was lost just now
    peer.time_ns += 59 * SECOND_NS
    assert peer.session.backoff_ns()


def test_an_error_without_correlation_and_handle_ends_the_connection() -> None:
    peer = Peer()
    peer.connect()
    with pytest.raises(Draining):
        peer.feed(wire.error_frame(Draining("stopping")))


def test_a_silent_broker_is_asked_and_then_given_up() -> None:
    peer = Peer()
    silent: list[Any] = []
    peer.session.when_silent = silent.append
    peer.connect()
    peer.pass_time(10)
    peer.pass_time(10)
    [(frame, _)] = peer.sent()
    assert frame.kind == Kind.PING
    peer.feed(wire.control_frame(Kind.PONG, None, frame.correlation))
    peer.pass_time(10)
    peer.pass_time(10)
    assert [one.kind for one, _ in peer.sent()] == [Kind.PING] and not silent
    peer.pass_time(10)
    assert isinstance(silent[0], ConnectionFailed) and "answered nothing" in str(silent[0])


def test_failing_the_session_fails_everything_that_waits_and_all_later_calls() -> None:
    peer, producer = open_pair()
    outgoing = send(producer, b"x")
    request = peer.session.request(Kind.ADMIN, wire.Admin("status"))
    peer.session.fail(ConnectionFailed("gone"))
    assert isinstance(outgoing.error, ConnectionFailed)
    assert isinstance(request.error, ConnectionFailed)
    with pytest.raises(ConnectionFailed):
        send(producer, b"y")
    with pytest.raises(ConnectionFailed):
        peer.session.request(Kind.ADMIN, wire.Admin("status"))


# -- publishing -------------------------------------------------------------------------------------


def test_batches_are_pipelined_with_consecutive_sequences() -> None:
    peer, producer = open_pair()
    sent = [send(producer, b"x", count) for count in (1, 3, 2)]
    published = peer.published()
    assert [sequence for sequence, _, _ in published] == [0, 1, 4]
    assert [view.header.producer_epoch for _, _, view in published] == [3, 3, 3]
    for (_, frame, view), offset in zip(published, (10, 11, 14), strict=True):
        peer.acknowledge(frame, offset, view.record_count)
    assert [(one.result().offset, one.result().record_count) for one in sent] == [(10, 1), (11, 3), (14, 2)]
    assert sent[0].result().durability == "written"


def test_at_most_the_window_of_batches_is_out() -> None:
    peer, producer = open_pair()
    for _ in range(UNACKED_BATCHES_MAX + 5):
        send(producer, b"x")
    published = peer.published()
    assert len(published) == UNACKED_BATCHES_MAX
    peer.acknowledge(published[0][1], 0)
    assert [sequence for sequence, _, _ in peer.published()] == [UNACKED_BATCHES_MAX]


@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(1, 60)), min_size=1, max_size=60),
    st.integers(300, 2000),
)
def test_publish_credit_is_never_exceeded_and_nobody_starves(
    sends: list[tuple[int, int]], credit_bytes: int
) -> None:
    peer = Peer()
    peer.connect(publish_credit_bytes=credit_bytes)
    producers = []
    for number in range(2):
        producers.append(peer.producer())
        peer.open(number + 1, 1)
    outgoing = [send(producers[which], b"x" * size) for which, size in sends]
    unanswered: list[tuple[Frame, int]] = []
    answered = 0
    while answered < len(sends):
        for _, frame, view in peer.published():
            unanswered.append((frame, wire.FRAME_HEADER_BYTES + view.header.size))
        assert unanswered, "a batch waits although nothing is out"
        assert sum(size for _, size in unanswered) <= credit_bytes or len(unanswered) == 1
        frame, _ = unanswered.pop(0)
        peer.acknowledge(frame, answered)
        answered += 1
    assert all(one.settled and one.error is None for one in outgoing)


def test_after_a_lost_connection_unanswered_batches_are_sent_again_with_their_sequences() -> None:
    peer, producer = open_pair()
    first, second = send(producer, b"a"), send(producer, b"b")
    peer.acknowledge(peer.published()[0][1], 0)
    peer.lose()
    third = send(producer, b"c")
    peer.connect()
    asked = peer.open(7, 3, next_sequence=2)
    assert (asked.producer_id, asked.epoch, asked.name) == (7, 3, "p")
    published = peer.published()
    assert [(sequence, view.payload(0)) for sequence, _, view in published] == [(1, b"b"), (2, b"c")]
    for sequence, frame, _ in published:
        peer.acknowledge(frame, sequence)
    assert [one.result().offset for one in (first, second, third)] == [0, 1, 2]


@pytest.mark.parametrize("unanswered", [1, 2])
def test_numbers_that_an_owner_does_not_know_are_never_given_to_other_batches(unanswered: int) -> None:
    peer, producer = open_pair()
    outgoing = [send(producer, bytes([one])) for one in range(2 + unanswered)]
    published = peer.published()
    for frame in published[:2]:
        peer.acknowledge(frame[1], frame[0])
    peer.lose()
    late = send(producer, b"late")
    peer.connect()
    assert peer.open(7, 3, next_sequence=1).epoch == 3  # the second is on the disk of an owner that is gone
    assert (asked := peer.open(7, 4)).producer_id == asked.epoch == 0
    again = peer.published()
    assert [(sequence, view.header.producer_epoch) for sequence, _, view in again] == [
        (number, 4) for number in range(unanswered + 1)
    ]
    assert [view.payload(0) for *_, view in again] == [*[b"\x02", b"\x03"][:unanswered], b"late"]
    for sequence, frame, _ in again:
        peer.acknowledge(frame, 100 + sequence)
    results = [one.result().offset for one in (*outgoing, late)]
    assert results == [0, 1, *range(100, 101 + unanswered)]
    assert producer.next_sequence == unanswered + 1


def test_a_moved_owner_is_opened_again_on_a_new_handle() -> None:
    peer, producer = open_pair()
    outgoing = send(producer, b"a")
    [(_, frame, _)] = peer.published()
    peer.feed(wire.error_frame(OwnerMoved("moved"), 0, frame.handle))
    peer.pass_time(0)
    peer.open(7, 3, next_sequence=0)
    peer.acknowledge(frame, 99)  # a late answer on the old handle means nothing
    assert not outgoing.settled
    [(sequence, again, _)] = peer.published()
    assert sequence == 0 and again.handle != frame.handle
    peer.acknowledge(again, 0)
    assert outgoing.result().offset == 0


def test_a_moved_owner_that_stays_away_is_asked_with_growing_pauses() -> None:
    peer, producer = open_pair()
    send(producer, b"a")
    [(_, frame, _)] = peer.published()
    peer.feed(wire.error_frame(OwnerMoved("moved"), 0, frame.handle))
    asked_after_ms = []
    waited_ms = 0
    for _ in range(400):
        peer.pass_time(0.01)
        waited_ms += 10
        for one, _ in peer.sent():
            asked_after_ms.append(waited_ms)
            peer.feed(wire.error_frame(OwnerMoved("still moving"), one.correlation, one.handle))
    assert asked_after_ms[:5] == [10, 60, 160, 360, 760]


def test_after_a_refused_batch_the_rest_follows_in_a_new_epoch() -> None:
    peer, producer = open_pair()
    outgoing = [send(producer, bytes([one])) for one in range(4)]
    published = peer.published()
    peer.acknowledge(published[0][1], 0)
    peer.refuse(published[1][1], StorageFull("no space"))
    late = send(producer, bytes([4]))
    assert peer.published() == []  # nothing goes out before all answers are in
    peer.refuse(published[2][1], SequenceGap("expected 1"))
    peer.refuse(published[3][1], SequenceGap("expected 1"))
    asked = peer.open(7, 4)
    assert asked.producer_id == 0
    again = peer.published()
    assert [(sequence, view.header.producer_epoch, view.payload(0)) for sequence, _, view in again] == [
        (0, 4, b"\x02"),
        (1, 4, b"\x03"),
        (2, 4, b"\x04"),
    ]
    for sequence, frame, _ in again:
        peer.acknowledge(frame, sequence + 1)
    assert isinstance(outgoing[1].error, StorageFull)
    assert [one.result().offset for one in (outgoing[0], outgoing[2], outgoing[3], late)] == [0, 1, 2, 3]


def test_a_connection_lost_while_settling_also_leads_to_a_new_epoch() -> None:
    peer, producer = open_pair()
    outgoing = [send(producer, bytes([one])) for one in range(2)]
    published = peer.published()
    peer.refuse(published[0][1], StorageFull("no space"))
    peer.lose()
    peer.connect()
    assert peer.open(7, 4).producer_id == 0
    [(sequence, frame, _)] = peer.published()
    peer.acknowledge(frame, 0)
    assert sequence == 0
    assert isinstance(outgoing[0].error, StorageFull) and outgoing[1].result().offset == 0


def test_batches_refused_by_the_gap_keep_their_order_across_a_lost_connection() -> None:
    peer, producer = open_pair()
    outgoing = [send(producer, bytes([one])) for one in range(5)]
    published = peer.published()
    peer.refuse(published[0][1], StorageFull("no space"))
    peer.refuse(published[1][1], SequenceGap("expected 0"))
    peer.lose()  # batches 2 to 4 were not answered
    peer.connect()
    peer.open(7, 4)
    again = peer.published()
    assert [view.payload(0) for _, _, view in again] == [b"\x01", b"\x02", b"\x03", b"\x04"]
    for sequence, frame, _ in again:
        peer.acknowledge(frame, sequence)
    assert [one.result().offset for one in outgoing[1:]] == [0, 1, 2, 3]


@pytest.mark.parametrize("error", [Fenced("a newer one"), TopicNotFound("deleted")])
def test_a_producer_that_cannot_go_on_fails_what_it_holds(error: Any) -> None:
    peer, producer = open_pair()
    outgoing = [send(producer, b"x") for _ in range(3)]
    peer.refuse(peer.published()[0][1], error)
    assert all(isinstance(one.error, type(error)) for one in outgoing)
    with pytest.raises(type(error)):
        send(producer, b"y")


def test_a_sent_batch_that_times_out_keeps_its_place_in_the_sequence() -> None:
    peer = Peer()
    peer.connect()
    producer = peer.producer(timeout_s=1)
    peer.open(7, 3)
    first = send(producer, b"a")
    [(_, frame, _)] = peer.published()
    peer.pass_time(1.5)
    assert isinstance(first.error, OperationTimeout) and "not known" in str(first.error)
    send(producer, b"b")
    assert [sequence for sequence, _, _ in peer.published()] == [1]
    peer.acknowledge(frame, 0)


def test_an_unsent_batch_that_times_out_leaves_no_gap() -> None:
    peer = Peer()
    peer.connect()
    producer = peer.producer(timeout_s=1)
    first = send(producer, b"a", 3)  # the producer is not open yet
    peer.pass_time(0.5)
    second = send(producer, b"b")
    peer.pass_time(0.6)
    assert isinstance(first.error, OperationTimeout) and "not sent" in str(first.error)
    peer.open(7, 3)
    [(sequence, frame, view)] = peer.published()
    assert (sequence, view.payload(0)) == (0, b"b")
    peer.acknowledge(frame, 0)
    assert second.result().offset == 0


def test_a_withdrawn_batch_leaves_no_gap() -> None:
    peer = Peer()
    peer.connect()
    producer = peer.producer()
    first, second = send(producer, b"a"), send(producer, b"b")
    assert producer.withdraw(first)
    peer.open(7, 3)
    assert [sequence for sequence, _, _ in peer.published()] == [0]
    assert not producer.withdraw(second)


def test_closing_fails_what_is_not_answered() -> None:
    peer, producer = open_pair()
    outgoing = send(producer, b"x")
    producer.close()
    assert isinstance(outgoing.error, ClosedError)
    assert [one.kind for one, _ in peer.sent()] == [Kind.PUBLISH, Kind.CLOSE_PRODUCER]


# -- addresses --------------------------------------------------------------------------------------


def test_urls_name_one_or_more_addresses() -> None:
    assert parse_url("danube://localhost") == [Address("localhost", 6660)]
    assert parse_url("danube://a:1,b:2/") == [Address("a", 1), Address("b", 2)]
    assert parse_url("danube://[::1]:7") == [Address("::1", 7)]
    assert str(Address("::1", 7)) == "[::1]:7"


@pytest.mark.parametrize(
    "url",
    [
        "localhost:6660",
        "danube://",
        "danube://h:0",
        "danube://h:x",
        "danube://h:70000",
        "http://h",
        "danube://a/b",
    ],
)
def test_urls_that_cannot_be_are_refused(url: str) -> None:
    with pytest.raises(InvalidArgument, match="not valid"):
        parse_url(url)
