"""Files are deleted in two halves: the name at once, the blocks in a thread.

A file system that tells its disk what is free again waits for that: 15 to 90 ms for a segment, in which a
worker's loop would answer nobody.  Blocks are freed when a file has neither a name nor a descriptor, so one
descriptor is kept over the deletion and closed in the thread.  Nothing depends on when that happens.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from queue import SimpleQueue
from typing import Final

from danube.host import files

WAITING_MAX: Final = 32  # descriptors; who deletes faster waits for the disk


class Freeing:
    """One for the process; safe for threads."""

    def __init__(self) -> None:
        self._waiting: SimpleQueue[int] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def delete(self, path: Path) -> None:
        """Take the file's name; raises as unlink() does.  Its blocks are free soon after."""
        fd = self._held(path)
        try:
            files.unlink(path)
        finally:
            if fd >= 0:
                self._waiting.put(fd)
                self._start()

    def _held(self, path: Path) -> int:
        """A descriptor of the file; -1 where none is to be had, and its blocks are freed at once."""
        if self._waiting.qsize() >= WAITING_MAX:
            return -1
        try:
            return files.open_existing(path, writable=False)
        except OSError:
            return -1

    def _start(self) -> None:
        thread = self._thread
        if thread is None or not thread.is_alive():  # none yet, or this process was forked since
            self._thread = threading.Thread(target=self._work, name="danube-freeing", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while True:
            os.close(self._waiting.get())


freeing: Final = Freeing()
