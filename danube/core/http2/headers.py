"""Header blocks that a server sends, and the one door to ``hpack`` (RFC 7541).

Blocks are built from the static table and literals that are never indexed.  They leave no trace in a
peer's decoder, so one block is right for every stream of every connection and is made once.

Header blocks of a peer: the HPACK decoder of one connection and the memory of decoded heads.

Most calls of a client repeat a block byte for byte.  A block that leaves the dynamic table as it was
means the same as long as the table is unchanged, so its head is remembered under its bytes; a block
that inserts or resizes forgets all of them.  A client that puts a changing ``grpc-timeout`` into the
table misses that memory every time, so heads are remembered once more by their other fields.

Everything is bounded: integers, strings, fields, the list as RFC 9113 counts it, the table, both
memories.  Fields above a limit are dropped and named as the head's problem while the table is kept
right; ``_EXCESS`` times the limit ends the connection.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections import deque
from collections.abc import Iterable
from typing import Final
from urllib.parse import quote, unquote

from hpack.huffman_table import HUFFMAN_COMPLETE, HUFFMAN_EMIT_SYMBOL, HUFFMAN_FAIL, HUFFMAN_TABLE
from hpack.table import HeaderTable

from danube.core.http2.frames import TABLE_BYTES_DEFAULT, ErrorCode, Http2Settings
from danube.core.http2.request import Field, RequestHead, request_head
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
    """Build the whole answer to a request that is no gRPC call; gRPC clients get status INTERNAL."""
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


FIELD_OVERHEAD_BYTES: Final = 32
MEMORY_HEADS_MAX: Final = 64
MEMORY_LIST_BYTES_MAX: Final = 2_048  # larger heads are decoded every time
_EXCESS: Final = 4
_STATIC_COUNT: Final = len(STATIC_TABLE)
_INTEGER_SHIFT_MAX: Final = 28
_TIMEOUT: Final = "grpc-timeout"
_TIMEOUT_VALUE: Final = re.compile(r"[0-9]{1,8}[HMSmun]")


class HeaderDecoder:
    """HPACK of one connection.  ``changed``, ``list_bytes`` and ``oversize`` tell of the last block."""

    __slots__ = ("_dynamic", "_fields_max", "_list_bytes_max", "_settings", "_table_bytes",
                 "_table_bytes_max", "changed", "list_bytes", "oversize")  # fmt: skip

    def __init__(self, settings: Http2Settings) -> None:
        self._settings = settings
        self._dynamic: deque[Field] = deque()  # the newest first
        self._table_bytes = 0
        self._table_bytes_max = TABLE_BYTES_DEFAULT  # what the peer chose, at most what we announced
        self._list_bytes_max = settings.header_list_bytes_max
        self._fields_max = settings.header_fields_max
        self.changed = False
        self.list_bytes = 0
        self.oversize = ""

    def decode(self, block: bytes) -> list[Field]:
        """The fields of a whole block; ProtocolError (fact ``code``) ends the connection."""
        self.changed = False
        self.oversize = ""
        fields: list[Field] = []
        updates = field_count = list_bytes = position = 0
        end, dynamic = len(block), self._dynamic
        while position < end:
            first = block[position]
            if first >= 0x80:
                if first < 0xFF:
                    index = first & 0x7F
                    position += 1
                else:
                    index, position = _read_integer(block, position, 0x7F)
                place = index - _STATIC_COUNT - 1
                field = dynamic[place] if 0 <= place < len(dynamic) else self._entry(index)
            elif first >= 0x40:
                field, position = self._literal(block, position, 0x3F)
                self._insert(field)
            elif first >= 0x20:
                updates += 1
                if field_count or updates > 2:
                    raise ProtocolError("a table size update is not at the start of a header block")
                position = self._resize(block, position)
                continue
            else:
                field, position = self._literal(block, position, 0x0F)
            field_count += 1
            list_bytes += len(field[0]) + len(field[1]) + FIELD_OVERHEAD_BYTES
            if list_bytes <= self._list_bytes_max and field_count <= self._fields_max:
                fields.append(field)
            else:
                self._excess(field_count, list_bytes)
        self.list_bytes = list_bytes
        return fields

    def _excess(self, field_count: int, list_bytes: int) -> None:
        if list_bytes > self._list_bytes_max:
            self.oversize = f"the header fields take more than {self._list_bytes_max} bytes"
        else:
            self.oversize = f"there are more than {self._fields_max} header fields"
        if list_bytes > self._list_bytes_max * _EXCESS or field_count > self._fields_max * _EXCESS:
            raise ProtocolError(self.oversize, code=ErrorCode.ENHANCE_YOUR_CALM)

    def _entry(self, index: int) -> Field:
        if 0 < index <= _STATIC_COUNT:
            return STATIC_TABLE[index - 1]
        if 0 < index <= _STATIC_COUNT + len(self._dynamic):
            return self._dynamic[index - _STATIC_COUNT - 1]
        raise ProtocolError(f"no header field has index {index}")

    def _literal(self, block: bytes, position: int, mask: int) -> tuple[Field, int]:
        index, position = _read_integer(block, position, mask)
        if index:
            name = self._entry(index)[0]
        else:
            name, position = _shown(block, position)
        value, position = _shown(block, position)
        return (name, value), position

    def _insert(self, field: Field) -> None:
        self.changed = True
        size = len(field[0]) + len(field[1]) + FIELD_OVERHEAD_BYTES
        self._shrink(self._table_bytes_max - size)
        if size <= self._table_bytes_max:
            self._dynamic.appendleft(field)
            self._table_bytes += size

    def _resize(self, block: bytes, position: int) -> int:
        size, position = _read_integer(block, position, 0x1F)
        if size > self._settings.header_table_bytes:
            raise ProtocolError(f"the header table may not grow to {size} bytes")
        self.changed = True
        self._table_bytes_max = size
        self._shrink(size)
        return position

    def _shrink(self, size: int) -> None:
        while self._table_bytes > size and self._dynamic:
            name, value = self._dynamic.pop()
            self._table_bytes -= len(name) + len(value) + FIELD_OVERHEAD_BYTES


class RequestDecoder:
    """Header blocks to request heads, with both memories.

    ``heads`` may be asked directly; what is not in it goes through ``head``.
    """

    __slots__ = ("_heads_by_fields", "decoder", "heads")

    def __init__(self, settings: Http2Settings) -> None:
        self.decoder = HeaderDecoder(settings)
        self.heads: dict[bytes, RequestHead] = {}
        self._heads_by_fields: dict[tuple[Field, ...], RequestHead] = {}

    def fields(self, block: bytes) -> list[Field]:
        """The fields of trailers, or of a block whose stream is of no interest: the table must know it."""
        fields = self.decoder.decode(block)
        if self.decoder.changed:
            self.heads.clear()
        return fields

    def head(self, block: bytes) -> RequestHead:
        """The head of a request; ProtocolError (fact ``code``) ends the connection."""
        known = self.heads.get(block)
        if known is not None:
            return known
        fields = self.fields(block)
        head = self._judge(fields)
        if not self.decoder.changed and self.decoder.list_bytes <= MEMORY_LIST_BYTES_MAX:
            if len(self.heads) >= MEMORY_HEADS_MAX:
                self.heads.clear()
            self.heads[block] = head
        return head

    def forget(self) -> None:
        """Give the memory of an idle connection back; nothing but time is lost."""
        self.heads.clear()
        self._heads_by_fields.clear()

    def _judge(self, fields: list[Field]) -> RequestHead:
        if self.decoder.oversize:
            return request_head(fields, oversize=self.decoder.oversize)
        places = [place for place, field in enumerate(fields) if field[0] == _TIMEOUT]
        if len(places) != 1 or not _TIMEOUT_VALUE.fullmatch(fields[places[0]][1]):
            return self._head_of(tuple(fields))
        name, value = fields.pop(places[0])
        head = self._head_of(tuple(fields))
        after = fields[places[0] : places[0] + 1]
        if head.malformed or (after and after[0][0][:1] == ":"):
            return request_head([*fields[: places[0]], (name, value), *fields[places[0] :]])
        return head.with_field(name, value)

    def _head_of(self, fields: tuple[Field, ...]) -> RequestHead:
        head = self._heads_by_fields.get(fields)
        if head is None:
            head = request_head(fields)
            if self.decoder.list_bytes <= MEMORY_LIST_BYTES_MAX:
                if len(self._heads_by_fields) >= MEMORY_HEADS_MAX:
                    self._heads_by_fields.clear()
                self._heads_by_fields[fields] = head
        return head


def _read_integer(block: bytes, position: int, mask: int) -> tuple[int, int]:
    """RFC 7541, 5.1, at most 2^35: (number, position after it)."""
    number = block[position] & mask
    position += 1
    if number < mask:
        return number, position
    shift = 0
    while position < len(block):
        octet = block[position]
        position += 1
        number += (octet & 0x7F) << shift
        if octet < 0x80:
            return number, position
        shift += 7
        if shift > _INTEGER_SHIFT_MAX:
            raise ProtocolError("an integer of a header block is too long")
    raise ProtocolError("a header block ends inside an integer")


def _shown(block: bytes, position: int) -> tuple[str, int]:
    if position >= len(block):
        raise ProtocolError("a header block ends before a string")
    coded = block[position] & 0x80
    size, position = _read_integer(block, position, 0x7F)
    end = position + size
    if end > len(block):
        raise ProtocolError("a header block ends inside a string")
    data = block[position:end]
    return huffman_text(data) if coded else data.decode("latin-1"), end
