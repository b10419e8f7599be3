"""danube_admin.ClusterAdmin: the members of a cluster.  One host has none, and says so."""

from __future__ import annotations

from danube.errors import NotSupported
from danube.server.proto import DanubeAdmin_pb2 as pb
from danube.server.services.ports import BrokerCalls, Call


class ClusterAdmin:
    """Every method answers UNIMPLEMENTED, as brokers without a cluster do."""

    def __init__(self, broker: BrokerCalls) -> None:
        self._broker = broker

    async def cluster_status(self, request: pb.Empty, call: Call) -> pb.ClusterStatusResponse:
        raise _alone("there is no cluster status")

    async def add_node(self, request: pb.AddNodeRequest, call: Call) -> pb.AddNodeResponse:
        raise _alone("a node cannot be added")

    async def promote_node(self, request: pb.PromoteNodeRequest, call: Call) -> pb.PromoteNodeResponse:
        raise _alone("a node cannot be promoted")

    async def remove_node(self, request: pb.RemoveNodeRequest, call: Call) -> pb.RemoveNodeResponse:
        raise _alone("a node cannot be removed")


def _alone(what: str) -> NotSupported:
    return NotSupported(what, why="this broker runs on one host, without a cluster", hint="use ListBrokers")
