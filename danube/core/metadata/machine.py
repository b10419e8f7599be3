"""The metadata machine: namespaces and topics, changed by commands in one agreed order.

``apply(index, command)`` is deterministic: machines that apply the same commands in the same order are equal,
wherever the order comes from (a local log, or a replicated one). ``apply`` refuses only commands that would
break the machine, because agreed commands must stay applicable in later versions.  ``check(command)`` is for
the proposer and refuses everything that is not allowed today.

Rules:  names follow danube.ids;  a name that ends like a partition is never a topic's own, so
``/ns/t`` and ``/ns/t-part-0`` cannot mean two things, while ``/ns/foo`` and ``/ns/foobar`` have
nothing to do with each other;  topic ids count up and are never used twice;  the namespaces default
and system are always there;  a namespace is deleted only when it is empty.

Parts with rules of their own: schemas (:mod:`danube.core.metadata.schemas`), roles and bindings
(:mod:`danube.core.metadata.roles`), consumers that clients know by a number
(:mod:`danube.core.metadata.known_consumers`), policies of namespaces and tenants
(:mod:`danube.core.metadata.quotas`), and what only a cluster has (:mod:`danube.core.cluster.state`).
The parts of a topic (its schema, its subscriptions' settings, its known consumers, the ownership of its
partitions) are deleted with it.  Bytes: :mod:`danube.core.metadata.snapshot`.
"""

from __future__ import annotations

import difflib
import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final

from danube.core.cluster.commands import ClusterCommand
from danube.core.cluster.records import no_room
from danube.core.cluster.state import ClusterState
from danube.core.metadata import changes as metadata_changes
from danube.core.metadata import snapshot as metadata_snapshot
from danube.core.metadata.commands import (
    AccessCommand,
    AddPartitions,
    Change,
    Command,
    ConfigureTopicSchema,
    CreateNamespace,
    CreateTopic,
    DeleteNamespace,
    DeleteTopic,
    ForgetSubscription,
    KnowConsumer,
    NamespaceCommand,
    NamespaceCreated,
    NamespaceDeleted,
    QuotaCommand,
    QuotasChanged,
    RegisterSchema,
    SchemaCommand,
    SetNamespacePolicy,
    SetSubscriptionSettings,
    TopicCommand,
    TopicCreated,
    TopicDeleted,
    TopicEdit,
    TopicRecord,
    TopicUpdated,
    UpdatePolicy,
)
from danube.core.metadata.known_consumers import KnownConsumers
from danube.core.metadata.policies import check_schema, check_topic_policy
from danube.core.metadata.quotas import Quotas, namespace_of
from danube.core.metadata.roles import Access
from danube.core.metadata.schemas import Registry
from danube.core.metadata.topic_settings import check_edit, edited
from danube.core.partition.policy import FailurePolicy
from danube.errors import (
    Conflict,
    InvalidArgument,
    LimitExceeded,
    NotFound,
    PolicyMismatch,
    TopicExists,
    TopicNotFound,
    WrongState,
    broken,
)
from danube.ids import (
    NAMES_END,
    check_namespace,
    check_new_topic_name,
    check_topic_name,
    split_partition_name,
)
from danube.limits import NAMESPACES_MAX, PARTITIONS_MAX, TOPICS_MAX

QUOTA_COMMANDS: Final = 1  # the level of commands that a broker must know before policies are set
NAMESPACES_ALWAYS: Final = ("default", "system")

_SUGGESTIONS: Final = 3
_SUGGESTION_LOOKUPS_MAX: Final = 2_000
_SUGGESTION_CANDIDATES_MAX: Final = 32


class Metadata:
    """The agreed state of one broker or cluster.  ``version`` is the index of the last applied command."""

    __slots__ = ("_by_id", "_names", "_namespaces", "_partition_count", "access", "cluster", "consumers",
                 "next_topic_id", "quotas", "registry", "settings_count", "version")  # fmt: skip

    def __init__(self) -> None:
        self.version = 0
        self.next_topic_id = 1
        self._namespaces: dict[str, dict[str, TopicRecord]] = {name: {} for name in NAMESPACES_ALWAYS}
        self._by_id: dict[int, TopicRecord] = {}
        self._names: list[str] | None = None  # of topics, sorted; from the first list on
        self._partition_count = 0
        self.settings_count = 0  # of subscriptions, in all topics together
        self.registry = Registry()
        self.access = Access()
        self.consumers = KnownConsumers()
        self.quotas = Quotas()
        self.cluster = ClusterState()

    # Lookup

    @property
    def topic_count(self) -> int:
        return len(self._by_id)

    @property
    def partition_count(self) -> int:
        """Partitions of all topics together."""
        return self._partition_count

    def find_topic(self, name: str) -> TopicRecord | None:
        """The topic of this logical name, or None; a name that is not valid is not found either."""
        topics = self._namespaces.get(name[1 : name.find("/", 1)])
        return topics.get(name) if topics is not None else None

    def topic(self, name: str) -> TopicRecord:
        """The topic of this logical name; raises InvalidName or TopicNotFound with suggestions."""
        record = self.find_topic(name)
        if record is None:
            check_topic_name(name)
            raise self._not_found(name)
        return record

    def topic_with_id(self, topic_id: int) -> TopicRecord | None:
        return self._by_id.get(topic_id)

    def oldest_topics(self, count: int) -> list[int]:
        """Ids of at most ``count`` topics, those that were made first."""
        return heapq.nsmallest(count, self._by_id)

    def topic_of_partition(self, physical_name: str) -> tuple[TopicRecord, int]:
        """The topic and partition number behind a physical name (number 0 without partitions)."""
        record = self.find_topic(physical_name)
        if record is not None and record.partitions == 0:
            return record, 0
        name, partition = split_partition_name(physical_name)
        parent = self.find_topic(name) if partition is not None else None
        if parent is not None and partition is not None and partition < parent.partitions:
            return parent, partition
        check_topic_name(physical_name)
        if record is None and parent is None:
            raise self._not_found(physical_name)
        topic = record or parent
        raise TopicNotFound(
            f"{physical_name} is not a partition",
            why=f"topic {topic.topic} has {topic.partitions} partitions" if topic else "",
            hint=f"for example {topic.physical_name(0)}" if topic else "",
        )

    def topics(self, namespace: str | None = None) -> list[TopicRecord]:
        """The topics of one namespace, or all, in order of creation within a namespace.

        Raises NotFound for an unknown namespace.
        """
        if namespace is None:
            return [record for topics in self._namespaces.values() for record in topics.values()]
        return list(self._topics_of(namespace).values())

    def topics_by_name(
        self,
        spans: Iterable[tuple[str, str]],
        prefix: str = "",
        after: str = "",
        namespace: str | None = None,
    ) -> Iterator[TopicRecord]:
        """Topics by name, of these spans of names; no other topic is looked at.

        Raises NotFound for an unknown namespace.
        """
        within = ""
        if namespace is not None:
            self._topics_of(namespace)
            within = f"/{namespace}/"
        if self._names is None:
            self._names = sorted(name for topics in self._namespaces.values() for name in topics)
        names, first = self._names, max(prefix, f"{after}\0", within)
        end = min(prefix + NAMES_END, within + NAMES_END)
        for low, high in spans:
            for at in range(bisect_left(names, max(low, first)), bisect_left(names, min(high, end))):
                yield self.topic(names[at])

    def namespaces(self) -> list[str]:
        return sorted(self._namespaces)

    def suggestions(self, name: str) -> list[str]:
        """Up to three topics with names like ``name``, best first; looks at a bounded number."""
        namespace = name[1 : name.find("/", 1)]
        topics: dict[str, TopicRecord] = self._namespaces.get(namespace, {})
        looked_at = islice(topics, _SUGGESTION_LOOKUPS_MAX)
        alike = [other for other in looked_at if abs(len(other) - len(name)) < 4]
        start = name[:-2]
        alike.sort(key=lambda other: not other.startswith(start))
        return difflib.get_close_matches(name, islice(alike, _SUGGESTION_CANDIDATES_MAX), _SUGGESTIONS, 0.8)

    def _not_found(self, name: str) -> TopicNotFound:
        similar = self.suggestions(name)
        hint = f"did you mean {' or '.join(similar)}?" if similar else "create the topic first"
        return TopicNotFound(f"topic {name} does not exist", hint=hint)

    def _topics_of(self, namespace: str) -> dict[str, TopicRecord]:
        topics = self._namespaces.get(namespace)
        if topics is None:
            looked_at = islice(self._namespaces, _SUGGESTION_CANDIDATES_MAX)
            similar = difflib.get_close_matches(namespace, looked_at, 1)
            hint = f"did you mean {similar[0]}?" if similar else "create the namespace first"
            raise NotFound(f"namespace {namespace[:80]!r} does not exist", hint=hint)
        return topics

    # Check and apply

    def check(self, command: Command) -> bool:
        """Whether ``command`` would change anything; raises a CallerError if it is not allowed."""
        if isinstance(command, ClusterCommand):
            return self.cluster.check(command, self._partitions_with_id)
        if isinstance(command, SchemaCommand):
            needed = self.registry.check(command)
            if needed and self.quotas and isinstance(command, RegisterSchema):
                self._check_quota_of_subject(command.subject)
            return needed
        if isinstance(command, QuotaCommand):
            self.cluster.check_known(QUOTA_COMMANDS, "policies of namespaces and tenants")
            self._refuse_unknown_namespace(command)
            return self.quotas.check(command)
        if isinstance(command, AccessCommand):
            return self.access.check(command)
        if isinstance(command, KnowConsumer):
            self._refuse_unplaced(command)
            return self.consumers.check(command)
        match command:
            case CreateTopic():
                return self._check_create_topic(command)
            case CreateNamespace():
                return self._check_create_namespace(command)
            case DeleteTopic() | DeleteNamespace():
                self._refuse(command)
                return True
        check_edit(self.topic(command.topic), command, self.settings_count, self._partition_count)
        self._refuse(command)
        needed = not self._unneeded(command)
        if needed and self.quotas:
            self._check_quotas_of_edit(command)
        return needed

    def _check_create_topic(self, command: CreateTopic) -> bool:
        check_topic_name(command.topic)
        existing = self.find_topic(command.topic)
        if existing is not None and command.ensure and self._same(existing, command):
            return False
        self._refuse(command)
        command.policy.check()
        if not 0 <= command.partitions <= PARTITIONS_MAX:
            raise LimitExceeded(
                f"a topic cannot have {command.partitions} partitions",
                why=f"the limit is {PARTITIONS_MAX}",
                hint="0 makes a topic that is not partitioned",
                limit=PARTITIONS_MAX,
            )
        if self._partition_count + max(1, command.partitions) > TOPICS_MAX:
            hint = "delete topics that are not used"
            raise no_room("topics", TOPICS_MAX, of="partitions of all topics", hint=hint)
        if self.quotas:
            self._check_quotas_of_topic(command)
        return True

    # Quotas: only for the proposer, and only where there are any

    def _check_quotas_of_topic(self, command: CreateTopic) -> None:
        namespace = namespace_of(command.topic)
        limits = self.quotas.effective(namespace)
        if limits is not None:
            check_topic_policy(command.topic, command.policy, limits)
            self._check_letters(command.topic, command.policy.failure)
        self.quotas.check_room("max_topics", namespace, 1, self.topics_in)
        more = max(1, command.partitions)
        self.quotas.check_room("max_partitions", namespace, more, self.partitions_in)

    def _check_quotas_of_edit(self, command: TopicEdit) -> None:
        record = self.topic(command.topic)
        namespace = namespace_of(record.topic)
        limits = self.quotas.effective(namespace)
        if isinstance(command, AddPartitions):
            more = command.partitions - record.partitions
            self.quotas.check_room("max_partitions", namespace, more, self.partitions_in)
        elif isinstance(command, UpdatePolicy) and limits is not None:
            check_topic_policy(record.topic, command.policy, limits)
            self._check_letters(record.topic, command.policy.failure)
        elif isinstance(command, SetSubscriptionSettings) and command.settings.failure is not None:
            self._check_letters(record.topic, command.settings.failure)
        elif isinstance(command, ConfigureTopicSchema) and limits is not None:
            check_schema(record.topic, command.schema is not None, limits)

    def _check_letters(self, topic: str, failure: FailurePolicy) -> None:
        if failure.dead_letter_topic:
            self.quotas.check_letters(topic, failure.dead_letter_topic)

    def _check_quota_of_subject(self, subject: str) -> None:
        if self.registry.find(subject) is None and (namespace := namespace_of(subject)):
            self.quotas.check_room("max_subjects", namespace, 1, self.subjects_in)

    def topics_in(self, namespace: str) -> int:
        """How many topics a namespace has; none where it does not exist."""
        return len(self._namespaces.get(namespace, ()))

    def partitions_in(self, namespace: str) -> int:
        """How many partitions its topics have together."""
        return sum(record.partition_count for record in self._namespaces.get(namespace, {}).values())

    def subjects_in(self, namespace: str) -> int:
        """How many schema subjects are named after it."""
        return sum(namespace_of(one.subject) == namespace for one in self.registry.subjects())

    def _same(self, existing: TopicRecord, command: CreateTopic) -> bool:
        """Whether ``existing`` equals the topic that ``command`` ensures.

        Raises PolicyMismatch if only the policy differs.
        """
        if existing.partitions != command.partitions:
            return False
        if existing.policy.unsigned != command.policy.unsigned:
            raise PolicyMismatch(
                f"topic {existing.topic} exists with another policy",
                why=f"it has {existing.policy}",
                hint="use it as it is, or update its policy",
            )
        return True

    def _check_create_namespace(self, command: CreateNamespace) -> bool:
        check_namespace(command.namespace)
        if command.ensure and command.namespace in self._namespaces:
            return False
        self._refuse(command)
        if len(self._namespaces) >= NAMESPACES_MAX:
            raise no_room("namespaces", NAMESPACES_MAX)
        return True

    def _refuse(self, command: TopicCommand | NamespaceCommand) -> None:
        """Raise a CallerError if applying would break the machine."""
        match command:
            case CreateTopic():
                self._refuse_create_topic(command)
            case DeleteTopic() | ForgetSubscription():
                record = self.topic(command.topic)
                if command.topic_id not in (0, record.topic_id):
                    raise TopicNotFound(
                        f"topic {command.topic} was deleted and created again",
                        why=f"its id is {record.topic_id}, not {command.topic_id}",
                    )
            case UpdatePolicy() | AddPartitions() | SetSubscriptionSettings():
                self.topic(command.topic)
            case ConfigureTopicSchema():
                self.topic(command.topic)
                if command.schema is not None:
                    self.registry.subject(command.schema.subject)
            case CreateNamespace():
                if command.namespace in self._namespaces:
                    raise Conflict(f"namespace {command.namespace!r} exists")
            case DeleteNamespace():
                self._refuse_delete_namespace(command.namespace)

    def _refuse_unknown_namespace(self, command: QuotaCommand) -> None:
        """Raise NotFound for the policy of a namespace that is not there; a tenant may make its own later."""
        if isinstance(command, SetNamespacePolicy):
            self._topics_of(command.namespace)

    def _refuse_unplaced(self, command: KnowConsumer) -> None:
        """Raise TopicNotFound if the consumer's topic or partition is not there (any more)."""
        consumer = command.consumer
        record = self._by_id.get(consumer.topic_id)
        if record is None or not 0 <= consumer.partition < record.partition_count:
            raise TopicNotFound(
                "the consumer's partition does not exist",
                why=f"topic id {consumer.topic_id}, partition {consumer.partition}",
                hint="look the topic up again",
            )

    def _refuse_create_topic(self, command: CreateTopic) -> None:
        namespace, _ = check_topic_name(command.topic)
        topics = self._topics_of(namespace)
        existing = topics.get(command.topic)
        if existing is not None:
            raise TopicExists(
                f"topic {command.topic} exists",
                why=f"it has {existing.partitions} partitions",
                topic_id=existing.topic_id,
            )
        parent, partition = split_partition_name(command.topic)
        if partition is not None and parent in topics:
            raise TopicExists(
                f"{command.topic} would look like a partition of topic {parent}",
                why=f"{parent} exists with {topics[parent].partitions} partitions",
                hint="choose a name that does not end in -part-N",
            )
        check_new_topic_name(command.topic)

    def _refuse_delete_namespace(self, namespace: str) -> None:
        if namespace in NAMESPACES_ALWAYS:
            raise InvalidArgument(f"namespace {namespace} cannot be deleted", why="it is always there")
        topics = self._topics_of(namespace)
        if topics:
            raise WrongState(
                f"namespace {namespace} is not empty",
                why=f"it holds {len(topics)} topics, for example {next(iter(topics))}",
                hint="delete its topics first",
            )

    def apply(self, index: int, command: Command) -> list[Change]:
        """Take the command with number ``index``, which is ``version`` + 1, and return what changed.

        A refused command uses up its index and changes nothing else; the error is raised.  A command without
        an effect (an ensured creation, an equal policy) changes nothing.
        """
        if index != self.version + 1:
            broken("a metadata command is out of order", index=index, version=self.version)
        self.version = index
        if isinstance(command, ClusterCommand):
            return [*self.cluster.apply(index, command, self._partitions_with_id)]
        if isinstance(command, SchemaCommand):
            self.registry.apply(index, command)
            return []
        if isinstance(command, AccessCommand):
            self.access.apply(index, command)
            return []
        if isinstance(command, QuotaCommand):
            self._refuse_unknown_namespace(command)
            changed = self.quotas.apply(command)
            return [QuotasChanged(tuple(changed))] if changed else []
        if isinstance(command, KnowConsumer):
            self._refuse_unplaced(command)
            self.consumers.apply(command)
            return []
        if self._unneeded(command):
            return []
        self._refuse(command)
        if isinstance(command, DeleteTopic):
            return self._remove(self.topic(command.topic))
        return [self._change(command)]

    def _change(self, command: CreateTopic | TopicEdit | NamespaceCommand) -> Change:
        """Carry out the needed and allowed changes."""
        match command:
            case CreateTopic():
                record = TopicRecord(
                    command.topic, self.next_topic_id, command.partitions, command.policy, command.created_us
                )
                self.next_topic_id += 1
                self._install(record)
                return TopicCreated(record)
            case CreateNamespace():
                self._namespaces[command.namespace] = {}
                return NamespaceCreated(command.namespace)
            case DeleteNamespace():
                del self._namespaces[command.namespace]
                self.quotas.forget(command.namespace)
                return NamespaceDeleted(command.namespace)
        former = self.topic(command.topic)
        if isinstance(command, ForgetSubscription):
            for consumer_id in self.consumers.ids_of(
                former.topic_id, command.subscription, command.partition
            ):
                self.consumers.forget(consumer_id)
        record = edited(former, command)
        self._count(former, -1)
        self._install(record)
        return TopicUpdated(record)

    def _unneeded(self, command: TopicCommand | NamespaceCommand) -> bool:
        """Return whether the command would change nothing, which is no error."""
        if isinstance(command, CreateNamespace):
            return command.ensure and command.namespace in self._namespaces
        if isinstance(command, DeleteNamespace | DeleteTopic):
            return False
        existing = self.find_topic(command.topic)
        if existing is None:
            return False
        if isinstance(command, CreateTopic):
            return command.ensure and self._same(existing, command)
        if isinstance(command, ForgetSubscription) and (
            command.topic_id not in (0, existing.topic_id)
            or self.consumers.ids_of(existing.topic_id, command.subscription, command.partition)
        ):
            return False
        return edited(existing, command) == existing

    def _install(self, record: TopicRecord) -> None:
        namespace, _ = check_topic_name(record.topic)
        topics = self._namespaces[namespace]
        if self._names is not None and record.topic not in topics:
            insort(self._names, record.topic)
        topics[record.topic] = record
        self._by_id[record.topic_id] = record
        self._count(record, 1)

    def _remove(self, record: TopicRecord) -> list[Change]:
        namespace, _ = check_topic_name(record.topic)
        del self._namespaces[namespace][record.topic]
        if self._names is not None:
            del self._names[bisect_left(self._names, record.topic)]
        del self._by_id[record.topic_id]
        self._count(record, -1)
        for consumer_id in self.consumers.ids_of(record.topic_id):
            self.consumers.forget(consumer_id)
        return [TopicDeleted(record), *self.cluster.forget_topic(record.topic_id, record.partition_count)]

    def _partitions_with_id(self, topic_id: int) -> int:
        """Partitions of the topic of this id; 0 if there is none."""
        record = self._by_id.get(topic_id)
        return record.partition_count if record is not None else 0

    def _count(self, record: TopicRecord, change: int) -> None:
        """A topic with this schema and these settings is there (1), or no longer (-1)."""
        self._partition_count += change * record.partition_count
        self.settings_count += change * len(record.settings)
        if record.schema is not None:
            namespace, _ = check_topic_name(record.topic)
            self.registry.count_topic(record.schema.subject, namespace, change)

    # Copies

    def copy(self) -> Metadata:
        """A machine that changes on its own from here; records are shared, as they never change."""
        other = Metadata()
        other.version, other.next_topic_id = self.version, self.next_topic_id
        other._namespaces = {name: dict(topics) for name, topics in self._namespaces.items()}
        other._by_id = dict(self._by_id)
        other._partition_count = self._partition_count
        other.settings_count = self.settings_count
        other.registry, other.access = self.registry.copy(), self.access.copy()
        other.consumers = self.consumers.copy()
        other.quotas = self.quotas.copy()
        if self.cluster.used:
            other.cluster = self.cluster.copy()
        return other

    def changes_since(self, earlier: Metadata) -> list[Change]:
        """Return the changes from ``earlier`` to this machine, in an order that can be carried out."""
        changes: list[Change] = [*metadata_changes.topic_deletions(earlier._by_id, self._by_id)]
        changes.extend(NamespaceDeleted(name) for name in earlier._namespaces if name not in self._namespaces)
        changes.extend(NamespaceCreated(name) for name in self._namespaces if name not in earlier._namespaces)
        changes += metadata_changes.topic_additions(earlier._by_id, self._by_id)
        if limited := self.quotas.changes_since(earlier.quotas):
            changes.append(QuotasChanged(tuple(limited)))
        changes += metadata_changes.cluster_changes(earlier.cluster, self.cluster, self.version)
        return changes

    def snapshot(self) -> bytes:
        """The whole machine as bytes; equal machines give equal bytes."""
        topics = [self._by_id[topic_id] for topic_id in sorted(self._by_id)]
        return metadata_snapshot.encode(
            self.version, self.next_topic_id, sorted(self._namespaces), topics, self.registry, self.consumers,
            self.access, self.quotas, self.cluster if self.cluster.used else None,
        )  # fmt: skip

    @classmethod
    def restore(cls, snapshot: bytes) -> Metadata:
        """The machine that gave ``snapshot``; raises Damage or StorageIncompatible."""
        stored = metadata_snapshot.decode(snapshot)
        machine = cls()
        machine.version, machine.next_topic_id = stored.index, stored.next_topic_id
        machine._namespaces = {name: {} for name in (*NAMESPACES_ALWAYS, *stored.namespaces)}
        machine.registry.load(stored.next_schema_id, stored.subjects)
        machine.access.load(stored.access_version or stored.index, stored.roles, stored.bindings)
        machine.access.credentials.load(stored.api_keys, stored.revocations)
        machine.consumers.load(stored.known)
        machine.quotas.load(stored.policies_of_namespaces, stored.tenants)
        machine.cluster = metadata_snapshot.cluster_of(stored)
        schemas, settings = dict(stored.schemas), dict(stored.settings)
        for topic, topic_id, partitions, policy, created_us in stored.topics:
            own = schemas.get(topic_id), settings.get(topic_id, {})
            machine._install(
                TopicRecord(topic, topic_id, partitions, stored.policies[policy], created_us, *own)
            )
        return machine
