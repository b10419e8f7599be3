"""The brokers of one client: *home*, which answers lookups, and the owners of its open partitions.

A broker on its own never names another one; then there is only home.  In a cluster a lookup names the broker
of each partition, and OwnerMoved names a new one; the producer or consumer then connects there.  When a
connection to an owner is lost, the partition returns to home and sends its lookup again.  Any broker at home
knows the next owner, or keeps the request until there is one.

There is no socket here: the shell dials and closes connections on request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, Self, TypeVar

from danube.client.machine.address import SCHEME, Address, parse_url
from danube.client.machine.requests import nothing
from danube.errors import ClosedError, ConnectionFailed, DanubeError, InvalidArgument, OwnerMoved

if TYPE_CHECKING:
    from danube.core.protocol.native import TopicView, Welcome

SILENCE_NS: Final = 2_000_000_000  # in a cluster another broker takes over, so a silent one is left early
BROKERS_KNOWN_MAX: Final = 1_000
ADVERTISED_HINT: Final = (
    "another broker sends its clients there: if that one runs, its advertised address (server.advertised)"
    " cannot be reached from here"
)


class BrokerSession(Protocol):
    """A session, as the brokers see it: :class:`danube.client.machine.session.Session`."""

    ready: bool
    welcome: Welcome
    failure: DanubeError | None
    silence_ns: int

    @property
    def in_use(self) -> bool: ...
    def sibling(self) -> Self: ...
    def move_to(self, home: Any, error: DanubeError) -> None: ...
    def fail(self, error: DanubeError) -> None: ...


Session = TypeVar("Session", bound=BrokerSession)


class Brokers(Generic[Session]):
    """See the module; everything is called as a session is, from one thread at a time."""

    def __init__(self, home: Session) -> None:
        self.home = home
        self.dial: Callable[[Session, Address], None] | None = None  # the shell's: connect, once
        self.drop: Callable[[Session], None] = nothing  # the shell's: close for good
        self.known: list[Address] = []  # where home may be found as well
        self._home_at: Address | None = None  # where it was found last
        self._owners: dict[str, Session] = {}

    @property
    def owners(self) -> list[Session]:
        """The sessions besides home."""
        return list(self._owners.values())

    def learn(self, view: TopicView) -> None:
        """Take in which brokers there are; leave those where nothing is open, but for this topic's owners.

        Only here: a session that was named for one partition must not end while the next one is named.
        """
        self._drop_idle(view.owners)
        if view.brokers:
            self.known = [one for text in view.brokers[:BROKERS_KNOWN_MAX] if (one := _address(text))]
            self.home.silence_ns = SILENCE_NS

    def homes(self, given: Sequence[Address]) -> list[Address]:
        """Return addresses to try as home: those of the client and known ones, the present home last.

        A broker that reaches no other one lets go of its clients, and still takes their connections.
        """
        places = list(dict.fromkeys([*given, *self.known]))
        if self._home_at in places:
            following = places.index(self._home_at) + 1
            places = places[following:] + places[:following]
        return places

    def found(self, address: Address) -> None:
        """The shell: home is connected there."""
        self._home_at = address

    def serving(self, view: TopicView, index: int) -> Session:
        """Return the session for a partition of a known topic."""
        address = view.owners[index] if index < len(view.owners) else ""
        return self.at(address) if address else self.home

    def after(self, session: Session, error: BaseException | None) -> Session:
        """Return the session to ask again after ``error`` on ``session``."""
        address = error.facts.get("address", "") if isinstance(error, OwnerMoved) else ""
        return self.at(address) if isinstance(address, str) and address else self.home

    def at(self, text: str) -> Session:
        """The session with the broker at an address, which may not be connected yet."""
        home = self.home
        if home.ready and home.welcome.address == text:
            return home
        session = self._owners.get(text)
        if session is not None:
            return session
        address = _address(text)
        if address is None or self.dial is None or home.failure is not None:
            return home
        session = self._owners[text] = home.sibling()
        session.silence_ns = SILENCE_NS
        self.dial(session, address)
        return session

    def _drop_idle(self, kept: Sequence[str]) -> None:
        for text, session in list(self._owners.items()):
            if session.ready and not session.in_use and text not in kept:
                del self._owners[text]
                self._end(session, ClosedError("nothing of this client is there any more"))

    def lost(self, session: Session, error: DanubeError) -> None:
        """The shell: this owner is not reached, or not any more; all that was there comes home."""
        for text in [text for text, one in self._owners.items() if one is session]:
            del self._owners[text]
        if isinstance(error, ConnectionFailed):
            error = ConnectionFailed(error.what, why=error.why, hint=ADVERTISED_HINT, **error.facts)
        session.move_to(self.home, error)
        self._end(session, error)

    def _end(self, session: Session, error: DanubeError) -> None:
        self.drop(session)
        session.fail(error)

    def fail(self, error: DanubeError) -> None:
        """The client is at its end."""
        owners, self._owners = self._owners, {}
        for session in owners.values():
            self._end(session, error)


def _address(text: str) -> Address | None:
    try:
        return parse_url(SCHEME + text)[0]
    except InvalidArgument:
        return None
