"""What each workload is called in the report, and in which table it stands.

A workload that is not listed here is shown under its own name, behind the others; a test keeps the
list complete.
"""

from __future__ import annotations

NATIVE = "The native protocol"
GRPC = "The gRPC ports"
TIERS = "Tiered storage"
METADATA = "Metadata of a cluster"
OTHERS = "Other workloads"
GROUPS = (NATIVE, GRPC, TIERS, METADATA, OTHERS)

TITLES: dict[str, tuple[str, str]] = {
    "publish": (NATIVE, "publish, `send_many`"),
    "nowait": (NATIVE, "publish, `send_nowait` one by one"),
    "e2e": (NATIVE, "publish and consume, `batches()`"),
    "e2e-memory": (NATIVE, "publish and consume, non-reliable"),
    "consume": (NATIVE, "`async for` and an ack for each"),
    "replay": (NATIVE, "replay from the start, `batches()`"),
    "ack-latency": (NATIVE, "acknowledgement of one `send` at 1,000/s"),
    "ack-polling": (NATIVE, "the same, where broker and client poll (`busy_poll_us` 2000)"),
    "latency": (NATIVE, "publish to consumer at 1,000/s"),
    "remote": (NATIVE, "a partition of another worker (floor: of this one)"),
    "topics": (NATIVE, "batches of 10 to many topics (floor: to one)"),
    "consumers": (NATIVE, "one by one to many shared consumers (floor: to one)"),
    "restart": (NATIVE, "ready after SIGKILL with a log (floor: without)"),
    "grpc-publish": (GRPC, "SendMessage, 64 in flight"),
    "grpc-receive": (GRPC, "ReceiveMessages, each message acked"),
    "grpc-latency": (GRPC, "SendMessage, one at a time"),
    "tier-upload": (TIERS, "upload, verified (floor: a bare client)"),
    "tier-publish": (TIERS, "publish beside uploads (floor: without)"),
    "tier-read": (TIERS, "catch-up read (floor: ranged GETs)"),
    "tier-first": (TIERS, "first record of a cold read (floor: two round trips)"),
    "tier-plan": (TIERS, "planning over many segments (floor: copying)"),
    "tier-cold-readers": (TIERS, "p99 beside many readers of history (floor: without)"),
    "meta-sequential": (METADATA, "one write after the other, three members (floor: syncs of a file)"),
    "meta-concurrent": (METADATA, "512 writes at once, three members (floor: syncs of a file)"),
    "meta-later": (METADATA, "one after the other, behind a million (floor: behind few)"),
    "meta-one-down": (METADATA, "one after the other, one of three down (floor: all up)"),
    "meta-failover": (METADATA, "first write after kill -9 of the leader (floor: 5 heartbeats)"),
    "meta-restart": (METADATA, "a member level again, behind a million (floor: behind few)"),
    "meta-disk": (METADATA, "files of a member, behind a million (floor: its state)"),
}
# What distinguishes two runs of a workload beside size, level and workers: the detail, and its words.
VARIED_BY = {
    "e2e-memory": ("consumers", "consumers"),
    "consumers": ("consumers", "consumers"),
    "topics": ("topics", "topics"),
    "tier-first": ("added_ms", "ms more a request"),
}


def group_of(workload: str) -> str:
    return TITLES.get(workload, (OTHERS, ""))[0]


def title_of(workload: str) -> str:
    return TITLES.get(workload, ("", workload))[1]


def place_of(workload: str) -> int:
    """Where a workload stands among the others."""
    known = list(TITLES)
    return known.index(workload) if workload in TITLES else len(known)
