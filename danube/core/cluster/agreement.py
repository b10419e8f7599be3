"""Replication state of the metadata: last applied entry, agreed time, last sequence of each origin.

Entries:  indexes and terms never go back; several origins may share an entry.
Time:     the leader's clock, which never goes back here.  The metadata machine has no other clock;
          AgreedTime is the clock of a leader.
Origins:  the last sequence of each, so that a proposal that is sent again is recognised.  The origin that
          has been silent longest is forgotten first.
"""

from __future__ import annotations

from danube.core.cluster.commands import Agreed
from danube.errors import InvalidArgument, WrongState
from danube.ids import check_label
from danube.limits import AGREED_ORIGINS_MAX


class Agreement:
    """``index`` and ``term`` are of the last entry (0: there is no replicated log), ``now_us`` the time."""

    def __init__(self) -> None:
        self.index = self.term = self.now_us = 0
        self._sequences: dict[str, int] = {}  # by origin, the one heard of longest ago first

    def last_sequence(self, origin: str) -> int:
        """The last sequence of an origin that was agreed on; 0 when none is known."""
        return self._sequences.get(origin, 0)

    def repeated(self, origin: str, sequence: int) -> bool:
        """Whether this proposal was agreed on before."""
        return bool(origin) and sequence <= self.last_sequence(origin)

    def origins(self) -> list[tuple[str, int]]:
        """Known origins with their last sequences, the one heard of longest ago first."""
        return list(self._sequences.items())

    def check(self, command: Agreed) -> bool:
        """True, as it always changes something; raises a CallerError if it is not allowed."""
        if command.origin:
            check_label(command.origin, "origin")
        if not 1 <= command.origins_max <= AGREED_ORIGINS_MAX:
            raise InvalidArgument(f"origins_max is 1 .. {AGREED_ORIGINS_MAX}")
        self._refuse(command)
        return True

    def _refuse(self, command: Agreed) -> None:
        if command.index < max(1, self.index) or command.term < max(1, self.term):
            raise WrongState(
                f"entry {command.index} of term {command.term} is not the next one",
                why=f"entry {self.index} of term {self.term} was agreed on",
            )
        if self.repeated(command.origin, command.sequence):
            raise WrongState(
                f"proposal {command.sequence} of {command.origin} was agreed on before",
                why=f"its last one is {self.last_sequence(command.origin)}",
            )

    def apply(self, command: Agreed) -> None:
        self._refuse(command)
        self.index, self.term = command.index, command.term
        self.pass_time(command.now_us)
        if not command.origin:
            return
        self._sequences.pop(command.origin, None)
        while len(self._sequences) >= max(1, command.origins_max):
            del self._sequences[next(iter(self._sequences))]
        self._sequences[command.origin] = command.sequence

    def pass_time(self, now_us: int) -> None:
        """Let the agreed time be ``now_us``, unless it is later already."""
        self.now_us = max(self.now_us, now_us)

    def pass_own_time(self, now_us: int) -> None:
        """The time of a proposer, which counts only where there is no leader's."""
        if self.index == 0:
            self.pass_time(now_us)

    def copy(self) -> Agreement:
        other = Agreement()
        other.index, other.term, other.now_us = self.index, self.term, self.now_us
        other._sequences = dict(self._sequences)
        return other

    def load(self, index: int, term: int, now_us: int, origins: list[tuple[str, int]]) -> None:
        """Load the replication state of a snapshot."""
        self.index, self.term, self.now_us = index, term, now_us
        self._sequences = dict(origins)


class AgreedTime:
    """The time that a leader, or a proposer without one, gives its commands.

    The time continues from the agreed time with the monotonic clock.  So a jump of the wall clock neither
    ends nor prolongs a lease.  A change of leaders makes leases last longer, never shorter.
    """

    def __init__(self) -> None:
        self._offset_us: int | None = None

    def now_us(self, agreed_us: int, monotonic_ns: int, wall_us: int) -> int:
        """The time now.  ``agreed_us`` is the machine's; at the very beginning ``wall_us`` is the start."""
        own_us = monotonic_ns // 1000
        if self._offset_us is None:
            self._offset_us = (agreed_us or wall_us) - own_us
        now_us = own_us + self._offset_us
        if agreed_us > now_us:
            self._offset_us += agreed_us - now_us
            now_us = agreed_us
        return now_us
