"""The section ``auth`` of the configuration: who may use the broker's ports, and which keys sign tokens.

Upstream's keys of this section mean what they mean there; ours lie beside them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, NamedTuple

from danube.config.problems import Contradiction
from danube.config.sections import (
    NO_SECRET,
    Secret,
    TlsConfig,
    choice,
    declare,
    duration,
    hidden,
    integer,
    parse_text,
)
from danube.core.security.principals import GIVEN_KINDS

if TYPE_CHECKING:
    from danube.host.credentials import Credentials, Key, Provider

MODES: Final = ("none", "token", "tls")
ALGORITHMS: Final = ("HS256", "RS256", "ES256", "EdDSA")
SECRET_BYTES_MIN: Final = 32  # of a key for HS256: as many as its hash has
RELOADED: Final = ("auth.jwt.secret_key", "auth.jwt.secret_key_file", "auth.jwt.keys")  # by `danube reload`
_KEY_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}\Z")
_PARTS: Final = ("kid", "alg", "file", "use")
_USES: Final = ("check", "sign")


class KeyFile(NamedTuple):
    """One entry of ``auth.jwt.keys``; the algorithm belongs to the key, whatever a token says."""

    key_id: str
    algorithm: str
    file: str
    signs: bool


def parse_keys(text: str) -> str:
    """Check entries such as ``kid=2026 alg=ES256 file=/etc/danube/jwt.pem use=sign``, separated by commas."""
    entries = list(key_files(text))
    names = [one.key_id for one in entries]
    if len(set(names)) < len(names):
        raise ValueError("names a kid twice")
    if sum(one.signs for one in entries) > 1:
        raise ValueError("has two keys with use=sign; one signs, and all others only check")
    return text.strip()


def key_files(text: str) -> Iterator[KeyFile]:
    """Yield the entries of ``auth.jwt.keys``; ValueError names what is wrong with one."""
    for entry in filter(None, map(str.strip, text.split(","))):
        parts = dict(word.partition("=")[::2] for word in entry.split())
        unknown = [name for name in parts if name not in _PARTS]
        if unknown or not all(parts.get(name) for name in ("kid", "alg", "file")):
            raise ValueError("has an entry that is not kid, alg, file and use, such as use=check")
        if not _KEY_ID.match(parts["kid"]):
            raise ValueError(f"has the kid {parts['kid'][:40]!r}, which is not 1-64 letters, digits, . _ -")
        if parts["alg"] not in ALGORITHMS:
            raise ValueError(f"has the alg {parts['alg'][:40]!r}; there are {', '.join(ALGORITHMS)}")
        use = parts.get("use", "check")
        if use not in _USES:
            raise ValueError(f"has the use {use[:40]!r}; there are {', '.join(_USES)}")
        yield KeyFile(parts["kid"], parts["alg"], parts["file"], use == "sign")


def parse_address(text: str) -> str:
    """Check an address that keys are fetched from."""
    from danube.host.issuer import check_address

    text = text.strip()
    if text:
        check_address(text)
    return text


def _parse_names(text: str) -> str:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not all(name.isprintable() for name in names):
        raise ValueError("holds control characters")
    return ",".join(names)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthConfig:
    """``mode`` none asks nobody; ``token`` and ``tls`` ask everybody at every port for a credential.

    ``jwt_secret_key`` is the key of upstream's configuration, for HS256; it has the kid "".
    """

    mode: str = choice("none", "mode", *MODES)
    super_admins: str = declare("", "super_admins", _parse_names)
    jwt_secret_key: Secret = field(default=NO_SECRET, metadata=hidden("jwt.secret_key"))
    jwt_secret_key_file: str = declare("", "jwt.secret_key_file", parse_text)
    jwt_keys: str = declare("", "jwt.keys", parse_keys)
    jwt_issuer: str = declare("", "jwt.issuer", parse_text)
    jwt_leeway_ms: int = duration(60_000, "jwt.leeway", 0, 300_000)
    oidc_issuer: str = declare("", "oidc.issuer", parse_address)
    oidc_audience: str = declare("", "oidc.audience", parse_text)
    oidc_jwks_uri: str = declare("", "oidc.jwks_uri", parse_address)
    oidc_ca_file: str = declare("", "oidc.ca_file", parse_text)
    oidc_principal_claim: str = declare("sub", "oidc.principal_claim", parse_text)
    oidc_principal_type: str = declare("user", "oidc.principal_type", parse_text, choices=GIVEN_KINDS)
    oidc_groups_claim: str = declare("groups", "oidc.groups_claim", parse_text)
    failures_per_minute: int = integer(10, "failures_per_minute", 1, 100_000)

    @property
    def asks(self) -> bool:
        """Return whether a client must say who it is."""
        return self.mode != "none"

    @property
    def super_admin_names(self) -> list[str]:
        return [name for name in self.super_admins.split(",") if name]

    @property
    def has_key(self) -> bool:
        return bool(self.jwt_secret_key or self.jwt_secret_key_file or self.jwt_keys or self.oidc_issuer)

    @property
    def key_paths(self) -> list[str]:
        """Files of keys; "" where there is none."""
        return [*(one.file for one in key_files(self.jwt_keys)), self.jwt_secret_key_file]


def credentials_of(auth: AuthConfig, keys: Iterable[Key]) -> Credentials:
    """Return what checks and signs with these keys by this section.

    Keys of ``auth.oidc`` are not read before its provider is started.
    """
    from danube.host.credentials import Credentials

    leeway_s = auth.jwt_leeway_ms // 1000
    return Credentials(keys, issuer=auth.jwt_issuer, leeway_s=leeway_s, provider=_provider_of(auth))


def keys_of(auth: AuthConfig, *, short_allowed: bool) -> list[Key]:
    """Load the keys of this section; ConfigInvalid names one that cannot be used.

    ``short_allowed``: nobody but this host can guess a secret.
    """
    from danube.host.credentials import load_key, secret_key

    keys = [
        load_key(one.key_id, one.algorithm, one.file, signs=one.signs, short_allowed=short_allowed)
        for one in key_files(auth.jwt_keys)
    ]
    if auth.jwt_secret_key:
        keys.append(secret_key("", auth.jwt_secret_key.reveal().encode(), short_allowed=short_allowed))
    elif auth.jwt_secret_key_file:
        keys.append(load_key("", "HS256", auth.jwt_secret_key_file, signs=True, short_allowed=short_allowed))
    return keys


def packed_keys(auth: AuthConfig) -> bytes:
    """Return the settings of this section that are read again, for other processes of the broker."""
    texts = (auth.jwt_secret_key.reveal(), auth.jwt_secret_key_file, auth.jwt_keys)
    return json.dumps(texts).encode()


def with_keys(auth: AuthConfig, packed: bytes) -> AuthConfig:
    """Return the section with such settings; ``packed`` is empty before they were read again."""
    if not packed:
        return auth
    secret, file, keys = json.loads(packed)
    return replace(auth, jwt_secret_key=Secret(secret), jwt_secret_key_file=file, jwt_keys=keys)


def _provider_of(auth: AuthConfig) -> Provider | None:
    if not auth.oidc_issuer:
        return None
    from danube.host.credentials import Provider
    from danube.host.issuer import IssuerKeys

    keys = IssuerKeys(auth.oidc_issuer, jwks_uri=auth.oidc_jwks_uri, ca_file=auth.oidc_ca_file)
    claims = auth.oidc_principal_claim, auth.oidc_principal_type, auth.oidc_groups_claim
    return Provider(keys, auth.oidc_audience, *claims)


def contradictions(
    auth: AuthConfig, tls: TlsConfig, *, loopback: bool, clustered: bool
) -> Iterator[Contradiction]:
    """Yield what cannot hold together in this section; ``loopback``: only this host reaches the ports."""
    if not auth.asks:
        return
    if clustered and not tls.cert_file:
        what = f"auth.mode is {auth.mode} in a cluster without tls.cert_file"
        hint = "brokers prove by TLS that they are: set the files of tls and of cluster"
        yield "auth.mode", what, hint
    elif auth.mode == "tls" and not tls.cert_file:
        yield "auth.mode", "auth.mode is tls without a certificate", "set tls.cert_file"
    if auth.jwt_secret_key and auth.jwt_secret_key_file:
        what = "auth.jwt.secret_key and auth.jwt.secret_key_file are both given"
        yield "auth.jwt.secret_key", what, "give one of them"
    if not auth.has_key and tls.client_certificates == "off":
        what = f"auth.mode is {auth.mode}, and there is no key that checks tokens"
        hint = "set auth.jwt.keys, auth.jwt.secret_key_file, or auth.oidc"
        yield "auth.mode", what, hint
    yield from _of_provider(auth)
    if auth.jwt_secret_key and not loopback and auth.jwt_secret_key.size_bytes < SECRET_BYTES_MIN:
        what = (
            f"auth.jwt.secret_key has less than {SECRET_BYTES_MIN} bytes, and others than this host may guess"
        )
        yield "auth.jwt.secret_key", what, "take a longer one: openssl rand -hex 32"


def _of_provider(auth: AuthConfig) -> Iterator[Contradiction]:
    """Yield what is missing in ``auth.oidc``, or said for nothing."""
    if not auth.oidc_issuer:
        for name in ("audience", "jwks_uri", "ca_file"):
            if getattr(auth, f"oidc_{name}"):
                what = f"auth.oidc.{name} is given without auth.oidc.issuer"
                yield f"auth.oidc.{name}", what, "set the issuer, as its tokens spell it"
        return
    if not auth.oidc_audience:
        what = "auth.oidc.issuer is given without auth.oidc.audience"
        hint = "set the audience (aud) of tokens for this broker: others of the issuer are for other programs"
        yield "auth.oidc.issuer", what, hint
    if auth.oidc_issuer == auth.jwt_issuer:
        what = "auth.oidc.issuer is auth.jwt.issuer as well"
        yield "auth.jwt.issuer", what, "an issuer's keys are in one place: take one of them"
