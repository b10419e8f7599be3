"""The check of one payload against a Protobuf message; it answers with a sentence and never raises."""

from __future__ import annotations

from typing import Any, cast

from google.protobuf.descriptor import Descriptor
from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.unknown_fields import UnknownFieldSet

from danube.schema.kinds import Validator

_PATHS_SHOWN_MAX = 5


def validator(payload: Descriptor) -> Validator:
    """A check for payloads of this message.

    Numbers that the message does not know are fine: a newer writer may send them.  A number that it does
    know, under another wire type, is not: it is another message.
    """
    message_class = GetMessageClass(payload)
    name = payload.full_name

    def check(data: bytes) -> str | None:
        try:
            return _wrong(message_class, name, bytes(data))
        except Exception as error:
            # Whatever the library raises on a stranger's bytes, the answer is that they do not parse.
            return f"the payload is not a {name}: {str(error)[:200] or type(error).__name__}"

    return check


def _wrong(message_class: type[Message], name: str, data: bytes) -> str | None:
    message = message_class()
    message.ParseFromString(data)
    if not message.IsInitialized():
        missing = list(cast(Any, message).FindInitializationErrors())
        shown = ", ".join(missing[:_PATHS_SHOWN_MAX])
        return f"the payload lacks what {name} requires: {shown}"
    size = message.ByteSize()
    message.DiscardUnknownFields()
    if message.ByteSize() == size:
        return None
    return _mistyped(message_class.FromString(data), name)


def _mistyped(message: Message, name: str) -> str | None:
    """The first known number that came under another wire type, in the message or below it."""
    waiting = [(message, name)]
    while waiting:
        message, path = waiting.pop()
        known = message.DESCRIPTOR.fields_by_number
        unknowns: Any = UnknownFieldSet(message)
        for unknown in unknowns:
            field = known.get(unknown.field_number)
            # A closed enum keeps the numbers that it has no name for among the unknown fields.
            if field is not None and not (field.enum_type is not None and unknown.wire_type in (0, 2)):
                return (
                    f"the payload is not a {name}: field {path}.{field.name} "
                    f"(number {field.number}) came with wire type {unknown.wire_type}"
                )
        waiting.extend(_below(message, path))
    return None


def _below(message: Message, path: str) -> list[tuple[Any, str]]:
    """The messages inside a message, with their paths."""
    found: list[tuple[Any, str]] = []
    for field, value in message.ListFields():
        place = f"{path}.{field.name}"
        if field.message_type is None:
            continue
        if field.message_type.GetOptions().map_entry:
            if field.message_type.fields_by_number[2].type == Field.TYPE_MESSAGE:
                found.extend((one, place) for one in value.values())
        elif field.is_repeated:
            found.extend((one, place) for one in value)
        else:
            found.append((value, place))
    return found
