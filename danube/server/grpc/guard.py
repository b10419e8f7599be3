"""The guard of a gRPC port: who calls, and whether the call is allowed.

Credentials are looked at once for each distinct head of a request; calls that repeat it are known by that.
Calls that are judged by what they resolve, such as SendMessage, are judged where they are put together
(:mod:`danube.server.messages`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from danube.broker.admission import Admission
from danube.core.metadata.quotas import namespace_of
from danube.core.security.authority import topic_resource
from danube.core.security.operations import NATIVE, OPEN, Row, judge
from danube.errors import NotAuthenticated

if TYPE_CHECKING:
    from danube.core.metadata.machine import Metadata
    from danube.core.security.authority import Authority
    from danube.core.security.principals import Identity

_SCHEME: Final = "bearer "


class GrpcGuard:
    """One for each worker; its two ports share it."""

    def __init__(self, admission: Admission, authority: Authority, state: Callable[[], Metadata]) -> None:
        self._admission = admission
        self.authority = authority
        self._state = state

    def identity(self, field: str, source: str, certificate: bytes) -> Identity:
        """Return who calls with this ``authorization`` field, or with a certificate alone.

        Raises NotAuthenticated or TokenExpired.
        """
        token = bearer_of(field)
        return self._admission.admit(token, source, b"" if field and not token else certificate)

    def demand(self, row: Row | None, identity: Identity, request: Any) -> None:
        """Raise NotAllowed unless this caller may have the request carried out."""
        if row is None:  # a method that the table does not know is nobody's
            raise NotAuthenticated("this method is not open to anybody")
        judge(self.authority, identity, row, request, self._state())

    def consumes(self, identity: Identity, topic: str, subscription: str) -> None:
        """Raise NotAllowed unless this caller may have records of a subscription, and settle them."""
        state = self._state()
        limits = state.quotas.effective(namespace_of(topic)) if state.quotas else None
        if limits is None or not limits.subscription_auth:  # asked for each lot of Acks, so no more
            self.authority.demand(identity, "Consume", topic_resource(topic))
        else:
            request = {"partition": topic, "subscription": subscription}
            judge(self.authority, identity, NATIVE["SUBSCRIBE"], request, state)

    def pause_s(self, source: str) -> float:
        """How long a refusal is held back: some clients call again at once, for ever."""
        return self._admission.pause_s(source)

    def ended(self, identity: Identity) -> bool:
        """Return whether a credential has expired for good."""
        admission = self._admission
        return 0 < identity.expires_us < admission.now_us() - admission.leeway_us

    def revoked(self, identity: Identity) -> bool:
        return self._admission.revoked(identity)


def asks(row: Row | None) -> bool:
    """Return whether a method needs a credential."""
    return row is None or row.permission != OPEN


def bearer_of(field: str) -> str:
    """Return the token in an ``authorization`` field; "" where it holds none, or more than one."""
    return field[len(_SCHEME) :].strip() if field[: len(_SCHEME)].lower() == _SCHEME else ""
