"""Waiting until what was sealed is in the object store."""

from __future__ import annotations

from time import sleep
from typing import Any, Final

from danube.cli.terminal.output import plain
from danube.errors import NotSupported, OperationTimeout
from danube.host.clock import monotonic_ns

_POLL_S: Final = 0.2


def wait_uploaded(client: Any, topic: str, ends: list[int], timeout_ms: int) -> None:
    """Ask until every partition is uploaded up to its place in ``ends``.

    Raises OperationTimeout, with the reason where there is one, and NotSupported where nothing is tiered.
    """
    deadline_ns = monotonic_ns() + timeout_ms * 1_000_000
    while True:
        partitions = plain(client.admin.describe_topic(topic))["partitions"]
        late = [one for one, end in zip(partitions, ends, strict=True) if one["uploaded_end"] < end]
        if not late:
            return
        status = client.admin.storage_status(topic)
        if not status["tiered"]:
            raise NotSupported("storage is local: nothing is uploaded", hint="set storage.url")
        if monotonic_ns() >= deadline_ns:
            why = next((row["error"] for row in status["topics"] if row["error"]), "")
            raise OperationTimeout(f"{len(late)} partitions of {topic} are not uploaded yet", why=why)
        sleep(_POLL_S)
