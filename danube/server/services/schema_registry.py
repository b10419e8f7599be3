"""danube_schema.SchemaRegistry: subjects, their versions, and the schema that a topic keeps to.

``schema_definition`` in responses is the text that was registered, byte for byte.  All versions of a
subject have one ``schema_id``.  Times are seconds since 1970.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from danube.errors import InvalidArgument, SchemaInvalid, SchemaNotFound, WrongState
from danube.ids import check_label
from danube.limits import KIB, SCHEMA_DEFINITION_BYTES_MAX
from danube.schema.model import Compatibility, SchemaType, ValidationPolicy, Violation
from danube.server.proto import SchemaRegistry_pb2 as pb
from danube.server.services.calls import BrokerCalls, Call, filled, whole_list
from danube.server.services.naming import find, required

_MICROSECONDS: Final = 1_000_000
_REMARKS_BYTES_MAX: Final = 16 * KIB
_TAGS_MAX: Final = 100
_SUBJECTS: Final = "ListSubjects tells the subjects"


class SchemaRegistry:
    """Served on the data port and on the admin port alike."""

    def __init__(self, broker: BrokerCalls) -> None:
        self._broker = broker

    async def register_schema(
        self, request: pb.RegisterSchemaRequest, call: Call
    ) -> pb.RegisterSchemaResponse:
        _check_remarks(request)
        made = await self._broker.ask(
            "schema.register",
            subject=_subject(request.subject),
            schema_type=str(SchemaType.parse(request.schema_type)),
            definition=_definition(request.schema_definition),
            description=request.description,
            created_by=request.created_by,
            tags=list(request.tags),
        )
        return filled(pb.RegisterSchemaResponse, made)

    async def get_schema(self, request: pb.GetSchemaRequest, call: Call) -> pb.GetSchemaResponse:
        version = request.version if request.HasField("version") else None
        if version == 0:
            raise SchemaNotFound(
                "there is no version 0", hint="versions count from 1; leave it out for the latest"
            )
        found = await self._broker.ask("schema.get", schema_id=request.schema_id, version=version or 0)
        return _schema(found)

    async def get_latest_schema(self, request: pb.GetLatestSchemaRequest, call: Call) -> pb.GetSchemaResponse:
        return _schema(await self._broker.ask("schema.get", subject=_subject(request.subject)))

    async def list_versions(self, request: pb.ListVersionsRequest, call: Call) -> pb.ListVersionsResponse:
        found = await whole_list(self._broker.ask, "schema.versions", subject=_subject(request.subject))
        return pb.ListVersionsResponse(
            versions=[
                filled(pb.SchemaVersionInfo, one, created_at=one["created_us"] // _MICROSECONDS)
                for one in found
            ]
        )

    async def check_compatibility(
        self, request: pb.CheckCompatibilityRequest, call: Call
    ) -> pb.CheckCompatibilityResponse:
        """Incompatible is an answer, not an error; each error text names path, rule and reason."""
        mode = ""
        if request.HasField("compatibility_mode"):
            mode = str(Compatibility.parse(request.compatibility_mode))
        verdict = await self._broker.ask(
            "schema.check",
            subject=_subject(request.subject),
            schema_type=str(SchemaType.parse(request.schema_type)),
            definition=_definition(request.new_schema_definition),
            compatibility=mode,
        )
        violations = msgspec.convert(verdict["violations"], list[Violation])
        return pb.CheckCompatibilityResponse(
            is_compatible=verdict["is_compatible"], errors=[str(one) for one in violations]
        )

    async def delete_schema_version(
        self, request: pb.DeleteSchemaVersionRequest, call: Call
    ) -> pb.DeleteSchemaVersionResponse:
        subject = _subject(request.subject)
        if request.version == 0:
            raise InvalidArgument("the request has no version", hint="versions count from 1")
        await self._broker.ask("schema.delete_version", subject=subject, version=request.version)
        message = f"Deleted version {request.version} of subject '{subject}'"
        return pb.DeleteSchemaVersionResponse(success=True, message=message)

    async def set_compatibility_mode(
        self, request: pb.SetCompatibilityModeRequest, call: Call
    ) -> pb.SetCompatibilityModeResponse:
        subject = _subject(request.subject)
        mode = str(Compatibility.parse(request.compatibility_mode))
        await self._broker.ask("schema.set_compatibility", subject=subject, compatibility=mode)
        message = f"Compatibility mode of subject '{subject}' is {mode}"
        return pb.SetCompatibilityModeResponse(success=True, message=message)

    async def configure_topic_schema(
        self, request: pb.ConfigureTopicSchemaRequest, call: Call
    ) -> pb.ConfigureTopicSchemaResponse:
        subject = _subject(request.schema_subject)
        topic, policy = await self._configure(request, subject=subject)
        message = f"Topic {topic} keeps to subject '{subject}' with policy {policy}"
        return pb.ConfigureTopicSchemaResponse(success=True, message=message)

    async def update_topic_validation_policy(
        self, request: pb.UpdateTopicValidationPolicyRequest, call: Call
    ) -> pb.UpdateTopicValidationPolicyResponse:
        try:
            topic, policy = await self._configure(request)
        except WrongState as error:  # the topic has no subject
            hint = "set the subject first, with ConfigureTopicSchema"
            raise WrongState(error.what, why=error.why, hint=hint) from None
        message = f"Topic {topic} has policy {policy}"
        return pb.UpdateTopicValidationPolicyResponse(success=True, message=message)

    async def _configure(self, request: Any, **subject: str) -> tuple[str, str]:
        """Set a topic's policy, and its subject if given; return the names of the topic and the policy."""
        policy = str(ValidationPolicy.parse(request.validation_policy))
        topic = find(self._broker, request.topic_name).record.topic
        check = request.enable_payload_validation
        await self._broker.ask(
            "schema.configure_topic", topic=topic, validation=policy, validate_payload=check, **subject
        )
        return topic, policy

    async def get_topic_schema_config(
        self, request: pb.GetTopicSchemaConfigRequest, call: Call
    ) -> pb.GetTopicSchemaConfigResponse:
        topic = find(self._broker, request.topic_name).record.topic
        present = await self._broker.ask("schema.topic", topic=topic)
        return pb.GetTopicSchemaConfigResponse(
            schema_subject=present["subject"],
            validation_policy=present["validation"],
            enable_payload_validation=present["validate_payload"],
            schema_id=present["schema_id"],
        )

    async def list_subjects(self, request: pb.ListSubjectsRequest, call: Call) -> pb.ListSubjectsResponse:
        sight = self._broker.sight(call)
        found = await whole_list(self._broker.ask, "schema.subjects")
        found = [row for row in found if sight.subject(row["subject"])]
        return pb.ListSubjectsResponse(
            subjects=[
                filled(pb.SubjectSummary, one, compatibility_mode=one["compatibility"]) for one in found
            ]
        )


def _subject(text: str) -> str:
    required(text, "subject", _SUBJECTS)
    check_label(text, "subject")
    return text


def _definition(text: bytes) -> bytes:
    if len(text) > SCHEMA_DEFINITION_BYTES_MAX:
        raise SchemaInvalid(
            f"the definition has {len(text)} bytes",
            why=f"the most is {SCHEMA_DEFINITION_BYTES_MAX}",
            hint="split the schema into several subjects",
        )
    return text


def _check_remarks(request: pb.RegisterSchemaRequest) -> None:
    """Refuse remarks that are too long: they are stored beside the definition."""
    texts = [request.description, request.created_by, *request.tags]
    size_bytes = sum(len(text.encode()) for text in texts)
    if size_bytes > _REMARKS_BYTES_MAX or len(request.tags) > _TAGS_MAX:
        raise InvalidArgument(
            "description, created_by and tags are too long",
            why=f"together they have {size_bytes} bytes and {len(request.tags)} tags",
            hint=f"keep to {_REMARKS_BYTES_MAX} bytes and {_TAGS_MAX} tags",
        )


def _schema(entry: dict[str, Any]) -> pb.GetSchemaResponse:
    return filled(
        pb.GetSchemaResponse,
        entry,
        schema_definition=entry["definition"],
        created_at=entry["created_us"] // _MICROSECONDS,
        compatibility_mode=entry["compatibility"],
    )
