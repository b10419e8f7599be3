"""Records that are sent one at a time and leave together, and the outcome of each."""

from __future__ import annotations

from danube.client.machine.ack import Ack
from danube.client.machine.publishing import Outgoing
from danube.client.machine.reply import Reply
from danube.client.records.records import Attributes
from danube.errors import DanubeError, InvalidArgument


class Group:
    """Records sent one at a time that leave together."""

    __slots__ = (
        "attributes",
        "flushed",
        "keys",
        "parts",
        "payloads",
        "reported",
        "rows",
        "size",
        "withdrawn",
    )

    def __init__(self) -> None:
        self.payloads: list[bytes] = []
        self.keys: list[bytes | None] | None = None
        self.attributes: list[Attributes | None] | None = None
        self.size = 0
        self.withdrawn: set[int] | None = None
        self.reported = False  # whether an error of the group was reported to the application
        self.flushed: Reply | None = None  # settles when the group has left; made when someone waits
        self.parts: list[Outgoing | DanubeError] = []
        self.rows: list[tuple[int, int]] | None = None  # (part, row in it) of each record; None: one part

    def outcome(self, index: int) -> Outgoing | DanubeError | None:
        """The batch that holds record ``index``, once the group has left."""
        if not self.parts:
            return None
        return self.parts[self.rows[index][0] if self.rows is not None else 0]

    def row(self, index: int) -> int:
        return self.rows[index][1] if self.rows is not None else index


class SendFuture:
    """The outcome of one send_nowait: ``done()``, ``result()``, ``exception()``."""

    __slots__ = ("_group", "_index")

    def __init__(self, group: Group, index: int) -> None:
        self._group = group
        self._index = index

    def done(self) -> bool:
        """Whether the broker has answered, or will not."""
        outcome = self._group.outcome(self._index)
        return outcome is not None and (not isinstance(outcome, Outgoing) or outcome.settled)

    def exception(self) -> BaseException | None:
        """The error, or None when the record was acknowledged; only when done()."""
        outcome = self._group.outcome(self._index)
        error = outcome
        if isinstance(outcome, Outgoing) and outcome.settled:
            error = outcome.error  # type: ignore[assignment]
        if error is None or isinstance(error, DanubeError):
            self._group.reported |= error is not None
            if outcome is not None:
                return error
        raise InvalidArgument("the send is not answered yet", hint="await it, or flush() the producer first")

    def _ack(self) -> Ack:
        """The record's own Ack, or the error raised; only when done()."""
        error = self.exception()
        if error is not None:
            raise error.with_traceback(None)
        outcome = self._group.outcome(self._index)
        batch: Ack = outcome.value  # type: ignore[union-attr]
        offset = batch.offset + self._group.row(self._index)
        return Ack(offset, batch.partition, batch.durability, batch.epoch, batch.duplicate, 1)

    def __repr__(self) -> str:
        return f"<SendFuture {'done' if self.done() else 'waiting'}>"
