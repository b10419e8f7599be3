"""Compressed columns: the one door to lz4 and zstandard, both optional.

The columns of a batch are one LZ4 or Zstandard frame, followed by up to seven zero bytes of padding.
Inflating is bounded before it starts: the header states the inflated size, which is capped by BATCH_BYTES_MAX
and by the ratio below.  A frame with more or fewer bytes, or with a large window, is refused as soon as that
shows.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

from danube.core.batch.format import Compression
from danube.errors import InvalidArgument, LimitExceeded, ProtocolError, UnsupportedVersion
from danube.limits import BATCH_BYTES_MAX, MIB

WINDOW_BYTES_MAX: Final = 8 * MIB
RATIO_MAX: Final = 512
RATIO_FREE_BYTES: Final = 1 * MIB  # up to here any ratio is fine: it cannot hurt

_MODULES: Final = {Compression.LZ4: "lz4.frame", Compression.ZSTD: "zstandard"}


def inflated_bytes_max(block_bytes: int) -> int:
    """The most that a block of this size may say it inflates to."""
    return min(BATCH_BYTES_MAX, max(RATIO_FREE_BYTES, block_bytes * RATIO_MAX))


def check_ratio(block_bytes: int, columns_size: int) -> None:
    """Raise LimitExceeded if a header claims the inflated size of a bomb."""
    if columns_size > inflated_bytes_max(block_bytes):
        raise LimitExceeded(
            "compressed batch inflates too much",
            why=f"{block_bytes} bytes may become {inflated_bytes_max(block_bytes)}, not {columns_size}",
            hint="send such records without compression",
            block_bytes=block_bytes,
            columns_size=columns_size,
        )


def compress(kind: Compression, columns: bytes | memoryview) -> bytes | None:
    """One frame holding ``columns``; None if the frame saves nothing or would be refused as a bomb."""
    library = _library(kind)
    if kind is Compression.LZ4:
        block: bytes = library.compress(columns, store_size=True)
    else:
        block = library.ZstdCompressor(level=3, write_content_size=True).compress(columns)
    if len(block) >= len(columns) or len(columns) > inflated_bytes_max(len(block)):
        return None
    return block


def decompress(kind: int, block: bytes | memoryview, columns_size: int) -> bytes:
    """Inflate to exactly ``columns_size`` bytes; raise ProtocolError or LimitExceeded, never inflate more."""
    if kind not in _MODULES:
        raise UnsupportedVersion(f"compression {kind} is not known", hint="update danube on this side")
    check_ratio(len(block), columns_size)
    library = _library(Compression(kind))
    inflate = _inflate_lz4 if kind == Compression.LZ4 else _inflate_zstd
    columns = inflate(library, block, columns_size)
    if len(columns) != columns_size:
        raise ProtocolError("compressed batch does not inflate to its stated size", expected=columns_size)
    return columns


def _inflate_lz4(library: Any, block: bytes | memoryview, columns_size: int) -> bytes:
    inflater = library.LZ4FrameDecompressor()
    try:
        # One byte more than allowed is asked for, so that a longer frame shows without inflating it.
        columns: bytes = inflater.decompress(block, max_length=columns_size + 1)
    except (RuntimeError, ValueError, MemoryError) as error:
        raise ProtocolError("compressed batch is not an LZ4 frame", why=str(error)) from None
    if not inflater.eof and len(columns) <= columns_size:
        raise ProtocolError("compressed batch is cut")
    return columns


def _inflate_zstd(library: Any, block: bytes | memoryview, columns_size: int) -> bytes:
    try:
        parameters = library.get_frame_parameters(block)
        if parameters.window_size > WINDOW_BYTES_MAX or parameters.content_size not in (
            columns_size,
            library.CONTENTSIZE_UNKNOWN,
        ):
            raise ProtocolError(
                "compressed batch asks for too much memory",
                window_bytes=parameters.window_size,
                content_bytes=parameters.content_size,
            )
        inflater = library.ZstdDecompressor(max_window_size=WINDOW_BYTES_MAX)
        with inflater.stream_reader(block, read_across_frames=False) as reader:
            columns: bytes = reader.read(columns_size + 1)
    except library.ZstdError as error:
        raise ProtocolError("compressed batch is not a Zstandard frame", why=str(error)) from None
    return columns


def _library(kind: Compression) -> Any:
    name = _MODULES[kind]
    try:
        return import_module(name)
    except ImportError:
        raise InvalidArgument(
            f"compression {kind.name.lower()} needs the package {name.partition('.')[0]}",
            why="it is not installed here",
            hint="pip install 'danube[compression]'",
        ) from None
