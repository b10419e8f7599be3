"""Tail of each partition, which only the running broker has: its present end, and its newest records.

Records are read through a temporary subscription, so the right to consume is enough.  It goes with its
consumer.  A broker of before keeps it: its name has ``danube-spark-``, and it is deleted after the read.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from danube.client.blocking.client import Client
from danube.client.machine.admin import TopicInfo
from danube.client.machine.received import ReceivedBatch
from danube.client.machine.subscribing import PartitionConsumer
from danube.core.batch.format import BODY_CRC_START, pack_header
from danube.core.dispatch.consumer_window import ConsumerWindow
from danube.core.partition.policy import READER
from danube.core.placement.recovered import History
from danube.core.protocol import native as wire
from danube.errors import DanubeError, FetchPending, InvalidArgument, NotAllowed, OperationTimeout
from danube.limits import MIB
from danube.spark.history.access import ENVIRONMENT, BrokerAccess
from danube.wal.segments.holes import Hole, HoleKind

SUBSCRIPTION_PREFIX: Final = "danube-spark-"
_WAIT_S: Final = 30.0
_CLOSE_S: Final = 5.0
_ASK_S: Final = 0.2
_QUIET_S: Final = 0.5  # then it is asked whether anything is left
_JOIN_BYTES: Final = 4 * MIB
_CREDIT_RECORDS: Final = 65_536
_CREDIT_BYTES: Final = 16 * MIB


Lose = Callable[[int, str], None]  # how many records, and why
_LOSSES: Final = {
    "damaged": "they are damaged where the broker has them",
    "expired": "they expired while they were read",
}


class PartitionEnds(NamedTuple):
    """Records ``start .. end`` of a partition can be read from the broker.

    ``holes``: those among them that no record has; ``histories`` as the broker's metadata names them.
    """

    start: int
    end: int
    holes: tuple[Hole, ...] = ()
    histories: tuple[History, ...] = ()


class Tail:
    """One broker, connected when it is first asked; for one thread."""

    def __init__(self, url: str, access: BrokerAccess = ENVIRONMENT) -> None:
        self._url = url
        self._access = access
        self._client: Client | None = None

    @classmethod
    def over(cls, client: Client) -> Tail:
        """On a client that is open and stays its owner's: not to be closed."""
        tail = cls("")
        tail._client = client
        return tail

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _live(self) -> Client:
        if self._client is None:
            self._client = self._access.connect(self._url).open()
        return self._client

    def topics(self) -> list[TopicInfo]:
        return self._live().admin.list_topics()

    def ends(self, topic: str) -> list[tuple[str, PartitionEnds]]:
        """Physical name and ends of every partition, in order; TopicNotFound if there is no topic.

        FetchPending if a partition's start stays unknown: its broker has not heard from the store.
        """
        end_s = time.monotonic() + _WAIT_S
        while True:
            described = self._live().admin.topic_ends(topic)
            unknown = [str(facts["partition"]) for facts in described if facts["start"] is None]
            if not unknown:
                return [(str(facts["partition"]), _ends_of(facts)) for facts in described]
            if time.monotonic() >= end_s:
                raise _unknown(unknown[0])
            time.sleep(_ASK_S)

    def offset_at_time(self, partition: str, time_us: int) -> int:
        """Offset of the first record of a physical partition that was appended then or later, or its end."""
        time_us = max(0, time_us)
        told = asked(self._live(), "offset_at", partition, _WAIT_S, kind="time", value=time_us)
        return int(told["offset"])

    def read(
        self, partition: str, start: int, end: int, lose: Lose | None = None
    ) -> Iterator[tuple[NDArray[np.uint8], int]]:
        """Records ``start .. end`` of a physical partition: whole stored batches, one after the other, and
        the offset from which on they count.

        The first and the last may hold more than that.  ``lose`` is told why some could not be sent.
        OperationTimeout where the broker sends nothing for half a minute, though something is left.
        """
        parts: list[bytes] = []
        gathered, at, group = 0, start, start
        for content, first, behind in self._batches(partition, start, end, lose):
            if behind <= at:
                continue  # sent again after a lost connection
            if parts and (first < at or gathered >= _JOIN_BYTES):
                yield np.frombuffer(b"".join(parts), np.uint8), group
                parts, gathered, group = [], 0, at
            parts.append(content)
            gathered, at = gathered + len(content), behind
        if parts:
            yield np.frombuffer(b"".join(parts), np.uint8), group

    def _batches(
        self, partition: str, start: int, end: int, lose: Lose | None
    ) -> Iterator[tuple[bytes, int, int]]:
        """Yield stored batches with their first offset and their end, until no record is left below the end.

        All records are acked, so the broker's count of settled records shows the end.  Offsets alone do not,
        because compaction may have removed the last records.
        """
        client = self._live()
        session, connection = client._session, client._connection
        name = _subscription_name(session.welcome.principal)
        body = wire.Subscribe(
            partition=partition, subscription=name, consumer=name, mode="exclusive", start="offset",
            start_value=start, credit_records=_CREDIT_RECORDS, credit_bytes=_CREDIT_BYTES, failure=READER,
            temporary=True,
        )  # fmt: skip
        window = ConsumerWindow(_CREDIT_RECORDS, least=_CREDIT_RECORDS, most=_CREDIT_RECORDS)
        consumer = PartitionConsumer(session, body, 0, reliable=True, window=window)
        try:
            with connection.lock:
                consumer.start()
            connection.wait(consumer.opened, _WAIT_S, f"subscribing to {partition}")
            at, silent_s = start, time.monotonic() + _WAIT_S
            while at < end:
                if not connection.wait_until(lambda: bool(consumer.ready or consumer.failure), _QUIET_S):
                    if self._state(client, partition, name).get("ack_floor", 0) >= end:
                        break
                    if time.monotonic() >= silent_s:
                        raise _silent(partition, at, end, consumer.waiting)
                    continue
                with connection.lock:
                    consumer.asked_for_more()
                    batch = _taken(consumer)
                    if batch is None:
                        continue
                    first, at = int(batch.offsets[0]), int(batch.offsets[-1]) + 1
                    consumer.ack_ranges([(first, at)])
                yield pack_header(batch.header)[:BODY_CRC_START] + batch.body, first, at
                silent_s = time.monotonic() + _WAIT_S
            if lose is not None:
                _tell_lost(self._state(client, partition, name), lose)
        finally:
            self._forget(client, consumer, partition, name)

    @staticmethod
    def _state(client: Client, partition: str, name: str) -> Mapping[str, Any]:
        """How the subscription stands; empty if the broker does not say now."""
        try:
            return _progress(client, partition, name)
        except NotAllowed:
            raise
        except DanubeError:
            return {}

    @staticmethod
    def _forget(client: Client, consumer: PartitionConsumer, partition: str, name: str) -> None:
        """Unsubscribe, and delete the subscription where it does not go by itself."""
        connection = client._connection
        try:
            with connection.lock:
                closed = consumer.close()
            connection.wait(closed, _CLOSE_S)
            opened = consumer.opened
            if opened.error is None and opened.settled and opened.value.temporary:
                return
            asked(client, "delete_subscription", partition, _CLOSE_S, subscription=name)
        except DanubeError:
            pass  # a broker that is gone takes the reader with it, and not its subscription


def _subscription_name(principal: str) -> str:
    """A new name, which a namespace allows whose subscriptions are named after who consumes."""
    _, colon, own = principal.partition(":")
    return f"{own}{'-' if colon else ''}{SUBSCRIPTION_PREFIX}{uuid.uuid4().hex}"


def _progress(client: Client, partition: str, name: str) -> dict[str, Any]:
    try:
        return dict(asked(client, "subscription_progress", partition, _CLOSE_S, subscription=name))
    except InvalidArgument:  # from a broker of before
        return dict(asked(client, "describe_subscription", partition, _CLOSE_S, subscription=name))


def asked(client: Client, op: str, partition: str, timeout_s: float | None, **args: Any) -> Any:
    """The answer of a partition's owner to an operation."""
    connection = client._connection
    with connection.lock:
        reply = client._session.admin(op, partition, **args)
    return connection.wait(reply, timeout_s, f"{op} of {partition}")


def _tell_lost(state: Mapping[str, Any], lose: Lose) -> None:
    """Count records as lost that the broker passed over."""
    for name, why in _LOSSES.items():
        if state.get(name, 0):
            lose(int(state[name]), why)


def _ends_of(facts: Mapping[str, Any]) -> PartitionEnds:
    holes = [
        Hole(row["start"], row["end"], row["broker_id"], row["epoch"], HoleKind[row["kind"].upper()],
             row["since_us"], row["settled_us"])
        for row in facts.get("holes", ())
    ]  # fmt: skip
    histories = msgspec.convert(facts.get("histories", []), tuple[History, ...])
    return PartitionEnds(int(facts["start"]), int(facts["high_watermark"]), tuple(holes), histories)


def _taken(consumer: PartitionConsumer) -> ReceivedBatch | None:
    if consumer.failure is not None:
        raise consumer.failure.with_traceback(None)
    return consumer.take()


def _unknown(partition: str) -> FetchPending:
    return FetchPending(
        f"it is not known where {partition} begins",
        why=f"the broker has not heard from its object store for {_WAIT_S:.0f} s",
        hint="`danube storage status` says why; run the job again when the store answers",
    )


def _silent(partition: str, at: int, end: int, reason: DanubeError | None) -> OperationTimeout:
    why = f"it has records up to {end}, and {_WAIT_S:.0f} s have passed"
    error = OperationTimeout(
        f"{partition} sends nothing from offset {at} on",
        why=why if reason is None else f"{why}; the broker cannot read them: {reason}",
        hint=(reason.hint if reason is not None else "") or "look at the broker with `danube status`",
    )
    error.__cause__ = reason
    return error
