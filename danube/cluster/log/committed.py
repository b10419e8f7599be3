"""Reading ``metadata.log`` beside the broker that writes it: nothing is locked, and nothing is mended."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Final

from danube.cluster.log import log_file
from danube.core.metadata.commands import decode_commands
from danube.core.metadata.machine import Metadata
from danube.errors import Damage
from danube.host import files

_ATTEMPTS: Final = 3


def read_committed(path: Path) -> Metadata:
    """The machine with all that was committed; raises OSError, Damage, StorageIncompatible."""
    for _ in range(_ATTEMPTS - 1):
        with suppress(Damage):  # it may have been replaced in between
            return _read_once(path)
    return _read_once(path)


def _read_once(path: Path) -> Metadata:
    fd = files.open_existing(path, writable=False)
    try:
        head = log_file.read_head(fd, str(path))
        metadata = Metadata.restore(head.snapshot)
        end = log_file.read_mark(fd, str(path))
        content = log_file.read_all(fd, head.entries_start, end, str(path))
        for entry in log_file.committed_entries(content, head.entries_start, str(path)):
            for command in decode_commands(entry.content):
                metadata.apply(metadata.version + 1, command)
        return metadata
    finally:
        files.close(fd)
