"""Loads, stores and fences on 64-bit words that other processes read and write: the one door.

Two implementations, chosen by machine:

``plain``    x86-64 only.  ``memoryview.cast("Q")[i]`` copies 8 aligned bytes with one ``mov``.  The
             processor keeps loads in order with loads and stores in order with stores (TSO), so a plain
             load acquires and a plain store releases.  It costs 35 ns from Python.
``kernels``  any machine with LLVM: its atomic instructions on the word's address, 100 to 150 ns.

The one order that TSO does not keep is a store before a later load of another word; ``fence`` is for
that (the sleeping protocol of :mod:`danube.ipc.bell` needs it).  On x86-64 it is an uncontended lock:
taking it is a ``lock cmpxchg``, which is a full barrier on x86.

A word here has a single writer.  Values are 0 .. 2**64-1; callers mask their sums with ``WORD_MASK``.
"""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable
from typing import Any, Final

from danube.errors import broken

WORD_BYTES: Final = 8
WORD_MASK: Final = (1 << 64) - 1
TOTAL_STORE_ORDER: Final = platform.machine().lower() in ("x86_64", "amd64")

_barrier_lock = threading.Lock()
_kernels: dict[str, Callable[..., Any]] = {}


def _lock_fence() -> None:
    _barrier_lock.acquire()
    _barrier_lock.release()


fence: Callable[[], None] = _lock_fence
"""Everything before is seen before everything after.  Call it as ``atomics.fence()``."""


class Words:
    """64-bit words over shared memory; word ``i`` lies at byte ``8 * i`` of ``memory``."""

    __slots__ = ("_address", "_view", "load", "store")

    load: Callable[[int], int]
    store: Callable[[int, int], None]

    def __init__(self, memory: memoryview, plain: bool = TOTAL_STORE_ORDER) -> None:
        self._view = memory.cast("Q")
        self._address = 0
        if plain:
            self.load = self._view.__getitem__
            self.store = self._view.__setitem__
            return
        kernels = load_kernels()
        self._address = address = kernels["address"](memory)
        load_acquire, store_release, count = kernels["load"], kernels["store"], len(self._view)

        def load(index: int) -> int:
            if not 0 <= index < count:
                raise IndexError(index)
            return int(load_acquire(address + 8 * index))

        def store(index: int, value: int) -> None:
            if not 0 <= index < count:
                raise IndexError(index)
            store_release(address + 8 * index, value)

        self.load = load
        self.store = store

    def add(self, index: int, amount: int) -> int:
        """Add to a word of which the caller is the only writer; returns the new value."""
        value = (self.load(index) + amount) & WORD_MASK
        self.store(index, value)
        return value


def load_kernels() -> dict[str, Callable[..., Any]]:
    """Make them once per process tree: the supervisor calls it before forking.

    Raises ImportError if llvmlite is missing, which only x86-64 can do without.
    """
    global fence
    if not _kernels:
        _kernels.update(_compile_kernels())
        fence = _kernels["fence"]
    return _kernels


def _compile_kernels() -> dict[str, Callable[..., Any]]:
    """Functions over addresses: load, store, fence and the address of a buffer."""
    import numpy

    from danube.core.kernels.words import compile_words

    words = compile_words()

    def address(memory: memoryview) -> int:
        return int(numpy.frombuffer(memory, dtype=numpy.uint8).ctypes.data)

    return {"load": words.load, "store": words.store, "fence": words.fence, "address": address}


def choose() -> str:
    """Install the accesses for this machine; returns ``"plain"`` or ``"kernels"`` for the start-up log."""
    if TOTAL_STORE_ORDER:
        return "plain"
    try:
        load_kernels()
    except ImportError as error:
        broken("this processor reorders memory and llvmlite is missing", error=str(error))
    return "kernels"
