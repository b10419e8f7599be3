"""Principals and identities: who asks, and by which credential that is known.

A *principal* is a name with a kind, spelled as in bindings: ``service_account:orders``.  An *identity* is a
principal with the credential that proved it.  It holds ``token_key`` in place of the credential's text, so
that caches, logs and revocations can name a credential without knowing it.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from danube.errors import InvalidArgument
from danube.ids import check_label

# Kinds that a credential may name; besides there are broker_internal, and anonymous for who shows none.
GIVEN_KINDS: Final = ("user", "service_account")
GROUP: Final = "group"  # what an issuer says its users are in; bindings name it, nobody comes in as one
BOUND_KINDS: Final = (*GIVEN_KINDS, "broker_internal", GROUP)  # that a binding may name


class Principal(NamedTuple):
    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}" if self.name else self.kind

    @classmethod
    def parse(cls, text: str) -> Principal:
        """Read ``kind:name``, the way a person or a certificate names it; raises InvalidArgument.

        Only a user or a service account can be named: nobody becomes a broker by a text.
        """
        kind, colon, name = text.partition(":")
        if not colon or kind not in GIVEN_KINDS:
            raise InvalidArgument(
                f"principal {text[:80]!r} is not valid",
                why=f"it does not begin with {' or '.join(f'{one}:' for one in GIVEN_KINDS)}",
                hint="for example service_account:orders",
            )
        check_label(name, "principal")
        return cls(kind, name)


class Identity(NamedTuple):
    """``how``: none, token, key, certificate, internal, or forwarded by another broker, which knows how.

    Times are wall microseconds.
    """

    principal: Principal
    how: str
    expires_us: int = 0  # 0: never
    key_id: str = ""  # of the key that signed a token (kid), or of an API key
    token_key: bytes = b""  # BLAKE2b-128 of the credential
    token_id: str = ""  # a token's jti
    issued_us: int = 0  # 0: the credential does not say; then it counts as older than any other
    descent: tuple[str, ...] = ()  # of a token that the broker signed: by which credentials it was asked for
    groups: tuple[str, ...] = ()  # that the token's issuer says the principal is in
    key_fingerprint: bytes = b""  # of the key that signed a token: another key may get its name

    @property
    def author(self) -> str:
        """How the principal is written into what it sets; "" for who is not known."""
        return "" if self.principal.kind == "anonymous" else str(self.principal)


ANONYMOUS: Final = Identity(Principal("anonymous", ""), "none")
# Who holds the first token of a broker, which has the claim ``bootstrap``.  No text, binding or certificate
# can name it, and brokers forward it by its name like any other.
BOOTSTRAP: Final = Principal("bootstrap", "")
BOOTSTRAP_TTL_S: Final = 86_400  # the most that a first token may live
INTERNAL: Final = Identity(Principal("broker_internal", ""), "internal")
