"""What goes out to clients of the native protocol: how soon, and what it answers."""

from __future__ import annotations

import os

from danube.core.protocol.native import FrameDecoder, Kind


def sent_at_once(descriptor: int, data: bytes | memoryview) -> int:
    """How much of it the socket has taken now; uvloop's transports write after the loop's callbacks.

    Where it fails the transport finds out why.
    """
    try:
        return os.write(descriptor, data)
    except OSError:
        return 0


def answers_in(output: bytes) -> int:
    """How many requests after HELLO are answered by these whole frames."""
    frames = FrameDecoder().frames(output, 0, len(output))
    return sum(1 for frame in frames if frame.correlation and frame.kind != Kind.WELCOME)
