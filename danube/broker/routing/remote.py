"""Sessions of other workers: frames of a connection travel to the partition's owner and back over rings.

    record kind      body
    TO_OWNER         u64 connection id, then whole frames of that connection
    TO_CONNECTION    u64 connection id, then whole frames for that connection
    SESSION_GONE     u64 connection id
    METADATA         empty: read the metadata log again

A frame is copied once into the ring; the owner writes it to the log from there, so a ring's space is released
only after the turn's write.  A full ring makes the sending side stop reading that socket, or delivering.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING

from danube.broker.api import RoutedSession, Session
from danube.core.protocol.native import FRAME_HEADER_BYTES, Frame, FrameDecoder, Kind
from danube.limits import MIB

if TYPE_CHECKING:
    from danube.broker.shard.shard import Shard
    from danube.ipc.channel import Channel

_CONNECTION = struct.Struct("<Q")
_PUBLISH = int(Kind.PUBLISH)
RECORD_BYTES_MAX = 2 * MIB
BACKLOG_BYTES_MAX = 8 * MIB


class RecordKind(IntEnum):
    TO_OWNER = 1
    TO_CONNECTION = 2
    SESSION_GONE = 3
    METADATA = 4


class RemoteSession(Session):
    """A session of the owner for a connection that another worker holds."""

    def __init__(self, worker: int, connection_id: int, on_output: Callable[[RemoteSession], None]) -> None:
        super().__init__()
        self.worker = worker
        self.connection_id = connection_id
        self.frames: deque[tuple[bytes | memoryview, ...]] = deque()
        self.backlog_bytes = 0
        self._on_output = on_output

    def send(self, *parts: bytes | memoryview) -> None:
        if not self.frames:
            self._on_output(self)
        self.frames.append(parts)
        self.backlog_bytes += sum(map(len, parts))
        if self.backlog_bytes > BACKLOG_BYTES_MAX:
            self.writable = False


class RemoteSessions:
    """This worker's end of all rings: sessions of other workers' connections, and its own answers."""

    def __init__(
        self,
        channel: Channel,
        shard: Shard,
        deliver: Callable[[int, bytes], None],
        on_metadata: Callable[[], None],
    ) -> None:
        self._channel = channel
        self._shard = shard
        self._deliver = deliver
        self._on_metadata = on_metadata
        self._sessions: dict[tuple[int, int], RemoteSession] = {}
        self._outgoing: dict[RemoteSession, None] = {}
        self._notices: deque[tuple[int, RecordKind, bytes]] = deque()
        self._decoder = FrameDecoder()

    def forward(self, worker: int, session: RoutedSession, frame: Frame, buffer: memoryview) -> bool:
        """Copy one frame to the owner's ring; return False, without an effect, if the ring is full."""
        start = frame.start - FRAME_HEADER_BYTES
        connection = _CONNECTION.pack(session.connection_id)
        raw = buffer[start : frame.start + ((frame.end - frame.start + 7) & ~7)]
        taken = self._channel.send(worker, RecordKind.TO_OWNER, (connection, raw))
        if taken and frame.kind == _PUBLISH:
            self._shard.counters.add("forwarded_out")
        return taken

    def notify(self, worker: int, kind: RecordKind, connection_id: int = 0) -> None:
        """Send a record without frames; if the ring is full, send it later."""
        body = _CONNECTION.pack(connection_id)
        if self._notices or not self._channel.send(worker, kind, (body,)):
            self._notices.append((worker, kind, body))

    def take(self, worker: int, kind: int, record: memoryview) -> None:
        """Handle one record; its bytes stay valid until the ring is released after this turn."""
        if kind == RecordKind.TO_OWNER:
            session = self._session(worker, _CONNECTION.unpack_from(record)[0])
            for frame in self._decoder.frames(record, _CONNECTION.size, len(record)):
                self._take_frame(session, frame, record)
        elif kind == RecordKind.TO_CONNECTION:
            self._deliver(_CONNECTION.unpack_from(record)[0], bytes(record[_CONNECTION.size :]))
        elif kind == RecordKind.SESSION_GONE:
            session_gone = self._sessions.pop((worker, _CONNECTION.unpack_from(record)[0]), None)
            if session_gone is not None:
                self._drop(session_gone)
        elif kind == RecordKind.METADATA:
            self._on_metadata()

    def _take_frame(self, session: RemoteSession, frame: Frame, record: memoryview) -> None:
        self._shard.on_frame(session, frame, record)
        if frame.kind == _PUBLISH:
            self._shard.counters.add("forwarded_in")

    def _session(self, worker: int, connection_id: int) -> RemoteSession:
        session = self._sessions.get((worker, connection_id))
        if session is None:
            session = RemoteSession(worker, connection_id, self._has_output)
            self._sessions[worker, connection_id] = session
        return session

    def _has_output(self, session: RemoteSession) -> None:
        self._outgoing[session] = None

    def worker_restarted(self, worker: int) -> None:
        """Drop the sessions of a worker that has ended."""
        for key in [key for key in self._sessions if key[0] == worker]:
            self._drop(self._sessions.pop(key))
        self._notices = deque(notice for notice in self._notices if notice[0] != worker)

    def _drop(self, session: RemoteSession) -> None:
        session.frames.clear()
        self._outgoing.pop(session, None)
        self._shard.drop_session(session)

    @property
    def pending(self) -> bool:
        """Return whether flush() has output for the rings."""
        return bool(self._outgoing or self._notices)

    def flush(self) -> bool:
        """Put the sessions' output into the rings; return True if some ring was full."""
        while self._notices and self._channel.send(
            self._notices[0][0], self._notices[0][1], (self._notices[0][2],)
        ):
            self._notices.popleft()
        blocked = bool(self._notices)
        if self._outgoing:
            outgoing, self._outgoing = self._outgoing, {}
            for session in outgoing:
                if not self._flush_session(session):
                    self._outgoing[session] = None
                    blocked = True
        return blocked

    def _flush_session(self, session: RemoteSession) -> bool:
        while session.frames:
            if not self._send_run(session):
                return False
        if not session.writable:
            session.writable = True
            self._shard.session_writable(session)
        return True

    def _send_run(self, session: RemoteSession) -> bool:
        """Send some frames, about RECORD_BYTES_MAX at most."""
        parts: list[bytes | memoryview] = [_CONNECTION.pack(session.connection_id)]
        size = count = 0
        for frame in session.frames:
            if count and size > RECORD_BYTES_MAX:
                break
            parts.extend(frame)
            size += sum(map(len, frame))
            count += 1
        if not self._channel.send(session.worker, RecordKind.TO_CONNECTION, parts):
            return False
        for _ in range(count):
            session.frames.popleft()
        session.backlog_bytes -= size
        return True
