"""grpc.reflection.v1alpha, for older tools: the messages and the service of v1 in a package of that name."""

from __future__ import annotations

from typing import Any, Final

from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.message_factory import GetMessageClass

from danube.server.proto import reflection_v1_pb2
from danube.server.proto.pool import POOL


def _renamed() -> FileDescriptorProto:
    file = FileDescriptorProto.FromString(reflection_v1_pb2.DESCRIPTOR.serialized_pb)
    package = f"{file.package}alpha"
    for field in (field for message in file.message_type for field in message.field):
        if field.type_name:
            field.type_name = field.type_name.replace(file.package, package)
    for method in (method for service in file.service for method in service.method):
        method.input_type = method.input_type.replace(file.package, package)
        method.output_type = method.output_type.replace(file.package, package)
    file.name, file.package = "reflection_v1alpha.proto", package
    return file


DESCRIPTOR: Final = POOL.AddSerializedFile(_renamed().SerializeToString())


def __getattr__(name: str) -> Any:
    """Return the class of a message."""
    try:
        return GetMessageClass(DESCRIPTOR.message_types_by_name[name])
    except KeyError:
        raise AttributeError(name) from None
