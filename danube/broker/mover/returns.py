"""The mover's rounds for disks that came back: directories whose partitions go on elsewhere.

A directory below ``partitions`` is *stranded* when the store has a manifest of a later ownership than the
last one it was opened in: somebody else took over, and nothing is ever appended here again.  It is set aside,
unless a worker of this broker has the partition, or is about to, and is given back by rounds.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

from danube.broker.mover.copies import Ended, Job
from danube.broker.mover.returning import Memory, newest_manifest, round_of
from danube.broker.tiers.inheritance import LOG_EPOCHS, KeptOwner, read_owner, set_aside
from danube.errors import Damage, DanubeError, ObjectMissing, StorageFailed
from danube.host import telemetry
from danube.wal.segments.segment import LogIdentity
from danube.wal.stores.objects import ObjectStore
from danube.wal.tier.keys import parse_partition

ROUND_S: Final = 15.0
_log = telemetry.events("returning")


class Mover(Protocol):
    """What is needed of the mover."""

    @property
    def store(self) -> ObjectStore: ...
    def block(self, job: Job, ended: Ended) -> None: ...
    def call_later(self, delay_s: float, action: Callable[[], None]) -> None: ...


class Returns:
    """``held`` says whether a worker has a partition, or whether it is being made ready for one."""

    def __init__(self, mover: Mover, data_dir: Path, held: Callable[[LogIdentity], bool]) -> None:
        self._mover = mover
        self._data_dir = data_dir
        self._held = held
        self._memories: dict[str, Memory] = {}

    def begin(self) -> None:
        """Called once the store is this broker's; then it goes on by itself."""
        self._mover.block(partial(stranded, self._mover.store, self._data_dir), self._found)

    def _found(self, directories: Any, error: DanubeError | None) -> None:
        # Decided here, on the mover's loop, where nothing becomes held in between; a rename is quick.
        for identity, directory, kept in directories or ():
            if not self._held(identity) and read_owner(directory) == kept:
                try:
                    set_aside(directory, self._data_dir)
                except OSError as failure:
                    _log.limited("a directory is not set aside", source=str(directory), why=str(failure))
        if error is not None:
            _log.limited("stranded records are not looked for", source="round", why=str(error))
        self._mover.block(partial(round_of, self._mover.store, self._data_dir, self._memories), self._ended)

    def _ended(self, outcomes: Any, error: DanubeError | None) -> None:
        for name, outcome in (outcomes or {}).items():
            if outcome.word == "removed":
                _log.info("a partition's directory is not needed any more", directory=name)
        if error is not None:
            _log.limited("nothing is given back", source="round", why=str(error))
        self._mover.call_later(ROUND_S, self.begin)


def stranded(store: ObjectStore, data_dir: Path) -> list[tuple[LogIdentity, Path, KeptOwner]]:
    """Directories whose partition another ownership went on with.  In a thread."""
    root = data_dir / "partitions"
    found: list[tuple[LogIdentity, Path, KeptOwner]] = []
    try:
        names = sorted(os.listdir(root))
    except OSError as error:
        raise StorageFailed(f"{root} cannot be read", why=str(error)) from None
    for name in names:
        identity = parse_partition(name)
        kept = read_owner(root / name) if identity is not None else None
        if identity is None or kept is None:
            continue
        try:
            manifest = newest_manifest(store, identity)
        except (Damage, ObjectMissing) as error:  # replaced while it was looked for, or told by others
            _log.limited("a manifest cannot be read", source=name, why=str(error))
            continue
        if manifest is not None and manifest.epoch // LOG_EPOCHS > kept.last_epoch:
            found.append((identity, root / name, kept))
    return found
