"""Keys of an OpenID Connect issuer: read by a thread of their own, and never waited for.

Keys are read at the start, every five minutes, and when a token names one that is not known, which is done
once a minute at most.  Until then such a token is refused with IssuerUnavailable, which clients try again;
once the issuer has been asked, a key that it does not have is not accepted.

Where reading fails, the keys of before hold for a day.  Then no token of the issuer is accepted.

Writer:  the thread, which replaces the keys as a whole.
Reader:  the loop, which asks for a key and leaves the name of one that is missing.
"""

from __future__ import annotations

import http.client
import json
import ssl
import threading
from collections.abc import Callable, Mapping
from typing import Final
from urllib.parse import SplitResult, urlsplit

from danube.errors import ConfigInvalid, IssuerUnavailable
from danube.host import clock, telemetry
from danube.host.credentials import Key, Refused, issuer_keys
from danube.host.local_socket import loopback

EVERY_S: Final = 300.0
LEAST_S: Final = 60.0  # between two readings for tokens, whatever these name
RETRY_S: Final = 10.0  # after one that failed
KEPT_NS: Final = 86_400 * 1_000_000_000  # after the last one that did not
DOCUMENT_BYTES_MAX: Final = 1 << 20
TIMEOUT_S: Final = 5.0  # of each operation on the socket
DEADLINE_NS: Final = 15_000_000_000  # of a whole document
WANTED_MAX: Final = 100
_READ_BYTES: Final = 64 * 1024
_DISCOVERY: Final = "/.well-known/openid-configuration"
_log = telemetry.events("issuer")


class _Failed(Exception):
    """Why the keys were not read."""


def check_address(text: str) -> SplitResult:
    """Return the parts of an address that keys may come from; ValueError says what is wrong with it."""
    parts = urlsplit(text)
    host = parts.hostname or ""
    if not host or (parts.scheme != "https" and not (parts.scheme == "http" and loopback(host))):
        raise ValueError("is not https, and http is for loopback alone")
    if parts.username is not None or parts.fragment or not text.isprintable() or " " in text:
        raise ValueError("has a user, a fragment or a space in it")
    if parts.port == 0:
        raise ValueError("has the port 0")
    return parts


class IssuerKeys:
    """The keys of one issuer, by kid."""

    def __init__(
        self,
        issuer: str,
        *,
        jwks_uri: str = "",
        ca_file: str = "",
        now_ns: Callable[[], int] = clock.monotonic_ns,
        least_s: float = LEAST_S,
    ) -> None:
        """``jwks_uri``: where the keys are; else the issuer's own configuration says it.

        ``ca_file``: the authority of its certificates, in the place of those that the system trusts.
        """
        self.issuer = issuer
        self._jwks_uri = jwks_uri
        self._now_ns = now_ns
        self._least_s = least_s
        try:
            self._tls = ssl.create_default_context(cafile=ca_file or None)
        except OSError as error:
            raise ConfigInvalid(f"auth.oidc.ca_file {ca_file} cannot be read", why=str(error)) from None
        self._keys: Mapping[str, Key] = {}
        self._absent: frozenset[str] = frozenset()  # asked for, and not among the keys
        self._read_ns = 0  # when the keys were read
        self._lock = threading.Lock()  # of the next two
        self._wanted: set[str] = set()
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="danube-issuer", daemon=True)

    def start(self) -> None:
        """Read the keys now and from time to time; called once, in the process that checks tokens."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread, once it does not read."""
        self._stopping.set()
        self._wake.set()

    def find(self, key_id: str) -> Key:
        """Return a key; raises Refused if there is none, IssuerUnavailable if that is not known yet."""
        keys, fresh = self._keys, self._now_ns() - self._read_ns <= KEPT_NS
        if keys and fresh and key_id in keys:
            return keys[key_id]
        if keys and fresh and key_id in self._absent:
            raise Refused(f"{self.issuer} has no key with its kid")
        with self._lock:
            if len(self._wanted) < WANTED_MAX:
                self._wanted.add(key_id)
            self._wake.set()
        raise IssuerUnavailable(
            "the keys of the token's issuer are being read again",
            why="the key that signed it is not among those that are known",
            hint="try again within a minute; if that does not help, ask the operator for the broker's log",
        )

    # -- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        resting_s = 0.0  # until keys may be read for a token again
        while not self._stopping.is_set():
            if not self.read():
                self._stopping.wait(RETRY_S)
                resting_s = max(0.0, resting_s - RETRY_S)
            elif not self._stopping.wait(resting_s):
                named = self._wake.wait(EVERY_S - resting_s)
                resting_s = self._least_s if named else 0.0

    def read(self) -> bool:
        """Read the keys; return whether that went well."""
        with self._lock:
            wanted, self._wanted = self._wanted, set()
            self._wake.clear()
        try:
            keys = issuer_keys(self._document(self._jwks_uri or self._discovered()))
            if not keys:
                raise _Failed("it has no key for RS256, ES256 or EdDSA with a kid")
        except (_Failed, ValueError, OSError, http.client.HTTPException, RecursionError) as error:
            why = str(error)[:200]
            _log.lasting("the keys of an issuer were not read", source=self.issuer, why=why)
            return False
        if keys.keys() != self._keys.keys():
            _log.info("the keys of an issuer were read", issuer=self.issuer, kids=sorted(keys))
        self._absent = frozenset(wanted - keys.keys())
        self._keys, self._read_ns = keys, self._now_ns()
        return True

    def _discovered(self) -> str:
        found = json.loads(self._document(self.issuer.rstrip("/") + _DISCOVERY))
        if not isinstance(found, dict) or found.get("issuer") != self.issuer:
            raise _Failed("its configuration names another issuer")
        address = found.get("jwks_uri")
        if not isinstance(address, str) or urlsplit(address).scheme != urlsplit(self.issuer).scheme:
            raise _Failed("its configuration names no jwks_uri of the issuer's scheme")
        return address

    def _document(self, address: str) -> bytes:
        """Fetch a document; no redirect is followed, because it could lead to a host that nobody named."""
        parts = check_address(address)
        host = parts.hostname or ""
        if parts.scheme == "https":
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                host, parts.port or 443, timeout=TIMEOUT_S, context=self._tls
            )
        else:
            connection = http.client.HTTPConnection(host, parts.port or 80, timeout=TIMEOUT_S)
        end_ns = clock.monotonic_ns() + DEADLINE_NS
        try:
            where = parts.path or "/"
            connection.request("GET", f"{where}?{parts.query}" if parts.query else where)
            answer = connection.getresponse()
            if answer.status != 200:
                raise _Failed(f"{address} answered with status {answer.status}")
            content = bytearray()
            while piece := answer.read1(_READ_BYTES):
                content += piece
                if len(content) > DOCUMENT_BYTES_MAX:
                    raise _Failed(f"{address} has more than {DOCUMENT_BYTES_MAX} bytes")
                if clock.monotonic_ns() > end_ns:
                    raise _Failed(f"{address} took too long")
            return bytes(content)
        finally:
            connection.close()
