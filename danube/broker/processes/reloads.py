"""Reloads: the broker is told to load certificates and keys again, and all of its processes learn of it."""

from __future__ import annotations

import mmap
import zlib
from collections.abc import Callable
from typing import Final

from danube.errors import ConfigInvalid
from danube.host import telemetry

KEYS_BYTES_MAX: Final = 64 * 1024
_COUNT, _REFUSED, _SIZE, _CRC = range(4)  # words
_TEXT_START: Final = 64  # in bytes

_log = telemetry.events("broker.reloads")


class Reloads:
    """Memory shared by a fork: the supervisor writes, its processes read.

    ``keys`` are the settings of keys (:func:`danube.config.auth.packed_keys`) as they were read last.  One
    process reads them for all, so that workers agree, and a worker that is replaced begins with the same.
    """

    def __init__(self, read: Callable[[], bytes] | None = None) -> None:
        """``read`` returns the settings of keys anew, or raises ConfigInvalid; None: they stay."""
        self._memory = mmap.mmap(-1, _TEXT_START + KEYS_BYTES_MAX)
        self._words = memoryview(self._memory)[:_TEXT_START].cast("q")
        self._read = read
        self._keys = b""

    @property
    def count(self) -> int:
        """How often the broker was told."""
        return self._words[_COUNT]

    @property
    def refused(self) -> bool:
        """Whether the settings of keys, as they are now, cannot be used."""
        return bool(self._words[_REFUSED])

    @property
    def keys(self) -> bytes:
        """The settings of keys that were read last; b"" before that."""
        found = self._memory[_TEXT_START : _TEXT_START + self._words[_SIZE]]
        if zlib.crc32(found) == self._words[_CRC]:  # else it is being written
            self._keys = found
        return self._keys

    def request(self) -> None:
        """Supervisor: read the settings of keys; all processes load files anew within a second."""
        try:
            self._put(self._read() if self._read is not None else b"")
        except ConfigInvalid as error:
            _log.error("the former list of keys stays", what=str(error), why=error.why, hint=error.hint)
            self._words[_REFUSED] = 1
        else:
            self._words[_REFUSED] = 0
        self._words[_COUNT] += 1

    def _put(self, keys: bytes) -> None:
        if len(keys) > KEYS_BYTES_MAX:
            raise ConfigInvalid(
                "the list of keys in auth.jwt is too long",
                why=f"it has {len(keys)} bytes, and {KEYS_BYTES_MAX} can be exchanged while a broker runs",
                hint="remove keys whose tokens have expired",
            )
        self._memory[_TEXT_START : _TEXT_START + len(keys)] = keys
        self._words[_SIZE] = len(keys)
        self._words[_CRC] = zlib.crc32(keys)
