"""Errors of tasks: Spark hands them to the driver as text, and they become what they were."""

from __future__ import annotations

import re
from typing import Final

from danube import errors
from danube.errors import DanubeError

_RAISED: Final = re.compile(r"^(?:\w+\.)*danube\.errors\.(\w+): (.*)$", re.MULTILINE)


def told_by_spark(error: BaseException) -> DanubeError | None:
    """The DanubeError that a failed task or planner raised; None for anything else."""
    if isinstance(error, DanubeError) or not type(error).__module__.startswith(("pyspark", "py4j")):
        return None
    found = _RAISED.findall(str(error))
    if not found:
        return None
    name, text = found[-1]
    kind = getattr(errors, name, None)
    if not isinstance(kind, type) or not issubclass(kind, DanubeError):
        return None
    return kind(text.strip())
