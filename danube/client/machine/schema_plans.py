"""The schema registry as plans that both shells run, and the broker's answers as structs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final, TypeVar

import msgspec

from danube.client.machine.paging import WHOLE, answered, page_of, whole_list
from danube.client.machine.reply import Plan
from danube.client.machine.session import Session
from danube.errors import InvalidArgument, SchemaNotFound
from danube.ids import check_topic_name


class Violation(msgspec.Struct, frozen=True, kw_only=True):
    """One reason why a version cannot follow another."""

    path: str = ""  # where in the schema; "" is the whole of it
    rule: str = ""  # stable lower_case word, for example "field_removed"
    message: str = ""  # a sentence for people
    direction: str = "backward"  # which promise it breaks: "backward" or "forward"
    version: int = 0  # the older version that it was compared with
    old: Any = None  # what stands at the path in each, as short JSON values
    new: Any = None
    hint: str = ""

    def __str__(self) -> str:
        """``path: rule: message (old -> new); hint``."""
        text = f"{self.path or '(root)'}: {self.rule}: {self.message}"
        if self.old is not None or self.new is not None:
            text += f" ({_short(self.old)} -> {_short(self.new)})"
        return f"{text}; {self.hint}" if self.hint else text


class RegisteredSchema(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a registration: the id of the subject and the version that holds the definition."""

    subject: str
    schema_id: int
    version: int
    new_version: bool = msgspec.field(default=True, name="is_new_version")  # False: it was there already
    fingerprint: str = ""


class SchemaVersion(msgspec.Struct, frozen=True, kw_only=True):
    """One version of a subject.  ``definition`` is empty if versions are listed."""

    subject: str
    schema_id: int
    version: int
    schema_type: str
    definition: bytes = b""
    fingerprint: str = ""
    description: str = ""
    created_by: str = ""
    created_us: int = 0  # microseconds since 1970 UTC
    tags: list[str] = []
    compatibility: str = ""

    @property
    def text(self) -> str:
        """The definition as text."""
        return self.definition.decode("utf-8", "replace")


class SubjectInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A subject as the registry lists it."""

    subject: str
    schema_id: int
    schema_type: str
    latest_version: int
    compatibility: str = ""
    tags: list[str] = []


class SchemaCheck(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a definition may become the subject's next version, and every reason why not."""

    compatible: bool = msgspec.field(name="is_compatible")
    violations: list[Violation] = []


class SchemaDiff(msgspec.Struct, frozen=True, kw_only=True):
    """Two versions compared in both directions."""

    subject: str
    old: int
    new: int
    backward: list[Violation] = []  # why the newer version cannot read records of the older one
    forward: list[Violation] = []  # why the older version cannot read records of the newer one


class TopicSchema(msgspec.Struct, frozen=True, kw_only=True):
    """Schema that a topic's records are checked against, and how."""

    topic: str
    subject: str = ""  # "": none
    validation: str = "warn"  # none, warn or enforce
    validate_payload: bool = False
    schema_id: int = 0  # of the subject; 0 without one


S = TypeVar("S")
_ABOUT: Final = "answered about schemas"
Definition = str | bytes | dict[str, Any] | list[Any]


def definition_bytes(definition: Definition) -> bytes:
    """A definition as it is registered: UTF-8 text; dicts and lists become compact JSON."""
    if isinstance(definition, bytes):
        return definition
    if isinstance(definition, str):
        return definition.encode()
    try:
        return json.dumps(definition, separators=(",", ":"), ensure_ascii=False).encode()
    except (TypeError, ValueError) as error:
        raise InvalidArgument(
            "the schema's definition is not text and no JSON", why=str(error), hint="give text or bytes"
        ) from None


def default_subject(topic: str) -> str:
    """The subject of a topic that names none: ``/default/orders`` gives ``default-orders``."""
    return topic.strip("/").replace("/", "-")


class SchemaPlans:
    """Each method is a plan: it yields replies and returns the answer."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def _asked(self, shape: type[S], op: str, **arguments: Any) -> Plan[S]:
        return answered((yield self._session.admin(op, **arguments)), shape, _ABOUT)

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
    ) -> Plan[RegisteredSchema]:
        """Register a definition; the same definition again gives the version that holds it.

        ``schema_type`` is bytes, string, number, avro, json_schema or protobuf.  ``compatibility``
        sets the subject's mode first.  Raises SchemaInvalid or SchemaIncompatible (with every
        violation, see :func:`danube.violations_of`).
        """
        text = definition_bytes(definition)
        unset = bool(compatibility)
        if compatibility:
            try:
                yield from self.set_compatibility(subject, compatibility)
                unset = False
            except SchemaNotFound:
                pass  # a new subject: its mode is set when there is one
        made = yield from self._asked(
            RegisteredSchema, "schema.register", subject=subject, schema_type=schema_type, definition=text,
            description=description, created_by=created_by, tags=list(tags),
        )  # fmt: skip
        if unset:
            yield from self.set_compatibility(subject, compatibility)
        return made

    def get(self, subject: str, version: int = 0) -> Plan[SchemaVersion]:
        """One version (0: the latest) with its definition; raises SchemaNotFound."""
        return (yield from self._asked(SchemaVersion, "schema.get", subject=subject, version=version))

    def get_by_id(self, schema_id: int, version: int = 0) -> Plan[SchemaVersion]:
        """One version (0: the latest) of the subject with this id; raises SchemaNotFound."""
        return (yield from self._asked(SchemaVersion, "schema.get", schema_id=schema_id, version=version))

    def versions(self, subject: str) -> Plan[list[SchemaVersion]]:
        """All versions of a subject, without their definitions."""
        found = yield from whole_list(self._session, "schema.versions", WHOLE, subject=subject)
        return answered(found, list[SchemaVersion], _ABOUT)

    def subjects(
        self, *, after: str = "", limit: int | None = None, prefix: str = ""
    ) -> Plan[list[SubjectInfo]]:
        """All subjects by name, or those with a ``prefix``, behind ``after``, the first ``limit``."""
        page = page_of(after, limit, prefix)
        found = yield from whole_list(self._session, "schema.subjects", page)
        return answered(found, list[SubjectInfo], _ABOUT)

    def check(
        self, subject: str, schema_type: str, definition: Definition, *, compatibility: str = ""
    ) -> Plan[SchemaCheck]:
        """Whether the definition could be the next version, by the subject's mode or the one given."""
        given = {"subject": subject, "schema_type": schema_type, "compatibility": compatibility}
        text = definition_bytes(definition)
        return (yield from self._asked(SchemaCheck, "schema.check", definition=text, **given))

    def diff(self, subject: str, old: int = 0, new: int = 0) -> Plan[SchemaDiff]:
        """Return the differences of two versions, in both directions (0: the latest and the one before)."""
        if not old or not new:
            numbers = sorted(one.version for one in (yield from self.versions(subject)))
            new = new or numbers[-1]
            older = [number for number in numbers if number < new]
            if not old and not older:
                raise SchemaNotFound(f"subject {subject!r} has no version before {new}", subject=subject)
            old = old or older[-1]
        return (yield from self._asked(SchemaDiff, "schema.diff", subject=subject, old=old, new=new))

    def set_compatibility(self, subject: str, compatibility: str) -> Plan[str]:
        """Set none, backward, forward, full or one of ``*_transitive``; returns the mode that holds."""
        answer = yield self._session.admin(
            "schema.set_compatibility", subject=subject, compatibility=compatibility
        )
        return str(answer["compatibility"])

    def delete_version(self, subject: str, version: int) -> Plan[None]:
        """Delete one version; records that name it cannot be resolved any more."""
        yield self._session.admin("schema.delete_version", repeatable=False, subject=subject, version=version)

    def delete(self, subject: str) -> Plan[list[int]]:
        """Delete a subject and all its versions; returns their numbers."""
        answer = yield self._session.admin("schema.delete", repeatable=False, subject=subject)
        return deleted_versions(answer)

    def configure_topic(
        self,
        topic: str,
        *,
        subject: str | None = None,
        validation: str | None = None,
        validate_payload: bool | None = None,
    ) -> Plan[TopicSchema]:
        """Change the schema of a topic, and how records are checked; None leaves a setting as it is.

        ``subject`` "" takes the subject away.  ``validation`` is none, warn or enforce;
        ``validate_payload`` checks every record and not only its schema id.
        """
        check_topic_name(topic)
        settings = {"subject": subject, "validation": validation, "validate_payload": validate_payload}
        given = {name: value for name, value in settings.items() if value is not None}
        return (yield from self._asked(TopicSchema, "schema.configure_topic", topic=topic, **given))

    def topic_schema(self, topic: str) -> Plan[TopicSchema]:
        """Return the schema that a topic's records are checked against."""
        check_topic_name(topic)
        return (yield from self._asked(TopicSchema, "schema.topic", topic=topic))


def violations_of(error: BaseException) -> list[Violation]:
    """The violations that a SchemaIncompatible carries; empty for every other error."""
    found = getattr(error, "facts", {}).get("violations")
    if not found:
        return []
    try:
        if isinstance(found, str | bytes):
            return msgspec.json.decode(found, type=list[Violation])
        return msgspec.convert(found, list[Violation])
    except msgspec.MsgspecError:
        return []


def deleted_versions(answer: Any) -> list[int]:
    """Numbers of the versions that went with a subject."""
    found = answer.get("deleted_versions", []) if isinstance(answer, dict) else []
    return [int(one) for one in found] if isinstance(found, list) else list(range(1, int(found) + 1))


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 120 else text[:117] + "..."
