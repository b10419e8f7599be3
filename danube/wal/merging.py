"""Many small objects into one: fetched, merged, uploaded and read back.  Blocking."""

from __future__ import annotations

from collections.abc import Sequence

from danube.errors import NotSupported
from danube.wal.manifest import SegmentEntry
from danube.wal.uploader import Uploader


def merge(uploader: Uploader, sources: Sequence[SegmentEntry]) -> SegmentEntry:
    """The entry of one object with all that ``sources`` hold; nothing names it yet."""
    raise NotSupported("segments cannot be merged yet")
