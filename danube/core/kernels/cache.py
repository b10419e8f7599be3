"""Compiled kernels on disk, so that only the first start on a machine compiles them.

One file holds one kernel for one signature, one processor and one version of Python and Numba::

    position  size  field
           0    32  SHA-256 of the sources' digest and the rest of the file
          32     n  the compiled result, as numba.core.serialize writes it

Reader:  a file whose digest differs (damaged, cut, empty, or made from other sources) is passed over.
Writer:  a temporary file is renamed over the old one.  Processes may write the same file at once.
Errors:  no error leaves this module.  Where nothing can be written each start compiles again.

The folders are tried in order: NUMBA_CACHE_DIR alone where it is set; else the one beside the sources, which
an image may have filled and mounted read-only, the user's cache folder, and a private temporary one.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sys
import tempfile
from functools import lru_cache
from typing import Any, Final

_DIGEST_BYTES: Final = 32
_HERE: Final = os.path.dirname(os.path.abspath(__file__))
_PRIVATE: Final = stat.S_IRWXU
# Constants of these are compiled into kernels as well.
_SOURCES_BESIDE: Final = ("../batch/format.py", "../../limits.py")


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
    """Return a digest of every file whose code or constants may be part of a kernel.

    Numba would compare only the file that a kernel stands in; a kernel also contains parts of others.
    """
    names = sorted(name for name in os.listdir(_HERE) if name.endswith(".py"))
    digest = hashlib.sha256()
    for name in [*names, *_SOURCES_BESIDE]:
        with open(os.path.join(_HERE, name), "rb") as file:
            digest.update(name.encode() + b"\0" + file.read() + b"\0")
    return digest.digest()


class KernelCache:
    """The cache of one kernel, as numba's dispatcher calls it (numba.core.caching._Cache)."""

    cache_path: str | None = None  # of the folder that the kernel came from or went to

    def __init__(self, numba: Any, function: Any) -> None:
        self._numba = numba
        self._name = f"{function.__module__.rpartition('.')[2]}.{function.__qualname__}"

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        """Return the compiled result for these argument types, or None."""
        try:
            # Numba's own cache calls refresh(), which imports all that compiling needs, too.
            self._numba.core.runtime.rtsys.initialize(target_context)
            name = self._file_name(signature, target_context.codegen())
            for folder in folders():
                body = _read(folder, name)
                if body is not None:
                    payload = self._numba.core.serialize.loads(body)
                    found = self._numba.core.compiler.CompileResult._rebuild(target_context, *payload)
                    self.cache_path = folder
                    return found
        except Exception:  # whatever Numba meets in there: compiling is always right
            return None
        return None

    def save_overload(self, signature: Any, result: Any) -> None:
        """Keep a compiled result in the first folder that takes it."""
        if result.lifted or result.library.has_dynamic_globals:
            return  # contains addresses of this process
        try:
            name = self._file_name(signature, result.codegen)
            body = self._numba.core.serialize.dumps(result._reduce())
        except Exception:
            return
        self.cache_path = next((folder for folder in folders() if _write(folder, name, body)), None)

    def flush(self) -> None:
        """Forget nothing: files of other versions are replaced when they are needed."""

    enable = disable = flush

    def _file_name(self, signature: Any, codegen: Any) -> str:
        made_for = (
            sys.implementation.cache_tag,
            self._numba.__version__,
            *codegen.magic_tuple(),
            str(signature),
        )
        return f"{self._name}.{hashlib.sha256(repr(made_for).encode()).hexdigest()[:16]}.kernel"


def _digest(body: bytes) -> bytes:
    return hashlib.sha256(sources_digest() + body).digest()


def _trusted(owner: int) -> bool:
    """Return whether code of this user may run here: ourselves, root, and the package's installer."""
    return owner in (0, os.getuid(), os.stat(_HERE).st_uid)


def _read(folder: str, name: str) -> bytes | None:
    """Return the body of an undamaged file of a trusted user."""
    try:
        with open(os.path.join(folder, name), "rb") as file:
            if not _trusted(os.fstat(file.fileno()).st_uid):
                return None
            content = file.read()
    except OSError:
        return None
    body = content[_DIGEST_BYTES:]
    return body if content[:_DIGEST_BYTES] == _digest(body) else None


def _write(folder: str, name: str, body: bytes) -> bool:
    try:
        os.makedirs(folder, mode=_PRIVATE, exist_ok=True)
        if not _trusted(os.lstat(folder).st_uid):
            return False  # another user made it, in a folder open to all
        descriptor, temporary = tempfile.mkstemp(prefix=f"{name}.", dir=folder)
    except OSError:
        return False
    try:
        with open(descriptor, "wb") as file:
            file.write(_digest(body) + body)
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
