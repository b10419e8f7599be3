"""Locust's side of a load test: user classes, options and the hooks into a run.

Locust loads this file by its path (``danube load``, ``locust -f perf/locustfile.py``).  Importing it patches
the process for gevent, which is why nothing else imports it.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import gevent
import gevent.event
import locust.stats
from locust import User, constant, events, task
from locust.exception import StopTest
from locust.runners import MasterRunner, WorkerRunner
from locust.stats import PERCENTILES_TO_REPORT, StatsCSVFileWriter

from danube.errors import DanubeError, InvalidArgument, exit_code_of
from danube.load import results
from danube.load.conduct import Conductor, Running
from danube.load.consuming import Consuming
from danube.load.links.links import Receiver, Sender
from danube.load.links.native import NativeReceiver, NativeSender
from danube.load.plan import BROKER, OPTIONS, PROTOCOLS, TOPIC, Plan
from danube.load.producing import Producing
from danube.load.topic import subscription_name

EXIT_FOUND = 10
EXIT_INTERRUPTED = 130
SET_UP_S = 30.0
PR_SET_PDEATHSIG = 1
# Locust puts the current folder first on the path before it loads this file; nothing is imported from there.
sys.path[:] = [folder for folder in sys.path if folder not in ("", os.getcwd())]
_loaded_in = os.getpid()
_conductor: Conductor | None = None
_set_up = gevent.event.Event()  # the conductor is there
_told_early = False  # a test started before that
_csv: LiveCsv | None = None
_interrupts = 0

locust.stats.bucket_response_time = results.bucket_ms  # type: ignore[assignment]


# -- users ---------------------------------------------------------------------------------------


def _running() -> tuple[Conductor, Running]:
    """The run a new user belongs to.

    Locust takes orders from its master while it still sets a worker up: users may be there before the run is.
    """
    _set_up.wait(SET_UP_S)
    if _conductor is None or _conductor.running is None:
        raise StopTest("no run has begun in this process")
    return _conductor, _conductor.running


class LoadUser(User):
    """One producer or consumer."""

    abstract = True
    wait_time = constant(0)  # a turn waits by itself
    protocol: ClassVar[str]
    work: Producing | Consuming | None = None  # until it has started

    def on_start(self) -> None:
        self.work = self.make_work(*_running())

    def make_work(self, conductor: Conductor, running: Running) -> Producing | Consuming:
        raise NotImplementedError

    def on_stop(self) -> None:
        if self.work is not None:
            self.work.close()

    @task
    def turn(self) -> None:
        if self.work is not None:
            self.work.turn()


class Producer(LoadUser):
    """Sends at the plan's rate."""

    abstract = True

    def make_work(self, conductor: Conductor, running: Running) -> Producing:
        sender: Callable[..., Sender] = NativeSender
        if self.protocol == "grpc":
            from danube.load.links.grpc import GrpcSender  # grpcio is imported after the fork

            sender = GrpcSender
        return Producing(
            running.plan,
            running.collector,
            partial(sender, running.plan, running.collector, running.place),
            conductor.record,
            protocol=self.protocol,
            durability=running.place.durability,
            halted=running.halted,
        )


class Consumer(LoadUser):
    """Receives through the run's subscription of its mode."""

    abstract = True
    mode: ClassVar[str]

    def make_work(self, conductor: Conductor, running: Running) -> Consuming:
        subscription = subscription_name(running.run, self.protocol, self.mode)
        receiver: Callable[..., Receiver] = NativeReceiver
        if self.protocol == "grpc":
            from danube.load.links.grpc import GrpcReceiver

            receiver = partial(GrpcReceiver, name=f"load-{os.getpid()}-{id(self):x}")
        return Consuming(
            running.collector,
            partial(receiver, running.plan, running.collector, running.place, subscription, self.mode),
            conductor.record,
            protocol=self.protocol,
            mode=self.mode,
            durability=running.place.durability,
            subscription=subscription,
        )


def _user_class(protocol: str, part: str, about: str) -> type[User]:
    """Make a class named ``NativeShared`` and the like; Locust finds users by their names here."""
    name = protocol.capitalize() + part.title().replace("_", "")
    base = Producer if part == "producer" else Consumer
    members = {
        "protocol": protocol,
        "mode": part,
        "abstract": False,
        "__doc__": about,
        "__module__": __name__,
    }
    made: type[User] = type(name, (base,), members | {"__module__": __name__})
    globals()[name] = made
    return made


_PARTS = {
    "producer": "Sends records and accounts for each.",
    "exclusive": "The only consumer of its subscription.",
    "shared": "Takes its share of the records.",
    "failover": "Active, or waits for the active one to go.",
    "key_shared": "Takes the records of its keys.",
}
USERS = {
    (protocol, part): _user_class(protocol, part, about)
    for protocol in PROTOCOLS
    for part, about in _PARTS.items()
}


# -- options -------------------------------------------------------------------------------------


@events.init_command_line_parser.add_listener
def add_options(parser: Any) -> None:
    """Locust's command line, configuration and web page learn the plan's options."""
    fixed = {"broker", "topic", "protocol", "modes", "consumers"}  # what users there are is chosen once
    for option in (BROKER, TOPIC, *OPTIONS):
        parser.add_argument(
            f"--{option.name}",
            default=option.default,
            metavar=option.metavar,
            help=option.help,
            include_in_web_ui=option.name not in fixed,
        )
    for name, text in (
        ("--report-csv", "Write PREFIX_stats.csv, _stats_history.csv, _failures.csv, _exceptions.csv."),
        ("--report-html", "Write Locust's page, with the verdict."),
        ("--report-json", "Write the result as JSON."),
        ("--report-form", "table or json: what standard output gets."),
    ):
        parser.add_argument(name, default="", help=text, include_in_web_ui=False)


def _tell(error: DanubeError) -> None:
    lines = [("error", error.what), ("  why", error.why), ("  try", error.hint)]
    sys.stderr.write("".join(f"{name}: {text}\n" for name, text in lines if text))


# -- the run -------------------------------------------------------------------------------------


@events.init.add_listener
def prepare_process(environment: Any, runner: Any, web_ui: Any, **_: Any) -> None:
    """Locust is set up in this process: choose users, open results, take care of Ctrl-C."""
    global _conductor, _csv
    known = ((WorkerRunner, "worker"), (MasterRunner, "judge"))
    role = next((role for kind, role in known if isinstance(runner, kind)), "local")
    _conductor = Conductor(environment, role)
    if environment.parsed_options.loglevel.upper() not in ("INFO", "DEBUG"):
        logging.getLogger("danube.client").setLevel(logging.ERROR)  # reconnects are counted in the result
    if role == "worker":
        _follow_the_judge(runner)
        if _told_early:
            begin_run(environment)
        _set_up.set()
        return
    _set_up.set()
    options = environment.parsed_options
    try:
        _choose_users(environment, Plan.parse(vars(options)))
        if options.headless:
            _conductor.prepare()  # before the clock of --run-time starts
    except DanubeError as error:
        _tell(error)
        sys.exit(exit_code_of(error))
    if options.report_csv:
        _csv = LiveCsv(environment, options.report_csv)
    gevent.signal_handler(signal.SIGINT, _interrupted, runner, web_ui)


def _choose_users(environment: Any, plan: Plan) -> None:
    """Choose the plan's consumers, with their counts; all other users are producers.

    Users that another locustfile adds stay.
    """
    options = environment.parsed_options
    ours = set(USERS.values())
    if options.user_classes and ours & set(environment.user_classes):
        raise InvalidArgument(
            "users cannot be named one by one",
            why="every subscription of the plan is judged, so all its consumers are needed",
            hint="choose with --protocol and --modes",
        )
    if not options.user_classes:
        chosen = [USERS[both] for both in plan.consumer_counts()]
        chosen += [USERS[protocol, "producer"] for protocol in plan.protocols]
        environment.user_classes[:] = [*(set(environment.user_classes) - ours), *chosen]
        for both, count in plan.consumer_counts().items():
            USERS[both].fixed_count = count
        if options.headless:
            plan.check_users(options.num_users or 1)


@events.test_start.add_listener
def begin_run(environment: Any, **_: Any) -> None:
    """A test starts, in every process of it."""
    global _told_early
    if _conductor is None:
        _told_early = True
        return
    try:
        _conductor.begin()
    except DanubeError as error:
        _tell(error)
        if environment.parsed_options.headless:  # a page can be corrected
            environment.process_exit_code = exit_code_of(error)
            gevent.spawn(environment.runner.quit)
        raise StopTest(f"the run could not begin: {error}") from None


@events.test_stopping.add_listener
def end_run(environment: Any, **_: Any) -> None:
    """A test stops: drain and judge it while its users are still there."""
    if _conductor is not None:
        _conductor.conclude()
        if _conductor.role != "worker" and not environment.parsed_options.headless:
            logging.getLogger("danube.load").warning("%s", _verdict(environment))


@events.test_stop.add_listener
def tidy(environment: Any, **_: Any) -> None:
    """Between runs of a page nothing is left at the broker; the last one is tidied up at the end."""
    if _conductor is not None and not environment.parsed_options.headless:
        _conductor.discard()


@events.quitting.add_listener
def leave(environment: Any, **_: Any) -> None:
    """Locust ends: write the results and choose the exit code."""
    if _conductor is None or _conductor.role == "worker":
        return
    if environment.runner.state in ("spawning", "running"):
        environment.runner.stop()
    outcome = _conductor.outcome
    _conductor.discard()
    if outcome is None:
        return
    logging.getLogger("locust.stats_logger").disabled = True  # our table says the same with more digits
    environment.process_exit_code = 0 if outcome.passed else EXIT_FOUND
    try:
        _write_results(environment)
    except OSError as error:
        sys.stderr.write(f"error: the results cannot be written\n  why: {error}\n")
        environment.process_exit_code = 1


def _verdict(environment: Any) -> str:
    """The last line of the report."""
    if _conductor is None or _conductor.outcome is None:
        return "nothing was run"
    return results.text_of(_report(environment)).splitlines()[-1]


def _report(environment: Any) -> dict[str, Any]:
    if _conductor is None or _conductor.outcome is None:
        raise StopTest("nothing was run")
    return results.report_of(_conductor.outcome, environment.stats, environment.runner.target_user_count)


def _write_results(environment: Any) -> None:
    options = environment.parsed_options
    report = _report(environment)
    if _csv is not None:
        _csv.finish()
    if options.report_html:
        results.write_html(options.report_html, environment)
    if options.report_json:
        results.write_json(options.report_json, report)
    text = json.dumps(report, indent=2) + "\n" if options.report_form == "json" else results.text_of(report)
    sys.stdout.write(text)
    sys.stdout.flush()


# -- signals -------------------------------------------------------------------------------------


def _interrupted(runner: Any, web_ui: Any) -> None:
    """The first Ctrl-C ends the run as its time does; the second does not wait; the third leaves."""
    global _interrupts
    _interrupts += 1
    if _conductor is None or _interrupts > 2:
        os._exit(EXIT_INTERRUPTED)
    if _interrupts == 2:
        _conductor.hurry()
    elif _conductor.running is None and web_ui is None:
        gevent.get_hub().parent.throw(KeyboardInterrupt)  # nothing has begun: Locust waits for workers
    else:
        sys.stderr.write("stopping: waiting for what is under way (Ctrl-C again: do not wait)\n")
        gevent.spawn(_stop, runner, web_ui)


def _stop(runner: Any, web_ui: Any) -> None:
    runner.quit()
    if web_ui is not None:
        web_ui.stop()


def _follow_the_judge(runner: Any) -> None:
    """A forked worker ends with the judge, however that ends, and goes on at the first Ctrl-C.

    Both get it from the terminal, and the worker is needed to drain.
    """

    def interrupted() -> None:
        if runner.state not in ("spawning", "running"):
            gevent.spawn(runner.quit)

    if os.getpid() != _loaded_in:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        gevent.signal_handler(signal.SIGINT, interrupted)


# -- CSV -----------------------------------------------------------------------------------------


class LiveCsv(StatsCSVFileWriter):
    """Locust's CSV files, with response times to the microsecond, and complete at the end."""

    def __init__(self, environment: Any, prefix: str) -> None:
        if folder := os.path.dirname(prefix):
            os.makedirs(folder, exist_ok=True)
        super().__init__(environment, PERCENTILES_TO_REPORT, prefix, full_history=True)
        self._writing = gevent.spawn(self.stats_writer)

    def _percentile_fields(self, stats_entry: Any, use_current: bool = False) -> list[Any]:
        if stats_entry.num_requests <= stats_entry.num_none_requests:
            return self.percentiles_na
        if use_current and stats_entry.use_response_times_cache:
            ask = stats_entry.get_current_response_time_percentile
        else:
            ask = stats_entry.get_response_time_percentile
        return [ask(part) or 0 for part in self.percentiles_to_report]

    def finish(self) -> None:
        """Write the last state of everything and close the files; raises OSError."""
        self._writing.kill()
        for file, writer, write in (
            (self.requests_csv_filehandle, self.requests_csv_writer, self.requests_csv),
            (self.failures_csv_filehandle, self.failures_csv_writer, self.failures_csv),
            (self.exceptions_csv_filehandle, self.exceptions_csv_writer, self.exceptions_csv),
        ):
            file.seek(0)
            file.truncate()
            write(writer)
        self.close_files()
