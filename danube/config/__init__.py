"""Settings: their sources, their sections, and checks of their values."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_PUBLIC = ("BrokerConfig", "Loaded", "load")


def __getattr__(name: str) -> Any:
    """Import the names that programs load a configuration with, on first use."""
    if name in _PUBLIC:
        return getattr(import_module("danube.config.loading"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
