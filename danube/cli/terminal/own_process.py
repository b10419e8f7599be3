"""Command line and environment of a further process of this Danube (``start --detach``, ``bench``, ``load``).

``python -m`` puts the current folder first on the module path, and so does an empty entry of PYTHONPATH: a
``uuid.py`` or a folder ``danube`` that happens to lie there would be executed.  Both are kept out.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path

import danube


def own_command(module: str, *words: str) -> list[str]:
    """Return the command line that runs ``module`` of this package with ``words`` as its arguments."""
    return [sys.executable, "-P", "-m", module, *words]


def own_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` with a PYTHONPATH of absolute folders that finds this package.

    A checkout that is not installed is found through the current folder alone, which ``-P`` takes away;
    then the checkout's folder is added by name.
    """
    folders = [folder for folder in environ.get("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(folder)]
    root = str(Path(danube.__file__).resolve().parents[1])
    if root not in folders and not _installed():
        folders.append(root)
    kept = {name: text for name, text in environ.items() if name != "PYTHONPATH"}
    return kept | {"PYTHONPATH": os.pathsep.join(folders)} if folders else kept


def _installed() -> bool:
    """Whether danube can be imported without the current folder and without PYTHONPATH."""
    chosen = {"", os.getcwd()} | set(os.environ.get("PYTHONPATH", "").split(os.pathsep))
    folders = [folder for folder in sys.path if folder not in chosen]
    others = [finder for finder in sys.meta_path if finder is not PathFinder]
    return (
        any(finder.find_spec(danube.__name__, None) for finder in others)
        or PathFinder.find_spec(danube.__name__, folders) is not None
    )
