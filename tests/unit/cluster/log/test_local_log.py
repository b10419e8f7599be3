"""The local metadata log: what is answered is durable, shared, and the same for every reader."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from danube.cluster.log import local_log, log_file
from danube.cluster.log.local_log import LocalLog
from danube.core.metadata.commands import (
    Command,
    ConfigureTopicSchema,
    CreateNamespace,
    CreateTopic,
    DeleteNamespace,
    DeleteTopic,
    KnowConsumer,
    KnownConsumer,
    NamespaceCreated,
    PutRole,
    RegisterSchema,
    Role,
    SetSubscriptionSettings,
    SubscriptionSettings,
    TopicCreated,
    TopicDeleted,
    TopicRecord,
    TopicSchema,
    TopicUpdated,
    UpdatePolicy,
)
from danube.core.metadata.ports import Consensus
from danube.core.partition.policy import FailurePolicy, TopicPolicy
from danube.errors import (
    ClosedError,
    Conflict,
    Damage,
    InvalidName,
    InvariantBroken,
    LimitExceeded,
    NotFound,
    OperationTimeout,
    Overloaded,
    StorageIncompatible,
    TopicExists,
    TopicNotFound,
)
from danube.limits import METADATA_COMMANDS_PER_ENTRY_MAX


def create(name: str, ensure: bool = False, policy: TopicPolicy | None = None) -> CreateTopic:
    return CreateTopic(topic=f"/default/{name}", policy=policy or TopicPolicy(), created_us=7, ensure=ensure)


def names(log: LocalLog) -> list[str]:
    return [record.topic.removeprefix("/default/") for record in log.state.topics()]


def test_what_was_proposed_is_there_after_opening_again(tmp_path: Path) -> None:
    with LocalLog(tmp_path / "metadata") as log:
        consensus: Consensus = log
        record = consensus.propose(create("a"))
        assert record == TopicRecord("/default/a", 1, 0, TopicPolicy(), 7)
        consensus.propose(CreateNamespace(namespace="team"))
        policy = TopicPolicy(durability="fsync")
        assert log.propose(UpdatePolicy(topic="/default/a", policy=policy)).policy == policy
        log.propose(create("b"))
        assert log.propose(DeleteTopic(topic="/default/b")).topic_id == 2
        snapshot = log.state.snapshot()
    with LocalLog(tmp_path / "metadata", create=False) as log:
        assert log.state.snapshot() == snapshot
        assert log.version == 5
        assert log.refresh() == [], "what was there when it was opened is state, not change"
        log.propose(DeleteNamespace(namespace="team"))
        assert log.propose(create("b")).topic_id == 3


def test_files_and_directory_are_private(tmp_path: Path) -> None:
    with LocalLog(tmp_path / "deep" / "metadata"):
        directory = tmp_path / "deep" / "metadata"
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert {stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()} == {0o600}


def test_a_missing_log_is_not_made_unless_asked(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        LocalLog(tmp_path / "metadata", create=False)
    assert not (tmp_path / "metadata").exists()


def test_a_refused_command_is_not_stored(tmp_path: Path) -> None:
    with LocalLog(tmp_path) as log:
        log.propose(create("a"))
        size = (tmp_path / "metadata.log").stat().st_size
        with pytest.raises(TopicExists):
            log.propose(create("a"))
        with pytest.raises(TopicNotFound):
            log.propose(DeleteTopic(topic="/default/b"))
        assert log.propose(create("a", ensure=True)).topic_id == 1
        policy = TopicPolicy(failure=FailurePolicy(poison="dead_letter", dead_letter_topic="x" * 20_000))
        with pytest.raises(LimitExceeded):
            log.propose(create("large", policy=policy))
        assert (tmp_path / "metadata.log").stat().st_size == size
        assert log.version == 1


def test_many_are_made_durable_with_one_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalLog(tmp_path) as log:
        syncs: list[int] = []
        sync = os.fdatasync
        monkeypatch.setattr(os, "fdatasync", lambda descriptor: (syncs.append(1), sync(descriptor)))
        deletion = DeleteTopic(topic="/default/a")
        commands = [create("a"), create("a"), create("a", ensure=True), deletion, create("a")]
        first, refused, ensured, deleted, second = log.propose_many(commands)
        assert len(syncs) == 1
        assert isinstance(refused, TopicExists)
        assert first == ensured == deleted
        assert isinstance(second, TopicRecord) and second.topic_id == 2
        assert log.propose_many([]) == []
        size = METADATA_COMMANDS_PER_ENTRY_MAX * 2 + 1
        assert len(log.propose_many([create(f"n{number}") for number in range(size)])) == size
        assert len(syncs) == 4
        state = log.state.snapshot()
    with LocalLog(tmp_path) as log:
        assert log.state.snapshot() == state


def test_every_change_is_told_once_to_everyone_in_order(tmp_path: Path) -> None:
    with LocalLog(tmp_path) as one, LocalLog(tmp_path) as two:
        a = one.propose(create("a"))
        assert two.refresh() == [TopicCreated(a)]
        two.propose(CreateNamespace(namespace="team"))
        b = two.propose(create("b"))
        updated = one.propose(UpdatePolicy(topic="/default/a", policy=TopicPolicy(retention_ms=1)))
        expected = [NamespaceCreated("team"), TopicCreated(b), TopicUpdated(updated)]
        assert one.refresh() == [TopicCreated(a), *expected]
        assert two.refresh() == expected
        assert one.refresh() == two.refresh() == []
        assert one.state.snapshot() == two.state.snapshot()


def test_nothing_new_costs_one_system_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalLog(tmp_path) as log:
        log.propose(create("a"))
        log.refresh()
        monkeypatch.setattr(os, "pread", None)
        assert log.refresh() == []


def test_changes_that_nobody_takes_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_log, "_CHANGES_WAITING_MAX", 2)
    with LocalLog(tmp_path) as log:
        for name in "abc":
            log.propose(create(name))
        with pytest.raises(Overloaded):
            log.propose(create("d"))
        log.refresh()
        log.propose(create("d"))


def test_a_grown_log_becomes_a_snapshot_and_everyone_changes_over(tmp_path: Path) -> None:
    with (
        LocalLog(tmp_path, compact_bytes_min=2_000) as one,
        LocalLog(tmp_path, compact_bytes_min=2_000) as two,
        LocalLog(tmp_path) as three,
    ):
        kept = one.propose(create("kept"))
        three.refresh()
        for number in range(60):
            one.propose(create(f"n{number}"))
            two.propose(UpdatePolicy(topic="/default/kept", policy=TopicPolicy(retention_ms=number)))
            two.propose(DeleteTopic(topic=f"/default/n{number}"))
        assert one.compaction_count + two.compaction_count > 3
        assert (tmp_path / "metadata.log").stat().st_size < 20_000
        changes = three.refresh()
        assert changes and {type(change) for change in changes} <= {TopicCreated, TopicDeleted, TopicUpdated}
        one.refresh()
        assert one.state.snapshot() == two.state.snapshot() == three.state.snapshot()
        assert names(three) == ["kept"] and three.state.topic("/default/kept").topic_id == kept.topic_id
        assert three.propose(create("next")).topic_id == 62
        assert not (tmp_path / "metadata.new").exists()


def test_a_reader_that_slept_through_compactions_is_told_what_changed(tmp_path: Path) -> None:
    with LocalLog(tmp_path, compact_bytes_min=500) as writer, LocalLog(tmp_path) as reader:
        a, b = writer.propose_many([create("a"), create("b")])
        assert reader.refresh() == [TopicCreated(a), TopicCreated(b)]
        for number in range(20):
            writer.propose(create("c"))
            if number < 19:
                writer.propose(DeleteTopic(topic="/default/c"))
        writer.propose(DeleteTopic(topic="/default/a"))
        writer.propose(create("a"))
        assert writer.compaction_count > 1
        told = reader.refresh()
        assert TopicDeleted(a) in told and TopicCreated(writer.state.topic("/default/a")) in told
        assert TopicCreated(writer.state.topic("/default/c")) in told
        assert reader.state.snapshot() == writer.state.snapshot()


def test_a_held_lock_is_waited_for_and_then_named(tmp_path: Path) -> None:
    with LocalLog(tmp_path) as holder, LocalLog(tmp_path, lock_timeout_s=0.02) as other:
        with holder._locked(), pytest.raises(OperationTimeout):
            other.propose(create("a"))
        other.propose(create("a"))


def test_a_forked_child_must_open_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalLog(tmp_path) as log:
        monkeypatch.setattr(os, "getpid", lambda: -1)
        with pytest.raises(InvariantBroken):
            log.propose(create("a"))


def test_a_closed_log_refuses(tmp_path: Path) -> None:
    log = LocalLog(tmp_path)
    log.close()
    log.close()
    with pytest.raises(ClosedError):
        log.refresh()
    with pytest.raises(ClosedError):
        log.propose(create("a"))


# The tail, damage and versions


def log_with(directory: Path, *topics: str) -> bytearray:
    with LocalLog(directory) as log:
        for topic in topics:
            log.propose(create(topic))
    return bytearray((directory / "metadata.log").read_bytes())


def entry_positions(content: bytes) -> list[int]:
    """Where the entries of a file begin, and the end."""
    end = int.from_bytes(content[24:32], "little")
    position = (40 + int.from_bytes(content[16:24], "little") + 7) & ~7
    positions = [position]
    while position < end:
        entry = log_file.entry_at(content, position, position)
        assert entry is not None
        position = entry.end
        positions.append(position)
    return positions


def test_a_torn_tail_is_cut_wherever_it_was_torn(tmp_path: Path) -> None:
    content = log_with(tmp_path, "a", "b")
    path = tmp_path / "metadata.log"
    *_, last, end = entry_positions(content)
    content[24:40] = log_file.pack_mark(last)
    for cut in range(last, end):
        path.write_bytes(content[:cut])
        with LocalLog(tmp_path) as log:
            assert names(log) == ["a"]
            assert path.stat().st_size == last
    path.write_bytes(content[: last + 20] + bytes(end - last - 20))
    with LocalLog(tmp_path) as log:
        assert names(log) == ["a"]
        assert log.propose(create("c")).topic_id == 2
    with LocalLog(tmp_path) as log:
        assert names(log) == ["a", "c"]


def test_an_entry_that_is_whole_behind_the_mark_counts(tmp_path: Path) -> None:
    content = log_with(tmp_path, "a", "b", "c")
    path = tmp_path / "metadata.log"
    *_, second, third, _ = entry_positions(content)
    content[24:40] = log_file.pack_mark(second)
    path.write_bytes(content[:-3])
    with LocalLog(tmp_path) as log:
        assert names(log) == ["a", "b"]
        assert path.read_bytes()[24:40] == log_file.pack_mark(third)


def test_readers_do_not_see_what_is_not_committed(tmp_path: Path) -> None:
    with LocalLog(tmp_path) as writer, LocalLog(tmp_path) as reader:
        writer.propose(create("a"))
        reader.refresh()
        with (tmp_path / "metadata.log").open("ab") as file:
            file.write(log_file.pack_entry(2, b"\x90"))
        assert reader.refresh() == []
        assert reader.version == 1


def test_damage_behind_the_mark_is_not_taken_for_a_tear(tmp_path: Path) -> None:
    content = log_with(tmp_path, "a", "b", "c")
    second = entry_positions(content)[1]
    content[24:40] = log_file.pack_mark(second)
    content[second + 30] ^= 1
    assert_damaged(tmp_path, content, second)


def assert_damaged(directory: Path, content: bytes, position: int | None = None) -> None:
    """Opening names the place and leaves the bytes as they are."""
    path = directory / "metadata.log"
    path.write_bytes(content)
    with pytest.raises((Damage, StorageIncompatible)) as caught:
        LocalLog(directory)
    if position is not None:
        assert caught.value.facts["position"] == position
    assert path.read_bytes() == content


def test_every_flipped_bit_is_found_with_its_place_and_nothing_is_touched(tmp_path: Path) -> None:
    content = log_with(tmp_path, "a")
    first, end = entry_positions(content)
    for bit in range(len(content) * 8):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        place = first if first <= bit // 8 < end else None
        assert_damaged(tmp_path, flipped, place)


def test_every_cut_of_what_was_committed_is_found(tmp_path: Path) -> None:
    content = log_with(tmp_path, "a")
    for cut in range(len(content)):
        assert_damaged(tmp_path, content[:cut])


def test_damage_is_found_by_a_log_that_is_open(tmp_path: Path) -> None:
    with LocalLog(tmp_path) as writer, LocalLog(tmp_path) as reader:
        writer.propose(create("a"))
        path = tmp_path / "metadata.log"
        content = bytearray(path.read_bytes())
        content[-1 if content[-1] else -9] ^= 1
        with path.open("r+b") as file:
            file.write(content)
        for use in (reader.refresh, lambda: reader.propose(create("b"))):
            with pytest.raises(Damage):
                use()
        assert path.read_bytes() == content


def test_a_huge_length_allocates_nothing(tmp_path: Path) -> None:
    content = log_with(tmp_path, "a")
    with (tmp_path / "metadata.log").open("r+b") as file:
        file.truncate(1 << 40)
    with LocalLog(tmp_path) as log:
        assert names(log) == ["a"]
    content[16:24] = (1 << 60).to_bytes(8, "little")
    content[4:8] = log_file.crc32c(bytes(content[8:24])).to_bytes(4, "little")
    assert_damaged(tmp_path, content)


def test_an_entry_out_of_order_or_without_effect_is_damage(tmp_path: Path) -> None:
    content = log_with(tmp_path, "a", "b")
    first, second, end = entry_positions(content)
    swapped = content[:first] + content[second:end] + content[first:second]
    assert_damaged(tmp_path, swapped, first)
    twice = content[:end] + log_file.pack_entry(3, content[second + 16 : end].rstrip(b"\0"))
    twice[24:40] = log_file.pack_mark(len(twice))
    assert_damaged(tmp_path, twice, end)


def test_a_newer_format_is_refused_and_not_touched(tmp_path: Path) -> None:
    content = log_with(tmp_path, "a")
    path = tmp_path / "metadata.log"
    newer = b"DNL2" + content[4:]
    path.write_bytes(newer)
    with pytest.raises(StorageIncompatible):
        LocalLog(tmp_path)
    assert path.read_bytes() == newer
    unknown = content + log_file.pack_entry(2, b"\x91\x81\xa4kind\xa3new")
    unknown[24:40] = log_file.pack_mark(len(unknown))
    path.write_bytes(unknown)
    with pytest.raises(StorageIncompatible):
        LocalLog(tmp_path)
    assert path.read_bytes() == unknown


def test_the_file_is_what_its_table_says(tmp_path: Path) -> None:
    content = bytes(log_with(tmp_path, "a"))
    first, end = entry_positions(content)
    assert content[:4] == b"DNL1"
    assert int.from_bytes(content[8:16], "little") == 1
    assert content[40:44] == b"DNM1"
    assert len(content) == end and end % 8 == first % 8 == 0
    assert content[first + 8 : first + 16] == (1).to_bytes(8, "little")


# -- what else the metadata remembers -----------------------------------------------------------------


def schema(subject: str, definition: bytes, after: int = 0, fingerprint: str = "f") -> RegisterSchema:
    return RegisterSchema(
        subject=subject, after_revision=after, schema_type="avro", definition=definition,
        fingerprint=fingerprint, created_us=1, compatibility="backward",
    )  # fmt: skip


def test_everything_that_was_agreed_survives_a_restart_and_a_compaction(tmp_path: Path) -> None:
    with LocalLog(tmp_path, compact_bytes_min=1) as log, LocalLog(tmp_path) as reader:
        record = log.propose(create("a"))
        assert log.propose(schema("s", b"{}")) is None
        wanted = TopicSchema("s", "enforce", True)
        assert log.propose(ConfigureTopicSchema(topic=record.topic, schema=wanted)).schema == wanted
        kept = SubscriptionSettings(FailurePolicy(poison="drop"), 7)
        changed = log.propose(SetSubscriptionSettings(topic=record.topic, subscription="sub", settings=kept))
        one = KnownConsumer(77, record.topic_id, 0, "sub", "shared", "c", ("a*",))
        assert log.propose(KnowConsumer(consumer=one, known_max=10)) is None
        log.propose(PutRole(role=Role("r", ("Lookup",))))
        assert log.compaction_count > 0
        assert changed in [
            change.record for change in reader.refresh() if isinstance(change, TopicCreated | TopicUpdated)
        ]
        assert reader.state.snapshot() == log.state.snapshot()
    with LocalLog(tmp_path, create=False) as again:
        assert again.state.topic(record.topic) == changed and changed.settings == {"sub": kept}
        assert again.state.registry.subject("s").version().definition == b"{}"
        assert again.state.consumers.find(77) == one
        assert [role.name for role in again.state.access.roles()] == ["r"]


def test_an_entry_holds_as_many_commands_as_fit_its_bytes(tmp_path: Path) -> None:
    definition = bytes(256 * 1024)
    commands: list[Command] = [schema(f"s{number}", definition) for number in range(40)]
    commands.insert(20, create("between"))
    with LocalLog(tmp_path, compact_bytes_min=1 << 30) as log:
        results = log.propose_many(commands)
        assert [result for result in results if result is not None] == [log.state.topic("/default/between")]
        assert len(log.state.registry.subjects()) == 40 and log.version == 41
        sizes = [
            len(entry.content)
            for entry in log_file.committed_entries(
                (tmp_path / "metadata.log").read_bytes()[log._entries_start :], log._entries_start, "log"
            )
        ]
    assert len(sizes) == 3 and all(size <= log_file.ENTRY_BYTES_MAX for size in sizes)
    assert sizes[0] > log_file.ENTRY_BYTES_MAX - 300 * 1024, "as many as fit"
    with LocalLog(tmp_path, create=False) as again:
        assert again.version == 41


def test_the_bound_of_an_entry_is_that_of_every_version() -> None:
    assert log_file.ENTRY_BYTES_MAX == 4 * 1024 * 1024 + 8, "readers take a larger one for damage"


def test_only_a_schema_may_be_large(tmp_path: Path) -> None:
    with LocalLog(tmp_path) as log:
        log.propose(schema("s", bytes(256 * 1024)))
        large = PutRole(role=Role("r" * 20_000, ("Lookup",)))
        with pytest.raises(InvalidName):
            log.propose(large)
        wide = TopicPolicy(failure=FailurePolicy(dead_letter_topic="x" * 20_000))
        with pytest.raises(LimitExceeded):
            log.propose(create("wide", policy=wide))
        assert log.version == 1


def test_of_two_that_compared_with_the_same_state_one_must_look_again(tmp_path: Path) -> None:
    with LocalLog(tmp_path) as first, LocalLog(tmp_path) as second:
        first.propose(schema("s", b"1", fingerprint="1"))
        second.refresh()
        seen = second.state.registry.subject("s").revision
        first.propose(schema("s", b"2", seen, "2"))
        with pytest.raises(Conflict):
            second.propose(schema("s", b"3", seen, "3"))
        assert second.propose(schema("s", b"2 again", seen, "2")) is None, "the same is there already"
        assert second.state.registry.subject("s").last_version == 2
        both = second.propose_many(
            [schema("s", b"4", second.version, "4"), schema("s", b"5", second.version, "5")]
        )
        assert both[0] is None and isinstance(both[1], Conflict)
