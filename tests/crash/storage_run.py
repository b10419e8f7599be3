"""One run over storage that fails: a disk whose power is cut, a mover and a store that are slow or away.

The load is that of a crash run, with consumers that leave gaps and subscriptions that nobody reads until the
end, when all that is old lies in the store alone.  All consumers let the broker confirm their acks.

With a store and a disk that keeps its power, ``danube verify`` must find nothing in the bucket, and the log
that is judged is that of a fresh broker which has the bucket alone.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from danube import sync
from tests.broker_process import ROOT, BrokerProcess, wait_until
from tests.crash.checker import Verdict
from tests.crash.journal import Journal
from tests.crash.nemesis import WEIGHTS, Nemesis, kill_mover
from tests.crash.power import PowerDisk, cut_power, missing_disk
from tests.crash.run import CLIENT_TIMEOUT_S, Load, Plan, Run, every_kind_of_load, members
from tests.crash.slow_starts import READY_S, killed, slow_starts, worker_killed
from tests.crash.store_faults import for_nemesis
from tests.fakes.s3_proxy import S3Proxy
from tests.s3_server import NoServer, S3Server, find

# Longer than what came to a consumer of a busy machine lies unseen: after that it is a redelivery.
ACK_TIMEOUT_S = 6.0
SETTLE_S = 90.0
RETENTION_MS = 24 * 3_600_000  # nothing is as old, but somebody looks
TIERED = {
    "DANUBE_STORAGE__SEAL_AFTER": "1s",
    "DANUBE_STORAGE__LOCAL_RETENTION_TIME": "1s",
    "DANUBE_STORAGE__CACHE_SIZE": "16MiB",
    "DANUBE_STORAGE__MERGE_BELOW": "1MiB",
    "DANUBE_STORAGE__MERGE_TO": "4MiB",
    "DANUBE_WAL__SEGMENT_SIZE": "16MiB",
}


@dataclass(frozen=True, kw_only=True)
class Storage:
    """Which storage a run has: a disk of its own that loses power, an object store behind a proxy."""

    power: bool
    store: bool

    @property
    def any(self) -> bool:
        return self.power or self.store


SHORT_FAULTS = {
    Storage(power=True, store=False): ("power_cut", "kill_worker", "power_cut"),
    Storage(power=False, store=True): ("start_with_a_stopped_mover", "start_without_the_store"),
    Storage(power=True, store=True): (
        "power_cut", "start_with_a_stopped_mover", "start_without_the_store"
    ),
}  # fmt: skip


def missing_storage(storage: Storage) -> str:
    """Why it cannot be had here; empty where it can."""
    if storage.power and (reason := missing_disk()):
        return reason
    if storage.store:
        try:
            find()
        except NoServer as reason:
            return str(reason)
    return ""


@contextmanager
def s3_proxy(seed: int, host: str = "127.0.0.1") -> Iterator[tuple[S3Proxy, dict[str, str]]]:
    """A proxy before an S3 server of its own, and the environment of a broker that stores through it."""
    server = S3Server(find()).start()
    try:
        proxy = S3Proxy("127.0.0.1", server.port, client=server.client(), seed=seed, listens=host).start()
        try:
            yield proxy, server.environ(server.make_bucket(), "run", endpoint=proxy.endpoint)
        finally:
            proxy.stop()
    finally:
        server.stop()


def add_late_and_gaps(load: Load) -> Load:
    """To each topic one subscription whose consumer leaves gaps, and one that nobody reads until the end."""
    for topic in load.topics:
        topic["retention_ms"] = RETENTION_MS
        name = topic["topic"].rpartition("/")[2]
        load.consumers += [
            one | {"gaps": True} for one in members(topic["topic"], "exclusive", f"gaps-{name}", 1)
        ]
        load.consumers += [
            one | {"cold": True} for one in members(topic["topic"], "exclusive", f"cold-{name}", 1)
        ]
    return load


def alone(load: Load) -> frozenset[str]:
    """Subscriptions of exactly one consumer."""
    names = [one["subscription"] for one in load.consumers]
    return frozenset(name for name in names if names.count(name) == 1)


class StorageRun:
    """The broker, its disk, its store and what is done to them; use it in ``with``."""

    def __init__(self, plan: Plan, storage: Storage) -> None:
        self.plan = plan
        self.storage = storage
        self._stack = ExitStack()

    def __enter__(self) -> StorageRun:
        with ExitStack() as stack:
            self.plan.directory.mkdir(parents=True, exist_ok=True)
            self.disk = (
                stack.enter_context(PowerDisk(self.plan.directory / "data")) if self.storage.power else None
            )
            self.proxy, environment = None, {}
            if self.storage.store:
                self.proxy, environment = stack.enter_context(s3_proxy(self.plan.seed))
                environment = TIERED | environment
            self._environment = environment
            self.run = Run(
                self.plan,
                add_late_and_gaps(every_kind_of_load(self.plan.levels)),
                environment=environment,
                client_options={
                    "confirms": True,
                    "asks": True,
                    "idle_s": ACK_TIMEOUT_S + 1,
                    "failure": {"ack_timeout_ms": int(ACK_TIMEOUT_S * 1000)},
                    "log": str(self.plan.directory / "clients.log"),
                },
            )
            stack.callback(self.run.broker.kill)
            self.run.broker.start()
            self.journal = Journal(self.run.journals / "nemesis.jsonl")
            stack.callback(self.journal.close)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    # -- faults -----------------------------------------------------------------------------------

    def nemesis(self) -> Nemesis:
        faults, ways = {}, {"killed": killed, "worker_killed": worker_killed}
        weights = {**WEIGHTS, "kill_worker": 3}
        if self.disk is not None:
            faults |= {"power_cut": self.power_cut, "power_cut_while_it_starts": self.power_cut_again}
            weights |= {"power_cut": 8, "power_cut_while_it_starts": 3}
            ways["power_cut"] = self.power_lost
        if self.proxy is not None:
            slow = slow_starts(ways, self.proxy)
            store = for_nemesis(self.proxy)
            faults |= slow | store
            weights |= dict.fromkeys(slow, 2) | dict.fromkeys(store, 1) | {kill_mover.__name__: 1}
        return Nemesis(self.run.broker, self.journal, self.plan.seed, weights=weights, more=faults)

    def power_lost(self, broker: BrokerProcess, source: random.Random) -> dict[str, Any]:
        """A power cut, and a start that nobody waits for."""
        assert self.disk is not None
        facts = cut_power(self.disk, broker, source) | {"ended": "all"}
        broker.launch()
        return facts

    def power_cut(self, broker: BrokerProcess, source: random.Random) -> dict[str, Any]:
        """The power is cut under load; then a start."""
        facts = self.power_lost(broker, source)
        broker.wait_ready(READY_S)
        return facts

    def power_cut_again(self, broker: BrokerProcess, source: random.Random) -> dict[str, Any]:
        """A power cut, and another while the next start recovers."""
        assert self.disk is not None
        first = self.power_lost(broker, source)
        rest_s = source.uniform(0.1, 4.0)
        time.sleep(rest_s)
        second = cut_power(self.disk, broker, source)
        broker.start(READY_S)
        return {"cut_ns": first["cut_ns"] + second["cut_ns"], "rest_s": round(rest_s, 3), "ended": "all"}

    # -- the parts of a run -----------------------------------------------------------------------

    def execute(self) -> Verdict:
        run, plan = self.run, self.plan
        run.prepare()
        nemesis = self.nemesis()
        with ExitStack() as stack:
            consumers = run.client("consume", consumers=run.load.consumers).wait_ready()
            stack.callback(consumers.close)
            producers = run.client("produce", producers=run.load.producers).wait_ready()
            stack.callback(producers.close)
            nemesis.rest(0.5, 2.0)
            for name in plan.faults or [""] * plan.fault_count:
                nemesis.fire(name)
                nemesis.rest(*plan.rest_s)
            for child in (producers, consumers):
                child.go()
                child.result(2 * CLIENT_TIMEOUT_S)
        run.client("stands").result(CLIENT_TIMEOUT_S)
        nemesis.fire("power_cut" if self.disk is not None else "kill_all")
        self.look_again()
        run.client("stands").result(CLIENT_TIMEOUT_S)
        if self.proxy is not None and self.disk is None:
            self.restore()
        run.read_log()
        return self.judge(len(nemesis.fired))

    def restore(self) -> None:
        """Everything goes to the bucket, which is sound; the run goes on with a broker that has no more."""
        with sync.connect(self.run.broker.address) as client:
            for topic in self.run.load.topics:
                client.admin.seal(topic["topic"])
            wait_until(lambda: not _pending(client), SETTLE_S, "everything is off the host")
        url, data_dir = self._environment["DANUBE_STORAGE__URL"], self.plan.directory / "restored"
        self.danube("verify", url)
        self.run.broker.stop()
        self.danube("storage", "restore", url, "--data-dir", str(data_dir))
        self.run.broker = BrokerProcess(data_dir, workers=self.plan.workers, environment=self._environment)
        self._stack.callback(self.run.broker.kill)
        self.run.broker.start(READY_S)

    def danube(self, *words: str) -> None:
        """A command that must find nothing wrong."""
        endpoint = self._environment["DANUBE_STORAGE__ENDPOINT"]
        ran = subprocess.run(
            [sys.executable, "-m", "danube", *words, "--s3-endpoint", endpoint],
            cwd=ROOT, env={**os.environ, **self._environment}, capture_output=True, text=True, timeout=120,
            check=False,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-1000:]

    def look_again(self) -> None:
        """Everything was taken, confirmed, and all processes died: whatever comes now is given twice."""
        found = {one["subscription"]: one for one in self.run.load.consumers}
        once = [one | {"consumer": "again", "cold": False, "gaps": False} for one in found.values()]
        consumers = self.run.client("consume", consumers=once, idle_s=2.0).wait_ready()
        try:
            consumers.go()
            consumers.result(CLIENT_TIMEOUT_S)
        finally:
            consumers.close()

    def judge(self, faults: int) -> Verdict:
        load = self.run.load
        unused = self.unused()
        self.run.broker.stop()
        return self.run.verdict(
            acknowledged_min=200,
            faults_min=faults,
            acknowledged_after_fault_min=0,
            unused=unused,
            levels={one["topic"]: one["durability"] for one in load.topics},
            delivered_stays=True,
            one_owner=True,
            alone=alone(load),
        )

    def unused(self) -> dict[tuple[str, int], list[tuple[int, int]]]:
        """The holes of each partition, as the broker describes them."""
        with sync.connect(self.run.broker.address) as client:
            return {
                (one["topic"], number): sorted(
                    (hole["start"], hole["end"]) for hole in part.get("holes") or []
                )
                for one in self.run.load.topics
                for number, part in enumerate(client.admin.describe_topic(one["topic"]).partitions)
            }


def _pending(client: sync.Client) -> bool:
    """Whether anything is on this host alone."""
    topics = msgspec.to_builtins(client.admin.storage_status(""))["topics"]
    return any(one["pending_bytes"] for one in topics)


def storage_run(plan: Plan, storage: Storage) -> Verdict:
    """Load, faults, drain, one more crash, another look by every subscription, fresh reading, verdict."""
    with StorageRun(plan, storage) as run:
        return run.execute()
