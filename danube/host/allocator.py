"""Settings of the allocator and of the garbage collector in processes that serve.

The C library gives a freed block of more than 128 KiB back to the kernel, so every batch of half a
MiB would touch fresh pages: about half of a producer's time.  glibc raises that limit by itself to
the size of the largest such block that was freed; one that is never touched costs nothing.
"""

from __future__ import annotations

import gc
from typing import Final

# By default a collection runs after every 700 new objects: with ten thousand partitions that took a third of
# a worker's time.  Reference counts free nearly all garbage of a worker.
COLLECT_EVERY: Final = (20_000, 10, 10)

BLOCK_BYTES: Final = 24 * 1024 * 1024  # glibc learns from blocks of up to 32 MiB


def keep_large_blocks() -> None:
    """Let blocks of up to 24 MiB be used again; at most twice as much stays with the process unused."""
    bytes(BLOCK_BYTES)


def collect_rarely() -> None:
    """Look for cycles of garbage after 20,000 objects more, not after 700; at most as many wait for it."""
    gc.set_threshold(*COLLECT_EVERY)
