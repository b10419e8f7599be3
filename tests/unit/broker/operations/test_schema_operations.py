"""Operations on the registry, as a client asks them of any worker."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from danube.broker.operations import examinations as examinations_module
from danube.broker.operations import schemas as schema_operations
from danube.broker.operations.examinations import Examinations
from danube.core.metadata.commands import DeleteSubject, SetCompatibility
from danube.core.protocol import native as wire
from danube.core.protocol.native import Kind
from danube.errors import (
    CallerError,
    Conflict,
    DanubeError,
    InvalidArgument,
    InvalidName,
    OperationTimeout,
    Overloaded,
    SchemaIncompatible,
    SchemaInvalid,
    SchemaNotFound,
    StorageFailed,
    TopicNotFound,
    WrongState,
)
from danube.schema.model import Checks, Compatibility, Definition, SchemaType
from danube.schema.verdict import Outcome, Request
from tests.answers import fitting
from tests.unit.broker_parts import RecordingSession, RoutedBench

TOPIC = "/default/of-schemas"


def avro(*fields: tuple[str, Any], **defaults: Any) -> bytes:
    described = [
        {"name": name, "type": kind, **({"default": defaults[name]} if name in defaults else {})}
        for name, kind in fields
    ]
    return json.dumps({"type": "record", "name": "R", "fields": described}).encode()


ONE = avro(("a", "int"))
TWO = avro(("a", "int"), ("b", "int"), b=0)
BROKEN = avro(("a", "string"))


class Registry(RoutedBench):
    def __init__(self, root: Path, **options: Any) -> None:
        super().__init__(root, **options)
        self.session = RecordingSession(7)
        self.proposals.create(TOPIC)

    def ask(self, op: str, **args: Any) -> Any:  # type: ignore[override]
        """The value, all steps done; raises what came instead."""
        self.request(self.session, Kind.ADMIN, wire.Admin(op, "", args))
        while self.examiner.step() or self.proposals.waiting:
            self.proposals.step()
        return fitting(op, self.answered())

    def answered(self) -> Any:
        [frame] = self.session.take()
        if frame.kind == Kind.ERROR:
            raise frame.error
        return wire.decode_result(frame.body)

    def register(self, definition: bytes = ONE, subject: str = "s", kind: str = "avro", **args: Any) -> Any:
        return self.ask("schema.register", subject=subject, schema_type=kind, definition=definition, **args)

    def refused(self, op: str, **args: Any) -> DanubeError:
        with pytest.raises(DanubeError) as refused:
            self.ask(op, **args)
        return refused.value


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Registry]:
    made = Registry(tmp_path)
    yield made
    made.shard.close()


def test_a_schema_is_registered_found_and_listed(bench: Registry) -> None:
    first = bench.register(description="orders", created_by="me", tags=["x", "y"])
    assert (first["schema_id"], first["version"], first["is_new_version"]) == (1, 1, True)
    assert first["fingerprint"].startswith("sha256:") and first["subject"] == "s"
    assert bench.metadata_changes == 1
    second = bench.register(TWO)
    assert (second["schema_id"], second["version"], second["is_new_version"]) == (1, 2, True)
    found = bench.ask("schema.get", subject="s")
    assert found["definition"] == TWO and found["version"] == 2 and found["compatibility"] == "backward"
    by_id = bench.ask("schema.get", schema_id=1, version=1)
    assert by_id["definition"] == ONE and by_id["tags"] == ["x", "y"] and by_id["created_by"] == "me"
    assert by_id["description"] == "orders" and by_id["created_us"] > 0 and by_id["schema_type"] == "avro"
    versions = bench.ask("schema.versions", subject="s")
    assert [one["version"] for one in versions] == [1, 2] and "definition" not in versions[0]
    bench.register(b"", "plain", "Int64")
    assert bench.ask("schema.subjects") == [
        {"subject": "plain", "schema_id": 2, "schema_type": "number", "latest_version": 1,
         "compatibility": "backward", "tags": []},
        {"subject": "s", "schema_id": 1, "schema_type": "avro", "latest_version": 2,
         "compatibility": "backward", "tags": []},
    ]  # fmt: skip


def test_what_is_there_already_is_the_answer(bench: Registry) -> None:
    first = bench.register()
    bench.register(TWO)
    seen = len(bench.examiner.seen)
    again = bench.register()
    assert again == {**first, "is_new_version": False}
    assert len(bench.examiner.seen) == seen, "the same bytes are not examined again"
    spaced = json.dumps(json.loads(ONE), indent=4).encode()
    assert bench.register(spaced) == {**first, "is_new_version": False}, "the fingerprint is the same"
    assert bench.register(b"ignored", "p", "string")["is_new_version"]
    assert not bench.register(b"other", "p", "string")["is_new_version"]
    assert bench.ask("schema.get", subject="p")["definition"] == b""


def test_an_incompatible_version_is_refused_with_every_reason(bench: Registry) -> None:
    bench.register()
    error = bench.refused("schema.register", subject="s", schema_type="avro", definition=BROKEN)
    assert isinstance(error, SchemaIncompatible) and "'s'" in error.what and "backward" in error.what
    [violation] = json.loads(error.facts["violations"])
    assert violation["version"] == 1 and violation["rule"] in str(error) and violation["message"]
    assert bench.ask("schema.get", subject="s")["version"] == 1


def test_the_mode_says_what_is_compared(bench: Registry) -> None:
    bench.register()
    bench.register(TWO)
    third = avro(("a", "int"), ("b", "int"), ("c", "int"), b=0, c=0)
    for mode, versions in (
        ("none", []), ("backward", [2]), ("forward", [2]), ("full", [2]), ("backward_transitive", [1, 2]),
        ("forward_transitive", [1, 2]), ("full_transitive", [1, 2]),
    ):  # fmt: skip
        bench.ask("schema.set_compatibility", subject="s", compatibility=mode.upper())
        bench.request(
            bench.session, Kind.ADMIN,
            wire.Admin("schema.register", "", {"subject": "s", "schema_type": "avro", "definition": third}),
        )  # fmt: skip
        [(request, _)] = bench.examiner.waiting
        bench.examiner.waiting.clear()
        assert [older.version for older in request.against] == versions, mode
        assert request.compatibility == mode and request.checks is Checks.STRICT
        assert all(older.definition.fingerprint for older in request.against)


def test_the_configured_mode_and_checks_are_used(tmp_path: Path) -> None:
    bench = Registry(tmp_path, default_compatibility=Compatibility.NONE, compatibility_checks=Checks.UPSTREAM)
    bench.register()
    assert bench.register(BROKEN)["version"] == 2, "nothing is compared"
    assert bench.ask("schema.get", subject="s")["compatibility"] == "none"
    assert {request.checks for request in bench.examiner.seen} == {Checks.UPSTREAM}
    bench.shard.close()


def test_a_registration_that_was_overtaken_looks_again(bench: Registry) -> None:
    bench.register()
    args = {"subject": "s", "schema_type": "avro", "definition": TWO}
    bench.request(bench.session, Kind.ADMIN, wire.Admin("schema.register", "", args))
    bench.examiner.step()
    bench.proposals.apply(SetCompatibility(subject="s", compatibility="full"))
    bench.proposals.step()
    assert bench.session.take() == [], "it is examined again under the new mode"
    bench.examiner.step()
    assert bench.examiner.seen[-1].compatibility == "full"
    bench.proposals.step()
    assert bench.answered()["version"] == 2


def test_a_registration_does_not_look_again_for_ever(bench: Registry) -> None:
    bench.register()
    args = {"subject": "s", "schema_type": "avro", "definition": TWO}
    bench.request(bench.session, Kind.ADMIN, wire.Admin("schema.register", "", args))
    for attempt in range(schema_operations.ATTEMPTS_MAX):
        assert bench.examiner.step() == 1
        mode = "full" if attempt % 2 else "forward"
        bench.proposals.apply(SetCompatibility(subject="s", compatibility=mode))
        bench.proposals.step()
    with pytest.raises(Conflict, match="meanwhile"):
        bench.answered()


def test_the_same_definition_from_two_workers_is_one_version(bench: Registry) -> None:
    bench.register()
    args = {"subject": "s", "schema_type": "avro", "definition": TWO}
    for _ in range(2):
        bench.request(bench.session, Kind.ADMIN, wire.Admin("schema.register", "", args))
    bench.examiner.step()
    bench.proposals.step()
    values = [wire.decode_result(frame.body) for frame in bench.session.take()]
    assert [value["version"] for value in values] == [2, 2]
    assert bench.ask("schema.get", subject="s")["version"] == 2


def test_a_version_that_was_deleted_at_once_is_not_claimed(bench: Registry) -> None:
    args = {"subject": "s", "schema_type": "avro", "definition": ONE}
    bench.request(bench.session, Kind.ADMIN, wire.Admin("schema.register", "", args))
    bench.examiner.step()
    [(command, then)] = bench.proposals.waiting
    bench.proposals.apply(command)
    bench.proposals.apply(DeleteSubject(subject="s"))
    then(None)
    with pytest.raises(SchemaNotFound):
        bench.answered()


@pytest.mark.parametrize("error", [OperationTimeout("slow"), Overloaded("busy"), SchemaInvalid("no")])
def test_what_the_examination_says_is_answered(bench: Registry, error: DanubeError) -> None:
    bench.register()
    for op, more in (
        ("schema.register", {"definition": TWO}), ("schema.check", {"definition": TWO}), ("schema.diff", {})
    ):  # fmt: skip
        args = {"subject": "s", "schema_type": "avro", "old": 1, "new": 1, **more}
        bench.request(bench.session, Kind.ADMIN, wire.Admin(op, "", args))
        bench.examiner.step(error)
        with pytest.raises(type(error)):
            bench.answered()


def test_what_the_log_says_is_answered(bench: Registry) -> None:
    args = {"subject": "s", "schema_type": "avro", "definition": ONE}
    bench.request(bench.session, Kind.ADMIN, wire.Admin("schema.register", "", args))
    bench.examiner.step()
    bench.proposals.step(StorageFailed("no disk"))
    with pytest.raises(StorageFailed):
        bench.answered()
    bench.proposals.refusal = Overloaded("too many")
    bench.request(bench.session, Kind.ADMIN, wire.Admin("schema.register", "", args))
    bench.examiner.step()
    with pytest.raises(Overloaded):
        bench.answered()


def test_a_check_says_all_and_stores_nothing(bench: Registry) -> None:
    bench.register()
    ask = {"subject": "s", "schema_type": "avro"}
    assert bench.ask("schema.check", definition=TWO, **ask) == {"is_compatible": True, "violations": []}
    verdict = bench.ask("schema.check", definition=BROKEN, **ask)
    assert not verdict["is_compatible"]
    assert verdict["violations"][0]["direction"] == "backward" and verdict["violations"][0]["version"] == 1
    assert bench.ask("schema.check", definition=BROKEN, compatibility="None", **ask)["is_compatible"]
    other = bench.ask("schema.check", subject="s", schema_type="string", definition=b"")
    assert other["violations"][0]["rule"] == "type_changed"
    assert bench.ask("schema.get", subject="s")["version"] == 1


def test_a_diff_looks_both_ways(bench: Registry) -> None:
    bench.register()
    bench.ask("schema.set_compatibility", subject="s", compatibility="none")
    bench.register(avro(("a", "int"), ("b", "int")))
    diff = bench.ask("schema.diff", subject="s", old=1, new=2)
    assert (diff["subject"], diff["old"], diff["new"]) == ("s", 1, 2)
    assert diff["backward"] and not diff["forward"]
    turned = bench.ask("schema.diff", subject="s", old=2, new=1)
    assert turned["forward"] and not turned["backward"]


def test_versions_and_subjects_are_deleted(bench: Registry) -> None:
    bench.register()
    bench.register(TWO)
    assert bench.ask("schema.delete_version", subject="s", version=2) == {}
    assert bench.ask("schema.get", subject="s")["version"] == 1
    assert isinstance(bench.refused("schema.delete_version", subject="s", version=2), SchemaNotFound)
    assert bench.ask("schema.delete_version", subject="s", version=1) == {}
    assert bench.ask("schema.subjects")[0]["latest_version"] == 0
    assert isinstance(bench.refused("schema.get", subject="s"), SchemaNotFound)
    assert bench.register(BROKEN)["version"] == 3, "nothing is left to compare with"
    assert bench.ask("schema.delete", subject="s") == {"deleted_versions": [3]}
    assert isinstance(bench.refused("schema.delete", subject="s"), SchemaNotFound)


def test_a_topic_is_configured_step_by_step(bench: Registry) -> None:
    bench.register()
    none = {"topic": TOPIC, "subject": "", "validation": "warn", "validate_payload": False, "schema_id": 0}
    assert bench.ask("schema.topic", topic=TOPIC) == none
    set_up = bench.ask("schema.configure_topic", topic=TOPIC, subject="s")
    assert set_up == {**none, "subject": "s", "schema_id": 1}
    stricter = bench.ask("schema.configure_topic", topic=TOPIC, validation="ENFORCE")
    assert stricter == {**set_up, "validation": "enforce"}
    payload = bench.ask("schema.configure_topic", topic=TOPIC, validate_payload=True)
    assert payload == {**stricter, "validate_payload": True} == bench.ask("schema.topic", topic=TOPIC)
    assert isinstance(bench.refused("schema.delete", subject="s"), WrongState)
    entry = bench.ask("topic", topic=TOPIC)
    assert entry["schema"] == {"subject": "s", "validation": "enforce", "validate_payload": True}
    assert bench.ask("schema.configure_topic", topic=TOPIC, subject="") == none
    assert bench.ask("topic", topic=TOPIC)["schema"] is None
    assert bench.ask("schema.delete", subject="s") == {"deleted_versions": [1]}


@pytest.mark.parametrize(
    "op, args, error",
    [
        ("schema.get", {"subject": "none"}, SchemaNotFound),
        ("schema.get", {"schema_id": 9}, SchemaNotFound),
        ("schema.get", {"subject": "s", "version": 9}, SchemaNotFound),
        ("schema.get", {"subject": "s", "version": -1}, InvalidArgument),
        ("schema.get", {"subject": "s", "version": "1"}, InvalidArgument),
        ("schema.get", {"subject": "s", "version": True}, InvalidArgument),
        ("schema.get", {"subject": 5}, InvalidArgument),
        ("schema.get", {}, InvalidArgument),
        ("schema.versions", {"subject": "none"}, SchemaNotFound),
        ("schema.register", {"subject": "", "schema_type": "avro"}, InvalidName),
        ("schema.register", {"subject": "s", "schema_type": "xml"}, InvalidArgument),
        ("schema.register", {"subject": "s"}, InvalidArgument),
        ("schema.register", {"subject": "s", "schema_type": "avro", "definition": "text"}, InvalidArgument),
        ("schema.register", {"subject": "s", "schema_type": "avro", "definition": b"{"}, SchemaInvalid),
        (
            "schema.register",
            {"subject": "s", "schema_type": "avro", "definition": bytes(300_000)},
            SchemaInvalid,
        ),
        ("schema.register", {"subject": "n", "schema_type": "string", "tags": "x"}, InvalidArgument),
        ("schema.register", {"subject": "n", "schema_type": "string", "tags": [1]}, InvalidArgument),
        (
            "schema.register",
            {"subject": "n", "schema_type": "string", "description": "d" * 5000},
            InvalidArgument,
        ),
        ("schema.check", {"subject": "none", "schema_type": "avro"}, SchemaNotFound),
        ("schema.check", {"subject": "s", "schema_type": "avro", "compatibility": "up"}, InvalidArgument),
        ("schema.diff", {"subject": "s", "old": 1, "new": 7}, SchemaNotFound),
        ("schema.diff", {"subject": "s", "old": 1}, InvalidArgument),
        ("schema.set_compatibility", {"subject": "none", "compatibility": "full"}, SchemaNotFound),
        ("schema.set_compatibility", {"subject": "s", "compatibility": "up"}, InvalidArgument),
        ("schema.delete_version", {"subject": "none", "version": 1}, SchemaNotFound),
        ("schema.configure_topic", {"topic": TOPIC, "subject": "none"}, SchemaNotFound),
        ("schema.configure_topic", {"topic": "/default/none", "subject": "s"}, TopicNotFound),
        ("schema.configure_topic", {"topic": TOPIC, "subject": "s", "validation": "hope"}, InvalidArgument),
        ("schema.configure_topic", {"topic": TOPIC, "subject": "s", "validate_payload": 1}, InvalidArgument),
        ("schema.configure_topic", {"topic": TOPIC, "validation": "enforce"}, WrongState),
        ("schema.configure_topic", {"topic": TOPIC, "subject": "", "validation": "enforce"}, InvalidArgument),
        ("schema.topic", {"topic": "/default/none"}, TopicNotFound),
        ("schema.topic", {"topic": "none"}, InvalidName),
        ("schema.dance", {}, InvalidArgument),
    ],
)
def test_what_cannot_be_done_is_said(
    bench: Registry, op: str, args: dict[str, Any], error: type[CallerError]
) -> None:
    bench.register()
    before = bench.proposals.state.snapshot()
    refused = bench.refused(op, **args)
    assert type(refused) is error, refused
    assert refused.what and bench.proposals.state.snapshot() == before


# -- the threads in front of the children -------------------------------------------------------------


def outcome_of(request: Request) -> Outcome:
    if request.text == b"slow":
        raise OperationTimeout("slow")
    if request.text == b"bug":
        raise ValueError("a bug")
    return Outcome(definition=Definition(schema_type=SchemaType.AVRO, text=request.text, fingerprint="f"))


def test_examinations_come_back_on_the_loop_and_bugs_are_not_hidden() -> None:
    handed: Future[tuple[Any, Any, Any]] = Future()
    examiner = Examinations(lambda *call: handed.set_result(call), outcome_of)
    got: list[Any] = []
    for text, wanted in ((b"{}", Outcome), (b"slow", OperationTimeout)):
        handed = Future()
        examiner.submit(Request(schema_type=SchemaType.AVRO, text=text), got.append)
        function, done, then = handed.result(10)
        assert got == []
        function(done, then)
        assert isinstance(got.pop(), wanted)
    handed = Future()
    examiner.submit(Request(schema_type=SchemaType.AVRO, text=b"bug"), got.append)
    function, done, then = handed.result(10)
    with pytest.raises(ValueError, match="a bug"):
        function(done, then)
    examiner.close()
    examiner.close()


def test_examinations_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examinations_module, "EXAMINATIONS_WAITING_MAX", 1)
    handed: Future[tuple[Any, Any, Any]] = Future()
    examiner = Examinations(lambda *call: handed.set_result(call), outcome_of)
    request = Request(schema_type=SchemaType.AVRO, text=b"{}")
    examiner.submit(request, lambda outcome: None)
    with pytest.raises(Overloaded):
        examiner.submit(request, lambda outcome: None)
    function, done, then = handed.result(10)
    function(done, then)
    handed = Future()
    examiner.submit(request, lambda outcome: None)
    handed.result(10)
    examiner.close()


def test_a_stranger_is_examined_in_a_child() -> None:
    outcome = examinations_module.in_child(Request(schema_type=SchemaType.AVRO, text=ONE))
    assert outcome.definition.fingerprint.startswith("sha256:") and outcome.violations == []
