"""The producer of the blocking client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from danube.client.blocking.connection import BlockingConnection
from danube.client.blocking.contexts import Context, open_whole
from danube.client.machine.ack import Ack
from danube.client.machine.reply import all_settled
from danube.client.records.group import Group, SendFuture
from danube.client.records.handles import ProducerHandle
from danube.client.records.outbox import CLOSE_TIMEOUT_S, Outbox, Part, acks_of
from danube.client.records.records import Attributes
from danube.errors import DanubeError, OperationTimeout


class BlockingSend(SendFuture):
    """The outcome of one send_nowait; ``result()`` waits for it."""

    __slots__ = ("_producer",)

    def __init__(self, group: Group, index: int, producer: Producer) -> None:
        super().__init__(group, index)
        self._producer = producer

    def result(self, timeout: float | None = None) -> Ack:
        """Return the record's Ack, or raise its error; sends gathered records first, then waits."""
        if not self.done():
            self._producer._settle(self._group)
            if not self._producer._connection.wait_until(self.done, timeout):
                raise OperationTimeout(f"the send took longer than {timeout:g} s")
        return self._ack()


class Producer(ProducerHandle[BlockingConnection], Context):
    """Sends records to a topic.  Made by ``client.producer(...)``; use it in ``with``."""

    _use = "use it in `with client.producer(...)`"

    def open(self) -> Self:
        """Find or make the topic and open every partition; done by ``with``."""
        open_whole(self)
        return self

    def send(
        self, payload: bytes, key: str | bytes | None = None, attributes: Attributes | None = None
    ) -> Ack:
        """Send one record and wait for its acknowledgement."""
        self.ready()
        with self._connection.lock:
            box = self._box
            group, index = box.add(payload, key, attributes)
            box.flush_group()
        return BlockingSend(group, index, self).result()

    def send_many(
        self,
        payloads: Any,
        keys: Sequence[str | bytes | None] | None = None,
        attributes: Sequence[Attributes | None] | Attributes | None = None,
    ) -> list[Ack]:
        """Send many records and wait for all of them; one Ack per batch, in the order of the batches.

        ``payloads`` is a sequence of bytes, a numpy array or a pyarrow binary array.  ``attributes`` is one
        mapping per record, or one for all.  They belong to the client until the call has ended: a record that
        is changed meanwhile may be stored with its old or new bytes.

        Raises the first error; other batches may be stored then.  Its facts name the stored ones: ``acks``,
        and ``places``, the indexes in the call of each ack's records.  ``index`` is that of a record at
        fault.
        """
        connection = self._connection
        box = self._box
        sent: list[Part] = []
        refused: DanubeError | None = None
        batches = box.batches(payloads, keys, attributes)
        more = True
        try:
            while more:
                with connection.lock:
                    part = next(batches, None)
                    connection.flush()
                if part is not None:
                    sent.append(part)
                more = part is not None and part.more
                if more and not box.has_room:
                    self._room(box)
        except DanubeError as error:
            refused = error
        connection.wait(all_settled([part.outgoing for part in sent]))
        return acks_of(sent, refused)

    def send_nowait(
        self, payload: bytes, key: str | bytes | None = None, attributes: Attributes | None = None
    ) -> BlockingSend:
        """Gather one record; it leaves when ``batch_bytes`` are gathered or someone waits.

        There is no loop behind the blocking client: call flush(), ready() or result() to be sure
        that it leaves.  Raises Overloaded when ``max_in_flight_bytes`` are not acknowledged.
        """
        with self._connection.lock:
            group, index = self._box.add(payload, key, attributes)
            if self._connection.has_output:
                self._connection.flush()
        return BlockingSend(group, index, self)

    def _settle(self, group: Group) -> None:
        """Send the group if it has not left."""
        with self._connection.lock:
            if self._open_box is not None and self._open_box.group is group:
                self._open_box.flush_group()

    def ready(self) -> None:
        """Wait until there is room for send_nowait."""
        box = self._box
        if not box.has_room:
            self._room(box)

    def _room(self, box: Outbox) -> None:
        """Wait for room, for as long as a send may take."""
        if not self._connection.wait_until(lambda: box.has_room, box.timeout_s):
            raise box.no_room()

    def flush(self, timeout: float | None = None) -> None:
        """Wait until everything sent so far is answered.

        Raises the first failure of a send_nowait whose future was not read.
        """
        self._connection.run(self._flushing(timeout))

    def close(self, timeout: float = CLOSE_TIMEOUT_S) -> None:
        """Flush for at most ``timeout`` seconds and close; raise the error of undelivered records."""
        self._connection.run(self._closing(timeout))
