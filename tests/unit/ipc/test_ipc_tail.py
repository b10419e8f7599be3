"""The tail against one growing byte string."""

from __future__ import annotations

import mmap
import os
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from danube.errors import LimitExceeded
from danube.ipc.atomics import WORD_MASK, Words
from danube.ipc.tail import END, START, TailReader, TailWriter

CAPACITY = 4096


def memory(start: int = 0) -> tuple[Words, memoryview]:
    whole = memoryview(mmap.mmap(-1, 2 * CAPACITY))
    words = Words(whole[:CAPACITY])
    words.store(START, start)
    words.store(END, start)
    return words, whole[CAPACITY:]


@settings(deadline=None, max_examples=150)
@given(
    st.sampled_from([0, 2**32 - 5, 2**64 - 3, 2**64 - 4096]),
    st.lists(st.lists(st.integers(0, 900), max_size=4), max_size=40),
)
def test_what_is_read_is_what_was_appended_or_none(start: int, appends: list[list[int]]) -> None:
    words, body = memory(start)
    writer, reader = TailWriter(words, body), TailReader(words, body)
    whole = b""
    for number, sizes in enumerate(appends):
        parts = [bytes([number, place]) * (size // 2) for place, size in enumerate(sizes)]
        position = writer.append(parts)
        assert position == (start + len(whole)) & WORD_MASK
        whole += b"".join(parts)
    for at in range(0, len(whole) + 200, 97):
        for size in (0, 1, 97, 1000):
            expected = None
            if len(whole) - CAPACITY <= at and at + size <= len(whole):
                expected = whole[at : at + size]
            assert reader.read((start + at) & WORD_MASK, size) == expected


def test_a_new_writer_goes_on_where_the_dead_one_stopped() -> None:
    words, body = memory()
    first = TailWriter(words, body)
    kept = first.append([b"kept"])
    body[4:2000] = b"h" * 1996  # half an append: copied, never ended
    second = TailWriter(words, body)
    position = second.append([b"next"])
    reader = TailReader(words, body)
    assert (reader.read(kept, 4), reader.read(position, 4)) == (b"kept", b"next")
    assert reader.read(position, 5) is None


def test_more_than_the_tail_holds_is_an_error() -> None:
    words, body = memory()
    with pytest.raises(LimitExceeded):
        TailWriter(words, body).append([bytes(CAPACITY + 1)])
    assert TailWriter(words, body).append([bytes(CAPACITY)]) == 0


def test_a_reader_in_another_process_never_gets_torn_bytes() -> None:
    words, body = memory()
    size = 512
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            writer = TailWriter(words, body)
            for number in range(60_000):
                writer.append([number.to_bytes(4, "little") * (size // 4)])
        finally:
            os.write(writing, b"x")
            os._exit(0)
    os.set_blocking(reading, False)
    reader = TailReader(words, body)
    numbers = random.Random(1)
    whole_count = 0
    ended = False
    while not ended:
        try:
            ended = bool(os.read(reading, 1))
        except BlockingIOError:
            pass
        start, end = words.load(START), words.load(END)
        if end == 0:
            continue
        # Near the start is where the writer is about to overwrite.
        position = start + size * numbers.randrange(2)
        got = reader.read(position, size)
        if got is not None:
            whole_count += 1
            assert got == (position // size).to_bytes(4, "little") * (size // 4)
    os.waitpid(child, 0)
    os.close(reading)
    os.close(writing)
    assert whole_count > 0
