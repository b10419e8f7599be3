"""Where CPython keeps the parts of a list and of ``bytes``, so that kernels need not ask for each element.

A list's address is its ``id``; there lie its type, its size and a pointer to the addresses of its elements.
``bytes`` have their content behind type, size and hash.  The stable C API gives the same by three calls an
element, which is most of what walking a list of small payloads costs.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any, Final

#: Positions inside an object, in bytes.
TYPE: Final = 8
SIZE: Final = 16
ITEMS: Final = 24
CONTENT: Final = 32

_new_bytes: Any = None


def layout_is_known() -> bool:
    """Whether this interpreter keeps objects so, which is looked up in some."""
    if sys.implementation.name != "cpython" or sys.byteorder != "little":
        return False
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return False  # others may change a list while it is read
    if (object.__basicsize__, list.__basicsize__, bytes.__basicsize__) != (SIZE, ITEMS + 16, CONTENT + 1):
        return False
    samples = [b"", b"sample", bytes(range(256)) * 4]
    return (
        _word(samples, TYPE) == id(list)
        and _word(samples, SIZE) == len(samples)
        and all(_found(samples, place, sample) for place, sample in enumerate(samples))
    )


def _found(samples: list[bytes], place: int, sample: bytes) -> bool:
    item = ctypes.c_ssize_t.from_address(_word(samples, ITEMS) + 8 * place).value
    return (
        item == id(sample)
        and (_word(sample, TYPE), _word(sample, SIZE)) == (id(bytes), len(sample))
        and ctypes.string_at(item + CONTENT, len(sample)) == sample
    )


def _word(thing: object, position: int) -> int:
    return ctypes.c_ssize_t.from_address(id(thing) + position).value


def address_of(view: memoryview) -> int:
    """Where the first of a writable view's bytes lies, as long as the view is held."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def new_bytes(size: int) -> bytes:
    """``bytes`` that nobody else has seen yet, for a kernel to fill; what they hold is undefined."""
    global _new_bytes
    if _new_bytes is None:
        _new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
        _new_bytes.restype, _new_bytes.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_ssize_t)
    made: bytes = _new_bytes(None, size)
    return made
