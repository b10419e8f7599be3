"""Heads of the controller's audit chain, which are in the metadata like those of the workers.

The controller is no worker and has no proposals through one, so it asks its own member, as for the lease.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from danube.broker.audit.audit import MEMBERS_CHAIN
from danube.broker.audit.heads import HeadKeeper, key_of
from danube.cluster.control.registration import Proposals
from danube.errors import DanubeError

if TYPE_CHECKING:
    from danube.broker.audit.audit import Audit
    from danube.cluster.control.node import Node
    from danube.core.cluster.commands import PutKey
    from danube.core.metadata.commands import Outcome

POLL_S: Final = 0.2
TIMEOUT_S: Final = 10.0


async def keep_heads(audit: Audit, directory: Path, node: Node, registered: Callable[[], bool]) -> None:
    """Keep the heads of this chain from now on, the present one first; runs until cancelled.

    It begins once the cluster has taken a proposal of this host, and the copy of the metadata has the heads
    of before.
    """
    while not (registered() and node.machine.visible):  # noqa: ASYNC110
        await asyncio.sleep(POLL_S)
    proposals = Proposals(node.asked)
    wanted: asyncio.Queue[tuple[PutKey, Callable[[Outcome], None]]] = asyncio.Queue()
    audit.heads = HeadKeeper(
        key_of(int(node.node_id), MEMBERS_CHAIN), directory, lambda: node.machine.state.cluster.keys,
        lambda command, answered: wanted.put_nowait((command, answered)),
    )  # fmt: skip
    audit.tell_head()
    while True:
        command, answered = await wanted.get()
        try:
            await proposals.propose([command], TIMEOUT_S)
        except DanubeError as error:
            answered(error)
        else:
            answered(None)
