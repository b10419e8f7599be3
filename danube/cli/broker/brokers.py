"""``danube brokers``: which brokers a cluster has, emptying them, and how evenly they are loaded."""

from __future__ import annotations

from time import sleep
from typing import Any, Final

import click

from danube.cli.terminal import arguments
from danube.cli.terminal.addressing import Address, address_option, explaining
from danube.cli.terminal.confirming import confirm, yes_option
from danube.cli.terminal.lazy import LazyGroup
from danube.cli.terminal.output import note, output_option, show
from danube.cli.terminal.services import Services
from danube.errors import OperationTimeout
from danube.host.clock import monotonic_ns

COLUMNS = ("broker_id", "role", "mode", "alive", "native_address", "partitions", "version", "reason")
BALANCE_COLUMNS = ("broker_id", "load", "partitions", "overloaded", "underloaded")
MOVE_COLUMNS = ("partition", "from_broker", "to_broker", "load", "reason")
_POLL_S: Final = 0.2
_broker_argument = click.argument("broker_id", metavar="BROKER_ID")


@click.group(cls=LazyGroup, aliases={"ls": "list"})
def brokers() -> None:
    """Show the brokers of a cluster, empty them, and spread partitions over them.  Ask any broker.

    \b
    danube brokers list
    danube brokers unload 4000974598167414716 --wait
    danube brokers rebalance --dry-run
    """


@brokers.command("list", short_help="List the brokers.")
@address_option()
@output_option()
@click.pass_obj
def list_brokers(services: Services, /, service_addr: Address, output: str) -> None:
    """Modes: active brokers take partitions, draining ones are being emptied, drained ones are."""
    show(_ask(services, service_addr, "brokers"), output, COLUMNS)


@brokers.command("leader", short_help="Show the broker that decides.")
@address_option()
@output_option()
@click.pass_obj
def show_deciding(services: Services, /, service_addr: Address, output: str) -> None:
    """The one whose controller leads; exit code 3 when none is known."""
    show(_ask(services, service_addr, "deciding_broker"), output)


@brokers.command("unload", short_help="Empty a broker.")
@_broker_argument
@address_option()
@click.option("--dry-run", is_flag=True, help="Only say how many partitions would go, and how many stay.")
@click.option("--namespace", "include", multiple=True, help="Only these, and the broker stays active.")
@click.option("--wait", is_flag=True, help="Until nothing more has to go.")
@click.option("--timeout", type=arguments.duration_ms, default="300s", help="How long to wait.  [300s]")
@output_option()
@click.pass_obj
def unload(
    services: Services,
    /,
    broker_id: str,
    service_addr: Address,
    dry_run: bool,
    include: tuple[str, ...],
    wait: bool,
    timeout: int,
    output: str,
) -> None:
    """Let other brokers take over all that a broker owns; it takes nothing more until it is activated.

    What is on its disk only (a reliable topic without shared storage) stays and is served on.
    """
    answer = _ask(
        services, service_addr, "unload_broker", broker_id=broker_id, dry_run=dry_run,
        namespaces_include=list(include),
    )  # fmt: skip
    if wait and answer["started"] and not include:
        _wait_drained(services, service_addr, broker_id, timeout)
    show(answer, output)


def _wait_drained(services: Services, address: Address, broker_id: str, timeout_ms: int) -> None:
    deadline_ns = monotonic_ns() + timeout_ms * 1_000_000
    while True:
        rows = {row["broker_id"]: row for row in _ask(services, address, "brokers")}
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


@brokers.command("activate", short_help="Let a broker take partitions again.")
@_broker_argument
@address_option()
@click.option("--reason", default="admin_activate", show_default=True)
@output_option()
@click.pass_obj
def activate(services: Services, /, broker_id: str, service_addr: Address, reason: str, output: str) -> None:
    """Let a broker get partitions again: new ones, and others when they are rebalanced."""
    show(_ask(services, service_addr, "activate_broker", broker_id=broker_id, reason=reason), output)


@brokers.command("forget", short_help="Forget a broker that comes back no more.")
@_broker_argument
@address_option()
@click.option(
    "--accept-loss", is_flag=True, help="Give up what only its disk holds: those partitions are empty."
)
@yes_option
@output_option()
@click.pass_obj
def forget(
    services: Services,
    /,
    broker_id: str,
    service_addr: Address,
    accept_loss: bool,
    yes: bool,
    output: str,
) -> None:
    """Only one that is dead; exit code 4 while it is there, or holds what nobody else has.

    `danube cluster remove-node` takes its vote.
    """
    if accept_loss:
        confirm(services, broker_id, f"what only the disk of broker {broker_id} holds is given up", yes)
    show(_ask(services, service_addr, "forget_broker", broker_id=broker_id, accept_loss=accept_loss), output)


@brokers.command("balance", short_help="Show how evenly the brokers are loaded.")
@address_option()
@output_option()
@click.pass_obj
def balance(services: Services, /, service_addr: Address, output: str) -> None:
    """The loads of active brokers by the configured strategy; 100 is an average one, unless that is fair."""
    found = _ask(services, service_addr, "balance")
    if output == "json":
        show(found, output)
        return
    show(found["brokers"], output, BALANCE_COLUMNS)
    note(
        f"strategy {found['strategy']}, deviation {100 * found['coefficient_of_variation']:.0f} % of the mean"
        f" (moves begin above {100 * found['threshold']:.0f} %), {found['under_way']} moves under way"
    )


@brokers.command("rebalance", short_help="Move partitions from loaded brokers to others.")
@address_option()
@click.option("--dry-run", is_flag=True, help="Only say which partitions would move now.")
@click.option("--max-moves", type=click.IntRange(1, 1_000), help="At most; by default what a round has.")
@output_option()
@click.pass_obj
def rebalance(
    services: Services, /, service_addr: Address, dry_run: bool, max_moves: int | None, output: str
) -> None:
    """The leader does one round, in the background; the moves that are shown are what it would do now."""
    found = _ask(services, service_addr, "rebalance", dry_run=dry_run, max_moves=max_moves or 0)
    if output == "json":
        show(found, output)
        return
    show(found["moves"], output, MOVE_COLUMNS)
    if not found["moves"]:
        note(
            f"nothing to move: the deviation is {100 * found['coefficient_of_variation']:.0f} % of the mean,"
            f" moves begin above {100 * found['threshold']:.0f} %"
        )
    elif found["started"]:
        note("the leader does this in the background; `danube brokers balance` shows how far it is")


def _ask(services: Services, address: Address, op: str, **arguments_: Any) -> Any:
    with explaining(address), services.connect(address.url) as client:
        return client.admin.cluster(op, **arguments_)
