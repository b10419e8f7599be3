"""Operations on API keys, tokens and revocations, and the question of who may do what."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any, Final

import msgspec

from danube.broker.operations.arguments import listed
from danube.broker.operations.context import proposing
from danube.core.metadata.commands import (
    ApiKey,
    DeleteRevocation,
    PutApiKey,
    Revocation,
    Revoke,
)
from danube.core.metadata.credentials import descent_from, exchanged_token_id
from danube.core.metadata.roles import PERMISSIONS, resource_in
from danube.core.security.api_keys import RANDOM_BYTES, api_key_text, hash_of_key
from danube.core.security.authority import Decision, Resource, topic_resource
from danube.core.security.operations import OWN_TOKEN_TTL_S_MAX
from danube.core.security.principals import Identity, Principal
from danube.errors import InvalidArgument, NotSupported
from danube.host import clock

if TYPE_CHECKING:
    from danube.broker.operations.context import Answer, Operation, Operations
    from danube.core.security import arguments as of

DAY_S: Final = 86_400
TOKEN_TTL_S: Final = {"user": DAY_S, "service_account": 90 * DAY_S}
TTL_S_MAX: Final = 3_650 * DAY_S
_US: Final = 1_000_000


# -- API keys -----------------------------------------------------------------------------------------


def _api_keys(operations: Operations, args: of.Page, answer: Answer) -> None:
    operations.refresh()
    answer(listed(args, operations.state.access.credentials.api_keys(), lambda key: key.id, _shown_key))


def _shown_key(key: ApiKey) -> dict[str, Any]:
    """A key without its hash, which is nobody's business."""
    shown = msgspec.structs.asdict(key)
    del shown["secret_hash"]
    return shown


def _create_api_key(operations: Operations, args: of.NewApiKey, answer: Answer) -> None:
    """Make a key; the answer is the only place where its text ever is."""
    key_id = args.id or secrets.token_hex(8)
    content = api_key_text(key_id, secrets.token_bytes(RANDOM_BYTES))
    now_us, ttl_s = clock.wall_us(), _lifetime(args.ttl_s)
    key = ApiKey(
        key_id, hash_of_key(content), str(Principal.parse(args.principal)), now_us,
        now_us + ttl_s * _US if ttl_s else 0, args.description,
    )  # fmt: skip
    operations.propose(PutApiKey(key=key), answer, lambda _: {**_shown_key(key), "key": content})


# -- revocations --------------------------------------------------------------------------------------


def _revocations(operations: Operations, args: of.Page, answer: Answer) -> None:
    operations.refresh()
    found = operations.state.access.credentials.revocations()
    answer(listed(args, found, lambda one: f"{one.kind}\n{one.value}", msgspec.structs.asdict))


def _revoke(operations: Operations, args: of.NewRevocation, answer: Answer) -> None:
    """Take credentials back: those of a principal that were issued before now, unless another time is given.

    Without a lifetime the revocation lasts as long as any credential that this broker signs could.
    """
    value, before_us, now_us = args.value, 0, clock.wall_us()
    if args.kind == "principal":
        value = str(Principal.parse(value))
        before_us = now_us if args.before_us is None else args.before_us
    end_us = now_us + _lifetime(TTL_S_MAX if args.ttl_s is None else args.ttl_s) * _US
    revocation = Revocation(args.kind, value, end_us, before_us, args.reason)
    shown = msgspec.structs.asdict(revocation)
    operations.propose(Revoke(revocation=revocation, now_us=now_us), answer, lambda _: shown)


def _delete_revocation(operations: Operations, args: of.Revoked, answer: Answer) -> None:
    operations.propose(DeleteRevocation(revoked=args.kind, value=args.value), answer)


# -- tokens -------------------------------------------------------------------------------------------


def _issue_token(operations: Operations, args: of.NewToken, answer: Answer) -> None:
    """Sign a token for the caller, or for whom he names."""
    named = args.principal
    principal = Principal.parse(named) if named else operations.identity.principal
    if principal.kind not in TOKEN_TTL_S:
        raise InvalidArgument(f"there are no tokens of {principal}", hint="name a user or a service account")
    if operations.signer is None:
        raise NotSupported("this broker signs no tokens", hint="set auth.mode, and a key in auth.jwt")
    own, now_us, token_id = operations.identity, clock.wall_us(), secrets.token_hex(16)
    usual_s = TOKEN_TTL_S[principal.kind] if named else OWN_TOKEN_TTL_S_MAX
    ttl_s = _lifetime(usual_s if args.ttl_s is None else args.ttl_s)
    if principal == own.principal and own.expires_us:
        ttl_s = min(ttl_s, (own.expires_us - now_us) // _US)  # nobody lives on by tokens for himself
    if principal == own.principal and own.how == "key":
        token_id = exchanged_token_id(own.key_id, token_id)
    token = operations.signer.sign(principal, ttl_s, now_us, descent=descent_from(own), jti=token_id)
    expires_us = (now_us // _US + ttl_s) * _US
    answer({"token": token, "id": token_id, "principal": str(principal), "expires_us": expires_us})


def _lifetime(ttl_s: int) -> int:
    if ttl_s > TTL_S_MAX:
        raise InvalidArgument(f"a lifetime of {ttl_s} s is too long", why=f"the most is {TTL_S_MAX}")
    return ttl_s


# -- who may what -------------------------------------------------------------------------------------


def _can(operations: Operations, args: of.Question, answer: Answer) -> None:
    """Whether a principal (default: the caller) has a permission on a resource, and by which binding.

    Groups of another are those that are named: only tokens tell who is in which.
    """
    operations.refresh()
    named = args.principal
    own = not named or named == str(operations.identity.principal)
    identity = operations.identity
    if not own:  # whatever credentials it may show, none is older than now
        identity = Identity(Principal.parse(named), "named", issued_us=clock.wall_us())
    if args.groups:
        identity = identity._replace(groups=args.groups)
    permission = {one.lower(): one for one in PERMISSIONS}.get(args.permission.lower())
    if permission is None:
        asked = args.permission[:40]
        raise InvalidArgument(f"permission {asked!r} is not known", hint=f"use {', '.join(PERMISSIONS)}")
    name = resource_in(args.scope, args.resource_name)
    resource = topic_resource(name) if args.scope == "topic" else Resource(args.scope, name)
    decision = operations.authority.decide(identity, permission, resource)
    answer(
        {
            "principal": str(identity.principal),
            "permission": permission,
            "scope": resource.scope,
            "resource_name": resource.name,
            **_told(decision),
        }
    )


def _told(decision: Decision) -> dict[str, Any]:
    binding = None if decision.binding is None else msgspec.structs.asdict(decision.binding)
    told = {"allowed": decision.allowed, "reason": decision.reason}
    return {**told, "binding": binding, "role": decision.role}


TABLE: dict[str, Operation] = {
    "api_keys": _api_keys,
    "create_api_key": _create_api_key,
    "delete_api_key": proposing(),
    "revocations": _revocations,
    "revoke": _revoke,
    "delete_revocation": _delete_revocation,
    "issue_token": _issue_token,
    "can": _can,
}
