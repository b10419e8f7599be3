"""Danube beside the floor, turn by turn, in one run.

A row of perf/rows.py gets a :class:`Bench` (broker, floor server and a fresh topic name at hand) and
returns its :class:`Plan`; :func:`compare` lets the two measurements take turns and returns one dictionary.
"""

from __future__ import annotations

import importlib
import itertools
import os
import secrets
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

from danube import sync
from danube.client.machine.admin import TopicInfo
from danube.limits import GIB
from perf import machine
from perf.rows import BY_NAME
from tests.broker_process import ROOT, BrokerProcess
from tests.child_process import Child
from tests.e2e.authority_site import ENVIRONMENT, root

__all__ = ["GIB", "ROOT", "Bench", "Plan", "Settings", "Skipped"]
TURN_BYTES = GIB * 5 // 4  # what most turns write, and some more
CLIENT_BATCH_BYTES = 512 << 10  # where the client cuts what send_many is given
FRAME_AND_BATCH_HEADERS = 16 + 104 + 8  # frame, batch and padded producer name
STOLEN_MAX = 0.01  # of the processors' time while one side is measured, with its set-up
Measure = Callable[[], float | dict[str, Any]]


class Skipped(Exception):
    """A row cannot be measured here; the message says what is missing and how to get it."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What one comparison varies; ``scale`` multiplies the work and ``count`` is the workload's own."""

    directory: Path
    size: int = 100
    batch: int = 0
    durability: str = "written"
    workers: int = 1
    rounds: int = 3
    scale: float = 1.0
    count: int = 0

    @property
    def batch_records(self) -> int:
        return self.batch or max(1, CLIENT_BATCH_BYTES // (self.size + 8))

    @property
    def frame_bytes(self) -> int:
        """Size of the frame in which Danube sends such a batch."""
        columns = (4 * (self.batch_records + 1) + 7) // 8 * 8 + (self.batch_records * self.size + 7) // 8 * 8
        return FRAME_AND_BATCH_HEADERS + columns

    def scaled(self, count: float, least: int = 1) -> int:
        """An amount of work, by ``scale``."""
        return max(least, int(count * self.scale))

    def batches(self, total_bytes: int) -> int:
        """Number of batches that make ``total_bytes``, scaled."""
        return max(1, self.scaled(total_bytes) // self.frame_bytes)

    def sent(self, total_bytes: int) -> dict[str, int]:
        """What a producer sends: batches that make ``total_bytes``, behind four that warm up."""
        count = self.batches(total_bytes)
        return {"record_count": count * self.batch_records, "warm_count": 4 * self.batch_records}


@dataclass
class Plan:
    """Two measurements that take turns, what they count and what is aimed for.

    ``within`` is how much more than the floor is allowed, in their unit.  ``also`` has further targets: their
    words, and what judges the details at the end.
    """

    floor: Measure
    danube: Measure
    unit: str = "records/s"
    _: KW_ONLY
    ratio_min: float = 0
    ratio_max: float = 0
    danube_min: float = 0
    danube_max: float = 0
    within: float = 0
    also: Mapping[str, Callable[[dict[str, Any]], bool]] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)

    def goals(self, ratio: float, danube: float) -> dict[str, bool]:
        """Each target in words, and whether it is met."""
        more = danube - danube / ratio
        bounds = {
            f"ratio >= {self.ratio_min}": (self.ratio_min, ratio >= self.ratio_min),
            f"ratio <= {self.ratio_max}": (self.ratio_max, ratio <= self.ratio_max),
            f">= {self.danube_min:,} {self.unit}": (self.danube_min, danube >= self.danube_min),
            f"<= {self.danube_max:,} {self.unit}": (self.danube_max, danube <= self.danube_max),
            f"<= {self.within:,} {self.unit} more than the floor": (self.within, more <= self.within),
        }
        found = {words: met for words, (bound, met) in bounds.items() if bound}
        return found | {words: judge(self.details) for words, judge in self.also.items()}


class Bench(ExitStack):
    """The processes of one comparison; closing it leaves nothing behind."""

    def __init__(self, settings: Settings, broker: BrokerProcess | None = None) -> None:
        """``broker`` is one that runs already and is left running; without it one is started."""
        super().__init__()
        self.settings = settings
        self._name, self._numbers = secrets.token_hex(4), itertools.count()
        self._broker = broker
        self._floor_port = 0
        self._topics: list[str] = []

    def __enter__(self) -> Bench:
        self.touch_memory(2 * GIB)
        return self

    @property
    def broker(self) -> BrokerProcess:
        if self._broker is None:
            self._broker = self.start_broker("data")
        return self._broker

    def start_broker(self, name: str, environment: Mapping[str, str] | None = None) -> BrokerProcess:
        """A broker with a directory of its own, which is killed when this bench is closed."""
        directory, workers = self.settings.directory / name, self.settings.workers
        broker = BrokerProcess(directory, workers=workers, environment=environment)
        self.callback(broker.kill)
        return broker.start()

    def asking(self) -> BrokerProcess:
        """Another broker, which asks for a token; all loads bear one from now on."""
        os.environ["DANUBE_TOKEN"] = root()  # a broker that asks nobody does not look at it
        self.callback(os.environ.pop, "DANUBE_TOKEN")
        return self.start_broker("asks", ENVIRONMENT)

    def options(
        self, broker: BrokerProcess | None = None, *, keep: bool = False, **more: Any
    ) -> dict[str, Any]:
        """What every load needs, with a topic of its own: of another broker, or one of this bench's own.

        The latter is deleted after the turn unless kept.
        """
        topic = f"/default/bench-{self._name}-{next(self._numbers)}"
        if broker is None and not keep:
            self._topics.append(topic)
        return {
            "url": (broker or self.broker).address,
            "topic": topic,
            "size": self.settings.size,
            "batch": self.settings.batch_records,
            "durability": self.settings.durability,
            "workers": self.settings.workers,
            **more,
        }

    def create(self, options: dict[str, Any]) -> TopicInfo:
        """Make the topic of these options at their level."""
        level = options["durability"]
        policy: dict[str, Any] = {"reliable": level != "memory", "durability": level}
        with sync.connect(options["url"]) as client:
            return client.admin.create_topic(options["topic"], **policy)

    def delete(self, options: dict[str, Any]) -> None:
        with sync.connect(options["url"]) as client:
            client.admin.delete_topic(options["topic"])

    def end_turn(self) -> None:
        """Delete this turn's topics, so that their pages serve the next turn, as retention would."""
        for topic in self._topics:
            self.delete({"url": self.broker.address, "topic": topic})
        self._topics = []

    def load(self, name: str, options: dict[str, Any]) -> Child:
        return Child("perf/loads.py", name, options)

    def run(self, name: str, options: dict[str, Any]) -> dict[str, Any]:
        """One load from set-up to result."""
        return self.started(self.load(name, options)).result()

    def started(self, child: Child) -> Child:
        """Let a load go once it is ready and memory for what it sends is there."""
        child.wait_ready()
        self.touch_memory(TURN_BYTES)
        child.go()
        return child

    def touch_memory(self, size: int) -> None:
        machine.touch(self.settings.directory, self.settings.scaled(size))

    def fill(self, options: dict[str, Any], total_bytes: int) -> int:
        """Publish until the topic holds about ``total_bytes``; returns the number of records."""
        sent = self.settings.sent(total_bytes)
        self.run("publish", {**options, "record_count": sent["record_count"]})
        return sent["record_count"]

    def floor_port(self, total_bytes: int) -> int:
        if not self._floor_port:
            options = {
                "directory": str(self.settings.directory),
                "frame_bytes": self.settings.frame_bytes,
                "total_bytes": total_bytes,
                "sync": self.settings.durability == "fsync",
            }
            server = Child("perf/pump.py", "serve", options)
            self.callback(server.stop)
            self._floor_port = int(server.line())
        return self._floor_port

    def floor_rate(self, frame_count: int) -> float:
        """Records/s of the bare pump for the same frames."""
        port = self.floor_port(frame_count * self.settings.frame_bytes)
        options = {"port": port, "frame_bytes": self.settings.frame_bytes, "frame_count": frame_count}
        found = self.started(Child("perf/pump.py", "send", options)).result()
        return per_second(found) * self.settings.batch_records

    def ping(self, count: int, rate: int = 0) -> dict[str, Any]:
        options = {"port": self.floor_port(0), "count": count, "rate": rate}
        return Child("perf/pump.py", "ping", options).result()


def timed(run: Callable[[], Any]) -> float:
    """Seconds of one call."""
    started = time.monotonic()
    run()
    return time.monotonic() - started


def seconds(found: dict[str, Any]) -> float:
    return max(1e-9, (found["ended_ns"] - found["started_ns"]) / 1e9)


def per_second(found: dict[str, Any]) -> float:
    return float(found["records"] / seconds(found))


def plan_of(name: str, bench: Bench) -> Plan:
    """Set a row up and return what it measures; raises Skipped."""
    module, function = BY_NAME[name].measure.split(":")
    plan: Plan = getattr(importlib.import_module(f"perf.{module}"), function)(bench)
    return plan


def compare(name: str, settings: Settings) -> dict[str, Any]:
    """Let floor and Danube take turns and return the medians, their spread and the ratio; raises Skipped."""
    with Bench(settings) as bench:
        plan = plan_of(name, bench)
        floors, danubes, stolen = zip(*_turns(bench, plan, settings.rounds), strict=True)
    floor, danube = statistics.median(floors), statistics.median(danubes)
    ratio = danube / floor
    goals = plan.goals(ratio, danube)
    return {
        "workload": name,
        "size": settings.size,
        "batch": settings.batch_records,
        "durability": settings.durability,
        "workers": settings.workers,
        "unit": plan.unit,
        "floor": rounded(floor),
        "danube": rounded(danube),
        "ratio": round(ratio, 3),
        "target": " and ".join(goals),
        "met": all(goals.values()),
        "rounds": settings.rounds,
        "floor_range": [rounded(min(floors)), rounded(max(floors))],
        "danube_range": [rounded(min(danubes)), rounded(max(danubes))],
        "details": {**plan.details, "stolen": round(max(stolen), 4)},
    }


def _turns(bench: Bench, plan: Plan, rounds: int) -> Iterator[tuple[float, float, float]]:
    """Both figures of each turn, and the share of the processors' time that others had meanwhile.

    One turn to warm up, then ``rounds``; disturbed ones are taken again, as often as that at most.
    """
    left, count = rounds, 0
    while count <= rounds:
        sides = [_side(bench, plan, measure) for measure in (plan.floor, plan.danube)]
        (floor, danube), shares = zip(*sides, strict=True)
        stolen = max(shares)
        if count and stolen > STOLEN_MAX and left:
            left -= 1
            plan.details["turns_again"] = rounds - left
            continue
        if count or not rounds:
            yield floor, danube, stolen
        count += 1


def _side(bench: Bench, plan: Plan, measure: Measure) -> tuple[float, float]:
    """What one side had, and what was stolen meanwhile."""
    started_s, before_s = time.monotonic(), machine.stolen_s()
    found = measure()
    processors_s = (time.monotonic() - started_s) * (os.cpu_count() or 1)
    share = (machine.stolen_s() - before_s) / processors_s
    bench.end_turn()
    if isinstance(found, dict):
        plan.details.update({name: value for name, value in found.items() if name != "value"})
        found = float(found["value"])
    return found, share


def rounded(value: float) -> float | int:
    return round(value) if value >= 1_000 else round(value, 2)
