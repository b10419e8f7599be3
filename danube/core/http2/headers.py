"""Header blocks of both sides, and the one door to ``hpack`` (RFC 7541).

Blocks that a server sends are built from the static table and literals that are never indexed.  They leave no
trace in a peer's decoder, so one block is right for every stream of every connection and is made once.

Most calls of a client repeat a block byte for byte.  A block that does not change the dynamic table has the
same meaning until the table changes, so its head is cached by its bytes.  A block that inserts or resizes
clears this cache.  A client that inserts a changing ``grpc-timeout`` misses the cache every time, so heads
are also cached by their other fields.

Everything is bounded: the list as RFC 9113 counts it, fields, the table, both memories.  A list above a limit
is named as the head's problem; ``_EXCESS`` times the limit ends the connection.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterable
from typing import Final
from urllib.parse import quote, unquote

from hpack import Decoder, Encoder, HPACKError, OversizedHeaderListError
from hpack.table import HeaderTable

from danube.core.http2.frames import ErrorCode, Http2Settings
from danube.core.http2.request import Field, RequestHead, request_head
from danube.errors import ProtocolError

GRPC_MESSAGE_BYTES_MAX: Final = 2_048  # after percent-encoding; clients bound a header list at 8 KiB
GRPC_DETAILS_BYTES_MAX: Final = 3_072  # before base64; larger details are left out

_PLAIN: Final = "".join(chr(code) for code in range(0x20, 0x7F) if code != 0x25)
_encoder: Final = Encoder()


def response_block(fields: Iterable[tuple[str, str]]) -> bytes:
    """A header block of these fields (lower-case name, latin-1 value), the same for every connection."""
    never_indexed = [(name, value.encode("latin-1"), True) for name, value in fields]
    return _encoder.encode(never_indexed, huffman=False)


def trailers_block(status: int, message: str = "", details: bytes = b"") -> bytes:
    """The trailers of a gRPC answer: number of the status, message, serialized google.rpc.Status."""
    return response_block(_status_fields(status, message, details))


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
        # A letter may be several escapes; an incomplete one is dropped.
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


RESPONSE_HEAD: Final = response_block(
    [(":status", "200"), ("content-type", "application/grpc"), ("grpc-accept-encoding", "identity")]
)
OK_TRAILERS: Final = trailers_block(0)

MEMORY_HEADS_MAX: Final = 64
MEMORY_LIST_BYTES_MAX: Final = 2_048  # larger heads are decoded every time
_FIELD_OVERHEAD_BYTES: Final = 32
_EXCESS: Final = 4
_RESIZES: Final = {bytes([first]) for first in range(0x20, 0x40)}  # how a block begins that resizes the table
_TIMEOUT: Final = "grpc-timeout"
_TIMEOUT_VALUE: Final = re.compile(r"[0-9]{1,8}[HMSmun]")


class _Table(HeaderTable):
    """A peer's table that tells whether a block has added to it."""

    added = False

    def add(self, name: bytes, value: bytes) -> None:
        self.added = True
        super().add(name, value)


class RequestDecoder:
    """Header blocks of one connection to request heads, with both memories.

    Callers may look up ``heads`` directly; blocks that are not in it go through ``head``.
    """

    __slots__ = ("_changed", "_fields_max", "_heads_by_fields", "_hpack", "_list_bytes", "_list_bytes_max",
                 "_table", "heads")  # fmt: skip

    def __init__(self, settings: Http2Settings) -> None:
        self._list_bytes_max = settings.header_list_bytes_max
        self._fields_max = settings.header_fields_max
        self._hpack = Decoder(_EXCESS * self._list_bytes_max)
        self._hpack.max_allowed_table_size = settings.header_table_bytes
        self._hpack.header_table = self._table = _Table()
        self._changed = False  # the table, by the last block
        self._list_bytes = 0
        self.heads: dict[bytes, RequestHead] = {}
        self._heads_by_fields: dict[tuple[Field, ...], RequestHead] = {}

    def fields(self, block: bytes) -> list[Field]:
        """The fields of a whole block; ProtocolError (fact ``code``) ends the connection.

        Trailers are read too, and blocks whose stream is of no interest: the table must know them.
        """
        self._table.added = False
        try:
            decoded = self._hpack.decode(block, raw=True)
        except OversizedHeaderListError as error:
            raise ProtocolError(str(error), code=ErrorCode.ENHANCE_YOUR_CALM) from None
        except (HPACKError, IndexError) as error:
            raise ProtocolError("a header block cannot be read", why=str(error)) from None
        fields = [(str(name, "latin-1"), str(value, "latin-1")) for name, value in decoded]
        self._list_bytes = sum(len(name) + len(value) + _FIELD_OVERHEAD_BYTES for name, value in fields)
        if len(fields) > _EXCESS * self._fields_max:
            raise ProtocolError(f"there are {len(fields)} header fields", code=ErrorCode.ENHANCE_YOUR_CALM)
        self._changed = self._table.added or block[:1] in _RESIZES
        if self._changed:
            self.heads.clear()
        return fields

    def head(self, block: bytes) -> RequestHead:
        """The head of a request; ProtocolError (fact ``code``) ends the connection."""
        known = self.heads.get(block)
        if known is not None:
            return known
        fields = self.fields(block)
        head = self._judge(fields)
        if not self._changed and self._list_bytes <= MEMORY_LIST_BYTES_MAX:
            if len(self.heads) >= MEMORY_HEADS_MAX:
                self.heads.clear()
            self.heads[block] = head
        return head

    def forget(self) -> None:
        """Give the memory of an idle connection back; nothing but time is lost."""
        self.heads.clear()
        self._heads_by_fields.clear()

    def _judge(self, fields: list[Field]) -> RequestHead:
        if self._list_bytes > self._list_bytes_max:
            oversize = f"the header fields take more than {self._list_bytes_max} bytes"
            return request_head(fields, oversize=oversize)
        if len(fields) > self._fields_max:
            return request_head(fields, oversize=f"there are more than {self._fields_max} header fields")
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
            if self._list_bytes <= MEMORY_LIST_BYTES_MAX:
                if len(self._heads_by_fields) >= MEMORY_HEADS_MAX:
                    self._heads_by_fields.clear()
                self._heads_by_fields[fields] = head
        return head
