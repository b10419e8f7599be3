"""Removing the directory of a partition that is no more: its name in one step, then file by file.

A crash in between leaves a directory that no reader takes for a partition with gaps.  A directory is removed
because its topic was deleted.  If the metadata never knew the topic, the directory is put aside instead:
metadata that lost its end knows less than the disk.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Final

from danube.host import files, telemetry
from danube.wal.recovery.witness import remove_witness

SUFFIX: Final = ".removed"
UNKNOWN: Final = "unknown"  # below the data directory

_log = telemetry.events("removing")


def remove_directory(directory: Path) -> None:
    """Remove a partition's directory, also one that was half removed; nothing if there is none."""
    remove_witness(directory.with_name(directory.name.removesuffix(SUFFIX)))
    if directory.suffix != SUFFIX:
        away = directory.with_name(directory.name + SUFFIX)
        shutil.rmtree(away, ignore_errors=True)  # left by a process that died
        with suppress(FileNotFoundError):
            files.rename(directory, away)
        directory = away
    shutil.rmtree(directory, ignore_errors=True)


def put_aside(directory: Path, data_dir: Path) -> None:
    """Keep a partition's directory where no topic that is made later takes it for its own."""
    root = data_dir / UNKNOWN
    target, number = root / directory.name, 0
    while target.exists():
        number += 1
        target = root / f"{directory.name}-{number}"
    facts = {"directory": str(directory), "target": str(target)}
    try:
        remove_witness(directory)
        if not directory.exists():
            return
        files.make_directory(root)
        files.rename(directory, target)
        files.fsync_directory(root)
        files.fsync_directory(directory.parent)
    except OSError as error:
        _log.error("a directory of no known topic cannot be put aside", **facts, why=str(error))
        return
    _log.error(
        "a directory of no known topic is put aside", **facts,
        why="the metadata has never given its topic's id, so it lost its end or is another broker's",
        hint="`danube inspect` shows the files' content; delete the directory if it is not needed",
    )  # fmt: skip
