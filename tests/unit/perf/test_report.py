"""The report shows what the history says, the same bytes each time, and nothing of lines that are damaged."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from perf import report as command
from perf.report import (
    BEGIN,
    END,
    NOTHING,
    Line,
    by_machine,
    make,
    number,
    read_history,
    size,
)

MACHINE = {"cpu": "A CPU", "cores": 2, "memory_gib": 23.5, "filesystem": "ext4", "commit": "abc1234"}
LINE: dict[str, Any] = {
    "workload": "publish",
    "size": 100,
    "batch": 4854,
    "durability": "written",
    "workers": 1,
    "unit": "records/s",
    "floor": 26_000_000,
    "danube": 10_500_000,
    "ratio": 0.404,
    "target": "ratio >= 0.6",
    "met": False,
    "rounds": 3,
    "floor_range": [1, 2],
    "danube_range": [10_100_000, 11_000_000],
    "details": {},
    "time": "2026-11-21T12:00:00+00:00",
    "machine": MACHINE,
}
DOCUMENT = f"# By hand\n\nbefore\n\n{BEGIN}\nold\n{END}\n\nbehind\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with a document and no measurements."""
    (tmp_path / "perf" / "history").mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "performance.md").write_text(DOCUMENT)
    return tmp_path


def add(root: Path, *lines: dict[str, Any] | str, file: str = "2026-11.jsonl") -> None:
    with (root / "perf" / "history" / file).open("a") as history:
        for line in lines:
            history.write((line if isinstance(line, str) else json.dumps(line)) + "\n")


def lines_of(root: Path) -> list[Line]:
    return read_history(root / "perf" / "history", root)


def at(day: int, **fields: Any) -> dict[str, Any]:
    return {**LINE, "time": f"2026-11-{day:02}T12:00:00+00:00", **fields}


def report(root: Path, *words: str) -> int:
    return command.main(["--root", str(root), *words])


def document(root: Path) -> str:
    return (root / "docs" / "performance.md").read_text()


# -- what is shown ----------------------------------------------------------------------------------


def test_the_latest_run_is_in_the_table(root: Path) -> None:
    add(root, at(3, ratio=0.8, met=True, danube=20e6), at(1), at(2, ratio=0.5))
    assert report(root) == 0
    rows = [line for line in document(root).splitlines() if line.startswith("| publish")]
    assert rows == [
        "| publish, `send_many` | 100 B | written | 1 | 26 M records/s | 20 M records/s | 10.1 M to 11 M |"
        " 0.80 | ratio >= 0.6 | met | 2026-11-03 abc1234 |"
    ]


def test_the_history_is_trimmed_to_the_newest_lines_of_each_variant(root: Path) -> None:
    add(root, at(1), at(2), {"kind": "peers"}, at(1, workers=2), file="2026-10.jsonl")
    add(root, at(3), at(4), at(3, machine={**MACHINE, "cpu": "B CPU"}))
    assert report(root, "--keep", "3") == 0
    found = [(line.time.day, line.workers, line.machine.cpu) for line in lines_of(root)]
    assert found == [(1, 2, "A CPU"), (2, 1, "A CPU"), (3, 1, "A CPU"), (3, 1, "B CPU"), (4, 1, "A CPU")]
    assert '"kind": "peers"' in (root / "perf" / "history" / "2026-10.jsonl").read_text()
    assert report(root, "--check") == 0


def test_what_is_written_by_hand_stays(root: Path) -> None:
    add(root, at(1))
    report(root)
    text = document(root)
    assert text.startswith("# By hand\n\nbefore\n\n") and text.endswith(f"{END}\n\nbehind\n")
    assert "\nold\n" not in text
    assert "of 1 targets 0 are met." in text and "**missed**" in text


def test_machines_do_not_meet_and_the_last_one_comes_first(root: Path) -> None:
    other = {**MACHINE, "cpu": "B CPU", "memory_gib": 7.6}
    upgraded = {**MACHINE, "memory_gib": 23.4, "kernel": "7.0", "python": "3.12"}
    add(root, at(2, machine=other), at(1), at(3, machine=upgraded))
    machines = by_machine(lines_of(root))
    assert [[line.time.day for line in newest] for newest in machines] == [[3], [2]]
    assert report(root) == 0
    text = document(root)
    assert text.index("A CPU, 2 cores, 23 GiB, ext4") < text.index("B CPU, 2 cores, 8 GiB, ext4")


def test_variants_are_apart_and_in_order(root: Path) -> None:
    memory = {"workload": "e2e-memory", "durability": "memory"}
    add(
        root,
        at(1, **memory, details={"consumers": 4}),
        at(1, **memory, details={"consumers": 1}),
        at(1, workers=2),
        at(1, durability="fsync"),
        at(1, size=65_536),
        at(1),
    )
    (variants,) = by_machine(lines_of(root))
    assert [(one.workload, one.size, one.workers) for one in variants] == [
        ("publish", 100, 1),
        ("publish", 100, 2),
        ("publish", 65_536, 1),
        ("publish", 100, 1),
        ("e2e-memory", 100, 1),
        ("e2e-memory", 100, 1),
    ]
    assert [one.title.rpartition(", ")[2] for one in variants[-2:]] == ["1 consumer", "4 consumers"]
    assert variants[3].durability == "fsync"


def test_an_unknown_workload_is_shown_under_its_own_name(root: Path) -> None:
    add(root, at(1, workload="new|one", target="", met=True))
    assert report(root) == 0
    assert "| new\\|one | 100 B | written | 1 |" in document(root)
    assert "| none |  |" in document(root)


def test_a_line_with_a_kind_is_left_to_who_wrote_it(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add(root, at(1), {"kind": "peers", "what": "ever"})
    assert report(root) == 0
    assert capsys.readouterr().out == "1 lines\n"


def test_without_history_the_report_says_so(root: Path) -> None:
    add(root, "", "   ")
    assert report(root) == 0
    assert NOTHING in document(root)
    assert report(root, "--check") == 0


# -- the same bytes ---------------------------------------------------------------------------------


def test_the_same_history_gives_the_same_bytes(root: Path, source: random.Random) -> None:
    lines = [at(day, workers=workers, ratio=day / 10) for day in range(1, 9) for workers in (1, 2)]
    add(root, *lines)
    first = make(lines_of(root), DOCUMENT)
    source.shuffle(lines)
    (root / "perf" / "history" / "2026-11.jsonl").unlink()
    add(root, *lines[:7], file="2026-12.jsonl")
    add(root, *lines[7:], file="2026-10.jsonl")
    assert make(lines_of(root), DOCUMENT) == first
    assert make(lines_of(root), first) == first, "a report over a report changes nothing"


def test_a_check_says_what_is_not_up_to_date(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add(root, at(1))
    assert report(root, "--check") == 1
    assert capsys.readouterr().err.startswith("docs/performance.md is not up to date")
    assert document(root) == DOCUMENT, "a check changes nothing"
    assert report(root) == 0 == report(root, "--check")
    add(root, at(2))
    assert report(root, "--check") == 1


# -- damage -----------------------------------------------------------------------------------------

WRONG: list[tuple[dict[str, Any] | str, str]] = [
    ('{"workload": "publish", "si', "truncated"),
    ("[1, 2]", "Expected `object`, got `array`"),
    ({**LINE, "ratio": 0}, "Expected `float` > 0.0 - at `$.ratio`"),
    ({**LINE, "ratio": -1}, "at `$.ratio`"),
    ({**LINE, "ratio": "0.4"}, r"Expected `float`, got `str` - at `$.ratio`"),
    ({name: value for name, value in LINE.items() if name != "met"}, "missing required field `met`"),
    ({**LINE, "time": "2026-11-21T12:00:00"}, "timezone component - at `$.time`"),
    ({**LINE, "time": "yesterday"}, "at `$.time`"),
    ({**LINE, "machine": {"cpu": "A"}}, "at `$.machine`"),
    ({**LINE, "danube_range": [1]}, "at `$.danube_range`"),
]


@pytest.mark.parametrize(("line", "sentence"), WRONG, ids=[sentence for _, sentence in WRONG])
def test_a_damaged_line_is_named_and_nothing_is_written(
    root: Path, capsys: pytest.CaptureFixture[str], line: dict[str, Any] | str, sentence: str
) -> None:
    add(root, at(1), "", line, at(2))
    for words in ([], ["--check"]):
        assert report(root, *words) == 2
        error, advice = capsys.readouterr().err.splitlines()
        assert error.startswith("perf/history/2026-11.jsonl:3: ") and sentence in error
        assert "nothing was written" in advice
    assert document(root) == DOCUMENT


@pytest.mark.parametrize("text", ["no markers", END + BEGIN, BEGIN, BEGIN + BEGIN + END])
def test_a_document_without_its_markers_is_refused(
    root: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    with pytest.raises(ValueError, match="not exactly one"):
        make([], text)
    (root / "docs" / "performance.md").write_text(text)
    assert report(root) == 2
    assert capsys.readouterr().err.startswith("the document has not exactly one line")


def test_a_missing_document_is_told(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "docs" / "performance.md").unlink()
    assert report(root) == 2
    assert "No such file" in capsys.readouterr().err


# -- words, numbers, shapes -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [(10_582_133, "10.6 M"), (2_000_000, "2 M"), (29_482, "29,482"), (131.75, "132"), (0.856, "0.856")],
)
def test_numbers_have_three_digits_or_all_before_the_point(value: float, text: str) -> None:
    assert number(value) == text


def test_sizes_are_written_as_people_write_them() -> None:
    assert [size(octets) for octets in (100, 1_024, 1_500, 65_536)] == ["100 B", "1 KiB", "1500 B", "64 KiB"]


def test_a_variant_without_its_detail_is_plain(root: Path) -> None:
    add(root, at(1, workload="topics", details={"topics": "many"}))
    assert lines_of(root)[0].title == "batches of 10 to many topics (floor: to one)"
