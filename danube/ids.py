"""Identifiers and names: distinct types over int and str, and the one grammar for names.

An *offset* counts records and a *position* counts bytes; adding the two is a type error on purpose.
A *partition* is addressed by its physical name: ``/ns/topic`` for a topic without partitions and
``/ns/topic-part-3`` for partition 3 of a partitioned one.  Names never become file names; the
``topic_id`` does (see :mod:`danube.wal`).
"""

from __future__ import annotations

import re
from typing import NewType

from danube.errors import InvalidName

Offset = NewType("Offset", int)
Position = NewType("Position", int)
Sequence = NewType("Sequence", int)
Epoch = NewType("Epoch", int)
ProducerId = NewType("ProducerId", int)
ConsumerId = NewType("ConsumerId", int)
TopicId = NewType("TopicId", int)

NAME_PART_MAX = 200
LABEL_BYTES_MAX = 256
NAMES_END = "\x7f"  # behind every name, and put behind one it is behind all that begin with that

_PART = r"(?!\.{1,2}(?:/|\Z))[A-Za-z0-9._-]{1,200}"  # a part of a path must not mean another folder
_TOPIC = re.compile(rf"/({_PART})/({_PART})\Z")
_NAMESPACE = re.compile(rf"{_PART}\Z")
_PARTITION_SUFFIX = re.compile(r"(.+)-part-(0|[1-9][0-9]{0,4})\Z")


def check_topic_name(name: str) -> tuple[str, str]:
    """Return ``(namespace, local name)`` of a topic or partition name, or raise InvalidName."""
    match = _TOPIC.match(name)
    if match is None:
        raise InvalidName(
            f"topic name {name[:80]!r} is not valid",
            why="a topic is /namespace/name; each part is 1-200 letters, digits, '.', '_' or '-', never '..'",
            hint="for example /default/orders",
        )
    return match[1], match[2]


def check_namespace(name: str) -> str:
    """Return the namespace as it is, or raise InvalidName."""
    if not _NAMESPACE.match(name):
        raise InvalidName(
            f"namespace {name[:80]!r} is not valid",
            why="it is 1-200 letters, digits, '.', '_' or '-', never '..', without a slash",
            hint="for example default",
        )
    return name


def check_new_topic_name(name: str) -> None:
    """Like check_topic_name, and refuse the ending that is reserved for partitions."""
    check_topic_name(name)
    if _PARTITION_SUFFIX.match(name):
        raise InvalidName(
            f"topic name {name!r} ends like a partition",
            why="names ending in -part-N are made by partitioned topics",
            hint="create the topic with --partitions instead",
        )


def check_label(text: str, what: str) -> None:
    """Check a subscription, consumer or producer name: free text, short, without control bytes."""
    size_bytes = len(text.encode("utf-8", "surrogatepass"))
    if not text or size_bytes > LABEL_BYTES_MAX or not text.isprintable():
        raise InvalidName(
            f"{what} name {text[:40]!r} is not valid",
            why=f"it is 1-{LABEL_BYTES_MAX} bytes of printable text",
            hint="use letters, digits and punctuation",
        )


def partition_name(topic: str, partition: int) -> str:
    """Physical name of partition ``partition`` of a partitioned topic."""
    return f"{topic}-part-{partition}"


def split_partition_name(name: str) -> tuple[str, int | None]:
    """Split a physical name into ``(topic, partition)``; partition is None if there is no suffix."""
    match = _PARTITION_SUFFIX.match(name)
    return (match[1], int(match[2])) if match else (name, None)
