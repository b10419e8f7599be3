"""Loads, stores and fences on 64-bit words that other processes read and write: the one door.

Two implementations, chosen by machine:

``plain``    x86-64 only.  ``memoryview.cast("Q")[i]`` copies 8 aligned bytes with one ``mov``.  The
             processor keeps loads in order with loads and stores in order with stores (TSO), so a plain
             load acquires and a plain store releases.  It costs 35 ns from Python.
``kernels``  any machine with Numba: LLVM's atomic instructions on the word's address, 100 to 150 ns.

The one order that TSO does not keep is a store before a later load of another word; ``fence`` is for
that (the sleeping protocol of :mod:`danube.ipc.bell` needs it).  Without Numba it is an uncontended lock:
taking it is a ``lock cmpxchg``, which is a full barrier on x86.

A word here has a single writer, except where ``fetch_add`` is used.  Values are 0 .. 2**64-1; callers
mask their sums with ``WORD_MASK``.
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


def _no_fence() -> None:
    """Loads are in order already."""


fence: Callable[[], None] = _lock_fence
"""Everything before is seen before everything after.  Call it as ``atomics.fence()``."""

read_fence: Callable[[], None] = _no_fence
"""Loads before are done before loads after."""


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

    def fetch_add(self, index: int, amount: int) -> int:
        """Add to a word that has several writers; returns the value before.  Needs Numba."""
        kernels = load_kernels()
        if not 0 <= index < len(self._view):
            raise IndexError(index)
        if not self._address:
            self._address = kernels["address"](self._view.cast("B"))
        return int(kernels["fetch_add"](self._address + 8 * index, amount & WORD_MASK))


def load_kernels() -> dict[str, Callable[..., Any]]:
    """Compile the Numba implementation once per process tree: the supervisor calls it before forking.

    Raises ImportError if Numba is missing, which only x86-64 can do without.
    """
    global fence, read_fence
    if not _kernels:
        _kernels.update(_compile_kernels())
        fence = _kernels["fence"]
        read_fence = _no_fence if TOTAL_STORE_ORDER else fence
    return _kernels


def _compile_kernels() -> dict[str, Callable[..., Any]]:
    """Numba functions over addresses: load, store, fetch_add, fence and the address of a buffer."""
    import numpy
    from llvmlite import ir
    from numba import njit, types
    from numba.extending import intrinsic

    word = ir.IntType(64)

    @intrinsic
    def load_word(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pointer = builder.inttoptr(arguments[0], word.as_pointer())
            return builder.load_atomic(pointer, "acquire", 8)

        return types.uint64(types.uint64), generate

    @intrinsic
    def store_word(typing_context: Any, address: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pointer = builder.inttoptr(arguments[0], word.as_pointer())
            builder.store_atomic(arguments[1], pointer, "release", 8)
            return context.get_dummy_value()

        return types.void(types.uint64, types.uint64), generate

    @intrinsic
    def add_word(typing_context: Any, address: Any, amount: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pointer = builder.inttoptr(arguments[0], word.as_pointer())
            return builder.atomic_rmw("add", pointer, arguments[1], "seq_cst")

        return types.uint64(types.uint64, types.uint64), generate

    @intrinsic
    def full_fence(typing_context: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            builder.fence("seq_cst")
            return context.get_dummy_value()

        return types.void(), generate

    # Numba passes the typing context itself.
    load = njit("uint64(uint64)", nogil=True)(lambda address: load_word(address))  # type: ignore[call-arg]
    store = njit("void(uint64, uint64)", nogil=True)(
        lambda address, value: store_word(address, value)  # type: ignore[call-arg]
    )
    fetch_add = njit("uint64(uint64, uint64)", nogil=True)(
        lambda address, amount: add_word(address, amount)  # type: ignore[call-arg]
    )
    fence_all = njit("void()", nogil=True)(lambda: full_fence())  # type: ignore[call-arg]

    def address(memory: memoryview) -> int:
        return int(numpy.frombuffer(memory, dtype=numpy.uint8).ctypes.data)

    return {"load": load, "store": store, "fetch_add": fetch_add, "fence": fence_all, "address": address}


def choose() -> str:
    """Install the accesses for this machine; returns ``"plain"`` or ``"kernels"`` for the start-up log."""
    if TOTAL_STORE_ORDER:
        return "plain"
    try:
        load_kernels()
    except ImportError as error:
        broken("this processor reorders memory and Numba is missing", error=str(error))
    return "kernels"
