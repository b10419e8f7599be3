"""Names of Danube's own files in a data directory.

The root of a disk has a ``lost+found``, and a desktop leaves its ``.DS_Store``: neither proves that
a broker has kept something there, and neither is ever touched.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from danube.broker.processes.removing import SUFFIX as REMOVED_SUFFIX
from danube.core.placement.recovered import LOG_EPOCHS
from danube.errors import DanubeError
from danube.wal.recovery.mark import FILE_NAME as MARK_NAME
from danube.wal.recovery.mark import read_mark
from danube.wal.segments.segment import HEADER_BYTES, base_offset_of, read_header
from danube.wal.tier.keys import parse_partition
from danube.wal.tier.manifest import Manifest

PARTITIONS: Final = "partitions"
COPY_NAME: Final = "manifest"
METADATA: Final = "metadata"
_METADATA_NAMES: Final = ("metadata.log", "metadata.new", "metadata.lock")


def partition_names(data_dir: Path) -> list[str]:
    """Names of the partitions' directories, in order, half removed ones included; OSError."""
    return [name for name in _names(data_dir / PARTITIONS) if _of_partition(name)]


def strangers(data_dir: Path) -> list[Path]:
    """Return paths among Danube's directories and files that are not Danube's; raises OSError."""
    places = (data_dir / PARTITIONS, data_dir / METADATA)
    found = [place / name for place in places for name in _names(place)]
    return [path for path in found if not _of_partition(path.name) and path.name not in _METADATA_NAMES]


def proof_of_use(data_dir: Path) -> Path | None:
    """Return a path that proves that a broker has run here; None for a new directory.  Raises OSError."""
    for name in ("metadata/metadata.log", "raft/raft.id", "node_id"):
        if (data_dir / name).exists():
            return data_dir / name
    names = partition_names(data_dir)
    return data_dir / PARTITIONS / names[0] if names else None


def highest_incarnation(data_dir: Path) -> int:
    """Return the largest incarnation that stored data in a partition here; unreadable files are ignored."""
    epochs = [0]
    for directory in (data_dir / PARTITIONS / name for name in partition_names(data_dir)):
        for name in _names(directory):
            epochs += _epochs_in(directory, name)
    return max(epochs) // LOG_EPOCHS


def _epochs_in(directory: Path, name: str) -> list[int]:
    identity = parse_partition(directory.name)
    try:
        if identity is not None and name == MARK_NAME:
            mark = read_mark(directory, identity).mark
            return [mark.epoch] if mark is not None else []
        if name == COPY_NAME:
            return [Manifest.decode((directory / name).read_bytes()).epoch]
        if base_offset_of(name) is not None:
            with (directory / name).open("rb") as file:
                return [read_header(file.read(HEADER_BYTES)).epoch]
    except (OSError, DanubeError):
        pass  # opening reports its damage
    return []


def _of_partition(name: str) -> bool:
    return parse_partition(name.removesuffix(REMOVED_SUFFIX)) is not None


def _names(directory: Path) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except FileNotFoundError:
        return []
