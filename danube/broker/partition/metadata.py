"""Metadata for the partitions of one worker: reads and proposals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from danube.core.metadata.commands import ForgetSubscription, SetSubscriptionSettings, SubscriptionSettings
from danube.core.metadata.quotas import namespace_of
from danube.core.placement.recovered import recovery_of
from danube.errors import DanubeError
from danube.host import telemetry

if TYPE_CHECKING:
    from danube.broker.operations.context import Operations
    from danube.broker.operations.schema_gate import SchemaGate
    from danube.core.metadata.commands import TopicRecord
    from danube.core.metadata.policies import NamespacePolicy
    from danube.core.partition.policy import FailurePolicy

_log = telemetry.events("metadata")


class OwnerMetadata:
    """Access of one worker's partitions to the metadata."""

    def __init__(self, gate: SchemaGate, operations: Operations) -> None:
        self.gate = gate
        self.read = operations.refresh
        self.fresh = False  # whether all metadata is read that was committed before the last bytes came
        self._log = operations.metadata
        self._operations = operations

    @property
    def histories(self) -> list[dict[str, Any]]:
        """Return the histories that followed the first one, as plain values."""
        return [msgspec.structs.asdict(one) for one in recovery_of(self._log.state).histories]

    @property
    def limited(self) -> bool:
        """Return whether any namespace has limits."""
        return bool(self._log.state.quotas)

    def limits(self, record: TopicRecord) -> NamespacePolicy | None:
        """The limits of a topic's namespace; None if there are none."""
        return self._log.state.quotas.effective(namespace_of(record.topic))

    def freshen(self) -> None:
        """Read newly committed metadata, if there may be any."""
        if self._log.changed:
            self.read()
        self.fresh = True

    def after_operation(
        self, record: TopicRecord, index: int, name: str, failure: FailurePolicy | None
    ) -> None:
        """Store an operation's effect in the metadata, for the topic's other partitions and the next start.

        ``failure``: the new policy of the subscription ``name``; None: it was deleted.
        """
        command: ForgetSubscription | SetSubscriptionSettings
        if failure is None:
            command = ForgetSubscription(
                topic=record.topic, subscription=name, partition=index, topic_id=record.topic_id
            )
        else:
            present = record.settings.get(name, SubscriptionSettings())
            settings = msgspec.structs.replace(present, failure=failure)
            command = SetSubscriptionSettings(topic=record.topic, subscription=name, settings=settings)

        def remembered(value: Any) -> None:
            if isinstance(value, DanubeError):
                _log.warning(
                    "not remembered",
                    subscription=name,
                    partition=record.physical_name(index),
                    error=str(value),
                )

        try:
            self._operations.propose(command, remembered)
        except DanubeError as error:
            remembered(error)
