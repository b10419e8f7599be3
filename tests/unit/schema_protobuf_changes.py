"""Protobuf changes with what they break: the older body, the newer body, and (path, rule) for each promise.

``backward``: the newer reads what the older wrote.  ``forward``: the older reads what the newer wrote.
``freed``: numbers and names that the newer one set free.  A body without ``syntax`` or ``edition`` is proto3.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Broken = list[tuple[str, str]]


@dataclass(frozen=True)
class Change:
    name: str
    old: str
    new: str
    backward: Broken = field(default_factory=list)
    forward: Broken = field(default_factory=list)
    freed: Broken = field(default_factory=list)


def _field(name: str, old: str, new: str, backward: str = "", forward: str = "") -> Change:
    """A change of one field ``x`` inside ``message M``."""
    path = "M.x"
    return Change(
        name, f"message M {{ {old} }}", f"message M {{ {new} }}",
        [(path, backward)] if backward else [], [(path, forward)] if forward else [],
    )  # fmt: skip


def _types(old: str, new: str, backward: str = "", forward: str = "") -> Change:
    return _field(f"{old}_to_{new}", f"{old} x = 1;", f"{new} x = 1;", backward, forward)


CARDINALITY = ["field_cardinality_changed"] * 2
NARROWED, CHANGED, JSON = "field_type_narrowed", "field_type_changed", "field_json_form_changed"

SCALARS = [
    _types("int32", "int64", "", NARROWED),
    _types("uint32", "uint64", "", NARROWED),
    _types("uint32", "int64", "", NARROWED),
    _types("sint32", "sint64", "", NARROWED),
    _types("int32", "uint32", NARROWED, NARROWED),
    _types("int32", "uint64", NARROWED, NARROWED),
    _types("int64", "uint64", NARROWED, NARROWED),
    _types("bool", "int32", JSON, NARROWED),
    _types("bool", "uint64", JSON, NARROWED),
    _types("string", "bytes", JSON, NARROWED),
    _types("fixed32", "sfixed32", NARROWED, NARROWED),
    _types("fixed64", "sfixed64", NARROWED, NARROWED),
    _types("int32", "sint32", CHANGED, CHANGED),
    _types("int64", "sint64", CHANGED, CHANGED),
    _types("int32", "fixed32", CHANGED, CHANGED),
    _types("fixed32", "fixed64", CHANGED, CHANGED),
    _types("float", "double", CHANGED, CHANGED),
    _types("float", "fixed32", CHANGED, CHANGED),
    _types("int32", "string", CHANGED, CHANGED),
    _types("string", "double", CHANGED, CHANGED),
]

_ENUM = "enum E { ZERO = 0; ONE = 1; }"
_CLOSED = "enum E { option features.enum_type = CLOSED; ZERO = 0; ONE = 1; }"
_PART = "message P { int32 a = 1; }"

FIELDS = [
    _field("nothing", "int32 x = 1;", "int32 x = 1; /* the same */"),
    _field("optional_added", "int32 x = 1;", "optional int32 x = 1;"),
    _field("singular_to_repeated", "int32 x = 1;", "repeated int32 x = 1;", *CARDINALITY),
    _field("string_to_list", "string x = 1;", "repeated string x = 1;", *CARDINALITY),
    _field("unpacked", "repeated int32 x = 1;", "repeated int32 x = 1 [packed = false];"),
    _field("list_widened", "repeated int32 x = 1;", "repeated int64 x = 1;", "", NARROWED),
    _field("map_to_string", "map<string, int32> x = 1;", "string x = 1;", "map_changed", "map_changed"),
    _field("map_to_entries", f"{_PART} map<int32, int32> x = 1;", f"{_PART} repeated P x = 1;", "map_changed",
           "map_changed"),
    _field("enum_to_int32", f"{_ENUM} E x = 1;", f"{_ENUM} int32 x = 1;", JSON, ""),
    _field("enum_to_bool", f"{_ENUM} E x = 1;", f"{_ENUM} bool x = 1;", NARROWED, NARROWED),
    _field("message_to_bytes", f"{_PART} P x = 1;", f"{_PART} bytes x = 1;", CHANGED, CHANGED),
    _field("json_name", "int32 x = 1;", 'int32 x = 1 [json_name = "other"];', "", "field_json_name_changed"),
    _field("json_name_said_aloud", "int32 x = 1;", 'int32 x = 1 [json_name = "x"];'),
    _field("deprecated", "int32 x = 1;", "int32 x = 1 [deprecated = true];"),
    Change("renamed", "message M { int32 a = 1; }", "message M { int32 b = 1; }",
           [("M.b", "field_renamed")], [("M.a", "field_renamed")]),
    Change("renamed_with_json_name", "message M { int32 a = 1; }",
           'message M { int32 b = 1 [json_name = "a"]; }'),
    Change("number_reused", "message M { int32 a = 1; }", "message M { string b = 1; }",
           [("M.b", "field_number_reused")], [("M.a", "field_number_reused")]),
    Change("renumbered", "message M { int32 a = 1; }", "message M { int32 a = 2; reserved 1; }",
           [("M.a", "field_renumbered")], [("M.a", "field_renumbered")]),
    Change("swapped", "message M { int32 a = 1; int32 b = 2; }", "message M { int32 a = 2; int32 b = 1; }",
           [("M.b", "field_number_reused"), ("M.a", "field_number_reused")],
           [("M.a", "field_number_reused"), ("M.b", "field_number_reused")]),
    Change("added", "message M { int32 a = 1; }", "message M { int32 a = 1; string b = 2; }"),
    Change("removed", "message M { int32 a = 1; string b = 2; }", "message M { int32 a = 1; }",
           freed=[("M.b", "field_not_reserved")]),
    Change("removed_and_reserved", "message M { int32 a = 1; string b = 2; }",
           'message M { int32 a = 1; reserved 2; reserved "b"; }'),
    Change("reserved_number_used", "message M { int32 a = 1; reserved 2; }",
           "message M { int32 a = 1; int32 c = 2; }", freed=[("M.c", "reserved_number_used")]),
    Change("reserved_name_used", 'message M { int32 a = 1; reserved "b"; }',
           "message M { int32 a = 1; int32 b = 2; }", freed=[("M.b", "reserved_name_used")]),
    Change("reservation_removed", "message M { int32 a = 1; reserved 5 to 9; }",
           "message M { int32 a = 1; reserved 5 to 7; }", freed=[("M", "reservation_removed")]),
    Change("reserved_name_removed", 'message M { int32 a = 1; reserved "b"; }',
           "message M { int32 a = 1; }", freed=[("M", "reservation_removed")]),
    Change("reservation_split", "message M { int32 a = 1; reserved 5 to 9; }",
           "message M { int32 a = 1; reserved 5 to 7, 8, 9 to 20; }"),
]  # fmt: skip

ONEOFS = [
    Change("into_one_oneof", "message M { int32 a = 1; int32 b = 2; }",
           "message M { oneof o { int32 a = 1; int32 b = 2; } }", [("M.o", "field_moved_into_oneof")]),
    Change("single_field_into_new_oneof", "message M { int32 a = 1; }",
           "message M { oneof o { int32 a = 1; int32 b = 2; } }"),
    Change("out_of_a_oneof", "message M { oneof o { int32 a = 1; int32 b = 2; } }",
           "message M { oneof o { int32 a = 1; } int32 b = 2; }", [], [("M.o", "field_moved_into_oneof")]),
    Change("two_oneofs_joined", "message M { oneof o { int32 a = 1; } oneof p { int32 b = 2; } }",
           "message M { oneof o { int32 a = 1; int32 b = 2; } }", [("M.o", "field_moved_into_oneof")]),
    Change("oneof_renamed", "message M { oneof o { int32 a = 1; int32 b = 2; } }",
           "message M { oneof p { int32 a = 1; int32 b = 2; } }"),
    Change("oneof_grows", "message M { oneof o { int32 a = 1; } }",
           "message M { oneof o { int32 a = 1; string b = 2; } }"),
]  # fmt: skip


def _values(values: str) -> str:
    return f"enum E {{ {values} }}\nmessage M {{ E x = 1; }}"


def _closed(values: str) -> str:
    return f'syntax = "proto2"; enum E {{ {values} }}\nmessage M {{ optional E x = 1; }}'


ENUMS = [
    Change("value_added", _values("ZERO = 0;"), _values("ZERO = 0; ONE = 1;")),
    Change("value_removed", _values("ZERO = 0; ONE = 1;"), _values("ZERO = 0;"),
           freed=[("M.x.ONE", "enum_value_not_reserved")]),
    Change("value_removed_and_reserved", _values("ZERO = 0; ONE = 1;"),
           _values('ZERO = 0; reserved 1; reserved "ONE";')),
    Change("value_renumbered", _values("ZERO = 0; ONE = 1;"), _values("ZERO = 0; ONE = 2; reserved 1;"),
           [("M.x.ONE", "enum_value_renumbered")], [("M.x.ONE", "enum_value_renumbered")]),
    Change("value_renamed", _values("ZERO = 0; ONE = 1;"), _values("ZERO = 0; UNO = 1;"),
           [("M.x.ONE", "enum_value_renamed")], [("M.x.UNO", "enum_value_renamed")]),
    Change("value_renamed_by_alias", _values("ZERO = 0; ONE = 1;"),
           _values("option allow_alias = true; ZERO = 0; ONE = 1; UNO = 1;")),
    Change("alias_first", _values("ZERO = 0; ONE = 1;"),
           _values("option allow_alias = true; ZERO = 0; UNO = 1; ONE = 1;"), [],
           [("M.x.UNO", "enum_value_renamed")]),
    Change("reserved_value_used", _values("ZERO = 0; reserved 3;"), _values("ZERO = 0; THREE = 3;"),
           freed=[("M.x.THREE", "reserved_number_used")]),
    Change("closed_value_added", _closed("ZERO = 0;"), _closed("ZERO = 0; ONE = 1;"), [],
           [("M.x.ONE", "enum_value_unknown")]),
    Change("closed_default_changed", _closed("A = 1; B = 2;"), _closed("B = 2; A = 1;"),
           [("M.x", "field_default_changed")], [("M.x", "field_default_changed")]),
    Change("closed", f'edition = "2023"; {_ENUM} message M {{ E x = 1; }}',
           f'edition = "2023"; {_CLOSED} message M {{ E x = 1; }}', [("M.x", "enum_closed")]),
    Change("int32_to_closed_enum", f'edition = "2023"; {_CLOSED} message M {{ int32 x = 1; }}',
           f'edition = "2023"; {_CLOSED} message M {{ E x = 1; }}', [("M.x", NARROWED)], [("M.x", JSON)]),
    Change("enum_type_renamed", f"{_ENUM} message M {{ E x = 1; }}",
           f"{_ENUM.replace('E {', 'F {')} message M {{ F x = 1; }}"),
]  # fmt: skip


def _old(body: str) -> str:
    return f'syntax = "proto2"; message M {{ {body} }}'


PROTO2 = [
    Change("required_added", _old("optional int32 a = 1;"),
           _old("optional int32 a = 1; required int32 b = 2;"), [("M.b", "field_required")]),
    Change("required_removed", _old("required int32 a = 1;"), _old("reserved 1;"), [],
           [("M.a", "field_required")]),
    Change("required_to_optional", _old("required int32 a = 1;"), _old("optional int32 a = 1;"), [],
           [("M.a", "field_required")]),
    Change("default_changed", _old("optional int32 a = 1 [default = 5];"),
           _old("optional int32 a = 1 [default = 6];"),
           [("M.a", "field_default_changed")], [("M.a", "field_default_changed")]),
    Change("default_zero_said_aloud", _old("optional int32 a = 1;"),
           _old("optional int32 a = 1 [default = 0];")),
    Change("default_nan_kept", _old("optional float a = 1 [default = nan];"),
           _old("optional float a = 1 [default = nan]; optional int32 b = 2;")),
    Change("default_infinite", _old("optional float a = 1;"), _old("optional float a = 1 [default = inf];"),
           [("M.a", "field_default_changed")], [("M.a", "field_default_changed")]),
    Change("default_bytes", _old('optional bytes a = 1 [default = "\\377"];'), _old("optional bytes a = 1;"),
           [("M.a", "field_default_changed")], [("M.a", "field_default_changed")]),
    Change("group_to_message", _old("optional group G = 1 { optional int32 a = 1; }"),
           _old("message G { optional int32 a = 1; } optional G g = 1;"),
           [("M.g", CHANGED)], [("M.g", CHANGED)]),
    Change("group_kept", _old("optional group G = 1 { optional int32 a = 1; }"),
           _old("optional group G = 1 { optional int64 a = 1; }"), [], [("M.g.a", NARROWED)]),
    Change("proto2_to_proto3", _old("optional int32 a = 1;"), "message M { optional int32 a = 1; }"),
    Change("proto2_default_to_proto3", _old("optional int32 a = 1 [default = 7];"),
           "message M { int32 a = 1; }",
           [("M.a", "field_default_changed")], [("M.a", "field_default_changed")]),
    Change("proto3_to_edition", "message M { int32 a = 1; }",
           'edition = "2023"; option features.field_presence = IMPLICIT; message M { int32 a = 1; }'),
    Change("legacy_required", 'edition = "2023"; message M { int32 a = 1; }',
           'edition = "2023"; message M { int32 a = 1 [features.field_presence = LEGACY_REQUIRED]; }',
           [("M.a", "field_required")]),
    Change("extension_changed",
           _old("extensions 100 to 200;") + " extend M { optional int32 e = 100; }",
           _old("extensions 100 to 200;") + " extend M { optional string e = 100; }",
           [("M.[e]", CHANGED)], [("M.[e]", CHANGED)]),
    Change("extension_renamed",
           _old("extensions 100 to 200;") + " extend M { optional int32 e = 100; }",
           _old("extensions 100 to 200;") + " extend M { optional int32 f = 100; }",
           [("M.[f]", "field_renamed")], [("M.[e]", "field_renamed")]),
]  # fmt: skip


def _nested(inner: str, name: str = "P") -> str:
    return f"message M {{ repeated {name} p = 1; map<string, {name}> by = 2; }} message {name} {{ {inner} }}"


NESTED = [
    Change("nested_type", _nested("int32 a = 1;"), _nested("string a = 1;"),
           [("M.p.a", CHANGED)], [("M.p.a", CHANGED)]),
    Change("nested_type_renamed", _nested("int32 a = 1;"), _nested("int32 a = 1;", "Q")),
    Change("nested_type_renamed_and_changed", _nested("int32 a = 1;"), _nested("int64 a = 1;", "Q"), [],
           [("M.p.a", NARROWED)]),
    Change("recursive", "message M { M child = 1; int32 a = 2; }",
           "message M { M child = 1; int64 a = 2; }", [],
           [("M.a", NARROWED)]),
    Change("mutually_recursive",
           "message M { A a = 1; } message A { B b = 1; } message B { A a = 1; bool v = 2; }",
           "message M { A a = 1; } message A { B b = 1; } message B { A a = 1; float v = 2; }",
           [("M.a.b.v", CHANGED)], [("M.a.b.v", CHANGED)]),
    Change("map_value", "message M { map<string, int32> m = 1; }",
           "message M { map<string, int64> m = 1; }", [],
           [("M.m.value", NARROWED)]),
    Change("map_key", "message M { map<int32, int32> m = 1; }", "message M { map<string, int32> m = 1; }",
           [("M.m.key", CHANGED)], [("M.m.key", CHANGED)]),
    Change("map_of_messages",
           "message M { map<string, P> m = 1; } message P { int32 a = 1; }",
           "message M { map<string, P> m = 1; } message P { bytes a = 1; }",
           [("M.m.value.a", CHANGED)], [("M.m.value.a", CHANGED)]),
    Change("package", "package a; message M { int32 a = 1; }", "package b.c; message M { int32 a = 1; }"),
    Change("payload_renamed", "message M { int32 a = 1; }", "message N { int32 a = 1; }",
           [("N", "payload_message_changed")], [("M", "payload_message_changed")]),
    Change("another_message_first", "message M { int32 a = 1; } message N { int32 a = 1; }",
           "message N { int32 a = 1; } message M { int32 a = 1; }",
           [("N", "payload_message_changed")], [("M", "payload_message_changed")]),
    Change("unreachable_message", "message M { int32 a = 1; } message N { int32 a = 1; }",
           "message M { int32 a = 1; } message N { string z = 1; }"),
    Change("well_known_kept", 'import "google/protobuf/timestamp.proto"; '
           "message M { google.protobuf.Timestamp t = 1; }",
           'import "google/protobuf/timestamp.proto"; '
           "message M { google.protobuf.Timestamp t = 1; int32 a = 2; }"),
    Change("well_known_to_own", 'import "google/protobuf/timestamp.proto"; '
           "message M { google.protobuf.Timestamp t = 1; }",
           "message M { T t = 1; } message T { int64 seconds = 1; int32 nanos = 2; }",
           [("M.t", CHANGED)], [("M.t", CHANGED)]),
    Change("wrapper_to_scalar", 'import "google/protobuf/wrappers.proto"; '
           "message M { google.protobuf.Int32Value v = 1; }", "message M { int32 v = 1; }",
           [("M.v", CHANGED)], [("M.v", CHANGED)]),
    Change("nested_removed_number", _nested("int32 a = 1; int32 b = 2;"), _nested("int32 a = 1;"),
           freed=[("M.p.b", "field_not_reserved")]),
]  # fmt: skip

CHANGES = [*SCALARS, *FIELDS, *ONEOFS, *ENUMS, *PROTO2, *NESTED]
