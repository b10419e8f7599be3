"""Values instead of bytes: how a model encodes, decodes and names its schema.

This is the client's only door to fastavro and google.protobuf; each is imported when a model needs it.
pydantic models are used through their own methods, dataclasses through msgspec.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from functools import partial
from io import BytesIO
from typing import Any, Generic, TypedDict, TypeVar, Unpack, cast, overload

import msgspec

from danube.client.machine.schema_plans import Definition, SchemaVersion, definition_bytes
from danube.client.typed.proto_text import file_text
from danube.errors import DanubeError, InvalidArgument, NotSupported, PayloadInvalid, SchemaInvalid

T = TypeVar("T")
Decode = Callable[[bytes], Any]
_INTEGER = struct.Struct(">q")
_FLOAT = struct.Struct(">d")
_INTEGERS = {4: struct.Struct(">i"), 8: _INTEGER}
_FLOATS = {4: struct.Struct(">f"), 8: _FLOAT}


class SchemaKeywords(TypedDict, total=False):
    """Keywords of Schema() besides the model."""

    subject: str
    version: int
    definition: Definition | None
    schema_type: str
    register: bool
    description: str


class Schema(Generic[T]):
    """Argument ``schema=`` of a producer or consumer, if the model alone does not say enough.

    ``model`` is a pydantic model class, a dataclass, an Avro record schema (dict or JSON text), a
    generated Protobuf message class, or one of bytes, str, int, float.  Without it values follow
    ``definition`` and ``schema_type``, or the registered ``subject``.  ``subject`` "" is named after the
    topic.  ``version`` pins one version (0: the latest).  ``register=False`` never registers.
    """

    __slots__ = ("definition", "description", "model", "register", "schema_type", "subject", "version")

    @overload
    def __init__(self, model: type[T], **options: Unpack[SchemaKeywords]) -> None: ...

    @overload
    def __init__(
        self: Schema[Any], model: dict[str, Any] | str | None = None, **options: Unpack[SchemaKeywords]
    ) -> None: ...

    def __init__(
        self,
        model: type[T] | dict[str, Any] | str | None = None,
        *,
        subject: str = "",
        version: int = 0,
        definition: Definition | None = None,
        schema_type: str = "",
        register: bool = True,
        description: str = "",
    ) -> None:
        if model is not None and definition is not None:
            raise InvalidArgument("give a model or a definition, not both")
        if (definition is not None) != bool(schema_type):
            raise InvalidArgument("definition and schema_type belong together")
        if version < 0:
            raise InvalidArgument(f"version must be at least 1, or 0 for the latest, not {version}")
        if model is None and definition is None and not subject:
            raise InvalidArgument("a schema needs a model, a definition or a subject")
        self.model = model
        self.subject = subject
        self.version = version
        self.definition = definition
        self.schema_type = schema_type.strip().lower()
        self.register = register
        self.description = description

    def __repr__(self) -> str:
        what = self.model if self.model is not None else self.schema_type
        return f"<Schema {getattr(what, '__name__', what)!s} subject={self.subject!r} version={self.version}>"


Model = type[T] | Schema[T]  # what ``schema=`` takes and type checkers can read
AvroSchema = dict[str, Any] | str


@dataclass(frozen=True, slots=True)
class Codec:
    """Values to payloads and back.

    ``decoder`` gives the function for one version.  The version is fetched only if the payload cannot be read
    without its writer's definition (``needs_version``).
    """

    schema_type: str
    definition: bytes
    encode: Callable[[Any], bytes]
    decoder: Callable[[SchemaVersion | None], Decode]
    needs_version: bool = False


def schema_of(given: Any) -> Schema[Any]:
    """Return the argument ``schema=`` as a Schema."""
    return given if isinstance(given, Schema) else Schema(given)


def codec_of(schema: Schema[Any]) -> Codec | None:
    """Return the codec of a schema's model or definition; None if only the registry describes the values."""
    if schema.definition is not None:
        return codec_of_definition(schema.schema_type, definition_bytes(schema.definition))
    model = schema.model
    if model is None:
        return None
    if isinstance(model, dict | str):
        return _avro_codec(definition_bytes(model))
    if isinstance(model, type):
        if model in _PLAIN:
            return _PLAIN[model]
        if hasattr(model, "model_json_schema"):
            return _pydantic_codec(model)
        if is_dataclass(model) or hasattr(model, "__struct_fields__"):
            return _dataclass_codec(model)
        if hasattr(model, "DESCRIPTOR") and hasattr(model, "FromString"):
            return _protobuf_codec(model)
    raise InvalidArgument(
        f"{model!r} cannot be a schema",
        hint="give a pydantic model, a dataclass, an Avro record schema, a Protobuf message class, "
        "or one of bytes, str, int, float",
    )


def codec_of_definition(schema_type: str, definition: bytes) -> Codec:
    """The codec of a definition without a model: JSON values, Avro dicts, text, numbers, bytes."""
    if schema_type == "avro":
        return _avro_codec(definition)
    if schema_type == "protobuf":
        return Codec("protobuf", definition, _only_bytes, lambda version: _no_message_class)
    if schema_type in _GENERIC:
        return Codec(schema_type, definition, *_GENERIC[schema_type])
    raise InvalidArgument(
        f"schema type {schema_type!r} is not known",
        hint="use bytes, string, number, avro, json_schema or protobuf",
    )


def registered_codec(pinned: SchemaVersion, resolve: bool) -> Codec:
    """The codec of a registered version; values of other versions are decoded by their own schemas.

    With ``resolve`` Avro values are read as the pinned version has them, whatever wrote them.
    """
    own = codec_of_definition(pinned.schema_type, pinned.definition)

    def decoder(version: SchemaVersion | None) -> Decode:
        if version is None or (resolve and version.schema_type == pinned.schema_type):
            return own.decoder(version)
        other = codec_of_definition(version.schema_type, version.definition)
        return other.decoder(version)

    return Codec(own.schema_type, own.definition, own.encode, decoder, needs_version=True)


def decoded(decode: Decode, payload: bytes, **facts: Any) -> Any:
    """Return the value, or PayloadInvalid with the reason; the payload is not changed."""
    try:
        return decode(payload)
    except DanubeError:
        raise
    except Exception as error:  # whatever a library or a model's validator makes of a stranger's bytes
        raise PayloadInvalid(
            f"the payload of {len(payload)} bytes does not follow its schema",
            why=f"{type(error).__name__}: {str(error)[:500]}",
            hint="payload holds the bytes as they were sent",
            **facts,
        ) from error


def encoded(codec: Codec, value: Any) -> bytes:
    """The value's payload; bytes are taken as encoded already.  Raises PayloadInvalid."""
    if isinstance(value, bytes):
        return value
    try:
        return codec.encode(value)
    except DanubeError:
        raise
    except Exception as error:  # as above
        raise PayloadInvalid(
            f"{type(value).__name__} cannot be encoded as {codec.schema_type}",
            why=f"{type(error).__name__}: {str(error)[:500]}",
        ) from error


# -- JSON ---------------------------------------------------------------------------------------


def _pydantic_codec(model: Any) -> Codec:
    def encode(value: Any) -> bytes:
        _check_instance(value, model)
        return cast(str, value.model_dump_json(by_alias=True)).encode()

    definition = _json_schema(model, lambda: model.model_json_schema(by_alias=True))
    return Codec("json_schema", definition, encode, lambda version: model.model_validate_json)


def _dataclass_codec(model: Any) -> Codec:
    encoder = msgspec.json.Encoder()

    def encode(value: Any) -> bytes:
        _check_instance(value, model)
        return encoder.encode(value)

    definition = _json_schema(model, lambda: _whole_schema(model))
    decode = msgspec.json.Decoder(model).decode
    return Codec("json_schema", definition, encode, lambda version: decode)


def _json_schema(model: Any, derive: Callable[[], dict[str, Any]]) -> bytes:
    try:
        return definition_bytes(derive())
    except DanubeError:
        raise
    except Exception as error:  # type hints that no JSON Schema can tell; each library has its own errors
        raise SchemaInvalid(
            f"no JSON Schema can be made of {model.__name__}", why=str(error)[:500], hint="simplify its types"
        ) from error


def _whole_schema(model: Any) -> dict[str, Any]:
    """JSON Schema with the model's own properties on top, where every checker looks; $defs for the rest."""
    (top,), definitions = msgspec.json.schema_components([model], ref_template="#/$defs/{name}")
    name = top["$ref"].rpartition("/")[2]
    whole = dict(definitions[name])
    if f'"#/$defs/{name}"' not in json.dumps(definitions):
        del definitions[name]
    return {**whole, "$defs": definitions} if definitions else whole


def _check_instance(value: Any, model: type[Any]) -> None:
    if not isinstance(value, model):
        raise PayloadInvalid(
            f"a value of this producer is a {model.__name__}, not {type(value).__name__}",
            hint="bytes are sent as they are",
        )


# -- Avro ---------------------------------------------------------------------------------------


def _avro_codec(definition: bytes) -> Codec:
    """Return the codec of bare datums, without a container."""
    import fastavro

    own = _avro_schema(definition)

    def encode(value: Any) -> bytes:
        out = BytesIO()
        fastavro.schemaless_writer(out, own, value, strict_allow_default=True)
        return out.getvalue()

    def decoder(version: SchemaVersion | None) -> Decode:
        if version is None or version.definition == definition:
            return lambda payload: _datum(payload, own, None)
        if version.schema_type != "avro":
            raise PayloadInvalid(
                f"version {version.version} of {version.subject} is {version.schema_type}, not avro"
            )
        writer = _avro_schema(version.definition)
        return lambda payload: _datum(payload, writer, own)

    return Codec("avro", definition, encode, decoder, needs_version=True)


def _avro_schema(definition: bytes) -> Any:
    from fastavro import parse_schema
    from fastavro.schema import SchemaParseException, UnknownType

    try:
        return parse_schema(json.loads(definition))
    except (SchemaParseException, UnknownType, ValueError, KeyError, TypeError, RecursionError) as error:
        raise SchemaInvalid(
            "the Avro schema cannot be used",
            why=f"{type(error).__name__}: {error}",
            hint='a record is {"type": "record", "name": ..., "fields": [...]}; JSON Schema is given as '
            'Schema(definition=..., schema_type="json_schema")',
        ) from None


def _datum(payload: bytes, writer: Any, reader: Any) -> Any:
    from fastavro import schemaless_reader

    source = BytesIO(payload)
    value = schemaless_reader(source, writer, reader)
    if source.tell() != len(payload):
        raise ValueError(f"{len(payload) - source.tell()} bytes follow the datum")
    return value


# -- Protobuf -----------------------------------------------------------------------------------


def _protobuf_codec(model: Any) -> Codec:
    from google.protobuf.descriptor_pb2 import FileDescriptorProto

    descriptor = model.DESCRIPTOR
    if descriptor.containing_type is not None:
        raise SchemaInvalid(
            f"{descriptor.full_name} stands inside another message",
            why="the registry checks payloads against the first message of a definition",
            hint="move it to the top of its file",
        )
    file = FileDescriptorProto()
    descriptor.file.CopyToProto(file)

    def encode(value: Any) -> bytes:
        _check_instance(value, model)
        return cast(bytes, value.SerializeToString())

    definition = file_text(file, descriptor.name).encode()
    return Codec("protobuf", definition, encode, lambda version: model.FromString)


def _no_message_class(payload: bytes) -> Any:
    raise NotSupported(
        "Protobuf values need the generated message class",
        hint="give it as schema=; payload holds the bytes",
    )


# -- plain --------------------------------------------------------------------------------------


def _only_bytes(value: Any) -> bytes:
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    raise TypeError("it takes bytes")


def _text(value: Any) -> bytes:
    if not isinstance(value, str):
        raise TypeError("it takes str")
    return value.encode()


def _number(value: Any) -> bytes:
    return _FLOAT.pack(value) if isinstance(value, float) else _INTEGER.pack(value)


def _number_from(layouts: dict[int, struct.Struct], payload: bytes) -> Any:
    layout = layouts.get(len(payload))
    if layout is None:
        raise ValueError("a number takes 4 or 8 bytes")
    return layout.unpack(payload)[0]


def _ambiguous_number(payload: bytes) -> Any:
    raise NotSupported(
        "the registry does not say whether a number is an integer", hint="give schema=int or schema=float"
    )


def _always(decode: Decode) -> Callable[[SchemaVersion | None], Decode]:
    return lambda version: decode


_PLAIN: dict[Any, Codec] = {
    bytes: Codec("bytes", b"", _only_bytes, _always(bytes)),
    str: Codec("string", b"", _text, _always(bytes.decode)),
    int: Codec("number", b"", _INTEGER.pack, _always(partial(_number_from, _INTEGERS))),
    float: Codec("number", b"", _FLOAT.pack, _always(partial(_number_from, _FLOATS))),
}
_GENERIC: dict[str, tuple[Callable[[Any], bytes], Callable[[SchemaVersion | None], Decode]]] = {
    "bytes": (_only_bytes, _always(bytes)),
    "string": (_text, _always(bytes.decode)),
    "number": (_number, _always(_ambiguous_number)),
    "json_schema": (msgspec.json.encode, _always(msgspec.json.decode)),
}
