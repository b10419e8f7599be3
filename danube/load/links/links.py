"""The two ends of a load test as users see them, whichever protocol they speak."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from danube.load.collector import Reader


class Place(NamedTuple):
    """Topic of a run, and the meaning of an acknowledgement there."""

    topic: str
    partitions: tuple[str, ...]  # physical names
    durability: str

    @property
    def reliable(self) -> bool:
        return self.durability != "memory"


class Delivery(NamedTuple):
    """One record as it was handed out."""

    payload: bytes
    partition: int
    redelivered: bool  # the broker says that it was delivered before
    reader: Reader
    ack: Callable[[], None]


class Sender(Protocol):
    """Sends records of one producer.  Blocks the greenlet that calls it and no other."""

    pipelined: bool  # begin() may be called again before the first has its answer

    def open(self) -> None:
        """Connect; raises DanubeError."""

    def begin(self, payload: bytes, key: str) -> Callable[[], str]:
        """Send; the result waits for the acknowledgement, returns its durability and raises DanubeError.

        Records are stored in the order of these calls.
        """

    def close(self) -> None:
        """Close, and drop records without an answer after a few seconds; raises nothing."""


class Receiver(Protocol):
    """Hands out the records of one consumer."""

    def open(self) -> None:
        """Connect and subscribe; raises DanubeError."""

    def receive(self, timeout_s: float) -> Delivery | None:
        """The next record, or None when there was none for so long; raises DanubeError."""

    def close(self) -> None:
        """Unsubscribe; raises nothing."""
