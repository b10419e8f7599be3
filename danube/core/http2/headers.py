"""Header blocks that a server sends, and the one door to ``hpack`` (RFC 7541).

Blocks are built from the static table and literals that are never indexed.  They leave no trace in a
peer's decoder, so one block is right for every stream of every connection and is made once.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable
from typing import Final
from urllib.parse import quote, unquote

from hpack.huffman_table import HUFFMAN_COMPLETE, HUFFMAN_EMIT_SYMBOL, HUFFMAN_FAIL, HUFFMAN_TABLE
from hpack.table import HeaderTable

from danube.errors import ProtocolError

STATIC_TABLE: Final[tuple[tuple[str, str], ...]] = tuple(
    (name.decode("ascii"), value.decode("ascii")) for name, value in HeaderTable.STATIC_TABLE
)
GRPC_MESSAGE_BYTES_MAX: Final = 2_048  # after percent-encoding; clients bound a header list at 8 KiB
GRPC_DETAILS_BYTES_MAX: Final = 3_072  # before base64; larger details are left out

_INDEX_BY_FIELD: Final = {field: index for index, field in reversed(list(enumerate(STATIC_TABLE, 1)))}
_INDEX_BY_NAME: Final = {field[0]: index for index, field in reversed(list(enumerate(STATIC_TABLE, 1)))}
_PLAIN: Final = "".join(chr(code) for code in range(0x20, 0x7F) if code != 0x25)


# One octet's way through the tables of hpack, which go by half octets: state << 8 | octet to the next
# state (shifted alike), the text and whether a string may end here.  Text of headers needs few of them.
_steps: dict[int, tuple[int, str, bool]] = {}
_STEPS_MAX: Final = 8_192


def huffman_text(data: bytes) -> str:
    """The text of a Huffman-coded string literal (latin-1); raises ProtocolError when it is damaged."""
    state, text, complete = 0, "", True
    for octet in data:
        step = _steps.get(state | octet) or _new_step(state, octet)
        state, letters, complete = step
        text += letters
    if not complete:
        raise ProtocolError("a Huffman code ends with more padding than 7 bits of ones")
    return text


def _new_step(state: int, octet: int) -> tuple[int, str, bool]:
    node, flags, letters = state >> 8, 0, ""
    for half in (octet >> 4, octet & 0x0F):
        node, flags, letter = HUFFMAN_TABLE[node * 16 + half]
        if flags & HUFFMAN_FAIL:
            raise ProtocolError("a Huffman code stands for nothing")
        if flags & HUFFMAN_EMIT_SYMBOL:
            letters += chr(letter)
    if len(_steps) >= _STEPS_MAX:
        _steps.clear()
    step = _steps[state | octet] = (node << 8, letters, bool(flags & HUFFMAN_COMPLETE))
    return step


def response_block(fields: Iterable[tuple[str, str]]) -> bytes:
    """A header block of these fields (lower-case name, latin-1 value), the same for every connection."""
    return b"".join(_field(name, value) for name, value in fields)


def trailers_block(status: int, message: str = "", details: bytes = b"") -> bytes:
    """The trailers of a gRPC answer: number of the status, message, serialized google.rpc.Status."""
    return response_block(_status_fields(status, message, details))


def trailers_only_block(status: int, message: str = "", details: bytes = b"") -> bytes:
    """The one header block of a gRPC answer that has no message."""
    return RESPONSE_HEAD + trailers_block(status, message, details)


def refusal_block(http_status: int, message: str) -> bytes:
    """The whole answer to what is no gRPC request; tells gRPC clients as well (status INTERNAL)."""
    fields = [(":status", str(http_status)), ("content-type", "application/grpc")]
    return response_block(fields + _status_fields(13, message, b""))


def percent_encoded(message: str) -> str:
    """``message`` as the value of ``grpc-message``: printable ASCII but ``%`` stays, UTF-8 else."""
    encoded = quote(message[:GRPC_MESSAGE_BYTES_MAX], safe=_PLAIN, errors="replace")
    if len(encoded) > GRPC_MESSAGE_BYTES_MAX:
        cut = encoded[:GRPC_MESSAGE_BYTES_MAX]
        half = cut.rfind("%", len(cut) - 2)
        # A letter may be several escapes; what is left of one is dropped.
        encoded = quote(unquote(cut[:half] if half >= 0 else cut, errors="ignore"), safe=_PLAIN)
    return encoded.strip(" ")


def _status_fields(status: int, message: str, details: bytes) -> list[tuple[str, str]]:
    fields = [("grpc-status", str(status))]
    if message:
        fields.append(("grpc-message", percent_encoded(message)))
    if details and len(details) <= GRPC_DETAILS_BYTES_MAX:
        # Binary fields travel without padding, as the gRPC specification recommends.
        fields.append(("grpc-status-details-bin", b64encode(details).rstrip(b"=").decode("ascii")))
    return fields


def _field(name: str, value: str) -> bytes:
    index = _INDEX_BY_FIELD.get((name, value))
    if index is not None:
        return bytes([0x80 | index])
    name_index = _INDEX_BY_NAME.get(name)
    start = b"\x10" + _text(name) if name_index is None else _integer(name_index, 0x0F, 0x10)
    return start + _text(value)


def _text(text: str) -> bytes:
    data = text.encode("latin-1")
    return _integer(len(data), 0x7F, 0) + data


def _integer(number: int, prefix_mask: int, first: int) -> bytes:
    """RFC 7541, 5.1: ``prefix_mask`` is 2^N-1, ``first`` the bits above it."""
    if number < prefix_mask:
        return bytes([first | number])
    encoded = bytearray([first | prefix_mask])
    number -= prefix_mask
    while number >= 0x80:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


RESPONSE_HEAD: Final = response_block(
    [(":status", "200"), ("content-type", "application/grpc"), ("grpc-accept-encoding", "identity")]
)
OK_TRAILERS: Final = trailers_block(0)
