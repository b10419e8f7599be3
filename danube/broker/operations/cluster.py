"""Operations on a cluster's brokers and on placement: any broker takes them, the leader decides.

Operations read the metadata of this host.  A change is a command, or a request that the leader finds in the
metadata; so no operation waits for a move.  A broker that is alone answers as a cluster of one
(:mod:`danube.broker.operations.alone`).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from danube.broker.operations import alone
from danube.broker.operations.arguments import listed
from danube.cluster.log.waiting import waiting_error
from danube.core.cluster.commands import (
    DeleteKey,
    ForgetBroker,
    ReleasePartitions,
    SetBrokerMode,
    UnloadPartitions,
)
from danube.core.cluster.ownership import DEAD
from danube.core.placement.duties import ClusterView, balance_settings, rebalance_command
from danube.core.placement.load_report import DECIDING_KEY, STORAGE_PREFIX, report_of, storage_shared
from danube.core.placement.partition_table import PartitionTable
from danube.errors import DanubeError, InvalidArgument, NotLeader, NotSupported, WrongState
from danube.ids import check_topic_name
from danube.limits import PARTITIONS_PER_COMMAND_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from danube.broker.operations.context import Answer, Operation, Operations
    from danube.core.cluster.commands import BrokerRecord
    from danube.core.metadata.commands import Command
    from danube.core.metadata.machine import Metadata
    from danube.core.security import arguments as of

_ID_END: Final = 1 << 64
_UNLOAD: Final = partial(UnloadPartitions, reason="unload")


def _or_alone(clustered: Operation, of_one: alone.Alone) -> Operation:
    """Return the operation of a cluster's broker, or without a cluster the result of ``alone``."""

    def either(operations: Operations, args: Any, answer: Answer) -> None:
        operations.refresh()
        if operations.clustered:
            if not operations.state.cluster.agreement.index:
                raise waiting_error(None, 0)
            clustered(operations, args, answer)
        else:
            answer(of_one(operations.status(), operations.state, args))

    return either


def _outlook(state: Metadata) -> ClusterView:
    return ClusterView(state, PartitionTable.of(state), balance_settings(state))


def _broker(state: Metadata, given: str) -> BrokerRecord:
    if not (given.isascii() and given.isdecimal() and 0 < int(given[:21]) < _ID_END):
        raise InvalidArgument(f"broker id {given[:40]!r} is not a number", hint="`danube brokers list`")
    return state.cluster.brokers.broker(int(given))


def _deciding(state: Metadata) -> int:
    """The broker whose controller leads; 0 while it is not known."""
    record = state.cluster.keys.find(DECIDING_KEY)
    return int(record.value) if record is not None and record.value.isdigit() else 0


# -- brokers ------------------------------------------------------------------------------------------


def _brokers(operations: Operations, args: of.Page, answer: Answer) -> None:
    """One row for each broker that is known."""
    state = operations.state
    counts: dict[int, int] = {}
    for ownership in state.cluster.owners.records():
        counts[ownership.broker_id] = counts.get(ownership.broker_id, 0) + 1
    known = state.cluster.brokers.records()
    answer(listed(args, known, _broker_key, lambda one: _row(state, one, counts.get(one.broker_id, 0))))


def _broker_key(broker: BrokerRecord) -> str:
    """Return a broker's id, as wide as the largest, so that texts are in the order of numbers."""
    return f"{broker.broker_id:020}"


def _row(state: Metadata, broker: BrokerRecord, partitions: int) -> dict[str, Any]:
    keys = state.cluster.keys
    report = report_of(keys, broker.broker_id)
    return {
        "broker_id": str(broker.broker_id), "mode": broker.mode, "reason": broker.reason,
        "alive": broker.alive, "role": "leader" if broker.broker_id == _deciding(state) else "follower",
        "native_address": broker.native_address, "grpc_address": broker.grpc_address,
        "admin_address": broker.admin_address, "metrics_address": broker.metrics_address,
        "version": broker.version, "partitions": partitions,
        "shared_storage": storage_shared(keys, broker.broker_id),
        "load": None if report is None else {
            "cpu": report.cpu, "memory": report.memory, "bytes_per_s": report.bytes_per_s,
            "records_per_s": report.records_per_s, "backlog_records": report.backlog_records,
        },
    }  # fmt: skip


def _member_status(operations: Operations, args: of.Nothing, answer: Answer) -> None:
    operations.refresh()
    if operations.clustered:
        raise NotSupported("members of a cluster are asked of its controller", hint="`danube cluster status`")
    answer(msgspec.to_builtins(alone.member_status(operations.status(), operations.state)))


def _deciding_broker(operations: Operations, args: of.Nothing, answer: Answer) -> None:
    state = operations.state
    broker = state.cluster.brokers.find(_deciding(state))
    if broker is None:
        hint = "most of the voters must be up and reach each other"
        raise NotLeader("no leader is known", hint=hint, leader_id="")
    answer({"broker_id": str(broker.broker_id), "native_address": broker.native_address})


def _activate_broker(operations: Operations, args: of.Activation, answer: Answer) -> None:
    state = operations.state
    broker = _broker(state, args.broker_id)
    reason = args.reason or "admin_activate"
    row = {"broker_id": str(broker.broker_id), "mode": "active"}
    command = SetBrokerMode(broker_id=broker.broker_id, mode="active", reason=reason)
    operations.propose(command, answer, lambda made: row)


def _unload_broker(operations: Operations, args: of.Unload, answer: Answer) -> None:
    """Empty a broker, or take the partitions of some namespaces from it; others take over."""
    state = operations.state
    others = [one for one in state.cluster.brokers.records() if one.alive and one.mode == "active"]
    if len(state.cluster.brokers) < 2:
        raise alone.nowhere_to_go()
    broker = _broker(state, args.broker_id)
    if not any(one.broker_id != broker.broker_id for one in others):
        raise WrongState("no other broker is active", why="no broker could take over", hint="activate one")
    include, exclude = args.namespaces_include, args.namespaces_exclude
    rows, stays = _movable(_outlook(state), broker.broker_id, include, exclude)
    answered = {
        "broker_id": str(broker.broker_id), "total": len(rows), "stays": stays,
        "started": not args.dry_run, "drained": not rows and not include and not exclude,
    }  # fmt: skip
    if not answered["started"]:
        answer(answered)
    elif include or exclude:
        _propose_all(operations, _commands(rows, _UNLOAD), answer, answered)
    else:
        mode = "draining" if rows or stays else "drained"
        command = SetBrokerMode(broker_id=broker.broker_id, mode=mode, reason="unload")
        operations.propose(command, answer, lambda made: answered)


def _forget_broker(operations: Operations, args: of.Forget, answer: Answer) -> None:
    """Remove a dead broker.

    Records that are only on its disk are then lost, which the caller must accept.
    """
    state = operations.state
    broker = _broker(state, args.broker_id)
    if broker.alive:
        raise WrongState(f"broker {broker.broker_id} is there", hint="stop it first")
    outlook = _outlook(state)
    table = outlook.table
    slot = table.slot(broker.broker_id)
    owned = [table.place(row) for row in table.rows_of_slot(slot).tolist()]
    waiting = sum(outlook.home(one, row) == slot for row, one in table.unowned.items())
    lost = len(owned) + waiting
    if lost and not args.accept_loss:
        raise WrongState(
            f"{lost} partitions have records on the disk of broker {broker.broker_id} only",
            hint="start it again; or accept the loss, and they go on without those records",
        )
    commands: list[Command] = [
        *_commands(owned, partial(ReleasePartitions, broker_id=broker.broker_id, reason=DEAD)),
        ForgetBroker(broker_id=broker.broker_id),
        DeleteKey(key=f"{STORAGE_PREFIX}{broker.broker_id}"),
    ]
    _propose_all(operations, commands, answer, {"broker_id": str(broker.broker_id), "lost": lost})


def _movable(
    outlook: ClusterView, broker_id: int, include: Sequence[str], exclude: Sequence[str]
) -> tuple[list[tuple[int, int, int]], int]:
    """Places that can leave a broker, and how many cannot, of these namespaces."""
    table, movable = outlook.table, outlook.movable()
    slot = table.find_slot(broker_id)
    found: list[tuple[int, int, int]] = []
    stays = 0
    for row in table.rows_of_slot(slot).tolist() if slot >= 0 else []:
        place = table.place(row)
        record = outlook.state.topic_with_id(place[0])
        namespace = record.topic.split("/")[1] if record is not None else ""
        if (include and namespace not in include) or namespace in exclude:
            continue
        if movable[row]:
            found.append(place)
        else:
            stays += 1
    return found, stays


# -- balance ------------------------------------------------------------------------------------------


def _balance(operations: Operations, args: of.Nothing, answer: Answer) -> None:
    answer(_balance_view(_outlook(operations.state)))


def _balance_view(outlook: ClusterView) -> dict[str, Any]:
    found, settings = outlook.imbalance, outlook.settings
    low, high = found.bounds
    counts, load = outlook.table.counts(), outlook.loads.load
    return {
        "strategy": settings.strategy, "aggressiveness": settings.aggressiveness,
        "automatic": settings.automatic, "threshold": settings.level.imbalance,
        "coefficient_of_variation": found.cv, "mean_load": found.mean, "max_load": found.most,
        "min_load": found.least, "std_deviation": found.deviation, "broker_count": found.broker_count,
        "under_way": len(outlook.table.asked), "unowned": len(outlook.table.unowned),
        "brokers": [
            {
                "broker_id": str(outlook.table.broker_ids[slot]), "load": round(float(load[slot]), 3),
                "partitions": int(counts[slot]), "overloaded": bool(load[slot] > high),
                "underloaded": bool(load[slot] < low),
            }
            for slot in range(len(outlook.takes)) if outlook.takes[slot]
        ],
    }  # fmt: skip


def _rebalance(operations: Operations, args: of.Rebalance, answer: Answer) -> None:
    """Ask the leader for a round of moves; with ``dry_run`` only say which they would be now."""
    outlook = _outlook(operations.state)
    most = args.max_moves
    now_us = outlook.state.cluster.agreement.now_us
    moves = outlook.plan(most or outlook.settings.level.moves_per_round, now_us)
    ids = outlook.table.broker_ids
    view = {
        "started": False, "coefficient_of_variation": outlook.imbalance.cv,
        "threshold": outlook.settings.level.imbalance,
        "moves": [
            {
                "partition": _name(outlook, one.row), "from_broker": str(ids[one.source]),
                "to_broker": str(ids[one.target]), "load": round(one.weight, 3), "reason": one.reason,
            }
            for one in moves
        ],
    }  # fmt: skip
    if args.dry_run or not moves:
        answer(view)
        return
    operations.propose(rebalance_command(most), answer, lambda made: view | {"started": True})


def _name(outlook: ClusterView, row: int) -> str:
    topic_id, partition, _ = outlook.table.place(row)
    record = outlook.state.topic_with_id(topic_id)
    return record.physical_name(partition) if record is not None else f"topic id {topic_id}"


def _unload_topic(operations: Operations, args: of.Topic, answer: Answer) -> None:
    """Ask the owners of a topic's partitions, or of one, to release them; others take over."""
    name = args.topic
    check_topic_name(name)
    outlook = _outlook(operations.state)
    record = outlook.state.find_topic(name)
    wanted: Sequence[int] = range(record.partition_count) if record is not None else ()
    if record is None:
        record, number = outlook.state.topic_of_partition(name)
        wanted = (number,)
    if int(outlook.takes.sum()) < 2:
        raise WrongState("a topic cannot be unloaded without another active broker", hint="activate one")
    table, movable = outlook.table, outlook.movable()
    rows = [row for one in wanted if (row := table.row(record.topic_id, one)) is not None]
    owned = [row for row in rows if table.owner_id(row)]
    stay = [row for row in owned if not movable[row]]
    if stay:
        raise WrongState(
            f"{len(stay)} partitions of {name} cannot leave their brokers",
            why="their records are on those brokers' disks only",
            hint="set storage.url, so that others can read them",
        )
    commands = _commands([table.place(row) for row in owned], _UNLOAD)
    _propose_all(operations, commands, answer, {"topic": record.topic, "partitions": len(owned)})


def _commands(places: list[tuple[int, int, int]], command: Callable[..., Command]) -> list[Command]:
    """As many commands as these partitions need."""
    most = PARTITIONS_PER_COMMAND_MAX
    return [command(partitions=tuple(places[at : at + most])) for at in range(0, len(places), most)]


def _propose_all(
    operations: Operations, commands: list[Command], answer: Answer, value: dict[str, Any]
) -> None:
    """One after the other; answers ``value``, or the first error."""
    if not commands:
        answer(value)
        return

    def done(outcome: Any) -> None:
        if isinstance(outcome, DanubeError):
            answer(outcome)
        else:
            _propose_all(operations, commands[1:], answer, value)

    operations.propose(commands[0], done)


TABLE: dict[str, Operation] = {
    "brokers": _or_alone(_brokers, alone.brokers),
    "member_status": _member_status,
    "deciding_broker": _or_alone(_deciding_broker, alone.deciding_broker),
    "activate_broker": _or_alone(_activate_broker, alone.activate_broker),
    "unload_broker": _or_alone(_unload_broker, alone.unload_broker),
    "forget_broker": _or_alone(_forget_broker, alone.forget_broker),
    "balance": _or_alone(_balance, alone.balance),
    "rebalance": _or_alone(_rebalance, alone.rebalance),
    "unload_topic": _or_alone(_unload_topic, alone.unload_topic),
}
