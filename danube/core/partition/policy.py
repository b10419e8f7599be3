"""Policy of a topic: delivery mode, durability level, retention, limits and failure policy."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import msgspec

from danube.errors import InvalidArgument
from danube.limits import MAX_UNACKED_DEFAULT, MAX_UNACKED_LIMIT, MIB, RECORD_BYTES_MAX

DAY_MS: Final = 24 * 3600 * 1000
LATER: Final = ("max_publish_rate", "max_publish_bytes")  # left out of stored policies where they say nothing
LATER_OF_FAILURES: Final = ("set_by",)
CLEANUPS = ("delete", "compact", "compact_delete")


class Durability(IntEnum):
    """Meaning of an acknowledgement; a higher level survives more."""

    MEMORY = 0
    WRITTEN = 1
    FSYNC = 2
    QUORUM = 3

    @classmethod
    def parse(cls, text: str) -> Durability:
        try:
            return cls[text.upper()]
        except KeyError:
            raise InvalidArgument(
                f"durability {text!r} is not known", hint="use memory, written or fsync"
            ) from None

    @property
    def label(self) -> str:
        return self.name.lower()


class FailurePolicy(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Treatment of a record that is nacked or not acked in time (reliable subscriptions)."""

    max_redelivery_count: int = 5
    ack_timeout_ms: int = 30_000
    base_redelivery_delay_ms: int = 1_000
    max_redelivery_delay_ms: int = 60_000
    backoff: str = "exponential"  # or "fixed"
    poison: str = "block"  # or "drop", "dead_letter"
    dead_letter_topic: str = ""
    set_by: str = ""  # the principal that chose it, written by the broker; "": nobody who had to be judged

    def check(self) -> None:
        if self.backoff not in ("fixed", "exponential") or self.poison not in (
            "block",
            "drop",
            "dead_letter",
        ):
            raise InvalidArgument(
                "failure policy is not valid",
                why=f"backoff={self.backoff!r} poison={self.poison!r}",
                hint="backoff is fixed or exponential; poison is block, drop or dead_letter",
            )
        if self.poison == "dead_letter" and not self.dead_letter_topic:
            raise InvalidArgument("poison policy dead_letter needs a dead_letter_topic")
        if min(self.max_redelivery_count, self.base_redelivery_delay_ms, self.max_redelivery_delay_ms) < 0:
            raise InvalidArgument("failure policy has a negative number")
        if self.ack_timeout_ms < 1:
            raise InvalidArgument("ack_timeout_ms must be at least 1")


READER: Final = FailurePolicy(ack_timeout_ms=7 * DAY_MS, poison="block")
"""Of who only reads, through a subscription of its own: nothing is redelivered or dead-lettered for it."""


class TopicPolicy(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Settings of a topic; they hold for each of its partitions.

    ``retention_ms``, ``retention_bytes`` and ``retention_segments`` (per partition) delete whole
    sealed segments from the front; 0 keeps for ever.  ``cleanup`` says whether that happens
    (``delete``), whether instead only the latest record of each key is kept (``compact``), or both
    (``compact_delete``).  ``tombstone_retention_ms``: a record with a key and an empty payload goes
    with its key when it is this old.

    A default here is what a stored policy means that leaves the field out, so it never changes.  New topics
    take theirs from the configuration, which allows larger records.
    """

    reliable: bool = True
    durability: str = "written"
    retention_ms: int = 7 * DAY_MS
    retention_bytes: int = 0
    retention_segments: int = 0
    max_record_bytes: int = 1 * MIB
    max_unacked: int = MAX_UNACKED_DEFAULT
    max_dispatch_rate: int = 0  # records a second to each subscription of a partition; 0: no limit
    failure: FailurePolicy = FailurePolicy()
    cleanup: str = "delete"
    tombstone_retention_ms: int = DAY_MS
    max_publish_rate: int = 0  # records a second, of all producers and partitions together; 0: no limit
    max_publish_bytes: int = 0  # bytes a second, as batches are sent; these two came later, see LATER

    @property
    def unsigned(self) -> TopicPolicy:
        """The policy without who set it."""
        if not self.failure.set_by:
            return self
        failure = msgspec.structs.replace(self.failure, set_by="")
        return msgspec.structs.replace(self, failure=failure)

    @property
    def compacts(self) -> bool:
        """Whether only the latest record of each key is kept."""
        return self.cleanup != "delete"

    @property
    def expires(self) -> bool:
        """Whether the bounds of retention hold."""
        return self.cleanup != "compact"

    @property
    def level(self) -> Durability:
        return Durability.parse(self.durability)

    def check(self) -> None:
        """Raise InvalidArgument if a value or a combination cannot be kept."""
        level = self.level
        if level is Durability.QUORUM:
            raise InvalidArgument("durability quorum needs a cluster", hint="use fsync on one host")
        if self.reliable == (level is Durability.MEMORY):
            raise InvalidArgument(
                f"durability {self.durability} does not go with reliable={self.reliable}",
                hint="reliable topics are written or fsync; non-reliable ones are memory",
            )
        if not 1 <= self.max_record_bytes <= RECORD_BYTES_MAX:
            raise InvalidArgument(f"max_record_bytes must be 1 .. {RECORD_BYTES_MAX}")
        check_max_unacked(self.max_unacked)
        for name in ("max_dispatch_rate", *LATER):
            if getattr(self, name) < 0:
                raise InvalidArgument(f"{name} must not be negative", hint="0 is no limit")
        for name in ("retention_ms", "retention_bytes", "retention_segments"):
            if getattr(self, name) < 0:
                raise InvalidArgument(f"{name} must not be negative", hint="0 keeps for ever")
        if self.cleanup not in CLEANUPS:
            raise InvalidArgument(f"cleanup {self.cleanup!r} is not known", hint=f"use {', '.join(CLEANUPS)}")
        if self.compacts and not self.reliable:
            raise InvalidArgument("a non-reliable topic stores nothing that could be compacted")
        if self.tombstone_retention_ms < 0:
            raise InvalidArgument("tombstone_retention_ms must not be negative")
        self.failure.check()


def check_max_unacked(max_unacked: int) -> None:
    """Raise InvalidArgument if a subscription cannot have this many records unacked."""
    if not 1 <= max_unacked <= MAX_UNACKED_LIMIT:
        raise InvalidArgument(f"max_unacked must be 1 .. {MAX_UNACKED_LIMIT}")
