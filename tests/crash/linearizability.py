"""Whether what clients saw of the metadata can be explained by one order of their operations.

After Wing and Gong, with the states that were tried remembered: an operation may be the next one when
nothing that must come after it had ended before it began.  One whose outcome nobody knows may take
effect at any moment after its beginning, or never.  Keys do not speak of each other, so each key's
history is judged by itself, and each must start absent.

A state is the value of a key (None: absent), or the last number of a counter (0: none given).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from tests.crash.journal import Event

NEVER: Final = 1 << 62
STEPS_MAX: Final = 2_000_000  # of one key; a history that needs more is not judged, and that is told

State = Any


@dataclass(frozen=True, slots=True)
class Call:
    """One operation as its client saw it; ``returned_ns`` is NEVER where the outcome is not known."""

    name: str  # get, put, delete, compare or take
    argument: Any
    answer: Any
    called_ns: int
    returned_ns: int

    @property
    def known(self) -> bool:
        return self.returned_ns != NEVER


class Undecided(Exception):
    """The history of a key takes more steps than are allowed."""


def step(state: State, call: Call) -> tuple[bool, State]:
    """Whether the call could have had its answer in this state, and the state after it."""
    if call.name == "get":
        return call.answer == state, state
    if call.name == "put":
        return True, call.argument
    if call.name == "delete":
        return not call.known or call.answer == state, None
    if call.name == "compare":
        expected, value = call.argument
        done = state == expected
        return not call.known or call.answer == done, value if done else state
    if call.name == "take":
        return not call.known or call.answer == (state or 0) + 1, (state or 0) + 1
    raise ValueError(f"no operation {call.name}")


def linearizable(calls: Iterable[Call], steps_max: int = STEPS_MAX) -> bool:
    """Whether an order exists that explains every answer; raises Undecided."""
    history = sorted(calls, key=lambda call: call.called_ns)
    seen = {call.answer for call in history if call.known and call.name in ("get", "delete", "take")}
    # Most of what has no answer was never seen either: an order without it is found soon, where there is one.
    likely = [call for call in history if call.known or call.name == "take" or _value(call) in seen]
    if len(likely) < len(history) and _has_order(likely, steps_max):
        return True
    return _has_order(history, steps_max)


def _value(call: Call) -> Any:
    return call.argument[1] if call.name == "compare" else call.argument


def _has_order(history: list[Call], steps_max: int) -> bool:
    wanted = 0  # a bit for each call that had an answer: all of those must be explained
    for place, call in enumerate(history):
        wanted |= call.known << place
    tried: set[tuple[int, State]] = set()
    waiting: list[tuple[int, State]] = [(0, None)]
    while waiting:
        done, state = waiting.pop()
        if done & wanted == wanted:
            return True
        if (done, state) in tried:
            continue
        tried.add((done, state))
        if len(tried) > steps_max:
            raise Undecided(f"{len(history)} operations")
        waiting += _next(history, done, state)
    return False


def _next(history: list[Call], done: int, state: State) -> list[tuple[int, State]]:
    """Every way to go on: calls that began before the first of those left had ended."""
    found = []
    first_end_ns = NEVER
    left = ~done & ((1 << len(history)) - 1)
    while left:
        bit = left & -left
        left ^= bit
        call = history[bit.bit_length() - 1]
        if call.called_ns > first_end_ns:
            break  # and so did all that follow
        first_end_ns = min(first_end_ns, call.returned_ns)
        possible, after = step(state, call)
        if possible and (call.known or after != state):
            found.append((done | bit, after))
    found.reverse()  # the earliest is looked at first
    return found


def calls_by_key(events: Iterable[Event]) -> dict[str, list[Call]]:
    """The histories in journals: ``meta`` lines (:mod:`tests.crash.metadata_clients`).

    A read that had no answer says nothing and is left out.
    """
    found: dict[str, list[Call]] = defaultdict(list)
    for event in events:
        if event[0] != "meta":
            continue
        _, _, key, name, argument, known, answer, called_ns, returned_ns = event
        if name == "get" and not known:
            continue
        argument = tuple(argument) if isinstance(argument, list) else argument
        found[key].append(Call(name, argument, answer, called_ns, returned_ns if known else NEVER))
    return found


def judge(events: Iterable[Event]) -> tuple[list[str], dict[str, int]]:
    """A sentence for each key whose history has no order, and how much was judged."""
    histories = calls_by_key(events)
    broken, undecided = [], 0
    for key, calls in sorted(histories.items()):
        try:
            if not linearizable(calls):
                broken.append(f"{key}: no order of its {len(calls)} operations explains the answers")
        except Undecided:
            undecided += 1
    every = [call for calls in histories.values() for call in calls]
    return broken, {
        "keys": len(histories),
        "operations": len(every),
        "unknown": sum(not call.known for call in every),
        "undecided": undecided,
    }
