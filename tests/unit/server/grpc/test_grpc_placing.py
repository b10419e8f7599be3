"""gRPC connections that leave for the worker of their first call: which, when, and what the client sees."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from danube.broker.routing.passing import ConnectionPassing
from danube.broker.worker.guests import Guests
from danube.broker.worker.places import Places
from danube.core.http2 import frames
from danube.core.http2.headers import response_block
from danube.core.metadata.commands import KnownConsumer
from danube.core.placement.workers import owner_of
from danube.core.protocol.grpc import frame_message
from danube.core.security.principals import Identity, Principal
from danube.errors import LimitExceeded, Overloaded, TopicNotFound
from danube.host import clock
from danube.ipc.passage import UNREAD_BYTES_MAX
from danube.limits import OUTPUT_BUFFER_BYTES_MAX
from danube.server.grpc import socket as grpc_socket
from danube.server.grpc.connection import GrpcConnection
from danube.server.grpc.door import REFUSED_MAX, GrpcDoor
from danube.server.grpc.methods import Method, MethodKind
from danube.server.grpc.placing import GREETING_BYTES_MAX, Placing
from danube.server.proto import DanubeApi_pb2 as pb
from tests.unit.http2_parts import FIELDS, GREETING, data, headers, parsed
from tests.unit.native_door import DESCRIPTOR, FakeTransport

TOPIC = "/default/t"
SEND, CREATE = "/danube.ProducerService/SendMessage", "/danube.ProducerService/CreateProducer"
SUBSCRIBE, RECEIVE = "/danube.ConsumerService/Subscribe", "/danube.ConsumerService/ReceiveMessages"
ACK, LOOKUP = "/danube.ConsumerService/Ack", "/danube.Discovery/TopicLookup"
PARTITIONS, SCHEMA = "/danube.Discovery/TopicPartitions", "/danube.SchemaRegistry/GetLatestSchema"
CHAT = "/danube.Chat/Chat"
PING = frames.ping_frame(b"12345678", answer=False)
CONSUMER = KnownConsumer(77, 5, 1, "s", "shared", "c", ())


class FakePassing:
    """Takes connections for another worker, as ConnectionPassing does, while ``takes``."""

    def __init__(self) -> None:
        self.takes = True
        self.passed: list[tuple[int, int, bytes, int]] = []

    def offer(self, owner: int, descriptor: int, unread: bytearray, sent_bytes: int) -> bool:
        if self.takes:
            self.passed.append((owner, descriptor, bytes(unread), sent_bytes))
        return self.takes


class Worker:
    """The data door of one worker; calls are answered with what they brought, in its turns."""

    def __init__(
        self, *, passes: bool = True, connections_max: int = 10, places: Places | None = None
    ) -> None:
        self.way = FakePassing()
        self.taken: list[tuple[str, bytes]] = []
        self.waiting: list[Callable[[], None]] = []
        self.counted: dict[str, int] = {}
        self.flush_pending = False
        self.asked = 0
        placing = Placing(cast(ConnectionPassing, self.way), self._owner, self._find, 4) if passes else None
        self.door = GrpcDoor(
            "grpc", connections_max=connections_max, places=places or Places(100),
            message_bytes_max=1 << 20, handshake_timeout_ms=1000, turns=self, count=self._count,
            placing=placing,
        )  # fmt: skip
        for path, request in [
            (SEND, pb.StreamMessage), (CREATE, pb.ProducerRequest), (SUBSCRIBE, pb.ConsumerRequest),
            (RECEIVE, pb.ReceiveRequest), (ACK, pb.AckRequest), (LOOKUP, pb.TopicLookupRequest),
            (PARTITIONS, pb.TopicLookupRequest), (SCHEMA, pb.TopicLookupRequest),
        ]:  # fmt: skip
            self.door.methods[path] = Method(MethodKind.DIRECT, request, self._take)
        self.door.methods[CHAT] = Method(MethodKind.BIDIRECTIONAL, pb.TopicLookupRequest, self._chat)

    def _owner(self, partition: str) -> int:
        if partition != TOPIC:
            raise TopicNotFound(partition)
        return 1

    def _find(self, consumer_id: int) -> KnownConsumer | None:
        return CONSUMER if consumer_id == CONSUMER.consumer_id else None

    def schedule_turn(self) -> None:
        self.asked += 1

    def run_turn(self) -> None:
        raise AssertionError("no buffer was lent")

    def _count(self, name: str, amount: int) -> None:
        self.counted[name] = self.counted.get(name, 0) + amount

    def _take(self, connection: GrpcConnection, stream: Any, message: bytes, size: int) -> None:
        self.taken.append((stream.head.path, message))
        self.waiting.append(lambda: connection.answer(stream, frame_message(message), size))

    async def _chat(self, requests: AsyncIterator[Any], call: Any) -> AsyncIterator[Any]:
        async for request in requests:
            yield request

    def connect(self) -> tuple[GrpcConnection, FakeTransport]:
        return self._made(self.door.factory())

    def arrive(self, unread: bytes, sent_bytes: int) -> tuple[GrpcConnection, FakeTransport]:
        return self._made(self.door.arrived(unread, sent_bytes))

    def _made(self, connection: GrpcConnection) -> tuple[GrpcConnection, FakeTransport]:
        transport = FakeTransport()
        connection.connection_made(cast(asyncio.BaseTransport, transport))
        return connection, transport

    def turn(self) -> None:
        waiting, self.waiting = self.waiting, []
        for answer in waiting:
            answer()
        self.door.flush()


def feed(connection: GrpcConnection, piece: bytes) -> None:
    connection.get_buffer(-1)[: len(piece)] = piece
    connection.buffer_updated(len(piece))


def block(path: str) -> bytes:
    return response_block([(name, path if name == ":path" else value) for name, value in FIELDS])


def call(path: str, message: Any, stream_id: int = 1) -> bytes:
    body = data(stream_id, frame_message(message.SerializeToString()), ended=True)
    return headers(stream_id, block=block(path)) + body


def sent(payload: bytes = b"x", stream_id: int = 1, topic: str = TOPIC) -> bytes:
    place = pb.MsgID(producer_id=1, topic_name=topic)
    return call(SEND, pb.StreamMessage(request_id=stream_id, msg_id=place, payload=payload), stream_id)


def on_loop(test: Callable[[], Any]) -> None:
    async def inside() -> None:
        result = test()
        if asyncio.iscoroutine(result):
            await result

    asyncio.run(inside())


def whole_answer(stream: bytes) -> bytes:
    """What a client gets of a worker that passes nothing on, in one turn."""
    alone = Worker(passes=False)
    connection, transport = alone.connect()
    feed(connection, stream)
    alone.turn()
    return transport.written


def test_a_client_cannot_tell_wherever_its_bytes_are_cut() -> None:
    stream = GREETING + PING + sent(b"first") + sent(b"second", 3)
    expected = whole_answer(stream)
    assert [frame.kind for frame in parsed(expected)].count("DATA") == 2

    def test() -> None:
        passed = 0
        for first in range(1, len(stream), 7):
            for second in range(first, len(stream) + 1, 31):
                here, there = Worker(), Worker()
                connection, transport = here.connect()
                for piece in filter(None, (stream[:first], stream[first:second], stream[second:])):
                    if transport.aborted:
                        break
                    feed(connection, piece)
                    here.turn()
                if not here.way.passed:  # its head came without its body, and something was answered then
                    assert transport.written == expected and len(here.taken) == 2
                    continue
                ((owner, descriptor, received, sent_bytes),) = here.way.passed
                assert (owner, descriptor) == (1, DESCRIPTOR) and stream.startswith(received)
                assert transport.aborted and here.taken == [] and sent_bytes == len(transport.written)
                other, others = there.arrive(received, sent_bytes)
                there.turn()
                if stream[len(received) :]:
                    feed(other, stream[len(received) :])
                    there.turn()
                assert len(there.taken) == 2 and transport.written + others.written == expected
                passed += 1
        assert passed > 100

    on_loop(test)


def test_the_connection_is_counted_where_it_goes() -> None:
    def test() -> None:
        here, there = Worker(), Worker()
        connection, transport = here.connect()
        feed(connection, GREETING + sent())
        connection.connection_lost(None)
        there.arrive(here.way.passed[0][2], here.way.passed[0][3])
        assert here.counted == {"connections": 0, "connections_total": 1, "connections_passed": 1}
        assert there.counted == {"connections": 1} and there.way.passed == []
        assert not here.door.connections and transport.aborted

    on_loop(test)


@pytest.mark.parametrize(
    ("first", "owner"),
    [
        (sent(), 1),
        (call(CREATE, pb.ProducerRequest(topic_name=TOPIC)), 1),
        (call(SUBSCRIBE, pb.ConsumerRequest(topic_name=TOPIC)), 1),
        (call(RECEIVE, pb.ReceiveRequest(consumer_id=77)), owner_of(5, 1, 4)),
        (call(ACK, pb.AckRequest(msg_id=pb.MsgID(topic_name=TOPIC))), 1),
        (call(LOOKUP, pb.TopicLookupRequest(topic=TOPIC)), 1),
        (call(PARTITIONS, pb.TopicLookupRequest(topic=TOPIC)), 1),
        (sent(topic="/default/unknown"), None),
        (call(RECEIVE, pb.ReceiveRequest(consumer_id=78)), None),
        (call(SCHEMA, pb.TopicLookupRequest(topic=TOPIC)), None),
        (headers(1, block=block(CREATE)) + data(1, frame_message(b"\xff\xff"), ended=True), None),
    ],
)
def test_the_first_call_says_which_worker_it_is_for(first: bytes, owner: int | None) -> None:
    def test() -> None:
        worker = Worker()
        connection, transport = worker.connect()
        feed(connection, GREETING)
        worker.turn()
        feed(connection, first)
        assert [one[0] for one in worker.way.passed] == ([] if owner is None else [owner])
        assert len(worker.taken) == (owner is None) and transport.aborted == (owner is not None)
        if owner is None:
            feed(connection, sent(stream_id=3))
            assert worker.way.passed == [] and len(worker.taken) == 2, "it stays for good"

    on_loop(test)


def test_what_the_owner_does_not_get_is_served_here() -> None:
    stream = GREETING + sent(b"first") + sent(b"second", 3)
    expected = whole_answer(stream)

    def refused(worker: Worker, transport: FakeTransport) -> None:
        worker.way.takes = False

    def draining(worker: Worker, transport: FakeTransport) -> None:
        worker.door.draining = True

    def stays(because: Callable[[Worker, FakeTransport], None]) -> None:
        worker = Worker()
        connection, transport = worker.connect()
        because(worker, transport)
        feed(connection, stream)
        worker.turn()
        assert worker.way.passed == [] and [path for path, _ in worker.taken] == [SEND, SEND]
        assert transport.written == expected and not transport.aborted

    for because in (refused, draining):
        on_loop(lambda because=because: stays(because))  # type: ignore[misc]


@pytest.mark.parametrize("kernel_took_it", [True, False])
def test_unsent_bytes_are_waited_for_once(kernel_took_it: bool) -> None:
    stream = GREETING + sent()

    async def test() -> None:
        worker = Worker()
        connection, transport = worker.connect()
        transport.unsent = 57
        feed(connection, stream)
        worker.turn()
        worker.door.sweep(0)
        assert worker.way.passed == [] and worker.taken == [] and len(parsed(transport.written)) == 2
        transport.unsent = 0 if kernel_took_it else 57
        await asyncio.sleep(0)
        assert bool(worker.way.passed) == transport.aborted == kernel_took_it
        worker.turn()
        assert kernel_took_it or transport.written == whole_answer(stream)

    on_loop(test)


def test_a_client_that_leaves_meanwhile_is_not_served() -> None:
    async def test() -> None:
        worker = Worker()
        connection, transport = worker.connect()
        transport.unsent = 57
        feed(connection, GREETING + sent())
        connection.connection_lost(None)
        await asyncio.sleep(0)
        assert worker.way.passed == [] and worker.taken == []

    on_loop(test)


def stays_after(before: Callable[[Worker, GrpcConnection], None]) -> None:
    def test() -> None:
        worker = Worker()
        connection, _ = worker.connect()
        feed(connection, GREETING)
        worker.turn()
        before(worker, connection)
        feed(connection, sent(stream_id=3))
        worker.turn()
        assert worker.way.passed == [] and worker.taken[-1][0] == SEND

    on_loop(test)


def test_a_connection_that_has_an_answer_stays() -> None:
    def unknown_method(worker: Worker, connection: GrpcConnection) -> None:
        feed(connection, headers(1, block=block("/danube.No/Such")) + data(1, ended=True))
        worker.turn()

    stays_after(unknown_method)


def test_a_connection_that_was_asked_whether_it_lives_stays() -> None:
    def asked(worker: Worker, connection: GrpcConnection) -> None:
        connection._http2.output.append(PING)
        connection.tick(connection._http2._now_ns)
        worker.turn()

    stays_after(asked)


def test_what_came_over_a_long_time_is_not_replayed_at_once() -> None:
    def pinged(worker: Worker, connection: GrpcConnection) -> None:
        for _ in range(GREETING_BYTES_MAX // len(PING) + 1):
            feed(connection, PING)
            worker.turn()

    stays_after(pinged)


def test_a_first_call_that_is_too_large_stays() -> None:
    def test() -> None:
        worker = Worker()
        connection, _ = worker.connect()
        pieces = [bytes(16_000)] * (UNREAD_BYTES_MAX // 16_000 + 1)
        message = pb.StreamMessage(msg_id=pb.MsgID(topic_name=TOPIC), payload=b"".join(pieces))
        body = frame_message(message.SerializeToString())
        feed(connection, GREETING + headers(1, block=block(SEND)))
        for start in range(0, len(body), 16_000):
            piece = body[start : start + 16_000]
            feed(connection, data(1, piece, ended=start + 16_000 >= len(body)))
        assert worker.way.passed == [] and len(worker.taken) == 1
        assert worker.taken[0][1] == message.SerializeToString()

    on_loop(test)


def test_a_stream_that_a_call_follows_begins_again_at_the_other_worker() -> None:
    message = pb.TopicLookupRequest(topic=TOPIC)

    async def test() -> None:
        here, there = Worker(), Worker()
        connection, _ = here.connect()
        chat = headers(1, block=block(CHAT)) + data(1, frame_message(message.SerializeToString()))
        feed(connection, GREETING + chat + sent(stream_id=3))
        connection.connection_lost(None)
        _, transport = there.arrive(here.way.passed[0][2], here.way.passed[0][3])
        for _ in range(5):
            await asyncio.sleep(0)
            here.turn()
            there.turn()
        streams = {frame.stream_id for frame in parsed(transport.written) if frame.kind == "DATA"}
        assert here.taken == [] and streams == {1, 3}

    on_loop(test)


def test_one_worker_holds_nothing_back() -> None:
    def test() -> None:
        worker = Worker(passes=False)
        connection, _ = worker.connect()
        feed(connection, GREETING + sent())
        assert len(worker.taken) == 1 and worker.way.passed == []

    on_loop(test)


def test_an_arrival_beyond_the_limit_is_told_so() -> None:
    def test() -> None:
        here, there = Worker(), Worker(connections_max=0)
        connection, transport = here.connect()
        feed(connection, GREETING)
        here.turn()
        feed(connection, sent())
        _, others = there.arrive(here.way.passed[0][2], here.way.passed[0][3])
        kinds = [frame.kind for frame in parsed(transport.written + others.written)]
        assert kinds == ["SETTINGS", "WINDOW_UPDATE", "SETTINGS", "GOAWAY"] and there.taken == []

    on_loop(test)


def test_several_calls_at_once_ask_for_a_turn_like_several_connections() -> None:
    worker = Worker(passes=False)
    connection, _ = worker.connect()
    feed(connection, GREETING)
    worker.turn()
    for first in (1, 3, 5):
        worker.turn()
        worker.asked = 0
        feed(connection, sent(stream_id=first))
        assert worker.asked == 1, "it is alone"
    worker.turn()
    worker.asked = 0
    feed(connection, sent(stream_id=7) + sent(stream_id=9))
    assert worker.asked == 2


def test_a_flood_of_refused_connections_of_one_host_has_one_source(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[dict[str, Any]] = []
    log = SimpleNamespace(limited=lambda event, **facts: logged.append(facts))
    monkeypatch.setattr(grpc_socket, "_log", log)
    worker = Worker(passes=False)

    class From(FakeTransport):
        def __init__(self, port: int) -> None:
            super().__init__()
            self.port = port

        def get_extra_info(self, name: str) -> Any:
            return ("192.0.2.1", self.port) if name == "peername" else super().get_extra_info(name)

    for port in (1, 2):
        connection = worker.door.factory()
        connection.connection_made(cast(asyncio.BaseTransport, From(port)))
        received = b"GET / HTTP/1.1\r\n\r\n" + bytes(64)
        connection.get_buffer(-1)[: len(received)] = received
        connection.buffer_updated(len(received))
        connection.flush()
    assert [one["source"] for one in logged] == ["192.0.2.1"] * 2
    assert len({one["peer"] for one in logged}) == 2


def test_connections_that_would_take_the_logs_descriptors_are_told_so() -> None:
    places = Places(1)
    worker = Worker(passes=False, places=places)
    first, _ = worker.connect()
    _, late = worker.connect()
    assert b"has descriptors for 1 connections" in late.written
    with pytest.raises(LimitExceeded):
        places.take("192.0.2.9", 0, 10)
    told = [worker.connect()[1] for _ in range(REFUSED_MAX)]
    assert [transport.aborted for transport in told] == [False] * (REFUSED_MAX - 1) + [True]
    first.connection_lost(None)
    places.take("192.0.2.9", 0, 10)


def test_who_does_not_read_is_not_read_either_and_is_given_up() -> None:
    """So no answers pile up.  Records that wait for a slow reader close nothing, whatever it asks."""

    def test() -> None:
        worker = Worker(passes=False)
        connection, transport = worker.connect()
        feed(connection, GREETING)
        transport.unsent = OUTPUT_BUFFER_BYTES_MAX - 1
        connection.pause_writing()
        feed(connection, PING * 100)  # came before
        worker.turn()
        assert not transport.reading and not transport.closed
        connection.resume_writing()
        assert transport.reading
        connection.pause_writing()
        connection.tick(clock.monotonic_ns() + grpc_socket.UNREAD_NS_MAX)
        assert transport.aborted

    on_loop(test)


def test_a_principal_has_its_connections_and_one_that_is_passed_on_was_judged() -> None:
    counts: Counter[str] = Counter()
    counted = SimpleNamespace(
        add=lambda name, amount: counts.update({name: amount}), total=lambda name: counts[name]
    )
    guests = Guests(counted, per_address=0, per_principal=1, per_second=0)
    worker = Worker(passes=False, places=Places(100, guests=guests))
    anna, bert = (Identity(Principal("user", name), "token") for name in ("anna", "bert"))
    (first, _), (second, _) = worker.connect(), worker.connect()
    second.host = "192.0.2.1"
    for _ in range(2):
        worker.door.enter(first, anna)
    with pytest.raises(Overloaded, match="connections_per_principal is 1"):
        worker.door.enter(second, anna)
    second.judged = True  # where it came from, until its socket is closed there
    worker.door.enter(second, anna)
    assert counts["principal user:anna"] == 2
    worker.door.enter(second, bert)
    assert (counts["principal user:anna"], counts["principal user:bert"]) == (1, 1)
    for connection in (first, second):
        connection.connection_lost(None)
    assert counts["principal user:anna"] == counts["principal user:bert"] == 0
    arrived, _ = worker.arrive(GREETING, 0)
    assert arrived.judged


def test_where_nobody_is_known_any_more_a_connection_without_a_credential_stays() -> None:
    worker = Worker()
    (shown, ended), (_, kept) = worker.connect(), worker.connect()
    worker.door.enter(shown, Identity(Principal("user", "ada"), "token"))
    worker.door.abort_entered()
    assert ended.aborted
    assert not kept.closed


def test_where_the_lease_is_over_a_connection_without_a_call_stays() -> None:
    worker = Worker(passes=False)
    (called, ended), (silent, kept) = worker.connect(), worker.connect()
    feed(called, GREETING + sent())
    feed(silent, GREETING + PING)
    assert called.called and not silent.called
    worker.door.silence()
    assert ended.aborted
    assert not kept.closed
