"""Calls of the metadata log to etcd, through its HTTP/JSON gateway (``/v3``, etcd 3.4 and later).

A read is tried at every endpoint in turn.  A transaction is sent once: without an answer, the caller has to
find out whether it took effect (OutcomeUnknown).  A call blocks for at most ``timeout_s``.
"""

from __future__ import annotations

import base64
import http.client
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import msgspec

from danube.errors import (
    ConfigInvalid,
    ConnectionFailed,
    DanubeError,
    EtcdRefused,
    NotFound,
    OutcomeUnknown,
    StorageFull,
    StorageIncompatible,
    Unavailable,
)

TIMEOUT_S: Final = 5.0
PAGE_KEYS: Final = 32
_RETRY_S: Final = 0.5  # of a watch
_ANSWER_BYTES_MAX: Final = 256 * 1024 * 1024
_UNAUTHENTICATED: Final = 16
_EXHAUSTED: Final = 8
_NOT_FOUND: Final = 5
_VERSION_LEAST: Final = (3, 4)
# Errors of an etcd without a leader, or with a timeout.  Another endpoint may answer, and the request may
# still take effect.  gRPC's cancelled, unknown, deadline, internal and unavailable.
_UNDECIDED: Final = (1, 2, 4, 13, 14)


class KeyValue(NamedTuple):
    key: bytes
    value: bytes
    mod_revision: int
    lease_id: int = 0


class Guard(NamedTuple):
    """A condition of a transaction: the key was last changed at this revision; 0: it is absent."""

    key: bytes
    mod_revision: int


class Put(NamedTuple):
    """A key to be set; with a lease it goes when the lease ends."""

    key: bytes
    value: bytes
    lease_id: int = 0


class EtcdCalls:
    """Connections to one etcd; an object belongs to one thread at a time."""

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        user: str = "",
        password: str = "",
        tls: ssl.SSLContext | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        if not endpoints:
            raise ConfigInvalid("no etcd endpoint is given", hint="for example http://127.0.0.1:2379")
        self._endpoints = [_place_of(endpoint) for endpoint in endpoints]
        self._user, self._password = user, password
        self._tls = tls
        self._timeout_s = timeout_s
        self._current = 0
        self._connection: http.client.HTTPConnection | None = None
        self._token = ""

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    # Calls

    def get(self, key: bytes) -> KeyValue | None:
        """The value of a key, as of now (a quorum read)."""
        found, _ = self._range({"key": _text(key)})
        return found[0] if found else None

    def get_range(self, start: bytes, end: bytes, count_max: int = PAGE_KEYS) -> tuple[list[KeyValue], bool]:
        """Keys from ``start`` to ``end`` in order, at most ``count_max``, and whether there are more."""
        return self._range({"key": _text(start), "range_end": _text(end), "limit": str(count_max)})

    def put(self, key: bytes, value: bytes) -> None:
        self._ask("/v3/kv/put", {"key": _text(key), "value": _text(value)}, again=True)

    def delete_range(self, start: bytes, end: bytes) -> None:
        self._ask("/v3/kv/deleterange", {"key": _text(start), "range_end": _text(end)}, again=True)

    def delete(self, key: bytes) -> None:
        self._ask("/v3/kv/deleterange", {"key": _text(key)}, again=True)

    def put_if(self, guards: Sequence[Guard], puts: Sequence[Put]) -> int | None:
        """Put all where every guard holds; the new revision, or None if one does not hold.

        Raises OutcomeUnknown if that is not known.
        """
        compare = [
            {"key": _text(one.key), "target": "MOD", "result": "EQUAL", "mod_revision": str(one.mod_revision)}
            for one in guards
        ]
        success = [
            {"request_put": {"key": _text(one.key), "value": _text(one.value), "lease": str(one.lease_id)}}
            for one in puts
        ]
        answer = self._ask("/v3/kv/txn", {"compare": compare, "success": success}, again=False)
        return int(answer["header"]["revision"]) if answer.get("succeeded") else None

    def grant_lease(self, ttl_s: int) -> int:
        """The id of a new lease; one whose answer was lost ends by itself."""
        return int(self._ask("/v3/lease/grant", {"TTL": str(ttl_s)}, again=True)["ID"])

    def keep_lease(self, lease_id: int) -> bool:
        """Whether the lease is still there; then it is renewed."""
        answer = self._ask("/v3/lease/keepalive", {"ID": str(lease_id)}, again=True)
        return int(answer.get("result", {}).get("TTL", 0)) > 0

    def revoke_lease(self, lease_id: int) -> None:
        """End a lease and delete its keys; a lease that has ended already is a success."""
        with suppress(NotFound):
            self._ask("/v3/lease/revoke", {"ID": str(lease_id)}, again=True)

    def compact_history(self, revision: int) -> None:
        """Let etcd discard values from before ``revision``; refused if it has done so already."""
        self._ask("/v3/kv/compaction", {"revision": str(revision)}, again=True)

    def check_version(self) -> None:
        """Raise StorageIncompatible if the server is too old or no etcd."""
        try:
            connection = self._connected()
            connection.request("GET", "/version")
            told = connection.getresponse().read(_ANSWER_BYTES_MAX)
        except (OSError, http.client.HTTPException) as error:
            raise ConnectionFailed("etcd cannot be reached", why=self._lost(error)) from error
        _, host, port = self._endpoints[self._current]
        needed = ".".join(map(str, _VERSION_LEAST))
        try:
            version = str(msgspec.json.decode(told)["etcdserver"])
            numbers = tuple(int(part) for part in version.split(".")[:2])
        except (msgspec.DecodeError, LookupError, TypeError, ValueError):
            raise StorageIncompatible(
                f"{host}:{port} is no etcd", why="it does not tell a version", hint="check cluster.metadata"
            ) from None
        if numbers < _VERSION_LEAST:
            raise StorageIncompatible(
                f"etcd {version[:20]} at {host}:{port} is too old", hint=f"etcd {needed} or later is needed"
            )

    # A stream

    def watched(self, start: bytes, end: bytes) -> Iterator[None]:
        """Yield once when the watch of the keys has begun, then at each change; ends with the connection.

        Uses this object for nothing else meanwhile; ``interrupt`` ends it from another thread.
        """
        self.close()
        self.get(start)  # connects, and has a token that is good
        connection = self._connected()
        asked = {"create_request": {"key": _text(start), "range_end": _text(end)}}
        try:
            headers = {"Authorization": self._token} if self._token else {}
            connection.request("POST", "/v3/watch", msgspec.json.encode(asked), headers)
            response = connection.getresponse()
            if response.status != 200:
                raise Unavailable("etcd refuses to watch", why=f"status {response.status}")
            if connection.sock is not None:
                connection.sock.settimeout(None)
                _notice_silence(connection.sock)
            while response.readline(_ANSWER_BYTES_MAX):
                yield
        except (OSError, http.client.HTTPException) as error:
            raise ConnectionFailed("the watch of etcd has ended", why=self._lost(error)) from error
        finally:
            self.close()

    def interrupt(self) -> None:
        """End the call that another thread waits for."""
        connection = self._connection
        if connection is not None and connection.sock is not None:
            with suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)

    def _range(self, asked: dict[str, Any]) -> tuple[list[KeyValue], bool]:
        answer = self._ask("/v3/kv/range", asked, again=True)
        found = [
            KeyValue(
                _bytes(one["key"]),
                _bytes(one.get("value", "")),
                int(one["mod_revision"]),
                int(one.get("lease", 0)),
            )
            for one in answer.get("kvs", [])
        ]
        return found, bool(answer.get("more"))

    # One call

    def _ask(self, path: str, body: dict[str, Any], *, again: bool) -> dict[str, Any]:
        content = msgspec.json.encode(body)
        if self._user and not self._token:
            self._authenticate()
        try:
            return self._send(path, content, again=again)
        except _Refused as refused:
            if refused.code != _UNAUTHENTICATED or not self._user:
                raise refused.error() from None
        self._authenticate()
        try:
            return self._send(path, content, again=again)
        except _Refused as refused:
            raise refused.error() from None

    def _authenticate(self) -> None:
        self._token = ""
        content = msgspec.json.encode({"name": self._user, "password": self._password})
        try:
            self._token = self._send("/v3/auth/authenticate", content, again=True)["token"]
        except _Refused as refused:
            raise refused.error() from None

    def _send(self, path: str, content: bytes, *, again: bool) -> dict[str, Any]:
        reason = ""
        for _ in range(len(self._endpoints) + 1):  # the first may be a connection that was idle too long
            try:
                connection = self._connected()
            except OSError as error:
                reason = self._lost(error)
                continue
            try:
                return self._exchange(connection, path, content)
            except (OSError, http.client.HTTPException) as error:
                reason = self._lost(error)
                if not again:
                    raise OutcomeUnknown("etcd did not answer a transaction", why=reason) from error
        raise ConnectionFailed("etcd cannot be reached", why=reason)

    def _exchange(self, connection: http.client.HTTPConnection, path: str, content: bytes) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if self._token:
            headers["Authorization"] = self._token
        connection.request("POST", path, content, headers)
        response = connection.getresponse()
        answered = response.read(_ANSWER_BYTES_MAX)
        try:
            answer = msgspec.json.decode(answered)
        except msgspec.DecodeError as error:
            if response.status == 400:  # so it says that it takes no certificate with a name
                raise _Refused(400, {"message": answered.decode("utf-8", "replace").strip()}) from None
            raise http.client.HTTPException(f"status {response.status}, no JSON: {error}") from None
        if response.status == 200 and isinstance(answer, dict):
            return answer
        refused = _Refused(response.status, answer)
        if refused.code in _UNDECIDED:
            raise http.client.HTTPException(refused.text)
        raise refused

    def _connected(self) -> http.client.HTTPConnection:
        if self._connection is None:
            secure, host, port = self._endpoints[self._current]
            made: http.client.HTTPConnection = (
                http.client.HTTPSConnection(host, port, timeout=self._timeout_s, context=self._tls)
                if secure
                else http.client.HTTPConnection(host, port, timeout=self._timeout_s)
            )
            made.connect()
            self._connection = made
        return self._connection

    def _lost(self, error: Exception) -> str:
        """Change to the next endpoint; return the error for this one."""
        self.close()
        _, host, port = self._endpoints[self._current]
        self._current = (self._current + 1) % len(self._endpoints)
        return f"{host}:{port}: {type(error).__name__} {error}"


_CODE_OF_STATUS: Final = {401: _UNAUTHENTICATED, 502: 14, 503: 14, 504: 4}  # of a proxy in front of etcd


class _Refused(Exception):
    """etcd answered with an error; ``code`` is gRPC's."""

    def __init__(self, status: int, answer: Any) -> None:
        super().__init__(status)
        said = answer if isinstance(answer, dict) else {}
        self.code = int(said.get("code", 0)) or _CODE_OF_STATUS.get(status, 0)
        self.text = str(said.get("message") or said.get("error") or f"status {status}")[:300]

    def error(self) -> DanubeError:
        if "space" in self.text and self.code == _EXHAUSTED:
            return StorageFull(
                "etcd has no room for metadata", why=self.text, hint="compact and defragment it"
            )
        if self.code == _NOT_FOUND:
            return NotFound("etcd has not what was asked for", why=self.text)
        hint = "check cluster.etcd_user, its password and its role in etcd"
        if "CommonName" in self.text:
            hint = "with users, etcd takes only client certificates without a CommonName at its gateway"
        return EtcdRefused("etcd refuses", why=self.text, hint=hint)


def _place_of(endpoint: str) -> tuple[bool, str, int]:
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
        raise ConfigInvalid(f"{endpoint!r} is no etcd endpoint", hint="for example http://127.0.0.1:2379")
    return parts.scheme == "https", parts.hostname, parts.port or 2379


def _notice_silence(waiting: socket.socket) -> None:
    """Let a connection that only listens end some 20 s after its other side is gone without a word."""
    waiting.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            waiting.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)


class EtcdWatch:
    """A thread that watches some keys for changes, so that nothing has to poll.

    ``told`` is called in it at every change, and whenever some may have been missed.  It says not
    which.  Owns ``calls``.
    """

    def __init__(self, calls: EtcdCalls, start: bytes, end: bytes, told: Callable[[], None]) -> None:
        self._calls = calls
        self._range = start, end
        self._told = told
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="danube-etcd-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread.  May be called twice."""
        self._stopped.set()
        while self._thread.is_alive():
            self._calls.interrupt()
            self._thread.join(0.05)

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                for _ in self._calls.watched(*self._range):
                    self._told()
                    if self._stopped.is_set():
                        break
            except DanubeError:
                pass  # readers get the error; here it only means to watch again
            self._told()
            self._stopped.wait(_RETRY_S)
        self._calls.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdPlace:
    """An etcd and the prefix of one cluster in it; ``compacted``: whether its history is cut by us."""

    endpoints: tuple[str, ...]
    prefix: str
    user: str = ""
    password: str = field(default="", repr=False)
    tls: ssl.SSLContext | None = None
    compacted: bool = True

    def calls(self, timeout_s: float = TIMEOUT_S) -> EtcdCalls:
        return EtcdCalls(
            self.endpoints, user=self.user, password=self.password, tls=self.tls, timeout_s=timeout_s
        )
