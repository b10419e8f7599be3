"""What is installed is what is meant: typed, complete, light to start, nothing of the tests."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import danube
from tests.law.source import PRODUCT, ROOT

# Importing one of these takes longer than the whole of ``danube --help`` may.
HEAVY = {
    "numba",
    "llvmlite",
    "numpy",
    "pyarrow",
    "pyspark",
    "uvloop",
    "google_crc32c",
    "yaml",
    "gevent",
    "locust",
    "jwt",
    "cryptography",
}


def metadata() -> dict[str, object]:
    return dict(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"])


def test_the_version_stands_in_one_place() -> None:
    assert "version" not in metadata() and metadata()["dynamic"] == ["version"]


def test_a_later_python_is_not_refused() -> None:
    assert metadata()["requires-python"] == ">=3.11"


def test_what_is_needed_has_a_range() -> None:
    """Extras for developers may be without an end."""
    extras: dict[str, list[str]] = dict(metadata()["optional-dependencies"])  # type: ignore[call-overload]
    needed = list(metadata()["dependencies"])  # type: ignore[call-overload]
    needed += [one for name, listed in extras.items() if name != "dev" for one in listed]
    open_ended = [one for one in needed if "<" not in one and not one.startswith("danube-broker[")]
    assert open_ended == []


@pytest.mark.slow
def test_the_wheel_holds_the_product_and_nothing_else(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
    # Built from a copy: a build leaves files behind.
    copy = tmp_path / "tree"
    listed = ["pyproject.toml", "setup.cfg", "README.md", "LICENSE", "NOTICE"]
    copy.mkdir()
    for name in listed:
        (copy / name).write_bytes((ROOT / name).read_bytes())
    for path in PRODUCT.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            target = copy / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    subprocess.run([*command, "--wheel-dir", str(tmp_path), str(copy)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert wheel.name == f"danube_broker-{danube.__version__}-py3-none-any.whl"
    assert "danube/py.typed" in names
    python_files = {path.relative_to(ROOT).as_posix() for path in PRODUCT.rglob("*.py")}
    assert python_files <= names
    assert not {name for name in names if not name.startswith(("danube/", "danube_broker-"))}


def test_help_imports_nothing_heavy() -> None:
    code = "import sys, danube.cli.main; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert not HEAVY & set(result.stdout.split())


def test_module_and_command_answer_help() -> None:
    for command in ([sys.executable, "-m", "danube"], [str(Path(sys.executable).parent / "danube")]):
        result = subprocess.run([*command, "--help"], capture_output=True, text=True, cwd=ROOT)
        assert result.returncode == 0, result.stderr
        for verb in (
            "start",
            "stop",
            "status",
            "produce",
            "consume",
            "topics",
            "subscriptions",
            "bench",
            "config",
        ):
            assert verb in result.stdout
