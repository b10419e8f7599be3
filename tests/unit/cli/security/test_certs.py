"""``danube certs``: what it makes is taken by TLS, and what TLS would refuse is named in words."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import dsa, ec, ed448, ed25519, rsa

from danube.cli.main import root
from danube.cli.security import checking
from danube.cli.security.checking import BROKER, NODE, Files, problems
from danube.cli.terminal import private_file
from danube.cli.terminal.services import Services
from danube.cluster.links.tls import identity_problem
from danube.errors import InvalidArgument, NotFound, StorageFailed
from danube.host import certificates
from danube.host.certificates import CLIENT, SERVER, Pair, Wanted

NOW = datetime.now(UTC)
DAY = timedelta(days=1)


def danube(*words: str | Path, exit_code: int = 0) -> Result:
    result = CliRunner().invoke(root, [str(word) for word in words], obj=Services(), prog_name="danube")
    assert result.exit_code == exit_code, result.output
    return result


def told(*words: str | Path, exit_code: int = 0) -> Any:
    return json.loads(danube(*words, "-o", "json", exit_code=exit_code).stdout)


def put(folder: Path, name: str, pair: Pair, key_mode: int = 0o600) -> Files:
    files = Files(folder / f"{name}.pem", folder / f"{name}.key", folder / "authority.pem")
    files.certificate.write_bytes(pair.certificate)
    key = folder / f"{name}.key"
    key.write_bytes(pair.key)
    key.chmod(key_mode)
    return files


@pytest.fixture
def authority(tmp_path: Path) -> Pair:
    made = certificates.make_authority("the authority", 10, NOW)
    (tmp_path / "authority.pem").write_bytes(made.certificate)
    return made


def of_broker(authority: Pair, days: int = 5, now: datetime = NOW, **facts: Any) -> Pair:
    wanted = {"uses": (SERVER,), "hosts": ("localhost", "127.0.0.1", "::1"), **facts}
    return certificates.sign(authority, Wanted("broker", **wanted), days, now)


def of_client(authority: Pair, *uris: str, **facts: Any) -> Pair:
    wanted = {"uses": (CLIENT,), "uris": uris or ("danube:service_account:app",), **facts}
    return certificates.sign(authority, Wanted("app", **wanted), 5, NOW)


# -- dev ----------------------------------------------------------------------------------------------------


def test_dev_makes_what_each_end_takes(tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    made = told("certs", "dev", "--dir", folder, "--client", "alice", "--node", "17", "--host", "b.example")
    assert {Path(row["file"]).name: row["done"] for row in made} == {
        "authority.pem": "made", "broker.pem": "made", "alice.pem": "made",
        "cluster-authority.pem": "made", "node-17.pem": "made",
    }  # fmt: skip
    ca = folder / "authority.pem"
    for name, role, host in (
        ("broker", BROKER, "b.example"),
        ("broker", BROKER, "::1"),
        ("alice", CLIENT, ""),
    ):
        words = ["certs", "check", folder / f"{name}.pem", "--key", folder / f"{name}.key", "--ca", ca]
        found = told(*words, "--as", role, *(["--host", host] if host else []))
        assert found["refused"] == []
    node = Files(folder / "node-17.pem", folder / "node-17.key", folder / "cluster-authority.pem")
    assert problems(node, NODE, "", datetime.now(UTC)) == []
    (facts,) = certificates.describe(node.certificate.read_bytes())
    names = [tuple(name.split(":", 1)) for name in facts.names]
    assert identity_problem({"subjectAltName": names}, "17", "elsewhere") == ""
    assert problems(Files(node.certificate, node.key, ca), NODE, "", datetime.now(UTC)) == [
        f"no authority of {ca} signed it"
    ]


def test_dev_keeps_what_is_there_and_replaces_when_told(tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    danube("certs", "dev", "--dir", folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    rows = told("certs", "dev", "--dir", folder, "--client", "bob")
    assert {Path(row["file"]).name: row["done"] for row in rows} == {
        "authority.pem": "kept", "broker.pem": "kept", "bob.pem": "made"
    }  # fmt: skip
    assert {name: (folder / name).read_bytes() for name in before} == before
    danube("certs", "dev", "--dir", folder, "--replace")
    changed = {name for name in before if (folder / name).read_bytes() != before[name]}
    assert changed == {"broker.pem", "broker.key"}


def test_keys_are_the_owners_alone_whatever_the_umask(tmp_path: Path) -> None:
    for mask in (0, 0o077):
        folder = tmp_path / f"certs-{mask}"
        before = os.umask(mask)
        try:
            danube("certs", "dev", "--dir", folder, "--client", "a")
        finally:
            os.umask(before)
        assert folder.stat().st_mode & 0o777 == 0o700
        modes = {path.suffix: oct(path.stat().st_mode & 0o777) for path in folder.iterdir()}
        assert modes == {".pem": "0o644", ".key": "0o600"}


def test_dev_says_why_it_cannot(tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    danube("certs", "dev", "--dir", folder)
    (folder / "authority.key").unlink()
    assert "without its key" in danube("certs", "dev", "--dir", folder, "--client", "a", exit_code=3).stderr
    for name in ("../a", "a b", ".a", "", "ä/b"):
        refusal = danube("certs", "dev", "--dir", tmp_path / "x", "--client", name, exit_code=2).stderr
        assert "cannot be the name" in refusal
    for name in ("authority", "broker"):
        assert (
            "twice" in danube("certs", "dev", "--dir", tmp_path / "x", "--client", name, exit_code=2).stderr
        )
    danube("certs", "dev", "--dir", tmp_path / "x", "--client", "a", "--client", "a", exit_code=2)
    danube("certs", "dev", "--dir", tmp_path / "y", "--host", "a" * 300, exit_code=2)
    danube("certs", "dev", "--dir", tmp_path / "z", "--client", "a" * 70, exit_code=2)
    (tmp_path / "file").write_text("")
    danube("certs", "dev", "--dir", tmp_path / "file" / "certs", exit_code=12)


def test_dev_does_not_sign_with_an_authority_that_has_expired(tmp_path: Path) -> None:
    old = certificates.make_authority("old", 1, NOW - 3 * DAY)
    put(tmp_path, "authority", old)
    assert "expired" in danube("certs", "dev", "--dir", tmp_path, exit_code=2).stderr


def test_a_disk_that_takes_nothing_leaves_no_certificate_without_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert "No space" in danube("certs", "dev", "--dir", tmp_path / "certs", exit_code=12).stderr
    assert not list((tmp_path / "certs").glob("*.pem"))
    monkeypatch.undo()
    danube("certs", "dev", "--dir", tmp_path / "certs")


def test_a_certificate_ends_no_later_than_its_authority(authority: Pair) -> None:
    (leaf,) = certificates.describe(of_broker(authority, days=3_650).certificate)
    (above,) = certificates.describe(authority.certificate)
    assert leaf.not_after <= above.not_after and not leaf.authority and above.authority


# -- show ---------------------------------------------------------------------------------------------------


def test_show_says_what_a_certificate_is(tmp_path: Path, authority: Pair) -> None:
    files = put(tmp_path, "app", of_client(authority, "danube:user:ann"))
    files.certificate.write_bytes(files.certificate.read_bytes() + authority.certificate)
    leaf, above = told("certs", "show", files.certificate)
    assert (leaf["subject"], leaf["issuer"]) == ("CN=app", "CN=the authority") and above["authority"]
    assert leaf["names"] == ["URI:danube:user:ann"] and leaf["uses"] == ["client"]
    assert leaf["key"] == "EC secp256r1" and len(leaf["fingerprint"]) == 64
    assert "danube:user:ann" in danube("certs", "show", files.certificate).stdout


def test_show_reads_certificates_that_others_made(tmp_path: Path) -> None:
    """No extensions, other keys, other uses."""
    for key, kind in (
        (rsa.generate_private_key(65_537, 2_048), "RSA 2048"),
        (ed25519.Ed25519PrivateKey.generate(), "Ed25519"),
    ):
        made = _bare(key, x509.ExtendedKeyUsage([x509.ObjectIdentifier("1.3.6.1.5.5.7.3.3")]))
        (tmp_path / "other.pem").write_bytes(made)
        (row,) = told("certs", "show", tmp_path / "other.pem")
        assert row["key"] == kind and row["uses"] == ["1.3.6.1.5.5.7.3.3"] and row["names"] == []
    (tmp_path / "bare.pem").write_bytes(_bare(ec.generate_private_key(ec.SECP256R1())))
    assert told("certs", "show", tmp_path / "bare.pem")[0]["uses"] == []


def _bare(key: Any, *extensions: x509.ExtensionType) -> bytes:
    name = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, "bare")])
    builder = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(1).not_valid_before(NOW - DAY).not_valid_after(NOW + DAY)
    )  # fmt: skip
    for extension in extensions:
        builder = builder.add_extension(extension, critical=False)
    digest = None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256()
    return builder.sign(key, digest).public_bytes(serialization.Encoding.PEM)


@pytest.mark.parametrize(
    "content", [b"", b"nothing", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"]
)
def test_what_is_no_certificate_is_an_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.pem").write_bytes(content)
    assert "no certificate" in danube("certs", "show", tmp_path / "a.pem", exit_code=2).stderr
    assert "no certificate" in told("certs", "check", tmp_path / "a.pem", exit_code=10)["refused"][0]


def test_files_that_cannot_be_read_are_errors(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="is not there"):
        private_file.read_file(tmp_path / "missing")
    with pytest.raises(StorageFailed, match="cannot be read"):
        private_file.read_file(tmp_path)


# -- check --------------------------------------------------------------------------------------------------


def refused(files: Files, role: str = BROKER, host: str = "", now: datetime = NOW) -> str:
    found = problems(files, role, host, now)
    assert found, "nothing was found"
    return "; ".join(found)


def test_dates_are_told(tmp_path: Path, authority: Pair) -> None:
    files = put(tmp_path, "broker", of_broker(authority))
    assert "expired on" in refused(files, now=NOW + 6 * DAY)
    assert "clock" in refused(files, now=NOW - DAY)
    assert "its authority: it expired" in refused(files, now=NOW + 11 * DAY)


def test_a_certificate_that_ends_soon_is_taken_with_a_warning(tmp_path: Path, authority: Pair) -> None:
    files = put(tmp_path, "broker", of_broker(authority))
    assert "expires in" in danube("certs", "check", files.certificate).stderr
    assert not danube("certs", "check", files.certificate, "--days", "1").stderr
    assert "accepted" in danube("certs", "check", files.certificate).stdout


def test_uses_and_names_are_told(tmp_path: Path, authority: Pair) -> None:
    broker, client = put(tmp_path, "broker", of_broker(authority)), put(tmp_path, "app", of_client(authority))
    assert problems(broker, BROKER, "127.0.0.1", NOW) == problems(client, CLIENT, "", NOW) == []
    assert "may not be used as a client" in refused(broker, CLIENT)
    assert "may not be used as a server" in refused(client)
    assert "does not name elsewhere" in refused(broker, host="elsewhere")
    star = put(tmp_path, "star", of_broker(authority, hosts=["*.example.org"]))
    assert problems(star, BROKER, "a.example.org", NOW) == []
    assert "does not name" in refused(star, host="a.b.example.org")
    nameless = put(tmp_path, "nameless", of_broker(authority, hosts=(), uris=("urn:x",)))
    assert "names no host" in refused(nameless)
    assert "names no node" in refused(
        put(tmp_path, "n", of_client(authority, "urn:x", uses=(SERVER, CLIENT))), NODE
    )
    assert "an authority's own" in refused(Files(tmp_path / "authority.pem"))


def test_principals_of_clients_are_told(tmp_path: Path, authority: Pair) -> None:
    for uris, reason in (
        (("urn:x",), "no principal"),
        (("danube:user:a", "danube:user:b"), "several principals"),
        (("danube:node:1",), "clients' doors take no nodes"),
        (("danube:broker_internal:1",), "no principal"),
    ):
        assert reason in refused(put(tmp_path, "app", of_client(authority, *uris)), CLIENT)


def test_keys_are_told(tmp_path: Path, authority: Pair) -> None:
    pair, other = of_broker(authority), of_broker(authority)
    files = put(tmp_path, "broker", Pair(pair.certificate, other.key))
    assert "the key of another certificate" in refused(files)
    assert "other users" in refused(put(tmp_path, "broker", pair, key_mode=0o644))
    assert "other users" in refused(put(tmp_path, "broker", pair, key_mode=0o660))
    assert problems(put(tmp_path, "broker", pair, key_mode=0o640), BROKER, "", NOW) == []
    key = certificates.read_key(pair.key)
    locked = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )  # fmt: skip
    assert "encrypted" in refused(put(tmp_path, "broker", Pair(pair.certificate, locked)))
    for content in (b"", b"x", pair.key[:90]):
        assert "no private key" in refused(put(tmp_path, "broker", Pair(pair.certificate, content)))
    (tmp_path / "broker.key").unlink()
    assert "is not there" in refused(files)


def test_keys_of_kinds_that_tls_does_not_use_are_refused() -> None:
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    with pytest.raises(InvalidArgument, match="kind"):
        certificates.read_key(dsa.generate_private_key(2_048).private_bytes(*form))
    assert certificates.read_key(ed448.Ed448PrivateKey.generate().private_bytes(*form))


def test_a_short_rsa_key_is_told(tmp_path: Path) -> None:
    names = x509.SubjectAlternativeName([x509.DNSName("localhost")])
    (tmp_path / "a.pem").write_bytes(_bare(rsa.generate_private_key(65_537, 1_024), names))
    assert "1024 bits" in refused(Files(tmp_path / "a.pem"))


def test_another_authority_is_told(tmp_path: Path, authority: Pair) -> None:
    files = put(tmp_path, "broker", of_broker(authority))
    namesake = certificates.make_authority("the authority", 10, NOW)
    (tmp_path / "authority.pem").write_bytes(namesake.certificate)
    assert "no authority of" in refused(files)
    (tmp_path / "authority.pem").write_bytes(namesake.certificate + authority.certificate)
    assert problems(files, BROKER, "", NOW) == []
    (tmp_path / "authority.pem").write_bytes(b"")
    assert "no certificate" in refused(files)


def test_a_leaf_that_signs_is_no_authority(tmp_path: Path, authority: Pair) -> None:
    between = of_broker(authority)
    (tmp_path / "authority.pem").write_bytes(between.certificate)
    assert "is no authority" in refused(put(tmp_path, "broker", of_broker(between)))


def test_openssl_has_the_last_word(tmp_path: Path, authority: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """An authority without the extensions that strict verification wants is refused by nothing else."""
    key = ec.generate_private_key(ec.SECP256R1())
    bare = Pair(_bare(key, x509.BasicConstraints(ca=True, path_length=None)), _pem(key))
    (tmp_path / "authority.pem").write_bytes(bare.certificate)
    assert "OpenSSL refuses it" in refused(put(tmp_path, "broker", of_broker(bare)))
    assert "OpenSSL refuses it" in refused(put(tmp_path, "app", of_client(bare)), CLIENT)
    monkeypatch.setattr(checking, "_ROUNDS_MAX", 1)
    (tmp_path / "authority.pem").write_bytes(authority.certificate)
    assert "does not end" in refused(put(tmp_path, "broker", of_broker(authority)))


def _pem(key: Any) -> bytes:
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    content: bytes = key.private_bytes(*form)
    return content


@pytest.mark.parametrize("name", ["broker.pem", "broker.key", "authority.pem"])
def test_files_that_were_cut_are_refused_at_every_length(tmp_path: Path, authority: Pair, name: str) -> None:
    files = put(tmp_path, "broker", of_broker(authority))
    path = tmp_path / name
    whole = path.read_bytes()
    for size in range(0, len(whole.rstrip()) - 1, 7):
        path.write_bytes(whole[:size])
        assert problems(files, BROKER, "", NOW), size
    path.write_bytes(whole)
    assert problems(files, BROKER, "", NOW) == []
