"""One run of a cluster: brokers on hosts under load and faults, then everything is read and judged.

At the end all faults are healed, all brokers are killed once more and started, and what every disk had is
installed.  Then consumers take what is left, a fresh subscription reads every log, and what was promised is
checked: records by :mod:`tests.crash.checker`, the metadata by :mod:`tests.crash.linearizability`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.child_process import Child
from tests.crash import linearizability
from tests.crash.checker import Expectation, Ranges, Verdict, check
from tests.crash.cluster_hosts import ClusterOnHosts
from tests.crash.cluster_nemesis import ROUGH_WEIGHTS, Step, plan_of
from tests.crash.cluster_storage import StorageNemesis, weights_of
from tests.crash.cluster_times import ROUGH, histogram, summary, times_of
from tests.crash.journal import Journal, read_journals
from tests.crash.run import CLIENTS, Load, members
from tests.crash.storage_run import TIERED, add_late_and_gaps, alone

METADATA_CLIENTS = "tests/crash/metadata_clients.py"
CLIENT_TIMEOUT_S = 300.0
STEPS_MAX = 10_000
# Longer than what came to a consumer of a busy machine lies unseen: after that it is a redelivery.
ACK_TIMEOUT_S = 6.0
ACK_COPY_S = 20.0  # confirmed acks of a lost owner: copied every ten seconds, and uploads are held up
STALL_MAX_S = 10.0  # of a partition, on a network that only loses and delays packets
SETTINGS = {"DANUBE_STORAGE__SEAL_AFTER": "3s", "DANUBE_WAL__SEGMENT_SIZE": "16MiB"}

# What docs/cluster.md says of networks that lose or delay packets; and the smallest records, so that a batch
# of them is two packets, where a connection gets one through in a while.
ROUGH_SETTINGS = {**SETTINGS, "DANUBE_CLUSTER__HEARTBEAT": "500ms", "DANUBE_CLUSTER__LEASE": "20s"}
ROUGH_SIZES = (0,)


@dataclass(frozen=True, kw_only=True)
class ClusterPlan:
    """What a run does: ``faults`` first, then drawn ones, ``count`` in all or until ``seconds`` are over.

    With ``rough`` cables the drawn faults are those of a bad network; with ``power`` and ``store`` those of
    storage are among them.
    """

    seed: int
    directory: Path
    faults: tuple[str, ...] = ()
    count: int = 0
    seconds: float = 0.0
    size: int = 3
    workers: int = 1
    rough: bool = False
    power: bool = False
    store: bool = False
    etcd: bool = False
    sizes: tuple[int, ...] = ()
    pause_s: float = 0.05
    settings: dict[str, str] = field(default_factory=lambda: dict(SETTINGS))

    @classmethod
    def on_rough_cables(cls, **fields: Any) -> ClusterPlan:
        """A run on a bad network, with the settings for one."""
        return cls(rough=True, settings=dict(ROUGH_SETTINGS), sizes=ROUGH_SIZES, **fields)

    @classmethod
    def with_storage(cls, *, power: bool, store: bool, **fields: Any) -> ClusterPlan:
        """A run whose disks lose power, or whose store fails and has all that is a second old alone."""
        settings = SETTINGS | (TIERED if store else {})
        return cls(power=power, store=store, settings=settings, **fields)

    def steps(self) -> list[Step]:
        count = self.count or (STEPS_MAX if self.seconds else len(self.faults))
        weights = ROUGH_WEIGHTS if self.rough else weights_of(self.power, self.store)
        return plan_of(self.seed, count, self.faults, weights)


def cluster_load() -> Load:
    """Two plain topics and one of four partitions, ten consumers of every mode."""
    load = Load()
    written, synced, keyed = "/default/written", "/default/synced", "/default/keyed"
    load.topics = [
        {"topic": written, "partitions": 0, "durability": "written"},
        {"topic": synced, "partitions": 0, "durability": "fsync"},
        {"topic": keyed, "partitions": 4, "durability": "fsync"},
    ]
    for topic, producer, style, is_keyed in (
        (written, "many", "many", False),
        (synced, "nowait", "nowait", False),
        (keyed, "keyed", "nowait", True),
        (keyed, "single", "one", True),
    ):
        durability = "written" if topic == written else "fsync"
        load.producers.append(
            {
                "topic": topic,
                "producer": producer,
                "style": style,
                "keyed": is_keyed,
                "durability": durability,
            }
        )
    for topic, mode, count in ((written, "exclusive", 1), (synced, "failover", 2), (synced, "shared", 2)):
        load.consumers += members(topic, mode, f"{mode}-{topic.rpartition('/')[2]}", count)
    for topic, mode, count in ((keyed, "key_shared", 3), (keyed, "shared", 2)):
        load.consumers += members(topic, mode, f"{mode}-keyed", count)
    return load


class ClusterRun:
    """Brokers, clients, journals of one run; use it in ``with``."""

    def __init__(self, plan: ClusterPlan) -> None:
        self.plan = plan
        self.load = cluster_load()
        if plan.power or plan.store:
            add_late_and_gaps(self.load)
        self.topics = [one["topic"] for one in self.load.topics]
        self.journals = plan.directory / "journals"
        self.journals.mkdir(parents=True)
        self.cluster = ClusterOnHosts(
            plan.directory,
            size=plan.size,
            workers=plan.workers,
            rough=plan.rough,
            power=plan.power,
            store=plan.store,
            etcd=plan.etcd,
            environment=plan.settings,
        )
        self.unused: dict[tuple[str, int], Ranges] = {}
        self.facts: dict[str, Any] = {"seed": plan.seed, "steps": []}
        self._stack = ExitStack()
        self._part = 0

    def __enter__(self) -> ClusterRun:
        with ExitStack() as stack:
            stack.enter_context(self.cluster)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def client(self, role: str, **more: Any) -> Child:
        """A child on the clients' host."""
        self._part += 1
        options = {
            "url": self.cluster.url,
            "connect": {"connect_timeout": 2.0},
            "journals": str(self.journals),
            "log": str(self.plan.directory / "clients.log"),
            "seed": self.plan.seed,
            "part": self._part,
            "pause_s": self.plan.pause_s,
            "idle_s": ACK_TIMEOUT_S + 1,
            "failure": {"ack_timeout_ms": int(ACK_TIMEOUT_S * 1000)},
            "sizes": self.plan.sizes,
            "confirms": True,
            "asks": True,
            "topics": self.load.topics,
            "subscriptions": self.load.subscriptions,
            **more,
        }
        prefix = self.cluster.hosts.prefix(self.cluster.clients_place)
        return self._child(Child(CLIENTS, role, options, [*prefix, sys.executable]))

    def metadata_client(self, place: int) -> Child:
        """A child at a member's host, as its workers are."""
        options = {
            "name": f"m{place}",
            "data_dir": str(self.cluster.brokers[place].data_dir),
            "journals": str(self.journals),
            "seed": self.plan.seed,
            "threads": 2,
            "pause_s": self.plan.pause_s * 2,
        }
        prefix = self.cluster.hosts.prefix(place)
        return self._child(Child(METADATA_CLIENTS, "metadata", options, [*prefix, sys.executable]))

    def _child(self, child: Child) -> Child:
        self._stack.callback(child.close)
        return child

    # -- the parts of a run -----------------------------------------------------------------------

    def execute(self) -> Verdict:
        self.client("prepare").result(CLIENT_TIMEOUT_S)
        consumers = self.client("consume", consumers=self.load.consumers)
        producers = self.client("produce", producers=self.load.producers)
        askers = [self.metadata_client(place) for place in range(self.cluster.size)]
        for child in (consumers, producers, *askers):
            child.wait_ready()
        self.torment()
        errors = [error for asker in askers for error in finished(asker)["errors"]]
        finished(producers)
        self.settle()
        finished(consumers)
        self.client("stands").result(CLIENT_TIMEOUT_S)
        self.client("read_log").result(CLIENT_TIMEOUT_S)
        self.unused = {
            place: sorted((hole["start"], hole["end"]) for hole in holes)
            for place, holes in self.cluster.holes(self.topics).items()
        }
        return self.judge(errors)

    def torment(self) -> None:
        """One step of the plan after the other."""
        deadline = time.monotonic() + self.plan.seconds if self.plan.seconds else None
        journal = Journal(self.journals / "nemesis.jsonl")
        self._stack.callback(journal.close)
        nemesis = StorageNemesis(self.cluster, journal, self.plan.seed)
        for step in self.plan.steps():
            if deadline is not None and time.monotonic() > deadline:
                break
            self.facts["steps"].append(step.fault)
            nemesis.do(step)
        time.sleep(2)  # clients find their way back, so that the last fault has an end too

    def settle(self) -> None:
        """Everybody dies once more and comes back; then every disk has given back what it had."""
        for broker in self.cluster.brokers:
            broker.kill()
        self.cluster.start(range(self.cluster.size))
        self.cluster.wait_settled()
        self.facts["returned_s"] = round(self.cluster.wait_returned(self.topics), 1)

    # -- the verdict ------------------------------------------------------------------------------

    def judge(self, errors: Iterable[str] = ()) -> Verdict:
        paths = sorted(self.journals.glob("*.jsonl"))
        events = list(read_journals(paths))
        broken, metadata = linearizability.judge(events)
        times = times_of(events)
        steps = len(self.facts["steps"])
        verdict = check(
            (event for event in events if event[0] != "meta"),
            Expectation(
                modes=self.load.modes,
                topics=self.load.topics_read,
                acknowledged_min=200,
                faults_min=steps,
                acknowledged_after_fault_min=1,
                unused=self.unused,
                delivered_stays=True,
                levels={one["topic"]: one["durability"] for one in self.load.topics},
                alone=alone(self.load),
                ack_copy_s=ACK_COPY_S,
            ),
        )
        for sentence in broken:
            verdict.add("not linearizable", sentence)
        for name in ROUGH:
            if stalled := [one for one in times.get(f"stall, {name}", ()) if one > STALL_MAX_S]:
                verdict.add("stall", f"{name}: no acknowledgement of a partition for {stalled} s")
        for sentence in errors:
            verdict.add("metadata client", sentence)
        if metadata["operations"] - metadata["unknown"] < 10 * steps or metadata["undecided"]:
            verdict.add("liveness", f"the metadata says too little: {metadata}")
        verdict.statistics["metadata"] = metadata
        verdict.statistics["returned_s"] = self.facts["returned_s"]
        verdict.statistics["times"] = {name: summary(seconds) for name, seconds in times.items()}
        self.facts["histograms"] = [histogram(name, seconds) for name, seconds in times.items()]
        return verdict

    def report(self, verdict: Verdict, path: Path) -> str:
        """Write everything down as JSON; what people are told of it."""
        found = {
            **self.facts,
            "passed": verdict.passed,
            "violations": dict(verdict.counts),
            "examples": verdict.examples,
            "statistics": verdict.statistics,
        }
        path.write_text(json.dumps(found, indent=1))
        return "\n".join([str(verdict), *self.facts["histograms"]])


def finished(child: Child) -> dict[str, Any]:
    """Tell a child to come to its end, and wait for what it has to say."""
    child.go()
    return child.result(CLIENT_TIMEOUT_S)


def cluster_run(plan: ClusterPlan, report: Path | None = None) -> Verdict:
    """Run a plan; the verdict over all journals.  Prints the histograms."""
    with ClusterRun(plan) as run:
        verdict = run.execute()
        print(run.report(verdict, report or plan.directory / "report.json"), flush=True)
    return verdict
