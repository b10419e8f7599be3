"""A reliable subscription (being filled in; the names below are final)."""

from __future__ import annotations

from danube.core.grants import AckResult, DeadLetter, Grant, JoinResult, Mode

__all__ = ["AckResult", "DeadLetter", "Grant", "JoinResult", "Mode", "Subscription"]


class Subscription:
    pass
