"""API keys and revocations: what the metadata knows of credentials.  No secret is among it.

An API key is kept as the SHA-256 of its text, which has 256 random bits, so that it needs no slower hash.  A
*revocation* takes credentials back before they end by themselves.  Each has an end, the latest time at which
a credential that it means could still be good; then it is dropped with the next one that comes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, Protocol

from danube.core.cluster.records import no_room
from danube.core.metadata.commands import (
    ApiKey,
    CredentialCommand,
    DeleteApiKey,
    DeleteRevocation,
    PutApiKey,
    Revocation,
    Revoke,
)
from danube.errors import Conflict, InvalidArgument, NotFound
from danube.ids import check_label
from danube.limits import API_KEYS_MAX, REVOCATIONS_MAX

HASH_BYTES: Final = 32
_KEY_ID: Final = re.compile(r"[A-Za-z0-9-]{1,64}")
# What a revocation means: a token by its id (jti), any credential by the hash that logs know it by, all
# credentials of a principal issued before a time, all tokens signed with a key (kid).
REVOKED_KINDS: Final = ("token", "credential", "principal", "signing_key")
# A token that was given in exchange for an API key has an id that begins so, and goes with the key.
EXCHANGED: Final = "api-key:"
_API_KEY: Final = "api_key"  # in a descent, beside the kinds of revocations


class Shown(Protocol):
    """The parts of an identity (:class:`danube.core.security.principals.Identity`) that are looked at."""

    @property
    def principal(self) -> object: ...
    @property
    def how(self) -> str: ...
    @property
    def key_id(self) -> str: ...
    @property
    def token_key(self) -> bytes: ...
    @property
    def token_id(self) -> str: ...
    @property
    def issued_us(self) -> int: ...
    @property
    def descent(self) -> tuple[str, ...]: ...


def exchanged_token_id(key_id: str, unique: str) -> str:
    """The id of a token that is given in exchange for an API key."""
    return f"{EXCHANGED}{key_id}:{unique}"


def descent_from(shown: Shown) -> tuple[str, ...]:
    """Return the names by which a credential may be taken back; a token that it asks for carries them."""
    own = [f"{kind}:{value}" for kind, value in _places_of(shown)]
    if shown.how == "key":
        own.append(f"{_API_KEY}:{shown.key_id}")
    return tuple(dict.fromkeys((*shown.descent, *own)))


class KnownCredentials:
    """All API keys and revocations."""

    __slots__ = ("_keys", "_revocations")

    def __init__(self) -> None:
        self._keys: dict[str, ApiKey] = {}
        self._revocations: dict[tuple[str, str], Revocation] = {}

    def __bool__(self) -> bool:
        return bool(self._keys or self._revocations)

    def api_keys(self) -> list[ApiKey]:
        """All API keys by id."""
        return [self._keys[name] for name in sorted(self._keys)]

    def find_key(self, key_id: str) -> ApiKey | None:
        return self._keys.get(key_id)

    def revocations(self) -> list[Revocation]:
        """All revocations by kind and value."""
        return [self._revocations[place] for place in sorted(self._revocations)]

    def find_revocation(self, kind: str, value: str) -> Revocation | None:
        return self._revocations.get((kind, value))

    def revoked(self, shown: Shown) -> str:
        """Why a credential that was good is good no longer; "" if it still is."""
        if shown.how in ("internal", "forwarded"):  # the broker itself; or another broker has judged it
            return ""
        if shown.how == "key" and shown.key_id not in self._keys:
            return "its API key was deleted"
        token_id = shown.token_id
        if token_id.startswith(EXCHANGED) and token_id.split(":")[1] not in self._keys:
            return "the API key that it was given for was deleted"
        for name in shown.descent:
            kind, _, value = name.partition(":")
            if kind == _API_KEY and value not in self._keys:
                return "the API key that asked for it was deleted"
            if (kind, value) in self._revocations:
                return "the credential that asked for it was revoked"
        if not self._revocations:
            return ""
        found = self._revocations.get(("principal", str(shown.principal)))
        if found is not None and shown.issued_us < found.before_us:
            return _told(found)
        for place in _places_of(shown):
            if (found := self._revocations.get(place)) is not None:
                return _told(found)
        return ""

    # Check and apply

    def check(self, command: CredentialCommand) -> bool:
        """Whether ``command`` would change anything; raises a CallerError if it is not allowed."""
        match command:
            case PutApiKey(key=key):
                self._check_key(key)
            case Revoke(revocation=revocation):
                self._check_revocation(revocation, command.now_us)
                return self._revocations.get(_place(revocation)) != revocation
        self._refuse(command)
        return True

    def _check_key(self, key: ApiKey) -> None:
        if not _KEY_ID.fullmatch(key.id):
            raise InvalidArgument(
                f"API key id {key.id[:80]!r} is not valid", why="it is 1-64 letters, digits or '-'"
            )
        if len(key.secret_hash) != HASH_BYTES:
            raise InvalidArgument(
                "an API key is kept as its SHA-256", why=f"not {len(key.secret_hash)} bytes"
            )
        check_label(key.principal, "principal")
        if len(self._keys) >= API_KEYS_MAX:
            raise no_room("API keys", API_KEYS_MAX, hint="delete keys that are not used")

    def _check_revocation(self, revocation: Revocation, now_us: int) -> None:
        if revocation.kind not in REVOKED_KINDS:
            raise InvalidArgument(
                f"a revocation of kind {revocation.kind[:40]!r} is not known",
                hint=f"use {', '.join(REVOKED_KINDS)}",
            )
        if revocation.value or revocation.kind != "signing_key":  # that of auth.jwt.secret_key has no name
            check_label(revocation.value, "revoked")
        if revocation.end_us <= now_us:
            raise InvalidArgument("a revocation needs an end in the future")
        left = [one for one in self._revocations.values() if one.end_us > now_us]
        if len(left) >= REVOCATIONS_MAX and _place(revocation) not in self._revocations:
            hint = "revoke a principal, or a signing key, in the place of many tokens"
            raise no_room("revocations", REVOCATIONS_MAX, hint=hint)

    def _refuse(self, command: CredentialCommand) -> None:
        """Raise a CallerError if applying would break the machine."""
        match command:
            case PutApiKey(key=key):
                if key.id in self._keys:
                    raise Conflict(f"API key {key.id!r} exists")
            case DeleteApiKey(id=key_id):
                if key_id not in self._keys:
                    raise NotFound(f"API key {key_id[:80]!r} does not exist")
            case DeleteRevocation(revoked=kind, value=value):
                if (kind, value) not in self._revocations:
                    raise NotFound(f"{kind[:40]} {value[:80]!r} is not revoked")
            case _:
                pass

    def apply(self, command: CredentialCommand) -> None:
        """Take a command; raises where ``_refuse`` does and changes nothing then."""
        self._refuse(command)
        match command:
            case PutApiKey(key=key):
                self._keys[key.id] = key
            case DeleteApiKey(id=key_id):
                del self._keys[key_id]
            case Revoke(revocation=revocation, now_us=now_us):
                left = {place: one for place, one in self._revocations.items() if one.end_us > now_us}
                self._revocations = {**left, _place(revocation): revocation}
            case DeleteRevocation(revoked=kind, value=value):
                del self._revocations[kind, value]

    def copy(self) -> KnownCredentials:
        other = KnownCredentials()
        other._keys, other._revocations = dict(self._keys), dict(self._revocations)
        return other

    def load(self, keys: Iterable[ApiKey], revocations: Iterable[Revocation]) -> None:
        """Load the keys and revocations of a snapshot."""
        self._keys = {key.id: key for key in keys}
        self._revocations = {_place(one): one for one in revocations}


def _places_of(shown: Shown) -> list[tuple[str, str]]:
    """Where revocations of this one credential would stand."""
    places = [("credential", shown.token_key.hex())] if shown.token_key else []
    if shown.token_id:
        places.append(("token", shown.token_id))
    if shown.how == "token":
        places.append(("signing_key", shown.key_id))
    return places


def _place(revocation: Revocation) -> tuple[str, str]:
    return revocation.kind, revocation.value


def _told(revocation: Revocation) -> str:
    return "the credential was revoked" + (f": {revocation.reason}" if revocation.reason else "")
