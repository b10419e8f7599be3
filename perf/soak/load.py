"""What runs all the time: every subscription mode and way of sending, native and over gRPC.

Beside the load of the crash check there is a topic that gRPC clients fill, read by gRPC and native
consumers together, and one that lives for one epoch only, so that topics come and go as well.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.crash.run import Load, every_kind_of_load, members

GRPC_TOPIC = "/default/grpc"
GRPC_PRODUCERS = 4
LEVELS = ("written", "fsync")


@dataclass(frozen=True)
class Pace:
    """How fast producers go: a random pause of up to ``pause_s`` seconds after each of their sends."""

    pause_s: float = 0.25


def mixed_load(epoch: int, retention_ms: int) -> Load:
    """Topics, producers and consumers of an epoch; all but the short-lived topic are there in each."""
    load = every_kind_of_load(LEVELS)
    _add_grpc(load)
    _add_short_lived(load, short_lived_topic(epoch))
    for topic in load.topics:
        topic["retention_ms"] = retention_ms
    return load


def short_lived_topic(epoch: int) -> str:
    return f"/default/epoch-{epoch}"


def _add_grpc(load: Load) -> None:
    load.topics.append({"topic": GRPC_TOPIC, "partitions": 0, "durability": LEVELS[0]})
    for number in range(GRPC_PRODUCERS):
        load.producers.append(
            {
                "topic": GRPC_TOPIC,
                "producer": f"grpc-{number}",
                "style": "one",
                "keyed": True,
                "durability": LEVELS[0],
                "via": "grpc",
            }
        )
    for mode, count, natives in (
        ("exclusive", 1, 0),
        ("failover", 2, 1),
        ("shared", 3, 1),
        ("key_shared", 3, 1),
    ):
        group = members(GRPC_TOPIC, mode, f"{mode}-grpc", count)
        for one in group[natives:]:
            one["via"] = "grpc"
        load.consumers += group


def _add_short_lived(load: Load, topic: str) -> None:
    load.topics.append({"topic": topic, "partitions": 0, "durability": LEVELS[0]})
    load.producers.append(
        {
            "topic": topic,
            "producer": "short-lived",
            "style": "many",
            "keyed": False,
            "durability": LEVELS[0],
        }
    )
    load.consumers += members(topic, "exclusive", "exclusive-short-lived", 1)
