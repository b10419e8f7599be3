"""The client's URL: ``danube://host:port[,host:port]``."""

from __future__ import annotations

from typing import NamedTuple

from danube.errors import InvalidArgument

PORT = 6660
SCHEME = "danube://"
URL_DEFAULT = f"{SCHEME}127.0.0.1:{PORT}"


class Address(NamedTuple):
    """Where a broker listens; ``str()`` is how people write it."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_url(url: str) -> list[Address]:
    """Addresses of a URL, in the order in which they are tried; raise InvalidArgument."""
    if not url.startswith(SCHEME):
        raise InvalidArgument(
            f"broker URL {url!r} is not valid",
            why=f"it does not start with {SCHEME}",
            hint=f"for example {URL_DEFAULT}",
        )
    return [_parse_address(part, url) for part in url[len(SCHEME) :].rstrip("/").split(",")]


def _parse_address(text: str, url: str) -> Address:
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        port = rest[1:] if rest.startswith(":") else rest
        valid = bool(bracket) and (not rest or rest.startswith(":"))
    else:
        host, colon, port = text.rpartition(":")
        if not colon:
            host, port = text, ""
        valid = ":" not in host
    number = int(port) if port.isascii() and port.isdigit() else (PORT if not port else 0)
    if not host or not valid or not 1 <= number <= 65_535 or "/" in host or "@" in host:
        raise InvalidArgument(
            f"broker URL {url!r} is not valid",
            why=f"{text!r} is not host:port",
            hint=f"for example {URL_DEFAULT}",
        )
    return Address(host, number)
