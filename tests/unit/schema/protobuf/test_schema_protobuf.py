"""Protobuf definitions: what compiles, what is refused and how it is said, and what payloads pass."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet

from danube.errors import DanubeError, Overloaded, SchemaInvalid
from danube.limits import SCHEMA_DEFINITION_BYTES_MAX
from danube.schema import kinds
from danube.schema.limited import door as limited
from danube.schema.model import Checks, Compatibility, Definition, SchemaType
from danube.schema.protobuf import compatibility as protobuf_compatibility
from danube.schema.protobuf import kind as protobuf
from danube.schema.protobuf import limits as protobuf_limits
from danube.schema.verdict import Older, Request
from tests.processor_time import processor_time_within

ORDER = b"""syntax = "proto3";
package shop;
import "google/protobuf/timestamp.proto";
message Order {
  int32 id = 1;
  string name = 2;
  repeated Item items = 3;
  map<string, Item> by_name = 4;
  google.protobuf.Timestamp at = 5;
  State state = 6;
  Item main = 7;
}
message Item { int64 price = 1; Order order = 2; }
enum State { NEW = 0; DONE = 1; }
"""


def examine(text: bytes | str) -> Definition:
    return kinds.examine(SchemaType.PROTOBUF, text.encode() if isinstance(text, str) else text)


def refusal(text: bytes | str) -> SchemaInvalid:
    with pytest.raises(SchemaInvalid) as caught:
        examine(text)
    return caught.value


def check(text: bytes | str) -> kinds.Validator:
    return kinds.validator(examine(text))


def test_a_definition_is_compiled_with_what_it_imports() -> None:
    definition = examine(ORDER)
    files = FileDescriptorSet.FromString(definition.compiled)
    assert [file.name for file in files.file] == ["google/protobuf/timestamp.proto", "definition.proto"]
    assert definition.text == ORDER
    assert definition.fingerprint.startswith("sha256:") and len(definition.fingerprint) == 71


def test_comments_and_spaces_do_not_change_the_fingerprint() -> None:
    one = examine('syntax = "proto3"; message M { int32 a_b = 1; }')
    same = examine(
        '// words\nsyntax = "proto3";\n\n/* more */ message M {\n  int32 a_b = 1 [json_name = "aB"];  }\n'
    )
    other = examine('syntax = "proto3"; message M { int32 a_b = 2; }')
    assert one.fingerprint == same.fingerprint != other.fingerprint
    assert one.compiled != b"" and one.compiled == examine(one.text).compiled


@pytest.mark.parametrize("name", sorted(protobuf_limits.IMPORTABLE))
def test_each_well_known_file_can_be_imported(name: str) -> None:
    definition = examine(f'syntax = "proto3"; import "{name}"; message M {{ int32 a = 1; }}')
    assert kinds.validator(definition)(b"\x08\x01") is None


@pytest.mark.parametrize("edition", ["2023", "2024"])
def test_editions_compile(edition: str) -> None:
    assert check(f'edition = "{edition}"; message M {{ int32 a = 1; }}')(b"\x08\x01") is None


@pytest.mark.parametrize(
    "line",
    [
        'import "other.proto";',
        'import "/etc/passwd";',
        'import "../../../etc/passwd";',
        'import "google/protobuf/../../x.proto";',
        'import public "definition.proto";',
        'import weak "x.proto";',
        "import /* a comment */ \"x\" '.proto';",
        'import "google/protobuf/compiler/plugin.proto";',
        'import "0";',
        'import "google/\\x70rotobuf/any.proto";',
        "import x;",
        'message A { } import "later.proto";',
    ],
)
def test_no_other_file_is_read(line: str) -> None:
    error = refusal(f'syntax = "proto3";\n{line} message M {{ int32 a = 1; }}')
    assert "imports" in error.what and "line 2" in error.why and error.hint
    assert error.facts["line"] == 2


def test_a_well_known_import_may_be_said_in_two_strings() -> None:
    examine(
        'syntax = "proto3"; import "google/protobuf/" \'any.proto\'; message M { google.protobuf.Any a = 1; }'
    )


def test_a_field_may_be_called_import() -> None:
    examine('syntax = "proto3"; message M { message import { int32 a = 1; } import package = 1; }')


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("message M {\n  int32 a = 1;\n}", "line 2, column 3: Expected"),
        ('syntax = "proto3";\nmessage M { Missing a = 1; }', 'line 2, column 13: "Missing" is not defined'),
        ('syntax = "proto3"; message M { int32 a = 1; int32 a = 2; }', "already defined"),
        ('syntax = "proto3"; message M { int32 a = 1; int32 b = 1; }', "already been used"),
        ('syntax = "proto3"; message M { int32 a = 536870912; }', "line 1"),
        ('syntax = "proto9"; message M { }', "proto9"),
        ('edition = "2999"; message M { }', "2999"),
        ('syntax = "proto3"; message M { ', "end of input"),
        ('syntax = "proto3"; message M { string s = "', "line 1"),
        ('syntax = "proto3"; enum E { ONE = 1; } message M { E e = 1; }', "zero"),
        ("{}", "line 1, column 1"),
        ("order = b'quoted'", "line 1"),
    ],
)
def test_what_does_not_compile_is_named_with_its_place(text: str, why: str) -> None:
    error = refusal(text)
    assert why in error.why
    assert "b'" not in error.why.replace("b'quoted'", "")
    assert error.hint


def test_many_mistakes_are_shown_in_part() -> None:
    fields = "\n".join(f"Missing{number} f{number} = {number};" for number in range(1, 21))
    error = refusal(f'syntax = "proto3"; message M {{ {fields} }}')
    assert error.why.count("is not defined") == 5 and "and 15 more" in error.why


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (b"", "no message"),
        (b'syntax = "proto3"; enum E { A = 0; }', "no message"),
        (b'syntax = "proto3"; message M { }\n\xff', "not UTF-8"),
        (b'syntax = "proto3"; message M { }\0', "NUL"),
        (b'syntax = "proto2"; message M { option message_set_wire_format = true; extensions 4 to max; }',
         "message_set_wire_format"),
        (b'syntax = "proto3"; message A { message M { option message_set_wire_format = true; } }', "compile"),
        (b'syntax = "proto2"; message A { message M { option message_set_wire_format = true; '
         b"extensions 4 to max; } }", "message_set_wire_format"),
    ],
)  # fmt: skip
def test_what_cannot_describe_payloads_is_refused(text: bytes, word: str) -> None:
    error = refusal(text)
    assert word in error.what


BOMBS: dict[str, Callable[[], str]] = {
    "bytes": lambda: 'syntax = "proto3"; message M { } //' + "x" * SCHEMA_DEFINITION_BYTES_MAX,
    "levels": lambda: 'syntax = "proto3"; ' + "message M { " * 50_000,
    "brackets": lambda: 'syntax = "proto3"; message M { int32 a = 1 ' + "[" * 50_000,
    "numbers": lambda: 'syntax = "proto3"; message M { reserved ' + "1, " * 20_000 + "2; }",
    "words": lambda: 'syntax = "proto3"; message M { ' + "a " * 100_000,
    "name": lambda: f'syntax = "proto3"; message {"M" * 300} {{ }}',
    "package": lambda: 'syntax = "proto3"; package ' + "a . " * 300 + "b; message M { }",
    "imports": lambda: 'import "google/protobuf/any.proto"; ' * 20 + "message M { }",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_is_refused_before_it_is_compiled(bomb: str) -> None:
    text = BOMBS[bomb]()
    with processor_time_within(1.0):
        error = refusal(text)
    assert "costs too much" in error.what and "at most" in error.why and error.hint


def test_the_largest_definition_compiles_in_time() -> None:
    fields = "\n".join(
        f"  optional int32 a_field_number_{number} = {number + 20_000};" for number in range(5_000)
    )
    text = f'syntax = "proto3"; message M {{\n{fields}\n}}'.encode()
    assert SCHEMA_DEFINITION_BYTES_MAX * 0.8 < len(text) <= SCHEMA_DEFINITION_BYTES_MAX
    with processor_time_within(1.5):
        definition = examine(text)
        assert kinds.compare(definition, definition, Checks.STRICT) == []
        assert protobuf.evolution(definition, definition, Checks.STRICT) == []


def test_many_reservations_are_compared_in_time() -> None:
    reserved = ", ".join(str(30_000 + 2 * number) for number in range(4_900))
    fields = " ".join(f"int32 a{number} = {number};" for number in range(1, 4_900))
    definition = examine(f'syntax = "proto3"; message M {{ reserved {reserved}; {fields} }}')
    with processor_time_within(0.5):
        assert protobuf.evolution(definition, definition, Checks.STRICT) == []


def test_a_message_that_the_library_cannot_load_is_refused() -> None:
    error = refusal(
        'syntax = "proto3"; message M { ' + "".join(f"string f{n} = {n};" for n in range(1, 5_000)) + "}"
    )
    assert "cannot be read" in error.what and "65535" in error.why and error.hint


def test_the_compiler_needs_no_file_to_write() -> None:
    child = os.fork()
    if child == 0:
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
            os._exit(0 if examine(ORDER).compiled else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_nothing_stays_open() -> None:
    examine(ORDER)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        examine(ORDER)
        refusal('syntax = "proto3"; message M { Missing a = 1; }')
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("fault", ["no room", "no pipe size"])
def test_a_kernel_without_room_says_come_again(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    def refuse(*_: Any) -> int:
        if fault == "no room":
            return 0  # the pipe stays as small as it was
        raise PermissionError(1, "no larger pipe")

    monkeypatch.setattr(protobuf.fcntl, "fcntl", refuse)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(Overloaded, match="pipes"):
        examine(b'syntax = "proto3"; message M { } //' + b"x" * 200_000)
    assert len(os.listdir("/proc/self/fd")) == before


def test_two_long_cycles_cost_a_bounded_number_of_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    def cycle(count: int) -> Definition:
        messages = [f"message M{one} {{ M{(one + 1) % count} a = 1; }}" for one in range(count)]
        return examine(f'syntax = "proto3"; {" ".join(messages)}')

    seven, eleven = cycle(7), cycle(11)
    assert kinds.compare(seven, eleven, Checks.STRICT) == []
    monkeypatch.setattr(protobuf_compatibility, "PAIRS_MAX", 70)
    with pytest.raises(SchemaInvalid, match="cost too much to compare"):
        kinds.compare(seven, eleven, Checks.STRICT)


def test_a_chain_that_the_library_cannot_follow_is_refused() -> None:
    def chain(count: int) -> str:
        messages = [f"message M{one} {{ M{one + 1} a = 1; }}" for one in range(count)]
        return f'syntax = "proto3"; {" ".join(messages)} message M{count} {{ }}'

    assert "levels" in refusal(chain(3_000)).why and refusal(chain(150)).hint
    assert check(chain(149))(b"\x0a\x00") is None


def test_the_paths_of_a_deep_chain_stay_short() -> None:
    count = 140
    chain = [f"message M{one} {{ M{one + 1} next_message = 1; }}" for one in range(count)]
    old = examine(f'syntax = "proto3"; {" ".join(chain)} message M{count} {{ int32 a = 1; }}')
    new = examine(f'syntax = "proto3"; {" ".join(chain)} message M{count} {{ string a = 1; }}')
    (difference,) = kinds.compare(new, old, Checks.STRICT)
    assert difference.rule == "field_type_changed"
    assert len(difference.path) < 400
    assert protobuf.evolution(new, old, Checks.STRICT) == []


def test_differences_are_bounded() -> None:
    def many(kind: str) -> Definition:
        return examine(
            'syntax = "proto3"; message M { ' + "".join(f"{kind} a{n} = {n};" for n in range(1, 500)) + "}"
        )

    found = kinds.compare(many("string"), many("int32"), Checks.STRICT)
    assert len(found) == protobuf_compatibility.DIFFERENCES_MAX


def test_a_definition_that_was_never_compiled_is_refused() -> None:
    bare = Definition(schema_type=SchemaType.PROTOBUF, text=ORDER)
    with pytest.raises(SchemaInvalid, match="never compiled"):
        kinds.validator(bare)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\x08\x01",
        b"\x12\x03abc",
        b"\x1a\x02\x08\x05\x1a\x00",
        b"\x22\x07\x0a\x01k\x12\x02\x08\x01",
        b"\x2a\x02\x08\x01",
        b"\x30\x63",  # a value that the open enum has no name for
        b"\xa0\x06\x01",  # field 100, which a newer version may have
        b"\x3a\x04\x12\x02\x08\x01",
    ],
)
def test_payloads_that_pass(payload: bytes) -> None:
    assert check(ORDER)(payload) is None


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (b"hello", "not a shop.Order"),
        (b"\x08", "not a shop.Order"),
        (b"\x12\x05ab", "not a shop.Order"),
        (b"\x12\x02\xff\xfe", "UTF-8"),
        (b"\x08\x01\x00", "not a shop.Order"),
        (b"\x08\x01\x07", "not a shop.Order"),
        (b"\x08" + b"\xff" * 10 + b"\x01", "not a shop.Order"),
        (b"\x0b" * 500, "not a shop.Order"),
        (b"\x0c", "not a shop.Order"),
        (b"\x0a\x01x", "shop.Order.id (number 1) came with wire type 2"),
        (b"\x1a\x05\x0d\x01\x00\x00\x00", "shop.Order.items.price"),
        (b"\x22\x0a\x0a\x01k\x12\x05\x0d\x01\x00\x00\x00", "shop.Order.by_name.price"),
        (b"\x3a\x05\x0d\x01\x00\x00\x00", "shop.Order.main.price"),
        (b"\x35\x01\x00\x00\x00", "shop.Order.state"),
    ],
)
def test_payloads_that_fail_say_why(payload: bytes, words: str) -> None:
    reason = check(ORDER)(payload)
    assert reason is not None and words in reason


def test_any_buffer_is_taken() -> None:
    validate: Any = check(ORDER)
    assert validate(memoryview(b"\x08\x01")) is None and validate(bytearray(b"\x08\x01")) is None


def test_nesting_in_a_payload_is_bounded() -> None:
    def nested(levels: int) -> bytes:
        payload = b""
        for _ in range(levels):
            inner = b"\x12" + varint(len(payload)) + payload
            payload = b"\x3a" + varint(len(inner)) + inner
        return payload

    validate = check(ORDER)
    assert validate(nested(20)) is None
    with processor_time_within(1.0):
        assert "not a shop.Order" in (validate(nested(2_000)) or "")


def varint(number: int) -> bytes:
    out = b""
    while number > 0x7F:
        out += bytes([number & 0x7F | 0x80])
        number >>= 7
    return out + bytes([number])


def test_what_proto2_requires_must_be_there() -> None:
    validate = check('syntax = "proto2"; message M { required int32 a = 1; repeated P p = 2; } '
                     "message P { required int32 b = 1; optional E e = 2; } enum E { X = 1; }")  # fmt: skip
    assert validate(b"\x08\x01") is None
    assert "requires: a" in (validate(b"") or "")
    assert "requires: p[0].b" in (validate(b"\x08\x01\x12\x00") or "")
    assert validate(b"\x08\x01\x12\x04\x08\x01\x10\x63") is None, (
        "a closed enum keeps what it cannot name aside"
    )


def test_equal_names_in_two_versions_do_not_meet() -> None:
    first, second = check('syntax = "proto3"; message M { int32 a = 1; }'), check(
        'syntax = "proto3"; message M { string a = 1; }'
    )  # fmt: skip
    assert first(b"\x08\x01") is None and second(b"\x0a\x01x") is None
    assert first(b"\x0a\x01x") is not None and second(b"\x08\x01") is not None


def test_the_limited_child_compiles_and_compares() -> None:
    old = limited.run(Request(schema_type=SchemaType.PROTOBUF, text=ORDER)).definition
    new = ORDER.replace(b"int64 price", b"string price")
    outcome = limited.run(
        Request(
            schema_type=SchemaType.PROTOBUF, text=new, against=[Older(3, old)],
            compatibility=Compatibility.BACKWARD,
        )
    )  # fmt: skip
    (violation,) = outcome.violations
    assert (violation.path, violation.rule, violation.version) == (
        "Order.items.price",
        "field_type_changed",
        3,
    )
    assert (violation.old, violation.new) == ("int64", "string")
    assert kinds.validator(outcome.definition)(b"\x08\x01") is None
    with pytest.raises(DanubeError, match="Missing"):
        limited.run(
            Request(schema_type=SchemaType.PROTOBUF, text=b'syntax = "proto3"; message M { Missing a = 1; }')
        )
