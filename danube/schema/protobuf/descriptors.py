"""Descriptors of a compiled definition: a private pool, and the message of the payloads.

A payload is the first message of the definition, as Confluent's registry reads it too when a payload
names none.  Everything else in the file matters only as far as that message reaches it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto, FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool

from danube.errors import SchemaInvalid
from danube.schema.model import Definition

FILE_NAME: Final = "definition.proto"


class Compiled:
    """One definition's descriptors in a pool of their own, so that equal names of versions never meet."""

    def __init__(self, compiled: bytes) -> None:
        files = FileDescriptorSet.FromString(compiled)
        self.file: FileDescriptorProto = files.file[-1]
        self.pool = DescriptorPool()
        for file in files.file:
            self.pool.AddSerializedFile(file.SerializeToString())
        package = f"{self.file.package}." if self.file.package else ""
        self.payload: Descriptor = self.pool.FindMessageTypeByName(package + self.file.message_type[0].name)

    def fields(self, message: Descriptor) -> dict[int, FieldDescriptor]:
        """Fields by number, with the extensions that the definition itself gives the message."""
        found = {field.number: field for field in message.fields}
        if message.is_extendable:
            for extension in self.pool.FindAllExtensions(message):
                found[extension.number] = extension
        return found


def open_definition(definition: Definition) -> Compiled:
    """Descriptors of a definition that passed ``examine``; raises SchemaInvalid when it did not."""
    if not definition.compiled:
        raise SchemaInvalid(
            "the Protobuf definition was never compiled", hint="register it again; the broker compiles it"
        )
    return Compiled(definition.compiled)


def chain_levels(payload: Descriptor) -> int:
    """How deep the message library recurses when it makes the classes that a payload needs."""
    met = {payload.full_name}
    open_messages = [iter(payload.fields)]
    deepest = 1
    while open_messages:
        field = next(open_messages[-1], None)
        if field is None:
            open_messages.pop()
        elif field.message_type is not None and field.message_type.full_name not in met:
            met.add(field.message_type.full_name)
            open_messages.append(iter(field.message_type.fields))
            deepest = max(deepest, len(open_messages))
    return deepest


def messages_of(file: FileDescriptorProto) -> Iterator[DescriptorProto]:
    """Every message of a file, nested ones too."""
    waiting = list(file.message_type)
    while waiting:
        message = waiting.pop()
        waiting.extend(message.nested_type)
        yield message


def normalize(file: FileDescriptorProto) -> None:
    """Drop parts without a meaning, so that equal definitions become equal bytes."""
    file.ClearField("source_code_info")
    for message in messages_of(file):
        for field in message.field:
            if field.json_name == default_json_name(field.name):
                field.ClearField("json_name")


def default_json_name(name: str) -> str:
    """lowerCamelCase of a field's name, as the JSON mapping of Protobuf defines it."""
    head, *rest = name.split("_")
    return head + "".join(part[:1].upper() + part[1:] for part in rest)
