"""Clients, producers and consumers as their users hold them, whichever shell moves the bytes."""

from __future__ import annotations

import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import msgspec

from danube.client.machine.address import URL_DEFAULT, parse_url
from danube.client.machine.admin import AdminPlans
from danube.client.machine.reply import Plan, Reply, all_settled
from danube.client.machine.requests import nothing
from danube.client.machine.schema_plans import SchemaPlans
from danube.client.machine.session import Session
from danube.client.machine.tls import TlsOptions, tls_of
from danube.client.records.inbox import CLOSE_WAIT_S, Inbox
from danube.client.records.message import BaseBatch, BaseMessage
from danube.client.records.outbox import Outbox, ProducerOptions, raise_first
from danube.client.records.setup import ConsumerOptions, open_consumer, open_producer, seconds_as_ns
from danube.client.records.tokens import Token, token_source
from danube.errors import ClosedError, DanubeError, OperationTimeout
from danube.host.allocator import keep_large_blocks


class _Connected(Protocol):
    @property
    def session(self) -> Session: ...


Shell = TypeVar("Shell", bound=_Connected)
Options = TypeVar("Options", bound=ProducerOptions | ConsumerOptions)
Box = TypeVar("Box", bound=Outbox | Inbox[Any, Any])
Made = TypeVar("Made", bound="Handle[Any, Any, Any]")
M = TypeVar("M", bound=BaseMessage)
B = TypeVar("B", bound=BaseBatch)


class BaseClient(Generic[Shell]):
    """A client of either kind: its session, its open producers and consumers, and administration."""

    _connection: Shell  # from open() on
    _called: ClassVar[str]  # in repr()
    _use: ClassVar[str]  # example of its use, for an error's hint
    _admin_cls: type[Any]
    _schemas_cls: type[Any]
    _close_failed = "closing the client failed"

    def __init__(
        self,
        url: str = URL_DEFAULT,
        *,
        token: Token = "",
        token_file: str | os.PathLike[str] | None = None,
        allow_plaintext_token: bool = False,
        tls: TlsOptions | None = None,
        name: str = "",
        timeout: float = 30.0,
        connect_timeout: float = 10.0,
        reconnect_timeout: float | None = 60.0,
    ) -> None:
        """Check the arguments; open() connects.

        ``timeout`` (seconds) bounds requests and sends, ``connect_timeout`` for each address first the dial
        and then the broker's greeting.  After a lost connection the client dials again
        for ``reconnect_timeout`` seconds (None: for ever) before everything that waits fails.
        ``danube+tls://`` or ``tls`` (:class:`danube.TlsOptions`) makes it connect by TLS.

        ``token`` is a text or a function that returns one, ``token_file`` a file that holds one; both are
        asked again before the token ends.  Without either DANUBE_TOKEN and DANUBE_TOKEN_FILE are.  A token is
        sent only to this host, or through TLS, unless ``allow_plaintext_token`` is set.
        """
        keep_large_blocks()
        plain_url, self._tls = tls_of(url, tls)
        self._addresses = parse_url(plain_url)
        self._url = url
        self._timeout_ns = seconds_as_ns(timeout, "timeout")
        self._connect_timeout_s = connect_timeout
        self._session = Session(
            client=name or f"danube-python on {socket.gethostname()}",
            token=token_source(token, token_file),
            plaintext_token=allow_plaintext_token,
            reconnect_timeout_ns=None if reconnect_timeout is None else int(reconnect_timeout * 1e9),
            request_timeout_ns=self._timeout_ns,
        )
        self._opened = False
        self._closed = False
        self._open: dict[Any, None] = {}  # producers and consumers, which it closes when it is closed itself
        self.admin = self._admin_cls(AdminPlans(self._session), lambda: self._live)
        self.schemas = self._schemas_cls(SchemaPlans(self._session), lambda: self._live)

    @property
    def _live(self) -> Shell:
        self._session.check_usable()
        if not self._opened:
            raise ClosedError(
                f"the client is {'closed' if self._closed else 'not connected'}", hint=self._use
            )
        return self._connection

    def _add(
        self,
        plain: Callable[[Shell, Options], Made],
        typed: Callable[[Shell, Options, Any], Made],
        options: Options,
        schema: Any,
    ) -> Made:
        """Make a producer or consumer, of values where there is a schema."""
        one = plain(self._live, options) if schema is None else typed(self._live, options, schema)
        self._open[one] = None
        one._when_closed = lambda: self._open.pop(one, None)
        return one

    @property
    def principal(self) -> str:
        """As whom the broker takes this client, ``kind:name``; "" where it asks nobody."""
        return self._session.welcome.principal

    def statistics(self) -> dict[str, int]:
        """Counters since the client was made: connections, batches, records, bytes, duplicates, failures."""
        return msgspec.structs.asdict(self._session.statistics)

    @property
    def connected(self) -> bool:
        return self._session.ready

    def __repr__(self) -> str:
        state = "closed" if self._closed else "connected" if self.connected else "not connected"
        return f"<{self._called} {self._url} {state}>"


class Handle(ABC, Generic[Shell, Options, Box]):
    """A producer or a consumer, with its box of records while it is open."""

    _kind: ClassVar[str]
    _use: ClassVar[str]  # example of its use, for an error's hint

    def __init__(self, connection: Shell, options: Options) -> None:
        self._connection = connection
        self._options = options
        self._when_closed: Callable[[], Any] = nothing
        self._open_box: Box | None = None
        self._closed = False

    @property
    def topic(self) -> str:
        return self._options.topic

    @property
    def name(self) -> str:
        return self._options.name

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def _box(self) -> Box:
        self._connection.session.check_usable()
        if self._open_box is None:
            raise ClosedError(
                f"the {self._kind} is {'closed' if self._closed else 'not open'}", hint=self._use
            )
        return self._open_box

    @abstractmethod
    def _make_box(self) -> Plan[Box]:
        """Find the topic, and open all its partitions."""

    def _opening(self) -> Plan[None]:
        """Open, unless it is; what is opened is closed again if the handle was closed meanwhile."""
        if self._open_box is not None:
            return
        if self._closed:
            raise ClosedError(f"the {self._kind} is closed", hint="make a new one")
        self._open_box = box = yield from self._make_box()
        if self.closed:
            self._open_box = None
            box.close()
            raise ClosedError(f"the {self._kind} was closed while it was opened", hint="make a new one")

    def _take_box(self) -> Box | None:
        """Be closed from now on; return the box that is to be closed."""
        box, self._open_box = self._open_box, None
        self._closed = True
        self._when_closed()
        return box

    def _within(self, reply: Reply, timeout_s: float | None, what: str) -> Reply:
        """Return a reply that settles when ``reply`` has, or fails with OperationTimeout."""
        if reply.settled or timeout_s is None:
            return reply
        bounded = self._connection.session.bounded(
            int(timeout_s * 1e9), lambda: OperationTimeout(f"{what} took longer than {timeout_s:g} s")
        )
        reply.when_settled(bounded.resolve)
        return bounded

    def __repr__(self) -> str:
        return f"<{self._kind.capitalize()} {self.name!r} of {self.topic}>"


class ProducerHandle(Handle[Shell, ProducerOptions, Outbox]):
    """A producer of either client."""

    _kind = "producer"
    _close_failed = "the producer also failed to deliver"

    def _make_box(self) -> Plan[Outbox]:
        return open_producer(self._connection.session, self._options)

    def _flushing(self, timeout: float | None) -> Plan[None]:
        box = self._box
        yield self._within(box.emptied(), timeout, "flush")
        raise_first(box.take_failures())

    def _closing(self, timeout: float) -> Plan[None]:
        box = self._take_box()
        if box is None:
            return
        failure: DanubeError | None = None
        try:
            yield self._within(box.emptied(), timeout, "flush")
        except OperationTimeout as error:
            failure = box.undelivered(error)
        finally:
            failures = box.take_failures()
            replies = box.close()
        with suppress(OperationTimeout):  # the connection's end closes the handles too
            yield self._within(all_settled(replies), 1.0, "close")
        if failure is not None:
            raise failure
        raise_first(failures)


class ConsumerHandle(Handle[Shell, ConsumerOptions, Inbox[M, B]], Generic[Shell, M, B]):
    """A consumer of messages ``M`` and batches ``B``."""

    _kind = "consumer"
    _close_failed = "acknowledgements may be lost"
    _message_cls: Callable[..., M]
    _batch_cls: Callable[..., B]

    def _make_box(self) -> Plan[Inbox[M, B]]:
        session = self._connection.session
        return open_consumer(session, self._options, self._message_cls, self._batch_cls)

    def _flushing(self) -> Plan[None]:
        for reply in self._box.synced():  # noqa: UP028 -- a list takes no value that is sent
            yield reply

    def _closing(self) -> Plan[None]:
        inbox = self._take_box()
        if inbox is None:
            return
        replies = inbox.close()
        with suppress(OperationTimeout):  # no ack is at stake; the connection's end closes it at the broker
            yield self._within(all_settled(replies), CLOSE_WAIT_S, "closing the consumer")
        for reply in replies:  # an error means that acks may be lost
            if reply.error is not None:
                raise reply.error.with_traceback(None)

    @property
    def subscription(self) -> str:
        return self._options.subscription

    @property
    def active(self) -> bool:
        """False for a failover standby that was given no partition when it subscribed."""
        return any(partition.active for partition in self._box.partitions)

    @property
    def waits_for(self) -> DanubeError | None:
        """Return the broker's reason for sending no records now, or None.

        Examples: an object of the store is missing or damaged, the store does not answer, a disk fails.
        Delivery continues by itself after that.
        """
        return self._box.waits_for

    def __repr__(self) -> str:
        return f"<Consumer {self.name!r} of {self.topic} subscription={self.subscription!r}>"
