"""The comparison with other brokers: what may stand beside what, the figures, the table, and the turns."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from perf.compare import __main__ as command
from perf.compare import report as table
from perf.compare import run as running_module
from perf.compare.model import (
    GROUPS,
    MEANINGS,
    Client,
    Failed,
    Level,
    Row,
    Running,
    Setting,
    Spent,
    Spread,
    Turn,
    Unfair,
    Work,
    group_of,
    refuse_unfair,
    summary,
)
from perf.compare.products import products
from perf.compare.report import BEGIN, DOCUMENT, END, HISTORY, Run, last_runs, run_of, written
from perf.compare.run import Comparison, Skip
from perf.report import read_history
from perf.turns import GIB


def row(**more: Any) -> Row:
    """A row of the table with what a test is not about filled in."""
    known: dict[str, Any] = {
        "workload": "publish",
        "size": 100,
        "group": "written",
        "product": "peer",
        "setting": "peer default",
        "level": Level.WRITTEN,
        "promise": "written before the ack",
        "client": "peer-py",
        "kind": "python",
        "ours": False,
        "version": "1.2",
        "rounds": 5,
        "rate": Spread(1_000.0, 900.0, 1_100.0),
    }
    return Row(**{**known, **more})


def own(level: Level = Level.WRITTEN, **more: Any) -> Row:
    return row(product="danube", setting="danube own", ours=True, level=level, **more)


# --- levels ---


def test_levels_are_ordered_by_what_they_survive() -> None:
    assert list(Level) == sorted(Level)
    assert Level.TAKEN < Level.IN_MEMORY < Level.WRITTEN_LATER < Level.WRITTEN < Level.FSYNC
    assert set(MEANINGS) == set(Level)


@pytest.mark.parametrize(
    ("level", "group"),
    [
        (Level.TAKEN, "memory"),
        (Level.IN_MEMORY, "written"),
        (Level.WRITTEN_LATER, "written"),
        (Level.WRITTEN, "written"),
        (Level.FSYNC, "fsync"),
    ],
)
def test_a_peer_joins_the_first_group_that_is_not_weaker(level: Level, group: str) -> None:
    assert group_of(level) == group


@pytest.mark.parametrize("theirs", list(Level))
@pytest.mark.parametrize("ours", list(Level))
def test_ours_weaker_beside_theirs_stronger_is_refused_in_every_group(ours: Level, theirs: Level) -> None:
    for group, floor in GROUPS.items():
        allowed = ours >= floor >= theirs
        if allowed:
            refuse_unfair(group, [own(ours), row(level=theirs)])
        else:
            with pytest.raises(Unfair):
                refuse_unfair(group, [own(ours), row(level=theirs)])


def test_a_refusal_names_who_it_is_and_both_levels() -> None:
    with pytest.raises(Unfair, match=r"peer default \(peer-py\) .* 'fsync' .* 'written' there"):
        refuse_unfair("written", [own(), row(level=Level.FSYNC)])
    with pytest.raises(Unfair, match=r"danube own \(peer-py\) .* 'written' .* 'fsync' there"):
        refuse_unfair("fsync", [own(), row()])


def test_peers_alone_may_stand_where_they_belong() -> None:
    refuse_unfair("written", [row(level=Level.IN_MEMORY), row()])
    with pytest.raises(Unfair, match="no peer above"):
        refuse_unfair("written", [row(level=Level.FSYNC)])


def test_every_setting_of_every_product_has_a_fair_place() -> None:
    known = products()
    assert [product.name for product in known if product.ours] == ["danube"]
    assert {setting.level for setting in known[0].settings} == set(GROUPS.values())
    for product in known:
        for setting in product.settings:
            group = group_of(setting.level)
            ours = own(GROUPS[group])
            refuse_unfair(group, [ours, row(level=setting.level, ours=product.ours)])
            assert setting.promise
            assert "," not in setting.name  # --only takes a list
    names = [setting.name for product in known for setting in product.settings]
    assert len(names) == len(set(names))


# --- figures ---


def test_medians_ranges_and_cpu_time_for_a_million() -> None:
    turns = [
        Turn(rate=rate, seconds=1, records=500_000, spent=Spent(server=cpu, client=cpu / 2))
        for rate, cpu in ((10.0, 1.0), (30.0, 3.0), (20.0, 2.0), (50.0, 9.0), (40.0, 4.0))
    ]
    found = summary(turns)
    assert found["rounds"] == 5
    assert found["rate"] == Spread(30.0, 10.0, 50.0)
    assert found["server_per_million"] == Spread(6.0, 2.0, 18.0)
    assert found["client_per_million"] == Spread(3.0, 1.0, 9.0)
    assert found["p50_us"] is None


def test_cpu_time_that_cannot_be_told_apart_is_not_known() -> None:
    found = summary([Turn(rate=1.0, seconds=1, records=1)])
    assert found["server_per_million"] is None
    assert "not known" in "".join(table.table([row(**found)]))


def test_what_was_lost_is_added_up() -> None:
    found = summary([Turn(rate=1.0, seconds=1, records=1, lost=lost) for lost in (0, 3, 4)])
    assert found["lost"] == 7


def test_a_line_of_history_gives_the_row_back() -> None:
    written = row(
        p50_us=Spread(10.0, 9.0, 12.0),
        p99_us=Spread(20.0, 19.0, 30.0),
        server_per_million=Spread(1.0, 0.5, 2.0),
    )
    line = json.loads(json.dumps(written.line()))
    assert (line["workload"], line["kind"], line["level"]) == ("publish", "python", "written")
    assert line["rate"] == [1_000, 900, 1_100]
    assert Row.from_line(line) == written


def test_a_line_of_something_else_is_refused() -> None:
    for line in (
        {"workload": "publish", "floor": 1},
        {"kind": "comparison", "rows": [{"size": 1}], "skips": []},
    ):
        with pytest.raises(ValueError, match="no line of a comparison"):
            run_of(line)


def test_a_run_is_one_line_of_history() -> None:
    run = Run({"time": "1", "machine": {"cpu": "A"}}, [row()], [Skip("kafka", "it is not here")])
    line = json.loads(json.dumps(run.line()))
    assert (line["kind"], line["time"]) == ("comparison", "1") and run_of(line) == run


# --- table ---


def rows() -> list[Row]:
    return [
        own(rate=Spread(2_000_000.0, 1_900_000.0, 2_100_000.0), server_per_million=Spread(0.25, 0.2, 0.3)),
        row(setting="peer slow", rate=Spread(50_000.0, 40_000.0, 60_000.0), lost=12),
        row(setting="peer", level=Level.WRITTEN_LATER, rate=Spread(500_000.0, 1.0, 600_000.0)),
        own(
            Level.FSYNC,
            group="fsync",
            workload="latency",
            p50_us=Spread(90, 80, 99),
            p99_us=Spread(300, 1, 400),
        ),
    ]


def test_the_table_has_a_level_beside_every_figure_and_the_best_first() -> None:
    lines = table.table(rows())
    assert len(lines) == 2 + 4
    assert {line.count("|") for line in lines} == {len(table.HEAD) + 1}
    figures = lines[2:]
    assert "**danube own**" in figures[0] and "**" not in figures[1]
    assert [re.search(r"danube own|peer slow|peer ", line)[0].strip() for line in figures] == [  # type: ignore[index]
        *("danube own", "peer", "peer slow", "danube own")
    ]
    for line, level in zip(figures, ("written", "written later", "written", "fsync"), strict=True):
        assert f"| {level} |" in line.replace("**", "")
    assert "2,000,000/s" in figures[0] and "1,900,000-2,100,000" in figures[0] and "0.25" in figures[0]
    assert figures[2].endswith("| 12 |")
    assert "p50 90 us, p99 300 us" in figures[3]


def test_no_table_prints_an_unfair_comparison() -> None:
    with pytest.raises(Unfair):
        table.table([own(), row(level=Level.FSYNC)])


def test_the_legend_says_what_each_level_and_setting_means() -> None:
    lines = table.legend(rows())
    assert any(line.startswith("written later: ") for line in lines)
    assert "peer slow (1.2): written before the ack" in lines
    assert not any(line.startswith("taken") for line in lines)


# --- turns ---


class FakeServer:
    def __init__(self) -> None:
        self.running = True

    def stop(self) -> None:
        self.running = False


class FakeClient:
    """Notes its turns; ``rates`` are what it measures, one after the other and the last for ever."""

    kind = "python"
    lone = False

    def __init__(self, name: str, log: list[str], rates: Sequence[float] = (1_000.0,)) -> None:
        self.name = name
        self.log = log
        self.rates = list(rates)
        self.works: list[Work] = []
        self.fails = False
        self.reason = ""

    def missing(self, setting: Setting, workload: str) -> str:
        return self.reason

    def turn(self, running: Running, work: Work) -> Turn:
        self.works.append(work)
        self.log.append(self.name)
        if self.fails and len(self.works) > 1:
            raise Failed("it broke")
        rate = self.rates.pop(0) if len(self.rates) > 1 else self.rates[0]
        return Turn(rate=rate, seconds=work.count / rate, records=work.count)


class FakeProduct:
    stored_max = 1_000

    def __init__(
        self, name: str, client: FakeClient, level: Level = Level.WRITTEN, ours: bool = False
    ) -> None:
        self.name = name
        self.ours = ours
        self.settings: tuple[Setting, ...] = (Setting(f"{name} default", level, "?"),)
        self.client = client
        self.reason = ""
        self.servers: list[FakeServer] = []

    def clients(self, setting: Setting) -> tuple[Client, ...]:
        return (self.client,)

    def missing(self, setting: Setting) -> str:
        return self.reason

    def version(self) -> str:
        return "0"

    def start(self, setting: Setting, directory: Path) -> Running:
        if not directory.is_dir():
            raise Failed("no directory")
        self.servers.append(FakeServer())
        server = self.servers[-1]
        return Running(
            setting=setting, directory=directory, pids=list, stop=server.stop, address={}
        )  # fmt: skip


@pytest.fixture(autouse=True)
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perf.compare.run.os.sync", lambda: None)


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def three(log: list[str]) -> list[FakeProduct]:
    return [FakeProduct(name, FakeClient(name, log), ours=name == "a") for name in ("a", "b", "c")]


def compared(tmp_path: Path, known: Sequence[FakeProduct], **more: Any) -> tuple[list[Row], Comparison]:
    options: dict[str, Any] = {"workloads": ["publish"], "sizes": [100], "scale": 0.001, "rounds": 2}
    comparison = Comparison(directory=tmp_path, products=known, **{**options, **more})
    return list(comparison.rows()), comparison


def test_turns_are_interleaved_and_the_first_of_each_does_not_count(
    tmp_path: Path, three: list[FakeProduct], log: list[str]
) -> None:
    found, _ = compared(tmp_path, three)
    assert log[-6:] == ["a", "b", "c", "a", "b", "c"]
    assert log.index("b") > log.index("a")
    assert [one.rounds for one in found] == [2, 2, 2]
    assert not any(server.running for product in three for server in product.servers)
    assert not list(tmp_path.iterdir())


def test_figures_are_of_the_turns_that_count(tmp_path: Path, log: list[str]) -> None:
    client = FakeClient("a", log, [7.0, 100.0, 300.0, 200.0])
    (found,), _ = compared(tmp_path, [FakeProduct("a", client)], rounds=3, workloads=["latency"])
    assert found.rate == Spread(200.0, 100.0, 300.0)


def test_work_grows_until_a_turn_lasts(tmp_path: Path, log: list[str]) -> None:
    client = FakeClient("a", log, [1e6])
    compared(tmp_path, [FakeProduct("a", client)], scale=1.0, rounds=1)
    assert client.works[0].count == 2_000
    assert client.works[-1].count == 4_000_000  # four seconds of a million a second


class FakeTool(FakeClient):
    """Starts for two seconds, which it counts, and then does a million a second."""

    kind = "tool"

    def turn(self, running: Running, work: Work) -> Turn:
        self.works.append(work)
        seconds = 2 + work.count / 1e6
        return Turn(rate=work.count / seconds, seconds=seconds, records=work.count)


def test_the_start_of_a_tool_is_not_taken_for_its_work(tmp_path: Path, log: list[str]) -> None:
    tool = FakeTool("a", log)
    compared(tmp_path, [FakeProduct("a", tool)], scale=1.0, rounds=1)
    assert tool.works[0].count == 2_000
    assert tool.works[-1].count == 4_000_000


class FakeReplay(FakeClient):
    """Reads what is stored, however much is asked for; takes a little longer each time."""

    kind = "tool"

    def turn(self, running: Running, work: Work) -> Turn:
        self.works.append(work)
        records = min(work.count, work.stored)
        seconds = 0.5 * 2 ** len(self.works)
        return Turn(rate=records / seconds, seconds=seconds, records=records)


def test_a_replay_of_all_that_is_stored_is_not_made_smaller(tmp_path: Path, log: list[str]) -> None:
    client = FakeReplay("a", log)
    compared(tmp_path, [FakeProduct("a", client)], scale=1.0, rounds=2, workloads=["replay"])
    assert [min(work.count, work.stored) for work in client.works[-2:]] == [1_000, 1_000]


def test_work_is_bounded_by_bytes(tmp_path: Path, log: list[str]) -> None:
    client = FakeClient("a", log, [1e9])
    compared(tmp_path, [FakeProduct("a", client)], scale=0.01, rounds=1, sizes=[65_536])
    assert max(work.count for work in client.works) * 65_536 <= GIB * 0.01


def test_one_at_a_time_is_paced_and_not_measured_by_volume(tmp_path: Path, log: list[str]) -> None:
    client = FakeClient("a", log)
    compared(tmp_path, [FakeProduct("a", client)], workloads=["latency"], scale=0.5)
    assert [work.count for work in client.works] == [2_000] * 3
    assert {work.rate for work in client.works} == {1_000}


def test_topics_for_replays_keep_their_name_and_others_do_not(tmp_path: Path, log: list[str]) -> None:
    client = FakeClient("a", log)
    compared(tmp_path, [FakeProduct("a", client)], workloads=["publish", "replay"])
    topics = {
        name: {work.topic for work in client.works if work.workload == name} for name in ("publish", "replay")
    }
    assert topics["replay"] == {"replay-100"}
    assert len(topics["publish"]) == sum(work.workload == "publish" for work in client.works)


def test_who_fails_leaves_the_comparison_and_the_others_go_on(
    tmp_path: Path, three: list[FakeProduct]
) -> None:
    three[1].client.fails = True
    found, comparison = compared(tmp_path, three)
    assert [one.product for one in found] == ["a", "c"]
    (skip,) = comparison.skips
    assert str(skip) == "FAILED: b default (b), publish 100: it broke"


def test_what_is_missing_is_said_once_with_the_reason(tmp_path: Path, three: list[FakeProduct]) -> None:
    three[1].reason = "b is not installed"
    three[2].client.reason = "c-py is not installed"
    found, comparison = compared(tmp_path, three, sizes=[100, 200])
    assert {one.product for one in found} == {"a"}
    assert [str(skip) for skip in comparison.skips] == [
        *("skipped: b default: b is not installed", "skipped: c, publish: c-py is not installed")
    ]


def test_a_server_that_does_not_start_is_a_failure_of_its_own(
    tmp_path: Path, three: list[FakeProduct], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(setting: Setting, directory: Path) -> Running:
        raise Failed("port taken")

    monkeypatch.setattr(three[0], "start", refuse)
    found, comparison = compared(tmp_path, three)
    assert [one.product for one in found] == ["b", "c"]
    assert [str(skip) for skip in comparison.skips] == ["FAILED: a default: it did not start: port taken"]


def test_groups_are_measured_apart_with_their_servers_only(tmp_path: Path, log: list[str]) -> None:
    weak = FakeProduct("weak", FakeClient("weak", log), Level.TAKEN)
    strong = FakeProduct("strong", FakeClient("strong", log), Level.FSYNC)
    found, _ = compared(tmp_path, [strong, weak])
    assert [one.group for one in found] == ["memory", "fsync"]
    assert log.index("strong") > max(place for place, name in enumerate(log) if name == "weak")


def test_nothing_unfair_is_even_measured(
    tmp_path: Path, three: list[FakeProduct], log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    three[0].settings = (Setting("a weak", Level.TAKEN, "?"),)
    monkeypatch.setattr(running_module, "group_of", lambda level: "written")
    with pytest.raises(Unfair):
        compared(tmp_path, three)
    assert not log
    assert not any(server.running for product in three for server in product.servers)


def test_the_rust_client_measures_one_after_another_and_nothing_else(
    tmp_path: Path, three: list[FakeProduct]
) -> None:
    three[0].client.lone = True
    for workload, measured in (("lone", ["a"]), ("publish", ["b", "c"])):
        found, comparison = compared(tmp_path, three, workloads=[workload])
        assert [one.product for one in found] == measured and not comparison.skips


def test_only_names_products_or_settings(tmp_path: Path, three: list[FakeProduct]) -> None:
    found, _ = compared(tmp_path, three, only=["a", "c default"])
    assert [one.product for one in found] == ["a", "c"]


# --- the command ---


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--only", "rocketmq"], "does not know rocketmq; there are: danube, danube fsync"),
        (["--workload", "fast"], "does not know fast; there are: e2e, latency, lone, publish, replay"),
        (["--scale", "0"], "--scale above 0"),
        (["--size", "4"], "at least 8"),
        (["--append", "f", "--rounds", "4"], "at least 5 rounds"),
        (["--append", "f", "--scale", "0.1"], "leave --append away"),
    ],
)
def test_bad_words_end_with_what_is_wrong(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(words)
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err


def test_the_list_names_every_product_with_its_levels(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--list"]) == 0
    printed = capsys.readouterr().out
    for product in products():
        assert f"\n{product.name}:\n" in printed
        for setting in product.settings:
            assert f"  {setting.name} [{setting.level.label}; " in printed


def recorded(path: Path, *runs: Run) -> Path:
    with path.open("a") as history:
        history.writelines(json.dumps(run.line()) + "\n" for run in runs)
    return path


@pytest.fixture
def history(tmp_path: Path) -> Path:
    path = tmp_path / "history.jsonl"
    path.write_text(json.dumps({"workload": "publish", "floor": 1, "time": "1"}) + "\n")
    skips = [Skip("kafka", "it is not here")]
    old, new = Run({"time": "1"}, [row(setting="old")]), Run({"time": "2"}, [row(setting="new")], skips)
    return recorded(path, old, new)


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The document that ``--write`` writes out of the history in ``tmp_path``."""
    path = tmp_path / "comparison.md"
    path.write_text(f"{BEGIN}\n{END}\n")
    monkeypatch.setattr(command, "HISTORY", tmp_path)
    monkeypatch.setattr(command, "DOCUMENT", path)
    return path


@pytest.mark.usefixtures("history")
def test_what_was_recorded_last_is_written_into_the_document(page: Path) -> None:
    assert command.main(["--write"]) == 0
    shown = page.read_text()
    assert "| new |" in shown and "| old |" not in shown
    assert "- skipped: kafka: it is not here" in shown


def test_the_reader_of_other_lines_leaves_these_alone(history: Path) -> None:
    lines = history.read_text().splitlines()
    history.write_text("\n".join(lines[1:]) + "\n")
    assert read_history(history.parent, history.parent) == []


def test_a_run_is_written_between_the_marks_and_nowhere_else(history: Path) -> None:
    before = f"# Words\n\n{BEGIN}\nold\n{END}\n\nmore\n"
    once = written(before, last_runs([history]))
    assert once.startswith(f"# Words\n\n{BEGIN}\n\nMeasured: time 2") and once.endswith(
        f"\n\n{END}\n\nmore\n"
    )
    assert "| new |" in once and "old" not in once
    assert written(once, last_runs([history])) == once
    with pytest.raises(ValueError, match="not exactly one"):
        written("# Words\n", [])


def test_the_document_shows_what_was_recorded_last() -> None:
    files = sorted(HISTORY.glob("*.jsonl"))
    runs = last_runs(files) if any('"kind": "comparison"' in path.read_text() for path in files) else []
    assert DOCUMENT.read_text() == written(DOCUMENT.read_text(), runs), "run python -m perf.compare --write"


def test_sizes_that_were_not_measured_again_keep_their_run(history: Path) -> None:
    rows = [row(setting=f"of {size}", size=size) for size in (1_024, 65_536)]
    recorded(history, Run({"time": "3"}, rows))
    runs = last_runs([history])
    shown = [[(one.setting, one.size) for one in run.rows] for run in runs]
    assert shown == [[("of 1024", 1_024), ("of 65536", 65_536)], [("new", 100)]]
    text = written(f"{BEGIN}\n{END}\n", runs)
    assert text.count("Measured: time") == 2 and text.index("time 3") < text.index("time 2")


@pytest.mark.parametrize("text", ['{"workload": "publish", "time": "1"}\n', "no json\n"])
def test_a_history_without_a_comparison_is_an_error(
    text: str, page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page.with_name("history.jsonl").write_text(text)
    assert command.main(["--write"]) == 1
    assert capsys.readouterr().err.startswith("perf.compare: ")


def test_recorded_lines_that_do_not_belong_together_are_not_written(
    page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded(page.with_name("history.jsonl"), Run({"time": "1"}, [own(), row(level=Level.FSYNC)]))
    assert command.main(["--write"]) == 1
    assert "does not stand in the group 'written'" in capsys.readouterr().err
    assert page.read_text() == f"{BEGIN}\n{END}\n"
