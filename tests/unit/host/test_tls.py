"""Contexts follow their files, keep what works, and name the file that does not."""

from __future__ import annotations

import os
import shutil
import ssl
from pathlib import Path

import pytest

from danube.errors import ConfigInvalid
from danube.host import clock, tls
from danube.host.tls import HTTP2, NATIVE, PEER_NAME, Renewed, TlsFiles, TlsPort, TlsWatch, server_context
from tests.certificates import Authority


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def files(authority: Authority, tmp_path: Path) -> TlsFiles:
    """Files of a port in a folder of their own, to be replaced."""
    made = authority.sign("server", "IP:127.0.0.1")
    places = [tmp_path / name for name in ("cert.pem", "key.pem", "ca.pem")]
    for source, place in zip(made, places, strict=False):
        shutil.copy(source, place)
    return TlsFiles(*map(str, places))


def native(files: TlsFiles) -> ssl.SSLContext:
    return server_context(files, [NATIVE], "off")


def test_a_context_is_made_anew_when_its_files_change(authority: Authority, files: TlsFiles) -> None:
    renewed = Renewed(files, native)
    first = renewed.context
    renewed.look(at_once=True)
    assert renewed.context is first and renewed.renewed_count == 0
    other = authority.sign("other", "IP:127.0.0.1")
    os.replace(shutil.copy(other.key_file, files.key_file + ".new"), files.key_file)
    renewed.look(at_once=True)
    assert renewed.failed and renewed.context is first, "a key without its certificate: the former set stays"
    os.replace(shutil.copy(other.cert_file, files.cert_file + ".new"), files.cert_file)
    renewed.look()
    assert renewed.context is first, "it looks every five seconds"
    renewed.look(at_once=True)
    assert renewed.context is not first and not renewed.failed and renewed.renewed_count == 1


def test_a_file_that_is_gone_changes_nothing_until_it_is_back(files: TlsFiles) -> None:
    renewed = Renewed(files, native)
    first = renewed.context
    os.rename(files.cert_file, files.cert_file + ".away")
    renewed.look(at_once=True)
    assert renewed.failed and renewed.context is first
    os.rename(files.cert_file + ".away", files.cert_file)
    renewed.look(at_once=True)
    assert not renewed.failed and renewed.context is not first


def test_a_context_of_yesterday_is_replaced_for_its_ticket_keys(
    files: TlsFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    renewed = Renewed(files, native)
    first, now_ns = renewed.context, clock.monotonic_ns()
    monkeypatch.setattr(clock, "monotonic_ns", lambda: now_ns + tls.RENEW_NS + 1)
    renewed.look()
    assert renewed.context is not first and renewed.renewed_count == 0, "no file has changed"


def test_a_watch_looks_at_once_when_the_broker_was_told_to(files: TlsFiles) -> None:
    renewed = Renewed(files, native)
    watch = TlsWatch([renewed])
    first = renewed.context
    os.utime(files.cert_file, ns=(1, 1))
    watch.look(0)
    assert renewed.context is first, "five seconds are not over"
    watch.look(1)
    assert renewed.context is not first and watch.renewed_count == 1 and not watch.failed
    Path(files.cert_file).write_text("no certificate")
    watch.look(1)
    assert not watch.failed
    watch.look(2)
    assert watch.failed


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"cert_file": "/nowhere.pem"}, "/nowhere.pem as a certificate"),
        ({"key_file": "/nowhere.key"}, "/nowhere.key as a private key"),
        ({"ca_file": "/nowhere.ca"}, "/nowhere.ca as certificates of authorities"),
        ({"ca_file": ""}, "a file without a name as certificates of authorities"),
        ({"crl_file": "/nowhere.crl"}, "/nowhere.crl as lists of revoked certificates"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(files: TlsFiles, changed: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigInvalid, match=f"TLS cannot use {named}") as caught:
        server_context(files._replace(**changed), [NATIVE], "required")
    assert caught.value.why and caught.value.hint


def test_an_encrypted_key_is_an_error_and_no_question(authority: Authority, tmp_path: Path) -> None:
    made = authority.sign("locked", "DNS:a")
    key = tmp_path / "locked.key"
    os.system(f"openssl ec -aes256 -passout pass:secret -in {made.key_file} -out {key} 2>/dev/null")
    with pytest.raises(ConfigInvalid, match="with the key of"):
        native(made._replace(key_file=str(key)))


def test_other_brokers_get_a_context_of_their_own(files: TlsFiles) -> None:
    port = TlsPort(files, [NATIVE], peers=files)
    assert port.reads_greeting and len(port.all) == 2
    clients, peers = port.context(b"\x16 localhost"), port.context(b"\x16 " + PEER_NAME.encode())
    assert clients.verify_mode == ssl.CERT_NONE and peers.verify_mode == ssl.CERT_REQUIRED
    assert not TlsPort(files, [HTTP2]).reads_greeting


def test_what_every_context_has(files: TlsFiles) -> None:
    context = server_context(files, [HTTP2], "required")
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert context.options & ssl.OP_NO_RENEGOTIATION
    assert context.verify_flags & ssl.VERIFY_X509_STRICT
    old = {one["name"] for one in context.get_ciphers() if one["protocol"] == "TLSv1.2"}
    assert old and all(name.startswith("ECDHE-") and ("GCM" in name or "CHACHA20" in name) for name in old)
