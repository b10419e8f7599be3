"""Edits of a topic that exists: policy, partitions, schema, settings of subscriptions."""

from __future__ import annotations

from typing import Final

import msgspec

from danube.core.cluster.records import no_room
from danube.core.metadata.commands import (
    AddPartitions,
    ConfigureTopicSchema,
    ForgetSubscription,
    SetSubscriptionSettings,
    SubscriptionSettings,
    TopicEdit,
    TopicRecord,
    UpdatePolicy,
)
from danube.core.partition.policy import check_max_unacked
from danube.errors import InvalidArgument, LimitExceeded, PolicyMismatch, WrongState
from danube.ids import check_label
from danube.limits import PARTITIONS_MAX, SUBSCRIPTION_SETTINGS_MAX, TOPICS_MAX

VALIDATIONS: Final = ("none", "warn", "enforce")


def check_edit(record: TopicRecord, command: TopicEdit, settings_count: int, partition_count: int) -> None:
    """Raise a CallerError if the edit is not allowed; both counts are of all topics together."""
    match command:
        case AddPartitions():
            _check_partitions(record, command, partition_count)
        case UpdatePolicy():
            command.policy.check()
            if record.policy.reliable != command.policy.reliable:
                raise PolicyMismatch(
                    f"topic {record.topic} cannot change between reliable and non-reliable",
                    why="its records keep the promise that they were sent under",
                    hint="create another topic",
                )
        case ConfigureTopicSchema():
            if command.schema is not None and command.schema.validation not in VALIDATIONS:
                raise InvalidArgument(
                    f"validation policy {command.schema.validation[:40]!r} is not known",
                    hint=f"use {', '.join(VALIDATIONS)}",
                )
        case SetSubscriptionSettings():
            _check_settings(record, command, settings_count)
        case ForgetSubscription():
            pass


def _check_partitions(record: TopicRecord, command: AddPartitions, partition_count: int) -> None:
    if record.partitions == 0:
        raise WrongState(
            f"topic {record.topic} is not partitioned",
            why="its records would have to move",
            hint="create a partitioned topic under another name",
        )
    if not 1 <= command.partitions <= PARTITIONS_MAX:
        raise LimitExceeded(
            f"a topic cannot have {command.partitions} partitions",
            why=f"the limit is {PARTITIONS_MAX}",
            limit=PARTITIONS_MAX,
        )
    if partition_count + command.partitions - record.partitions > TOPICS_MAX:
        hint = "delete topics that are not used"
        raise no_room("partitions", TOPICS_MAX, of="of all topics", hint=hint)


def _check_settings(record: TopicRecord, command: SetSubscriptionSettings, settings_count: int) -> None:
    check_label(command.subscription, "subscription")
    if not record.policy.reliable:
        raise PolicyMismatch(
            f"topic {record.topic} is non-reliable",
            why="its subscriptions have neither acknowledgements nor redelivery",
            hint="use a reliable topic",
        )
    if command.settings.failure is not None:
        command.settings.failure.check()
    if command.settings.max_unacked:  # 0 is the topic's
        check_max_unacked(command.settings.max_unacked)
    if command.subscription not in record.settings and settings_count >= SUBSCRIPTION_SETTINGS_MAX:
        hint = "delete subscriptions that are not used"
        raise no_room("settings of subscriptions", SUBSCRIPTION_SETTINGS_MAX, of="in all topics", hint=hint)


def edited(record: TopicRecord, command: TopicEdit) -> TopicRecord:
    """The record after the edit; equal to ``record`` where the edit changes nothing."""
    match command:
        case UpdatePolicy():
            return msgspec.structs.replace(record, policy=command.policy)
        case AddPartitions():
            # A topic that is not partitioned stays so: its partition has another name.
            partitions = max(record.partitions, command.partitions) if record.partitions else 0
            return msgspec.structs.replace(record, partitions=partitions)
        case ConfigureTopicSchema():
            return msgspec.structs.replace(record, schema=command.schema)
        case SetSubscriptionSettings():
            settings = {**record.settings, command.subscription: command.settings}
            if command.settings == SubscriptionSettings():
                del settings[command.subscription]
            return msgspec.structs.replace(record, settings=settings)
        case ForgetSubscription():
            settings = dict(record.settings)
            if command.partition < 0 or record.partition_count == 1:  # gone from every partition
                settings.pop(command.subscription, None)
            return msgspec.structs.replace(record, settings=settings)
