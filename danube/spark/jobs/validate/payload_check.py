"""Payloads against the schemas that their records name, and columns that have to be inflated to be read."""

from __future__ import annotations

import time
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from danube.core.batch.columns import BatchView
from danube.core.batch.format import COMPRESSION_MASK
from danube.core.metadata.machine import Metadata
from danube.errors import DanubeError, NotFound, SchemaNotFound
from danube.schema import kinds
from danube.schema.kinds import Validator
from danube.schema.model import Definition, SchemaType
from danube.spark.history.places import AnyPlace
from danube.spark.jobs.findings import Damage

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
            schema_id = view.schema_id
            check = (
                None if schema_id is None else validator_of(self._place, schema_id, view.schema_version or 0)
            )
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
        """Whether it removes its key, by what the topic's policy is now."""
        return view.removes_key(index) and compacted(self._place, self._topic_id)

    def _note(self, kind: Damage, detail: str, position: int, offset: int) -> None:
        if len(self.found) < FOUND_MAX:
            self.found.append((kind, detail, position, offset))


def validator_of(place: AnyPlace, schema_id: int, version: int) -> Validator | None:
    """The check of a schema's version (0: the latest); None where there is none, or nothing to check."""
    return _validator(place, schema_id, version, _age())


def compacted(place: AnyPlace, topic_id: int) -> bool:
    """Whether a topic keeps only the latest record of each key; one that is not known any more may have."""
    metadata = _metadata(place, _age())
    topic = None if metadata is None else metadata.topic_with_id(topic_id)
    return topic is None or topic.policy.compacts


def _age() -> int:
    """A number that changes when the metadata that was read is too old."""
    return int(time.monotonic() / _METADATA_AGE_S)


@lru_cache(maxsize=512)
def _validator(place: AnyPlace, schema_id: int, version: int, age: int) -> Validator | None:
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
