"""The one door to Numba: a decorator, a few machine instructions, and plain Python without it.

``@jit("int64(const uint8[::1], int64)")`` registers a kernel for that one signature; ``const``
before an array type accepts read-only arrays as well.  Kernels release the GIL, check no bounds
(their callers or they themselves do) and are kept in Numba's on-disk cache.  They are compiled by
:func:`compile_all`, or on the first call where nobody did.

Where Numba is missing, or DANUBE_KERNELS=off is in the environment, ``jit`` returns the function as
it is and :data:`reason` says why.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any, Final, TypeVar

import numpy as np

_Function = TypeVar("_Function", bound=Callable[..., Any])

reason = ""
hardware_crc = False
try:
    if os.environ.get("DANUBE_KERNELS", "").lower() == "off":
        reason = "switched off by DANUBE_KERNELS=off"
    else:
        import numba
        from llvmlite import binding, ir
        from numba.core import cgutils, sigutils, types
        from numba.extending import intrinsic
except ImportError as error:
    reason = f"numba cannot be imported: {error}"

_registered: list[tuple[Any, Any]] = []
_CONST: Final = re.compile(r"\bconst\s+")


def jit(signature: str) -> Callable[[_Function], _Function]:
    """Register a kernel for ``signature``, or return the function unchanged without Numba."""
    if reason:
        return lambda function: function

    def register(function: _Function) -> _Function:
        dispatcher = numba.njit(cache=True, nogil=True, boundscheck=False)(function)
        _registered.append((dispatcher, _arguments(signature)))
        return dispatcher  # type: ignore[no-any-return]

    return register


def compile_all(progress: Callable[[str], None] | None = None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Compile every registered kernel or load it from the cache; return the names of both kinds."""
    compiled: list[str] = []
    cached: list[str] = []
    for number, (dispatcher, arguments) in enumerate(_registered, 1):
        name = dispatcher.py_func.__name__
        if not dispatcher.signatures:
            dispatcher.compile(arguments)
            dispatcher.disable_compile()
        if dispatcher.stats.cache_hits:
            cached.append(name)
            continue
        compiled.append(name)
        if progress is not None:
            progress(f"compiled kernel {name} ({number} of {len(_registered)}), for this and later starts")
    return tuple(compiled), tuple(cached)


def _arguments(signature: str) -> tuple[Any, ...]:
    """Numba types of the arguments, read-only where the text says ``const``."""
    arguments, _ = sigutils.normalize_signature(_CONST.sub("", signature))
    texts = re.split(r",(?![^\[(]*[\])])", signature[signature.index("(") + 1 : -1]) if arguments else []
    return tuple(
        argument.copy(readonly=True) if _CONST.search(text) else argument
        for argument, text in zip(arguments, texts, strict=True)
    )


def _cpu_has(feature: str) -> bool:
    """Whether the CPU and the target that Numba compiles for have ``feature``."""
    if numba.config.CPU_NAME or numba.config.CPU_FEATURES:
        return feature in (numba.config.CPU_FEATURES or "")
    return bool(binding.get_host_cpu_features().get(feature, False))


def _is_architecture(prefix: str) -> bool:
    return str(binding.get_process_triple()).startswith(prefix)
