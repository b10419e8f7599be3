"""Processes of a measurement as they see themselves: ready, told to go, a result of one line of JSON.

A script runs as ``SCRIPT ROLE JSON``.  Moments are CLOCK_MONOTONIC nanoseconds, which all processes of one
machine share.  Clients of other brokers run this in a Python of their own, so nothing of Danube is imported.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import uvloop

from tests.child_process import told

Options = dict[str, Any]
Role = Callable[[Options], Awaitable[Any]]


async def go() -> None:
    """Tell the parent that this process is set up, and wait for its word."""
    print("ready", flush=True)
    await told().wait()


def moments(started: int, records: int, ended: int = 0) -> Options:
    """The result of a role: when it worked (until now by default), and on how many records."""
    return {"started_ns": started, "ended_ns": ended or time.monotonic_ns(), "records": records}


def payloads_of(size: int, count: int) -> list[bytes]:
    """Records of ``size`` bytes that differ from each other."""
    return [number.to_bytes(8, "little").ljust(size, b"x")[:size] for number in range(count)]


def percentiles(values: list[float]) -> dict[str, Any]:
    ordered = sorted(values)
    return {
        "count": len(ordered),
        "p50_us": round(ordered[len(ordered) // 2], 1),
        "p99_us": round(ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)], 1),
        "max_us": round(ordered[-1], 1),
    }


class Window:
    """A bounded number of calls side by side; their errors are raised in order."""

    def __init__(self, in_flight: int) -> None:
        self.in_flight = in_flight
        self._pending: deque[asyncio.Future[Any]] = deque()

    async def add(self, call: Any) -> None:
        while len(self._pending) >= self.in_flight or (self._pending and self._pending[0].done()):
            await self._pending.popleft()
        self._pending.append(asyncio.ensure_future(call))

    async def end(self) -> None:
        while self._pending:
            await self._pending.popleft()


class Pace:
    """Sleeps until the next of ``rate`` moments a second; 0: not at all."""

    def __init__(self, rate: float) -> None:
        self._step_s = 1 / rate if rate else 0.0
        self._due_s = time.monotonic()

    async def wait(self) -> None:
        if self._step_s:
            self._due_s += self._step_s
            await asyncio.sleep(max(0.0, self._due_s - time.monotonic()))


async def timed_us(calls: int, call: Callable[[], Awaitable[Any]], rate: float = 0) -> list[float]:
    """Microseconds of each of ``calls`` awaited calls, at ``rate`` a second or back to back."""
    times, pace = [], Pace(rate)
    for _ in range(calls):
        await pace.wait()
        started = time.perf_counter_ns()
        await call()
        times.append((time.perf_counter_ns() - started) / 1000)
    return times


def serve(roles: Mapping[str, Role], run: Callable[..., Any] = uvloop.run) -> None:
    """Play the role of this process's command line and print its result."""
    print(json.dumps(run(roles[sys.argv[1]](json.loads(sys.argv[2])))), flush=True)
