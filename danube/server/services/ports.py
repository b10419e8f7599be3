"""Ports of a servicer: the call that it answers, and the broker that it asks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from danube.cluster.control.calls import Answer, Request
from danube.config.loading import BrokerConfig
from danube.core.metadata.machine import Metadata


class Call(Protocol):
    """One RPC: the caller, the address it dialled, and headers (names in lower case)."""

    @property
    def authority(self) -> str: ...

    @property
    def metadata(self) -> Mapping[str, str]: ...

    @property
    def peer(self) -> str: ...

    @property
    def dialled(self) -> str:
        """``host:port`` by which this caller reaches the broker."""

    @property
    def local_address(self) -> str:
        """``host:port`` of this end of the connection."""


class BrokerCalls(Protocol):
    """The broker behind the door.  Both ``ask`` raise DanubeErrors."""

    @property
    def metadata(self) -> Metadata:
        """Metadata as far as this worker has read it; see refresh."""

    def refresh(self) -> None:
        """Read what other workers committed since."""

    @property
    def config(self) -> BrokerConfig: ...

    @property
    def broker_id(self) -> int:
        """1 .. 2**63 - 1."""

    @property
    def admin_address(self) -> str:
        """``host:port`` or URL of the admin port."""

    @property
    def metrics_address(self) -> str:
        """URL of the metrics; "" if they are off."""

    @property
    def workers(self) -> int: ...

    async def ask(self, op: str, **args: Any) -> Any:
        """An operation that any worker answers."""

    async def ask_partition(self, partition: str, op: str, **args: Any) -> Any:
        """An operation at the owner of a partition, by its physical name."""

    @property
    def clustered(self) -> bool:
        """Whether this host takes part in a cluster."""

    async def ask_controller(self, request: Request) -> Answer:
        """Ask this host's controller; only where it is clustered.  Raises DanubeErrors."""

    async def served_at(self, topic_id: int, partition: int) -> str:
        """``http://host:port`` of another broker that serves a partition; "" if this one does."""

    def serves(self, topic_id: int, partition: int) -> bool:
        """Whether this broker is where clients of a partition belong."""

    def address_for(self, call: Call) -> str:
        """``http://host:port`` of the data port, as this caller reaches it."""
