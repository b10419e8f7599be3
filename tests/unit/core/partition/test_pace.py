"""Uploads rest while busy workers wait for a processor, not else, and never for longer than they may."""

from __future__ import annotations

import pytest

from danube.core.partition.pace import PAUSE_MAX_NS, SHARE_MIN, WAIT_HIGH, Bounds, Pace, Scheduled

SECOND_NS = 1_000_000_000
STEP_NS = SECOND_NS // 10
PARALLEL = 4
BOUNDS = Bounds(age_s=300.0, size_bytes=16 << 30)


class Host:
    """A worker that runs and waits for given parts of each step, before a pace."""

    def __init__(self, bounds: Bounds = BOUNDS) -> None:
        self.pace = Pace(bounds, PARALLEL)
        self._now_ns = 77 * SECOND_NS
        self._workers: dict[int, Scheduled] = {}
        self.step({1: (0.0, 0.0)})

    def step(self, parts: dict[int, tuple[float, float]]) -> float:
        """One look; ``parts``: what each worker ran and waited of the time since the last one."""
        self._now_ns += STEP_NS
        self._workers = {
            pid: Scheduled(
                self._workers.get(pid, Scheduled(0, 0)).ran_ns + int(ran * STEP_NS),
                self._workers.get(pid, Scheduled(0, 0)).waited_ns + int(waited * STEP_NS),
            )
            for pid, (ran, waited) in parts.items()
        }
        self.pace.observe(self._workers, self._now_ns)
        return self.pace.share


def test_where_nobody_waits_uploads_work_all_the_time() -> None:
    host = Host()
    for _ in range(10):
        assert host.step({1: (0.9, 0.0)}) == 1.0
    assert host.pace.slots == PARALLEL and host.pace.pause_ns(SECOND_NS, PARALLEL) == 0


def test_within_half_a_second_a_worker_that_waits_has_what_it_needs() -> None:
    host = Host()
    shares = [host.step({1: (0.4, 0.6)}) for _ in range(5)]
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] == SHARE_MIN
    assert host.pace.slots == 1


def test_those_under_way_share_what_is_left_and_the_last_one_has_it_all() -> None:
    host = Host()
    while host.pace.share > SHARE_MIN:
        host.step({1: (0.4, 0.6)})
    for running, part in ((4, 0.1), (2, 0.2), (1, 0.4), (0, 0.4)):
        assert host.pace.pause_ns(STEP_NS, running) == pytest.approx(STEP_NS * (1 - part) / part, rel=1e-3)
    one = Pace(BOUNDS, 1)
    assert (one.slots, one.pause_ns(STEP_NS, 1)) == (1, 0)


@pytest.mark.parametrize(("share", "slots"), [(1.0, 4), (0.7, 3), (0.5, 2), (0.3, 1)])
def test_fewer_uploads_begin_where_less_is_left(share: float, slots: int) -> None:
    host = Host()
    while host.pace.share > SHARE_MIN:
        host.step({1: (0.4, 0.6)})
    host.pace.exposed(BOUNDS.age_s * (1 + share) / 2, 0)
    assert host.pace.share == pytest.approx(share)
    assert host.pace.slots == slots


def test_little_waiting_takes_little_and_much_takes_more() -> None:
    little, much = Host().step({1: (0.5, 1.3 * WAIT_HIGH)}), Host().step({1: (0.5, 3 * WAIT_HIGH)})
    assert SHARE_MIN < much < little < 1.0


def test_the_share_finds_what_the_workers_leave() -> None:
    """A host on which the worker waits in proportion to what uploads do."""
    host = Host()
    shares = [host.pace.share]
    for _ in range(200):
        shares.append(host.step({1: (0.5, 0.3 * shares[-1])}))
    settled = shares[50:]
    assert min(settled) >= WAIT_HIGH / 0.3 / 4
    assert max(settled) <= WAIT_HIGH / 0.3 * 1.01


def test_full_speed_comes_back_when_publishing_ends() -> None:
    host = Host()
    for _ in range(10):
        host.step({1: (0.4, 0.6)})
    shares = [host.step({1: (0.01, 0.0)}) for _ in range(6)]
    assert shares == sorted(shares) and shares[-1] == 1.0


def test_an_idle_worker_that_waits_for_its_turn_holds_nobody() -> None:
    host = Host()
    for _ in range(10):
        assert host.step({1: (0.01, 0.3)}) == 1.0


def test_the_worker_that_waits_most_counts() -> None:
    host = Host()
    host.step({1: (0.5, 0.0), 2: (0.5, 0.0)})
    assert host.step({1: (0.5, 0.0), 2: (0.5, 0.5)}) < 1.0


def test_a_worker_that_comes_or_goes_and_no_worker_at_all_hold_nobody() -> None:
    host = Host()
    assert host.step({2: (0.5, 0.9)}) == 1.0  # for all that is known its waiting is of long ago
    for _ in range(3):
        assert host.step({}) == 1.0
    host.pace.observe({3: Scheduled(0, 0)}, 0)  # a clock that stood still
    assert host.pace.share == 1.0


@pytest.mark.parametrize(
    ("age_s", "size_bytes", "least"),
    [
        (0, 0, SHARE_MIN), (150, 8 << 30, SHARE_MIN), (225, 0, 0.5), (0, 12 << 30, 0.5), (300, 0, 1.0),
        (0, 16 << 30, 1.0), (9_000, 1 << 60, 1.0),
    ],
)  # fmt: skip
def test_nothing_is_held_beyond_its_bounds(age_s: float, size_bytes: int, least: float) -> None:
    host = Host()
    for _ in range(10):
        host.step({1: (0.4, 0.6)})
    host.pace.exposed(age_s, size_bytes)
    assert host.pace.share == pytest.approx(least)
    host.pace.exposed(0, 0)
    assert host.pace.share == SHARE_MIN, "what has been uploaded holds no longer"


def test_what_waits_settles_below_the_bound_where_uploads_at_full_speed_keep_up() -> None:
    """Publishing at two fifths of what uploads could do, on a host that is always short of processors."""
    host, waiting, full = Host(), 0.0, float(500 << 20)
    for _ in range(6_000):
        share = host.step({1: (0.5, 0.5)})
        waiting = max(0.0, waiting + (0.4 - share) * full * STEP_NS / SECOND_NS)
        host.pace.exposed(0, int(waiting))
    assert waiting == pytest.approx(0.7 * BOUNDS.size_bytes, rel=0.02)


@pytest.mark.parametrize("bounds", [Bounds(0, 1 << 30), Bounds(60, 0), Bounds(0, 0)])
def test_without_a_bound_uploads_are_never_held(bounds: Bounds) -> None:
    host = Host(bounds)
    for _ in range(5):
        assert host.step({1: (0.4, 0.6)}) == 1.0


def test_a_pause_is_bounded_however_long_the_store_took() -> None:
    host = Host()
    for _ in range(5):
        host.step({1: (0.4, 0.6)})
    assert host.pace.pause_ns(60 * SECOND_NS, PARALLEL) == PAUSE_MAX_NS
