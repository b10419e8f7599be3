"""This host's broker in the cluster: registered with a lease, which its controller renews.

The lease is renewed RENEWALS times in its duration, together with a report of load if one is due.  After each
renewal the workers may serve until the lease's time, counted from before the request, less a margin for
clocks of different speed.  The leader counts from after the grant.  Time in which this host is suspended
counts here.  Time in which the leader is suspended does not count, so its lease ends no earlier.

Time without service after the death of a host, with a lease of 2 s and heartbeats of 150 ms:

    the lease ends              at most 2.0 s after its last renewal
    the leader looks            within 0.1 s
    three commands, one after the other: expire, release, assign    some 0.05 s
    the new owner is told, opens the log, clients find it           the rest of 3 s

If the dead host was the leader, another leader is elected after 0.75 .. 1.5 s.  The new leader continues with
the time that it has followed, so the lease ends no later; it first lets brokers renew for 0.5 s.  Together
that is at most 2.0 s if the first election succeeds.  A silent host costs the same time as a dead one,
because no process waits for its connections to end.

A broker whose lease had ended returns in its former mode, not drained.  So a whole cluster that was without
power, or a broker that was cut off from the leader for a moment, serves again without an operator.  The
balance decides when it gets more partitions.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Protocol

import msgspec

from danube.cluster.control.calls import (
    Failed,
    Propose,
    Proposed,
    decode_answer,
    decode_outcomes,
    encode,
    received_error,
)
from danube.core.cluster.brokers import COMMANDS, COMMANDS_PREFIX
from danube.core.cluster.commands import GrantLease, PutKey, RegisterBroker, RenewLease, RevokeLease
from danube.core.metadata.commands import Command, encode_command, join_commands
from danube.core.placement.load_report import LOCAL, SHARED, STORAGE_PREFIX, LoadReport, report_command
from danube.errors import CallerError, DanubeError, NotFound, ProtocolError
from danube.host import clock, telemetry

RENEWALS: Final = 4  # in the time of a lease
MARGIN: Final = 50  # a part of the lease
REPORT_NS: Final = 5_000_000_000
RETRY_S: Final = 0.1
REVOKE_S: Final = 1.0

_log = telemetry.events("cluster.registration")

Asked = Callable[[bytes], Awaitable[bytes]]


class Bound(Protocol):
    """Time until which the workers may serve; see danube.broker.processes.lease."""

    def begin(self, registration: int) -> None: ...
    def extend(self, end_ns: int) -> None: ...
    def end(self) -> None: ...


class Local(msgspec.Struct, frozen=True, kw_only=True):
    """This host's broker: addresses are ``host:port``, ``shared``: its records can be read by others."""

    broker_id: int
    native_address: str
    grpc_address: str = ""
    admin_address: str = ""
    metrics_address: str = ""
    version: str = ""
    shared: bool = False
    lease_ms: int = 2_000


class Proposals:
    """Commands of the controller's own, on the way that those of its host's workers go."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._origin = f"controller-{secrets.token_hex(8)}"
        self._sequence = 0

    async def propose(self, commands: Sequence[Command], timeout_s: float) -> int:
        """Have commands agreed on together; the version that holds them.  Raises the first error."""
        self._sequence += 1
        joined = join_commands([encode_command(command) for command in commands])
        request = Propose(self._origin, self._sequence, joined, int(timeout_s * 1000))
        answer = decode_answer(await self._asked(encode(request)))
        if isinstance(answer, Failed):
            raise received_error(answer.error)
        if not isinstance(answer, Proposed):
            raise ProtocolError("the member answered something else")
        for outcome in decode_outcomes(answer.outcomes):
            if isinstance(outcome, DanubeError):
                raise outcome
        return answer.version


class Registration:
    """Keeps the broker registered; ``run`` is its task."""

    def __init__(
        self,
        local: Local,
        proposals: Proposals,
        bound: Bound,
        report: Callable[[], LoadReport],
    ) -> None:
        self._local = local
        self._proposals = proposals
        self._bound = bound
        self._report = report
        self._lease_id = 0  # 0: not registered
        self._reported_ns = 0

    @property
    def registered(self) -> bool:
        """Return whether the cluster has taken this broker, whose lease may have ended since."""
        return self._lease_id != 0

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            asked_ns = clock.elapsed_ns()
            try:
                await self.keep(asked_ns)
                wait_s = self._local.lease_ms / 1000 / RENEWALS - (clock.elapsed_ns() - asked_ns) / 1e9
            except DanubeError as error:
                _log.lasting("not registered in the cluster", source="registration", why=error.what)
                wait_s = RETRY_S
            await asyncio.sleep(max(0.0, wait_s))

    async def keep(self, asked_ns: int) -> None:
        """Register or renew once; raises DanubeError if that is not known to be done."""
        if self._lease_id:
            try:
                await self._renew(asked_ns)
                return
            except NotFound:
                _log.warning("the broker's lease had ended", broker_id=self._local.broker_id)
                self._bound.end()
                self._lease_id = 0
        await self._register(asked_ns)

    async def leave(self) -> None:
        """The broker has stopped: others may take over at once."""
        self._bound.end()
        lease_id, self._lease_id = self._lease_id, 0
        if lease_id:
            try:
                await self._proposals.propose([RevokeLease(lease_id=lease_id)], REVOKE_S)
            except DanubeError as error:
                _log.info("the lease is left to end by itself", why=str(error))

    async def _register(self, asked_ns: int) -> None:
        """Register with a new lease id, so that the outcome of an earlier attempt does not matter."""
        local = self._local
        lease_id = secrets.randbits(62) + 1
        stored = SHARED if local.shared else LOCAL
        version = await self._proposals.propose(
            [
                PutKey(key=f"{STORAGE_PREFIX}{local.broker_id}", value=stored),
                GrantLease(lease_id=lease_id, ttl_ms=local.lease_ms),
                PutKey(
                    key=f"{COMMANDS_PREFIX}{local.broker_id}", value=b"%d" % COMMANDS, lease_id=lease_id
                ),
                RegisterBroker(
                    broker_id=local.broker_id, lease_id=lease_id, native_address=local.native_address,
                    grpc_address=local.grpc_address, admin_address=local.admin_address,
                    metrics_address=local.metrics_address, version=local.version,
                ),
            ],
            self._timeout_s,
        )  # fmt: skip
        self._lease_id = lease_id
        self._reported_ns = 0
        self._bound.begin(version)
        self._extend(asked_ns)
        _log.info("registered in the cluster", broker_id=local.broker_id, lease_ms=local.lease_ms)

    async def _renew(self, asked_ns: int) -> None:
        commands: list[Command] = [RenewLease(lease_id=self._lease_id)]
        if asked_ns - self._reported_ns >= REPORT_NS:
            commands.append(report_command(self._local.broker_id, self._lease_id, self._report()))
        try:
            await self._proposals.propose(commands, self._timeout_s)
        except NotFound:
            raise
        except CallerError as error:
            if len(commands) == 1:
                raise
            _log.limited("the load report is refused", source="report", why=str(error))
            await self._proposals.propose(commands[:1], self._timeout_s)
        if len(commands) > 1:
            self._reported_ns = asked_ns
        self._extend(asked_ns)

    @property
    def _timeout_s(self) -> float:
        return self._local.lease_ms / 1000

    def _extend(self, asked_ns: int) -> None:
        lease_ns = self._local.lease_ms * 1_000_000
        self._bound.extend(asked_ns + lease_ns - lease_ns // MARGIN)
