"""Keeping batch-sized memory in the process.

The C library gives a freed block of more than 128 KiB back to the kernel, so every batch of half a
MiB would touch fresh pages: about half of a producer's time.  glibc raises that limit by itself to
the size of the largest such block that was freed; one that is never touched costs nothing.
"""

from __future__ import annotations

from typing import Final

BLOCK_BYTES: Final = 24 * 1024 * 1024  # glibc learns from blocks of up to 32 MiB


def keep_large_blocks() -> None:
    """Let blocks of up to 24 MiB be used again; at most twice as much stays with the process unused."""
    bytes(BLOCK_BYTES)
