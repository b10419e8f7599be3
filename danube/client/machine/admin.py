"""Administration as plans that both shells run: which requests are sent, and how answers are put together."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, TypedDict, Unpack

import msgspec

from danube.client.machine.access_plans import AccessPlans
from danube.client.machine.paging import WHOLE, answered, asked, page_of, rest_of, whole_list
from danube.client.machine.reply import Plan
from danube.client.machine.session import Session
from danube.core.metadata.policies import NamespacePolicy
from danube.core.partition.policy import FailurePolicy, TopicPolicy
from danube.core.protocol import native as wire
from danube.core.protocol.native import Kind
from danube.errors import InvalidArgument
from danube.ids import check_new_topic_name, check_topic_name

STATUS_ROWS = 1_000  # of one request
_CLUSTER_READS = frozenset({"brokers", "deciding_broker", "balance"})

Row = dict[str, Any]
Start = str | int | datetime | tuple[str, int]
_START_MAX = (1 << 63) - 1  # offsets and microseconds are signed 64-bit numbers in every format


class TopicInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A topic as the broker lists it."""

    topic: str
    topic_id: int = 0
    partitions: list[str] = []  # physical names; one for a topic that is not partitioned
    reliable: bool = True
    durability: str = ""
    max_record_bytes: int = 0
    policy: dict[str, Any] = {}

    @property
    def partition_count(self) -> int:
        return len(self.partitions)


class TopicDescription(msgspec.Struct, frozen=True, kw_only=True):
    """A topic with its owners' descriptions of each partition, in partition order."""

    topic: TopicInfo
    partitions: list[dict[str, Any]]


class SubscriptionInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A subscription over all partitions: its state in each, in partition order."""

    subscription: str
    mode: str = ""
    lag_records: int = 0
    in_flight: int = 0
    consumer_count: int = 0
    partitions: list[dict[str, Any]] = []


class PolicyKeywords(TypedDict, total=False):
    """Fields of a topic's policy that are given; see :class:`danube.core.partition.policy.TopicPolicy`."""

    durability: str | None
    retention_ms: int | None
    retention_bytes: int | None
    retention_segments: int | None
    max_record_bytes: int | None
    max_unacked: int | None
    max_dispatch_rate: int | None  # records a second to each subscription of a partition; 0: no limit
    max_publish_rate: int | None  # records a second from all producers to all partitions; 0: no limit
    max_publish_bytes: int | None  # the same in bytes, as batches are sent
    cleanup: str | None  # delete, compact or compact_delete
    tombstone_retention_ms: int | None
    failure: FailurePolicy | dict[str, Any] | None


class LimitKeywords(TypedDict, total=False):
    """Fields of a policy or quota; see :class:`danube.core.metadata.policies.NamespacePolicy`."""

    max_topics: int | None
    max_partitions: int | None
    max_subjects: int | None
    max_producers_per_topic: int | None
    max_subscriptions_per_topic: int | None
    max_consumers_per_topic: int | None
    max_consumers_per_subscription: int | None
    max_subscription_dispatch_rate: int | None
    max_message_size: int | None
    max_publish_rate_per_topic: int | None
    max_publish_bytes_per_topic: int | None
    max_storage_bytes_per_topic: int | None
    durability_min: str | None
    retention_max_ms: int | None
    auto_create: bool | None
    schema_required: bool | None
    max_publish_rate: int | None
    max_publish_bytes: int | None
    max_storage_bytes: int | None
    subscription_auth: str | None
    dead_letter_within: str | None
    max_dispatch_rate: int | None
    max_dispatch_bytes: int | None
    max_unacked: int | None


def start_of(start: Start) -> tuple[str, int]:
    """A start position as (kind, value) on the wire: earliest, latest, offset or time (microseconds)."""
    if isinstance(start, str) and start in ("earliest", "latest"):
        return start, 0
    if isinstance(start, int) and not isinstance(start, bool) and 0 <= start <= _START_MAX:
        return "offset", start
    if isinstance(start, datetime):
        if start.tzinfo is None:
            raise InvalidArgument(
                "start time has no time zone", hint="for example datetime.now(timezone.utc)"
            )
        return "time", round(start.timestamp() * 1_000_000)
    if isinstance(start, tuple) and start[0] in ("time", "offset") and 0 <= int(start[1]) <= _START_MAX:
        return start[0], int(start[1])
    raise InvalidArgument(
        f"start {start!r} is not valid",
        why=f"a number must be from 0 to {_START_MAX}" if isinstance(start, int | tuple) else "",
        hint='use "earliest", "latest", an offset, a datetime, or ("time", microseconds)',
    )


def failure_policy_of(failure: FailurePolicy | dict[str, Any] | None) -> FailurePolicy | None:
    """A checked failure policy; raise InvalidArgument for unknown fields or values."""
    if failure is None:
        return None
    if isinstance(failure, dict):
        _check_fields(failure, FailurePolicy, "failure policy")
        checked: FailurePolicy = _convert(failure, FailurePolicy)
    else:
        checked = failure
    checked.check()
    return checked


def policy_fields(reliable: bool | None, durability: str | None = None, **fields: Any) -> dict[str, Any]:
    """Return the given fields of a topic policy in wire form; the broker decides those that are None."""
    policy: dict[str, Any] = {name: value for name, value in fields.items() if value is not None}
    if "failure" in policy:
        policy["failure"] = msgspec.to_builtins(failure_policy_of(policy["failure"]))
    if reliable is not None:
        policy["reliable"] = reliable
    if durability is not None:
        policy["durability"] = durability
    elif reliable is not None:
        policy["durability"] = "written" if reliable else "memory"
    _check_fields(policy, TopicPolicy, "topic policy")
    return policy


def limit_fields(fields: Mapping[str, Any], what: str) -> dict[str, Any]:
    """The given fields of a namespace's policy or a quota in wire form; raises InvalidArgument."""
    given = {name: value for name, value in fields.items() if value is not None}
    _check_fields(given, NamespacePolicy, what)
    policy: NamespacePolicy = _convert(given, NamespacePolicy)
    policy.check()
    return given


def _check_fields(fields: dict[str, Any], cls: type[msgspec.Struct], what: str) -> None:
    unknown = sorted(set(fields) - set(cls.__struct_fields__))
    if unknown:
        raise InvalidArgument(
            f"{what} has no field {unknown[0]!r}", hint=f"it has {', '.join(cls.__struct_fields__)}"
        )


def _convert(value: Any, cls: type[Any]) -> Any:
    try:
        return msgspec.convert(value, cls)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"{cls.__name__} is not valid", why=str(error)) from None


class AdminPlans(AccessPlans):
    """Each method is a plan: it yields replies and returns the answer."""

    def lookup(self, topic: str) -> Plan[wire.TopicView]:
        """The topic as it is; raises TopicNotFound."""
        check_topic_name(topic)
        answer = yield self._session.request(Kind.LOOKUP, wire.Lookup(topic))
        return view_of(answer)

    def create_topic(
        self,
        topic: str,
        *,
        partitions: int = 0,
        reliable: bool | None = None,
        **policy: Unpack[PolicyKeywords],
    ) -> Plan[TopicInfo]:
        """Make a topic; raise TopicExists when there is one.  ``policy``: see :class:`PolicyKeywords`."""
        fields = policy_fields(reliable, **policy)
        check_new_topic_name(topic)
        if fields.get("durability") == "memory" and "reliable" not in fields:
            fields["reliable"] = False
        _convert(fields, TopicPolicy).check()
        yield self._session.admin(
            "create_topic", repeatable=False, topic=topic, partitions=partitions, policy=fields
        )
        return (yield from self.topic(topic))

    def delete_topic(self, topic: str) -> Plan[None]:
        """Delete a topic and everything in it."""
        check_topic_name(topic)
        yield self._session.admin("delete_topic", repeatable=False, topic=topic)

    def update_topic(self, topic: str, **policy: Unpack[PolicyKeywords]) -> Plan[TopicInfo]:
        """Change the given fields of a topic's policy, which are those of create_topic()."""
        fields = policy_fields(None, **policy)
        check_topic_name(topic)
        yield self._session.admin("update_topic", topic=topic, policy=fields)
        return (yield from self.topic(topic))

    def topic(self, topic: str) -> Plan[TopicInfo]:
        """One topic with its policy."""
        answer = yield self._session.admin("topic", topic=topic)
        return topic_of(answer)

    def list_topics(
        self, namespace: str | None = None, *, after: str = "", limit: int | None = None, prefix: str = ""
    ) -> Plan[list[TopicInfo]]:
        """Topics by name: of a namespace, with ``prefix``, behind ``after``, the first ``limit``; or all."""
        page = page_of(after, limit, prefix)
        found = yield from whole_list(self._session, "list_topics", page, namespace=namespace)
        return [topic_of(one) for one in found]

    def describe_topic(self, topic: str) -> Plan[TopicDescription]:
        """One topic, and the state of each of its partitions."""
        view: TopicInfo = yield from self.topic(topic)
        partitions = yield from asked_of(self._session, "describe_partition", view.partitions)
        return TopicDescription(topic=view, partitions=partitions)

    def topic_ends(self, topic: str) -> Plan[list[Row]]:
        """Where each partition begins and ends, in order; for whoever may read or write the topic.

        ``start`` is None until the broker has heard from its store.
        """
        view = yield from self.lookup(topic)
        return (yield from ends_of(self._session, view.partitions))

    def list_subscriptions(
        self, topic: str, *, after: str = "", limit: int | None = None, prefix: str = ""
    ) -> Plan[list[SubscriptionInfo]]:
        """The topic's subscriptions by name; as many of them as list_topics() would tell."""
        page = page_of(after, limit, prefix)
        view = yield from self.lookup(topic)
        by_name: dict[str, list[dict[str, Any]]] = {}
        op = "list_subscriptions"
        answers = yield from asked_of(self._session, op, view.partitions, **asked(page))
        for partition, answer in zip(view.partitions, answers, strict=True):
            for one in (yield from rest_of(self._session, op, page, answer, partition)):
                facts = one if isinstance(one, dict) else {"subscription": one}
                name = facts.get("subscription") or facts.get("name", "")
                by_name.setdefault(name, []).append({"partition": partition, **facts})
        return [_merged(name, by_name[name]) for name in sorted(by_name)[: page.limit]]

    def describe_subscription(self, topic: str, subscription: str) -> Plan[SubscriptionInfo]:
        """One subscription with the state of each partition."""
        answers = yield from self._everywhere("describe_subscription", topic, subscription=subscription)
        return _merged(subscription, answers)

    def subscription_progress(self, topic: str, subscription: str) -> Plan[list[Row]]:
        """How far a subscription is on each partition, in order; for whoever may consume through it."""
        try:
            return (yield from self._everywhere("subscription_progress", topic, subscription=subscription))
        except InvalidArgument:  # an earlier broker describes it, to whoever has View
            return (yield from self._everywhere("describe_subscription", topic, subscription=subscription))

    def seek(self, topic: str, subscription: str, start: Start) -> Plan[None]:
        """Move a subscription to "earliest", "latest", an offset, a datetime or ("time", microseconds)."""
        kind, value = start_of(start)
        yield from self._everywhere("seek", topic, subscription=subscription, kind=kind, value=value)

    def delete_subscription(self, topic: str, subscription: str) -> Plan[None]:
        """Delete a subscription and its cursor on every partition."""
        yield from self._everywhere("delete_subscription", topic, subscription=subscription)
        yield self._session.admin("forget_subscription", topic=topic, subscription=subscription)

    def unblock(self, topic: str, subscription: str) -> Plan[None]:
        """Let a subscription go on that a poison record blocks; the record is skipped."""
        yield from self._everywhere("unblock", topic, subscription=subscription)

    def set_failure_policy(
        self, topic: str, subscription: str, failure: FailurePolicy | dict[str, Any]
    ) -> Plan[None]:
        """Change what happens to records of a subscription that are nacked or not acked in time."""
        policy = msgspec.to_builtins(failure_policy_of(failure))
        yield from self._everywhere("set_failure_policy", topic, subscription=subscription, failure=policy)

    def seal(self, topic: str) -> Plan[list[int]]:
        """Seal what each partition has written so far; below which offset, in partition order."""
        answers = yield from self._everywhere("seal", topic)
        return [int(answer["sealed_end"]) for answer in answers]

    def open_holes(self, topic: str) -> Plan[list[dict[str, Any]]]:
        """Offsets of each partition that only the disk of a broker that is away may hold."""
        answers = yield from self._everywhere("accept_loss", topic, dry_run=True)
        return [dict(answer) for answer in answers]

    def accept_loss(self, ends: Mapping[str, int]) -> Plan[list[dict[str, Any]]]:
        """Give up the open holes of partitions (by name) that begin below an offset."""
        answers: list[dict[str, Any]] = []
        for partition, end in ends.items():
            answers += yield from asked_of(self._session, "accept_loss", [partition], end_offset=end)
        return answers

    def storage_status(self, topic: str = "") -> Plan[dict[str, Any]]:
        """Return where data lies, by topic (or of one), and the bytes and seconds not off the host yet."""
        answer = yield self._session.admin("storage_status", topic=topic, limit=STATUS_ROWS)
        found = dict(answer)
        while after := found.pop("after", None):
            answer = yield self._session.admin("storage_status", topic=topic, limit=STATUS_ROWS, after=after)
            found["after"] = answer.get("after")
            for name in ("pending_bytes", "unconfirmed", "errors", "topics"):
                found[name] += answer[name]
            found["pending_seconds"] = max(found["pending_seconds"], answer["pending_seconds"])
        return found

    def cluster(self, /, op: str, **arguments: Any) -> Plan[Any]:
        """Ask about a cluster's brokers, or have partitions moved: see ``danube brokers``."""
        if op == "brokers":
            return (yield from whole_list(self._session, op, WHOLE))
        answer = yield self._session.admin(op, repeatable=op in _CLUSTER_READS, **arguments)
        return answer

    def status(self) -> Plan[dict[str, Any]]:
        """The broker's own account of itself."""
        return (yield from self._facts("status"))

    def namespaces(self, *, after: str = "", limit: int | None = None, prefix: str = "") -> Plan[list[str]]:
        """Namespaces by name."""
        return (yield from whole_list(self._session, "namespaces", page_of(after, limit, prefix)))

    def create_namespace(self, namespace: str) -> Plan[None]:
        """Make a namespace; raise Conflict when there is one."""
        yield self._session.admin("create_namespace", repeatable=False, namespace=namespace)

    def delete_namespace(self, namespace: str) -> Plan[None]:
        """Delete a namespace that holds no topics, and its policy."""
        yield self._session.admin("delete_namespace", repeatable=False, namespace=namespace)

    def namespace_policy(self, namespace: str) -> Plan[dict[str, Any]]:
        """A namespace's ``policy``, the ``effective`` one with its ``tenant``, and its ``usage``."""
        return (yield from self._facts("namespace_policy", namespace=namespace))

    def set_namespace_policy(self, namespace: str, **policy: Unpack[LimitKeywords]) -> Plan[dict[str, Any]]:
        """Change the given fields of a namespace's policy; returns all of it.  A limit of 0 is none."""
        fields = limit_fields(policy, "namespace policy")
        return (yield from self._facts("set_namespace_policy", namespace=namespace, policy=fields))

    def tenants(self, *, after: str = "", limit: int | None = None, prefix: str = "") -> Plan[list[Row]]:
        """Tenants by name, with their namespaces, quota and usage."""
        return (yield from whole_list(self._session, "tenants", page_of(after, limit, prefix)))

    def put_tenant(
        self, name: str, namespaces: list[str] | None = None, **quota: Unpack[LimitKeywords]
    ) -> Plan[None]:
        """Make a tenant, or change its namespaces (None: keep them) and the given fields of its quota."""
        fields = limit_fields(quota, "quota")
        yield self._session.admin("put_tenant", name=name, namespaces=namespaces, quota=fields)

    def delete_tenant(self, name: str) -> Plan[None]:
        """Forget a tenant; its namespaces stay, with their own policies."""
        yield self._session.admin("delete_tenant", repeatable=False, name=name)

    def quotas(self, *, after: str = "", limit: int | None = None, prefix: str = "") -> Plan[list[Row]]:
        """Quotas that are set on sums, and how much of each is used, over all brokers.

        Rates are a second's, of the last seconds.  The whole list begins with what is used most; pages go by
        names.
        """
        rows: list[Row] = yield from whole_list(self._session, "quotas", page_of(after, limit, prefix))
        if not after and limit is None:
            rows.sort(key=lambda row: (-row["used"] / row["limit"], row["of"], row["name"]))
        return rows

    def _everywhere(self, op: str, topic: str, **arguments: Any) -> Plan[list[Any]]:
        view = yield from self.lookup(topic)
        return (yield from asked_of(self._session, op, view.partitions, **arguments))


def ends_of(session: Session, partitions: list[str]) -> Plan[list[Row]]:
    """Where partitions begin and end; an earlier broker describes them whole, to whoever has View."""
    try:
        return (yield from asked_of(session, "partition_ends", partitions))
    except InvalidArgument:
        return (yield from asked_of(session, "describe_partition", partitions))


def asked_of(session: Session, op: str, partitions: list[str], **arguments: Any) -> Plan[list[Any]]:
    """Ask the owner of every partition at once; the first error is raised when all have answered."""
    replies = [session.admin(op, partition, **arguments) for partition in partitions]
    answers, errors = [], []
    for reply in replies:
        try:
            answers.append((yield reply))
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return answers


def view_of(answer: Any) -> wire.TopicView:
    return answered(answer, wire.TopicView, "described the topic")


def topic_of(answer: Any) -> TopicInfo:
    if isinstance(answer, str):
        return TopicInfo(topic=answer)
    return answered(answer, TopicInfo, "described the topic")


def _merged(subscription: str, facts: list[dict[str, Any]]) -> SubscriptionInfo:
    def total(name: str) -> int:
        return sum(int(one.get(name, 0) or 0) for one in facts)

    return SubscriptionInfo(
        subscription=subscription,
        mode=str(facts[0].get("mode", "")) if facts else "",
        lag_records=total("lag"),
        in_flight=total("in_flight"),
        consumer_count=max((int(one.get("consumers", 0)) for one in facts), default=0),
        partitions=facts,
    )
