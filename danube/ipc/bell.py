"""Doorbell: wakes a worker that sleeps, and costs one load when it does not.

The reader has a word ``sleeping`` that only it writes, and an eventfd that its loop watches.

    reader                                  ringer
    arm():     sleeping = 1                 (publishes its records)
               fence                        fence
               look at the rings again      sleeping?  then write the eventfd
    disarm():  sleeping = 0, empty the eventfd

Either the ringer's load comes after the reader's store, and it rings; or the reader's second look comes
after the ringer's publish, and it does not sleep.  The fences forbid the third possibility, that both
loads were done before both stores.  Ringers never clear ``sleeping``: one that died between clearing it
and ringing would leave the reader asleep for good.  tests/model/test_ring_model.py walks all
interleavings, with store buffers.
"""

from __future__ import annotations

import os
from typing import Final

from danube.ipc import atomics
from danube.ipc.atomics import Words

SLEEPING: Final = 0


class Bell:
    """The bell of one worker; this worker arms and disarms it, all others ring it."""

    def __init__(self, words: Words, descriptor: int) -> None:
        self._load = words.load
        self._store = words.store
        self.descriptor = descriptor

    def ring(self) -> bool:
        """Wake the reader if it sleeps; whether that was needed.

        The caller has called ``atomics.fence()`` after publishing; once for all the bells of a turn.
        """
        if not self._load(SLEEPING):
            return False
        try:
            os.eventfd_write(self.descriptor, 1)
        except BlockingIOError:
            pass  # 2**64-2 rings are pending: the reader will wake
        return True

    def arm(self) -> None:
        """Announce that the reader will sleep.  The reader must poll its rings once more after this."""
        self._store(SLEEPING, 1)
        atomics.fence()

    def disarm(self) -> None:
        """Say that the reader is awake and forget earlier rings."""
        self._store(SLEEPING, 0)
        try:
            os.eventfd_read(self.descriptor)
        except BlockingIOError:
            pass  # woken by something else
