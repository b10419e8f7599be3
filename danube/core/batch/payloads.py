"""Payloads as they come from an application, turned into offsets and pieces of one column.

Accepted: a sequence of ``bytes``; numpy arrays of dtype S, V or object (one dimension) and uint8
(two dimensions, a row per record); pyarrow Binary, LargeBinary, String, LargeString and
FixedSizeBinary arrays, recognised by their buffers so that pyarrow is never imported here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate
from struct import Struct
from typing import Any, Final, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from danube.errors import InvalidArgument, LimitExceeded, RecordTooLarge
from danube.limits import BATCH_BYTES_MAX, BATCH_RECORDS_MAX, MIB, RECORD_BYTES_MAX

Piece = bytes | bytearray | memoryview
Bounds = NDArray[np.int64] | NDArray[np.int32]  # offsets before they were found to fit

RECORD_OVERHEAD: Final = 8  # approximate size of a record in a batch beside its payload

# For so few numpy is slower than plain Python.
_FEW: Final = 128
_SAMPLE: Final = 16

_ARROW_OFFSETS: Final[dict[str, np.dtype[Any]]] = {
    "binary": np.dtype(np.int32),
    "string": np.dtype(np.int32),
    "large_binary": np.dtype(np.int64),
    "large_string": np.dtype(np.int64),
}


class PayloadColumn(NamedTuple):
    """``offsets`` are int32[n+1], little-endian; ``pieces`` in order hold ``total`` bytes."""

    offsets: bytes
    total: int
    pieces: Sequence[Piece]

    @property
    def record_count(self) -> int:
        return len(self.offsets) // 4 - 1


def payload_column(payloads: Any) -> PayloadColumn:
    """Lay out ``payloads``; raise InvalidArgument, RecordTooLarge or LimitExceeded."""
    if isinstance(payloads, list):
        return _from_sequence(payloads)
    if isinstance(payloads, np.ndarray):
        return _from_numpy(payloads)
    if hasattr(payloads, "buffers") and hasattr(payloads, "type"):
        return _from_arrow(payloads)
    if hasattr(payloads, "combine_chunks"):
        return payload_column(payloads.combine_chunks())
    if isinstance(payloads, str | bytes | bytearray | memoryview):
        refuse_single(payloads, "payloads")
    return _from_sequence(list(payloads))


def leading_column(payloads: Any, start: int, bytes_max: int) -> PayloadColumn:
    """payload_column() of payloads from ``start`` on, at least of one, with some ``bytes_max`` in the batch.

    ``payloads`` is a list, an array of numpy or an Arrow array.  The first few payloads give an estimate of
    how many fit; those that turn out too large are left out.
    """
    count = min(len(payloads) - start, BATCH_RECORDS_MAX)
    if count < 1:
        refuse_changed()
    if type(payloads) is list:
        count = count if count <= _FEW else min(count, _likely_count(payloads, start, bytes_max))
        return _column_of_list(payloads[start : start + count], bytes_max)
    payloads = payloads[start : start + _likely_count(payloads, start, bytes_max)]
    while (size := int(payloads.nbytes)) > 2 * bytes_max and len(payloads) > 1:
        payloads = payloads[: max(1, len(payloads) * bytes_max // size)]
    return payload_column(payloads)


def _likely_count(payloads: Any, start: int, bytes_max: int) -> int:
    """How many payloads from ``start`` on make ``bytes_max`` of a batch, by the size of the first few."""
    sample = payload_column(payloads[start : start + _SAMPLE])
    mean = sample.total // sample.record_count + RECORD_OVERHEAD
    return max(1, min(bytes_max // mean, BATCH_RECORDS_MAX))


def _column_of_list(payloads: list[Any], bytes_max: int) -> PayloadColumn:
    """Of the first payloads that have ``bytes_max`` together, at least of one, by their sizes."""
    try:
        few = _offsets_of_few(payloads, min(bytes_max, RECORD_BYTES_MAX))
        if few is not None:
            return PayloadColumn(*few, payloads)
        bounds = _bounds_of_sizes(payloads)
    except TypeError:
        refuse_type(payloads, "payload")
    if int(bounds[-1]) > bytes_max and len(payloads) > 1:
        count = max(1, int(bounds.searchsorted(bytes_max, "right")) - 1)
        payloads, bounds = payloads[:count], bounds[: count + 1]
    return _column(bounds, payloads)


def _column(bounds: Bounds, pieces: Sequence[Piece]) -> PayloadColumn:
    return PayloadColumn(*_checked(bounds, RECORD_BYTES_MAX, "payload"), pieces)


def offsets_of_pieces(pieces: Sequence[Any], limit: int, what: str) -> tuple[bytes, int]:
    """Offsets of the pieces (int32[n+1], little-endian) and their byte total; ``what`` names one in errors.

    Raises RecordTooLarge, LimitExceeded, and TypeError if one has no length.
    """
    return _offsets_of_few(pieces, limit) or _checked(_bounds_of_sizes(pieces), limit, what)


def _offsets_of_few(pieces: Sequence[Any], limit: int) -> tuple[bytes, int] | None:
    """The offsets where there are few pieces, none of which can be too large; otherwise None."""
    count = len(pieces)
    if not 0 < count <= _FEW:
        return None
    sizes = list(map(len, pieces))
    total = sum(sizes)
    if total > limit:
        return None
    if sizes.count(sizes[0]) == count:
        return _even_offsets(count, sizes[0]), total
    return _offsets_layout(count).pack(*accumulate(sizes, initial=0)), total


@lru_cache(maxsize=_FEW)
def _offsets_layout(count: int) -> Struct:
    return Struct(f"<{count + 1}i")


@lru_cache(maxsize=512)
def _even_offsets(count: int, width: int) -> bytes:
    """The offsets of records of one size, which senders often send again and again."""
    return _offsets_layout(count).pack(*(place * width for place in range(count + 1)))


def _bounds_of_sizes(pieces: Sequence[Any]) -> Bounds:
    sizes = list(map(len, pieces))
    count, width = len(sizes), sizes[0]
    # Records of one size are common, and counting equal numbers costs a third of making an array.
    if width and width == sizes[-1] == sizes[count // 2] and sizes.count(width) == count:
        return np.arange(0, width * count + 1, width, dtype=np.int64)
    return _bounds_of(np.fromiter(sizes, np.int64, count))


def _bounds_of(lengths: NDArray[np.int64]) -> Bounds:
    bounds = np.zeros(len(lengths) + 1, np.int64)
    lengths.cumsum(out=bounds[1:])
    return bounds


def _checked(bounds: Bounds, limit: int, what: str) -> tuple[bytes, int]:
    total = int(bounds[-1])
    if total > limit:
        lengths = np.diff(bounds)
        worst = int(lengths.argmax())
        if lengths[worst] > limit:
            refuse_size(what, worst, int(lengths[worst]), limit)
    if total > BATCH_BYTES_MAX:
        refuse_batch(total)
    return bounds.astype("<i4", copy=False).tobytes(), total


def check_count(count: int) -> None:
    """A batch holds 1 .. BATCH_RECORDS_MAX records."""
    if not 1 <= count <= BATCH_RECORDS_MAX:
        raise LimitExceeded(
            f"batch of {count} records cannot be made",
            why=f"a batch holds 1 to {BATCH_RECORDS_MAX} records",
            hint="split it into several batches",
            records=count,
        )


def refuse_changed() -> NoReturn:
    raise InvalidArgument(
        "the list of payloads changed while it was encoded", hint="give each call a list of its own"
    )


def larger_record_hint(size_bytes: int, topic: str = "TOPIC") -> str:
    """Advice for a payload above its topic's limit."""
    if size_bytes > RECORD_BYTES_MAX:
        return f"no topic takes more than {RECORD_BYTES_MAX // MIB} MiB; send a reference to large content"
    raise_to = f"{-(-size_bytes // MIB)}MiB"
    return (
        f"raise it with `danube topics update {topic} --max-record-size {raise_to}`;"
        " topics made later take topics.max_record_size"
    )


def refuse_size(what: str, index: int, size: int, limit: int) -> NoReturn:
    raise RecordTooLarge(
        f"{what} of record {index} has {size} bytes",
        why=f"the limit is {limit} bytes",
        index=index,
        size=size,
        limit=limit,
    )


def refuse_batch(size: int) -> NoReturn:
    raise LimitExceeded(
        f"batch of {size} bytes is too large",
        why=f"the limit is {BATCH_BYTES_MAX} bytes",
        hint="send smaller batches",
        size=size,
        limit=BATCH_BYTES_MAX,
    )


def refuse_single(value: Any, what: str) -> NoReturn:
    raise InvalidArgument(
        f"{what} must be a sequence with one element per record, not {type(value).__name__}",
        hint="wrap a single value in a list",
    )


def refuse_type(values: Iterable[Any], what: str) -> NoReturn:
    """Name the first element that is not bytes."""
    for index, value in enumerate(values):
        if not isinstance(value, bytes | bytearray | memoryview):
            raise InvalidArgument(
                f"{what} of record {index} is {type(value).__name__}, not bytes",
                hint="encode text first, for example with text.encode()",
                index=index,
            )
    raise InvalidArgument(f"a {what} is not a view of single bytes", hint="cast it with cast('B')")


def _from_sequence(payloads: list[Any]) -> PayloadColumn:
    check_count(len(payloads))
    return _column_of_list(payloads, sys.maxsize)


def _from_numpy(payloads: NDArray[Any]) -> PayloadColumn:
    kind = payloads.dtype.kind
    if payloads.ndim == 1 and kind in "SO":
        return _from_sequence(payloads.tolist())
    if payloads.ndim == 2 and payloads.dtype == np.uint8:
        width = payloads.shape[1]
    elif payloads.ndim == 1 and kind == "V" and payloads.dtype.names is None:
        width = payloads.dtype.itemsize
    else:
        raise InvalidArgument(
            f"payloads cannot be a numpy array of {payloads.dtype} with {payloads.ndim} dimensions",
            hint="use dtype S, V or object with one dimension, or uint8 with two",
        )
    check_count(len(payloads))
    octets: Any = np.ascontiguousarray(payloads).reshape(-1).view(np.uint8) if width else b""
    rows = memoryview(octets)
    return _fixed_width(rows, width, len(payloads))


def _fixed_width(data: memoryview, width: int, count: int) -> PayloadColumn:
    return _column(_bounds_of(np.full(count, width, np.int64)), (data,))


def _from_arrow(payloads: Any) -> PayloadColumn:
    count, first = len(payloads), int(payloads.offset)
    check_count(count)
    if payloads.null_count:
        raise InvalidArgument(
            f"payloads hold {payloads.null_count} nulls",
            why="a record has a payload",
            hint="fill or drop them first",
        )
    name = str(payloads.type)
    buffers = payloads.buffers()
    if name.startswith("fixed_size_binary"):
        width = int(payloads.type.byte_width)
        return _fixed_width(_bytes_of(buffers[1])[first * width : (first + count) * width], width, count)
    dtype = _ARROW_OFFSETS.get(name)
    if dtype is None:
        raise InvalidArgument(
            f"payloads cannot be an Arrow array of {name}", hint="cast it to binary, large_binary or string"
        )
    ends = np.frombuffer(buffers[1], dtype, count + 1, first * dtype.itemsize).astype(np.int64, copy=False)
    if np.diff(ends).min() < 0:
        raise InvalidArgument("the Arrow array's offsets are not ascending")
    return _column(ends - ends[0], (_bytes_of(buffers[2])[int(ends[0]) : int(ends[-1])],))


def _bytes_of(buffer: Any) -> memoryview:
    return memoryview(b"") if buffer is None else memoryview(buffer).cast("B")
