"""Outbox of a producer: splits and coalesces an application's records into batches, within a bound.

The outbox of one producer.  Records sent one at a time gather in a *group* that leaves as one batch
at the end of the turn, when it is full, or, while the broker is busy with earlier batches, when
one of those is answered: the slower the broker, the larger the batches.
"""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

import msgspec
import numpy as np

from danube.client.machine.ack import Ack
from danube.client.machine.publishing import Outgoing, PartitionProducer
from danube.client.machine.reply import Reply, all_settled, settled_reply
from danube.client.machine.requests import Timer, nothing
from danube.client.records.group import Group
from danube.client.records.records import (
    Attributes,
    as_bytes,
    attributes_size,
    compression_of,
    countable,
    key_bytes_of,
    key_list,
    pick,
    renumbered,
)
from danube.core.batch.columns import encode, key_partitions
from danube.core.batch.payloads import RECORD_OVERHEAD, larger_record_hint, leading_column
from danube.errors import (
    ClosedError,
    DanubeError,
    InvalidArgument,
    OperationTimeout,
    Overloaded,
    RecordTooLarge,
)
from danube.host.clock import wall_us
from danube.host.telemetry import events
from danube.limits import BATCH_RECORDS_MAX, MIB

BATCH_BYTES: Final = 512 * 1024
IN_FLIGHT_BYTES: Final = 8 * MIB
UNANSWERED_BATCHES_HOLD: Final = 4  # while so many are out, a group waits to grow
FAILURES_KEPT: Final = 100
CLOSE_TIMEOUT_S: Final = 5.0

outboxes: weakref.WeakSet[Outbox] = weakref.WeakSet()
_telemetry = events("client")


class ProducerOptions(msgspec.Struct, kw_only=True):
    """Arguments of client.producer(); checked when made."""

    topic: str
    name: str
    reliable: bool | None = None
    durability: str | None = None
    partitions: int = 0
    compression: str = "none"
    linger_us: int = 0
    batch_bytes: int = BATCH_BYTES
    max_in_flight_bytes: int = IN_FLIGHT_BYTES
    timeout_ns: int
    schema_id: int | None = None  # on every batch, where values have a schema
    schema_version: int | None = None


class Part(NamedTuple):
    """One batch of a send_many and the places of its records in the call."""

    outgoing: Outgoing
    start: int
    stop: int
    chosen: list[int] | None  # records of ``start`` .. ``stop`` in this part; None: all
    more: bool  # whether another batch follows

    @property
    def places(self) -> Sequence[int]:
        found: Sequence[int] = pick(range(self.start, self.stop), self.chosen)
        return found


def acks_of(sent: list[Part], refused: DanubeError | None = None) -> list[Ack]:
    """Return the Acks of a send_many whose batches are all settled, or raise its first error.

    ``refused`` ended the call before all of its records were sent.  The error's facts name the stored
    records: ``acks``, and in ``places`` the indexes in the call of each ack's records.  ``index``, if any, is
    that of the record at fault.
    """
    failed = next((part for part in sent if part.outgoing.error is not None), None)
    if failed is not None:
        found = failed.outgoing.error
        if not isinstance(found, DanubeError):
            raise cast(BaseException, found)
        error = renumbered(found, failed.places)
    elif refused is not None:
        error = refused
    else:
        return [part.outgoing.result() for part in sent]
    stored = [part for part in sent if part.outgoing.settled and part.outgoing.error is None]
    facts = {
        **error.facts, "acks": [part.outgoing.result() for part in stored],
        "places": [part.places for part in stored],
    }  # fmt: skip
    raise type(error)(error.what, why=error.why, hint=error.hint, **facts)


def raise_first(failures: list[BaseException]) -> None:
    """Raise the first failure; it names the number of the others."""
    if failures:
        if len(failures) > 1:
            failures[0].add_note(f"danube: {len(failures) - 1} more sends failed")
        raise failures[0].with_traceback(None)


class Outbox:
    """Unanswered records of one producer, bounded by ``in_flight_bytes_max``."""

    def __init__(self, options: ProducerOptions, partitions: list[PartitionProducer]) -> None:
        batch_bytes, in_flight_bytes_max = options.batch_bytes, options.max_in_flight_bytes
        if not 1024 <= batch_bytes <= 8 * MIB:
            raise InvalidArgument(f"batch_bytes must be 1 KiB to 8 MiB, not {batch_bytes}")
        if in_flight_bytes_max < batch_bytes:
            raise InvalidArgument("max_in_flight_bytes must be at least batch_bytes")
        self.topic = options.topic
        self.name = options.name
        self.partitions = partitions
        self.batch_bytes = batch_bytes
        self.in_flight_bytes_max = in_flight_bytes_max
        self.in_flight_bytes = 0
        self.in_flight_batches = 0
        self.group: Group | None = None
        self.record_bytes_max = min((one.max_record_bytes or 8 * MIB for one in partitions), default=8 * MIB)
        self.closed = False
        self.left_full = False  # since someone last let the loop turn
        self.when_full: Callable[[], None] = nothing  # a full group has left: write it
        self.when_group: Callable[[], None] = nothing  # a group was begun: flush it at the end of the turn
        self._compression = compression_of(options.compression)
        self._schema_id = options.schema_id
        self._schema_version = options.schema_version
        self._next_partition = 0
        self._room: Reply | None = None
        self._held = False
        self._expiry: Timer | None = None  # of the group that is held
        self._unreported: list[tuple[Group, BaseException]] = []
        for partition in partitions:
            partition.when_settled = self._on_settled
            partition.when_late = self._on_late
        outboxes.add(self)

    # -- one record at a time -------------------------------------------------------------------

    def add(
        self, payload: bytes, key: str | bytes | None, attributes: Attributes | None
    ) -> tuple[Group, int]:
        """Put a record into the group; return the group and the record's place in it."""
        if type(payload) is not bytes:
            payload = as_bytes(payload)
        size = len(payload)
        if size > self.record_bytes_max:
            self._refuse_record(size)
        group = self.group
        if group is None or group.size + size > self.batch_bytes or len(group.payloads) >= BATCH_RECORDS_MAX:
            group = self._begin_group()
        payloads = group.payloads
        index = len(payloads)
        if (
            key is not None
            or attributes is not None
            or group.keys is not None
            or group.attributes is not None
        ):
            size += self._add_extras(group, index, key, attributes)
        payloads.append(payload)
        group.size += size + RECORD_OVERHEAD
        return group, index

    def _begin_group(self) -> Group:
        self.check()
        if self.group is not None:
            self.flush_group()
            self.left_full = True
            self.when_full()
        if self.in_flight_bytes >= self.in_flight_bytes_max + self.batch_bytes:
            raise Overloaded(
                f"{self.in_flight_bytes} bytes are not acknowledged yet",
                why=f"max_in_flight_bytes is {self.in_flight_bytes_max}",
                hint="call producer.ready() (awaited where it is async) before sending on",
                limit=self.in_flight_bytes_max,
            )
        group = Group()
        self.when_group()  # where no loop runs it raises, and nothing is begun
        self.group = group
        return group

    def check(self) -> None:
        """Raise the error that ended the producer."""
        for partition in self.partitions:
            if partition.failure is not None:
                raise partition.failure.with_traceback(None)
        if self.closed:
            raise ClosedError(f"the producer {self.name!r} is closed")

    @property
    def idle(self) -> bool:
        """Return whether no record is unanswered or gathered, so that a record can be sent at once."""
        return self.in_flight_batches == 0 and self.group is None

    def _add_extras(
        self, group: Group, index: int, key: str | bytes | None, attributes: Attributes | None
    ) -> int:
        """Key and attributes of a record, checked now so that one bad record spoils no batch."""
        size = 0
        key_bytes = key_bytes_of(key)
        if key_bytes is not None:
            size += len(key_bytes)
        if attributes:
            size += attributes_size(attributes)
            attributes = dict(attributes)
        if key_bytes is not None and group.keys is None:
            group.keys = [None] * index
        if attributes and group.attributes is None:
            group.attributes = [None] * index
        if group.keys is not None:
            group.keys.append(key_bytes)
        if group.attributes is not None:
            group.attributes.append(attributes)
        return size

    def withdraw(self, group: Group, index: int) -> bool:
        """Take a record back that has not left yet; False when it may have been sent."""
        if group is self.group:
            group.withdrawn = group.withdrawn or set()
            group.withdrawn.add(index)
            return True
        outcome = group.outcome(index)
        if isinstance(outcome, Outgoing) and outcome.record_count == 1:
            group.reported = True  # flush() must not report a record that its sender has cancelled
            return outcome.partition.withdraw(outcome)
        return False

    def end_turn(self) -> None:
        """Send the group, or let it grow until the next answer if the broker is busy."""
        if self.group is not None:
            if self.in_flight_batches >= UNANSWERED_BATCHES_HOLD * len(self.partitions):
                self._hold()
            else:
                self.flush_group()

    def _hold(self) -> None:
        """Keep the group until the next answer, or until its records have waited too long."""
        group = self.group
        if self._held or group is None:
            return
        first = self.partitions[0]
        home, timeout_ns = first.session.brokers.home, first.timeout_ns

        def expire() -> None:
            if self.group is group:
                self._fail_group(first.timed_out("it was not sent"))

        self._expiry = home.call_at(home.now_ns() + timeout_ns, expire)
        self._held = True

    def _fail_group(self, error: DanubeError) -> None:
        """Fail the gathered records, which are not sent."""
        group = self._take_group()
        if group is not None:
            group.parts = [error]
            self._note_failure(group, error)
            if group.flushed is not None:
                group.flushed.resolve(None)

    def _take_group(self) -> Group | None:
        group, self.group = self.group, None
        self._held = False
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        return group

    def flush_group(self) -> None:
        """Send gathered records."""
        group = self._take_group()
        if group is None:
            return
        positions = None
        if group.withdrawn is not None:
            positions = [index for index in range(len(group.payloads)) if index not in group.withdrawn]
            if not positions:
                group.parts = [ClosedError("the send was cancelled")]
        try:
            self._send_group(group, positions)
        except DanubeError as error:
            group.parts = [error]
            group.rows = None
            self._note_failure(group, error)
        finally:
            if not group.parts:  # something else has ended the call, a signal's exception perhaps
                group.parts = [ClosedError("the send was cut short by an exception")]
        if group.flushed is not None:
            group.flushed.resolve(None)

    def _send_group(self, group: Group, positions: list[int] | None) -> None:
        payloads, keys, attributes = group.payloads, group.keys, group.attributes
        count = len(payloads)
        if positions is not None:
            if not positions:
                return
            payloads = [payloads[one] for one in positions]
            keys = None if keys is None else [keys[one] for one in positions]
            attributes = None if attributes is None else [attributes[one] for one in positions]
        elif keys is None or len(self.partitions) == 1:
            group.parts = [self._send(self._turn(), payloads, keys, attributes, group)]
            return
        parts: list[Outgoing | DanubeError] = []
        rows: list[tuple[int, int]] = [(0, 0)] * count
        for partition, chosen in self._by_partition(len(payloads), keys):
            indexes = range(len(payloads)) if chosen is None else chosen
            for row, index in enumerate(indexes):
                rows[index if positions is None else positions[index]] = (len(parts), row)
            parts.append(
                self._send(
                    partition, pick(payloads, chosen), pick(keys, chosen), pick(attributes, chosen), group
                )
            )
        group.parts, group.rows = parts, rows

    # -- many records ---------------------------------------------------------------------------

    def batches(self, payloads: Any, keys: Any, attributes: Any) -> Iterator[Part]:
        """Send ``payloads`` batch by batch, and tell whether more follow: then the caller waits for room."""
        self.flush_group()
        payloads, count = countable(payloads)
        if keys is not None and len(keys) != count:
            raise InvalidArgument(f"there are {len(keys)} keys for {count} records")
        if isinstance(attributes, Mapping):
            attributes = [attributes] * count
        elif attributes is not None and len(attributes) != count:
            raise InvalidArgument(f"there are {len(attributes)} attributes for {count} records")
        start = 0
        while start < count:
            self.check()
            try:
                column = leading_column(payloads, start, self.batch_bytes)
            except DanubeError as error:
                raise renumbered(error, range(start, count)) from None
            stop = start + column.record_count
            chunk_keys = None if keys is None else key_list(keys[start:stop])
            chunk_attributes = None if attributes is None else attributes[start:stop]
            shares = list(self._by_partition(stop - start, chunk_keys))
            for number, (partition, chosen) in enumerate(shares, 1):
                try:
                    outgoing = self._send(
                        partition,
                        column if chosen is None else pick(payloads[start:stop], chosen),
                        pick(chunk_keys, chosen),
                        pick(chunk_attributes, chosen),
                    )
                except DanubeError as error:
                    raise renumbered(error, pick(range(start, stop), chosen)) from None
                yield Part(outgoing, start, stop, chosen, stop < count or number < len(shares))
            start = stop

    def _by_partition(
        self, count: int, keys: list[bytes | None] | None
    ) -> Iterator[tuple[PartitionProducer, list[int] | None]]:
        """Partitions and the places of their records (None: all of them), in record order."""
        if len(self.partitions) == 1:
            yield self.partitions[0], None
            return
        if keys is None:
            yield self._turn(), None
            return
        present = [key for key in keys if key is not None]
        if len(present) == count:
            places = key_partitions(present, len(self.partitions))
        else:
            keyed = np.fromiter((key is not None for key in keys), np.bool_, count)
            places = np.full(count, self.partitions.index(self._turn()), np.int64)
            if present:
                places[keyed] = key_partitions(present, len(self.partitions))
        order = np.argsort(places, kind="stable")
        bounds = np.flatnonzero(np.diff(places[order])) + 1
        for indexes in np.split(order, bounds):
            chosen = indexes.tolist()
            yield self.partitions[int(places[chosen[0]])], (None if len(chosen) == count else chosen)

    def _turn(self) -> PartitionProducer:
        """Return the next partition, round robin."""
        partition = self.partitions[self._next_partition]
        self._next_partition = (self._next_partition + 1) % len(self.partitions)
        return partition

    # -- batches --------------------------------------------------------------------------------

    def _send(
        self,
        partition: PartitionProducer,
        payloads: Any,
        keys: Any,
        attributes: Any,
        group: Group | None = None,
    ) -> Outgoing:
        sequence, producer_id, epoch = partition.next_sequence, partition.producer_id, partition.epoch
        encoded = encode(
            payloads,
            producer_name=self.name,
            keys=keys,
            attributes=attributes,
            publish_time_us=wall_us(),
            producer_id=producer_id,
            producer_epoch=epoch,
            base_sequence=sequence,
            compression=self._compression,
            schema_id=self._schema_id,
            schema_version=self._schema_version,
        )
        outgoing = Outgoing(partition, encoded)
        outgoing.group = group
        self.in_flight_bytes += outgoing.size
        self.in_flight_batches += 1
        try:
            partition.send(outgoing, producer_id, epoch, sequence)
        except BaseException:
            self.in_flight_bytes -= outgoing.size
            self.in_flight_batches -= 1
            raise
        return outgoing

    def _on_settled(self, outgoing: Outgoing) -> None:
        self.in_flight_bytes -= outgoing.size
        self.in_flight_batches -= 1
        self._on_late(outgoing)
        if self._held:
            self.flush_group()
        if self._room is not None and self.in_flight_bytes <= self.in_flight_bytes_max // 2:
            room, self._room = self._room, None
            room.resolve(None)

    def _on_late(self, outgoing: Outgoing) -> None:
        """Tell the next flush, once, that records of a group have failed."""
        if outgoing.error is not None and outgoing.group is not None:
            group, outgoing.group = outgoing.group, None
            self._note_failure(group, outgoing.error)

    def _note_failure(self, group: Group, error: BaseException) -> None:
        self._unreported.append((group, error))
        del self._unreported[:-FAILURES_KEPT]

    @property
    def has_room(self) -> bool:
        """Return whether a whole batch may be gathered before send_nowait raises Overloaded."""
        return self.in_flight_bytes < self.in_flight_bytes_max

    def room(self) -> Reply:
        """Settles when there is room for more; half of the bound is free then, if it was full."""
        if self.has_room:
            return settled_reply()
        if self._room is None:
            self._room = Reply()
        return self._room

    @property
    def timeout_s(self) -> float:
        """How long a send may take."""
        return self.partitions[0].timeout_ns / 1e9

    def emptied(self) -> Reply:
        """Sends the group; settles when everything sent so far is answered."""
        self.flush_group()
        return all_settled([outgoing for partition in self.partitions for outgoing in partition.unanswered()])

    def take_failures(self) -> list[BaseException]:
        """Return errors of send_nowait that were not read since the last call (at most the last 100)."""
        failures, self._unreported = self._unreported, []
        return [error for group, error in failures if not group.reported]

    @property
    def unanswered(self) -> int:
        """Batches, and a group not yet sent, that the broker has not answered."""
        return self.in_flight_batches + (self.group is not None)

    def no_room(self) -> OperationTimeout:
        """Return the error of a send that waited too long for room."""
        return OperationTimeout(
            f"there was no room for more records of producer {self.name!r} within {self.timeout_s:g} s",
            why=f"{self.in_flight_bytes} of {self.in_flight_bytes_max} bytes are not acknowledged",
            hint="records that were sent before may be stored; look at the broker",
        )

    def undelivered(self, error: OperationTimeout) -> OperationTimeout:
        """Return the error of a close whose flush took too long."""
        return OperationTimeout(
            f"producer {self.name!r} was closed with {self.unanswered} batches not acknowledged",
            why=error.what,
            hint="whether they are stored is not known; flush() with a longer timeout before closing",
            batches=self.unanswered,
        )

    def close(self) -> list[Reply]:
        """Close the partitions; unanswered records fail."""
        self.closed = True
        self.flush_group()
        return [partition.close() for partition in self.partitions]

    def disown(self) -> None:
        """In the child of a fork: drop gathered records, which the parent sends."""
        self.closed = True
        self._unreported = []
        group, self.group = self.group, None
        if group is not None:
            group.parts = [one.failure for one in self.partitions if one.failure is not None]
            if group.flushed is not None:
                try:
                    group.flushed.resolve(None)
                except RuntimeError:  # the caller's loop is closed, or of another thread
                    pass

    def _refuse_record(self, size: int) -> None:
        raise RecordTooLarge(
            f"record of {size} bytes is too large",
            why=f"the limit of topic {self.topic} is {self.record_bytes_max} bytes",
            hint=larger_record_hint(size, self.topic),
            size=size,
            limit=self.record_bytes_max,
        )


def warn_unflushed() -> None:
    """Name at exit the producers that were never closed and still hold records."""
    for outbox in list(outboxes):
        if not outbox.closed and outbox.unanswered:
            _telemetry.warning(
                "a producer was never closed and may have lost records; use `with` or close()",
                topic=outbox.topic,
                producer=outbox.name,
                unanswered_batches=outbox.unanswered,
            )


atexit.register(warn_unflushed)


def _after_fork_in_child() -> None:
    for outbox in list(outboxes):
        outbox.disown()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_after_fork_in_child)  # after the sessions, which are imported above
