"""The replicated log by itself: three members in one process, messages handed over, every disk synced.

    python -m perf.raft [--scale 1] [--directory DIRECTORY]

One thread does the work of three members, so a cluster of three hosts has about three times the room;
what a network adds to the latency is not in here.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from danube.cluster.raft.engine import EngineStatus, Members
from danube.cluster.raft.raftos_engine import RaftosEngine
from danube.errors import DanubeError

ENTRY = b"x" * 100
IN_FLIGHT = 512


class Counting:
    """The smallest machine."""

    def __init__(self) -> None:
        self.applied_index = self.count = 0

    def apply(self, index: int, term: int, entry: bytes) -> int:
        self.applied_index = index
        self.count += 1
        return self.count

    def freeze(self) -> Callable[[], bytes]:
        frozen = json.dumps([self.applied_index, self.count]).encode()
        return lambda: frozen

    def stored(self, snapshot: bytes) -> None:
        pass

    def thaw(self, snapshot: bytes) -> object:
        return None

    def restore(self, index: int, snapshot: bytes, thawed: object) -> None:
        _, self.count = json.loads(snapshot)
        self.applied_index = index


class Host:
    """Hands messages to the other members of this process, one turn later."""

    def __init__(self, group: Group, name: str) -> None:
        self.group, self.name = group, name

    def send(self, node_id: str, message: bytes) -> None:
        self.group.loop.call_soon(self.group.hand, self.name, node_id, message)

    def role_changed(self, status: EngineStatus) -> None:
        pass

    def members_changed(self, members: Members) -> None:
        pass

    def failed(self, error: BaseException) -> None:
        self.group.failure = error


class Group:
    """Members of one process, some of them down."""

    def __init__(self, directory: Path, size: int) -> None:
        self.directory = directory
        self.loop = asyncio.get_running_loop()
        self.members = Members({f"m{number}": "" for number in range(size)})
        self.engines: dict[str, RaftosEngine] = {}
        self.failure: BaseException | None = None
        for name in self.members.voters:
            self.start(name)

    def start(self, name: str) -> float:
        """Start a member; return how many seconds that took."""
        began = time.perf_counter()
        engine = RaftosEngine(
            name,
            self.directory / name,
            Counting(),
            Host(self, name),
            bootstrap=self.members,
            heartbeat_ms=100,
        )
        engine.start()
        self.engines[name] = engine
        return time.perf_counter() - began

    def stop(self, name: str) -> None:
        self.engines.pop(name).stop()

    def hand(self, source: str, target: str, message: bytes) -> None:
        engine = self.engines.get(target)
        if engine is not None:
            engine.receive(source, message)

    async def leader(self) -> RaftosEngine:
        while self.failure is None:
            for engine in self.engines.values():
                if engine.status.role == "leader":
                    try:
                        await engine.read_barrier()
                    except DanubeError:
                        continue
                    return engine
            await asyncio.sleep(0.02)
        raise self.failure

    def bytes_on_disk(self) -> int:
        return max(
            sum(path.stat().st_size for path in (self.directory / name).iterdir())
            for name in self.members.voters
        )


async def sequential(group: Group, count: int) -> dict[str, float]:
    leader = await group.leader()
    times = []
    for _ in range(count):
        began = time.perf_counter()
        await leader.propose(ENTRY)
        times.append(time.perf_counter() - began)
    times.sort()
    return {
        "writes_per_s": round(count / sum(times)),
        "p50_ms": round(times[count // 2] * 1e3, 2),
        "p99_ms": round(times[count * 99 // 100] * 1e3, 2),
    }


async def concurrent(group: Group, count: int) -> dict[str, float]:
    leader = await group.leader()
    began = time.perf_counter()
    left = iter(range(count))

    async def caller() -> None:
        for _ in left:
            await leader.propose(ENTRY)

    await asyncio.gather(*(caller() for _ in range(IN_FLIGHT)))
    return {"writes_per_s": round(count / (time.perf_counter() - began)), "in_flight": IN_FLIGHT}


async def measure(directory: Path, scale: float, say: Callable[[str, dict[str, Any]], None]) -> None:
    group = Group(directory, 3)
    few, many = max(20, int(3_000 * scale)), max(IN_FLIGHT, int(100_000 * scale))
    say("sequential", await sequential(group, few))
    say("concurrent", await concurrent(group, many))
    total, rest = max(many, int(1_000_000 * scale)), []
    while group.engines["m0"].status.last_index < total:
        rest.append((await concurrent(group, many))["writes_per_s"])
    say("concurrent, later", {"writes_per_s": rest})
    say("sequential, after all those", await sequential(group, few))
    group.stop(next(name for name, one in group.engines.items() if one.status.role != "leader"))
    say("sequential, one of three down", await sequential(group, few))
    say("concurrent, one of three down", await concurrent(group, many))
    for name in list(group.engines):
        group.stop(name)
    say("on disk", {"entries": total, "mib": round(group.bytes_on_disk() / (1 << 20), 1)})
    seconds = [round(group.start(name), 3) for name in group.members.voters]
    await group.leader()
    say("restart", {"entries": total, "seconds": seconds, "log": group.engines["m0"].status.snapshot_index})
    for name in list(group.engines):
        group.stop(name)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m perf.raft", description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="1 writes a million entries")
    parser.add_argument("--directory", type=Path, default=None, help="where the members' disks are")
    chosen = parser.parse_args(arguments)
    directory = Path(tempfile.mkdtemp(prefix="raft-", dir=chosen.directory))
    try:
        asyncio.run(
            measure(directory, chosen.scale, lambda what, facts: print(f"{what:32}", json.dumps(facts)))
        )
    finally:
        shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
