"""The image's Dockerfile."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.broker_process import ROOT

DOCKERFILE = ROOT / "deploy" / "container" / "Dockerfile"


def hadolint(path: Path) -> subprocess.CompletedProcess[str]:
    found = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if found is None:
        pytest.skip("hadolint is not installed (pip install 'danube-broker[test-deploy]')")
    return subprocess.run([found, str(path)], capture_output=True, text=True, check=False)


def test_the_linter_finds_nothing() -> None:
    done = hadolint(DOCKERFILE)
    assert done.returncode == 0, done.stdout


def test_the_linter_finds_what_is_wrong(tmp_path: Path) -> None:
    broken = tmp_path / "Dockerfile"
    broken.write_text(DOCKERFILE.read_text().replace("WORKDIR /var/lib/danube", "WORKDIR var/lib"))
    assert "DL3000" in hadolint(broken).stdout


def test_the_image_runs_unprivileged_and_checks_its_health() -> None:
    last = DOCKERFILE.read_text().rpartition("\nFROM ")[2]
    assert "\nUSER 10001\n" in last
    assert "\nHEALTHCHECK " in last
    assert "\nSTOPSIGNAL SIGTERM\n" in last


def test_only_the_wheel_goes_into_the_build() -> None:
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert rules == ["*", "!dist/*.whl"]
