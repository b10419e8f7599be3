"""The one door to Numba: a decorator, a few machine instructions, and plain Python without it.

``@jit("int64(const uint8[::1], int64)")`` registers a kernel for that one signature; ``const``
before an array type accepts read-only arrays as well.  Kernels check no bounds (their callers or they
themselves do) and run without the GIL.  danube.core.kernels.compiling compiles what is registered.

Where Numba cannot be imported, or DANUBE_KERNELS=off is in the environment, ``jit`` returns the function as
it is and :data:`reason` says why.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from typing import Any, Final, TypeVar, cast

from danube.core.kernels.cache import switched_off

_Function = TypeVar("_Function", bound=Callable[..., Any])

# Any: Numba's own annotations differ between its versions.
numba: Any = None
binding: Any = None
ir: Any = None
cgutils: Any = None
sigutils: Any = None
types: Any = None
intrinsic: Any = None


reason = ""
hardware_crc = False
try:
    if switched_off():
        reason = "switched off by DANUBE_KERNELS=off"
    else:
        numba = import_module("numba")
        binding, ir = import_module("llvmlite.binding"), import_module("llvmlite.ir")
        cgutils, sigutils = import_module("numba.core.cgutils"), import_module("numba.core.sigutils")
        types, intrinsic = numba.types, numba.extending.intrinsic
except Exception as error:  # an accelerator that is broken in whatever way must not stop the program
    reason = f"numba cannot be imported: {str(error) or type(error).__name__}"

registered: list[tuple[Any, Any]] = []
_CONST: Final = re.compile(r"\bconst\s+")


def jit(signature: str) -> Callable[[_Function], _Function]:
    """Register a kernel for ``signature``, or return the function unchanged without Numba."""
    if reason:
        return lambda function: function

    def register(function: _Function) -> _Function:
        # Without counted references: a kernel owns no memory, and its code needs nothing of Numba.
        dispatcher = numba.njit(boundscheck=False, _nrt=False, no_cfunc_wrapper=True)(function)
        registered.append((dispatcher, _arguments(signature)))
        return cast(_Function, dispatcher)

    return register


def inline(function: _Function) -> _Function:
    """A part of kernels, compiled into each that calls it; unchanged without Numba."""
    if reason:
        return function
    return cast(_Function, numba.njit(boundscheck=False, _nrt=False, inline="always")(function))


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


def _runs_on(prefix: str) -> bool:
    return str(binding.get_process_triple()).startswith(prefix)


if not reason:
    _X86 = _runs_on("x86_64") and _cpu_has("sse4.2")
    _ARM = _runs_on("aarch64") and _cpu_has("crc")
    hardware_crc = _X86 or _ARM
    _BYTE, _WORD, _HALF = ir.IntType(8), ir.IntType(64), ir.IntType(32)

    def _address(context: Any, builder: Any, array_type: Any, array: Any, position: Any, width: Any) -> Any:
        """Pointer to ``position`` bytes into a byte array, as a pointer to ``width``."""
        struct = cgutils.create_struct_proxy(array_type)(context, builder, value=array)
        return builder.bitcast(builder.gep(struct.data, [position]), width.as_pointer())

    def _loader(width: Any, result: Any) -> Any:
        def typed(typing_context: Any, data: Any, position: Any) -> Any:
            def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
                pointer = _address(context, builder, signature.args[0], values[0], values[1], width)
                loaded = builder.load(pointer)
                loaded.align = 1
                return loaded

            return result(data, types.intp), generate

        return intrinsic(typed)

    def _storer(width: Any, value_type: Any) -> Any:
        def typed(typing_context: Any, data: Any, position: Any, value: Any) -> Any:
            def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
                pointer = _address(context, builder, signature.args[0], values[0], values[1], width)
                builder.store(values[2], pointer).align = 1
                return context.get_dummy_value()

            return types.void(data, types.intp, value_type), generate

        return intrinsic(typed)

    #: ``load_x(bytes, position)`` and ``store_x(bytes, position, value)``: little-endian, at any alignment.
    load_word = _loader(_WORD, types.uint64)
    load_int = _loader(_HALF, types.int32)
    load_half = _loader(_HALF, types.uint32)
    load_short = _loader(ir.IntType(16), types.uint16)
    store_word = _storer(_WORD, types.uint64)
    store_half = _storer(_HALF, types.uint32)

    @intrinsic  # type: ignore[untyped-decorator]
    def copy_bytes(
        typing_context: Any, target: Any, target_position: Any, source: Any, source_position: Any, size: Any
    ) -> Any:
        """memcpy between two byte arrays that do not overlap."""

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            to = _address(context, builder, signature.args[0], values[0], values[1], _BYTE)
            origin = _address(context, builder, signature.args[2], values[2], values[3], _BYTE)
            cgutils.raw_memcpy(builder, to, origin, values[4], 1)
            return context.get_dummy_value()

        return types.void(target, types.intp, source, types.intp, types.intp), generate

    def _fetcher(width: Any, result: Any) -> Any:
        def typed(typing_context: Any, address: Any) -> Any:
            def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
                loaded = builder.load(builder.inttoptr(values[0], width.as_pointer()))
                loaded.align = 1
                return loaded

            return result(types.intp), generate

        return intrinsic(typed)

    #: ``x_at(address)``: what lies there, at any alignment.
    word_at = _fetcher(_WORD, types.uint64)
    octet_at = _fetcher(_BYTE, types.uint8)

    def _crc_instruction(x86_name: str, arm_name: str, width: Any, value_type: Any) -> Any:
        """The CPU's CRC32C step: ``(checksum, value) -> checksum``, all in 64-bit numbers."""

        def typed(typing_context: Any, checksum: Any, value: Any) -> Any:
            def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
                before = values[0] if _X86 and width is _WORD else builder.trunc(values[0], _HALF)
                result = _WORD if _X86 and width is _WORD else _HALF
                kind = ir.FunctionType(result, (before.type, width if _X86 or width is _WORD else _HALF))
                function = cgutils.get_or_insert_function(
                    builder.module, kind, x86_name if _X86 else arm_name
                )
                value_in = values[1] if width is _WORD or not _X86 else builder.trunc(values[1], width)
                after = builder.call(function, (before, value_in))
                return after if result is _WORD else builder.zext(after, _WORD)

            return types.uint64(types.uint64, value_type), generate

        return intrinsic(typed)

    crc_word = _crc_instruction("llvm.x86.sse42.crc32.64.64", "llvm.aarch64.crc32cx", _WORD, types.uint64)
    crc_octet = _crc_instruction("llvm.x86.sse42.crc32.32.8", "llvm.aarch64.crc32cb", _BYTE, types.uint32)
