"""Move of a partition to another broker: it is released only when another broker can read all of it.

    upload    written records go to the store, while the partition is still served
    drain     no request is accepted and no record delivered; accepted requests are answered
    store     the last records and the cursors go to the store; if that takes long, back to upload
    release   the cluster gets the release, with the epoch

A non-reliable partition has no records to store.  A partition without a store is not moved.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Final, Protocol

from danube.errors import DanubeError
from danube.host import telemetry

if TYPE_CHECKING:
    from danube.broker.clustered.owning import Place
    from danube.broker.partition.hosted import HostedPartition, HostedTier
    from danube.broker.shard.storage import Storage
    from danube.broker.tiers.worker_tiers import Tiers
    from danube.core.cluster.commands import Ownership

MS_NS: Final = 1_000_000
ACKS_NS: Final = 100 * MS_NS  # for acks of delivered records
DRAIN_NS: Final = 2_000 * MS_NS  # limit for the disk
STORE_NS: Final = 10_000 * MS_NS  # limit for the store; then the partition is served until it answers
RETRY_NS: Final = 200 * MS_NS

_log = telemetry.events("leaving")


class Step(Enum):
    UPLOAD = "upload"
    DRAIN = "drain"
    STORE = "store"
    RELEASE = "release"


class Giver(Protocol):
    """Members of the shard that Leaving uses."""

    storage: Storage
    tiers: Tiers | None

    def silence(self, hosted: HostedPartition) -> None: ...
    def serve_on(self, hosted: HostedPartition) -> None: ...
    def keep(self, place: Place) -> None: ...
    def release(
        self, hosted: HostedPartition, record: Ownership, then: Callable[[DanubeError | None], None]
    ) -> None: ...


class Leaving:
    """State of one move; :meth:`step` is called many times a second."""

    def __init__(self, hosted: HostedPartition, record: Ownership, giver: Giver) -> None:
        self.hosted = hosted
        self.given_away = False  # the release was proposed: another broker may own it at any moment
        self._record = record
        self._giver = giver
        self._step = Step.UPLOAD
        self._sealed_end = -1  # asked for, not sealed yet: None
        self._sealing = False
        self._silent_ns = 0
        self._retry_ns = 0
        self._leave_id = 0
        self._left_version = -1  # version of the cursors that were sent to the mover

    def step(self, now_ns: int) -> None:
        """Check which steps are done, and begin the next one."""
        if now_ns < self._retry_ns:
            return
        try:
            self._advance(now_ns)
        except DanubeError as error:  # the disk fails: storage reopens the log
            _log.limited("a partition cannot leave yet", source=self.hosted.name, why=str(error))
            self._retry_ns = now_ns + RETRY_NS

    def _advance(self, now_ns: int) -> None:
        hosted = self.hosted
        if self._step is Step.UPLOAD:
            if hosted.log is not None and hosted.tier is None:
                self._giver.keep((hosted.topic_id, hosted.index))
                return
            if not (self._uploaded(hosted.core.written_end) and self._heard()):
                return
            self._silent_ns = now_ns
            self._step = Step.DRAIN
        if self._step is Step.DRAIN:
            self._giver.silence(hosted)  # again, because a reopened log accepts records
            if not self._drained(now_ns):
                return
            self._sealed_end = -1
            self._step = Step.STORE
            _log.debug("drained", partition=hosted.name, drain_ms=(now_ns - self._silent_ns) // MS_NS)
        if self._step is Step.STORE:
            self._giver.silence(hosted)
            if not (self._uploaded(hosted.core.log_end) and self._cursors_kept()):
                self._serve_on_after(now_ns - self._silent_ns)
                return
            self._step = Step.RELEASE
        if not self.given_away:
            self.given_away = True
            silent_ms = (now_ns - self._silent_ns) // MS_NS
            _log.info("partition given away", partition=hosted.name, silent_ms=silent_ms)
            self._retry_ns = now_ns + RETRY_NS
            self._giver.release(hosted, self._record, self._released)

    def _serve_on_after(self, waited_ns: int) -> None:
        """Serve the partition again if the store fails, so that its clients keep their access."""
        if waited_ns >= STORE_NS:
            _log.warning("the store takes too long: served on", partition=self.hosted.name)
            self._sealed_end = self._left_version = -1
            self._step = Step.UPLOAD
            self._giver.serve_on(self.hosted)

    def _drained(self, now_ns: int) -> bool:
        hosted = self.hosted
        waited_ns = now_ns - self._silent_ns
        if hosted.waiting and waited_ns < DRAIN_NS:
            return False
        in_flight = any(host.core.in_flight_count for host in hosted.subscriptions.values())
        return not in_flight or waited_ns >= ACKS_NS

    def _uploaded(self, end: int) -> bool:
        """Return whether all below ``end`` is in the store; request the upload of the rest."""
        tier = self.hosted.tier
        if tier is None:
            return True
        if self._sealed_end < 0:
            if not self._sealing:
                self._seal()
            return False
        if self._left_version < 0:
            self._leave(tier)
        if self._sealed_end < end and self._step is Step.STORE:
            self._sealed_end = -1
            return False
        return tier.uploaded_end >= self._sealed_end

    def _seal(self) -> None:
        self._sealing = True
        try:
            self._giver.storage.seal(self.hosted, self._sealed)
        except DanubeError:  # the log is being reopened, and no callback follows: the next step tries again
            self._sealing = False
            raise

    def _sealed(self, end: int | DanubeError) -> None:
        self._sealing = False
        if isinstance(end, DanubeError):
            _log.limited("a partition cannot be sealed", source=self.hosted.name, why=str(end))
            return
        self._sealed_end = end
        if self._giver.tiers is not None and self.hosted.tier is not None:
            self._giver.tiers.sealed(self.hosted)

    def _cursors_kept(self) -> bool:
        """Return whether the store has the current cursors; request their copy once."""
        hosted, tier, tiers = self.hosted, self.hosted.tier, self._giver.tiers
        if tier is None or tiers is None or hosted.cursors is None:
            return True
        if hosted.store_cursors():
            self._giver.storage.cursors_written(hosted)
        if self._left_version != hosted.cursors.version:
            self._leave(tier)
        return self._heard()

    def _heard(self) -> bool:
        """Return whether the store has the cursors that were sent last, which shows that it answers."""
        tier = self.hosted.tier
        return tier is None or tier.left_id == self._leave_id

    def _leave(self, tier: HostedTier) -> None:
        """Have the mover upload all of the partition first, and report when it has stored these cursors."""
        tiers, cursors = self._giver.tiers, self.hosted.cursors
        if tiers is not None and cursors is not None:
            self._left_version = cursors.version
            self._leave_id = tiers.leave(tier)

    def _released(self, error: DanubeError | None) -> None:
        if error is not None:
            _log.limited("a partition was not released", source=self.hosted.name, why=str(error))
            self.given_away = False
