"""Machine-code kernels for the hot loops; each has a numpy or library twin beside its caller.

Importing this package costs nothing: Numba (0.6 s) is imported by :func:`load` alone, which brokers
call once before they fork and clients may (``danube.load_kernels``).  Callers look at :data:`available`
and use their twin while it is False.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Final, NamedTuple

from danube.core.batch import checksum

available: bool = False
WELL_FORMED: Final = -1  # what checking kernels return; an index >= 0 names the entry at fault
MALFORMED: Final = -2

_MODULES: Final = ("crc", "batch", "columns", "cursor", "http2", "messages")


class Report(NamedTuple):
    """Result of load(): ``compiled`` and ``cached`` name kernels; ``reason`` says why there are none.

    ``warning`` says why the next start will be slow again, if it will.
    """

    available: bool
    compiled: tuple[str, ...]
    cached: tuple[str, ...]
    reason: str = ""
    warning: str = ""


def load(progress: Callable[[str], None] | None = None, *, more: tuple[str, ...] = ()) -> Report:
    """Import Numba, compile every kernel or take it from the on-disk cache, and switch the callers over.

    ``progress`` gets one line per kernel that is really compiled; ``more`` names further modules of
    this package.  Starts no thread, so forking afterwards is safe and shares the code.  Without Numba,
    with one that fails in whatever way, or with DANUBE_KERNELS=off in the environment, nothing changes
    and the report says so.
    """
    global available
    from danube.core.kernels import jit

    if jit.reason:
        return Report(False, (), (), jit.reason)
    try:
        modules = {name: import_module(f"{__name__}.{name}") for name in (*_MODULES, *more)}
        compiled, cached = jit.compile_all(progress)
    except Exception as error:  # an accelerator never stops the program; the twins do the same work
        why = f"{type(error).__name__}: {error}"
        return Report(False, (), (), f"a kernel cannot be compiled by this Numba: {why}")
    if jit.hardware_crc:
        checksum.use_kernel(modules["crc"].crc32c_of)
    available = True
    warning = "no cache folder can be written; NUMBA_CACHE_DIR names one that can" if jit.unkept() else ""
    return Report(True, compiled, cached, warning=warning)


def batch_kernels() -> ModuleType:
    """danube.core.kernels.batch; only while ``available``."""
    return sys.modules[f"{__name__}.batch"]


def column_kernels() -> ModuleType:
    """danube.core.kernels.columns; only while ``available``."""
    return sys.modules[f"{__name__}.columns"]


def http2_kernels() -> ModuleType:
    """danube.core.kernels.http2; only while ``available``."""
    return sys.modules[f"{__name__}.http2"]


def message_kernels() -> ModuleType:
    """danube.core.kernels.messages; only while ``available``."""
    return sys.modules[f"{__name__}.messages"]


def unload() -> None:
    """Go back to the twins, for tests and comparisons; load() is cheap from then on."""
    global available
    available = False
    checksum.use_kernel(None)
