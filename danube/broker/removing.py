"""Removing the directory of a partition that is no more: its name in one step, then file by file.

Who dies in between leaves a directory that no reader takes for a partition with gaps.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Final

from danube import files

SUFFIX: Final = ".removed"


def remove_directory(directory: Path) -> None:
    """Remove a partition's directory, also one that was half removed; nothing where there is none."""
    if directory.suffix != SUFFIX:
        away = directory.with_name(directory.name + SUFFIX)
        shutil.rmtree(away, ignore_errors=True)  # left by a process that died
        with suppress(FileNotFoundError):
            files.rename(directory, away)
        directory = away
    shutil.rmtree(directory, ignore_errors=True)
