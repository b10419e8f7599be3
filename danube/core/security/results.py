"""Answers of operations: a type for each row of the table, as msgspec reads it.

Operations answer maps of just these fields.  A list is of all entries; in pages it comes as ``entries`` and
``after`` (:mod:`danube.broker.operations.arguments`).  None: nothing but that it was done.  Later brokers may
add fields.  A field with the default UNSET is left out where it does not apply.
"""

from __future__ import annotations

from typing import Any, Final

from msgspec import UNSET, Struct, UnsetType

from danube.core.metadata.commands import Binding, Revocation, Role, TopicSchema
from danube.core.metadata.policies import NamespacePolicy
from danube.core.partition.policy import FailurePolicy, TopicPolicy


class Result(Struct, frozen=True):
    pass


class Empty(Result, frozen=True):
    pass


# -- the broker, namespaces and tenants ---------------------------------------------------------------


class Status(Result, frozen=True):
    """``workers``: counters of each worker, by name."""

    version: str
    broker_id: str
    supervisor_pid: int
    data_dir: str
    topics: int
    workers: list[dict[str, int | float]]
    native: str | UnsetType = UNSET
    native_tls: str | UnsetType = UNSET
    grpc: str | UnsetType = UNSET
    admin: str | UnsetType = UNSET
    local: str | UnsetType = UNSET
    peer: str | UnsetType = UNSET
    metrics: str | UnsetType = UNSET


class AuditLine(Result, frozen=True, rename={"number": "seq"}):
    worker: int
    time: str
    number: int
    principal: str
    how: str
    source: str
    operation: str
    resource: str
    outcome: str
    code: int
    request_id: str
    details: dict[str, Any]
    prev: str
    hash: str


class Usage(Result, frozen=True):
    topics: int
    partitions: int
    subjects: int


class NamespaceLimits(Result, frozen=True):
    namespace: str
    tenant: str | None
    policy: NamespacePolicy
    effective: NamespacePolicy
    usage: Usage


class Tenant(Result, frozen=True):
    name: str
    namespaces: list[str]
    quota: NamespacePolicy
    usage: Usage | UnsetType = UNSET


class QuotaUse(Result, frozen=True):
    """``of``: namespace or tenant."""

    of: str
    name: str
    quota: str
    used: int
    limit: int


# -- topics, partitions and subscriptions -------------------------------------------------------------


class Topic(Result, frozen=True):
    topic: str
    topic_id: int
    partition_count: int
    created_us: int
    reliable: bool
    durability: str
    max_record_bytes: int
    partitions: list[str]
    policy: TopicPolicy
    schema: TopicSchema | None
    broker_version: str


class SubscriptionSettings(Result, frozen=True):
    """``mode`` is None while the subscription does not exist."""

    failure: FailurePolicy | None
    max_unacked: int
    mode: str | None


class Hole(Result, frozen=True):
    start: int
    end: int
    kind: str
    broker_id: int
    epoch: int
    since_us: int
    settled_us: int


class PartitionEnds(Result, frozen=True):
    partition: str
    start: int
    log_end: int
    high_watermark: int
    holes: list[Hole]
    histories: list[Any]


class Partition(PartitionEnds, frozen=True):
    local_start: int
    uploaded_end: int
    written_end: int
    synced_end: int
    waits_for_disk: bool
    epoch: int
    local_bytes: int
    records_in: int
    bytes_in: int
    producers: list[str]
    subscriptions: list[str]
    lost_subscriptions: list[str]
    durability: str
    damaged: list[list[int]]
    unreadable: list[str]
    state: str


class RowMark(Result, frozen=True):
    mark: str
    waiting: bool


class PartitionStorage(Result, frozen=True):
    """Where there is an object store, the fields of its tier too."""

    partition: str
    local_bytes: int
    tiered: bool | UnsetType = UNSET
    start: int | UnsetType = UNSET
    local_start: int | UnsetType = UNSET
    uploaded_end: int | UnsetType = UNSET
    uploaded_bytes: int | UnsetType = UNSET
    objects: int | UnsetType = UNSET
    pending_bytes: int | UnsetType = UNSET
    pending_seconds: float | UnsetType = UNSET
    holes: int | UnsetType = UNSET
    upload_error: str | UnsetType = UNSET
    read_error: str | UnsetType = UNSET
    known: bool | UnsetType = UNSET


class Segment(Result, frozen=True):
    key: str
    start_offset: int
    end_offset: int
    size_bytes: int
    record_count: int
    first_append_us: int
    last_append_us: int
    uploaded_us: int
    content_hash: str


class Subscription(Result, frozen=True):
    """Counts in records.  Those of a non-reliable topic's subscriptions are fewer, and have the queue's."""

    subscription: str
    partition: str
    mode: str
    consumers: int
    consumer_names: list[str]
    state: str | UnsetType = UNSET
    dead_letter_error: str | UnsetType = UNSET
    blocked_offsets: list[int] | UnsetType = UNSET
    withheld_ranges: list[list[int]] | UnsetType = UNSET
    ack_floor: int | UnsetType = UNSET
    ack_ignored: int | UnsetType = UNSET
    ack_refused: int | UnsetType = UNSET
    acked: int | UnsetType = UNSET
    acked_above_floor: int | UnsetType = UNSET
    blocked: int | UnsetType = UNSET
    compacted: int | UnsetType = UNSET
    damaged: int | UnsetType = UNSET
    dead: int | UnsetType = UNSET
    dead_lettered: int | UnsetType = UNSET
    dropped: int | UnsetType = UNSET
    expired: int | UnsetType = UNSET
    given_up: int | UnsetType = UNSET
    granted: int | UnsetType = UNSET
    held: int | UnsetType = UNSET
    in_flight: int | UnsetType = UNSET
    lag: int | UnsetType = UNSET
    left_from: int | UnsetType = UNSET
    nacked: int | UnsetType = UNSET
    next: int | UnsetType = UNSET
    redelivered: int | UnsetType = UNSET
    skipped: int | UnsetType = UNSET
    timed_out: int | UnsetType = UNSET
    unused: int | UnsetType = UNSET
    waiting_redelivery: int | UnsetType = UNSET
    withheld: int | UnsetType = UNSET
    offered: int | UnsetType = UNSET
    queued_records: int | UnsetType = UNSET
    queued_bytes: int | UnsetType = UNSET
    queued_batches: int | UnsetType = UNSET


class Progress(Result, frozen=True):
    subscription: str
    lag: int
    ack_floor: int | UnsetType = UNSET
    left_from: int | UnsetType = UNSET
    damaged: int | UnsetType = UNSET
    expired: int | UnsetType = UNSET


class Offset(Result, frozen=True):
    offset: int


class Sought(Offset, frozen=True):
    lag: int


class Unblocked(Result, frozen=True):
    unblocked: int


class Sealed(Result, frozen=True):
    sealed_end: int


class Holes(Result, frozen=True):
    partition: str
    holes: list[Hole]


class TopicStorage(Result, frozen=True):
    topic: str
    partitions: int
    local_bytes: int
    uploaded_bytes: int
    objects: int
    pending_bytes: int
    pending_seconds: float
    unconfirmed: int
    errors: int
    error: str


class StorageStatus(Result, frozen=True):
    """Sums are of the topics in the answer."""

    tiered: bool
    store: dict[str, Any] | None
    pending_bytes: int
    pending_seconds: float
    unconfirmed: int
    errors: int
    topics: list[TopicStorage]
    after: str | UnsetType = UNSET


# -- schemas ------------------------------------------------------------------------------------------


class Registered(Result, frozen=True, rename={"new": "is_new_version"}):
    subject: str
    schema_id: int
    version: int
    new: bool
    fingerprint: str


class Version(Result, frozen=True):
    subject: str
    schema_id: int
    version: int
    schema_type: str
    fingerprint: str
    description: str
    created_by: str
    created_us: int
    tags: list[str]
    compatibility: str


class Definition(Version, frozen=True):
    definition: bytes


class Subject(Result, frozen=True):
    subject: str
    schema_id: int
    schema_type: str
    latest_version: int
    compatibility: str
    tags: list[str]


class Verdict(Result, frozen=True, rename={"compatible": "is_compatible"}):
    compatible: bool
    violations: list[dict[str, Any]]


class Differences(Result, frozen=True):
    subject: str
    old: int
    new: int
    backward: list[dict[str, Any]]
    forward: list[dict[str, Any]]


class CompatibilityMode(Result, frozen=True):
    subject: str
    compatibility: str


class DeletedVersions(Result, frozen=True):
    deleted_versions: list[int]


class SchemaOfTopic(Result, frozen=True):
    topic: str
    subject: str
    validation: str
    validate_payload: bool
    schema_id: int


# -- access -------------------------------------------------------------------------------------------


class ApiKey(Result, frozen=True):
    id: str
    principal: str
    created_us: int
    expires_us: int
    description: str


class NewApiKey(ApiKey, frozen=True):
    key: str  # shown this once


class Token(Result, frozen=True):
    token: str
    id: str
    principal: str
    expires_us: int


class Right(Result, frozen=True):
    """Whether a principal has a permission, and by which binding and role."""

    principal: str
    permission: str
    scope: str
    resource_name: str
    allowed: bool
    reason: str
    binding: Binding | None
    role: str


# -- brokers ------------------------------------------------------------------------------------------


class Load(Result, frozen=True):
    cpu: float
    memory: float
    bytes_per_s: float
    records_per_s: float
    backlog_records: int


class Broker(Result, frozen=True):
    broker_id: str
    mode: str
    reason: str
    alive: bool
    role: str
    native_address: str
    grpc_address: str
    admin_address: str
    metrics_address: str
    version: str
    partitions: int
    load: Load | None
    shared_storage: bool | UnsetType | None = UNSET


class Deciding(Result, frozen=True):
    broker_id: str
    native_address: str


class Member(Result, frozen=True):
    """A member of the metadata's cluster as it sees itself."""

    type: str
    self_node_id: str
    raft_addr: str
    cluster: str
    cluster_id: str
    role: str
    leader_id: str
    current_term: int
    last_applied: int
    commit_index: int
    version: int
    voters: dict[str, str]
    learners: dict[str, str]
    reached: list[str]
    counters: dict[str, int]
    placing: dict[str, Any] | None
    waiting: dict[str, Any] | None


class Mode(Result, frozen=True):
    broker_id: str
    mode: str


class Unloading(Result, frozen=True):
    """``stays``: partitions that cannot leave."""

    broker_id: str
    total: int
    stays: int
    started: bool
    drained: bool


class Forgotten(Result, frozen=True):
    """``lost``: partitions that go on without records of the broker's disk."""

    broker_id: str
    lost: int


class BrokerLoad(Result, frozen=True):
    broker_id: str
    load: float
    partitions: int
    overloaded: bool
    underloaded: bool


class Balance(Result, frozen=True):
    strategy: str
    aggressiveness: str
    automatic: bool
    threshold: float
    coefficient_of_variation: float
    mean_load: float
    max_load: float
    min_load: float
    std_deviation: float
    broker_count: int
    under_way: int
    unowned: int
    brokers: list[BrokerLoad]


class Move(Result, frozen=True):
    partition: str
    from_broker: str
    to_broker: str
    load: float
    reason: str


class Moves(Result, frozen=True):
    started: bool
    coefficient_of_variation: float
    threshold: float
    moves: list[Move]


class Unloaded(Result, frozen=True):
    topic: str
    partitions: int


# -- by operation -------------------------------------------------------------------------------------

RESULTS: Final[dict[str, Any]] = {
    "status": Status,
    "audit": list[AuditLine],
    "namespaces": list[str],
    "create_namespace": None,
    "delete_namespace": None,
    "namespace_policy": NamespaceLimits,
    "set_namespace_policy": NamespacePolicy,
    "tenants": list[Tenant],
    "put_tenant": None,
    "delete_tenant": None,
    "quotas": list[QuotaUse],
    "list_topics": list[Topic],
    "topic": Topic,
    "create_topic": Topic,
    "delete_topic": None,
    "update_topic": Topic,
    "add_partitions": Topic,
    "subscription_settings": SubscriptionSettings,
    "set_subscription_settings": None,
    "forget_subscription": None,
    "describe_partition": Partition,
    "partition_ends": PartitionEnds,
    "row_mark": RowMark,
    "storage": PartitionStorage,
    "list_segments": list[Segment],
    "list_subscriptions": list[Subscription],
    "describe_subscription": Subscription,
    "subscription_progress": Progress,
    "offset_at": Offset,
    "seek": Sought,
    "delete_subscription": None,
    "unblock": Unblocked,
    "set_failure_policy": None,
    "settle": Empty,
    "seal": Sealed,
    "accept_loss": Holes,
    "install_staged": list[tuple[str, str]],
    "schema.register": Registered,
    "schema.get": Definition,
    "schema.versions": list[Version],
    "schema.subjects": list[Subject],
    "schema.check": Verdict,
    "schema.diff": Differences,
    "schema.set_compatibility": CompatibilityMode,
    "schema.delete_version": Empty,
    "schema.delete": DeletedVersions,
    "schema.configure_topic": SchemaOfTopic,
    "schema.topic": SchemaOfTopic,
    "roles": list[Role],
    "put_role": None,
    "delete_role": None,
    "bindings": list[Binding],
    "put_binding": None,
    "delete_binding": None,
    "api_keys": list[ApiKey],
    "create_api_key": NewApiKey,
    "delete_api_key": None,
    "revocations": list[Revocation],
    "revoke": Revocation,
    "delete_revocation": None,
    "issue_token": Token,
    "can": Right,
    "storage_status": StorageStatus,
    "brokers": list[Broker],
    "member_status": Member,
    "deciding_broker": Deciding,
    "activate_broker": Mode,
    "unload_broker": Unloading,
    "forget_broker": Forgotten,
    "balance": Balance,
    "rebalance": Moves,
    "unload_topic": Unloaded,
}
