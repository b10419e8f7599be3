"""Compiling all kernels to one object file, by Numba; some 20 s of one core."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, Final

from danube.core.kernels import cursor
from danube.core.kernels.cache import Compiled
from danube.core.kernels.entries import PREFIX, ArrayTaken, ArrayValue, Taken, add_entry

MODULES: Final = ("crc", "batch", "columns", "http2", "joining", "messages", "segment")


def compile_all(progress: Callable[[str], None] | None = None) -> Compiled:
    """Compile every kernel; ``progress`` gets one line for each."""
    jit: Any = import_module("danube.core.kernels.jit")
    if jit.reason:
        raise ImportError(jit.reason)
    for name in MODULES:
        import_module(f"danube.core.kernels.{name}")
    for function, signature in cursor.SIGNATURES.items():
        jit.jit(signature)(function)
    results: list[Any] = []
    for number, (dispatcher, arguments) in enumerate(jit.registered, 1):
        dispatcher.compile(arguments)
        results.append(dispatcher.overloads[arguments])
        if progress is not None:
            progress(f"compiled kernel {dispatcher.py_func.__name__} ({number} of {len(jit.registered)})")
    context = results[0].target_context
    module = context.create_module("danube.entries")
    names = [dispatcher.py_func.__name__ for dispatcher, _ in jit.registered]
    for name, result in zip(names, results, strict=True):
        _add(module, context, name, result)
    library = context.codegen().create_library("danube.kernels")
    library.enable_object_caching()
    with import_module("numba.core.compiler_lock").global_compiler_lock:
        library.add_ir_module(module)
        for result in results:
            library.add_linking_library(result.library)
        library.finalize()
    _, _, (code, _) = library.serialize_using_object_code()
    return Compiled(names, bool(jit.hardware_crc), bytes(code))


def _add(module: Any, context: Any, name: str, result: Any) -> None:
    """The entry of one compiled kernel, which has the calling convention of Numba."""
    ir, arrayobj = import_module("llvmlite.ir"), import_module("numba.np.arrayobj")
    gives, takes = result.signature.return_type, result.signature.args
    kind = context.call_conv.get_function_type(gives, takes)
    callee = ir.Function(module, kind, result.fndesc.llvm_func_name)

    def call(builder: Any, values: list[Any]) -> tuple[Any, Any]:
        given = [
            _array(context, builder, arrayobj, taken, value) if isinstance(value, ArrayValue) else value
            for taken, value in zip(takes, values, strict=True)
        ]
        status, out = context.call_conv.call_function(builder, callee, gives, takes, given)
        return status.is_error, out

    add_entry(module, PREFIX + name, [_taken(one) for one in takes], _kind_name(gives), call)


def _taken(kind: Any) -> Taken:
    if hasattr(kind, "ndim"):
        return ArrayTaken(str(kind.dtype), kind.ndim, kind.mutable)
    return _kind_name(kind)


def _kind_name(kind: Any) -> str:
    return "boolean" if str(kind).startswith("bool") else str(kind)


def _array(context: Any, builder: Any, arrayobj: Any, kind: Any, value: ArrayValue) -> Any:
    """The array as Numba passes it; it does not own its memory."""
    array = arrayobj.make_array(kind)(context, builder)
    itemsize = kind.dtype.bitwidth // 8
    word = value.data.type
    strides = [word(itemsize)]
    for size in reversed(value.shape[1:]):
        strides.insert(0, builder.mul(strides[0], size))
    arrayobj.populate_array(
        array, data=builder.inttoptr(value.data, array.data.type), shape=value.shape, strides=strides,
        itemsize=word(itemsize), meminfo=None,
    )  # fmt: skip
    return array._getvalue()
