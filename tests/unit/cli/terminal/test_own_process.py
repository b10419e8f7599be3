"""Further processes of Danube import nothing from the folder that the user happens to stand in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from danube.cli.terminal import own_process
from tests.broker_process import ROOT

HOSTILE = "raise SystemExit('a file of the current folder was executed')\n"


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A folder with modules that have the names of ours, of the standard library's and of packages."""
    for name in ("uuid", "json", "asyncio", "msgspec", "click", "numpy", "locust"):
        (tmp_path / f"{name}.py").write_text(HOSTILE)
    (tmp_path / "danube").mkdir()
    (tmp_path / "danube" / "__init__.py").write_text(HOSTILE)
    return tmp_path


def run(words: list[str], folder: Path, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=folder, env=environ, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("inherited", [None, os.pathsep, f".{os.pathsep}"])
def test_a_process_of_ours_ignores_the_current_folder(hostile: Path, inherited: str | None) -> None:
    given = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    environ = own_process.own_environment(given | ({"PYTHONPATH": inherited} if inherited else {}))
    ended = run(own_process.own_command("danube", "version"), hostile, environ)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("danube")


def test_the_module_run_by_hand_ignores_foreign_files(hostile: Path) -> None:
    (hostile / "danube" / "__init__.py").unlink()
    (hostile / "danube").rmdir()
    ended = run([sys.executable, "-m", "danube", "version"], hostile, os.environ | {"PYTHONPATH": str(ROOT)})
    assert ended.returncode == 0, ended.stderr


def test_a_chosen_path_stays_and_entries_of_the_current_folder_go() -> None:
    given = {"PYTHONPATH": os.pathsep.join(["", "relative", str(ROOT), "/chosen", ""]), "HOME": "/h"}
    environ = own_process.own_environment(given)
    assert environ == {"PYTHONPATH": os.pathsep.join([str(ROOT), "/chosen"]), "HOME": "/h"}


@pytest.mark.parametrize("installed", [True, False])
def test_a_checkout_that_is_not_installed_is_found_by_its_folder(
    installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_process, "_installed", lambda: installed)
    assert own_process.own_environment({}) == ({} if installed else {"PYTHONPATH": str(ROOT)})


def test_only_the_current_folder_makes_no_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "danube").mkdir()
    (tmp_path / "danube" / "__init__.py").touch()
    monkeypatch.setattr(sys, "meta_path", [own_process.PathFinder])
    monkeypatch.setattr(sys, "path", ["", str(tmp_path)])
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert own_process._installed()
    monkeypatch.chdir(tmp_path)
    assert not own_process._installed()
