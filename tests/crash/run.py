"""One crash run: a broker under load of every subscription type, faults, drain, fresh reading, verdict."""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.broker_process import BrokerProcess
from tests.child_process import Child
from tests.crash.checker import Expectation, Verdict, check
from tests.crash.journal import Journal, read_journals
from tests.crash.nemesis import Nemesis

CLIENTS = "tests/crash/clients.py"
CLIENT_TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one run does; everything random comes from ``seed``."""

    seed: int
    directory: Path
    workers: int = 2
    faults: tuple[str, ...] = ()  # in this order; empty: ``fault_count`` drawn ones
    fault_count: int = 4
    rest_s: tuple[float, float] = (0.2, 0.8)
    pause_s: float = 0.02
    arguments: tuple[str, ...] = ()
    levels: tuple[str, str] = ("written", "fsync")


@dataclass
class Load:
    """Topics, producers and consumers of a run, as the clients read them."""

    topics: list[dict[str, Any]] = field(default_factory=list)
    producers: list[dict[str, Any]] = field(default_factory=list)
    consumers: list[dict[str, Any]] = field(default_factory=list)

    @property
    def subscriptions(self) -> list[dict[str, Any]]:
        names = {one["subscription"]: one for one in self.consumers}
        return list(names.values())

    @property
    def modes(self) -> dict[str, str]:
        """The mode of each subscription."""
        return {one["subscription"]: one["mode"] for one in self.consumers}

    @property
    def topics_read(self) -> dict[str, str]:
        """The topic that each subscription reads wholly."""
        return {one["subscription"]: one["topic"] for one in self.consumers}


def every_kind_of_load(levels: tuple[str, str]) -> Load:
    """A plain and a partitioned topic, four producers, all four subscription modes, nine consumers."""
    load = Load()
    plain, keyed = "/default/plain", "/default/keyed"
    load.topics = [
        {"topic": plain, "partitions": 0, "durability": levels[0]},
        {"topic": keyed, "partitions": 3, "durability": levels[1]},
    ]
    for topic, producer, style, is_keyed in (
        (plain, "many", "many", False),
        (plain, "nowait", "nowait", False),
        (keyed, "keyed", "nowait", True),
        (keyed, "single", "one", True),
    ):
        durability = levels[0] if topic == plain else levels[1]
        load.producers.append(
            {
                "topic": topic,
                "producer": producer,
                "style": style,
                "keyed": is_keyed,
                "durability": durability,
            }
        )
    for topic, mode, count in ((plain, "exclusive", 1), (plain, "failover", 2), (plain, "shared", 2)):
        load.consumers += members(topic, mode, f"{mode}-plain", count)
    for topic, mode, count in ((keyed, "key_shared", 3), (keyed, "shared", 1)):
        load.consumers += members(topic, mode, f"{mode}-keyed", count)
    return load


def members(topic: str, mode: str, subscription: str, count: int) -> list[dict[str, Any]]:
    """The consumers of one subscription; the first shared one takes batches."""
    return [
        {
            "topic": topic,
            "subscription": subscription,
            "mode": mode,
            "consumer": f"c{number}",
            "batched": mode == "shared" and number == 0,
        }
        for number in range(count)
    ]


class Run:
    """The processes and journals of one run, with a broker of its own unless one is given."""

    def __init__(
        self,
        plan: Plan,
        load: Load,
        *,
        broker: BrokerProcess | None = None,
        first_part: int = 0,
        client_options: dict[str, Any] | None = None,
        **broker_options: Any,
    ) -> None:
        """``first_part`` numbers the clients: runs that share a broker's topics must not share parts."""
        self.plan = plan
        self.load = load
        self.journals = plan.directory / "journals"
        self.journals.mkdir(parents=True, exist_ok=broker is not None)
        self.client_options = client_options or {}
        self.broker = broker or BrokerProcess(
            plan.directory / "data", workers=plan.workers, arguments=plan.arguments, **broker_options
        )
        self._parts = itertools.count(first_part)

    def options(self, **more: Any) -> dict[str, Any]:
        return {
            "url": self.broker.address,
            "grpc": self.broker.grpc_address,
            "journals": str(self.journals),
            "seed": self.plan.seed,
            "part": next(self._parts),
            "pause_s": self.plan.pause_s,
            "topics": self.load.topics,
            "subscriptions": self.load.subscriptions,
            **self.client_options,
            **more,
        }

    def client(self, role: str, **more: Any) -> Child:
        return Child(CLIENTS, role, self.options(**more))

    def prepare(self) -> None:
        self.client("prepare").result(CLIENT_TIMEOUT_S)

    def read_log(self, **more: Any) -> None:
        self.client("read_log", **more).result(CLIENT_TIMEOUT_S)

    def verdict(self, **expected: Any) -> Verdict:
        paths = sorted(self.journals.glob("*.jsonl"))
        expectation = Expectation(modes=self.load.modes, topics=self.load.topics_read, **expected)
        return check(read_journals(paths), expectation)


def crash_run(plan: Plan) -> Verdict:
    """Load, faults, drain, one more crash, fresh reading; the verdict over all journals."""
    run = Run(plan, every_kind_of_load(plan.levels))
    with ExitStack() as stack:
        stack.callback(run.broker.kill)
        run.broker.start()
        run.prepare()
        journal = Journal(run.journals / "nemesis.jsonl")
        stack.callback(journal.close)
        nemesis = Nemesis(run.broker, journal, plan.seed)
        consumers = run.client("consume", consumers=run.load.consumers).wait_ready()
        stack.callback(consumers.close)
        producers = run.client("produce", producers=run.load.producers).wait_ready()
        stack.callback(producers.close)
        nemesis.rest(0.3, 0.6)
        for name in plan.faults or [""] * plan.fault_count:
            nemesis.fire(name)
            nemesis.rest(*plan.rest_s)
        producers.go()
        producers.result(CLIENT_TIMEOUT_S)
        consumers.go()
        consumers.result(CLIENT_TIMEOUT_S)
        run.broker.kill()
        run.broker.start()
        run.read_log()
        run.broker.stop()
    faults = len(plan.faults) or plan.fault_count
    return run.verdict(acknowledged_min=200, faults_min=faults, acknowledged_after_fault_min=1)
