"""Decoding payloads by the schema registry into one typed column.

The column has the type of one version, the target.  Each record is decoded as the version that its producer
named (the target if it named none) and then fitted to the target: Avro by its resolution rules, the others by
field names.  A tombstone has no value and is null.  A payload that does not fit its schema is an error, or
null and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from danube.client.machine.schema_plans import SchemaVersion
from danube.client.typed.models import registered_codec
from danube.core.metadata.machine import Metadata
from danube.core.metadata.schemas import Subject
from danube.errors import InvalidArgument, PayloadInvalid, SchemaNotFound
from danube.host import telemetry
from danube.limits import MIB
from danube.spark.source.export_shape import loses
from danube.spark.source.value_types import VALUE, arrow_type, json_text

_log = telemetry.events("spark")
_SOURCES: Final = ("payload", "schema_id", "schema_version", "partition", "offset")
_OF_TOMBSTONES: Final = ("key", "topic")
Decode = Callable[[bytes], Any]
Fit = Callable[[Any], Any]
_ANY_SUBJECT: Final = ("true", "latest")
_OTHERS_BYTES_MAX: Final = 1 * MIB  # of the other subjects' schemas, which go to every task


class Registered(NamedTuple):
    """One version of a subject, with its definition."""

    subject: str
    schema_id: int
    version: int
    schema_type: str
    definition: bytes
    compiled: bytes

    @property
    def value_type(self) -> pa.DataType:
        return arrow_type(self.schema_type, self.definition, self.compiled)


class Schemas(NamedTuple):
    """The target version, and every version that records may name, by schema id and number.

    ``compacted``: those of the topics that keep only the latest record of each key.
    """

    target: Registered
    known: Mapping[tuple[int, int], Registered]
    compacted: frozenset[str] = frozenset()

    def since(self, named: str) -> list[Registered]:
        """The target, and before it the versions of its subject after ``named``, which is subject:version."""
        subject, _, number = named.rpartition(":")
        known = sorted(self.known.values(), key=lambda one: one.version)
        earlier = [
            one
            for one in known
            if (one.subject, subject) == (self.target.subject,) * 2
            and int(number) < one.version < self.target.version
        ]
        return [*earlier, self.target]


def find_schemas(metadata: Metadata, topics: Iterable[str], wanted: str) -> Schemas:
    """The schemas for the option ``decode``: ``true``, ``subject`` or ``subject:version``.

    ``true`` takes the subject that the topics are configured with.  SchemaNotFound or InvalidArgument
    where that is none, or several.
    """
    names = list(topics)
    subject, version = _choice(metadata, names, wanted)
    others = [one for one in metadata.registry.stored() if one.schema_id != subject.schema_id]
    size = sum(each.size_bytes for one in others for each in one.versions)
    known = {
        (one.schema_id, each.number): _registered(one, each.number)
        for one in [subject, *(others if size <= _OTHERS_BYTES_MAX else [])]
        for each in one.versions
    }
    records = filter(None, map(metadata.find_topic, names))
    compacted = frozenset(record.topic for record in records if record.policy.compacts)
    return Schemas(_registered(subject, version), known, compacted)


def _choice(metadata: Metadata, topics: list[str], wanted: str) -> tuple[Subject, int]:
    name, _, number = wanted.partition(":")
    if wanted.lower() in _ANY_SUBJECT:
        records = [metadata.topic(topic) for topic in topics]
        names = {record.schema.subject for record in records if record.schema and record.schema.subject}
        if len(names) != 1:
            raise InvalidArgument(
                "the topics have no one schema to decode by",
                why=f"their subjects are {', '.join(sorted(names)) or 'none'}",
                hint="name a subject: decode=orders-value or decode=orders-value:3",
            )
        name, number = names.pop(), ""
    if number and not number.isdigit():
        raise InvalidArgument(f"option decode names version {number!r}", hint="write subject:3")
    return metadata.registry.subject(name), int(number or 0)


def _registered(subject: Subject, number: int) -> Registered:
    one = subject.version(number)
    return Registered(
        subject.subject, subject.schema_id, one.number, str(one.schema_type), one.definition, one.compiled
    )


def tombstones_of(payloads: pa.Array, keys: pa.Array) -> pa.Array:
    """bool[n]: which records of a compacted topic say that their key has no value any more."""
    return pc.and_(pc.equal(pc.binary_length(payloads), 0), pc.is_valid(keys))


class Decoded(NamedTuple):
    """Values, the rows that are null because their payload is no value, and why the first one is."""

    values: pa.Array
    bad: list[int]
    why: str


class ValueDecoder:
    """Decodes columns of payloads; for one thread.

    ``kind``: of the values, where they have fields beside those of the target (other versions' fields).
    """

    def __init__(self, schemas: Schemas, kind: pa.DataType | None = None) -> None:
        self._schemas = schemas
        self.type = schemas.target.value_type if kind is None else kind
        self._fit = _fitting(self.type)
        self._decoders: dict[tuple[int | None, int | None], Decode] = {}

    def decode(
        self, payloads: pa.Array, ids: pa.Array, versions: pa.Array, tombstones: pa.Array | None = None
    ) -> Decoded:
        """The values of records with these payloads, schema ids and versions; null for ``tombstones``."""
        removed = [False] * len(payloads) if tombstones is None else tombstones.to_pylist()
        values: list[Any] = []
        bad: list[int] = []
        why = ""
        rows = zip(payloads.to_pylist(), ids.to_pylist(), versions.to_pylist(), removed, strict=True)
        for row, (payload, schema_id, version, tombstone) in enumerate(rows):
            if tombstone:
                values.append(None)
                continue
            try:
                values.append(self._fit(self._decoder(schema_id, version)(payload)))
            except Exception as error:
                # Whatever a library raises on a stranger's bytes, they are no value of their schema.
                why = why or f"{type(error).__name__}: {error}"
                values.append(None)
                bad.append(row)
        return self._array(values, bad, why)

    def _array(self, values: list[Any], bad: list[int], why: str) -> Decoded:
        try:
            return Decoded(pa.array(values, self.type), bad, why)
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
            pass  # some value is out of its column's range: find which
        for row, value in enumerate(values):
            try:
                pa.array([value], self.type)
            except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
                why = why or str(error)
                values[row] = None
                bad.append(row)
        return Decoded(pa.array(values, self.type), sorted(bad), why)

    def _decoder(self, schema_id: int | None, version: int | None) -> Decode:
        known = self._decoders.get((schema_id, version))
        if known is None:
            writer = self._writer(schema_id, version)
            known = self._decoders[schema_id, version] = _decoder_for(self._reader(writer), writer)
        return known

    def _reader(self, writer: Registered) -> Registered:
        """As which version a record is read: its own where the target has not all that is wanted of it."""
        target = self._schemas.target
        if self.type == target.value_type or writer.schema_type != target.schema_type:
            return target
        return writer if loses(writer.value_type, target.value_type, self.type) else target

    def _writer(self, schema_id: int | None, version: int | None) -> Registered:
        """Return the version of a record that its producer named."""
        target = self._schemas.target
        if schema_id is None or (schema_id == target.schema_id and version is None):
            return target
        numbers = [number for known_id, number in self._schemas.known if known_id == schema_id]
        number = version if version is not None else max(numbers, default=0)
        found = self._schemas.known.get((schema_id, number))
        if found is None:
            raise SchemaNotFound(
                f"version {number} of schema {schema_id} is not known",
                why="it was registered after this read began, or deleted since",
                hint="start the read again",
            )
        return found


class TypedRows:
    """Adds the decoded value to what was read, in the order of ``columns``.

    ``needed`` are the columns that must be read.  ``allowed``: a payload that is no value becomes null.
    """

    def __init__(self, schemas: Schemas, columns: Sequence[str], schema: pa.Schema, *, allowed: bool) -> None:
        self._decoder = ValueDecoder(schemas)
        self._compacted = pa.array(sorted(schemas.compacted), pa.string())
        self._schema = schema
        self._columns = columns
        self._allowed = allowed
        plain = [name for name in columns if name != VALUE]
        sources = [*_SOURCES, *(_OF_TOMBSTONES if schemas.compacted else ())]
        self.needed = [*plain, *(name for name in sources if name not in plain)]

    def take(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The batch with its values; PayloadInvalid names the first record that is none."""
        payloads, ids, versions = (batch.column(name) for name in _SOURCES[:3])
        found = self._decoder.decode(payloads, ids, versions, self._tombstones(batch))
        if found.bad:
            self._note(batch, found.bad, found.why)
        values = found.values.cast(self._schema.field(VALUE).type)
        made = [values if name == VALUE else batch.column(name) for name in self._columns]
        return pa.RecordBatch.from_arrays(made, schema=self._schema)

    def _tombstones(self, batch: pa.RecordBatch) -> pa.Array | None:
        if not len(self._compacted):
            return None
        among = pc.is_in(batch.column("topic"), self._compacted)
        return pc.and_(tombstones_of(batch.column("payload"), batch.column("key")), among)

    def _note(self, batch: pa.RecordBatch, bad: list[int], why: str) -> None:
        partition, offset = (batch.column(name)[bad[0]].as_py() for name in ("partition", "offset"))
        if not self._allowed:
            raise PayloadInvalid(
                f"record {offset} of partition {partition} cannot be decoded",
                why=why,
                hint="failOnDataLoss=false makes such values null",
                partition=partition,
                offset=offset,
            )
        _log.warning(
            "payloads cannot be decoded", partition=partition, offset=offset, count=len(bad), why=why
        )


def _decoder_for(target: Registered, writer: Registered) -> Decode:
    if writer.schema_type == "protobuf":
        from danube.spark.source.protobuf_values import decoder_of

        return decoder_of(writer.definition, writer.compiled)
    same = target.schema_type == writer.schema_type
    codec = registered_codec(_version(target if same else writer), resolve=True)
    return codec.decoder(_version(writer))


def _version(registered: Registered) -> SchemaVersion:
    return SchemaVersion(
        subject=registered.subject,
        schema_id=registered.schema_id,
        version=registered.version,
        schema_type=registered.schema_type,
        definition=registered.definition,
    )


def _fitting(kind: pa.DataType) -> Fit:
    """A function that gives values the shape that Arrow's converter takes for this type."""
    if pa.types.is_struct(kind):
        return _fitting_struct(kind)
    if pa.types.is_map(kind):
        inner = _fitting(kind.item_type)
        return lambda value: None if value is None else [(key, inner(one)) for key, one in _pairs(value)]
    if pa.types.is_list(kind):
        element = _fitting(kind.value_type)
        return lambda value: None if value is None else [element(one) for one in _listed(value)]
    if pa.types.is_string(kind):
        return lambda value: value if isinstance(value, str) else json_text(value)
    if pa.types.is_floating(kind):
        return lambda value: None if value is None else float(value)
    if pa.types.is_integer(kind):
        return _whole
    return lambda value: value


def _fitting_struct(kind: pa.DataType) -> Fit:
    fields = [(field.name, _fitting(field.type)) for field in kind]

    def fit(value: Any) -> Any:
        if value is None:
            return None
        if not isinstance(value, dict):
            raise PayloadInvalid(f"a record is {type(value).__name__}, not an object")
        return {name: inner(value.get(name)) for name, inner in fields}

    return fit


def _pairs(value: Any) -> Iterable[tuple[Any, Any]]:
    return value.items() if isinstance(value, dict) else value


def _listed(value: Any) -> Iterable[Any]:
    if not isinstance(value, list | tuple):
        raise PayloadInvalid(f"a list is {type(value).__name__}")
    return value


def _whole(value: Any) -> Any:
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise PayloadInvalid(f"{value!r} is not a whole number")
    return int(value) if isinstance(value, float) else value
