"""CRC32C and xxHash: the one door to google_crc32c and xxhash.

``google_crc32c`` reads only immutable bytes.  A mutable view is copied first when it is small (up to
64 KiB a copy costs no more than entering a kernel) and handed to the Numba kernel in
:mod:`danube.core.kernels` when that module was loaded (brokers load it, plain clients need not).
"""

from __future__ import annotations

from collections.abc import Callable

import google_crc32c
import xxhash

ContentHasher = xxhash.xxh3_128

_KERNEL_BYTES_MIN = 64 * 1024
_kernel: Callable[[memoryview], int] | None = None


def use_kernel(kernel: Callable[[memoryview], int] | None) -> None:
    """Install the kernel for large mutable views; None goes back to the library alone."""
    global _kernel
    _kernel = kernel


def crc32c(data: bytes | bytearray | memoryview) -> int:
    """CRC32C (Castagnoli, RFC 3720) of ``data``."""
    if type(data) is bytes:
        return int(google_crc32c.value(data))
    if _kernel is not None and len(data) >= _KERNEL_BYTES_MIN:
        return _kernel(memoryview(data))
    return int(google_crc32c.value(bytes(data)))


def key_hash(key: bytes) -> int:
    """64-bit hash of a routing key (XXH3, seed 0): unsigned."""
    return xxhash.xxh3_64_intdigest(key)


def keyed_hash(key: bytes, seed: int) -> bytes:
    """16-byte XXH3-128 digest of a key with a 64-bit seed, for tables whose keys a stranger chooses."""
    return xxhash.xxh3_128_digest(key, seed)


def content_hash(data: bytes | memoryview) -> bytes:
    """16-byte XXH3-128 digest, used to name whole files."""
    return xxhash.xxh3_128_digest(data)


def content_hasher() -> ContentHasher:
    """A streaming content_hash."""
    return xxhash.xxh3_128()
