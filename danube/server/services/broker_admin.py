"""danube_admin.BrokerAdmin: which brokers there are.  This broker runs on one host, so there is one."""

from __future__ import annotations

from danube.errors import NotFound, NotSupported, WrongState
from danube.server.proto import DanubeAdmin_pb2 as pb
from danube.server.services.naming import number_of_broker
from danube.server.services.ports import BrokerCalls, Call

_NO_LEADER = "not_found"  # what a broker without a cluster answers


class BrokerAdmin:
    """One broker, always active, with nobody to hand topics to."""

    def __init__(self, broker: BrokerCalls) -> None:
        self._broker = broker

    async def list_brokers(self, request: pb.Empty, call: Call) -> pb.BrokerListResponse:
        broker = self._broker
        one = pb.BrokerInfo(
            broker_id=str(broker.broker_id),
            broker_addr=broker.address_for(call),
            broker_role="None",
            admin_addr=_url(broker.admin_address),
            metrics_addr=broker.metrics_address,
            broker_status="active",
        )
        return pb.BrokerListResponse(brokers=[one])

    async def get_leader_broker(self, request: pb.Empty, call: Call) -> pb.BrokerResponse:
        return pb.BrokerResponse(leader=_NO_LEADER)

    async def list_namespaces(self, request: pb.Empty, call: Call) -> pb.NamespaceListResponse:
        return pb.NamespaceListResponse(namespaces=await self._broker.ask("namespaces"))

    async def unload_broker(self, request: pb.UnloadBrokerRequest, call: Call) -> pb.UnloadBrokerResponse:
        number_of_broker(request.broker_id)
        raise WrongState(
            "a broker cannot be unloaded when there are fewer than 2 brokers",
            why="its topics would have nowhere to go",
            hint="stop the broker to take it out of service; it keeps what it stored",
        )

    async def activate_broker(
        self, request: pb.ActivateBrokerRequest, call: Call
    ) -> pb.ActivateBrokerResponse:
        broker_id = number_of_broker(request.broker_id)
        if broker_id != self._broker.broker_id:
            raise NotFound(f"there is no broker {broker_id}", hint=f"this broker is {self._broker.broker_id}")
        return pb.ActivateBrokerResponse(success=True)

    async def get_cluster_balance(
        self, request: pb.ClusterBalanceRequest, call: Call
    ) -> pb.ClusterBalanceResponse:
        raise NotSupported("there is no cluster balance", why="this broker runs on one host", hint=_ALONE)

    async def trigger_rebalance(self, request: pb.RebalanceRequest, call: Call) -> pb.RebalanceResponse:
        raise NotSupported("there is nothing to rebalance", why="this broker runs on one host", hint=_ALONE)


_ALONE = "its workers share the partitions by themselves"


def _url(address: str) -> str:
    return address if "://" in address else f"http://{address}"
