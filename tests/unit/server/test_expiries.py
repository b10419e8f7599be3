"""Ends of credentials: a notice before, the end with the leeway, and nothing for those that came back."""

from __future__ import annotations

from danube.core.security.principals import Identity, Principal
from danube.server.expiries import Expiries

S = 1_000_000
LEEWAY_S = 60


class Held:
    closed = False

    def __init__(self, expires_s: int) -> None:
        self.identity = of(expires_s)

    def expire(self, left_s: int) -> None: ...


def of(expires_s: int) -> Identity:
    return Identity(Principal("user", "ada"), "token", expires_s * S)


def told(expiries: Expiries, now_s: float) -> list[tuple[object, int]]:
    return list(expiries.due(int(now_s * S)))


def test_a_notice_at_four_fifths_and_the_end_behind_the_leeway() -> None:
    expiries, held = Expiries(LEEWAY_S * S), Held(1_000)
    expiries.watch(held, 0)
    assert told(expiries, 799) == []
    assert told(expiries, 800) == [(held, 200)]
    assert told(expiries, 1_059) == []
    assert told(expiries, 1_060) == [(held, 0)] and told(expiries, 9_999) == []


def test_the_notice_comes_half_a_minute_before_the_end_at_least() -> None:
    expiries, held = Expiries(0), Held(100)
    expiries.watch(held, 0)
    assert told(expiries, 69) == [] and told(expiries, 70) == [(held, 30)]


def test_a_short_credential_is_told_at_once() -> None:
    expiries, short, over = Expiries(LEEWAY_S * S), Held(20), Held(5)
    expiries.watch(short, 10 * S)
    expiries.watch(over, 10 * S)
    assert sorted(seconds for _, seconds in told(expiries, 10)) == [1, 10]


def test_one_that_never_ends_is_not_watched() -> None:
    expiries = Expiries(0)
    expiries.watch(Held(0), 0)
    assert told(expiries, 1 << 40) == []


def test_a_newer_credential_takes_the_place_of_the_older() -> None:
    expiries, held = Expiries(0), Held(100)
    expiries.watch(held, 0)
    held.identity = of(1_000)
    expiries.watch(held, 50 * S)
    assert told(expiries, 100) == []
    assert told(expiries, 810) == [(held, 190)]


def test_a_closed_connection_is_told_nothing() -> None:
    expiries, held = Expiries(0), Held(100)
    expiries.watch(held, 0)
    held.closed = True
    assert told(expiries, 200) == []
