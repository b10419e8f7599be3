"""Operations on the schema registry and on the schemas of topics.

A definition is examined and compared in a limited child, against the subject as it was then.  The
command that stores it names that state; where the subject changed meanwhile, it is all done again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import msgspec

from danube.broker.operations.arguments import listed
from danube.broker.operations.context import proposing
from danube.core.metadata.commands import (
    ConfigureTopicSchema,
    DeleteSubject,
    RegisterSchema,
    SetCompatibility,
    TopicRecord,
    TopicSchema,
)
from danube.core.metadata.schemas import SchemaVersion, Subject
from danube.errors import (
    Conflict,
    DanubeError,
    InvalidArgument,
    SchemaIncompatible,
    SchemaInvalid,
    SchemaNotFound,
    WrongState,
)
from danube.host import clock
from danube.ids import check_label
from danube.limits import SCHEMA_DEFINITION_BYTES_MAX
from danube.schema.model import (
    Compatibility,
    Definition,
    SchemaType,
    ValidationPolicy,
    Violation,
)
from danube.schema.plain import PLAIN
from danube.schema.verdict import Older, Outcome, Request

if TYPE_CHECKING:
    from danube.broker.operations.context import Answer, Operation, Operations
    from danube.core.security import arguments as of

ATTEMPTS_MAX: Final = 5
VIOLATIONS_SHOWN_MAX: Final = 100
_VIOLATIONS_TOLD: Final = 3


def definition_of(version: SchemaVersion) -> Definition:
    """A stored version as schema types take it."""
    return Definition(
        schema_type=SchemaType(version.schema_type),
        text=version.definition,
        fingerprint=version.fingerprint,
        compiled=version.compiled,
    )


# -- register -----------------------------------------------------------------------------------------


def _register(operations: Operations, args: of.NewSchema, answer: Answer) -> None:
    check_label(args.subject, "subject")
    _Registration(operations, args, answer).attempt()


class _Registration:
    """One registration on its way; tried again while others change the same subject."""

    def __init__(self, operations: Operations, asked: of.NewSchema, answer: Answer) -> None:
        self._operations = operations
        self._asked = asked
        self._schema_type = SchemaType.parse(asked.schema_type)
        self._stored = b"" if self._schema_type in PLAIN else asked.definition
        self._answer = answer
        self._attempt_count = 0

    def attempt(self) -> None:
        """Check the definition against the current subject; raises the error that refuses it at once."""
        operations, asked = self._operations, self._asked
        self._attempt_count += 1
        operations.refresh()
        known = operations.state.registry.find(asked.subject)
        present = self._identical(known)
        if known is not None and present is not None:
            self._answer(_registered(known, present, False))
            return
        mode = Compatibility.NONE if known is None else Compatibility(known.compatibility)
        request = _request(operations, known, self._schema_type, asked.definition, mode)
        operations.examinations.submit(request, lambda outcome: self._examined(known, mode, outcome))

    def _identical(self, known: Subject | None) -> SchemaVersion | None:
        """Return the version that holds the very same bytes; it was examined when it was registered."""
        for version in known.versions if known is not None else ():
            if version.definition == self._stored and version.schema_type == self._schema_type:
                return version
        return None

    def _again(self, error: DanubeError) -> None:
        if self._attempt_count >= ATTEMPTS_MAX:
            self._answer(error)
            return
        try:
            self.attempt()
        except DanubeError as refusal:
            self._answer(refusal)

    def _examined(self, known: Subject | None, mode: Compatibility, outcome: Outcome | DanubeError) -> None:
        if isinstance(outcome, DanubeError):
            self._answer(outcome)
            return
        asked, definition = self._asked, outcome.definition
        present = known.same(definition.schema_type, definition.fingerprint) if known is not None else None
        if known is not None and present is not None:
            self._answer(_registered(known, present, False))
            return
        if outcome.violations:
            self._answer(_incompatible(asked.subject, mode, outcome.violations))
            return
        command = RegisterSchema(
            subject=asked.subject,
            after_revision=0 if known is None else known.revision,
            schema_type=str(definition.schema_type),
            definition=self._stored,
            fingerprint=definition.fingerprint,
            created_us=clock.wall_us(),
            compatibility=str(self._operations.default_compatibility),
            compiled=definition.compiled,
            description=asked.description,
            created_by=asked.created_by,
            tags=asked.tags,
        )
        try:
            self._operations.propose(
                command, lambda value: self._committed(command, value), lambda _: self._made(command)
            )
        except DanubeError as error:
            self._answer(error)

    def _committed(self, command: RegisterSchema, value: Any) -> None:
        if isinstance(value, Conflict):
            self._again(value)
        else:
            self._answer(value)

    def _made(self, command: RegisterSchema) -> dict[str, Any]:
        subject = self._operations.state.registry.subject(command.subject)
        version = subject.same(command.schema_type, command.fingerprint)
        if version is None:
            raise SchemaNotFound(f"the new version of {command.subject!r} was deleted at once")
        # Another worker may have stored the same definition first: then that is the answer.
        return _registered(subject, version, version.created_us == command.created_us)


def _registered(subject: Subject, version: SchemaVersion, new: bool) -> dict[str, Any]:
    return {
        "subject": subject.subject,
        "schema_id": subject.schema_id,
        "version": version.number,
        "is_new_version": new,
        "fingerprint": version.fingerprint,
    }


def _request(
    operations: Operations,
    known: Subject | None,
    schema_type: SchemaType,
    definition: bytes,
    mode: Compatibility,
) -> Request:
    """Build the child's request: the definition, against every version that ``mode`` names."""
    if len(definition) > SCHEMA_DEFINITION_BYTES_MAX:
        raise SchemaInvalid(
            f"the definition has {len(definition)} bytes",
            why=f"the limit is {SCHEMA_DEFINITION_BYTES_MAX}",
            hint="leave documentation out, or split it into several subjects",
        )
    versions: tuple[SchemaVersion, ...] = ()
    if known is not None and mode is not Compatibility.NONE:
        versions = known.versions if mode.transitive else known.versions[-1:]
    return Request(
        schema_type=schema_type,
        text=definition,
        against=[Older(version.number, definition_of(version)) for version in versions],
        compatibility=mode,
        checks=operations.compatibility_checks,
    )


def _incompatible(subject: str, mode: Compatibility, violations: list[Violation]) -> SchemaIncompatible:
    told = "; ".join(str(violation) for violation in violations[:_VIOLATIONS_TOLD])
    more = len(violations) - _VIOLATIONS_TOLD
    shown = violations[:VIOLATIONS_SHOWN_MAX]
    return SchemaIncompatible(
        f"the schema is not compatible with subject {subject!r} under mode {mode}",
        why=f"{told}; and {more} more" if more > 0 else told,
        hint=violations[0].hint or "danube schema check tells all differences",
        violations=msgspec.json.encode(shown).decode(),
    )


# -- look ---------------------------------------------------------------------------------------------


def _subject(operations: Operations, args: of.Named | of.Versions) -> Subject:
    operations.refresh()
    registry = operations.state.registry
    if args.subject is not None:
        return registry.subject(args.subject)
    if args.schema_id is None:
        raise InvalidArgument("the request names no subject", hint="give subject, or schema_id")
    if (found := registry.with_id(args.schema_id)) is None:
        raise SchemaNotFound(
            f"schema id {args.schema_id} does not exist", hint="danube schema list shows all"
        )
    return found


def _entry(subject: Subject, version: SchemaVersion) -> dict[str, Any]:
    same = ("schema_type", "fingerprint", "description", "created_by", "created_us", "tags")
    return {
        "subject": subject.subject,
        "schema_id": subject.schema_id,
        "version": version.number,
        **{name: getattr(version, name) for name in same},
        "compatibility": subject.compatibility,
    }


def _get(operations: Operations, args: of.Version, answer: Answer) -> None:
    subject = _subject(operations, args)
    version = subject.version(args.version)
    answer(_entry(subject, version) | {"definition": version.definition})


def _versions(operations: Operations, args: of.Versions, answer: Answer) -> None:
    subject = _subject(operations, args)
    answer(listed(args, subject.versions, _version_key, lambda version: _entry(subject, version)))


def _subjects(operations: Operations, args: of.Page, answer: Answer) -> None:
    operations.refresh()
    subjects = operations.state.registry.subjects()
    answer(listed(args, subjects, lambda one: one.subject, _summary, operations.shows))


def _version_key(version: SchemaVersion) -> str:
    """Return a version's number, as wide as the largest, so that texts are in the order of numbers."""
    return f"{version.number:010}"


def _summary(subject: Subject) -> dict[str, Any]:
    latest = subject.latest
    return {
        "subject": subject.subject,
        "schema_id": subject.schema_id,
        "schema_type": "" if latest is None else latest.schema_type,
        "latest_version": 0 if latest is None else latest.number,
        "compatibility": subject.compatibility,
        "tags": [] if latest is None else list(latest.tags),
    }


# -- compare ------------------------------------------------------------------------------------------


def _check(operations: Operations, args: of.SchemaCheck, answer: Answer) -> None:
    subject = _subject(operations, args)
    mode = Compatibility.parse(args.compatibility or subject.compatibility)
    request = _request(operations, subject, SchemaType.parse(args.schema_type), args.definition, mode)

    def view(found: list[Violation]) -> dict[str, Any]:
        return {"is_compatible": not found, "violations": _maps(found)}

    _examine(operations, request, answer, view)


def _diff(operations: Operations, args: of.Difference, answer: Answer) -> None:
    subject = _subject(operations, args)
    old, new = subject.version(args.old), subject.version(args.new)
    request = Request(
        schema_type=SchemaType(new.schema_type),
        text=new.definition,
        against=[Older(old.number, definition_of(old))],
        compatibility=Compatibility.FULL,
        checks=operations.compatibility_checks,
    )

    def view(found: list[Violation]) -> dict[str, Any]:
        sides = {
            side: _maps([one for one in found if one.direction == side]) for side in ("backward", "forward")
        }
        return {"subject": subject.subject, "old": old.number, "new": new.number, **sides}

    _examine(operations, request, answer, view)


def _examine(
    operations: Operations, request: Request, answer: Answer, view: Callable[[list[Violation]], Any]
) -> None:
    """Answer a view of what a child finds, or the error."""

    def examined(outcome: Outcome | DanubeError) -> None:
        answer(outcome if isinstance(outcome, DanubeError) else view(outcome.violations))

    operations.examinations.submit(request, examined)


def _maps(violations: list[Violation]) -> list[dict[str, Any]]:
    return [msgspec.structs.asdict(violation) for violation in violations[:VIOLATIONS_SHOWN_MAX]]


# -- change -------------------------------------------------------------------------------------------


def _set_compatibility(operations: Operations, args: SetCompatibility, answer: Answer) -> None:
    mode = str(Compatibility.parse(args.compatibility))
    command = msgspec.structs.replace(args, compatibility=mode)
    operations.propose(command, answer, lambda _: {"subject": args.subject, "compatibility": mode})


def _delete(operations: Operations, args: of.Named, answer: Answer) -> None:
    subject = _subject(operations, args)
    numbers = [version.number for version in subject.versions]
    command = DeleteSubject(subject=subject.subject)
    operations.propose(command, answer, lambda _: {"deleted_versions": numbers})


# -- topics -------------------------------------------------------------------------------------------


def _topic_schema(operations: Operations, record: TopicRecord) -> dict[str, Any]:
    schema = record.schema or TopicSchema("")
    subject = operations.state.registry.find(schema.subject) if schema.subject else None
    return {
        "topic": record.topic,
        **msgspec.structs.asdict(schema),
        "schema_id": 0 if subject is None else subject.schema_id,
    }


def _topic(operations: Operations, args: of.Topic, answer: Answer) -> None:
    operations.refresh()
    answer(_topic_schema(operations, operations.topic(args.topic)))


def _configure_topic(operations: Operations, args: of.TopicSchemaChange, answer: Answer) -> None:
    operations.refresh()
    record = operations.topic(args.topic)
    present = record.schema or TopicSchema("")
    subject = present.subject if args.subject is None else args.subject
    schema = TopicSchema(
        subject,
        str(ValidationPolicy.parse(present.validation if args.validation is None else args.validation)),
        present.validate_payload if args.validate_payload is None else args.validate_payload,
    )
    if not subject and args.subject is None:
        raise WrongState(
            f"topic {record.topic} has no schema subject",
            why="a validation policy says what becomes of records that break the subject's schema",
            hint="name the subject too",
        )
    if not subject and (args.validation or args.validate_payload):
        raise InvalidArgument(
            "nothing can be validated without a subject", hint="leave the policy out to remove the schema"
        )
    command = ConfigureTopicSchema(topic=record.topic, schema=schema if subject else None)
    operations.propose(command, answer, lambda made: _topic_schema(operations, made))


TABLE: dict[str, Operation] = {
    "schema.register": _register,
    "schema.get": _get,
    "schema.versions": _versions,
    "schema.subjects": _subjects,
    "schema.check": _check,
    "schema.diff": _diff,
    "schema.set_compatibility": _set_compatibility,
    "schema.delete_version": proposing(lambda _: {}),
    "schema.delete": _delete,
    "schema.configure_topic": _configure_topic,
    "schema.topic": _topic,
}
