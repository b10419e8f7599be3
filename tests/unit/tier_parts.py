"""A shard with cold tiers whose mover is in the test's hands, and a store that fails when told to."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from danube.broker.api import Session
from danube.broker.partition.hosted import HostedTier
from danube.broker.tiers.worker_tiers import TierOptions, Tiers
from danube.core.partition.policy import FailurePolicy
from danube.errors import DanubeError, StorageFailed
from danube.wal.segments.segment import SUMMARY_BYTES, LogIdentity, Summary, base_offset_of, read_summary
from danube.wal.tier.keys import segment_key
from danube.wal.tier.manifest import EntryFlag, Manifest, SegmentEntry, entry_of
from tests.fakes.memory_store import MemoryStore
from tests.unit.broker_parts import Bench


def sealed_files(directory: Path) -> list[tuple[Summary, bytes]]:
    """Footers and bytes of the sealed segments of a partition, by base offset."""
    found = []
    for path in sorted(directory.iterdir()):
        if base_offset_of(path.name) is not None:
            data = path.read_bytes()
            summary = read_summary(data[-SUMMARY_BYTES:], len(data))
            if summary is not None:
                found.append((summary, data))
    return found


class FakeMover:
    """The mover's side of the link, in steps: nothing happens before ``step`` unless ``prompt``."""

    def __init__(self, answer: Callable[[dict[str, Any]], None], store: MemoryStore | None = None) -> None:
        self.store = store or MemoryStore()
        self.prompt = True
        self.connected = True
        self.crowded = False
        self.frames: list[dict[str, Any]] = []
        self.said: list[dict[str, Any]] = []
        self.manifests: dict[LogIdentity, Manifest] = {}
        self.owners: dict[LogIdentity, dict[str, Any]] = {}
        self.fetch_error: DanubeError | None = None
        self.upload = True
        self.left: dict[LogIdentity, int] = {}
        self._answer = answer
        self._stepping = False

    def send(self, kind: str, **fields: Any) -> None:
        frame = {"kind": kind, **fields}
        self.said.append(frame)
        self.frames.append(frame)
        if self.prompt:
            self.step()

    def step(self, count: int = 1_000_000) -> int:
        """Carry out up to ``count`` frames; return how many."""
        if self._stepping:
            return 0
        self._stepping = True
        done = 0
        try:
            while self.frames and done < count:
                self._take(self.frames.pop(0))
                done += 1
        finally:
            self._stepping = False
        return done

    def kinds(self) -> list[str]:
        return [frame["kind"] for frame in self.said]

    def _take(self, frame: dict[str, Any]) -> None:
        kind = frame["kind"]
        if kind == "fetch":
            self._fetch(frame)
            return
        if kind not in ("attach", "sealed", "trim", "leave"):
            return
        identity = LogIdentity(frame["topic_id"], frame["partition"])
        if kind == "leave":
            self.left[identity] = frame["id"]
        if kind == "attach":
            self.owners[identity] = frame
            known = self.manifests.get(identity)
            if known is None:
                known = Manifest.empty(frame["topic"], identity, frame["epoch"], frame["log_start"])
            self.manifests[identity] = replace(known, epoch=frame["epoch"], generation=known.generation + 1)
        elif kind == "trim":
            manifest = self.manifests[identity]
            if frame["start_offset"] > manifest.start_offset:
                self.manifests[identity] = manifest.trimmed(frame["start_offset"])
        self.look(identity)

    def look(self, identity: LogIdentity) -> None:
        """Upload what is sealed, then tell the owner."""
        owner = self.owners[identity]
        for summary, data in sealed_files(Path(owner["directory"])) if self.upload else []:
            manifest = self.manifests[identity]
            if summary.base_offset < manifest.uploaded_end:
                continue
            flags = EntryFlag.HOLE_BEFORE if summary.base_offset > manifest.uploaded_end else 0
            entry = entry_of(summary, len(data), 1, flags=flags)
            self.store.put(segment_key(identity, entry), data)
            self.manifests[identity] = manifest.with_added(entry)
        self.tell(identity)

    def tell(self, identity: LogIdentity, error: str = "") -> None:
        self._answer(
            {
                "kind": "state", "topic_id": identity.topic_id, "partition": identity.partition,
                "manifest": self.manifests[identity].encode(), "error": error,
                "loaded": True, "epoch": self.owners[identity]["epoch"],
                "left_id": self.left.get(identity, 0),
            }
        )  # fmt: skip

    def _fetch(self, frame: dict[str, Any]) -> None:
        answer = {"kind": "fetched", "id": frame["id"], "error": "", "code": 0}
        try:
            if self.fetch_error is not None:
                raise self.fetch_error
            data = self.store.get(frame["key"], frame["start"], frame["end"])
            fd = os.open(frame["path"], os.O_WRONLY)
            try:
                os.pwrite(fd, data, frame["position"])
            finally:
                os.close(fd)
        except (DanubeError, OSError) as error:
            code = error.code if isinstance(error, DanubeError) else StorageFailed.code
            answer |= {"error": str(error), "code": code}
        self._answer(answer)


class TieredBench(Bench):
    """A shard whose partition has a cold tier; everything of the mover is in ``mover``."""

    def __init__(self, root: Path, options: TierOptions | None = None, **policy: Any) -> None:
        policy.setdefault("failure", FailurePolicy(ack_timeout_ms=1_000_000_000))
        super().__init__(root / "partitions", **policy)
        shard = self.shard
        shard.tiers = self.tiers = Tiers(
            root / "cache", options or TierOptions(cache_bytes=64 << 20),
            wake=shard.wake_readers, roll=shard.storage.roll, connect=self._connect,
            metadata=lambda: (7, lambda: b"snapshot"),
        )  # fmt: skip

    def _connect(self, on_connected: Any, on_frame: Any) -> FakeMover:
        self.mover = FakeMover(on_frame)
        return self.mover

    @property
    def tier(self) -> HostedTier:
        tier = self.hosted.tier
        assert tier is not None
        return tier

    def entry(self, number: int) -> SegmentEntry:
        assert self.tier.manifest is not None
        return self.tier.manifest.entry(number)

    def ask(self, session: Session, kind: int, body: Any = None, handle: int = 0) -> int:
        """Ask, and let what waits for fetched bytes go on."""
        correlation = super().ask(session, kind, body, handle)
        for _ in range(10):
            self.tiers.tick()
        return correlation

    def seal(self) -> None:
        """Write, roll and seal what there is; the mover is told."""
        self.turn()
        self.shard.storage.request_sync(self.hosted)
        self.syncer.step()
        self.shard.storage.roll(self.hosted)
        self.sealer.step()
        self.shard.storage.request_sync(self.hosted)
        self.syncer.step()

    def evict(self) -> None:
        """All that is uploaded and sealed leaves this host."""
        assert self.hosted.log is not None
        self.hosted.log.evict(self.tier.uploaded_end)
