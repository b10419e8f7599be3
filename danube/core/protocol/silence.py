"""Silence of a session's client: when to send a PING, and when to end the session.

Every received byte ends a silence.  After a third of the session's time in silence the client gets a PING;
after the whole time in silence from then on the session ends.  A client that reads its data is alive, however
late it answers, because the PING may lie behind much data.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

_ASKED_AFTER: Final = 3  # a third of the time


class Verdict(Enum):
    """Verdict on a session: nothing to do, a PING, or its end."""

    NONE = 0
    ASK = 1
    END = 2


class Silence:
    """Silence of one session; the receiver sets ``heard_ns``."""

    __slots__ = ("_asked_ns", "_unsent_bytes", "heard_ns")

    def __init__(self, now_ns: int) -> None:
        self.heard_ns = now_ns
        self._asked_ns = -1
        self._unsent_bytes = 0

    def quiet(self, now_ns: int, timeout_ns: int) -> bool:
        """Whether the session is due for a check."""
        return now_ns - self.heard_ns >= timeout_ns // _ASKED_AFTER

    def look(self, now_ns: int, timeout_ns: int, unsent_bytes: int) -> Verdict:
        """Judge a quiet session; ``unsent_bytes`` were sent and not taken by the client's host yet."""
        if self._asked_ns < self.heard_ns:
            self._asked_ns = now_ns
            self._unsent_bytes = unsent_bytes
            return Verdict.ASK
        taking, self._unsent_bytes = unsent_bytes < self._unsent_bytes, unsent_bytes
        if taking:
            self.heard_ns = now_ns
        elif now_ns - self._asked_ns >= timeout_ns - timeout_ns // _ASKED_AFTER:
            return Verdict.END
        return Verdict.NONE
