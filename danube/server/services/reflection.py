"""grpc.reflection.v1 and v1alpha: lets tools call the services of a door without their protos.

The answers are the descriptors that the generated code holds.  Only files that a served service needs are
shown, so the data port does not describe the administration.  google.rpc's error details are included, for
tools that show them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterator
from types import ModuleType
from typing import Any, Final

from google.protobuf.descriptor import FileDescriptor
from google.rpc import error_details_pb2

from danube.errors import LimitExceeded
from danube.server.proto.pool import POOL
from danube.server.services.calls import Call

REQUESTS_PER_CALL_MAX: Final = 4_096
NAME_CHARACTERS_MAX: Final = 1_000

_ERROR_DETAILS_FILE: Final = "google/rpc/error_details.proto"
_ERROR_DETAILS: Final = {one.full_name for one in error_details_pb2.DESCRIPTOR.message_types_by_name.values()}

# Numbers of the gRPC status codes.
_INVALID_ARGUMENT: Final = 3
_NOT_FOUND: Final = 5


class ServerReflection:
    """The service in one of its versions; they differ in the classes of their messages alone."""

    def __init__(self, messages: ModuleType, services: Collection[str]) -> None:
        """``messages`` is the module of one version.

        ``services`` are the full names of the door's services.
        """
        self._messages = messages
        own = messages.DESCRIPTOR.services_by_name["ServerReflection"].full_name
        self._services = sorted({*services, own})
        shown = [
            error_details_pb2.DESCRIPTOR,
            *(POOL.FindServiceByName(name).file for name in self._services),
        ]
        self._files = {file.name: file for each in shown for file in _needed(each)}

    async def server_reflection_info(self, requests: AsyncIterator[Any], call: Call) -> AsyncIterator[Any]:
        """One response for each request; raises LimitExceeded for a call that never ends."""
        count = 0
        async for request in requests:
            count += 1
            if count > REQUESTS_PER_CALL_MAX:
                raise LimitExceeded(
                    f"a reflection call answers {REQUESTS_PER_CALL_MAX} requests", hint="start another call"
                )
            yield self._answer(request)

    def _answer(self, request: Any) -> Any:
        response = self._messages.ServerReflectionResponse(valid_host=request.host[:NAME_CHARACTERS_MAX])
        what = request.WhichOneof("message_request")
        asked = getattr(request, what) if what else ""
        if len(request.host) > NAME_CHARACTERS_MAX or (
            isinstance(asked, str) and len(asked) > NAME_CHARACTERS_MAX
        ):
            self._refuse(response, _INVALID_ARGUMENT, f"a name has at most {NAME_CHARACTERS_MAX} characters")
            return response
        response.original_request.CopyFrom(request)
        match what:
            case "list_services":
                answer = response.list_services_response
                for name in self._services:
                    answer.service.add(name=name)
            case "file_by_filename":
                self._tell_file(response, self._files.get(asked), asked)
            case "file_containing_symbol":
                self._tell_file(response, self._file_of(asked), asked)
            case "file_containing_extension" | "all_extension_numbers_of_type":
                self._refuse(response, _NOT_FOUND, "no message here has extensions")
            case _:
                self._refuse(response, _INVALID_ARGUMENT, "the request asks for nothing")
        return response

    def _refuse(self, response: Any, code: int, why: str) -> None:
        response.error_response.error_code = code
        response.error_response.error_message = why

    def _tell_file(self, response: Any, file: FileDescriptor | None, asked: str) -> None:
        if file is None:
            self._refuse(response, _NOT_FOUND, f"{asked!r} is not known here")
            return
        files = {each.name: each.serialized_pb for each in _needed(file)}
        response.file_descriptor_response.file_descriptor_proto.extend(files.values())

    def _file_of(self, symbol: str) -> FileDescriptor | None:
        if symbol in _ERROR_DETAILS:
            return self._files.get(_ERROR_DETAILS_FILE)
        service, _, method = symbol.rpartition(".")
        try:
            if service in self._services and method in POOL.FindServiceByName(service).methods_by_name:
                symbol = service  # the pool does not look for methods
            file = POOL.FindFileContainingSymbol(symbol)
        except KeyError:
            return None
        return self._files.get(file.name)


def _needed(file: FileDescriptor) -> Iterator[FileDescriptor]:
    """The file, then everything that it imports."""
    yield file
    for each in file.dependencies:
        yield from _needed(each)
