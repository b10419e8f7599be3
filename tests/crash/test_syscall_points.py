"""Points are found where strace saw a thread touch the data directory."""

from __future__ import annotations

import random

from tests.crash.syscalls import Point, points_of, sample

TRACE = """\
10 write(1<pipe:[1]>, ""..., 20) = 20
10 write(5</d/data/metadata.log>, ""..., 40) = 40
11 pwritev(7</d/data/t/1.segment>, [{iov_base=""..., iov_len=9}], 1, 0) = 9
11 pwritev(7</d/data/t/1.segment>, [{iov_base=""..., iov_len=9}], 1, 9 <unfinished ...>
12 fdatasync(7</d/data/t/1.segment>) = 0
11 <... pwritev resumed>) = 9
13 unlink("/elsewhere/x") = 0
14 pwritev(7</d/data/t/2.segment>, [{iov_base=""..., iov_len=9}], 1, 0) = 9
14 +++ killed by SIGKILL +++
"""


def test_points_are_counted_per_thread_and_call() -> None:
    assert points_of(TRACE, "/d/data") == [
        Point("fdatasync", 1),
        Point("pwritev", 1),
        Point("pwritev", 2),
        Point("write", 2),
    ]


def test_a_sample_covers_every_kind_of_call_before_it_repeats_one() -> None:
    points = [Point(call, count) for call in ("write", "fsync", "pwritev") for count in range(1, 10)]
    chosen = sample(points, 3, random.Random(1))
    assert {point.call for point in chosen} == {"write", "fsync", "pwritev"}
    assert sorted(map(str, sample(points, 99, random.Random(2)))) == sorted(map(str, points))
