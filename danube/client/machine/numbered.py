"""Producers whose sequences the application gives, so that another process can continue their work.

A plain producer opens anew whenever its process starts, and its numbers start at 0 again.  A job that may be
killed and repeated needs the opposite: the same name, the same numbers, and the count of its stored records.
Resuming an epoch gives that count, in this process or a later one.  This module decides which epoch to
resume.

Work comes in *rounds* (the batches of a stream; 0 for a job that has only one), and the epoch encodes the
round.  The epoch is congruent to the round modulo ROUNDS, above every earlier epoch of the name, and above
the clock, so that it is above forgotten epochs.  The epoch that the partition knows thus names its round.  If
it is this round, the next sequence is the count of stored records.  If it is an earlier one, a new epoch
follows.  If it is a later one, this process came too late.

Rounds beyond ROUNDS need a name of their own for every ROUNDS of them, see :func:`round_name`.
"""

from __future__ import annotations

from typing import Final

from danube.client.machine.ack import Ack
from danube.client.machine.publishing import Outgoing, PartitionProducer, State
from danube.client.machine.requests import Request
from danube.client.machine.session import Session
from danube.core.partition.dedup import EPOCH_AHEAD_MAX, producer_id_of
from danube.core.protocol import native as wire
from danube.core.protocol.native import Kind
from danube.errors import (
    DanubeError,
    Fenced,
    InvalidArgument,
    NotFound,
    OwnerMoved,
    QuotaExceeded,
    SequenceGap,
)
from danube.host.clock import wall_us
from danube.limits import DEDUP_BATCHES_KEPT

ROUNDS: Final = 1 << 15  # twice as many seconds stay below EPOCH_AHEAD_MAX, so the broker takes the epoch
_ASKING_EPOCH: Final = 1  # older than any that is given out: the answer names the one that holds

if EPOCH_AHEAD_MAX < 2 * ROUNDS:
    raise ImportError("an epoch of a round may lie too far ahead of the clock")


def round_name(stem: str, round_number: int) -> str:
    """The producer name of a round: one for every ROUNDS rounds of ``stem``."""
    generation = round_number // ROUNDS
    return f"{stem}/{generation}" if generation else stem


def epoch_of_round(round_number: int, known_epoch: int, now_s: int) -> int:
    """Return the lowest epoch above ``known_epoch`` and the clock that encodes ``round_number``."""
    floor = max(known_epoch, now_s) + 1
    return floor + (round_number - floor) % ROUNDS


class NumberedPartition(PartitionProducer):
    """Sends numbered batches to one partition; ``stored`` is the number of its records of the round.

    A batch that a quota refuses is sent again under its number, and so are those behind it.  A batch that
    fails ends the partition's work, because its number can be no other batch's.  The broker knows the stored
    records and reports them to the next process that opens under the same name and round.
    """

    def __init__(
        self,
        session: Session,
        name: str,
        partition: str,
        index: int,
        timeout_ns: int,
        round_number: int,
        topic_id: int = 0,
    ) -> None:
        super().__init__(session, round_name(name, round_number), partition, index, timeout_ns, topic_id)
        self.producer_id = producer_id_of(self.name)
        self.epoch = _ASKING_EPOCH
        self.stored = 0
        self.recall = DEDUP_BATCHES_KEPT
        self.stored_batches: tuple[tuple[int, int, int], ...] = ()  # the last ones, as the answer has them
        self._round = round_number % ROUNDS
        self._agreed = False

    def _on_opened(self, request: Request, handle: int) -> None:
        if handle != self._handle or self._state is not State.OPENING:
            return
        if not self._agreed:
            self._agree(request, handle)
        elif request.error is None and request.value.next_sequence < self._first_unanswered():
            self.session.drop_handle(handle)
            self._fail(_forgotten(self.partition, request.value.next_sequence, self._first_unanswered()))
        else:
            super()._on_opened(request, handle)

    def _agree(self, request: Request, handle: int) -> None:
        """Find the epoch of this round; open with it until the partition confirms it."""
        error = request.error
        if error is None and self.epoch != _ASKING_EPOCH:
            self._agreed = True
            self.stored = request.value.next_sequence
            self.stored_batches = request.value.batches
            super()._on_opened(request, handle)
            self._sent_sequence = self.stored
            return
        if error is None:
            known = _ASKING_EPOCH
            self.session.send(wire.control_frame(Kind.CLOSE_PRODUCER, None, 0, handle))
        elif isinstance(error, Fenced):
            known = int(error.facts["epoch"])
        elif isinstance(error, SequenceGap):
            known = self.epoch
        else:
            super()._on_opened(request, handle)
            return
        self.session.drop_handle(handle)
        if isinstance(error, Fenced) and known % ROUNDS == self._round:
            self.epoch = known
        elif isinstance(error, Fenced) and known % ROUNDS > self._round:
            self._fail(_too_late(self.name, self._round, known % ROUNDS))
            return
        else:
            self.epoch = epoch_of_round(self._round, known, wall_us() // 1_000_000)
        self._open()

    @property
    def next_sequence(self) -> int:
        """The number of the next batch; in a pause that a quota asked for some are out and others are not."""
        last = [batches[-1] for batches in (self._unacked, self._queue) if batches]
        return max((one.base_sequence + one.record_count for one in last), default=self._sent_sequence)

    def on_refused(self, outgoing: Outgoing, error: DanubeError) -> None:
        """Handle an ERROR for this batch; it ends the work unless the batch can be sent again."""
        follows = isinstance(error, SequenceGap) and self._state is State.RESTING
        if follows or isinstance(error, OwnerMoved | Fenced | NotFound | QuotaExceeded):
            super().on_refused(outgoing, error)
            return
        self._unacked.remove(outgoing)
        self._settle(outgoing, None, error)
        self.session.credit.give_back(outgoing.size)

    def _settle(self, outgoing: Outgoing, ack: Ack | None, error: DanubeError | None) -> None:
        super()._settle(outgoing, ack, error)
        if error is not None:
            self._fail(error)


def check_round(round_number: int) -> None:
    """Raise InvalidArgument for a number that no round can have."""
    if not 0 <= round_number < 1 << 48:
        raise InvalidArgument(f"round {round_number} is not valid", hint="rounds are numbered from 0")


def _too_late(name: str, own: int, known: int) -> Fenced:
    return Fenced(
        f"producer {name!r} is in a later round already",
        why=f"the partition knows round {known}, this is round {own} (of {ROUNDS})",
        hint="the round was finished by another run; this one must stop",
        round=own,
    )


def _forgotten(partition: str, stored: int, expected: int) -> SequenceGap:
    return SequenceGap(
        f"{partition} holds fewer records of this producer than it acknowledged",
        why=f"it has {stored}, this process had answers for {expected}",
        hint="run the job again: it continues after the stored records",
        stored=stored,
        expected=expected,
    )
