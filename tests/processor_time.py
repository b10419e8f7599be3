"""Bounds on processor time that also hold on a slow, shared host."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

from perf.machine import python_call_ns

USUAL_CALL_NS = 40.0
"""What calling an empty function takes where the bounds were chosen."""


@contextmanager
def processor_time_within(seconds: float) -> Iterator[None]:
    """Fail when the block takes this thread more than ``seconds`` of processor time.

    Where Python runs slower at the moment, as much more is allowed. What other tests left in memory is not
    searched for garbage meanwhile, and what their threads do is not counted.
    """
    call_ns = python_call_ns()
    gc.freeze()
    started_s = time.thread_time()
    try:
        yield
        spent_s = time.thread_time() - started_s
    finally:
        gc.unfreeze()
    slower = max(call_ns, python_call_ns(), USUAL_CALL_NS) / USUAL_CALL_NS
    assert spent_s < seconds * slower, f"{spent_s:.3f} s of {seconds} s, on a host {slower:.1f} times slower"
