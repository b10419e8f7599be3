"""One batch on its way to a partition."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from danube.client.machine.reply import Reply
from danube.core.protocol import native as wire
from danube.errors import DanubeError

if TYPE_CHECKING:
    from danube.client.machine.publishing import PartitionProducer
    from danube.core.batch.builder import EncodedBatch


class Outgoing(Reply):
    """Settles with the batch's Ack."""

    base_sequence: int  # this and the next three from when it is given to the partition
    deadline_ns: int
    epoch: int
    producer_id: int

    __slots__ = (
        "base_sequence", "body", "correlation", "deadline_ns", "epoch", "group", "head", "order", "partition",
        "producer_id", "record_count", "sent", "size",
    )  # fmt: skip

    def __init__(self, partition: PartitionProducer, encoded: EncodedBatch) -> None:
        super().__init__()
        self.partition = partition
        self.head = encoded.head
        self.body = encoded.body
        self.record_count = encoded.record_count
        self.size = wire.FRAME_HEADER_BYTES + encoded.size
        self.order = 0  # in which it was given to the partition, whatever its sequence becomes
        self.correlation = 0  # 0: not out on this connection
        self.sent = False  # under this epoch: it may be in the log, so its number is taken
        self.group: Any = None  # whose records they are, where someone wants to be told

    def on_answer(self, kind: int, flags: int, body: memoryview) -> None:
        self.partition.on_published(self, flags, wire.decode_published(body))

    def on_error(self, error: DanubeError) -> None:
        self.partition.on_refused(self, error)
