"""When compaction is worth it, of which segments, and what becomes one."""

from __future__ import annotations

import pytest

from danube.core.partition.compaction_plan import (
    CompactionRound,
    CompactionSettings,
    Piece,
    group_end,
    next_round,
)

NOW_US = 1_700_000_000_000_000
SETTINGS = CompactionSettings(dirty_bytes_min=10, lag_us=60_000_000, keys_max=100, dirty_bytes_max=40)
OLD_US = NOW_US - 120_000_000
AGED_US = NOW_US - SETTINGS.dirty_age_us - 1


def log_of(words: str, size: int = 10) -> list[Piece]:
    """c: compacted, d: dirty, a: dirty for a day, y: young, b: broken by damage, |: a hole."""
    pieces: list[Piece] = []
    offset = 0
    for word in words:
        if word == "|":
            offset += 5
            continue
        when = {"y": NOW_US, "a": AGED_US}.get(word, OLD_US)
        pieces.append(Piece(offset, offset + 10, size, 10, when, word == "c", word != "b"))
        offset += 10
    return pieces


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", None),
        ("d", None),
        ("dd", (0, 0, 1, True)),
        ("ddd", (0, 0, 2, True)),
        ("cdd", (0, 1, 2, True)),
        ("ccd", None),
        ("cccdd", None),
        ("cccad", (0, 3, 4, True)),
        ("dyd", (0, 0, 1, True)),
        ("ydd", None),
        ("bdd", (1, 1, 2, False)),
        ("db", (0, 0, 1, True)),
        ("dbd", None),
        ("d|dd", (1, 1, 2, False)),
        ("dddddddd", (0, 0, 4, True)),
        ("cccccc" + "d" * 7, (0, 6, 10, False)),
    ],
)
def test_rounds(words: str, expected: tuple[int, int, int, bool] | None) -> None:
    found = next_round(log_of(words), NOW_US, SETTINGS)
    assert found == (None if expected is None else CompactionRound(*expected))


def test_few_bytes_are_not_worth_it() -> None:
    assert next_round(log_of("dd", size=9), NOW_US, SETTINGS) is None
    assert next_round(log_of("ad", size=9), NOW_US, SETTINGS) is not None


def test_groups() -> None:
    settings = CompactionSettings(target_bytes=30)
    assert group_end([10, 10, 10, 10], [True] * 4, 0, settings) == 3
    assert group_end([10, 10, 10, 10], [True] * 4, 3, settings) == 4
    assert group_end([50, 10], [True] * 2, 0, settings) == 1
    assert group_end([10, 10, 10, 10], [False, False, False, True], 0, settings) == 4
    assert group_end([10, 10, 10, 10], [True, True, False, False], 0, settings) == 2
    assert group_end([10, 10], [True, False], 1, settings) is None
