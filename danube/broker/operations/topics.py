"""Operations on namespaces, topics and the settings of their subscriptions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from danube import __version__
from danube.broker.operations.arguments import Args, integer, listed, paged, struct_of, text
from danube.broker.operations.context import proposing
from danube.core.metadata.commands import (
    AddPartitions,
    CreateNamespace,
    CreateTopic,
    DeleteNamespace,
    DeleteTopic,
    ForgetSubscription,
    SetSubscriptionSettings,
    SubscriptionSettings,
    TopicRecord,
    UpdatePolicy,
)
from danube.core.partition.policy import FailurePolicy, TopicPolicy
from danube.core.protocol.native import TopicView
from danube.errors import DanubeError, InvalidArgument, SubscriptionNotFound
from danube.host import clock
from danube.ids import check_label, check_topic_name

if TYPE_CHECKING:
    from danube.broker.operations.context import Answer, Operation, Operations


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


def policy_from(asked: Any, present: TopicPolicy) -> TopicPolicy:
    """The present policy with the asked fields; unknown fields and impossible values are refused."""
    if not isinstance(asked, dict):
        raise InvalidArgument("policy must be a map")
    unknown = set(asked) - set(TopicPolicy.__struct_fields__)
    if unknown:
        raise InvalidArgument(f"policy has unknown fields: {', '.join(sorted(map(str, unknown)))}")
    given = {name: value for name, value in asked.items() if value is not None}
    fields = msgspec.to_builtins(present) | given
    if isinstance(asked.get("failure"), dict):
        fields["failure"] = msgspec.to_builtins(present.failure) | asked["failure"]
    policy = struct_of(fields, TopicPolicy, "policy")
    policy.check()
    return policy


def _mode_asked(asked: Any) -> tuple[bool | None, str]:
    """``reliable`` and ``durability`` of a policy that a client sent; None and "" if not given."""
    if not isinstance(asked, dict):
        raise InvalidArgument("policy must be a map")
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


def _status(operations: Operations, args: Args, answer: Answer) -> None:
    answer(operations.status())


def _namespaces(operations: Operations, args: Args, answer: Answer) -> None:
    operations.refresh()
    answer(listed(args, operations.state.namespaces(), str, str, operations.shows))


def _list_topics(operations: Operations, args: Args, answer: Answer) -> None:
    """Answer a page of what the caller may look up, without a look at what he may not."""
    operations.refresh()
    records = operations.state.topics_by_name(
        operations.authority.topic_spans(operations.identity),
        text(args, "prefix", ""),
        text(args, "after", ""),
        None if args.get("namespace") is None else text(args, "namespace"),
    )
    answer(paged(args, records, lambda record: record.topic, topic_entry))


def _topic(operations: Operations, args: Args, answer: Answer) -> None:
    answer(topic_entry(operations.topic(str(args.get("topic", "")))))


def _create_topic(operations: Operations, args: Args, answer: Answer) -> None:
    asked, partitions = args.get("policy", {}), args.get("partitions", 0)
    reliable, durability = _mode_asked(asked)
    if not isinstance(partitions, int):
        raise InvalidArgument("partitions must be a number")
    topic = str(args.get("topic", ""))
    present = policy_for(operations.policy_of_new(topic), reliable, durability)
    policy = policy_from({**asked, "reliable": present.reliable, "durability": present.durability}, present)
    command = CreateTopic(
        topic=topic, partitions=partitions, policy=policy,
        created_us=clock.wall_us(), ensure=bool(args.get("ensure", False)),
    )  # fmt: skip
    operations.propose(command, answer, topic_entry)


def _update_topic(operations: Operations, args: Args, answer: Answer) -> None:
    record = operations.topic(str(args.get("topic", "")))
    policy = policy_from(args.get("policy", {}), record.policy)
    operations.propose(UpdatePolicy(topic=record.topic, policy=policy), answer, topic_entry)


# -- settings of subscriptions ------------------------------------------------------------------------


def _subscription(args: Args) -> str:
    name = text(args, "subscription")
    check_label(name, "subscription")
    return name


def _subscription_settings(operations: Operations, args: Args, answer: Answer) -> None:
    operations.refresh()
    record = operations.topic(text(args, "topic"))
    name = _subscription(args)
    settings = record.settings.get(name, SubscriptionSettings())
    failure = None if settings.failure is None else msgspec.structs.asdict(settings.failure)
    view = {"failure": failure, "max_unacked": settings.max_unacked}

    def described(outcome: Any) -> None:
        if isinstance(outcome, SubscriptionNotFound):
            answer(view | {"mode": None})
        elif isinstance(outcome, DanubeError):
            answer(outcome)
        else:
            answer(view | {"mode": outcome["mode"]})

    operations.ask_owner(record.physical_name(0), "describe_subscription", {"subscription": name}, described)


def _set_subscription_settings(operations: Operations, args: Args, answer: Answer) -> None:
    operations.refresh()
    record = operations.topic(text(args, "topic"))
    name = _subscription(args)
    settings = record.settings.get(name, SubscriptionSettings())
    if "failure" in args:
        asked = args["failure"]
        failure = None if asked is None else struct_of(asked, FailurePolicy, "failure policy")
        if failure is not None and failure.dead_letter_topic:
            check_topic_name(failure.dead_letter_topic)
        settings = msgspec.structs.replace(settings, failure=failure)
    if "max_unacked" in args:
        settings = msgspec.structs.replace(settings, max_unacked=integer(args, "max_unacked"))
    command = SetSubscriptionSettings(topic=record.topic, subscription=name, settings=settings)
    operations.propose(command, answer)


def _forget_subscription(operations: Operations, args: Args, answer: Answer) -> None:
    """Forget it on all partitions; that of one partition alone is its owner's command, not a client's."""
    command = ForgetSubscription(topic=text(args, "topic"), subscription=_subscription(args))
    operations.propose(command, answer)


TABLE: dict[str, Operation] = {
    "status": _status,
    "namespaces": _namespaces,
    "create_namespace": proposing(CreateNamespace),
    "delete_namespace": proposing(DeleteNamespace),
    "list_topics": _list_topics,
    "topic": _topic,
    "create_topic": _create_topic,
    "delete_topic": proposing(DeleteTopic),
    "update_topic": _update_topic,
    "add_partitions": proposing(AddPartitions, topic_entry),
    "subscription_settings": _subscription_settings,
    "set_subscription_settings": _set_subscription_settings,
    "forget_subscription": _forget_subscription,
}
