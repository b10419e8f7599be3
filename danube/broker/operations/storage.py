"""Operations on stored data: bytes that are not off this host yet, by topic."""

from __future__ import annotations

from collections import deque
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from danube.errors import DanubeError
from danube.ids import NAMES_END
from danube.limits import PAGE_ENTRIES_MAX

if TYPE_CHECKING:
    from danube.broker.operations.context import Answer, Operation, Operations
    from danube.core.metadata.commands import TopicRecord
    from danube.core.security import arguments as of

QUESTIONS_AT_ONCE: Final = 64


class _Gathering:
    """Asks the owners of all partitions, some at a time, and answers the sums by topic."""

    def __init__(
        self, operations: Operations, records: list[TopicRecord], after: str | None, answer: Answer
    ) -> None:
        self._operations = operations
        self._after = after
        self._answer = answer
        self._waiting = deque((record, name) for record in records for name in record.physical_names)
        self._rows = {record.topic: _row(record.topic) for record in records}
        self._open = 0
        self._asking = False

    def go_on(self) -> None:
        """Ask as many as may be open; answer when all have answered."""
        ask = self._operations.ask_owner
        self._asking = True  # an owner on this worker answers before ask() returns
        while self._waiting and self._open < QUESTIONS_AT_ONCE:
            record, name = self._waiting.popleft()
            self._open += 1
            try:
                ask(name, "storage", {}, partial(self._take, record.topic))
            except DanubeError as error:
                self._open -= 1
                self._add(record.topic, error)
        self._asking = False
        if not self._open:
            rows = list(self._rows.values())
            store = self._operations.store
            self._answer(
                {
                    "tiered": store is not None,
                    "store": store() if store is not None else None,
                    "pending_bytes": sum(row["pending_bytes"] for row in rows),
                    "pending_seconds": max((row["pending_seconds"] for row in rows), default=0.0),
                    "unconfirmed": sum(row["unconfirmed"] for row in rows),
                    "errors": sum(row["errors"] for row in rows),
                    "topics": rows,
                    **({} if self._after is None else {"after": self._after}),
                }
            )

    def _take(self, topic: str, value: Any) -> None:
        self._open -= 1
        self._add(topic, value)
        if not self._asking:
            self.go_on()

    def _add(self, topic: str, value: Any) -> None:
        row = self._rows[topic]
        row["partitions"] += 1
        if isinstance(value, DanubeError):
            row["errors"] += 1
            row["error"] = row["error"] or str(value)
            return
        row["unconfirmed"] += value.get("known") is False
        for name in ("local_bytes", "uploaded_bytes", "objects", "pending_bytes"):
            row[name] += value.get(name, 0)
        row["pending_seconds"] = max(row["pending_seconds"], value.get("pending_seconds", 0.0))
        for why in (value.get("upload_error"), value.get("read_error")):
            if why:
                row["errors"] += 1
                row["error"] = row["error"] or why


def _row(topic: str) -> dict[str, Any]:
    return {
        "topic": topic, "partitions": 0, "local_bytes": 0, "uploaded_bytes": 0, "objects": 0,
        "pending_bytes": 0, "pending_seconds": 0.0, "unconfirmed": 0, "errors": 0, "error": "",
    }  # fmt: skip


def _storage_status(operations: Operations, args: of.StorageRows, answer: Answer) -> None:
    operations.refresh()
    topic = args.topic
    if topic:
        operations.topic(topic)  # raises where there is none
    found = operations.state.topics_by_name(
        [(topic, f"{topic}\0" if topic else NAMES_END)], args.prefix, args.after
    )
    limit = min(args.limit, PAGE_ENTRIES_MAX)
    records = list(islice((one for one in found if one.policy.reliable), limit + 1 if limit else None))
    page = records[: limit or None]
    after = page[-1].topic if len(page) < len(records) else None
    _Gathering(operations, page, after, answer).go_on()


TABLE: dict[str, Operation] = {"storage_status": _storage_status}
