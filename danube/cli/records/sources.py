"""Sources of records to send: an argument, a file, or lines of a file or standard input."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import os
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any, BinaryIO, NamedTuple

from danube.errors import InvalidArgument, RecordTooLarge
from danube.limits import RECORD_BYTES_MAX
from danube.schema.json_text import misread

READ_BYTES = 256 * 1024
READS_AHEAD = 4


class Record(NamedTuple):
    """One record as the user gave it."""

    payload: bytes
    key: str | None = None
    attributes: dict[str, str] | None = None


async def lines_of(stream: BinaryIO) -> AsyncIterator[list[bytes]]:
    """The lines of a stream without their newline, as they arrive; the last one may lack it."""
    rest = b""
    number = 0
    async for data in _chunks(stream):
        *whole, rest = (rest + data).split(b"\n")
        number += len(whole)
        if len(rest) > RECORD_BYTES_MAX or any(len(one) > RECORD_BYTES_MAX for one in whole):
            raise RecordTooLarge(
                f"a line near line {number} is longer than {RECORD_BYTES_MAX} bytes",
                why="one line is one record",
                hint="send a file as one record with --file and without --lines",
            )
        if whole:
            yield whole
    if rest:
        yield [rest]


async def _chunks(stream: BinaryIO) -> AsyncIterator[bytes]:
    """Read the stream as bytes come; a thread reads, because a terminal and a pipe may block.

    The thread reads the descriptor itself and is a daemon.  So an interrupt leaves it behind in its read; a
    thread inside the buffered stream would delay the interpreter's exit.
    """
    loop = asyncio.get_running_loop()
    arrived: asyncio.Queue[bytes | OSError] = asyncio.Queue()
    room = threading.Semaphore(READS_AHEAD)
    read = _reader(stream)

    def pump() -> None:
        while True:
            room.acquire()
            found: bytes | OSError
            try:
                found = read()
            except OSError as error:
                found = error
            try:
                loop.call_soon_threadsafe(arrived.put_nowait, found)
            except RuntimeError:
                return  # the loop is gone, so nothing waits for this any more
            if not found or isinstance(found, OSError):
                return

    threading.Thread(target=pump, daemon=True, name="read-input").start()
    while True:
        found = await arrived.get()
        room.release()
        if isinstance(found, OSError):
            raise InvalidArgument("the input cannot be read", why=str(found))
        if not found:
            return
        yield found


def _reader(stream: BinaryIO) -> Callable[[], bytes]:
    try:
        descriptor = stream.fileno()
    except (OSError, AttributeError, ValueError):
        return lambda: stream.read(READ_BYTES)
    return lambda: os.read(descriptor, READ_BYTES)


def record_of_json(line: bytes, number: int) -> Record:
    """The record that an NDJSON line describes: the object that ``consume -o json`` prints."""
    try:
        fields = json.loads(line)
        if not isinstance(fields, dict):
            raise ValueError("it is not an object")
        return Record(_payload(fields), _key(fields), _attributes(fields))
    except (ValueError, RecursionError, binascii.Error) as error:
        raise InvalidArgument(
            f"line {number} is not a record in JSON",
            why=misread(error)[1] if isinstance(error, json.JSONDecodeError) else str(error),
            hint='write {"payload": "text", "key": "k", "attributes": {"a": "b"}}',
        ) from None


def _payload(fields: dict[str, Any]) -> bytes:
    if "payload_base64" in fields:
        return base64.b64decode(str(fields["payload_base64"]), validate=True)
    if "payload" not in fields:
        raise ValueError("it has neither payload nor payload_base64")
    payload = fields["payload"]
    if isinstance(payload, str):
        return payload.encode("utf-8")
    return json.dumps(payload, ensure_ascii=False, separators=(",", ":")).encode("utf-8")


def _key(fields: dict[str, Any]) -> str | None:
    key = fields.get("key")
    if key is not None and not isinstance(key, str):
        raise ValueError("key is not text")
    return key


def _attributes(fields: dict[str, Any]) -> dict[str, str] | None:
    found = fields.get("attributes")
    if found is None:
        return None
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise ValueError("attributes is not an object of texts")
    return found or None
