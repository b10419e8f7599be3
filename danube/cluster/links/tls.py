"""TLS between members: both sides show a certificate of the cluster's own authority, bound to a node.

A certificate stands for a node when it names the node's id (a URI ``danube:node:ID``) or, without any such
name, the host of the address that the members agreed on for it.  The authority should sign nothing else,
because every holder of its certificate with one of the names is a member.
"""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from danube.errors import ConfigInvalid

NODE_URI: Final = "danube:node:"


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files: this node's certificate, its key, and the authority of all members."""

    cert_file: str
    key_file: str
    ca_file: str


@dataclass(frozen=True, slots=True)
class TlsContexts:
    server: ssl.SSLContext
    client: ssl.SSLContext


def contexts(files: TlsFiles) -> TlsContexts:
    """Return both ends of mutual TLS 1.2 or newer; raises ConfigInvalid for files that cannot be used."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False  # the node's identity is checked instead, by identity_problem()
    for context in (server, client):
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_cert_chain(files.cert_file, files.key_file)
            context.load_verify_locations(files.ca_file)
        except (OSError, ssl.SSLError) as error:
            raise ConfigInvalid(
                f"members cannot speak TLS with {files.cert_file}, {files.key_file}, {files.ca_file}",
                why=str(error),
                hint="they are PEM files that this user may read, and the key belongs to the certificate",
            ) from None
    return TlsContexts(server, client)


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
