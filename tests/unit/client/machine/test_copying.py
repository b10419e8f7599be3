"""How a client copies to memory that the broker reads: past the caches, and when."""

from __future__ import annotations

import random

import numpy as np
import pytest

from danube.client.machine.shared_memory import SLOW_IN_A_ROW, STREAMED, TIMES, TRIED, CopyChoice
from danube.core import kernels

SIZE = 1 << 19
SLOW_NS = 200_000  # of SIZE bytes
FAST_NS = 50_000


def copies(choice: CopyChoice, count: int, usual_ns: int, streamed_ns: int = FAST_NS) -> str:
    """How each of so many copies was done."""
    done = ""
    for _ in range(count):
        streamed = choice.streams()
        choice.took(streamed, SIZE, streamed_ns if streamed else usual_ns)
        done += "s" if streamed else "u"
    return done


@pytest.fixture
def choice(with_kernels: None) -> CopyChoice:
    return CopyChoice()


def test_a_usual_copy_that_is_as_fast_stays(choice: CopyChoice) -> None:
    assert copies(choice, TRIED + 200, FAST_NS) == "s" * TRIED + "u" * 200


def test_where_usual_ones_are_slow_one_is_tried_now_and_then(choice: CopyChoice) -> None:
    copies(choice, TRIED, SLOW_NS)
    round_of_both = "u" * SLOW_IN_A_ROW + "s" * STREAMED
    assert copies(choice, 3 * len(round_of_both), SLOW_NS) == 3 * round_of_both
    assert copies(choice, 100, FAST_NS) == "u" * 100, "until they are as fast again"


def test_what_one_past_the_caches_costs_is_found_anew_each_time(choice: CopyChoice) -> None:
    copies(choice, TRIED, SLOW_NS)
    copies(choice, SLOW_IN_A_ROW + STREAMED, SLOW_NS, streamed_ns=3 * FAST_NS)
    assert copies(choice, 100, SLOW_NS) == "u" * 100, "200 us are not much more than 150"


def test_one_that_was_held_up_does_not_hide_what_others_cost(choice: CopyChoice) -> None:
    choice.took(True, SIZE, 100 * FAST_NS)
    copies(choice, TRIED - 1, SLOW_NS)
    assert copies(choice, SLOW_IN_A_ROW + 1, SLOW_NS) == "u" * SLOW_IN_A_ROW + "s"


def test_a_usual_one_that_was_held_up_changes_nothing(choice: CopyChoice) -> None:
    copies(choice, TRIED, FAST_NS)
    for _ in range(50):
        choice.took(False, SIZE, int(10 * TIMES * FAST_NS))
        assert copies(choice, 3, FAST_NS) == "uuu"


def test_without_kernels_there_is_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "available", False)
    assert copies(CopyChoice(), 100, SLOW_NS) == "u" * 100


@pytest.mark.parametrize("size", [0, 1, 7, 63, 64, 65, 127, 128, 191, 4_096, 100_001])
def test_what_is_streamed_arrives_whole_and_nothing_beside_it(with_kernels: None, size: int) -> None:
    target = np.zeros(size + 512, np.uint8)
    data = random.Random(size).randbytes(size + 64)
    for position in range(130):
        for start in (0, 1, 9):
            source = np.frombuffer(data, np.uint8)[start : start + size]
            kernels.streaming_kernels().stream(target, position, source)
            assert bytes(target[position : position + size]) == bytes(source)
            target[position : position + size] = 0
            assert not target.any()
