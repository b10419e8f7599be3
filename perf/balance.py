"""The cost of a leader's decisions on many partitions: its table, assignments, a round of moves, no work.

    python -m perf.balance --partitions 200000 --brokers 10

Prints one JSON object; milliseconds, the longest of assignments and the best of repeated rounds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from danube.core.cluster.commands import (
    Agreed,
    AssignPartitions,
    GrantLease,
    PutKey,
    RegisterBroker,
)
from danube.core.metadata.commands import Change, Command, CreateTopic
from danube.core.metadata.machine import Metadata
from danube.core.partition.policy import TopicPolicy
from danube.core.placement.balance import STRATEGIES, BalanceSettings
from danube.core.placement.duties import Duties, Outlook
from danube.core.placement.load_report import SHARED, STORAGE_PREFIX, LoadReport, report_command
from danube.core.placement.partition_table import PartitionTable
from danube.host.clock import monotonic_ns

NOW_US = 10_000_000
REPEATED = 5
MOVES = 64


class Cluster:
    """Brokers that are loaded differently, and topics that nobody owns yet."""

    def __init__(self, brokers: int, partitions: int, per_topic: int) -> None:
        self.state = Metadata()
        self.do(Agreed(index=1, term=1, now_us=NOW_US))
        for broker_id in range(1, brokers + 1):
            self.do(GrantLease(lease_id=broker_id, ttl_ms=3_600_000))
            self.do(
                RegisterBroker(broker_id=broker_id, lease_id=broker_id, native_address=f"b{broker_id}:6660")
            )
            self.do(PutKey(key=f"{STORAGE_PREFIX}{broker_id}", value=SHARED))
            report = LoadReport(cpu=broker_id / brokers, memory=0.5, bytes_per_s=1e7 * broker_id)
            self.do(report_command(broker_id, broker_id, report))
        policy = TopicPolicy()
        for number in range(max(1, partitions // per_topic)):
            name = f"/default/t{number}"
            count = 0 if per_topic == 1 else per_topic
            self.do(CreateTopic(topic=name, policy=policy, created_us=1, partitions=count))

    def do(self, command: Command) -> list[Change]:
        return self.state.apply(self.state.version + 1, command)


def timed_ms(work: Callable[[], Any]) -> tuple[float, Any]:
    began_ns = monotonic_ns()
    result = work()
    return (monotonic_ns() - began_ns) / 1e6, result


def assign_all(cluster: Cluster, duties: Duties) -> tuple[float, float]:
    """The longest look that assigned something, and one that found nothing to do."""
    longest_ms = 0.0
    while True:
        spent_ms, commands = timed_ms(lambda: duties.turn(cluster.state, NOW_US))
        if not any(isinstance(command, AssignPartitions) for command in commands):
            return longest_ms, spent_ms
        longest_ms = max(longest_ms, spent_ms)
        for command in commands:
            duties.changed(cluster.do(command))


def round_ms(cluster: Cluster, table: PartitionTable, strategy: str) -> tuple[float, int]:
    settings = BalanceSettings(strategy=strategy, aggressiveness="aggressive")

    def plan() -> int:
        return len(Outlook(cluster.state, table, settings).plan(MOVES, NOW_US))

    found = [timed_ms(plan) for _ in range(REPEATED)]
    return min(found)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--partitions", type=int, default=200_000)
    parser.add_argument("--per-topic", type=int, default=1)
    parser.add_argument("--brokers", type=int, default=10)
    options = parser.parse_args(words)
    cluster = Cluster(options.brokers, options.partitions, options.per_topic)
    duties = Duties(1, BalanceSettings(strategy="weighted_load"))
    begin_ms, _ = timed_ms(lambda: duties.begin(cluster.state, NOW_US))
    assign_ms, idle_ms = assign_all(cluster, duties)
    table_ms, table = timed_ms(lambda: PartitionTable.of(cluster.state))
    figures: dict[str, Any] = {
        "partitions": len(table), "brokers": options.brokers, "begin_ms": round(begin_ms, 1),
        "table_ms": round(table_ms, 1), "assign_ms": round(assign_ms, 1), "idle_ms": round(idle_ms, 2),
    }  # fmt: skip
    for strategy in STRATEGIES:
        spent_ms, moves = round_ms(cluster, table, strategy)
        figures[f"round_{strategy}_ms"], figures[f"moves_{strategy}"] = round(spent_ms, 1), moves
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
