"""The schema registry inside the metadata machine: subjects, their versions, and their users.

A subject has one schema id, which all its versions share; ids and version numbers count up from 1 and
are never used twice, not even after a deletion.  Two versions of a subject never have both the same
type and the same fingerprint.  Whether a definition is sound and compatible is decided by the
proposer, against the ``revision`` it names: the index of the command that last changed the subject.
A subject that changed meanwhile refuses, and the proposer looks again.

A version may be deleted although records name it: they are kept, and only reading them by that version
fails from then on.  The last version of a subject that a topic is configured with stays, and so does
such a subject.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import islice
from typing import Final

import msgspec

from danube.core.cluster.records import no_room
from danube.core.metadata.commands import (
    DeleteSchemaVersion,
    DeleteSubject,
    RegisterSchema,
    SchemaCommand,
    SetCompatibility,
)
from danube.errors import InvalidArgument, SchemaInvalid, SchemaNotFound, WrongState
from danube.ids import LABEL_BYTES_MAX, check_label
from danube.limits import (
    REGISTRY_BYTES_MAX,
    SCHEMA_COMPILED_BYTES_MAX,
    SCHEMA_DEFINITION_BYTES_MAX,
    SCHEMA_DESCRIPTION_BYTES_MAX,
    SCHEMA_TAGS_MAX,
    SCHEMA_VERSIONS_MAX,
    SUBJECTS_MAX,
)

SCHEMA_TYPES: Final = ("bytes", "string", "number", "avro", "json_schema", "protobuf")
COMPATIBILITIES: Final = (
    "none", "backward", "forward", "full", "backward_transitive", "forward_transitive", "full_transitive"
)  # fmt: skip
_FINGERPRINT_BYTES_MAX: Final = 128
_VERSION_BYTES: Final = 64  # what a version takes besides its texts
_SUGGESTION_LOOKUPS_MAX: Final = 5_000


class SchemaVersion(msgspec.Struct, frozen=True, array_like=True):
    """One version of a subject, as it was registered.  ``created_us`` is in microseconds since 1970 UTC."""

    number: int
    schema_type: str
    definition: bytes
    compiled: bytes
    fingerprint: str
    description: str
    created_by: str
    tags: tuple[str, ...]
    created_us: int

    @property
    def size_bytes(self) -> int:
        """Return the bytes that the version counts for in REGISTRY_BYTES_MAX."""
        texts = (self.fingerprint, self.description, self.created_by, *self.tags)
        return len(self.definition) + len(self.compiled) + sum(map(_size, texts)) + _VERSION_BYTES


class Subject(msgspec.Struct, frozen=True, array_like=True):
    """A named line of versions, ascending; ``last_version`` is the highest number ever given."""

    subject: str
    schema_id: int
    compatibility: str
    last_version: int
    revision: int
    versions: tuple[SchemaVersion, ...]

    @property
    def latest(self) -> SchemaVersion | None:
        """The highest version that is there; None when all were deleted."""
        return self.versions[-1] if self.versions else None

    def find(self, number: int) -> SchemaVersion | None:
        place = bisect_left(self.versions, number, key=lambda version: version.number)
        found = place < len(self.versions) and self.versions[place].number == number
        return self.versions[place] if found else None

    def version(self, number: int = 0) -> SchemaVersion:
        """The version of this number (0: the latest); raises SchemaNotFound."""
        version = self.find(number) if number else self.latest
        if version is None:
            raise SchemaNotFound(
                f"subject {self.subject!r} has no version {number}" if number
                else f"subject {self.subject!r} has no version left",
                hint="danube schema versions lists them" if self.versions else "register one",
            )  # fmt: skip
        return version

    def same(self, schema_type: str, fingerprint: str) -> SchemaVersion | None:
        """The version of this type and fingerprint, if there is one."""
        for version in self.versions:
            if version.fingerprint == fingerprint and version.schema_type == schema_type:
                return version
        return None


class Registry:
    """All subjects.  Records are shared between copies, as they never change."""

    __slots__ = ("_by_id", "_subjects", "_topic_counts", "next_schema_id", "size_bytes")

    def __init__(self) -> None:
        self.next_schema_id = 1
        self.size_bytes = 0
        self._subjects: dict[str, Subject] = {}
        self._by_id: dict[int, Subject] = {}
        self._topic_counts: dict[str, dict[str, int]] = {}  # by subject and namespace

    # Lookup

    def subjects(self) -> list[Subject]:
        """All subjects by name."""
        return [self._subjects[name] for name in sorted(self._subjects)]

    def find(self, subject: str) -> Subject | None:
        return self._subjects.get(subject)

    def with_id(self, schema_id: int) -> Subject | None:
        return self._by_id.get(schema_id)

    def subject(self, name: str) -> Subject:
        """The subject of this name; raises InvalidName or SchemaNotFound."""
        found = self._subjects.get(name)
        if found is None:
            check_label(name, "subject")
            raise SchemaNotFound(f"subject {name!r} does not exist", hint=self._hint(name))
        return found

    def _hint(self, name: str) -> str:
        alike = name.lower()
        for other in islice(self._subjects, _SUGGESTION_LOOKUPS_MAX):
            if other.lower().startswith(alike) or alike.startswith(other.lower()):
                return f"did you mean {other}?"
        return "register a schema first"

    def topic_count(self, subject: str) -> int:
        """How many topics are configured with this subject."""
        return sum(self._topic_counts.get(subject, {}).values())

    def namespaces_of(self, subject: str) -> list[str]:
        """Namespaces with a topic that is configured with this subject."""
        return list(self._topic_counts.get(subject, ()))

    def count_topic(self, subject: str, namespace: str, change: int) -> None:
        """A topic of the namespace is configured with ``subject`` (1) or no longer (-1)."""
        counts = self._topic_counts.setdefault(subject, {})
        counts[namespace] = counts.get(namespace, 0) + change
        if not counts[namespace]:
            del counts[namespace]
            if not counts:
                del self._topic_counts[subject]

    # Check and apply

    def check(self, command: SchemaCommand) -> bool:
        """Whether ``command`` would change anything; raises a CallerError if it is not allowed."""
        if isinstance(command, SetCompatibility) and command.compatibility not in COMPATIBILITIES:
            raise InvalidArgument(
                f"compatibility mode {command.compatibility[:40]!r} is not known",
                hint=f"use one of {', '.join(COMPATIBILITIES)}",
            )
        if self.unneeded(command):
            return False
        if isinstance(command, RegisterSchema):
            self._check_register(command)
        self._refuse(command)
        return True

    def unneeded(self, command: SchemaCommand) -> bool:
        """Return whether the command would change nothing."""
        known = self._subjects.get(command.subject)
        match command:
            case RegisterSchema():
                return known is not None and known.same(command.schema_type, command.fingerprint) is not None
            case SetCompatibility():
                return known is not None and known.compatibility == command.compatibility
            case _:
                return False

    def _check_register(self, command: RegisterSchema) -> None:
        check_label(command.subject, "subject")
        if command.schema_type not in SCHEMA_TYPES or command.compatibility not in COMPATIBILITIES:
            raise InvalidArgument(
                f"a schema of type {command.schema_type[:40]!r} with mode {command.compatibility[:40]!r} "
                "cannot be registered"
            )
        _check_sizes(command)
        known = self._subjects.get(command.subject)
        if known is None and len(self._subjects) >= SUBJECTS_MAX:
            raise no_room("subjects", SUBJECTS_MAX, hint="delete subjects that are not used")
        if known is not None and len(known.versions) >= SCHEMA_VERSIONS_MAX:
            of_subject = f"versions of subject {known.subject!r}"
            raise no_room(of_subject, SCHEMA_VERSIONS_MAX, hint="delete versions that nobody reads")
        if self.size_bytes + _version_of(command, 0).size_bytes > REGISTRY_BYTES_MAX:
            raise no_room("schemas", REGISTRY_BYTES_MAX, of="bytes", hint="delete versions that nobody reads")

    def _refuse(self, command: SchemaCommand) -> None:
        """Raise a CallerError if applying would break the registry."""
        if isinstance(command, RegisterSchema):
            known = self._subjects.get(command.subject)
            if command.after_revision != (0 if known is None else known.revision):
                raise WrongState(
                    f"subject {command.subject!r} was changed meanwhile",
                    why="the definition was compared with what it held before",
                    hint="register it again",
                )
            return
        known = self.subject(command.subject)
        if isinstance(command, DeleteSchemaVersion):
            known.version(command.version or known.last_version + 1)
            if len(known.versions) == 1:
                self._refuse_used(known, f"version {command.version}, the last of")
        elif isinstance(command, DeleteSubject):
            self._refuse_used(known, "")

    def _refuse_used(self, known: Subject, what: str) -> None:
        count = self.topic_count(known.subject)
        if count:
            raise WrongState(
                " ".join(f"{what} subject {known.subject!r} is in use".split()),
                why=f"{count} topics are configured with it",
                hint="configure them with another subject or none, then delete it",
            )

    def apply(self, index: int, command: SchemaCommand) -> None:
        """Take the command with number ``index``; raises where ``_refuse`` does and changes nothing then."""
        if self.unneeded(command):
            return
        self._refuse(command)
        match command:
            case RegisterSchema():
                self._register(index, command)
            case DeleteSchemaVersion():
                known = self._subjects[command.subject]
                kept = tuple(version for version in known.versions if version.number != command.version)
                self._put(msgspec.structs.replace(known, versions=kept, revision=index))
            case DeleteSubject():
                known = self._subjects.pop(command.subject)
                del self._by_id[known.schema_id]
                self.size_bytes -= _size_of(known)
            case SetCompatibility():
                known = self._subjects[command.subject]
                changed = msgspec.structs.replace(known, compatibility=command.compatibility, revision=index)
                self._put(changed)

    def _register(self, index: int, command: RegisterSchema) -> None:
        known = self._subjects.get(command.subject)
        if known is None:
            known = Subject(command.subject, self.next_schema_id, command.compatibility, 0, 0, ())
            self.next_schema_id += 1
        number = known.last_version + 1
        versions = (*known.versions, _version_of(command, number))
        self._put(msgspec.structs.replace(known, versions=versions, last_version=number, revision=index))

    def _put(self, subject: Subject) -> None:
        former = self._subjects.get(subject.subject)
        self.size_bytes += _size_of(subject) - (_size_of(former) if former is not None else 0)
        self._subjects[subject.subject] = self._by_id[subject.schema_id] = subject

    # Copies

    def copy(self) -> Registry:
        other = Registry()
        other.next_schema_id, other.size_bytes = self.next_schema_id, self.size_bytes
        other._subjects, other._by_id = dict(self._subjects), dict(self._by_id)
        other._topic_counts = {subject: dict(counts) for subject, counts in self._topic_counts.items()}
        return other

    def stored(self) -> list[Subject]:
        """Return the subjects by id: the content of a snapshot besides the next id."""
        return [self._by_id[schema_id] for schema_id in sorted(self._by_id)]

    def load(self, next_schema_id: int, subjects: list[Subject]) -> None:
        """Load the result of ``stored``."""
        self.next_schema_id = next_schema_id
        for subject in subjects:
            self._put(subject)


def _version_of(command: RegisterSchema, number: int) -> SchemaVersion:
    return SchemaVersion(
        number, command.schema_type, command.definition, command.compiled, command.fingerprint,
        command.description, command.created_by, command.tags, command.created_us,
    )  # fmt: skip


def _check_sizes(command: RegisterSchema) -> None:
    if len(command.definition) > SCHEMA_DEFINITION_BYTES_MAX:
        raise SchemaInvalid(
            f"the definition has {len(command.definition)} bytes",
            why=f"the limit is {SCHEMA_DEFINITION_BYTES_MAX}",
        )
    if len(command.compiled) > SCHEMA_COMPILED_BYTES_MAX:
        raise SchemaInvalid(
            f"the definition becomes {len(command.compiled)} bytes when it is compiled",
            why=f"the limit is {SCHEMA_COMPILED_BYTES_MAX}",
            hint="import less",
        )
    if not 0 < _size(command.fingerprint) <= _FINGERPRINT_BYTES_MAX:
        raise InvalidArgument("a schema needs a fingerprint", why=f"of 1-{_FINGERPRINT_BYTES_MAX} bytes")
    if _size(command.description) > SCHEMA_DESCRIPTION_BYTES_MAX:
        raise InvalidArgument(f"a description has at most {SCHEMA_DESCRIPTION_BYTES_MAX} bytes")
    if _size(command.created_by) > LABEL_BYTES_MAX:
        raise InvalidArgument(f"created_by has at most {LABEL_BYTES_MAX} bytes")
    if len(command.tags) > SCHEMA_TAGS_MAX:
        raise InvalidArgument(f"a version has at most {SCHEMA_TAGS_MAX} tags")
    for tag in command.tags:
        check_label(tag, "tag")


def _size_of(subject: Subject) -> int:
    return sum(version.size_bytes for version in subject.versions)


def _size(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))
