"""Errors that cross Spark as text: the text has the hint, and can be parsed into an error again."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from danube import errors
from danube.errors import DanubeError

_RAISED: Final = re.compile(r"^(?:\w+\.)*danube\.errors\.(\w+): (.*)$", re.MULTILINE)

_MISSING: Final = re.compile(r"(Danube cannot be imported by .*) \((.*)\): (install it .*)")


@contextmanager
def hinted() -> Iterator[None]:
    """Put the hint of an error that leaves the block into its text, which is all that Spark shows of it."""
    try:
        yield
    except DanubeError as error:
        if error.hint and error.hint not in str(error):
            error.args = (f"{error}; try: {error.hint}",)
        raise


def error_from_spark(error: BaseException) -> DanubeError | None:
    """The DanubeError that a failed task or planner raised; None for anything else."""
    if isinstance(error, DanubeError) or not type(error).__module__.startswith(("pyspark", "py4j")):
        return None
    missing = _MISSING.search(str(error))
    if missing is not None:
        return errors.ConfigInvalid(missing[1], why=missing[2], hint=missing[3])
    found = _RAISED.findall(str(error))
    if not found:
        return None
    name, text = found[-1]
    kind = getattr(errors, name, None)
    if not isinstance(kind, type) or not issubclass(kind, DanubeError):
        return None
    return kind(text.strip())
