"""Records against their topic's schema, at the partition's owner."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from danube.broker.operations import schema_gate
from danube.core.batch.builder import encode
from danube.core.batch.compression import Compression
from danube.core.metadata.commands import (
    ConfigureTopicSchema,
    DeleteSchemaVersion,
    DeleteTopic,
    RegisterSchema,
    TopicDeleted,
    TopicSchema,
    UpdatePolicy,
)
from danube.core.protocol import native as wire
from danube.core.protocol.native import Kind
from danube.errors import PayloadInvalid, SchemaInvalid, TopicNotFound
from danube.schema import kinds
from tests.unit.broker_parts import RecordingSession, RoutedBench, batch

TOPIC = "/default/checked"
NAMED = json.dumps({"type": "object", "required": ["name"]}).encode()
AGED = json.dumps({"type": "object", "required": ["age"]}).encode()


class Gated(RoutedBench):
    """A topic behind the gate: subject ``s`` (id 1) with versions 1 (name) and 2 (age), ``t`` (id 2)."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.session = RecordingSession(7)
        self.proposals.create(TOPIC)
        self.register("s", NAMED, "f1")
        self.register("s", AGED, "f2")
        self.register("t", b"", "string", schema_type="string")

    def register(
        self, subject: str, definition: bytes, fingerprint: str, schema_type: str = "json_schema"
    ) -> None:
        known = self.proposals.state.registry.find(subject)
        command = RegisterSchema(
            subject=subject, after_revision=known.revision if known else 0, schema_type=schema_type,
            definition=definition, fingerprint=fingerprint, created_us=1, compatibility="none",
        )  # fmt: skip
        assert self.proposals.apply(command) is None

    def configure(self, validation: str, validate_payload: bool = False, subject: str = "s") -> None:
        schema = TopicSchema(subject, validation, validate_payload)
        record = self.proposals.apply(ConfigureTopicSchema(topic=TOPIC, schema=schema))
        self.shard.update_policy(record)

    def policy(self, **fields: Any) -> None:
        policy = msgspec.structs.replace(self.proposals.state.topic(TOPIC).policy, **fields)
        self.shard.update_policy(self.proposals.apply(UpdatePolicy(topic=TOPIC, policy=policy)))

    def send(self, *payloads: bytes, **fields: Any) -> Exception | None:
        """Publish one batch; return what refuses it."""
        if 1 not in self.session.producers:
            self.request(self.session, Kind.OPEN_PRODUCER, wire.OpenProducer(TOPIC, "p"), 1)
            self.session.take()
        self.router.received()
        self.publish(self.session, batch(*payloads, **fields))
        self.turn()
        [frame] = self.session.take()
        return frame.error if frame.kind == Kind.ERROR else None

    @property
    def gate(self) -> schema_gate.SchemaGate:
        assert self.shard.metadata is not None
        return self.shard.metadata.gate

    @property
    def stored_count(self) -> int:
        return self.shard.partitions[TOPIC].high_watermark


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Gated]:
    made = Gated(tmp_path)
    yield made
    made.shard.close()


# What a batch names, what is wrong with it (None: nothing), for a topic of subject s.
NAMES = [
    ({}, "schema_missing"),
    ({"schema_version": 1}, "schema_missing"),
    ({"schema_id": 9}, "schema_unknown"),
    ({"schema_id": 2}, "schema_unknown"),
    ({"schema_id": 2, "schema_version": 1}, "schema_unknown"),
    ({"schema_id": 1, "schema_version": 3}, "schema_version_unknown"),
    ({"schema_id": 1}, None),
    ({"schema_id": 1, "schema_version": 1}, None),
    ({"schema_id": 1, "schema_version": 2}, None),
]


@pytest.mark.parametrize("fields, rule", NAMES)
@pytest.mark.parametrize("validation", ["none", "warn", "enforce"])
def test_what_a_batch_names_is_looked_at(
    bench: Gated, validation: str, fields: dict[str, int], rule: str | None
) -> None:
    bench.configure(validation)
    refused = bench.send(b"not json", b"{}", **fields)
    assert (refused is not None) == (validation == "enforce" and rule is not None)
    if refused is not None:
        assert isinstance(refused, PayloadInvalid) and refused.facts["rule"] == rule
        assert refused.hint and "'s'" in str(refused)
    assert bench.counters["schema_rejected"] == (2 if refused is not None else 0)
    assert bench.counters["schema_warnings"] == (2 if validation == "warn" and rule is not None else 0)
    assert bench.stored_count == (0 if refused is not None else 2)


# Keys and payloads of a batch that names version 1 or nothing, and the rule that it breaks (None: none).
TOMBSTONES = [
    ([b"k"], [b""], {"schema_id": 1}, None),
    ([b"k", b"l", None], [b"", b'{"name": 1}', b'{"name": 2}'], {"schema_id": 1, "schema_version": 1}, None),
    ([b"k", b"l"], [b"", b"{}"], {"schema_id": 1, "schema_version": 1}, "payload_invalid"),
    ([b"k", None], [b"", b""], {"schema_id": 1, "schema_version": 1}, "payload_invalid"),
    (None, [b""], {"schema_id": 1}, "payload_invalid"),
    ([b"k", b"l"], [b"", b""], {}, None),
    ([b"k", None], [b"", b""], {}, "schema_missing"),
    ([b"k", b"l"], [b"", b"{}"], {}, "schema_missing"),
]


@pytest.mark.parametrize("keys, payloads, fields, rule", TOMBSTONES)
@pytest.mark.parametrize("compression", [Compression.NONE, Compression.ZSTD])
def test_a_tombstone_of_a_compacted_topic_keeps_to_every_schema(
    bench: Gated, keys: Any, payloads: list[bytes], fields: Any, rule: str | None, compression: Compression
) -> None:
    bench.configure("enforce", validate_payload=True)
    bench.policy(cleanup="compact_delete")
    refused = bench.send(*payloads, keys=keys, compression=compression, **fields)
    assert (refused and refused.facts["rule"]) == rule  # type: ignore[attr-defined]
    assert bench.stored_count == (0 if rule else len(payloads))


def test_an_empty_payload_with_a_key_is_no_tombstone_elsewhere(bench: Gated) -> None:
    bench.configure("enforce", validate_payload=True)
    for cleanup, fields, refused in [
        ("delete", {"schema_id": 1}, True), ("compact", {"schema_id": 1}, False), ("delete", {}, True)
    ]:  # fmt: skip
        bench.policy(cleanup=cleanup)
        assert (bench.send(b"", keys=[b"k"], **fields) is not None) == refused


def test_tombstones_are_not_among_what_is_only_told(bench: Gated) -> None:
    bench.configure("warn", validate_payload=True)
    bench.policy(cleanup="compact")
    assert bench.send(b"", b"{}", keys=[b"k", b"l"], schema_id=1) is None
    assert bench.counters["schema_warnings"] == 1


@pytest.mark.parametrize(
    "version, payloads, wrong",
    [
        ({"schema_version": 1}, [b'{"name": 1}', b'{"name": 2}'], []),
        ({"schema_version": 1}, [b'{"name": 1}', b'{"age": 2}', b"no json"], [1, 2]),
        ({"schema_version": 2}, [b'{"name": 1}', b'{"age": 2}'], [0]),
        ({}, [b'{"name": 1}', b'{"age": 2}'], [0]),
    ],
)
@pytest.mark.parametrize("validation", ["none", "warn", "enforce"])
def test_payloads_keep_to_the_version_that_the_batch_names(
    bench: Gated, validation: str, version: dict[str, int], payloads: list[bytes], wrong: list[int]
) -> None:
    bench.configure(validation, True)
    refused = bench.send(*payloads, schema_id=1, **version)
    assert (refused is not None) == (validation == "enforce" and bool(wrong))
    if refused is not None:
        assert isinstance(refused, PayloadInvalid) and refused.facts["rule"] == "payload_invalid"
        assert refused.facts["index"] == wrong[0] and f"record {wrong[0]} " in str(refused)
        assert bench.counters["schema_rejected"] == len(payloads) and bench.stored_count == 0
    elif validation == "warn":
        assert bench.counters["schema_warnings"] == len(wrong) and bench.stored_count == len(payloads)


def test_payloads_are_left_alone_where_the_topic_does_not_ask(bench: Gated) -> None:
    bench.configure("enforce", False)
    assert bench.send(b"\xff", schema_id=1) is None


def test_a_refused_batch_takes_no_offset_and_its_producer_goes_on(bench: Gated) -> None:
    bench.configure("enforce", True)
    assert bench.send(b"{}", schema_id=1) is not None
    assert bench.send(b'{"age": 1}', schema_id=1) is None
    assert bench.stored_count == 1


def test_compressed_payloads_are_looked_at_too(bench: Gated) -> None:
    bench.configure("enforce", True)
    many = [b'{"age": 1, "filler": "%s"}' % (b"x" * 200)] * 20
    assert bench.send(*many, schema_id=1, compression=Compression.LZ4) is None
    refused = bench.send(*many, b'{"filler": "x"}', schema_id=1, compression=Compression.LZ4)
    assert isinstance(refused, PayloadInvalid) and refused.facts["index"] == 20


def test_plain_types_are_checked_as_they_say(bench: Gated) -> None:
    bench.register("b", b"", "bytes", schema_type="bytes")
    bench.configure("enforce", True, "t")
    assert bench.send("grün".encode(), schema_id=2) is None
    assert isinstance(bench.send(b"\xff", schema_id=2), PayloadInvalid)
    bench.configure("enforce", True, "b")
    assert bench.send(b"\xff", schema_id=3) is None


def others_do(bench: Gated, monkeypatch: pytest.MonkeyPatch, *changes: Callable[[], object]) -> None:
    """What other workers commit, each before the next batch, and this one has not read yet."""
    left = list(changes)
    monkeypatch.setattr(bench.shard.metadata, "read", lambda: left.pop(0)() if left else None)


def test_what_another_worker_committed_holds_for_the_next_batch(
    bench: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bench.send(b"1") is None
    others_do(
        bench,
        monkeypatch,
        lambda: bench.configure("enforce", True),
        lambda: bench.register("s", b"true", "f3"),
        lambda: bench.configure("warn"),
    )
    assert isinstance(bench.send(b"1", schema_id=1, schema_version=3), PayloadInvalid)
    assert bench.send(b"1", schema_id=1, schema_version=3) is None
    assert bench.send(b"1", schema_id=1, schema_version=4) is None
    assert bench.counters["schema_warnings"] == 1


def test_metadata_is_read_once_for_all_that_was_received_together(
    bench: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.send(b"1")
    reads: list[int] = []
    monkeypatch.setattr(bench.shard.metadata, "read", lambda: reads.append(1))
    bench.router.received()
    for _ in range(3):
        bench.publish(bench.session, batch(b"1"))
    assert len(reads) == 1
    bench.router.received()
    bench.publish(bench.session, batch(b"1"))
    assert len(reads) == 2
    bench.proposals.changed = False
    bench.router.received()
    bench.publish(bench.session, batch(b"1"))
    assert len(reads) == 2, "nor where nobody committed anything"
    bench.turn()


def test_the_same_holds_for_what_comes_over_grpc(bench: Gated, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.send(b"1")
    hosted = bench.shard.partitions[TOPIC]
    others_do(bench, monkeypatch, lambda: bench.configure("enforce"))
    bench.router.received()
    with pytest.raises(PayloadInvalid):
        hosted.publish_own(bench.session, 1, 9, encode([b"1"], publish_time_us=1), 1)


def test_a_topic_that_another_worker_deleted_takes_nothing(
    bench: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deletion() -> None:
        [change] = bench.proposals.state.apply(bench.proposals.state.version + 1, DeleteTopic(topic=TOPIC))
        assert isinstance(change, TopicDeleted)
        bench.shard.delete_topic(change.record)

    assert bench.send(b"1") is None
    others_do(bench, monkeypatch, deletion)
    bench.router.received()
    bench.publish(bench.session, batch(b"1"))
    errors = [frame.error for frame in bench.session.take()]
    assert errors and all(isinstance(error, TopicNotFound) for error in errors)
    bench.turn()


def test_a_deleted_version_is_unknown(bench: Gated) -> None:
    bench.configure("enforce", True)
    assert bench.send(b'{"name": 1}', schema_id=1, schema_version=1) is None
    bench.proposals.apply(DeleteSchemaVersion(subject="s", version=1))
    refused = bench.send(b'{"name": 1}', schema_id=1, schema_version=1)
    assert isinstance(refused, PayloadInvalid) and refused.facts["rule"] == "schema_version_unknown"


def test_a_validator_is_built_once_and_the_least_used_goes_first(
    bench: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[bytes] = []
    real = kinds.validator

    def counting(definition: Any) -> kinds.Validator:
        built.append(definition.text)
        return real(definition)

    monkeypatch.setattr(kinds, "validator", counting)
    monkeypatch.setattr(schema_gate, "SCHEMA_VALIDATORS_MAX", 2)
    bench.configure("warn", True)
    bench.register("s", b"true", "f3")
    for version in (1, 2, 1, 2, 1, 3, 1, 2):
        assert bench.send(b"{}", schema_id=1, schema_version=version) is None
    assert built == [NAMED, AGED, b"true", AGED]


@pytest.mark.parametrize("validation", ["warn", "enforce"])
def test_a_version_that_cannot_be_used_is_no_crash(
    bench: Gated, monkeypatch: pytest.MonkeyPatch, validation: str
) -> None:
    def broken(definition: Any) -> kinds.Validator:
        raise SchemaInvalid("it does not compile here")

    monkeypatch.setattr(kinds, "validator", broken)
    bench.configure(validation, True)
    refused = bench.send(b"{}", schema_id=1)
    assert (refused is not None) == (validation == "enforce")
    if refused is not None:
        assert refused.facts["rule"] == "schema_unusable" and "does not compile" in str(refused)


def test_warnings_are_told_within_limits(bench: Gated, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []

    class Events:
        def limited(self, event: str, /, **facts: Any) -> None:
            told.append(facts)

    monkeypatch.setattr(schema_gate, "_log", Events())
    bench.configure("warn", True)
    assert bench.send(b"{}", b"[]", b'{"age": 1}', schema_id=1) is None
    [facts] = told
    assert facts["source"] == TOPIC and facts["records"] == 2 and "record 0" in facts["example"]


def test_a_topic_without_a_schema_does_not_meet_the_gate(
    bench: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    def met(*_: object) -> None:
        raise AssertionError("the gate was asked")

    monkeypatch.setattr(bench.gate, "check", met)
    assert bench.send(b"1", schema_id=99) is None
