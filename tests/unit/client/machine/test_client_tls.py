"""TLS of a client: what asks for it, and what its failures are called."""

from __future__ import annotations

import ssl
from typing import Any

import pytest

from danube.client.machine.address import Address, closed_early, parse_url, refused
from danube.client.machine.tls import ClientTls, TlsOptions, explained, tls_of
from danube.cluster.links.tls import broker_problem
from danube.errors import ConfigInvalid, ConnectionFailed, InvalidArgument

PLACE = Address("broker.example", 6660)


def verification(code: int) -> ssl.SSLCertVerificationError:
    error = ssl.SSLCertVerificationError(1, "certificate verify failed")
    error.verify_code, error.verify_message = code, "in OpenSSL's words"
    return error


def alert(reason: str) -> ssl.SSLError:
    error = ssl.SSLError(1, f"[SSL: {reason}] in OpenSSL's words")
    error.reason = reason
    return error


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (verification(10), "its certificate has expired"),
        (verification(9), "is not valid yet"),
        (verification(18), "no authority that is known here"),
        (verification(20), "no authority that is known here"),
        (verification(62), "for another name"),
        (verification(64), "for another address"),
        (verification(23), "was revoked"),
        (verification(66), "its certificate is not valid: in OpenSSL's words"),
        (alert("WRONG_VERSION_NUMBER"), "does not speak TLS"),
        (alert("RECORD_LAYER_FAILURE"), "does not speak TLS"),
        (alert("TLSV13_ALERT_CERTIFICATE_REQUIRED"), "requires a client certificate"),
        (alert("TLSV1_ALERT_UNKNOWN_CA"), "does not accept this client's certificate"),
        (alert("SSLV3_ALERT_CERTIFICATE_EXPIRED"), "does not accept this client's certificate"),
        (alert("NO_SHARED_CIPHER"), "TLS failed: no shared cipher"),
    ],
)
def test_a_failure_in_words(error: ssl.SSLError, why: str) -> None:
    found = refused(PLACE, error, ClientTls(TlsOptions()))
    assert isinstance(found, ConnectionFailed) and "broker.example:6660" in found.what
    assert why in found.why and found.hint


def test_what_is_none_of_tls_keeps_its_words() -> None:
    assert explained(None) is None and explained(ValueError()) is None and explained(OSError()) is None
    tls = ClientTls(TlsOptions())
    assert "nothing listens there" in refused(PLACE, ConnectionRefusedError(), tls).why


@pytest.mark.parametrize("ended", [ConnectionResetError(), BrokenPipeError(), ssl.SSLEOFError(8, "EOF")])
def test_an_end_in_the_handshake_says_what_a_broker_ends_it_for(ended: OSError) -> None:
    none, shown = ClientTls(TlsOptions()), ClientTls(TlsOptions(cert_file="app.pem"))
    assert "requires a client certificate" in refused(PLACE, ended, none).why
    assert "does not accept a client's certificate" in refused(PLACE, ended, shown).why
    for tls, word in ((none, "requires"), (shown, "does not accept")):
        early = closed_early(PLACE, ConnectionFailed("lost"), tls)
        assert isinstance(early, ConnectionFailed) and word in early.why


def test_the_url_or_options_ask_for_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DANUBE_TLS_SERVER_NAME", "of.the.environment")
    plain, none = tls_of("danube://a:1", None)
    assert (plain, none) == ("danube://a:1", None)
    url, by_url = tls_of("danube+tls://a:1,b:2", None)
    assert by_url is not None and by_url.server_name("a") == "of.the.environment"
    assert parse_url(url) == [Address("a", 1), Address("b", 2)]
    _, by_options = tls_of("danube://a:1", TlsOptions())
    assert by_options is not None and by_options.server_name("a") == "a", "its own options hold"


def test_options_that_cannot_be_used() -> None:
    with pytest.raises(InvalidArgument, match="a key without a certificate"):
        ClientTls(TlsOptions(key_file="app.key"))
    with pytest.raises(ConfigInvalid, match=r"/nowhere\.pem"):
        ClientTls(TlsOptions(ca_file="/nowhere.pem")).context()


def test_without_an_authority_those_of_the_system_hold() -> None:
    context = ClientTls(TlsOptions()).context()
    assert context.verify_mode == ssl.CERT_REQUIRED and context.check_hostname


@pytest.mark.parametrize(
    ("names", "host", "good"),
    [
        ((("URI", "danube:node:7"),), "10.0.0.1", True),
        ((("IP Address", "10.0.0.1"),), "10.0.0.1", True),
        ((("IP Address", "10.0.0.1"),), "127.0.0.1", True),  # this broker itself
        ((("IP Address", "10.0.0.1"),), "10.0.0.2", False),
        ((("IP Address", "10.0.0.1"),), "localhost.example", False),  # another host's name
        ((("IP Address", "10.0.0.1"),), "127.example", False),
        ((("URI", "danube:user:a"),), "10.0.0.1", False),
        ((), "10.0.0.1", False),
    ],
)
def test_which_certificate_stands_for_a_broker(names: Any, host: str, good: bool) -> None:
    assert (broker_problem({"subjectAltName": names}, host) == "") is good
    assert broker_problem(None, host)
