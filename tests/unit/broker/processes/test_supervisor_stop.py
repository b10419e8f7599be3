"""What a supervisor that was told to stop does with the sockets of its workers."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from danube.broker.processes.contexts import SupervisorSettings
from danube.broker.processes.listeners import open_listeners
from danube.broker.processes.supervisor import Supervisor


@pytest.fixture
def stopping(tmp_path: Path) -> Iterator[Supervisor]:
    """Its workers have ended; what is beside them is taken to be there still."""
    supervisor = Supervisor(SupervisorSettings(data_dir=tmp_path, workers=2), lambda context: 0, None, None)
    supervisor._listeners = open_listeners("127.0.0.1", {"native": 0}, 2)
    yield supervisor
    for sockets in supervisor._listeners:
        sockets["native"].close()


def test_who_comes_after_the_workers_were_told_to_stop_is_refused_at_once(stopping: Supervisor) -> None:
    """The mover still drains: whoever got a connection would wait for an answer that nobody gives."""
    address = stopping._listeners[0]["native"].getsockname()
    waiting = socket.create_connection(address, 5)
    stopping._stop(1)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, 5)
    with pytest.raises(ConnectionResetError):  # and who came before is told
        waiting.recv(1)
    waiting.close()
    stopping._stop(2)
