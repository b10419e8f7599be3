"""From a wheel in an empty environment to a consumed record, as scripts/install-check does it."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.broker_process import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NO_INDEX = 3
UNREACHED = "wheel: raftos cannot be fetched from the package index"
# Of the files of raftos 0.2.6 that a wheel holds: names and contents together.
RAFTOS_DIGEST = "7efadadaea7d8067257501e56f22ac509429cdd5c01637f794c5376038304d8e"


def run(*words: str, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "DANUBE_PYTHON": sys.executable, "DANUBE_INSTALL_S": "400", **settings}
    return subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=800)


def build(out: Path) -> list[Path]:
    """Return the wheel and the source distribution of this checkout."""
    built = run("scripts/wheel", str(out))
    if UNREACHED in built.stderr:
        pytest.skip("no package index can be reached")
    assert built.returncode == 0, built.stderr
    return sorted(out.iterdir())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return build(tmp_path_factory.mktemp("dist"))


def test_a_wheel_in_an_empty_environment_serves(built: list[Path]) -> None:
    """The bundled engine is what its authors released, byte for byte."""
    wheel = built[0]
    with zipfile.ZipFile(wheel) as files:
        names = sorted(name for name in files.namelist() if name.startswith("danube/bundled/raftos/"))
        digest = hashlib.sha256()
        for name in names:
            digest.update(name.rpartition("/")[2].encode() + b"\0" + files.read(name) + b"\0")
        assert any(name.endswith("licenses/NOTICE") for name in files.namelist())
    assert "danube/bundled/raftos/LICENSE" in names and len(names) == 13
    assert digest.hexdigest() == RAFTOS_DIGEST
    done = run("scripts/install-check", str(wheel))
    if done.returncode == NO_INDEX:
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, done.stderr + done.stdout
    print(done.stderr)


def test_two_builds_are_equal(built: list[Path], tmp_path: Path) -> None:
    """Also the source distribution, which setuptools stamps with the time and the user."""
    again = build(tmp_path / "again")
    assert [path.suffix for path in built] == [".whl", ".gz"]
    assert [path.name for path in again] == [path.name for path in built]
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in built]
    with tarfile.open(built[1]) as files:
        assert len([name for name in files.getnames() if "/danube/bundled/raftos/" in name]) == 13


def test_no_wheel_without_the_engine(tmp_path: Path) -> None:
    """No index, and one that has another file of that name."""
    out = tmp_path / "dist"
    alone = run("scripts/wheel", str(out), PIP_NO_INDEX="1", PIP_FIND_LINKS="")
    assert alone.returncode == 1 and UNREACHED in alone.stderr
    (tmp_path / "raftos-0.2.6.zip").write_bytes(b"another")
    other = run("scripts/wheel", str(out), PIP_NO_INDEX="1", PIP_FIND_LINKS=str(tmp_path))
    assert other.returncode == 1 and "another raftos came" in other.stderr, other.stderr
    assert not out.exists()
