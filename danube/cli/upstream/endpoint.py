"""Endpoint of a compatibility command: the address as its scripts write it, TLS files and a token."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from danube.errors import InvalidArgument

ADMIN_DEFAULT: Final = "http://127.0.0.1:50051"
_URL: Final = re.compile(r"(?:(https?)://)?([^/\s]+:[0-9]{1,5})/?\Z")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """``target`` is ``host:port``; certificates and key are PEM; ``domain`` is the name to check."""

    target: str
    tls: bool = False
    domain: str = ""
    authority_certificate: bytes = b""
    certificate: bytes = b""
    private_key: bytes = b""
    token: str = ""


def read_endpoint(address: str) -> Endpoint:
    """``http://host:port``, ``https://host:port`` or ``host:port``; raises InvalidArgument."""
    match = _URL.match(address)
    if match is None:
        raise InvalidArgument(f"address {address[:120]!r} cannot be read", hint="write http://host:port")
    return Endpoint(match[2], tls=match[1] == "https")


def admin_endpoint(address: str, environ: Mapping[str, str]) -> Endpoint:
    """Return the admin endpoint with TLS and token from the environment."""
    token = environ.get("DANUBE_ADMIN_TOKEN") or environ.get("DANUBE_ADMIN_API_KEY", "")
    plain = replace(read_endpoint(address), token=token)
    wanted = environ.get("DANUBE_ADMIN_TLS", "").strip().lower() in ("1", "true", "yes", "on")
    if not (plain.tls or wanted):
        return plain
    return replace(
        plain,
        tls=True,
        domain=environ.get("DANUBE_ADMIN_DOMAIN", "localhost"),
        authority_certificate=_file(environ, "DANUBE_ADMIN_CA"),
        certificate=_file(environ, "DANUBE_ADMIN_CERT"),
        private_key=_file(environ, "DANUBE_ADMIN_KEY"),
    )


def _file(environ: Mapping[str, str], name: str) -> bytes:
    path = environ.get(name, "")
    if not path:
        return b""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidArgument(
            f"{name} cannot be read", why=str(error), hint="it is the path of a PEM file"
        ) from None
