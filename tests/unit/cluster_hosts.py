"""Hosts of a cluster with their own disks and one store, as far as one partition is concerned.

The metadata is a few fields with the rules of :mod:`danube.core.cluster.ownership`; logs, uploaders,
inheritance and the return of tails are the real ones.  What was given and acknowledged is remembered here.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from danube.broker.mover.copies import put_cursors
from danube.broker.mover.returning import Memory, Outcome, asides, give_back, newest_manifest
from danube.broker.tiers.inheritance import Heir, Inherited, inherit, set_aside
from danube.core.batch.format import read_header
from danube.core.cluster.commands import Reservation
from danube.core.dispatch.cursor import CursorState
from danube.core.dispatch.grants import Mode
from danube.core.dispatch.holed import HoledSubscription
from danube.core.partition.policy import FailurePolicy
from danube.core.placement.recovered import LOG_EPOCHS
from danube.wal.log.cursors import CursorStore
from danube.wal.log.log import Log
from danube.wal.segments.holes import HoleKind
from danube.wal.segments.reading import Chunk
from danube.wal.segments.segment import HEADER_BYTES, file_name
from danube.wal.tier.hole_changes import giving_up
from danube.wal.tier.keys import segment_key
from danube.wal.tier.manifest import Manifest
from danube.wal.tier.returned import take_returned
from danube.wal.tier.sealed_files import LocalListing
from danube.wal.tier.uploader import Ownership, Uploader, adding
from tests.unit.faulty_store import TOPIC, FaultyStore
from tests.unit.wal_samples import IDENTITY, SMALL, append, records_in, roll, sync

NOW_US = 1 << 50
STEP = 40
SUBSCRIPTION = "s"


class Cluster:
    """What all hosts know: the store and the metadata of one partition; and what the test knows."""

    def __init__(self) -> None:
        self.store = FaultyStore()
        self.epoch = 0
        self.owner: Host | None = None
        self.reservation = Reservation(*IDENTITY, 0, 0, 0)
        self.given: dict[int, bytes] = {}  # acknowledged
        self.acked: set[int] = set()

    @property
    def manifest(self) -> Manifest | None:
        return newest_manifest(self.store.memory, IDENTITY)

    def holes(self) -> list[tuple[int, int, str]]:
        manifest = self.manifest
        found = manifest.all_holes() if manifest is not None else []
        return [(hole.start, hole.end, hole.kind.name.lower()) for hole in found]


class Host:
    """One broker with its disk."""

    def __init__(self, cluster: Cluster, broker_id: int, data_dir: Path) -> None:
        self.cluster = cluster
        self.broker_id = broker_id
        self.data_dir = data_dir
        self.directory = data_dir / "partitions" / IDENTITY.directory_name
        self.epoch = 0
        self.incarnation = 1
        self.lost_before = 0  # see Heir
        self.log: Log | None = None
        self.uploader: Uploader | None = None
        self.subscription: HoledSubscription | None = None
        self.cursors: CursorStore | None = None
        self.inherited: Inherited | None = None
        self.memories: dict[str, Memory] = {}
        self._known: Manifest | None = None

    # -- owning -----------------------------------------------------------------------------------

    def take(self) -> Host:
        """Become the owner, with an epoch of its own; nobody is, or this host."""
        assert self.cluster.owner in (None, self)
        self.crash()
        self.cluster.epoch += 1
        self.epoch = self.cluster.epoch
        self.cluster.owner = self
        return self

    def open(self) -> Inherited:
        """What the mover and then the worker do."""
        cluster = self.cluster
        owner = Ownership(TOPIC, IDENTITY, self.epoch * LOG_EPOCHS, self.directory)
        heir = Heir(
            owner, self.broker_id, self.epoch, cluster.reservation, self.incarnation, self.lost_before
        )
        self.inherited = inherit(cluster.store, heir, self.data_dir, NOW_US)
        self.log = Log.open(self.directory, IDENTITY, owner.epoch, SMALL)
        self.cursors = CursorStore(self.directory, IDENTITY)
        self.uploader = Uploader(cluster.store, owner)
        self.uploader.load()
        states = self.cursors.load()
        state = CursorState.decode(states[SUBSCRIPTION]) if states else CursorState.at(Mode.SHARED, 0)
        self.subscription = HoledSubscription(
            SUBSCRIPTION, Mode.SHARED, state, max_unacked=50, failure=FailurePolicy(ack_timeout_ms=10**9)
        )
        self.subscription.join(1, "c", now_ns=0)
        self.subscription.credit(1, 10**9)
        self.reserve()
        return self.inherited

    def reserve(self) -> None:
        assert self.log is not None
        known = self.cluster.reservation
        end = max(known.end, self.log.log_end + STEP)
        assert end >= known.end and self.log.log_end >= 0
        self.cluster.reservation = Reservation(*IDENTITY, end, self.broker_id, self.epoch)

    def crash(self) -> None:
        """The process ends; the disk stays."""
        if self.log is not None:
            self.log.abandon()
        if self.cursors is not None:
            self.cursors.close()
        self.log = self.uploader = self.subscription = self.cursors = None
        if self.cluster.owner is self:
            self.cluster.owner = None

    def cut_power(self, lost_from: int) -> None:
        """The machine ends: the log has lost its records from this offset on, and the next start knows."""
        assert self.log is not None and self.log.active is not None
        path = self.directory / self.log.active.name
        self.crash()
        data, position = path.read_bytes(), HEADER_BYTES
        while data[position : position + 4] == b"DNB1":
            header = read_header(data, position)
            if header.base_offset >= lost_from:
                break
            position += header.size
        path.write_bytes(data[:position])
        (self.directory / "mark").unlink()
        self.incarnation += 1
        self.lost_before = self.incarnation

    def restart(self) -> None:
        """It is there again and owns nothing: what it has of the partition is to come back."""
        self.memories.clear()
        if self.log is None and self.cluster.owner is not self:
            set_aside(self.directory, self.data_dir)

    def release(self) -> None:
        """Give the partition away with everything in the store."""
        assert self.log is not None
        self.upload()
        self.copy_cursors()
        log_end = self.log.log_end
        assert self.cluster.reservation.epoch == self.epoch and log_end <= self.cluster.reservation.end
        self.cluster.reservation = Reservation(*IDENTITY, log_end, self.broker_id, self.epoch, True)
        self.crash()

    # -- records ----------------------------------------------------------------------------------

    def publish(self, *payloads: bytes) -> None:
        """Append and acknowledge."""
        log = self.log
        assert log is not None
        if log.log_end + len(payloads) > self.cluster.reservation.end:
            self.reserve()
        base = log.log_end
        append(log, *payloads)
        log.write()
        sync(log)
        for offset, payload in enumerate(payloads, base):
            assert offset not in self.cluster.given, f"offset {offset} was given twice"
            self.cluster.given[offset] = payload

    def seal(self) -> None:
        assert self.log is not None
        if self.log.active is not None and self.log.active.batch_count:
            roll(self.log, b"")

    def upload(self) -> None:
        """Seal, upload and name everything."""
        self.seal()
        assert self.uploader is not None
        for segment in LocalListing(self.directory).refresh():
            if segment.sealed and segment.end_offset > self.uploader.manifest.uploaded_end:
                entry = self.uploader.upload(self.directory / file_name(segment.base_offset), resumed=True)
                if entry is not None:
                    self.uploader.install(adding([entry]))

    def evict(self) -> None:
        assert self.log is not None and self.uploader is not None
        self.log.evict(self.uploader.manifest.uploaded_end)

    # -- what comes back ----------------------------------------------------------------------------

    def bring_back(self) -> list[Outcome]:
        """A round at a host whose disk is back."""
        return [
            give_back(self.cluster.store, aside, self.memories.setdefault(aside.directory.name, Memory()))
            for aside in asides(self.data_dir)
        ]

    def take_back(self) -> bool:
        """A round at the owner."""
        assert self.uploader is not None
        return take_returned(self.uploader, self.data_dir / "work", NOW_US)

    def accept_loss(self) -> None:
        assert self.uploader is not None
        self.uploader.install(giving_up(self.uploader.manifest.uploaded_end, NOW_US))

    # -- reading ------------------------------------------------------------------------------------

    def read(self, offset: int) -> Chunk:
        """As the partition's tier and its log do."""
        assert self.log is not None and self.uploader is not None
        if offset >= self.log.start:
            return self.log.read(offset, self.log.written_end)
        manifest = self.uploader.manifest
        number = manifest.find(offset)
        if number < len(manifest) and manifest.entry(number).base_offset <= offset:
            entry = manifest.entry(number)
            data = self.cluster.store.memory.get(segment_key(IDENTITY, entry))[HEADER_BYTES : entry.data_end]
            return Chunk(data, entry.base_offset, entry.end_offset)
        hole = manifest.hole_at(offset)
        assert hole is not None, f"offset {offset} is nowhere"
        return Chunk(b"", offset, hole.end, hole=hole.kind)

    def records(self) -> dict[int, bytes]:
        """All that can be read now."""
        assert self.log is not None
        found: dict[int, bytes] = {}
        offset = 0
        while offset < self.log.written_end:
            chunk = self.read(offset)
            assert not chunk.damage and chunk.next_offset > offset
            found |= dict(records_in(chunk.data))
            offset = chunk.next_offset
        return found

    # -- consuming ----------------------------------------------------------------------------------

    def follow_holes(self) -> None:
        """The owner's mover told of another manifest."""
        assert self.uploader is not None and self.subscription is not None
        manifest = self.uploader.manifest
        if self._known is manifest:
            return
        self._known = manifest
        of_kind = [
            np.array([hole[:2] for hole in manifest.all_holes() if hole.kind is kind], np.int64).reshape(
                -1, 2
            )
            for kind in HoleKind
        ]
        self.subscription.follow_holes(*of_kind)

    def deliver(self, chunks: int = 10_000) -> list[int]:
        """Grant what can be granted; offsets."""
        self.follow_holes()
        one, log = self.subscription, self.log
        assert one is not None and log is not None
        granted: list[int] = []
        while chunks and one.wants_records and one.next < log.written_end:
            chunks -= 1
            at = one.next
            chunk = self.read(at)
            if chunk.hole is HoleKind.OPEN:
                one.withhold(chunk.next_offset)
            elif chunk.hole is not None:
                one.skip_damaged(at, chunk.next_offset, why=chunk.hole.name.lower())
            else:
                for grant in one.grant(chunk.next_offset, 0):
                    offsets = grant.offsets
                    granted += range(grant.start, grant.end) if offsets is None else offsets.tolist()
            one.check()
            if one.next == at:
                break
        return granted

    def ack(self, offsets: Iterable[int]) -> None:
        assert self.subscription is not None
        for offset in offsets:
            if self.subscription.ack(1, np.array([[offset, offset + 1]], np.int64), 0).acked:
                self.cluster.acked.add(offset)
        self.subscription.check()

    def copy_cursors(self) -> None:
        assert self.subscription is not None and self.cursors is not None and self.uploader is not None
        self.cursors.store(SUBSCRIPTION, self.subscription.cursor_state().encode())
        self.cursors.write()
        job = self.cursors.sync_job()
        if job is not None:
            job.run()
        put_cursors(self.uploader, self.cursors.copy(), 0)
