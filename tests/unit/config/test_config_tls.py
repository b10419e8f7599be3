"""Settings of TLS that cannot hold together, and what each port gets of those that do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from danube.config.exposure import open_doors
from danube.config.loading import load
from danube.errors import ConfigInvalid
from danube.server.tls import tls_ports
from tests.certificates import Authority

PAIR = {"tls.cert_file": "c", "tls.key_file": "k"}


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"tls.cert_file": "c"}, "tls.key_file is missing"),
        ({"tls.key_file": "k"}, "tls.cert_file is missing"),
        ({"grpc.cert_file": "c"}, "grpc.key_file is missing"),
        ({"admin.tls": True}, "admin.tls is on without a certificate"),
        ({"tls.client_certificates": "optional", "tls.ca_file": "a"}, "is optional without TLS"),
        ({**PAIR, "tls.client_certificates": "required"}, "there is no tls.ca_file"),
        ({**PAIR, "tls.crl_file": "r"}, "no client certificates are asked for"),
        ({**PAIR, "cluster.seed_nodes": "127.0.0.1:1"}, "in a cluster without cluster.cert_file"),
        ({"tls.client_certificates": "perhaps"}, "is not one of off, optional, required"),
    ],
)
def test_what_cannot_hold_together(given: dict[str, object], what: str) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        load(None, {"HOME": "/tmp"}, given)
    assert any(what in problem.what for problem in caught.value.facts["problems"])


@pytest.mark.parametrize(
    ("clients", "said"),
    [("off", ["without authentication"]), ("optional", ["without authentication"]), ("required", [])],
)
def test_a_port_that_asks_for_certificates_is_not_open(clients: str, said: list[str]) -> None:
    given = {**PAIR, "tls.ca_file": "a", "tls.client_certificates": clients, "server.host": "10.0.0.1"}
    found = [sentence for _, sentence in open_doors(load(None, {"HOME": "/tmp"}, given).config)]
    assert len(found) == len(said) and all(one in found[0] for one in said)


def test_which_port_gets_which_certificate(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    one, two = authority.sign("one", "DNS:one"), authority.sign("two", "DNS:two")
    ours = {"tls.cert_file": one.cert_file, "tls.key_file": one.key_file}
    grpc = {"grpc.cert_file": two.cert_file, "grpc.key_file": two.key_file}
    members = {f"cluster.{name}": getattr(one, name) for name in ("cert_file", "key_file", "ca_file")}

    def served(given: dict[str, object]) -> dict[str, str]:
        ports = tls_ports(load(None, {"HOME": "/tmp"}, given).config)
        return {name: Path(port.all[0].source.cert_file).stem for name, port in ports.items()}

    everywhere = dict.fromkeys(("native", "metrics", "grpc", "admin"), "one")
    assert served({}) == {}
    assert served(ours) == everywhere
    assert served(grpc) == {"grpc": "two"}
    assert served({**grpc, "admin.tls": True}) == {"grpc": "two", "admin": "two"}
    assert served({**ours, **grpc}) == {**everywhere, "grpc": "two"}
    assert served({**ours, **grpc, "admin.tls": True}) == {**everywhere, "grpc": "two", "admin": "two"}
    clustered = {**ours, **members, "cluster.seed_nodes": "127.0.0.1:1"}
    ports = tls_ports(load(None, {"HOME": "/tmp"}, clustered).config)
    assert ports["native"].reads_greeting and not ports["grpc"].reads_greeting


def test_certificates_of_members_alone_take_no_places_for_handshakes_of_clients() -> None:
    members = {"cluster.cert_file": "c", "cluster.key_file": "k", "cluster.ca_file": "a"}
    config = load(None, {}, {**members, "cluster.seed_nodes": "127.0.0.1:1"}).config
    assert config.has_certificates and not config.serves_tls
    assert load(None, {}, {"grpc.cert_file": "c", "grpc.key_file": "k"}).config.serves_tls


@pytest.mark.parametrize(
    ("settings", "encrypted"),
    [
        ({}, ""),
        ({"grpc.cert_file": "c", "grpc.key_file": "k"}, "grpc"),
        ({"grpc.cert_file": "c", "grpc.key_file": "k", "admin.tls": True}, "grpc admin"),
        ({"tls.cert_file": "c", "tls.key_file": "k"}, "grpc admin metrics"),
    ],
    ids=["none", "grpc", "grpc and admin", "all"],
)
def test_the_scheme_of_a_port_tells_whether_it_speaks_tls(settings: dict[str, Any], encrypted: str) -> None:
    config = load(None, {}, settings).config
    told = {door: config.scheme_of(door) for door in ("grpc", "admin", "metrics")}
    assert told == {door: "https" if door in encrypted.split() else "http" for door in told}
