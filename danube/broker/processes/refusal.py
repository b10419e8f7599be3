"""Refusal of a worker to start, in its own words: from the child to the supervisor, over its death."""

from __future__ import annotations

import os
from typing import Final

import msgspec

from danube.core.protocol.native import ErrorBody
from danube.errors import DanubeError, error_for_code

_BYTES_MAX: Final = 64 * 1024
_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(ErrorBody)


class Refusal:
    """Memory that both share; made before the fork."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("danube-refusal", os.MFD_CLOEXEC)

    def tell(self, error: DanubeError) -> None:
        """In the child, before it ends."""
        facts = {name: value for name, value in error.facts.items() if isinstance(value, str | int | float)}
        os.pwrite(
            self._fd, _encoder.encode(ErrorBody(error.code, error.what, error.why, error.hint, facts)), 0
        )

    def take(self) -> DanubeError | None:
        """In the supervisor, once the child is gone; the next one begins anew."""
        body = os.pread(self._fd, _BYTES_MAX, 0)
        os.ftruncate(self._fd, 0)
        try:
            fields = _decoder.decode(body) if body else None
        except msgspec.DecodeError:  # it was killed while it told
            return None
        if fields is None:
            return None
        error = error_for_code(fields.code, fields.what, fields.why, fields.hint)
        error.facts.update(fields.facts)
        return error

    def close(self) -> None:
        os.close(self._fd)
