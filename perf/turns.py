"""Danube beside the floor: one function a workload, each returning one dictionary.

A workload gets a :class:`Bench` (broker, floor server and a fresh topic name at hand) and names two
measurements; :func:`compare` lets them take turns.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perf import memory
from tests.broker_process import BrokerProcess
from tests.child_process import Child

GIB = 1 << 30
TURN_BYTES = GIB * 5 // 4  # what most turns write, and some more
CLIENT_BATCH_BYTES = 512 << 10  # where the client cuts what send_many is given
FRAME_AND_BATCH_HEADERS = 16 + 104 + 8  # frame, batch and padded producer name
BUSY_POLL_US = 2_000  # longer than from one send to the next
Measure = Callable[[], float | dict[str, Any]]


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

    def batches(self, total_bytes: int) -> int:
        """Number of batches that make ``total_bytes``, scaled."""
        return max(1, int(total_bytes * self.scale) // self.frame_bytes)

    def records(self, count: int) -> int:
        """``count`` records, scaled, rounded up to whole thousands."""
        return max(1_000, int(count * self.scale) // 1_000 * 1_000)


@dataclass(kw_only=True)
class Plan:
    """Two measurements that take turns, what they count and what is aimed for."""

    floor: Measure
    danube: Measure
    unit: str = "records/s"
    ratio_min: float = 0.0
    ratio_max: float = 0.0
    danube_min: float = 0.0
    danube_max: float = 0.0
    target: str = ""
    details: dict[str, Any] = field(default_factory=dict)

    def met(self, ratio: float, danube: float) -> bool:
        return (
            ratio >= self.ratio_min
            and danube >= self.danube_min
            and (not self.ratio_max or ratio <= self.ratio_max)
            and (not self.danube_max or danube <= self.danube_max)
        )


class Bench:
    """The processes of one comparison; closing it leaves nothing behind."""

    def __init__(self, settings: Settings, broker: BrokerProcess | None = None) -> None:
        """``broker`` is one that runs already and is left running; without it one is started."""
        self.settings = settings
        self._stack = ExitStack()
        self._numbers = itertools.count()
        self._broker = broker
        self.environment: dict[str, str] = {}  # of the broker that is started
        self._floor_port = 0
        self._topics: list[str] = []

    def __enter__(self) -> Bench:
        self.touch_memory(2 * GIB)
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    @property
    def broker(self) -> BrokerProcess:
        if self._broker is None:
            data_dir = self.settings.directory / "data"
            broker = BrokerProcess(data_dir, workers=self.settings.workers, environment=self.environment)
            self._broker = self.closing(broker).start()
        return self._broker

    def closing(self, broker: BrokerProcess) -> BrokerProcess:
        """Have a broker killed when this bench is closed."""
        self._stack.callback(broker.kill)
        return broker

    def on_close(self, end: Callable[[], None]) -> None:
        """Have something of a workload's own ended when this bench is closed."""
        self._stack.callback(end)

    def options(self, *, keep: bool = False, **more: Any) -> dict[str, Any]:
        """What every load needs, with a topic of its own that is deleted after the turn unless kept."""
        topic = f"/default/bench-{id(self):x}-{next(self._numbers)}"
        if not keep:
            self._topics.append(topic)
        return {
            "url": self.broker.address,
            "topic": topic,
            "size": self.settings.size,
            "batch": self.settings.batch_records,
            "durability": self.settings.durability,
            "workers": self.settings.workers,
            **more,
        }

    def end_turn(self) -> None:
        """Delete this turn's topics, so that their pages serve the next turn, as retention would."""
        if self._topics:
            ending = self.load("delete_topics", {"url": self.broker.address, "topics": self._topics})
            ending.wait_ready().go()
            ending.result()
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
        memory.touch(self.settings.directory, int(size * self.settings.scale))

    def fill(self, options: dict[str, Any], total_bytes: int) -> int:
        """Publish until the topic holds about ``total_bytes``; returns the number of records."""
        batch_count = self.settings.batches(total_bytes)
        self.run("publish", {**options, "batch_count": batch_count, "warm_count": 0})
        return batch_count * self.settings.batch_records

    def floor_port(self, total_bytes: int) -> int:
        if not self._floor_port:
            options = {
                "directory": str(self.settings.directory),
                "frame_bytes": self.settings.frame_bytes,
                "total_bytes": total_bytes,
                "sync": self.settings.durability == "fsync",
            }
            server = Child("perf/pump.py", "serve", options)
            self._stack.callback(server.stop)
            self._floor_port = int(server.line())
        return self._floor_port

    def floor_rate(self, frame_count: int) -> float:
        """Records/s of the bare pump for the same frames."""
        port = self.floor_port(frame_count * self.settings.frame_bytes)
        options = {"port": port, "frame_bytes": self.settings.frame_bytes, "frame_count": frame_count}
        seconds = self.started(Child("perf/pump.py", "send", options)).result()["seconds"]
        return frame_count * self.settings.batch_records / float(seconds)

    def ping(self, count: int, rate: int = 0) -> dict[str, Any]:
        options = {"port": self.floor_port(0), "count": count, "rate": rate}
        return Child("perf/pump.py", "ping", options).result()


def per_second(result: dict[str, Any]) -> float:
    return result["records"] / max(1e-9, (result["ended_ns"] - result["started_ns"]) / 1e9)


def publish(bench: Bench) -> Plan:
    """send_many of one producer, acknowledged at the level, against the bare pump."""
    settings = bench.settings
    count = settings.batches(GIB if settings.durability != "fsync" else GIB // 2)
    absolute = {("written", 100): 4_000_000, ("fsync", 100): 2_000_000}.get(
        (settings.durability, settings.size), 0
    )
    ratio = 0.0 if settings.durability == "fsync" else 0.6
    return Plan(
        floor=lambda: bench.floor_rate(count),
        danube=lambda: per_second(bench.run("publish", bench.options(batch_count=count))),
        ratio_min=ratio,
        danube_min=absolute,
        target=" and ".join(
            filter(None, [f"ratio >= {ratio}" if ratio else "", f"{absolute:,}/s" if absolute else ""])
        ),
    )


def nowait(bench: Bench) -> Plan:
    """send_nowait one record at a time, against the pump with whole batches."""
    count, frames = bench.settings.records(1_000_000), bench.settings.batches(GIB // 4)
    return Plan(
        floor=lambda: bench.floor_rate(frames),
        danube=lambda: per_second(bench.run("nowait", bench.options(record_count=count))),
        danube_min=400_000,
        target="400,000/s",
    )


def _end_to_end(bench: Bench, consumer_count: int, options: dict[str, Any]) -> dict[str, Any]:
    """One producer and ``consumer_count`` consumers with a subscription each; deliveries a second."""
    batch_count = options["batch_count"]
    record_count = (batch_count + 4) * bench.settings.batch_records  # with the producer's warm-up
    reliable = options["durability"] != "memory"
    wanted = record_count if reliable else 0
    readers = [
        bench.load("read_batches", {**options, "subscription": f"bench-{number}", "record_count": wanted})
        for number in range(consumer_count)
    ]
    for reader in readers:
        reader.wait_ready()
    resident_before = resident_bytes(bench.broker)
    sent = bench.run("publish", options)
    if not reliable:
        time.sleep(0.5)  # what is still on its way; nothing is counted by this wait
        for reader in readers:
            reader.go()
    results = [reader.result() for reader in readers]
    delivered = sum(result["records"] for result in results)
    ended = max(sent["ended_ns"], *(result["ended_ns"] for result in results))
    seconds = (ended - sent["started_ns"]) / 1e9
    warm = 4 * bench.settings.batch_records * consumer_count
    return {
        "value": max(0, delivered - warm) / seconds,
        "delivered": delivered,
        "dropped": record_count * consumer_count - delivered,
        "resident_growth_mib": round((resident_bytes(bench.broker) - resident_before) / 2**20, 1),
    }


def resident_bytes(broker: BrokerProcess) -> int:
    """Private resident memory of all the broker's processes; shared regions and page cache not counted."""
    total = 0
    for pid in broker.pids:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                total += int(line.split()[1]) * 1024
    return total


def e2e(bench: Bench) -> Plan:
    """Publish and consume through batches() at the same time, one producer and one consumer."""
    count = bench.settings.batches(GIB)
    return Plan(
        floor=lambda: bench.floor_rate(count),
        danube=lambda: _end_to_end(bench, 1, bench.options(batch_count=count)),
        danube_min=2_000_000 if bench.settings.size == 100 else 0,
        target="2,000,000/s" if bench.settings.size == 100 else "",
    )


def e2e_memory(bench: Bench) -> Plan:
    """The same on a non-reliable topic, to one consumer or to ``--count 4`` (deliveries are summed)."""
    count, consumers = bench.settings.batches(GIB), bench.settings.count or 1
    goal = {1: 4_000_000, 4: 8_000_000}.get(consumers, 0) if bench.settings.size == 100 else 0
    return Plan(
        floor=lambda: bench.floor_rate(count),
        danube=lambda: _end_to_end(bench, consumers, bench.options(batch_count=count, durability="memory")),
        danube_min=goal,
        target=f"{goal:,}/s" if goal else "",
        details={"consumers": consumers},
    )


def consume(bench: Bench) -> Plan:
    """async for message with an acknowledgement each, from a filled log."""
    options = bench.options(keep=True)
    filled = bench.fill(options, GIB // 4)
    count, numbers = min(filled, bench.settings.records(1_000_000)), itertools.count()
    frames = bench.settings.batches(GIB // 4)
    return Plan(
        floor=lambda: bench.floor_rate(frames),
        danube=lambda: per_second(
            bench.run("consume", {**options, "record_count": count, "subscription": f"c{next(numbers)}"})
        ),
        danube_min=400_000,
        target="400,000/s",
    )


def replay(bench: Bench) -> Plan:
    """A stored log from its start through batches(), each time with a new subscription."""
    options = bench.options(keep=True)
    count, numbers = bench.fill(options, GIB), itertools.count()
    frames = bench.settings.batches(GIB)
    return Plan(
        floor=lambda: bench.floor_rate(frames),
        danube=lambda: per_second(
            bench.run("replay", {**options, "record_count": count, "subscription": f"r{next(numbers)}"})
        ),
        danube_min=5_000_000 if bench.settings.size == 100 else 0,
        target="5,000,000/s" if bench.settings.size == 100 else "",
    )


def ack_polling(bench: Bench) -> Plan:
    """The same where broker and client do not sleep between two sends."""
    bench.environment["DANUBE_SERVER__BUSY_POLL_US"] = str(BUSY_POLL_US)
    return ack_latency(bench, BUSY_POLL_US)


def ack_latency(bench: Bench, busy_poll_us: int = 0) -> Plan:
    """One awaited send at 1,000/s; p50 against the 64-byte ping-pong (details: the paced one too)."""
    count = bench.settings.records(3_000)
    details: dict[str, Any] = {}

    def floor() -> float:
        details["ping_paced"] = bench.ping(count, 1_000)
        found = details["ping"] = bench.ping(count)
        return float(found["p50_us"])

    def danube() -> float:
        options = bench.options(record_count=count, rate=1_000, busy_poll_us=busy_poll_us)
        found = details["ack"] = bench.run("ack_latency", options)
        details["p99_under_1_ms"] = found["p99_us"] < 1_000
        return float(found["p50_us"])

    return Plan(
        floor=floor,
        danube=danube,
        unit="us p50",
        ratio_max=2.0,
        target="p50 <= 2 x ping-pong",
        details=details,
    )


def latency(bench: Bench) -> Plan:
    """Publish to consumer at 1,000/s; p99 against the paced ping-pong's."""
    count = bench.settings.records(3_000)
    details: dict[str, Any] = {}

    def danube() -> float:
        options = bench.options(record_count=count, rate=1_000)
        reader = bench.load("latency", options)
        reader.wait_ready()
        bench.run("stamped", options)
        details["latency"] = reader.result()
        return float(details["latency"]["p99_us"])

    return Plan(
        floor=lambda: float(bench.ping(count, 1_000)["p99_us"]),
        danube=danube,
        unit="us p99",
        danube_max=2_000,
        target="p99 < 2 ms",
        details=details,
    )


def topics(bench: Bench) -> Plan:
    """Small batches over one topic (floor) and over ``--count`` of them (10,000)."""
    many = bench.settings.count or max(10, int(10_000 * bench.settings.scale))
    batch_count = max(2 * many, int(20_000 * bench.settings.scale))

    def rate(topic_count: int) -> float:
        options = bench.options(
            keep=True, topic_count=topic_count, batch_count=batch_count, batch=bench.settings.batch or 10
        )
        return per_second(bench.run("many_topics", options))

    return Plan(
        floor=lambda: rate(1),
        danube=lambda: rate(many),
        ratio_min=0.5,
        target="cost a message grows less than 2 x",
        details={"topics": many},
    )


def consumers(bench: Bench) -> Plan:
    """Messages one by one to a shared subscription with one consumer (floor) and ``--count`` (1,000)."""
    many = bench.settings.count or max(10, int(1_000 * bench.settings.scale))
    batch = bench.settings.batch or 1
    count = max(batch, int(40_000 * batch * bench.settings.scale))

    def rate(consumer_count: int) -> float:
        options = bench.options(consumer_count=consumer_count, record_count=count, batch=batch, mode="shared")
        return per_second(bench.run("many_consumers", options))

    return Plan(
        floor=lambda: rate(1),
        danube=lambda: rate(many),
        ratio_min=0.5,
        target="cost a message grows less than 2 x",
        details={"consumers": many},
    )


def remote(bench: Bench) -> Plan:
    """A partition that another worker owns against one of the worker that holds the connection."""
    count = bench.settings.batches(GIB // 2)

    def rate(elsewhere: bool) -> float:
        return per_second(bench.run("publish", bench.options(batch_count=count, remote=elsewhere)))

    return Plan(
        floor=lambda: rate(elsewhere=False),
        danube=lambda: rate(elsewhere=True),
        ratio_min=0.7,
        target="ratio >= 0.7 of local",
    )


def restart(bench: Bench) -> Plan:
    """Seconds to ready after SIGKILL with ``--count`` (10) GiB of log; floor: an empty directory."""
    gib = bench.settings.count or 10
    broker = bench.broker
    for _ in range(gib):
        bench.fill(bench.options(keep=True), GIB)  # scaled, like all work
    empty = bench.closing(BrokerProcess(bench.settings.directory / "empty", workers=bench.settings.workers))

    def ready_seconds(process: BrokerProcess) -> float:
        process.kill()
        started = time.monotonic()
        process.start()
        return time.monotonic() - started

    return Plan(
        floor=lambda: ready_seconds(empty),
        danube=lambda: ready_seconds(broker),
        unit="s",
        danube_max=3.0,
        target="< 3 s",
        details={"log_gib": gib * bench.settings.scale},
    )


WORKLOADS: dict[str, Callable[[Bench], Plan]] = {
    "publish": publish,
    "nowait": nowait,
    "e2e": e2e,
    "e2e-memory": e2e_memory,
    "consume": consume,
    "replay": replay,
    "ack-latency": ack_latency,
    "ack-polling": ack_polling,
    "latency": latency,
    "topics": topics,
    "consumers": consumers,
    "remote": remote,
    "restart": restart,
}


def compare(
    name: str, settings: Settings, workloads: Mapping[str, Callable[[Bench], Plan]] = WORKLOADS
) -> dict[str, Any]:
    """Let floor and Danube take turns and return the medians, their spread and the ratio."""
    with Bench(settings) as bench:
        plan = workloads[name](bench)
        turns = list(_turns(bench, plan, settings.rounds))
    floors, danubes = ([turn[side] for turn in turns] for side in (0, 1))
    floor, danube = statistics.median(floors), statistics.median(danubes)
    ratio = danube / floor
    return {
        "workload": name,
        "size": settings.size,
        "batch": settings.batch_records,
        "durability": "memory" if name == "e2e-memory" else settings.durability,
        "workers": settings.workers,
        "unit": plan.unit,
        "floor": rounded(floor),
        "danube": rounded(danube),
        "ratio": round(ratio, 3),
        "target": plan.target,
        "met": plan.met(ratio, danube),
        "rounds": settings.rounds,
        "floor_range": [rounded(min(floors)), rounded(max(floors))],
        "danube_range": [rounded(min(danubes)), rounded(max(danubes))],
        "details": plan.details,
    }


def _turns(bench: Bench, plan: Plan, rounds: int) -> Iterator[tuple[float, float]]:
    for number in range(rounds + 1):
        floor = _value(plan, plan.floor)
        bench.end_turn()
        danube = _value(plan, plan.danube)
        bench.end_turn()
        if number or not rounds:
            yield floor, danube


def _value(plan: Plan, measure: Measure) -> float:
    found = measure()
    if isinstance(found, dict):
        plan.details.update({name: value for name, value in found.items() if name != "value"})
        return float(found["value"])
    return found


def rounded(value: float) -> float | int:
    return round(value) if value >= 1_000 else round(value, 2)


def floor_alone(settings: Settings) -> dict[str, Any]:
    """The floor for the usual sizes, without a broker."""
    found: dict[str, Any] = {}
    for size in (100, 1_024, 65_536):
        one = Settings(**{**vars(settings), "size": size, "batch": settings.batch})
        with Bench(one) as bench:
            count = one.batches(GIB)
            rates = [bench.floor_rate(count) for _ in range(settings.rounds + 1)][min(1, settings.rounds) :]
            found[f"pump_{size}_records_s"] = rounded(statistics.median(rates))
            found[f"pump_{size}_mb_s"] = round(statistics.median(rates) * size / 1e6)
    with Bench(settings) as bench:
        pings = [bench.ping(max(500, int(5_000 * settings.scale))) for _ in range(max(1, settings.rounds))]
        for name in ("p50_us", "p99_us"):
            found[f"ping_pong_{name}"] = statistics.median(ping[name] for ping in pings)
        paced = bench.ping(max(200, int(2_000 * settings.scale)), 1_000)
        found["ping_pong_paced"] = {name: paced[name] for name in ("p50_us", "p99_us")}
    return found
