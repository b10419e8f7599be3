"""Opening a producer or consumer: the plan from a topic's name to a machine for every partition."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any, TypedDict

import msgspec

from danube.client.machine.admin import Start, failure_policy_of, start_of, view_of
from danube.client.machine.publishing import PartitionProducer
from danube.client.machine.reply import Plan
from danube.client.machine.requests import Timer
from danube.client.machine.session import Session
from danube.client.machine.subscribing import PartitionConsumer
from danube.client.records.inbox import Inbox
from danube.client.records.outbox import Outbox, ProducerOptions
from danube.core.dispatch.consumer_window import WINDOW_FIRST, WINDOW_MAX, ConsumerWindow
from danube.core.partition.policy import Durability, FailurePolicy
from danube.core.protocol import native as wire
from danube.core.protocol.native import Kind
from danube.errors import InvalidArgument, OperationTimeout, PolicyMismatch
from danube.ids import check_label, check_topic_name
from danube.limits import DELIVER_CREDIT_BYTES_MAX, MAX_UNACKED_LIMIT, MIB, PARTITIONS_MAX

MODES = ("shared", "exclusive", "failover", "key_shared")
PREFETCH_BYTES = 8 * MIB
PREFETCH_BYTES_MIN = 256 * 1024


class ProducerKeywords(TypedDict, total=False):
    """Keywords of client.producer() besides topic, name and schema."""

    reliable: bool | None
    durability: str | None
    partitions: int
    compression: str
    linger_us: int
    batch_bytes: int
    max_in_flight_bytes: int
    timeout: float | None


class ConsumerKeywords(TypedDict, total=False):
    """Keywords of client.consumer() besides topic, subscription, mode and schema."""

    start: Start
    name: str | None
    prefetch_records: int | None
    prefetch_bytes: int
    filters: Sequence[str]
    max_unacked: int
    failure: FailurePolicy | dict[str, Any] | None
    temporary: bool


class ConsumerOptions(msgspec.Struct, kw_only=True):
    """Arguments of client.consumer(); checked when made."""

    topic: str
    subscription: str
    name: str
    mode: str
    start: tuple[str, int]
    prefetch_records: int | None = None
    prefetch_bytes: int = PREFETCH_BYTES
    filters: list[str]
    max_unacked: int = 0
    failure: FailurePolicy | None
    temporary: bool = False


def seconds_as_ns(seconds: float, what: str) -> int:
    if not 0 < seconds <= 86_400:
        raise InvalidArgument(f"{what} of {seconds} s is not valid", hint="seconds above 0, at most a day")
    return int(seconds * 1e9)


def producer_options(
    topic: str, name: str | None, timeout_ns: int, *, timeout: float | None = None, **options: Any
) -> ProducerOptions:
    """Make the options of a producer, checked without a broker; ``timeout_ns`` is the default timeout."""
    check_topic_name(topic)
    name = name or f"producer-{uuid.uuid4().hex}"
    timeout_ns = timeout_ns if timeout is None else seconds_as_ns(timeout, "timeout")
    made = ProducerOptions(topic=topic, name=name, timeout_ns=timeout_ns, **options)
    check_label(made.name, "producer")
    if made.durability is not None:
        Durability.parse(made.durability)
    if not 0 <= made.partitions <= PARTITIONS_MAX:
        raise InvalidArgument(f"partitions must be 0 to {PARTITIONS_MAX}, not {made.partitions}")
    if not 0 <= made.linger_us <= 10_000_000:
        raise InvalidArgument(f"linger_us must be 0 to 10000000, not {made.linger_us}")
    return made


def consumer_options(
    topic: str,
    subscription: str,
    mode: str,
    *,
    start: Start = "latest",
    name: str | None = None,
    filters: Sequence[str] = (),
    failure: FailurePolicy | dict[str, Any] | None = None,
    **options: Any,
) -> ConsumerOptions:
    """Make the options of a consumer, checked without a broker."""
    check_topic_name(topic)
    check_label(subscription, "subscription")
    name = name or f"consumer-{uuid.uuid4().hex}"
    check_label(name, "consumer")
    known_mode = mode.replace("-", "_").replace("fail_over", "failover")
    if known_mode not in MODES:
        raise InvalidArgument(
            f"subscription mode {mode!r} is not known", hint="use shared, exclusive, failover or key_shared"
        )
    if isinstance(filters, str):
        raise InvalidArgument("filters is a list of patterns, not text", hint=f"use [{filters!r}]")
    made = ConsumerOptions(
        topic=topic,
        subscription=subscription,
        name=name,
        mode=known_mode,
        start=start_of(start),
        filters=list(filters),
        failure=failure_policy_of(failure),
        **options,
    )
    records, size_bytes = made.prefetch_records, made.prefetch_bytes
    if records is not None and not 1 <= records <= MAX_UNACKED_LIMIT:
        raise InvalidArgument(f"prefetch_records must be 1 to {MAX_UNACKED_LIMIT}, not {records}")
    if not 1 <= size_bytes <= DELIVER_CREDIT_BYTES_MAX:
        raise InvalidArgument(f"prefetch_bytes must be 1 to {DELIVER_CREDIT_BYTES_MAX}, not {size_bytes}")
    return made


def find_topic(session: Session, lookup: wire.Lookup) -> Plan[wire.TopicView]:
    """Find or make a topic; raise PolicyMismatch where it is not as reliable as was asked for."""
    view = view_of((yield session.request(Kind.LOOKUP, lookup)))
    if lookup.reliable is not None and view.reliable != lookup.reliable:
        raise PolicyMismatch(
            f"topic {view.topic} is {'reliable' if view.reliable else 'not reliable'}",
            why=f"the producer asked for reliable={lookup.reliable}",
            hint="leave reliable out to take the topic as it is",
        )
    return view


def open_producer(session: Session, options: ProducerOptions) -> Plan[Outbox]:
    """Find or make the topic, open a producer of each partition, and put an outbox before them."""
    lookup = wire.Lookup(options.topic, True, options.partitions, options.reliable, options.durability or "")
    view = yield from find_topic(session, lookup)
    session.brokers.learn(view)
    partitions = [
        PartitionProducer(
            session.brokers.serving(view, index),
            options.name,
            name,
            index,
            options.timeout_ns,
            view.topic_id,
        )
        for index, name in enumerate(view.partitions)
    ]
    yield from _open_all(session, partitions, f"opening the producer on {options.topic}")
    return Outbox(options, partitions)


def open_consumer(
    session: Session, options: ConsumerOptions, message_cls: Callable[..., Any], batch_cls: Callable[..., Any]
) -> Plan[Inbox[Any, Any]]:
    """Find the topic, subscribe to each partition, and merge them in an inbox."""
    view = yield from find_topic(session, wire.Lookup(options.topic))
    size_bytes = max(options.prefetch_bytes // len(view.partitions), PREFETCH_BYTES_MIN)
    size_bytes = min(size_bytes, options.prefetch_bytes)
    fixed = options.prefetch_records
    session.brokers.learn(view)
    partitions = [
        PartitionConsumer(
            session.brokers.serving(view, index),
            wire.Subscribe(
                partition=name,
                subscription=options.subscription,
                consumer=options.name,
                mode=options.mode,
                start=options.start[0],
                start_value=options.start[1],
                filters=options.filters,
                credit_records=fixed or WINDOW_FIRST,
                credit_bytes=size_bytes,
                max_unacked=options.max_unacked,
                failure=options.failure,
                topic_id=view.topic_id,
                temporary=options.temporary,
            ),
            index,
            view.reliable,
            ConsumerWindow(fixed or WINDOW_FIRST, least=fixed or 1, most=fixed or WINDOW_MAX),
        )
        for index, name in enumerate(view.partitions)
    ]
    inbox: Inbox[Any, Any] = Inbox(options.topic, partitions, message_cls, batch_cls)
    yield from _open_all(session, partitions, f"subscribing to {options.topic}")
    return inbox


def _open_all(
    session: Session, partitions: Sequence[PartitionProducer | PartitionConsumer], what: str
) -> Plan[None]:
    """Start all and wait for all; if one fails or the time is over, close the others."""
    timeout_ns = session.request_timeout_ns
    timer: Timer = session.call_at(
        session.now_ns() + timeout_ns, lambda: _time_out(partitions, what, timeout_ns)
    )
    try:
        for partition in partitions:
            partition.start()
        for partition in partitions:
            yield partition.opened
    except BaseException:
        for partition in partitions:
            partition.close()
        raise
    finally:
        timer.cancel()


def _time_out(
    partitions: Sequence[PartitionProducer | PartitionConsumer], what: str, timeout_ns: int
) -> None:
    for partition in partitions:
        error = partition.last_error
        partition.opened.fail(
            OperationTimeout(
                f"{what} took longer than {timeout_ns / 1e9:g} s",
                why=str(error or "the broker did not answer"),
                hint=getattr(error, "hint", "") or "try again, or look at the broker's log",
            )
        )
