"""The static checks hold even where hooks were skipped."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.law.source import ROOT

TOOLS = Path(sys.executable).parent


def run(*command: str) -> None:
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, f"{' '.join(command)}\n{result.stdout}{result.stderr}"


def test_ruff_finds_nothing() -> None:
    run(str(TOOLS / "ruff"), "check", "--output-format", "concise", ".")


def test_source_is_formatted() -> None:
    run(str(TOOLS / "ruff"), "format", "--check", "--output-format", "concise", ".")


def test_imports_keep_the_law() -> None:
    run(str(TOOLS / "lint-imports"), "--config", "setup.cfg")


def test_types_hold() -> None:
    run(str(TOOLS / "mypy"))
