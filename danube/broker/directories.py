"""What in a data directory is Danube's own, by its name.

A directory that is a disk's own has a ``lost+found``, a desktop leaves its ``.DS_Store``: neither says that
a broker has kept something there, and neither is ever touched.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from danube.broker.removing import SUFFIX as REMOVED_SUFFIX
from danube.wal.manifest_keys import parse_partition

PARTITIONS: Final = "partitions"
_METADATA: Final = "metadata"
_METADATA_NAMES: Final = ("metadata.log", "metadata.new", "metadata.lock")


def partition_names(data_dir: Path) -> list[str]:
    """Names of the partitions' directories, in order, half removed ones included; OSError."""
    return [name for name in _names(data_dir / PARTITIONS) if _of_partition(name)]


def strangers(data_dir: Path) -> list[Path]:
    """What lies among Danube's directories and files and is none of them; OSError."""
    places = (data_dir / PARTITIONS, data_dir / _METADATA)
    found = [place / name for place in places for name in _names(place)]
    return [path for path in found if not _of_partition(path.name) and path.name not in _METADATA_NAMES]


def _of_partition(name: str) -> bool:
    return parse_partition(name.removesuffix(REMOVED_SUFFIX)) is not None


def _names(directory: Path) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except FileNotFoundError:
        return []
