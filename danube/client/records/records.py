"""Payloads, keys and attributes as applications give them: checked one by one, or cut into chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from danube.core.batch.format import Compression
from danube.errors import DanubeError, InvalidArgument, RecordTooLarge
from danube.limits import ATTRIBUTE_BYTES_MAX, ATTRIBUTES_PER_RECORD_MAX, KEY_BYTES_MAX

Attributes = Mapping[str, str]


def compression_of(text: str) -> Compression:
    try:
        return Compression[text.upper()]
    except (KeyError, AttributeError):
        raise InvalidArgument(f"compression {text!r} is not known", hint="use none, lz4 or zstd") from None


def as_bytes(payload: Any) -> bytes:
    if isinstance(payload, bytes | bytearray | memoryview):
        return bytes(payload)
    raise InvalidArgument(
        f"a payload is bytes, not {type(payload).__name__}",
        hint="encode text first, for example with text.encode()",
    )


def key_bytes_of(key: Any) -> bytes | None:
    if key is None or type(key) is bytes:
        encoded: bytes | None = key
    elif isinstance(key, str):
        try:
            encoded = key.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgument("key is not valid text", why=str(error)) from None
    elif isinstance(key, bytearray | memoryview):
        encoded = bytes(key)
    else:
        raise InvalidArgument(f"a key is text or bytes, not {type(key).__name__}")
    if encoded is not None and len(encoded) > KEY_BYTES_MAX:
        raise RecordTooLarge(f"key of {len(encoded)} bytes is too large", why=f"the limit is {KEY_BYTES_MAX}")
    return encoded


def attributes_size(attributes: Attributes) -> int:
    size = 0
    try:
        for name, value in attributes.items():
            name_size, value_size = len(name.encode()), len(value.encode())
            if name_size > 0xFFFF:
                raise RecordTooLarge("attribute name is longer than 65535 bytes")
            size += 6 + name_size + value_size
    except (AttributeError, UnicodeEncodeError) as error:
        raise InvalidArgument(
            "attributes are not valid", why=str(error), hint="they map text to text"
        ) from None
    if len(attributes) > ATTRIBUTES_PER_RECORD_MAX or size > ATTRIBUTE_BYTES_MAX:
        raise RecordTooLarge(
            f"{len(attributes)} attributes of {size} bytes are too many",
            why=f"limits are {ATTRIBUTES_PER_RECORD_MAX} and {ATTRIBUTE_BYTES_MAX} bytes",
        )
    return size


def key_list(keys: Any) -> list[bytes | None]:
    if hasattr(keys, "to_pylist"):
        keys = keys.to_pylist()
    return [key if type(key) is bytes else key_bytes_of(key) for key in keys]


def countable(payloads: Any) -> tuple[Any, int]:
    """Payloads as something that can be cut: a list, a numpy array or a pyarrow array; and how many."""
    if isinstance(payloads, str | bytes | bytearray | memoryview):
        raise InvalidArgument("send_many takes a sequence of payloads", hint="use send() for a single one")
    if isinstance(payloads, np.ndarray):
        if payloads.dtype.kind in "SO" and payloads.ndim == 1:
            payloads = payloads.tolist()
    elif hasattr(payloads, "combine_chunks") and hasattr(payloads, "chunks"):
        payloads = payloads.combine_chunks()
    elif not isinstance(payloads, list) and not hasattr(payloads, "buffers"):
        payloads = list(payloads)
    return payloads, len(payloads)


def renumbered(error: DanubeError, places: Sequence[int]) -> DanubeError:
    """An error that names a record of a part by its place there, with its place in the whole list."""
    index = error.facts.get("index")
    if not isinstance(index, int) or not 0 <= index < len(places) or places[index] == index:
        return error
    what = error.what.replace(f"record {index}", f"record {places[index]}", 1)
    facts = {**error.facts, "index": places[index]}
    return type(error)(what, why=error.why, hint=error.hint, **facts)


def pick(values: Any, chosen: list[int] | None) -> Any:
    """The values at these places, as the same kind of sequence."""
    if values is None or chosen is None:
        return values
    if isinstance(values, list | range):
        return [values[chosen[0]]] if len(chosen) == 1 else list(itemgetter(*chosen)(values))
    if isinstance(values, np.ndarray):
        return values[chosen]
    import pyarrow

    return values.take(pyarrow.array(chosen))
