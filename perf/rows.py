"""Rows of the benchmark as data: name, title, the function that measures it, and the variants of a full run.

A measuring function takes a Bench and returns its Plan: what is the floor, what is driven, what is read, and
the target.  Nothing is imported here, so that the report can read the table alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

MIB = 1 << 20
NEAR = 9  # rounds where Danube is near its target


class Row(NamedTuple):
    """One row; ``runs`` are the variants of a full benchmark, ``varied`` a detail that tells runs apart."""

    name: str
    measure: str  # module:function
    title: str
    runs: tuple[dict[str, Any], ...] = ({},)
    settings: Mapping[str, Any] = MappingProxyType({})  # defaults of this row
    varied: tuple[str, str] = ("", "")

    @property
    def module(self) -> str:
        """Rows of one module are one group: what is measured through one door."""
        return self.measure.partition(":")[0]


def each(*runs: dict[str, Any], workers: tuple[int, ...] = (1, 2)) -> tuple[dict[str, Any], ...]:
    """All ``runs`` with each number of workers."""
    return tuple({**run, "workers": count} for run in runs or ({},) for count in workers)


_KIB = {"size": 1_024}
_GRPC = {"size": 1_024, "batch": 1}
_QUORUM = {"durability": "quorum"}
_PUBLISH = each(
    *({"size": size, "rounds": NEAR} for size in (100, 1_024, 65_536)), {"size": 100, "durability": "fsync"}
)
ROWS: tuple[Row, ...] = (
    Row("rust-lone", "grpc_door:lone",
        "one message after another by the official Rust client (floor: ping-pongs)", each()),
    Row("publish", "native:publish", "publish, `send_many`", _PUBLISH),
    Row("nowait", "native:nowait", "publish, `send_nowait` one by one", each()),
    Row("e2e", "native:e2e", "publish and consume, `batches()`", each()),
    Row("e2e-memory", "native:e2e", "publish and consume, non-reliable",
        each({"count": 1}, {"count": 4}), {"durability": "memory"}, ("consumers", "consumers")),
    Row("consume", "native:consume", "`async for` and an ack for each", each()),
    Row("replay", "native:replay", "replay from the start, `batches()`", each()),
    Row("ack-latency", "native:ack_latency", "acknowledgement of one `send` at 1,000/s (floor: ping-pongs)",
        each({"rounds": NEAR})),
    Row("latency", "native:latency", "publish to consumer at 1,000/s (floor: ping-pongs)", each()),
    Row("remote", "native:remote", "a partition of another worker (floor: of this one)", each(workers=(2,))),
    Row("auth", "native:auth", "publish with `auth.mode: token` (floor: `none`)",
        each({"size": 1_024, "rounds": NEAR})),
    Row("neighbour", "native:neighbour",
        "a tenant beside a neighbour at ten times its quota (floor: at its quota)",
        each({"rounds": 5}, workers=(1,))),
    Row("topics", "native:topics", "batches of 10 to many topics (floor: to one)",
        varied=("topics", "topics")),
    Row("consumers", "native:consumers", "one by one to many shared consumers (floor: to one)",
        varied=("consumers", "consumers")),
    Row("restart", "native:restart", "ready after SIGKILL with a log (floor: without)", each(workers=(2,))),
    Row("grpc-publish", "grpc_door:publish", "SendMessage, 64 in flight", each(), _GRPC),
    Row("grpc-receive", "grpc_door:receive", "ReceiveMessages, each message acked", each(), _GRPC),
    Row("grpc-auth", "grpc_door:auth", "SendMessage with `auth.mode: token` (floor: `none`)",
        each({"rounds": NEAR}, workers=(1,)), _GRPC),
    Row("tier-upload", "tiers:upload", "upload, verified (floor: a bare client)", settings=_KIB),
    Row("tier-publish", "tiers:publish", "publish beside uploads (floor: without)", settings=_KIB),
    Row("tier-read", "tiers:read", "catch-up read (floor: ranged GETs)", settings=_KIB),
    Row("tier-first", "tiers:first", "first record of a cold read (floor: two round trips)",
        ({}, {"count": 20}), _KIB, ("added_ms", "ms more a request")),
    Row("tier-cold-readers", "tiers:cold_readers", "p99 beside many readers of history (floor: without)",
        settings=_KIB),
    Row("meta-sequential", "metadata:sequential",
        "one write after the other, three members (floor: syncs of a file)", ({"size": MIB}, {}), _QUORUM),
    Row("meta-concurrent", "metadata:concurrent",
        "512 writes at once, three members (floor: syncs of a file)", settings=_QUORUM),
    Row("meta-later", "metadata:later", "one after the other, behind a million (floor: behind few)",
        settings=_QUORUM),
    Row("meta-failover", "metadata:failover",
        "first write after kill -9 of the leader, p99 (floor: 5 heartbeats)", settings=_QUORUM),
    Row("meta-restart", "metadata:restart", "a member level again, behind a million (floor: behind few)",
        settings=_QUORUM),
    # Spark is measured when it is named: a full run has no JVM to itself.
    Row("spark-read", "spark:read_history", "history into the JVM (floor: Parquet)", (), _KIB),
    Row("spark-validate", "spark:validate_store", "validate a store (floor: CRC32C of its bytes)", (), _KIB),
    Row("spark-export", "spark:export_topic", "export to Parquet (floor: `df.write.parquet`)", (), _KIB),
    Row("spark-compact", "spark:compact_store", "compact a store (floor: copying its bytes)", (), _KIB),
    Row("spark-replay", "spark:replay_topic", "replay (floor: `danube bench publish`)", (), _KIB),
)  # fmt: skip
BY_NAME = {row.name: row for row in ROWS}
