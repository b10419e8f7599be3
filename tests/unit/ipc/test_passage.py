"""Sockets from one worker to another: with their bytes, bounded, and not lost with a process."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from danube.ipc.passage import UNREAD_BYTES_MAX, Pair, Passage, Passed, close_pairs, open_pairs


@pytest.fixture
def pairs() -> Iterator[tuple[Pair, ...]]:
    opened = open_pairs(2)
    yield opened
    close_pairs(opened)


@contextmanager
def forked(worker: int, pairs: tuple[Pair, ...]) -> Iterator[Passage]:
    """The passage of a process of ``worker``, with descriptors of its own as after a fork."""
    passage = Passage(worker, tuple((own.dup(), towards.dup()) for own, towards in pairs))
    try:
        yield passage
    finally:
        passage.close()


@contextmanager
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    client, accepted = socket.socketpair()
    with client, accepted:
        yield client, accepted


def test_the_other_worker_goes_on_where_the_first_has_stopped(pairs: tuple[Pair, ...]) -> None:
    with forked(0, pairs) as here, forked(1, pairs) as there, connection() as (client, accepted):
        assert here.send(1, accepted.fileno(), "native", 17, b"what was read", b"who it is")
        accepted.close()
        client.sendall(b" and what was not")
        arrived = there.receive()
        assert arrived is not None and there.receive() is None and here.receive() is None
        raw, door, sent_bytes, unread, told = arrived
        assert (door, sent_bytes, told) == ("native", 17, b"who it is")
        assert raw is not None and unread + raw.recv(100) == b"what was read and what was not"
        assert not os.get_inheritable(raw.fileno())
        raw.sendall(b"answer")
        raw.close()
        assert (client.recv(100), client.recv(100)) == (b"answer", b"")


def test_what_waits_for_a_worker_that_died_is_taken_by_its_replacement(pairs: tuple[Pair, ...]) -> None:
    with forked(1, pairs) as here, connection() as (client, accepted):
        with forked(0, pairs):
            assert here.send(0, accepted.fileno(), "grpc", 0, b"HELLO")
        with forked(0, pairs) as replacement:
            arrived = replacement.receive()
            assert arrived is not None and arrived.raw is not None
            assert (arrived.door, arrived.unread) == ("grpc", b"HELLO")
            arrived.raw.close()
        client.sendall(b"still open")


def test_a_worker_that_takes_nothing_is_offered_only_so_much(pairs: tuple[Pair, ...]) -> None:
    with forked(0, pairs) as here, forked(1, pairs) as there, connection() as (_, accepted):
        assert not here.send(1, accepted.fileno(), "grpc", 0, bytes(UNREAD_BYTES_MAX + 1))
        assert there.receive() is None
        sent = 0
        while here.send(1, accepted.fileno(), "grpc", 0, bytes(UNREAD_BYTES_MAX)):
            sent += 1
            assert sent < 1_000, "nothing bounds it"
        assert sent
        while (arrived := there.receive()) is not None:
            assert arrived.raw is not None and len(arrived.unread) == UNREAD_BYTES_MAX
            arrived.raw.close()
            sent -= 1
        assert sent == 0 and here.send(1, accepted.fileno(), "grpc", 0, b"again")


def test_a_process_without_a_free_descriptor_loses_the_connection_and_nothing_else(
    pairs: tuple[Pair, ...],
) -> None:
    with forked(0, pairs) as here, forked(1, pairs) as there, connection() as (client, accepted):
        for name in (b"first", b"second"):
            assert here.send(1, accepted.fileno(), "grpc", 3, name)
        accepted.close()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        try:
            first = there.receive()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert first == Passed(None, "grpc", 3, b"first")
        second = there.receive()
        assert second is not None and second.raw is not None and second.unread == b"second"
        second.raw.close()
        assert client.recv(1) == b"", "the kernel has closed what nobody could hold"


def test_a_single_worker_has_nobody_to_pass_to() -> None:
    assert open_pairs(1) == ()
