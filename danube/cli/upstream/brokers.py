"""``danube-admin brokers``.

``danube-admin cluster``: the members of a cluster.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import click

from danube.cli.upstream.admin_line import AdminLine
from danube.cli.upstream.calls import fields_of
from danube.cli.upstream.root import Shown, json_output, quoted, upstream_command
from danube.errors import DanubeError, WrongState

_WIDTHS: Final = (15, 15, 25, 15, 25, 25)
_BOX: Final = 60
_BANDS: Final = ((20, "well balanced"), (30, "slightly unbalanced"), (40, "unbalanced"))
_FIGURES: Final = (
    "coefficient_of_variation", "mean_load", "max_load", "min_load", "std_deviation", "broker_count"
)  # fmt: skip
_U32 = click.IntRange(0, (1 << 32) - 1)
_broker_id = click.option("--broker-id", required=True)
_node_id = click.option("--node-id", type=click.IntRange(0, (1 << 64) - 1), required=True)


@click.group()
def brokers() -> None:
    """List brokers, unload and activate them."""


@upstream_command(brokers, "list", json_output)
def list_brokers(line: AdminLine) -> Shown:
    """List the brokers."""
    names = ("broker_id", "broker_status", "broker_addr", "broker_role", "admin_addr", "metrics_addr")
    rows = [fields_of(one, *names) for one in line.ask("BrokerAdmin/ListBrokers").brokers]
    head = _columns("BROKER ID", "STATUS", "ADDRESS", "ROLE", "ADMIN ADDR", "METRICS ADDR")
    return Shown(rows, [head, "-" * 125, *(_columns(*row.values()) for row in rows)])


def _columns(*cells: str, widths: tuple[int, ...] = _WIDTHS) -> str:
    return " ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


@upstream_command(brokers, "leader-broker")
def leader_broker(line: AdminLine) -> list[str]:
    """Show the leader of the cluster."""
    return [f"Leader Broker: {quoted(line.ask('BrokerAdmin/GetLeaderBroker').leader)}"]


@upstream_command(brokers, "namespaces", json_output)
def namespaces(line: AdminLine) -> Shown:
    """List the namespaces."""
    found = list(line.ask("BrokerAdmin/ListNamespaces").namespaces)
    return Shown(found, [f"Namespace: {name}" for name in found])


@upstream_command(brokers, "unload")
@_broker_id
@click.option("--max-parallel", type=_U32, default=1, show_default=True)
@click.option("--namespaces-include", multiple=True)
@click.option("--namespaces-exclude", multiple=True)
@click.option("--dry-run", is_flag=True)
@click.option("--timeout-seconds", type=_U32, default=60, show_default=True)
def unload(line: AdminLine, **asked: Any) -> list[str]:
    """Move the topics of a broker to others."""
    done = line.ask("BrokerAdmin/UnloadBroker", **asked)
    for topic in done.failed_topics:
        click.echo(f"failed topic: {topic}", err=True)
    return [
        f"UnloadBroker started={str(done.started).lower()} total={done.total} succeeded={done.succeeded}"
        f" failed={done.failed} pending={done.pending}"
    ]


@upstream_command(brokers, "activate")
@_broker_id
@click.option("--reason", default="admin_activate", show_default=True)
def activate(line: AdminLine, **asked: Any) -> list[str]:
    """Let a broker take topics again."""
    done = line.ask("BrokerAdmin/ActivateBroker", **asked)
    return [f"ActivateBroker success={str(done.success).lower()}"]


@upstream_command(brokers, "balance", json_output)
def balance(line: AdminLine) -> Shown:
    """Show how evenly the brokers are loaded."""
    found = line.ask("BrokerAdmin/GetClusterBalance")
    of_broker = ("broker_id", "load", "topic_count", "is_overloaded", "is_underloaded")
    loads = [fields_of(one, *of_broker) for one in found.brokers]
    return Shown(fields_of(found, *_FIGURES) | {"brokers": loads}, _balance_report(found))


def _balance_report(found: Any) -> Iterator[str]:
    percent = found.coefficient_of_variation * 100
    band = next((word for limit, word in _BANDS if percent < limit), "severely unbalanced")
    yield from (*_box("Cluster Balance Report"), f"Status: {band} (CV {percent:.2f}%)")
    for name in _FIGURES[1:5]:
        yield f"{name.replace('_', ' ').capitalize()}: {getattr(found, name):.2f}"
    yield from (f"Brokers: {found.broker_count}", f"Assignment strategy: {found.assignment_strategy}", "")
    widths = (15, 10, 10, 15)
    yield from (_columns("BROKER ID", "LOAD", "TOPICS", "STATUS", widths=widths), "-" * sum(widths))
    for one in found.brokers:
        state = "overloaded" if one.is_overloaded else "underloaded" if one.is_underloaded else "normal"
        yield _columns(str(one.broker_id), f"{one.load:.2f}", str(one.topic_count), state, widths=widths)
    if percent >= 30:
        yield from ("", "Consider `danube-admin brokers rebalance --dry-run`.")


@upstream_command(brokers, "rebalance")
@click.option("--dry-run", is_flag=True)
@click.option("--max-moves", type=_U32)
def rebalance(line: AdminLine, **asked: Any) -> Iterator[str]:
    """Move topics from loaded brokers to others."""
    done = line.ask("BrokerAdmin/TriggerRebalance", **asked)
    yield from _box("Cluster Rebalance (dry run)" if asked["dry_run"] else "Cluster Rebalance")
    if not done.success:
        yield f"Error: {done.error_message}"
        return
    if "background" in done.error_message:
        yield "Rebalancing goes on in the background."
    elif done.error_message:
        yield done.error_message
    yield f"Moves executed: {done.moves_executed}"
    for one in done.proposed_moves:
        yield f"  {one.topic_name}: {one.from_broker} -> {one.to_broker} ({one.reason})"


def _box(title: str) -> tuple[str, str, str]:
    bar = "═" * _BOX
    return f"╔{bar}╗", f"║{title.center(_BOX)}║", f"╚{bar}╝"


@click.group()
def cluster() -> None:
    """Members of the cluster."""


@upstream_command(cluster, "status")
def status(line: AdminLine) -> list[str]:
    """Show the members and the state of the cluster."""
    found = line.ask("ClusterAdmin/ClusterStatus")
    return [
        "Raft Cluster Status:",
        f"  Self Node ID: {found.self_node_id}",
        f"  Raft Address: {found.raft_addr}",
        f"  Leader: {found.leader_id or 'none'}",
        f"  Term: {found.current_term}",
        f"  Last Applied: {found.last_applied}",
        f"  Voters: {list(found.voters)}",
        f"  Learners: {list(found.learners)}",
    ]


@upstream_command(cluster, "add-node")
@click.option("--node-addr", required=True, help="Admin endpoint of the broker that joins.")
def add_node(line: AdminLine, node_addr: str) -> Iterator[str]:
    """Add a broker as a learner."""
    yield f"Discovering node at {node_addr}..."
    found = line.ask_other(node_addr, "ClusterAdmin/ClusterStatus")
    yield f"Discovered: node_id={found.self_node_id}, raft_addr={found.raft_addr}"
    yield "Adding node to the cluster..."
    if not found.raft_addr:
        raise WrongState(
            f"Failed: the broker at {node_addr} is a cluster of one",
            why="it was started without --seed-nodes and --join",
            hint="start it with --join and the address of a member",
        )
    yield _told(line.ask("ClusterAdmin/AddNode", addr=found.raft_addr, node_id=found.self_node_id))


@upstream_command(cluster, "promote-node", _node_id)
def promote_node(line: AdminLine, node_id: int) -> list[str]:
    """Make a learner a voter."""
    return [_told(line.ask("ClusterAdmin/PromoteNode", node_id=node_id))]


@upstream_command(cluster, "remove-node", _node_id)
def remove_node(line: AdminLine, node_id: int) -> list[str]:
    """Remove a member."""
    return [_told(line.ask("ClusterAdmin/RemoveNode", node_id=node_id))]


def _told(done: Any) -> str:
    if not done.success:
        raise DanubeError(f"Failed: {done.message}")
    return f"Success: {done.message}"
