"""The leader's side of proposals over an engine in memory: order, one entry for many, nothing twice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from danube.cluster.control.calls import Change, Changed
from danube.cluster.control.leadership import Leadership, changed_members
from danube.cluster.control.proposer import PROPOSAL_COMMANDS_MAX, Proposer
from danube.cluster.log.applied_log import AppliedLog
from danube.cluster.raft.engine import Members
from danube.core.cluster.commands import Agreed, Allocated, AllocateId, KeyRecord, PutKey
from danube.core.metadata.commands import (
    Command,
    CreateTopic,
    DeleteTopic,
    TopicRecord,
    decode_commands,
    encode_command,
    in_full,
    join_commands,
)
from danube.core.metadata.machine import Metadata
from danube.core.partition.policy import TopicPolicy
from danube.errors import (
    CallerError,
    Conflict,
    DanubeError,
    InvalidArgument,
    InvariantBroken,
    LimitExceeded,
    NotFound,
    NotLeader,
    OutcomeUnknown,
    TopicExists,
    TopicNotFound,
    WrongState,
    broken,
)
from danube.limits import METADATA_ENTRY_BYTES_MAX, METADATA_VALUE_BYTES_MAX, RAFT_ENTRY_BYTES_MAX
from tests.fakes.raft_engine import FakeEngine

NUMBER = AllocateId(counter="/c")


def create(name: str, ensure: bool = False) -> CreateTopic:
    return CreateTopic(topic=f"/default/{name}", policy=TopicPolicy(), created_us=7, ensure=ensure)


class Parts:
    """A machine, an engine and a proposer that leads."""

    def __init__(self, directory: Path) -> None:
        self.machine = AppliedLog(directory)
        self.machine.publish()
        self.engine = FakeEngine(self.machine)
        self.failures: list[BaseException] = []
        self.proposer = Proposer(self.engine, self.machine, self.failures.append)

    def propose(self, origin: str, sequence: int, commands: Sequence[Command]) -> asyncio.Task[list[Any]]:
        return asyncio.get_running_loop().create_task(self.proposer.propose(origin, sequence, commands))


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Parts]:
    made = Parts(tmp_path)
    yield made
    made.machine.close()
    assert made.failures == []


def run(parts: Parts, test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def led() -> None:
        parts.proposer.lead()
        try:
            await asyncio.wait_for(test(), 10)
        finally:
            parts.proposer.resign("")

    asyncio.run(led())


def test_outcomes_stand_in_their_commands_places(parts: Parts) -> None:
    async def test() -> None:
        deletion = DeleteTopic(topic="/default/none")
        commands = [create("a"), create("a"), NUMBER, create("a", ensure=True), deletion, create("b")]
        first, refused, number, ensured, missing, second = await parts.proposer.propose("o", 1, commands)
        assert isinstance(first, TopicRecord) and first == ensured
        assert isinstance(refused, TopicExists) and isinstance(missing, TopicNotFound)
        assert number == Allocated("/c", 1)
        assert isinstance(second, TopicRecord) and second.topic_id == 2
        assert len(parts.engine.entries) == 1
        agreed, *stored = decode_commands(parts.engine.entries[0])
        assert (type(agreed).__name__, stored) == ("Agreed", [create("a"), NUMBER, create("b")])

    run(parts, test)


def test_what_waits_shares_one_entry(parts: Parts) -> None:
    async def test() -> None:
        parts.engine.held = True
        waiting = [parts.propose("first", 1, [create("first")])]
        await asyncio.sleep(0.01)
        waiting += [parts.propose(f"o{number}", 1, [create(f"t{number}")]) for number in range(50)]
        waiting.append(parts.propose("late", 1, [create("t7")]))
        await asyncio.sleep(0.01)
        assert not any(task.done() for task in waiting)
        parts.engine.held = False
        parts.engine.release()
        *made, refused = [(await task)[0] for task in waiting]
        assert all(isinstance(record, TopicRecord) for record in made)
        assert isinstance(refused, TopicExists), "checked against what is stored before it in the entry"
        assert len(parts.engine.entries) == 2

    run(parts, test)


def test_a_proposal_that_comes_again_is_answered_and_not_repeated(parts: Parts) -> None:
    async def test() -> None:
        commands = [NUMBER, create("a"), create("a"), create("a", ensure=True)]
        answered = await parts.proposer.propose("o", 5, commands)
        again = await parts.proposer.propose("o", 5, commands)
        assert [type(one) for one in again] == [type(one) for one in answered]
        assert again[0] == answered[0] == Allocated("/c", 1)
        assert (await parts.proposer.propose("o", 6, [NUMBER]))[0] == Allocated("/c", 2)
        (stale,) = await parts.proposer.propose("o", 5, [NUMBER])
        assert isinstance(stale, OutcomeUnknown), "it was stored, and its proposer has gone on"
        assert (await parts.proposer.propose("p", 1, [NUMBER]))[0] == Allocated("/c", 3)

    run(parts, test)


def test_a_repetition_is_known_although_another_version_wrote_the_first_one(parts: Parts) -> None:
    """In a rolling upgrade the leader before may have left out what is a default, or not have known it."""

    async def test() -> None:
        agreed = encode_command(Agreed(index=1, term=1, now_us=1, origin="o", sequence=1))
        command = create("a")
        known = {"kind", "topic", "policy", "created_us"}
        shorter = {name: value for name, value in in_full(command).items() if name in known}
        entry = join_commands([agreed, msgspec.msgpack.encode(shorter)])
        await parts.engine.propose(entry)
        (record,) = await parts.proposer.propose("o", 1, [command])
        assert isinstance(record, TopicRecord) and record.topic_id == 1

    run(parts, test)


def test_a_repetition_waits_for_the_first_one(parts: Parts) -> None:
    async def test() -> None:
        parts.engine.held = True
        first, again = parts.propose("o", 1, [NUMBER]), parts.propose("o", 1, [NUMBER])
        await asyncio.sleep(0.01)
        older = parts.propose("o", 0, [NUMBER])
        await asyncio.sleep(0.01)
        parts.engine.held = False
        parts.engine.release()
        assert await first == await again == [Allocated("/c", 1)]
        assert isinstance((await older)[0], OutcomeUnknown)

    run(parts, test)


@pytest.mark.parametrize("committed", [True, False])
def test_after_a_change_of_leaders_it_is_done_once(parts: Parts, committed: bool) -> None:
    async def test() -> None:
        parts.engine.held = True
        asked = parts.propose("o", 1, [NUMBER, create("a")])
        queued = parts.propose("p", 1, [NUMBER])
        await asyncio.sleep(0.01)
        late = parts.propose("q", 1, [NUMBER])
        await asyncio.sleep(0.01)
        parts.engine.lose(committed=committed)
        parts.proposer.resign("2")
        for task in (asked, queued):
            with pytest.raises(OutcomeUnknown):
                await task
        with pytest.raises(NotLeader):
            await late
        with pytest.raises(NotLeader):
            await parts.proposer.propose("o", 1, [NUMBER])
        parts.engine.held = False
        parts.engine.win()
        parts.proposer.lead()
        number, record = await parts.proposer.propose("o", 1, [NUMBER, create("a")])
        assert number == Allocated("/c", 1) and isinstance(record, TopicRecord)
        assert await parts.proposer.propose("p", 1, [NUMBER]) == [Allocated("/c", 2)]
        assert await parts.proposer.propose("q", 1, [NUMBER]) == [Allocated("/c", 3)]

    run(parts, test)


def test_what_nobody_remembers_is_not_made_up(parts: Parts) -> None:
    async def test() -> None:
        await parts.proposer.propose("o", 1, [NUMBER, create("a")])
        snapshot = parts.machine.state.snapshot()
        parts.machine.restore(parts.machine.applied_index, snapshot, parts.machine.thaw(snapshot))
        number, record = await parts.proposer.propose("o", 1, [NUMBER, create("a")])
        assert isinstance(number, OutcomeUnknown) and isinstance(record, TopicRecord)

    run(parts, test)


def test_nothing_is_answered_by_who_does_not_lead(parts: Parts) -> None:
    async def test() -> None:
        await parts.proposer.propose("o", 1, [create("a")])
        parts.engine.leading = False  # deposed, and not told yet
        with pytest.raises(NotLeader):
            await parts.proposer.propose("o", 2, [create("a")])

    run(parts, test)


def test_entries_are_split_and_large_commands_refused(parts: Parts) -> None:
    async def test() -> None:
        value = bytes(METADATA_VALUE_BYTES_MAX)
        parts.engine.held = True
        waiting = [parts.propose("first", 1, [NUMBER])]
        await asyncio.sleep(0.01)
        waiting += [parts.propose(f"o{n}", 1, [PutKey(key=f"/k{n}", value=value)]) for n in range(9)]
        numbers = [create(f"m{n}") for n in range(PROPOSAL_COMMANDS_MAX)]
        waiting += [parts.propose(f"m{n}", 1, numbers) for n in range(3)]
        too_large = parts.propose("l", 1, [PutKey(key="/l", value=bytes(3 * METADATA_VALUE_BYTES_MAX))])
        await asyncio.sleep(0.05)
        parts.engine.held = False
        parts.engine.release()
        outcomes = [await task for task in waiting]
        assert all(isinstance(one[0], KeyRecord) for one in outcomes[1:10])
        assert all(isinstance(one, TopicRecord) for one in outcomes[10])
        assert all(isinstance(one, TopicExists) for one in outcomes[11])
        assert isinstance((await too_large)[0], LimitExceeded)

    run(parts, test)


def test_what_waits_never_makes_an_entry_that_the_engine_refuses(parts: Parts) -> None:
    """Their sum lies between what a reader of the copy takes and what the engine takes."""

    async def test() -> None:
        count, around = 5, 700
        size = (METADATA_ENTRY_BYTES_MAX - 16) // count - around
        assert count * (size + 60) > RAFT_ENTRY_BYTES_MAX
        parts.engine.held = True
        waiting = [parts.propose("first", 1, [NUMBER])]
        await asyncio.sleep(0.01)
        value = bytes(size)
        waiting += [parts.propose(f"o{n}", 1, [PutKey(key=f"/k{n}", value=value)]) for n in range(count)]
        await asyncio.sleep(0.01)
        parts.engine.held = False
        parts.engine.release()
        for task in waiting:
            (outcome,) = await task
            assert not isinstance(outcome, DanubeError)

    run(parts, test)


def test_a_proposal_that_can_be_no_entry_is_refused_and_the_leader_goes_on(parts: Parts) -> None:
    async def test() -> None:
        value = bytes(METADATA_VALUE_BYTES_MAX)
        large = [PutKey(key=f"/k{n}", value=value) for n in range(5)]
        outcomes = await parts.proposer.propose("o", 1, large)
        assert len(outcomes) == len(large)
        assert all(isinstance(one, LimitExceeded) for one in outcomes)
        refused = parts.proposer.propose("o" * 4_096, 1, [NUMBER])
        with pytest.raises(CallerError):
            await refused
        forged = Agreed(index=9, term=9, now_us=9, origin="someone", sequence=1)
        assert isinstance((await parts.proposer.propose("p", 1, [forged]))[0], InvalidArgument)
        assert await parts.proposer.propose("q", 1, [NUMBER]) == [Allocated("/c", 1)]

    run(parts, test)


@pytest.mark.parametrize("lost", [False, True])
def test_a_change_of_members_that_is_only_on_its_way_is_not_told_as_done(parts: Parts, lost: bool) -> None:
    async def test() -> None:
        leadership = Leadership(parts.engine, parts.machine, parts.failures.append)
        leadership.lead()
        add = Change("add", "2", "b:1")
        try:
            parts.engine.held = True
            asked = [asyncio.ensure_future(leadership.answer(add)) for _ in range(2)]
            await asyncio.sleep(0.05)
            assert "2" in parts.engine.members.learners
            assert not any(one.done() for one in asked)
            if lost:
                parts.engine.lose()
                for one in asked:
                    with pytest.raises((OutcomeUnknown, NotLeader)):
                        await one
                return
            parts.engine.held = False
            parts.engine.release()
            changed = Changed(Members({"1": "h:1"}, {"2": "b:1"}))
            assert [await one for one in asked] == [changed, changed]
            assert await leadership.answer(add) == changed
        finally:
            leadership.resign("")

    run(parts, test)


def test_a_bug_in_a_round_ends_the_member_and_not_only_the_rounds(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it led on, and took proposals that nobody would ever look at."""

    async def test() -> None:
        monkeypatch.setattr(Metadata, "check", lambda *_: broken("a bug"))
        asked = parts.propose("o", 1, [NUMBER])
        async with asyncio.timeout(5):
            while not parts.failures:
                await asyncio.sleep(0.001)
        asked.cancel()
        failures, parts.failures[:] = parts.failures.copy(), []
        assert [type(error) for error in failures] == [InvariantBroken]

    run(parts, test)


def test_members_change_one_at_a_time_and_again_without_harm() -> None:
    before = Members({"1": "a:1"})
    added = changed_members(before, Change("add", "2", "b:1"))
    assert added == Members({"1": "a:1"}, {"2": "b:1"})
    assert changed_members(added, Change("add", "2", "b:1")) == added
    promoted = changed_members(added, Change("promote", "2"))
    assert promoted == Members({"1": "a:1", "2": "b:1"})
    assert changed_members(promoted, Change("promote", "2")) == promoted
    assert changed_members(promoted, Change("add", "2", "b:1")) == promoted
    assert changed_members(promoted, Change("move", "2", "c:1")).voters["2"] == "c:1"
    removed = changed_members(promoted, Change("remove", "1"))
    assert removed == Members({"2": "b:1"})
    assert changed_members(removed, Change("remove", "1", repeated=True)) == removed
    for change, error in (
        (Change("remove", "2"), WrongState),
        (Change("remove", "9"), NotFound),
        (Change("promote", "9"), NotFound),
        (Change("add", "3", "b:1"), Conflict),
        (Change("add", "0", "x:1"), InvalidArgument),
        (Change("add", "x", "x:1"), InvalidArgument),
        (Change("add", "07", "x:1"), InvalidArgument),
        (Change("add", "\u0663", "x:1"), InvalidArgument),
        (Change("add", "9" * 5_000, "x:1"), InvalidArgument),
        (Change("add", str(1 << 63), "x:1"), InvalidArgument),
        (Change("add", "3"), InvalidArgument),
        (Change("add", "3", "a..b:1"), InvalidArgument),
        (Change("move", "2", "a..b:1"), InvalidArgument),
        (Change("shuffle", "2"), InvalidArgument),
    ):
        with pytest.raises(error):
            changed_members(removed, change)
