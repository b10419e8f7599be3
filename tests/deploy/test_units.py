"""The units of systemd."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.broker_process import ROOT

UNITS = sorted((ROOT / "deploy" / "systemd").glob("*.service"))
EXPOSURE_MAX = 3.0

pytestmark = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here")


def analyze(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["systemd-analyze", *words], capture_output=True, text=True, check=False)


def verified(text: str, path: Path) -> subprocess.CompletedProcess[str]:
    """Verify a unit whose program is one that is here."""
    path.write_text(text.replace("/opt/danube/bin/danube", "/bin/true"))
    return analyze("verify", "--man=no", str(path))


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_reads_it(unit: Path, tmp_path: Path) -> None:
    name = unit.name.replace("@", "@one")
    done = verified(unit.read_text(), tmp_path / name)
    assert (done.returncode, done.stderr) == (0, "")


def test_systemd_finds_a_misspelt_setting(tmp_path: Path) -> None:
    text = UNITS[0].read_text().replace("WatchdogSec=", "WatchdogSecs=")
    assert "WatchdogSecs" in verified(text, tmp_path / "danube.service").stderr


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_the_service_may_do_little(unit: Path) -> None:
    said = analyze("security", "--offline=yes", str(unit)).stdout
    exposure = re.search(r"Overall exposure level for .*: ([0-9.]+)", said)
    assert exposure is not None, said
    assert float(exposure[1]) < EXPOSURE_MAX


def test_both_units_differ_in_their_names_alone() -> None:
    single, several = (unit.read_text().splitlines() for unit in reversed(UNITS))
    changed = [line for line, other in zip(single, several, strict=True) if line != other]
    assert len(changed) == 5, changed
