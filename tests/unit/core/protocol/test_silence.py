"""Sessions that say nothing: when they are asked, who is left alone, and when one ends."""

from __future__ import annotations

import gc
import itertools
import threading
import time
import weakref
from typing import Any

import pytest

from danube.client.blocking.attendance import Attendance
from danube.client.machine.session import Session
from danube.core.protocol import native as wire
from danube.core.protocol.native import Kind
from danube.core.protocol.silence import Silence, Verdict
from danube.host import clock
from danube.server import native
from tests.unit.native_door import Door, FakeTransport, feed, on_loop

SECOND = 1_000_000_000
TIMEOUT = 30 * SECOND


def looks(*unsent_bytes: int, every_s: int = 1) -> list[Verdict]:
    silence = Silence(0)
    moments = itertools.count(10 * SECOND, every_s * SECOND)
    return [silence.look(next(moments), TIMEOUT, unsent) for unsent in unsent_bytes]


def test_a_silent_session_is_asked_and_ends_at_its_time() -> None:
    silence = Silence(5 * SECOND)
    assert not silence.quiet(14 * SECOND, TIMEOUT) and silence.quiet(15 * SECOND, TIMEOUT)
    verdicts = looks(*[0] * 21)
    assert verdicts == [Verdict.ASK, *[Verdict.NONE] * 19, Verdict.END]


def test_a_session_that_answers_is_asked_again_later() -> None:
    silence = Silence(0)
    assert silence.look(10 * SECOND, TIMEOUT, 0) is Verdict.ASK
    silence.heard_ns = 11 * SECOND
    assert not silence.quiet(20 * SECOND, TIMEOUT)
    assert silence.look(21 * SECOND, TIMEOUT, 0) is Verdict.ASK
    assert silence.look(40 * SECOND, TIMEOUT, 0) is Verdict.NONE
    assert silence.look(41 * SECOND, TIMEOUT, 0) is Verdict.END


def test_a_client_that_takes_what_it_was_sent_is_alive() -> None:
    assert Verdict.END not in looks(*range(100_000, 0, -1000), every_s=1)
    assert Verdict.END in looks(*[100_000] * 40)
    assert Verdict.END in looks(*range(40)), "what comes on top is no sign of life"


# -- the native door -----------------------------------------------------------------------------


class Times:
    """The door's clock, and a sweep each second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns = SECOND
        monkeypatch.setattr(clock, "monotonic_ns", lambda: self.now_ns)

    def pass_seconds(self, door: Door, count: int) -> None:
        for _ in range(count):
            self.now_ns += SECOND
            door.server.sweep(0)


def joined(door: Door, *, answers_ping: bool = True) -> tuple[Any, FakeTransport]:
    connection, transport = door.connect(shake=False)
    feed(connection, wire.control_frame(Kind.HELLO, wire.Hello(answers_ping=answers_ping)))
    (welcome,) = door.sent(transport)
    assert wire.decode_control(welcome.body, wire.Welcome).session_timeout_ms == 30_000
    return connection, transport


def test_the_door_asks_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    times = Times(monkeypatch)

    def test() -> None:
        door = Door()
        _, silent = joined(door)
        answering, alive = joined(door)
        _, older = joined(door, answers_ping=False)
        times.pass_seconds(door, 9)
        assert not silent.written
        for _ in range(6):
            times.pass_seconds(door, 11)
            for frame in door.sent(alive):
                assert frame.kind == Kind.PING
                feed(answering, wire.control_frame(Kind.PONG, None, frame.correlation))
        assert [frame.kind for frame in door.sent(silent)] == [Kind.PING]
        assert silent.aborted and not alive.aborted and not older.aborted and not older.written
        assert door.router.taken == [], "a PONG is for nobody else"

    on_loop(test)


def test_nobody_is_blamed_for_what_holds_the_broker_up(monkeypatch: pytest.MonkeyPatch) -> None:
    times = Times(monkeypatch)

    def test() -> None:
        door = Door()
        connection, transport = joined(door)
        times.pass_seconds(door, 12)
        times.now_ns += 10 * native.HELD_UP_NS
        door.server.sweep(0)
        times.pass_seconds(door, 9)
        assert not transport.aborted
        connection._blocked = True  # a ring is full: nothing is read from it
        times.pass_seconds(door, 60)
        assert not transport.aborted
        connection._blocked = False
        times.pass_seconds(door, 35)
        assert transport.aborted

    on_loop(test)


def test_who_arrives_from_another_worker_is_asked_if_it_answers() -> None:
    def test() -> None:
        server = Door().server
        assert server.arrived(b"", 1).silence is not None
        assert server.arrived(b"", 0).silence is None

    on_loop(test)


# -- the blocking client -------------------------------------------------------------------------


class Attended:
    def __init__(self, timeout_ms: int) -> None:
        self.session = Session()
        self.session.welcome = wire.Welcome(session_timeout_ms=timeout_ms)
        self.attended = threading.Event()

    def attend(self) -> None:
        self.attended.set()


def test_a_thread_looks_while_nobody_waits_until_the_client_is_closed() -> None:
    attended, attendance = Attended(timeout_ms=4), Attendance()
    attendance.start(attended)
    assert attended.attended.wait(10)
    attendance.stop()
    deadline = time.monotonic() + 10
    while any(one.name == "danube-client" for one in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_client_that_nobody_holds_any_more_needs_no_thread() -> None:
    attended = Attended(timeout_ms=4)
    held = weakref.ref(attended)
    Attendance().start(attended)
    del attended
    deadline = time.monotonic() + 10
    while held() is not None or any(one.name == "danube-client" for one in threading.enumerate()):
        assert time.monotonic() < deadline
        gc.collect()
        time.sleep(0.001)
