"""Another build of this program: the same files but for some, in a directory of its own."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tests.broker_process import ROOT


class Build(NamedTuple):
    version: str
    environment: dict[str, str]  # in which ``python -m danube`` runs it


def other_build(directory: Path, changes: Mapping[str, tuple[str, str]]) -> dict[str, str]:
    """The environment in which ``python -m danube`` runs it.

    ``changes``: by path below ``danube``, a piece of that file (there once) and what stands there instead.
    All other files are links, so that what was compiled of them is used.
    """
    changed = {Path(name): piece for name, piece in changes.items()}
    folders = {Path(), *(parent for path in changed for parent in path.parents)}
    for folder in sorted(folders):
        made = directory / "danube" / folder
        made.mkdir(parents=True)
        for entry in (ROOT / "danube" / folder).iterdir():
            below = folder / entry.name
            if below not in changed and below not in folders and entry.name != "__pycache__":
                (made / entry.name).symlink_to(entry)
    for path, (old, new) in changed.items():
        text = (ROOT / "danube" / path).read_text()
        assert text.count(old) == 1, f"{path} holds {old!r} {text.count(old)} times"
        (directory / "danube" / path).write_text(text.replace(old, new))
    return _environment(directory)


def named_build(directory: Path, name: str) -> Build | None:
    """Return the build of a wheel, a commit or a tag; None where git is not there or does not know it."""
    if name.endswith(".whl"):
        with zipfile.ZipFile(name) as wheel:
            wheel.extractall(directory)
    elif shutil.which("git") is None:
        return None
    else:
        archive = subprocess.run(["git", "archive", name, "danube"], cwd=ROOT, capture_output=True)
        if archive.returncode:
            return None
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
            files.extractall(directory, filter="data")
    kernels = directory / "danube/core/kernels/__pycache__"
    kernels.mkdir(exist_ok=True)
    for kept in (ROOT / "danube/core/kernels/__pycache__").glob("*.kernels"):
        shutil.copy(kept, kernels)  # used where they were made from the same sources
    version = re.search(r'__version__ = "(.+)"', (directory / "danube/__init__.py").read_text())
    assert version is not None
    return Build(version[1], _environment(directory))


def _environment(directory: Path) -> dict[str, str]:
    return {"PYTHONPATH": str(directory), "PYTHONSAFEPATH": "1"}
