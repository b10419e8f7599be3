"""Rows of the native protocol: what is driven, beside which floor, and the target."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from danube.limits import GIB
from perf.compare.processes import cpu_seconds
from perf.turns import Bench, Plan, per_second, timed
from tests.broker_process import BrokerProcess

PUBLISH_MIN = {("written", 100): 4_000_000, ("fsync", 100): 2_000_000}
PUBLISH_RATIO_MIN = 0.5


def at_least(bench: Bench, danube: Callable[[], Any], least: float, gib: float = 1.0, **more: Any) -> Plan:
    """A rate against the bare pump's for ``gib`` GiB of the same frames; ``least`` is for 100 bytes."""
    frames = bench.settings.batches(int(GIB * gib))
    least = least if bench.settings.size == 100 else 0
    return Plan(lambda: bench.floor_rate(frames), danube, danube_min=least, **more)


def read_anew(bench: Bench, load: str, gib: float, most: int = 0) -> Callable[[], float]:
    """The rate of a load over a filled log, each time with a new subscription."""
    options, numbers = bench.options(keep=True), itertools.count()
    filled = bench.fill(options, int(GIB * gib))
    options["record_count"] = min(filled, bench.settings.scaled(most, 1_000)) if most else filled
    return lambda: per_second(bench.run(load, {**options, "subscription": f"{load}{next(numbers)}"}))


def publish(bench: Bench) -> Plan:
    """send_many of one producer, acknowledged at the level, against the bare pump."""
    settings = bench.settings
    synced = settings.durability == "fsync"
    size = GIB // 2 if synced else GIB
    return Plan(
        lambda: bench.floor_rate(settings.batches(size)),
        lambda: per_second(bench.run("publish", bench.options(**settings.sent(size)))),
        ratio_min=0 if synced else PUBLISH_RATIO_MIN,
        danube_min=PUBLISH_MIN.get((settings.durability, settings.size), 0),
    )


def nowait(bench: Bench) -> Plan:
    """send_nowait one record at a time, against the pump with whole batches."""
    sent = {"record_count": bench.settings.scaled(1_000_000, 1_000), "warm_count": 1}
    return at_least(bench, lambda: per_second(bench.run("nowait", bench.options(**sent))), 400_000, 0.25)


def consume(bench: Bench) -> Plan:
    """async for message with an acknowledgement each, from a filled log."""
    return at_least(bench, read_anew(bench, "consume", 0.25, 1_000_000), 400_000, 0.25)


def replay(bench: Bench) -> Plan:
    """A stored log from its start through batches()."""
    return at_least(bench, read_anew(bench, "replay", 1.0), 5_000_000)


def e2e(bench: Bench) -> Plan:
    """Publish and consume through batches() at once, to ``--count`` consumers (deliveries are summed)."""
    count = bench.settings.count or 1
    lossy = bench.settings.durability == "memory"
    least = {1: 4_000_000, 4: 8_000_000}.get(count, 0) if lossy else 2_000_000 * (count == 1)

    def danube() -> dict[str, Any]:
        options = bench.options(**bench.settings.sent(GIB))
        record_count = options["record_count"] + options["warm_count"]
        bench.create(options)
        wanted = {"record_count": 0 if lossy else record_count}
        readers = [
            bench.load("read", {**options, "subscription": f"bench-{number}", **wanted}).wait_ready()
            for number in range(count)
        ]
        resident_before = resident_bytes(bench.broker)
        sent = bench.run("publish", options)
        if lossy:
            time.sleep(0.5)  # what is still on its way; nothing is counted by this wait
            for reader in readers:
                reader.go()
        results = [reader.result() for reader in readers]
        delivered = sum(result["records"] for result in results)
        ended = max(sent["ended_ns"], *(result["ended_ns"] for result in results))
        return {
            "value": max(0, delivered - options["warm_count"] * count) / ((ended - sent["started_ns"]) / 1e9),
            "delivered": delivered,
            "dropped": record_count * count - delivered,
            "resident_growth_mib": round((resident_bytes(bench.broker) - resident_before) / 2**20, 1),
        }

    return at_least(bench, danube, least, details={"consumers": count} if lossy else {})


def resident_bytes(broker: BrokerProcess) -> int:
    """Private resident memory of all the broker's processes; shared regions and page cache not counted."""
    lines = (line for pid in broker.pids for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def ack_latency(bench: Bench) -> Plan:
    """One awaited send at 1,000/s; p50 against the 64-byte ping-pong (details: the paced one too)."""
    count = bench.settings.scaled(3_000, 1_000)

    def floor() -> dict[str, Any]:
        paced, found = bench.ping(count, 1_000), bench.ping(count)
        return {"value": found["p50_us"], "ping_paced": paced, "ping": found}

    def danube() -> dict[str, Any]:
        found = bench.run("ack_latency", bench.options(record_count=count, rate=1_000))
        return {"value": found["p50_us"], "ack": found, "p99_under_1_ms": found["p99_us"] < 1_000}

    return Plan(floor, danube, "us p50", ratio_max=2.5)


def latency(bench: Bench) -> Plan:
    """Publish to consumer at 1,000/s; p99 against the paced ping-pong's."""
    count = bench.settings.scaled(3_000, 1_000)

    def danube() -> dict[str, Any]:
        options = bench.options(record_count=count, rate=1_000)
        reader = bench.load("latency", options)
        reader.wait_ready()
        bench.run("stamped", options)
        found = reader.result()
        return {"value": found["p99_us"], "latency": found}

    return Plan(lambda: bench.ping(count, 1_000)["p99_us"], danube, "us p99", danube_max=2_000)


def of_many(rate: Callable[[int], float], what: str, many: int) -> Plan:
    """The rate with one of them as the floor of that with ``many``: what a message costs at most doubles."""
    return Plan(lambda: rate(1), lambda: rate(many), ratio_min=0.5, details={what: many})


def topics(bench: Bench) -> Plan:
    """Small batches over one topic (floor) and over ``--count`` of them (10,000)."""
    settings = bench.settings
    many = settings.count or settings.scaled(10_000, 10)
    more = {"batch_count": settings.scaled(20_000, 2 * many), "batch": settings.batch or 10}

    def rate(topic_count: int) -> float:
        options = bench.options(keep=True, topic_count=topic_count, **more)
        return per_second(bench.run("many_topics", options))

    return of_many(rate, "topics", many)


def consumers(bench: Bench) -> Plan:
    """Messages one by one to a shared subscription with one consumer (floor) and ``--count`` (1,000)."""
    settings = bench.settings
    many, batch = settings.count or settings.scaled(1_000, 10), settings.batch or 1
    more = {"record_count": settings.scaled(40_000 * batch, batch), "batch": batch}

    def rate(consumer_count: int) -> float:
        options = bench.options(consumer_count=consumer_count, **more)
        return per_second(bench.run("many_consumers", options))

    return of_many(rate, "consumers", many)


def remote(bench: Bench) -> Plan:
    """A partition that another worker owns against one of the worker that holds the connection."""
    sent = bench.settings.sent(GIB // 2)

    def rate(load: str) -> float:
        return per_second(bench.run(load, bench.options(**sent)))

    return Plan(lambda: rate("publish"), lambda: rate("publish_remote"), ratio_min=0.7)


def auth(bench: Bench) -> Plan:
    """send_many to a broker that asks for a token, against one that asks nobody and has the same load."""
    sent = bench.settings.sent(GIB // 2)
    asks = bench.asking()

    def open_to_all() -> float:
        return per_second(bench.run("publish", bench.options(**sent)))

    def asked() -> float:
        options = bench.options(asks, **sent)
        found = per_second(bench.run("publish", options))
        bench.delete(options)
        return found

    return Plan(open_to_all, asked, ratio_min=0.97)


def neighbour(bench: Bench) -> Plan:
    """A tenant beside a neighbour at ten times its quota, against one that offers just what it may.

    The figure is the p99 of sends at 1,000/s; details tell the rate of ``send_many``, and the time of the
    broker's processors for a record of it, with all that it does for the neighbour.
    """
    count, sent = bench.settings.scaled(3_000, 1_000), bench.settings.sent(GIB // 2)
    quota, turns = 2_000, dict[str, list[float]]()

    def beside(name: str, times: int) -> float:
        place = {"topic": "/neighbour/bench", "clients": 10, "batch": 200}
        load = bench.load("neighbour", bench.options(keep=True, quota=quota, rate=times * quota, **place))
        load.wait_ready().go()
        paced = bench.run("ack_latency", bench.options(record_count=count, rate=1_000))
        before_s = cpu_seconds(bench.broker.pids)
        rate = bench.run("publish", bench.options(**sent))
        used_s = cpu_seconds(bench.broker.pids) - before_s
        load.go()
        other = load.result()
        found = {
            "rate": per_second(rate),
            "broker_us": used_s * 1e6 / rate["records"],
            "offered": other["offered"] / other["seconds"],
            "taken": other["taken"] / other["seconds"],
        }
        for what, value in found.items():
            turns.setdefault(f"{what}_{name}", []).append(value)
        return float(paced["p99_us"])

    def kept(details: dict[str, Any]) -> bool:
        details.update({what: round(median(values[1:] or values), 3) for what, values in turns.items()})
        return bool(details["rate_ten"] >= 0.9 * details["rate_one"])

    also = {"rate >= 0.9 x": kept}
    return Plan(lambda: beside("one", 1), lambda: beside("ten", 10), "us p99", ratio_max=2, also=also)


def restart(bench: Bench) -> Plan:
    """Seconds to ready after SIGKILL with ``--count`` (10) GiB of log; floor: an empty directory."""
    gib = bench.settings.count or 10
    for _ in range(gib):
        bench.fill(bench.options(keep=True), GIB)  # scaled, like all work
    empty = bench.start_broker("empty")

    def ready_seconds(process: BrokerProcess) -> float:
        process.kill()
        return timed(process.start)

    return Plan(
        lambda: ready_seconds(empty), lambda: ready_seconds(bench.broker), "s", danube_max=3,
        details={"log_gib": gib * bench.settings.scale},
    )  # fmt: skip
