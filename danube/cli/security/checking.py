"""Reasons for which a broker, or a client of one, would refuse a certificate.

What can be said in plain words is said here, by the facts of the files.  OpenSSL has the last word: where
nothing else is wrong, both ends of a handshake are played in memory, with the strictness of a broker.
"""

from __future__ import annotations

import ipaddress
import ssl
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

from danube.cli.terminal.private_file import read_file
from danube.errors import DanubeError
from danube.host import certificates
from danube.host.certificates import CLIENT, SERVER, Facts, Wanted

NODE_URI: Final = "danube:node:"
PRINCIPAL_URIS: Final = ("danube:service_account:", "danube:user:")
BROKER, NODE = "broker", "node"
USES: Final = {BROKER: (SERVER,), CLIENT: (CLIENT,), NODE: (SERVER, CLIENT)}
_ROUNDS_MAX: Final = 10


@dataclass(frozen=True, slots=True)
class Files:
    """PEM files under examination; ``authority`` is None where nobody named one."""

    certificate: Path
    key: Path | None = None
    authority: Path | None = None


def problems(files: Files, role: str, host: str, now: datetime) -> list[str]:
    """Sentences about what would be refused, and why; empty where nothing would be."""
    try:
        leaf, *_ = certificates.read_certificates(read_file(files.certificate))
    except DanubeError as error:
        return [f"{files.certificate}: {error}"]
    facts = certificates.facts_of(leaf)
    found = [*_dates(facts, now), *_content(facts, role, host)]
    if weak := certificates.weak_key(leaf):
        found.append(weak)
    if files.key is not None:
        found += _key(files.key, leaf)
    if files.authority is not None:
        found += _authority(files.authority, leaf, now)
    if not found and files.key is not None and files.authority is not None:
        found += _by_handshake(Files(files.certificate, files.key, files.authority), role, host, now)
    return found


def _dates(facts: Facts, now: datetime) -> Iterator[str]:
    if now > facts.not_after:
        yield f"it expired on {facts.not_after:%Y-%m-%d %H:%M} UTC"
    if now < facts.not_before:
        yield f"it is not valid before {facts.not_before:%Y-%m-%d %H:%M} UTC; is this host's clock right?"


def _content(facts: Facts, role: str, host: str) -> Iterator[str]:
    if facts.authority:
        yield "it is an authority's own certificate; sign another one with it"
        return
    for use in USES[role]:
        if use not in facts.uses and (facts.uses or use == CLIENT):
            yield f"it may not be used as a {use} (extended key usage {', '.join(facts.uses) or 'missing'})"
    hosts = [*facts.names_of("DNS"), *facts.names_of("IP")]
    uris = facts.names_of("URI")
    if role == CLIENT:
        yield from _principal(uris)
    elif role == BROKER and not hosts:
        yield "it names no host (subject alternative name); clients do not look at its common name"
    elif role == NODE and not hosts and not any(uri.startswith(NODE_URI) for uri in uris):
        yield f"it names no node ({NODE_URI}ID) and no host (subject alternative name)"
    if host and role != CLIENT and not any(_names(name, host) for name in hosts):
        yield f"it does not name {host}, but {', '.join(hosts) or 'no host'}"


def _principal(uris: list[str]) -> Iterator[str]:
    principals = [uri for uri in uris if uri.startswith(PRINCIPAL_URIS)]
    if any(uri.startswith(NODE_URI) for uri in uris):
        yield f"it is of a node ({NODE_URI}...), and clients' doors take no nodes"
    elif len(principals) != 1:
        count = "several principals" if principals else "no principal"
        yield f"it names {count}; one URI danube:service_account:NAME or danube:user:NAME is wanted"


def _names(name: str, host: str) -> bool:
    try:
        return ipaddress.ip_address(name) == ipaddress.ip_address(host)
    except ValueError:
        name, host = name.lower(), host.lower().rstrip(".")
        return name == host or (name.startswith("*.") and host.partition(".")[2] == name[2:] != "")


def _key(path: Path, leaf: object) -> Iterator[str]:
    try:
        key = certificates.read_key(read_file(path))
        mode = path.stat().st_mode
    except DanubeError as error:
        yield f"{path}: {error}"
        return
    if not certificates.key_fits(leaf, key):  # type: ignore[arg-type]
        yield f"{path} is the key of another certificate"
    if mode & (stat.S_IRWXO | stat.S_IWGRP):
        yield f"{path} can be read by other users (mode {stat.S_IMODE(mode):04o}); chmod 0600"


def _authority(path: Path, leaf: object, now: datetime) -> Iterator[str]:
    try:
        authorities = certificates.read_certificates(read_file(path))
    except DanubeError as error:
        yield f"{path}: {error}"
        return
    if not certificates.signed_by(leaf, authorities):  # type: ignore[arg-type]
        yield f"no authority of {path} signed it"
        return
    for one in authorities:
        if certificates.signed_by(leaf, [one]):  # type: ignore[arg-type]
            facts = certificates.facts_of(one)
            yield from (f"its authority: {problem}" for problem in _dates(facts, now))
            if not facts.authority:
                yield f"{facts.subject} in {path} is no authority"


def _by_handshake(files: Files, role: str, host: str, now: datetime) -> Iterator[str]:
    """Play a broker and a client in memory, one of them with a certificate made for the purpose."""
    with _other_end(role, now) as other:
        try:
            shown = _context(files, server=role != CLIENT, trusts=other.authority)
            taker = _context(other, server=role == CLIENT, trusts=files.authority)
        except (ssl.SSLError, OSError) as error:
            yield f"OpenSSL cannot use the files: {error}"
            return
        taker.check_hostname = bool(host) and role != CLIENT
        server, client = (taker, shown) if role == CLIENT else (shown, taker)
        if refusal := _shake(server, client, host):
            yield f"OpenSSL refuses it: {refusal}"


@contextmanager
def _other_end(role: str, now: datetime) -> Iterator[Files]:
    authority = certificates.make_authority("the other end", 1, now)
    wanted = Wanted("the other end", (SERVER if role == CLIENT else CLIENT,), hosts=["localhost"])
    pair = certificates.sign(authority, wanted, 1, now)
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        contents = {"certificate": pair.certificate, "key": pair.key, "authority": authority.certificate}
        for name, content in contents.items():
            (place / name).write_bytes(content)
        yield Files(*(place / name for name in contents))


def _context(files: Files, *, server: bool, trusts: Path | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(files.certificate, files.key)
    context.load_verify_locations(trusts)
    return context


def _shake(server: ssl.SSLContext, client: ssl.SSLContext, host: str) -> str:
    """OpenSSL's reason against the handshake; "" if both ends finish it."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname=host or None),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(_ROUNDS_MAX):
        for end in list(ends):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError as error:
                return getattr(error, "verify_message", "") or error.reason or str(error)
            ends.remove(end)
        if not ends:
            return ""
    return "the handshake does not end"
