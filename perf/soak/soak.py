"""One run from its start, or from where it was stopped, to its report."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from danube.core.partition.tier_plan import TierSettings
from danube.host.files import replace_durably
from perf.machine import fingerprint
from perf.soak.growth import Growth, Rules, findings, over_capacity
from perf.soak.load import LOADS, Load, kept_end, make_kept_topic, unread, violations_of
from perf.soak.store import Store
from perf.soak.watch import Faults, Record, Watch, disk_bytes
from tests.broker_process import ROOT, BrokerProcess, wait_until
from tests.crash.journal import Journal
from tests.crash.nemesis import WEIGHTS, Nemesis

MIB = 1 << 20
PASSED, FAILED, STOPPED = "passed", "failed", "stopped"
EXIT_CODES = {PASSED: 0, FAILED: 1, STOPPED: 3}
FORMAT = 3
PROGRESS_S = 60.0
START_S, HEAL_S, DRAIN_S, STOP_S, VERIFY_S = 60.0, 60.0, 300.0, 60.0, 600.0
OUTPUT_BYTES_MAX = 32 << 20
PHASE_EPOCHS = 4  # processes grow while they are young: they need some epochs to be followed
ENDING = {**WEIGHTS, "kill_mover": 2}
GENTLE = {"pause_worker": 1}  # no process ends, so that its memory can be followed
EXAMPLES_SHOWN = 40
COUNTED = ("sent", "acknowledged", "not_known", "reconnects", "retries")
NOWHERE = "/nowhere"  # no region yet


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Options of a run; times in seconds.  Those of :attr:`lasting` must not change when it is resumed."""

    directory: Path = ROOT / "soak-runs"
    total_s: float = 7200.0
    epoch_s: float = 300.0
    fault_every_s: tuple[float, float] = (30.0, 60.0)
    sample_every_s: float = 5.0
    settle_s: float = 5.0
    workers: int = 2
    rate: float = 20.0  # records/s of each producer
    store: str = "auto"
    faults: str = "alternate"

    @property
    def lasting(self) -> dict[str, Any]:
        return {"workers": self.workers, "store": self.store, "epoch_s": self.epoch_s}

    @property
    def retention_ms(self) -> int:
        """Records live for some epochs: the open one is always whole, and the disk stays bounded."""
        return int(max(120.0, 3 * self.epoch_s) * 1000)

    @property
    def rules(self) -> Rules:
        """Warm-up: a fifth of the run, an hour at most; the disk's: until as much leaves as comes in.

        What retention removes leaves the store when no reader can be using it any more.
        """
        warm_up_s = min(3600.0, self.total_s / 5)
        leaves_s = self.retention_ms / 1000 + TierSettings().reader_grace_us / 1e6
        return Rules(warm_up_s=warm_up_s, disk_warm_up_s=max(warm_up_s, leaves_s + self.epoch_s))

    def load_s(self, left_s: float) -> float:
        """How long the load of the next epoch runs when ``left_s`` are left; 0: no epoch fits any more."""
        fitting = left_s - min(15.0, self.epoch_s / 4)  # what the end of an epoch takes
        if fitting >= self.epoch_s * 1.5:
            return self.epoch_s
        return fitting if fitting >= min(10.0, self.epoch_s / 2) else 0.0


class StateRefused(Exception):
    """The directory holds another run, or one that cannot go on; the text says which and what to do."""


@dataclass
class State:
    """Everything that must survive a stop; :meth:`save` replaces its file as a whole."""

    path: str  # of its file
    seed: int
    options: dict[str, Any]
    format: int = FORMAT
    epochs: int = 0  # that were begun
    open: bool = False  # the last one was not judged
    sessions: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    totals: Counter[str] = field(default_factory=Counter)
    violations: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def load(cls, path: Path, seed: int | None, options: dict[str, Any]) -> State:
        """The run of this directory, or a new one; raises StateRefused when it is another run."""
        if not path.exists():
            drawn = int.from_bytes(os.urandom(4), "big")
            return cls(str(path), drawn if seed is None else seed, options)
        try:
            state = msgspec.json.decode(path.read_bytes(), type=cls, dec_hook=lambda _, one: Counter(one))
        except ValueError as error:
            raise StateRefused(f"{path} cannot be read ({error}); --restart begins anew") from error
        if state.format != FORMAT:
            raise StateRefused(f"{path} has format {state.format}, not {FORMAT}; --restart begins anew")
        known = {"seed": state.seed, **state.options}
        given = {"seed": state.seed if seed is None else seed, **options}
        differing = [name for name in given if given[name] != known.get(name)]
        if differing:
            changes = (f"{name} {known.get(name)}, not {given[name]}" for name in differing)
            raise StateRefused(
                f"the run in {path.parent} was started with {', '.join(changes)};"
                " go on with the same, begin anew with --restart, or name another --directory"
            )
        state.path = str(path)
        return state

    def save(self) -> None:
        replace_durably(Path(self.path), msgspec.json.encode(self))

    def add(self, kind: str, *examples: str) -> None:
        """Note violations of one kind, if there are any."""
        self.violations.update([kind] * len(examples))
        self.examples += examples


class Soak:
    """A run in its directory; :meth:`run` does all of it or goes on, and returns the report."""

    def __init__(
        self, settings: Settings, state: State, say: Callable[[str], None], stopped: threading.Event
    ) -> None:
        """Raise NoServer or StateRefused when the store asked for, or begun with, is not here."""
        self.settings, self.state, self.say, self.stopped = settings, state, say, stopped
        self.directory = settings.directory.absolute()
        self.store = Store(settings.store, self.directory / "store", state.seed)
        began = state.options.setdefault("chosen_store", self.store.kind)
        if began != self.store.kind:
            raise StateRefused(f"the run began with the store {began}, and here is only {self.store.kind}")
        self.record = Record(self.directory / "samples.jsonl")
        self.data_dir = self.directory / "data"
        self.broker = BrokerProcess(self.data_dir, workers=settings.workers)
        places = {
            "data": lambda: disk_bytes(self.data_dir),
            "store": lambda: disk_bytes(self.directory / "store"),
            "region": lambda: disk_bytes(Path(self.broker.statistics().get("region", NOWHERE))),
        }
        self.watch = Watch(
            self.record, Faults(), self.broker.processes, places, data=f"{self.data_dir}/",
            every_s=settings.sample_every_s, settle_s=settings.settle_s, on_sample=self._progress,
        )  # fmt: skip
        self.phase = "start"
        self._told_s = 0.0

    def run(self) -> dict[str, Any]:
        """Epochs until the time is over, a violation is found, or somebody stops it."""
        if not self.state.violations and not self._complete:
            self.state.sessions += 1
            if self.state.open:
                self.state.notes.append(f"epoch {self.state.epochs - 1} was cut off and not judged")
                self.state.open = False
            with ExitStack() as stack:
                if self._guarded(lambda: self._start(stack)):
                    self._epochs()
                    if not self.state.violations:  # else what is there stays as it was found
                        self._guarded(self._stop)
        self.record.close()
        return self.report()

    @property
    def _complete(self) -> bool:
        """Whether no epoch is open and none fits any more."""
        left_s = self.settings.total_s - self.record.latest.at_s
        return not self.state.open and not self.settings.load_s(left_s)

    def _start(self, stack: ExitStack) -> None:
        stack.callback(self.store.close)
        self.broker.environment = self.store.open()
        stack.callback(self.broker.kill)
        self.broker.start()
        make_kept_topic(self.broker.address, self.settings.retention_ms)
        stack.enter_context(self.watch)

    def _guarded(self, step: Callable[[], None]) -> bool:
        """Whether a step went through; what cannot be finished is a violation, with where it happened."""
        try:
            step()
            self.watch.check()
            return True
        except Exception:
            self.state.add("unfinished", "unfinished: " + traceback.format_exc(limit=-4))
            return False
        finally:
            self.state.add("died", *self.watch.take_died())
            self.state.save()

    # -- epochs -------------------------------------------------------------------------------------

    def _epochs(self) -> None:
        while not self.stopped.is_set() and not self.state.violations:
            load_s = self.settings.load_s(self.settings.total_s - self.watch.run_s)
            if not load_s:
                return
            self.state.epochs, self.state.open = self.state.epochs + 1, True
            self.state.save()
            self._guarded(lambda load_s=load_s: self._epoch(self.state.epochs - 1, load_s))  # type: ignore[misc]

    def _epoch(self, number: int, load_s: float) -> None:
        """Load with faults, drain, audit, and read what was stored; what passed is cleared away."""
        started, address = time.monotonic(), self.broker.address
        folder = self.directory / f"epoch-{number}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        base = kept_end(address)
        with ExitStack() as stack:
            journal = Journal(folder / "nemesis.jsonl")
            stack.callback(journal.close)
            self.phase = "load"
            loads = [Load(self.broker, folder, name, self.settings.rate) for name in LOADS]
            for load in loads:
                stack.callback(load.kill)
            wait_until(lambda: kept_end(address) > base, START_S, "records stored")
            fired = self._torment(self._nemesis(journal, number), loads, load_s)
            self.phase = "drain"
            for load in loads:
                load.halt()
            reports = [load.report(DRAIN_S) for load in loads]
        self.phase = "read"
        self._judge(number, reports, unread(address, base, reports[1]))
        self.say(
            f"epoch {number}: {_counts(self.state.violations)} violated;"
            f" {sum(one['records']['acknowledged'] for one in reports):,} acknowledged,"
            f" {', '.join(fired) or 'no fault'}, {time.monotonic() - started:.0f} s"
        )
        if not self.state.violations:
            self._leave(folder)

    def _nemesis(self, journal: Journal, number: int) -> Nemesis:
        turns = {"all": True, "gentle": False, "alternate": number // PHASE_EPOCHS % 2 == 0}
        more = self.store.faults()
        weights = {**(ENDING if turns[self.settings.faults] else GENTLE), **dict.fromkeys(more, 1)}
        seed = f"{self.state.seed} {number} {self.state.sessions}"
        return Nemesis(self.broker, journal, seed, weights=weights, more=more)

    def _torment(self, nemesis: Nemesis, loads: list[Load], load_s: float) -> list[str]:
        source, every_s = random.Random(f"epoch {nemesis.seed}"), self.settings.fault_every_s
        ends = time.monotonic() + load_s
        due = time.monotonic() + source.uniform(*every_s)
        while time.monotonic() < ends and not self.stopped.wait(0.2):
            self.watch.check()
            if self.watch.died or any(load.ended for load in loads):
                break
            if time.monotonic() >= due:
                self._fire(nemesis)
                due = time.monotonic() + source.uniform(*every_s)
        return nemesis.fired

    def _fire(self, nemesis: Nemesis) -> None:
        """One fault, and wait until a record is acknowledged again in the synced topic."""
        self.watch.faults.begin()
        try:
            nemesis.fire()
        finally:
            self.watch.faults.end()
        self.state.faults[nemesis.fired[-1]] += 1
        address = self.broker.address
        healed = kept_end(address)
        wait_until(lambda: kept_end(address) > healed, HEAL_S, "a record acknowledged again")

    def _judge(self, number: int, reports: list[dict[str, Any]], unread: list[str]) -> None:
        state = self.state
        for report in reports:
            for kind, examples in violations_of(report).items():
                state.add(kind, *(f"epoch {number}: {one}" for one in examples))
            state.totals.update({name: report["records"][name] for name in COUNTED})
            failed = sum(one["count"] for one in report["findings"] if one["kind"] == "requests")
            state.totals["failed_requests"] += failed
            for one in report["subscriptions"]:
                state.totals.update(deliveries=one["received"], redeliveries=one["duplicates"])
        state.add("stored", *(f"epoch {number}: {one}" for one in unread))
        state.open = False
        state.save()

    def _leave(self, folder: Path) -> None:
        """Drop what no later epoch needs."""
        self.store.forget_requests()
        if self.broker.output_path.stat().st_size > OUTPUT_BYTES_MAX:
            os.truncate(self.broker.output_path, 0)  # the broker goes on at its new end
        shutil.rmtree(folder)

    # -- the end ------------------------------------------------------------------------------------

    def _stop(self) -> None:
        """Stop the broker, which must leave with 0, and have another reader look at all that it stored."""
        self.phase = "stop"
        self.watch.faults.begin()
        code = self.broker.stop(STOP_S)
        if code != 0:
            raise RuntimeError(f"SIGTERM left with {code}\n{self.broker.output_tail()}")
        self.phase = "verify"
        words, environment = self.store.location()
        ran = subprocess.run(
            [sys.executable, "-m", "danube", "verify", str(self.data_dir), *words], cwd=ROOT,
            env={**os.environ, **environment}, capture_output=True, text=True, timeout=VERIFY_S, check=False,
        )  # fmt: skip
        if ran.returncode:
            said = ran.stdout[-3000:] + ran.stderr[-1000:]
            raise RuntimeError(f"danube verify left with {ran.returncode}\n{said}")

    def _progress(self) -> None:
        """A line a minute; called by the thread that samples."""
        run_s, state, latest = self.watch.run_s, self.state, self.record.latest
        if run_s - self._told_s < PROGRESS_S:
            return
        self._told_s = run_s
        parts = [
            f"{datetime.now(UTC):%H:%M:%S} {run_s / 60:.1f} of {self.settings.total_s / 60:g} min",
            f"epoch {max(0, state.epochs - 1)} {self.phase}",
            f"faults {_counts(state.faults)}",
            f"acknowledged {state.totals['acknowledged']:,}, violations {_counts(state.violations)}",
        ]
        for role, one in sorted(latest.processes.items()):
            parts.append(f"{role} {one.private_bytes / MIB:.0f} MiB {one.descriptors} fds")
        parts += [f"{name} {size / MIB:.0f} MiB" for name, size in sorted(latest.places.items())]
        self.say(" | ".join(parts))

    def report(self) -> dict[str, Any]:
        """Everything that was found; ``verdict`` is passed, failed or stopped."""
        state, settings = self.state, self.settings
        slopes, exceeded = findings(self.record, settings.rules), over_capacity(self.record)
        violations = state.violations + Counter(bounds=len(exceeded))
        if self._complete and not violations and not state.faults:
            violations["liveness"] = 1
        failed = violations or any(one.growth is Growth.BEYOND for one in slopes)
        return {
            "verdict": FAILED if failed else PASSED if self._complete else STOPPED,
            "time": datetime.now(UTC).isoformat(timespec="seconds"), "seed": state.seed,
            "minutes": round(self.record.latest.at_s / 60, 2), "asked_minutes": settings.total_s / 60,
            "sessions": state.sessions, "epochs": state.epochs, "store": self.store.kind,
            "workers": settings.workers, "faults": dict(state.faults), "totals": dict(state.totals),
            "violations": dict(violations), "examples": [*exceeded, *state.examples], "notes": state.notes,
            "growth": msgspec.to_builtins(slopes), "largest": self.record.largest,
            "machine": fingerprint(self.directory),
        }  # fmt: skip


def text(found: dict[str, Any]) -> str:
    """A report for the terminal."""
    lines = [
        f"{found['verdict']}: {found['minutes']:.1f} min in {found['epochs']} epochs, seed {found['seed']}",
        f"faults: {_counts(found['faults'])}",
        ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in found["totals"].items()),
        f"violations: {_counts(found['violations'])}",
        *(f"  {line}" for line in found["examples"][:EXAMPLES_SHOWN]),
        *found["notes"],
    ]
    for one in found["growth"]:
        lines.append(f"{one['growth']:7} {one['whose']} {one['metric']} {one['when']}: {_slope(one)}")
    return "\n".join(lines)


def _slope(one: dict[str, Any]) -> str:
    slope = one["slope"]
    if slope is None:
        return "too few points"
    values = (slope["per_hour"], slope["low"], slope["high"], one["limit_per_hour"])
    if one["metric"] in ("descriptors", "threads"):
        hourly, low, high, most = (f"{value:+.1f}" for value in values)
    else:
        hourly, low, high, most = (f"{value / MIB:+.2f} MiB" for value in values)
    lasted = f"{slope['points']} points over {slope['span_s'] / 60:.1f} min"
    return f"{hourly} an hour ({low} to {high}), at most {most}; {lasted}"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"
