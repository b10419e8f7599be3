"""Rows of the native protocol: what is driven, beside which floor, and the target."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from perf.turns import GIB, Bench, Plan, per_second
from tests.broker_process import BrokerProcess
from tests.fork_server import spent_s

PUBLISH_MIN = {("written", 100): 4_000_000, ("fsync", 100): 2_000_000}
PUBLISH_RATIO_MIN = 0.5


def at_least(bench: Bench, danube: Callable[[], Any], least: float, gib: float = 1.0, **more: Any) -> Plan:
    """A rate against the bare pump's for ``gib`` GiB of the same frames; ``least`` is for 100 bytes."""
    frames = bench.settings.batches(int(GIB * gib))
    least = least if bench.settings.size == 100 else 0
    target = f"{least:,}/s" if least else ""
    floor = lambda: bench.floor_rate(frames)  # noqa: E731
    return Plan(floor=floor, danube=danube, danube_min=least, target=target, **more)


def read_anew(bench: Bench, load: str, gib: float, most: int = 0) -> Callable[[], float]:
    """The rate of a load over a filled log, each time with a new subscription."""
    options, numbers = bench.options(keep=True), itertools.count()
    filled = bench.fill(options, int(GIB * gib))
    options["record_count"] = min(filled, bench.settings.records(most)) if most else filled
    return lambda: per_second(bench.run(load, {**options, "subscription": f"{load}{next(numbers)}"}))


def publish(bench: Bench) -> Plan:
    """send_many of one producer, acknowledged at the level, against the bare pump."""
    settings = bench.settings
    synced = settings.durability == "fsync"
    count = settings.batches(GIB // 2 if synced else GIB)
    absolute = PUBLISH_MIN.get((settings.durability, settings.size), 0)
    ratio = 0.0 if synced else PUBLISH_RATIO_MIN
    wanted = (f"ratio >= {ratio}" if ratio else "", f"{absolute:,}/s" if absolute else "")
    return Plan(
        floor=lambda: bench.floor_rate(count),
        danube=lambda: per_second(bench.run("publish", bench.options(**settings.sent(count)))),
        ratio_min=ratio,
        danube_min=absolute,
        target=" and ".join(filter(None, wanted)),
    )


def nowait(bench: Bench) -> Plan:
    """send_nowait one record at a time, against the pump with whole batches."""
    sent = {"record_count": bench.settings.records(1_000_000), "warm_count": 1}
    return at_least(bench, lambda: per_second(bench.run("nowait", bench.options(**sent))), 400_000, 0.25)


def consume(bench: Bench) -> Plan:
    """async for message with an acknowledgement each, from a filled log."""
    return at_least(bench, read_anew(bench, "consume", 0.25, 1_000_000), 400_000, 0.25)


def replay(bench: Bench) -> Plan:
    """A stored log from its start through batches()."""
    return at_least(bench, read_anew(bench, "replay", 1.0), 5_000_000)


def e2e(bench: Bench) -> Plan:
    """Publish and consume through batches() at once, to ``--count`` consumers (deliveries are summed)."""
    consumers = bench.settings.count or 1
    lossy = bench.settings.durability == "memory"
    least = {1: 4_000_000, 4: 8_000_000}.get(consumers, 0) if lossy else 2_000_000 * (consumers == 1)
    details = {"consumers": consumers} if lossy else {}
    return at_least(bench, lambda: end_to_end(bench, consumers, reliable=not lossy), least, details=details)


def end_to_end(bench: Bench, consumer_count: int, *, reliable: bool) -> dict[str, Any]:
    """One producer and ``consumer_count`` consumers with a subscription each; deliveries a second."""
    options = bench.options(**bench.settings.sent(bench.settings.batches(GIB)))
    record_count = options["record_count"] + options["warm_count"]
    wanted = record_count if reliable else 0
    bench.ask("create", options)
    readers = [
        bench.load("read", {**options, "subscription": f"bench-{number}", "record_count": wanted})
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
    warm = options["warm_count"] * consumer_count
    return {
        "value": max(0, delivered - warm) / ((ended - sent["started_ns"]) / 1e9),
        "delivered": delivered,
        "dropped": record_count * consumer_count - delivered,
        "resident_growth_mib": round((resident_bytes(bench.broker) - resident_before) / 2**20, 1),
    }


def resident_bytes(broker: BrokerProcess) -> int:
    """Private resident memory of all the broker's processes; shared regions and page cache not counted."""
    lines = (line for pid in broker.pids for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def ack_latency(bench: Bench) -> Plan:
    """One awaited send at 1,000/s; p50 against the 64-byte ping-pong (details: the paced one too)."""
    count = bench.settings.records(3_000)
    details: dict[str, Any] = {}

    def floor() -> float:
        details["ping_paced"] = bench.ping(count, 1_000)
        found = details["ping"] = bench.ping(count)
        return float(found["p50_us"])

    def danube() -> float:
        options = bench.options(record_count=count, rate=1_000)
        found = details["ack"] = bench.run("ack_latency", options)
        details["p99_under_1_ms"] = found["p99_us"] < 1_000
        return float(found["p50_us"])

    return Plan(
        floor=floor,
        danube=danube,
        unit="us p50",
        ratio_max=2.5,
        target="p50 <= 2.5 x ping-pong",
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


def of_many(rate: Callable[[int], float], what: str, many: int) -> Plan:
    """The rate with one of them as the floor of that with ``many``."""
    target = "cost a message grows less than 2 x"
    return Plan(
        floor=lambda: rate(1), danube=lambda: rate(many), ratio_min=0.5, target=target, details={what: many}
    )


def topics(bench: Bench) -> Plan:
    """Small batches over one topic (floor) and over ``--count`` of them (10,000)."""
    settings = bench.settings
    many = settings.count or max(10, int(10_000 * settings.scale))
    more = {"batch_count": max(2 * many, int(20_000 * settings.scale)), "batch": settings.batch or 10}

    def rate(topic_count: int) -> float:
        options = bench.options(keep=True, topic_count=topic_count, **more)
        return per_second(bench.run("many_topics", options))

    return of_many(rate, "topics", many)


def consumers(bench: Bench) -> Plan:
    """Messages one by one to a shared subscription with one consumer (floor) and ``--count`` (1,000)."""
    many = bench.settings.count or max(10, int(1_000 * bench.settings.scale))
    batch = bench.settings.batch or 1
    more = {"record_count": max(batch, int(40_000 * batch * bench.settings.scale)), "batch": batch}

    def rate(consumer_count: int) -> float:
        options = bench.options(consumer_count=consumer_count, **more)
        return per_second(bench.run("many_consumers", options))

    return of_many(rate, "consumers", many)


def remote(bench: Bench) -> Plan:
    """A partition that another worker owns against one of the worker that holds the connection."""
    sent = bench.settings.sent(bench.settings.batches(GIB // 2))

    def rate(load: str) -> float:
        return per_second(bench.run(load, bench.options(**sent)))

    return Plan(
        floor=lambda: rate("publish"), danube=lambda: rate("publish_remote"), ratio_min=0.7,
        target="ratio >= 0.7 of local",
    )  # fmt: skip


def auth(bench: Bench) -> Plan:
    """send_many to a broker that asks for a token, against one that asks nobody and has the same load."""
    sent = bench.settings.sent(bench.settings.batches(GIB // 2))
    asks = bench.asking()

    def asked() -> float:
        options = bench.options(keep=True, url=asks.address, **sent)
        found = per_second(bench.run("publish", options))
        bench.ask("delete_topics", {"url": asks.address, "topics": [options["topic"]]})
        return found

    return Plan(
        floor=lambda: per_second(bench.run("publish", bench.options(**sent))), danube=asked,
        ratio_min=0.97, target="ratio >= 0.97 of `none`",
    )  # fmt: skip


def neighbour(bench: Bench) -> Plan:
    """A tenant beside a neighbour at ten times its quota, against one that offers just what it may.

    The figure is the p99 of sends at 1,000/s; details tell the rate of ``send_many``, and the time of the
    broker's processors for a record of it, with all that it does for the neighbour.
    """
    count, sent = bench.settings.records(3_000), bench.settings.sent(bench.settings.batches(GIB // 2))
    quota, details = 2_000, dict[str, Any]()
    turns: dict[str, list[float]] = {}

    def beside(name: str, times: int) -> float:
        place = {"topic": "/neighbour/bench", "clients": 10, "batch": 200}
        load = bench.load("neighbour", bench.options(keep=True, quota=quota, rate=times * quota, **place))
        load.wait_ready().go()
        paced = bench.run("ack_latency", bench.options(record_count=count, rate=1_000))
        before_s = sum(map(spent_s, bench.broker.pids))
        rate = bench.run("publish", bench.options(**sent))
        used_s = sum(map(spent_s, bench.broker.pids)) - before_s
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

    def also() -> bool:
        details.update({what: round(median(values[1:] or values), 3) for what, values in turns.items()})
        return bool(details["rate_ten"] >= 0.9 * details["rate_one"])

    return Plan(
        floor=lambda: beside("one", 1), danube=lambda: beside("ten", 10), unit="us p99", ratio_max=2.0,
        also=also, target="p99 < 2 x, rate >= 0.9 x", details=details,
    )  # fmt: skip


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
