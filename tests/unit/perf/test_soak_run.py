"""The parts of a soak that need no broker: verdicts over epochs, state, arguments, report."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perf.soak import __main__ as command
from perf.soak import epoch, store, verdict
from perf.soak.epoch import Context
from perf.soak.load import mixed_load, short_lived_topic
from perf.soak.report import markdown, text
from perf.soak.sampling import Reading, Sample
from perf.soak.settings import Settings
from perf.soak.soak import FAILED, PASSED, STOPPED, Soak
from perf.soak.state import Judged, OpenEpoch, State, StateRefused
from perf.soak.store import NoStore, Store
from perf.soak.watch import Faults, Watch
from tests.broker_process import BrokerProcess
from tests.child_process import Child
from tests.crash.journal import Event, Journal
from tests.s3_server import NoServer, Program

TOPIC = "/default/plain"
BASE = 100


def honest() -> list[Event]:
    """An epoch that begins at offset 100, with one record of before that came once more."""
    events: list[Event] = [
        ["got", "s", "c0", TOPIC, 0, BASE - 1, "p", 7, None, True, False, 150],
        ["ack", "s", TOPIC, 0, BASE - 1],
    ]
    for number in range(5):
        sequence, offset = 1_000 + number, BASE + number
        events += [
            ["try", "p", TOPIC, sequence, sequence + 1, None],
            ["ok", "p", TOPIC, sequence, sequence + 1, 0, offset, "written", 100 + number],
            ["got", "s", "c0", TOPIC, 0, offset, "p", sequence, None, True, False, 200 + number],
            ["ack", "s", TOPIC, 0, offset],
            ["log", TOPIC, 0, offset, "p", sequence, None, True],
        ]
    return [*events, ["fault", "kill_worker", 1, 90, 95, {}]]


def judged(folder: Path, events: list[Event], **asked: Any) -> dict[str, Any]:
    """The verdict of the process that a soak starts, over journals in files."""
    folder.mkdir()
    journal = Journal(folder / "all.jsonl")
    for event in events:
        journal.write(*event)
    journal.close()
    options = {
        "journals": str(folder),
        "bases": {TOPIC: [BASE]},
        "modes": {"s": "exclusive"},
        "topics_read": {"s": TOPIC},
        "acknowledged_min": 1,
        "faults_min": 1,
        "acknowledged_after_fault_min": 1,
        "acks_are_known": True,
        **asked,
    }
    return Child("perf/soak/verdict.py", "judge", options).result(60)


def test_an_honest_epoch_passes_and_what_was_before_it_does_not_count(tmp_path: Path) -> None:
    found = judged(tmp_path / "journals", honest())
    assert found["counts"] == {}, found["examples"]
    assert found["statistics"]["acknowledged"] == found["statistics"]["in_log"] == 5
    assert found["statistics"]["redeliveries_from_before"] == 1


@pytest.mark.parametrize(
    ("planted", "named"),
    [
        (lambda event: event[0] == "log" and event[3] == BASE + 2, "lost"),
        (lambda event: event[0] in ("log", "ok") and BASE in event, "hole"),
        (lambda event: event[0] in ("got", "ack") and BASE + 3 in event, "undelivered"),
        (lambda event: event[0] == "try" and event[3] == 1_004, "invented"),
    ],
)
def test_a_planted_loss_is_found(tmp_path: Path, planted: Any, named: str) -> None:
    found = judged(tmp_path / "journals", [event for event in honest() if not planted(event)])
    assert named in found["counts"]


def test_damage_to_a_record_of_an_earlier_epoch_is_found(tmp_path: Path) -> None:
    events = honest()
    events[0][9] = False
    assert judged(tmp_path / "journals", events)["counts"] == {"invented": 1}


def test_an_epoch_in_which_nothing_happened_fails(tmp_path: Path) -> None:
    assert judged(tmp_path / "journals", [])["counts"] == {"liveness": 3}


def test_acks_of_killed_clients_are_not_demanded(tmp_path: Path) -> None:
    events = [event for event in honest() if not (event[0] == "ack" and event[4] == BASE + 1)]
    assert judged(tmp_path / "with", events)["counts"] == {"undelivered": 1}
    assert judged(tmp_path / "without", events, acks_are_known=False)["counts"] == {}


def test_an_acknowledgement_is_found_at_the_end_of_a_journal(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "producer-p-0.jsonl")
    for number in range(1_000):
        journal.write("try", "p", TOPIC, number, number + 1, None)
        journal.write("ok", "p", TOPIC, number, number + 1, 0, number, "written", number)
    journal.write("try", "p", TOPIC, 1_000, 1_001, None)
    journal.close()
    (tmp_path / "producer-q-0.jsonl").write_text("")
    assert epoch._acknowledged_since(tmp_path, 998)
    assert not epoch._acknowledged_since(tmp_path, 999)


# -- load and time ----------------------------------------------------------------------------------


def test_the_load_has_every_mode_native_and_over_grpc() -> None:
    load = mixed_load(3, 60_000)
    natives = {one["mode"] for one in load.consumers if one.get("via") != "grpc"}
    assert natives == {one["mode"] for one in load.consumers if one.get("via") == "grpc"}
    assert natives == {"exclusive", "shared", "failover", "key_shared"}
    assert {one.get("via", "native") for one in load.producers} == {"native", "grpc"}
    assert {topic["durability"] for topic in load.topics} == {"written", "fsync"}
    assert {topic["retention_ms"] for topic in load.topics} == {60_000}
    assert short_lived_topic(3) in {topic["topic"] for topic in load.topics}


def test_epochs_fill_the_time_and_leave_room_for_their_end() -> None:
    settings = Settings(directory=Path(), total_s=600, epoch_s=120)
    assert settings.load_s(600) == 120
    assert settings.load_s(150) == 135, "a last epoch that is a little longer rather than one too short"
    assert settings.load_s(80) == 65
    assert settings.load_s(20) == 0
    assert settings.retention_ms == 360_000


@pytest.mark.parametrize("words", [["--minutes", "0"], ["--fault-every", "9-3"], ["--fault-every", "x"]])
def test_wrong_arguments_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        command.arguments(words)
    assert left.value.code == 2
    assert words[0] in capsys.readouterr().err


# -- state ------------------------------------------------------------------------------------------

OPTIONS = {"workers": 2, "store": "directory", "epoch_s": 60.0}


def state_in(folder: Path, *, died: list[str] | None = None, counts: dict[str, int] | None = None) -> State:
    state = State.load(folder / "state.json", 7, OPTIONS)
    state.judged = [
        Judged(0, 60.0, {}, [], {"acknowledged": 10, "faults": {"kill_all": 1}}),
        Judged(
            1, 61.5, counts or {}, ["lost: it"] if counts else [], {"acknowledged": 5, "faults": {}}, "cut"
        ),
    ]
    state.died = died or []
    return state


def test_a_state_is_what_was_saved(tmp_path: Path) -> None:
    state = state_in(tmp_path)
    state.open = OpenEpoch(2, 123, {TOPIC: [4, 5]}, 1)
    state.save()
    again = State.load(tmp_path / "state.json", None, OPTIONS)
    assert (again.seed, again.open, again.judged) == (7, state.open, state.judged)
    assert again.next_epoch == 2
    assert (again.totals["acknowledged"], dict(again.faults)) == (15, {"kill_all": 1})
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]


@pytest.mark.parametrize(
    ("seed", "options", "sentence"),
    [
        (8, OPTIONS, "seed 7, not 8"),
        (7, {**OPTIONS, "workers": 3}, "workers 2, not 3"),
        (None, {**OPTIONS, "store": "s3"}, "store directory, not s3"),
    ],
)
def test_another_run_is_refused(
    tmp_path: Path, seed: int | None, options: dict[str, Any], sentence: str
) -> None:
    state_in(tmp_path).save()
    with pytest.raises(StateRefused, match=sentence):
        State.load(tmp_path / "state.json", seed, options)


@pytest.mark.parametrize("content", ["", "{", "{}", '{"format": 1}'])
def test_a_damaged_state_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "state.json").write_text(content)
    with pytest.raises(StateRefused, match="cannot be read"):
        State.load(tmp_path / "state.json", 7, OPTIONS)


def test_a_state_of_a_later_format_is_refused(tmp_path: Path) -> None:
    state_in(tmp_path).save()
    path = tmp_path / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 9}))
    with pytest.raises(StateRefused, match="format 9"):
        State.load(path, 7, OPTIONS)


def test_a_directory_of_something_else_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    assert command.main(["--directory", str(tmp_path), "--restart"]) == 2
    assert "holds something else" in capsys.readouterr().err
    assert (tmp_path / "thesis.tex").exists()


def test_two_soaks_do_not_share_a_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (tmp_path / command.LOCK).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert command.main(["--directory", str(tmp_path)]) == 2
    assert "a soak is running" in capsys.readouterr().err


def test_a_restart_forgets_the_run(tmp_path: Path) -> None:
    with command.claimed(tmp_path, restart=False):
        (tmp_path / "state.json").write_text("{")
        (tmp_path / "epoch-3").mkdir()
    with command.claimed(tmp_path, restart=True):
        assert [path.name for path in tmp_path.iterdir()] == [command.LOCK]


# -- the verdict of a run ---------------------------------------------------------------------------


def soak_of(folder: Path, minutes: float, **state: Any) -> Soak:
    """A run of which one minute was sampled."""
    folder.mkdir(exist_ok=True)
    settings = Settings(directory=folder, total_s=minutes * 60, epoch_s=60, store="directory")
    soak = Soak(settings, state_in(folder, **state), lambda line: None, threading.Event())
    reading = Reading("1", 99.0, 1, 1, 1, 1, 1, 0, 1)
    soak.record.add(60.0, 1, True, Sample({"supervisor": reading}, {"data": 1}))
    return soak


@pytest.mark.parametrize(
    ("minutes", "state", "word"),
    [
        (1, {}, PASSED),
        (5, {}, STOPPED),
        (1, {"counts": {"lost": 1}}, FAILED),
        (5, {"counts": {"lost": 1}}, FAILED),
        (1, {"died": ["worker-0 ended"]}, FAILED),
    ],
)
def test_the_verdict_is_passed_only_when_nothing_was_found(
    tmp_path: Path, minutes: float, state: dict[str, Any], word: str
) -> None:
    soak = soak_of(tmp_path / "run", minutes, **state)
    found = soak.report()
    soak.record.close()
    assert found["verdict"] == word
    assert found["totals"]["acknowledged"] == 15
    assert word in text(found) and "kill_all 1" in markdown(found)
    if word == FAILED:
        assert found["examples"][0] in text(found)


def test_a_run_with_an_open_epoch_is_not_over(tmp_path: Path) -> None:
    soak = soak_of(tmp_path / "run", 1)
    soak.state.open = OpenEpoch(2, 123, {})
    found = soak.report()
    soak.record.close()
    assert found["verdict"] == STOPPED


def test_an_open_epoch_that_retention_may_have_eaten_is_not_judged(tmp_path: Path) -> None:
    soak = soak_of(tmp_path / "run", 5)
    state = soak.state
    state.open = OpenEpoch(2, 123, {})
    (tmp_path / "run" / "epoch-2" / "journals").mkdir(parents=True)
    soak._take_up()
    soak.record.close()
    assert soak.state.open is None and not soak.state.violations
    assert any("epoch 2 not judged: it is" in note for note in soak.report()["notes"])
    assert not (tmp_path / "run" / "epoch-2").exists()


def test_a_line_a_minute_says_how_far_it_is(tmp_path: Path) -> None:
    soak = soak_of(tmp_path / "run", 5)
    said: list[str] = []
    soak.say = said.append
    watch = Watch(soak.record, Faults(), dict, {})
    broker = BrokerProcess(tmp_path / "data")
    soak._started = Context(soak.settings, 7, broker, soak.store, watch, soak.stopped, "load", ["kill_all"])
    soak._progress()
    soak._progress()
    soak.record.close()
    (line,) = said
    assert "1.0 of 5 min | epoch 2 load | faults 1 judged, 1 in this session, last kill_all" in line
    assert "acknowledged 15, violations none | supervisor 0 MiB 1 fds | data 0 MiB" in line


def test_a_second_signal_leaves_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run", interrupted)
    assert command.main([]) == 3
    assert "left at once" in capsys.readouterr().out


def test_the_first_signal_lets_the_epoch_end_and_the_second_does_not() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    stopped = threading.Event()
    try:
        command.stopping(stopped)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stopped.wait(10)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Event().wait(10)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_run_without_a_fault_says_nothing(tmp_path: Path) -> None:
    soak = soak_of(tmp_path / "run", 1)
    soak.state.judged[0].statistics["faults"] = {}
    found = soak.report()
    soak.record.close()
    assert (found["verdict"], found["violations"]) == (FAILED, {"liveness": 1})


def test_a_slope_beyond_its_bound_fails_the_run(tmp_path: Path) -> None:
    soak = soak_of(tmp_path / "run", 30)
    for number in range(1, 400):
        reading = Reading("1", 99.0, number << 20, 1, 1, 1, 1, 0, 1)
        soak.record.add(60.0 + 5 * number, 1, True, Sample({"supervisor": reading}, {"data": 1}))
    found = soak.report()
    soak.record.close()
    assert found["verdict"] == FAILED
    assert "beyond  supervisor private_bytes long run" in text(found)
    assert "a slope beyond its bound" in markdown(found)


def test_more_than_a_bound_at_any_moment_fails_the_run(tmp_path: Path) -> None:
    soak = soak_of(tmp_path / "run", 1)
    reading = Reading("1", 99.0, 1, 1, 1, 1, 1, 5_000, 1)
    soak.record.add(61.0, 1, True, Sample({"worker-1": reading}, {"data": 1}))
    found = soak.report()
    soak.record.close()
    assert (found["verdict"], found["violations"]) == (FAILED, {"bounds": 1})
    assert "worker-1 had 5000 data_files at once" in text(found)


def test_a_run_that_failed_is_not_gone_on_with(tmp_path: Path) -> None:
    soak = soak_of(tmp_path / "run", 5, counts={"lost": 1})
    assert soak.run()["verdict"] == FAILED
    assert not (tmp_path / "run" / "data").exists(), "no broker was started"


def test_a_step_that_cannot_be_finished_is_a_violation(tmp_path: Path) -> None:
    soak = soak_of(tmp_path / "run", 5)

    def step() -> None:
        raise OSError("the disk is gone")

    assert not soak._guarded(step)
    soak.record.close()
    assert soak.state.violations == {"unfinished": 1}
    assert "the disk is gone" in text(soak.report())


# -- the store --------------------------------------------------------------------------------------


def test_without_a_server_that_keeps_its_objects_a_directory_is_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "find", lambda: Program("moto", Path("moto")))
    made = Store("auto", tmp_path / "store", 1)
    assert made.kind == "directory" and made.has_mover
    assert made.open()["DANUBE_STORAGE__URL"] == f"file://{tmp_path}/store"
    assert (made.faults(), made.fault_weights) == ({}, {})
    made.close()
    with pytest.raises(NoStore, match="in memory"):
        Store("s3", tmp_path / "store", 1)


def test_a_missing_server_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none() -> Program:
        raise NoServer("no S3 server: none here")

    monkeypatch.setattr(store, "find", none)
    assert command.main(["--directory", str(tmp_path / "run"), "--store", "s3"]) == 2
    assert "none here" in capsys.readouterr().err


def test_a_run_does_not_go_on_with_another_store(tmp_path: Path) -> None:
    soak = soak_of(tmp_path / "run", 5)
    soak.record.close()
    soak.state.save()
    settings = replace(soak.settings, store="none")
    with pytest.raises(NoStore, match="began with the store directory, and here is only none"):
        Soak(settings, soak.state, lambda line: None, threading.Event())


def test_no_store_needs_no_mover(tmp_path: Path) -> None:
    made = Store("none", tmp_path / "store", 1)
    assert not made.has_mover and "DANUBE_STORAGE__URL" not in made.open()
    assert made.location() == ("", [], {})


def test_the_expectation_of_an_epoch_names_where_its_logs_begin() -> None:
    options = {
        "modes": {},
        "topics_read": {},
        "acknowledged_min": 0,
        "faults_min": 0,
        "acknowledged_after_fault_min": 0,
        "acks_are_known": True,
    }
    assert verdict.expectation_of(options, {(TOPIC, 1): 9}).log_starts == {(TOPIC, 1): 9}
