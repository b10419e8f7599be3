"""The commands and snapshots of the metadata that the golden vectors pin.

``topics`` is a machine of the first snapshot format, ``parts`` of the second, ``cluster`` of the third and
``credentials`` and ``quotas`` of the fourth; each is made by commands, whose stored bytes are pinned with it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from danube.core.cluster.commands import (
    Agreed,
    AllocateId,
    AssignPartitions,
    CompareAndSet,
    DeleteKey,
    DeletePrefix,
    ExpireLeases,
    ForgetBroker,
    GrantLease,
    PutKey,
    RegisterBroker,
    ReleasePartitions,
    RenewLease,
    ReserveOffsets,
    RevokeLease,
    SetBrokerMode,
    UnloadPartitions,
)
from danube.core.metadata.commands import (
    AddPartitions,
    ApiKey,
    Binding,
    Command,
    ConfigureTopicSchema,
    CreateNamespace,
    CreateTopic,
    DeleteApiKey,
    DeleteRevocation,
    DeleteTenant,
    DeleteTopic,
    KnowConsumer,
    KnownConsumer,
    PutApiKey,
    PutBinding,
    PutRole,
    PutTenant,
    RegisterSchema,
    Revocation,
    Revoke,
    Role,
    SetNamespacePolicy,
    SetSubscriptionSettings,
    SubscriptionSettings,
    TopicSchema,
    encode_command,
    join_commands,
)
from danube.core.metadata.machine import Metadata
from danube.core.metadata.policies import NamespacePolicy, Tenant
from danube.core.partition.policy import FailurePolicy, TopicPolicy

FOLDER = Path(__file__).resolve().parent / "metadata"
POLICY = TopicPolicy(durability="fsync", failure=FailurePolicy(poison="drop"))

TOPICS: list[Command] = [
    CreateNamespace(namespace="team"),
    CreateTopic(topic="/default/plain", policy=TopicPolicy(), created_us=1),
    CreateTopic(topic="/team/wide", policy=POLICY, created_us=2, partitions=2),
    CreateTopic(topic="/team/gone", policy=POLICY, created_us=3),
    DeleteTopic(topic="/team/gone"),
    AddPartitions(topic="/team/wide", partitions=3),
]
PARTS: list[Command] = [
    *TOPICS,
    RegisterSchema(
        subject="s", after_revision=0, schema_type="avro", definition=b"\x00\n\xff", fingerprint="f",
        created_us=4, compatibility="full", compiled=b"c", tags=("t",),
    ),
    ConfigureTopicSchema(topic="/team/wide", schema=TopicSchema("s", "enforce", True)),
    SetSubscriptionSettings(
        topic="/team/wide", subscription="sub", settings=SubscriptionSettings(FailurePolicy(), 7)
    ),
    KnowConsumer(consumer=KnownConsumer(9, 1, 0, "sub", "shared", "c", ("*",)), known_max=5),
    PutRole(role=Role("reader", ("Lookup", "Consume"))),
    PutBinding(binding=Binding("b", "user", "anna", ("reader",), "topic", "/team/wide")),
]  # fmt: skip
CLUSTER: list[Command] = [
    *PARTS,
    Agreed(index=3, term=2, now_us=1_000_000, origin="host-1/7", sequence=4),
    GrantLease(lease_id=11, ttl_ms=32_000),
    GrantLease(lease_id=12, ttl_ms=32_000, now_us=5),
    GrantLease(lease_id=13, ttl_ms=1),
    RegisterBroker(
        broker_id=(1 << 64) - 1, lease_id=11, native_address="host-1:7400", grpc_address="host-1:6650",
        admin_address="host-1:50051", metrics_address="host-1:9040", version="1.2.3",
    ),
    RegisterBroker(broker_id=2, lease_id=12, native_address="[::1]:7400", mode="drained", reason="joined"),
    RegisterBroker(broker_id=3, lease_id=13, native_address="host-3:7400"),
    SetBrokerMode(broker_id=2, mode="active", reason="by hand"),
    PutKey(key="/a/bytes", value=bytes(range(256)), lease_id=11),
    PutKey(key="/a/own", value=b"1", ttl_ms=500),
    PutKey(key="/a/plain", value=b"\n"),
    CompareAndSet(key="/a/plain", value=b"2", expected=b"\n"),
    PutKey(key="/a/deleted", value=b""),
    DeleteKey(key="/a/deleted"),
    PutKey(key="/b/one", value=b""),
    DeletePrefix(prefix="/b/"),
    AllocateId(counter="/ids/schema"),
    AllocateId(counter="/ids/schema"),
    AssignPartitions(broker_id=2, partitions=((2, 0, 0), (2, 1, 0)), epoch_floor=40),
    AssignPartitions(broker_id=(1 << 64) - 1, partitions=((1, 0, 0), (2, 2, 0))),
    UnloadPartitions(partitions=((2, 0, 41),), reason="rebalance", to_broker_id=(1 << 64) - 1),
    ReleasePartitions(broker_id=2, partitions=((2, 1, 41),)),
    Agreed(index=5, term=2, now_us=1_002_000, origin="host-2/1", sequence=1),
    RenewLease(lease_id=12),
    ExpireLeases(leases=((13, 16), (12, 15))),
    ForgetBroker(broker_id=3),
    GrantLease(lease_id=14, ttl_ms=1),
    RevokeLease(lease_id=14),
]  # fmt: skip
RESERVED: list[Command] = [
    *CLUSTER,
    ReserveOffsets(broker_id=2, partitions=((2, 0, 41, 1 << 25),)),
    ReserveOffsets(broker_id=(1 << 64) - 1, partitions=((1, 0, 1, 1 << 62), (2, 2, 1, 7))),
    ReserveOffsets(broker_id=2, partitions=((2, 0, 41, 1_000),), last=True),
]
CREDENTIALS: list[Command] = [
    *PARTS,
    PutApiKey(key=ApiKey("a1", bytes(range(32)), "service_account:app", 7, 9, "laptop")),
    PutApiKey(key=ApiKey("b2", bytes(32), "user:anna", 8)),
    PutApiKey(key=ApiKey("c3", bytes(32), "user:bert", 8)),
    DeleteApiKey(id="c3"),
    Revoke(revocation=Revocation("token", "jti-1", 20), now_us=10),
    Revoke(revocation=Revocation("principal", "user:anna", 40, 12, "left"), now_us=12),
    Revoke(revocation=Revocation("signing_key", "", 50), now_us=30),  # the first one has ended
    Revoke(revocation=Revocation("credential", "00" * 16, 60), now_us=31),
    DeleteRevocation(revoked="credential", value="00" * 16),
    CreateNamespace(namespace="later"),
]
QUOTAS: list[Command] = [
    *PARTS,
    SetNamespacePolicy(namespace="team", policy=NamespacePolicy(max_topics=4, durability_min="fsync")),
    SetNamespacePolicy(namespace="system", policy=NamespacePolicy(auto_create=False)),
    SetNamespacePolicy(namespace="system", policy=NamespacePolicy()),
    PutTenant(tenant=Tenant("gone", ("system",))),
    DeleteTenant(name="gone"),
    PutTenant(tenant=Tenant("acme", ("later", "team"), NamespacePolicy(max_partitions=9))),
]
CASES: dict[str, list[Command]] = {
    "topics": TOPICS, "parts": PARTS, "cluster": CLUSTER, "reserved": RESERVED, "credentials": CREDENTIALS,
    "quotas": QUOTAS,
}  # fmt: skip


def vectors() -> dict[str, bytes]:
    """Stored commands and the snapshot of each case."""
    made: dict[str, bytes] = {}
    for name, commands in CASES.items():
        machine = Metadata()
        for index, command in enumerate(commands, 1):
            machine.apply(index, command)
        made[f"{name}.commands"] = join_commands([encode_command(command) for command in commands])
        made[f"{name}.snapshot"] = machine.snapshot()
    return made


def describe(name: str, data: bytes) -> Any:
    """What a reader without Danube's classes sees, as JSON; bytes are in hexadecimal."""
    content = data[8:] if name.endswith(".snapshot") else data
    return msgspec.to_builtins(_shown(msgspec.msgpack.decode(content)))


def _shown(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    if isinstance(value, dict):
        return {str(key): _shown(one) for key, one in value.items()}
    return [_shown(one) for one in value] if isinstance(value, list) else value
