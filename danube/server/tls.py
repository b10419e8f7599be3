"""TLS of each port that has it: which files, which protocol, and whether clients show certificates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from danube.core.protocol import native as wire
from danube.errors import NotSupported
from danube.host.tls import HTTP1, HTTP2, NATIVE, TlsFiles, TlsPort

if TYPE_CHECKING:
    from danube.config.loading import BrokerConfig

_HINT = "connect to danube+tls://, or with tls=danube.TlsOptions(...)"
_NATIVE_REFUSAL = wire.error_frame(NotSupported("this port speaks TLS", hint=_HINT))
_HTTP_REFUSAL = b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\nthis port speaks TLS: write https://\n"


def tls_ports(config: BrokerConfig) -> dict[str, TlsPort]:
    """Return the ports that speak TLS, by name; raises ConfigInvalid if their files cannot be used."""
    tls, grpc = config.tls, config.grpc
    files = TlsFiles(tls.cert_file, tls.key_file, tls.ca_file, tls.crl_file)
    own = TlsFiles(grpc.cert_file, grpc.key_file, tls.ca_file, tls.crl_file) if grpc.cert_file else files
    clients = tls.client_certificates
    ports = {}
    if tls.cert_file:
        members = config.cluster
        peers = TlsFiles(members.cert_file, members.key_file, members.ca_file) if members.enabled else None
        ports["native"] = TlsPort(files, [NATIVE], clients, peers, _NATIVE_REFUSAL)
        ports["metrics"] = TlsPort(files, [HTTP1], clients, refusal=_HTTP_REFUSAL)
    if own.cert_file:
        ports["grpc"] = TlsPort(own, [HTTP2], clients)
    if config.admin.tls or tls.cert_file:
        ports["admin"] = TlsPort(own if config.admin.tls else files, [HTTP2], clients)
    return ports
