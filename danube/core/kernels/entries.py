"""Doors from Python into machine code: how arguments are taken apart and a result is made.

An entry is a C function with the signature of METH_FASTCALL, in which every pointer is a word:
``entry(self, arguments, count)``.  All that it uses of Python it finds in the bytes object ``self``, as
:func:`addresses` makes it.  So compiled code names no address of a process, and may be kept on disk.

Arrays are read as ``PyArrayObject_fields`` has them, which is the same in numpy 1 and 2.  No kernel is loaded
where :func:`arrays_fit` finds another layout.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

_FUNCTIONS: Final = (
    "PyErr_SetString", "PyErr_Occurred", "PyType_IsSubtype", "PyLong_AsLongLong",
    "PyLong_AsUnsignedLongLongMask", "PyObject_IsTrue", "PyEval_SaveThread", "PyEval_RestoreThread",
    "PyLong_FromLongLong", "PyLong_FromUnsignedLongLong", "PyBool_FromLong", "Py_IncRef",
)  # fmt: skip
_OBJECTS: Final = (np.ndarray, None, TypeError, RuntimeError)
_NDARRAY, _NONE, _TYPE_ERROR, _RUNTIME_ERROR = range(len(_FUNCTIONS), len(_FUNCTIONS) + len(_OBJECTS))

PREFIX: Final = "danube_kernel_"  # of entries' names in an object file

_HEAD: Final = object.__basicsize__  # of every object; its last word is the type
_TABLE: Final = bytes.__basicsize__ - 1  # where the octets of a bytes object lie in it
_DATA, _DIMENSIONS_COUNT, _DIMENSIONS, _DESCRIPTION, _FLAGS = (_HEAD + at for at in (0, 8, 16, 40, 48))
_BYTE_ORDER, _TYPE_NUMBER = _HEAD + 10, _HEAD + 12  # of a description
_UNFIT: Final = "an argument is not what it takes"
_CONTIGUOUS, _ALIGNED, _WRITEABLE = 0x1, 0x100, 0x400


class ArrayTaken(NamedTuple):
    """An argument that is an array, contiguous in C's order."""

    dtype: str
    dimensions: int
    writable: bool


class ArrayValue(NamedTuple):
    """An array inside of an entry: words."""

    data: Any
    shape: list[Any]


Taken = ArrayTaken | str  # "int64", "uint64" or "boolean"
Call = Callable[[Any, list[Any]], tuple[Any, Any]]  # (builder, values): has it failed (None: never), result


def addresses() -> bytes:
    """Return what entries of this process get as ``self``."""
    functions = [ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value for name in _FUNCTIONS]
    return struct.pack(f"{len(_FUNCTIONS) + len(_OBJECTS)}Q", *functions, *map(id, _OBJECTS))


def arrays_fit() -> bool:
    """Whether this numpy's arrays lie as entries read them."""
    samples = [np.zeros((3, 5), one) for one in "bBhHiIlLqQ?"]
    samples += [np.zeros((6, 5), ">i8")[::2], np.frombuffer(bytes(15), np.uint8).reshape(5, 3)]
    return all(map(_lies_as_read, samples))


def _lies_as_read(array: Any) -> bool:
    """Compare what is read with what numpy says; dimensions come last, as they are behind a pointer."""
    flags, dtype = array.flags, array.dtype
    expected = (
        (_CONTIGUOUS if flags.c_contiguous else 0)
        | (_ALIGNED if flags.aligned else 0)
        | (_WRITEABLE if flags.writeable else 0)
    )
    at, octet = id(array), ctypes.c_uint8.from_address
    half, word = ctypes.c_int32.from_address, ctypes.c_uint64.from_address
    return (
        word(at + _DATA).value == array.__array_interface__["data"][0]
        and half(at + _DIMENSIONS_COUNT).value == array.ndim
        and word(at + _DESCRIPTION).value == id(dtype)
        and half(at + _FLAGS).value & (_CONTIGUOUS | _ALIGNED | _WRITEABLE) == expected
        and half(id(dtype) + _TYPE_NUMBER).value == dtype.num
        and (octet(id(dtype) + _BYTE_ORDER).value == ord(">")) == (dtype.byteorder == ">")
        and tuple((ctypes.c_int64 * 2).from_address(word(at + _DIMENSIONS).value)) == array.shape
    )


def add_entry(
    module: Any, name: str, takes: Sequence[Taken], gives: str, call: Call, *, keeps_gil: bool = False
) -> None:
    """Add the entry ``name`` to a module of LLVM; ``gives`` is a number's type, "boolean" or "none"."""
    entry = _Entry(module, name)
    entry.expect(entry.builder.icmp_unsigned("==", entry.count, entry.word(len(takes))))
    values = [entry.take(index, taken) for index, taken in enumerate(takes)]
    if keeps_gil:
        failed, result = call(entry.builder, values)
    else:
        state = entry.use("PyEval_SaveThread")
        failed, result = call(entry.builder, values)
        entry.use("PyEval_RestoreThread", state)
    if failed is not None:
        entry.expect(entry.builder.not_(failed), "failed", _RUNTIME_ERROR)
    entry.give(gives, result)


class _Entry:
    """One entry while it is being built."""

    def __init__(self, module: Any, name: str) -> None:
        from llvmlite import ir

        self._ir = ir
        self._module = module
        self._name = name
        self._word = ir.IntType(64)
        self._function = ir.Function(module, ir.FunctionType(self._word, [self._word] * 3), name)
        self._self, self._arguments, self.count = self._function.args
        self.builder = ir.IRBuilder(self._function.append_basic_block())
        self._refusals: dict[str, Any] = {}

    def word(self, value: int) -> Any:
        return self._word(value)

    def at(self, base: Any, offset: int, bits: int = 64) -> Any:
        """Read a number ``offset`` bytes behind the word ``base``."""
        place = self.builder.add(base, self.word(offset))
        kind = self._ir.IntType(bits)
        return self.builder.load(self.builder.inttoptr(place, kind.as_pointer()))

    def _address(self, index: int) -> Any:
        return self.at(self._self, _TABLE + 8 * index)

    def use(self, name: str, *words: Any) -> Any:
        """Call a function of Python; its result is a word."""
        kind = self._ir.FunctionType(self._word, [self._word] * len(words))
        function = self.builder.inttoptr(self._address(_FUNCTIONS.index(name)), kind.as_pointer())
        return self.builder.call(function, words)

    def expect(self, holds: Any, what: str = _UNFIT, kind: int = _TYPE_ERROR) -> None:
        """Go on where ``holds``; leave with an exception else."""
        rest = self._function.append_basic_block()
        self.builder.cbranch(holds, rest, self._refusal(what, kind))
        self.builder.position_at_end(rest)

    def _refusal(self, what: str, kind: int) -> Any:
        if what not in self._refusals:
            ir, here = self._ir, self.builder.block
            self._refusals[what] = block = self._function.append_basic_block()
            self.builder.position_at_end(block)
            text = bytearray(f"kernel {self._name}: {what}".encode() + b"\0")
            constant = ir.Constant(ir.ArrayType(ir.IntType(8), len(text)), text)
            name = f"{self._name}.refusal.{len(self._refusals)}"
            place = ir.GlobalVariable(self._module, constant.type, name)
            place.linkage, place.global_constant, place.initializer = "internal", True, constant
            self.use("PyErr_SetString", self._address(kind), self.builder.ptrtoint(place, self._word))
            self.builder.ret(self.word(0))
            self.builder.position_at_end(here)
        return self._refusals[what]

    def take(self, index: int, taken: Taken) -> Any:
        """The value of an argument; leaves the entry where it is of another kind."""
        given = self.at(self._arguments, 8 * index)
        if isinstance(taken, ArrayTaken):
            return self._take_array(given, taken)
        if taken == "boolean":
            number = self.builder.trunc(self.use("PyObject_IsTrue", given), self._ir.IntType(32))
            self._raise_pending(self.builder.icmp_signed("<", number, number.type(0)))
            return self.builder.icmp_signed("!=", number, number.type(0))
        signed = taken == "int64"
        number = self.use("PyLong_AsLongLong" if signed else "PyLong_AsUnsignedLongLongMask", given)
        self._raise_pending(self.builder.icmp_signed("==", number, self.word(-1)))
        return number

    def _raise_pending(self, doubtful: Any) -> None:
        """Leave with the exception that a function of Python has raised."""
        with self.builder.if_then(doubtful):
            raised = self.builder.icmp_unsigned("!=", self.use("PyErr_Occurred"), self.word(0))
            with self.builder.if_then(raised):
                self.builder.ret(self.word(0))

    def _take_array(self, given: Any, taken: ArrayTaken) -> ArrayValue:
        builder = self.builder
        kind, wanted = self.at(given, _HEAD - 8), self._address(_NDARRAY)
        with builder.if_then(builder.icmp_unsigned("!=", kind, wanted)):
            derived = builder.trunc(self.use("PyType_IsSubtype", kind, wanted), self._ir.IntType(32))
            self.expect(builder.icmp_unsigned("!=", derived, derived.type(0)))
        half = self._ir.IntType(32)
        description = self.at(given, _DESCRIPTION)
        number = self.at(description, _TYPE_NUMBER, 32)
        known = [builder.icmp_unsigned("==", number, half(one)) for one in _type_numbers(taken.dtype)]
        fits = known[0] if len(known) == 1 else builder.or_(*known)
        order = self.at(description, _BYTE_ORDER, 8)
        fits = builder.and_(fits, builder.icmp_unsigned("!=", order, order.type(ord(">"))))
        count = self.at(given, _DIMENSIONS_COUNT, 32)
        fits = builder.and_(fits, builder.icmp_unsigned("==", count, half(taken.dimensions)))
        needed = half(_CONTIGUOUS | _ALIGNED | (_WRITEABLE if taken.writable else 0))
        flags = builder.and_(self.at(given, _FLAGS, 32), needed)
        self.expect(builder.and_(fits, builder.icmp_unsigned("==", flags, needed)))
        dimensions = self.at(given, _DIMENSIONS)
        return ArrayValue(
            self.at(given, _DATA), [self.at(dimensions, 8 * index) for index in range(taken.dimensions)]
        )

    def give(self, gives: str, result: Any) -> None:
        builder = self.builder
        if gives == "none":
            none = self._address(_NONE)
            self.use("Py_IncRef", none)
            builder.ret(none)
        elif gives == "boolean":
            builder.ret(self.use("PyBool_FromLong", builder.zext(result, self._word)))
        elif gives == "int64":
            builder.ret(self.use("PyLong_FromLongLong", result))
        else:
            wide = result if result.type == self._word else builder.zext(result, self._word)
            builder.ret(self.use("PyLong_FromUnsignedLongLong", wide))


def _type_numbers(dtype: str) -> list[int]:
    """Numbers of the types that are ``dtype`` on this machine: C has two names for one of 64 or 32 bits."""
    wanted = np.dtype(dtype)
    same = [one for one in map(np.dtype, "bBhHiIlLqQ?") if one == wanted]
    return sorted({one.num for one in same})
