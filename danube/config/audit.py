"""The section ``audit`` of the configuration: whether requests are written down, where and for how long."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from danube.config.sections import choice, declare, duration, parse_text, size
from danube.core.partition.policy import DAY_MS

MODES: Final = ("off", "on", "required")


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditConfig:
    """With ``mode`` on, requests that change something are written down.

    With ``required`` such a request is refused if its line cannot be written.
    ``directory`` is by default the folder ``audit`` of the data directory; ``keep`` 0 keeps for ever.
    """

    mode: str = choice("off", "mode", *MODES)
    directory: str = declare("", "directory", parse_text)
    keep_ms: int = duration(90 * DAY_MS, "keep", 0, 36_500 * DAY_MS)
    file_bytes: int = size(64 << 20, "file_size", 1 << 16, 1 << 40)
