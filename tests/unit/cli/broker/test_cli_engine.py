"""`danube cluster install-engine`: what is shown, asked and run; pip itself is not."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from danube.cli.broker import engine
from danube.cli.main import root
from danube.cli.terminal.services import Services
from danube.cluster.raft import raftos_engine

PIP = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands that were run, where raftos is missing."""
    commands: list[list[str]] = []

    def run(command: Sequence[str], check: bool) -> Any:
        if "--requirement" in command:
            assert command[-1] == str(engine.PINNED)
        commands.append(list(command))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(raftos_engine, "MISSING", "No module named 'raftos'")
    return commands


def invoke(*words: str, exit_code: int = 0) -> Result:
    result = CliRunner().invoke(root, ["cluster", "install-engine", *words], obj=Services())
    assert result.exit_code == exit_code, result.output
    return result


def test_it_is_installed_by_its_hash_and_shown_before(ran: list[list[str]]) -> None:
    result = invoke("--yes")
    (command,) = ran
    assert command[:-1] == [*PIP, "--no-deps", "--require-hashes", "--requirement"]
    assert " ".join(command) in result.stderr and engine.PINNED.read_text().strip() in result.stderr
    assert "is installed" in result.stdout


def test_without_a_terminal_it_must_be_confirmed(ran: list[list[str]]) -> None:
    assert "--yes" in invoke(exit_code=2).stderr
    assert ran == []


def test_it_says_that_it_is_there(ran: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raftos_engine, "MISSING", "")
    assert "nothing was done" in invoke().stdout
    assert ran == []


def test_msgpack_comes_with_it(ran: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "find_spec", lambda name: name == "pip" or None)
    invoke("--yes")
    assert ran[0] == [*PIP, engine.MSGPACK] and len(ran) == 2


def test_where_there_is_no_pip_uv_does_it(ran: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "find_spec", lambda name: name == "msgpack" or None)
    monkeypatch.setattr(engine, "which", lambda name: "/bin/uv")
    invoke("--yes")
    assert ran[0][:5] == ["/bin/uv", "pip", "install", "--python", sys.executable]
    monkeypatch.setattr(engine, "which", lambda name: None)
    assert "neither pip nor uv" in invoke("--yes", exit_code=6).stderr


def test_a_pip_that_fails_is_told(ran: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *rest, **more: SimpleNamespace(returncode=1))
    assert "left with status 1" in invoke("--yes", exit_code=6).stderr


WHEEL = {
    "raftos.py": "",
    "raftos-0.2.6.dist-info/METADATA": "Metadata-Version: 2.1\nName: raftos\nVersion: 0.2.6\n",
    "raftos-0.2.6.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "raftos-0.2.6.dist-info/RECORD": "raftos.py,,\n",
}


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Another package that calls itself raftos 0.2.6."""
    path = tmp_path / "raftos-0.2.6-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as files:
        for name, content in WHEEL.items():
            files.writestr(name, content)
    return path


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """The real one: where it looks instead of an index, and where it installs."""

    def settings(links: Path | None, target: Path) -> None:
        monkeypatch.setattr(raftos_engine, "MISSING", "No module named 'raftos'")
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(links or ""))
        monkeypatch.setenv("PIP_TARGET", str(target))

    return settings


@pytest.mark.slow
@pytest.mark.parametrize(
    "found, why", [(True, "DO NOT MATCH THE HASHES"), (False, "No matching distribution")]
)
def test_nothing_is_installed_that_has_not_the_hash(
    pip: Callable[..., None], other: Path, capfd: pytest.CaptureFixture[str], found: bool, why: str
) -> None:
    target = other.parent / "installed"
    pip(other.parent if found else None, target)
    assert "index must be reachable" in invoke("--yes", exit_code=6).stderr
    assert why in capfd.readouterr().err
    assert not target.exists()


@pytest.mark.slow
def test_packages_that_cannot_be_changed(
    pip: Callable[..., None], other: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A folder below /proc refuses root as well."""
    pinned = other.with_name("raftos.txt")
    pinned.write_text(f"raftos==0.2.6 --hash=sha256:{sha256(other.read_bytes()).hexdigest()}\n")
    monkeypatch.setattr(engine, "PINNED", pinned)
    pip(other.parent, Path("/proc/danube"))
    assert "be yours to change" in invoke("--yes", exit_code=6).stderr
    assert "/proc/danube" in capfd.readouterr().err
