"""Admission: who a client is, asked once at each door, and a brake on guessing.

A refused client is answered late; from an address that was refused too often within a minute, later still.
Credentials of that address are checked all the same: others may live behind it.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

from danube.config.auth import AuthConfig, credentials_of, keys_of, with_keys
from danube.core.metadata.credentials import descent_from, exchanged_token_id
from danube.core.security.api_keys import identity_of_key, looks_like_api_key
from danube.core.security.authority import EVERYBODY, Authority, super_admins_of
from danube.core.security.principals import ANONYMOUS, Identity, Principal
from danube.errors import ConfigInvalid, IssuerUnavailable, NotAuthenticated, TokenExpired, Unavailable
from danube.host import clock, telemetry
from danube.host.renewal import Renewal

if TYPE_CHECKING:
    from danube.broker.processes.reloads import Reloads
    from danube.config.loading import BrokerConfig
    from danube.core.metadata.roles import Access
    from danube.host.credentials import Credentials, Key  # noqa: F401 - a base names Key in a string

_log = telemetry.events("admission")
MINUTE_NS: Final = 60_000_000_000
SOURCES_MAX: Final = 10_000
REFUSAL_S: Final = 0.2  # before a refusal is told
GUESSING_S: Final = 1.0
EXCHANGED_TTL_S: Final = 3_600  # of a token for an API key: clients exchange theirs each hour

NO_CREDENTIAL: Final = "this broker wants to know who asks"


class TokenKeys(Renewal[AuthConfig, "list[Key]"]):
    """Keys of tokens, which follow their files and, when the broker is told to, the list of them."""

    def __init__(self, auth: AuthConfig, *, short_allowed: bool) -> None:
        """Load the keys; raises ConfigInvalid."""
        super().__init__(auth, lambda source: keys_of(source, short_allowed=short_allowed))
        self._asked = 0
        self._told = b""

    def paths(self) -> Iterable[str]:
        return self.source.key_paths

    def renewed(self) -> None:
        _log.info("keys of tokens renewed", keys=",".join(key.key_id or '""' for key in self.made))

    def kept(self, error: ConfigInvalid) -> None:
        _log.error("the former keys of tokens stay", what=str(error), why=error.why)

    def look_again(self, reloads: Reloads) -> bool:
        """Look at the files, and at the list that was read last; return whether the keys were exchanged."""
        former, told = self.made, reloads.keys
        at_once, self._asked = reloads.count != self._asked, reloads.count
        if told != self._told:
            self._told = told
            self.follow(with_keys(self.source, told))
        else:
            self.look(at_once=at_once)
        return self.made is not former


class Admission:
    """Checks credentials for the doors of one worker."""

    def __init__(
        self,
        credentials: Credentials,
        access: Callable[[], Access],
        *,
        failures_per_minute: int,
        now_us: Callable[[], int] = clock.wall_us,
        now_ns: Callable[[], int] = clock.monotonic_ns,
        keys: TokenKeys | None = None,
    ) -> None:
        """``keys``: those of the credentials, where they are followed."""
        self.keys = keys
        self.leeway_us = credentials.leeway_s * 1_000_000
        self._access = access
        self.now_us = now_us
        self.credentials = credentials
        self._failures_per_minute = failures_per_minute
        self._now_ns = now_ns
        self.rights_known: Callable[[], bool] = _always  # False: only super admins come in
        self.super_admins: frozenset[Principal] = frozenset()
        self.on_admitted: Callable[[Identity], None] = _unnoticed
        self.on_refused: Callable[[Identity, str, int, str], None] = _untold  # who, from where, code, why
        self._failures: OrderedDict[str, tuple[int, int]] = OrderedDict()  # since when, and how many

    def open(self) -> None:
        """Begin to read the keys of the provider, if there is one."""
        if self.credentials.provider is not None:
            self.credentials.provider.keys.start()

    def close(self) -> None:
        if self.credentials.provider is not None:
            self.credentials.provider.keys.stop()

    def admit(self, token: str, source: str, certificate: bytes = b"") -> Identity:
        """Return who holds the token, or the client certificate (DER) that TLS has verified.

        Raises NotAuthenticated, TokenExpired or IssuerUnavailable, to be told after pause_s(); Unavailable
        where the broker is cut off from its cluster, as it does not hear then what is taken away.
        """
        if not token and not certificate:
            self._failed(source, NotAuthenticated.code, "no credential was given")
            raise NotAuthenticated(NO_CREDENTIAL, hint="give the client a token")
        try:
            identity = self._proven(token, certificate)
        except (NotAuthenticated, TokenExpired, IssuerUnavailable) as error:
            self._failed(source, error.code, str(error.__cause__ or error))
            raise error.with_traceback(None) from None
        if why := self._why_revoked(identity):
            self._failed(source, NotAuthenticated.code, why, identity)
            raise refused(why)
        if not self.rights_known() and identity.principal not in self.super_admins:
            raise Unavailable(
                "this broker cannot tell who may do what",
                why="it has not heard from its cluster for a while",
                hint="ask another broker, or wait until this one is back",
            )
        self.on_admitted(identity)
        return identity

    def exchange(self, text: str, source: str) -> str:
        """Return a token of an hour for an API key; raises NotAuthenticated or TokenExpired, as `admit` does.

        A token is not exchanged: it would be made to live longer.
        """
        if not looks_like_api_key(text):
            self._failed(source, NotAuthenticated.code, "it is no API key")
            raise refused("it is no API key")
        identity = self.admit(text, source)
        now_us, ttl_s = self.now_us(), EXCHANGED_TTL_S
        if identity.expires_us:
            ttl_s = max(1, min(ttl_s, (identity.expires_us - now_us) // 1_000_000))
        token_id = exchanged_token_id(identity.key_id, secrets.token_hex(16))
        descent = descent_from(identity)
        return self.credentials.sign(identity.principal, ttl_s, now_us, descent=descent, jti=token_id)

    def _proven(self, token: str, certificate: bytes) -> Identity:
        """The identity of either; with both they must name the same principal."""
        if not certificate:
            return self._identity(token)
        try:
            shown = self.credentials.of_certificate(certificate, self.now_us())
        except NotAuthenticated:
            if not token:
                raise
            return self._identity(token)  # a certificate that names nobody, such as a proxy's
        if token and (other := self._identity(token)).principal != shown.principal:
            raise refused(f"the token is of {other.principal}, and the certificate of {shown.principal}")
        return shown

    def _identity(self, text: str) -> Identity:
        """Return the holder of a token or an API key."""
        if looks_like_api_key(text):
            return identity_of_key(self._access(), text, self.now_us())
        return self.credentials.check(text, self.now_us())

    def revoked(self, identity: Identity) -> bool:
        """Return whether a credential that was good is good no longer."""
        return bool(self._why_revoked(identity))

    def _why_revoked(self, identity: Identity) -> str:
        if identity.how == "token" and not self.credentials.holds(identity):
            return "the key that signed it was removed"
        return self._access().credentials.revoked(identity)

    def look_at_keys(self, reloads: Reloads) -> bool:
        """Follow the keys of tokens; return whether one is gone, so that its tokens are good no longer."""
        if self.keys is None or not self.keys.look_again(reloads):
            return False
        return self.credentials.exchange(self.keys.made)

    def forget(self) -> None:
        """Check every credential anew: keys or revocations have changed."""
        self.credentials.forget()

    def pause_s(self, source: str) -> float:
        """How long a refusal of this source is held back."""
        return GUESSING_S if self._failures.get(source, (0, 0))[1] > self._failures_per_minute else REFUSAL_S

    def _failed(self, source: str, code: int, why: str, identity: Identity = ANONYMOUS) -> None:
        now_ns = self._now_ns()
        since_ns, count = self._failures.pop(source, (now_ns, 0))
        if now_ns - since_ns > MINUTE_NS:
            since_ns, count = now_ns, 0
        self._failures[source] = since_ns, count + 1
        if len(self._failures) > SOURCES_MAX:
            self._failures.popitem(last=False)
        facts: dict[str, Any] = {} if identity is ANONYMOUS else {"principal": str(identity.principal)}
        _log.limited("a credential was refused", source=source, why=why, **facts)
        self.on_refused(identity, source, code, why)


def _unnoticed(identity: Identity) -> None:
    pass


def _always() -> bool:
    return True


def _untold(identity: Identity, source: str, code: int, why: str) -> None:
    pass


def authority_of(config: BrokerConfig, access: Callable[[], Access]) -> Authority:
    """Return the judge by the metadata's roles and bindings; where nobody is asked all is allowed."""
    if not config.auth.asks:
        return EVERYBODY
    return Authority(access, super_admins_of(config.auth.super_admin_names))


def admission_of(config: BrokerConfig, access: Callable[[], Access]) -> Admission | None:
    """Return what checks credentials; made in the worker, so that no other process holds the keys."""
    auth = config.auth
    if not auth.asks:
        return None
    keys = TokenKeys(auth, short_allowed=config.only_this_host)
    credentials = credentials_of(auth, keys.made)
    admission = Admission(credentials, access, failures_per_minute=auth.failures_per_minute, keys=keys)
    admission.super_admins = super_admins_of(auth.super_admin_names)
    admission.open()
    return admission


def refused(why: str) -> NotAuthenticated:
    """The one error of every credential that is not taken; ``why`` is for the log."""
    error = NotAuthenticated("the credential is not accepted", hint="ask the operator for one that is")
    error.__cause__ = NotAuthenticated(why)
    return error
