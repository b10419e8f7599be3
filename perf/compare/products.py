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
from perf.compare.driving import Scripted, Tool, steady
from perf.compare.model import GROUPS, Failed, Level, Product, Running, Setting, Spent, Turn, Work
from perf.compare.peers import PEERS, RUST_LONE
from tests.broker_process import BrokerProcess
from tests.child_process import Child

DURABILITY = {level: name for name, level in GROUPS.items()}
BENCH = {"publish": "publish", "latency": "latency", "e2e": "e2e", "replay": "consume"}
BATCH_BYTES = 512 << 10


BATCHES = Scripted(
    name="danube, batches", script="danube_native.py", prefix="/default/", told={"style": "batches"},
    cannot={"latency": "one send at a time is not a batch"},
)  # fmt: skip
ONE_BY_ONE = Scripted(
    name="danube, one by one", script="danube_native.py", prefix="/default/", told={"style": "one by one"},
    cannot={"e2e": "measured in batches"},
)  # fmt: skip


class Grpc(Scripted):
    """The official Python client on the gRPC port; topics are made by Danube's own."""

    def create(self, running: Running, work: Work, stack: ExitStack) -> None:
        BATCHES.create(running, work, stack)

    def child(self, role: str, running: Running, work: Work, **more: Any) -> Child:
        if role == "replay":  # the gRPC API has no word for the earliest record
            BATCHES.run("subscribe", running, work, given=[more["subscription"]])
        return super().child(role, running, work, **more)

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
        return replace(steady(work.rate, work, spent), p50_us=p50_us, p99_us=p99_us)
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
    environment={"PYTHONPATH": str(places.ROOT)},
)


SETTINGS = (
    Setting("danube memory", Level.TAKEN,
            "non-reliable topic: the broker took it; a slow consumer loses its oldest records"),
    Setting("danube written", Level.WRITTEN,
            "written to the log before the ack; a background sync runs at most 100 ms behind"),
    Setting("danube fsync", Level.FSYNC,
            "an fdatasync that covers it returned before the ack; one sync for what has gathered"),
)  # fmt: skip
GRPC = Grpc(name="danube-client, gRPC", script="danube_grpc.py", package="danube", prefix="/default/")
CLIENTS = (BATCHES, ONE_BY_ONE, GRPC, DANUBE_BENCH, RUST_LONE)


def danube_of(workers: int) -> Product:
    """This repository's broker."""

    def start(setting: Setting, directory: Path) -> Running:
        over_tcp = {"DANUBE_SERVER__LOCAL_SOCKET": "off"}  # as everybody else
        broker = BrokerProcess(directory / "data", workers=workers, environment=over_tcp).start()
        address = {
            "url": broker.address, "grpc": f"http://{broker.grpc_address}",
            "durability": DURABILITY[setting.level],
        }  # fmt: skip
        return Running(
            setting=setting, directory=directory, pids=lambda: broker.pids, stop=broker.kill, address=address
        )

    return Product(
        name="danube", settings=SETTINGS, start=start, drivers=dict.fromkeys(Level, CLIENTS),
        version=lambda: f"{danube.__version__}, {workers} worker{'s' if workers > 1 else ''}",
        missing=lambda setting: "", stored_max=10_000_000, ours=True,
    )  # fmt: skip


def products(workers: int = 1) -> tuple[Product, ...]:
    """All of them; Danube with this many workers."""
    return (danube_of(workers), *PEERS)
