"""Compiled code, linked into this process: entries as functions of Python.

Needs LLVM's linker (llvmlite, 0.08 s), and not Numba.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from importlib import import_module
from types import SimpleNamespace
from typing import Any, Final

from danube.core.kernels import entries

_MAKE: Final = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)
_OBJECT_FILES: Final = (b"\x7fELF", b"\xcf\xfa\xed\xfe", b"\x64\x86", b"\x64\xaa")  # of Linux, macOS, Windows
_FASTCALL: Final = 0x80  # METH_FASTCALL


class _Method(ctypes.Structure):
    """PyMethodDef."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("entry", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


_kept: list[Any] = []  # code that functions of this process run: for good


def target_machine() -> Any:
    """LLVM's machine for the processor that this is, as Numba sets it up."""
    binding: Any = import_module("llvmlite.binding")
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return binding.Target.from_default_triple().create_target_machine(jit=True, codemodel="jitdefault", opt=3)


def link(code: bytes, names: Iterable[str]) -> Any:
    """Return the entries of an object file by their names; raise ValueError or LookupError without them."""
    if not code.startswith(_OBJECT_FILES):
        raise ValueError("compiled kernels are no object file")  # LLVM would end the process
    binding: Any = import_module("llvmlite.binding")
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), target_machine())
    file = binding.ObjectFileRef.from_data(code)
    engine.add_object_file(file)
    engine.finalize_object()
    _kept.extend((engine, file))
    return SimpleNamespace(
        **{name: _function(engine.get_function_address(entries.PREFIX + name), name) for name in names}
    )


def _function(address: int, name: str) -> Any:
    if not address:
        raise LookupError(f"no entry {name}")
    method = _Method(name.encode(), address, _FASTCALL, None)
    _kept.append(method)
    make = _MAKE(("PyCFunction_NewEx", ctypes.pythonapi))
    return make(ctypes.addressof(method), entries.addresses(), None)
