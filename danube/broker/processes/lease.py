"""Lease of this broker: until when it may serve, in two words of memory that its processes share.

Writer:   the controller, after each renewal of the broker's registration: the lease's end, counted from
          before the request.  The leader counts from after the grant, so the word ends first.
Readers:  the workers, in every turn that writes or answers: one comparison.  A process that was paused
          finds out at its next turn.
Again:    ``registration`` changes with each new registration, and is stored before the time.  The former
          registration may have ended, so workers check their ownership again.  ``end_ns`` alone does not
          show this to a worker that slept meanwhile.
Crash:    a dead controller renews nothing, so the lease ends by itself.  The next controller continues it.

Made before the processes are forked; a store and a load of eight aligned bytes are never torn.
"""

from __future__ import annotations

import mmap


class SharedLease:
    """Lease by the clock of elapsed time, which all processes of a host share.

    It counts a suspension, too: others do not wait for a host that sleeps.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)
        self._word = memoryview(self._memory).cast("q")

    @property
    def end_ns(self) -> int:
        """0 before the first registration."""
        return self._word[0]

    @property
    def registration(self) -> int:
        """Return the metadata version of the last registration; a copy with that version is new enough."""
        return self._word[1]

    def begin(self, registration: int) -> None:
        """Store a new registration; called by the controller, before :meth:`extend`."""
        self._word[1] = registration

    def extend(self, end_ns: int) -> None:
        """Controller: a renewal was granted.  It never goes back, except to 0 by :meth:`end`."""
        if end_ns > self._word[0]:
            self._word[0] = end_ns

    def end(self) -> None:
        """Controller: the registration is over."""
        self._word[0] = 0
