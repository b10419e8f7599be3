"""Every bound in one place; relations between them are checked when this module is imported."""

from __future__ import annotations

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB


def _agree(condition: bool, reason: str) -> None:
    if not condition:
        raise ImportError(f"danube.limits disagree: {reason}")


# Records and batches
RECORD_BYTES_MAX = 8 * MIB
RECORD_BYTES_DEFAULT = 4 * MIB  # of a topic that names no limit: the limit of official clients
BATCH_BYTES_MAX = 12 * MIB
BATCH_RECORDS_MAX = 65_536
ATTRIBUTES_PER_RECORD_MAX = 64
ATTRIBUTE_BYTES_MAX = 32 * KIB
KEY_BYTES_MAX = 64 * KIB

# Native protocol
FRAME_BYTES_MAX = 16 * MIB
CONTROL_BYTES_MAX = 1 * MIB
ANSWER_BYTES_MAX = 12 * MIB  # of an operation; larger is answered with an error
PAGE_BYTES = 2 * MIB  # a page of a list ends there
PAGE_ENTRIES_MAX = 1_000
CONNECTIONS_MAX = 10_000
HANDLES_PER_CONNECTION_MAX = 65_536
HANDSHAKE_TIMEOUT_S = 10.0
SESSION_TIMEOUT_S = 30.0
PUBLISH_CREDIT_BYTES = 32 * MIB  # un-acknowledged bytes a connection may have at the broker
DELIVER_CREDIT_BYTES_MAX = 64 * MIB
OUTPUT_BUFFER_BYTES_MAX = 96 * MIB  # written to a socket but not taken by the kernel
RECEIVE_BUFFER_BYTES = 2 * MIB
RECEIVE_BUFFER_BYTES_FIRST = 64 * KIB  # of a client's connection; it grows when a read fills it

# Topics and subscriptions
PARTITIONS_MAX = 1_024
TOPICS_MAX = 200_000  # of all partitions: a topic that is not partitioned counts as one
NAMESPACES_MAX = 10_000
SUBSCRIPTIONS_PER_PARTITION_MAX = 1_000
CONSUMERS_PER_SUBSCRIPTION_MAX = 10_000
CONSUMER_NAMES_LISTED_MAX = 1_000  # of a subscription; how many it has is told beside them
MAX_UNACKED_DEFAULT = 262_144
MAX_UNACKED_LIMIT = 4_194_304
KEY_FILTERS_MAX = 100
KEY_FILTER_BYTES_MAX = 256
KEY_FILTER_WILDCARDS_MAX = 64
PRODUCERS_PER_PARTITION_MAX = 10_000
DEDUP_BATCHES_PER_PRODUCER = 256
DEDUP_BATCHES_PER_PARTITION_MAX = 131_072  # of all producers together; then idle ones keep fewer
DEDUP_BATCHES_KEPT = 8  # by any producer, however many there are
ACKED_RANGES_STORED_MAX = 65_536

# Schemas
SUBJECTS_MAX = 10_000
SCHEMA_VERSIONS_MAX = 1_000  # of one subject, deleted ones not counted
SCHEMA_DEFINITION_BYTES_MAX = 256 * KIB
SCHEMA_COMPILED_BYTES_MAX = 640 * KIB
SCHEMA_DESCRIPTION_BYTES_MAX = 4 * KIB
SCHEMA_TAGS_MAX = 32
REGISTRY_BYTES_MAX = 64 * MIB  # of all versions together, as they are stored
SCHEMA_VALIDATORS_MAX = 256  # kept ready in one worker

# What the metadata remembers of subscriptions and access
SUBSCRIPTION_SETTINGS_MAX = 50_000  # of all topics together
KNOWN_CONSUMERS_MAX = 20_000
ROLES_MAX = 1_000
BINDINGS_MAX = 10_000
ROLES_PER_BINDING_MAX = 16
API_KEYS_MAX = 10_000
REVOCATIONS_MAX = 10_000
DECISIONS_KEPT_MAX = 100_000  # of one worker, until a role or binding changes
PRINCIPALS_KEPT_MAX = 10_000  # the same
TENANTS_MAX = 1_000
NAMESPACES_PER_TENANT_MAX = 1_000  # as many as fit a command

# Bounds of the cluster's part of the metadata
METADATA_KEYS_MAX = 100_000
METADATA_KEY_BYTES_MAX = 1 * KIB  # of a key or a counter's name
METADATA_VALUE_BYTES_MAX = 1 * MIB
METADATA_VALUES_BYTES_MAX = 64 * MIB  # of all keys and values together
COUNTERS_MAX = 10_000
LEASES_MAX = 20_000
LEASE_TTL_MS_MAX = 7 * 24 * 3_600_000
LEASES_PER_COMMAND_MAX = 500
BROKERS_MAX = 1_000
PARTITIONS_PER_COMMAND_MAX = 256
AGREED_ORIGINS_MAX = 1_024

# Metadata log
METADATA_COMMAND_BYTES_MAX = 16 * KIB  # but one that registers a schema
METADATA_SCHEMA_COMMAND_BYTES_MAX = 1 * MIB
METADATA_KEY_COMMAND_BYTES_MAX = 2 * MIB + 16 * KIB  # a value, and the one it is compared with
METADATA_COMMANDS_PER_ENTRY_MAX = 256
METADATA_ENTRY_BYTES_MAX = 4 * MIB + 8

# Replicated log
RAFT_ENTRY_BYTES_MAX = 4 * MIB - 4 * KIB
RAFT_BATCH_BYTES = 1 * MIB  # of entries in one message, unless it is a single one
RAFT_BATCH_ENTRIES = 1_024
RAFT_MESSAGE_BYTES_MAX = 5 * MIB
RAFT_MESSAGES_IN_FLIGHT = 8  # to one peer
RAFT_PROPOSALS_MAX = 65_536  # that wait for their outcome
RAFT_PROPOSALS_BYTES_MAX = 64 * MIB
RAFT_SNAPSHOT_BYTES_MAX = 256 * MIB
RAFT_SNAPSHOT_PART_BYTES = 1 * MIB
RAFT_JOURNAL_BYTES = 8 * MIB  # of entries, before a snapshot takes their place
RAFT_MEMBERS_MAX = 64

# Shared memory
RING_BYTES = 16 * MIB
WORKERS_MAX = 64
WORKER_MEMORY_BYTES = 384 * MIB  # of a limit of memory, so many for each worker: rings, heap and page cache

# Log
SEGMENT_BYTES = 256 * MIB
SEGMENT_PREALLOCATE_FIRST = 64 * KIB
SEGMENT_PREALLOCATE_STEP_MAX = 32 * MIB
WRITE_BYTES_MAX = 1 * MIB  # of one call to the kernel: docs/adr/0032-writes-of-a-mebibyte.md
SYNC_INTERVAL_MS = 20  # `written`: background sync starts this often
SYNC_LAG_MAX_MS = 1_000  # `written`: acknowledgements wait while older records are not synced
UNSYNCED_RECORDS_MAX = 1 << 24  # `written`: the same while so many are not synced
READ_CHUNK_BYTES = 1 * MIB

_agree(RECORD_BYTES_DEFAULT <= RECORD_BYTES_MAX, "the default is allowed")
_agree(RECORD_BYTES_MAX < BATCH_BYTES_MAX < FRAME_BYTES_MAX, "a record fits a batch fits a frame")
_agree(RING_BYTES & (RING_BYTES - 1) == 0, "a ring position is masked: its size is a power of two")
_agree(BATCH_BYTES_MAX + 4 * KIB < RING_BYTES, "the largest frame fits an empty ring")
_agree(ANSWER_BYTES_MAX + 4 * KIB < RING_BYTES, "the largest answer fits an empty ring")
_agree(2 * PAGE_BYTES < ANSWER_BYTES_MAX, "a page fits an answer")
_agree(BATCH_BYTES_MAX < 1 << 31, "the offsets of a column have 32 bits with a sign")
_agree(CONSUMERS_PER_SUBSCRIPTION_MAX < 1 << 15, "a seat has 16 bits with a sign")
_agree(32 * MAX_UNACKED_LIMIT < 1 << 31, "a key's number has 32 bits with a sign; a table is an eighth full")
_agree(MAX_UNACKED_DEFAULT <= MAX_UNACKED_LIMIT, "the default is allowed")
_agree(BATCH_BYTES_MAX <= PUBLISH_CREDIT_BYTES, "the largest batch can be sent at all")
_agree(DEDUP_BATCHES_KEPT <= DEDUP_BATCHES_PER_PRODUCER, "a trimmed window is a shorter window")
_agree(
    PRODUCERS_PER_PARTITION_MAX * DEDUP_BATCHES_KEPT <= DEDUP_BATCHES_PER_PARTITION_MAX * 7 // 8,
    "trimming every window to what is kept makes room",
)
_agree(
    SCHEMA_DEFINITION_BYTES_MAX + SCHEMA_COMPILED_BYTES_MAX + 64 * KIB <= METADATA_SCHEMA_COMMAND_BYTES_MAX,
    "a definition with all that is said about it is one command",
)
_agree(
    SCHEMA_DEFINITION_BYTES_MAX + 64 * KIB <= CONTROL_BYTES_MAX, "a definition can be sent to be registered"
)
_agree(
    max(METADATA_SCHEMA_COMMAND_BYTES_MAX, METADATA_KEY_COMMAND_BYTES_MAX) + METADATA_COMMAND_BYTES_MAX + 8
    <= METADATA_ENTRY_BYTES_MAX,
    "the largest command fits an entry, with who agreed on it",
)
_agree(
    2 * METADATA_VALUE_BYTES_MAX + METADATA_KEY_BYTES_MAX + 1 * KIB <= METADATA_KEY_COMMAND_BYTES_MAX,
    "a value can be compared and set",
)
_agree(
    LEASES_PER_COMMAND_MAX * 24 <= METADATA_COMMAND_BYTES_MAX, "leases that expire together fit one command"
)
_agree(
    PARTITIONS_PER_COMMAND_MAX * 32 <= METADATA_COMMAND_BYTES_MAX, "partitions move together in one command"
)
_agree(
    RAFT_ENTRY_BYTES_MAX + 1 * KIB <= METADATA_ENTRY_BYTES_MAX, "a replicated entry fits a step of a journal"
)
_agree(RAFT_ENTRY_BYTES_MAX + RAFT_BATCH_BYTES < RAFT_MESSAGE_BYTES_MAX, "the largest batch is a message")
