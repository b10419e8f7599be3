"""The text of a ``.proto`` file from its descriptor; a registry stores it for a generated message class.

Works on a ``FileDescriptorProto`` without importing protobuf; numbers of types and labels are those of
descriptor.proto.  The file's own messages and enums are written.  Imports must be google's well-known types,
which every compiler includes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from danube.errors import SchemaInvalid

WELL_KNOWN = "google/protobuf/"
_TYPES = {
    1: "double", 2: "float", 3: "int64", 4: "uint64", 5: "int32", 6: "fixed64", 7: "fixed32", 8: "bool",
    9: "string", 12: "bytes", 13: "uint32", 15: "sfixed32", 16: "sfixed64", 17: "sint32", 18: "sint64",
}  # fmt: skip
_GROUP, _STRING, _BYTES = 10, 9, 12
_LABELS = {1: "optional", 2: "required", 3: "repeated"}
_REPEATED = 3
_FIELD_NUMBER_MAX = 536_870_911
_ENUM_NUMBER_MAX = 2**31 - 1


def file_text(file: Any, first: str) -> str:
    """The definition with the message ``first`` (a name without its package) before all others.

    Raises SchemaInvalid if one text cannot express it: other imports, groups, extensions, editions.
    """
    _check(file)
    proto3 = file.syntax == "proto3"
    lines = [f'syntax = "{file.syntax or "proto2"}";']
    if file.package:
        lines.append(f"package {file.package};")
    lines += [f'import "{name}";' for name in file.dependency]
    messages = sorted(file.message_type, key=lambda one: one.name != first)
    for message in messages:
        lines += ["", *_message(message, proto3)]
    for enum in file.enum_type:
        lines += ["", *_enum(enum)]
    return "\n".join(lines) + "\n"


def _check(file: Any) -> None:
    foreign = [name for name in file.dependency if not name.startswith(WELL_KNOWN)]
    problem = ""
    if foreign:
        problem = f"it imports {foreign[0]}"
    elif file.syntax not in ("", "proto2", "proto3"):
        problem = "it uses an edition"
    elif file.extension or any(message.extension for message in file.message_type):
        problem = "it has extensions"
    if problem:
        raise SchemaInvalid(
            f"{file.name} cannot be told in one text",
            why=problem,
            hint="put all messages into one file, or give the text: Schema(definition=..., "
            'schema_type="protobuf")',
        )


def _message(message: Any, proto3: bool) -> list[str]:
    maps = {one.name: one for one in message.nested_type if one.options.map_entry}
    lines = [f"message {message.name} {{"]
    for nested in message.nested_type:
        if nested.name not in maps:
            lines += _indented(_message(nested, proto3))
    for enum in message.enum_type:
        lines += _indented(_enum(enum))
    open_oneof = -1
    for field in message.field:
        oneof = field.oneof_index if field.HasField("oneof_index") and not field.proto3_optional else -1
        if oneof != open_oneof:
            if open_oneof >= 0:
                lines.append("  }")
            if oneof >= 0:
                lines.append(f"  oneof {message.oneof_decl[oneof].name} {{")
            open_oneof = oneof
        lines.append(("    " if oneof >= 0 else "  ") + _field(field, maps, proto3, oneof >= 0))
    if open_oneof >= 0:
        lines.append("  }")
    lines += _reserved(message, _FIELD_NUMBER_MAX, exclusive=True)
    if message.extension_range:
        ranges = [_range(one.start, one.end - 1, _FIELD_NUMBER_MAX) for one in message.extension_range]
        lines.append(f"  extensions {', '.join(ranges)};")
    return [*lines, "}"]


def _field(field: Any, maps: dict[str, Any], proto3: bool, in_oneof: bool) -> str:
    if field.type == _GROUP:
        raise SchemaInvalid(f"field {field.name} is a group", hint="use a message in its place")
    entry = maps.get(field.type_name.rpartition(".")[2]) if field.label == _REPEATED else None
    if entry is not None:
        key, value = entry.field
        kind = f"map<{_type(key)}, {_type(value)}>"
    else:
        kind = _type(field)
        label = _LABELS[field.label]
        if not in_oneof and (not proto3 or label == "repeated" or field.proto3_optional):
            kind = f"{label} {kind}"
    options = ", ".join(_options(field))
    return f"{kind} {field.name} = {field.number}{f' [{options}]' if options else ''};"


def _options(field: Any) -> Iterator[str]:
    if field.HasField("default_value"):
        quoted = field.type in (_STRING, _BYTES)
        yield f"default = {_quoted(field) if quoted else field.default_value}"
    if field.options.HasField("packed"):
        yield f"packed = {str(field.options.packed).lower()}"
    if field.options.deprecated:
        yield "deprecated = true"


def _quoted(field: Any) -> str:
    # The default of a bytes field is escaped already, as in C.
    return f'"{field.default_value}"' if field.type == _BYTES else json.dumps(field.default_value)


def _type(field: Any) -> str:
    return _TYPES.get(field.type) or field.type_name


def _enum(enum: Any) -> list[str]:
    lines = [f"enum {enum.name} {{"]
    if enum.options.allow_alias:
        lines.append("  option allow_alias = true;")
    lines += [f"  {one.name} = {one.number};" for one in enum.value]
    return [*lines, *_reserved(enum, _ENUM_NUMBER_MAX, exclusive=False), "}"]


def _reserved(holder: Any, number_max: int, *, exclusive: bool) -> list[str]:
    lines = []
    ranges = [_range(one.start, one.end - exclusive, number_max) for one in holder.reserved_range]
    if ranges:
        lines.append(f"  reserved {', '.join(ranges)};")
    if holder.reserved_name:
        lines.append(f"  reserved {', '.join(json.dumps(name) for name in holder.reserved_name)};")
    return lines


def _range(first: int, last: int, number_max: int) -> str:
    if first == last:
        return str(first)
    return f"{first} to {'max' if last >= number_max else last}"


def _indented(lines: list[str]) -> list[str]:
    return [f"  {line}" for line in lines]
