"""A range of an object into a local file, for a reader.  Blocking."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from danube.errors import InvalidArgument
from danube.wal.segments.segment import LogIdentity
from danube.wal.stores.objects import ObjectStore, local_failure
from danube.wal.tier.keys import KeyKind, parse_key

FETCH_BYTES_MAX: Final = 256 << 20


def fetch(
    store: ObjectStore,
    identity: LogIdentity,
    source: tuple[str, int, int],
    target: tuple[Path, int],
    root: Path,
) -> None:
    """Copy ``source`` (key, start, end) of a segment into ``target`` (file below ``root``, position).

    The file is not synced: a cache may lose its content.  Raises InvalidArgument when the key is not of this
    partition or the file lies elsewhere, StorageFailed when the file cannot be written, and what the store
    raises.
    """
    key, start, end = source
    path, position = target
    parsed = parse_key(key)
    if parsed is None or parsed.kind is not KeyKind.SEGMENT or parsed.identity != identity:
        raise InvalidArgument(f"{key[:200]!r} is no segment of {identity.directory_name}")
    if not 0 <= start <= end or end - start > FETCH_BYTES_MAX:
        raise InvalidArgument(f"{start} to {end} cannot be fetched at once")
    if not path.resolve().is_relative_to(root.resolve()):
        raise InvalidArgument(f"{path} lies outside the data directory")
    try:
        fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise local_failure(path, error) from None
    try:
        store.get_to(key, start, end, fd, position)
    finally:
        os.close(fd)
