"""Threads that upload leave the processors to those that somebody waits for."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

from danube.broker.mover.threads import NICENESS, yielding_pool


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def below() -> int:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(niceness).result()


def test_a_yielding_thread_and_those_it_starts_yield_and_no_other() -> None:
    before = niceness()
    with yielding_pool(2, "yielding") as pool:
        assert pool.submit(niceness).result() == max(before, NICENESS)
        assert pool.submit(below).result() == max(before, NICENESS)
    assert niceness() == before
    assert below() == before


def test_a_broker_that_is_nicer_already_stays_so() -> None:
    expected = max(niceness(), NICENESS + 3)

    def nicer() -> int:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), expected)
        with yielding_pool(1, "yielding") as pool:
            return pool.submit(niceness).result()

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(nicer).result() == expected
