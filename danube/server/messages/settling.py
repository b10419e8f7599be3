"""Ack and Nack calls: those of one turn are settled together, one request for each subscription."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from google.protobuf.message import DecodeError

from danube.core.protocol import native as wire
from danube.core.protocol.native import Admin, Frame, Kind
from danube.errors import DanubeError, InvalidArgument, OwnerMoved
from danube.ids import check_label, check_topic_name
from danube.server.messages.answers import Answering, Call, answer_calls, refuse_calls
from danube.server.messages.consuming import Judge
from danube.server.messages.session import BrokerSession
from danube.server.proto.DanubeApi_pb2 import AckRequest, NackRequest

if TYPE_CHECKING:
    from danube.broker.shard.admin import NackedRecord
    from danube.core.http2.streams import Stream
    from danube.core.security.principals import Principal

_OFFSET_MAX = (1 << 62) - 1
_DELAY_MS_MAX = (1 << 62) // 1_000_000
_REASON_CHARACTERS_MAX = 1024
_RANGE = struct.Struct("<QQ")
SETTLED_PER_REQUEST_MAX = 16_384
ATTEMPTS_MAX = 3

Settle = Callable[[str, str, bytes, list["NackedRecord"]], bool]
"""Acks and nacks records of a partition that is open in this worker; False if it is not."""


class _Pending:
    """Acks and nacks of one turn for one subscription of one partition."""

    __slots__ = ("acks", "calls", "nacks", "request_ids")

    def __init__(self) -> None:
        self.acks: list[int] = []
        self.nacks: list[NackedRecord] = []
        self.calls: list[Call] = []
        self.request_ids: list[int] = []


class Settling:
    """The acknowledging part of a gRPC door; one for each worker."""

    def __init__(self, session: BrokerSession, settle: Settle, judge: Judge | None = None) -> None:
        """``judge``: None where access is not controlled."""
        self._session = session
        self._settle = settle
        self._judge = judge
        self.pending: dict[tuple[str, str, Principal | None], _Pending] = {}

    def ack(self, connection: Answering, stream: Stream, data: bytes, size: int) -> None:
        """Take one Ack call; raises InvalidArgument if it is malformed."""
        try:
            request = AckRequest.FromString(data)
        except DecodeError:
            raise InvalidArgument("the message is not a danube.AckRequest") from None
        pending, offset = self._find(request, connection, stream)
        pending.acks.append(offset)
        pending.calls.append((connection, stream, size))
        pending.request_ids.append(request.request_id)

    def nack(self, connection: Answering, stream: Stream, data: bytes, size: int) -> None:
        """Take one Nack call; raises InvalidArgument if it is malformed."""
        try:
            request = NackRequest.FromString(data)
        except DecodeError:
            raise InvalidArgument("the message is not a danube.NackRequest") from None
        pending, offset = self._find(request, connection, stream)
        delay_ms = min(request.delay_ms, _DELAY_MS_MAX) if request.HasField("delay_ms") else -1
        pending.nacks.append((offset, delay_ms, request.reason[:_REASON_CHARACTERS_MAX]))
        pending.calls.append((connection, stream, size))
        pending.request_ids.append(request.request_id)

    def _find(
        self, request: AckRequest | NackRequest, connection: Answering, stream: Stream
    ) -> tuple[_Pending, int]:
        place, judge = request.msg_id, self._judge
        caller = None if judge is None else connection.identity_of(stream)
        key = (place.topic_name, request.subscription_name, caller and caller.principal)
        pending = self.pending.get(key)
        if pending is None:
            if not request.HasField("msg_id"):
                raise InvalidArgument("msg_id is missing", hint="send back the msg_id of the message")
            check_topic_name(place.topic_name)
            check_label(request.subscription_name, "subscription")
            if judge is not None and caller is not None:
                judge.consumes(caller, place.topic_name, request.subscription_name)
            pending = self.pending[key] = _Pending()
        if place.topic_offset > _OFFSET_MAX:
            raise InvalidArgument(f"topic_offset {place.topic_offset} cannot be an offset")
        return pending, place.topic_offset

    def hand_over(self) -> None:
        """Send the turn's settlements to the partitions' owners."""
        pending, self.pending = self.pending, {}
        for (partition, subscription, _), settled in pending.items():
            for start in range(0, len(settled.calls), SETTLED_PER_REQUEST_MAX):
                self._send(partition, subscription, settled, start)

    def _send(self, partition: str, subscription: str, settled: _Pending, start: int) -> None:
        end = start + SETTLED_PER_REQUEST_MAX
        acks, nacks = ranges_of(settled.acks[start:end]), settled.nacks[start:end]
        calls, request_ids = settled.calls[start:end], settled.request_ids[start:end]
        try:
            if self._settle(partition, subscription, acks, nacks):
                answer_calls(calls, request_ids)
                return
        except DanubeError as error:
            refuse_calls(calls, error)
            return
        args = {"subscription": subscription, "acks": acks, "nacks": nacks}
        self._ask(Admin("settle", partition, args), calls, request_ids, ATTEMPTS_MAX)

    def _ask(self, request: Admin, calls: list[Call], request_ids: list[int], attempts: int) -> None:
        """Send settlements to the owner.

        A dying owner's unanswered ones go to its successor, as repetition does no harm.
        """

        def answered(frame: Frame, data: bytes | memoryview) -> None:
            if frame.kind != Kind.ERROR:
                answer_calls(calls, request_ids)
                return
            error = wire.decode_error(data[frame.start : frame.end])
            if isinstance(error, OwnerMoved) and attempts > 1:
                self._ask(request, calls, request_ids, attempts - 1)
            else:
                refuse_calls(calls, error)

        self._session.request(Kind.ADMIN, request, 0, answered)


def ranges_of(offsets: list[int]) -> bytes:
    """The bytes of uint64[n][2]: half-open ranges that cover these offsets, ascending."""
    if len(offsets) < 2:
        return _RANGE.pack(offsets[0], offsets[0] + 1) if offsets else b""
    unique = np.unique(np.array(offsets, np.int64))
    breaks = np.flatnonzero(np.diff(unique) != 1)
    starts = unique[np.concatenate(([0], breaks + 1))]
    ends = unique[np.concatenate((breaks, [len(unique) - 1]))] + 1
    return np.stack((starts, ends), axis=1).astype("<u8").tobytes()
