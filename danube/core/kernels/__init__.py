"""Machine-code kernels for the hot loops; each has a numpy or library twin beside its caller.

Importing this package costs nothing.  :func:`load` takes compiled kernels from the disk, which needs LLVM's
linker alone (0.1 s), or compiles them with Numba (some 20 s) and keeps them.  Callers look at
:data:`available` and use their twin while it is False; both give the same, so a process may go over to
kernels between any two calls.  Kernels of cursors are their own twins: they run as they are written.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Final, NamedTuple

from danube.core.batch import checksum

available: bool = False
compiled: Any = None
"""The kernels, by their names; only while ``available``."""

WELL_FORMED: Final = -1  # what checking kernels return; an index >= 0 names the entry at fault
MALFORMED: Final = -2

_fast_checksum = False
_CHECKED: Final = (b"123456789", 0xE3069283)  # a CRC32C that everybody knows


class Report(NamedTuple):
    """Result of a load; ``reason`` says why there are no kernels, empty where they can be compiled.

    ``warning`` says why the next start will have none either, if it will.
    """

    available: bool
    reason: str = ""
    warning: str = ""


def load(progress: Callable[[str], None] | None = None) -> Report:
    """Take all kernels from the disk, or compile them, and switch the callers over.

    ``progress`` gets one line per kernel that is really compiled.  Starts no thread, so forking afterwards
    is safe and shares the code.  Without Numba, with one that fails in whatever way, or with
    DANUBE_KERNELS=off in the environment, nothing changes and the report says so.
    """
    report = load_kept()
    if report.available or report.reason:
        return report
    try:
        content, warning = compile_kept(progress)
        install(content)
    except Exception as error:  # an accelerator never stops the program; the twins do the same work
        return Report(False, f"kernels cannot be compiled: {type(error).__name__}: {error}")
    return Report(True, warning=warning)


def load_kept() -> Report:
    """Take all kernels from the disk.  Where there are none, ``reason`` is empty if they can be compiled."""
    from danube.core.kernels import cache, entries

    if cache.switched_off():
        return Report(False, "switched off by DANUBE_KERNELS=off")
    if compiled is not None:
        _switch_over()
        return Report(True)
    if find_spec("numba") is None:
        return Report(False, "numba is not installed")
    try:
        if not entries.arrays_fit():
            return Report(False, "this numpy lays out arrays in another way than kernels read them")
        content = cache.read()
    except Exception as error:
        return Report(False, f"kernels cannot be loaded: {type(error).__name__}: {error}")
    if content is not None:
        try:
            install(content)
        except Exception:
            return Report(False)  # compiling is always right
    return Report(available)


def compile_kept(progress: Callable[[str], None] | None = None) -> tuple[bytes, str]:
    """Compile all kernels and keep them; return content for install(), and a warning where they are not kept.

    Raises whatever Numba raises.
    """
    from danube.core.kernels import cache
    from danube.core.kernels.compiling import compile_all

    content = cache.pack(compile_all(progress))
    kept = cache.write(content)
    return content, "" if kept else "no cache folder can be written; NUMBA_CACHE_DIR names one that can"


def install(content: bytes) -> None:
    """Switch the callers over to the kernels in ``content``; ValueError where it is not what it should be."""
    global compiled, _fast_checksum
    from danube.core.kernels import cache, linking

    unpacked = cache.unpack(content)
    linked = linking.link(unpacked.code, unpacked.names)
    octets, expected = _CHECKED
    if _checksum_by(linked)(memoryview(octets)) != expected:
        raise ValueError("compiled kernels compute a wrong checksum")
    compiled, _fast_checksum = linked, unpacked.fast_checksum
    _switch_over()


def _switch_over() -> None:
    global available
    if _fast_checksum:
        checksum.use_kernel(_checksum_by(compiled))
    available = True


def _checksum_by(linked: Any) -> Callable[[memoryview], int]:
    """CRC32C of a contiguous buffer, writable or not."""
    import numpy as np

    crc32c = linked.crc32c

    def crc32c_of(data: memoryview) -> int:
        octets = np.frombuffer(data, np.uint8)
        return int(crc32c(octets, 0, len(octets)))

    return crc32c_of


def unload() -> None:
    """Go back to the twins, for tests and comparisons; load() is cheap from then on."""
    global available
    available = False
    checksum.use_kernel(None)
