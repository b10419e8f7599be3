"""TLS between members: both sides show a certificate of the cluster's own authority, bound to a node.

A certificate stands for a node when it names the node's id (a URI ``danube:node:ID``) or, without any such
name, the host of the address that the members agreed on for it.  The authority should sign nothing else,
because every holder of its certificate with one of the names is a member.
"""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Mapping
from typing import Any, Final

from danube.errors import ConfigInvalid
from danube.host.local_socket import loopback
from danube.host.tls import Renewed, TlsFiles, mutual_context

__all__ = ["TlsContexts", "TlsFiles", "broker_problem", "contexts", "identity_problem"]
NODE_URI: Final = "danube:node:"


class TlsContexts:
    """Both ends of mutual TLS; ``client`` is the newest context, and ``server`` takes the newest itself."""

    def __init__(self, files: TlsFiles) -> None:
        """Load the files; raises ConfigInvalid if they cannot be used."""
        self._server = Renewed(files, _server_context)
        self._client = Renewed(files, _client_context)
        self.all = [self._server, self._client]
        self.server = _server_context(files)
        # Whatever server name is asked for, or none; both contexts ask for the same of the other side.
        self.server.sni_callback = self._take_newest

    @property
    def client(self) -> ssl.SSLContext:
        return self._client.context

    def _take_newest(self, ssl_object: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        ssl_object.context = self._server.context


def contexts(files: TlsFiles) -> TlsContexts:
    """Return both ends of mutual TLS 1.2 or newer; raises ConfigInvalid for files that cannot be used."""
    try:
        return TlsContexts(files)
    except ConfigInvalid as error:
        raise ConfigInvalid(
            f"members cannot speak TLS with {files.cert_file}, {files.key_file}, {files.ca_file}",
            why=f"{error.what}: {error.why}",
            hint="they are PEM files that this user may read, and the key belongs to the certificate",
        ) from None


def _server_context(files: TlsFiles) -> ssl.SSLContext:
    return mutual_context(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), files)


def _client_context(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # the node's identity is checked instead, by identity_problem()
    return mutual_context(context, files)


def identity_problem(certificate: Mapping[str, Any] | None, node_id: str, host: str) -> str:
    """Why the certificate does not stand for the node at ``host``; "" if it does."""
    names: list[tuple[str, str]] = list((certificate or {}).get("subjectAltName", ()))
    uris = [name for kind, name in names if kind == "URI"]
    nodes = [name.removeprefix(NODE_URI) for name in uris if name.startswith(NODE_URI)]
    if nodes:
        return "" if node_id in nodes else f"the certificate is of node {nodes[0]}"
    if any(_names_host(kind, name, host) for kind, name in names):
        return ""
    return f"the certificate does not name {host}"


def broker_problem(certificate: Mapping[str, Any] | None, host: str) -> str:
    """Why the certificate stands for no broker at ``host``; "" if it names any node, or the host.

    A broker dials itself on loopback, which the certificates of members need not name.
    """
    names: list[tuple[str, str]] = list((certificate or {}).get("subjectAltName", ()))
    if any(kind == "URI" and name.startswith(NODE_URI) for kind, name in names):
        return ""
    if certificate and loopback(host):
        return ""
    return identity_problem(certificate, "", host)


def _names_host(kind: str, name: str, host: str) -> bool:
    if kind == "DNS":
        host, name = host.lower().rstrip("."), name.lower()
        return name == host or (name.startswith("*.") and host.partition(".")[2] == name[2:] != "")
    if kind == "IP Address":
        try:
            return ipaddress.ip_address(name.strip()) == ipaddress.ip_address(host)
        except ValueError:
            return False
    return False
