"""Tokens and certificates: what is taken, and some hundred of each that are not."""

from __future__ import annotations

import base64
import datetime
import hashlib
import hmac
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa, utils
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from danube.core.security.principals import BOOTSTRAP, Identity, Principal
from danube.errors import ConfigInvalid, InvalidArgument, NotAuthenticated, TokenExpired
from danube.host import credentials
from danube.host.credentials import (
    REMEMBERED_US,
    TOKEN_BYTES_MAX,
    Credentials,
    Key,
    load_key,
    of_certificate,
    secret_key,
    token_key_of,
)

NOW_S = 1_700_000_000
NOW_US = NOW_S * 1_000_000
SECRET = b"a secret of thirty-two bytes, or more"
CLAIMS: dict[str, Any] = {
    "iss": "danube-auth",
    "exp": NOW_S + 3_600,
    "sub": "app",
    "principal_type": "service_account",
    "principal_name": "app",
}
HEADER: dict[str, Any] = {"typ": "JWT", "alg": "HS256"}
RSA_KEY = rsa.generate_private_key(65_537, 2_048)
OTHER_RSA_KEY = rsa.generate_private_key(65_537, 2_048)
EC_KEY = ec.generate_private_key(ec.SECP256R1())
ED_KEY = ed25519.Ed25519PrivateKey.generate()
PUBLIC_PEM = RSA_KEY.public_key().public_bytes(
    serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
)
KEYS = [
    secret_key("", SECRET),
    Key("r", "RS256", RSA_KEY.public_key(), RSA_KEY),
    Key("e", "ES256", EC_KEY.public_key(), EC_KEY),
    Key("d", "EdDSA", ED_KEY.public_key(), ED_KEY),
]


def encoded(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def content(header: Any, claims: Any) -> str:
    return ".".join(encoded(json.dumps(part).encode()) for part in (header, claims))


def hs(
    header: Any = HEADER, claims: Any = CLAIMS, secret: bytes = SECRET, digest: Any = hashlib.sha256
) -> str:
    text = content(header, claims)
    return f"{text}.{encoded(hmac.digest(secret, text.encode(), digest))}"


def rs(header: Any, claims: Any = CLAIMS, key: rsa.RSAPrivateKey = RSA_KEY) -> str:
    text = content(header, claims)
    return f"{text}.{encoded(key.sign(text.encode(), padding.PKCS1v15(), hashes.SHA256()))}"


def es(header: Any, claims: Any = CLAIMS) -> tuple[str, bytes, bytes]:
    """The content and both halves of its signature."""
    text = content(header, claims)
    r, s = utils.decode_dss_signature(EC_KEY.sign(text.encode(), ec.ECDSA(hashes.SHA256())))
    return text, r.to_bytes(32, "big"), s.to_bytes(32, "big")


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in CLAIMS.items() if key != name}


def checker(**options: Any) -> Credentials:
    return Credentials(KEYS, **options)


GOOD = hs()
R, E, D = (
    {"typ": "JWT", "alg": "RS256", "kid": "r"},
    {"alg": "ES256", "kid": "e"},
    {"alg": "EdDSA", "kid": "d"},
)
ES_TEXT, ES_R, ES_S = es(E)
ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551  # of the curve P-256
NEGATED = (ORDER - int.from_bytes(ES_S, "big")).to_bytes(32, "big")
DEEP = encoded(b'{"alg":"HS256","x":' + b"[" * 2_900 + b"]" * 2_900 + b"}")

SHAPES = {
    "empty": "",
    "one part": "abc",
    "two parts": "a.b",
    "four parts": GOOD + ".x",
    "empty parts": "..",
    "no signature": GOOD.rpartition(".")[0] + ".",
    "no header": "." + GOOD.partition(".")[2],
    "not base64": "!!!!.e30.e30",
    "not ascii": "é.é.é",
    "padding": GOOD + "=",
    "space before": " " + GOOD,
    "space behind": GOOD + " ",
    "newline behind": GOOD + "\n",
    "newline in the signature": GOOD[:-3] + "\n" + GOOD[-3:],
    "nul": GOOD + "\0",
    "two tokens": GOOD + "," + GOOD,
    "with the scheme": "Bearer " + GOOD,
    "other alphabet": GOOD.replace("_", "/").replace("-", "+") + "+",
    "surrogates": GOOD + "\udc80",
    "header no json": f"{encoded(b'{')}.{encoded(b'{}')}.aaaa",
    "header no utf-8": f"{encoded(bytes([255, 254]))}.{encoded(b'{}')}.aaaa",
    "claims no json": hs().split(".")[0] + "." + encoded(b"{") + ".aaaa",
    "header a list": hs([]),
    "header a text": hs("x"),
    "claims a list": hs(claims=[]),
    "claims a text": hs(claims="x"),
    "claims nothing": hs(claims=None),
    "deep header": f"{DEEP}.{encoded(b'{}')}.aaaa",
    "too long": hs(claims={**CLAIMS, "more": "x" * TOKEN_BYTES_MAX}),
    "encrypted (five parts)": "a.b.c.d.e",
}
FORGED = {
    "another secret": hs(secret=b"another secret of thirty-two bytes"),
    "empty secret": hs(secret=b""),
    "last letter": GOOD[:-4] + "AAAA",
    "cut signature": GOOD[:-4],
    "claims changed": ".".join([GOOD.split(".")[0], encoded(json.dumps({**CLAIMS, "sub": "root"}).encode()),
                                GOOD.split(".")[2]]),
    "alg none": hs({**HEADER, "alg": "none"}),
    "alg none, unsigned": content({"alg": "none"}, CLAIMS) + ".",
    "alg None": hs({**HEADER, "alg": "None"}),
    "alg missing": hs({"typ": "JWT"}),
    "alg null": hs({**HEADER, "alg": None}),
    "alg a number": hs({**HEADER, "alg": 256}),
    "alg a list": hs({**HEADER, "alg": ["HS256"]}),
    "alg in small letters": hs({**HEADER, "alg": "hs256"}),
    "HS384": hs({**HEADER, "alg": "HS384"}, digest=hashlib.sha384),
    "HS512": hs({**HEADER, "alg": "HS512"}, digest=hashlib.sha512),
    "HS256 by the public key": hs({"alg": "HS256", "kid": "r"}, secret=PUBLIC_PEM),
    "RS256 said, HS256 done": hs({"alg": "RS256", "kid": "r"}, secret=PUBLIC_PEM),
    "RS256 for the secret": rs({"alg": "RS256"}),
    "another RSA key": rs(R, key=OTHER_RSA_KEY),
    "PS256": rs({"alg": "PS256", "kid": "r"}),
    "ES256 by the RSA key": rs({"alg": "ES256", "kid": "e"}),
    "ES256 zeros": f"{ES_TEXT}.{encoded(bytes(64))}",
    "ES256 short": f"{ES_TEXT}.{encoded(ES_R)}",
    "ES256 swapped": f"{ES_TEXT}.{encoded(ES_S + ES_R)}",
    "ES256 in DER": f"{ES_TEXT}.{encoded(EC_KEY.sign(ES_TEXT.encode(), ec.ECDSA(hashes.SHA256())))}",
    "EdDSA zeros": f"{content(D, CLAIMS)}.{encoded(bytes(64))}",
    "kid unknown": hs({**HEADER, "kid": "nobody"}),
    "kid a path": hs({**HEADER, "kid": "../../../../dev/null"}, secret=b""),
    "kid a query": hs({**HEADER, "kid": "' UNION SELECT 'x"}),
    "kid a number": hs({**HEADER, "kid": 0}),
    "kid null": hs({**HEADER, "kid": None}),
    "kid a list": hs({**HEADER, "kid": [""]}),
    "kid of another key": rs({"alg": "RS256", "kid": "e"}),
    "key in the header": rs({**R, "kid": "mine", "jwk": {"kty": "RSA"}}, key=OTHER_RSA_KEY),
    "address in the header": rs({**R, "jku": "https://example.com"}, key=OTHER_RSA_KEY),
    "crit": hs({**HEADER, "crit": ["exp"]}),
    "b64": hs({**HEADER, "b64": False}),
    "typ of another kind": hs({**HEADER, "typ": "at+jwt"}),
    "typ a number": hs({**HEADER, "typ": 1}),
}  # fmt: skip
CLAIMED = {
    **{f"{name} missing": hs(claims=without(name)) for name in CLAIMS},
    **{f"{name} null": hs(claims={**CLAIMS, name: None}) for name in CLAIMS},
    **{f"{name} a list": hs(claims={**CLAIMS, name: ["x"]}) for name in CLAIMS},
    "exp a text": hs(claims={**CLAIMS, "exp": str(NOW_S + 3_600)}),
    "exp true": hs(claims={**CLAIMS, "exp": True}),
    "exp a fraction": hs(claims={**CLAIMS, "exp": NOW_S + 3_600.5}),
    "exp negative": hs(claims={**CLAIMS, "exp": -1}),
    "exp huge": hs(claims={**CLAIMS, "exp": 1 << 70}),
    "exp infinite": hs(claims={**CLAIMS, "exp": float("inf")}),
    "nbf later": hs(claims={**CLAIMS, "nbf": NOW_S + 61}),
    "nbf a text": hs(claims={**CLAIMS, "nbf": "now"}),
    "iat later": hs(claims={**CLAIMS, "iat": NOW_S + 61}),
    "iat a fraction": hs(claims={**CLAIMS, "iat": 1.5}),
    "aud": hs(claims={**CLAIMS, "aud": "danube"}),
    "aud empty": hs(claims={**CLAIMS, "aud": ""}),
    "aud a list": hs(claims={**CLAIMS, "aud": ["danube"]}),
    "jti a number": hs(claims={**CLAIMS, "jti": 7}),
    "jti long": hs(claims={**CLAIMS, "jti": "x" * 257}),
    "a broker": hs(claims={**CLAIMS, "principal_type": "broker_internal"}),
    "anonymous": hs(claims={**CLAIMS, "principal_type": "anonymous"}),
    "kind in other letters": hs(claims={**CLAIMS, "principal_type": "User"}),
    "kind with space": hs(claims={**CLAIMS, "principal_type": "user "}),
    "name with a control character": hs(claims={**CLAIMS, "principal_name": "a\nb"}),
    "name too long": hs(claims={**CLAIMS, "principal_name": "x" * 257}),
    "descent a text": hs(claims={**CLAIMS, "danube_descent": "token:1"}),
    "descent of numbers": hs(claims={**CLAIMS, "danube_descent": [1]}),
    "a first token that is none": hs(claims={**CLAIMS, "iat": NOW_S, "bootstrap": False}),
    "a first token by a text": hs(claims={**CLAIMS, "iat": NOW_S, "bootstrap": "true"}),
    "a first token by a number": hs(claims={**CLAIMS, "iat": NOW_S, "bootstrap": 1}),
    "a first token of unknown age": hs(claims={**CLAIMS, "bootstrap": True}),
    "a first token for two days": hs(
        claims={**CLAIMS, "iat": NOW_S, "exp": NOW_S + 172_800, "bootstrap": True}
    ),
    "descent null": hs(claims={**CLAIMS, "danube_descent": None}),
    "name empty": hs(claims={**CLAIMS, "principal_name": ""}),
}
BAD = {**SHAPES, **FORGED, **CLAIMED}


@pytest.mark.parametrize("name", BAD)
def test_bad_tokens_are_refused_with_one_text(name: str) -> None:
    with pytest.raises(NotAuthenticated) as caught:
        checker().check(BAD[name], NOW_US)
    error = caught.value
    assert (error.what, error.why, error.facts) == ("the credential is not accepted", "", {})
    assert isinstance(error.__cause__, credentials.Refused), "the log may say why"


def test_there_are_enough_of_them() -> None:
    assert len(BAD) >= 80


# -- what is taken --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("token", "key_id"),
    [
        (GOOD, ""),
        (hs({"alg": "HS256"}), ""),
        (hs({**HEADER, "typ": "jwt", "kid": ""}), ""),
        (rs(R), "r"),
        (f"{ES_TEXT}.{encoded(ES_R + ES_S)}", "e"),
        (f"{content(D, CLAIMS)}.{encoded(ED_KEY.sign(content(D, CLAIMS).encode()))}", "d"),
        (hs({**HEADER, "jku": "https://example.com"}), ""),
    ],
    ids=["HS256", "without typ", "small typ", "RS256", "ES256", "EdDSA", "with an address"],
)
def test_each_algorithm_by_its_key(token: str, key_id: str) -> None:
    found = checker().check(token, NOW_US)
    assert found.principal == Principal("service_account", "app")
    assert (found.how, found.key_id, found.expires_us) == ("token", key_id, (NOW_S + 3_600) * 1_000_000)
    assert (found.token_id, found.issued_us) == ("", 0), "it counts as older than any other"


def test_a_token_of_the_standard() -> None:
    """RFC 7515, appendix A.1: its signature fits, and its claims are not those of a token of ours."""
    token = (
        "eyJ0eXAiOiJKV1QiLA0KICJhbGciOiJIUzI1NiJ9"
        ".eyJpc3MiOiJqb2UiLA0KICJleHAiOjEzMDA4MTkzODAsDQogImh0dHA6Ly9leGFtcGxlLmNvbS9pc19yb290Ijp0cnVlfQ"
        ".dBjftJeZ4CVP-mB92K27uhbUJU1p1r_wW1gFWFOEjXk"
    )
    key = "AyM1SysPpbyDfgZld3umj1qzKObwVMkoqQ-EstJQLr_T-1qS0gZH75aKtMN3Yj0iPS4hcgUuTwjAzZr1Z9CAow"
    known = Credentials([secret_key("", base64.urlsafe_b64decode(key + "=="))])
    with pytest.raises(InvalidArgument, match="claim sub is missing"):
        known.examine(token, NOW_US)


@pytest.mark.parametrize(("late_s", "taken"), [(0, True), (60, True), (61, False), (3_600, False)])
def test_sixty_seconds_of_grace_behind_the_end(late_s: int, taken: bool) -> None:
    token = hs(claims={**CLAIMS, "exp": NOW_S})
    now_us = NOW_US + late_s * 1_000_000
    if taken:
        assert checker().check(token, now_us).expires_us == NOW_US
    else:
        with pytest.raises(TokenExpired):
            checker().check(token, now_us)


@pytest.mark.parametrize("name", ["nbf", "iat"])
def test_a_clock_may_be_a_minute_behind(name: str) -> None:
    assert checker().check(hs(claims={**CLAIMS, name: NOW_S + 60}), NOW_US)


def test_the_issuer_is_checked_where_one_is_set() -> None:
    assert checker(issuer="danube-auth").check(GOOD, NOW_US)
    with pytest.raises(NotAuthenticated):
        checker(issuer="another").check(GOOD, NOW_US)


def test_a_token_carries_what_stands_behind_it() -> None:
    known, principal = checker(), Principal("user", "anna")
    names = ("token:1", "api_key:k")
    assert known.check(known.sign(principal, 60, NOW_US, descent=names), NOW_US).descent == names
    for too_long in (tuple(f"token:{one}" for one in range(credentials.DESCENT_NAMES_MAX + 1)),
                     ("x" * TOKEN_BYTES_MAX,)):  # fmt: skip
        with pytest.raises(InvalidArgument, match="too long"):
            known.sign(principal, 60, NOW_US, descent=too_long)


def test_a_first_token_is_of_no_principal_that_can_be_named() -> None:
    known = checker()
    for principal in (Principal("user", "bootstrap"), Principal("service_account", "root")):
        shown = known.check(known.sign(principal, 86_400, NOW_US, jti="7", bootstrap=True), NOW_US)
        assert (shown.principal, shown.token_id, shown.issued_us) == (BOOTSTRAP, "7", NOW_US)


def test_an_expired_token_of_a_stranger_is_just_refused() -> None:
    with pytest.raises(NotAuthenticated):
        checker().check(hs(claims={**CLAIMS, "exp": 1}, secret=b"x" * 32), NOW_US)


# -- what is remembered ---------------------------------------------------------------------------


class Counted(Credentials):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.count = 0

    def _claims(self, text: str, now_s: int) -> tuple[dict[str, Any], Key]:
        self.count += 1
        return super()._claims(text, now_s)


def test_a_token_is_checked_once_in_half_a_minute() -> None:
    known = Counted(KEYS)
    first = known.check(GOOD, NOW_US)
    assert known.check(GOOD, NOW_US + REMEMBERED_US - 1) is first and known.count == 1
    known.check(GOOD, NOW_US + REMEMBERED_US)
    assert known.count == 2
    known.forget()
    known.check(GOOD, NOW_US + REMEMBERED_US)
    assert known.count == 3


def test_a_remembered_token_ends_in_time() -> None:
    known, token = Counted(KEYS), hs(claims={**CLAIMS, "exp": NOW_S + 5})
    known.check(token, NOW_US)
    known.check(token, NOW_US + 5_000_000)
    assert known.count == 2, "behind its end each check is a new one"
    with pytest.raises(TokenExpired):
        known.check(token, NOW_US + 66_000_000)


def test_refusals_are_not_remembered_and_the_least_used_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credentials, "REMEMBERED_MAX", 2)
    known = Counted(KEYS)
    tokens = [hs(claims={**CLAIMS, "sub": name}) for name in "abc"]
    for _ in range(2):
        with pytest.raises(NotAuthenticated):
            known.check(GOOD + "x", NOW_US)
    assert known.count == 2
    for token in (tokens[0], tokens[1], tokens[0], tokens[2], tokens[0]):
        known.check(token, NOW_US)
    assert known.count == 5, "a was used again before c came"
    known.check(tokens[1], NOW_US)
    assert known.count == 6


def test_another_signature_of_the_same_token_has_its_name() -> None:
    """Both halves of ECDSA are valid; a revoked token must not come back by the other."""
    one, two = f"{ES_TEXT}.{encoded(ES_R + ES_S)}", f"{ES_TEXT}.{encoded(ES_R + NEGATED)}"
    first, second = checker().check(one, NOW_US), checker().check(two, NOW_US)
    assert one != two and first.token_key == second.token_key == token_key_of(one)
    assert first.token_key != checker().check(GOOD, NOW_US).token_key


def test_a_forged_signature_behind_a_known_content_is_no_known_token() -> None:
    known = checker()
    known.check(GOOD, NOW_US)
    with pytest.raises(NotAuthenticated):
        known.check(GOOD.rpartition(".")[0] + "." + "A" * 43, NOW_US)


# -- signing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("key_id", ["", "r", "e", "d"])
def test_what_is_signed_is_taken(key_id: str) -> None:
    token = checker().sign(Principal("user", "ada"), 60, NOW_US, key_id=key_id, jti="7")
    found = checker().check(token, NOW_US)
    assert found.principal == Principal("user", "ada")
    assert (found.expires_us, found.issued_us) == (NOW_US + 60_000_000, NOW_US)
    assert (found.key_id, found.token_id) == (key_id, "7")


def test_signing_needs_a_key_and_a_lifetime() -> None:
    only_checks = Credentials([KEYS[1]._replace(private=None)])
    with pytest.raises(InvalidArgument, match="no key that signs"):
        only_checks.sign(Principal("user", "ada"), 60, NOW_US)
    for ttl_s in (0, -1, 1 << 40):
        with pytest.raises(InvalidArgument, match="lifetime"):
            checker().sign(Principal("user", "ada"), ttl_s, NOW_US)


def test_examine_says_why() -> None:
    assert checker().examine(GOOD, NOW_US) == CLAIMS
    with pytest.raises(InvalidArgument, match="expired 3600 s ago"):
        checker().examine(GOOD, NOW_US + 7_200_000_000)
    with pytest.raises(InvalidArgument, match="algorithm is not HS256"):
        checker().examine(FORGED["HS512"], NOW_US)


# -- keys from files ------------------------------------------------------------------------------


def written(folder: Path, raw: bytes, mode: int = 0o600) -> str:
    path = folder / "key"
    path.write_bytes(raw)
    path.chmod(mode)
    return str(path)


def pem(key: Any) -> bytes:
    raw: bytes = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return raw


@pytest.mark.parametrize(
    ("algorithm", "key"),
    [("RS256", RSA_KEY), ("ES256", EC_KEY), ("EdDSA", ED_KEY)],
    ids=["RS256", "ES256", "EdDSA"],
)
def test_keys_are_loaded_and_checked(tmp_path: Path, algorithm: str, key: Any) -> None:
    loaded = load_key("k", algorithm, written(tmp_path, pem(key)), signs=True)
    token = Credentials([loaded]).sign(Principal("user", "ada"), 60, NOW_US)
    public = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    file = written(tmp_path, public, 0o644)
    checks = load_key("k", algorithm, file, signs=False)
    assert checks.private is None and Credentials([checks]).check(token, NOW_US)
    with pytest.raises(ConfigInvalid, match="signs nothing"):
        load_key("k", algorithm, file, signs=True)
    for other in {"RS256", "ES256", "EdDSA"} - {algorithm}:
        with pytest.raises(ConfigInvalid, match=f"not for {other}"):
            load_key("k", other, file, signs=False)


def test_a_secret_is_loaded_without_its_newline(tmp_path: Path) -> None:
    file = written(tmp_path, SECRET + b"\n")
    assert load_key("", "HS256", file, signs=True) == KEYS[0]
    assert load_key("", "HS256", file, signs=False).private is None


def test_a_key_of_a_certificate(tmp_path: Path) -> None:
    found = load_key("k", "ES256", written(tmp_path, _certificate_pem(), 0o644), signs=False)
    assert found.public.public_numbers() == EC_KEY.public_key().public_numbers()


@pytest.mark.parametrize(
    ("raw", "mode", "says"),
    [
        (b"short", 0o600, "5 bytes"),
        (b"", 0o600, "0 bytes"),
        (SECRET, 0o644, "open to others"),
        (SECRET, 0o620, "open to others"),
    ],
)
def test_secrets_that_are_refused(tmp_path: Path, raw: bytes, mode: int, says: str) -> None:
    with pytest.raises(ConfigInvalid, match=says):
        load_key("", "HS256", written(tmp_path, raw, mode), signs=True)


def test_a_short_secret_where_only_this_host_can_guess(tmp_path: Path) -> None:
    key = load_key("", "HS256", written(tmp_path, b"short"), signs=True, short_allowed=True)
    known = Credentials([key])
    assert known.check(known.sign(Principal("user", "ada"), 60, NOW_US), NOW_US)


def test_files_that_hold_no_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match="cannot be read"):
        load_key("k", "ES256", str(tmp_path / "missing"), signs=False)
    with pytest.raises(ConfigInvalid, match="no key that can be read"):
        load_key("k", "ES256", written(tmp_path, b"-----BEGIN PUBLIC KEY-----\nx"), signs=False)
    with pytest.raises(ConfigInvalid, match="open to others"):
        load_key("k", "ES256", written(tmp_path, pem(EC_KEY), 0o644), signs=True)
    weak = rsa.generate_private_key(65_537, 1_024)
    with pytest.raises(ConfigInvalid, match="not for RS256"):
        load_key("k", "RS256", written(tmp_path, pem(weak)), signs=True)


# -- certificates ---------------------------------------------------------------------------------

CLIENT = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH])


def certificate(
    *uris: str, name: str = "app", purposes: x509.ExtendedKeyUsage | None = CLIENT
) -> x509.Certificate:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)] if name else [])
    start = datetime.datetime.fromtimestamp(NOW_S, datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(EC_KEY.public_key())
        .serial_number(0xABC)
        .not_valid_before(start)
        .not_valid_after(start + datetime.timedelta(hours=1))
    )
    if uris:
        names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri) for uri in uris])
        builder = builder.add_extension(names, critical=False)
    if purposes is not None:
        builder = builder.add_extension(purposes, critical=False)
    return builder.sign(EC_KEY, hashes.SHA256())


def _certificate_pem() -> bytes:
    return certificate().public_bytes(serialization.Encoding.PEM)


def der(found: x509.Certificate) -> bytes:
    return found.public_bytes(serialization.Encoding.DER)


@pytest.mark.parametrize(
    ("uri", "principal"),
    [
        ("danube:service_account:orders", Principal("service_account", "orders")),
        ("danube:user:ada", Principal("user", "ada")),
        ("danube:user:a:b", Principal("user", "a:b")),
    ],
)
def test_a_certificate_names_a_principal(uri: str, principal: Principal) -> None:
    raw = der(certificate("https://example.com", uri))
    found = of_certificate(raw)
    assert found == Identity(
        principal, "certificate", NOW_US + 3_600_000_000, "",
        hashlib.blake2b(raw, digest_size=16).digest(), "abc", NOW_US,
    )  # fmt: skip


def test_the_common_name_where_that_is_allowed() -> None:
    raw = der(certificate())
    assert of_certificate(raw, from_common_name=True).principal == Principal("service_account", "app")
    with pytest.raises(NotAuthenticated):
        of_certificate(raw)


BAD_CERTIFICATES: dict[str, Callable[[], bytes]] = {
    "no certificate": lambda: b"x",
    "empty": lambda: b"",
    "cut": lambda: der(certificate("danube:user:ada"))[:-10],
    "of a node": lambda: der(certificate("danube:node:1")),
    "of another kind": lambda: der(certificate("danube:broker_internal:1")),
    "two principals": lambda: der(certificate("danube:user:a", "danube:user:b")),
    "no name": lambda: der(certificate("danube:user:")),
    "kind in capitals": lambda: der(certificate("danube:User:a")),
    "for servers": lambda: der(
        certificate("danube:user:a", purposes=x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]))
    ),
    "for nothing": lambda: der(certificate("danube:user:a", purposes=None)),
    "nobody at all": lambda: der(certificate(name="")),
    "node beside a common name": lambda: der(certificate("danube:node:1", name="admin")),
    "long name": lambda: der(certificate("danube:user:" + "x" * 257)),
}


@pytest.mark.parametrize("name", BAD_CERTIFICATES)
def test_bad_certificates(name: str) -> None:
    with pytest.raises(NotAuthenticated) as caught:
        of_certificate(BAD_CERTIFICATES[name](), from_common_name=True)
    assert caught.value.what == "the credential is not accepted"
