"""Avro logical types: what the bytes of a plain type mean.

The specification lets a reader ignore a logical type that it does not know or that does not fit its plain
type; so does this module.  A decimal with impossible numbers is refused, because libraries disagree on it.
Source: Avro specification 1.12, "Logical Types".
"""

from __future__ import annotations

import math
from typing import Any, Final

from danube.errors import SchemaInvalid

# Which plain type carries it; a number is the size of a fixed.
_CARRIERS: Final[dict[str, tuple[str | int, ...]]] = {
    "big-decimal": ("bytes",),
    "uuid": ("string", 16),
    "date": ("int",),
    "time-millis": ("int",),
    "time-micros": ("long",),
    "timestamp-millis": ("long",),
    "timestamp-micros": ("long",),
    "timestamp-nanos": ("long",),
    "local-timestamp-millis": ("long",),
    "local-timestamp-micros": ("long",),
    "local-timestamp-nanos": ("long",),
    "duration": (12,),
}
PRECISION_MAX: Final = 10_000


def logical_type(value: dict[str, Any], kind: str, size_bytes: int, path: str) -> str:
    """The logical type of a type object: its name, ``decimal(precision,scale)``, or "" for none.

    ``kind`` is the plain type, ``size_bytes`` the size of a fixed.  Raises SchemaInvalid.
    """
    name = value.get("logicalType")
    if name == "decimal" and kind in ("bytes", "fixed"):
        return _decimal(value, size_bytes, path)
    if not isinstance(name, str):
        return ""
    carrier = size_bytes if kind == "fixed" else kind
    return name if carrier in _CARRIERS.get(name, ()) else ""


def _decimal(value: dict[str, Any], size_bytes: int, path: str) -> str:
    precision, scale = value.get("precision"), value.get("scale", 0)
    if not isinstance(precision, int) or not _counts(precision, 1, PRECISION_MAX):
        raise _refusal(path, f"the precision of a decimal is 1 to {PRECISION_MAX}")
    if not _counts(scale, 0, precision):
        raise _refusal(path, "the scale of a decimal is 0 up to its precision")
    if size_bytes and precision > math.floor(math.log10(2) * (8 * size_bytes - 1)):
        raise _refusal(path, f"{precision} digits do not fit into {size_bytes} bytes")
    return f"decimal({precision},{scale})"


def _counts(value: Any, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _refusal(path: str, why: str) -> SchemaInvalid:
    return SchemaInvalid("the Avro definition is refused", why=f"{path}: {why}" if path else why, path=path)
