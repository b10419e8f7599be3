"""Load tests: how a run begins, halts, drains and is judged, in one process and in several."""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from danube.errors import ConnectionFailed, InvalidArgument, StorageFull
from danube.load import conduct, results
from danube.load.collector import Reader
from danube.load.conduct import Conductor, Outcome, RequestFailed, Running
from danube.load.links.links import Place
from danube.load.plan import Plan
from danube.load.stamp import Stamp
from danube.load.topic import subscription_name

PLACE = Place("/default/load", ("/default/load",), "written")
PRODUCER = 5


class FakeRunner:
    """Messages between a judge and its workers, handed over at once."""

    def __init__(self, name: str, judge: FakeRunner | None = None) -> None:
        self.client_id = name
        self.judge = judge
        self.workers: list[FakeRunner] = []
        self.clients: dict[str, object] = {}
        self.listeners: dict[str, Callable[..., None]] = {}
        self.sent: list[str] = []
        self.stats = SimpleNamespace(errors={})
        self.exceptions: dict[int, Any] = {}
        if judge is not None:
            judge.workers.append(self)
            judge.clients[name] = object()

    def register_message(self, kind: str, listener: Callable[..., None]) -> None:
        self.listeners[kind] = listener

    def send_message(self, kind: str, data: Any) -> None:
        self.sent.append(kind)
        for target in [self.judge] if self.judge is not None else list(self.workers):
            if kind in target.listeners:
                message = SimpleNamespace(
                    type=kind, data=json.loads(json.dumps(data)), node_id=self.client_id
                )
                target.listeners[kind](environment=None, msg=message)


class FakeEvent:
    def __init__(self) -> None:
        self.fired: list[dict[str, Any]] = []

    def fire(self, **facts: Any) -> None:
        self.fired.append(facts)


class FakeEnvironment:
    def __init__(self, runner: FakeRunner, **options: Any) -> None:
        self.runner = runner
        self.events = SimpleNamespace(request=FakeEvent(), report_to_master=FakeEvent())
        self.parsed_options = argparse.Namespace(**{"modes": "shared", "drain_timeout": "400ms"} | options)


@pytest.fixture(autouse=True)
def no_broker(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    discarded: list[str] = []
    monkeypatch.setattr(conduct, "prepare", lambda plan, run: PLACE)
    monkeypatch.setattr(conduct, "discard", lambda plan, run, place: discarded.append(run))
    monkeypatch.setattr(conduct, "REPORT_S", 0.02)
    yield discarded


def local(**options: Any) -> tuple[Conductor, FakeEnvironment]:
    environment = FakeEnvironment(FakeRunner("local"), **options)
    conductor = Conductor(environment, "local")
    conductor.begin()
    return conductor, environment


def running_of(conductor: Conductor) -> Running:
    assert conductor.running is not None
    return conductor.running


def send(conductor: Conductor, *numbers: int) -> None:
    collector = running_of(conductor).collector
    for number in numbers:
        collector.begin(0)
        collector.acknowledged(PRODUCER, number)


def arrive(conductor: Conductor, *numbers: int) -> None:
    running = running_of(conductor)
    reader = Reader(subscription_name(running.run, "native", "shared"), "shared")
    for number in numbers:
        stamp = Stamp(int(running.run, 16), PRODUCER, number, 0, 0, 0, 0)
        running.collector.arrived(reader, stamp, 0, False)


def outcome_of(conductor: Conductor) -> Outcome:
    assert conductor.outcome is not None
    return conductor.outcome


def kinds(conductor: Conductor) -> list[str]:
    return [one.kind for one in outcome_of(conductor).findings]


def checks(environment: FakeEnvironment) -> list[tuple[str, str | None]]:
    return [
        (fact["name"], None if fact["exception"] is None else str(fact["exception"]))
        for fact in environment.events.request.fired
        if fact["request_type"] == "check"
    ]


# -- one process ----------------------------------------------------------------------------------


def test_a_run_in_which_all_arrived_passes() -> None:
    conductor, environment = local()
    send(conductor, 0, 1, 2)
    arrive(conductor, 0, 1, 2)
    conductor.conclude()
    outcome = outcome_of(conductor)
    assert outcome.passed and outcome.acknowledged == 3
    assert checks(environment) == [("native shared written", None)]


def test_the_drain_waits_for_answers_and_then_for_arrivals() -> None:
    conductor, _ = local(drain_timeout="20s")
    running = running_of(conductor)
    running.collector.senders.add(PRODUCER)
    for _ in range(3):
        running.collector.begin(0)
    moments: list[str] = []

    def late() -> None:
        assert running.halted.wait(20)
        time.sleep(0.1)
        moments.append("answers")
        for number in range(3):
            running.collector.acknowledged(PRODUCER, number)
        running.collector.senders.clear()
        for number in range(3):
            time.sleep(0.1)
            moments.append("arrival")
            arrive(conductor, number)

    thread = threading.Thread(target=late)
    thread.start()
    conductor.conclude()
    thread.join(20)
    assert outcome_of(conductor).passed
    assert moments == ["answers", *["arrival"] * 3]


def test_what_does_not_arrive_within_the_drain_is_lost() -> None:
    conductor, environment = local()
    send(conductor, 0, 1, 2)
    arrive(conductor, 0, 2)
    conductor.conclude()
    assert kinds(conductor) == ["lost"]
    (check,) = checks(environment)
    assert check == (
        "native shared written",
        "lost: 1 acknowledged records did not arrive; no consumer was left",
    )


def test_a_send_that_never_ends_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conduct, "ANSWERS_S", 0.1)
    conductor, _ = local(send_timeout="200ms")
    send(conductor, 0)
    arrive(conductor, 0)
    running_of(conductor).collector.begin(0)
    conductor.conclude()
    assert kinds(conductor) == ["incomplete"]
    assert outcome_of(conductor).unknown == 1


def test_somebody_impatient_ends_the_drain_and_the_verdict_says_so() -> None:
    conductor, _ = local(drain_timeout="1h")
    send(conductor, 0)
    timer = threading.Timer(0.2, conductor.hurry)
    timer.start()
    conductor.conclude()
    timer.join()
    assert kinds(conductor) == ["lost", "incomplete"]


def test_impatience_after_everything_arrived_changes_nothing() -> None:
    conductor, _ = local()
    send(conductor, 0)
    arrive(conductor, 0)
    running_of(conductor).halt()
    conductor.hurry()
    conductor.conclude()
    assert outcome_of(conductor).passed


def test_failed_requests_and_bugs_of_users_are_findings() -> None:
    conductor, environment = local()
    send(conductor, 0)
    arrive(conductor, 0)
    failure = SimpleNamespace(
        method="publish", name="native written 100B", occurrences=4, error="StorageFull: x"
    )
    environment.runner.stats.errors["key"] = failure
    environment.runner.exceptions[1] = {"count": 2, "msg": "bug", "traceback": "line 1"}
    conductor.conclude()
    assert [str(one) for one in outcome_of(conductor).findings] == [
        "publish native written 100B: StorageFull: x",
        "users: bug (line 1)",
    ]
    assert [one.count for one in outcome_of(conductor).findings] == [4, 2]


def test_an_end_is_judged_once() -> None:
    conductor, environment = local()
    send(conductor, 0)
    arrive(conductor, 0)
    conductor.conclude()
    first = conductor.outcome
    conductor.conclude()
    assert conductor.outcome is first and len(checks(environment)) == 1


def test_nothing_is_recorded_after_the_end() -> None:
    conductor, environment = local()
    conductor.record("e2e", "x", 1.0, 5)
    send(conductor, 0)
    arrive(conductor, 0)
    conductor.conclude()
    before = len(environment.events.request.fired)
    conductor.record("e2e", "x", 1.0, 5, ConnectionFailed("the topic is gone"))
    assert len(environment.events.request.fired) == before


def test_a_second_run_is_another_run(no_broker: list[str]) -> None:
    conductor, _ = local()
    first = running_of(conductor).run
    send(conductor, 0)
    conductor.conclude()
    assert kinds(conductor) == ["lost"]
    conductor.begin()
    assert running_of(conductor).run != first and no_broker == [first]
    send(conductor, 0)
    arrive(conductor, 0)
    conductor.conclude()
    assert outcome_of(conductor).passed
    conductor.discard()
    assert len(no_broker) == 2


def test_a_run_that_was_prepared_and_never_began_is_discarded(no_broker: list[str]) -> None:
    conductor = Conductor(FakeEnvironment(FakeRunner("local")), "local")
    conductor.prepare()
    conductor.conclude()
    conductor.discard()
    assert conductor.outcome is None and len(no_broker) == 1


def test_a_topic_that_cannot_be_made_and_a_bad_option_stop_the_beginning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(plan: Plan, run: str) -> Place:
        raise ConnectionFailed("nothing listens there")

    monkeypatch.setattr(conduct, "prepare", refuse)
    with pytest.raises(ConnectionFailed):
        local()
    with pytest.raises(InvalidArgument, match="--rate"):
        local(rate="x")


def test_errors_are_grouped_without_what_differs_each_time() -> None:
    errors = [
        StorageFull(f"partition '/default/load-{number:016x}' has {number} bytes left; id {number:08x}")
        for number in range(50)
    ]
    assert len({str(RequestFailed(error)) for error in errors}) == 1
    assert "StorageFull: partition # has # bytes left; id #" in str(RequestFailed(errors[0]))


# -- several processes ----------------------------------------------------------------------------


class Hosts:
    """A judge with workers that run in threads of this process; ``mute`` more never report."""

    def __init__(self, workers: int, mute: int = 0, **options: Any) -> None:
        judge = FakeRunner("judge")
        runners = [FakeRunner(f"w{number}", judge) for number in range(workers + mute)]
        del judge.workers[workers:]
        self.environment = FakeEnvironment(judge, **options)
        self.judge = Conductor(self.environment, "judge")
        self.judge.begin()
        self.workers: list[Conductor] = []
        for runner in runners[:workers]:
            environment = FakeEnvironment(runner, **options)
            told = vars(self.environment.parsed_options)[conduct.OPTION]
            setattr(environment.parsed_options, conduct.OPTION, told)
            self.workers.append(Conductor(environment, "worker"))
            self.workers[-1].begin()

    def wait_reports(self) -> None:
        deadline = time.monotonic() + 20
        while len(self.judge._heard) < len(self.workers):
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def end(self) -> None:
        """Let the threads that report for ever report nothing."""
        for worker in self.workers:
            worker.running = None


@pytest.fixture
def hosts() -> Iterator[Callable[..., Hosts]]:
    made: list[Hosts] = []

    def make(workers: int, mute: int = 0, **options: Any) -> Hosts:
        made.append(Hosts(workers, mute, **options))
        return made[-1]

    yield make
    for one in made:
        one.end()


def test_workers_learn_the_run_and_the_judge_adds_up(hosts: Callable[..., Hosts]) -> None:
    run = hosts(2)
    assert {running_of(one).run for one in run.workers} == {running_of(run.judge).run}
    assert all(running_of(one).place == PLACE for one in run.workers)
    run.wait_reports()
    send(run.workers[0], *range(10))
    arrive(run.workers[0], *range(0, 10, 2))
    arrive(run.workers[1], *range(1, 10, 2))
    run.judge.conclude()
    outcome = outcome_of(run.judge)
    assert outcome.passed and outcome.processes == 2 and outcome.acknowledged == 10
    assert all(running_of(one).halted.is_set() for one in run.workers)


def test_a_worker_that_missed_the_end_is_told_again(hosts: Callable[..., Hosts]) -> None:
    run = hosts(2)
    run.wait_reports()
    send(run.workers[0], 0)
    arrive(run.workers[1], 0)
    deaf = run.workers[1].environment.runner
    listener = deaf.listeners.pop(conduct.HALT)
    heard: list[str] = []

    def later(**told: Any) -> None:
        heard.append(told["msg"].type)
        if len(heard) == 3:
            deaf.listeners[conduct.HALT] = listener

    deaf.listeners[conduct.HALT] = later
    run.judge.conclude()
    assert outcome_of(run.judge).passed


def test_workers_hand_over_their_statistics_before_the_verdict(hosts: Callable[..., Hosts]) -> None:
    run = hosts(2)
    run.wait_reports()
    send(run.workers[0], 0)
    arrive(run.workers[1], 0)
    run.judge.conclude()
    for worker in run.workers:
        assert len(worker.environment.events.report_to_master.fired) == 1
        assert worker.environment.runner.sent[-2:] == ["stats", conduct.FINISHED]
        assert running_of(worker).finished


def test_a_loss_between_processes_is_found(hosts: Callable[..., Hosts]) -> None:
    run = hosts(2)
    run.wait_reports()
    send(run.workers[0], *range(10))
    arrive(run.workers[1], *range(9))
    run.judge.conclude()
    assert kinds(run.judge) == ["lost"]


def test_a_worker_that_leaves_fails_the_run(hosts: Callable[..., Hosts]) -> None:
    run = hosts(2)
    run.wait_reports()
    send(run.workers[0], 0)
    arrive(run.workers[0], 0)
    run.workers[1].running = None  # silent from now on
    del run.environment.runner.clients["w1"]
    run.environment.runner.workers.pop()
    run.judge.conclude()
    assert [(one.kind, one.where) for one in outcome_of(run.judge).findings] == [("incomplete", "w1")]


def test_a_worker_that_leaves_before_it_has_reported_fails_the_run(hosts: Callable[..., Hosts]) -> None:
    run = hosts(1, mute=1)
    run.wait_reports()
    send(run.workers[0], 0)
    arrive(run.workers[0], 0)
    del run.environment.runner.clients["w1"]
    run.judge.conclude()
    assert [(one.kind, one.where) for one in outcome_of(run.judge).findings] == [("incomplete", "w1")]


def test_a_worker_that_falls_silent_fails_the_run(
    hosts: Callable[..., Hosts], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conduct, "SILENT_S", 0.3)
    run = hosts(2)
    run.wait_reports()
    send(run.workers[0], 0)
    arrive(run.workers[0], 0)
    run.workers[1].running = None
    run.environment.runner.workers.pop()
    run.judge.conclude()
    assert ("incomplete", "w1") in [(one.kind, one.where) for one in outcome_of(run.judge).findings]


# -- results --------------------------------------------------------------------------------------


def test_the_result_as_json_and_as_text(tmp_path: Path) -> None:
    conductor, _ = local()
    send(conductor, 0, 1)
    arrive(conductor, 0)
    conductor.conclude()
    report = results.report_of(outcome_of(conductor), _statistics(), users=9)
    results.write_json(str(tmp_path / "new" / "load.json"), report)
    read = json.loads((tmp_path / "new" / "load.json").read_text())
    assert read == report and list((tmp_path / "new").iterdir()) == [tmp_path / "new" / "load.json"]
    assert read["passed"] is False
    assert read["findings"][0]["kind"] == "lost" and read["findings"][0]["count"] == 1
    assert read["run"]["durability"] == "written" and read["run"]["users"] == 9
    assert read["records"]["acknowledged"] == 2
    assert read["subscriptions"][0]["lost"] == 1
    assert read["requests"][0]["p50_ms"] == 0.512 and read["requests"][1]["p50_ms"] is None
    text = results.text_of(report)
    assert "lost: " in text and text.endswith("failed: 1 findings\n")
    assert "2 records sent at level written, 2 acknowledged, 0 not known" in text


def test_a_memory_run_says_what_passing_means() -> None:
    conductor, _ = local()
    send(conductor, 0)
    arrive(conductor, 0)
    conductor.conclude()
    report = results.report_of(outcome_of(conductor), _statistics(), users=9)
    assert results.text_of(report).endswith("passed: every acknowledged record arrived, in order\n")
    report["run"]["durability"] = "memory"
    assert "may drop records" in results.text_of(report)


def test_many_findings_are_cut_in_the_text_alone() -> None:
    conductor, environment = local()
    send(conductor, 0)
    arrive(conductor, 0)
    for number in range(30):
        environment.runner.exceptions[number] = {"count": 1, "msg": f"bug {number}", "traceback": ""}
    conductor.conclude()
    report = results.report_of(outcome_of(conductor), _statistics(), users=9)
    assert len(report["findings"]) == 30
    assert "and 10 more" in results.text_of(report)


def test_response_times_keep_three_digits() -> None:
    found = [results.bucket_ms(one) for one in (0.0512345, 0.512345, 5.12345, 51.2345, 512.345, 5123.45)]
    assert found == [0.0512, 0.512, 5.12, 51.2, 512, 5120]
    assert results.bucket_ms(0) == results.bucket_ms(-1) == 0
    assert len({results.bucket_ms(one / 1000) for one in range(1, 1_000_000)}) < 4_000


def _statistics() -> Any:
    """What Locust's own would be: one kind of request with times, one without."""

    def entry(method: str, none: int) -> Any:
        return SimpleNamespace(
            method=method,
            name="native shared written",
            num_requests=3,
            num_none_requests=none,
            num_failures=0,
            avg_response_time=0.5,
            max_response_time=1.0,
            total_rps=2.0,
            avg_content_length=100.0,
            get_response_time_percentile=lambda part: 0.512,
        )

    return SimpleNamespace(entries={("a", "e2e"): entry("e2e", 0), ("b", "check"): entry("check", 3)})
