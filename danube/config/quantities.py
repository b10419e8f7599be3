"""Durations and sizes as people write them: ``250ms 5s 1h 7d`` and ``64KiB 10MB``."""

from __future__ import annotations

import re

_DURATION = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*(ms|s|m|h|d)\Z")
_UNIT_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*([KMGT]?)(i?)B?\Z", re.IGNORECASE)
_SIZE_POWER = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_duration_ms(text: str) -> int:
    """Milliseconds of ``250ms``, ``5s``, ``10m``, ``1h`` or ``7d``; ``0`` needs no unit.  Else ValueError."""
    if text.strip() == "0":
        return 0
    match = _DURATION.match(text.strip())
    if match is None:
        raise ValueError("is not a duration; write 250ms, 5s, 10m, 1h or 7d")
    return round(float(match[1]) * _UNIT_MS[match[2]])


def parse_size_bytes(text: str) -> int:
    """Bytes of ``64KiB`` (1024), ``10MB`` (1000) or ``512``.  ValueError if it is not a size."""
    match = _SIZE.match(text.strip())
    if match is None or (match[3] and not match[2]):
        raise ValueError("is not a size; write 512, 64KiB or 10MB")
    unit: int = (1024 if match[3] else 1000) ** _SIZE_POWER[match[2].upper()]
    return round(float(match[1]) * unit)


def format_duration(value_ms: int) -> str:
    """The shortest exact text for a duration: 90000 is ``90s``, 3600000 is ``1h``."""
    if value_ms == 0:
        return "0"
    for unit in ("d", "h", "m", "s"):
        if value_ms % _UNIT_MS[unit] == 0:
            return f"{value_ms // _UNIT_MS[unit]}{unit}"
    return f"{value_ms}ms"


def format_size(value_bytes: int) -> str:
    """The shortest exact text for a size: 1048576 is ``1MiB``, 1000 is ``1000``."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if value_bytes and value_bytes % 1024**power == 0:
            return f"{value_bytes // 1024**power}{unit}"
    return str(value_bytes)
