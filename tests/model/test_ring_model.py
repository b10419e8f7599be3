"""Every interleaving of the shared-memory protocols on a machine with store buffers.

The machine is x86's: each process sees its own stores at once, the others see them later and in order; a
fence or a system call empties the store buffer.  A protocol is a little program per process, written
after the module it models; the walk visits every state that any schedule and any delay of stores can
reach.  Each protocol is walked again with one step left out or moved, and then the walk must find the
fault: the model can see it, and the step is needed.  The last tests record what the real code does and
compare it with the programs' order.

Weakly ordered processors are not modelled; there the Numba loads and stores carry the order themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest

from danube.ipc import atomics
from danube.ipc.atomics import Words
from danube.ipc.channel import Channel
from danube.ipc.region import Region
from danube.ipc.ring import HEAD, TAIL, WANTED

Values = dict[str, int]
Value = int | Callable[[Values], int]


class Step(NamedTuple):
    """One instruction of a program; ``label`` is where jumps to that name land."""

    act: str
    name: str = ""
    value: Value = 0
    label: str = ""


def store(name: str, value: Value, label: str = "") -> Step:
    return Step("store", name, value, label)


def load(name: str, label: str = "") -> Step:
    """Into the register of the same name."""
    return Step("load", name, 0, label)


def put(register: str, value: Value, label: str = "") -> Step:
    return Step("put", register, value, label)


def jump(target: str, condition: Value = 1) -> Step:
    return Step("jump", target, condition)


def system(name: str, value: Value, label: str = "") -> Step:
    """A system call that changes kernel memory: it empties the store buffer first."""
    return Step("system", name, value, label)


def sleep_until(name: str) -> Step:
    return Step("sleep", name)


FENCE = Step("fence")
END_OF_PROGRAM = Step("end", label="end")

# Per process: counter, registers, store buffer; then the memory.
Process = tuple[int, tuple[tuple[str, int], ...], tuple[tuple[str, int], ...]]
State = tuple[tuple[Process, ...], tuple[tuple[str, int], ...]]
Fault = Callable[[Values, list[Values]], bool]


def fault_reached(programs: Sequence[Sequence[Step]], memory: Values, fault: Fault) -> bool:
    """Whether some schedule ends, with all processes ended or asleep for good, in a faulty state."""
    first: State = (tuple((0, (), ()) for _ in programs), tuple(sorted(memory.items())))
    seen, todo = {first}, [first]
    while todo:
        processes, words = todo.pop()
        following = list(_following(programs, processes, dict(words)))
        registers = [dict(process[1]) for process in processes]
        if not following and fault(dict(words), registers):
            return True
        for after in following:
            if after not in seen:
                seen.add(after)
                todo.append(after)
    assert len(seen) > 20, "the walk went nowhere"
    return False


def _following(
    programs: Sequence[Sequence[Step]], processes: tuple[Process, ...], memory: Values
) -> Iterator[State]:
    for place, (counter, registers, buffer) in enumerate(processes):
        if buffer:  # its oldest store reaches the memory
            name, value = buffer[0]
            yield _state(processes, place, (counter, registers, buffer[1:]), {**memory, name: value})
        after = _stepped(programs[place], counter, dict(registers), buffer, dict(memory))
        if after is not None:
            process, changed = after
            yield _state(processes, place, process, changed)


def _state(processes: tuple[Process, ...], place: int, process: Process, memory: Values) -> State:
    return (*processes[:place], process, *processes[place + 1 :]), tuple(sorted(memory.items()))


def _stepped(
    program: Sequence[Step],
    counter: int,
    registers: Values,
    buffer: tuple[tuple[str, int], ...],
    memory: Values,
) -> tuple[Process, Values] | None:
    """The process after its next instruction; None when it has ended or must wait."""
    act, name, given, _ = program[counter]
    value = given(registers) if callable(given) else given
    counter += 1
    if act == "end":
        return None
    if act in ("fence", "system", "sleep") and buffer:
        return None
    if act == "sleep" and not memory[name]:
        return None
    if act == "store":
        buffer = (*buffer, (name, value))
    elif act == "load":
        registers[name] = dict(buffer).get(name, memory[name])
    elif act == "put":
        registers[name] = value
    elif act == "system":
        memory[name] = value
    elif act == "jump" and value:
        counter = next(place for place, step in enumerate(program) if step.label == name)
    return (counter, tuple(sorted(registers.items())), buffer), memory


def without(program: Sequence[Step], *steps: Step) -> list[Step]:
    """A copy that lacks the first of each of these steps, which must be there and bear no label."""
    left = list(program)
    for step in steps:
        left.remove(step)
    return left


# The bell: danube.ipc.bell and Channel.arm, disarm, flush

RECORDS = 2
EMPTY_BELL = system("bell", 0)
LOOK = load("head")
SECOND_LOOK = jump("turn", lambda seen: seen["head"] != seen["known"])
SLEEPER = [
    store("sleeping", 0, "turn"),
    EMPTY_BELL,
    LOOK,
    put("known", lambda seen: seen["head"]),
    jump("end", lambda seen: seen["known"] == RECORDS),
    store("sleeping", 1),
    FENCE,
    load("head"),
    SECOND_LOOK,
    sleep_until("bell"),
    jump("turn"),
    END_OF_PROGRAM,
]


def ringer(fenced: bool = True) -> list[Step]:
    steps: list[Step] = []
    for number in range(1, RECORDS + 1):
        steps.append(store("head", number))
        if fenced:
            steps.append(FENCE)
        steps.append(load("sleeping"))
        steps.append(jump(f"quiet{number}", lambda seen: not seen["sleeping"]))
        steps.append(system("bell", 1))
        steps.append(put("", 0, f"quiet{number}"))
    return [*steps, END_OF_PROGRAM]


def overslept(memory: Values, registers: list[Values]) -> bool:
    return registers[0].get("known") != RECORDS


BELL_MEMORY = {"head": 0, "sleeping": 0, "bell": 0}


def test_no_wake_up_is_lost() -> None:
    assert not fault_reached([SLEEPER, ringer()], BELL_MEMORY, overslept)


@pytest.mark.parametrize(
    ("sleeper", "ringing"),
    [
        pytest.param(without(SLEEPER, FENCE), ringer(), id="the sleeper has no fence"),
        pytest.param(SLEEPER, ringer(fenced=False), id="the ringer has no fence"),
        pytest.param(without(SLEEPER, SECOND_LOOK), ringer(), id="no second look"),
        pytest.param(
            [*SLEEPER[:9], EMPTY_BELL, *SLEEPER[9:]], ringer(), id="the bell is emptied after the second look"
        ),
    ],
)
def test_each_step_of_the_bell_is_needed(sleeper: list[Step], ringing: list[Step]) -> None:
    assert fault_reached([sleeper, ringing], BELL_MEMORY, overslept)


def test_a_ringer_that_cleared_the_word_and_died_would_leave_the_sleeper_asleep() -> None:
    """Why only the sleeper writes its word."""
    died = [
        load("sleeping"),
        jump("end", lambda seen: not seen["sleeping"]),
        store("sleeping", 0),
        END_OF_PROGRAM,
    ]
    assert fault_reached([SLEEPER, ringer(), died], BELL_MEMORY, overslept)


# Room: Channel.send refused, arm, and the reader's release

MOVED = jump("told", lambda seen: seen["tail"] != seen["refused_at"])
REFUSED = [
    load("tail"),
    jump("told", lambda seen: seen["tail"] == 1),
    put("refused_at", lambda seen: seen["tail"]),
    store("wanted", 1),
    store("sleeping", 1),
    FENCE,
    load("tail"),
    MOVED,
    sleep_until("bell"),
    put("told", 1, "told"),
    END_OF_PROGRAM,
]
RELEASE = [
    store("tail", 1),
    FENCE,
    load("wanted"),
    jump("end", lambda seen: not seen["wanted"]),
    load("sleeping"),
    jump("end", lambda seen: not seen["sleeping"]),
    system("bell", 1),
    END_OF_PROGRAM,
]
ROOM_MEMORY = {"tail": 0, "wanted": 0, "sleeping": 0, "bell": 0}


def not_told(memory: Values, registers: list[Values]) -> bool:
    return "told" not in registers[0]


def test_who_waits_for_room_is_told() -> None:
    assert not fault_reached([REFUSED, RELEASE], ROOM_MEMORY, not_told)


@pytest.mark.parametrize(
    ("refused", "release"),
    [
        pytest.param(without(REFUSED, FENCE), RELEASE, id="the refused has no fence"),
        pytest.param(REFUSED, without(RELEASE, FENCE), id="the releasing has no fence"),
        pytest.param(without(REFUSED, MOVED), RELEASE, id="no second look"),
        pytest.param(
            [*REFUSED[:2], load("tail"), *REFUSED[2:]],
            RELEASE,
            id="the tail is remembered from after the refusal",
        ),
    ],
)
def test_each_step_for_room_is_needed(refused: list[Step], release: list[Step]) -> None:
    assert fault_reached([refused, release], ROOM_MEMORY, not_told)


# The ring: one slot that is written, read and written again

SLOTS_WRITTEN = 3


def ring_writer(head_first: bool = False) -> list[Step]:
    steps: list[Step] = []
    for number in range(1, SLOTS_WRITTEN + 1):
        steps.append(load("tail", f"room{number}"))
        steps.append(jump(f"room{number}", lambda seen, number=number: seen["tail"] < number - 1))
        pair = [store("slot", number), store("head", number)]
        steps += reversed(pair) if head_first else pair
    return [*steps, END_OF_PROGRAM]


def ring_reader(release_first: bool = False) -> list[Step]:
    steps: list[Step] = []
    for number in range(1, SLOTS_WRITTEN + 1):
        steps.append(load("head", f"record{number}"))
        steps.append(jump(f"record{number}", lambda seen, number=number: seen["head"] < number))
        taken = [load("slot"), put(f"got{number}", lambda seen: seen["slot"])]
        release = [store("tail", number)]
        steps += [*release, *taken] if release_first else [*taken, *release]
    return [*steps, END_OF_PROGRAM]


def misread(memory: Values, registers: list[Values]) -> bool:
    return any(registers[1][f"got{number}"] != number for number in range(1, SLOTS_WRITTEN + 1))


RING_MEMORY = {"head": 0, "tail": 0, "slot": 0}


def test_every_record_is_read_as_it_was_written() -> None:
    assert not fault_reached([ring_writer(), ring_reader()], RING_MEMORY, misread)


def test_a_head_before_its_slot_or_a_release_before_the_read_would_be_seen() -> None:
    assert fault_reached([ring_writer(head_first=True), ring_reader()], RING_MEMORY, misread)
    assert fault_reached([ring_writer(), ring_reader(release_first=True)], RING_MEMORY, misread)


# What the real code does, in which order


class RecordingWords:
    """Stands in for Words and notes every access by name."""

    def __init__(self, words: Words, names: dict[int, str], notes: list[str]) -> None:
        self._words, self._names, self._notes = words, names, notes

    def load(self, index: int) -> int:
        self._notes.append(f"load {self._names.get(index, index)}")
        return self._words.load(index)

    def store(self, index: int, value: int) -> None:
        self._notes.append(f"store {self._names.get(index, index)}")
        self._words.store(index, value)


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    noted: list[str] = []
    words = Region.words

    def recorded(region: Region, position: int, size: int) -> Any:
        layout = region.layout
        names = {0: "unknown"}
        if position >= layout.rings_position:
            writer = 0 if position == layout.ring_position(0, 1) else 1
            names = {HEAD: f"head{writer}", TAIL: f"tail{writer}", WANTED: f"wanted{writer}"}
        for worker in range(layout.workers):
            if position == layout.sleeping_position(worker):
                names = {0: f"sleeping{worker}"}
            elif position == layout.incarnation_position(worker):
                names = {0: f"incarnation{worker}"}
        return RecordingWords(words(region, position, size), names, noted)

    fence = atomics.fence

    def recorded_fence() -> None:
        noted.append("fence")
        fence()

    monkeypatch.setattr(Region, "words", recorded)
    monkeypatch.setattr(atomics, "fence", recorded_fence)
    return noted


def ordered(notes: list[str], *expected: str) -> bool:
    """Whether the notes hold these in this order, others between them or not."""
    rest = iter(notes)
    return all(note in rest for note in expected)


def test_the_channel_takes_the_steps_of_the_programs_in_their_order(notes: list[str]) -> None:
    region = Region.create(2, ring_bytes=4096)
    one, two = Channel(region, 0, 0), Channel(region, 1, 0)
    notes.clear()
    assert two.arm()
    assert ordered(notes, "store sleeping1", "fence", "load head0")
    assert notes.index("store sleeping1") < notes.index("load head0")
    notes.clear()
    one.send(1, 1, [bytes(1000)])
    assert "store head0" not in notes
    one.flush()
    assert notes[-3:] == ["store head0", "fence", "load sleeping1"]
    while one.send(1, 1, [bytes(1000)]):
        pass
    one.flush()
    two.disarm()
    assert two.poll()
    notes.clear()
    assert one.arm()
    assert notes.index("store sleeping0") < notes.index("fence") < notes.index("load tail0")
    notes.clear()
    two.release()
    assert notes == ["store tail0", "fence", "load wanted0", "load sleeping0"]
    region.close()
