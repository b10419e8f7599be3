"""Rows of a cluster's metadata, over three real controllers: processes, sockets, every disk synced.

A write goes the way of a worker's: Unix socket, controller, a majority's disks, the host's own copy, answer.
Members and clients share this machine's cores, and three members its one disk.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import time
from typing import Any, cast

from danube.cluster.control.calls import Propose, Proposed, decode_answer, encode
from danube.cluster.control.door import REQUESTS_MAX
from danube.cluster.links.frames import FrameReader, Kind, Lane, pack_frame
from danube.core.cluster.commands import PutKey
from danube.core.metadata.commands import encode_command, join_commands
from danube.limits import MIB
from perf.child import percentiles
from perf.turns import Bench, Plan, Settings
from tests.broker_process import wait_until
from tests.cluster_process import HEARTBEAT_MS, Cluster, MemberProcess

SEQUENTIAL = 1_000
CONCURRENT = 50_000
LONG = 1_000_000
KILLS = 20
KEYS = 8
IN_FLIGHT = 512
BATCH = 100
READY_S = 60.0
TIMEOUT_MS = 60_000
WRITERS_PER_LINK = REQUESTS_MAX // 2


class Link(asyncio.Protocol):
    """A connection of a worker that has several requests under way."""

    def __init__(self) -> None:
        self._frames = FrameReader(Lane.CALLS.frame_bytes_max)
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._numbers = itertools.count(1)
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        for frame in self._frames.feed(data):
            self._waiting.pop(frame.number).set_result(frame.body)

    def connection_lost(self, error: Exception | None) -> None:
        for waiting in self._waiting.values():
            waiting.set_exception(error or ConnectionError("the controller closed the connection"))

    async def ask(self, body: bytes) -> bytes:
        number = next(self._numbers)
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._transport.write(pack_frame(Kind.REQUEST, body, number))
        return await waiting

    def close(self) -> None:
        self._transport.close()


async def write_many(path: str, count: int, writers: int, batch: int, size: int) -> float:
    """Have ``count`` keys put by ``writers``, ``batch`` in each proposal; keys a second."""
    loop = asyncio.get_running_loop()
    needed = -(-writers // WRITERS_PER_LINK)
    links = [(await loop.create_unix_connection(Link, path))[1] for _ in range(needed)]
    proposals = iter(range(-(-count // batch)))
    value, run = b"x" * size, secrets.token_hex(4)

    async def writer(place: int) -> None:
        puts = [PutKey(key=f"/perf/{place}/{number}", value=value) for number in range(batch)]
        commands = join_commands([encode_command(put) for put in puts])
        for sequence, _ in enumerate(proposals, 1):
            request = Propose(f"{run}-{place}", sequence, commands, TIMEOUT_MS)
            answer = decode_answer(await links[place % needed].ask(encode(request)))
            if not isinstance(answer, Proposed) or any(outcome.error for outcome in answer.outcomes):
                raise AssertionError(f"a write was not agreed on: {answer}")

    began = time.perf_counter()
    try:
        await asyncio.gather(*(writer(place) for place in range(writers)))
    finally:
        for link in links:
            link.close()
    return count / (time.perf_counter() - began)


def few(settings: Settings) -> int:
    """So many writes one after the other that they make 64 MiB at most."""
    return max(10, min(settings.scaled(SEQUENTIAL), 64 * MIB // settings.size))


def disk_rate(settings: Settings) -> float:
    """Writes a second of this disk by itself: an append of one entry and its sync, again and again."""
    count = few(settings)
    entry = b"x" * settings.size
    with (settings.directory / "floor").open("wb", buffering=0) as file:
        began = time.perf_counter()
        for _ in range(count):
            file.write(entry)
            os.fdatasync(file.fileno())
        return count / (time.perf_counter() - began)


def one_by_one(member: MemberProcess, settings: Settings) -> dict[str, float]:
    """One worker at this member's host, one write after the other."""
    count, value, times_us = few(settings), b"x" * settings.size, []
    with member.log() as log:
        log.propose(PutKey(key="/perf/first", value=b""))
        for number in range(count):
            began = time.perf_counter()
            log.propose(PutKey(key=f"/perf/{number % KEYS}", value=value))
            times_us.append((time.perf_counter() - began) * 1e6)
    return {"value": count / sum(times_us) * 1e6, **percentiles(times_us)}


def lengthened(cluster: Cluster, settings: Settings) -> int:
    """Have many commands agreed on, the same keys again and again; how many."""
    count = settings.scaled(LONG, IN_FLIGHT * BATCH)
    asyncio.run(write_many(cluster.leader().socket_path, count, 16, BATCH, settings.size))
    return count


def started(bench: Bench, name: str) -> Cluster:
    directory = bench.settings.directory / name
    directory.mkdir()
    return bench.enter_context(Cluster(directory))


# -- workloads --------------------------------------------------------------------------------------


def sequential(bench: Bench) -> Plan:
    """One write after the other at the leader's host, against appends and syncs of a file."""
    settings, cluster = bench.settings, started(bench, "c")
    goal: dict[str, Any] = {"danube_min": 500}
    if settings.size > 1_024:
        goal = {"also": {"they pass": lambda details: True}}  # or the row fails
    details = {"nice": os.nice(0)}  # members inherit it; it says much where others work, too
    return Plan(
        lambda: disk_rate(settings), lambda: one_by_one(cluster.leader(), settings), "writes/s",
        details=details, **goal,
    )  # fmt: skip


def concurrent(bench: Bench) -> Plan:
    """512 writes on their way at once, of as many origins, against one after the other on the bare disk."""
    settings, cluster = bench.settings, started(bench, "c")
    count = settings.scaled(CONCURRENT, IN_FLIGHT)

    def danube() -> float:
        return asyncio.run(write_many(cluster.leader().socket_path, count, IN_FLIGHT, 1, settings.size))

    details = {"in_flight": IN_FLIGHT}
    return Plan(lambda: disk_rate(settings), danube, "writes/s", danube_min=10_000, details=details)


def later(bench: Bench) -> Plan:
    """Writes behind a million commands, against those of a cluster that has just begun."""
    settings = bench.settings
    new, old = started(bench, "new"), started(bench, "old")
    details = {"commands": lengthened(old, settings)}
    return Plan(
        lambda: one_by_one(new.leader(), settings)["value"], lambda: one_by_one(old.leader(), settings),
        "writes/s", ratio_min=0.8, details=details,
    )  # fmt: skip


def failover(bench: Bench) -> Plan:
    """From kill -9 of the leader to the answer of a write at another member, p99."""
    cluster = started(bench, "c")
    kills = bench.settings.scaled(KILLS)

    def once() -> float:
        leader = cluster.leader(READY_S)
        other = next(member for member in cluster.members if member is not leader)
        with other.log() as log:
            log.propose(PutKey(key="/perf/before", value=b""))
            began = time.perf_counter()
            leader.kill()
            log.propose(PutKey(key="/perf/after", value=b""))
            spent = time.perf_counter() - began
        leader.start()
        wait_until(lambda: (status := leader.status()) is not None and bool(status.leader_id), READY_S, "it")
        return spent * 1e3

    def danube() -> dict[str, float]:
        times = sorted(once() for _ in range(kills))
        return {"value": times[kills * 99 // 100], "p50_ms": round(times[kills // 2]), "kills": kills}

    details = {"heartbeat_ms": HEARTBEAT_MS}
    return Plan(lambda: 5.0 * HEARTBEAT_MS, danube, "ms", danube_max=3_000, details=details)


def restart_s(cluster: Cluster) -> float:
    """Seconds from the start of a member that was killed until it holds all that it held."""
    leader = cluster.leader(READY_S)
    member = next(member for member in cluster.members if member is not leader)
    status = leader.status(READY_S)
    assert status is not None
    member.kill()
    began = time.perf_counter()
    member.start()

    def level() -> bool:
        now = member.status(READY_S)
        return now is not None and now.version >= status.version

    wait_until(level, READY_S, f"{member.data_dir.name} is there again\n{member.output[-1500:]}")
    return time.perf_counter() - began


def restart(bench: Bench) -> Plan:
    """A member that is killed and started again behind a million commands, against behind few."""
    new, old = started(bench, "new"), started(bench, "old")
    details = {"commands": lengthened(old, bench.settings)}
    return Plan(lambda: restart_s(new), lambda: restart_s(old), "s", danube_max=2, details=details)
