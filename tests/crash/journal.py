"""What clients write down while a broker is being killed, and the payload that says who it is.

A journal is a file of JSON lines, each a list: a kind and its fields.  It is written on another
directory than the broker's, before a request leaves and after its answer came.

    try    producer, topic, first sequence, end sequence, key or null       before sending
    ok     producer, topic, first sequence, end sequence, partition, offset, durability, moment_ns
           (offset null where the answer does not say it, as over gRPC)
    fail   producer, topic, first sequence, end sequence, error class       not acknowledged
    got    subscription, consumer, topic, partition, offset, producer, sequence, key, intact, moment_ns
    ack    subscription, topic, partition, offset                          after the call returned
    ack_unknown   the same, where the call failed: it may have had its effect
    confirmed     subscription, topic, partition, offsets, moment_ns       the broker has stored these acks
    stands subscription, topic, partition, counts    what the broker says that it left out of a subscription
    log    topic, partition, offset, producer, sequence, key, intact        the last, fresh reading
    fault  name, seed, started_ns, ended_ns, facts

A payload names its producer and sequence and is filled from them, so the checker needs no copy of
what was sent: whoever meets the record can tell whether every byte is right.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TextIO

Event = list[Any]


class Identity(NamedTuple):
    """Who a record is; ``sequence`` is the journal's own count per producer."""

    producer: str
    sequence: int


def payload_of(producer: str, sequence: int, size: int) -> bytes:
    """The payload of a record: identity, filling that depends on it, checksum; at least 64 bytes."""
    head = f"{producer}|{sequence}|".encode()
    seed = hashlib.blake2b(head, digest_size=32).digest()
    room = max(size, 64) - len(head) - 4
    body = head + (seed * (room // len(seed) + 1))[:room]
    return body + zlib.crc32(body).to_bytes(4, "little")


def read_payload(payload: bytes) -> tuple[Identity, bool]:
    """Identity of a payload and whether every byte is what its producer sent."""
    try:
        producer, sequence, _ = payload.split(b"|", 2)
        identity = Identity(producer.decode(), int(sequence))
    except ValueError:
        return Identity("?", -1), False
    return identity, payload == payload_of(*identity, len(payload))


class Journal:
    """Appends events to one file; each reaches the kernel before ``write`` returns."""

    def __init__(self, path: Path) -> None:
        self._file: TextIO = path.open("a", buffering=1)

    def write(self, kind: str, *fields: Any) -> None:
        self._file.write(json.dumps([kind, *fields]) + "\n")

    def close(self) -> None:
        self._file.close()


def read_journals(paths: Iterable[Path]) -> Iterator[Event]:
    """Events of all files; a last line that a killed process cut is left out."""
    for path in paths:
        with path.open() as file:
            for line in file:
                if line.endswith("\n"):
                    yield json.loads(line)
