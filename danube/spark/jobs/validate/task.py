"""A validation task: reads and checks some segments of one place, and returns the results as bytes.

It also checks payloads against the schemas that their records name, and inflates compressed columns.
"""

from __future__ import annotations

import time
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from danube.config.sections import split_store_url
from danube.core import kernels
from danube.core.batch.columns import BatchView
from danube.core.batch.format import COMPRESSION_MASK
from danube.core.metadata.machine import Metadata
from danube.errors import DanubeError, NotFound, ObjectMissing, SchemaNotFound
from danube.schema import kinds
from danube.schema.kinds import Validator
from danube.schema.model import Definition, SchemaType
from danube.spark.history.places import AnyPlace, StorePlace
from danube.spark.jobs.findings import Expected, SegmentFacts
from danube.spark.jobs.validate.segment import validate_segment
from danube.wal.verify.bytes import Damage, FileSource, Source
from danube.wal.verify.objects import ObjectSource

FOUND_MAX: Final = 1_000  # in one segment
RECORDS_PER_BATCH_MAX: Final = 10  # named of one batch
_METADATA_AGE_S: Final = 30.0


class PayloadCheck:
    """Looks into the batches of one segment of a topic.  ``found``: kind, detail, byte and offset."""

    def __init__(self, place: AnyPlace, topic_id: int) -> None:
        self._place = place
        self._topic_id = topic_id
        self.found: list[tuple[Damage, str, int, int]] = []

    def on_batch(self, data: NDArray[np.uint8], place: int, size: int, position: int) -> None:
        view = BatchView(data[place : place + size].data)
        try:
            if view.header.flags & COMPRESSION_MASK:
                view.check()
            if view.schema_id is not None:
                check = _validator(self._place, view.schema_id, view.schema_version or 0, _age())
                if check is not None:
                    self._check_payloads(view, check, position)
        except DanubeError as error:
            self._note(Damage.BATCH_COMPRESSION, str(error), position, view.header.base_offset)

    def _check_payloads(self, view: BatchView, check: Validator, position: int) -> None:
        named = 0
        for index, (offset, payload) in enumerate(zip(view.offsets.tolist(), view.payloads(), strict=True)):
            problem = check(payload)
            if problem is not None and not self._tombstone(view, index):
                self._note(Damage.PAYLOAD_INVALID, problem, position, offset)
                named += 1
                if named == RECORDS_PER_BATCH_MAX:
                    return

    def _tombstone(self, view: BatchView, index: int) -> bool:
        """Whether the record removes its key, by the topic's current policy."""
        return view.removes_key(index) and _compacted(self._place, self._topic_id)

    def _note(self, kind: Damage, detail: str, position: int, offset: int) -> None:
        if len(self.found) < FOUND_MAX:
            self.found.append((kind, detail, position, offset))


def _compacted(place: AnyPlace, topic_id: int) -> bool:
    """Whether a topic keeps only the latest record of each key; one that is not known any more may have."""
    metadata = _metadata(place, _age())
    topic = None if metadata is None else metadata.topic_with_id(topic_id)
    return topic is None or topic.policy.compacts


def _age() -> int:
    """A number that changes when the metadata that was read is too old."""
    return int(time.monotonic() / _METADATA_AGE_S)


@lru_cache(maxsize=512)
def _validator(place: AnyPlace, schema_id: int, version: int, age: int) -> Validator | None:
    """The check of a schema's version (0: the latest); None if there is none, or nothing to check."""
    metadata = _metadata(place, age)
    subject = metadata.registry.with_id(schema_id) if metadata is not None else None
    if subject is None:
        return None
    try:
        found = subject.version(version)
    except SchemaNotFound:
        return None
    if found.schema_type == SchemaType.BYTES:
        return None
    return kinds.validator(
        Definition(
            schema_type=SchemaType(found.schema_type), text=found.definition, fingerprint=found.fingerprint,
            compiled=found.compiled,
        )
    )  # fmt: skip


@lru_cache(maxsize=4)
def _metadata(place: AnyPlace, age: int) -> Metadata | None:
    try:
        return place.metadata()
    except NotFound:
        return None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[SegmentFacts])


class ValidateTask(NamedTuple):
    """Segments of one place; ``payloads``: inflate all columns and compare payloads with their schemas."""

    place: AnyPlace
    segments: tuple[Expected, ...]
    payloads: bool


def validate(task: ValidateTask) -> bytes:
    """Facts of the task's segments, encoded, in its order."""
    kernels.load()
    return _encoder.encode([_validate(task, one) for one in task.segments])


def decode(data: bytes) -> list[SegmentFacts]:
    return _decoder.decode(data)


def _validate(task: ValidateTask, expected: Expected) -> SegmentFacts:
    where, size = expected.where, expected.size
    facts = SegmentFacts(expected.base_offset, size, expected.base_offset, where=where)
    try:
        path = local_path(task.place, where)
        if path is None and isinstance(task.place, StorePlace):
            return _judge(task, ObjectSource(task.place.store(), where, size), expected)
        with FileSource(path or Path(where)) as source:
            return _judge(task, source, expected)
    except (FileNotFoundError, ObjectMissing):
        facts.gone = True  # deleted since it was planned: the planner knows whether it may be
    except OSError as error:
        facts.note(Damage.UNREADABLE, error.strerror or str(error))
    except DanubeError as error:
        facts.note(Damage.UNREADABLE, str(error))
    return facts


def local_path(place: AnyPlace, name: str) -> Path | None:
    """The file that an object of a directory store is: read without the store, it costs a third."""
    if not isinstance(place, StorePlace):
        return Path(name)
    parts = split_store_url(place.settings.url)
    return Path(parts.path) / name if parts.scheme == "file" else None


def _judge(task: ValidateTask, source: Source, expected: Expected) -> SegmentFacts:
    if not task.payloads:
        return validate_segment(source, expected)
    check = PayloadCheck(task.place, expected.topic_id)
    facts = validate_segment(source, expected, check.on_batch)
    for kind, detail, byte, offset in check.found:
        facts.note(kind, detail, byte, offset)
    return facts
