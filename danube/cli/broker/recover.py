"""``danube cluster recover``: go on after a majority of the journals is gone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from danube.cli.broker.here import Here, config_file_option, data_dir_option, pass_here
from danube.cli.terminal.output import note, output_option, plain, show
from danube.errors import InvalidArgument

if TYPE_CHECKING:
    from danube.cluster.control.recovery import Plan


@click.command(short_help="Recover after the loss of most journals.")
@data_dir_option("Data directory of a stopped broker.")
@click.option("--unsafe-recover", is_flag=True, help="Make this node the only voter of a new cluster.")
@click.option("--rejoin", is_flag=True, help="Leave the old cluster, to join the new one.")
@click.option("--raft-addr", default="", metavar="HOST:PORT", help="Needed if the journal lacks it.")
@config_file_option
@output_option()
@pass_here
def recover(here: Here, unsafe_recover: bool, rejoin: bool, raft_addr: str) -> None:
    """Without a flag: show the content of this node's journal, change nothing, and exit with code 2.

    \b
    danube cluster recover --data-dir DIR                     on every node: compare last_term, last_index
    danube cluster recover --data-dir DIR --unsafe-recover    on the node with the most
    danube cluster recover --data-dir DIR --rejoin            on all others; then start them with --join

    Agreed changes that are not in the journal of that node are lost: topics, policies, schemas, rights.
    Records are not lost, and no id or offset is given twice.  Old files are kept below left-<cluster id>.
    """
    from danube.cluster.control.recovery import rejoin as let_go
    from danube.cluster.control.survey import member
    from danube.cluster.links.addresses import split_address

    if unsafe_recover and rejoin:
        raise InvalidArgument("--unsafe-recover and --rejoin are for different nodes", hint="give one")
    if raft_addr:
        split_address(raft_addr)
    place = here.data_dir
    if not (place / "recovering").exists():
        member(place)
    with _stopped(place):
        if unsafe_recover:
            _recover(place, raft_addr, here.output)
        elif rejoin:
            _show(place, let_go(place), here.output)
            note("start it with --join HOST:PORT, or --seed-nodes as before")
        else:
            _look(place, here.output)


def _recover(place: Path, raft_addr: str, output: str) -> None:
    from danube.cluster.control import recovery
    from danube.wal.tier.binding import rebind

    _show(place, recovery.recover(place, rebind, raft_addr), output)
    note("start it as before; then let the other nodes rejoin")


def _show(place: Path, plan: Plan, output: str) -> None:
    show({**plain(plan), "kept": str(place / plan.kept)}, output)


def _look(place: Path, output: str) -> None:
    """Show the content of the journal, and that nothing was changed."""
    from danube.cluster.control.recovery import unfinished
    from danube.cluster.control.survey import survey

    plan = unfinished(place)
    if plan is not None:
        raise InvalidArgument(f"`{plan.command}` was begun here and has not ended", hint="give it again")
    found = survey(place)
    told: dict[str, Any] = {**found.told(), "why_not": found.why}
    show(told, output)
    if found.state is None:
        raise InvalidArgument("this node cannot be recovered", why=found.why, hint="recover another one")
    raise InvalidArgument(
        "nothing was changed",
        why="what other nodes agreed on behind this is lost when this one is recovered",
        hint="give --unsafe-recover on the node with the highest last_term, then last_index",
    )


@contextmanager
def _stopped(place: Path) -> Iterator[None]:
    """Hold the lock of a broker's data directory; raises AlreadyRunning."""
    from danube.broker.processes.data_dir import DataDir

    held = DataDir(place)
    try:
        yield
    finally:
        held.close()
