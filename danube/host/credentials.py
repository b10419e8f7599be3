"""Credentials: tokens, their keys, and client certificates.  The one door to PyJWT and cryptography.

A token is a JSON Web Token (RFC 7519) with the claims ``iss exp sub principal_type principal_name``.  The
algorithm belongs to the key and is never taken from the token; a token's ``kid`` only selects among the keys
that were configured (RFC 8725).  Every refusal has one text, so that it helps nobody who guesses.  The reason
is the error's cause, for the broker's log.

A token with a ``kid`` that no key of the configuration has may be one of the *provider*, an OpenID Connect
issuer: it needs the issuer and the audience that were configured, and a key of that issuer's.

Checked tokens are remembered by the hash of their whole text, for half a minute at most.  A token's
``token_key`` is the hash of what is signed: a signature can be written in several ways, and a revoked token
must not come back with another one.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import jwt
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from danube.core.security.principals import (
    BOOTSTRAP,
    BOOTSTRAP_TTL_S,
    GIVEN_KINDS,
    Identity,
    Principal,
)
from danube.errors import ConfigInvalid, DanubeError, InvalidArgument, NotAuthenticated, TokenExpired
from danube.ids import check_label

TOKEN_BYTES_MAX: Final = 8 * 1024
KEY_FILE_BYTES_MAX: Final = 64 * 1024
REMEMBERED_MAX: Final = 10_000
REMEMBERED_US: Final = 30_000_000
LEEWAY_S: Final = 60
ISSUER: Final = "danube-auth"
SECRET_BYTES_MIN: Final = 32  # of a key for HS256: as many as its hash has
RSA_BITS_MIN: Final = 2_048
ALGORITHMS: Final = ("HS256", "RS256", "ES256", "EdDSA")
_EXPIRES_S_MAX: Final = 253_402_300_799  # the end of the year 9999
_TOKEN_ID_CHARACTERS_MAX: Final = 256
_TOKEN: Final = re.compile(r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\Z")
DESCENT: Final = "danube_descent"  # the claim with the credentials that a token was asked for by
FIRST: Final = "bootstrap"  # the claim of a first token, whatever principal it names; its value is true
DESCENT_NAMES_MAX: Final = 48  # some three for each credential: nobody needs tokens of tokens without end
_TYPES: Final = ("JWT",)  # of a header
_PROVIDER_TYPES: Final = ("JWT", "AT+JWT", "APPLICATION/AT+JWT")  # the latter two of RFC 9068
_PROVIDER_CLAIMS: Final = ("iss", "sub", "exp", "nbf", "iat", "jti")  # with the meaning that they have here
_PROVIDER_ALGORITHMS: Final = {"RSA": "RS256", "EC": "ES256", "OKP": "EdDSA"}  # by kind of key
_TEXTS: Final = ("iss", "sub", "principal_type", "principal_name")
_CERTIFICATE_KINDS: Final = {f"danube:{kind}:": kind for kind in GIVEN_KINDS}


class Refused(Exception):
    """Why a credential is not taken; ``expired``: it was good and has ended."""

    def __init__(self, why: str, *, expired: bool = False) -> None:
        super().__init__(why)
        self.expired = expired


class Key(NamedTuple):
    """A key of one algorithm; ``private`` is None where it only checks."""

    key_id: str
    algorithm: str
    public: Any
    private: Any = None
    fingerprint: bytes = b""  # tells it from another key of the same name


class KeySource(Protocol):
    """The keys of an issuer, which come and go (:class:`danube.host.issuer.IssuerKeys`)."""

    @property
    def issuer(self) -> str: ...
    def find(self, key_id: str) -> Key: ...
    def start(self) -> None: ...
    def stop(self) -> None: ...


class Provider(NamedTuple):
    """Whose tokens are taken besides, and which of their claims name the principal and its groups."""

    keys: KeySource
    audience: str
    principal_claim: str = "sub"
    principal_type: str = "user"
    groups_claim: str = "groups"


# -- keys -----------------------------------------------------------------------------------------


def secret_key(key_id: str, secret: bytes, *, short_allowed: bool = False) -> Key:
    """Return a key for HS256, which checks and signs; raises ConfigInvalid for one that can be guessed."""
    if not secret or (len(secret) < SECRET_BYTES_MIN and not short_allowed):
        raise ConfigInvalid(
            f"the key {key_id!r} has {len(secret)} bytes",
            why=f"a key for HS256 with less than {SECRET_BYTES_MIN} can be guessed",
            hint="take a longer one: openssl rand -hex 32",
        )
    return Key(key_id, "HS256", secret, secret, _fingerprint(secret))


def load_key(key_id: str, algorithm: str, file: str, *, signs: bool, short_allowed: bool = False) -> Key:
    """Load a key from its file: a secret for HS256, else PEM; ConfigInvalid names the file.

    A public key or a certificate is enough where the key only checks.
    """
    content = _read(file)
    if algorithm == "HS256":
        key = secret_key(key_id, content.strip(b"\r\n"), short_allowed=short_allowed)
        return key if signs else key._replace(private=None)
    private: Any = None
    try:
        if b"PRIVATE KEY-----" in content:
            private = serialization.load_pem_private_key(content, None)
            public: Any = private.public_key()
        elif b"BEGIN CERTIFICATE-----" in content:
            public = x509.load_pem_x509_certificate(content).public_key()
        else:
            public = serialization.load_pem_public_key(content)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigInvalid(f"{file} holds no key that can be read", why=str(error)[:200]) from None
    if not _fits(algorithm, public):
        raise ConfigInvalid(f"the key in {file} is not for {algorithm}", hint="each algorithm has its keys")
    if signs and private is None:
        raise ConfigInvalid(f"{file} holds a public key, which signs nothing", hint="name the private key")
    form = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    mark = _fingerprint(public.public_bytes(*form))
    return Key(key_id, algorithm, public, private if signs else None, mark)


def _fingerprint(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16, person=b"danube key").digest()


def _fits(algorithm: str, public: Any) -> bool:
    if algorithm == "RS256":
        return isinstance(public, rsa.RSAPublicKey) and public.key_size >= RSA_BITS_MIN
    if algorithm == "ES256":
        return isinstance(public, ec.EllipticCurvePublicKey) and isinstance(public.curve, ec.SECP256R1)
    return isinstance(public, ed25519.Ed25519PublicKey)


def _read(file: str) -> bytes:
    """Read a key's file; one that holds a secret must be its owner's alone."""
    try:
        with Path(file).open("rb") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            content = opened.read(KEY_FILE_BYTES_MAX)
    except OSError as error:
        raise ConfigInvalid(f"the key {file} cannot be read", why=error.strerror or str(error)) from None
    public = b"-----BEGIN" in content and b"PRIVATE KEY-----" not in content
    if not public and stat.S_IMODE(mode) & (stat.S_IRWXG & ~stat.S_IRGRP | stat.S_IRWXO):
        raise ConfigInvalid(
            f"the key {file} is open to others",
            why=f"its mode is {stat.S_IMODE(mode):04o}",
            hint=f"chmod 600 {file}",
        )
    return content


def issuer_keys(document: bytes) -> dict[str, Key]:
    """Return the keys of a JSON Web Key Set (RFC 7517) that tokens may be signed with, by kid.

    All others are left out, secrets first of all: whoever reads the set could sign with them.  ValueError if
    it is no such set.
    """
    found = json.loads(document)
    entries = found.get("keys") if isinstance(found, dict) else None
    if not isinstance(entries, list):
        raise ValueError("it is no set of keys")
    keys: dict[str, Key] = {}
    for entry in entries:
        key = _issuer_key(entry) if isinstance(entry, dict) else None
        if key is not None:
            keys.setdefault(key.key_id, key)
    return keys


def _issuer_key(entry: dict[str, Any]) -> Key | None:
    key_id, kind = entry.get("kid"), entry.get("kty")
    algorithm = _PROVIDER_ALGORITHMS.get(kind) if isinstance(kind, str) else None
    if not key_id or not isinstance(key_id, str) or algorithm is None:
        return None
    if entry.get("alg", algorithm) != algorithm or entry.get("use", "sig") != "sig":
        return None
    try:
        public = jwt.PyJWK(entry, algorithm).key
    except (jwt.PyJWTError, ValueError, TypeError):
        return None
    return Key(key_id, algorithm, public) if _fits(algorithm, public) else None


# -- checking and signing -------------------------------------------------------------------------


class Credentials:
    """Checks what clients show, and signs tokens; one for each worker."""

    def __init__(
        self,
        keys: Iterable[Key],
        *,
        issuer: str = "",
        leeway_s: int = LEEWAY_S,
        provider: Provider | None = None,
    ) -> None:
        """``issuer``: the only one whose tokens are taken; "" takes every one's."""
        self._keys = {key.key_id: key for key in keys}
        self._issuer = issuer
        self.provider = provider
        self.leeway_s = leeway_s
        self._remembered: dict[bytes, tuple[Identity, int]] = {}  # until when, wall microseconds

    def check(self, text: str, now_us: int) -> Identity:
        """Return who holds this token; raises NotAuthenticated, TokenExpired or IssuerUnavailable."""
        name = _hash(text[: TOKEN_BYTES_MAX + 1])
        found = self._remembered.pop(name, None)
        if found is None or now_us >= found[1]:
            try:
                identity = _identity(text, *self._claims(text, now_us // 1_000_000))
            except Refused as refused:
                raise refusal(refused) from refused
            found = identity, min(identity.expires_us, now_us + REMEMBERED_US)
            if len(self._remembered) >= REMEMBERED_MAX:
                del self._remembered[next(iter(self._remembered))]  # not used for the longest time
        self._remembered[name] = found
        return found[0]

    def of_certificate(self, certificate: bytes, now_us: int) -> Identity:
        """Return who holds this client certificate; the answer is remembered like that of a token."""
        name = b"certificate" + hashlib.blake2b(certificate, digest_size=16).digest()
        found = self._remembered.pop(name, None)
        if found is None or now_us >= found[1]:
            found = of_certificate(certificate), now_us + REMEMBERED_US
            if len(self._remembered) >= REMEMBERED_MAX:
                del self._remembered[next(iter(self._remembered))]
        self._remembered[name] = found
        return found[0]

    def exchange(self, keys: Iterable[Key]) -> bool:
        """Check and sign with these keys; return whether a former one is not among them."""
        former, self._keys = self._keys, {key.key_id: key for key in keys}
        gone = any(not self._has(key.key_id, key.fingerprint) for key in former.values())
        if gone:
            self.forget()
        return gone

    def holds(self, identity: Identity) -> bool:
        """Return whether the key that signed this identity's token is still there.

        Keys of the provider have no fingerprint; they come and go at its own word.
        """
        return not identity.key_fingerprint or self._has(identity.key_id, identity.key_fingerprint)

    def _has(self, key_id: str, fingerprint: bytes) -> bool:
        key = self._keys.get(key_id)
        return key is not None and key.fingerprint == fingerprint

    def forget(self) -> None:
        """Check every token anew: keys or revocations have changed."""
        self._remembered.clear()

    def examine(self, text: str, now_us: int) -> dict[str, Any]:
        """Return the claims of a token; InvalidArgument says what is wrong with it, to its maker."""
        try:
            return self._claims(text, now_us // 1_000_000)[0]
        except Refused as refused:
            hint = "make one with `security tokens create`"
            raise InvalidArgument("Invalid token", why=str(refused), hint=hint) from None

    def sign(
        self,
        principal: Principal,
        ttl_s: int,
        now_us: int,
        *,
        issuer: str = "",
        key_id: str | None = None,
        descent: tuple[str, ...] = (),
        **claims: Any,
    ) -> str:
        """Return a token of this principal; raises InvalidArgument if no key signs.

        ``descent``: names of the credentials that asked for it; it does not outlive their revocation.
        ``claims`` are further ones, such as ``jti``.
        """
        now_s = now_us // 1_000_000
        if not 0 < ttl_s <= _EXPIRES_S_MAX - now_s:
            raise InvalidArgument(f"a lifetime of {ttl_s} s is not possible", hint="a year has 31536000")
        able = [
            one for one in self._keys.values() if one.private is not None and key_id in (None, one.key_id)
        ]
        if not able:
            raise InvalidArgument("there is no key that signs tokens", hint="set use=sign in auth.jwt.keys")
        key = able[0]
        if descent:
            claims[DESCENT] = list(descent)
        content = {
            "iss": issuer or self._issuer or ISSUER,
            "exp": now_s + ttl_s,
            "iat": now_s,
            "sub": principal.name,
            "principal_type": principal.kind,
            "principal_name": principal.name,
            **claims,
        }
        headers = {"kid": key.key_id} if key.key_id else None
        with _quiet(key):
            token = jwt.encode(content, key.private, key.algorithm, headers)
        if len(descent) > DESCENT_NAMES_MAX or len(token) > TOKEN_BYTES_MAX:
            raise InvalidArgument(
                "this token would be too long",
                why="it names every credential that stands behind it",
                hint="ask for it with one of the first of them",
            )
        return token

    def _claims(self, text: str, now_s: int) -> tuple[dict[str, Any], Key, tuple[str, ...]]:
        """Return what a token says, the key that signed it, and of the provider's ones the groups."""
        if len(text) > TOKEN_BYTES_MAX or not _TOKEN.match(text):
            raise Refused("it is not three parts of base64url, or too long")
        try:
            header = jwt.get_unverified_header(text)
            key, provider = self._key_of(text, header)
            issuer, audience = self._issuer or None, None
            if provider is not None:
                issuer, audience = provider.keys.issuer, provider.audience
            with _quiet(key):
                claims: dict[str, Any] = jwt.decode(
                    text, key.public, algorithms=[key.algorithm], issuer=issuer, audience=audience,
                    options={"verify_exp": False, "verify_nbf": False, "verify_iat": False},
                )  # fmt: skip
        except (jwt.PyJWTError, ValueError, TypeError, RecursionError) as error:
            raise Refused(str(error)[:200]) from None
        groups: tuple[str, ...] = ()
        if provider is not None:
            claims, groups = _provided(claims, provider)
        _check_claims(claims, now_s, self.leeway_s)
        return claims, key, groups

    def _key_of(self, text: str, header: dict[str, Any]) -> tuple[Key, Provider | None]:
        """Return the key that must have signed; the token's own word for its algorithm has to agree.

        A key of the provider comes with it.
        """
        key_id = header.get("kid", "")
        key, provider = self._keys.get(key_id), None
        if key is None and key_id:
            provider = self._provider_of(text)
            key = None if provider is None else provider.keys.find(key_id)
        if key is None:
            raise Refused("no key has its kid")
        if header.get("alg") != key.algorithm:
            raise Refused(f"its algorithm is not {key.algorithm}")
        types = _TYPES if provider is None else _PROVIDER_TYPES
        known = str(header.get("typ", "JWT")).upper() in types
        if not known or not header.keys().isdisjoint(("crit", "b64")):
            raise Refused("its header asks for what is not known here")
        return key, provider

    def _provider_of(self, text: str) -> Provider | None:
        """Return the provider if a token says, unproven as yet, that it is its own."""
        if self.provider is None:
            return None
        said = jwt.decode(text, options={"verify_signature": False})
        return self.provider if said.get("iss") == self.provider.keys.issuer else None


@contextmanager
def _quiet(key: Key) -> Iterator[None]:
    """Drop PyJWT's warning of a short secret: it was judged when it was loaded."""
    if key.algorithm != "HS256" or len(key.public) >= SECRET_BYTES_MIN:
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def token_key_of(text: str) -> bytes:
    """Return the name by which logs and revocations know this token."""
    return _hash(text.rpartition(".")[0] or text)


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=16).digest()


def _identity(text: str, claims: dict[str, Any], key: Key, groups: tuple[str, ...]) -> Identity:
    principal = Principal(claims["principal_type"], claims["principal_name"])
    if FIRST in claims:
        principal = BOOTSTRAP
    expires_us, issued_us = claims["exp"] * 1_000_000, claims.get("iat", 0) * 1_000_000
    token_key, token_id = token_key_of(text), claims.get("jti", "")
    descent = tuple(claims.get(DESCENT, ()))
    return Identity(
        principal, "token", expires_us, key.key_id, token_key, token_id, issued_us, descent, groups,
        key.fingerprint,
    )  # fmt: skip


def _provided(claims: dict[str, Any], provider: Provider) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return claims of the provider, which are proven, as a token of a broker has them, and the groups."""
    name, groups = claims.get(provider.principal_claim), claims.get(provider.groups_claim, [])
    if not isinstance(name, str) or not name:
        raise Refused(f"its claim {provider.principal_claim} is missing or no text")
    if provider.principal_claim == "email" and claims.get("email_verified") is not True:
        raise Refused("its issuer has not verified the email that names it")
    if "cnf" in claims:  # who stole it could not use it elsewhere (RFC 7800, 8705, 9449)
        raise Refused("it is bound to a key (cnf), and brokers take no proof of that key")
    if not isinstance(groups, list) or not all(isinstance(one, str) for one in groups):
        raise Refused(f"its claim {provider.groups_claim} is no list of texts")
    kept: dict[str, Any] = {one: claims[one] for one in _PROVIDER_CLAIMS if one in claims}
    kept |= {"principal_type": provider.principal_type, "principal_name": name}
    return kept, tuple(sorted(set(groups)))


def _check_claims(claims: dict[str, Any], now_s: int, leeway_s: int) -> None:
    for name in _TEXTS:
        if not isinstance(claims.get(name), str) or not claims[name]:
            raise Refused(f"its claim {name} is missing or no text")
    for name, required in (("exp", True), ("nbf", False), ("iat", False)):
        value = claims.get(name, None if required else 0)
        if type(value) is not int or not 0 <= value <= _EXPIRES_S_MAX:
            raise Refused(f"its claim {name} is missing or no time in seconds")
    if "aud" in claims:
        raise Refused("it is meant for an audience (aud), which brokers refuse")
    if claims["principal_type"] not in GIVEN_KINDS:
        raise Refused("its principal_type is not user or service_account")
    token_id = claims.get("jti", "")
    if not isinstance(token_id, str) or len(token_id) > _TOKEN_ID_CHARACTERS_MAX:
        raise Refused("its claim jti is no short text")
    if FIRST in claims and (
        claims[FIRST] is not True or claims["exp"] - claims.get("iat", 0) > BOOTSTRAP_TTL_S
    ):
        raise Refused(f"it is no first token, or one that lives longer than {BOOTSTRAP_TTL_S} s")
    descent = claims.get(DESCENT, [])
    if not isinstance(descent, list) or not all(isinstance(one, str) for one in descent):
        raise Refused("its claim of descent is no list of texts")
    try:
        check_label(claims["principal_name"], "principal")
    except DanubeError as error:
        raise Refused(str(error)) from None
    if max(claims.get("nbf", 0), claims.get("iat", 0)) - leeway_s > now_s:
        raise Refused("it is not valid yet")
    if claims["exp"] + leeway_s < now_s:
        raise Refused(f"it expired {now_s - claims['exp']} s ago", expired=True)


def refusal(refused: Refused) -> NotAuthenticated | TokenExpired:
    """Return the error that a client gets, which does not tell the reason."""
    if refused.expired:
        return TokenExpired("the credential has expired", hint="get a new one")
    return NotAuthenticated("the credential is not accepted", hint="ask the operator for one that is")


# -- certificates ---------------------------------------------------------------------------------


def of_certificate(certificate: bytes, *, from_common_name: bool = False) -> Identity:
    """Return who holds this client certificate (DER), whose chain TLS has verified; or NotAuthenticated.

    It names one principal as a URI, ``danube:service_account:NAME`` or ``danube:user:NAME``.  Without any,
    and with ``from_common_name``, its common name is a service account.
    """
    try:
        found = x509.load_der_x509_certificate(certificate)
        principal = _principal_in(found, from_common_name)
    except Refused as refused:
        raise refusal(refused) from refused
    except (ValueError, x509.ExtensionNotFound, UnsupportedAlgorithm) as error:
        raise refusal(Refused(str(error))) from error
    expires_us = int(found.not_valid_after_utc.timestamp()) * 1_000_000
    issued_us = int(found.not_valid_before_utc.timestamp()) * 1_000_000
    token_key = hashlib.blake2b(certificate, digest_size=16).digest()
    return Identity(
        principal, "certificate", expires_us, "", token_key, f"{found.serial_number:x}", issued_us
    )


def _principal_in(certificate: x509.Certificate, from_common_name: bool) -> Principal:
    extensions = certificate.extensions
    purposes = extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    if ExtendedKeyUsageOID.CLIENT_AUTH not in purposes:
        raise Refused("it is not for clients")
    try:
        names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    except x509.ExtensionNotFound:
        uris = []
    ours = [uri for uri in uris if uri.startswith("danube:")]
    if len(ours) > 1:
        raise Refused("it names more than one principal")
    if ours:
        for prefix, kind in _CERTIFICATE_KINDS.items():
            if ours[0].startswith(prefix):
                return _named(kind, ours[0].removeprefix(prefix))
        raise Refused("it is no certificate of a user or a service account")
    common = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME) if from_common_name else []
    if len(common) != 1 or not isinstance(common[0].value, str):
        raise Refused("it names no principal")
    return _named("service_account", common[0].value)


def _named(kind: str, name: str) -> Principal:
    try:
        check_label(name, "principal")
    except DanubeError as error:
        raise Refused(str(error)) from None
    return Principal(kind, name)
