"""A blocking producer whose records the application numbers: for jobs that are killed and run again.

    with NumberedProducer(client, "/default/orders", "replay/job-7/0") as producer:
        for number, payloads in work(producer.stored(0)):     # skip what is stored
            producer.send(0, number, payloads)
        producer.flush()

Every number of one name and round is stored at most once, however often and by how many processes the work
is done, and after flush() exactly once.  Two conditions: the same records get the same numbers each time, and
the partition remembers the producer, which it does until PRODUCERS_PER_PARTITION_MAX others have published
after it.
"""

from __future__ import annotations

import time
from typing import Any, Final, Self

from danube.client.blocking.client import Client
from danube.client.blocking.contexts import Context
from danube.client.machine.admin import ends_of
from danube.client.machine.numbered import NumberedPartition, check_round
from danube.client.machine.publishing import Outgoing
from danube.client.machine.reply import Reply, all_settled
from danube.client.records.outbox import IN_FLIGHT_BYTES
from danube.client.records.records import compression_of
from danube.client.records.setup import find_topic
from danube.core.batch.columns import encode
from danube.core.batch.row_mark import RowMark
from danube.core.partition.policy import Durability
from danube.core.protocol import native as wire
from danube.errors import ClosedError, InvalidArgument, OperationTimeout
from danube.host.clock import wall_us
from danube.ids import check_label, check_topic_name

_CONFIRM_PAUSE_S: Final = 0.02


class NumberedProducer(Context):
    """One name and round on the partitions of a topic, each opened on first use."""

    _close_failed = "closing the producer failed"

    def __init__(
        self,
        client: Client,
        topic: str,
        name: str,
        round_number: int = 0,
        *,
        reliable: bool | None = None,
        durability: str | None = None,
        partitions: int = 0,
        compression: str = "none",
        max_in_flight_bytes: int = IN_FLIGHT_BYTES,
        timeout: float = 60.0,
    ) -> None:
        check_topic_name(topic)
        check_label(name, "producer")
        check_round(round_number)
        if durability is not None:
            Durability.parse(durability)
        self.topic = topic
        self.name = name
        self.round_number = round_number
        self.reliable = True  # of the topic, once it is open
        self.duplicates = 0  # batches that were stored already when they were sent
        self._client = client
        self._lookup = wire.Lookup(topic, True, partitions, reliable, durability or "")
        self._compression = compression_of(compression)
        self._in_flight_max = max_in_flight_bytes
        self._timeout_s = timeout
        self._names: list[str] = []
        self._topic_id = 0
        self._open: dict[int, NumberedPartition] = {}
        self._in_flight = 0
        self._failure: BaseException | None = None
        self._room: Reply | None = None
        self._acked: set[int] = set()

    def open(self) -> Self:
        """Find or make the topic; done by ``with``."""
        view = self._client._live.run(find_topic(self._client._session, self._lookup))
        self._names, self._topic_id = list(view.partitions), view.topic_id
        self.reliable = view.reliable
        return self

    @property
    def client(self) -> Client:
        """Client that the producer publishes over."""
        return self._client

    @property
    def partition_count(self) -> int:
        return len(self._names)

    def stored(self, index: int) -> int:
        """How many of this round's records partition ``index`` holds: the first number to send."""
        return self._partition(index).stored

    def stored_batches(self, index: int) -> tuple[str, tuple[tuple[int, int, int], ...]]:
        """Name of a partition; first number, first offset and record count of the last stored batches."""
        partition = self._partition(index)
        return partition.partition, partition.stored_batches

    def _partition(self, index: int) -> NumberedPartition:
        opened = self._open.get(index)
        if opened is not None:
            return opened
        if not 0 <= index < len(self._names):
            raise InvalidArgument(
                f"partition {index} of {self.topic} does not exist", why=f"it has {len(self._names)}"
            )
        connection = self._client._live
        timeout_ns = int(self._timeout_s * 1e9)
        with connection.lock:
            partition = NumberedPartition(
                connection.session, self.name, self._names[index], index, timeout_ns, self.round_number,
                self._topic_id,
            )  # fmt: skip
            partition.when_settled = self._on_settled
            partition.when_late = self._on_late
            partition.start()
        try:
            connection.wait(partition.opened, self._timeout_s, f"opening a producer on {self._names[index]}")
        except BaseException:
            with connection.lock:
                partition.close()
            raise
        self._open[index] = partition
        return partition

    def send(
        self,
        index: int,
        number: int,
        payloads: Any,
        keys: Any = None,
        attributes: Any = None,
        *,
        publish_times: Any = None,
        publish_time_us: int | None = None,
        schema_id: int | None = None,
        schema_version: int | None = None,
        mark: RowMark | None = None,
    ) -> None:
        """Send one batch, whose first record has ``number``, to partition ``index``; wait for room only.

        ``payloads`` is as for :func:`danube.core.batch.columns.encode`; ``publish_time_us`` holds for all
        records, ``publish_times`` has one each, and without them it is now.  ``mark`` is of the rows up to
        the last of them.  Raises the first failure of an earlier batch; the numbers are to follow each
        other from stored() on.
        """
        partition = self._partition(index)
        connection = self._client._live
        with connection.lock:
            expected, failed = partition.next_sequence, self._failure or partition.failure
        if number != expected and failed is None:
            raise InvalidArgument(f"record {number} cannot follow", why=f"the next number is {expected}")
        encoded = encode(
            payloads,
            producer_name=partition.name,
            keys=keys,
            attributes=attributes,
            # Bytes that are sent again are to be the same: then they are a duplicate, not a conflict.
            publish_time_us=_first_time(publish_times, publish_time_us),
            publish_times=publish_times,
            producer_id=partition.producer_id,
            producer_epoch=partition.epoch,
            base_sequence=number,
            schema_id=schema_id,
            schema_version=schema_version,
            compression=self._compression,
            origin="" if mark is None else mark.text,
        )
        outgoing = Outgoing(partition, encoded)
        if self._in_flight >= self._in_flight_max and self._failure is None:
            self._wait_for_room()
        with connection.lock:
            self._raise_failure()
            partition.send(outgoing, partition.producer_id, partition.epoch, number)
            self._in_flight += outgoing.size
            connection.flush()

    def _wait_for_room(self) -> None:
        connection = self._client._live
        with connection.lock:
            self._room = room = Reply()
        connection.wait(room, self._timeout_s, "a send")

    def _on_settled(self, outgoing: Outgoing) -> None:
        self._in_flight -= outgoing.size
        if outgoing.error is not None:
            self._failure = self._failure or outgoing.error
        else:
            self._acked.add(outgoing.partition.index)
            self.duplicates += outgoing.value.duplicate
        self._make_room()

    def _on_late(self, outgoing: Outgoing) -> None:
        self._failure = self._failure or outgoing.error
        self._make_room()

    def _make_room(self) -> None:
        if self._room is not None and (self._failure or self._in_flight <= self._in_flight_max // 2):
            room, self._room = self._room, None
            room.resolve(None)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure.with_traceback(None)

    def flush(self) -> None:
        """Wait until every record that was sent or found stored is acknowledged; raise the first failure."""
        connection = self._client._live
        with connection.lock:
            emptied = all_settled([one for part in self._open.values() for one in part.unanswered()])
        connection.wait(emptied, self._timeout_s, "flush")
        self._raise_failure()
        for index, partition in self._open.items():
            if partition.stored and index not in self._acked:
                self._confirm(partition)

    def _confirm(self, partition: NumberedPartition) -> None:
        """Records that were found stored may still be on their way to the level that the topic promises."""
        connection = self._client._live
        deadline = time.monotonic() + self._timeout_s
        end = None
        while True:
            (state,) = connection.run(ends_of(connection.session, [partition.partition]))
            end = int(state["log_end"]) if end is None else end
            if int(state["high_watermark"]) >= end:
                return
            if time.monotonic() > deadline:
                raise OperationTimeout(f"records of {partition.partition} were not acknowledged in time")
            time.sleep(_CONFIRM_PAUSE_S)

    def close(self) -> None:
        """Close the handles; the next run learns of batches without an answer."""
        opened, self._open = self._open, {}
        self._failure = self._failure or ClosedError("the producer is closed")
        if opened:
            connection = self._client._connection
            with connection.lock:
                replies = [partition.close() for partition in opened.values()]
            connection.wait_until(lambda: all(reply.settled for reply in replies), 1.0)

    def __repr__(self) -> str:
        return f"<NumberedProducer {self.name!r} of {self.topic}, round {self.round_number}>"


def _first_time(times: Any, time_us: int | None) -> int:
    if time_us is not None:
        return time_us
    return wall_us() if times is None else int(times[0])
