"""Tokens of an OpenID Connect issuer: which are taken, and how its keys are read."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import logging
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from danube.core.security.principals import Principal
from danube.errors import ConfigInvalid, DanubeError, IssuerUnavailable, NotAuthenticated, TokenExpired
from danube.host import issuer as issuer_module
from danube.host.clock import wall_us
from danube.host.credentials import Credentials, Provider, Refused, issuer_keys, secret_key
from danube.host.issuer import DOCUMENT_BYTES_MAX, KEPT_NS, WANTED_MAX, IssuerKeys, check_address
from tests.broker_process import wait_until
from tests.certificates import Authority
from tests.fakes.issuer import AUDIENCE, CONFIGURATION, KEYS, Issuer, Page

LOCAL = secret_key("local", b"a secret of thirty-two bytes, or more")


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    made = Issuer()
    made.use("one")
    yield made
    made.close()


class Reader:
    """The keys of an issuer, read when a test says so, and who checks tokens by them."""

    def __init__(self, issuer: Issuer, *, read: bool = True, **options: Any) -> None:
        self.now_ns = 1
        where = {name: options.pop(name) for name in ("jwks_uri", "ca_file") if name in options}
        self.keys = IssuerKeys(issuer.name, now_ns=lambda: self.now_ns, **where)
        self.credentials = Credentials([LOCAL], provider=Provider(self.keys, AUDIENCE, **options))
        if read:
            assert self.keys.read()

    def check(self, token: str) -> Any:
        return self.credentials.check(token, wall_us())

    def refused(self, token: str) -> str:
        """The reason that the log has; a client gets none."""
        with pytest.raises(NotAuthenticated) as caught:
            self.check(token)
        assert caught.value.what == "the credential is not accepted" and not caught.value.why
        return str(caught.value.__cause__)


# -- which tokens are taken -----------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["RS256", "ES256", "EdDSA"])
def test_a_good_token_names_who_and_in_which_groups(issuer: Issuer, algorithm: str) -> None:
    issuer.use("key", algorithm=algorithm)
    found = Reader(issuer).check(issuer.token("ann", "writers", "admins", "writers", kid="key", jti="7"))
    assert (found.principal, found.groups) == (Principal("user", "ann"), ("admins", "writers"))
    assert (found.how, found.key_id, found.token_id, found.descent) == ("token", "key", "7", ())
    assert found.issued_us > 0 and found.expires_us == found.issued_us + 3_600_000_000


def test_claims_are_named_by_the_configuration(issuer: Issuer) -> None:
    reader = Reader(
        issuer, principal_claim="client_id", principal_type="service_account", groups_claim="roles"
    )
    found = reader.check(issuer.token("x", "not these", client_id="job", roles=["a"], typ="at+jwt"))
    assert (found.principal, found.groups) == (Principal("service_account", "job"), ("a",))
    assert reader.check(issuer.token("x", client_id="job", aud=["other", AUDIENCE])).groups == ()
    assert "client_id is missing" in reader.refused(issuer.token("x"))


def test_an_email_names_nobody_before_the_issuer_has_verified_it(issuer: Issuer) -> None:
    reader = Reader(issuer, principal_claim="email")
    found = reader.check(issuer.token("1", email="ann@example.com", email_verified=True))
    assert found.principal.name == "ann@example.com"
    for more in ({}, {"email_verified": False}, {"email_verified": "true"}):
        assert "not verified" in reader.refused(issuer.token("1", email="ann@example.com", **more))


def signed_by_secret(issuer: Issuer, secret: bytes, header: dict[str, Any]) -> str:
    claims = issuer.token("root", "admins").split(".")[1]
    text = f"{encoded(json.dumps(header).encode())}.{claims}"
    return f"{text}.{encoded(hmac.digest(secret, text.encode(), hashlib.sha256))}"


def encoded(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def public_pem(issuer: Issuer) -> bytes:
    public = issuer.private["one"][1].public_key()
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return bytes(public.public_bytes(serialization.Encoding.PEM, form))


def with_other_key(issuer: Issuer) -> str:
    private = rsa.generate_private_key(65_537, 2_048)
    claims = {"iss": issuer.name, "aud": AUDIENCE, "sub": "a", "exp": int(time.time()) + 60}
    return jwt.encode(claims, private, "RS256", {"kid": "one"})


BAD: dict[str, tuple[Callable[[Issuer], str], str]] = {
    "another audience": (lambda one: one.token("a", aud="other"), "Audience"),
    "no audience": (lambda one: one.token("a", aud=None), '"aud"'),
    "another issuer": (lambda one: one.token("a", iss="https://evil.example"), "no key has its kid"),
    "no issuer": (lambda one: one.token("a", iss=None), "no key has its kid"),
    "issuer and a slash": (lambda one: one.token("a", iss=one.name + "/"), "no key has its kid"),
    "issuers": (lambda one: one.token("a", iss=[one.name]), "no key has its kid"),
    "HS256 with the public key": (
        lambda one: signed_by_secret(one, public_pem(one), {"alg": "HS256", "kid": "one"}), "not RS256",
    ),
    "RS256 that is HS256": (
        lambda one: signed_by_secret(one, public_pem(one), {"alg": "RS256", "kid": "one"}), "Signature",
    ),
    "none": (lambda one: signed_by_secret(one, b"", {"alg": "none", "kid": "one"}), "not RS256"),
    "the key of another": (with_other_key, "Signature"),
    "a local kid": (
        lambda one: signed_by_secret(one, public_pem(one), {"alg": "HS256", "kid": "local"}), "Signature",
    ),
    "no kid": (lambda one: signed_by_secret(one, b"x", {"alg": "RS256"}), "no key has its kid"),
    "a kid of another type": (lambda one: signed_by_secret(one, b"x", {"alg": "RS256", "kid": 1}), "Key ID"),
    "type of another use": (lambda one: one.token("a", typ="logout+jwt"), "its header"),
    "no end": (lambda one: one.token("a", exp=None), "exp"),
    "not yet": (lambda one: one.token("a", nbf=int(time.time()) + 3_600), "not valid yet"),
    "bound to a key": (lambda one: one.token("a", cnf={"jkt": "x"}), "no proof"),
    "groups a text": (lambda one: one.token("a", groups="admins"), "no list of texts"),
    "groups of numbers": (lambda one: one.token("a", groups=[1]), "no list of texts"),
    "groups a table": (lambda one: one.token("a", groups={"admins": 1}), "no list of texts"),
    "a name that cannot be": (lambda one: one.token("a\nb"), "principal"),
    "an empty name": (lambda one: one.token(""), "sub"),
    "a number as name": (lambda one: one.token("a", sub=7), "ubject"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_tokens_are_refused_with_one_text(issuer: Issuer, name: str) -> None:
    make, why = BAD[name]
    assert why in Reader(issuer).refused(make(issuer))


def test_an_expired_token_is_named(issuer: Issuer) -> None:
    with pytest.raises(TokenExpired):
        Reader(issuer).check(issuer.token("a", exp=int(time.time()) - 120))


def test_claims_of_brokers_mean_nothing_in_it(issuer: Issuer) -> None:
    more: dict[str, Any] = {"principal_type": "broker_internal", "principal_name": "2", "danube_descent": [1],
                            "bootstrap": True}  # fmt: skip
    found = Reader(issuer).check(issuer.token("ann", **more))
    assert (found.principal, found.descent) == (Principal("user", "ann"), ())


def test_a_local_token_has_no_groups_and_needs_no_audience(issuer: Issuer) -> None:
    reader = Reader(issuer)
    local = reader.credentials.sign(Principal("user", "ann"), 60, wall_us(), groups=["admins"])
    assert reader.check(local).groups == ()
    stranger = reader.credentials.sign(Principal("user", "ann"), 60, wall_us(), issuer=issuer.name)
    assert reader.check(stranger).groups == (), "its kid says whose it is"


def test_without_a_provider_its_tokens_are_strangers(issuer: Issuer) -> None:
    with pytest.raises(NotAuthenticated):
        Credentials([LOCAL]).check(issuer.token("ann"), wall_us())


# -- which keys are taken -------------------------------------------------------------------------


def test_keys_that_nobody_may_sign_with_are_left_out(issuer: Issuer) -> None:
    issuer.use("one", "two")
    issuer.private["short"] = ("RS256", rsa.generate_private_key(65_537, 1_024))
    issuer.private["curve"] = ("ES384", ec.generate_private_key(ec.SECP384R1()))
    good, private = issuer.entry("one"), issuer.private["two"][1]
    secret = {"kty": "oct", "k": encoded(b"x" * 32), "kid": "secret"}
    d = jwt.get_algorithm_by_name("RS256").to_jwk(private, as_dict=True)
    left_out: list[Any] = [
        secret, {**secret, "alg": "HS256"}, {**secret, "alg": "RS256"}, {**secret, "kty": "RSA"},
        {**d, "kid": "private"}, issuer.entry("short"), issuer.entry("curve"),
        issuer.entry("curve", alg="ES256"), issuer.entry("two", use="enc"), issuer.entry("two", alg="PS256"),
        issuer.entry("two", alg="HS256"), issuer.entry("two", kid=""), issuer.entry("two", kid=3),
        issuer.entry("two", n="!"), issuer.entry("two", kty=["RSA"]), issuer.entry("two", kid="one"),
        {"kid": "empty"}, "text", None, {"kty": "OKP", "crv": "X25519", "x": encoded(b"x" * 32), "kid": "x"},
    ]  # fmt: skip
    found = issuer_keys(json.dumps({"keys": [good, *left_out]}).encode())
    assert list(found) == ["one"] and found["one"].private is None
    assert found["one"].public == issuer.private["one"][1].public_key(), "the first of a name"
    entry = {name: value for name, value in issuer.entry("two").items() if name not in ("alg", "use")}
    assert issuer_keys(json.dumps({"keys": [entry]}).encode())["two"].algorithm == "RS256"


@pytest.mark.parametrize("document", [b"", b"[]", b"{}", b'{"keys": {}}', b"\xff", b'{"keys"', b"1"])
def test_what_is_no_set_of_keys(document: bytes) -> None:
    with pytest.raises(ValueError):
        issuer_keys(document)


# -- how keys are read ----------------------------------------------------------------------------


def test_the_configuration_says_where_the_keys_are(issuer: Issuer) -> None:
    reader = Reader(issuer)
    assert issuer.asked == [CONFIGURATION, KEYS]
    assert reader.check(issuer.token("a"))


def test_an_address_of_keys_needs_no_configuration(issuer: Issuer) -> None:
    issuer.pages["/elsewhere?v=1"] = issuer.pages.pop(KEYS)
    Reader(issuer, jwks_uri=f"{issuer.name}/elsewhere?v=1")
    assert issuer.asked == ["/elsewhere?v=1"]


def test_an_issuer_may_end_with_a_slash() -> None:
    issuer = Issuer(path="/")
    issuer.pages[CONFIGURATION] = Page(
        json.dumps({"issuer": issuer.name, "jwks_uri": issuer.name + "keys"}).encode()
    )
    issuer.use("one")
    assert Reader(issuer).check(issuer.token("a"))
    issuer.close()


def break_status(issuer: Issuer) -> None:
    issuer.pages[KEYS] = Page(b"{}", 500)


def redirect(issuer: Issuer) -> None:
    issuer.pages["/moved"] = issuer.pages[KEYS]
    issuer.pages[KEYS] = Page(b"", 302, (("Location", f"{issuer.name}/moved"),))


def make_huge(issuer: Issuer) -> None:
    issuer.pages[KEYS] = Page(issuer.pages[KEYS].body + b" " * DOCUMENT_BYTES_MAX)


def send_no_json(issuer: Issuer) -> None:
    issuer.pages[KEYS] = Page(b"<html>")


def send_depth(issuer: Issuer) -> None:
    issuer.pages[KEYS] = Page(b"[" * 100_000)


def have_no_key(issuer: Issuer) -> None:
    issuer.serve([])


FAILURES: dict[str, tuple[Callable[[Issuer], None], str]] = {
    "status": (break_status, "answered with status 500"),
    "redirect": (redirect, "answered with status 302"),
    "huge": (make_huge, f"more than {DOCUMENT_BYTES_MAX} bytes"),
    "no JSON": (send_no_json, "Expecting value"),
    "depth": (send_depth, ""),
    "no key": (have_no_key, "no key for RS256"),
    "another issuer": (lambda one: one.configure(issuer="https://evil.example"), "names another issuer"),
    "no address": (lambda one: one.configure(jwks_uri=None), "names no jwks_uri"),
    "another scheme": (lambda one: one.configure(jwks_uri="https://127.0.0.1/"), "of the issuer's scheme"),
    "plain text": (lambda one: one.configure(jwks_uri="http://keys.example/"), "is not https"),
    "no port": (lambda one: one.configure(jwks_uri="http://127.0.0.1:1/"), "refused"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_keys_are_kept_when_they_cannot_be_read(
    issuer: Issuer, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    harm, why = FAILURES[name]
    reader, token = Reader(issuer), issuer.token("a")
    harm(issuer)
    with caplog.at_level(logging.WARNING):
        assert not reader.keys.read()
    [record] = [one for one in caplog.records if one.levelno >= logging.WARNING]  # others set the level, too
    assert why in str(vars(record)) and "/moved" not in issuer.asked
    assert reader.check(token).principal.name == "a"
    later = Reader(issuer, read=False)
    assert not later.keys.read()
    with pytest.raises(IssuerUnavailable):
        later.check(token)


def test_a_document_that_never_ends_is_given_up(issuer: Issuer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(issuer_module, "DEADLINE_NS", -1)
    assert not Reader(issuer, read=False).keys.read()


def test_keys_do_not_hold_for_ever(issuer: Issuer) -> None:
    reader = Reader(issuer)
    reader.now_ns += KEPT_NS
    assert reader.check(issuer.token("a"))
    reader.now_ns += 1
    with pytest.raises(IssuerUnavailable):
        reader.check(issuer.token("b"))
    assert reader.keys.read() and reader.check(issuer.token("b"))


def test_a_new_key_is_asked_for_once(issuer: Issuer) -> None:
    reader = Reader(issuer)
    issuer.use("one", "two")
    issuer.use("two")
    rotated = issuer.token("a", kid="two")
    with pytest.raises(IssuerUnavailable) as caught:
        reader.check(rotated)
    assert caught.value.retryable and "read again" in str(caught.value)
    assert reader.keys.read() and reader.check(rotated).key_id == "two"
    former = issuer.token("b", kid="one")
    with pytest.raises(IssuerUnavailable):
        reader.check(former)
    assert reader.keys.read()
    assert "has no key" in reader.refused(former), "the issuer was asked, and has it no longer"
    assert "has no key" in reader.refused(former)


def test_names_of_keys_that_nobody_has_take_no_room(issuer: Issuer) -> None:
    reader = Reader(issuer)
    for number in range(WANTED_MAX + 10):
        with pytest.raises(IssuerUnavailable):
            reader.keys.find(f"forged-{number}")
    assert len(reader.keys._wanted) == WANTED_MAX


# -- the thread -----------------------------------------------------------------------------------


def taken(keys: IssuerKeys, token: str) -> bool:
    try:
        Credentials([], provider=Provider(keys, AUDIENCE)).check(token, wall_us())
    except DanubeError:
        return False
    return True


def test_the_thread_reads_at_the_start_and_when_a_token_names_a_new_key(issuer: Issuer) -> None:
    keys = IssuerKeys(issuer.name, least_s=0.0)
    keys.start()
    wait_until(lambda: taken(keys, issuer.token("a")), 60, "the keys are read")
    issuer.use("two")
    wait_until(lambda: taken(keys, issuer.token("a", kid="two")), 60, "the new key is read")
    keys.stop()
    keys._thread.join(60)
    assert not keys._thread.is_alive()


def test_tokens_do_not_have_keys_read_all_the_time(issuer: Issuer) -> None:
    keys = IssuerKeys(issuer.name)
    keys.start()
    for time_of_it in ("at the start", "for a token"):
        wait_until(lambda: taken(keys, issuer.token("a")), 60, f"the keys are read {time_of_it}")
        for number in range(100):
            with pytest.raises((IssuerUnavailable, Refused)):
                keys.find(f"forged-{number}")
        wait_until(lambda: len(issuer.asked) == 4, 60, "the keys are read for a token")
    keys.stop()
    keys._thread.join(60)
    assert issuer.asked == [CONFIGURATION, KEYS] * 2


def test_a_key_that_is_new_just_after_a_reading_is_read_at_once(issuer: Issuer) -> None:
    keys = IssuerKeys(issuer.name)
    assert keys.read()
    keys.start()
    wait_until(lambda: issuer.asked.count(KEYS) == 2, 60, "the thread has read the keys")
    issuer.use("two")
    wait_until(lambda: taken(keys, issuer.token("a", kid="two")), 30, "the new key is read")
    keys.stop()


def test_an_issuer_that_is_away_at_the_start_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(issuer_module, "RETRY_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as place:
        port = int(place.getsockname()[1])
    keys = IssuerKeys(f"http://127.0.0.1:{port}")
    keys.start()
    with pytest.raises(IssuerUnavailable):
        keys.find("one")
    issuer = Issuer(port)
    issuer.use("one")
    wait_until(lambda: taken(keys, issuer.token("a")), 60, "the issuer is back")
    keys.stop()
    keys._thread.join(60)
    issuer.close()


# -- addresses and TLS ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["https://id.example", "https://id.example:8443/realms/x?y=1", "http://127.0.0.1:1/", "http://[::1]:1",
     "http://localhost/x"],
)  # fmt: skip
def test_addresses_that_keys_may_come_from(text: str) -> None:
    assert check_address(text).geturl() == text


@pytest.mark.parametrize(
    "text",
    ["", "id.example", "http://id.example", "http://127.example", "http://10.0.0.1", "file:///etc/passwd",
     "ftp://id.example", "https://", "https://me@id.example", "https://id.example/#x",
     "https://id.example/a b",
     "https://id.example:0", "https://id.example:port", "https://[::1", "https://id.example/\n"],
)  # fmt: skip
def test_addresses_that_they_may_not(text: str) -> None:
    with pytest.raises(ValueError):
        check_address(text)


def test_the_certificate_of_an_issuer_is_checked(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    files = authority.sign("issuer", "IP:127.0.0.1")
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(files.cert_file, files.key_file)
    issuer = Issuer(tls=server)
    issuer.use("one")
    assert not Reader(issuer, read=False).keys.read(), "this host does not know the authority"
    assert Reader(issuer, ca_file=str(authority.cert)).check(issuer.token("a"))
    issuer.configure(jwks_uri=f"http://127.0.0.1:{issuer.port}{KEYS}")
    assert not Reader(issuer, ca_file=str(authority.cert), read=False).keys.read(), (
        "not from TLS to plain text"
    )
    issuer.close()


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_an_authority_that_cannot_be_used_is_named(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "ca.pem"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigInvalid, match=r"auth\.oidc\.ca_file .*ca\.pem cannot be read"):
        IssuerKeys("https://id.example", ca_file=str(path))
