"""A compacted segment takes the place of the local files that it was made from.

    1.  it lies beside them, complete and synced, under a name that recovery removes
    2.  it is renamed to the name of the first of them: from here on it speaks for all their offsets
    3.  that name is made durable
    4.  the others are removed

A crash before 3 leaves the old files or, with it, files that lie wholly inside a compacted segment;
recovery removes these (see danube.wal.recovery.inventory).
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from danube.errors import broken
from danube.host import files
from danube.wal.log.retention import freeing
from danube.wal.segments.descriptors import descriptors
from danube.wal.segments.index import index_cache
from danube.wal.segments.merge import Merged
from danube.wal.segments.segment import file_name
from danube.wal.segments.stored_segment import StoredSegment

UNNAMED_SUFFIX: Final = ".compacted.new"


def unnamed_path(directory: Path, base_offset: int) -> Path:
    """Return the path at which a compacted segment is made."""
    return directory / (file_name(base_offset) + UNNAMED_SUFFIX)


def replace(
    sources: list[StoredSegment], made: Merged, path: Path, segments: list[StoredSegment], bases: list[int]
) -> None:
    """Steps 2 to 4 for the file ``path``; ``sources`` are adjacent ones of ``segments``.

    An OSError before step 2 leaves all as it was; after it the lists are as the log is now read, and
    files may be left that the next opening removes.
    """
    first = segments.index(sources[0])
    if segments[first : first + len(sources)] != sources:
        broken("what a compacted segment replaces is not in the log", base_offset=sources[0].base_offset)
    directory = sources[0].directory
    files.rename(path, directory / file_name(sources[0].base_offset))
    compacted = StoredSegment.of_summary(directory, made.summary, made.size_bytes)
    segments[first : first + len(sources)] = [compacted]
    bases[first : first + len(sources)] = [compacted.base_offset]
    for source in sources:
        descriptors.close(source.file)
        index_cache.drop(source.file)
    files.fsync_directory(directory)
    for source in sources[1:]:
        freeing.delete(source.file.path)
    files.fsync_directory(directory)
