"""What a client of a comparison does, whichever product it speaks to; the twin of perf/loads.py.

A script of this folder brings a :class:`Peer` and calls :func:`main`.  It runs as ``SCRIPT ROLE JSON`` in the
Python of the peers' clients, prints ``ready`` when it is set up, starts on a line from its standard input and
ends with one line of JSON.  Moments are CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import uvloop

from perf.pump import percentiles
from tests.child_process import told

WARM_SENDS = 50


class Peer(Protocol):
    """One product's Python client, used as its own documentation would for speed; made from the options.

    Options are what the product's adapter gives and ``topic``, ``size``, ``level``.
    """

    async def open(self) -> None:
        """Connect."""

    async def close(self) -> None:
        """Disconnect; nothing is left running."""

    async def create(self) -> None:
        """Make the topic, at the level that the options name."""

    async def delete(self) -> None:
        """Delete the topic and what it holds."""

    async def publish(self, payloads: list[bytes], count: int) -> None:
        """Send ``count`` records, a bounded number in flight; returns when all are acknowledged."""

    async def send(self, payload: bytes) -> None:
        """Send one record and wait for its acknowledgement."""

    async def fill(self, payloads: list[bytes], count: int) -> None:
        """Store ``count`` records in the cheapest way there is."""

    async def subscribe(self, name: str) -> None:
        """Be ready to read the topic from its start, as a reader whose place the product keeps."""

    async def receive(self) -> int:
        """Wait for records, tell the product that they are done with, and return how many they were."""


def payloads_of(size: int, count: int) -> list[bytes]:
    """Records of ``size`` bytes that differ from each other."""
    return [number.to_bytes(8, "little").ljust(size, b"x")[:size] for number in range(count)]


async def start() -> None:
    print("ready", flush=True)
    await told().wait()


async def create(peer: Peer, options: dict[str, Any]) -> dict[str, Any]:
    await start()
    await peer.create()
    return {}


async def delete(peer: Peer, options: dict[str, Any]) -> dict[str, Any]:
    await start()
    await peer.delete()
    return {}


async def fill(peer: Peer, options: dict[str, Any]) -> dict[str, Any]:
    payloads = payloads_of(options["size"], 1_000)
    await start()
    await peer.fill(payloads, options["record_count"])
    return {}


async def publish(peer: Peer, options: dict[str, Any]) -> dict[str, Any]:
    """``record_count`` records, all acknowledged; ``warm_count`` before the clock runs."""
    payloads, count = payloads_of(options["size"], 1_000), options["record_count"]
    if options["warm_count"]:
        await peer.publish(payloads, options["warm_count"])
    await start()
    started = time.monotonic_ns()
    await peer.publish(payloads, count)
    return {"started_ns": started, "ended_ns": time.monotonic_ns(), "records": count}


async def ack_latency(peer: Peer, options: dict[str, Any]) -> dict[str, Any]:
    """Microseconds from the call to the acknowledgement, ``rate`` sends a second, one at a time."""
    payload, loop = payloads_of(options["size"], 1)[0], asyncio.get_running_loop()
    for _ in range(WARM_SENDS):
        await peer.send(payload)
    await start()
    times, began = [], loop.time()
    due = began
    for _ in range(options["record_count"]):
        due += 1 / options["rate"]
        await asyncio.sleep(max(0.0, due - loop.time()))
        started = time.perf_counter_ns()
        await peer.send(payload)
        times.append((time.perf_counter_ns() - started) / 1000)
    return {**percentiles(times), "seconds": loop.time() - began}


async def read(peer: Peer, options: dict[str, Any]) -> dict[str, Any]:
    """Read until ``record_count`` records came (0: until told) or the parent says stop."""
    wanted, records, first, last = options["record_count"], 0, 0, 0
    await peer.subscribe(options["subscription"])
    print("ready", flush=True)
    stopped = asyncio.ensure_future(told().wait())
    while not stopped.done() and not (wanted and records >= wanted):
        receiving = asyncio.ensure_future(peer.receive())
        await asyncio.wait([receiving, stopped], return_when=asyncio.FIRST_COMPLETED)
        if not receiving.done():
            receiving.cancel()
            await asyncio.gather(receiving, return_exceptions=True)
            break
        if count := receiving.result():
            last = time.monotonic_ns()
            first = first or last
            records += count
    stopped.cancel()
    return {"started_ns": first, "ended_ns": last, "records": records}


async def replay(peer: Peer, options: dict[str, Any]) -> dict[str, Any]:
    """``record_count`` stored records from the start, as a reader that was never there before."""
    records = 0
    await start()
    started = time.monotonic_ns()
    await peer.subscribe(options["subscription"])
    while records < options["record_count"]:
        records += await peer.receive()
    return {"started_ns": started, "ended_ns": time.monotonic_ns(), "records": records}


ROLES: dict[str, Callable[[Peer, dict[str, Any]], Awaitable[dict[str, Any]]]] = {
    role.__name__: role for role in (create, delete, fill, publish, ack_latency, read, replay)
}


async def run(make: Callable[[dict[str, Any]], Peer], role: str, options: dict[str, Any]) -> dict[str, Any]:
    peer = make(options)
    await peer.open()
    try:
        return await ROLES[role](peer, options)
    finally:
        await peer.close()


def main(make: Callable[[dict[str, Any]], Peer]) -> None:
    """What a script of this folder does."""
    print(json.dumps(uvloop.run(run(make, sys.argv[1], json.loads(sys.argv[2])))), flush=True)
