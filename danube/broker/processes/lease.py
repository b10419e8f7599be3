"""Lease of this broker: until when it may serve, in two words of memory that its processes share.

Writer:   the controller, after each renewal of the broker's registration: the lease's time, counted from
          before it asked.  The leader counts from after it granted, so the word ends first.
Readers:  the workers, in every turn that writes or answers: one comparison.  A process that was paused
          finds out at its next turn.
Again:    ``registration`` is another number after each new registration, stored before the time is.  It says
          that the one before may have ended, however short that was, so what is owned has to be looked at
          again; ``end_ns`` alone does not tell a worker that slept through it.
Crash:    a controller that dies renews nothing; the word ends by itself.  The next one goes on with it.

Made before the processes are forked; a store and a load of eight aligned bytes are never torn.
"""

from __future__ import annotations

import mmap


class SharedLease:
    """Lease by the clock of elapsed time, which all processes of a host share.

    It counts a suspension, too: others do not wait for a host that sleeps.
    """

    __slots__ = ("_memory", "_word")

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)
        self._word = memoryview(self._memory).cast("q")

    @property
    def end_ns(self) -> int:
        """0 before the first registration."""
        return self._word[0]

    @property
    def registration(self) -> int:
        """The metadata version at which the broker was registered last; a copy that has it is new enough."""
        return self._word[1]

    def begin(self, registration: int) -> None:
        """Controller: the broker was registered anew; before :meth:`extend`."""
        self._word[1] = registration

    def extend(self, end_ns: int) -> None:
        """Controller: a renewal was granted.  It never goes back, except to 0 by :meth:`end`."""
        if end_ns > self._word[0]:
            self._word[0] = end_ns

    def end(self) -> None:
        """Controller: the registration is over."""
        self._word[0] = 0
