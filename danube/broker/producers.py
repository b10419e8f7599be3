"""The link between a connection's producer handle and the partition it publishes to."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from danube.broker.api import Session
    from danube.broker.hosted import HostedPartition


class ProducerLink:
    """A producer handle that is open on this worker."""

    __slots__ = ("epoch", "exclusive", "hosted", "name", "producer_id")

    def __init__(
        self, hosted: HostedPartition, name: str, producer_id: int, epoch: int, exclusive: bool = False
    ) -> None:
        self.hosted = hosted
        self.name = name
        self.producer_id = producer_id
        self.epoch = epoch
        self.exclusive = exclusive


class Waiting(NamedTuple):
    """A publish whose answer waits until the high watermark reaches ``end_offset``."""

    end_offset: int
    session: Session
    correlation: int
    handle: int
    base_offset: int
    epoch: int
    record_count: int
    flags: int
