"""The sending half of ``danube produce``.

A line on the terminal that says how far long work is; silent anywhere else.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any, BinaryIO

from danube.cli.records.sources import Record, lines_of, record_of_json
from danube.cli.terminal.addressing import Address, explaining
from danube.cli.terminal.output import json_line, line
from danube.cli.terminal.services import Services
from danube.cli.topics.schema_source import SchemaChoice
from danube.errors import DanubeError, PartialFailure

INTERVAL_S = 0.2
QUIET_S = 1.0  # short work shows nothing


class Progress:
    """Call ``update`` as often as you like; it writes a few times a second, and only to a terminal."""

    def __init__(self, shown: bool, what: str, total: int = 0) -> None:
        self._shown = shown
        self._what = what
        self._total = total
        self._began = self._last = time.monotonic()
        self._width = 0

    def update(self, done: int) -> None:
        if not self._shown:
            return
        now = time.monotonic()
        if now - self._last < INTERVAL_S or now - self._began < QUIET_S:
            return
        self._last = now
        of = f" of {self._total:,}" if self._total else ""
        rate = done / (now - self._began)
        self._write(f"{done:,}{of} {self._what}, {rate:,.0f}/s")

    def close(self) -> None:
        """Remove the line."""
        if self._width:
            self._write("")
            sys.stderr.write("\r")
            sys.stderr.flush()

    def _write(self, text: str) -> None:
        sys.stderr.write("\r" + text.ljust(self._width))
        sys.stderr.flush()
        self._width = len(text)


@dataclass(frozen=True, slots=True)
class Target:
    """Topic of the records, with the properties that it must have."""

    service_addr: Address
    topic: str
    producer_name: str
    partitions: int
    reliable: bool | None
    durability: str
    schema: SchemaChoice | None = None


class Sent:
    """Acknowledged records so far."""

    def __init__(self, topic: str, as_json: bool) -> None:
        self.records = 0
        self.bytes = 0
        self.durability = ""
        self.last: dict[int, int] = {}  # offset of the last record by partition
        self._topic = topic
        self._as_json = as_json
        self._began = time.monotonic()

    def acknowledged(self, ack: Any, record_count: int, size_bytes: int) -> None:
        self.records += record_count
        self.bytes += size_bytes
        self.durability = str(ack.durability)
        self.last[ack.partition] = ack.offset + record_count - 1
        if self._as_json:
            entry = {"topic": self._topic, "partition": ack.partition, "offset": ack.offset}
            json_line(entry | {"record_count": record_count, "durability": self.durability})

    def summary(self) -> str:
        seconds = time.monotonic() - self._began
        if self.records == 1:
            ((partition, offset),) = self.last.items()
            return (
                f"sent 1 record to {self._topic}: partition {partition} offset {offset} ({self.durability})"
            )
        level = f" ({self.durability})" if self.durability else ""
        return (
            f"sent {self.records:,} records, {self.bytes:,} bytes to {self._topic} in {seconds:.2f} s{level}"
        )


async def send_all(
    services: Services,
    target: Target,
    template: Record,
    stream: BinaryIO | None,
    *,
    ndjson: bool,
    count: int,
    interval: int,
    batch: int,
    output: str,
) -> None:
    """Send all records and print acknowledged ones; raises PartialFailure if it stopped in between."""
    sent = Sent(target.topic, output == "json")
    progress = Progress(services.shows_progress(), "records sent", 0 if stream else count)
    groups = (
        _grouped(_records(stream, template, ndjson), batch, interval > 0)
        if stream
        else _copies(template, count, 1 if interval else batch)
    )
    with explaining(target.service_addr):
        async with services.connect_async(target.service_addr.url) as client:
            options: dict[str, Any] = {"reliable": target.reliable, "partitions": target.partitions}
            if target.durability:
                options["durability"] = target.durability
            if target.schema is not None:
                options["schema"] = await target.schema.resolve(client)
            async with client.producer(target.topic, name=target.producer_name, **options) as producer:
                await _send_groups(producer, groups, interval, sent, progress)
    progress.close()
    if output != "json":
        line(sent.summary())


async def _send_groups(
    producer: Any, groups: AsyncIterator[list[Record]], interval_ms: int, sent: Sent, progress: Progress
) -> None:
    first = True
    async for records in groups:
        if interval_ms and not first:
            await asyncio.sleep(interval_ms / 1000)
        first = False
        try:
            await _send_group(producer, records, sent)
        except DanubeError as error:
            progress.close()
            if not sent.records:
                raise
            raise PartialFailure(
                f"sent {sent.records:,} records, then failed: {error.what}",
                why=error.why,
                hint=error.hint or "send the rest again; what was acknowledged is stored",
                sent=sent.records,
            ) from error
        progress.update(sent.records)


async def _send_group(producer: Any, records: list[Record], sent: Sent) -> None:
    """Send records and wait for their acknowledgements."""
    if len(records) == 1:
        one = records[0]
        ack = await producer.send(one.payload, key=one.key, attributes=one.attributes)
        sent.acknowledged(ack, 1, len(one.payload))
    else:
        keys = [one.key for one in records]
        attributes = [one.attributes for one in records]
        acks: list[Any] = []
        try:
            acks = await producer.send_many(
                [one.payload for one in records],
                keys=keys if any(key is not None for key in keys) else None,
                attributes=attributes if any(attributes) else None,
            )
        except DanubeError as error:
            acks = error.facts.get("acks", [])
            raise
        finally:
            size_bytes = sum(len(one.payload) for one in records)
            for ack in acks:
                share = size_bytes * ack.record_count // len(records)
                sent.acknowledged(ack, ack.record_count, share)


async def _copies(template: Record, count: int, size: int) -> AsyncIterator[list[Record]]:
    whole = [template] * min(size, count)
    for _ in range(count // len(whole)):
        yield whole
    if count % len(whole):
        yield [template] * (count % len(whole))


async def _records(stream: BinaryIO, template: Record, ndjson: bool) -> AsyncIterator[list[Record]]:
    number = 0
    async for lines in lines_of(stream):
        if ndjson:
            numbered = enumerate(lines, number + 1)
            found = [_filled(record_of_json(one, at), template) for at, one in numbered if one.strip()]
        else:
            found = [Record(one, template.key, template.attributes) for one in lines]
        number += len(lines)
        yield found


def _filled(record: Record, template: Record) -> Record:
    """Return the record, with the command line's key and attributes if it has none of its own."""
    attributes = {**(template.attributes or {}), **(record.attributes or {})}
    return Record(record.payload, record.key if record.key is not None else template.key, attributes or None)


async def _grouped(
    arrived: AsyncIterator[list[Record]], size: int, singly: bool
) -> AsyncIterator[list[Record]]:
    """Group records that arrived together, at most ``size`` each: a slow input is sent as it comes."""
    async for records in arrived:
        rest: Iterable[Record] = iter(records)
        while group := list(islice(rest, 1 if singly else size)):
            yield group
