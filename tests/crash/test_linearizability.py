"""The judge of metadata histories: it passes what one order explains and names what none does."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from tests.crash.linearizability import NEVER, Call, Undecided, judge, linearizable, step


def call(name: str, argument: object, answer: object, called: int, returned: int) -> Call:
    return Call(name, argument, answer, called, returned)


GOOD: dict[str, list[Call]] = {
    "nothing": [],
    "one after the other": [
        call("get", None, None, 0, 1),
        call("put", "a", None, 2, 3),
        call("get", None, "a", 4, 5),
        call("delete", None, "a", 6, 7),
        call("get", None, None, 8, 9),
    ],
    "a read beside a write sees either": [
        call("put", "a", None, 0, 10),
        call("get", None, None, 1, 2),
        call("get", None, "a", 3, 4),
    ],
    "one of two comparisons wins": [
        call("put", "a", None, 0, 1),
        call("compare", ("a", "b"), True, 2, 9),
        call("compare", ("a", "c"), False, 2, 9),
        call("get", None, "b", 10, 11),
    ],
    "what has no answer may have happened, late": [
        call("put", "a", None, 0, NEVER),
        call("get", None, None, 5, 6),
        call("get", None, "a", 7, 8),
    ],
    "or never": [call("put", "a", None, 0, NEVER), call("get", None, None, 5, 6)],
    "numbers in the order of their taking": [
        call("take", None, 2, 0, 9),
        call("take", None, 1, 1, 8),
        call("take", None, 3, 10, 11),
    ],
    "a number that nobody heard of": [
        call("take", None, 1, 0, 1),
        call("take", None, None, 2, NEVER),
        call("take", None, 3, 3, 4),
    ],
}
BAD: dict[str, list[Call]] = {
    "a write that is lost": [call("put", "a", None, 0, 1), call("get", None, None, 2, 3)],
    "a read that goes back": [
        call("put", "a", None, 0, 10),
        call("get", None, "a", 1, 2),
        call("get", None, None, 3, 4),
    ],
    "a stale read after another's write": [
        call("put", "a", None, 0, 1),
        call("put", "b", None, 2, 3),
        call("get", None, "a", 4, 5),
    ],
    "two comparisons that both won": [
        call("put", "a", None, 0, 1),
        call("compare", ("a", "b"), True, 2, 9),
        call("compare", ("a", "c"), True, 2, 9),
    ],
    "a comparison that failed without reason": [
        call("put", "a", None, 0, 1),
        call("compare", ("a", "b"), False, 2, 3),
    ],
    "a value that nobody wrote": [call("get", None, "ghost", 0, 1)],
    "what has no answer happened before it was asked": [
        call("get", None, "a", 0, 1),
        call("put", "a", None, 2, NEVER),
    ],
    "what has no answer happened twice": [
        call("put", "a", None, 0, NEVER),
        call("get", None, "a", 1, 2),
        call("put", "b", None, 3, 4),
        call("get", None, "b", 5, 6),
        call("get", None, "a", 7, 8),
    ],
    "a number twice": [call("take", None, 1, 0, 9), call("take", None, 1, 0, 9)],
    "a number that is missing": [call("take", None, 1, 0, 1), call("take", None, 3, 2, 3)],
    "a deletion of something else": [call("put", "a", None, 0, 1), call("delete", None, "b", 2, 3)],
}


@pytest.mark.parametrize("name", GOOD)
def test_what_one_order_explains_passes(name: str) -> None:
    assert linearizable(GOOD[name])


@pytest.mark.parametrize("name", BAD)
def test_what_no_order_explains_is_found(name: str) -> None:
    assert not linearizable(BAD[name])


def by_every_order(calls: Sequence[Call]) -> bool:
    """The same question, answered by trying every order of every choice of unknown operations."""
    unknown = [one for one in calls if not one.known]
    known = [one for one in calls if one.known]
    for count in range(len(unknown) + 1):
        for some in itertools.combinations(unknown, count):
            if any(map(explains, itertools.permutations([*known, *some]))):
                return True
    return False


def explains(order: Sequence[Call]) -> bool:
    state = None
    for place, one in enumerate(order):
        if any(later.returned_ns < one.called_ns for later in order[place + 1 :]):
            return False
        possible, state = step(state, one)
        if not possible:
            return False
    return True


def test_it_agrees_with_trying_every_order(source: random.Random) -> None:
    """Small random histories, of which about half have an order."""
    verdicts = [0, 0]
    for _ in range(600):
        calls = [random_call(source) for _ in range(source.randrange(1, 6))]
        expected = by_every_order(calls)
        assert linearizable(calls) == expected, calls
        verdicts[expected] += 1
    assert min(verdicts) > 50, verdicts


def random_call(source: random.Random) -> Call:
    called = source.randrange(12)
    returned = NEVER if source.random() < 0.2 else called + source.randrange(1, 8)
    value = source.choice("ab")
    name = source.choice(["get", "put", "compare", "delete"])
    if name == "get":
        return call("get", None, source.choice([None, "a", "b"]), called, min(returned, 20))
    if name == "put":
        return call("put", value, None, called, returned)
    if name == "delete":
        return call("delete", None, source.choice([None, "a", "b"]), called, returned)
    return call("compare", (value, source.choice("ab")), source.random() < 0.5, called, returned)


def test_a_long_history_of_a_real_register_is_judged_and_one_wrong_answer_is_found(
    source: random.Random,
) -> None:
    """Three clients, 300 operations, of which 5 have no answer, as many as a key of a run has."""
    moment, value, calls = 0, None, []
    for number in range(300):
        moment += 10
        early, late = moment - source.randrange(25), moment + source.randrange(25)
        if number % 60 == 7:
            calls.append(call("put", f"u{number}", None, early, NEVER))
        elif number % 3 == 0:
            value = f"v{number}"
            calls.append(call("put", value, None, early, late))
        else:
            calls.append(call("get", None, value, early, late))
    assert linearizable(calls)
    last = call("get", None, "v0", moment + 100, moment + 101)
    assert not linearizable([*calls, last])


def test_a_history_that_is_too_long_is_told_and_not_passed() -> None:
    events = [["meta", "c", "/k", "put", f"v{one}", False, None, one, 0] for one in range(12)]
    events.append(["meta", "c", "/k", "get", None, True, "ghost", 100, 101])
    with pytest.raises(Undecided):
        linearizable(
            [call("put", str(n), None, n, NEVER) for n in range(12)] + [call("get", None, "x", 50, 51)], 100
        )
    broken, counts = judge(events)
    assert counts["unknown"] == 12 and counts["operations"] == 13
    assert broken and not counts["undecided"]


def test_journals_are_judged_key_by_key() -> None:
    events = [
        ["meta", "c0", "/a", "put", "1", True, None, 0, 1],
        ["meta", "c1", "/b", "get", None, True, None, 2, 3],
        ["meta", "c1", "/a", "compare", ["1", "2"], True, True, 2, 3],
        ["meta", "c1", "/a", "get", None, False, None, 2, 3],
        ["fault", "kill", 1, 2, 3, {}],
    ]
    assert judge(events) == ([], {"keys": 2, "operations": 3, "unknown": 0, "undecided": 0})
    events.append(["meta", "c2", "/a", "get", None, True, "1", 4, 5])
    broken, _ = judge(events)
    assert broken == ["/a: no order of its 3 operations explains the answers"]
