"""``danube cluster``: the members of the cluster of this host's broker, and changes to them."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

import click

from danube.cli.broker.here import Answered, Here, config_file_option, data_dir_option, pass_here
from danube.cli.terminal.arguments import together
from danube.cli.terminal.lazy import Entry, LazyGroup
from danube.cli.terminal.output import note, output_option, plain, show
from danube.errors import InvalidArgument, NotSupported, WrongState

if TYPE_CHECKING:
    from danube.cli.broker.running import RunningBroker
    from danube.cluster.control.calls import ClusterStatus, Request

TIMEOUT_S = 15.0
COLUMNS = ("node_id", "address", "role", "reached")
COMMANDS = {
    "adopt": Entry("broker.adopt:adopt", "Make a broker of one host the first member."),
    "recover": Entry("broker.recover:recover", "Recover after the loss of most journals."),
    "install-engine": Entry(
        "broker.engine:install_engine", "Install raftos, which a cluster over Raft needs."
    ),
}

_node_id_option = click.option("--node-id", required=True, help="As `danube cluster status` shows it.")
_of_member_here = together(
    data_dir_option("Data directory of a member here; default as for start."),
    config_file_option,
    output_option(),
    pass_here,
)


@click.group(cls=LazyGroup, entries=COMMANDS)
def cluster() -> None:
    """Show and change the members.  Any member accepts the command and forwards it to the leader.

    \b
    danube cluster status
    danube cluster promote-node --node-id 1234567890
    """


@cluster.command("status", short_help="Show the members as this member knows them.")
@_of_member_here
def status(here: Here) -> None:
    """Voters decide, learners only follow.

    Exit code 6 if no leader is known: then no change is possible, and the output may be out of date.
    """
    from danube.cluster.control.calls import ClusterStatus, Status
    from danube.errors import Unavailable

    found = _ask(here.running, Status(), ClusterStatus, 5.0) if here.running.controller else here.ask(_alone)
    if here.output == "json":
        show(plain(found), here.output)
    else:
        show(_members(found), here.output, COLUMNS)
        name = f"cluster {found.cluster} {found.cluster_id}" if found.cluster_id else "a broker that is alone"
        note(f"{name}, term {found.current_term}, version {found.version}")
    if not found.leader_id:
        why, hint = "", "most of the voters must be up and reach each other"
        if found.waiting is not None:
            why, hint = found.waiting.why, found.waiting.hint
        raise Unavailable("no leader is known", why=why, hint=hint)


def _alone(client: Any) -> ClusterStatus:
    """A broker without a cluster has no controller; its workers know that it is the only member."""
    import msgspec

    from danube.cluster.control.calls import ClusterStatus

    return msgspec.convert(client.admin.cluster("member_status"), ClusterStatus)


def _members(found: ClusterStatus) -> list[dict[str, object]]:
    own_id = found.self_node_id
    nodes = [(*one, "voter") for one in found.voters.items()]
    nodes += [(*one, "learner") for one in found.learners.items()]
    return [
        {
            "node_id": node_id,
            "address": address,
            "role": "leader" if node_id == found.leader_id else role,
            "reached": "self" if node_id == own_id else "yes" if node_id in found.reached else "no",
        }
        for node_id, address, role in nodes
    ]


@cluster.command("add-node", short_help="Add a node as a learner.")
@_node_id_option
@click.option(
    "--raft-addr", required=True, metavar="HOST:PORT", help="Address of the node for other members."
)
@_of_member_here
def add_node(here: Here, node_id: str, raft_addr: str) -> Any:
    """Add a node as a learner.  A node with --join or --seed-nodes is added automatically."""
    return _change(here, "add", node_id, raft_addr)


@cluster.command("promote-node", short_help="Make a learner a voter.")
@_node_id_option
@_of_member_here
def promote_node(here: Here, node_id: str) -> Any:
    """Make a learner a voter.  Refused until the learner has caught up."""
    return _change(here, "promote", node_id)


@cluster.command("remove-node", short_help="Remove a voter or a learner.")
@_node_id_option
@_of_member_here
def remove_node(here: Here, node_id: str) -> Any:
    """Remove a node for good: it can return only as a new node with an empty data directory."""
    return _change(here, "remove", node_id)


def _change(here: Here, what: str, node_id: str, address: str = "") -> dict[str, list[str]]:
    from danube.cluster.control.calls import Change, Changed
    from danube.cluster.links.addresses import split_address

    if not node_id.isdecimal():
        raise InvalidArgument(f"{node_id[:80]!r} is no node id", hint="`danube cluster status` shows them")
    if address:
        split_address(address)
    change = Change(what, node_id, address, int(1000 * (TIMEOUT_S - 1)))
    if not here.running.controller:
        raise WrongState(
            "this broker is a cluster of one",
            why="it was started without --seed-nodes and --join",
            hint="see docs/cluster.md: from one host to a cluster",
        )
    changed = _ask(here.running, change, Changed, TIMEOUT_S)
    members = changed.members
    return {"voters": sorted(members.voters), "learners": sorted(members.learners)}


def _ask(running: RunningBroker, request: Request, kind: type[Answered], timeout_s: float) -> Answered:
    from danube.cluster.control.door import ControllerClient

    with closing(ControllerClient("\0" + running.controller)) as client:
        answer = client.ask(request, timeout_s)
    if not isinstance(answer, kind):
        raise NotSupported("the controller answered something else")
    return answer
