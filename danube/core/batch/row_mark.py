"""The mark of a job's rows: in every batch of them, all of the task's rows up to its end as one digest.

A task that comes again passes over the rows that the log has.  The mark of the last batch says which rows
these were, however many there are, and whether the task had come to its end.  It takes the place of the
origin, which only producers of gRPC name, and readers are not shown it.
"""

from __future__ import annotations

from typing import Final, NamedTuple

PREFIX: Final = "rows:"
_LAST: Final = "."


class RowMark(NamedTuple):
    """``digest``: hexadecimal.  ``last``: the task has no rows behind this batch in its partition."""

    digest: str
    last: bool

    @property
    def text(self) -> str:
        """How it is written."""
        return PREFIX + self.digest + (_LAST if self.last else "")


def read_mark(origin: str) -> RowMark | None:
    """The mark that stands in the place of an origin; None for an address."""
    if not origin.startswith(PREFIX):
        return None
    digest = origin.removeprefix(PREFIX)
    return RowMark(digest.removesuffix(_LAST), digest.endswith(_LAST))
