"""Operations about the cluster for a broker without one: it answers as a cluster of one.

Each function gets the broker's status, its metadata and the arguments of an operation of
:mod:`danube.broker.operations.cluster`, and returns that operation's answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from danube.broker.operations.arguments import listed
from danube.cluster.control.calls import ClusterStatus
from danube.core.placement.balance import BalanceSettings
from danube.errors import NotFound, WrongState
from danube.ids import check_topic_name

if TYPE_CHECKING:
    from danube.core.metadata.machine import Metadata
    from danube.core.security import arguments as of

Alone = Callable[[dict[str, Any], "Metadata", Any], Any]

JOIN_HINT = "give it other brokers: docs/cluster.md, from one host to a cluster"


def member_status(status: dict[str, Any], state: Metadata) -> ClusterStatus:
    """The only member, which leads."""
    own_id = status["broker_id"]
    return ClusterStatus(
        self_node_id=own_id, raft_addr="", cluster="", cluster_id="", role="leader", leader_id=own_id,
        current_term=1, last_applied=state.version, commit_index=state.version, version=state.version,
        voters={own_id: ""}, learners={},
    )  # fmt: skip


def brokers(status: dict[str, Any], state: Metadata, args: of.Page) -> list[Any] | dict[str, Any]:
    own = {
        "broker_id": status["broker_id"], "mode": "active", "reason": "", "alive": True, "role": "leader",
        "native_address": status.get("native", ""), "grpc_address": status.get("grpc", ""),
        "admin_address": status.get("admin", ""), "metrics_address": status.get("metrics", ""),
        "version": status.get("version", ""), "partitions": state.partition_count, "load": None,
    }  # fmt: skip
    return listed(args, [own], lambda one: one["broker_id"].zfill(20), lambda one: one)


def deciding_broker(status: dict[str, Any], state: Metadata, args: of.Nothing) -> dict[str, Any]:
    return {"broker_id": status["broker_id"], "native_address": status.get("native", "")}


def activate_broker(status: dict[str, Any], state: Metadata, args: of.Activation) -> dict[str, Any]:
    return {"broker_id": _own(status, args), "mode": "active"}


def unload_broker(status: dict[str, Any], state: Metadata, args: of.Unload) -> Any:
    raise nowhere_to_go()


def forget_broker(status: dict[str, Any], state: Metadata, args: of.Forget) -> Any:
    raise WrongState(f"broker {_own(status, args)} is there", hint="stop it first")


def balance(status: dict[str, Any], state: Metadata, args: of.Nothing) -> dict[str, Any]:
    """All partitions are at one broker, which is even by any measure."""
    settings, count = BalanceSettings(), state.partition_count
    own = {
        "broker_id": status["broker_id"], "load": float(count), "partitions": count,
        "overloaded": False, "underloaded": False,
    }  # fmt: skip
    return {
        "strategy": "fair", "aggressiveness": settings.aggressiveness, "automatic": settings.automatic,
        "threshold": settings.level.imbalance, "coefficient_of_variation": 0.0, "mean_load": float(count),
        "max_load": float(count), "min_load": float(count), "std_deviation": 0.0, "broker_count": 1,
        "under_way": 0, "unowned": 0, "brokers": [own],
    }  # fmt: skip


def rebalance(status: dict[str, Any], state: Metadata, args: of.Rebalance) -> dict[str, Any]:
    threshold = BalanceSettings().level.imbalance
    return {"started": False, "coefficient_of_variation": 0.0, "threshold": threshold, "moves": []}


def unload_topic(status: dict[str, Any], state: Metadata, args: of.Topic) -> Any:
    name = args.topic
    check_topic_name(name)
    if state.find_topic(name) is None:
        state.topic_of_partition(name)  # raises where it is none
    raise WrongState(
        f"topic {name} cannot be unloaded", why="there is no other broker that could take it", hint=JOIN_HINT
    )


def nowhere_to_go() -> WrongState:
    return WrongState(
        "a broker cannot be unloaded when there are fewer than 2 brokers",
        why="its topics would have nowhere to go",
        hint="stop the broker to take it out of service; it keeps what it stored",
    )


def _own(status: dict[str, Any], args: of.Activation | of.Forget) -> str:
    own_id: str = status["broker_id"]
    if args.broker_id != own_id:
        raise NotFound(f"there is no broker {args.broker_id[:40]}", hint=f"this broker is {own_id}")
    return own_id
