"""Entry script for spark-submit, which accepts a file but no module."""

from __future__ import annotations

from pathlib import Path
from typing import Final

JOBS: Final = ("validate", "replay", "compact", "export")


def submitted_file() -> Path:
    """The file to name on spark-submit's command line, before the job's name and options."""
    return Path(__file__).with_name("danube_job.py")
