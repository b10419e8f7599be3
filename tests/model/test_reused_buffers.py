"""Memory that is used again is poisoned as soon as it is given back: no payload carries old bytes, or poison.

Short payloads follow long ones through the real doors, rings, clients and caches.  Arrays that begin with
whatever lay in memory (``np.empty``) begin with poison as well.

``DANUBE_POISON_TURNS``: for how long it is tried (default 400).
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import pytest

import danube
from danube import sync
from danube.broker.routing.router import Router
from danube.broker.worker.places import Places
from danube.client.aio.connection import Link
from danube.client.blocking.connection import BlockingLink
from danube.core import kernels
from danube.core.batch.columns import BatchView, encode
from danube.core.http2 import frames as http2
from danube.core.protocol import native as wire
from danube.core.protocol.grpc import frame_message
from danube.core.protocol.native import Hello, Kind, OpenProducer, Subscribe
from danube.ipc.channel import Channel
from danube.ipc.region import Region
from danube.ipc.ring import RingReader
from danube.server.messages.sent_messages import FEW, encode_messages, read_together
from danube.server.native import NativeConnection, NativeServer
from danube.server.proto import DanubeApi_pb2 as pb
from danube.server.receive_buffers import ReceiveBuffer, ReceiveBuffers
from danube.wal.cold import cache as cold_cache
from danube.wal.cold.cache import ColdCache
from danube.wal.cold.segment import ColdSegment
from tests.fakes.broker import FakeBroker
from tests.unit.broker_parts import TOPIC, RoutedBench, frames_in
from tests.unit.http2_parts import FIELDS, GREETING, data, headers, parsed, response_block
from tests.unit.native_door import FakeTransport, feed
from tests.unit.server.grpc.test_grpc_placing import SEND, Worker
from tests.unit.server.grpc.test_grpc_placing import feed as feed_call
from tests.unit.wal.cold import test_cold_cache as cold

TURNS: Final = int(os.environ.get("DANUBE_POISON_TURNS", "400"))
POISON: Final = 0xA5
LONGEST: Final = 9_000
Feed = Callable[[bytes], None]
_empty = np.empty


def payload(number: int, size: int) -> bytes:
    """Bytes that tell their number; none of them is poison."""
    return b"%08d" % number + bytes([number % 0x80]) * size


def size_of_next(source: random.Random) -> int:
    return source.randrange(40) if source.random() < 0.6 else source.randrange(1_000, LONGEST)


def poison(room: Any) -> None:
    view = memoryview(room).cast("B")
    view[:] = bytes([POISON]) * len(view)


def _poisoned_array(*shape: Any, **named: Any) -> Any:
    made = _empty(*shape, **named)
    if made.nbytes and not made.dtype.hasobject:
        poison(made.reshape(-1).view(np.uint8))
    return made


@pytest.fixture(autouse=True)
def poisoned_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels.load()
    monkeypatch.setattr(np, "empty", _poisoned_array)


# -- the native door, the log and the deliveries ----------------------------------------------------


class PoisonedBuffers(ReceiveBuffers):
    """Receive buffers of a worker."""

    def end_turn(self) -> None:
        super().end_turn()
        for one in (self.scratch, *self._free):
            poison(one.view)

    def give_back(self, buffer: ReceiveBuffer) -> None:
        super().give_back(buffer)
        if not buffer.lent:
            poison(buffer.view)


class LateTransport(FakeTransport):
    """Keeps what it was given until the kernel takes it, as event loops do."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[bytes | memoryview] = []

    def writelines(self, parts: list[bytes | memoryview]) -> None:
        self.parts += parts

    def write(self, data: bytes) -> None:
        self.parts.append(data)

    def take(self) -> bytes:
        parts, self.parts = self.parts, []
        return b"".join(parts)


class NativeSite:
    """Producers and consumers of one topic at a real door, router, shard and log."""

    def __init__(self, root: Path, **policy: Any) -> None:
        self.bench = RoutedBench(root)
        self.flush_pending = False
        self.bench.proposals.create(TOPIC, **policy)
        self.server = NativeServer(
            0, cast(Router, self.bench.router), connections_max=10, places=Places(100),
            handshake_timeout_s=60, session_timeout_ms=0, turns=self, count=lambda name, amount: None,
        )  # fmt: skip
        self.server.buffers = PoisonedBuffers(4096)

    def schedule_turn(self) -> None:
        """The test has one after another."""

    def run_turn(self) -> None:
        self.turn()

    def turn(self) -> None:
        bench = self.bench
        bench.turn()
        bench.syncer.step()
        bench.turn()
        self.server.flush()
        self.server.hand_over()

    def connect(self, kind: Kind, body: Any, opened: Kind) -> tuple[NativeConnection, LateTransport]:
        """A connection with a producer or a consumer on handle 1."""
        transport, connection = LateTransport(), self.server.factory()
        connection.connection_made(cast(asyncio.BaseTransport, transport))
        feed(connection, wire.control_frame(Kind.HELLO, Hello(), 1))
        feed(connection, wire.control_frame(kind, body, 2, 1))
        self.turn()
        told = [frame.kind for frame in frames_in(transport.take())]
        assert told == [Kind.WELCOME, opened]
        return connection, transport


class Sender:
    """A producer whose frames come in pieces, over turns."""

    def __init__(self, connection: NativeConnection, source: random.Random) -> None:
        self.connection = connection
        self._source = source
        self._unsent = b""
        self._correlation = 10

    def publish(self, payloads: list[bytes]) -> None:
        keys = [one[7:8] for one in payloads]
        batch = encode(payloads, keys=keys, publish_time_us=1).to_bytes()
        self._correlation += 1
        self._unsent += wire.frame_header(Kind.PUBLISH, len(batch), self._correlation, 1) + batch

    def send(self, *, whole: bool = False) -> None:
        end = len(self._unsent) if whole else self._source.randrange(len(self._unsent) + 1)
        feed(self.connection, self._unsent[:end], self._source.choice((200, 3_000, 1 << 20)))
        self._unsent = self._unsent[end:]


class Taker:
    """A consumer that gives credit back and acks."""

    def __init__(self, connection: NativeConnection, transport: LateTransport) -> None:
        self.connection = connection
        self._transport = transport

    def take(self) -> list[bytes]:
        found: list[bytes] = []
        for frame in frames_in(self._transport.take()):
            if frame.kind != Kind.DELIVER:
                continue
            for offset, one in frame.records:
                found.append(one)
                ack = offset.to_bytes(8, "little") + (offset + 1).to_bytes(8, "little")
                feed(self.connection, wire.ack_frame(1, ack))
        if found:
            feed(self.connection, wire.credit_frame(1, len(found), 1 << 20))
        return found


WAYS: Final = [
    ("shared", {}), ("exclusive", {}), ("key_shared", {}), ("shared", {"durability": "fsync"}),
    ("shared", {"reliable": False, "durability": "memory"}),
]  # fmt: skip


@pytest.mark.parametrize(("mode", "policy"), WAYS)
def test_records_through_the_native_door_are_theirs_alone(
    tmp_path: Path, source: random.Random, mode: str, policy: dict[str, Any]
) -> None:
    def run() -> None:
        site = NativeSite(tmp_path, **policy)
        takers = []
        for number in range(2 if mode == "key_shared" else 1):
            body = Subscribe(TOPIC, "s", f"c{number}", mode, "earliest", credit_records=10_000,
                             credit_bytes=1 << 28)  # fmt: skip
            takers.append(Taker(*site.connect(Kind.SUBSCRIBE, body, Kind.SUBSCRIBED)))
        senders = []
        for number in range(3):
            opened = OpenProducer(TOPIC, f"p{number}")
            connection, _ = site.connect(Kind.OPEN_PRODUCER, opened, Kind.PRODUCER_OPENED)
            senders.append(Sender(connection, source))
        sent: list[bytes] = []
        found: list[bytes] = []
        for _ in range(TURNS):
            for sender in senders:
                if source.random() < 0.7:
                    ours = [
                        payload(len(sent) + one, size_of_next(source))
                        for one in range(source.choice((1, 1, 2, 5)))
                    ]
                    sender.publish(ours)
                    sent += ours
                sender.send()
            site.turn()
            if source.random() < 0.3:  # else their bytes wait for the kernel, over turns
                for taker in takers:
                    found += taker.take()
        for sender in senders:
            sender.send(whole=True)
        for _ in range(TURNS):
            site.turn()
            for taker in takers:
                found += taker.take()
            if len(found) >= len(sent):
                break
        assert sorted(found) == sorted(sent)
        assert len(sent) > TURNS and not any(POISON in one for one in found)
        if policy.get("reliable", True):  # live readers are sent copies of what the log writes
            assert sorted(one for _, one in site.bench.stored()) == sorted(sent)

    asyncio.run(_inside(run))


async def _inside(run: Callable[[], None]) -> None:
    run()


# -- the gRPC door ----------------------------------------------------------------------------------


def test_calls_through_the_grpc_door_are_theirs_alone(source: random.Random) -> None:
    """Each call is answered with its message, a turn after the bytes that it came in were poisoned."""
    block = response_block([(":path", SEND) if name == ":path" else (name, text) for name, text in FIELDS])

    def run() -> None:
        worker = Worker(passes=False)
        greeting = GREETING + http2.frame(http2.WINDOW_UPDATE, 0, 0, (1 << 30).to_bytes(4, "big"))
        clients = [worker.connect() for _ in range(3)]
        unsent = [greeting for _ in clients]
        sent: list[dict[int, bytes]] = [{} for _ in clients]
        for turn in range(TURNS + 1):
            for number, (connection, _) in enumerate(clients):
                for _ in range(source.choice((0, 1, 3)) if turn < TURNS else 0):
                    stream_id = 2 * len(sent[number]) + 1
                    message = payload(10_000 * number + stream_id, size_of_next(source))
                    sent[number][stream_id] = message
                    unsent[number] += headers(stream_id, block=block)
                    unsent[number] += data(stream_id, frame_message(message), ended=True)
                end = len(unsent[number]) if turn == TURNS else source.randrange(len(unsent[number]) + 1)
                rest = unsent[number][:end]
                while rest:
                    size = source.choice((9, 500, 20_000))
                    feed_call(connection, rest[:size])
                    poison(worker.door.scratch)
                    rest = rest[size:]
                unsent[number] = unsent[number][end:]
            worker.turn()
        worker.turn()
        for (_, transport), wanted in zip(clients, sent, strict=True):
            answers: dict[int, bytes] = {}
            for frame in parsed(transport.written):
                if frame.kind == "DATA":
                    answers[frame.stream_id] = answers.get(frame.stream_id, b"") + frame.payload
            assert answers == {stream_id: frame_message(one) for stream_id, one in wanted.items()}
            assert len(wanted) > TURNS // 2

    asyncio.run(_inside(run))


def test_messages_of_a_turn_that_are_read_together_are_theirs_alone(source: random.Random) -> None:
    """Every array between the calls and the batch begins with poison."""
    place = pb.MsgID(producer_id=7, topic_name=TOPIC, broker_addr="http://h:1")
    for turn in range(TURNS):
        wanted = [payload(one, size_of_next(source)) for one in range(source.randrange(FEW, 4 * FEW))]
        datas = [
            pb.StreamMessage(
                request_id=one, msg_id=place, payload=wanted[one], producer_name="p", publish_time=1
            )
            for one in range(len(wanted))
        ]
        lots = read_together([one.SerializeToString() for one in datas])
        assert lots is not None and len(lots) == 1
        made = encode_messages(lots[0].columns, producer_name="p", origin="", schema_id=turn)
        view = BatchView(made.to_bytes())
        assert view.payloads() == wanted
        assert (view.schema_id, view.record_count) == (turn, len(wanted))


# -- rings between workers --------------------------------------------------------------------------


@pytest.fixture
def poisoned_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a reader releases is poisoned before the writer is told."""
    release = RingReader.release

    def poisoned(self: RingReader) -> bool:
        start, slots = self._released, self._slots
        size = (self._position - start) % (1 << 64)
        start %= len(slots)
        poison(slots[start : start + size])
        poison(slots[: max(0, start + size - len(slots))])
        return release(self)

    monkeypatch.setattr(RingReader, "release", poisoned)


@pytest.mark.usefixtures("poisoned_slots")
def test_records_through_a_ring_are_theirs_alone(source: random.Random) -> None:
    region = Region.create(2, ring_bytes=16 * 1024)
    try:
        for worker in range(2):
            region.announce(worker, 10 + worker)
        writer, reader = (Channel(region, worker, 10 + worker) for worker in range(2))
        sent: list[bytes] = []
        found: list[bytes] = []
        waiting: list[bytes] = []
        for _ in range(20 * TURNS):
            if not waiting:
                waiting = [payload(len(sent), 4 * size_of_next(source))]
            if writer.send(1, 7, [waiting[0][:5], memoryview(waiting[0])[5:]]):
                sent += waiting
                waiting = []
            writer.flush()
            if source.random() < 0.5:
                kept = reader.poll(source.choice((1, 1 << 20)))
                writer.flush()
                found += [bytes(view) for _, _, view in kept]
                reader.release()
        for _ in range(20 * TURNS):
            whole = writer.flush()
            kept = reader.poll()
            found += [bytes(view) for _, _, view in kept]
            reader.release()
            if whole and not kept:
                break
        assert found == sent and len(sent) > TURNS
    finally:
        region.close()


# -- clients ----------------------------------------------------------------------------------------


@pytest.fixture
def poisoned_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a client's session has taken is poisoned before the next read."""
    received, updated = BlockingLink._received, Link.buffer_updated

    def after(link: Any) -> None:
        poison(link._view[: link._start])
        poison(link._view[link._end :])

    def blocking(self: BlockingLink, *given: Any) -> None:
        received(self, *given)
        after(self)

    def aio(self: Link, count: int) -> None:
        updated(self, count)
        after(self)

    monkeypatch.setattr(BlockingLink, "_received", blocking)
    monkeypatch.setattr(Link, "buffer_updated", aio)


@pytest.fixture
def fake_broker() -> Iterator[FakeBroker]:
    with FakeBroker() as running:
        yield running


def payloads(source: random.Random) -> list[bytes]:
    return [payload(number, 10 * size_of_next(source)) for number in range(TURNS)]


@pytest.mark.usefixtures("poisoned_links")
def test_messages_that_a_blocking_client_keeps_stay_as_they_came(
    fake_broker: FakeBroker, source: random.Random
) -> None:
    wanted = payloads(source)
    with sync.connect(fake_broker.url) as client:
        with client.producer(TOPIC) as producer:
            producer.send_many(wanted)
        with client.consumer(TOPIC, "s", start="earliest") as consumer:
            kept = [consumer.receive(timeout=120) for _ in wanted]
            assert [bytes(one.payload) for one in kept] == wanted


@pytest.mark.usefixtures("poisoned_links")
def test_batches_that_a_blocking_client_keeps_stay_as_they_came(
    fake_broker: FakeBroker, source: random.Random
) -> None:
    wanted, kept, count = payloads(source), [], 0
    with sync.connect(fake_broker.url) as client:
        with client.producer(TOPIC) as producer:
            producer.send_many(wanted)
        with client.consumer(TOPIC, "s", start="earliest") as consumer:
            for batch in consumer.batches(max_records=7):
                kept.append(batch)
                count += len(batch)
                if count == len(wanted):
                    break
            assert [one for batch in kept for one in batch.payloads] == wanted


@pytest.mark.usefixtures("poisoned_links")
def test_messages_that_an_asyncio_client_keeps_stay_as_they_came(
    fake_broker: FakeBroker, source: random.Random
) -> None:
    wanted = payloads(source)

    async def story() -> None:
        async with danube.connect(fake_broker.url) as client:
            async with client.producer(TOPIC) as producer:
                await producer.send_many(wanted)
            async with client.consumer(TOPIC, "s", start="earliest") as consumer:
                kept = [await consumer.receive(timeout=120) for _ in wanted]
                assert [bytes(one.payload) for one in kept] == wanted

    asyncio.run(story())


# -- the cache of blocks ----------------------------------------------------------------------------

small_blocks = cold.small_blocks


@pytest.mark.usefixtures("small_blocks")
def test_records_from_cached_blocks_are_theirs_alone(
    tmp_path: Path, source: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block that gave way holds poison until it is fetched again."""
    punched: list[int] = []

    def punch(self: ColdCache, segment: ColdSegment, start: int, end: int) -> None:
        with open(segment.file.path, "r+b") as file:
            file.seek(start)
            file.write(bytes([POISON]) * (end - start))
        punched.append(start)

    monkeypatch.setattr(cold_cache.ColdCache, "_punch", punch)
    entry, content = cold.sealed(tmp_path / "log")
    store = cold.Store(tmp_path, entry, content, bytes_max=24 * cold.BLOCK)
    wanted = cold.expected(entry)
    for _ in range(TURNS):
        offset = source.randrange(entry.end_offset)
        chunk = store.read(offset, source.choice((100, cold.BLOCK))).chunk
        found = [one for one in cold.records_in(chunk.data) if one[0] >= offset]
        assert found and not chunk.damage
        assert found == wanted[offset : offset + len(found)]
    assert len(punched) > TURNS // 2
