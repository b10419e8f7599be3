"""Every metric that a broker exports: its name, kind, labels and help text, as in docs/metrics.md.

A name is that of the original broker's metric with the same meaning, if there is one, so that its dashboards
work.  Units are the suffix, totals end in ``_total``. Each series also has the label ``broker``.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from danube.ipc.counters import Counter

TOPIC: Final = ("topic",)
WORKER: Final = ("worker",)
FEW: Final = frozenset({"version", "worker", "kind"})  # labels that clients cannot make more of

Kind = Literal["gauge", "counter"]


class Family(NamedTuple):
    """All series of one name; ``labels`` without ``broker``."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    says: str
    oldest: bool = False  # rows that become one are as the largest of them, not their sum


# Sums of the workers' counters in shared memory.
_COUNTED: Final[tuple[tuple[Counter, str, Kind, str], ...]] = (
    (Counter.CONNECTIONS, "connections", "gauge", "Connections of clients that are open now."),
    (Counter.CONNECTIONS_TOTAL, "connections_total", "counter", "Connections of clients so far."),
    (Counter.PARTITIONS_OPEN, "partitions_open", "gauge", "Partitions that their owners have open."),
    (Counter.RECORDS_IN, "records_in_total", "counter", "Records that were published and accepted."),
    (Counter.BYTES_IN, "bytes_in_total", "counter", "Bytes of the batches that were published."),
    (Counter.BATCHES_IN, "batches_in_total", "counter", "Batches that were published and accepted."),
    (Counter.RECORDS_OUT, "records_out_total", "counter", "Records that were delivered to consumers."),
    (Counter.BYTES_OUT, "bytes_out_total", "counter", "Bytes of the batches that were delivered."),
    (Counter.ACKS_IN, "acks_total", "counter", "Records that consumers acked."),
    (Counter.NACKS, "nacks_total", "counter", "Nacks of consumers."),
    (Counter.REDELIVERIES, "redeliveries_total", "counter", "Records that were delivered again."),
    (Counter.DEAD_LETTERS, "dead_letters_total", "counter", "Records that became dead letters."),
    (
        Counter.DEAD_LETTERS_REFUSED, "dead_letters_refused_total", "counter",
        "Attempts to copy a record to a dead-letter topic that was not allowed.",
    ),
    (
        Counter.DROPPED_RECORDS, "dropped_records_total", "counter",
        "Records of non-reliable topics that slow consumers lost.",
    ),
    (Counter.DUPLICATES, "duplicates_total", "counter", "Batches that were sent again and stored once."),
    (Counter.ERRORS, "errors_total", "counter", "Requests that were answered with an error."),
    (Counter.STORAGE_ERRORS, "storage_errors_total", "counter", "Failures to open, read or write logs."),
    (Counter.DAMAGED_RECORDS, "damaged_total", "counter", "Damaged places that were found in logs."),
    (Counter.SYNCS, "syncs_total", "counter", "Syncs of log files."),
    (
        Counter.SCHEMA_REJECTED, "schema_rejected_total", "counter",
        "Records that were refused because they break their topic's schema.",
    ),
    (
        Counter.TLS_HANDSHAKES_FAILED, "tls_handshakes_failed_total", "counter",
        "TLS handshakes of clients that failed or took too long.",
    ),
)  # fmt: skip
COUNTED: Final[dict[Counter, Family]] = {
    counter: Family(f"danube_broker_{name}", kind, (), says) for counter, name, kind, says in _COUNTED
}

FAMILIES: Final[tuple[Family, ...]] = (
    Family("danube_build_info", "gauge", ("version",), "1; the version is the label."),
    Family(
        "danube_broker_start_time_seconds", "gauge", (),
        "When the broker was started, in seconds of 1970.",
    ),
    Family(
        "danube_insecure", "gauge", (),
        "1 if other hosts reach a port that asks nobody who they are, else 0.",
    ),
    Family("danube_broker_topics_owned", "gauge", (), "Topics of this broker."),
    *COUNTED.values(),
    Family(
        "danube_worker_up", "gauge", WORKER,
        "1 if the worker answered in time, 0 if it did not or is replaced.",
    ),
    Family("danube_worker_restarts_total", "counter", WORKER, "How often the worker was replaced."),
    Family(
        "danube_tls_reload_failed", "gauge", (),
        "1 while changed certificate files cannot be used and the former ones stay, else 0.",
    ),
    Family(
        "danube_auth_keys_reload_failed", "gauge", (),
        "1 while changed keys of tokens, or their list, cannot be used and the former ones stay, else 0.",
    ),
    Family(
        "danube_auth_rights_unknown", "gauge", (),
        "1 while the broker is cut off from its cluster for so long that it lets nobody in, else 0.",
    ),
    Family("danube_storage_tiered", "gauge", (), "1 with an object store, 0 without one."),
    Family(
        "danube_storage_pending_bytes", "gauge", TOPIC,
        "Bytes of stored batches of the topic that are not known to be off this host.",
    ),
    Family(
        "danube_storage_pending_seconds", "gauge", TOPIC,
        "For how long the oldest record of the topic that is not known to be off this host has been stored.",
        oldest=True,
    ),
    Family("danube_storage_host_pending_bytes", "gauge", (), "The same bytes of all topics together."),
    Family(
        "danube_storage_host_pending_seconds", "gauge", (),
        "The same age, of the oldest record of all topics.",
    ),
    Family(
        "danube_storage_unknown_partitions", "gauge", (),
        "Partitions that are stored here and not open yet; their topics have no numbers meanwhile.",
    ),
    Family(
        "danube_storage_store_up", "gauge", (),
        "1 if the object store answered the mover last, 0 if it refused, was silent or was not heard of yet.",
    ),
    Family("danube_storage_mover_up", "gauge", (), "1 while the mover runs and gives signs of life."),
    Family("danube_storage_mover_restarts_total", "counter", (), "How often the mover was replaced."),
    Family(
        "danube_storage_upload_share", "gauge", (),
        "How much of what uploads could do they do: 1 is all, less while busy workers wait for processors.",
    ),
    Family(
        "danube_cluster_controller_up", "gauge", (),
        "1 if this host's controller answered, 0 if it did not.",
    ),
    Family("danube_cluster_leads", "gauge", (), "1 if this member leads; one of a cluster does, or none."),
    Family("danube_cluster_leader_known", "gauge", (), "1 if this member knows who leads, 0 if it does not."),
    Family("danube_cluster_term", "gauge", (), "The term of the agreement; it grows with elections."),
    Family("danube_cluster_commit_index", "gauge", (), "The last entry that is known here to be agreed on."),
    Family("danube_cluster_applied_index", "gauge", (), "The last entry that this host's metadata holds."),
    Family("danube_cluster_members", "gauge", ("kind",), "Members by kind: voter or learner."),
    Family("danube_cluster_members_reached", "gauge", (), "Other members to which there is a connection."),
    Family(
        "danube_cluster_lease_seconds", "gauge", (),
        "For how long this broker may serve without another renewal; 0 when its lease is over.",
    ),
    Family(
        "danube_cluster_partitions_moving", "gauge", (),
        "Partitions on their way to another broker; the leader tells it.",
    ),
    Family(
        "danube_cluster_partitions_cooling", "gauge", (),
        "Partitions that were moved lately and stay for a while; the leader tells it.",
    ),
    Family(
        "danube_cluster_imbalance", "gauge", (),
        "The deviation of the brokers' loads by their mean, 0 when they are equal; the leader tells it.",
    ),
)  # fmt: skip
