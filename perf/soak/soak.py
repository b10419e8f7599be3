"""One run from its start, or from where it was stopped, to its report."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from danube import sync
from danube.core.partition.tier_plan import TierSettings
from perf.machine import fingerprint
from perf.soak.epoch import Context, Epoch
from perf.soak.growth import Rules, findings, over_capacity
from perf.soak.load import mixed_load
from perf.soak.record import Record
from perf.soak.sampling import disk_bytes
from perf.soak.settings import MIB, Settings
from perf.soak.slopes import Growth
from perf.soak.state import Judged, OpenEpoch, State
from perf.soak.store import NoStore, Store
from perf.soak.watch import Faults, Watch
from tests.broker_process import ROOT, BrokerProcess

PASSED, FAILED, STOPPED = "passed", "failed", "stopped"
EXIT_CODES = {PASSED: 0, FAILED: 1, STOPPED: 3}
PROGRESS_S = 60.0
STOP_S = 60.0
VERIFY_S = 600.0
Say = Callable[[str], None]


def rules_for(settings: Settings) -> Rules:
    """Warm-up: a fifth of the run, an hour at most; the disk's: until as much leaves as comes in.

    What retention removes leaves the store when no reader can be using it any more.
    """
    warm_up_s = min(3600.0, settings.total_s / 5)
    leaves_s = settings.retention_ms / 1000 + TierSettings().reader_grace_us / 1e6
    return Rules(warm_up_s=warm_up_s, disk_warm_up_s=max(warm_up_s, leaves_s + settings.epoch_s))


class Soak:
    """A run in its directory; :meth:`run` does all of it or goes on, and returns the report."""

    def __init__(self, settings: Settings, state: State, say: Say, stopped: threading.Event) -> None:
        """Raise NoStore when the store that is asked for, or that the run began with, is not here."""
        self.settings = settings
        self.state = state
        self.say = say
        self.stopped = stopped
        self.store = Store(settings.store, settings.directory / "store", state.seed)
        began = state.options.setdefault("chosen_store", self.store.kind)
        if began != self.store.kind:
            raise NoStore(f"the run began with the store {began}, and here is only {self.store.kind}")
        self.record = Record(settings.directory / "samples.jsonl")
        self.data_dir = settings.directory / "data"
        self._started: Context | None = None
        self._told_s = 0.0

    def run(self) -> dict[str, Any]:
        """Epochs until the time is over, a violation is found, or somebody stops it."""
        state = self.state
        if not state.violations and not self._complete:
            state.sessions += 1
            state.save()
            with ExitStack() as stack:
                if self._guarded(lambda: self._start(stack)):
                    self._epochs()
                    self._finish()
        self.record.close()
        return self.report()

    @property
    def _complete(self) -> bool:
        """Whether no epoch is open and none fits any more."""
        return self.state.open is None and not self.settings.load_s(
            self.settings.total_s - self.record.last_s
        )

    def _start(self, stack: ExitStack) -> None:
        stack.callback(self.store.close)
        environment = self.store.open()
        broker = BrokerProcess(self.data_dir, workers=self.settings.workers, environment=environment)
        stack.callback(broker.kill)
        broker.start()
        places = {
            "data": lambda: disk_bytes(self.data_dir),
            "store": lambda: disk_bytes(self.settings.directory / "store"),
            "region": lambda: _file_bytes(broker.statistics().get("region", "")),
        }
        watch = Watch(
            self.record,
            Faults(),
            broker.processes,
            places,
            data=f"{self.data_dir}/",
            every_s=self.settings.sample_every_s,
            settle_s=self.settings.settle_s,
            on_sample=self._progress,
        )
        self._started = Context(self.settings, self.state.seed, broker, self.store, watch, self.stopped)
        stack.enter_context(watch)

    @property
    def _context(self) -> Context:
        assert self._started is not None, "the broker was started"
        return self._started

    # -- epochs -------------------------------------------------------------------------------------

    def _epochs(self) -> None:
        if self.state.open is not None:
            self._guarded(self._take_up)
        while not self.stopped.is_set() and not self.state.violations:
            load_s = self.settings.load_s(self.settings.total_s - self._context.watch.run_s)
            if not load_s:
                return
            self._guarded(lambda load_s=load_s: self._one(load_s))  # type: ignore[misc]

    def _guarded(self, step: Callable[[], None]) -> bool:
        """Whether a step went through; what cannot be finished is a violation, with where it happened."""
        number = self.state.open.epoch if self.state.open else self.state.next_epoch
        started = time.monotonic()
        try:
            step()
            self._context.watch.check()
            return True
        except Exception:
            text = "unfinished: " + traceback.format_exc(limit=-4)
            self.state.judged.append(
                Judged(number, time.monotonic() - started, {"unfinished": 1}, [text], {})
            )
            return False
        finally:
            if self._started is not None:
                self.state.died += self._started.watch.take_died()
            self.state.save()

    def _one(self, load_s: float) -> None:
        self.state.open = OpenEpoch(self.state.next_epoch, time.time_ns() // 1000, self._bases())
        self.state.save()
        started = time.monotonic()
        epoch = Epoch(self._context, self.state.open)
        epoch.work(load_s)
        self._conclude(epoch, started, cut_off=False)

    def _take_up(self) -> None:
        """Judge the epoch that was open when this soak was killed."""
        opened = self.state.open
        assert opened is not None
        age_ms = time.time_ns() // 1_000_000 - opened.since_us // 1000
        if age_ms > self.settings.retention_ms / 2:
            note = f"not judged: it is {age_ms / 60_000:.0f} minutes old, and retention may have removed it"
            shutil.rmtree(self.settings.directory / f"epoch-{opened.epoch}", ignore_errors=True)
            self._add(Judged(opened.epoch, 0.0, {}, [], {}, note))
            return
        opened.sessions += 1
        self.state.save()
        started = time.monotonic()
        epoch = Epoch(self._context, opened)
        epoch.take_up()
        epoch.note = "taken up after this soak was killed"
        self._conclude(epoch, started, cut_off=True)

    def _conclude(self, epoch: Epoch, started: float, *, cut_off: bool) -> None:
        judged = epoch.judge(cut_off=cut_off)
        judged.seconds = round(time.monotonic() - started, 1)
        self._add(judged)

    def _add(self, judged: Judged) -> None:
        self.state.judged.append(judged)
        self.state.open = None
        self.state.save()
        found = ", ".join(f"{name} {count}" for name, count in judged.violations.items()) or "no violation"
        facts = judged.statistics
        self.say(
            f"epoch {judged.epoch}: {found}; {facts.get('acknowledged', 0):,} acknowledged,"
            f" {facts.get('deliveries', 0):,} delivered, {judged.seconds:.0f} s"
            + (f"; {judged.note}" if judged.note else "")
        )

    def _bases(self) -> dict[str, list[int]]:
        """Where the logs that outlive epochs end before anything of the next one is sent."""
        load = mixed_load(self.state.next_epoch, self.settings.retention_ms)
        with sync.connect(self._context.broker.address) as client:
            known = {one.topic for one in client.admin.list_topics()}
            return {
                name: [one["high_watermark"] for one in client.admin.describe_topic(name).partitions]
                for name in (topic["topic"] for topic in load.topics)
                if name in known
            }

    # -- the end ------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Stop the broker, which must leave with 0, and have another reader look at all that it stored."""
        if self.state.violations:
            return  # what is there stays as it was found
        self._context.phase = "stop"
        self._context.watch.faults.begin("stop")
        self._guarded(self._stop)

    def _stop(self) -> None:
        code = self._context.broker.stop(STOP_S)
        if code != 0:
            raise RuntimeError(f"SIGTERM left with {code}\n{self._context.broker.output_tail()}")
        self._context.phase = "verify"
        url, words, environment = self.store.location()
        command = [sys.executable, "-m", "danube", "verify", str(self.data_dir), *([url] if url else [])]
        ran = subprocess.run(
            [*command, *words],
            cwd=ROOT,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=VERIFY_S,
            check=False,
        )
        if ran.returncode:
            raise RuntimeError(
                f"danube verify left with {ran.returncode}\n{ran.stdout[-3000:]}{ran.stderr[-1000:]}"
            )

    # -- telling ------------------------------------------------------------------------------------

    def _progress(self) -> None:
        """A line a minute; called by the thread that samples."""
        run_s = self._context.watch.run_s
        if run_s - self._told_s < PROGRESS_S:
            return
        self._told_s = run_s
        self.say(self.progress_line(run_s))

    def progress_line(self, run_s: float) -> str:
        context, state = self._context, self.state
        moment = datetime.now(UTC).strftime("%H:%M:%S")
        violations = ", ".join(f"{name} {count}" for name, count in state.violations.items()) or "none"
        last = f", last {context.fired[-1]}" if context.fired else ""
        return " | ".join(
            [
                f"{moment} {run_s / 60:.1f} of {self.settings.total_s / 60:g} min",
                f"epoch {state.next_epoch} {context.phase}",
                f"faults {sum(state.faults.values())} judged, {len(context.fired)} in this session{last}",
                f"acknowledged {state.totals['acknowledged']:,}, violations {violations}",
                *self._used(),
            ]
        )

    def _used(self) -> list[str]:
        latest = self.record.latest
        if latest is None:
            return []
        processes = [
            f"{role} {reading.private_bytes / MIB:.0f} MiB {reading.descriptors} fds"
            for role, reading in sorted(latest.processes.items())
        ]
        places = [f"{name} {size / MIB:.0f} MiB" for name, size in sorted(latest.places.items())]
        return [", ".join(processes), ", ".join(places)]

    def report(self) -> dict[str, Any]:
        """Everything that was found; ``verdict`` is passed, failed or stopped."""
        state, settings = self.state, self.settings
        slopes = findings(self.record, rules_for(settings))
        violations, exceeded = state.violations, over_capacity(self.record)
        violations.update({"bounds": len(exceeded)} if exceeded else {})
        complete = self._complete
        if complete and not violations and not state.faults:
            violations["liveness"] = 1
        failed = violations or any(one.growth is Growth.BEYOND for one in slopes)
        return {
            "verdict": FAILED if failed else PASSED if complete else STOPPED,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "seed": state.seed,
            "minutes": round(self.record.last_s / 60, 2),
            "asked_minutes": settings.total_s / 60,
            "sessions": state.sessions,
            "epochs": len(state.judged),
            "store": self.store.kind,
            "workers": settings.workers,
            "faults": dict(state.faults),
            "totals": dict(state.totals),
            "violations": dict(violations),
            "examples": [*exceeded, *state.died, *(text for one in state.judged for text in one.examples)],
            "notes": [f"epoch {one.epoch} {one.note}" for one in state.judged if one.note],
            "growth": [one.as_dict() for one in slopes],
            "largest": self.record.largest,
            "machine": fingerprint(settings.directory),
        }


def _file_bytes(path: str) -> int:
    """Blocks of one file; 0 while nobody has it."""
    try:
        return Path(path).stat().st_blocks * 512 if path else 0
    except OSError:
        return 0
