"""The native protocol, version 1: frames, their bodies and a decoder that owns no socket.

A connection carries frames in both directions.  Little-endian; every frame is padded to a multiple
of 8 so that a batch inside one is aligned wherever the frame was.

    position  size  field
           0     4  size         of the whole frame, a multiple of 8, 16 .. FRAME_BYTES_MAX
           4     1  kind         see Kind
           5     1  flags        see FrameFlag
           6     2  body_tail    padding bytes at the end of the body, 0 .. 7
           8     4  correlation  chosen by the client, echoed in the answer; 0 in unasked frames
          12     4  handle       a producer or consumer of this connection, chosen by the client; 0: none
          16        body

Control bodies are MessagePack maps of the structs below (unknown fields are ignored, missing ones
take the default).  PUBLISH carries one batch, DELIVER a delivery header and batches, ACK ranges.
The first frame of a client is HELLO; anything else before WELCOME closes the connection.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from enum import IntEnum, IntFlag
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from danube.core.partition.policy import FailurePolicy
from danube.errors import DanubeError, InvalidArgument, LimitExceeded, ProtocolError, error_for_code
from danube.limits import ANSWER_BYTES_MAX, CONTROL_BYTES_MAX, FRAME_BYTES_MAX

VERSION: Final = 1
FRAME_HEADER_BYTES: Final = 16
_FRAME: Final = struct.Struct("<IBBHII")
_HANDLE: Final = struct.Struct("<I")
_HANDLE_POSITION: Final = 12
_PUBLISHED: Final = struct.Struct("<QIIII")
_DELIVERY: Final = struct.Struct("<IIQ")
_CREDIT: Final = struct.Struct("<QQ")
_new: Final = tuple.__new__  # makes a named tuple without a call of a Python function
PUBLISHED_BYTES: Final = _PUBLISHED.size
DELIVERY_BYTES: Final = _DELIVERY.size


class Kind(IntEnum):
    """Frame kinds.  1-31 go from client to broker, 32-63 from broker to client."""

    HELLO = 1  # Hello -> WELCOME
    PING = 2  # empty -> PONG; either side asks
    LOOKUP = 3  # Lookup -> RESULT(TopicView)
    OPEN_PRODUCER = 4  # OpenProducer -> PRODUCER_OPENED
    CLOSE_PRODUCER = 5  # empty -> RESULT(None)
    PUBLISH = 6  # one batch -> PUBLISHED
    SUBSCRIBE = 7  # Subscribe -> SUBSCRIBED
    CLOSE_CONSUMER = 8  # empty -> RESULT(None), after all earlier acks were applied
    CREDIT = 9  # <QQ records, bytes added; no answer
    ACK = 10  # uint64[n][2] half-open offset ranges; answer RESULT(None) only with FrameFlag.SYNC
    NACK = 11  # Nack; no answer
    ADMIN = 12  # Admin -> RESULT(value)
    SHARE_MEMORY = 13  # of earlier clients, refused; 14 was theirs as well
    AUTHENTICATE = 15  # Authenticate -> RESULT(seconds until it ends, 0: never); the principal stays

    WELCOME = 32
    PONG = 33
    PRODUCER_OPENED = 34
    PUBLISHED = 35
    SUBSCRIBED = 36
    DELIVER = 37
    RESULT = 38
    ERROR = 39  # ErrorBody; correlation 0 with a handle: the handle is closed; both 0: the connection
    EXPIRING = 40  # Expiring: the connection ends then, unless the client sends AUTHENTICATE before
    WAITING = 41  # ErrorBody: why the consumer gets no records now; empty: they go on.  The handle stays
    SOUGHT = 42  # empty: the consumer's subscription begins anew; acks of what came before count no more


class FrameFlag(IntFlag):
    SYNC = 1  # ACK: answer when the cursor is stored
    DUPLICATE = 2  # PUBLISHED: the batch was stored before; the old offset is given


class DeliveryFlag(IntFlag):
    COMPACTED = 1  # of each key the topic keeps the latest record: a key with an empty payload is a tombstone


_KIND_PUBLISHED: Final = int(Kind.PUBLISHED)  # a member costs several times as much to look up
_KIND_DELIVER: Final = int(Kind.DELIVER)
_KIND_CREDIT: Final = int(Kind.CREDIT)
_KIND_ACK: Final = int(Kind.ACK)


class Hello(msgspec.Struct, omit_defaults=True):
    versions: list[int] = msgspec.field(default_factory=lambda: [VERSION])
    client: str = ""
    token: str = ""
    answers_ping: bool = False  # the broker may send PING, which is answered with PONG


class Welcome(msgspec.Struct, omit_defaults=True):
    version: int = VERSION
    broker: str = ""
    connection_id: int = 0
    worker: int = 0
    frame_bytes_max: int = FRAME_BYTES_MAX
    publish_credit_bytes: int = 0  # un-answered PUBLISH bytes this connection may have in flight
    address: str = ""  # in a cluster: host:port by which other brokers name this one
    session_timeout_ms: int = 0  # a client that answers_ping is given up after this silence; 0: never
    principal: str = ""  # service_account:orders; "" where nobody is asked for a credential
    expires_s: int = 0  # until the credential ends; 0: never


class Authenticate(msgspec.Struct, omit_defaults=True):
    token: str = ""


class Expiring(msgspec.Struct, omit_defaults=True):
    seconds: int = 0


class Lookup(msgspec.Struct, omit_defaults=True):
    """Find a topic; with ``create`` make it when missing, from the fields that follow."""

    topic: str
    create: bool = False
    partitions: int = 0  # 0: not partitioned
    reliable: bool | None = None  # None: whatever the topic is (reliable when created)
    durability: str = ""  # "": whatever the topic has (written or memory when created)


class TopicView(msgspec.Struct, omit_defaults=True):
    """In a cluster ``owners`` has host:port of the broker that serves each partition, or "" for this broker
    and for no broker; ``brokers`` are the addresses of all running brokers.
    """

    topic: str
    topic_id: int
    partitions: list[str]  # physical names, one for a topic that is not partitioned
    reliable: bool
    durability: str
    max_record_bytes: int
    owners: list[str] = []
    brokers: list[str] = []


class OpenProducer(msgspec.Struct, omit_defaults=True):
    """``producer_id`` 0 opens anew under ``name`` and fences an older one; else resumes that epoch.

    ``exclusive``: no producer of another name may be open on the partition as long as this one is.
    ``topic_id``: of the topic that is meant, if one of the same name was made since (0: whichever there is).
    ``recall``: of so many batches that the producer has stored last the answer says where they are.
    ``internal``: it is a broker's own, for dead letters, and counts in no limit.
    """

    partition: str
    name: str
    producer_id: int = 0
    epoch: int = 0
    exclusive: bool = False
    topic_id: int = 0
    recall: int = 0
    internal: bool = False


class ProducerOpened(msgspec.Struct, omit_defaults=True):
    """``batches``: first sequence, first offset and number of records of each that was asked for."""

    producer_id: int
    epoch: int
    next_sequence: int = 0  # 0 for a new epoch; after a resume, the sequence that the log expects next
    durability: str = "written"
    max_record_bytes: int = 0
    batches: tuple[tuple[int, int, int], ...] = ()


class Subscribe(msgspec.Struct, omit_defaults=True):
    """``start`` is used only when the subscription is made: earliest, latest, offset, time.

    ``epoch``: from this consumer's last SUBSCRIBED; 0: the consumer is new, and the subscription may be made.
    ``temporary``: the subscription is never stored, and goes with its last consumer.
    """

    partition: str
    subscription: str
    consumer: str
    mode: str = "shared"  # exclusive, shared, failover, key_shared
    start: str = "latest"
    start_value: int = 0  # offset, or microseconds since 1970 UTC
    filters: list[str] = []
    credit_records: int = 0
    credit_bytes: int = 0
    max_unacked: int = 0  # 0: the topic's
    failure: FailurePolicy | None = None  # None: the topic's
    topic_id: int = 0  # as in OpenProducer
    epoch: int = 0
    paced: bool = False  # on shared subscriptions acks decide how much of the credit can be used
    temporary: bool = False


class Subscribed(msgspec.Struct, omit_defaults=True):
    active: bool = True  # False: a failover standby
    ack_floor: int = 0
    high_watermark: int = 0
    epoch: int = 0  # of the partition at its owner
    ack_timeout_ms: int = 0  # 0: no record times out
    temporary: bool = False  # False too from a broker that makes no such subscriptions


class Nack(msgspec.Struct, omit_defaults=True):
    ranges: list[tuple[int, int]]
    delay_ms: int = -1  # -1: the policy's delay
    reason: str = ""
    returned: bool = False  # untried: given back at once, and not a failure


class Admin(msgspec.Struct, omit_defaults=True):
    """``partition`` routes the request to the partition's owner; "" is answered by any worker.

    A broker that is not the owner asks it, with ``forwarded``, which is asked no further.  ``on_behalf``: the
    principal that asked that broker, with its ``groups``; only brokers say it.
    """

    op: str
    partition: str = ""
    args: dict[str, Any] = {}
    forwarded: bool = False
    on_behalf: str = ""
    groups: tuple[str, ...] = ()


class ErrorBody(msgspec.Struct, omit_defaults=True):
    code: int
    what: str
    why: str = ""
    hint: str = ""
    facts: dict[str, Any] = {}


class Published(NamedTuple):
    base_offset: int
    epoch: int
    record_count: int
    level: int  # Durability
    reserved: int


class Delivery(NamedTuple):
    """Head of a DELIVER body; all its records were delivered ``redelivery_count`` times before."""

    redelivery_count: int
    record_count: int
    flags: int  # see DeliveryFlag; others are ignored


class Frame(NamedTuple):
    """One frame where it lies: body bytes are ``buffer[start:end]`` of the decoder's buffer."""

    kind: int
    flags: int
    correlation: int
    handle: int
    start: int
    end: int


_encoder = msgspec.msgpack.Encoder()
_INT_MIN: Final = -(1 << 63)  # values that MessagePack can encode
_INT_MAX: Final = (1 << 64) - 1
_Body = TypeVar("_Body", bound=msgspec.Struct)
_decoders: dict[type, Any] = {}


def frame_header(kind: int, body_size: int, correlation: int = 0, handle: int = 0, flags: int = 0) -> bytes:
    """Header of a frame whose body is ``body_size`` bytes, itself a multiple of 8."""
    return _FRAME.pack(FRAME_HEADER_BYTES + body_size, kind, flags, 0, correlation, handle)


def handle_of(frame: bytes | memoryview) -> int:
    """The handle of a frame of which at least the header is at hand."""
    handle: int = _HANDLE.unpack_from(frame, _HANDLE_POSITION)[0]
    return handle


def control_frame(
    kind: int, body: Any = None, correlation: int = 0, handle: int = 0, flags: int = 0
) -> bytes:
    """Return a whole frame with a MessagePack body (or an empty one for None).

    Raises InvalidArgument for a number of more than 64 bits, which MessagePack cannot carry.
    """
    try:
        encoded = b"" if body is None else _encoder.encode(body)
    except OverflowError:
        raise _beyond_64_bits(body) from None
    tail = -len(encoded) % 8
    size = FRAME_HEADER_BYTES + len(encoded) + tail
    return _FRAME.pack(size, kind, flags, tail, correlation, handle) + encoded + bytes(tail)


def _beyond_64_bits(body: Any) -> InvalidArgument:
    """Return the error that names the field whose number does not fit."""
    name, value = next(_numbers_beyond(body, "number"), ("number", 0))
    return InvalidArgument(
        f"{name} is out of range",
        why=f"a number of {value.bit_length()} bits was given; it must be from {_INT_MIN} to {_INT_MAX}",
        field=name,
    )


def _numbers_beyond(value: Any, name: str) -> Iterator[tuple[str, int]]:
    if isinstance(value, int):
        if not _INT_MIN <= value <= _INT_MAX:
            yield name, value
    elif isinstance(value, msgspec.Struct):
        for field in value.__struct_fields__:
            yield from _numbers_beyond(getattr(value, field), field)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _numbers_beyond(inner, str(key))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _numbers_beyond(inner, name)


def result_frame(value: Any, correlation: int, handle: int = 0) -> bytes:
    """A RESULT frame; the value travels inside a one-element list so that None is a body.

    An ERROR frame where it is too large: the other side would have to end the connection.
    """
    frame = control_frame(Kind.RESULT, [value], correlation, handle)
    if len(frame) > ANSWER_BYTES_MAX:
        error = LimitExceeded(
            f"the answer has {len(frame)} bytes",
            why=f"the limit is {ANSWER_BYTES_MAX}",
            hint="ask for less: a list in pages (limit, after, prefix)",
        )
        return error_frame(error, correlation, handle)
    return frame


def decode_result(body: bytes | memoryview) -> Any:
    try:
        return msgspec.msgpack.decode(body)[0]
    except (msgspec.DecodeError, IndexError, KeyError, TypeError) as error:
        raise ProtocolError("result cannot be decoded", why=str(error)) from None


def error_frame(error: DanubeError, correlation: int = 0, handle: int = 0, kind: int = Kind.ERROR) -> bytes:
    facts = {
        name: value for name, value in error.facts.items() if isinstance(value, str | int | float | bool)
    }
    body = ErrorBody(error.code, error.what, error.why, error.hint, facts)
    return control_frame(kind, body, correlation, handle)


def waiting_frame(reason: DanubeError | None, handle: int) -> bytes:
    """Why a consumer gets no records now; None: it goes on."""
    if reason is None:
        return control_frame(Kind.WAITING, None, 0, handle)
    return error_frame(reason, 0, handle, Kind.WAITING)


def decode_error(body: bytes | memoryview) -> DanubeError:
    fields = decode_control(body, ErrorBody)
    error = error_for_code(fields.code, fields.what, fields.why, fields.hint)
    error.facts.update(fields.facts)
    return error


def decode_control(body: bytes | memoryview, cls: type[_Body]) -> _Body:
    """Decode a MessagePack body; raise ProtocolError for anything that is not one."""
    if len(body) > CONTROL_BYTES_MAX:
        raise LimitExceeded(
            f"control body of {len(body)} bytes is too large", why=f"limit is {CONTROL_BYTES_MAX}"
        )
    decoder = _decoders.get(cls)
    if decoder is None:
        decoder = _decoders[cls] = msgspec.msgpack.Decoder(cls)
    try:
        return decoder.decode(body)  # type: ignore[no-any-return]
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(f"{cls.__name__} cannot be decoded", why=str(error)) from None


def published_frame(
    correlation: int, handle: int, base_offset: int, epoch: int, record_count: int, level: int, flags: int = 0
) -> bytes:
    return _FRAME.pack(
        FRAME_HEADER_BYTES + PUBLISHED_BYTES, _KIND_PUBLISHED, flags, 0, correlation, handle
    ) + _PUBLISHED.pack(base_offset, epoch, record_count, level, 0)


def decode_published(body: bytes | memoryview) -> Published:
    if len(body) != PUBLISHED_BYTES:
        raise ProtocolError("PUBLISHED body has the wrong size")
    return _new(Published, _PUBLISHED.unpack(body))


def deliver_header(
    handle: int, batches_size: int, redelivery_count: int, record_count: int, flags: int = 0
) -> bytes:
    """Frame and delivery header that go before ``batches_size`` bytes of batches."""
    return _FRAME.pack(
        FRAME_HEADER_BYTES + DELIVERY_BYTES + batches_size, _KIND_DELIVER, 0, 0, 0, handle
    ) + _DELIVERY.pack(redelivery_count, record_count, flags)


def decode_delivery(body: bytes | memoryview) -> Delivery:
    if len(body) < DELIVERY_BYTES:
        raise ProtocolError("DELIVER body is too short")
    return Delivery(*_DELIVERY.unpack_from(body))


def credit_frame(handle: int, records: int, size_bytes: int) -> bytes:
    return frame_header(_KIND_CREDIT, _CREDIT.size, 0, handle) + _CREDIT.pack(records, size_bytes)


def decode_credit(body: bytes | memoryview) -> tuple[int, int]:
    if len(body) != _CREDIT.size:
        raise ProtocolError("CREDIT body has the wrong size")
    records, size_bytes = _CREDIT.unpack(body)
    return records, size_bytes


def ack_frame(handle: int, ranges: bytes, correlation: int = 0, flags: int = 0) -> bytes:
    """``ranges`` are the bytes of uint64[n][2]: half-open offset ranges."""
    return frame_header(_KIND_ACK, len(ranges), correlation, handle, flags) + ranges


class FrameDecoder:
    """Cuts a byte stream into frames; the caller owns the buffer and says how much of it is filled.

    ``frames(buffer, start, end)`` yields the whole frames in ``buffer[start:end]`` and leaves
    ``position`` after the last one and ``wanted`` at the size of the frame that is incomplete
    (FRAME_HEADER_BYTES while even that is unknown).  Sizes are checked from the header alone, so
    a length of 2**32-1 allocates nothing.  ``size_max`` may be raised between frames.
    """

    __slots__ = ("position", "size_max", "wanted")

    def __init__(self, size_max: int = FRAME_BYTES_MAX) -> None:
        self.size_max = size_max
        self.position = 0
        self.wanted = FRAME_HEADER_BYTES

    def frames(self, buffer: bytearray | bytes | memoryview, start: int, end: int) -> Iterator[Frame]:
        """As above; a frame without a tail that fills ``buffer[start:end]`` needs no loop."""
        size = end - start
        if FRAME_HEADER_BYTES <= size <= self.size_max and not size & 7:
            found, kind, flags, tail, correlation, handle = _FRAME.unpack_from(buffer, start)
            if found == size and not tail:
                self.position = end
                self.wanted = FRAME_HEADER_BYTES
                body_start = start + FRAME_HEADER_BYTES
                return iter((_new(Frame, (kind, flags, correlation, handle, body_start, end)),))
        return self._cut(buffer, start, end)

    def _cut(self, buffer: bytearray | bytes | memoryview, start: int, end: int) -> Iterator[Frame]:
        unpack = _FRAME.unpack_from
        self.position = start
        while end - start >= FRAME_HEADER_BYTES:
            size, kind, flags, tail, correlation, handle = unpack(buffer, start)
            if size < FRAME_HEADER_BYTES or size & 7 or tail > 7 or tail > size - FRAME_HEADER_BYTES:
                raise ProtocolError("frame header is malformed", size=size, tail=tail)
            if size > self.size_max:
                raise LimitExceeded(f"frame of {size} bytes is too large", why=f"limit is {self.size_max}")
            if end - start < size:
                self.wanted = size
                return
            self.position = start + size
            body_start, body_end = start + FRAME_HEADER_BYTES, start + size - tail
            yield _new(Frame, (kind, flags, correlation, handle, body_start, body_end))
            start += size
        self.wanted = FRAME_HEADER_BYTES
