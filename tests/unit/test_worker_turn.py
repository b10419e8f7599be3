"""The order of a worker's turn, on which the bytes of un-written batches depend."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

from danube.broker.worker import Worker


def test_frames_that_a_full_ring_held_back_are_written_before_their_buffers_are_free() -> None:
    order: list[str] = []

    def note(name: str, result: Any = None) -> Any:
        return lambda *_: order.append(name) or result

    worker = Worker.__new__(Worker)
    worker.doors = {"native": SimpleNamespace(hand_over=note("hand over", False), flush=note("free buffers"))}  # type: ignore[dict-item]
    worker.shard = SimpleNamespace(turn=note("write"))  # type: ignore[assignment]
    worker.remote = SimpleNamespace(take=note("take"), flush=note("answer", False))  # type: ignore[assignment]
    worker.channel = SimpleNamespace(  # type: ignore[assignment]
        peers_restarted=list,
        poll=lambda: [(1, 1, memoryview(b""))],
        release=note("free ring"),
        flush=note("publish", True),
    )
    worker.counters = MagicMock()
    worker.context = SimpleNamespace(workers=2)  # type: ignore[assignment]
    worker.loop = MagicMock()
    worker._turn_scheduled = True
    worker._turn()
    for taken in ("take", "hand over"):
        assert order.index(taken) < order.index("write")
    for freed in ("free buffers", "free ring"):
        assert order.index("write") < order.index(freed)
