"""Operations on namespaces, topics and the settings of their subscriptions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from danube import __version__
from danube.broker.operations.arguments import changed, listed, paged
from danube.broker.operations.context import proposing
from danube.core.metadata.commands import (
    CreateTopic,
    ForgetSubscription,
    SetSubscriptionSettings,
    SubscriptionSettings,
    TopicRecord,
    UpdatePolicy,
)
from danube.core.partition.policy import TopicPolicy
from danube.core.protocol.native import TopicView
from danube.errors import DanubeError, InvalidArgument, SubscriptionNotFound
from danube.host import clock
from danube.ids import check_label, check_topic_name

if TYPE_CHECKING:
    from danube.broker.operations.context import Answer, Operation, Operations
    from danube.core.security import arguments as of


def policy_for(default: TopicPolicy, reliable: bool | None, durability: str) -> TopicPolicy:
    """Return the default policy with a mode and level; a missing one follows from the other."""
    level = durability
    if reliable is None:
        reliable = default.reliable if not level else level != "memory"
    if not level:
        level = default.durability if reliable == default.reliable else ("written" if reliable else "memory")
    policy = msgspec.structs.replace(default, reliable=reliable, durability=level)
    policy.check()
    return policy


def policy_from(asked: dict[str, Any], present: TopicPolicy) -> TopicPolicy:
    """The present policy with the asked fields, also of its failure policy."""
    if isinstance(failure := asked.get("failure"), dict):
        asked = {**asked, "failure": msgspec.to_builtins(present.failure) | failure}
    return changed(present, asked)


def _mode_asked(asked: dict[str, Any]) -> tuple[bool | None, str]:
    """``reliable`` and ``durability`` of a policy that a client sent; None and "" if not given."""
    reliable, durability = asked.get("reliable"), asked.get("durability") or ""
    if not isinstance(reliable, bool | None) or not isinstance(durability, str):
        raise InvalidArgument("policy cannot be read", why="reliable is a boolean and durability a text")
    return reliable, durability


def topic_view(record: TopicRecord) -> TopicView:
    """Return the answer to a LOOKUP."""
    policy = record.policy
    return TopicView(
        record.topic, record.topic_id, record.physical_names, policy.reliable, policy.durability,
        policy.max_record_bytes,
    )  # fmt: skip


def topic_entry(record: TopicRecord) -> dict[str, Any]:
    """Return one entry of list_topics, which topic answers too: the view, the whole policy and the schema."""
    policy = msgspec.structs.asdict(record.policy)
    return {
        **{name: getattr(record, name) for name in ("topic", "topic_id", "partition_count", "created_us")},
        **{name: policy[name] for name in ("reliable", "durability", "max_record_bytes")},
        "partitions": record.physical_names,
        "policy": policy | {"failure": msgspec.structs.asdict(record.policy.failure)},
        "schema": None if record.schema is None else msgspec.structs.asdict(record.schema),
        "broker_version": __version__,
    }


def _status(operations: Operations, args: of.Nothing, answer: Answer) -> None:
    answer(operations.status())


def _namespaces(operations: Operations, args: of.Page, answer: Answer) -> None:
    operations.refresh()
    answer(listed(args, operations.state.namespaces(), str, str, operations.shows))


def _list_topics(operations: Operations, args: of.Topics, answer: Answer) -> None:
    """Answer a page of what the caller may look up, without a look at what he may not."""
    operations.refresh()
    spans = operations.authority.topic_spans(operations.identity)
    records = operations.state.topics_by_name(spans, args.prefix, args.after, args.namespace)
    answer(paged(args, records, lambda record: record.topic, topic_entry))


def _topic(operations: Operations, args: of.Topic, answer: Answer) -> None:
    answer(topic_entry(operations.topic(args.topic)))


def _create_topic(operations: Operations, args: of.NewTopic, answer: Answer) -> None:
    reliable, durability = _mode_asked(args.policy)
    present = policy_for(operations.policy_of_new(args.topic), reliable, durability)
    mode = {"reliable": present.reliable, "durability": present.durability}
    command = CreateTopic(
        topic=args.topic, partitions=args.partitions, policy=policy_from({**args.policy, **mode}, present),
        created_us=clock.wall_us(), ensure=args.ensure,
    )  # fmt: skip
    operations.propose(command, answer, topic_entry)


def _update_topic(operations: Operations, args: of.TopicChange, answer: Answer) -> None:
    record = operations.topic(args.topic)
    policy = policy_from(args.policy, record.policy)
    operations.propose(UpdatePolicy(topic=record.topic, policy=policy), answer, topic_entry)


# -- settings of subscriptions ------------------------------------------------------------------------


def _settings(
    operations: Operations, args: of.TopicSubscription | of.SubscriptionChange
) -> tuple[TopicRecord, SubscriptionSettings]:
    operations.refresh()
    record = operations.topic(args.topic)
    check_label(args.subscription, "subscription")
    return record, record.settings.get(args.subscription, SubscriptionSettings())


def _subscription_settings(operations: Operations, args: of.TopicSubscription, answer: Answer) -> None:
    record, settings = _settings(operations, args)
    failure = None if settings.failure is None else msgspec.structs.asdict(settings.failure)
    view = {"failure": failure, "max_unacked": settings.max_unacked}

    def described(outcome: Any) -> None:
        if isinstance(outcome, SubscriptionNotFound):
            answer(view | {"mode": None})
        elif isinstance(outcome, DanubeError):
            answer(outcome)
        else:
            answer(view | {"mode": outcome["mode"]})

    operations.ask_owner(
        record.physical_name(0), "describe_subscription", {"subscription": args.subscription}, described
    )


def _set_subscription_settings(operations: Operations, args: of.SubscriptionChange, answer: Answer) -> None:
    record, settings = _settings(operations, args)
    if args.failure is not msgspec.UNSET:
        if args.failure is not None and args.failure.dead_letter_topic:
            check_topic_name(args.failure.dead_letter_topic)
        settings = msgspec.structs.replace(settings, failure=args.failure)
    if args.max_unacked is not msgspec.UNSET:
        settings = msgspec.structs.replace(settings, max_unacked=args.max_unacked)
    command = SetSubscriptionSettings(topic=record.topic, subscription=args.subscription, settings=settings)
    operations.propose(command, answer)


def _forget_subscription(operations: Operations, args: of.TopicSubscription, answer: Answer) -> None:
    """Forget it on all partitions; that of one partition alone is its owner's command, not a client's."""
    check_label(args.subscription, "subscription")
    operations.propose(ForgetSubscription(topic=args.topic, subscription=args.subscription), answer)


TABLE: dict[str, Operation] = {
    "status": _status,
    "namespaces": _namespaces,
    "create_namespace": proposing(),
    "delete_namespace": proposing(),
    "list_topics": _list_topics,
    "topic": _topic,
    "create_topic": _create_topic,
    "delete_topic": proposing(),
    "update_topic": _update_topic,
    "add_partitions": proposing(topic_entry),
    "subscription_settings": _subscription_settings,
    "set_subscription_settings": _set_subscription_settings,
    "forget_subscription": _forget_subscription,
}
