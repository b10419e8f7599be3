"""One worker's audit: what the router tells, folded where it repeats, written at once, synced in groups."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from danube.broker.audit.lines import Entry, text_of
from danube.broker.audit.pages import page
from danube.broker.audit.writer import AuditWriter
from danube.core.protocol.native import Admin
from danube.core.security.operations import ADMIN, Row, value_in
from danube.core.security.principals import Identity
from danube.errors import DanubeError
from danube.host import clock, telemetry

if TYPE_CHECKING:
    from danube.broker.audit.heads import HeadKeeper
    from danube.config.loading import BrokerConfig
    from danube.core.security.arguments import AuditLines

SYNC_DELAY_S: Final = 0.05
FOLD_US: Final = 1_000_000
SOURCES_MAX: Final = 1_024
HEAD_LINES: Final = 1_000
HEAD_US: Final = 60_000_000
DENIED, ALLOWED, FAILED = "denied", "allowed", "failed"

_events = telemetry.events("audit")


UNTOLD: Final = frozenset(
    {"settle"}
)  # acks of gRPC clients: too many, and they tell nothing of who administers
_BROKERS: Final = ("internal", "forwarded")
LOGIN: Final = "login"
MEMBERS_CHAIN: Final = 999_999  # the controller's, in place of a worker's number
_NAMED_BY: Final = ("topic", "namespace", "subject", "name", "id", "broker_id")
_ADMINISTERS: Final = ("/danube_admin.", "/danube_schema.")
_CALLS_NAME: Final = (
    "topic", "topic_name", "base_name", "subject", "name", "broker_id", "node_id", "binding_id", "binding.id",
    "role.name",
)  # fmt: skip
_DETAILS: Final = (
    "compatibility", "kind", "partitions", "permissions", "principal", "principal_name", "principal_type",
    "reason", "resource_name", "role_names", "scope", "start", "subscription", "ttl_s", "value", "version",
)  # fmt: skip


class Audit:
    """Lines of one worker.  ``required``: what cannot be told must not be done."""

    def __init__(
        self,
        writer: AuditWriter,
        loop: asyncio.AbstractEventLoop,
        *,
        required: bool = False,
        now_us: Callable[[], int] = clock.wall_us,
    ) -> None:
        self._writer = writer
        self._loop = loop
        self._required = required
        self._now_us = now_us
        self._sync_due: asyncio.TimerHandle | None = None  # until its thread has ended
        self._folded: dict[tuple[str, str, str], tuple[Entry, int, int]] = {}  # first line, when, more since
        self._told_number = 0
        self._told_us = 0
        self.heads: HeadKeeper | None = None  # where they are kept as well

    def request(self, asker: Identity, request: Admin, connection_id: int) -> None:
        """Write a line about an operation before it is carried out, unless it changes nothing; as `tell`."""
        row = ADMIN.get(request.op)
        if (row is not None and not row.audited) or request.op in UNTOLD:
            return
        if request.forwarded and asker.how in _BROKERS:  # the one that was asked first has told it
            return
        args = request.args
        resource = request.partition or next((text_of(args[one]) for one in _NAMED_BY if args.get(one)), "")
        details: dict[str, Any] = {name: args[name] for name in _DETAILS if name in args}
        if request.forwarded:  # as who asks says; without authentication nobody can show that
            details["forwarded"] = True
        self.tell(asker, request.op, resource, source=f"connection {connection_id}", details=details)

    def call(self, asker: Identity, row: Row, request: Any, source: str, code: int = 0) -> None:
        """Write a line about a gRPC call that administers, under who makes it; as `tell`.

        What the broker then does for it has lines of its own, where it changes something by an operation.
        ``code``: of the error that refuses it; then every call is told.
        """
        if code or (row.name.startswith(_ADMINISTERS) and row.audited):
            named = next((str(found) for one in _CALLS_NAME if (found := value_in(request, one))), "")
            self.tell(asker, row.name, named, DENIED if code else ALLOWED, source=source, code=code)

    def refused(self, identity: Identity, source: str, code: int, why: str) -> None:
        """Write a line about a credential that was not accepted; `why` has nothing of the credential."""
        self.tell(identity, LOGIN, "", DENIED, source=source, code=code, details={"reason": why})

    def tell(
        self,
        asker: Identity,
        operation: str,
        resource: str,
        outcome: str = ALLOWED,
        *,
        source: str = "",
        code: int = 0,
        request_id: str = "",
        details: Mapping[str, Any] | None = None,
    ) -> None:
        """Write a line about a request.

        Raises StorageFailed or StorageFull if lines are required: then the request must not be carried out.
        Denials of one source and reason are one line a second.
        """
        entry = Entry(
            self._now_us(), operation, outcome, str(asker.principal), asker.how, source, resource, code,
            request_id, details or {},
        )  # fmt: skip
        if outcome == DENIED and self._fold(entry):
            return
        self._append(entry, required=self._required and outcome == ALLOWED)

    def _fold(self, entry: Entry) -> bool:
        """Count a denial that repeats; its sum is written when its second is over."""
        key = (entry.source or entry.principal, entry.operation, str(entry.code))
        known = self._folded.get(key)
        if known is not None:
            first, since_us, more = known
            self._folded[key] = (first, since_us, more + 1)
            return True
        if len(self._folded) >= SOURCES_MAX:
            self.sweep(everything=True)
        self._folded[key] = (entry, entry.time_us, 0)
        return False

    def read(self, asked: AuditLines, answer: Callable[[Any], None]) -> None:
        """Answer a page of this host's lines, or the error, once a thread has read them."""

        def read(_done: asyncio.Future[Any]) -> None:
            error = _done.exception()
            if error is not None and not isinstance(error, DanubeError):
                raise error
            answer(error or _done.result())

        self._loop.run_in_executor(None, page, self._writer.directory, asked).add_done_callback(read)

    def sweep(self, *, everything: bool = False) -> None:
        """Write the sums of denials whose second is over; the worker calls it each second."""
        now_us = self._now_us()
        for key, (entry, since_us, more) in list(self._folded.items()):
            if everything or now_us - since_us >= FOLD_US or now_us < since_us:
                del self._folded[key]
                if more:
                    details = {**entry.details, "more": more}
                    self._append(entry._replace(time_us=now_us, details=details), required=False)
        self._tell_head(now_us)

    def _append(self, entry: Entry, *, required: bool) -> None:
        try:
            self._writer.append(entry)
        except DanubeError as error:
            _events.limited(
                "an audit line was not written", level=logging.ERROR, source=entry.operation, why=str(error)
            )
            if required:
                raise
            return
        if self._sync_due is None:
            self._sync_due = self._loop.call_later(SYNC_DELAY_S, self._sync)

    def _sync(self) -> None:
        self._loop.run_in_executor(None, self._sync_in_thread).add_done_callback(self._synced)

    def _synced(self, _done: asyncio.Future[None]) -> None:
        """Sync what was written meanwhile.  A disk that hangs holds one thread, not one for each 50 ms."""
        self._sync_due = self._loop.call_later(SYNC_DELAY_S, self._sync) if self._writer.dirty else None

    def _sync_in_thread(self) -> None:
        try:
            self._writer.sync()
        except OSError as error:
            _events.limited("audit lines were not synced", level=logging.ERROR, source="sync", why=str(error))

    def _tell_head(self, now_us: int) -> None:
        """Name the head in the log and the metadata: a cut end or a chain made anew is found by it."""
        refused = self.heads is not None and self.heads.refused
        moved = self._writer.place.number - self._told_number or refused
        if moved and (moved >= HEAD_LINES or now_us - self._told_us >= HEAD_US or now_us < self._told_us):
            self.tell_head()

    def tell_head(self) -> None:
        """Name the head at once; if the metadata does not take it now, the next sweep tries again."""
        place, now_us = self._writer.place, self._now_us()
        if self.heads is not None and not self.heads.put(place, now_us):
            self._told_us = 0
            return
        self._told_number, self._told_us = place.number, now_us
        _events.info("audit head", seq=place.number, hash=place.hash)

    def close(self) -> None:
        if self._sync_due is not None:
            self._sync_due.cancel()
        self.sweep(everything=True)
        self._writer.close()


def open_audit(config: BrokerConfig, worker: int, loop: asyncio.AbstractEventLoop) -> Audit | None:
    """The audit of a worker; None where it is off.

    Raises StorageFailed or StorageFull if lines are required and cannot be written; else each line tries
    again.
    """
    settings = config.audit
    if settings.mode == "off":
        return None
    writer = AuditWriter(
        config.audit_directory, worker, clock.wall_us, file_bytes_max=settings.file_bytes,
        keep_us=settings.keep_ms * 1000,
    )  # fmt: skip
    try:
        writer.open()
    except DanubeError as error:
        if settings.mode == "required":
            raise
        _events.error("audit files cannot be written", why=str(error))
    return Audit(writer, loop, required=settings.mode == "required")
