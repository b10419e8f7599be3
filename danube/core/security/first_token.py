"""The life of the first token of a broker, which has the claim ``bootstrap``.

It is made on the broker's host, beside the key that signs it, and makes the first administrator.  Once
somebody else has come in who holds ManageCluster, every first token that was issued before is taken back, by
a revocation of the principal ``bootstrap``.  The host's owner may make another one later.  It is seen when it
is shown: then it takes its forerunners back, and the next administrator takes it back as well.
"""

from __future__ import annotations

from typing import Final

from danube.core.metadata.commands import Revocation
from danube.core.metadata.roles import Access
from danube.core.security.authority import CLUSTER, Authority
from danube.core.security.principals import BOOTSTRAP, BOOTSTRAP_TTL_S, Identity

NEWER: Final = "a newer first token was shown"
HANDED_OVER: Final = "an administrator has come"
_LEEWAY_S: Final = 3_600  # more than the leeway that may be set for the end of a token
_PLACE: Final = ("principal", str(BOOTSTRAP))


def may_live(access: Access) -> bool:
    """Whether a first token may have been shown since they were taken back for good."""
    present = access.credentials.find_revocation(*_PLACE)
    return present is None or present.reason != HANDED_OVER


def taking_back(access: Access, authority: Authority, identity: Identity, now_us: int) -> Revocation | None:
    """The revocation of first tokens that is due when this identity comes in, whose credential is good."""
    present = access.credentials.find_revocation(*_PLACE)
    before_us = 0 if present is None else present.before_us
    end_us = now_us + (BOOTSTRAP_TTL_S + _LEEWAY_S) * 1_000_000
    if identity.principal == BOOTSTRAP:
        newer = identity.issued_us > before_us
        return Revocation(*_PLACE, end_us, identity.issued_us, NEWER) if newer else None
    if not may_live(access) or not authority.decide(identity, "ManageCluster", CLUSTER).allowed:
        return None
    # The clock of the host that made the one that was shown may be ahead.
    return Revocation(*_PLACE, end_us, max(now_us, before_us) + 1, HANDED_OVER)
