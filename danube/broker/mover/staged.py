"""Staged objects of one partition at the mover: offered, examined, installed or refused.

A job repeats its request until all of its objects are settled; repeating changes nothing.  A verdict is
dropped once it was fetched, and the manifest shows which objects are installed.  So a job that never returns
leaves no state.  After a crash of the mover the next request begins anew.

All methods are called on the mover's loop, except the jobs and the change, which run in its threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from danube.errors import Damage, ObjectMissing
from danube.limits import GIB
from danube.wal.segments.segment import LogIdentity
from danube.wal.tier.keys import segment_key
from danube.wal.tier.manifest import Manifest, SegmentEntry
from danube.wal.tier.staged import Rules, Staged, examine_staged, names, objection, sources_of
from danube.wal.tier.uploader import Change, Uploader

STAGED_MAX: Final = 256  # objects of one partition at a time
SOURCES_MAX: Final = 65_536  # sources of all these together
JOB_BYTES_MAX: Final = 1 * GIB  # examined by one job, unless the first object is larger
FORGET_US: Final = 600_000_000

INSTALLED: Final = "installed"
REFUSED: Final = "refused"
WAITING: Final = "waiting"
Answer = tuple[str, str]  # one of the words above, and the reason


class Examined(NamedTuple):
    """Verdicts on objects by content hash: the reason why one cannot be installed, or empty."""

    verdicts: dict[bytes, str]


class _Known(msgspec.Struct):
    """One offered object.  ``refused``: the reason why it will not be installed; empty without one."""

    one: Staged
    examined: bool = False
    refused: str = ""
    refused_us: int = 0

    def refuse(self, why: str, now_us: int) -> None:
        self.refused, self.refused_us = why, now_us


class StagedObjects:
    """Offered objects whose verdict has not been fetched yet."""

    def __init__(self) -> None:
        self._known: dict[bytes, _Known] = {}
        self._last_change: dict[bytes, str] = {}

    @property
    def examined(self) -> bool:
        """Return whether there are objects to install."""
        return any(known.examined and not known.refused for known in self._known.values())

    def keys(self, identity: LogIdentity) -> set[str]:
        """Return the keys of the objects that a manifest may still name."""
        return {segment_key(identity, known.one.made) for known in self._known.values() if not known.refused}

    def ask(self, offered: Sequence[Staged], manifest: Manifest, rules: Rules, why: str) -> list[Answer]:
        """Return the state of each offered object and add new ones; ``why``: a reason for all to wait."""
        self._forget(rules.now_us)
        expected = {one.made.content_hash for one in offered} | set(self._known)
        return [self._answer(one, manifest, rules, expected, why) for one in offered]

    def _answer(
        self, one: Staged, manifest: Manifest, rules: Rules, expected: set[bytes], why: str
    ) -> Answer:
        name = one.made.content_hash
        if names(manifest, one):
            self._known.pop(name, None)
            return INSTALLED, ""
        known = self._known.get(name)
        if known is not None:
            if not known.refused:
                return WAITING, why
            del self._known[name]
            return REFUSED, known.refused
        refused = objection(one, manifest, rules, expected)
        if refused:
            expected.discard(name)
            return REFUSED, refused
        if not self._room_for(one):
            return WAITING, "others are examined first"
        self._known[name] = _Known(one)
        return WAITING, why

    def _room_for(self, one: Staged) -> bool:
        held = sum(len(known.one.sources) for known in self._known.values())
        return len(self._known) < STAGED_MAX and held + len(one.sources) <= SOURCES_MAX

    def _forget(self, now_us: int) -> None:
        """Drop old verdicts that were never fetched."""
        old = [
            name
            for name, known in self._known.items()
            if known.refused and known.refused_us < now_us - FORGET_US
        ]
        for name in old:
            del self._known[name]

    # -- examining --------------------------------------------------------------------------------

    def job(
        self, uploader: Uploader, manifest: Manifest, rules: Rules, work: Path
    ) -> Callable[[], Examined] | None:
        """Return a job that examines the next objects, about JOB_BYTES_MAX; None if none wait."""
        chosen: list[tuple[Staged, list[SegmentEntry]]] = []
        size = 0
        for known in self._known.values():
            if known.examined or known.refused:
                continue
            if chosen and size + known.one.made.size_bytes > JOB_BYTES_MAX:
                break
            why = objection(known.one, manifest, rules, self._known)
            if why:
                known.refuse(why, rules.now_us)
            else:
                chosen.append((known.one, sources_of(manifest, known.one)))
                size += known.one.made.size_bytes
        return (lambda: _examine(uploader, chosen, work)) if chosen else None

    def took(self, examined: Examined, now_us: int) -> None:
        """Take the verdicts of a job."""
        for name, why in examined.verdicts.items():
            known = self._known.get(name)
            if known is not None:
                known.examined = True
                known.refuse(why, now_us)

    # -- installing -------------------------------------------------------------------------------

    def change(self, rules: Rules) -> Change:
        """Add the examined objects to the manifest, except those that the current manifest contradicts."""
        ready = [known.one for known in self._known.values() if known.examined and not known.refused]
        ready.sort(key=lambda one: one.made.base_offset)

        def change(manifest: Manifest) -> Manifest | None:
            result = manifest
            self._last_change = verdicts = {}
            for one in ready:
                made = one.made._replace(uploaded_us=rules.now_us)  # the job's clock may differ from ours
                why = objection(one, result, rules)
                verdicts[made.content_hash] = why
                if not why:
                    first = result.find(made.base_offset)
                    result = result.with_replaced(first, first + len(one.sources) - 1, made)
            return None if result is manifest else result

        return change

    def installed(self, manifest: Manifest, now_us: int) -> None:
        """Drop the objects that the manifest now in force names."""
        for name, why in self._last_change.items():
            known = self._known.get(name)
            if known is None:
                continue
            if names(manifest, known.one):
                del self._known[name]
            else:
                known.refuse(why or "its sources are not what the manifest names any more", now_us)
        self._last_change = {}


def _examine(uploader: Uploader, chosen: Sequence[tuple[Staged, list[SegmentEntry]]], work: Path) -> Examined:
    """Examine in a thread; errors of the store and the disk are raised, as a retry may succeed."""
    verdicts: dict[bytes, str] = {}
    for one, sources in chosen:
        try:
            examine_staged(uploader, one, sources, work)
        except (Damage, ObjectMissing) as error:
            verdicts[one.made.content_hash] = str(error)
        else:
            verdicts[one.made.content_hash] = ""
    return Examined(verdicts)
