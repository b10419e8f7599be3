"""One field of a reader beside the field of a writer with the same number: may the values be read?

Every verdict is about direction.  A reader may be wider than the writer, never narrower: what it reads must
be the value that was written.  Sources: the wire types and the list of compatible changes in
https://protobuf.dev/programming-guides/encoding/ and .../proto3/#updating, the JSON mapping in .../json/.
"""

from __future__ import annotations

from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor as Field

from danube.schema.model import Difference

_NAMES: Final = {
    value: name.removeprefix("TYPE_").lower()
    for name, value in vars(Field).items()
    if name.startswith("TYPE_")
}

_VARINT: Final = frozenset(
    {
        Field.TYPE_INT32,
        Field.TYPE_INT64,
        Field.TYPE_UINT32,
        Field.TYPE_UINT64,
        Field.TYPE_BOOL,
        Field.TYPE_ENUM,
    }
)
_FAMILIES: Final = (
    _VARINT,
    frozenset({Field.TYPE_SINT32, Field.TYPE_SINT64}),
    frozenset({Field.TYPE_FIXED32, Field.TYPE_SFIXED32}),
    frozenset({Field.TYPE_FIXED64, Field.TYPE_SFIXED64}),
    frozenset({Field.TYPE_STRING, Field.TYPE_BYTES}),
)  # types inside one family have the same bytes on the wire

# (writer, reader): every value arrives as it was written, in both forms.
_WIDER: Final = frozenset(
    {
        (Field.TYPE_INT32, Field.TYPE_INT64),
        (Field.TYPE_UINT32, Field.TYPE_UINT64),
        (Field.TYPE_UINT32, Field.TYPE_INT64),
        (Field.TYPE_SINT32, Field.TYPE_SINT64),
    }
)
# (writer, reader): equal bytes, but JSON writes true, a name or text where a number or base64 is read.
_OTHER_JSON: Final = frozenset(
    {(Field.TYPE_BOOL, number) for number in _VARINT - {Field.TYPE_BOOL, Field.TYPE_ENUM}}
    | {(Field.TYPE_ENUM, number) for number in (Field.TYPE_INT32, Field.TYPE_INT64)}
    | {(Field.TYPE_STRING, Field.TYPE_BYTES)}
)


def shown_type(field: Field) -> str:
    """A field's cardinality and type as its author wrote them: ``repeated int32``, ``map<string, int64>``."""
    if field.message_type is not None and holds_map(field):
        entry = field.message_type.fields_by_number
        return f"map<{shown_type(entry[1])}, {shown_type(entry[2])}>"
    kind = field.message_type or field.enum_type
    name = kind.full_name if kind is not None else _NAMES[field.type]
    if field.type == Field.TYPE_GROUP:
        name = f"group {name}"
    return f"repeated {name}" if field.is_repeated else name


def holds_map(field: Field) -> bool:
    message = field.message_type
    return message is not None and message.GetOptions().map_entry


def type_difference(path: str, reader: Field, writer: Field) -> Difference | None:
    """Return why the reader's type does not take values of the writer's type; None if it does."""
    if holds_map(reader) != holds_map(writer):
        return _difference(
            path, "map_changed", reader, writer, "a map and a plain field are not read as each other",
            "add a field under a new number",
        )  # fmt: skip
    if reader.is_repeated != writer.is_repeated:
        return _difference(
            path, "field_cardinality_changed", reader, writer,
            "one value and a list of values are not read as each other", "add a field under a new number",
        )  # fmt: skip
    if reader.type != writer.type:
        return _scalar_difference(path, reader, writer)
    if reader.message_type is None or writer.message_type is None:
        return None
    names = (reader.message_type.full_name, writer.message_type.full_name)
    if names[0] != names[1] and any(name.startswith("google.protobuf.") for name in names):
        return _difference(
            path, "field_type_changed", reader, writer,
            "the well-known types have a JSON form of their own", "add a field under a new number",
        )  # fmt: skip
    return None


def _scalar_difference(path: str, reader: Field, writer: Field) -> Difference | None:
    pair = (writer.type, reader.type)
    if pair in _WIDER:
        return None
    enum = reader.enum_type
    if writer.type == Field.TYPE_INT32 and enum is not None and not enum.is_closed:
        return None
    if pair in _OTHER_JSON:
        return _difference(
            path, "field_json_form_changed", reader, writer,
            "the bytes are read alike, but the JSON form is another one", "add a field under a new number",
        )  # fmt: skip
    if any(set(pair) <= family for family in _FAMILIES):
        return _difference(
            path, "field_type_narrowed", reader, writer,
            f"{shown_type(reader)} cannot hold every value of {shown_type(writer)}",
            "keep the type, or let readers widen it first",
        )  # fmt: skip
    return _difference(
        path, "field_type_changed", reader, writer,
        f"{shown_type(writer)} lies otherwise on the wire than {shown_type(reader)}",
        "add a field under a new number and reserve the old one",
    )  # fmt: skip


def default_difference(path: str, reader: Field, writer: Field) -> Difference | None:
    """A value that the writer left out must be read as the writer's default."""
    if reader.is_repeated or reader.message_type is not None or writer.is_required:
        return None
    # The second test is for NaN on both sides.
    ours, theirs = _plain(reader.default_value), _plain(writer.default_value)
    if ours == theirs or (ours != ours and theirs != theirs):
        return None
    return Difference(
        path=path, rule="field_default_changed", reader=_shown(ours), writer=_shown(theirs),
        message="a value that was left out is read as another default", hint="keep the default",
    )  # fmt: skip


def _plain(value: Any) -> Any:
    return value.encode() if isinstance(value, str) else value


def _shown(value: Any) -> Any:
    if isinstance(value, bytes):
        return value[:80].decode("utf-8", "backslashreplace")
    return value if not isinstance(value, float) or abs(value) < float("inf") else str(value)


def _difference(path: str, rule: str, reader: Field, writer: Field, message: str, hint: str) -> Difference:
    return Difference(
        path=path, rule=rule, message=message, reader=shown_type(reader), writer=shown_type(writer), hint=hint
    )
