"""One epoch: load and faults for a while, then drain, read the logs, judge, and begin the next from there.

Journals live as long as their epoch, so what is on disk and in the checker's memory is bounded by its
length and by ``journal_bytes_max``, however many hours the run takes.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from danube import sync
from perf.soak.load import mixed_load, short_lived_topic
from perf.soak.settings import Settings
from perf.soak.state import Judged, OpenEpoch
from perf.soak.store import Store
from perf.soak.watch import Watch
from tests.broker_process import BrokerProcess, wait_until
from tests.child_process import Child
from tests.crash.journal import Journal
from tests.crash.nemesis import WEIGHTS, Nemesis
from tests.crash.run import Plan, Run

CLIENTS_S = 300.0
HEAL_S = 60.0
TAKE_UP_IDLE_S = 8.0  # they also have to connect in this time
SINCE_MARGIN_US = 5_000_000
OUTPUT_BYTES_MAX = 32 << 20
PARTS_AN_EPOCH, PARTS_A_SESSION = 1_000, 20
ACKNOWLEDGED_A_SECOND_MIN = 5.0
PHASE_EPOCHS = 4  # processes grow while they are young: they need some epochs to be followed
GENTLE = {"pause_worker": 1}  # no process ends, so that its memory can be followed


@dataclass
class Context:
    """What all epochs of a session share."""

    settings: Settings
    seed: int
    broker: BrokerProcess
    store: Store
    watch: Watch
    stopped: threading.Event
    phase: str = ""
    fired: list[str] = field(default_factory=list)


class Epoch:
    """The clients, journals and faults of one epoch."""

    def __init__(self, context: Context, opened: OpenEpoch) -> None:
        self.context = context
        self.opened = opened
        self.number = opened.epoch
        self.directory = context.settings.directory / f"epoch-{self.number}"
        plan = Plan(
            seed=context.seed + self.number, directory=self.directory, pause_s=context.settings.pause_s
        )
        self.run = Run(
            plan,
            mixed_load(self.number, context.settings.retention_ms),
            broker=context.broker,
            first_part=self.number * PARTS_AN_EPOCH + opened.sessions * PARTS_A_SESSION,
            client_options={"log": str(self.directory / "clients.log")},
        )
        self.source = random.Random(f"epoch {context.seed} {self.number} {opened.sessions}")
        self.note = ""

    # -- load and faults ----------------------------------------------------------------------------

    def work(self, load_s: float) -> None:
        """Load for ``load_s`` seconds with faults, then let the clients finish."""
        self.context.phase = "load"
        with ExitStack() as stack:
            journal = Journal(self.run.journals / f"nemesis-{self.opened.sessions}.jsonl")
            stack.callback(journal.close)
            self.run.prepare()
            consumers = self._client(stack, "consume", consumers=self.run.load.consumers)
            producers = self._client(stack, "produce", producers=self.run.load.producers)
            self._torment(self._nemesis(journal), load_s)
            self.context.phase = "drain"
            producers.go()
            producers.result(CLIENTS_S)
            consumers.go()
            consumers.result(CLIENTS_S)

    def _client(self, stack: ExitStack, role: str, **options: Any) -> Child:
        child = self.run.client(role, **options)
        stack.callback(child.close)
        return child.wait_ready()

    def _nemesis(self, journal: Journal) -> Nemesis:
        store, settings = self.context.store, self.context.settings
        weights = dict(GENTLE)
        alternate = settings.faults == "alternate" and self.number // PHASE_EPOCHS % 2 == 0
        if settings.faults == "all" or alternate:
            weights = {**WEIGHTS, **({"kill_mover": 2} if store.has_mover else {})}
        return Nemesis(
            self.context.broker,
            journal,
            f"{self.context.seed} {self.number} {self.opened.sessions}",
            weights=weights | store.fault_weights,
            more=store.faults(),
        )

    def _torment(self, nemesis: Nemesis, load_s: float) -> None:
        context, every_s = self.context, self.context.settings.fault_every_s
        ends = time.monotonic() + load_s
        due = time.monotonic() + self.source.uniform(*every_s)
        while time.monotonic() < ends and not context.stopped.wait(0.2):
            context.watch.check()
            if context.watch.died:
                return
            if _size(self.run.journals) > context.settings.journal_bytes_max:
                self.note = "ended early: its journals were full"
                return
            if time.monotonic() >= due:
                self._fire(nemesis)
                due = time.monotonic() + self.source.uniform(*every_s)

    def _fire(self, nemesis: Nemesis) -> None:
        faults = self.context.watch.faults
        faults.begin(nemesis.broker.address)
        try:
            self.context.fired.append(nemesis.fire())
        finally:
            faults.end()
        healed_ns = time.monotonic_ns()
        wait_until(
            lambda: _acknowledged_since(self.run.journals, healed_ns), HEAL_S, "a record acknowledged again"
        )

    # -- the end ------------------------------------------------------------------------------------

    def take_up(self) -> None:
        """After this process itself was killed: the consumers take what its clients left behind."""
        self.context.phase = "take up"
        journal = Journal(self.run.journals / f"nemesis-{self.opened.sessions}.jsonl")
        journal.write("fault", "stopped_soak", self.context.seed, 0, 0, {})
        journal.close()
        self.run.prepare()
        with ExitStack() as stack:
            consumers = self._client(
                stack, "consume", consumers=self.run.load.consumers, idle_s=TAKE_UP_IDLE_S
            )
            consumers.go()
            consumers.result(CLIENTS_S)

    def judge(self, *, cut_off: bool = False) -> Judged:
        """Read every log and let the checker decide; what passed is cleared away."""
        started = time.monotonic()
        self.context.phase = "read"
        since_us = max(1, self.opened.since_us - SINCE_MARGIN_US)
        self.run.read_log(bases=self.opened.bases, since_us=since_us)
        self.context.phase = "judge"
        found = Child("perf/soak/verdict.py", "judge", self._asked(cut_off)).result(CLIENTS_S)
        judged = Judged(self.number, 0.0, found["counts"], found["examples"], found["statistics"], self.note)
        judged.statistics["judged_in_s"] = round(time.monotonic() - started, 1)
        if judged.passed:
            self._leave()
        return judged

    def _asked(self, cut_off: bool) -> dict[str, Any]:
        load_s = 0.0 if cut_off else time.time() - self.opened.since_us / 1e6
        return {
            "journals": str(self.run.journals),
            "bases": self.opened.bases,
            "modes": self.run.load.modes,
            "topics_read": self.run.load.topics_read,
            "acknowledged_min": 0 if cut_off else int(min(load_s, 30) * ACKNOWLEDGED_A_SECOND_MIN),
            "faults_min": 0,
            "acknowledged_after_fault_min": 0 if cut_off else 1,
            "acks_are_known": not cut_off,
        }

    def _leave(self) -> None:
        """Nothing of this epoch is needed any more."""
        with sync.connect(self.context.broker.address) as client:
            client.admin.delete_topic(short_lived_topic(self.number))
        self.context.store.forget_requests()
        output = self.context.broker.output_path
        if output.stat().st_size > OUTPUT_BYTES_MAX:
            os.truncate(output, 0)  # the broker goes on at its new end
        shutil.rmtree(self.directory)


def _size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())


def _acknowledged_since(journals: Path, moment_ns: int) -> bool:
    """Whether the end of a producer's journal has an acknowledgement of after that moment."""
    for path in journals.glob("producer-*.jsonl"):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 8192))
            lines = file.read().split(b"\n")[1:-1]
        for line in reversed(lines):
            event = json.loads(line)
            if event[0] == "ok" and event[-1] > moment_ns:
                return True
    return False
