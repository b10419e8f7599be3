"""Addresses of nodes as people write them: ``host:port``, ``[v6]:port``."""

from __future__ import annotations

from typing import Final

from danube.errors import ConfigInvalid

_ADDRESS_CHARACTERS_MAX: Final = 300  # a name has 253 at most


def split_address(address: str) -> tuple[str, int]:
    """Host and port; raises ConfigInvalid."""
    host, colon, port = address.strip().rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed:
        host = host[1:-1]
    sound = len(address) <= _ADDRESS_CHARACTERS_MAX and host.isprintable() and " " not in host
    number = port.isascii() and port.isdecimal()
    if not sound or not colon or not host or (":" in host and not bracketed) or not number:
        raise ConfigInvalid(
            f"{address[:80]!r} is no address of a node", hint="write host:port, or [address]:port for IPv6"
        )
    if not 0 < int(port) < 65_536:
        raise ConfigInvalid(f"{address[:80]!r} has no port that can be", hint="ports are 1 to 65535")
    try:
        host.encode("idna")  # as a lookup does, whose error is no OSError
    except UnicodeError as error:
        raise ConfigInvalid(f"{address[:80]!r} names no host that can be", why=str(error)) from None
    return host, int(port)


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_addresses(text: str) -> list[str]:
    """A list that commas separate, each address once; raises ConfigInvalid."""
    addresses = [join_address(*split_address(part)) for part in text.split(",") if part.strip()]
    return list(dict.fromkeys(addresses))
