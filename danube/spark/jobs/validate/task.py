"""Validation where it runs: some segments of one place, read and judged, and what they showed as bytes."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec

from danube.config.sections import split_store_url
from danube.errors import DanubeError, ObjectMissing
from danube.spark.history.places import AnyPlace, StorePlace
from danube.spark.jobs.findings import Damage
from danube.spark.jobs.segment_facts import Expected, SegmentFacts
from danube.spark.jobs.validate.bytes import FileBytes, ObjectBytes, Source
from danube.spark.jobs.validate.payload_check import PayloadCheck
from danube.spark.jobs.validate.rows import warm_up
from danube.spark.jobs.validate.segment import validate_segment

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[SegmentFacts])


class SegmentWork(NamedTuple):
    """One segment to read: the path of a file, or the key and size of an object."""

    expected: Expected
    name: str
    size: int


class ValidateTask(NamedTuple):
    """Segments of one place; ``payloads``: inflate all columns and compare payloads with their schemas."""

    place: AnyPlace
    segments: tuple[SegmentWork, ...]
    payloads: bool


def validate(task: ValidateTask) -> bytes:
    """Facts of the task's segments, encoded, in its order."""
    warm_up()
    return _encoder.encode([_validate(task, one) for one in task.segments])


def decode(data: bytes) -> list[SegmentFacts]:
    return _decoder.decode(data)


def _validate(task: ValidateTask, one: SegmentWork) -> SegmentFacts:
    expected = one.expected
    facts = SegmentFacts(expected.where, expected.base_offset, expected.base_offset, one.size)
    try:
        path = local_path(task.place, one.name)
        if path is None and isinstance(task.place, StorePlace):
            return _judge(task, ObjectBytes(task.place.store(), one.name, one.size), expected)
        with FileBytes(path or Path(one.name)) as source:
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
