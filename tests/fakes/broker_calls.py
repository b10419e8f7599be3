"""The broker behind the gRPC servicers: topics in the real metadata machine, the rest in dicts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from danube.broker.operations import cluster as cluster_operations
from danube.broker.operations import roles as role_operations
from danube.broker.operations.arguments import arguments_of
from danube.broker.routing.judging import Sight
from danube.config.loading import BrokerConfig
from danube.core.metadata.commands import Command, CreateNamespace, CreateTopic, DeleteNamespace, DeleteTopic
from danube.core.metadata.machine import Metadata
from danube.core.partition.policy import FailurePolicy, TopicPolicy
from danube.core.protocol.native import Admin
from danube.core.security.authority import EVERYBODY
from danube.core.security.principals import ANONYMOUS, Identity
from danube.errors import (
    SchemaIncompatible,
    SchemaInvalid,
    SchemaNotFound,
    SubscriptionNotFound,
    WrongState,
)
from danube.server.services.calls import BrokerCalls


@dataclass
class FakeCall:
    """One RPC of a client that dialled 127.0.0.1:6650."""

    authority: str = "127.0.0.1:6650"
    metadata: dict[str, str] = field(default_factory=dict)
    peer: str = "127.0.0.1:50000"
    identity: Identity = ANONYMOUS


def unpaged(args: dict[str, Any]) -> dict[str, Any]:
    """As a broker takes them that knows no pages."""
    return {name: value for name, value in args.items() if name not in ("after", "limit", "prefix")}


class FakeBrokerCalls:
    """Answers the operations that the servicers ask; ``asked`` keeps their names in order."""

    def __init__(self) -> None:
        self.config = BrokerConfig(workers=1)
        self.broker_id = 4711
        self.workers = 1
        self.admin_address = "http://127.0.0.1:50051"
        self.metrics_address = ""
        self.metadata = Metadata()
        self.clustered = False
        self.controller_answers: list[Any] = []
        self.controller_requests: list[Any] = []
        self.asked: list[str] = []
        self.refreshed = 0
        self.subscriptions: dict[tuple[str, str], list[str]] = {}  # (partition, name) -> consumer names
        self.settings: dict[tuple[str, str], dict[str, Any]] = {}
        self.schemas: dict[str, list[dict[str, Any]]] = {}
        self.topic_schemas: dict[str, dict[str, Any]] = {}

    async def ask_controller(self, request: Any) -> Any:
        self.controller_requests.append(request)
        return self.controller_answers.pop(0)

    def sight(self, call: Any) -> Sight:
        return Sight(EVERYBODY, ANONYMOUS, self.metadata)

    def refresh(self) -> None:
        self.refreshed += 1

    def url(self, door: str, address: str) -> str:
        return BrokerCalls.url(cast(BrokerCalls, self), door, address)

    def address_for(self, call: Any) -> str:
        return self.url("grpc", call.authority)

    async def ask(self, op: str, **args: Any) -> Any:
        self.asked.append(op)
        own = getattr(self, f"_{op.replace('.', '_')}", None)
        if own is None:
            return _over_the_wire(self._cluster(op, _over_the_wire(args)))
        return _over_the_wire(own(**_over_the_wire(unpaged(args))))

    def _cluster(self, op: str, args: dict[str, Any]) -> Any:
        """An operation of the broker itself, on this metadata."""
        answers: list[Any] = []
        table = cluster_operations.TABLE | role_operations.TABLE
        table[op](cast(Any, self), arguments_of(Admin(op, "", args)), answers.append)
        return answers[0]

    def propose(self, command: Command, answer: Any, view: Any = lambda made: None) -> None:
        self.commit(command)
        answer(view(None))

    @property
    def state(self) -> Metadata:
        return self.metadata

    def status(self) -> dict[str, Any]:
        return {"broker_id": str(self.broker_id), "native": "127.0.0.1:6660", "version": "1"}

    async def ask_partition(self, partition: str, op: str, **args: Any) -> Any:
        self.asked.append(op)
        self.metadata.topic_of_partition(partition)
        operation = getattr(self, f"_partition_{op}")
        return _over_the_wire(operation(partition, **_over_the_wire(unpaged(args))))

    def commit(self, command: Command) -> None:
        """Check and apply, as a proposal goes."""
        self.metadata.check(command)
        self.metadata.apply(self.metadata.version + 1, command)

    # Topics and namespaces

    def _namespaces(self) -> list[str]:
        return self.metadata.namespaces()

    def _create_namespace(self, namespace: str) -> None:
        self.commit(CreateNamespace(namespace=namespace))

    def _delete_namespace(self, namespace: str) -> None:
        self.commit(DeleteNamespace(namespace=namespace))

    def _create_topic(self, topic: str, partitions: int, policy: dict[str, Any]) -> None:
        reliable = policy["reliable"]
        made = TopicPolicy(reliable=reliable, durability="written" if reliable else "memory")
        self.commit(CreateTopic(topic=topic, partitions=partitions, policy=made, created_us=1))

    def _delete_topic(self, topic: str) -> None:
        self.commit(DeleteTopic(topic=topic))

    # Subscriptions

    def subscribe(self, partition: str, name: str, *consumers: str, mode: str = "shared") -> None:
        record, _ = self.metadata.topic_of_partition(partition)
        self.subscriptions[partition, name] = list(consumers)
        self._of(record.topic, name)["mode"] = mode

    def _of(self, topic: str, subscription: str) -> dict[str, Any]:
        return self.settings.setdefault(
            (topic, subscription), {"failure": None, "max_unacked": 0, "mode": None}
        )

    def _subscription_settings(self, topic: str, subscription: str) -> dict[str, Any]:
        self.metadata.topic(topic)
        return self._of(topic, subscription)

    def _set_subscription_settings(self, topic: str, subscription: str, **given: Any) -> None:
        self.metadata.topic(topic)
        if "failure" in given:
            msgspec.convert(given["failure"], FailurePolicy).check()
        self._of(topic, subscription).update(given)

    def _forget_subscription(self, topic: str, subscription: str) -> None:
        self.settings.pop((topic, subscription), None)

    def _partition_list_subscriptions(self, partition: str) -> list[dict[str, Any]]:
        return [
            {"subscription": name, "partition": where, "consumer_names": consumers}
            for (where, name), consumers in self.subscriptions.items()
            if where == partition
        ]

    def _partition_delete_subscription(self, partition: str, subscription: str) -> None:
        if (partition, subscription) not in self.subscriptions:
            raise SubscriptionNotFound(f"subscription {subscription!r} does not exist on {partition}")
        if self.subscriptions[partition, subscription]:
            raise WrongState("consumers are connected")
        del self.subscriptions[partition, subscription]

    # Registry

    def register(self, subject: str, schema_type: str = "json_schema", definition: bytes = b"{}") -> int:
        made: dict[str, Any] = self._schema_register(subject, schema_type, definition)
        return int(made["schema_id"])

    def _schema_register(
        self,
        subject: str,
        schema_type: str,
        definition: bytes,
        description: str = "",
        created_by: str = "",
        tags: list[str] | None = None,
    ) -> dict[str, Any]:
        if definition == b"unparsable":
            raise SchemaInvalid("the definition does not parse")
        if definition == b"incompatible":
            raise SchemaIncompatible("a required field was removed", violations="[]")
        versions = self.schemas.setdefault(subject, [])
        same = [one for one in versions if one["definition"] == definition]
        if same:
            return {**same[0], "is_new_version": False}
        entry = {
            "subject": subject,
            "schema_id": versions[0]["schema_id"] if versions else len(self.schemas),
            "version": len(versions) + 1,
            "schema_type": schema_type,
            "definition": definition,
            "fingerprint": f"sha256:{len(definition):064x}",
            "description": description,
            "created_by": created_by,
            "created_us": 1_700_000_000_500_000,
            "tags": tags or [],
            "compatibility": versions[0]["compatibility"] if versions else "backward",
        }
        versions.append(entry)
        return {**entry, "is_new_version": True}

    def _versions(self, subject: str) -> list[dict[str, Any]]:
        if not self.schemas.get(subject):
            raise SchemaNotFound(f"subject {subject!r} is not registered")
        return self.schemas[subject]

    def _schema_get(self, subject: str = "", schema_id: int = 0, version: int = 0) -> dict[str, Any]:
        if subject:
            versions = self._versions(subject)
        else:
            versions = [
                one for group in self.schemas.values() for one in group if one["schema_id"] == schema_id
            ]
        found = [one for one in versions if version in (0, one["version"])]
        if not found:
            raise SchemaNotFound(f"schema {schema_id} version {version} is not registered")
        return found[-1]

    def _schema_versions(self, subject: str) -> list[dict[str, Any]]:
        return [
            {name: value for name, value in one.items() if name != "definition"}
            for one in self._versions(subject)
        ]

    def _schema_subjects(self) -> list[dict[str, Any]]:
        return [{**group[-1], "latest_version": group[-1]["version"]} for group in self.schemas.values()]

    def _schema_check(
        self, subject: str, schema_type: str, definition: bytes, compatibility: str
    ) -> dict[str, Any]:
        self._versions(subject)
        if definition == b"unparsable":
            raise SchemaInvalid("the definition does not parse")
        broken = definition == b"incompatible" and compatibility != "none"
        violation = {"path": "/required/0", "rule": "required_removed", "message": "id is gone", "old": "id"}
        return {"is_compatible": not broken, "violations": [violation] if broken else []}

    def _schema_set_compatibility(self, subject: str, compatibility: str) -> dict[str, Any]:
        for one in self._versions(subject):
            one["compatibility"] = compatibility
        return {"subject": subject, "compatibility": compatibility}

    def _schema_delete_version(self, subject: str, version: int) -> dict[str, Any]:
        found = [one for one in self._versions(subject) if one["version"] == version]
        if not found:
            raise SchemaNotFound(f"subject {subject!r} has no version {version}")
        self.schemas[subject].remove(found[0])
        return {}

    def _schema_topic(self, topic: str) -> dict[str, Any]:
        self.metadata.topic(topic)
        unset = {
            "topic": topic,
            "subject": "",
            "validation": "warn",
            "validate_payload": False,
            "schema_id": 0,
        }
        return self.topic_schemas.get(topic, unset)

    def _schema_configure_topic(self, topic: str, **given: Any) -> dict[str, Any]:
        present = {**self._schema_topic(topic), **given}
        if not present["subject"]:
            raise WrongState(f"topic {topic} has no schema subject")
        present["schema_id"] = self._versions(present["subject"])[0]["schema_id"]
        self.topic_schemas[topic] = present
        return present


def _over_the_wire(value: Any) -> Any:
    """What is left of a value that crossed to another worker."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value))
