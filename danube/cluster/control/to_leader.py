"""Sends this host's requests to the leader, and again to the next leader, until an answer or the deadline."""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec

from danube.cluster.control.calls import (
    Answer,
    Barrier,
    Change,
    Failed,
    Join,
    Propose,
    Proposed,
    Reached,
    Request,
    decode_answer,
    encode,
    received_error,
)
from danube.cluster.control.leadership import Leadership
from danube.cluster.links.transport import Transport
from danube.cluster.log.applied_log import AppliedLog
from danube.cluster.raft.engine import Engine
from danube.errors import (
    ConnectionFailed,
    NotLeader,
    NotSupported,
    OperationTimeout,
    OutcomeUnknown,
    Unavailable,
)
from danube.limits import KIB

TRY_S: Final = 2.0  # then the leader may be another one
TRY_BYTES_PER_S: Final = 100 * KIB  # a large request is on its way that long: some 1 Mbit/s
RETRY_S: Final = 0.05
_RETRIED: Final = (NotLeader, OutcomeUnknown, ConnectionFailed, OperationTimeout)


class ToLeader:
    """Requests of this host on their way; all on the loop of the member."""

    def __init__(
        self, engine: Engine, machine: AppliedLog, leadership: Leadership, transport: Transport
    ) -> None:
        self._engine = engine
        self._machine = machine
        self._leadership = leadership
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._leader_changed = asyncio.Event()
        self._behind: list[tuple[int, asyncio.Future[None]]] = []  # futures by the version that they wait for

    def leader_changed(self) -> None:
        """Wake all requests that wait for a leader."""
        self._leader_changed.set()
        self._leader_changed = asyncio.Event()

    def applied(self) -> None:
        """The machine here has come further, or its copy can be seen."""
        if not self._behind or not self._machine.visible:
            return
        version = self._machine.version
        waiting, self._behind = self._behind, []
        for wanted, reached in waiting:
            if reached.done():
                continue
            if wanted <= version:
                reached.set_result(None)
            else:
                self._behind.append((wanted, reached))

    async def add(self, join: Join, timeout_s: float) -> Answer:
        """Have a node added as a learner."""
        return await self._at_leader(Change("add", join.node_id, join.address), timeout_s)

    async def ask(self, request: Request) -> Answer:
        """Return the leader's answer, when this member has applied the entry that it refers to.

        Raises the leader's refusal, Unavailable if there was no leader in time, and OutcomeUnknown if the
        request may have been executed.
        """
        if not isinstance(request, Propose | Barrier | Change):
            raise NotSupported("a controller is not asked this by its host")
        timeout_s = min(max(request.timeout_ms, 1), 600_000) / 1000
        deadline_s = self._loop.time() + timeout_s
        answer = await self._at_leader(request, timeout_s)
        if isinstance(answer, Proposed | Reached):
            await self._reach(answer.version, deadline_s)
        return answer

    async def _reach(self, version: int, deadline_s: float) -> None:
        """Wait until this host's copy holds all entries up to ``version``."""
        if self._machine.version >= version and self._machine.visible:
            return
        reached: asyncio.Future[None] = self._loop.create_future()
        self._behind.append((version, reached))
        try:
            async with asyncio.timeout_at(deadline_s):
                await reached
        except TimeoutError:
            raise OutcomeUnknown(
                "this member has not applied it in time",
                why=f"it has version {self._machine.version}, and {version} was agreed on",
            ) from None

    async def _at_leader(self, request: Propose | Barrier | Change, timeout_s: float) -> Answer:
        deadline_s = self._loop.time() + timeout_s
        sent = False
        why = "no leader is known"
        while (left_s := deadline_s - self._loop.time()) > 0:
            changed = self._leader_changed
            try:
                answer = await self._try(request, left_s)
                if answer is not None:
                    return answer
            except _RETRIED as error:
                sent = sent or not isinstance(error, NotLeader)
                why = str(error)
                if sent and isinstance(request, Change):
                    request = msgspec.structs.replace(request, repeated=True)
            left_s = deadline_s - self._loop.time()
            try:
                async with asyncio.timeout(min(RETRY_S, max(0.0, left_s))):
                    await changed.wait()
            except TimeoutError:
                pass  # look again
        if sent:
            raise OutcomeUnknown("it was not answered in time", why=why)
        raise Unavailable(
            "the cluster has no leader", why=why, hint="most of its voters, or its etcd, must be up"
        )

    async def _try(self, request: Propose | Barrier | Change, left_s: float) -> Answer | None:
        """One leader's answer; None while none is known."""
        leader_id = self._engine.status.leader_id
        if self._leadership.leading:
            try:
                async with asyncio.timeout(left_s):
                    return await self._leadership.answer(request)
            except TimeoutError:
                raise OutcomeUnknown("no majority answered in time") from None
        if not leader_id or leader_id == self._transport.identity.node_id:
            return None
        body = encode(request)
        try_s = TRY_S + len(body) / TRY_BYTES_PER_S
        answer = decode_answer(await self._call(leader_id, body, min(left_s, try_s)))
        if isinstance(answer, Failed):
            raise received_error(answer.error)
        return answer

    async def _call(self, leader_id: str, body: bytes, timeout_s: float) -> bytes:
        """Ask a leader as long as it is one; raises OutcomeUnknown when it changes meanwhile."""
        call = self._loop.create_task(self._transport.call(leader_id, body, timeout_s))
        watch = self._loop.create_task(self._leader_changed.wait())
        try:
            await asyncio.wait((call, watch), return_when=asyncio.FIRST_COMPLETED)
            if call.done():
                return call.result()
            raise OutcomeUnknown("the leader changed before it answered")
        finally:
            call.cancel()
            watch.cancel()
