"""Protobuf payloads as plain values, by the descriptors that the broker compiled when it registered them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pyarrow as pa
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from danube.errors import PayloadInvalid
from danube.schema.model import Definition, SchemaType
from danube.schema.protobuf.descriptors import open_definition

_TYPES: Final = {
    FieldDescriptor.CPPTYPE_INT32: pa.int32(),
    FieldDescriptor.CPPTYPE_INT64: pa.int64(),
    FieldDescriptor.CPPTYPE_UINT32: pa.int64(),
    FieldDescriptor.CPPTYPE_UINT64: pa.decimal128(20, 0),
    FieldDescriptor.CPPTYPE_DOUBLE: pa.float64(),
    FieldDescriptor.CPPTYPE_FLOAT: pa.float32(),
    FieldDescriptor.CPPTYPE_BOOL: pa.bool_(),
    FieldDescriptor.CPPTYPE_ENUM: pa.string(),
}
_TIMESTAMP: Final = "google.protobuf.Timestamp"
_MOMENT: Final = pa.timestamp("us", tz="UTC")


def message_type(definition: bytes, compiled: bytes) -> pa.DataType:
    """The column type of a definition's payload, its first message."""
    return _struct(_descriptor(definition, compiled), ())


def decoder_of(definition: bytes, compiled: bytes) -> Callable[[bytes], dict[str, Any]]:
    """Payload to values by field name; PayloadInvalid for bytes that are not such a message."""
    descriptor = _descriptor(definition, compiled)
    message_class = GetMessageClass(descriptor)

    def decode(payload: bytes) -> dict[str, Any]:
        message = message_class()
        try:
            message.ParseFromString(payload)
        except DecodeError as error:
            raise PayloadInvalid(f"the payload is not a {descriptor.full_name}", why=str(error)) from None
        found: dict[str, Any] = _values(message)
        return found

    return decode


def _descriptor(definition: bytes, compiled: bytes) -> Descriptor:
    opened = Definition(schema_type=SchemaType.PROTOBUF, text=definition, compiled=compiled)
    return open_definition(opened).payload


def _struct(descriptor: Descriptor, above: tuple[str, ...]) -> pa.DataType:
    """A message that contains itself stays bytes where it does; one without fields is null text."""
    if descriptor.full_name == _TIMESTAMP:
        return _MOMENT
    if descriptor.full_name in above:
        return pa.binary()
    inner = (*above, descriptor.full_name)
    fields = [pa.field(one.name, _field_type(one, inner)) for one in descriptor.fields]
    return pa.struct(fields) if fields else pa.string()


def _field_type(field: FieldDescriptor, above: tuple[str, ...]) -> pa.DataType:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        entry = field.message_type.fields_by_number
        return pa.map_(_single_type(entry[1], above), _single_type(entry[2], above))
    single = _single_type(field, above)
    return pa.list_(pa.field("element", single)) if field.is_repeated else single


def _single_type(field: FieldDescriptor, above: tuple[str, ...]) -> pa.DataType:
    if field.message_type is not None:
        return _struct(field.message_type, above)
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return pa.binary() if field.type == FieldDescriptor.TYPE_BYTES else pa.string()
    return _TYPES[field.cpp_type]


def _values(message: Message, above: tuple[str, ...] = ()) -> Any:
    descriptor = message.DESCRIPTOR
    if descriptor.full_name == _TIMESTAMP:
        return message.ToDatetime() if hasattr(message, "ToDatetime") else _moment(message)
    if descriptor.full_name in above:
        return message.SerializeToString()
    inner = (*above, descriptor.full_name)
    return {field.name: _value(message, field, inner) for field in descriptor.fields}


def _value(message: Message, field: Any, above: tuple[str, ...]) -> Any:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        single = field.message_type.fields_by_number[2]
        found = getattr(message, field.name)
        return [(key, _single(found[key], single, above)) for key in found]
    if field.is_repeated:
        return [_single(one, field, above) for one in getattr(message, field.name)]
    if field.has_presence and not message.HasField(field.name):
        return None
    return _single(getattr(message, field.name), field, above)


def _single(value: Any, field: FieldDescriptor, above: tuple[str, ...]) -> Any:
    if field.message_type is not None:
        return _values(value, above)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return known.name if known is not None else str(value)
    return value


def _moment(message: Any) -> int:
    """A timestamp of a private pool has no methods of its own: microseconds since 1970 UTC."""
    return int(message.seconds) * 1_000_000 + int(message.nanos) // 1_000
