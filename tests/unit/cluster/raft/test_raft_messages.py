"""Messages between members: every one survives the way, whatever else arrives is refused."""

from __future__ import annotations

import random

import msgspec
import pytest

from danube.cluster.raft.engine import Members
from danube.cluster.raft.entry import COMMAND, Entry, members_entry, members_of
from danube.cluster.raft.messages import (
    KIND_BY_TYPE,
    AppendAnswer,
    AppendRequest,
    ElectNow,
    Message,
    PreVoteAnswer,
    PreVoteRequest,
    SnapshotAnswer,
    SnapshotPart,
    Stale,
    UnknownKind,
    Unreadable,
    VoteAnswer,
    VoteRequest,
    decode,
    encode,
)
from danube.cluster.raft.quorum import check_change, check_members, has_quorum, quorum_value
from danube.errors import InvalidArgument
from danube.limits import RAFT_BATCH_BYTES, RAFT_ENTRY_BYTES_MAX, RAFT_MEMBERS_MAX, RAFT_MESSAGE_BYTES_MAX

MEMBERS = Members({"a": "a:1", "b": "b:1", "c": "c:1"}, {"d": "d:1"})
SAMPLES: list[Message] = [
    VoteRequest(3, 7, 2),
    VoteAnswer(3, True),
    PreVoteRequest(3, 1, 7, 2),
    PreVoteAnswer(3, 1, False),
    AppendRequest(3, 9, 7, 2, 6, [Entry(3, COMMAND, b"entry"), Entry(3, 1, b"")]),
    AppendAnswer(3, 9, 7, False, 0, 5),
    SnapshotPart(3, 9, 7, 2, MEMBERS, 1_000, 500, b"part"),
    SnapshotAnswer(3, 9, 7, 504),
    Stale(4),
    ElectNow(4),
]


def test_every_kind_has_a_sample() -> None:
    assert {type(sample) for sample in SAMPLES} == set(KIND_BY_TYPE)
    assert sorted(KIND_BY_TYPE.values()) == list(range(1, len(KIND_BY_TYPE) + 1))


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda one: type(one).__name__)
def test_a_message_survives_the_way(sample: Message) -> None:
    content = encode(sample)
    assert decode(content) == sample
    assert content[0] == KIND_BY_TYPE[type(sample)]


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda one: type(one).__name__)
def test_fields_of_a_newer_version_are_skipped(sample: Message) -> None:
    content = encode(sample)
    fields = msgspec.msgpack.decode(content[1:])
    newer = content[:1] + msgspec.msgpack.encode([*fields, "new", {"more": 1}])
    assert decode(newer) == sample


def test_bytes_of_the_first_version_stay_readable() -> None:
    assert encode(SAMPLES[0]).hex() == "0193030702"
    assert encode(SAMPLES[4]).hex() == "0596030907020692930300c405656e747279930301c400"


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda one: type(one).__name__)
def test_every_cut_is_unreadable(sample: Message) -> None:
    content = encode(sample)
    for size in range(len(content)):
        with pytest.raises(Unreadable):
            decode(content[:size])


def test_a_kind_of_a_newer_version_is_told_from_garbage() -> None:
    for kind in (0, 11, 200, 255):
        with pytest.raises(UnknownKind):
            decode(bytes([kind]) + b"\x90")


def test_garbage_is_refused_and_nothing_else_happens() -> None:
    rng = random.Random(5)
    for _ in range(20_000):
        content = bytearray(encode(rng.choice(SAMPLES)))
        for _ in range(rng.randint(1, 4)):
            content[rng.randrange(len(content))] = rng.randrange(256)
        try:
            decode(bytes(content))
        except (Unreadable, UnknownKind):
            pass


@pytest.mark.parametrize("fields", [[-1, True], [2**63, True], ["3", True], [3, 1], [3]])
def test_fields_out_of_their_bounds_are_refused(fields: list[object]) -> None:
    with pytest.raises(Unreadable):
        decode(b"\x02" + msgspec.msgpack.encode(fields))


def test_the_largest_batch_is_a_message_and_nothing_larger_is() -> None:
    entries = [
        Entry(2**61, COMMAND, bytes(RAFT_ENTRY_BYTES_MAX)),
        Entry(1, COMMAND, bytes(RAFT_BATCH_BYTES - 100)),
    ]
    content = encode(AppendRequest(2**61, 2**61, 2**61, 2**61, 2**61, entries))
    assert len(content) <= RAFT_MESSAGE_BYTES_MAX
    assert decode(content)
    with pytest.raises(Unreadable, match="no message"):
        decode(b"\x05" + bytes(RAFT_MESSAGE_BYTES_MAX))


# Members


def test_members_travel_in_an_entry() -> None:
    assert members_of(members_entry(3, MEMBERS)) == MEMBERS


@pytest.mark.parametrize(("size", "majority"), [(1, 1), (2, 2), (3, 2), (4, 3), (5, 3)])
def test_a_majority_is_more_than_half_of_the_voters(size: int, majority: int) -> None:
    names = [f"n{number}" for number in range(size)]
    members = Members(dict.fromkeys(names, ""), {"learner": ""})
    for count in range(size + 1):
        granted = {*names[:count], "learner", "stranger"}
        assert has_quorum(members, granted) == (count >= majority)
        reached = dict.fromkeys(names[:count], 7)
        assert quorum_value(members, lambda one, reached=reached: reached.get(one, 0)) == (  # type: ignore[misc]
            7 if count >= majority else 0
        )
    assert not has_quorum(Members({}), {"a"})


def ready(node_id: str) -> bool:
    return True


VOTERS = {"a": "a:1", "b": "b:1", "c": "c:1"}


@pytest.mark.parametrize(
    "after",
    [
        Members(VOTERS, {"d": "d:1", "e": "e:1"}),
        Members(VOTERS),
        Members({**VOTERS, "d": "d:1"}),
        Members({"a": "a:1", "b": "b:1"}, {"d": "d:1"}),
        Members({"a": "a:1", "b": "b:1"}, {"d": "d:1", "c": "c:1"}),
        Members({**VOTERS, "a": "elsewhere:1"}, {"d": "d:1"}),
    ],
)
def test_one_member_may_change(after: Members) -> None:
    check_change(MEMBERS, after, ready)


@pytest.mark.parametrize(
    "after",
    [
        MEMBERS,
        Members({}, {"d": "d:1"}),
        Members({"a": "a:1"}, {"d": "d:1"}),
        Members({**VOTERS, "d": "d:1"}, {"e": "e:1"}),
        Members({**VOTERS, "e": "e:1"}, {"d": "d:1"}),
        Members(VOTERS, {"d": "d:1", "a": "a:1"}),
        Members(VOTERS, {"d": "d:1", "": "x"}),
        Members(VOTERS, {"d": "d:1", "x" * 200: "x"}),
    ],
)
def test_more_than_one_may_not(after: Members) -> None:
    with pytest.raises(InvalidArgument):
        check_change(MEMBERS, after, ready)


def test_a_learner_that_is_behind_is_not_promoted() -> None:
    with pytest.raises(InvalidArgument, match="caught up"):
        check_change(MEMBERS, Members({**VOTERS, "d": "d:1"}), lambda one: False)


def test_a_group_has_its_limit() -> None:
    with pytest.raises(InvalidArgument, match="too many"):
        check_members(Members({f"n{number}": "" for number in range(RAFT_MEMBERS_MAX + 1)}))
