"""SchemaRegistry: each row of the contract's table, with its conditions and statuses."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from danube.core.metadata.commands import CreateTopic
from danube.core.partition.policy import TopicPolicy
from danube.errors import DanubeError
from danube.limits import SCHEMA_DEFINITION_BYTES_MAX
from danube.server.proto import SchemaRegistry_pb2 as pb
from danube.server.services.schema_registry import SchemaRegistry
from tests.fakes.broker_calls import FakeBrokerCalls, FakeCall


class Registry:
    """The servicer with topics /default/t and /default/p (2 partitions)."""

    def __init__(self) -> None:
        self.broker = FakeBrokerCalls()
        for name, partitions in (("/default/t", 0), ("/default/p", 2)):
            made = CreateTopic(topic=name, partitions=partitions, policy=TopicPolicy(), created_us=1)
            self.broker.commit(made)
        self._servicer = SchemaRegistry(self.broker)

    def __call__(self, method: str, request: Any) -> Any:
        return asyncio.run(getattr(self._servicer, method)(request, FakeCall()))

    def refused(self, method: str, request: Any) -> tuple[str, str]:
        with pytest.raises(DanubeError) as caught:
            self(method, request)
        return caught.value.status, f"{caught.value} {caught.value.hint}"

    def register(self, subject: str = "orders", definition: bytes = b"{}", **fields: Any) -> Any:
        fields.setdefault("schema_type", "json_schema")
        request = pb.RegisterSchemaRequest(subject=subject, schema_definition=definition, **fields)
        return self("register_schema", request)


@pytest.fixture
def registry() -> Registry:
    return Registry()


def test_register_new_subject_next_version_and_known_text(registry: Registry) -> None:
    first = registry.register(definition=b"1")
    second = registry.register(definition=b"22")
    again = registry.register(definition=b"1")
    other = registry.register("other", b"1")
    assert (first.version, second.version, again.version) == (1, 2, 1)
    assert (first.is_new_version, second.is_new_version, again.is_new_version) == (True, True, False)
    assert first.schema_id == second.schema_id == again.schema_id != other.schema_id
    assert first.fingerprint.startswith("sha256:")
    assert first.fingerprint != second.fingerprint


@pytest.mark.parametrize(
    ("given", "canonical"),
    [
        ("bytes", "bytes"),
        ("STRING", "string"),
        ("number", "number"),
        ("int64", "number"),
        ("int", "number"),
        ("Float", "number"),
        ("double", "number"),
        ("AVRO", "avro"),
        ("json_schema", "json_schema"),
        ("json", "json_schema"),
        ("protobuf", "protobuf"),
        ("Proto", "protobuf"),
    ],
)
def test_every_type_and_alias_in_any_case(registry: Registry, given: str, canonical: str) -> None:
    registry.register(schema_type=given)
    assert registry("get_latest_schema", pb.GetLatestSchemaRequest(subject="orders")).schema_type == canonical


@pytest.mark.parametrize(
    ("fields", "status", "says"),
    [
        ({"subject": ""}, "INVALID_ARGUMENT", "no subject"),
        ({"subject": "a\nb"}, "INVALID_ARGUMENT", "subject name"),
        ({"schema_type": "xml"}, "INVALID_ARGUMENT", "use one of bytes"),
        ({"schema_type": ""}, "INVALID_ARGUMENT", "use one of bytes"),
        ({"definition": b"unparsable"}, "INVALID_ARGUMENT", "does not parse"),
        (
            {"definition": b"x" * (SCHEMA_DEFINITION_BYTES_MAX + 1)},
            "INVALID_ARGUMENT",
            str(SCHEMA_DEFINITION_BYTES_MAX),
        ),
        ({"definition": b"incompatible"}, "FAILED_PRECONDITION", "required field"),
        ({"description": "x" * 20_000}, "INVALID_ARGUMENT", "too long"),
        ({"tags": ["x"] * 101}, "INVALID_ARGUMENT", "101 tags"),
    ],
)
def test_registrations_that_are_refused(
    registry: Registry, fields: dict[str, Any], status: str, says: str
) -> None:
    fields = {"subject": "orders", "schema_type": "avro", "definition": b"{}", **fields}
    definition = fields.pop("definition")
    got, text = registry.refused(
        "register_schema", pb.RegisterSchemaRequest(schema_definition=definition, **fields)
    )
    assert got == status
    assert says in text


def test_the_definition_comes_back_byte_for_byte_with_everything_else(registry: Registry) -> None:
    definition = b'{ "type":"record" }\r\n'
    made = registry.register(
        definition=definition, schema_type="avro", description="what", created_by="me", tags=["a", "b"]
    )
    found = registry("get_latest_schema", pb.GetLatestSchemaRequest(subject="orders"))
    assert found == pb.GetSchemaResponse(
        schema_id=made.schema_id,
        version=1,
        subject="orders",
        schema_type="avro",
        schema_definition=definition,
        description="what",
        created_at=1_700_000_000,
        created_by="me",
        tags=["a", "b"],
        fingerprint=made.fingerprint,
        compatibility_mode="backward",
    )


def test_get_schema_by_id_with_and_without_a_version(registry: Registry) -> None:
    schema_id = registry.register(definition=b"1").schema_id
    registry.register(definition=b"22")
    assert registry("get_schema", pb.GetSchemaRequest(schema_id=schema_id)).schema_definition == b"22"
    first = registry("get_schema", pb.GetSchemaRequest(schema_id=schema_id, version=1))
    assert first.schema_definition == b"1"


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("get_schema", pb.GetSchemaRequest(schema_id=0)),
        ("get_schema", pb.GetSchemaRequest(schema_id=2**64 - 1)),
        ("get_schema", pb.GetSchemaRequest(schema_id=1, version=7)),
        ("get_schema", pb.GetSchemaRequest(schema_id=1, version=0)),
        ("get_latest_schema", pb.GetLatestSchemaRequest(subject="none")),
        ("list_versions", pb.ListVersionsRequest(subject="none")),
        (
            "check_compatibility",
            pb.CheckCompatibilityRequest(subject="none", schema_type="avro", new_schema_definition=b"{}"),
        ),
        (
            "set_compatibility_mode",
            pb.SetCompatibilityModeRequest(subject="none", compatibility_mode="FULL"),
        ),
        ("delete_schema_version", pb.DeleteSchemaVersionRequest(subject="none", version=1)),
        ("delete_schema_version", pb.DeleteSchemaVersionRequest(subject="orders", version=9)),
        (
            "configure_topic_schema",
            pb.ConfigureTopicSchemaRequest(
                topic_name="/default/t", schema_subject="none", validation_policy="WARN"
            ),
        ),
        (
            "configure_topic_schema",
            pb.ConfigureTopicSchemaRequest(
                topic_name="/default/none", schema_subject="orders", validation_policy="WARN"
            ),
        ),
        (
            "update_topic_validation_policy",
            pb.UpdateTopicValidationPolicyRequest(topic_name="/default/none", validation_policy="WARN"),
        ),
        ("get_topic_schema_config", pb.GetTopicSchemaConfigRequest(topic_name="/default/none")),
    ],
)
def test_what_is_missing_is_not_found(registry: Registry, method: str, request_: Any) -> None:
    registry.register()
    assert registry.refused(method, request_)[0] == "NOT_FOUND"


@pytest.mark.parametrize(
    ("method", "request_", "says"),
    [
        ("get_latest_schema", pb.GetLatestSchemaRequest(), "ListSubjects"),
        ("list_versions", pb.ListVersionsRequest(), "ListSubjects"),
        (
            "check_compatibility",
            pb.CheckCompatibilityRequest(subject="orders", schema_type="avro", compatibility_mode="sideways"),
            "use one of none",
        ),
        (
            "check_compatibility",
            pb.CheckCompatibilityRequest(subject="orders", schema_type="xml"),
            "use one of bytes",
        ),
        (
            "check_compatibility",
            pb.CheckCompatibilityRequest(
                subject="orders", schema_type="avro", new_schema_definition=b"unparsable"
            ),
            "parse",
        ),
        (
            "set_compatibility_mode",
            pb.SetCompatibilityModeRequest(subject="orders", compatibility_mode=""),
            "use one of none",
        ),
        ("delete_schema_version", pb.DeleteSchemaVersionRequest(subject="orders"), "count from 1"),
        (
            "configure_topic_schema",
            pb.ConfigureTopicSchemaRequest(topic_name="/default/t", schema_subject="orders"),
            "none, warn or enforce",
        ),
        (
            "configure_topic_schema",
            pb.ConfigureTopicSchemaRequest(topic_name="/default/t", validation_policy="warn"),
            "no subject",
        ),
        (
            "configure_topic_schema",
            pb.ConfigureTopicSchemaRequest(topic_name="t", schema_subject="orders", validation_policy="warn"),
            "/namespace/name",
        ),
        (
            "update_topic_validation_policy",
            pb.UpdateTopicValidationPolicyRequest(topic_name="/default/t", validation_policy="loud"),
            "none, warn or enforce",
        ),
        (
            "update_topic_validation_policy",
            pb.UpdateTopicValidationPolicyRequest(topic_name="t", validation_policy="warn"),
            "/namespace/name",
        ),
        ("get_topic_schema_config", pb.GetTopicSchemaConfigRequest(topic_name="t"), "/namespace/name"),
    ],
)
def test_what_cannot_be_meant_is_told(registry: Registry, method: str, request_: Any, says: str) -> None:
    registry.register()
    status, text = registry.refused(method, request_)
    assert status == "INVALID_ARGUMENT"
    assert says in text


def test_versions_are_listed(registry: Registry) -> None:
    registry.register(definition=b"1", created_by="me", description="one")
    registry.register(definition=b"22")
    found = registry("list_versions", pb.ListVersionsRequest(subject="orders")).versions
    assert [one.version for one in found] == [1, 2]
    assert (found[0].created_by, found[0].description) == ("me", "one")
    assert (found[0].created_at, found[0].schema_id) == (1_700_000_000, 1)
    assert found[0].fingerprint != found[1].fingerprint


def test_incompatible_is_an_answer_that_says_which_rule_broke_where(registry: Registry) -> None:
    registry.register()
    request = pb.CheckCompatibilityRequest(
        subject="orders", schema_type="json", new_schema_definition=b"incompatible"
    )
    found = registry("check_compatibility", request)
    assert not found.is_compatible
    assert list(found.errors) == ["/required/0: required_removed: id is gone"]
    request.compatibility_mode = "NONE"
    assert registry("check_compatibility", request) == pb.CheckCompatibilityResponse(is_compatible=True)


@pytest.mark.parametrize("mode", ["none", "BACKWARD", "Forward", "full", "FULL_TRANSITIVE"])
def test_modes_in_any_case_are_answered_in_lower_case(registry: Registry, mode: str) -> None:
    registry.register()
    request = pb.SetCompatibilityModeRequest(subject="orders", compatibility_mode=mode)
    assert registry("set_compatibility_mode", request).success
    found = registry("get_latest_schema", pb.GetLatestSchemaRequest(subject="orders"))
    assert found.compatibility_mode == mode.lower()


def test_a_deleted_version_is_gone(registry: Registry) -> None:
    registry.register(definition=b"1")
    registry.register(definition=b"22")
    request = pb.DeleteSchemaVersionRequest(subject="orders", version=1)
    assert registry("delete_schema_version", request).success
    found = registry("list_versions", pb.ListVersionsRequest(subject="orders")).versions
    assert [one.version for one in found] == [2]
    assert registry.refused("delete_schema_version", request)[0] == "NOT_FOUND"


@pytest.mark.parametrize("topic", ["/default/t", "/default/p", "/default/p-part-1"])
def test_a_topic_is_configured_under_any_of_its_names(registry: Registry, topic: str) -> None:
    schema_id = registry.register().schema_id
    before = registry("get_topic_schema_config", pb.GetTopicSchemaConfigRequest(topic_name=topic))
    assert before == pb.GetTopicSchemaConfigResponse(validation_policy="warn")
    registry(
        "configure_topic_schema",
        pb.ConfigureTopicSchemaRequest(
            topic_name=topic,
            schema_subject="orders",
            validation_policy="ENFORCE",
            enable_payload_validation=True,
        ),
    )
    found = registry("get_topic_schema_config", pb.GetTopicSchemaConfigRequest(topic_name=topic))
    assert found == pb.GetTopicSchemaConfigResponse(
        schema_subject="orders",
        validation_policy="enforce",
        enable_payload_validation=True,
        schema_id=schema_id,
    )
    registry(
        "update_topic_validation_policy",
        pb.UpdateTopicValidationPolicyRequest(topic_name=topic, validation_policy="None"),
    )
    found = registry("get_topic_schema_config", pb.GetTopicSchemaConfigRequest(topic_name=topic))
    assert (found.schema_subject, found.validation_policy) == ("orders", "none")
    assert not found.enable_payload_validation


def test_a_policy_without_a_subject_is_refused(registry: Registry) -> None:
    request = pb.UpdateTopicValidationPolicyRequest(topic_name="/default/t", validation_policy="warn")
    status, text = registry.refused("update_topic_validation_policy", request)
    assert status == "FAILED_PRECONDITION"
    assert "ConfigureTopicSchema" in text


def test_one_summary_for_each_subject(registry: Registry) -> None:
    assert not registry("list_subjects", pb.ListSubjectsRequest()).subjects
    registry.register(definition=b"1", tags=["x"])
    registry.register(definition=b"22", tags=["y"])
    registry.register("other", schema_type="avro")
    first, other = registry("list_subjects", pb.ListSubjectsRequest()).subjects
    assert (first.subject, first.latest_version, first.schema_type) == ("orders", 2, "json_schema")
    assert (first.compatibility_mode, first.schema_id, list(first.tags)) == ("backward", 1, ["y"])
    assert (other.subject, other.schema_type) == ("other", "avro")
