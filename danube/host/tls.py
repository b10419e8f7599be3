"""TLS contexts from PEM files, made anew when the files change: the one place where contexts are made.

A listening port asks for the newest context at each connection, so that a new certificate, key or authority
holds for all that connect later.  Connections that exist keep the context that they began with.  Sessions are
resumed with keys of their context alone, so a client of a former authority cannot resume one.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from danube.errors import ConfigInvalid
from danube.host import telemetry
from danube.host.renewal import Renewal

RENEW_NS: Final = 86_400_000_000_000  # the keys of resumed sessions are those of a context
CLIENT_CERTIFICATES: Final = ("off", "optional", "required")
PEER_NAME: Final = "peer.danube.internal"  # the server name that brokers ask each other for
NATIVE: Final = "danube/1"
HTTP2: Final = "h2"
HTTP1: Final = "http/1.1"
_CIPHERS: Final = "ECDHE+AESGCM:ECDHE+CHACHA20"  # of TLS 1.2; those of 1.3 are all fit

_log = telemetry.events("tls")


class TlsFiles(NamedTuple):
    """PEM files: a certificate chain, its key, authorities of the other side, and what they have revoked."""

    cert_file: str = ""
    key_file: str = ""
    ca_file: str = ""
    crl_file: str = ""


def server_context(files: TlsFiles, protocols: Sequence[str], client_certificates: str) -> ssl.SSLContext:
    """Return a port's context; ConfigInvalid names the file that cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _harden(context)
    context.set_alpn_protocols(list(protocols))
    _load_certificate(context, files)
    if client_certificates != "off":
        required = client_certificates == "required"
        context.verify_mode = ssl.CERT_REQUIRED if required else ssl.CERT_OPTIONAL
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        _load(context.load_verify_locations, "certificates of authorities", files.ca_file)
        if files.crl_file:
            context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
            _load(context.load_verify_locations, "lists of revoked certificates", files.crl_file)
    return context


def client_context(files: TlsFiles, protocols: Sequence[str]) -> ssl.SSLContext:
    """Return a client's context, which checks the name of the server; without ``ca_file`` by the system.

    ConfigInvalid names the file that cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _harden(context)
    context.set_alpn_protocols(list(protocols))
    if files.ca_file:
        _load(context.load_verify_locations, "certificates of authorities", files.ca_file)
    else:
        context.load_default_certs()
    if files.cert_file:
        _load_certificate(context, files)
    return context


def mutual_context(context: ssl.SSLContext, files: TlsFiles) -> ssl.SSLContext:
    """Let a new context show a certificate, and ask the other side for one of the files' authority."""
    _harden(context)
    context.verify_mode = ssl.CERT_REQUIRED
    _load_certificate(context, files)
    _load(context.load_verify_locations, "certificates of authorities", files.ca_file)
    return context


def _harden(context: ssl.SSLContext) -> None:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(_CIPHERS)
    context.options |= ssl.OP_NO_RENEGOTIATION


def _load_certificate(context: ssl.SSLContext, files: TlsFiles) -> None:
    key_file = files.key_file or files.cert_file

    def load(cert_file: str) -> None:
        # An encrypted key is an error here; without a password OpenSSL would ask the terminal for one.
        context.load_cert_chain(cert_file, key_file, password=str)

    with suppress(OSError), open(key_file, "rb"):
        _load(load, f"a certificate with the key of {key_file}", files.cert_file)
        return
    _load(_read, "a private key", key_file)


def _read(path: str) -> None:
    with open(path, "rb"):
        pass


def _load(load: Callable[[str], None], what: str, path: str) -> None:
    try:
        load(path)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ConfigInvalid(
            f"TLS cannot use {path or 'a file without a name'} as {what}",
            why=_why(error),
            hint="it is a PEM file that this user may read; a key belongs to its certificate and is not"
            " encrypted",
        ) from None


def _why(error: OSError | ValueError) -> str:
    reason = getattr(error, "reason", None)
    if isinstance(reason, str):
        return reason.lower().replace("_", " ")
    return getattr(error, "strerror", None) or str(error)


class Renewed(Renewal[TlsFiles, ssl.SSLContext]):
    """A context that follows its files; while they cannot be loaded the former one stays."""

    renew_ns = RENEW_NS

    @property
    def context(self) -> ssl.SSLContext:
        return self.made

    def paths(self) -> Iterable[str]:
        return self.source

    def renewed(self) -> None:
        _log.info("certificate and authorities renewed", cert_file=self.source.cert_file)

    def kept(self, error: ConfigInvalid) -> None:
        _log.error("the former certificate stays", what=str(error), why=error.why)


class TlsPort:
    """TLS of a listening port: the context of its clients and, in a cluster, that of other brokers."""

    def __init__(
        self,
        files: TlsFiles,
        protocols: Sequence[str],
        client_certificates: str = "off",
        peers: TlsFiles | None = None,
        refusal: bytes = b"",
    ) -> None:
        """``peers``: certificate of this broker and authority of the cluster, for other brokers.

        ``refusal``: the answer to a client that begins without TLS.
        """
        self.refusal = refusal

        def clients(files: TlsFiles) -> ssl.SSLContext:
            return server_context(files, protocols, client_certificates)

        self._clients = Renewed(files, clients)
        self._peers = Renewed(peers, _peer_context) if peers is not None else None

    @property
    def all(self) -> list[Renewed]:
        return [self._clients, *([self._peers] if self._peers is not None else [])]

    @property
    def reads_greeting(self) -> bool:
        """Whether the context depends on the client's greeting."""
        return self._peers is not None

    def context(self, greeting: bytes) -> ssl.SSLContext:
        """Return the newest context for a client that begins with these bytes, its ClientHello.

        Whoever asks for the name of peers gets their context, which asks for a certificate of the cluster.
        """
        if self._peers is not None and PEER_NAME.encode() in greeting:
            return self._peers.context
        return self._clients.context


class TlsWatch:
    """All contexts of one process, looked at together."""

    def __init__(self, all_of_it: Iterable[Renewed]) -> None:
        self._all = list(all_of_it)
        self._asked = 0  # how often the broker was told to load them again

    def look(self, asked: int) -> None:
        """Follow the files of all contexts; at once if the broker was told to since the last look."""
        at_once, self._asked = asked != self._asked, asked
        for one in self._all:
            one.look(at_once=at_once)

    @property
    def failed(self) -> bool:
        """Whether files, as they are now, cannot be used."""
        return any(one.failed for one in self._all)

    @property
    def renewed_count(self) -> int:
        return sum(one.renewed_count for one in self._all)


class PeerContext(ssl.SSLContext):
    """A context whose other side has shown a certificate of the cluster's own authority."""


def _peer_context(files: TlsFiles) -> ssl.SSLContext:
    context = mutual_context(PeerContext(ssl.PROTOCOL_TLS_SERVER), files)
    context.set_alpn_protocols([NATIVE])
    return context


def peer_client_context(files: TlsFiles) -> ssl.SSLContext:
    """Return the context of a broker that dials another one, whose names it checks itself."""
    context = client_context(files, [NATIVE])
    context.check_hostname = False  # the server name is the same for all
    return context


def of_peer(ssl_object: ssl.SSLObject | None) -> bool:
    """Return whether a broker of this cluster is at the other end of a connection that a port accepted."""
    return ssl_object is not None and isinstance(ssl_object.context, PeerContext)
