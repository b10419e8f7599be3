"""The judge of the router: what a session may open and ask for, and whether that still holds.

Everything is judged by its name, before anybody looks whether it exists: so a refusal does not tell.  What a
handle was opened by is kept as its *grant*.  Frames of an open handle are not judged.  When rights change,
grants are judged again, and handles that are no longer allowed are closed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Final, NamedTuple

from danube.broker.api import Holder, RoutedSession
from danube.core.metadata.machine import Metadata
from danube.core.protocol import native as wire
from danube.core.protocol.native import Admin, Frame, FrameDecoder, Kind, Lookup, OpenProducer, Subscribe
from danube.core.security.authority import CLUSTER, Authority, somewhere_in, topic_resource
from danube.core.security.operations import ADMIN, NATIVE, Row, judge, row_of
from danube.core.security.principals import Identity, Principal
from danube.errors import DanubeError, InvalidArgument, NotAllowed, NotAuthenticated

_LISTS: Final = ("namespaces", "schema.subjects")
SUGGESTS: Final = "did you mean "  # how a hint begins that has names
UNUSED_GRANTS_MAX: Final = 64  # of a connection, before they are looked for
JUDGED_AT_ONCE: Final = 1_000  # grants in one turn, when rights have changed


class Grant(NamedTuple):
    """Why a handle may be open: the request that opened it."""

    row: Row
    closes: Kind  # the frame that closes the handle
    request: OpenProducer | Subscribe


class Sight(NamedTuple):
    """One identity's view of lists: only what it may look up."""

    authority: Authority
    identity: Identity
    state: Metadata

    def topics(self) -> Callable[[str], bool]:
        return self.authority.sees_topic(self.identity)

    def may(self, permission: str, topic: str) -> bool:
        return self.authority.decide(self.identity, permission, topic_resource(topic)).allowed

    def consumes(self, topic: str, subscription: str) -> bool:
        """Return whether the identity may be a consumer of this subscription."""
        return self._allowed(NATIVE["SUBSCRIBE"], {"partition": topic, "subscription": subscription})

    def namespace(self, name: str) -> bool:
        return self.authority.visible(self.identity, somewhere_in(name))

    def subject(self, name: str) -> bool:
        return self._allowed(ADMIN["schema.get"], {"args": {"subject": name}})

    def _allowed(self, row: Row, request: object) -> bool:
        try:
            judge(self.authority, self.identity, row, request, self.state)
        except (NotAllowed, NotAuthenticated):
            return False
        return True


class Judging:
    """Asked by the router for each request of a session that is not the broker's own."""

    def __init__(
        self,
        authority: Authority,
        state: Callable[[], Metadata],
        route: Callable[[RoutedSession, Frame, memoryview], bool],
    ) -> None:
        self.authority = authority
        self._state = state
        self._route = route

    def lookup(self, session: RoutedSession, request: Lookup) -> None:
        self._demand(session.identity, NATIVE["LOOKUP"], request)

    def open_producer(self, session: RoutedSession, handle: int, request: OpenProducer) -> None:
        if request.internal and session.identity.how != "internal":
            raise NotAllowed("only a broker has producers of its own", hint="open it without `internal`")
        self._grant(session, handle, Grant(NATIVE["OPEN_PRODUCER"], Kind.CLOSE_PRODUCER, request))

    def subscribe(self, session: RoutedSession, handle: int, request: Subscribe) -> None:
        self._grant(session, handle, Grant(NATIVE["SUBSCRIBE"], Kind.CLOSE_CONSUMER, request))

    def _grant(self, session: RoutedSession, handle: int, grant: Grant) -> None:
        """Judge what opens a handle.

        A handle in use is not opened again, even where its owner would refuse that: its grant must be what
        it was opened by.
        """
        self._demand(session.identity, grant.row, grant.request)
        if session.identity.how == "internal":
            return
        if handle in session.grants and session.holds(handle):
            raise InvalidArgument(
                f"handle {handle} is in use on this connection", hint="choose another number"
            )
        opened = sum(map(len, (session.routes, session.producers, session.consumers, session.opening)))
        if len(session.grants) > 2 * opened + UNUSED_GRANTS_MAX:  # most of what was asked for did not open
            session.grants = {one: kept for one, kept in session.grants.items() if session.holds(one)}
        session.grants[handle] = grant

    def close(self, session: RoutedSession, handle: int, kind: int) -> None:
        """Drop the grant of a handle that its client closes.

        Refuse the close of a producer where a consumer is open, or the other way round: that closes nothing,
        and a handle without a grant would outlive its rights.
        """
        grant: Grant | None = session.grants.get(handle)
        if grant is None:
            return
        if grant.closes != kind:
            what = "consumer" if grant.closes is Kind.CLOSE_CONSUMER else "producer"
            raise InvalidArgument(f"handle {handle} is a {what}'s", hint="close it as what it was opened")
        del session.grants[handle]

    def admin(self, session: RoutedSession, request: Admin) -> None:
        """Judge an operation; what is forwarded is judged for who asked the other broker."""
        row = row_of(request.op)
        told = request.forwarded or request.on_behalf or request.groups
        if session.identity.how != "internal" and told:
            raise NotAllowed("only a broker forwards requests", hint="ask without `forwarded`")
        self._demand(asking(session.identity, request), row, request)

    def letter(self, author: str, topic: str) -> None:
        """Judge a copy that a failure policy asks for, by who set the policy; "" is the operator."""
        if author:
            self.authority.demand(_told(author), "Produce", topic_resource(topic))

    def shows(self, asker: Identity, op: str) -> Callable[[str], bool] | None:
        """Return a test of what a list shows to who asks, by its keys; None: everything.

        Rows are left out before a page is cut, so that no page ends at the name of a hidden one.
        """
        if op not in _LISTS or asker.how == "internal":
            return None
        sight = Sight(self.authority, asker, self._state())
        return sight.namespace if op == "namespaces" else sight.subject

    def _demand(self, identity: Identity, row: Row, request: object) -> None:
        judge(self.authority, identity, row, request, self._state())

    def again(self, session: RoutedSession) -> int:
        """Judge the grants of a session again, and close the handles that are no longer allowed.

        Return how many were looked at.
        """
        looked_at = 1
        for handle, grant in list(session.grants.items()):
            looked_at += 1
            if not session.holds(handle):
                del session.grants[handle]
                continue
            try:
                self._demand(session.identity, grant.row, grant.request)
            except (NotAllowed, NotAuthenticated) as error:
                self._close(session, handle, grant, error)
        return looked_at

    def _close(self, session: RoutedSession, handle: int, grant: Grant, error: DanubeError) -> None:
        """Close a handle at its owner, and tell the client."""
        buffer = memoryview(bytearray(wire.control_frame(grant.closes, None, 0, handle)))
        for one in FrameDecoder().frames(buffer, 0, len(buffer)):
            if not self._route(session, one, buffer):
                return  # the ring is full: the next look closes it
        session.grants.pop(handle, None)
        session.send_error(error.with_traceback(None), 0, handle)


def discreet(authority: Authority, identity: Identity, error: DanubeError) -> DanubeError:
    """Return an error for who asked: names that are alike are told only to who may look them up.

    Where that is not known, as of a namespace or a subject, they are told to who may look up everything.
    """
    if not error.hint.startswith(SUGGESTS) or authority.visible(identity, CLUSTER):
        return error
    sees = authority.sees_topic(identity)
    if all(name.startswith("/") and sees(name) for name in suggested(error.hint)):
        return error
    told = copy.copy(error)
    told.hint = ""
    return told


def suggested(hint: str) -> list[str]:
    """Return the names in a hint that suggests some."""
    return hint.removeprefix(SUGGESTS).removesuffix("?").split(" or ")


def asking(session_identity: Identity, request: Admin) -> Identity:
    """Return for whom a request is judged: a session of the broker itself may ask on behalf of another."""
    if session_identity.how != "internal" or not request.on_behalf:
        return session_identity
    return _told(request.on_behalf, request.groups)


def _told(principal: str, groups: tuple[str, ...] = ()) -> Identity:
    """Return the identity of a principal that a broker has told or written down."""
    kind, _, name = principal.partition(":")
    return Identity(Principal(kind, name), "forwarded", groups=groups)


class Recall:
    """Notices that rights or policies have changed, and has every holder judge its grants again."""

    def __init__(
        self,
        authority: Authority,
        holders: Callable[[], list[Holder]],
        forget: Callable[[], None],
        call_soon: Callable[[Callable[[], None]], object],
    ) -> None:
        """``forget``: what was known of credentials holds no longer."""
        self._authority = authority
        self._holders = holders
        self._forget = forget
        self._call_soon = call_soon
        self._seen = authority.version
        self._policies_changed = False
        self._left: list[Holder] = []

    def policies_changed(self) -> None:
        """Note that namespaces have other policies, which rights depend on (``subscription_auth``)."""
        self._policies_changed = self._authority.enforced

    def look(self) -> None:
        """Begin anew if rights or policies have changed since the last look; called once a second."""
        version = self._authority.version
        if version == self._seen and not self._policies_changed:
            return
        self._policies_changed = False
        if version != self._seen:
            self._seen = version
            self._forget()
        self.begin()

    def begin(self) -> None:
        """Have every holder judge its grants again."""
        running = bool(self._left)
        self._left = self._holders()
        if not running:
            self._go_on()

    def _go_on(self) -> None:
        looked_at = 0
        while self._left and looked_at < JUDGED_AT_ONCE:
            looked_at += self._left.pop().judge_again()
        if self._left:
            self._call_soon(self._go_on)
