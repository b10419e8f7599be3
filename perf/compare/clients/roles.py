"""What a client of a comparison does, whichever product it speaks to; perf/loads.py plays the roles, too.

A script of this folder brings a :class:`Peer` and calls :func:`main`; it runs in the Python of the peers'
clients.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from itertools import cycle, islice
from typing import Any

from perf.child import Options, Role, Window, go, moments, payloads_of, percentiles, serve, timed_us
from tests.child_process import told

WARM_SENDS = 50


class Peer:
    """One product's Python client, used as its documentation would for speed.

    Made from the options (the address, ``topic``, ``size``, ``level``).  A client brings ``send(payload)``,
    which waits for the acknowledgement, ``subscribe(name)`` from the start as a reader whose place is kept,
    and ``receive()``, which returns how many have come.  What it opens it leaves to ``opened`` to close.
    """

    in_flight = 1  # sends side by side, where publish() is the one below

    def __init__(self, options: Options) -> None:
        self.options = options
        self.topic = options["topic"]
        self.opened = AsyncExitStack()

    def fitting(self, most: int, bytes_max: int) -> int:
        """How many records: so many and so many bytes at most."""
        return max(1, min(most, bytes_max // self.options["size"]))

    async def open(self) -> None:
        """Connect."""

    async def close(self) -> None:
        """Close all that was opened, the last first."""
        await self.opened.aclose()

    async def create(self) -> None:
        """Make the topic."""

    async def delete(self) -> None:
        """Delete the topic."""

    async def fill(self, count: int) -> None:
        """Store so many records in the cheapest way."""
        await self.publish(payloads_of(self.options["size"], 1_000), count)

    async def publish(self, payloads: list[bytes], count: int) -> None:
        """With some in flight, until all are acknowledged."""
        window = Window(self.in_flight)
        for payload in islice(cycle(payloads), count):
            await window.add(self.send(payload))
        await window.end()

    async def send(self, payload: bytes) -> None:
        raise NotImplementedError


def step(name: str) -> Callable[..., Any]:
    """A role that is one call of the peer, of which nothing is told; ``given`` are its arguments."""

    async def role(peer: Any, options: Options) -> Options:
        await go()
        await getattr(peer, name)(*options.get("given", ()))
        return {}

    return role


create = step("create")


async def publish(peer: Any, options: Options) -> Options:
    """``record_count`` records, all acknowledged; ``warm_count`` before the clock runs."""
    payloads, count = payloads_of(options["size"], 1_000), options["record_count"]
    if warm_count := options.get("warm_count", 0):
        await peer.publish(payloads, warm_count)
    await go()
    started = time.monotonic_ns()
    await peer.publish(payloads, count)
    return moments(started, count)


async def ack_latency(peer: Any, options: Options) -> Options:
    """Microseconds from the call to the acknowledgement, ``rate`` sends a second, one at a time."""
    payload = payloads_of(options["size"], 1)[0]
    for _ in range(WARM_SENDS):
        await peer.send(payload)
    await go()
    began = time.monotonic()
    times = await timed_us(options["record_count"], lambda: peer.send(payload), options["rate"])
    return {**percentiles(times), "seconds": time.monotonic() - began}


async def read(peer: Any, options: Options) -> Options:
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


async def replay(peer: Any, options: Options) -> Options:
    """``record_count`` stored records from the start, as a reader that was never there before."""
    records = 0
    await go()
    started = time.monotonic_ns()
    await peer.subscribe(options["subscription"])
    if hasattr(peer, "receive_all"):
        records = await peer.receive_all(options["record_count"])
    while records < options["record_count"]:
        records += await peer.receive()
    return moments(started, records)


def played(make: Callable[[Options], Any], role: Callable[..., Any]) -> Role:
    """A role with its peer, which is opened before and closed after it."""

    async def play(options: Options) -> Any:
        peer = make(options)
        await peer.open()
        try:
            return await role(peer, options)
        finally:
            await peer.close()

    return play


def main(make: Callable[[Options], Any]) -> None:
    """What a script of this folder does."""
    roles = {role.__name__: role for role in (publish, ack_latency, read, replay)}
    roles |= {name: step(name) for name in ("create", "delete", "fill", "subscribe")}
    serve({name: played(make, role) for name, role in roles.items()})
