"""Tiered storage of a worker: reports sealed segments to the mover, applies its answers.

All reports are repeated on a new connection to the mover, so a restarted mover or a lost frame only causes a
delay.

Requests about staged objects go from a client through the partition's owner to the mover.  The owner adds its
epoch, and repeats them on a new connection until a time limit.  Repeating a request changes nothing, so the
client sends it again if the answer was lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from danube.broker.partition.hosted import HostedPartition, HostedTier
from danube.broker.partition.tier import NO_COMPACTION
from danube.broker.tiers.retention import LocalRetention, evictable_end, expired_end
from danube.errors import (
    DanubeError,
    FetchPending,
    Overloaded,
    StoreUnavailable,
    Unavailable,
    WrongState,
    error_for_code,
)
from danube.host import clock, telemetry
from danube.wal.cold.cache import ColdCache, Fetch
from danube.wal.segments.segment import LogIdentity

if TYPE_CHECKING:
    from danube.broker.links import LinkClient
    from danube.core.metadata.commands import TopicRecord


ASKED_MAX: Final = 64
PATIENCE_NS: Final = 10_000_000_000

Answer = Callable[[Any], None]
"""Takes a list of [word, why], or the DanubeError that stands for it."""


class _Asked(NamedTuple):
    hosted: HostedPartition
    objects: bytes
    answer: Answer
    deadline_ns: int


class StagedQuestions:
    """A worker's open requests about staged objects.

    ``send(kind, **fields)`` writes to the mover, or does nothing without a connection.
    """

    def __init__(self, send: Callable[..., None]) -> None:
        self._send = send
        self._asked: dict[int, _Asked] = {}
        self._number = 0

    def ask(self, hosted: HostedPartition, topic_id: int, objects: bytes, answer: Answer) -> None:
        """Request verdicts on ``objects``; raises WrongState, or Overloaded with too many open requests."""
        if topic_id != hosted.topic_id:
            raise WrongState(
                f"{hosted.record.topic} is another topic than the objects are of",
                why="it was deleted and made again",
                hint="they are swept away after a while",
            )
        if len(self._asked) >= ASKED_MAX:
            raise Overloaded("too many questions about staged objects are open", limit=ASKED_MAX)
        self._number += 1
        asked = _Asked(hosted, objects, answer, clock.monotonic_ns() + PATIENCE_NS)
        self._asked[self._number] = asked
        self._say(self._number, asked)

    def _say(self, number: int, asked: _Asked) -> None:
        hosted = asked.hosted
        self._send(
            "staged", id=number, topic_id=hosted.topic_id, partition=hosted.index,
            epoch=hosted.core.epoch, objects=asked.objects,
        )  # fmt: skip

    def resend(self) -> None:
        """Send all open requests again, on a new connection to the mover."""
        for number, asked in self._asked.items():
            self._say(number, asked)

    def answered(self, frame: Mapping[str, Any]) -> None:
        """Answer a request with the mover's ``judged`` frame."""
        asked = self._asked.pop(frame["id"], None)
        if asked is None:
            return
        if frame["error"]:
            asked.answer(error_for_code(frame.get("code", Unavailable.code), frame["error"]))
        else:
            asked.answer(msgspec.msgpack.decode(frame["answers"]))

    def tick(self, now_ns: int) -> None:
        """End requests that have waited too long."""
        late = [number for number, asked in self._asked.items() if asked.deadline_ns <= now_ns]
        for number in late:
            error = Unavailable("the mover does not answer", why="it is starting, or busy", hint="ask again")
            self._asked.pop(number).answer(error)


_log = telemetry.events("tiers")
CURSORS_INTERVAL_NS: Final = 5_000_000_000
METADATA_INTERVAL_NS: Final = 2_000_000_000
DELETED_REMEMBERED_MAX: Final = 10_000
_UNHEARD: Final[dict[str, Any]] = {"name": "", "answers": None, "error": "", "hint": ""}


class TierOptions(NamedTuple):
    """Options of the section ``storage``."""

    seal_after_ms: int = 60_000
    local_retention: LocalRetention = LocalRetention()
    cache_bytes: int = 1 << 28


class _Waiter(NamedTuple):
    pending: FetchPending
    deadline_ns: int
    again: Callable[[], None]


Snapshot = Callable[[], tuple[int, Callable[[], bytes]]]
Connect = Callable[[Callable[[], None], Callable[[Any], None]], "LinkClient"]


class Tiers:
    """Tiered storage of one worker; all methods run on its loop.

    ``wake`` schedules a partition's subscriptions, ``roll`` ends its active segment, and ``metadata`` gives
    the version of the metadata and a function for its snapshot (None: another worker keeps the copies).
    ``connect`` makes the link to the mover; its arguments are called on a new connection and with each frame.
    """

    def __init__(
        self,
        directory: Path,
        options: TierOptions,
        *,
        wake: Callable[[HostedPartition], None],
        roll: Callable[[HostedPartition], None],
        connect: Connect,
        metadata: Snapshot | None = None,
    ) -> None:
        self.options = options
        self.link: LinkClient | None = connect(self.on_connected, self.on_frame)
        self.staged = StagedQuestions(self._reach)
        self.cache = ColdCache(directory, options.cache_bytes, self._fetch, self._changed, self._ready)
        self._wake = wake
        self._roll = roll
        self._metadata = metadata
        self._metadata_sent = -1
        self._metadata_ns = self._cursors_ns = 0
        self._tiers: dict[LogIdentity, HostedTier] = {}
        self._deleted: dict[int, int] = {}  # partition counts of deleted topics, by topic id
        self._waiters: list[_Waiter] = []
        self._looked: set[HostedTier] = set()  # tiers with a new manifest: segments may be evictable
        self._store: dict[str, Any] = _UNHEARD
        self._leave_id = self._inherit_id = 0
        self._heirs: dict[int, Callable[[DanubeError | None], None]] = {}

    # -- partitions -------------------------------------------------------------------------------

    def attach(self, hosted: HostedPartition) -> None:
        """Make the tier of a partition that was opened, or whose log was opened anew with another epoch."""
        if hosted.log is None:
            return
        if hosted.tier is None:
            hosted.tier = HostedTier(hosted, self.cache)
            self._tiers[hosted.tier.identity] = hosted.tier
        self._say(hosted.tier)

    def all(self) -> list[HostedTier]:
        """Return the tiers of all partitions that this worker has open."""
        return list(self._tiers.values())

    def _say(self, tier: HostedTier) -> None:
        hosted = tier.hosted
        self._send(
            "attach", tier, topic=hosted.record.topic, epoch=hosted.core.epoch,
            directory=str(hosted.directory), log_start=tier.log.holes.start_below(tier.log.start),
            log_id=tier.log.options.log_id,
        )  # fmt: skip
        if tier.trimmed:
            self._send("trim", tier, start_offset=tier.trimmed)
        if tier.given_up_end:
            self._send("give_up", tier, end_offset=tier.given_up_end)
        tier.cursors_sent = -1
        tier.compaction_sent = NO_COMPACTION
        self._say_policy(tier)
        if tier.leave_id:
            self._say_leaving(tier)

    def _say_policy(self, tier: HostedTier) -> None:
        policy = tier.hosted.policy
        wanted = (True, policy.tombstone_retention_ms) if policy.compacts else NO_COMPACTION
        if wanted != tier.compaction_sent:
            tier.compaction_sent = wanted
            self._send("policy", tier, compacts=wanted[0], tombstone_retention_ms=wanted[1])

    def _send(self, kind: str, tier: HostedTier, **fields: Any) -> None:
        topic_id, partition = tier.identity
        self._reach(kind, topic_id=topic_id, partition=partition, **fields)

    def _reach(self, kind: str, **fields: Any) -> None:
        if self.link is not None:
            self.link.send(kind, **fields)

    def forget(self, hosted: HostedPartition) -> None:
        """Drop the tier of a partition that is no longer hosted here."""
        tier = hosted.tier
        if tier is not None and self._tiers.get(tier.identity) is tier:
            del self._tiers[tier.identity]
            self._looked.discard(tier)
            self._send("detach", tier, gone=tier.given_away)
            self.cache.forget(tier.identity)

    def delete(self, record: TopicRecord) -> None:
        """Have the mover remove the objects of a deleted topic."""
        if record.policy.reliable and len(self._deleted) < DELETED_REMEMBERED_MAX:
            self._deleted[record.topic_id] = max(1, record.partition_count)
            self._say_deleted(record.topic_id)

    def _say_deleted(self, topic_id: int) -> None:
        if self.link is not None:
            self.link.send("delete", topic_id=topic_id, partitions=self._deleted[topic_id])

    def sealed(self, hosted: HostedPartition) -> None:
        """Tell the mover that a segment was sealed."""
        if hosted.tier is not None:
            self._send("sealed", hosted.tier)

    def give_up(self, tier: HostedTier, end_offset: int) -> None:
        """Give up, by an operator's request, records in open holes that begin below ``end_offset``."""
        tier.given_up_end = max(tier.given_up_end, end_offset)
        self._send("give_up", tier, end_offset=tier.given_up_end)

    def leave(self, tier: HostedTier) -> int:
        """Have the mover upload all of a partition as soon as possible, with its current cursors.

        Returns a number.  Once ``tier.left_id`` equals it, the cursors are in the store.
        """
        self._leave_id += 1
        tier.leave_id = self._leave_id
        self._say_leaving(tier)
        return self._leave_id

    def _say_leaving(self, tier: HostedTier) -> None:
        cursors = tier.hosted.cursors
        if cursors is not None:
            tier.cursors_sent = cursors.version
            end = tier.log.log_end
            self._send("leave", tier, id=tier.leave_id, blob=cursors.copy(), end_offset=end)

    def inherit(self, fields: dict[str, Any], then: Callable[[DanubeError | None], None]) -> None:
        """Have the mover prepare a partition's directory for a new owner; ``then`` gets None or the error."""
        if self.link is None or not self.link.connected:
            then(StoreUnavailable("the partition cannot be taken over yet", why="the mover does not run"))
            return
        self._inherit_id += 1
        self._heirs[self._inherit_id] = then
        self._reach("inherit", id=self._inherit_id, **fields)

    # -- the link ---------------------------------------------------------------------------------

    def store(self) -> dict[str, Any]:
        """Return the store's condition: ``name``, ``answers`` (None: not known yet) and ``error``."""
        if self.link is None or not self.link.connected:
            return {**self._store, "answers": None, "error": "the mover does not run", "hint": ""}
        return self._store

    def on_connected(self) -> None:
        """Repeat all reports and requests on a new connection."""
        self._store = {**self._store, "answers": None, "error": "", "hint": ""}
        for tier in self._tiers.values():
            self._say(tier)
        for topic_id in self._deleted:
            self._say_deleted(topic_id)
        self._metadata_sent = -1
        self.staged.resend()
        heirs, self._heirs = self._heirs, {}
        for then in heirs.values():  # another attempt finds the results of a mover that has ended
            then(StoreUnavailable("the partition cannot be taken over yet", why="the mover started again"))
        self.cache.ask_again(clock.monotonic_ns())

    def on_frame(self, frame: Mapping[str, Any]) -> None:
        """Handle one frame from the mover."""
        kind = frame["kind"]
        if kind == "store":
            self._store = {name: frame.get(name, "") for name in _UNHEARD}
        elif kind == "fetched":
            self.cache.fetched(frame["id"], _error_of(frame), clock.monotonic_ns())
        elif kind == "inherited":
            heir = self._heirs.pop(frame["id"], None)
            if heir is not None:
                heir(_error_of(frame))
        elif kind == "judged":
            self.staged.answered(frame)
        elif kind == "state":
            tier = self._tiers.get(LogIdentity(frame["topic_id"], frame["partition"]))
            if tier is not None and tier.on_state(dict(frame)):
                self._looked.add(tier)
                self._changed(tier.identity)

    def _fetch(self, fetch: Fetch) -> None:
        if self.link is not None:
            topic_id, partition = fetch.segment.identity
            self.link.send(
                "fetch", id=fetch.number, topic_id=topic_id, partition=partition, key=fetch.segment.key,
                start=fetch.start, end=fetch.end, path=str(fetch.segment.file.path), position=fetch.start,
            )  # fmt: skip

    # -- waiting ----------------------------------------------------------------------------------

    def _changed(self, identity: LogIdentity) -> None:
        self._ready(identity)
        self._serve_waiters(clock.monotonic_ns())

    def _ready(self, identity: LogIdentity) -> None:
        tier = self._tiers.get(identity)
        if tier is not None:
            self._wake(tier.hosted)

    def when_ready(self, pending: FetchPending, deadline_ns: int, again: Callable[[], None]) -> None:
        """Call ``again`` when the fetch has ended, or when ``deadline_ns`` has passed."""
        self._waiters.append(_Waiter(pending, deadline_ns, again))

    def _serve_waiters(self, now_ns: int) -> None:
        if not self._waiters:
            return
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if waiter.pending.ready() or now_ns >= waiter.deadline_ns:
                waiter.again()
            else:
                self._waiters.append(waiter)

    # -- timers -----------------------------------------------------------------------------------

    def tick(self) -> None:
        """Check waiting reads of the cache; called several times a second."""
        now_ns = clock.monotonic_ns()
        self.cache.tick(now_ns)
        self.staged.tick(now_ns)
        self._serve_waiters(now_ns)

    def second(self) -> None:
        """Seal old segments, evict, and copy cursors and metadata; called about once a second."""
        now_ns, now_us = clock.monotonic_ns(), clock.wall_us()
        oldest_us = now_us - self.options.seal_after_ms * 1000
        for tier in self._tiers.values():
            self._say_policy(tier)
            active = tier.log.active
            if active is not None and active.batch_count and active.first_append_us < oldest_us:
                self._roll(tier.hosted)
        looked, self._looked = self._looked, set()
        for tier in looked:
            self._evict(tier, now_us)
        self._copy_metadata(now_ns)
        if now_ns - self._cursors_ns >= CURSORS_INTERVAL_NS:
            self._cursors_ns = now_ns
            self.copy_cursors()

    def copy_cursors(self) -> None:
        """Send the cursors that changed since the last call to the mover."""
        for tier in self._tiers.values():
            if self.link is None or self.link.crowded:
                return
            self._copy_cursors(tier)

    def subscriptions_changed(self, hosted: HostedPartition) -> None:
        """Copy changed cursors to the store so that the next owner has them."""
        if hosted.tier is not None:
            self._copy_cursors(hosted.tier, soon=True)

    def _copy_cursors(self, tier: HostedTier, **fields: bool) -> None:
        cursors = tier.hosted.cursors
        if cursors is not None and (fields or cursors.version != tier.cursors_sent):
            tier.cursors_sent = cursors.version
            self._send("cursors", tier, blob=cursors.copy(), **fields)

    def _copy_metadata(self, now_ns: int) -> None:
        if self._metadata is None or self.link is None or self.link.crowded:
            return
        version, snapshot = self._metadata()
        if version == self._metadata_sent or now_ns - self._metadata_ns < METADATA_INTERVAL_NS:
            return
        self._metadata_sent, self._metadata_ns = version, now_ns
        self.link.send("metadata", version=version, blob=snapshot())

    # -- retention --------------------------------------------------------------------------------

    def retain(self, hosted: HostedPartition, now_us: int) -> int | None:
        """Delete expired segments of both tiers, evict local ones; return the new start of the log.

        Returns None, without a deletion, while no manifest is known: the start of the log is then unknown.
        """
        tier = hosted.tier
        if tier is None or hosted.failure is not None:
            return None
        if hosted.policy.expires:
            tier.log.check_age(now_us, hosted.policy.retention_ms)
            if tier.log.should_roll:
                self._roll(hosted)
        if tier.manifest is None:
            return None
        manifest, former = tier.manifest, tier.start
        start = max(manifest.start_offset, tier.trimmed)
        end, fact = expired_end(manifest, start, tier.log, hosted.policy, now_us, confirmed=tier.confirmed)
        if end > max(tier.trimmed, former):
            tier.trimmed = end
            self._send("trim", tier, start_offset=end)
            tier.log.evict(end, sealed=False)
            facts = {"start": former, "end": tier.start, "fact": fact, "manifest": manifest.name}
            _log.info("records expired", partition=hosted.name, **facts)
        self._evict(tier, now_us)
        return tier.start

    def _evict(self, tier: HostedTier, now_us: int) -> None:
        manifest = tier.manifest
        if manifest is None or not tier.confirmed or tier.hosted.failure is not None:
            return  # a manifest copied on this host may be older than the one in the store
        end = evictable_end(manifest, tier.log, now_us, self.options.local_retention)
        if not end:
            return
        former = tier.log.start
        try:
            evicted = tier.log.evict(end)
        except DanubeError as error:
            _log.warning("segments not evicted", partition=tier.hosted.name, error=str(error))
            return
        if evicted:
            facts = {"count": len(evicted), "start": former, "local_start": tier.log.start}
            fact = "the store holds them, verified"
            _log.info(
                "segments evicted", partition=tier.hosted.name, **facts, fact=fact, manifest=manifest.name
            )
            if tier.log.start < end:  # on a full disk, the eviction has made room to evict the rest
                self._looked.add(tier)

    def close(self) -> None:
        """Report the last sealed segments, send the last copies, and remove the cache; the worker ends."""
        for tier in self._tiers.values():
            self._send("sealed", tier)
        self.copy_cursors()
        self._metadata_ns = -METADATA_INTERVAL_NS
        self._copy_metadata(clock.monotonic_ns())
        self.cache.close()

    def statistics(self) -> dict[str, Any]:
        """Return figures of the tiers."""
        return {"partitions": len(self._tiers), "cache": self.cache.statistics()}


def _error_of(frame: Mapping[str, Any]) -> DanubeError | None:
    """Return the error of a failed fetch; the frame's ``code`` names its class."""
    text = str(frame["error"])
    if not text:
        return None
    code = frame.get("code", 0)
    return error_for_code(code, text) if isinstance(code, int) and code else StoreUnavailable(text)
