"""The owner's side of a reservation: how far it may append now, and when to reserve more.

    wanted()    the end to reserve next, when half of a step is used; None: nothing to ask for now
    reserved()  the metadata has it: the owner may append below that end
    refused()   it was not reserved; wanted() tells again
    close()     nothing more is appended

On a single host there is none: offsets are not reserved there.  Pure; nothing is kept in files, because
what counts is what the metadata holds.
"""

from __future__ import annotations

from typing import Final

from danube.errors import broken

STEP: Final = 1 << 25


class OffsetBudget:
    """Of one partition in one epoch of its ownership; ``end``: appends stay below it."""

    __slots__ = ("_asked", "_step", "closed", "end")

    def __init__(self, end: int, step: int = STEP) -> None:
        self.end = end
        self.closed = False
        self._asked = 0
        self._step = step

    def wanted(self, log_end: int) -> int | None:
        """The end to reserve now: a step ahead, once less than half of one is left and none is asked for."""
        if self.closed or self._asked or self.end - log_end >= self._step // 2:
            return None
        return log_end + self._step

    def asked(self, end: int) -> None:
        """A command for this end was proposed."""
        self._asked = end

    def reserved(self, end: int) -> None:
        """It was committed; one that comes late or twice changes nothing."""
        if self.closed:
            return
        self.end = max(self.end, end)
        if self.end >= self._asked:
            self._asked = 0

    def refused(self) -> None:
        """What was asked for will not come."""
        self._asked = 0

    def close(self, log_end: int) -> int:
        """Stop at ``log_end``; the end to close the reservation with."""
        if log_end > self.end:
            broken("a log passed what was reserved for it", log_end=log_end, reserved_end=self.end)
        self.closed = True
        self.end = log_end
        return log_end
