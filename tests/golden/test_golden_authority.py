"""The matrix of rights is the reviewed one."""

from __future__ import annotations

from tests.golden.authority_cases import CALLERS, MATRIX, TARGETS, matrix


def test_everybody_may_do_what_the_reviewed_file_says() -> None:
    judged, reviewed = matrix().splitlines(), MATRIX.read_text(encoding="utf-8").splitlines()
    assert judged == reviewed, "python -m tests.golden.write_authority; then review each line that differs"


def test_the_file_has_a_cell_for_each_caller_and_target() -> None:
    rows = [line for line in MATRIX.read_text(encoding="utf-8").splitlines() if line[0] not in "# "]
    for line in rows:
        cells = line.split()[-len(CALLERS) :]
        assert all(len(cell) == len(TARGETS) and set(cell) <= set("+-?") for cell in cells), line
