"""Settings: where they come from, their sections, and what is wrong with them."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    from danube.config import loading

    return getattr(loading, name)
