"""Compiled kernels on disk, so that only the first start on a machine compiles them.

One file holds all kernels for one processor and one version of Python, Numba and LLVM::

    position  size  field
           0    32  SHA-256 of the sources' digest and the rest of the file
          32     4  size of the head, little-endian
          36     n  head: JSON with the names of the kernels, and whether checksums are fast
        36+n     m  object file (danube.core.kernels.linking)

Reader:  a file whose digest differs (damaged, cut, empty, or made from other sources) is passed over.
Writer:  a temporary file is renamed over the old one.  Processes may write the same file at once.
Errors:  no error leaves this module but those of pack() and unpack().  Where nothing can be written each
start compiles again.

The folders are tried in order: NUMBA_CACHE_DIR alone where it is set; else the one beside the sources, which
an image may have filled and mounted read-only, the user's cache folder, and a private temporary one.
Every user that reaches a folder may read its files: root installs and compiles, another user runs the broker.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sys
import tempfile
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final, NamedTuple

_DIGEST_BYTES: Final = 32
_HEAD_START: Final = 36
_HERE: Final = os.path.dirname(os.path.abspath(__file__))
_PRIVATE: Final = stat.S_IRWXU
_AS_SOURCES: Final = 0o755
_READABLE: Final = 0o644
# Constants of these are compiled into kernels as well.
_SOURCES_BESIDE: Final = ("../batch/format.py", "../http2/frames.py", "../../limits.py")


class Compiled(NamedTuple):
    """All kernels: an object file, and what is in it."""

    names: list[str]
    fast_checksum: bool  # by the processor's instruction
    code: bytes


def switched_off() -> bool:
    """Return whether the environment wants no kernels."""
    return os.environ.get("DANUBE_KERNELS", "").lower() == "off"


def pack(compiled: Compiled) -> bytes:
    """Return what is kept of compiled kernels."""
    head = json.dumps({"names": compiled.names, "fast_checksum": compiled.fast_checksum}).encode()
    body = len(head).to_bytes(4, "little") + head + compiled.code
    return _digest(body) + body


def unpack(content: bytes) -> Compiled:
    """Return what pack() was given; ValueError where the content is damaged or of other sources."""
    if content[:_DIGEST_BYTES] != _digest(content[_DIGEST_BYTES:]):
        raise ValueError("compiled kernels are damaged, or were made from other sources")
    end = _HEAD_START + int.from_bytes(content[_DIGEST_BYTES:_HEAD_START], "little")
    return Compiled(**json.loads(content[_HEAD_START:end]), code=content[end:])


def read() -> bytes | None:
    """Return the first content that a folder has for this machine, undamaged and of a trusted user."""
    name = _file_name()
    return next((found for folder in folders() if (found := _read(folder, name)) is not None), None)


def write(content: bytes) -> bool:
    """Keep content in the first folder that takes it; False where none does."""
    name = _file_name()
    return any(_write(folder, name, content) for folder in folders())


def folders() -> list[str]:
    """Return the folders to look into, in order; the first that takes a file keeps new code."""
    chosen = os.environ.get("NUMBA_CACHE_DIR", "")
    if chosen:
        return [os.path.join(chosen, "danube")]
    found = [os.path.join(_HERE, "__pycache__")]
    home = os.environ.get("XDG_CACHE_HOME", "") or os.path.expanduser("~/.cache")
    if os.path.isabs(home):  # "~" stays as it is where the user has no home
        found.append(os.path.join(home, "danube"))
    try:
        temporary = tempfile.gettempdir()
    except OSError:
        return found  # no place at all can be written
    # Without any other place Python takes the current folder, which no code is loaded from.
    return found if temporary == os.getcwd() else [*found, f"{temporary}/danube-kernels-{os.getuid()}"]


@lru_cache(maxsize=1)
def sources_digest() -> bytes:
    """Return a digest of every file whose code or constants may be part of a kernel."""
    names = sorted(name for name in os.listdir(_HERE) if name.endswith(".py"))
    digest = hashlib.sha256()
    for name in [*names, *_SOURCES_BESIDE]:
        with open(os.path.join(_HERE, name), "rb") as file:
            digest.update(name.encode() + b"\0" + file.read() + b"\0")
    return digest.digest()


def _file_name() -> str:
    """Name everything besides the sources that decides how kernels are compiled."""
    binding: Any = import_module("llvmlite.binding")
    made_for = (
        sys.implementation.cache_tag,
        object.__basicsize__,
        _numba_releases(),
        import_module("llvmlite").__version__,
        binding.get_process_triple(),
        os.environ.get("NUMBA_CPU_NAME", "") or binding.get_host_cpu_name(),
        os.environ.get("NUMBA_CPU_FEATURES") or binding.get_host_cpu_features().flatten(),
    )
    return f"all.{hashlib.sha256(repr(made_for).encode()).hexdigest()[:16]}.kernels"


def _numba_releases() -> list[str]:
    """Names of Numba's releases where it is installed: asking itself would import it, for 0.7 s."""
    spec = find_spec("numba")
    if spec is None or not spec.origin:
        return []
    place = os.path.dirname(os.path.dirname(spec.origin))
    return sorted(name for name in os.listdir(place) if name.startswith("numba-"))


def _digest(body: bytes) -> bytes:
    return hashlib.sha256(sources_digest() + body).digest()


def _trusted(owner: int) -> bool:
    """Return whether code of this user may run here: ourselves, root, and the package's installer."""
    return owner in (0, os.getuid(), os.stat(_HERE).st_uid)


def _read(folder: str, name: str) -> bytes | None:
    """Return the content of an undamaged file of a trusted user."""
    try:
        with open(os.path.join(folder, name), "rb") as file:
            if not _trusted(os.fstat(file.fileno()).st_uid):
                return None
            content = file.read()
    except OSError:
        return None
    return content if content[:_DIGEST_BYTES] == _digest(content[_DIGEST_BYTES:]) else None


def _write(folder: str, name: str, content: bytes) -> bool:
    try:
        os.makedirs(folder, mode=_AS_SOURCES if folder.startswith(_HERE) else _PRIVATE, exist_ok=True)
        if not _trusted(os.lstat(folder).st_uid):
            return False  # another user made it, in a folder open to all
        descriptor, temporary = tempfile.mkstemp(prefix=f"{name}.", dir=folder)
    except OSError:
        return False
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            os.fchmod(descriptor, _READABLE)
        os.replace(temporary, os.path.join(folder, name))
    except OSError:
        _remove(temporary)
        return False
    return True


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass  # the disk that refused the file refuses this as well
