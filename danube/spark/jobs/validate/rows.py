"""Batches of a piece of a segment as a table of numbers, columns judged too, by a kernel or by its twin."""

from __future__ import annotations

from typing import Final

import numpy as np

from danube.core import kernels
from danube.core.batch.columns import BatchView
from danube.core.batch.format import COMPRESSION_MASK, Flag, read_header
from danube.errors import DanubeError
from danube.limits import ATTRIBUTE_BYTES_MAX, KEY_BYTES_MAX
from danube.wal.verify import walk
from danube.wal.verify.walk import ROWS_MAX, WORDS, Examined, Examiner, Octets, Rows, Stop, Verdict


def examine(data: Octets, start: int, end: int) -> Examined:
    """Judge the batches in ``data[start:end]``; ``data`` is one-dimensional and contiguous."""
    if not kernels.available:
        return examine_twin(data, start, end)
    table = np.empty((ROWS_MAX, WORDS), np.int64)
    result = np.empty(3, np.int64)
    kernels.compiled.examine_batches(data, start, end, table, result)
    count, stop, reason = result.tolist()
    return Examined(Rows._make(table[:count].T), stop, Stop(reason))


def find(data: Octets, start: int, end: int, least_offset: int) -> int:
    """Position of the next intact header at or above ``least_offset``, in steps of 8; -1 where none is."""
    if not kernels.available:
        return walk.find(data, start, end, least_offset)
    return int(kernels.compiled.find_batch(data, start, end, least_offset))


def examine_twin(data: Octets, start: int, end: int) -> Examined:
    """examine() without machine code."""
    return walk.examine(data, start, end, _judge)


def _judge(batch: bytes, count: int) -> tuple[Verdict, int]:
    try:
        header = read_header(batch)
        view = BatchView(batch, header)
        view.layout  # noqa: B018  (raises where the sizes contradict each other)
    except DanubeError:
        return Verdict.SHAPE, count
    if header.flags & COMPRESSION_MASK > 2:
        return Verdict.SHAPE, count
    if header.flags & COMPRESSION_MASK:
        return Verdict.FINE, count
    verdict = _judge_columns(view, header.flags)
    if verdict is Verdict.FINE and header.flags & Flag.SELECTED:
        return verdict, int(view.offset_deltas[-1]) + 1
    return verdict, count


def _judge_columns(view: BatchView, flags: int) -> Verdict:
    verdict = Verdict.PAYLOADS
    try:
        view.payload_offsets  # noqa: B018
        if flags & Flag.KEYS:
            verdict = Verdict.KEYS
            keys = view.keys()
            if max(0 if key is None else len(key) for key in keys) > KEY_BYTES_MAX:
                return verdict
            validity = view.key_validity
            if validity is not None and np.diff(view._key_column()[0])[~validity].any():
                return verdict
        if flags & Flag.ATTRIBUTES:
            verdict = Verdict.ATTRIBUTES
            view.attributes_list()
            if int(np.diff(view._attribute_column()[0]).max()) > ATTRIBUTE_BYTES_MAX:
                return verdict
        verdict = Verdict.DELTAS
        view.offset_deltas  # noqa: B018
    except DanubeError:
        return verdict
    return Verdict.FINE


EXAMINER: Final = Examiner(examine, find)
