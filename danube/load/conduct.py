"""Conducts a run over one process or many: begins it, halts and drains it, and reports the result.

Three roles.  ``local`` runs users and judges; with several processes one *judge* (Locust's master) judges the
reports of the others, the *worker* role.  The end of a run, inside Locust's ``test_stopping``: producers
halt, every send gets its answer, consumers continue until all acknowledged records have arrived or no more
come; only then users are stopped.

The conductor gets Locust's objects as arguments: an environment with a runner, its events and options.
"""

from __future__ import annotations

import json
import re
import threading
import time
from typing import Any, Final

from danube.errors import DanubeError
from danube.load.audit import Account, Auditor, Finding
from danube.load.collector import Collector
from danube.load.links.links import Place
from danube.load.plan import Plan
from danube.load.topic import discard, new_run, prepare, subscriptions

REPORT_S: Final = 0.5
SILENT_S: Final = 10.0  # a process that reported nothing for so long is gone
ANSWERS_S: Final = 15.0  # beyond the timeout of a send
FINISH_S: Final = 10.0
LOSSY_QUIET_S: Final = 2.0  # a topic that may drop records: when nothing came for so long
OPTION: Final = "danube_run"  # among Locust's options, which travel from the judge to the workers

_VARIES: Final = re.compile(r"'[^']*'|[0-9a-f]{8,}|[0-9]+")  # names, ids and numbers in errors

REPORT: Final = "danube-report"
HALT: Final = "danube-halt"
FINISH: Final = "danube-finish"
FINISHED: Final = "danube-finished"


class Running:
    """One run as every process knows it."""

    def __init__(self, plan: Plan, run: str, place: Place) -> None:
        self.plan = plan
        self.run = run
        self.place = place
        self.collector = Collector(run)
        self.halted = threading.Event()
        self.finished = False  # what happens from now on is not part of the run

    def halt(self) -> None:
        self.halted.set()
        self.collector.halted = True


class Outcome:
    """Result of a run that has ended."""

    def __init__(self, running: Running, auditor: Auditor, findings: list[Finding], seconds: float) -> None:
        self.plan = running.plan
        self.run = running.run
        self.place = running.place
        self.accounts: list[Account] = auditor.accounts()
        self.findings = findings
        self.seconds = seconds
        self.begun = auditor.begun
        self.acknowledged = auditor.acknowledged
        self.unknown = auditor.unknown
        self.counts = dict(auditor.counts)
        self.behind_max_ms = auditor.behind_max_ns / 1e6

        self.processes = len(auditor.processes)

    @property
    def passed(self) -> bool:
        return not self.findings


class Conductor:
    """One for each process.  ``role`` is local, judge or worker."""

    def __init__(self, environment: Any, role: str) -> None:
        self.environment = environment
        self.role = role
        self.running: Running | None = None
        self.outcome: Outcome | None = None
        self._prepared: Running | None = None
        self._auditor: Auditor | None = None
        self._heard: dict[str, float] = {}
        self._finished: set[str] = set()
        self._began_s = 0.0
        self._cut_short = False
        self._lock = threading.RLock()  # one end of a run at a time
        runner = environment.runner
        if role == "judge":
            runner.register_message(REPORT, self._on_report)
            runner.register_message(FINISHED, self._on_finished)
        elif role == "worker":
            runner.register_message(HALT, self._on_halt)
            runner.register_message(FINISH, self._on_finish)
            threading.Thread(target=self._report_for_ever, name="danube-load-reports", daemon=True).start()

    # -- the beginning --------------------------------------------------------------------------

    def prepare(self) -> None:
        """Make topic and subscriptions, ahead of the test if it is to begin at once.  Raises DanubeError."""
        plan = Plan.parse(vars(self.environment.parsed_options))
        self.discard()
        run = new_run()
        self._prepared = Running(plan, run, prepare(plan, run))

    def begin(self) -> None:
        """A test starts, here or, as the judge has told, in all workers.  Raises DanubeError."""
        if self.role == "worker":
            told = json.loads(vars(self.environment.parsed_options)[OPTION])
            plan = Plan.parse(vars(self.environment.parsed_options))
            place = Place(told["topic"], tuple(told["partitions"]), told["durability"])
            self.running = Running(plan, told["run"], place)
            return
        if self._prepared is None:
            self.prepare()
        self.running, self._prepared = self._prepared, None
        running = self.running
        if running is None:
            return
        run, place = running.run, running.place
        self.outcome = None
        self._cut_short = False
        self._auditor = Auditor(
            run,
            subscriptions(running.plan, run),
            reliable=place.reliable,
            own_topic=not running.plan.topic,
        )
        if self.role == "judge":
            self._auditor.expected = set(self.environment.runner.clients)
        self._heard.clear()
        self._finished.clear()
        self._began_s = time.monotonic()
        setattr(self.environment.parsed_options, OPTION, json.dumps({"run": run, **place._asdict()}))

    def record(
        self, kind: str, name: str, milliseconds: float, size: int, error: Exception | None = None
    ) -> None:
        """Take one request into Locust's statistics, unless the run is over."""
        if self.running is not None and not self.running.finished:
            self._fire(kind, name, milliseconds, size, None if error is None else RequestFailed(error))

    def _fire(
        self, kind: str, name: str, milliseconds: float | None, size: int, error: Exception | None
    ) -> None:
        self.environment.events.request.fire(
            request_type=kind,
            name=name,
            response_time=milliseconds,
            response_length=size,
            exception=error,
            context={},
        )

    # -- reports --------------------------------------------------------------------------------

    def _report_for_ever(self) -> None:
        while True:
            time.sleep(REPORT_S)
            self._report()

    def _report(self) -> None:
        running = self.running
        if running is not None and not running.finished:
            self.environment.runner.send_message(REPORT, running.collector.take())

    def _on_report(self, **told: Any) -> None:
        report = told["msg"]
        self._heard[report.node_id] = time.monotonic()
        if self._auditor is not None:
            self._auditor.add(report.node_id, report.data)

    def _on_halt(self, **told: Any) -> None:
        if self.running is not None:
            self.running.halt()

    def _on_finish(self, **told: Any) -> None:
        """Send the figures that Locust would only send with its next report, and finish."""
        running, runner = self.running, self.environment.runner
        if running is not None and not running.finished:
            self._report()
            running.finished = True
            statistics: dict[str, Any] = {}
            self.environment.events.report_to_master.fire(client_id=runner.client_id, data=statistics)
            runner.send_message("stats", statistics)
        runner.send_message(FINISHED, {})

    def _on_finished(self, **told: Any) -> None:
        self._finished.add(told["msg"].node_id)

    # -- the end --------------------------------------------------------------------------------

    def hurry(self) -> None:
        """Stop waiting for anything: the user is impatient."""
        self._cut_short = True

    def conclude(self) -> None:
        """A test stops: halt, drain and judge it.  Does nothing when that is done."""
        with self._lock:
            running, auditor = self.running, self._auditor
            if self.role == "worker" or running is None or auditor is None or running.finished:
                return
            seconds = time.monotonic() - self._began_s
            running.halt()
            self._wait_answers(running, auditor)
            self._drain(running, auditor)
            cut_short = self._cut_short and (auditor.busy() or not auditor.drained())
            self._finish(running, auditor)
            findings = [*auditor.findings(), *self._request_findings()]
            if cut_short:
                findings.append(Finding("incomplete", "run", 1, "it was interrupted before all was judged"))
            self.outcome = Outcome(running, auditor, findings, seconds)
            self._record_checks(self.outcome)
            running.finished = True

    def _listen(self, auditor: Auditor) -> None:
        """Let reports come in."""
        time.sleep(REPORT_S / 2)
        if self.role == "local" and self.running is not None:
            auditor.add("local", self.running.collector.take())
        self._note_gone(auditor)

    def _note_gone(self, auditor: Auditor) -> None:
        """Processes that left Locust, or were silent for long; one that is heard again is back."""
        if self.role == "judge":
            present = set(self.environment.runner.clients)
            since = time.monotonic() - SILENT_S
            auditor.gone = {
                one
                for one in auditor.processes
                if one not in present or self._heard.get(one, self._began_s) < since
            }

    def _wait_answers(self, running: Running, auditor: Auditor) -> None:
        """Wait until no producer sends and every send has an outcome; each has a timeout of its own.

        A busy process may have missed the halt, because Locust drops messages while it sets a process up.  So
        the halt is repeated.
        """
        deadline = time.monotonic() + running.plan.send_timeout_s + ANSWERS_S
        while True:
            if self.role == "judge":
                self.environment.runner.send_message(HALT, {})
            self._listen(auditor)
            if not set(auditor.busy()) - auditor.gone or time.monotonic() >= deadline or self._cut_short:
                return

    def _drain(self, running: Running, auditor: Auditor) -> None:
        """Wait until all acknowledged records have arrived, or nothing has come for the timeout."""
        quiet_s = running.plan.drain_timeout_s
        if not auditor.reliable:
            quiet_s = min(quiet_s, LOSSY_QUIET_S)
        arrivals, since = auditor.arrivals, time.monotonic()
        while not auditor.drained() and not self._cut_short:
            self._listen(auditor)
            if auditor.arrivals != arrivals:
                arrivals, since = auditor.arrivals, time.monotonic()
            elif time.monotonic() - since > quiet_s:
                return

    def _finish(self, running: Running, auditor: Auditor) -> None:
        """Collect the statistics of all processes."""
        if self.role != "judge":
            return
        self.environment.runner.send_message(FINISH, {})
        deadline = time.monotonic() + FINISH_S
        while set(auditor.processes) - auditor.gone - self._finished and time.monotonic() < deadline:
            time.sleep(0.05)
            self._note_gone(auditor)

    def _request_findings(self) -> list[Finding]:
        """Failures that Locust counted, and bugs of the users themselves."""
        runner = self.environment.runner
        found = [
            Finding("requests", f"{one.method} {one.name}", one.occurrences, str(one.error))
            for one in runner.stats.errors.values()
        ]
        found += [
            Finding("exceptions", "users", one["count"], one["msg"], [one["traceback"][-500:]])
            for one in runner.exceptions.values()
        ]
        return found

    def _record_checks(self, outcome: Outcome) -> None:
        """A row of Locust's statistics for each subscription, failed where something was found."""
        by_place: dict[str, list[Finding]] = {}
        for finding in outcome.findings:
            by_place.setdefault(finding.where, []).append(finding)
        for account in outcome.accounts:
            name = f"{account.protocol} {account.mode} {outcome.place.durability}"
            found = by_place.get(account.subscription, [])
            failures: list[Exception | None] = [CheckFailed(f"{one.kind}: {one.what}") for one in found]
            for error in failures or [None]:
                self._fire("check", name, None, 0, error)

    def discard(self) -> None:
        """Take away topic and subscriptions of the last run, and of one that did not begin."""
        for running in (self.running, self._prepared):
            if self.role != "worker" and running is not None:
                discard(running.plan, running.run, running.place)
        self.running = self._prepared = None


class RequestFailed(Exception):
    """An error as Locust groups it: without the numbers that differ each time."""

    def __init__(self, error: Exception) -> None:
        what = error.what if isinstance(error, DanubeError) else str(error)
        super().__init__(f"{type(error).__name__}: {_VARIES.sub('#', what)[:200]}")


class CheckFailed(Exception):
    """Raised with the findings of the audit."""
