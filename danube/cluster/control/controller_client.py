"""Requests to the controller of this host over its Unix socket, from a thread that may block.

A connection that is lost is made again until the deadline: the controller may be starting anew.
"""

from __future__ import annotations

import socket
from time import sleep
from typing import Final

import msgspec

from danube.cluster.control.calls import Answer, Change, Failed, Request, decode_answer, encode
from danube.cluster.control.sent_outcomes import received_error
from danube.cluster.links.frames import FrameReader, Kind, Lane, pack_frame
from danube.errors import ConnectionFailed, OperationTimeout, OutcomeUnknown, ProtocolError
from danube.host.clock import monotonic_ns

RETRY_S: Final = 0.02
_RECEIVE_BYTES: Final = 256 * 1024


class ControllerClient:
    """One connection, used by one thread at a time; ``address`` is a path or an abstract name."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._link: socket.socket | None = None
        self._frames = FrameReader(Lane.CALLS.frame_bytes_max)
        self._number = 0

    def ask(self, request: Request, timeout_s: float) -> Answer:
        """The answer; raises what the controller refuses with, or OutcomeUnknown and ConnectionFailed.

        A request that can be sent again without harm is, until the deadline.
        """
        deadline_ns = monotonic_ns() + int(timeout_s * 1e9)
        sent, failure = False, None
        while True:
            try:
                self._connect(deadline_ns)
                if sent and isinstance(request, Change):
                    request = msgspec.structs.replace(request, repeated=True)
                sent = True
                answer = self._exchange(encode(request), deadline_ns)
            except ProtocolError:
                self.close()  # where the next frame begins is not known
                raise
            except OSError as error:
                self.close()
                if failure is None or not isinstance(error, TimeoutError):
                    failure = error  # this is told, also where time runs out in the pause behind it
                if monotonic_ns() + int(RETRY_S * 1e9) >= deadline_ns:
                    raise self._given_up(sent, timeout_s, failure) from None
                sleep(RETRY_S)
                continue
            if isinstance(answer, Failed):
                raise received_error(answer.error)
            return answer

    def _given_up(
        self, sent: bool, timeout_s: float, error: OSError
    ) -> OutcomeUnknown | OperationTimeout | ConnectionFailed:
        if sent:
            return OutcomeUnknown("the controller did not answer", why=f"within {timeout_s:.1f} s")
        if isinstance(error, TimeoutError):
            return OperationTimeout("the controller is not reached", why=f"within {timeout_s:.1f} s")
        return ConnectionFailed(
            "the controller is not reached", why=str(error), hint="is the broker running?"
        )

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None
        self._frames = FrameReader(Lane.CALLS.frame_bytes_max)

    def _connect(self, deadline_ns: int) -> None:
        if self._link is not None:
            return
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            link.settimeout(_left_s(deadline_ns))
            link.connect(self._address)
        except BaseException:
            link.close()
            raise
        self._link = link

    def _exchange(self, body: bytes, deadline_ns: int) -> Answer:
        link = self._link
        if link is None:
            raise ConnectionError("not connected")
        self._number += 1
        link.settimeout(_left_s(deadline_ns))
        link.sendall(pack_frame(Kind.REQUEST, body, self._number))
        while True:
            link.settimeout(_left_s(deadline_ns))
            data = link.recv(_RECEIVE_BYTES)
            if not data:
                raise ConnectionError("the controller closed the connection")
            for frame in list(self._frames.feed(data)):
                if frame.kind is Kind.ANSWER and frame.number == self._number:
                    return decode_answer(frame.body)


def _left_s(deadline_ns: int) -> float:
    """Seconds until the deadline; raises TimeoutError behind it."""
    left_ns = deadline_ns - monotonic_ns()
    if left_ns <= 0:
        raise TimeoutError("the deadline is over")
    return left_ns / 1e9
