"""Protobuf: parse by protoc inside this process, compare by descriptors, validate by the message class.

The definition is one ``.proto`` source in proto2, proto3 or an edition that the installed protoc knows.
protoc reads it from a pipe and gives the descriptors back in memory: nothing is written anywhere, so the
child that examines it may be forbidden to write files at all.
"""

from __future__ import annotations

import ast
import fcntl
import hashlib
import os
from typing import Any, Final

from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

from danube.errors import Overloaded, SchemaInvalid
from danube.schema.kinds import Validator
from danube.schema.model import Checks, Definition, Difference, SchemaType
from danube.schema.protobuf import payload as protobuf_payload
from danube.schema.protobuf.compatibility import differences
from danube.schema.protobuf.descriptors import (
    FILE_NAME,
    Compiled,
    chain_levels,
    messages_of,
    normalize,
    open_definition,
)
from danube.schema.protobuf.limits import CHAIN_LEVELS_MAX, IMPORTABLE, scan
from danube.schema.protobuf.reservations import forgotten

_PIPES: Final = "/proc/self/fd"
_LITERAL: Final = "AddSerializedFile("
_ERRORS_SHOWN_MAX: Final = 5


def examine(text: bytes) -> Definition:
    """Compile a definition; raises SchemaInvalid with line and column of protoc's error."""
    scan(text)
    files = _compile(text)
    own = files.file[-1]
    _refuse_unusable(own)
    fingerprint = _fingerprint(own)
    own.name = FILE_NAME
    compiled = files.SerializeToString(deterministic=True)
    _loads(compiled)
    return Definition(schema_type=SchemaType.PROTOBUF, text=text, fingerprint=fingerprint, compiled=compiled)


def compare(reader: Definition, writer: Definition, checks: Checks) -> list[Difference]:
    """Why ``reader`` cannot read all that ``writer`` wrote, in the binary and in the JSON form.

    ``Checks.UPSTREAM`` finds nothing: the broker of the official clients takes every Protobuf version.
    """
    if checks is Checks.UPSTREAM:
        return []
    return differences(open_definition(reader), open_definition(writer))


def evolution(newer: Definition, older: Definition, checks: Checks) -> list[Difference]:
    """Numbers and names that ``newer`` must not have set free, in whatever direction is promised.

    ``reader`` of each difference is the newer definition.  ``Checks.UPSTREAM`` finds nothing.
    """
    if checks is Checks.UPSTREAM:
        return []
    return forgotten(open_definition(newer), open_definition(older))


def validator(definition: Definition) -> Validator:
    """The check of payloads against the first message of the definition."""
    return protobuf_payload.validator(open_definition(definition).payload)


def _compile(text: bytes) -> FileDescriptorSet:
    """Compile the text by protoc: the imported files first, the definition last."""
    # Here and not above: workers validate with the message library alone and never load the compiler.
    from importlib.util import find_spec

    from grpc_tools import _protoc_compiler as protoc

    spec = find_spec("grpc_tools")
    installed = os.path.join(os.path.dirname((spec and spec.origin) or ""), "_proto")
    read_end = _pipe_with(text)
    try:
        generated = protoc.get_protos(str(read_end).encode(), [_PIPES.encode(), installed.encode()])
    except protoc.ProtocErrors as error:
        raise _refused(error.args[0]) from None
    finally:
        os.close(read_end)
    return FileDescriptorSet(file=[_descriptor_in(code) for _, code in generated])


def _pipe_with(text: bytes) -> int:
    """The read end of a pipe that holds the whole text and has no writer any more."""
    read_end, write_end = os.pipe()
    try:
        fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, max(4096, len(text)))
        os.set_blocking(write_end, False)
        written = os.write(write_end, text) if text else 0
    except OSError:
        written = -1
    finally:
        os.close(write_end)
    if written != len(text):
        os.close(read_end)
        raise Overloaded(
            "the Protobuf definition cannot be compiled now",
            why="the kernel gives this user no larger pipes", hint="send it again later",
        )  # fmt: skip
    return read_end


def _descriptor_in(code: bytes) -> FileDescriptorProto:
    """The file descriptor inside the Python source that protoc generates for it."""
    start = code.index(_LITERAL.encode()) + len(_LITERAL)
    literal = code[start : code.index(b"\n", start)].rstrip().removesuffix(b")")
    return FileDescriptorProto.FromString(ast.literal_eval(literal.decode("ascii")))


def _refused(errors: list[Any]) -> SchemaInvalid:
    """protoc's complaints as one error; its lines and columns count from zero, ours from one."""
    lines = [
        f"line {max(0, error.line) + 1}, column {max(0, error.column) + 1}: {_plain(error.message)}"
        for error in errors[:_ERRORS_SHOWN_MAX]
    ]
    more = len(errors) - len(lines)
    why = "; ".join(lines) + (f"; and {more} more" if more > 0 else "")
    first = max(0, errors[0].line) + 1 if errors else 0
    return SchemaInvalid(
        "the Protobuf definition does not compile", why=why or "protoc gave no reason",
        hint="compile it with protoc first; one file, no imports but google/protobuf", line=first,
    )  # fmt: skip


def _plain(message: str | bytes) -> str:
    text = message.decode("utf-8", "replace") if isinstance(message, bytes) else str(message)
    if text[:2] in ("b'", 'b"'):
        text = text[2:-1]
    return text[:300].rstrip(".")


def _refuse_unusable(own: FileDescriptorProto) -> None:
    """Refuse a definition that compiles and still cannot describe payloads; raises SchemaInvalid."""
    if not own.message_type:
        raise SchemaInvalid(
            "the Protobuf definition has no message", hint="the first message of the file is the payload"
        )
    foreign = sorted(set(own.dependency) - IMPORTABLE)
    if foreign:
        raise SchemaInvalid(
            f"the Protobuf definition imports {foreign[0][:80]!r}", hint="import nothing else"
        )
    if any(message.options.message_set_wire_format for message in messages_of(own)):
        raise SchemaInvalid(
            "the Protobuf definition uses message_set_wire_format",
            why="that form of message is only for old programs", hint="use extensions or Any instead",
        )  # fmt: skip


def _loads(compiled: bytes) -> None:
    """Check that the workers' library loads the result of protoc; raises SchemaInvalid if it does not."""
    try:
        payload = Compiled(compiled).payload
    except TypeError as error:
        raise SchemaInvalid(
            "the Protobuf definition compiles, but its messages cannot be read",
            why=str(error)[:300], hint="a message has too many fields; split it",
        ) from None  # fmt: skip
    if chain_levels(payload) > CHAIN_LEVELS_MAX:
        raise SchemaInvalid(
            "the Protobuf definition costs too much",
            why=f"its messages reach each other over more than {CHAIN_LEVELS_MAX} levels",
            hint="let fewer messages hold each other",
        )  # fmt: skip


def _fingerprint(own: FileDescriptorProto) -> str:
    """``sha256:`` and hex over the descriptor without file name, source places and default JSON names."""
    canonical = FileDescriptorProto()
    canonical.CopyFrom(own)
    canonical.ClearField("name")
    normalize(canonical)
    return "sha256:" + hashlib.sha256(canonical.SerializeToString(deterministic=True)).hexdigest()
