"""A broker in memory behind the native protocol: enough of one to test a client against.

It answers every frame kind, stores each sequence once, obeys delivery credit and notes where a
client does not obey publish credit (``violations``).  Tests script it: refuse sends, drop
connections, close handles, damage deliveries, hold answers back.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from danube.core.batch.columns import check_columns
from danube.core.batch.format import read_header, stamp
from danube.core.batch.selection import select
from danube.core.partition.policy import TopicPolicy
from danube.core.protocol import native as wire
from danube.core.protocol.native import FrameFlag, Kind
from danube.errors import (
    DanubeError,
    Fenced,
    InvalidArgument,
    NotFound,
    OwnerMoved,
    PolicyMismatch,
    ProtocolError,
    SequenceGap,
    SubscriptionBusy,
    SubscriptionNotFound,
    TopicExists,
    TopicNotFound,
)
from danube.ids import partition_name
from tests.fakes.registry import FakeRegistry

LEVELS = {"memory": 0, "written": 1, "fsync": 2}


class StoredProducer:
    def __init__(self, producer_id: int) -> None:
        self.producer_id = producer_id
        self.epoch = 0
        self.next_sequence = 0
        self.offsets: dict[int, int] = {}


class Subscription:
    """A cursor and the records that are out; all consumers share it, by the batch."""

    def __init__(self, name: str, mode: str, start: int) -> None:
        self.name = name
        self.mode = mode
        self.next = start
        self.acked: set[int] = set()
        self.returned: deque[tuple[int, int, int]] = deque()  # offset range, redelivery count
        self.consumers: deque[ConsumerHandle] = deque()
        self.nacks: list[wire.Nack] = []

    def give_back(self, consumer: ConsumerHandle) -> None:
        counts = consumer.in_flight
        for offset in sorted(counts):
            if offset not in self.acked:
                self.returned.append((offset, offset + 1, counts[offset] + 1))
        consumer.in_flight = {}


class Partition:
    def __init__(self, name: str, policy: TopicPolicy, topic_id: int) -> None:
        self.name = name
        self.topic_id = topic_id
        self.policy = policy
        self.log: list[tuple[int, bytes]] = []
        self.end = 0
        self.epoch = 1
        self.producers: dict[str, StoredProducer] = {}
        self.subscriptions: dict[str, Subscription] = {}


class ProducerHandle:
    def __init__(self, partition: Partition, producer: StoredProducer, epoch: int) -> None:
        self.partition = partition
        self.producer = producer
        self.epoch = epoch


class ConsumerHandle:
    def __init__(
        self,
        connection: FakeConnection,
        handle: int,
        partition: Partition,
        subscription: Subscription,
        body: Any,
    ) -> None:
        self.connection = connection
        self.handle = handle
        self.partition = partition
        self.subscription = subscription
        self.name = body.consumer
        self.credit_records = body.credit_records
        self.credit_bytes = body.credit_bytes
        self.in_flight: dict[int, int] = {}


class FakeConnection:
    """One client's socket, read by a thread of its own."""

    def __init__(self, broker: FakeBroker, sock: socket.socket) -> None:
        self.broker = broker
        self.sock = sock
        self.greeted = False
        self.closed = False
        self.handles: dict[int, ProducerHandle | ConsumerHandle] = {}
        self.unanswered_bytes = 0
        self.held: list[bytes] = []
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        buffer = bytearray(32 * 1024 * 1024)
        view = memoryview(buffer)
        decoder = wire.FrameDecoder()
        start = end = 0
        with contextlib.suppress(OSError):
            while True:
                count = self.sock.recv_into(view[end:])
                if not count:
                    break
                end += count
                with self.broker.lock:
                    for frame in decoder.frames(view, start, end):
                        if self.closed:
                            break
                        self.broker.on_frame(self, frame, bytes(view[frame.start : frame.end]))
                    self.broker.dispatch()
                start = decoder.position
                if start == end:
                    start = end = 0
                elif len(buffer) - end < 16 * 1024 * 1024:
                    rest = bytes(view[start:end])
                    view[: len(rest)] = rest
                    start, end = 0, len(rest)
        with self.broker.lock:
            self.close()
            self.broker.dispatch()

    def write(self, *frames: bytes) -> None:
        if self.broker.hold_answers:
            self.held += frames
            return
        if not self.closed:
            with contextlib.suppress(OSError):
                self.sock.sendall(b"".join(frames))

    def release(self) -> None:
        frames, self.held = self.held, []
        self.write(*frames)

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        for handle in self.handles.values():
            if isinstance(handle, ConsumerHandle):
                handle.subscription.give_back(handle)
                handle.subscription.consumers.remove(handle)
        self.handles.clear()
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()
        if self in self.broker.connections:
            self.broker.connections.remove(self)


class FakeBroker:
    """Use it in ``with``; ``url`` is where it listens."""

    def __init__(self, publish_credit_bytes: int = 0, port: int = 0) -> None:
        self.lock = threading.RLock()
        self.topics: dict[str, tuple[TopicPolicy, list[str]]] = {}
        self.partitions: dict[str, Partition] = {}
        self.connections: list[FakeConnection] = []
        self.publish_credit_bytes = publish_credit_bytes
        self.violations: list[str] = []
        self.hold_answers = False
        self.refusals: deque[tuple[int, DanubeError]] = deque()
        self.drop_after_publishes = -1
        self.damage_deliveries = 0
        self.frames_seen: list[tuple[int, int]] = []
        self.admin_calls: list[wire.Admin] = []
        self.registry = FakeRegistry()
        self.syncs = 0
        self.when_frame: Callable[[FakeConnection, wire.Frame], None] | None = None
        self._producer_ids = 100
        self._topic_ids = 6
        self._stopped = False
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port = self._listener.getsockname()[1]
        self._accepter = threading.Thread(target=self._accept, daemon=True)
        self._accepter.start()

    @property
    def url(self) -> str:
        return f"danube://127.0.0.1:{self.port}"

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with self.lock:
                    self.connections.append(FakeConnection(self, sock))

    def __enter__(self) -> FakeBroker:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop listening and drop everyone; what is stored stays, for ``again()``."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._accepter.join(5)
        self.drop_connections()

    def again(self) -> None:
        """Listen on the same port once more, as after a restart."""
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self._accepter = threading.Thread(target=self._accept, daemon=True)
        self._accepter.start()

    # -- scripting ------------------------------------------------------------------------------

    def drop_connections(self) -> None:
        with self.lock:
            for connection in list(self.connections):
                connection.close()

    def refuse(self, kind: int, *errors: DanubeError) -> None:
        """Answer the next frames of this kind with these errors."""
        with self.lock:
            self.refusals.extend((kind, error) for error in errors)

    def close_handles(self, error: DanubeError) -> None:
        """Close every handle as an owner does that moves away; un-answered sends stay un-answered."""
        with self.lock:
            for partition in self.partitions.values():
                partition.epoch += 1
            for connection in self.connections:
                for number, handle in list(connection.handles.items()):
                    if isinstance(handle, ConsumerHandle):
                        handle.subscription.give_back(handle)
                        handle.subscription.consumers.remove(handle)
                    else:
                        connection.unanswered_bytes = 0
                    del connection.handles[number]
                    connection.write(wire.error_frame(error, 0, number))

    def hold(self) -> None:
        with self.lock:
            self.hold_answers = True

    def release(self) -> None:
        with self.lock:
            self.hold_answers = False
            for connection in self.connections:
                connection.release()

    def wait_for(self, condition: Callable[[], Any], timeout_s: float = 5.0) -> None:
        """Until ``condition`` holds; AssertionError when it does not in time."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with self.lock:
                if condition():
                    return
            time.sleep(0.002)
        raise AssertionError("the fake broker did not get there in time")

    def payloads(self, partition: str) -> list[bytes]:
        from danube.core.batch.columns import BatchView

        with self.lock:
            log = self.partitions[partition].log
            return [payload for _, batch in log for payload in BatchView(batch).payloads()]

    def seen(self, kind: int) -> int:
        with self.lock:
            return sum(1 for one, _ in self.frames_seen if one == kind)

    # -- frames ---------------------------------------------------------------------------------

    def on_frame(self, connection: FakeConnection, frame: wire.Frame, body: bytes) -> None:
        self.frames_seen.append((frame.kind, len(body)))
        if self.when_frame is not None:
            self.when_frame(connection, frame)
        if not connection.greeted:
            self._greet(connection, frame, body)
            return
        if frame.kind == Kind.PUBLISH:
            connection.unanswered_bytes += len(body)
            if self.publish_credit_bytes and connection.unanswered_bytes > self.publish_credit_bytes:
                self.violations.append(f"publish credit exceeded: {connection.unanswered_bytes}")
        try:
            self._refuse_if_scripted(connection, frame, body)
            self._answer(connection, frame, body)
        except DanubeError as error:
            connection.write(wire.error_frame(error, frame.correlation, frame.handle))
        if frame.kind == Kind.PUBLISH and not self.hold_answers:
            connection.unanswered_bytes -= len(body)

    def _refuse_if_scripted(self, connection: FakeConnection, frame: wire.Frame, body: bytes) -> None:
        """What is stored already is answered as such, as by a broker that looks before it writes."""
        owner = connection.handles.get(frame.handle)
        if frame.kind == Kind.PUBLISH and isinstance(owner, ProducerHandle):
            header = read_header(body)
            if header.base_sequence != owner.producer.next_sequence:
                return
        for position, (kind, error) in enumerate(self.refusals):
            if kind == frame.kind:
                del self.refusals[position]
                raise error

    def _greet(self, connection: FakeConnection, frame: wire.Frame, body: bytes) -> None:
        if frame.kind != Kind.HELLO:
            connection.close()
            return
        hello = wire.decode_control(body, wire.Hello)
        connection.greeted = True
        welcome = wire.Welcome(
            version=hello.versions[0], broker="fake", publish_credit_bytes=self.publish_credit_bytes
        )
        connection.write(wire.control_frame(Kind.WELCOME, welcome, frame.correlation))

    def _answer(self, connection: FakeConnection, frame: wire.Frame, body: bytes) -> None:
        kind, correlation, handle = frame.kind, frame.correlation, frame.handle
        if kind == Kind.PUBLISH:
            self._publish(connection, correlation, handle, body)
        elif kind == Kind.PING:
            connection.write(wire.control_frame(Kind.PONG, None, correlation))
        elif kind == Kind.LOOKUP:
            lookup = wire.decode_control(body, wire.Lookup)
            connection.write(wire.result_frame(msgspec.to_builtins(self.lookup(lookup)), correlation))
        elif kind == Kind.OPEN_PRODUCER:
            opened = self._open_producer(connection, handle, wire.decode_control(body, wire.OpenProducer))
            connection.write(wire.control_frame(Kind.PRODUCER_OPENED, opened, correlation, handle))
        elif kind == Kind.SUBSCRIBE:
            self._subscribe(connection, correlation, handle, wire.decode_control(body, wire.Subscribe))
        elif kind in (Kind.CLOSE_PRODUCER, Kind.CLOSE_CONSUMER):
            owner = connection.handles.pop(handle, None)
            if isinstance(owner, ConsumerHandle):
                owner.subscription.give_back(owner)
                owner.subscription.consumers.remove(owner)
            connection.write(wire.result_frame(None, correlation, handle))
        elif kind == Kind.ADMIN:
            call = wire.decode_control(body, wire.Admin)
            self.admin_calls.append(call)
            connection.write(wire.result_frame(self._admin(call), correlation))
        else:
            self._flow(connection, frame, body)

    def _flow(self, connection: FakeConnection, frame: wire.Frame, body: bytes) -> None:
        consumer = connection.handles.get(frame.handle)
        if not isinstance(consumer, ConsumerHandle):
            return
        subscription = consumer.subscription
        if frame.kind == Kind.CREDIT:
            records, size_bytes = wire.decode_credit(body)
            consumer.credit_records += records
            consumer.credit_bytes += size_bytes
        elif frame.kind == Kind.ACK:
            for start, end in np.frombuffer(body, "<u8").reshape(-1, 2).tolist():
                subscription.acked.update(range(start, end))
                for offset in range(start, end):
                    consumer.in_flight.pop(offset, None)
            if frame.flags & FrameFlag.SYNC:
                self.syncs += 1
                connection.write(wire.result_frame(None, frame.correlation, frame.handle))
        elif frame.kind == Kind.NACK:
            nack = wire.decode_control(body, wire.Nack)
            subscription.nacks.append(nack)
            for start, end in nack.ranges:
                for offset in range(start, end):
                    count = consumer.in_flight.pop(offset, 0)
                    subscription.returned.append((offset, offset + 1, count + (not nack.returned)))

    # -- topics and producers -------------------------------------------------------------------

    def lookup(self, lookup: wire.Lookup) -> wire.TopicView:
        if lookup.topic not in self.topics:
            if not lookup.create:
                raise TopicNotFound(f"topic {lookup.topic!r} does not exist")
            reliable = lookup.reliable is not False
            durability = lookup.durability or ("written" if reliable else "memory")
            self.create(
                lookup.topic, lookup.partitions, TopicPolicy(reliable=reliable, durability=durability)
            )
        policy, partitions = self.topics[lookup.topic]
        if lookup.reliable is not None and lookup.reliable != policy.reliable:
            raise PolicyMismatch("the topic has another delivery mode")
        return wire.TopicView(
            lookup.topic,
            self.partitions[partitions[0]].topic_id,
            partitions,
            policy.reliable,
            policy.durability,
            policy.max_record_bytes,
        )

    def create(self, topic: str, partitions: int, policy: TopicPolicy) -> None:
        names = [partition_name(topic, one) for one in range(partitions)] if partitions else [topic]
        self.topics[topic] = (policy, names)
        self._topic_ids += 1
        for name in names:
            self.partitions[name] = Partition(name, policy, self._topic_ids)

    def partition(self, body: wire.OpenProducer | wire.Subscribe) -> Partition:
        partition = self.partitions.get(body.partition)
        if partition is None or body.topic_id not in (0, partition.topic_id):
            raise TopicNotFound(f"partition {body.partition!r} does not exist")
        return partition

    def _open_producer(
        self, connection: FakeConnection, handle: int, body: wire.OpenProducer
    ) -> wire.ProducerOpened:
        partition = self.partition(body)
        producer = partition.producers.get(body.name)
        if producer is None:
            self._producer_ids += 1
            producer = partition.producers[body.name] = StoredProducer(self._producer_ids)
        if body.producer_id == 0:
            producer.epoch += 1
            producer.next_sequence = 0
            producer.offsets.clear()
        elif (body.producer_id, body.epoch) != (producer.producer_id, producer.epoch):
            raise Fenced("a newer producer has taken over")
        connection.handles[handle] = ProducerHandle(partition, producer, producer.epoch)
        return wire.ProducerOpened(
            producer.producer_id,
            producer.epoch,
            producer.next_sequence,
            partition.policy.durability,
            partition.policy.max_record_bytes,
        )

    def _publish(self, connection: FakeConnection, correlation: int, handle: int, body: bytes) -> None:
        owner = connection.handles.get(handle)
        if not isinstance(owner, ProducerHandle):
            raise OwnerMoved("the handle is not open")
        header = read_header(body)
        check_columns(body, header, owner.partition.policy.max_record_bytes)
        producer, partition = owner.producer, owner.partition
        if header.producer_id != producer.producer_id or header.producer_epoch != producer.epoch:
            raise Fenced("another epoch holds")
        flags = 0
        sequence = header.base_sequence
        if sequence in producer.offsets:
            flags = int(FrameFlag.DUPLICATE)
            offset = producer.offsets[sequence]
        elif sequence != producer.next_sequence:
            raise SequenceGap(f"expected {producer.next_sequence}, got {sequence}")
        else:
            offset = partition.end
            batch = bytearray(body)
            stamp(batch, offset, partition.epoch, time.time_ns() // 1000)
            partition.log.append((offset, bytes(batch)))
            partition.end += header.record_count
            producer.offsets[sequence] = offset
            producer.next_sequence += header.record_count
        if self.drop_after_publishes > 0:
            self.drop_after_publishes -= 1
            if self.drop_after_publishes == 0:
                self.drop_after_publishes = -1
                connection.close()
                return
        level = LEVELS[partition.policy.durability]
        connection.write(
            wire.published_frame(
                correlation, handle, offset, partition.epoch, header.record_count, level, flags
            )
        )

    # -- consumers ------------------------------------------------------------------------------

    def _subscribe(
        self, connection: FakeConnection, correlation: int, handle: int, body: wire.Subscribe
    ) -> None:
        partition = self.partition(body)
        subscription = partition.subscriptions.get(body.subscription)
        if subscription is None:
            if body.epoch:
                raise SubscriptionNotFound("the subscription was deleted")
            start = {"earliest": 0, "latest": partition.end, "offset": body.start_value}.get(body.start, 0)
            subscription = Subscription(body.subscription, body.mode, start)
            partition.subscriptions[body.subscription] = subscription
        if body.mode == "exclusive" and subscription.consumers:
            raise SubscriptionBusy("the subscription has another consumer")
        consumer = ConsumerHandle(connection, handle, partition, subscription, body)
        connection.handles[handle] = consumer
        subscription.consumers.append(consumer)
        active = body.mode != "failover" or subscription.consumers[0] is consumer
        answer = wire.Subscribed(active, 0, partition.end, partition.epoch)
        connection.write(wire.control_frame(Kind.SUBSCRIBED, answer, correlation, handle))

    def dispatch(self) -> None:
        """Deliver what credit allows."""
        for partition in self.partitions.values():
            for subscription in partition.subscriptions.values():
                while self._deliver_one(partition, subscription):
                    pass

    def _deliver_one(self, partition: Partition, subscription: Subscription) -> bool:
        for _ in range(len(subscription.consumers)):
            consumer = subscription.consumers[0]
            if subscription.mode in ("shared", "key_shared"):
                subscription.consumers.rotate(-1)
            if consumer.credit_records <= 0 or consumer.credit_bytes <= 0:
                continue
            while subscription.returned and subscription.returned[0][0] in subscription.acked:
                subscription.returned.popleft()
            if subscription.returned:
                start, end, redelivery = subscription.returned.popleft()
                self._send_range(partition, consumer, start, end, redelivery)
                return True
            if subscription.next < partition.end:
                subscription.next = self._send_range(partition, consumer, subscription.next, 1 << 62, 0)
                return True
        return False

    def _send_range(
        self, partition: Partition, consumer: ConsumerHandle, start: int, end: int, redelivery: int
    ) -> int:
        base, batch = next(one for one in reversed(partition.log) if one[0] <= start)
        header = read_header(batch)
        stop: int = min(end, base + header.record_count, start + consumer.credit_records)
        if (start, stop) != (base, base + header.record_count):
            batch = select(batch, header, np.arange(start - base, stop - base))
        consumer.credit_records -= stop - start
        consumer.credit_bytes -= len(batch)
        consumer.in_flight.update(dict.fromkeys(range(start, stop), redelivery))
        if self.damage_deliveries:
            self.damage_deliveries -= 1
            batch = batch[:-9] + bytes([batch[-9] ^ 1]) + batch[-8:]
        consumer.connection.write(
            wire.deliver_header(consumer.handle, len(batch), redelivery, stop - start) + batch
        )
        return stop

    # -- administration -------------------------------------------------------------------------

    def _admin(self, call: wire.Admin) -> Any:
        arguments = call.args
        if call.op.startswith("schema."):
            return self.registry.answer(call.op, arguments)
        if call.op == "create_topic":
            if arguments["topic"] in self.topics:
                raise TopicExists(f"topic {arguments['topic']!r} exists")
            policy = msgspec.convert(arguments["policy"], TopicPolicy)
            self.create(arguments["topic"], arguments["partitions"], policy)
            return None
        if call.op == "topic":
            view = self.lookup(wire.Lookup(arguments["topic"]))
            policy = self.topics[arguments["topic"]][0]
            return {**msgspec.to_builtins(view), "policy": msgspec.to_builtins(policy)}
        if call.op == "list_topics":
            return [
                msgspec.to_builtins(self.lookup(wire.Lookup(topic)))
                for topic in sorted(self.topics)
                if not arguments["namespace"] or topic.startswith(f"/{arguments['namespace']}/")
            ]
        if call.op == "delete_topic":
            for name in self.topics.pop(arguments["topic"])[1]:
                del self.partitions[name]
            return None
        if call.op == "update_topic":
            policy, names = self.topics[arguments["topic"]]
            changed = msgspec.convert(msgspec.to_builtins(policy) | arguments["policy"], TopicPolicy)
            self.topics[arguments["topic"]] = (changed, names)
            return None
        if call.op == "status":
            return {"broker": "fake", "workers": 1}
        if call.op == "forget_subscription":
            return {}
        return self._admin_of_partition(call)

    def _admin_of_partition(self, call: wire.Admin) -> Any:
        partition = self.partitions.get(call.partition)
        if partition is None:
            raise ProtocolError(f"{call.op} needs a partition")
        if call.op == "describe_partition":
            return {"partition": partition.name, "start": 0, "high_watermark": partition.end}
        if call.op == "list_subscriptions":
            return [
                {"subscription": one.name, "mode": one.mode, "lag": partition.end - len(one.acked)}
                for one in partition.subscriptions.values()
            ]
        if call.op in ("partition_ends", "subscription_progress", "row_mark"):
            raise InvalidArgument(f"operation {call.op!r} is not known")  # as brokers of before say
        subscription = partition.subscriptions.get(call.args["subscription"])
        if subscription is None:
            raise NotFound(f"subscription {call.args['subscription']!r} does not exist")
        if call.op == "describe_subscription":
            return {
                "mode": subscription.mode,
                "lag": partition.end - len(subscription.acked),
                "consumers": len(subscription.consumers),
            }
        if call.op == "seek":
            subscription.next = {"earliest": 0, "latest": partition.end}.get(
                call.args["kind"], call.args["value"]
            )
            subscription.acked.clear()
        elif call.op == "delete_subscription":
            del partition.subscriptions[call.args["subscription"]]
        return None
