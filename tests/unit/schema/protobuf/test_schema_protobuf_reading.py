"""When no difference is found, a payload of the writer reads as the same values, whatever they are."""

from __future__ import annotations

from typing import Any

from google.protobuf.json_format import MessageToJson, Parse
from google.protobuf.message_factory import GetMessageClass
from hypothesis import event, given, settings
from hypothesis import strategies as st

from danube.errors import SchemaInvalid
from danube.schema import kinds
from danube.schema.model import Checks, Definition, SchemaType
from danube.schema.protobuf.descriptors import open_definition
from tests.examples import examples

RANGES = {
    "int32": (-(2**31), 2**31 - 1), "int64": (-(2**63), 2**63 - 1), "uint32": (0, 2**32 - 1),
    "uint64": (0, 2**64 - 1), "sint32": (-(2**31), 2**31 - 1), "sint64": (-(2**63), 2**63 - 1),
    "fixed32": (0, 2**32 - 1), "sfixed32": (-(2**31), 2**31 - 1), "fixed64": (0, 2**64 - 1),
    "sfixed64": (-(2**63), 2**63 - 1), "E": (0, 2),
}  # fmt: skip
VALUES: dict[str, st.SearchStrategy[Any]] = {
    **{name: st.integers(*ends) for name, ends in RANGES.items()},
    "bool": st.booleans(),
    "string": st.text(max_size=5),
    "bytes": st.binary(max_size=5),
    "double": st.floats(allow_nan=False),
}
TYPES = [*VALUES, "P"]
LABELS = ["", "optional ", "repeated ", "map<string, "]
# Pairs that are close to each other, so that many compatible schemas are drawn.
CLOSE = ["int32", "int64", "uint32", "uint64", "bool", "E", "string", "bytes", "P", "sint32", "sint64"]

one_field = st.tuples(st.sampled_from(LABELS), st.sampled_from(CLOSE) | st.sampled_from(TYPES))
bodies = st.dictionaries(st.integers(1, 6), one_field, max_size=5)


def source(body: dict[int, tuple[str, str]], part: dict[int, tuple[str, str]], oneof: bool) -> str:
    def lines(fields: dict[int, tuple[str, str]]) -> str:
        return " ".join(
            f"{label}{kind}{'>' if label.startswith('map') else ''} f{number} = {number};"
            for number, (label, kind) in sorted(fields.items())
        )

    single = {number: field for number, field in body.items() if field[0] == ""} if oneof else {}
    rest = {number: field for number, field in body.items() if number not in single}
    group = f"oneof choice {{ {lines(single)} }}" if single else ""
    return (
        f'syntax = "proto3"; message M {{ {lines(rest)} {group} }} message P {{ {lines(part)} }} '
        "enum E { ZERO = 0; ONE = 1; TWO = 2; }"
    )


definitions = st.builds(source, bodies, bodies, st.booleans()).map(
    lambda text: kinds.examine(SchemaType.PROTOBUF, text.encode())
)


def message_of(definition: Definition) -> Any:
    return GetMessageClass(open_definition(definition).payload)()


def kind_of(field: Any) -> str:
    if field.message_type is not None:
        return "P"
    if field.enum_type is not None:
        return "E"
    return next(
        name for name in VALUES if name != "E" and getattr(type(field), f"TYPE_{name.upper()}") == field.type
    )


def fill(message: Any, data: st.DataObject, depth: int = 0) -> None:
    """Give some fields of the message values of their type."""
    for field in message.DESCRIPTOR.fields:
        if depth > 2 or not data.draw(st.booleans()):
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            value = field.message_type.fields_by_name["value"]
            target = getattr(message, field.name)
            if value.message_type is not None:
                fill(target["k"], data, depth + 1)
            else:
                target["k"] = data.draw(VALUES[kind_of(value)])
        elif field.message_type is not None and field.is_repeated:
            fill(getattr(message, field.name).add(), data, depth + 1)
        elif field.message_type is not None:
            getattr(message, field.name).SetInParent()
            fill(getattr(message, field.name), data, depth + 1)
        elif field.is_repeated:
            getattr(message, field.name).extend(data.draw(st.lists(VALUES[kind_of(field)], max_size=3)))
        else:
            setattr(message, field.name, data.draw(VALUES[kind_of(field)]))


def alike(reader: Any, writer: Any) -> None:
    """Every field that both sides have holds the same value; reading a field gives its default when unset."""
    for field in reader.DESCRIPTOR.fields:
        written = writer.DESCRIPTOR.fields_by_number.get(field.number)
        if written is None:
            continue
        ours, theirs = getattr(reader, field.name), getattr(writer, written.name)
        if field.message_type is None:
            assert (list(ours) if field.is_repeated else ours) == (
                list(theirs) if field.is_repeated else theirs
            )
        elif field.message_type.GetOptions().map_entry:
            assert set(ours) == set(theirs)
            for key in ours:
                if field.message_type.fields_by_name["value"].message_type is None:
                    assert ours[key] == theirs[key]
                else:
                    alike(ours[key], theirs[key])
        elif field.is_repeated:
            assert len(ours) == len(theirs)
            for one, other in zip(ours, theirs, strict=True):
                alike(one, other)
        else:
            assert reader.HasField(field.name) == writer.HasField(written.name)
            if reader.HasField(field.name):  # what is not set reads as an empty message, of itself perhaps
                alike(ours, theirs)


@settings(max_examples=examples(400), deadline=None)
@given(reader=definitions, writer=definitions, data=st.data())
def test_without_a_difference_the_reader_gets_the_values_of_the_writer(
    reader: Definition, writer: Definition, data: st.DataObject
) -> None:
    if kinds.compare(reader, writer, Checks.STRICT):
        event("a difference")
        return
    event("read")
    written = message_of(writer)
    fill(written, data)
    payload = written.SerializeToString()
    assert kinds.validator(writer)(payload) is None
    assert kinds.validator(reader)(payload) is None
    read = message_of(reader)
    read.ParseFromString(payload)
    alike(read, written)
    from_json = message_of(reader)
    Parse(MessageToJson(written), from_json, ignore_unknown_fields=True)
    alike(from_json, written)


@settings(max_examples=examples(300), deadline=None)
@given(definition=definitions, data=st.data(), payload=st.binary(max_size=80))
def test_a_validator_answers_any_bytes(definition: Definition, data: st.DataObject, payload: bytes) -> None:
    validate = kinds.validator(definition)
    written = message_of(definition)
    fill(written, data)
    whole = written.SerializeToString()
    assert validate(whole) is None
    for one in (payload, whole + payload, whole[: len(whole) // 2]):
        answer = validate(one)
        assert answer is None or "M" in answer


@settings(max_examples=examples(300), deadline=None)
@given(
    text=st.binary(max_size=60)
    | st.text(alphabet="messageM{}=;1 \"'/*.\n[]<>int32aprt", max_size=120).map(str.encode)
)
def test_any_text_compiles_or_is_refused_with_a_reason(text: bytes) -> None:
    try:
        definition = kinds.examine(SchemaType.PROTOBUF, text)
    except SchemaInvalid as error:
        assert error.what
    else:
        assert kinds.compare(definition, definition, Checks.STRICT) == []
