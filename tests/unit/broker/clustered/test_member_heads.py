"""The heads of the controller's chain go into the metadata once that can be, and again after a refusal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from danube.broker.audit.audit import HEAD_US, MEMBERS_CHAIN, Audit
from danube.broker.audit.heads import decode_heads, key_of
from danube.broker.audit.writer import AuditWriter
from danube.broker.clustered import member_heads
from danube.cluster.control.calls import Failed, Propose, Proposed, decode_request, encode, sent_error
from danube.core.cluster.commands import PutKey
from danube.core.metadata.commands import decode_commands
from danube.core.metadata.machine import Metadata
from danube.errors import Unavailable

WITHIN_S = 30.0


class FakeNode:
    """Refuses what it is asked while ``refusing``; ``asked_for`` has the commands."""

    node_id = "7"

    def __init__(self) -> None:
        self.machine = SimpleNamespace(visible=False, state=Metadata())
        self.refusing = True
        self.asked_for: list[PutKey] = []

    async def asked(self, body: bytes) -> bytes:
        request = decode_request(body)
        assert isinstance(request, Propose)
        (command,) = decode_commands(request.commands)
        assert isinstance(command, PutKey)
        self.asked_for.append(command)
        if self.refusing:
            return encode(Failed(sent_error(Unavailable("there is no leader"))))
        return encode(Proposed(1, []))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not condition():
            await asyncio.sleep(0.001)


def test_heads_are_put_when_the_host_takes_part(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(member_heads, "POLL_S", 0.001)
    now_us = 1_000 * HEAD_US

    async def scenario() -> None:
        nonlocal now_us
        writer = AuditWriter(tmp_path, MEMBERS_CHAIN, lambda: now_us)
        writer.open()
        audit = Audit(writer, asyncio.get_running_loop(), now_us=lambda: now_us)
        node, ready = FakeNode(), False
        keeping = asyncio.create_task(
            member_heads.keep_heads(audit, tmp_path, cast(Any, node), lambda: ready)
        )
        ready = True
        await asyncio.sleep(0.01)
        assert audit.heads is None, "a copy that is behind does not have the heads of before"
        node.machine.visible = True
        await until(lambda: audit.heads is not None and audit.heads.refused)
        node.refusing = False
        now_us += HEAD_US
        audit.sweep()
        await until(lambda: len(node.asked_for) == 2 and not cast(Any, audit.heads).refused)
        keeping.cancel()
        first, second = node.asked_for
        assert first.key == second.key == key_of(7, MEMBERS_CHAIN)
        known = decode_heads(second.value)
        assert known is not None and known.directory == str(tmp_path.resolve())
        assert [head.place for head in known.heads] == [writer.place]
        audit.close()

    asyncio.run(scenario())
