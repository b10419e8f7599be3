"""``danube-admin brokers``.

``danube-admin cluster``: the members of a cluster.
"""

from __future__ import annotations

from typing import Final

import click

from danube.cli.upstream.admin_line import AdminLine
from danube.cli.upstream.root import json_output, quoted, say, show_json
from danube.errors import DanubeError, WrongState
from danube.server.proto import DanubeAdmin_pb2 as pb

_WIDTHS: Final = (15, 15, 25, 15, 25, 25)
_BOX: Final = 60
_BANDS: Final = ((20, "well balanced"), (30, "slightly unbalanced"), (40, "unbalanced"))


@click.group()
def brokers() -> None:
    """List brokers, unload and activate them."""


@brokers.command("list")
@json_output
@click.pass_obj
def list_brokers(line: AdminLine, output: str | None) -> None:
    """List the brokers."""
    found = line.ask("BrokerAdmin/ListBrokers", pb.Empty(), pb.BrokerListResponse).brokers
    if output:
        names = ("broker_id", "broker_status", "broker_addr", "broker_role", "admin_addr", "metrics_addr")
        show_json([{name: getattr(one, name) for name in names} for one in found])
        return
    say(_columns("BROKER ID", "STATUS", "ADDRESS", "ROLE", "ADMIN ADDR", "METRICS ADDR"), "-" * 125)
    for one in found:
        say(
            _columns(
                one.broker_id,
                one.broker_status,
                one.broker_addr,
                one.broker_role,
                one.admin_addr,
                one.metrics_addr,
            )
        )


def _columns(*cells: str, widths: tuple[int, ...] = _WIDTHS) -> str:
    return " ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


@brokers.command("leader-broker")
@click.pass_obj
def leader_broker(line: AdminLine) -> None:
    """Show the leader of the cluster."""
    found = line.ask("BrokerAdmin/GetLeaderBroker", pb.Empty(), pb.BrokerResponse)
    say(f"Leader Broker: {quoted(found.leader)}")


@brokers.command("namespaces")
@json_output
@click.pass_obj
def namespaces(line: AdminLine, output: str | None) -> None:
    """List the namespaces."""
    found = list(line.ask("BrokerAdmin/ListNamespaces", pb.Empty(), pb.NamespaceListResponse).namespaces)
    if output:
        show_json(found)
    else:
        say(*(f"Namespace: {name}" for name in found))


_U32 = click.IntRange(0, (1 << 32) - 1)


@brokers.command("unload")
@click.option("--broker-id", required=True)
@click.option("--max-parallel", type=_U32, default=1, show_default=True)
@click.option("--namespaces-include", multiple=True)
@click.option("--namespaces-exclude", multiple=True)
@click.option("--dry-run", is_flag=True)
@click.option("--timeout-seconds", type=_U32, default=60, show_default=True)
@click.pass_obj
def unload(
    line: AdminLine,
    broker_id: str,
    max_parallel: int,
    namespaces_include: tuple[str, ...],
    namespaces_exclude: tuple[str, ...],
    dry_run: bool,
    timeout_seconds: int,
) -> None:
    """Move the topics of a broker to others."""
    request = pb.UnloadBrokerRequest(
        broker_id=broker_id,
        max_parallel=max_parallel,
        namespaces_include=namespaces_include,
        namespaces_exclude=namespaces_exclude,
        dry_run=dry_run,
        timeout_seconds=timeout_seconds,
    )
    done = line.ask("BrokerAdmin/UnloadBroker", request, pb.UnloadBrokerResponse)
    say(
        f"UnloadBroker started={str(done.started).lower()} total={done.total} succeeded={done.succeeded}"
        f" failed={done.failed} pending={done.pending}"
    )
    for topic in done.failed_topics:
        click.echo(f"failed topic: {topic}", err=True)


@brokers.command("activate")
@click.option("--broker-id", required=True)
@click.option("--reason", default="admin_activate", show_default=True)
@click.pass_obj
def activate(line: AdminLine, broker_id: str, reason: str) -> None:
    """Let a broker take topics again."""
    request = pb.ActivateBrokerRequest(broker_id=broker_id, reason=reason)
    done = line.ask("BrokerAdmin/ActivateBroker", request, pb.ActivateBrokerResponse)
    say(f"ActivateBroker success={str(done.success).lower()}")


@brokers.command("balance")
@json_output
@click.pass_obj
def balance(line: AdminLine, output: str | None) -> None:
    """Show how evenly the brokers are loaded."""
    found = line.ask("BrokerAdmin/GetClusterBalance", pb.ClusterBalanceRequest(), pb.ClusterBalanceResponse)
    figures = (
        "coefficient_of_variation",
        "mean_load",
        "max_load",
        "min_load",
        "std_deviation",
        "broker_count",
    )
    if output:
        of_broker = ("broker_id", "load", "topic_count", "is_overloaded", "is_underloaded")
        loads = [{name: getattr(one, name) for name in of_broker} for one in found.brokers]
        show_json({name: getattr(found, name) for name in figures} | {"brokers": loads})
        return
    percent = found.coefficient_of_variation * 100
    band = next((word for limit, word in _BANDS if percent < limit), "severely unbalanced")
    say(*_box("Cluster Balance Report"), f"Status: {band} (CV {percent:.2f}%)")
    say(*(f"{name.replace('_', ' ').capitalize()}: {getattr(found, name):.2f}" for name in figures[1:5]))
    say(f"Brokers: {found.broker_count}", f"Assignment strategy: {found.assignment_strategy}", "")
    widths = (15, 10, 10, 15)
    say(_columns("BROKER ID", "LOAD", "TOPICS", "STATUS", widths=widths), "-" * sum(widths))
    for one in found.brokers:
        state = "overloaded" if one.is_overloaded else "underloaded" if one.is_underloaded else "normal"
        say(_columns(str(one.broker_id), f"{one.load:.2f}", str(one.topic_count), state, widths=widths))
    if percent >= 30:
        say("", "Consider `danube-admin brokers rebalance --dry-run`.")


@brokers.command("rebalance")
@click.option("--dry-run", is_flag=True)
@click.option("--max-moves", type=_U32)
@click.pass_obj
def rebalance(line: AdminLine, dry_run: bool, max_moves: int | None) -> None:
    """Move topics from loaded brokers to others."""
    request = pb.RebalanceRequest(dry_run=dry_run, max_moves=max_moves)
    done = line.ask("BrokerAdmin/TriggerRebalance", request, pb.RebalanceResponse)
    say(*_box("Cluster Rebalance (dry run)" if dry_run else "Cluster Rebalance"))
    if not done.success:
        say(f"Error: {done.error_message}")
        return
    if "background" in done.error_message:
        say("Rebalancing goes on in the background.")
    elif done.error_message:
        say(done.error_message)
    say(f"Moves executed: {done.moves_executed}")
    for one in done.proposed_moves:
        say(f"  {one.topic_name}: {one.from_broker} -> {one.to_broker} ({one.reason})")


def _box(title: str) -> tuple[str, str, str]:
    bar = "═" * _BOX
    return f"╔{bar}╗", f"║{title.center(_BOX)}║", f"╚{bar}╝"


@click.group()
def cluster() -> None:
    """Members of the cluster."""


@cluster.command("status")
@click.pass_obj
def status(line: AdminLine) -> None:
    """Show the members and the state of the cluster."""
    found = line.ask("ClusterAdmin/ClusterStatus", pb.Empty(), pb.ClusterStatusResponse)
    say(
        "Raft Cluster Status:",
        f"  Self Node ID: {found.self_node_id}",
        f"  Raft Address: {found.raft_addr}",
        f"  Leader: {found.leader_id or 'none'}",
        f"  Term: {found.current_term}",
        f"  Last Applied: {found.last_applied}",
        f"  Voters: {list(found.voters)}",
        f"  Learners: {list(found.learners)}",
    )


@cluster.command("add-node")
@click.option("--node-addr", required=True, help="Admin endpoint of the broker that joins.")
@click.pass_obj
def add_node(line: AdminLine, node_addr: str) -> None:
    """Add a broker as a learner."""
    say(f"Discovering node at {node_addr}...")
    found = line.ask_other(node_addr, "ClusterAdmin/ClusterStatus", pb.Empty(), pb.ClusterStatusResponse)
    say(
        f"Discovered: node_id={found.self_node_id}, raft_addr={found.raft_addr}",
        "Adding node to the cluster...",
    )
    if not found.raft_addr:
        raise WrongState(
            f"Failed: the broker at {node_addr} is a cluster of one",
            why="it was started without --seed-nodes and --join",
            hint="start it with --join and the address of a member",
        )
    request = pb.AddNodeRequest(addr=found.raft_addr, node_id=found.self_node_id)
    done = line.ask("ClusterAdmin/AddNode", request, pb.AddNodeResponse)
    _tell(done.success, done.message)


@cluster.command("promote-node")
@click.option("--node-id", type=click.IntRange(0, (1 << 64) - 1), required=True)
@click.pass_obj
def promote_node(line: AdminLine, node_id: int) -> None:
    """Make a learner a voter."""
    request = pb.PromoteNodeRequest(node_id=node_id)
    done = line.ask("ClusterAdmin/PromoteNode", request, pb.PromoteNodeResponse)
    _tell(done.success, done.message)


@cluster.command("remove-node")
@click.option("--node-id", type=click.IntRange(0, (1 << 64) - 1), required=True)
@click.pass_obj
def remove_node(line: AdminLine, node_id: int) -> None:
    """Remove a member."""
    request = pb.RemoveNodeRequest(node_id=node_id)
    done = line.ask("ClusterAdmin/RemoveNode", request, pb.RemoveNodeResponse)
    _tell(done.success, done.message)


def _tell(success: bool, message: str) -> None:
    if not success:
        raise DanubeError(f"Failed: {message}")
    say(f"Success: {message}")
