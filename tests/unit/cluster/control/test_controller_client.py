"""What a process of this host asks its controller: again where an answer was lost, and never out of step."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from danube.cluster.control.calls import Barrier, Change, Changed, Reached, decode_request, encode
from danube.cluster.control.door import ControllerClient
from danube.cluster.links.frames import Frame, FrameReader, Kind, Lane, pack_frame
from danube.cluster.raft.engine import Members
from danube.errors import ConnectionFailed, ProtocolError

Answer = Callable[[Frame], bytes]


@contextmanager
def controller(path: Path, answers: list[Answer]) -> Iterator[None]:
    """One request after the other, each answered with bytes; none at all end the connection."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen()

    def serve() -> None:
        while answers:
            link, _ = listener.accept()
            frames = FrameReader(Lane.CALLS.frame_bytes_max)
            with link:
                while answers and (data := link.recv(65_536)):
                    for frame in frames.feed(data):
                        said = answers.pop(0)(frame)
                        if not said:
                            link.shutdown(socket.SHUT_RDWR)
                        else:
                            link.sendall(said)
                link.recv(1)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        thread.join(10)
        listener.close()
        assert not thread.is_alive()


def test_a_change_that_is_sent_again_says_so(tmp_path: Path) -> None:
    """Else a removal that was carried out would be told as one of a node that was never there."""
    seen: list[object] = []
    gone = Changed(Members({"1": "a:1"}))

    def lost(frame: Frame) -> bytes:
        seen.append(decode_request(frame.body))
        return b""

    def answered(frame: Frame) -> bytes:
        seen.append(decode_request(frame.body))
        return pack_frame(Kind.ANSWER, encode(gone), frame.number)

    with controller(tmp_path / "s", [lost, answered]):
        client = ControllerClient(str(tmp_path / "s"))
        assert client.ask(Change("remove", "2"), 10) == gone
        client.close()
    assert seen == [Change("remove", "2"), Change("remove", "2", repeated=True)]


def test_why_it_was_not_reached_is_told_where_time_ran_out_between_two_attempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that shares its processor may sleep through the deadline."""
    monkeypatch.setattr("danube.cluster.control.door.sleep", lambda _: time.sleep(0.3))
    with pytest.raises(ConnectionFailed, match="No such file"):
        ControllerClient(str(tmp_path / "s")).ask(Barrier(), 0.2)


@pytest.mark.parametrize("garbage", [b"\xff" * 64, pack_frame(Kind.ANSWER, b"\xc1", 1)])
def test_after_an_answer_that_cannot_be_read_it_begins_anew(tmp_path: Path, garbage: bytes) -> None:
    def answered(frame: Frame) -> bytes:
        return pack_frame(Kind.ANSWER, encode(Reached(7)), frame.number)

    with controller(tmp_path / "s", [lambda frame: garbage, answered]):
        client = ControllerClient(str(tmp_path / "s"))
        with pytest.raises(ProtocolError):
            client.ask(Barrier(), 10)
        assert client.ask(Barrier(), 2) == Reached(7)
        client.close()
