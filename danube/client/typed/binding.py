"""Binding of a model to the registry: the version that batches name, and the decoder of each version.

Plans that both shells run, and the memory of the versions that a consumer has met.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cached_property, partial
from typing import Any, Generic, NamedTuple, TypeVar, cast

from danube.client.machine.received import Part, ReceivedBatch
from danube.client.machine.reply import Plan
from danube.client.machine.schema_plans import SchemaPlans, SchemaVersion, default_subject
from danube.client.machine.session import Session
from danube.client.records.handles import B, ConsumerHandle, M, ProducerHandle, Shell
from danube.client.records.inbox import Inbox
from danube.client.records.outbox import Outbox, ProducerOptions
from danube.client.records.setup import ConsumerOptions
from danube.client.typed.models import (
    Codec,
    Decode,
    Schema,
    codec_of,
    decoded,
    encoded,
    registered_codec,
    schema_of,
)
from danube.errors import ClosedError, DanubeError, SchemaInvalid, SchemaNotFound

VERSIONS_KEPT_MAX = 1_000  # a consumer of more versions than this forgets the oldest and asks again

T = TypeVar("T")
VersionKey = tuple[int, int]  # schema id, version; 0 for a record that names no version


class Bound(NamedTuple):
    """Codec of a producer's values, and the schema that its batches name."""

    codec: Codec
    subject: str
    schema_id: int
    version: int


def bind_producer(session: Session, schema: Schema[Any], topic: str) -> Plan[Bound]:
    """Register the schema, or find it: raises SchemaNotFound, SchemaInvalid, SchemaIncompatible."""
    registry = SchemaPlans(session)
    codec = codec_of(schema)
    subject = schema.subject or default_subject(topic)
    if codec is None or schema.version:
        found = yield from registry.get(subject, schema.version)
        if codec is None:
            codec = registered_codec(found, resolve=False)
        elif codec.schema_type != found.schema_type:
            raise _other_type(codec, found)
        return Bound(codec, subject, found.schema_id, found.version)
    if schema.register:
        made = yield from registry.register(
            subject,
            codec.schema_type,
            codec.definition,
            description=schema.description,
            created_by="danube-python",
        )
        return Bound(codec, subject, made.schema_id, made.version)
    found = yield from _same_definition(registry, subject, codec)
    return Bound(codec, subject, found.schema_id, found.version)


def _same_definition(registry: SchemaPlans, subject: str, codec: Codec) -> Plan[SchemaVersion]:
    """Return the newest version with the codec's definition."""
    listed = yield from registry.versions(subject)
    for one in sorted(listed, key=lambda listed: -listed.version):
        if one.schema_type != codec.schema_type:
            raise _other_type(codec, one)
        found = yield from registry.get(subject, one.version)
        if _meaning(found.definition) == _meaning(codec.definition):
            return found
    raise SchemaNotFound(
        f"no version of subject {subject!r} is the producer's schema",
        why=f"register=False, and all {len(listed)} versions differ from it",
        hint="register it, or pin a version: Schema(model, version=...)",
        subject=subject,
    )


def _meaning(definition: bytes) -> Any:
    """Return the form in which two definitions are compared: their JSON, else their words."""
    try:
        return json.loads(definition)
    except ValueError:
        return definition.split()


def _other_type(codec: Codec, found: SchemaVersion) -> SchemaInvalid:
    return SchemaInvalid(
        f"subject {found.subject!r} holds {found.schema_type}, and the model is {codec.schema_type}",
        hint="give the model another subject: Schema(model, subject=...)",
        subject=found.subject,
    )


def bind_consumer(session: Session, schema: Schema[Any]) -> Plan[Decoding]:
    """Return the decoder of a consumer's records; without a model the subject must exist (SchemaNotFound)."""
    codec = codec_of(schema)
    if codec is None:
        found = yield from SchemaPlans(session).get(schema.subject, schema.version)
        codec = registered_codec(found, resolve=bool(schema.version))
    return Decoding(session, codec)


class Decoding:
    """A consumer's codec and the versions it has met.

    A version is asked for before its first records are handed out, so that ``value`` never waits.
    """

    def __init__(self, session: Session, codec: Codec) -> None:
        self._session = session
        self._codec = codec
        self._decode_by_version: dict[VersionKey | None, Decode | DanubeError] = {}

    def missing(self, parts: Iterable[Part]) -> list[VersionKey]:
        """Return versions of these records that are not known yet and can be requested."""
        keys = {self._key(part.batch) for part in parts}
        return [key for key in keys if key is not None and self._unknown(key)]

    def _unknown(self, key: VersionKey) -> bool:
        known = self._decode_by_version.get(key)
        return known is None or (isinstance(known, DanubeError) and known.retryable)

    def learn(self, keys: list[VersionKey]) -> Plan[None]:
        """Request versions.  A failure is raised by ``value``, not here."""
        for key in keys:
            answer: Decode | DanubeError
            try:
                version = yield from SchemaPlans(self._session).get_by_id(*key)
                answer = self._codec.decoder(version)
            except DanubeError as error:
                answer = error
            while len(self._decode_by_version) >= VERSIONS_KEPT_MAX:
                del self._decode_by_version[next(iter(self._decode_by_version))]
            self._decode_by_version[key] = answer

    def value(self, payload: bytes, offset: int, batch: ReceivedBatch, index: int, topic: str) -> Any:
        """Return the value of record ``index`` of the batch; None for a tombstone of any schema.

        Raises PayloadInvalid, or the error of fetching its version.
        """
        if not payload and batch.tombstone(index):
            return None
        key = self._key(batch)
        decode = self._decode_by_version.get(key)
        if decode is None:
            if key is not None:
                raise SchemaNotFound(f"schema {key[0]} version {key[1]} is not at hand any more")
            decode = self._decode_by_version[None] = self._codec.decoder(None)
        if isinstance(decode, DanubeError):
            raise decode.with_traceback(None)
        return decoded(decode, payload, topic=topic, offset=offset)

    def _key(self, batch: ReceivedBatch) -> VersionKey | None:
        schema_id = batch.schema_id if self._codec.needs_version else None
        return None if schema_id is None else (schema_id, batch.schema_version or 0)


class Valued(Generic[T]):
    """Value of a message beside its record."""

    __slots__ = ()

    @property
    def value(self: Any) -> T:
        """Decode and return the payload; None for a tombstone.  Raises PayloadInvalid."""
        source = self._source
        found = self._decoding.value(self.payload, self.offset, source.batch, self._index, source.topic)
        return cast(T, found)


class ValuedBatch(Generic[T]):
    """Values of a batch beside its records; it stands before the batch among the bases."""

    def __init__(self, decoding: Decoding, *rest: Any) -> None:
        super().__init__(*rest)
        self._decoding = decoding

    @cached_property
    def values(self: Any) -> list[T]:
        """The value of each record, None for a tombstone.

        Raises PayloadInvalid for the first that cannot be decoded.
        """
        payloads, offsets = iter(self.payloads), iter(self.offsets.tolist())
        return [
            self._decoding.value(next(payloads), next(offsets), part.batch, index, self.topic)
            for part in self._parts
            for index in range(part.start, part.stop)
        ]


class BoundProducer(ProducerHandle[Shell], Generic[Shell, T]):
    """Producer of values, whichever client it belongs to."""

    def __init__(self, connection: Shell, options: ProducerOptions, schema: Any) -> None:
        super().__init__(connection, options)
        self._schema: Schema[T] = schema_of(schema)
        self._bound: Bound | None = None

    @property
    def subject(self) -> str:
        """The registry's subject that the batches name."""
        return self._open_bound.subject

    @property
    def schema_id(self) -> int:
        return self._open_bound.schema_id

    @property
    def schema_version(self) -> int:
        return self._open_bound.version

    @property
    def _open_bound(self) -> Bound:
        if self._bound is None:
            raise ClosedError("the producer is not open", hint=self._use)
        return self._bound

    def _make_box(self) -> Plan[Outbox]:
        """Register or find the schema, unless that is done, and open."""
        if self._bound is None:
            options = self._options
            self._bound = yield from bind_producer(self._connection.session, self._schema, options.topic)
            options.schema_id, options.schema_version = self._bound.schema_id, self._bound.version
        return (yield from super()._make_box())

    def _encoded(self, payload: T | bytes) -> bytes:
        return encoded(self._open_bound.codec, payload)


class BoundConsumer(ConsumerHandle[Shell, M, B], Generic[Shell, M, B, T]):
    """Consumer of values, whichever client it belongs to."""

    def __init__(self, connection: Shell, options: ConsumerOptions, schema: Any) -> None:
        super().__init__(connection, options)
        self._schema: Schema[T] = schema_of(schema)
        self._decoding: Decoding | None = None

    def _make_box(self) -> Plan[Inbox[M, B]]:
        """Find out how values are decoded, unless that is done, and subscribe for messages that do it."""
        if self._decoding is None:
            self._decoding = yield from bind_consumer(self._connection.session, self._schema)
            self._message_cls = partial(self._message_cls, _decoding=self._decoding)
            self._batch_cls = partial(self._batch_cls, self._decoding)
        return (yield from super()._make_box())

    def _unknown(self, parts: Iterable[Part]) -> Plan[None] | None:
        """The plan that fetches versions which the records name and which are not known yet."""
        decoding = cast(Decoding, self._decoding)
        missing = decoding.missing(parts)
        return decoding.learn(missing) if missing else None
