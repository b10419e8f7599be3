"""The HTTP/2 machine is a function of its bytes: wherever they are cut, it tells and sends the same."""

from __future__ import annotations

import random
from typing import Any

import pytest

from danube.core.http2 import frames
from tests.model.http2_traffic import Run, Traffic, fuzz_once, main, mutated

Events = list[tuple[Any, ...]]
pytestmark = pytest.mark.usefixtures("kernels_or_twins")


def fed(data: bytes, cuts: list[int]) -> tuple[Events, Events, Events, bytes, str, bytes]:
    """Feed ``data`` cut at these places; return what Http2Handler promises of the order, and the rest.

    First the events of each stream in their order, then the requests and then the ends of bodies in theirs.
    """
    run = Run()
    for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        run.feed(data[start:end])
    of_stream = sorted(run.events, key=lambda event: event[1])
    requests = [event for event in run.events if event[0] == "request"]
    ends = [event for event in run.events if event[0] == "data" and event[3]]
    return of_stream, requests, ends, bytes(run.sent), run.machine.failed, run.rest


def test_at_every_cut_the_same_is_told_and_sent(source: random.Random) -> None:
    traffic = (b"".join(piece for piece in Traffic(source).whole(25) if len(piece) < 400) for _ in range(50))
    data = next(one for one in traffic if len(fed(one, [])[0]) > 3)
    whole = fed(data, [])
    for cut in range(len(data) + 1):
        assert fed(data, [cut]) == whole, cut
    assert fed(data, list(range(1, len(data)))) == whole


@pytest.mark.parametrize("number", range(150))
def test_any_cuts_of_any_traffic_are_the_same(number: int, source: random.Random) -> None:
    pieces = Traffic(source).whole(40)
    data = b"".join(pieces) if number % 3 == 0 else mutated(pieces, source)
    whole = fed(data, [])
    for _ in range(4):
        cuts = sorted(source.randrange(len(data) + 1) for _ in range(source.choice([1, 5, 50])))
        assert fed(data, cuts) == whole


def test_fair_traffic_does_not_fail(source: random.Random) -> None:
    calls = 0
    for _ in range(40):
        run = Run()
        for piece in Traffic(source).whole(30):
            run.feed(piece)
        # Traffic is fair but careless: what it sends to a stream that was answered early is its own fault.
        assert run.machine.failed == "" or "has ended" in run.machine.failed
        run.check(10**6)
        calls += sum(event[0] == "request" for event in run.events)
    assert calls > 100


def test_damaged_traffic_never_raises_and_stays_bounded(seed: int) -> None:
    runs = [fuzz_once(seed + number) for number in range(1500)]
    assert 300 < sum(bool(run.machine.failed) for run in runs) < 1400, "faults and fair traffic are both met"
    assert sum(len(run.events) for run in runs) > 3000


def test_noise_is_no_preface(source: random.Random) -> None:
    for size in range(64):
        run = Run()
        run.feed(b"\x7f" + source.randbytes(size))
        assert run.machine.failed
        run = Run()
        run.feed(frames.PREFACE + b"\xff" + source.randbytes(size))
        run.check(size)


def test_the_fuzz_program_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seconds", "0.2", "--seed", "7"]) == 0
    assert "inputs from seed 7" in capsys.readouterr().out
