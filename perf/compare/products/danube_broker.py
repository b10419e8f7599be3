"""Danube: its own client in batches and one by one, the official client over gRPC, and ``danube bench``."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import danube
from danube import sync
from perf.compare import places
from perf.compare.figures import Spent, Turn
from perf.compare.levels import GROUPS, Level
from perf.compare.processes import Failed
from perf.compare.product import Client, Running, Setting, Work
from perf.compare.scripted import Scripted
from perf.compare.tooling import spend
from perf.turns import Bench, Settings
from tests.broker_process import BrokerProcess
from tests.child_process import Child

DURABILITY = {level: name for name, level in GROUPS.items()}
NOWAIT_STEP = 1_000  # what perf/loads.py sends between two looks at the clock
WARM_BATCHES = 4


class Tree:
    """The broker's processes."""

    def __init__(self, broker: BrokerProcess) -> None:
        self._broker = broker

    def pids(self) -> list[int]:
        return self._broker.pids

    def stop(self) -> None:
        self._broker.kill()


@dataclass(kw_only=True)
class RunningDanube(Running):
    """A broker, and how many workers it has."""

    broker: BrokerProcess
    workers: int

    @property
    def durability(self) -> str:
        return DURABILITY[self.setting.level]

    def bench(self, size: int) -> Bench:
        settings = Settings(
            directory=self.directory, size=size, durability=self.durability, workers=self.workers
        )
        return Bench(settings, self.broker)

    def create(self, topic: str, size: int) -> None:
        """Make a topic and see that its level is the one that the table will name."""
        with sync.connect(self.broker.address) as client:
            client.admin.create_topic(
                topic,
                reliable=self.durability != "memory",
                durability=self.durability,
                max_record_bytes=max(size, 1 << 20),
            )
            found = client.admin.describe_topic(topic).topic.durability
        if found != self.durability:
            raise Failed(f"the topic's level is {found!r} instead of {self.durability!r}")

    def subscribe(self, topic: str, name: str) -> None:
        """Make a subscription that begins with the first record."""
        with (
            sync.connect(self.broker.address) as client,
            client.consumer(topic, subscription=name, mode="exclusive", start="earliest"),
        ):
            pass

    def delete(self, topic: str) -> None:
        with sync.connect(self.broker.address) as client:
            client.admin.delete_topic(topic)


def topic_of(work: Work) -> str:
    return f"/default/{work.topic}"


class Own(Scripted):
    """What the clients of this package share: topics are made through its administration."""

    roles: ClassVar[dict[str, str]]
    other: ClassVar[dict[str, str]]  # workload: why it is another client's

    def __init__(self, name: str) -> None:
        super().__init__(name, "", "danube")

    def missing(self, setting: Setting, workload: str) -> str:
        return self.other.get(workload, "") or super().missing(setting, workload)

    def not_installed(self) -> str:
        return ""

    def create(self, running: Running, work: Work, stack: ExitStack) -> None:
        own = _own(running)
        own.create(topic_of(work), work.size)
        stack.callback(own.delete, topic_of(work))

    def child(self, role: str, running: Running, work: Work, **more: Any) -> Child:
        bench = _own(running).bench(work.size)
        options = {
            **bench.options(keep=True, rate=work.rate, record_count=work.count),
            "topic": topic_of(work),
            **self.counts(work),
            **more,
        }
        return bench.load(self.roles[role], options)

    def counts(self, work: Work) -> dict[str, int]:
        """How the load is told what to send."""
        return {}

    def fill(self, running: Running, work: Work) -> None:
        own = _own(running)
        own.create(topic_of(work), work.size)
        whole = Batches().whole(replace(work, count=work.stored))
        Batches().run("publish", running, whole, warm_count=0)
        running.stored[work.topic] = whole.count


class Batches(Own):
    """``send_many`` with several calls under way, ``batches()`` with one acknowledgement for each batch."""

    roles: ClassVar = {"publish": "publish", "read": "read_batches", "replay": "replay"}
    other: ClassVar = {"latency": "one send at a time is not a batch"}

    def __init__(self) -> None:
        super().__init__("danube, batches")

    @staticmethod
    def batch(work: Work) -> int:
        return max(1, min(Settings(directory=Path(), size=work.size).batch_records, work.count))

    def whole(self, work: Work) -> Work:
        return replace(work, count=max(1, work.count // self.batch(work)) * self.batch(work))

    def warm_count(self, work: Work) -> int:
        return WARM_BATCHES * self.batch(work)

    def counts(self, work: Work) -> dict[str, int]:
        batch = self.batch(work)
        return {"batch": batch, "batch_count": work.count // batch, "warm_count": WARM_BATCHES}


class OneByOne(Own):
    """``send_nowait`` and ``send``; ``async for`` with one acknowledgement for each message."""

    roles: ClassVar = {"publish": "nowait", "ack_latency": "ack_latency", "replay": "consume"}
    other: ClassVar = {"e2e": "measured in batches"}

    def __init__(self) -> None:
        super().__init__("danube, one by one")

    def whole(self, work: Work) -> Work:
        if work.workload != "publish":
            return work
        return replace(work, count=max(1, work.count // NOWAIT_STEP) * NOWAIT_STEP)


class Grpc(Scripted):
    """The official Python client on the gRPC port."""

    def __init__(self) -> None:
        super().__init__("danube-client, gRPC", "danube_grpc.py", "danube")

    def create(self, running: Running, work: Work, stack: ExitStack) -> None:
        own = _own(running)
        own.create(topic_of(work), work.size)
        stack.callback(own.delete, topic_of(work))

    def child(self, role: str, running: Running, work: Work, **more: Any) -> Child:
        if role == "replay":  # the gRPC API has no word for the earliest record
            _own(running).subscribe(topic_of(work), more["subscription"])
        return super().child(role, running, replace(work, topic=topic_of(work)), **more)

    def fill(self, running: Running, work: Work) -> None:
        Batches().fill(running, work)


class DanubeBench:
    """``danube bench``, which makes its own topic and names the level in its result."""

    name = "danube bench"
    kind = "tool"
    commands: ClassVar = {"publish": "publish", "latency": "latency", "e2e": "e2e", "replay": "consume"}

    def missing(self, setting: Setting, workload: str) -> str:
        unstored = workload == "replay" and setting.level is Level.TAKEN
        return "nothing is stored that could be read again" if unstored else ""

    def turn(self, running: Running, work: Work) -> Turn:
        own = _own(running)
        count = min(work.count, work.stored) if work.workload == "replay" else work.count
        command = [
            *(sys.executable, "-m", "danube", "bench", self.commands[work.workload]),
            *("--service-addr", own.broker.address, "--size", str(work.size), "--count", str(count)),
            *("--reliable" if own.durability != "memory" else "--non-reliable", "-o", "json"),
            *("--durability", own.durability),
        ]
        latency = work.workload == "latency"
        command += ["--rate", str(work.rate)] if latency else ["--batch", str(Batches.batch(work))]
        finished, spent = spend(running, command, {"PYTHONPATH": str(places.ROOT)})
        return self.read(json.loads(finished.output), work, own.durability, spent)

    @staticmethod
    def read(found: dict[str, Any], work: Work, durability: str, spent: Spent) -> Turn:
        """A turn from the documented result."""
        if found["durability"] != durability:
            raise Failed(f"danube bench measured at {found['durability']!r} instead of {durability!r}")
        if work.workload == "latency":
            acked = found["ack_us"]
            return Turn(
                rate=work.rate,
                seconds=found["records"] / work.rate,
                records=found["records"],
                p50_us=acked["p50"],
                p99_us=acked["p99"],
                spent=spent,
            )
        known = (
            None if work.workload == "replay" else spent
        )  # its CPU time is also that of storing the records
        return Turn(
            rate=found["records_per_second"],
            seconds=found["seconds"],
            records=found["records"],
            lost=found["missing"],
            spent=known,
        )


def _own(running: Running) -> RunningDanube:
    if not isinstance(running, RunningDanube):
        raise TypeError("a client of Danube measures Danube only")
    return running


class Danube:
    """This repository's broker."""

    name = "danube"
    ours = True
    stored_max = 10_000_000
    settings: tuple[Setting, ...] = (
        Setting(
            name="danube memory",
            level=Level.TAKEN,
            promise="non-reliable topic: the broker took it; a slow consumer loses its oldest records",
        ),
        Setting(
            name="danube written",
            level=Level.WRITTEN,
            promise="written to the log before the ack; a background sync runs at most 100 ms behind",
        ),
        Setting(
            name="danube fsync",
            level=Level.FSYNC,
            promise="an fdatasync that covers it returned before the ack; one sync for what has gathered",
        ),
    )

    def __init__(self, workers: int = 1) -> None:
        self.workers = workers

    def clients(self, setting: Setting) -> tuple[Client, ...]:
        return (Batches(), OneByOne(), Grpc(), DanubeBench())

    def missing(self, setting: Setting) -> str:
        return ""

    def version(self) -> str:
        return f"{danube.__version__}, {self.workers} worker{'s' if self.workers > 1 else ''}"

    def start(self, setting: Setting, directory: Path) -> Running:
        over_tcp = {"DANUBE_SERVER__LOCAL_SOCKET": "off"}  # as everybody else
        broker = BrokerProcess(directory / "data", workers=self.workers, environment=over_tcp).start()
        return RunningDanube(
            setting=setting,
            directory=directory,
            server=Tree(broker),
            address={"url": f"http://{broker.grpc_address}"},
            broker=broker,
            workers=self.workers,
        )
