"""The parts of a soak that need no broker: findings, state, arguments, report."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from perf.soak import __main__ as command
from perf.soak import store
from perf.soak.load import LOADS, violations_of
from perf.soak.soak import FAILED, PASSED, STOPPED, Settings, Soak, State, StateRefused, text
from perf.soak.store import Store
from perf.soak.watch import Reading, Sample
from tests.s3_server import NoServer, Program


def finding(kind: str, what: str, *examples: str) -> dict[str, Any]:
    return {"kind": kind, "where": "a subscription", "count": 2, "what": what, "examples": list(examples)}


def test_what_the_audit_found_is_a_violation_and_a_cut_connection_is_not() -> None:
    findings = [
        finding("requests", "ConnectionFailed: the broker went away"),
        finding("lost", "2 acknowledged records did not arrive", "producer p number 4 to 5"),
        finding("requests", "WrongState: acknowledged at level memory, not fsync"),
    ]
    assert violations_of({"findings": findings}) == {
        "lost": ["lost: a subscription: 2 acknowledged records did not arrive producer p number 4 to 5"],
        "requests": ["requests: a subscription: WrongState: acknowledged at level memory, not fsync "],
    }
    assert violations_of({"findings": findings[:1]}) == {}


# -- load and time ----------------------------------------------------------------------------------


def test_the_load_speaks_both_protocols_at_both_levels() -> None:
    words = {name: " ".join(one) for name, one in LOADS.items()}
    assert "--protocol both --partitions 3" in words["made"] and "--durability written" in words["made"]
    assert "--topic /default/soak" in words["kept"]
    assert not any("--modes" in one for one in words.values()), "all of them"


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


def state_in(folder: Path, *, violations: dict[str, int] | None = None) -> State:
    state = State.load(folder / "state.json", 7, OPTIONS)
    state.epochs, state.faults, state.totals = 2, Counter(kill_all=1), Counter(acknowledged=15)
    for kind, count in (violations or {}).items():
        state.add(kind, *[f"{kind}: it"] * count)
    return state


def test_a_state_is_what_was_saved(tmp_path: Path) -> None:
    state = state_in(tmp_path, violations={"lost": 1})
    state.open = True
    state.save()
    again = State.load(tmp_path / "state.json", None, OPTIONS)
    assert again == state
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
    reading = Reading("1", 99.0, 1, 1, 0, 1)
    soak.record.add(60.0, 1, True, Sample({"supervisor": reading}, {"data": 1}))
    return soak


@pytest.mark.parametrize(
    ("minutes", "state", "word"),
    [
        (1, {}, PASSED),
        (5, {}, STOPPED),
        (1, {"violations": {"lost": 1}}, FAILED),
        (5, {"violations": {"died": 1}}, FAILED),
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
    assert word in text(found) and "kill_all 1" in text(found)
    if word == FAILED:
        assert found["examples"][0] in text(found)


def test_a_run_with_an_open_epoch_is_not_over(tmp_path: Path) -> None:
    soak = soak_of(tmp_path / "run", 1)
    soak.state.open = True
    found = soak.report()
    soak.record.close()
    assert found["verdict"] == STOPPED


def test_a_line_a_minute_says_how_far_it_is(tmp_path: Path) -> None:
    soak = soak_of(tmp_path / "run", 5)
    said: list[str] = []
    soak.say, soak.phase = said.append, "load"
    soak.watch._started -= 60
    soak._progress()
    soak._progress()
    soak.record.close()
    (line,) = said
    assert "1.0 of 5 min | epoch 1 load | faults kill_all 1 | acknowledged 15, violations none" in line
    assert "supervisor 0 MiB 1 fds | data 0 MiB" in line


def test_a_second_signal_leaves_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*given: object) -> None:
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
    soak.state.faults.clear()
    found = soak.report()
    soak.record.close()
    assert (found["verdict"], found["violations"]) == (FAILED, {"liveness": 1})


def test_a_slope_beyond_its_bound_fails_the_run(tmp_path: Path) -> None:
    soak = soak_of(tmp_path / "run", 30)
    for number in range(1, 400):
        reading = Reading("1", 99.0, number << 20, 1, 0, 1)
        soak.record.add(60.0 + 5 * number, 1, True, Sample({"supervisor": reading}, {"data": 1}))
    found = soak.report()
    soak.record.close()
    assert found["verdict"] == FAILED
    assert "beyond  supervisor private_bytes long run" in text(found)


def test_more_than_a_bound_at_any_moment_fails_the_run(tmp_path: Path) -> None:
    soak = soak_of(tmp_path / "run", 1)
    reading = Reading("1", 99.0, 1, 1, 5_000, 1)
    soak.record.add(61.0, 1, True, Sample({"worker-1": reading}, {"data": 1}))
    found = soak.report()
    soak.record.close()
    assert (found["verdict"], found["violations"]) == (FAILED, {"bounds": 1})
    assert "worker-1 had 5000 data_files at once" in text(found)


def test_a_run_that_failed_is_not_gone_on_with(tmp_path: Path) -> None:
    soak = soak_of(tmp_path / "run", 5, violations={"lost": 1})
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
    assert made.kind == "directory"
    url = f"file://{tmp_path}/store"
    assert made.open()["DANUBE_STORAGE__URL"] == url and made.location() == ([url], {})
    assert made.faults() == {}
    made.close()
    with pytest.raises(NoServer, match="in memory"):
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
    soak.state.options["chosen_store"] = "s3"
    with pytest.raises(StateRefused, match="began with the store s3, and here is only directory"):
        Soak(soak.settings, soak.state, lambda line: None, threading.Event())
