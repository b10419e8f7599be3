"""TLS of the gRPC ports: a certificate and its key, TLS 1.2 or newer, HTTP/2 by ALPN."""

from __future__ import annotations

import ssl

from danube.errors import ConfigInvalid


def http2_context(cert_file: str, key_file: str) -> ssl.SSLContext:
    """A server's context from two PEM files; raises ConfigInvalid if they cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    try:
        context.load_cert_chain(cert_file, key_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigInvalid(
            f"TLS cannot be served with {cert_file} and {key_file}",
            why=str(error),
            hint="both are PEM files that this user may read, and the key belongs to the certificate",
        ) from None
    return context
