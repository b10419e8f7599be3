"""The receiving half of ``danube consume``.

One task receives, prints and acknowledges; a second one looks now and then whether it is time to
leave.  So no record pays for a timer, and leaving never waits for a record that does not come.

All that is asked of the broker is for whoever may look up and consume the topic.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from danube.cli.records.printing import Printer
from danube.cli.terminal.addressing import Address, explaining, suggest_topic
from danube.cli.terminal.arguments import Position, start_argument
from danube.cli.terminal.output import note
from danube.cli.terminal.services import Services
from danube.core.partition.policy import READER
from danube.errors import (
    Damage,
    DanubeError,
    InvalidArgument,
    ObjectMissing,
    OperationTimeout,
    StoreDamaged,
    TopicNotFound,
)
from danube.host.clock import monotonic_ns
from danube.limits import PAGE_ENTRIES_MAX

LOOK_INTERVAL_S = 0.05
REQUEST_TIMEOUT_S = 30.0  # of a client by itself
OPENING_S = 5.0  # a busy broker may take so long to open a partition, whatever --timeout says
IDLE_NS = 200_000_000  # nothing arrived for so long: worth asking the broker where the end is


@dataclass(frozen=True, slots=True)
class Wish:
    """Arguments of the user; ``temporary``: the subscription goes with its consumer."""

    service_addr: Address
    topic: str
    consumer: str
    subscription: str
    temporary: bool
    mode: str
    start: Position | None
    filters: tuple[str, ...]
    count: int | None
    until_end: bool
    timeout_ms: int | None
    acknowledge: bool


class Receiver:
    """Receives until it has enough; ``remaining`` maps a partition to the end still to be reached."""

    def __init__(self, wish: Wish, printer: Printer, remaining: dict[int, int] | None) -> None:
        self.received = 0
        self.reason: DanubeError | None = None  # why nothing more came, as the broker said
        self.arrived_ns = monotonic_ns()
        self.remaining = remaining
        self._wish = wish
        self._print = printer.print

    def done(self) -> bool:
        enough = self._wish.count is not None and self.received >= self._wish.count
        return enough or self.remaining == {}

    async def run(self, consumer: Any) -> None:
        """Print each record, then acknowledge it, so that records which were not printed come again."""
        if self.done():
            return
        acknowledge = self._wish.acknowledge or self._wish.temporary
        async for message in consumer:
            self._print(message)
            if acknowledge:
                await message.ack()
            self.received += 1
            self.arrived_ns = monotonic_ns()
            if self.remaining is not None:
                self._passed(message.partition, message.offset + 1)
            if self.done():
                return

    def _passed(self, partition: int, offset_end: int) -> None:
        if self.remaining is not None and offset_end >= self.remaining.get(partition, offset_end + 1):
            del self.remaining[partition]

    def take_progress(self, left_from: Mapping[int, int]) -> None:
        """Pass over records that are not for this consumer: acked, filtered, used up, or at another one."""
        for partition, offset in left_from.items():
            self._passed(partition, offset)


async def receive_all(services: Services, wish: Wish, printer: Printer) -> None:
    """Receive as wished.

    OperationTimeout when ``count`` records, or those up to the end, did not come in time; StoreDamaged when
    the broker cannot read them, because an object is gone or stored bytes are damaged.
    """
    # No request, and so no opening of a partition, waits much longer for an answer than for records.
    bounds: dict[str, float] = {}
    if wish.timeout_ms is not None and wish.timeout_ms < REQUEST_TIMEOUT_S * 1000:
        bounds["timeout"] = max(wish.timeout_ms / 1000, OPENING_S)
    with explaining(wish.service_addr):
        async with services.connect_async(wish.service_addr.url, **bounds) as client:
            wish = _named(wish, client.principal)
            try:
                await _remark_on_start(client, wish)
                remaining = await _ends(client, wish) if wish.until_end else None
                receiver = Receiver(wish, printer, remaining)
                await _subscribe_and_run(client, wish, receiver)
            except TopicNotFound as error:
                found = await client.admin.list_topics(limit=PAGE_ENTRIES_MAX)
                suggest_topic(error, [one.topic for one in found])
                raise
    _check_enough(wish, receiver)


def _named(wish: Wish, principal: str) -> Wish:
    """Name a temporary subscription after who consumes: a namespace may allow no other names."""
    _, colon, name = principal.partition(":")
    return replace(wish, subscription=f"{name}-{wish.subscription}") if wish.temporary and colon else wish


def _check_enough(wish: Wish, receiver: Receiver) -> None:
    """Raise an error with the reason if the requested records did not arrive."""
    if wish.count is not None and receiver.received >= wish.count:
        return
    missing = f"received {receiver.received} records and not the end of {wish.topic}"
    if receiver.remaining:
        hint = "raise --timeout; another consumer of the subscription may hold the rest"
    elif wish.count is not None and not wish.until_end:
        missing = f"received {receiver.received} of {wish.count} records"
        hint = "raise --timeout, or begin earlier with --from earliest"
    elif receiver.reason is None:
        return
    else:
        missing, hint = f"received {receiver.received} records of {wish.topic}", ""
    reason = receiver.reason
    if reason is None:
        raise OperationTimeout(missing, why=f"nothing more arrived on {wish.topic} in time", hint=hint)
    lasting = isinstance(reason, Damage | ObjectMissing)
    kind = StoreDamaged if lasting else OperationTimeout
    raise kind(missing, why=f"the broker cannot read the next ones: {reason}", hint=reason.hint)


async def _subscribe_and_run(client: Any, wish: Wish, receiver: Receiver) -> None:
    options: dict[str, Any] = {
        "name": wish.consumer,
        "mode": wish.mode,
        "start": start_argument(wish.start or Position("latest")),
    }
    if wish.temporary:
        options |= {"failure": READER, "temporary": True}
    if wish.filters:
        options["filters"] = list(wish.filters)
    async with client.consumer(wish.topic, subscription=wish.subscription, **options) as consumer:
        receiver.arrived_ns = monotonic_ns()
        work = asyncio.ensure_future(receiver.run(consumer))
        try:
            await _watch(client, consumer, wish, receiver, work)
        finally:
            if not work.done():
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
        if not work.cancelled():
            work.result()


async def _watch(
    client: Any, consumer: Any, wish: Wish, receiver: Receiver, work: asyncio.Future[None]
) -> None:
    """Return when the work is done, or when it is time to leave it."""
    timeout_ns = wish.timeout_ms * 1_000_000 if wish.timeout_ms is not None else None
    asked_ns, told = 0, ""
    left_from: dict[int, int] = {}  # as the broker said when it was asked last
    while not work.done():
        await asyncio.wait({work}, timeout=LOOK_INTERVAL_S)
        now = monotonic_ns()
        idle_ns = now - receiver.arrived_ns
        reason = consumer.waits_for
        if reason is not None and str(reason) != told:
            told = str(reason)
            note(f"the broker cannot read the next records now: {told}")
        if timeout_ns is not None and idle_ns >= timeout_ns:
            receiver.reason = reason
            return
        if receiver.remaining and idle_ns >= IDLE_NS and now - asked_ns >= IDLE_NS:
            if receiver.arrived_ns < asked_ns:  # records under way then would have arrived
                receiver.take_progress(left_from)
                if receiver.done():
                    return
            asked_ns = now
            left_from = await _left_from(client, wish)


async def _remark_on_start(client: Any, wish: Wish) -> None:
    if wish.start is None or wish.temporary:
        return
    try:
        await client.admin.subscription_progress(wish.topic, wish.subscription)
    except DanubeError:
        return  # it is new, so --from holds; any other trouble shows when it is opened
    note(
        f"subscription {wish.subscription} exists, so --from is not used; "
        f"`danube subscriptions seek {wish.topic} {wish.subscription} --to ...` moves it"
    )


async def _ends(client: Any, wish: Wish) -> dict[int, int]:
    """The end of each partition that holds anything."""
    partitions = await client.admin.topic_ends(wish.topic)
    found = await client.admin.list_topics(prefix=wish.topic, limit=1)
    if any(one.topic == wish.topic and not one.reliable for one in found):
        raise InvalidArgument(
            f"--until-end cannot be used on {wish.topic}",
            why="a non-reliable topic stores nothing, so it has no end",
            hint="use --count or --timeout",
        )
    # Without a start the broker does not know yet which records the object store has, so there may be some.
    return {
        at: one["high_watermark"]
        for at, one in enumerate(partitions)
        if one["high_watermark"] > (one["start"] or 0)
    }


async def _left_from(client: Any, wish: Wish) -> dict[int, int]:
    """Return for each partition the offset below which nothing is left to deliver."""
    found = await client.admin.subscription_progress(wish.topic, wish.subscription)
    return {at: one.get("left_from", one["ack_floor"]) for at, one in enumerate(found)}
