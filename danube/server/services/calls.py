"""Arguments of a unary or streaming RPC: the call it belongs to, and the broker it acts on."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from danube.broker.processes.data_dir import broker_id
from danube.broker.processes.listeners import address_text
from danube.broker.routing.judging import Sight
from danube.cluster.control.door import ControllerClient
from danube.core.security.principals import ANONYMOUS, Identity
from danube.errors import DanubeError, NotSupported, OwnerMoved, TopicNotFound
from danube.host import clock
from danube.limits import PAGE_ENTRIES_MAX
from danube.server.messages.session import BrokerSession

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from danube.broker.worker.worker import Worker
    from danube.cluster.control.calls import Answer, Request
    from danube.config.loading import BrokerConfig
    from danube.core.metadata.commands import Command, Outcome
    from danube.core.metadata.machine import Metadata


OWNER_WAIT_S = 1.0
OWNER_POLL_S = 0.02
CONTROLLER_TIMEOUT_S = 11.0  # it gives up itself a moment before
_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]{1,253}):[0-9]{1,5}\Z")


_Message = TypeVar("_Message", bound="Message")


@dataclass(slots=True)
class Call:
    """One RPC: the address that was dialled, headers (names in lower case), both ends and the connection."""

    authority: str
    metadata: Mapping[str, str]
    peer: str
    local_address: str  # ``host:port`` of this end
    connection: Any
    identity: Identity = ANONYMOUS

    @property
    def dialled(self) -> str:
        """``host:port`` by which this client reaches this broker."""
        return self.authority if _AUTHORITY.match(self.authority) else self.local_address


class BrokerCalls:
    """The broker as servicers use it, on one worker.  Whatever asks raises DanubeErrors.

    ``ask`` has an operation carried out that any worker answers, ``ask_partition`` one at the owner of a
    partition, by its physical name.
    """

    def __init__(self, worker: Worker, session: BrokerSession) -> None:
        self._worker = worker
        self._session = session
        self.broker_id = broker_id(worker.data_dir, clustered=self.clustered)
        self.ask = session.ask
        self.ask_partition = session.ask_partition

    @property
    def config(self) -> BrokerConfig:
        return self._worker.config

    @property
    def draining(self) -> bool:
        return self._worker.shard.draining

    @property
    def ready(self) -> bool:
        """Whether clients are served: in a cluster only while this broker's lease holds."""
        lease = self._worker.context.lease
        return not self.draining and (lease is None or lease.end_ns > clock.elapsed_ns())

    def exchange(self, api_key: str, source: str) -> str:
        """Return a token for an API key; raises NotSupported where nobody is asked who they are."""
        if self._worker.admission is None:
            raise NotSupported("this broker asks nobody for a credential", hint="connect without an API key")
        return self._worker.admission.exchange(api_key, source)

    def sight(self, call: Call) -> Sight:
        """Return the caller's view of lists."""
        return Sight(self._worker.authority, call.identity, self.metadata)

    @property
    def metadata(self) -> Metadata:
        """Return the metadata as this worker has read it; ``refresh`` reads newly committed commands."""
        return self._worker.metadata.state

    def refresh(self) -> None:
        self._worker.refresh_metadata()

    async def propose(self, command: Command) -> Any:
        """Commit a metadata command and return its outcome; raises the error that refuses it."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def committed(outcome: Outcome) -> None:
            self._worker.metadata_changed()
            if future.done():
                return
            if isinstance(outcome, DanubeError):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

        self._worker.proposals.submit(command, committed)
        return await future

    @property
    def clustered(self) -> bool:
        return bool(self._worker.context.controller_address)

    async def ask_controller(self, request: Request) -> Answer:
        """In a thread of its own: the controller may wait for the other members."""
        client = ControllerClient(self._worker.context.controller_address)
        try:
            return await asyncio.to_thread(client.ask, request, CONTROLLER_TIMEOUT_S)
        finally:
            client.close()

    async def served_at(self, topic_id: int, partition: int) -> str:
        """URL of another broker that serves a partition; "" if this one does.

        If no broker does, as for a new topic, this waits a moment and then raises NotFound, after which
        clients look up again.
        """
        cluster = self._worker.cluster
        if cluster is None:
            return ""
        directory = cluster.directory
        deadline_s = asyncio.get_running_loop().time() + OWNER_WAIT_S
        while (elsewhere := directory.elsewhere(topic_id, partition)) is not None:
            owner = directory.owner(topic_id, partition)
            if isinstance(elsewhere, OwnerMoved) and owner is not None:
                return self.url("grpc", owner.grpc_address)
            if asyncio.get_running_loop().time() >= deadline_s:
                raise TopicNotFound(
                    "the topic is served by nobody now", why=elsewhere.why, hint="look it up again"
                )
            await asyncio.sleep(OWNER_POLL_S)
        return ""

    def serves(self, topic_id: int, partition: int) -> bool:
        """Whether this broker is where clients of a partition belong."""
        cluster = self._worker.cluster
        return cluster is None or cluster.directory.elsewhere(topic_id, partition) is None

    def url(self, door: str, address: str) -> str:
        """The URL of a port of this broker or another, which are configured alike; "" of no address.

        Clients take the scheme from it: the Rust client speaks TLS to https alone.
        """
        return address if not address or "://" in address else f"{self.config.scheme_of(door)}://{address}"

    def address_for(self, call: Call) -> str:
        """Return the data port's URL for this client: the advertised address, else the dialled one."""
        if self.config.grpc.advertised:
            return self.url("grpc", self.config.grpc.advertised)
        host, _, port = call.dialled.rpartition(":")
        if call.local_address.endswith(self._port("admin")):  # asked on the administration port
            port = self._port("grpc")[1:]
        return self.url("grpc", f"{host}:{port}")

    def _port(self, door: str) -> str:
        """``:6650``"""
        return ":" + address_text(self._worker.context.listeners[door]).rpartition(":")[2]

    @property
    def admin_address(self) -> str:
        return self.url("admin", address_text(self._worker.context.listeners["admin"]))


async def whole_list(ask: Callable[..., Awaitable[Any]], *asked: str, **args: Any) -> list[Any]:
    """All entries that an operation lists, by its pages: the messages of the services have none."""
    found: list[Any] = []
    after: str | None = ""
    while after is not None:
        answer = await ask(*asked, after=after, limit=PAGE_ENTRIES_MAX, **args)
        if isinstance(answer, list):  # of a broker that knows no pages
            return answer
        found += answer["entries"]
        after = answer["after"]
    return found


def filled(message: type[_Message], row: Mapping[str, Any], **others: Any) -> _Message:
    """Return a message with the fields of an operation's answer that have its names, and ``others``."""
    same = {name: row[name] for name in message.DESCRIPTOR.fields_by_name if name in row}
    return message(**{**same, **others})
