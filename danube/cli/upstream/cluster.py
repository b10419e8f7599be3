"""``danube-admin cluster``: the members of a cluster."""

from __future__ import annotations

import click

from danube.cli.upstream.admin_line import AdminLine
from danube.cli.upstream.root import say
from danube.errors import DanubeError, WrongState
from danube.server.proto import DanubeAdmin_pb2 as pb


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
