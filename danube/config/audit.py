"""The section ``audit`` of the configuration: whether requests are written down, where and for how long."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from danube.config.quantities import format_duration, format_size, parse_duration_ms, parse_size_bytes
from danube.config.sections import declare, parse_text

MODES: Final = ("off", "on", "required")
_DAY_MS: Final = 86_400_000


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditConfig:
    """With ``mode`` on, requests that change something are written down.

    With ``required`` such a request is refused if its line cannot be written.
    ``directory`` is by default the folder ``audit`` of the data directory; ``keep`` 0 keeps for ever.
    """

    mode: str = declare("off", "mode", lambda text: text.strip().lower(), choices=MODES)
    directory: str = declare("", "directory", parse_text)
    keep_ms: int = declare(
        90 * _DAY_MS, "keep", parse_duration_ms, show=format_duration, least=0, most=36_500 * _DAY_MS
    )
    file_bytes: int = declare(
        64 << 20, "file_size", parse_size_bytes, show=format_size, least=1 << 16, most=1 << 40
    )
