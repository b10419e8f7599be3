"""A new cluster made from one data directory: after the loss of journals, or of a broker of one host.

``recover``  what a member still holds (:mod:`danube.cluster.control.survey`) is taken for decided, made safe
             (:mod:`danube.core.placement.recovered`), and is the first snapshot of a new cluster with it as
             the only voter.  That has an id of its own, so nobody who knows only the old one can take part
             in it.
``rejoin``   another member lets go of the old cluster and keeps its id and all partitions.  It has forgotten
             its votes there, so it is never part of that one again.
``adopt``    a broker that was alone becomes the first and only voter of a new cluster, with the machine that
             its caller has made of its metadata (:mod:`danube.broker.clustered.adopting`).

All three are for a stopped broker.  They write a plan, the point of no return, and then carry it out in
steps:

    recovering/raft      the new journal, whole, before there is a plan
    recovering/plan      what is to be done; whoever finds it goes on from where it was left
    left-<cluster id>/   what was there before, under its old names; nothing of it is ever removed
    left-alone/          the same of a broker that was alone

Until the last step the node does not start, because there is a plan, and its journal is missing or another
cluster's.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import msgspec

from danube.cluster.control.node import JOURNAL_DIRECTORY, JOURNAL_FILE, METADATA_DIRECTORY
from danube.cluster.control.survey import Survey, check_node_file, member, read_journal, survey
from danube.cluster.log import log_file
from danube.cluster.log.node_files import (
    MEMBER,
    NODE_FILE,
    STAGING,
    NodeRecord,
    check_journal,
    load_node,
    store_node,
)
from danube.cluster.raft.disk import DirectoryDisk
from danube.cluster.raft.engine import Members
from danube.cluster.raft.journal import Base, Identity, Journal, Promise
from danube.core.metadata.machine import Metadata
from danube.core.placement.recovered import COMMANDS_AHEAD, History, recovered
from danube.errors import Damage, InvalidArgument, WrongState
from danube.host import files
from danube.host.clock import wall_us

KEPT_PREFIX: Final = "left-"
ALONE: Final = "alone"
_PLAN: Final = "plan"
_PLAN_BYTES_MAX: Final = 4_096
_STORE_FILE: Final = "store"  # which store the data directory is bound to

Rebind = Callable[[Path, str, str], None]  # data directory, new id of the cluster, former one


class Plan(msgspec.Struct, frozen=True):
    """``cluster_id``: the new one; empty for a node that rejoins.  ``kept``: name of a directory.

    ``left``: the cluster of before; empty for a broker that was alone.
    """

    node_id: str
    cluster_id: str
    left: str
    kept: str

    @property
    def command(self) -> str:
        """The one that has made the plan, and ends it."""
        if not self.left:
            return "danube cluster adopt"
        return f"danube cluster recover {'--unsafe-recover' if self.cluster_id else '--rejoin'}"


def unfinished(data_dir: Path) -> Plan | None:
    """The plan of a recovery that was cut off."""
    path = data_dir / STAGING / _PLAN
    try:
        return msgspec.json.decode(files.read_bounded(path, _PLAN_BYTES_MAX), type=Plan)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise Damage(f"{path} cannot be read", why=str(error), file=str(path)) from None


def refuse_unfinished(data_dir: Path, command: str = "") -> Plan | None:
    """Raise WrongState for a plan that was cut off, but for one of ``command``, which is returned."""
    plan = unfinished(data_dir)
    if plan is not None and plan.command != command:
        raise WrongState(
            f"{data_dir} is half changed: `{plan.command}` was begun and has not ended",
            hint=f"give `{plan.command} --data-dir {data_dir}` again",
        )
    return plan


def refuse_unsound(data_dir: Path) -> None:
    """Raise an error if a member cannot start.

    There is an unfinished plan, or the journal or ``node_id`` is missing or damaged.  A controller would fail
    in the same way, and be restarted for ever.
    """
    refuse_unfinished(data_dir)
    check_node_file(data_dir)
    directory = data_dir / JOURNAL_DIRECTORY
    prefix = read_journal(directory / JOURNAL_FILE)
    if prefix is not None and prefix.damage is not None:
        raise prefix.damage
    if (data_dir / NODE_FILE).exists():
        check_journal(load_node(data_dir), prefix is not None, directory)


def recover(data_dir: Path, rebind: Rebind, raft_addr: str = "") -> Plan:
    """Make this node the only voter of a new cluster.  ``rebind`` changes the store's binding; repeatable.

    Raises the errors of ``survey``, InvalidArgument without an address, Damage if nothing is intact.
    """
    plan = refuse_unfinished(data_dir, "danube cluster recover --unsafe-recover")
    with _held(data_dir):
        if plan is None:
            plan = _begin_recovery(data_dir, survey(data_dir), raft_addr)
        _finish_recovery(data_dir, plan, rebind)
    return plan


def rejoin(data_dir: Path) -> Plan:
    """Let go of the cluster that this node is part of; partitions stay.  Raises NotFound, WrongState."""
    plan = refuse_unfinished(data_dir, "danube cluster recover --rejoin")
    with _held(data_dir):
        if plan is None:
            node = member(data_dir)
            plan = Plan(node.node_id, "", node.cluster_id, _free_name(data_dir, node.cluster_id))
            _store_plan(data_dir, plan)
        _finish_rejoin(data_dir, plan)
    return plan


def adopt(data_dir: Path, state: Metadata, raft_addr: str, rebind: Rebind) -> Plan:
    """Make this node, which never was a member, the only voter of a new cluster that has ``state``."""
    node, agreement = load_node(data_dir), state.cluster.agreement
    plan = Plan(node.node_id, secrets.token_hex(8), "", _free_name(data_dir, ALONE))
    base = Base(
        agreement.index, agreement.term, agreement.index, agreement.term,
        Members({node.node_id: raft_addr}), 0,
    )  # fmt: skip
    with _held(data_dir):
        _stage(data_dir, plan, base, state)
        _finish_recovery(data_dir, plan, rebind)
    return plan


def finish_adoption(data_dir: Path, rebind: Rebind) -> Plan | None:
    """End one that was cut off behind its plan; None if there is none.  WrongState for another plan."""
    plan = refuse_unfinished(data_dir, "danube cluster adopt")
    if plan is not None:
        with _held(data_dir):
            _finish_recovery(data_dir, plan, rebind)
    return plan


# -- recover --------------------------------------------------------------------------------------


def _begin_recovery(data_dir: Path, found: Survey, raft_addr: str) -> Plan:
    address = raft_addr or found.address
    if found.state is None:
        raise Damage(
            f"nothing of {data_dir} can be recovered", why=found.why, hint="recover another member",
            file=str(data_dir / JOURNAL_DIRECTORY / JOURNAL_FILE),
        )  # fmt: skip
    if not address:
        raise InvalidArgument(
            "it is not known where this member is reached",
            why="the journal does not say so any more",
            hint="give --raft-addr HOST:PORT",
        )
    node = found.node
    plan = Plan(node.node_id, secrets.token_hex(8), node.cluster_id, _free_name(data_dir, node.cluster_id))
    history = History(plan.cluster_id, wall_us(), why="the cluster was recovered from one member")
    state, index, term = _first_state(found.state, history, found.index, found.term)
    base = Base(index, term, index, term, Members({node.node_id: address}), 0)
    _stage(data_dir, plan, base, state)
    return plan


def _stage(data_dir: Path, plan: Plan, base: Base, state: Metadata) -> None:
    """Write the journal of the new cluster, whole, and then the plan."""
    staging = data_dir / STAGING
    shutil.rmtree(staging, ignore_errors=True)  # of an attempt that came to no plan
    _write_journal(staging / JOURNAL_DIRECTORY, Identity(plan.cluster_id, plan.node_id), base, state)
    _store_plan(data_dir, plan)


def _first_state(state: Metadata, history: History, index: int, term: int) -> tuple[Metadata, int, int]:
    """The machine that the new cluster begins with, and the entry that it stands for."""
    after = recovered(state, history)
    agreement = after.cluster.agreement
    index, term = index + COMMANDS_AHEAD, term + 1
    agreement.load(index, term, agreement.now_us, agreement.origins())
    return after, index, term


def _write_journal(directory: Path, identity: Identity, base: Base, state: Metadata) -> None:
    journal = Journal(DirectoryDisk(directory))
    try:
        journal.create(identity, base.members)
        journal.complete(journal.stage(base, state.snapshot()), Promise(base.term, None), [])
    finally:
        journal.close()


def _finish_recovery(data_dir: Path, plan: Plan, rebind: Rebind) -> None:
    made = data_dir / STAGING / JOURNAL_DIRECTORY
    if made.exists():
        _keep(data_dir, plan, METADATA_DIRECTORY)
        store_node(data_dir, NodeRecord(plan.node_id, plan.cluster_id, MEMBER, load_node(data_dir).left))
        rebind(data_dir, plan.cluster_id, plan.left)
        _keep(data_dir, plan, JOURNAL_DIRECTORY)
        files.rename(made, data_dir / JOURNAL_DIRECTORY)
        files.fsync_directory(data_dir)
    _end(data_dir)


# -- rejoin ---------------------------------------------------------------------------------------


def _finish_rejoin(data_dir: Path, plan: Plan) -> None:
    node = load_node(data_dir)
    if node.cluster_id == plan.left:
        for name in (METADATA_DIRECTORY, _STORE_FILE, JOURNAL_DIRECTORY):
            _keep(data_dir, plan, name)
        store_node(data_dir, NodeRecord(node.node_id, left=(*node.left, plan.left)))
    _end(data_dir)


# -- steps ----------------------------------------------------------------------------------------


def _free_name(data_dir: Path, cluster_id: str) -> str:
    name, number = f"{KEPT_PREFIX}{cluster_id}", 0
    while (data_dir / name).exists():
        number += 1
        name = f"{KEPT_PREFIX}{cluster_id}-{number}"
    return name


def _store_plan(data_dir: Path, plan: Plan) -> None:
    files.make_directory(data_dir / STAGING)
    files.replace_durably(data_dir / STAGING / _PLAN, msgspec.json.encode(plan) + b"\n")


def _keep(data_dir: Path, plan: Plan, name: str) -> None:
    """Move one of the old files or directories aside, if it was not moved before."""
    if not (data_dir / name).exists():
        return
    kept, number = data_dir / plan.kept, 0
    files.make_directory(kept)
    target = kept / name
    while target.exists():  # a start in between has made it anew
        number += 1
        target = kept / f"{name}-{number}"
    files.rename(data_dir / name, target)
    files.fsync_directory(kept)
    files.fsync_directory(data_dir)


def _end(data_dir: Path) -> None:
    files.unlink(data_dir / STAGING / _PLAN)
    shutil.rmtree(data_dir / STAGING, ignore_errors=True)


@contextmanager
def _held(data_dir: Path) -> Iterator[None]:
    """Hold the lock of the journal's directory, where there is one: a member that runs is refused."""
    directory = data_dir / JOURNAL_DIRECTORY
    with log_file.storage_errors(str(data_dir)), ExitStack() as held:
        if directory.is_dir():
            held.callback(DirectoryDisk(directory).close)
        yield
