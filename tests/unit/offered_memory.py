"""Memory as a client offers it, for tests that are the client."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
from pathlib import Path
from typing import Any

from danube.core.protocol import native as wire
from danube.core.protocol.native import SHARED_MEMORY_NAME, SHARED_TOKEN_BYTES, ShareMemory

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
TOKEN = os.urandom(SHARED_TOKEN_BYTES)
SIZE = 64 * 1024


class Offer:
    """A memfd as a client makes one, but for what a test changes."""

    def __init__(self, name: str = SHARED_MEMORY_NAME, seals: int = SEALS, token: bytes = TOKEN) -> None:
        self.descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.descriptor, SIZE)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, seals)
        self.memory = memoryview(mmap.mmap(self.descriptor, SIZE))
        self.memory[: len(token)] = token

    def said(self, **changed: Any) -> ShareMemory:
        said = {"process": os.getpid(), "descriptor": self.descriptor, "size": SIZE, "token": TOKEN}
        return ShareMemory(**{**said, **changed})

    def close(self) -> None:
        os.close(self.descriptor)


def in_memory(offer: Offer, frame: bytes, position: int = 4096) -> bytes:
    """Write it there; the frame that stands for it."""
    offer.memory[position : position + len(frame)] = frame
    return wire.shared_frame(position, len(frame))


def mapped() -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text().count(SHARED_MEMORY_NAME)
