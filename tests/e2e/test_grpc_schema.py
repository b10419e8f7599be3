"""The schema registry over gRPC, from registration to what a publish may hold; it survives restarts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from io import BytesIO
from typing import Any

import fastavro
import pytest

from danube import sync
from danube.errors import PayloadInvalid
from danube.server.proto import SchemaRegistry_pb2
from tests.broker_process import BrokerProcess
from tests.e2e.grpc_parts import INVALID, NOT_FOUND, PRECONDITION, DanubeCalls, pb
from tests.grpc_client import GrpcError

sr = SchemaRegistry_pb2
TOPIC = "/default/orders"
ORDER = {"type": "record", "name": "Order", "fields": [{"name": "id", "type": "long"}]}
WIDER = {**ORDER, "fields": [*ORDER["fields"], {"name": "note", "type": "string", "default": ""}]}  # type: ignore[misc]
BROKEN = {**ORDER, "fields": [*ORDER["fields"], {"name": "must", "type": "string"}]}  # type: ignore[misc]
PERSON = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
PROTO = 'syntax = "proto3"; message Order { int64 id = 1; repeated string tags = 2; }'


def register(calls: DanubeCalls, subject: str, definition: Any, kind: str = "avro", **fields: Any) -> Any:
    text = definition if isinstance(definition, bytes) else json.dumps(definition).encode()
    request = sr.RegisterSchemaRequest(subject=subject, schema_type=kind, schema_definition=text, **fields)
    return calls.schema("RegisterSchema", request)


def refused(code: int, words: str, call: Callable[..., Any], *args: Any, **fields: Any) -> None:
    with pytest.raises(GrpcError) as caught:
        call(*args, **fields)
    assert caught.value.code == code and words in caught.value.message, caught.value


def test_subjects_versions_and_compatibility(broker: Callable[..., BrokerProcess]) -> None:
    process = broker(workers=2)
    with DanubeCalls(process.grpc_address) as calls:
        first = register(calls, "orders-value", ORDER, description="d", created_by="me", tags=["a", "b"])
        assert (first.schema_id, first.version, first.is_new_version) == (1, 1, True)
        assert first.fingerprint.startswith("sha256:")
        again = register(calls, "orders-value", json.dumps(ORDER, indent=4).encode(), "AVRO")
        assert (again.schema_id, again.version, again.is_new_version) == (1, 1, False)
        assert again.fingerprint == first.fingerprint
        refused(PRECONDITION, "field_without_default", register, calls, "orders-value", BROKEN)
        second = register(calls, "orders-value", WIDER)
        assert (second.schema_id, second.version) == (1, 2)
        other = register(calls, "people", PERSON, "json")
        assert (other.schema_id, other.version) == (2, 1)
        assert register(calls, "raw", b"", "bytes").fingerprint == "bytes"
        register(calls, "proto", PROTO.encode(), "protobuf")
        check = sr.CheckCompatibilityRequest(
            subject="orders-value", schema_type="avro", new_schema_definition=json.dumps(BROKEN).encode()
        )
        verdict = calls.schema("CheckCompatibility", check)
        assert not verdict.is_compatible and "field_without_default" in verdict.errors[0]
        check.compatibility_mode = "FORWARD"
        assert calls.schema("CheckCompatibility", check).is_compatible
        mode = sr.SetCompatibilityModeRequest(subject="people", compatibility_mode="None")
        assert calls.schema("SetCompatibilityMode", mode).success
    process.kill()  # the registry is on disk, or it is nowhere
    process.start()
    with DanubeCalls(process.admin_address) as calls:  # the administration port serves it too
        found = calls.schema("GetSchema", sr.GetSchemaRequest(schema_id=1))
        assert (found.version, found.subject, found.schema_type) == (2, "orders-value", "avro")
        assert json.loads(found.schema_definition) == WIDER, "the text that was registered"
        old = calls.schema("GetSchema", sr.GetSchemaRequest(schema_id=1, version=1))
        assert (old.description, old.created_by, list(old.tags)) == ("d", "me", ["a", "b"])
        assert (
            calls.schema("GetLatestSchema", sr.GetLatestSchemaRequest(subject="people")).compatibility_mode
            == "none"
        )
        versions = calls.schema("ListVersions", sr.ListVersionsRequest(subject="orders-value")).versions
        assert [(one.version, one.schema_id) for one in versions] == [(1, 1), (2, 1)]
        subjects = calls.schema("ListSubjects", sr.ListSubjectsRequest()).subjects
        assert sorted(one.subject for one in subjects) == ["orders-value", "people", "proto", "raw"]
        delete = sr.DeleteSchemaVersionRequest(subject="orders-value", version=2)
        assert calls.schema("DeleteSchemaVersion", delete).success
        latest = calls.schema("GetLatestSchema", sr.GetLatestSchemaRequest(subject="orders-value"))
        assert latest.version == 1, "the latest is one that is there"
        assert register(calls, "orders-value", WIDER).version == 3, "a number is used once"


def test_what_is_not_there_and_what_cannot_be(broker: Callable[..., BrokerProcess]) -> None:
    process = broker(workers=1)
    with DanubeCalls(process.grpc_address) as calls:
        refused(NOT_FOUND, "", calls.schema, "GetSchema", sr.GetSchemaRequest(schema_id=77))
        refused(NOT_FOUND, "", calls.schema, "GetLatestSchema", sr.GetLatestSchemaRequest(subject="none"))
        refused(NOT_FOUND, "", calls.schema, "ListVersions", sr.ListVersionsRequest(subject="none"))
        refused(INVALID, "", register, calls, "s", b"{", "avro")
        refused(INVALID, "", register, calls, "s", b"message {", "protobuf")
        refused(INVALID, "schema type", register, calls, "s", b"{}", "xml")
        refused(INVALID, "", register, calls, "", ORDER)
        remote = {"$ref": "http://127.0.0.1:1/schema.json"}
        refused(INVALID, "", register, calls, "s", remote, "json_schema")
        began = time.monotonic()
        bomb = {
            "$defs": {f"a{n}": {"allOf": [{"$ref": f"#/$defs/a{n + 1}"}] * 2} for n in range(40)},
            "$ref": "#/$defs/a0",
        }
        bomb["$defs"]["a40"] = {"type": "string"}  # type: ignore[index]
        refused(INVALID, "", register, calls, "s", bomb, "json_schema")
        refused(INVALID, "", register, calls, "s", b'{"type":"array","items":' * 20_000, "avro")
        assert time.monotonic() - began < 20
        assert not calls.schema("ListSubjects", sr.ListSubjectsRequest()).subjects


def configure(calls: DanubeCalls, subject: str, policy: str, topic: str = TOPIC) -> None:
    request = sr.ConfigureTopicSchemaRequest(
        topic_name=topic, schema_subject=subject, validation_policy=policy, enable_payload_validation=True
    )
    assert calls.schema("ConfigureTopicSchema", request).success


def avro(definition: dict[str, Any], value: dict[str, Any]) -> bytes:
    out = BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(definition), value)
    return out.getvalue()


def test_a_topic_enforces_its_schema_for_all_clients(broker: Callable[..., BrokerProcess]) -> None:
    process = broker(workers=2)
    with DanubeCalls(process.grpc_address) as calls, sync.connect(process.address) as native:
        register(calls, "orders-value", ORDER)
        register(calls, "orders-value", WIDER)
        register(calls, "people", PERSON, "json_schema")
        reference = pb.SchemaReference(subject="orders-value", use_latest=True)
        number = calls.create(TOPIC, schema_ref=reference)
        config = calls.schema("GetTopicSchemaConfig", sr.GetTopicSchemaConfigRequest(topic_name=TOPIC))
        assert (config.schema_subject, config.validation_policy, config.schema_id) == (
            "orders-value",
            "warn",
            1,
        )
        calls.send(TOPIC, number, b'{"json": "on an Avro topic"}', schema_id=1)
        refused(
            PRECONDITION, "people", calls.create, TOPIC, "q", schema_ref=pb.SchemaReference(subject="people")
        )
        configure(calls, "orders-value", "ENFORCE")
        good, bad = avro(ORDER, {"id": 7}), b"\xff" * 30
        refused(INVALID, "", calls.send, TOPIC, number, good)
        refused(INVALID, "", calls.send, TOPIC, number, good, schema_id=2)
        refused(INVALID, "", calls.send, TOPIC, number, good, schema_id=99)
        refused(INVALID, "", calls.send, TOPIC, number, bad, schema_id=1)
        refused(INVALID, "", calls.send, TOPIC, number, good, schema_id=1)  # the latest wants a note
        calls.send(TOPIC, number, good, schema_id=1, schema_version=1)
        calls.send(TOPIC, number, avro(WIDER, {"id": 7, "note": "n"}), schema_id=1, schema_version=2)
        started = [
            calls.start(
                "/danube.ProducerService/SendMessage",
                calls.message(
                    TOPIC, number, bad if n == 4 else good, request_id=n, schema_id=1, schema_version=1
                ),
                pb.MessageResponse,
            )
            for n in range(8)
        ]
        codes = [call.wait_ended().code for call in started]
        assert codes == [INVALID if n == 4 else 0 for n in range(8)], "one bad message fails alone"
        with native.producer(TOPIC) as producer, pytest.raises(PayloadInvalid):
            producer.send(good)
        configure(calls, "orders-value", "warn")
        with native.producer(TOPIC) as producer:
            producer.send(b"anything")
    process.kill()
    process.start()
    with DanubeCalls(process.grpc_address) as calls:
        config = calls.schema("GetTopicSchemaConfig", sr.GetTopicSchemaConfigRequest(topic_name=TOPIC))
        assert (config.schema_subject, config.validation_policy, config.enable_payload_validation) == (
            "orders-value", "warn", True,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "definition", "good", "bad"),
    [
        ("string", b"", b"text", b"\xff\xfe"),
        ("number", b"", bytes(8), bytes(3)),
        ("bytes", b"", b"\xff", None),
        ("json_schema", json.dumps(PERSON).encode(), b'{"age": 3}', b'{"age": "three"}'),
        ("protobuf", PROTO.encode(), b"\x08\x05\x12\x01a", b"\x08"),
    ],
)
def test_payloads_of_every_type(
    shared_broker: Callable[..., BrokerProcess],
    topic: str,
    kind: str,
    definition: bytes,
    good: bytes,
    bad: bytes | None,
) -> None:
    process = shared_broker()
    with DanubeCalls(process.grpc_address) as calls:
        number = calls.create(topic)
        schema_id = register(calls, kind, definition, kind).schema_id
        configure(calls, kind, "enforce", topic)
        calls.send(topic, number, good, schema_id=schema_id)
        if bad is not None:
            refused(INVALID, "", calls.send, topic, number, bad, schema_id=schema_id)
