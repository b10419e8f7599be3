"""The schema registry in the metadata machine: ids, versions, revisions, use by topics, and limits."""

from __future__ import annotations

import pytest

from danube.core.metadata import schemas as registry_module
from danube.core.metadata.commands import (
    Command,
    ConfigureTopicSchema,
    CreateTopic,
    DeleteSchemaVersion,
    DeleteSubject,
    DeleteTopic,
    RegisterSchema,
    SetCompatibility,
    TopicSchema,
    TopicUpdated,
    encode_command,
)
from danube.core.metadata.machine import Metadata
from danube.core.metadata.schemas import Registry, Subject
from danube.core.partition.policy import TopicPolicy
from danube.errors import (
    CallerError,
    InvalidArgument,
    InvalidName,
    LimitExceeded,
    SchemaInvalid,
    SchemaNotFound,
    TopicNotFound,
    WrongState,
)
from danube.limits import SCHEMA_DEFINITION_BYTES_MAX
from danube.schema.model import Compatibility, SchemaType, ValidationPolicy

TOPIC = "/default/orders"


def register(subject: str, after: int = 0, fingerprint: str = "f1", **fields: object) -> RegisterSchema:
    given = {
        "schema_type": "avro", "definition": b"{}", "created_us": 5, "compatibility": "backward", **fields
    }  # fmt: skip
    return RegisterSchema(subject=subject, after_revision=after, fingerprint=fingerprint, **given)  # type: ignore[arg-type]


def propose(machine: Metadata, command: Command) -> list[object]:
    return list(machine.apply(machine.version + 1, command)) if machine.check(command) else []


def machine_with(*commands: Command) -> Metadata:
    machine = Metadata()
    for command in commands:
        propose(machine, command)
    return machine


def add(machine: Metadata, subject: str, fingerprint: str, **fields: object) -> Subject:
    known = machine.registry.find(subject)
    after = known.revision if known is not None else 0
    propose(machine, register(subject, after, fingerprint, **fields))
    return machine.registry.subject(subject)


def with_topic(machine: Metadata, subject: str = "s") -> None:
    propose(machine, CreateTopic(topic=TOPIC, policy=TopicPolicy(), created_us=1))
    propose(machine, ConfigureTopicSchema(topic=TOPIC, schema=TopicSchema(subject)))


def test_the_words_are_those_of_the_schema_types() -> None:
    assert tuple(SchemaType) == registry_module.SCHEMA_TYPES
    assert tuple(Compatibility) == registry_module.COMPATIBILITIES
    assert [str(one) for one in ValidationPolicy] == ["none", "warn", "enforce"]


def test_versions_of_a_subject_share_an_id_and_count_up() -> None:
    machine = Metadata()
    first = add(machine, "a", "f1", description="one", tags=("x",), created_by="me")
    again = add(machine, "a", "f2")
    other = add(machine, "b", "f1")
    assert (first.schema_id, again.schema_id, other.schema_id) == (1, 1, 2)
    assert [version.number for version in again.versions] == [1, 2]
    assert again.version().number == 2 and again.version(1).description == "one"
    assert again.version(1).tags == ("x",) and again.version(1).created_by == "me"
    assert machine.registry.with_id(1) is again and machine.registry.with_id(3) is None
    assert [subject.subject for subject in machine.registry.subjects()] == ["a", "b"]


def test_the_same_type_and_fingerprint_are_the_version_that_is_there() -> None:
    machine = Metadata()
    add(machine, "a", "f1")
    index = machine.version
    assert add(machine, "a", "f1", created_us=99).last_version == 1
    assert machine.version == index, "nothing was stored"
    assert machine.apply(index + 1, register("a", 0, "f1")) == [], "and nothing is refused"
    assert add(machine, "a", "f1", schema_type="json_schema").last_version == 2


def test_a_subject_that_changed_meanwhile_refuses() -> None:
    machine = Metadata()
    before = add(machine, "a", "f1").revision
    for change in (
        register("a", before, "f2"),
        SetCompatibility(subject="a", compatibility="none"),
        DeleteSchemaVersion(subject="a", version=2),
    ):
        present = machine.registry.subject("a").revision
        propose(machine, change)
        late = register("a", present, "f9")
        with pytest.raises(WrongState):
            machine.check(late)
        with pytest.raises(WrongState):
            machine.apply(machine.version + 1, late)
    with pytest.raises(WrongState):
        machine.check(register("a", 0, "f9"))
    with pytest.raises(WrongState):
        machine.check(register("new", 7, "f9"))
    # A subject of the same name that was made anew is another one.
    revision = machine.registry.subject("a").revision
    propose(machine, DeleteSubject(subject="a"))
    add(machine, "a", "f1")
    with pytest.raises(WrongState):
        machine.check(register("a", revision, "f3"))


def test_numbers_and_ids_are_never_used_again() -> None:
    machine = Metadata()
    for name in ("f1", "f2", "f3"):
        add(machine, "a", name)
    propose(machine, DeleteSchemaVersion(subject="a", version=3))
    subject = machine.registry.subject("a")
    assert subject.version().number == 2 and subject.find(3) is None
    with pytest.raises(SchemaNotFound):
        subject.version(3)
    assert add(machine, "a", "f3").version().number == 4
    propose(machine, DeleteSchemaVersion(subject="a", version=1))
    assert [version.number for version in machine.registry.subject("a").versions] == [2, 4]
    propose(machine, DeleteSubject(subject="a"))
    assert machine.registry.find("a") is None and machine.registry.with_id(1) is None
    assert add(machine, "a", "f1").schema_id == 2
    assert Metadata.restore(machine.snapshot()).registry.next_schema_id == 3


def test_a_subject_can_lose_all_its_versions_while_nobody_uses_it() -> None:
    machine = Metadata()
    add(machine, "a", "f1")
    propose(machine, DeleteSchemaVersion(subject="a", version=1))
    subject = machine.registry.subject("a")
    assert subject.latest is None
    with pytest.raises(SchemaNotFound, match="no version left"):
        subject.version()
    assert add(machine, "a", "f2").version().number == 2


def test_what_a_topic_is_configured_with_stays() -> None:
    machine = Metadata()
    add(machine, "s", "f1")
    with_topic(machine)
    for command in (DeleteSubject(subject="s"), DeleteSchemaVersion(subject="s", version=1)):
        with pytest.raises(WrongState, match="in use"):
            machine.check(command)
        with pytest.raises(WrongState, match="in use"):
            machine.apply(machine.version + 1, command)
    add(machine, "s", "f2")
    assert machine.check(DeleteSchemaVersion(subject="s", version=1)), "another version stays"
    copy = machine.copy()
    propose(copy, ConfigureTopicSchema(topic=TOPIC))
    assert copy.check(DeleteSubject(subject="s"))
    restored = Metadata.restore(machine.snapshot())
    with pytest.raises(WrongState):
        restored.check(DeleteSubject(subject="s"))
    propose(restored, DeleteTopic(topic=TOPIC))
    assert restored.check(DeleteSubject(subject="s")), "a deleted topic uses nothing"


def test_a_recreated_topic_inherits_no_schema() -> None:
    machine = Metadata()
    add(machine, "s", "f1")
    with_topic(machine)
    assert machine.topic(TOPIC).schema == TopicSchema("s", "warn", False)
    propose(machine, DeleteTopic(topic=TOPIC))
    propose(machine, CreateTopic(topic=TOPIC, policy=TopicPolicy(), created_us=1))
    assert machine.topic(TOPIC).schema is None and machine.registry.topic_count("s") == 0


def test_configuring_a_topic_is_told_as_a_change_of_it() -> None:
    machine = Metadata()
    add(machine, "s", "f1")
    before = machine.copy()
    with_topic(machine)
    wanted = ConfigureTopicSchema(topic=TOPIC, schema=TopicSchema("s", "enforce", True))
    assert propose(machine, wanted) == [TopicUpdated(machine.topic(TOPIC))]
    assert propose(machine, wanted) == [], "it is so already"
    middle = machine.copy()
    propose(machine, ConfigureTopicSchema(topic=TOPIC))
    assert machine.changes_since(middle) == [TopicUpdated(machine.topic(TOPIC))]
    assert len(machine.changes_since(before)) == 1


@pytest.mark.parametrize(
    "command, error",
    [
        (ConfigureTopicSchema(topic=TOPIC, schema=TopicSchema("none")), SchemaNotFound),
        (ConfigureTopicSchema(topic=TOPIC, schema=TopicSchema("s", "hope")), InvalidArgument),
        (ConfigureTopicSchema(topic="/default/none", schema=TopicSchema("s")), TopicNotFound),
        (register("", 0), InvalidName),
        (register("x" * 257, 0), InvalidName),
        (register("a\nb", 0), InvalidName),
        (register("a", 0, schema_type="xml"), InvalidArgument),
        (register("a", 0, compatibility="sometimes"), InvalidArgument),
        (register("a", 0, fingerprint=""), InvalidArgument),
        (register("a", 0, fingerprint="f" * 129), InvalidArgument),
        (register("a", 0, definition=bytes(SCHEMA_DEFINITION_BYTES_MAX + 1)), SchemaInvalid),
        (register("a", 0, compiled=bytes(640 * 1024 + 1)), SchemaInvalid),
        (register("a", 0, description="d" * 4097), InvalidArgument),
        (register("a", 0, created_by="d" * 257), InvalidArgument),
        (register("a", 0, tags=("t",) * 33), InvalidArgument),
        (register("a", 0, tags=("",)), InvalidName),
        (SetCompatibility(subject="s", compatibility="sideways"), InvalidArgument),
        (SetCompatibility(subject="none", compatibility="full"), SchemaNotFound),
        (SetCompatibility(subject="\x00", compatibility="full"), InvalidName),
        (DeleteSchemaVersion(subject="none", version=1), SchemaNotFound),
        (DeleteSchemaVersion(subject="s", version=2), SchemaNotFound),
        (DeleteSchemaVersion(subject="s", version=0), SchemaNotFound),
        (DeleteSubject(subject="none"), SchemaNotFound),
    ],
)
def test_what_is_refused_changes_nothing(command: Command, error: type[CallerError]) -> None:
    machine = Metadata()
    add(machine, "s", "f1")
    propose(machine, CreateTopic(topic=TOPIC, policy=TopicPolicy(), created_us=1))
    before = machine.snapshot()
    with pytest.raises(error):
        machine.check(command)
    assert machine.snapshot() == before


def test_a_missing_subject_is_answered_with_one_alike() -> None:
    machine = Metadata()
    add(machine, "user-events", "f1")
    with pytest.raises(SchemaNotFound) as refused:
        machine.registry.subject("User-Event")
    assert refused.value.hint == "did you mean user-events?"


def test_a_mode_is_set_once() -> None:
    machine = Metadata()
    assert add(machine, "s", "f1").compatibility == "backward"
    assert machine.check(SetCompatibility(subject="s", compatibility="full"))
    propose(machine, SetCompatibility(subject="s", compatibility="full"))
    assert machine.registry.subject("s").compatibility == "full"
    assert not machine.check(SetCompatibility(subject="s", compatibility="full"))


def test_the_number_of_everything_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Metadata()
    add(machine, "a", "f1")
    monkeypatch.setattr(registry_module, "SUBJECTS_MAX", 1)
    monkeypatch.setattr(registry_module, "SCHEMA_VERSIONS_MAX", 2)
    with pytest.raises(LimitExceeded, match="subjects"):
        add(machine, "b", "f1")
    add(machine, "a", "f2")
    with pytest.raises(LimitExceeded, match="versions"):
        add(machine, "a", "f3")
    revision = machine.registry.subject("a").revision
    tight = register("a", revision, "f3", definition=bytes(1000))
    monkeypatch.setattr(registry_module, "SCHEMA_VERSIONS_MAX", 3)
    monkeypatch.setattr(registry_module, "REGISTRY_BYTES_MAX", machine.registry.size_bytes + 1000)
    with pytest.raises(LimitExceeded, match="schemas"):
        machine.check(tight)
    machine.apply(machine.version + 1, tight)
    assert machine.registry.subject("a").last_version == 3, "what was agreed stays applicable"


def test_sizes_follow_what_is_there() -> None:
    machine = Metadata()
    empty = machine.registry.size_bytes
    add(machine, "a", "f1", definition=bytes(100))
    one = machine.registry.size_bytes
    add(machine, "a", "f2", definition=bytes(1000), description="d" * 10)
    assert machine.registry.size_bytes - one > 1000
    propose(machine, DeleteSchemaVersion(subject="a", version=2))
    assert machine.registry.size_bytes == one > empty == 0
    assert Metadata.restore(machine.snapshot()).registry.size_bytes == one
    propose(machine, DeleteSubject(subject="a"))
    assert machine.registry.size_bytes == 0


def test_the_largest_definition_is_one_command_and_a_larger_one_is_none() -> None:
    most = register(
        "s" * 256, 0, definition=bytes(256 * 1024), compiled=bytes(640 * 1024), description="d" * 4096,
        tags=tuple(f"{number:02d}" + "t" * 254 for number in range(32)),
    )  # fmt: skip
    assert len(machine_with(most).registry.subjects()) == 1
    assert len(encode_command(most)) > 900_000
    with pytest.raises(LimitExceeded):
        encode_command(register("s", 0, definition=bytes(1 << 20)))


def test_a_copy_goes_its_own_way() -> None:
    registry = Registry()
    registry.apply(1, register("a"))
    copy = registry.copy()
    copy.apply(2, register("b"))
    copy.apply(3, DeleteSubject(subject="a"))
    assert len(registry.subjects()) == 1 and registry.with_id(1) and registry.next_schema_id == 2
    assert [subject.subject for subject in copy.subjects()] == ["b"]
