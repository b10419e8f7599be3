"""danube_admin.BrokerAdmin: the brokers of a cluster, and moves of their partitions.

Any broker answers, by operations of its own; one without a cluster answers as a cluster of one.
"""

from __future__ import annotations

from typing import Any, Final

from danube.errors import NotLeader
from danube.server.proto import DanubeAdmin_pb2 as pb
from danube.server.services.calls import BrokerCalls, Call, filled, whole_list
from danube.server.services.naming import current, number_of_broker

_NO_LEADER = "not_found"  # the word that clients understand as none
_ROLES: Final = {"leader": "Cluster_Leader", "follower": "Cluster_Follower"}
_STRATEGIES: Final = {"fair": "Fair", "balanced": "Balanced", "weighted_load": "WeightedLoad"}


class BrokerAdmin:
    """Serves BrokerAdmin by the operations of ``danube brokers``."""

    def __init__(self, broker: BrokerCalls) -> None:
        self._broker = broker

    async def list_brokers(self, request: pb.Empty, call: Call) -> pb.BrokerListResponse:
        rows = await whole_list(self._broker.ask, "brokers")
        found = [self._info(row) for row in rows if row["alive"]]
        if not self._broker.clustered:  # there is only this broker, so the caller has dialled it
            for one in found:
                one.broker_addr = self._broker.address_for(call)
                one.admin_addr = self._broker.admin_address
        return pb.BrokerListResponse(brokers=found)

    def _info(self, row: dict[str, Any]) -> pb.BrokerInfo:
        url = self._broker.url
        return pb.BrokerInfo(
            broker_id=row["broker_id"],
            broker_addr=url("grpc", row["grpc_address"]),
            broker_role=_ROLES.get(row["role"], "None"),
            admin_addr=url("admin", row["admin_address"]),
            metrics_addr=url("metrics", row["metrics_address"]),
            broker_status=row["mode"],
        )

    async def get_leader_broker(self, request: pb.Empty, call: Call) -> pb.BrokerResponse:
        try:
            found = await self._broker.ask("deciding_broker")
        except NotLeader:  # an official client waits for this word, not for UNAVAILABLE
            return pb.BrokerResponse(leader=_NO_LEADER)
        return pb.BrokerResponse(leader=found["broker_id"])

    async def list_namespaces(self, request: pb.Empty, call: Call) -> pb.NamespaceListResponse:
        names = current(self._broker).namespaces()
        return pb.NamespaceListResponse(namespaces=filter(self._broker.sight(call).namespace, names))

    async def unload_broker(self, request: pb.UnloadBrokerRequest, call: Call) -> pb.UnloadBrokerResponse:
        """Answer at once: the moves are pending, and the leader makes some at a time."""
        broker_id = number_of_broker(request.broker_id)
        found = await self._broker.ask(
            "unload_broker",
            broker_id=str(broker_id),
            dry_run=request.dry_run,
            namespaces_include=list(request.namespaces_include),
            namespaces_exclude=list(request.namespaces_exclude),
        )
        total = found["total"]
        return pb.UnloadBrokerResponse(started=found["started"], total=total, pending=total)

    async def activate_broker(
        self, request: pb.ActivateBrokerRequest, call: Call
    ) -> pb.ActivateBrokerResponse:
        broker_id = number_of_broker(request.broker_id)
        await self._broker.ask("activate_broker", broker_id=str(broker_id), reason=request.reason)
        return pb.ActivateBrokerResponse(success=True)

    async def get_cluster_balance(
        self, request: pb.ClusterBalanceRequest, call: Call
    ) -> pb.ClusterBalanceResponse:
        found = await self._broker.ask("balance")
        brokers, strategy = [_load(row) for row in found["brokers"]], _STRATEGIES[found["strategy"]]
        return filled(pb.ClusterBalanceResponse, found, brokers=brokers, assignment_strategy=strategy)

    async def trigger_rebalance(self, request: pb.RebalanceRequest, call: Call) -> pb.RebalanceResponse:
        """Begin moves; upstream's commands recognise that by the word "background" in the answer."""
        most = min(request.max_moves, 1_000) if request.HasField("max_moves") else 0
        found = await self._broker.ask("rebalance", dry_run=request.dry_run, max_moves=most)
        message = ""
        if not found["moves"]:
            message = (
                f"Cluster is balanced (CV: {found['coefficient_of_variation']:.2f},"
                f" threshold: {found['threshold']:.2f})"
            )
        elif found["started"]:
            message = "moves go on in the background"
        return pb.RebalanceResponse(
            success=True,
            moves_executed=len(found["moves"]) if found["started"] else 0,
            proposed_moves=[_move(one) for one in found["moves"]],
            error_message=message,
        )


def _load(row: dict[str, Any]) -> pb.BrokerLoadInfo:
    return pb.BrokerLoadInfo(
        broker_id=int(row["broker_id"]),
        load=row["load"],
        topic_count=row["partitions"],
        is_overloaded=row["overloaded"],
        is_underloaded=row["underloaded"],
    )


def _move(one: dict[str, Any]) -> pb.ProposedMove:
    return pb.ProposedMove(
        topic_name=one["partition"],
        from_broker=int(one["from_broker"]),
        to_broker=int(one["to_broker"]),
        estimated_load=one["load"],
        reason=one["reason"],
    )
