"""One connection of a gRPC port: calls to their handlers, answers back.

The HTTP/2 machine is pure (:mod:`danube.core.http2.connection`), the socket is
:mod:`danube.server.grpc.socket`'s; this module owns the tasks of calls that wait for something.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from danube.broker.routing.judging import discreet
from danube.core.http2.connection import ServerConnection
from danube.core.http2.headers import OK_TRAILERS, RESPONSE_HEAD, refusal_block, trailers_block
from danube.core.http2.request import RequestHead
from danube.core.http2.streams import Stream
from danube.core.protocol.grpc import STATUS_NUMBERS, MessageAssembler, frame_message, timeout_ns
from danube.core.security.operations import Row
from danube.core.security.principals import ANONYMOUS, Identity
from danube.errors import (
    DanubeError,
    InvalidArgument,
    IssuerUnavailable,
    LimitExceeded,
    NotAllowed,
    NotAuthenticated,
    NotSupported,
    OperationTimeout,
    TokenExpired,
)
from danube.host import clock
from danube.server.grpc.guard import GrpcGuard, asks
from danube.server.grpc.methods import Method, MethodKind
from danube.server.grpc.placing import HeldCall, Unplaced
from danube.server.grpc.request_stream import RequestStream, check_framing
from danube.server.grpc.socket import GrpcSocket, SocketDoor
from danube.server.grpc.statuses import trailers_of
from danube.server.messages.consuming import GrpcConsumer
from danube.server.services.calls import Call

ASSEMBLING_BYTES_MAX = 64 * 1024 * 1024  # sixteen of the largest messages that topics take by default
NO_GRPC_TRAILERS = trailers_block(STATUS_NUMBERS["INTERNAL"])
STREAM_QUEUE_BYTES = 256 * 1024
_DIRECT, _BIDIRECTIONAL = MethodKind.DIRECT, MethodKind.BIDIRECTIONAL  # looked up once: it takes 0.1 us
_new = tuple.__new__  # a NamedTuple's own constructor is a Python function
_PREFIX = struct.Struct(">BI")  # of a message: is it compressed, and its size


class _Pending:
    """A call whose message is not whole yet."""

    __slots__ = ("assembler", "method")

    def __init__(self, method: Method, message_bytes_max: int) -> None:
        self.method = method
        self.assembler = MessageAssembler(message_bytes_max, unary=True)


class _Whole(NamedTuple):
    """A message that is whole, while the client has not ended its side."""

    method: Method
    message: bytes


class GrpcConnection(GrpcSocket):
    """See the module."""

    def __init__(self, door: SocketDoor) -> None:
        super().__init__(door)
        self._tasks: dict[Stream, asyncio.Task[None]] = {}
        self._headed: set[Stream] = set()  # streams whose headers were sent before their end
        self._assembling_bytes = 0
        self._waiting_for_room: list[asyncio.Future[None]] = []
        self._http2 = ServerConnection(self, door.http2_settings, clock.monotonic_ns())
        self._identified: RequestHead | None = None  # the head that the identity comes from
        self._authorization = ""
        self._identity = ANONYMOUS

    def _placed(self, unplaced: Unplaced) -> None:
        for call in unplaced.calls:
            self._dispatch(*call)

    def _room(self) -> None:
        waiting, self._waiting_for_room = self._waiting_for_room, []
        for room in waiting:
            if not room.done():
                room.set_result(None)

    # -- calls (Http2Handler) ---------------------------------------------------------------------

    def request(self, stream: Stream, ended: bool) -> None:
        head = stream.head
        method = self._door.methods.get(head.path)
        if head.problem:
            if ended:
                self._refuse_http(stream)
            return
        if method is None:
            hint = "the other gRPC port may serve it (grpc.port, admin.port, grpc.reflection)"
            self.answer_error(stream, NotSupported(f"{head.path} is not served on this port", hint=hint))
            return
        if self._door.guard is not None and asks(method.row) and not self._known(self._door.guard, [stream]):
            return
        stream.context = method
        if method.kind is _BIDIRECTIONAL:
            requests = RequestStream(method.request_class, self._door.message_bytes_max)
            stream.context = requests
            self._start(stream, self._stream_answers(stream, method.handler(requests, self._call(stream))))
        elif ended:
            self.answer_error(stream, InvalidArgument(f"{head.path} needs a message", why="none was sent"))

    def data(self, stream: Stream, data: memoryview, ended: bool) -> None:
        context = stream.context
        size = len(data)
        if type(context) is Method and size >= 5:
            compressed, message_size = _PREFIX.unpack_from(data)
            if not compressed and message_size == size - 5 <= self._door.message_bytes_max:
                if ended:
                    self._dispatch(context, stream, data[5:].tobytes(), size)
                else:  # its end comes in a frame of its own
                    self._http2.consumed(stream, size)
                    stream.context = _new(_Whole, (context, data[5:].tobytes()))
                return
        elif type(context) is _Whole and ended and not size:
            stream.context = context.method
            self._dispatch(context.method, stream, context.message, 0)
            return
        self._http2.consumed(stream, size)
        if stream.head.problem:
            if ended:
                self._refuse_http(stream)
            return
        try:
            if type(context) is Method:
                stream.context = context = _Pending(context, self._door.message_bytes_max)
            if type(context) is _Pending:
                self._assemble(context, stream, data, ended)
            elif type(context) is _Whole and size:
                raise InvalidArgument(
                    "a call that takes one message got more", hint="send one message a call"
                )
            elif type(context) is RequestStream:
                context.take(data, ended)
        except DanubeError as error:
            self._forget_pieces(stream)
            self.answer_error(stream, error)

    def requests(self, streams: Sequence[Stream]) -> None:
        head = streams[0].head
        method = self._door.methods.get(head.path)
        if head.problem or method is None or method.kind is _BIDIRECTIONAL:
            for stream in streams:
                self.request(stream, False)
            return
        if self._door.guard is not None and asks(method.row) and not self._known(self._door.guard, streams):
            return
        for stream in streams:
            stream.context = method

    def messages(self, streams: Sequence[Stream], messages: Sequence[bytes]) -> None:
        bytes_max = self._door.message_bytes_max
        for stream, message in zip(streams, messages, strict=True):
            method, size = stream.context, len(message)
            if type(method) is Method and size <= bytes_max:
                self._dispatch(method, stream, message, size + 5)
            else:
                self.data(stream, memoryview(frame_message(message)), True)

    def _forget_pieces(self, stream: Stream) -> None:
        if type(stream.context) is _Pending:
            self._assembling_bytes -= stream.context.assembler.held_bytes
            stream.context = None

    def cancelled(self, stream: Stream, code: int) -> None:
        context = stream.context
        if type(context) is GrpcConsumer:
            self._door.leave(context)
        self._forget_pieces(stream)
        self._headed.discard(stream)
        task = self._tasks.pop(stream, None)
        if task is not None:
            task.cancel()

    def writable(self, stream: Stream) -> None:
        context = stream.context
        if type(context) is GrpcConsumer:
            context.give_credit()
        self._room()
        self.has_output()

    def _refuse_http(self, stream: Stream) -> None:
        """Answer a whole request that is HTTP/2 and no gRPC: a status and a sentence."""
        head = stream.head
        self._http2.send_headers(stream, refusal_block(head.http_status, head.problem))
        self._http2.send_data(stream, head.problem.encode() + b"; this port speaks gRPC\n")
        self._http2.send_trailers(stream, NO_GRPC_TRAILERS)
        self.has_output()

    def _assemble(self, pending: _Pending, stream: Stream, data: memoryview, ended: bool) -> None:
        """Take bytes of a message that arrives in pieces, or is malformed."""
        assembler = pending.assembler
        before = assembler.held_bytes
        messages = assembler.take(data, ended)
        self._assembling_bytes += assembler.held_bytes - before
        check_framing(assembler)
        if self._assembling_bytes > ASSEMBLING_BYTES_MAX:
            raise LimitExceeded(
                "too many large messages are on their way on this connection",
                why=f"together they may hold {ASSEMBLING_BYTES_MAX} bytes",
                hint="send fewer at a time",
            )
        if messages and ended:
            stream.context = pending.method
            self._dispatch(pending.method, stream, bytes(messages[0]), 0)
        elif messages:  # whole, and its end comes in a frame of its own
            stream.context = _Whole(pending.method, bytes(messages[0]))

    def _dispatch(self, method: Method, stream: Stream, message: bytes, size: int) -> None:
        """Hand a whole message to its method; ``size`` bytes are not consumed yet."""
        if self._unplaced is not None:
            self._unplaced.calls.append(HeldCall(method, stream, message, size))
            return
        if method.kind is not _DIRECT:
            self._http2.consumed(stream, size)
            self._begin(method, stream, message)
            return
        try:
            method.handler(self, stream, message, size)
        except Exception as error:
            self._http2.consumed(stream, size)
            self.answer_error(stream, error)

    def _begin(self, method: Method, stream: Stream, data: bytes) -> None:
        try:
            request = method.request_class.FromString(data)
        except DecodeError:
            name = method.request_class.DESCRIPTOR.full_name
            self.answer_error(stream, InvalidArgument(f"the message is not a {name}"))
            return
        try:
            self._demand(method.row, stream, request)
        except DanubeError as error:
            self.answer_error(stream, error)
            return
        if method.kind is MethodKind.UNARY:
            self._start(stream, self._unary(stream, method.handler(request, self._call(stream))))
        elif method.kind is MethodKind.RECEIVE:
            self._start(stream, method.handler(self, stream, request))
        else:
            self._start(stream, self._stream_answers(stream, method.handler(request, self._call(stream))))

    def _demand(self, row: Row | None, stream: Stream, request: Any) -> None:
        """Raise NotAllowed unless the call may be carried out; the audit is told of either."""
        guard, audit, caller = self._door.guard, self._door.audit, ANONYMOUS
        if guard is not None and asks(row):
            caller = self.identity_of(stream)
            try:
                guard.demand(row, caller, request)
            except (NotAllowed, NotAuthenticated) as error:
                if audit is not None and row is not None:
                    audit.call(caller, row, request, self.peer, error.code)
                raise
        if audit is not None and row is not None:
            audit.call(caller, row, request, self.peer)

    def _call(self, stream: Stream) -> Call:
        head = stream.head
        identity = self._identity if head is self._identified else ANONYMOUS
        return Call(head.authority, head.fields, self.peer, self.local_address, self, identity)

    # -- who calls --------------------------------------------------------------------------------

    def identity_of(self, stream: Stream) -> Identity:
        """Return who makes this call; raises NotAuthenticated or TokenExpired."""
        head, guard = stream.head, self._door.guard
        if head is not self._identified and guard is not None:
            field = head.fields.get("authorization", "")
            if self._identified is None or field != self._authorization:
                identity = guard.identity(field, self.host, self._certificate)
                self._door.enter(self, identity)
                self._identity, self._authorization = identity, field
            self._identified = head
        return self._identity

    def forget_caller(self) -> None:
        self._identified = None

    def _known(self, guard: GrpcGuard, streams: Sequence[Stream]) -> bool:
        """Return whether these streams, which have one head, show good credentials; else they are refused."""
        try:
            self.identity_of(streams[0])
        except DanubeError as error:
            self._answer_late(guard, streams, error)
            return False
        return True

    def _answer_late(self, guard: GrpcGuard, streams: Sequence[Stream], error: DanubeError) -> None:
        """Refuse calls after a pause; what they still send is not kept."""
        loop, pause_s = asyncio.get_running_loop(), guard.pause_s(self.host)
        for stream in streams:
            stream.context = None
            loop.call_later(pause_s, self._answer_error, stream, error)

    # -- calls that wait --------------------------------------------------------------------------

    def _start(self, stream: Stream, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[stream] = task
        task.add_done_callback(lambda done: self._done(stream, done))

    def _done(self, stream: Stream, task: asyncio.Task[None]) -> None:
        if self._tasks.get(stream) is task:
            del self._tasks[stream]
        if not task.cancelled():
            error = task.exception()
            if error is not None:
                self.answer_error(stream, error)

    async def _unary(self, stream: Stream, answer: Any) -> None:
        limit_ns = timeout_ns(stream.head.fields.get("grpc-timeout", ""))
        try:
            async with asyncio.timeout(None if limit_ns < 0 else limit_ns / 1e9):
                message = await answer
        except TimeoutError:
            raise OperationTimeout("the call's own deadline has passed", hint="allow it more time") from None
        self.answer(stream, frame_message(message.SerializeToString()))

    async def _stream_answers(self, stream: Stream, answers: AsyncIterator[Any]) -> None:
        self.send_head(stream, RESPONSE_HEAD)
        async for message in answers:
            if stream.local_closed:
                return
            self.send_data(stream, frame_message(message.SerializeToString()))
            while self._queue_full(stream):
                room: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                self._waiting_for_room.append(room)
                await room
        self.end(stream, None)

    def _queue_full(self, stream: Stream) -> bool:
        return not stream.local_closed and (stream.queued_bytes > STREAM_QUEUE_BYTES or self.congested)

    # -- answers ----------------------------------------------------------------------------------

    def answer(self, stream: Stream, message: bytes, size: int = 0) -> None:
        """Answer a unary call with one framed message and OK; ``size`` bytes of it are consumed now."""
        if size:
            self._http2.consumed(stream, size)
        if not stream.local_closed:
            self._http2.answer(stream, RESPONSE_HEAD, message, OK_TRAILERS)
            if not self._dirty:
                self.has_output()

    def answer_all(self, streams: Sequence[Stream], messages: Sequence[bytes], size: int) -> None:
        """answer() of several calls that have ended their side; ``size`` bytes of theirs are consumed now."""
        self._http2.consumed(None, size)
        self._http2.answer_all(streams, RESPONSE_HEAD, messages, OK_TRAILERS)
        if not self._dirty:
            self.has_output()

    def answer_error(self, stream: Stream, error: BaseException) -> None:
        """End a call with an error, as trailers alone when no headers were sent."""
        if stream.local_closed:
            return
        guard = self._door.guard
        if guard is not None and isinstance(
            error, NotAllowed | NotAuthenticated | TokenExpired | IssuerUnavailable
        ):
            self._answer_late(guard, [stream], error)
            return
        if guard is not None and isinstance(error, DanubeError):
            error = discreet(guard.authority, self._call(stream).identity, error)
        self._answer_error(stream, error)

    def _answer_error(self, stream: Stream, error: BaseException) -> None:
        if stream.local_closed:
            return
        self._door.count("errors", 1)
        trailers = trailers_of(error)
        if stream in self._headed:
            self._headed.discard(stream)
            self._http2.send_trailers(stream, trailers)
        else:
            self._http2.send_headers(stream, RESPONSE_HEAD + trailers, end_stream=True)
        self.has_output()

    def consumed(self, stream: Stream, size: int) -> None:
        self._http2.consumed(stream, size)

    def send_head(self, stream: Stream, block: bytes) -> None:
        self._headed.add(stream)
        self._http2.send_headers(stream, block)
        self.has_output()

    def send_data(self, stream: Stream, data: bytes) -> None:
        if not stream.local_closed:
            self._http2.send_data(stream, data)
            self.has_output()

    def end(self, stream: Stream, error: DanubeError | None) -> None:
        """End a stream of answers: well, or with an error."""
        if error is not None:
            self.answer_error(stream, error)
        elif not stream.local_closed:
            self._headed.discard(stream)
            self._http2.send_trailers(stream, OK_TRAILERS)
            self.has_output()
