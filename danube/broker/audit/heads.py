"""Heads of audit chains in the metadata, where who may write to the audit folder cannot change them.

A head is the place of a chain's last line.  A chain keeps HEADS_MAX of them under one key: the newest ones
each, older ones ever further apart.  One head would not do: a forged chain goes on after the next start, and
its head would replace the true one.

Key: ``/audit/heads/BROKER/WORKER``; the broker of a single host is 0.  Value: MessagePack
``[directory, [[seq, hash, time_us], ...]]``, oldest first.  Heads of another directory are forgotten with the
first one of the new directory, because the chain begins anew there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from danube.broker.audit.lines import Place
from danube.core.cluster.commands import PutKey
from danube.errors import DanubeError
from danube.host import telemetry

if TYPE_CHECKING:
    from danube.core.cluster.keys import KeySpace
    from danube.core.metadata.commands import Outcome

PREFIX: Final = "/audit/heads/"
HEADS_MAX: Final = 64

_events = telemetry.events("audit")


class Head(NamedTuple):
    """The place of a chain's last line at a time."""

    number: int
    digest: bytes
    time_us: int

    @property
    def place(self) -> Place:
        return Place(self.number, self.digest.hex())


class KnownHeads(NamedTuple):
    """Heads of one chain, oldest first, and where its files are."""

    directory: str
    heads: list[Head]


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(KnownHeads)


def key_of(broker_id: int, worker: int) -> str:
    return f"{PREFIX}{broker_id}/{worker}"


def decode_heads(value: bytes) -> KnownHeads | None:
    """None for what is no list of heads."""
    try:
        return _decoder.decode(value)
    except msgspec.DecodeError:
        return None


def heads_of(keys: KeySpace, broker_id: int) -> dict[int, KnownHeads]:
    """By worker, what the metadata knows of the chains of one broker."""
    prefix = f"{PREFIX}{broker_id}/"
    read = {record.key.removeprefix(prefix): decode_heads(record.value) for record in keys.below(prefix)}
    return {int(worker): known for worker, known in read.items() if known is not None and worker.isdecimal()}


def thinned(heads: Sequence[Head]) -> list[Head]:
    """At most HEADS_MAX: of those in the middle the one goes whose neighbours are closest for their age."""
    kept = list(heads)
    while len(kept) > HEADS_MAX:
        newest_us = kept[-1].time_us

        def gap(at: int, newest_us: int = newest_us) -> float:
            before, after = kept[at - 1].time_us, kept[at + 1].time_us
            return (after - before) / max(1, newest_us - before)

        del kept[min(range(1, len(kept) - 1), key=gap)]
    return kept


class HeadKeeper:
    """Puts the heads of one chain into the metadata, one change at a time."""

    def __init__(
        self,
        key: str,
        directory: Path,
        keys: Callable[[], KeySpace],
        submit: Callable[[PutKey, Callable[[Outcome], None]], None],
    ) -> None:
        self._key = key
        self._directory = str(directory.resolve())
        self._keys = keys
        self._submit = submit
        self._waiting = False
        self.refused = False  # the last one

    def put(self, place: Place, now_us: int) -> bool:
        """Propose a head; False if the one before is not answered yet, or it could not be proposed."""
        if self._waiting:
            return False
        record = self._keys().find(self._key)
        known = decode_heads(record.value) if record is not None else None
        heads = known.heads if known is not None and known.directory == self._directory else []
        heads = thinned([*heads, Head(place.number, bytes.fromhex(place.hash), now_us)])
        command = PutKey(key=self._key, value=_encoder.encode(KnownHeads(self._directory, heads)))
        self._waiting = True
        try:
            self._submit(command, self._answered)
        except DanubeError as error:
            self._answered(error)
            return False
        return True

    def _answered(self, outcome: Outcome) -> None:
        self._waiting = False
        self.refused = isinstance(outcome, DanubeError)
        if self.refused:
            _events.limited("an audit head is not in the metadata", source=self._key, why=str(outcome))
