"""All products, Danube first: its own client in two styles, the official one over gRPC, ``danube bench``."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import danube
from perf.compare import places
from perf.compare.driving import UNSTORED, Scripted, Tool
from perf.compare.model import GROUPS, Failed, Level, Product, Running, Setting, Spent, Turn, Work
from perf.compare.peers import PEERS, RustLone
from tests.broker_process import BrokerProcess
from tests.child_process import Child

DURABILITY = {level: name for name, level in GROUPS.items()}
BENCH = {"publish": "publish", "latency": "latency", "e2e": "e2e", "replay": "consume"}
BATCH_BYTES = 512 << 10


class Native(Scripted):
    """Danube's own client, in the Python of this process; ``cannot`` is what another style measures."""

    def __init__(self, style: str, cannot: dict[str, str]) -> None:
        super().__init__(f"danube, {style}", "danube_native.py", "danube")
        self.style, self.cannot = style, cannot

    def missing(self, setting: Setting, workload: str) -> str:
        return self.cannot.get(workload, "") or super().missing(setting, workload)

    def not_installed(self) -> str:
        return ""

    def child(self, role: str, running: Running, work: Work, **more: Any) -> Child:
        named = replace(work, topic=f"/default/{work.topic}")
        options = self.options(running, named) | {"style": self.style, **more}
        return Child(self.script, role, options)


BATCHES = Native("batches", {"latency": "one send at a time is not a batch"})
ONE_BY_ONE = Native("one by one", {"e2e": "measured in batches"})


class Grpc(Scripted):
    """The official Python client on the gRPC port; topics are made by Danube's own."""

    def create(self, running: Running, work: Work, stack: ExitStack) -> None:
        BATCHES.create(running, work, stack)

    def child(self, role: str, running: Running, work: Work, **more: Any) -> Child:
        if role == "replay":  # the gRPC API has no word for the earliest record
            BATCHES.run("register", running, work, subscription=more["subscription"])
        return super().child(role, running, replace(work, topic=f"/default/{work.topic}"), **more)

    def fill(self, running: Running, work: Work) -> None:
        BATCHES.fill(running, work)


def bench(running: Running, work: Work) -> list[str]:
    """``danube bench``, which makes its own topic and names the level in its result."""
    durability = str(running.address["durability"])
    count = min(work.count, work.stored) if work.workload == "replay" else work.count
    batch = max(1, min(BATCH_BYTES // (work.size + 8), work.count))
    return [
        *(sys.executable, "-m", "danube", "bench", BENCH[work.workload], "--size", str(work.size)),
        *("--service-addr", str(running.address["url"]), "--count", str(count), "-o", "json"),
        *("--reliable" if durability != "memory" else "--non-reliable", "--durability", durability),
        *(["--rate", str(work.rate)] if work.workload == "latency" else ["--batch", str(batch)]),
    ]


def read_bench(printed: str, running: Running, work: Work, spent: Spent) -> Turn:
    """A turn from the documented result."""
    found, durability = json.loads(printed), running.address["durability"]
    if found["durability"] != durability:
        raise Failed(f"danube bench measured at {found['durability']!r} instead of {durability!r}")
    count = found["records"]
    if work.workload == "latency":
        p50_us, p99_us = found["ack_us"]["p50"], found["ack_us"]["p99"]
        lasted_s = count / work.rate
        return Turn(
            rate=work.rate, seconds=lasted_s, records=count, p50_us=p50_us, p99_us=p99_us, spent=spent
        )
    known = None if work.workload == "replay" else spent  # also that of storing the records
    return Turn(
        rate=found["records_per_second"], seconds=found["seconds"], records=count, lost=found["missing"],
        spent=known,
    )  # fmt: skip


DANUBE_BENCH = Tool(
    name="danube bench",
    needs=places.Program(sys.executable),
    command=bench,
    read=read_bench,
    lacks=lambda setting, workload: UNSTORED if (setting.level, workload) == (Level.TAKEN, "replay") else "",
    environment={"PYTHONPATH": str(places.ROOT)},
)


class Danube:
    """This repository's broker."""

    name = "danube"
    ours = True
    stored_max = 10_000_000
    settings: tuple[Setting, ...] = (
        Setting("danube memory", Level.TAKEN,
                "non-reliable topic: the broker took it; a slow consumer loses its oldest records"),
        Setting("danube written", Level.WRITTEN,
                "written to the log before the ack; a background sync runs at most 100 ms behind"),
        Setting("danube fsync", Level.FSYNC,
                "an fdatasync that covers it returned before the ack; one sync for what has gathered"),
    )  # fmt: skip

    def __init__(self, workers: int = 1) -> None:
        self.workers = workers

    def clients(self, setting: Setting) -> tuple[Any, ...]:
        grpc = Grpc("danube-client, gRPC", "danube_grpc.py", "danube")
        return (BATCHES, ONE_BY_ONE, grpc, DANUBE_BENCH, RustLone())

    def missing(self, setting: Setting) -> str:
        return ""

    def version(self) -> str:
        return f"{danube.__version__}, {self.workers} worker{'s' if self.workers > 1 else ''}"

    def start(self, setting: Setting, directory: Path) -> Running:
        over_tcp = {"DANUBE_SERVER__LOCAL_SOCKET": "off"}  # as everybody else
        broker = BrokerProcess(directory / "data", workers=self.workers, environment=over_tcp).start()
        address: dict[str, object] = {
            "url": broker.address, "grpc": f"http://{broker.grpc_address}",
            "durability": DURABILITY[setting.level],
        }  # fmt: skip
        return Running(setting=setting, directory=directory, server=Tree(broker), address=address)


class Tree:
    """The broker's processes."""

    def __init__(self, broker: BrokerProcess) -> None:
        self._broker = broker

    def pids(self) -> list[int]:
        return self._broker.pids

    def stop(self) -> None:
        self._broker.kill()


def products(workers: int = 1) -> tuple[Product, ...]:
    """All of them; Danube with this many workers."""
    return (Danube(workers), *PEERS)
