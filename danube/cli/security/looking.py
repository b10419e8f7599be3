"""Looks at a running broker from outside: its ports, its processes and its files.

Nothing is asked of the broker that a stranger could not ask, and no secret is read.
"""

from __future__ import annotations

import socket
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from danube.core.protocol.native import Hello, Kind, control_frame

TIMEOUT_S: Final = 10.0
OTHERS: Final = 0o077
WRITING: Final = 0o022
_HANDSHAKE: Final = 0x16  # the first byte of a TLS record that goes on with a greeting
_ERROR_AT: Final = 4  # where a frame of the native protocol has its kind
_TLS_1_1, _TLS_1_2 = b"\x03\x02", b"\x03\x03"
_CBC: Final = b"\xc0\x13\xc0\x14\xc0\x09\xc0\x0a"  # with SHA-1
_NO_SECRECY: Final = b"\x00\x9c\x00\x9d\x00\x3c\x00\x2f\x00\x0a"  # RSA keys: who gets the key reads the past
_WEAK: Final = (
    ("TLS 1.1", _TLS_1_1, _CBC),
    ("ciphers without forward secrecy", _TLS_1_2, _NO_SECRECY),
    ("ciphers without authenticated encryption", _TLS_1_2, _CBC),
)
_GOOD: Final = b"\xc0\x2b\xc0\x2c\xc0\x2f\xc0\x30\xcc\xa8\xcc\xa9"


class Port(NamedTuple):
    """``asks``: whether a stranger is refused; None where that cannot be seen from outside."""

    name: str
    host: str
    number: int
    tls: bool
    weak: str  # an old version or cipher that it takes, "" for none
    asks: bool | None


class Seen(NamedTuple):
    """A process of the broker, as /proc tells of it."""

    pid: int
    user: int
    capabilities: int
    confined: bool  # it can get no further privileges
    dumps_core: bool
    words: str


def looked_at(addresses: dict[str, str]) -> list[Port]:
    """Look at each port; one that does not answer is left out."""
    found = []
    for name, address in addresses.items():
        host, _, number = address.rpartition(":")
        if number.isdecimal():
            with suppress(OSError):
                found.append(_port(name, host.strip("[]"), int(number)))
    return found


def _port(name: str, host: str, number: int) -> Port:
    near = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)  # noqa: S104 - only compared
    place = (near, number)
    weak = next(
        (says for says, version, ciphers in _WEAK if _answers(place, _greeting(version, ciphers))), ""
    )
    tls = bool(weak) or _answers(place, _greeting(_TLS_1_2, _GOOD))
    asks = None
    if name == "native" and not tls:
        answer = _exchange(place, control_frame(Kind.HELLO, Hello(client="danube doctor"), 1), _ERROR_AT + 1)
        asks = len(answer) > _ERROR_AT and answer[_ERROR_AT] != Kind.WELCOME
    return Port(name, host, number, tls, weak, asks)


def _answers(place: tuple[str, int], greeting: bytes) -> bool:
    """Whether the port goes on with this greeting of TLS."""
    return _exchange(place, greeting, 1) == bytes([_HANDSHAKE])


def _exchange(place: tuple[str, int], said: bytes, wanted: int) -> bytes:
    answer = b""
    connection = socket.create_connection(place, TIMEOUT_S)
    with connection, suppress(OSError):  # it was refused in the middle
        connection.sendall(said)
        while len(answer) < wanted and (part := connection.recv(wanted - len(answer))):
            answer += part
    return answer


def _greeting(version: bytes, ciphers: bytes) -> bytes:
    """A ClientHello (RFC 5246, 7.4.1.2) of one version that offers these ciphers."""
    extensions = b"".join(
        kind + len(content).to_bytes(2, "big") + content
        for kind, content in (
            (b"\x00\x0a", b"\x00\x06\x00\x1d\x00\x17\x00\x18"),  # x25519, P-256, P-384
            (b"\x00\x0b", b"\x01\x00"),
            (b"\x00\x0d", b"\x00\x0e\x04\x03\x05\x03\x08\x04\x04\x01\x05\x01\x02\x01\x02\x03"),
        )
    )
    body = version + bytes(range(32)) + b"\0" + len(ciphers).to_bytes(2, "big") + ciphers + b"\x01\x00"
    body += len(extensions).to_bytes(2, "big") + extensions
    message = b"\x01" + len(body).to_bytes(3, "big") + body
    return b"\x16\x03\x01" + len(message).to_bytes(2, "big") + message


def processes_below(pid: int, proc: Path = Path("/proc")) -> list[Seen]:
    """The process and all that it started, as far as they can be looked at."""
    parents: dict[int, list[int]] = {}
    for entry in proc.iterdir():
        if entry.name.isdecimal():
            with suppress(OSError, IndexError, ValueError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                parents.setdefault(parent, []).append(int(entry.name))
    found, left = [], [pid]
    while left:
        one = left.pop()
        left += parents.get(one, [])
        with suppress(OSError, KeyError, ValueError):
            found.append(_process(one, proc / str(one)))
    return found


def _process(pid: int, place: Path) -> Seen:
    told = dict(line.split(":", 1) for line in (place / "status").read_text().splitlines() if ":" in line)
    limits = (place / "limits").read_text()
    core = next(line for line in limits.splitlines() if line.startswith("Max core file size"))
    words = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
    return Seen(
        pid, int(told["Uid"].split()[1]), int(told["CapEff"], 16), told["NoNewPrivs"].strip() == "1",
        core.split()[4] != "0", words,
    )  # fmt: skip


def open_to_others(directory: Path, owner: int) -> Iterator[str]:
    """Find what others than ``owner`` may write there, or read if they get into the directory, or own."""
    shut = not directory.stat().st_mode & OTHERS
    for path in (directory, *directory.rglob("*")):
        with suppress(OSError):  # it went away meanwhile
            status = path.lstat()
            if stat.S_ISLNK(status.st_mode):
                yield f"{path} is a link"
            elif status.st_uid != owner:
                yield f"{path} belongs to user {status.st_uid}"
            elif status.st_mode & (WRITING if shut else OTHERS):
                yield f"{path} has mode {stat.S_IMODE(status.st_mode):o}"
