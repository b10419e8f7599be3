"""The mover's part in a cluster: a store that its brokers share, and partitions that change their owner."""

from __future__ import annotations

import uuid
from functools import partial
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING, Any, Final

from danube.broker.mover.owner_link import OwnerLink, told
from danube.broker.tiers.inheritance import Heir, inherit
from danube.cluster.log.node_files import NODE_FILE, load_node
from danube.core.cluster.commands import Reservation
from danube.errors import DanubeError, StoreUnavailable
from danube.host import clock
from danube.wal.segments.segment import NO_LOG, LogIdentity
from danube.wal.stores.objects import ObjectStore
from danube.wal.tier.binding import share, take_over
from danube.wal.tier.uploader import Ownership

if TYPE_CHECKING:
    from danube.broker.links import Frame
    from danube.broker.mover.copies import Job, Mover


FORMING_NS: Final = 3_000_000_000
FORMING_POLL_S: Final = 0.05


class ClaimedPartitions:
    """Makes partitions' directories ready for this broker; see danube.broker.tiers.inheritance."""

    def __init__(self, mover: Mover, data_dir: Path) -> None:
        self._mover = mover
        self._data_dir = data_dir
        self.busy: set[LogIdentity] = set()  # partitions whose directories are being prepared

    def begin(self, link: OwnerLink, frame: Frame) -> None:
        """Prepare a partition's directory; answer ``inherited``, with the error if that fails."""
        heir = heir_of(frame)
        identity = heir.owner.identity
        why = self._mover.retire_earlier(identity)
        if identity in self.busy:
            why = "what was begun for an earlier owner has not ended"
        if why:
            _answer(link, frame, StoreUnavailable("the partition cannot be taken over yet", why=why))
            return
        self.busy.add(identity)

        def ended(_: Any, error: DanubeError | None) -> None:
            self.busy.discard(identity)
            _answer(link, frame, error)

        self._mover.block(partial(inherit, self._mover.store, heir, self._data_dir, clock.wall_us()), ended)


def ownership_of(frame: Frame) -> Ownership:
    """Return the ownership of the log that a frame is about."""
    identity = LogIdentity(frame["topic_id"], frame["partition"])
    place, log_id = Path(frame["directory"]), frame.get("log_id", NO_LOG)
    return Ownership(frame["topic"], identity, frame["epoch"], place, log_id)


def heir_of(frame: Frame) -> Heir:
    """Return the broker that is to own the partition, as its worker states it in the frame."""
    owner = ownership_of(frame)
    reservation = Reservation(
        *owner.identity, frame["reserved_end"], frame["reserved_broker_id"], frame["reserved_epoch"],
        frame["closed"],
    )  # fmt: skip
    return Heir(
        owner,
        frame["broker_id"],
        frame["owner_epoch"],
        reservation,
        frame["incarnation"],
        frame["lost_before"],
    )


def _answer(link: OwnerLink, frame: Frame, error: DanubeError | None) -> None:
    link.send("inherited", id=frame["id"], **told(error))


def claim_of(store: ObjectStore, data_dir: Path, *, clustered: bool) -> Job:
    """Return the job that proves, before any use, that the store is this broker's or its cluster's."""
    if clustered:
        return partial(_share_store, store, data_dir)
    return partial(take_over, store, data_dir, uuid.uuid4().hex)


def _share_store(store: ObjectStore, data_dir: Path) -> None:
    """Bind to the store of this cluster; raises while this node is part of none."""
    end_ns = clock.monotonic_ns() + FORMING_NS
    while not (cluster_id := _cluster_id(data_dir)) and clock.monotonic_ns() < end_ns:
        sleep(FORMING_POLL_S)  # the controller starts at the same time
    if not cluster_id:
        raise StoreUnavailable("the store is not used yet", why="this broker is part of no cluster yet")
    share(store, data_dir, cluster_id)


def _cluster_id(data_dir: Path) -> str:
    """Return the cluster's id; empty while the controller has made or joined none."""
    return load_node(data_dir).cluster_id if (data_dir / NODE_FILE).exists() else ""
