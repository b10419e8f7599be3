"""``danube brokers``: which brokers a cluster has, emptying them, and how evenly they are loaded."""

from __future__ import annotations

from time import sleep
from typing import Any, Final

import click

from danube.cli.terminal import arguments
from danube.cli.terminal.asking import Broker, broker_command
from danube.cli.terminal.confirming import yes_option
from danube.cli.terminal.lazy import LazyGroup
from danube.cli.terminal.output import note, show
from danube.errors import OperationTimeout
from danube.host.clock import monotonic_ns

COLUMNS = ("broker_id", "role", "mode", "alive", "native_address", "partitions", "version", "reason")
BALANCE_COLUMNS = ("broker_id", "load", "partitions", "overloaded", "underloaded")
MOVE_COLUMNS = ("partition", "from_broker", "to_broker", "load", "reason")
_POLL_S: Final = 0.2
_broker_id = click.argument("broker_id", metavar="BROKER_ID")


@click.group(cls=LazyGroup, aliases={"ls": "list"})
def brokers() -> None:
    """Show the brokers of a cluster, empty them, and balance partitions.  Any broker accepts the command.

    \b
    danube brokers list
    danube brokers unload 4000974598167414716 --wait
    danube brokers rebalance --dry-run
    """


@broker_command(brokers, "list", "List the brokers.", columns=COLUMNS)
def list_brokers(broker: Broker) -> Any:
    """Modes: active brokers take partitions, draining ones are being emptied, drained ones are empty."""
    return broker.admin.cluster("brokers")


@broker_command(brokers, "leader", "Show the leader.")
def show_deciding(broker: Broker) -> Any:
    """Show the broker whose controller is the leader; exit code 6 if none is known."""
    return broker.admin.cluster("deciding_broker")


@broker_command(brokers, "unload", "Empty a broker.")
@_broker_id
@click.option("--dry-run", is_flag=True, help="Only show how many partitions would move, and how many stay.")
@click.option("--namespace", "include", multiple=True, help="Only this namespace; the broker stays active.")
@click.option("--wait", is_flag=True, help="Wait until all partitions have moved.")
@click.option("--timeout", type=arguments.duration_ms, default="300s", help="How long to wait.  [300s]")
def unload(
    broker: Broker, broker_id: str, dry_run: bool, include: tuple[str, ...], wait: bool, timeout: int
) -> Any:
    """Move all partitions of a broker to others; it takes none until it is activated.

    A reliable topic without shared storage is on its disk only; it stays and is still served.
    """
    answer = broker.admin.cluster(
        "unload_broker", broker_id=broker_id, dry_run=dry_run, namespaces_include=list(include)
    )
    if wait and answer["started"] and not include:
        _wait_drained(broker, broker_id, timeout)
    return answer


def _wait_drained(broker: Broker, broker_id: str, timeout_ms: int) -> None:
    deadline_ns = monotonic_ns() + timeout_ms * 1_000_000
    while True:
        rows = {row["broker_id"]: row for row in broker.admin.cluster("brokers")}
        row = rows.get(broker_id)
        if row is None or row["mode"] == "drained":
            return
        if monotonic_ns() >= deadline_ns:
            raise OperationTimeout(
                f"broker {broker_id} still has {row['partitions']} partitions",
                why=row["reason"],
                hint="it goes on; look again with `danube brokers list`",
            )
        sleep(_POLL_S)


@broker_command(brokers, "activate", "Let a broker take partitions again.")
@_broker_id
@click.option("--reason", default="admin_activate", show_default=True)
def activate(broker: Broker, broker_id: str, reason: str) -> Any:
    """Let a broker get partitions again: new ones, and others when they are rebalanced."""
    return broker.admin.cluster("activate_broker", broker_id=broker_id, reason=reason)


@broker_command(brokers, "forget", "Remove a dead broker from the list.")
@_broker_id
@click.option("--accept-loss", is_flag=True, help="Give up records that are only on its disk.")
@yes_option
def forget(broker: Broker, broker_id: str, accept_loss: bool, yes: bool) -> Any:
    """The broker must be dead; exit code 4 while it runs, or if it has records that no other broker has.

    `danube cluster remove-node` takes its vote.
    """
    if accept_loss:
        broker.confirm(broker_id, f"what only the disk of broker {broker_id} holds is given up", yes)
    return broker.admin.cluster("forget_broker", broker_id=broker_id, accept_loss=accept_loss)


@broker_command(brokers, "balance", "Show how evenly the brokers are loaded.")
def balance(broker: Broker) -> Any:
    """Show the loads of active brokers by the configured strategy; 100 is the average, except for fair."""
    found = broker.admin.cluster("balance")
    if broker.output == "json":
        return found
    show(found["brokers"], broker.output, BALANCE_COLUMNS)
    note(
        f"strategy {found['strategy']}, deviation {100 * found['coefficient_of_variation']:.0f} % of the mean"
        f" (moves begin above {100 * found['threshold']:.0f} %), {found['under_way']} moves under way"
    )
    return None


@broker_command(brokers, "rebalance", "Move partitions from loaded brokers to others.")
@click.option("--dry-run", is_flag=True, help="Only show which partitions would move now.")
@click.option(
    "--max-moves", type=click.IntRange(1, 1_000), help="At most this many; default: a round's limit."
)
def rebalance(broker: Broker, dry_run: bool, max_moves: int | None) -> Any:
    """Start a round of moves at the leader, in the background; print the moves that it would make now."""
    found = broker.admin.cluster("rebalance", dry_run=dry_run, max_moves=max_moves or 0)
    if broker.output == "json":
        return found
    show(found["moves"], broker.output, MOVE_COLUMNS)
    if not found["moves"]:
        note(
            f"nothing to move: the deviation is {100 * found['coefficient_of_variation']:.0f} % of the mean,"
            f" moves begin above {100 * found['threshold']:.0f} %"
        )
    elif found["started"]:
        note("the leader does this in the background; `danube brokers balance` shows how far it is")
    return None
