"""``client.schemas`` of the blocking client: the names of the asyncio one without await."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from danube.client.machine.paging import page_of
from danube.client.machine.schema_plans import (
    Definition,
    RegisteredSchema,
    SchemaCheck,
    SchemaDiff,
    SchemaPlans,
    SchemaVersion,
    SubjectInfo,
    TopicSchema,
)

if TYPE_CHECKING:
    from danube.client.blocking.connection import BlockingConnection
    from danube.client.machine.session import Session


class Schemas:
    """Register, find and compare schemas; bind them to topics."""

    def __init__(self, session: Session, live: Callable[[], BlockingConnection]) -> None:
        self._plans = SchemaPlans(session)
        self._live = live

    def register(
        self,
        subject: str,
        schema_type: str,
        definition: Definition = b"",
        *,
        description: str = "",
        created_by: str = "",
        tags: Sequence[str] = (),
        compatibility: str = "",
    ) -> RegisteredSchema:
        """Register a definition; the same definition again gives the version that holds it.

        ``schema_type`` is bytes, string, number, avro, json_schema or protobuf.  ``compatibility``
        sets the subject's mode first.  Raises SchemaInvalid or SchemaIncompatible (with every
        violation, see :func:`danube.violations_of`).
        """
        plan = self._plans.register(
            subject,
            schema_type,
            definition,
            description=description,
            created_by=created_by,
            tags=list(tags),
            compatibility=compatibility,
        )
        return self._live().run(plan)

    def get(self, subject: str, version: int = 0) -> SchemaVersion:
        """One version (0: the latest) with its definition; raises SchemaNotFound."""
        return self._live().run(self._plans.get(subject, version))

    def get_by_id(self, schema_id: int, version: int = 0) -> SchemaVersion:
        """One version (0: the latest) of the subject with this id; raises SchemaNotFound."""
        return self._live().run(self._plans.get_by_id(schema_id, version))

    def versions(self, subject: str) -> list[SchemaVersion]:
        """All versions of a subject, without their definitions."""
        return self._live().run(self._plans.versions(subject))

    def subjects(self, *, after: str = "", limit: int | None = None, prefix: str = "") -> list[SubjectInfo]:
        """All subjects by name, or those with a ``prefix``, behind ``after``, the first ``limit``."""
        page = page_of(after, limit, prefix)
        return self._live().run(self._plans.subjects(page))

    def check(
        self, subject: str, schema_type: str, definition: Definition, *, compatibility: str = ""
    ) -> SchemaCheck:
        """Whether the definition could be the next version, by the subject's mode or the one given."""
        return self._live().run(self._plans.check(subject, schema_type, definition, compatibility))

    def diff(self, subject: str, old: int = 0, new: int = 0) -> SchemaDiff:
        """Return the differences of two versions, in both directions (0: the latest and the one before)."""
        return self._live().run(self._plans.diff(subject, old, new))

    def set_compatibility(self, subject: str, compatibility: str) -> str:
        """Set none, backward, forward, full or one of ``*_transitive``; returns the mode that holds."""
        return self._live().run(self._plans.set_compatibility(subject, compatibility))

    def delete_version(self, subject: str, version: int) -> None:
        """Delete one version; records that name it cannot be resolved any more."""
        self._live().run(self._plans.delete_version(subject, version))

    def delete(self, subject: str) -> list[int]:
        """Delete a subject and all its versions; returns their numbers."""
        return self._live().run(self._plans.delete(subject))

    def configure_topic(
        self,
        topic: str,
        *,
        subject: str | None = None,
        validation: str | None = None,
        validate_payload: bool | None = None,
    ) -> TopicSchema:
        """Change the schema of a topic, and how records are checked; None leaves a setting as it is.

        ``subject`` "" takes the subject away.  ``validation`` is none, warn or enforce;
        ``validate_payload`` checks every record and not only its schema id.
        """
        return self._live().run(self._plans.configure_topic(topic, subject, validation, validate_payload))

    def topic_schema(self, topic: str) -> TopicSchema:
        """Return the schema that a topic's records are checked against."""
        return self._live().run(self._plans.topic_schema(topic))
