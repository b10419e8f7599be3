"""Marks name what is there: folders of tests, and tests that are slow."""

from __future__ import annotations

from tests import marks
from tests.law.source import ROOT, name_of


def test_folders_of_marks_are_there() -> None:
    files = [name_of(path) for path in (ROOT / "tests").rglob("test_*.py")]
    unused = [
        one for each in marks.MARKED.values() for one in each if not any(f.startswith(one) for f in files)
    ]
    assert unused == []


def test_the_slow_tests_are_there_and_would_else_be_quick() -> None:
    wrong = []
    for line in marks.slow_tests():
        file, _, test = line.partition("::")
        path = ROOT / file
        known = path.is_file() and (not test or f"def {test}(" in path.read_text())
        if not known or not file.startswith(marks.MARKED["quick"]):
            wrong.append(line)
    assert wrong == [], "tests/slow.txt names tests of quick folders alone"
