"""What is asked of etcd through its gateway: endpoints, tokens, refusals, answers that do not come."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from danube.cluster.etcd.calls import EtcdCalls
from danube.errors import (
    ConfigInvalid,
    ConnectionFailed,
    DanubeError,
    NotFound,
    OutcomeUnknown,
    StorageFull,
    StorageIncompatible,
    Unavailable,
)
from tests.broker_process import free_port
from tests.etcd_server import EtcdServer


@pytest.mark.parametrize("endpoints", [[], ["127.0.0.1:2379"], ["ftp://a"], ["http://"], ["http://a/path"]])
def test_what_is_no_endpoint_is_refused(endpoints: list[str]) -> None:
    with pytest.raises(ConfigInvalid):
        EtcdCalls(endpoints)


Answer = Callable[[str, str], tuple[int, bytes]]


@contextmanager
def gateway(answer: Answer) -> Iterator[str]:
    """A server that answers as ``answer`` says of path and authorization."""

    class Gateway(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer()

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self._answer()

        def _answer(self) -> None:
            status, body = answer(self.path, self.headers.get("Authorization", ""))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Gateway)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_token_is_taken_and_taken_again_when_it_is_no_longer_good() -> None:
    tokens = iter(["first", "second"])
    good = ["first"]

    def answer(path: str, authorization: str) -> tuple[int, bytes]:
        if path == "/v3/auth/authenticate":
            good[0] = next(tokens)
            return 200, b'{"token": "%s"}' % good[0].encode()
        if authorization != good[0]:
            return 401, b'{"error": "invalid auth token", "code": 16}'
        return 200, b"{}"

    with gateway(answer) as endpoint:
        calls = EtcdCalls([endpoint], user="u", password="p")
        assert calls.get(b"a") is None
        good[0] = "expired"
        assert calls.get(b"a") is None and good[0] == "second"
        calls.close()


UNDECIDED = [
    (503, b'{"error": "etcdserver: request timed out", "code": 14}'),
    (503, b'{"error": "etcdserver: no leader", "code": 14}'),
    (504, b'{"error": "context deadline exceeded", "code": 4}'),
    (503, b'{"error": "upstream is away"}'),
]


@pytest.mark.parametrize("status, body", UNDECIDED)
def test_a_transaction_that_etcd_gave_up_may_have_taken_effect(status: int, body: bytes) -> None:
    """Its leader may have changed between the proposal and the answer."""
    with gateway(lambda path, authorization: (status, body)) as endpoint:
        calls = EtcdCalls([endpoint])
        with pytest.raises(OutcomeUnknown):
            calls.put_if([], [])
        with pytest.raises(ConnectionFailed):
            calls.get(b"a")
        calls.close()


@pytest.mark.parametrize("status, body", UNDECIDED)
def test_a_read_goes_on_to_the_next_endpoint_when_one_has_no_leader(status: int, body: bytes) -> None:
    with (
        gateway(lambda path, authorization: (status, body)) as cut_off,
        gateway(lambda path, authorization: (200, b"{}")) as sound,
    ):
        calls = EtcdCalls([cut_off, sound])
        assert calls.get(b"a") is None
        calls.close()


@pytest.mark.parametrize(
    "status, body, error",
    [
        (500, b'{"error": "etcdserver: mvcc: database space exceeded", "code": 8}', StorageFull),
        (400, b'{"message": "no", "code": 3}', Unavailable),
        (404, b'{"message": "requested lease not found", "code": 5}', NotFound),
        (401, b'{"error": "invalid", "code": 16}', Unavailable),
        (502, b"<html>", ConnectionFailed),
        (200, b"[]", Unavailable),
    ],
)
def test_what_etcd_refuses_is_an_error_of_ours(status: int, body: bytes, error: type[DanubeError]) -> None:
    with gateway(lambda path, authorization: (status, body)) as endpoint:
        for user in ("", "u"):
            calls = EtcdCalls([endpoint], user=user)
            with pytest.raises(error):
                calls.get(b"a")
            calls.close()
        calls = EtcdCalls([endpoint])
        with pytest.raises(OutcomeUnknown if error is ConnectionFailed else error):
            calls.put_if([], [])
        calls.close()


@pytest.mark.parametrize(
    "told, says",
    [
        ({"etcdserver": "3.3.27"}, "too old"),
        ({"etcdserver": "x"}, "no etcd"),
        ({"name": 1}, "no etcd"),
        ([], "no etcd"),
    ],
)
def test_what_is_too_old_or_no_etcd_is_refused(told: object, says: str) -> None:
    with gateway(lambda path, authorization: (200, json.dumps(told).encode())) as endpoint:
        calls = EtcdCalls([endpoint])
        with pytest.raises(StorageIncompatible, match=says):
            calls.check_version()
        calls.close()


def test_a_version_that_does_and_one_that_is_not_told(etcd_server: EtcdServer) -> None:
    calls = etcd_server.calls()
    calls.check_version()
    calls.close()
    away = EtcdCalls([f"http://127.0.0.1:{free_port()}"])
    with pytest.raises(ConnectionFailed):
        away.check_version()


def test_the_next_endpoint_is_asked_when_one_is_down(etcd_server: EtcdServer) -> None:
    calls = EtcdCalls([f"http://127.0.0.1:{free_port()}", etcd_server.endpoint])
    assert calls.get(b"/nothing") is None
    calls.close()


def test_history_is_forgotten_once(etcd_server: EtcdServer) -> None:
    calls = etcd_server.calls()
    calls.put(b"/history", b"1")
    found = calls.get(b"/history")
    assert found is not None
    calls.compact_history(found.mod_revision)
    with pytest.raises(Unavailable, match="compacted"):
        calls.compact_history(found.mod_revision)
    calls.close()


def test_a_watch_tells_of_changes_and_notices_a_side_that_is_gone(etcd_server: EtcdServer) -> None:
    prefix = etcd_server.new_prefix().encode()
    calls, other = etcd_server.calls(), etcd_server.calls()
    told = calls.watched(prefix + b"a", prefix + b"c")
    next(told)
    raw = calls._connection.sock
    assert raw.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) and raw.gettimeout() is None
    other.put(prefix + b"b", b"1")
    next(told)
    calls.interrupt()
    with pytest.raises((ConnectionFailed, StopIteration)):
        next(told)
    other.close()
    calls.close()
