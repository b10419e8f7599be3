"""danube_admin.ClusterAdmin: the members of a cluster, by this host's controller.

Unlike upstream any member answers: its controller speaks to the leader.
"""

from __future__ import annotations

from typing import Any

import msgspec

from danube.broker.operations.alone import JOIN_HINT
from danube.cluster.control.calls import Change, Changed, ClusterStatus, Status
from danube.cluster.links.addresses import split_address
from danube.errors import ConfigInvalid, InvalidArgument, NotSupported, WrongState
from danube.server.proto import DanubeAdmin_pb2 as pb
from danube.server.services.calls import BrokerCalls, Call


class ClusterAdmin:
    """A broker without a cluster is the only member of one, and its members cannot be changed."""

    def __init__(self, broker: BrokerCalls) -> None:
        self._broker = broker

    async def cluster_status(self, request: pb.Empty, call: Call) -> pb.ClusterStatusResponse:
        found: Any
        if self._broker.clustered:
            found = await self._broker.ask_controller(Status())
        else:
            found = msgspec.convert(await self._broker.ask("member_status"), ClusterStatus)
        if not isinstance(found, ClusterStatus):
            raise NotSupported("the controller answered something else")
        return pb.ClusterStatusResponse(
            leader_id=int(found.leader_id or 0),
            current_term=found.current_term,
            last_applied=found.last_applied,
            voters=sorted(map(int, found.voters)),
            learners=sorted(map(int, found.learners)),
            self_node_id=int(found.self_node_id),
            raft_addr=found.raft_addr,
        )

    async def add_node(self, request: pb.AddNodeRequest, call: Call) -> pb.AddNodeResponse:
        self._check_clustered("a node cannot be added")
        _check_id(request.node_id)
        try:
            split_address(request.addr)
        except ConfigInvalid as error:
            raise InvalidArgument(error.what, hint=error.hint) from None
        await self._change(Change("add", str(request.node_id), request.addr))
        message = f"Node {request.node_id} added as a learner"
        return pb.AddNodeResponse(success=True, node_id=request.node_id, message=message)

    async def promote_node(self, request: pb.PromoteNodeRequest, call: Call) -> pb.PromoteNodeResponse:
        self._check_clustered("a node cannot be promoted")
        _check_id(request.node_id)
        await self._change(Change("promote", str(request.node_id)))
        return pb.PromoteNodeResponse(success=True, message=f"Node {request.node_id} is a voter")

    async def remove_node(self, request: pb.RemoveNodeRequest, call: Call) -> pb.RemoveNodeResponse:
        self._check_clustered("a node cannot be removed")
        _check_id(request.node_id)
        await self._change(Change("remove", str(request.node_id)))
        return pb.RemoveNodeResponse(success=True, message=f"Node {request.node_id} is removed")

    async def _change(self, change: Change) -> None:
        if not isinstance(await self._broker.ask_controller(change), Changed):
            raise NotSupported("the controller answered something else")

    def _check_clustered(self, what: str) -> None:
        if not self._broker.clustered:
            raise WrongState(what, why="this broker is a cluster of one, and stays one", hint=JOIN_HINT)


def _check_id(node_id: int) -> None:
    if node_id == 0:
        raise InvalidArgument("a node id is a number above 0", hint="ClusterStatus of that node names it")
