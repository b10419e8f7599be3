"""The ring against a list, at positions where counters overflow, across deaths and with damaged slots."""

from __future__ import annotations

import ctypes
import mmap
import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from danube.errors import LimitExceeded, RingDamaged
from danube.ipc.atomics import WORD_MASK, Words
from danube.ipc.ring import HEAD, SLOT_HEADER_BYTES, TAIL, RingReader, RingWriter

CAPACITY = 4096
STARTS = [0, 8, 2**32 - 16, 2**32 - 8, 2**63 - 8, 2**64 - 24, 2**64 - 8, 2**64 - CAPACITY]


class Memory:
    """Words and slots of one ring in anonymous memory."""

    def __init__(self, start: int = 0, capacity: int = CAPACITY) -> None:
        whole = memoryview(mmap.mmap(-1, CAPACITY + capacity))
        self.words = Words(whole[:CAPACITY])
        self.slots = whole[CAPACITY:]
        self.words.store(HEAD, start)
        self.words.store(TAIL, start)

    def writer(self, source: int = 1, destination: int = 2) -> RingWriter:
        return RingWriter(self.words, self.slots, source, destination)

    def reader(self) -> RingReader:
        return RingReader(self.words, self.slots)


def put(writer: RingWriter, kind: int, payload: bytes) -> bool:
    return writer.put(kind, (payload,), len(payload))


def copied(records: list[tuple[int, memoryview]]) -> list[tuple[int, bytes]]:
    return [(kind, bytes(payload)) for kind, payload in records]


operations = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, CAPACITY // 2 - SLOT_HEADER_BYTES)),
        st.tuples(st.just("put"), st.integers(0, 80)),
        st.tuples(
            st.sampled_from(["publish", "abandon", "release", "writer dies", "reader dies"]), st.just(0)
        ),
        st.tuples(st.just("drain"), st.integers(0, CAPACITY)),
    ),
    max_size=120,
)


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(STARTS), operations)
def test_a_ring_gives_what_was_published_in_order_and_nothing_else(
    start: int, steps: list[tuple[str, int]]
) -> None:
    memory = Memory(start)
    writer, reader = memory.writer(), memory.reader()
    claimed: list[tuple[int, bytes]] = []
    published: deque[tuple[int, bytes]] = deque()
    drained: list[tuple[int, bytes]] = []
    for number, (step, size) in enumerate(steps):
        payload = bytes([number % 251]) * size
        if step == "put":
            if writer.put(number, (payload[: size // 3], memoryview(payload)[size // 3 :]), size):
                claimed.append((number, payload))
            elif not (claimed or published or drained):
                pytest.fail("an empty ring refused a record")
        elif step == "publish":
            writer.publish()
            published.extend(claimed)
            claimed.clear()
        elif step == "abandon":
            writer.abandon()
            claimed.clear()
        elif step == "drain":
            got = copied(reader.drain(size))
            for record in got:
                assert record == published.popleft()
            assert got or not published, "something is there and nothing came"
            drained.extend(got)
        elif step == "release":
            reader.release()
            drained.clear()
        elif step == "writer dies":
            writer = memory.writer()
            claimed.clear()
        else:
            reader = memory.reader()
            published.extendleft(reversed(drained))
            drained.clear()
    writer.publish()
    published.extend(claimed)
    rest: list[tuple[int, bytes]] = []
    while reader.pending:
        rest += copied(reader.drain(CAPACITY))
    assert rest == list(published)


@pytest.mark.parametrize("start", STARTS)
def test_a_million_bytes_pass_any_overflow_of_the_counters(start: int) -> None:
    memory = Memory(start)
    writer, reader = memory.writer(), memory.reader()
    expected: deque[bytes] = deque()
    numbers = random.Random(start)
    passed = 0
    while passed < 20 * CAPACITY:
        payload = numbers.randbytes(numbers.randrange(700))
        while not put(writer, 7, payload):
            writer.publish()
            for _, view in reader.drain(CAPACITY):
                assert bytes(view) == expected.popleft()
            reader.release()
        expected.append(payload)
        passed += len(payload)
    assert memory.words.load(HEAD) <= WORD_MASK


def test_nothing_is_visible_before_publish_and_all_of_it_after() -> None:
    memory = Memory()
    writer, reader = memory.writer(), memory.reader()
    assert put(writer, 1, b"abcde") and put(writer, 2, b"123456789")
    assert reader.drain(CAPACITY) == [] and not reader.pending
    assert writer.publish() and not writer.publish()
    assert copied(reader.drain(CAPACITY)) == [(1, b"abcde"), (2, b"123456789")]


def test_a_payload_is_aligned_so_that_a_batch_in_it_is() -> None:
    memory = Memory()
    writer = memory.writer()
    assert all(put(writer, 1, bytes(size)) for size in (1, 7, 8, 9, 100))
    writer.publish()
    for _, payload in memory.reader().drain(CAPACITY):
        assert ctypes.addressof(ctypes.c_char.from_buffer(payload)) % 8 == 0


def test_a_full_ring_refuses_and_takes_again_after_release() -> None:
    memory = Memory()
    writer, reader = memory.writer(), memory.reader()
    count = 0
    while put(writer, count, b"x" * 104):
        count += 1
    assert count == CAPACITY // (104 + SLOT_HEADER_BYTES)
    writer.publish()
    assert len(reader.drain(CAPACITY)) == count
    assert not put(writer, 0, b"x" * 104), "drained is not released"
    reader.release()
    assert put(writer, 0, b"x" * 104)


def test_a_record_too_large_for_any_ring_is_an_error_and_not_a_wait() -> None:
    writer = Memory().writer()
    with pytest.raises(LimitExceeded):
        put(writer, 1, bytes(CAPACITY // 2))


@pytest.mark.parametrize("place", range(0, CAPACITY, 8))
def test_the_largest_record_fits_an_empty_ring_wherever_its_position_is(place: int) -> None:
    memory = Memory(place)
    writer, reader = memory.writer(), memory.reader()
    payload = b"z" * writer.payload_bytes_max
    assert put(writer, 3, payload)
    writer.publish()
    assert copied(reader.drain(1)) == [(3, payload)]


def test_drain_stops_after_the_bytes_asked_for_but_gives_at_least_one() -> None:
    memory = Memory()
    writer, reader = memory.writer(), memory.reader()
    for number in range(5):
        assert put(writer, number, b"y" * 200)
    writer.publish()
    assert [kind for kind, _ in reader.drain(1)] == [0]
    assert [kind for kind, _ in reader.drain(300)] == [1, 2]
    assert [kind for kind, _ in reader.drain(CAPACITY)] == [3, 4]


def test_records_of_or_for_another_incarnation_are_dropped_and_counted() -> None:
    memory = Memory()
    reader = memory.reader()
    for source, destination in ((1, 2), (3, 2), (1, 4), (3, 4)):
        writer = memory.writer(source, destination)
        assert put(writer, source * 10 + destination, b"p")
        writer.publish()
    assert [kind for kind, _ in reader.drain(CAPACITY, source=3, destination=4)] == [34]
    assert reader.stale_count == 3


def test_every_flipped_bit_of_a_slot_header_is_damage_and_never_a_record() -> None:
    for bit in range(SLOT_HEADER_BYTES * 8):
        memory = Memory(2**40)
        writer, reader = memory.writer(), memory.reader()
        place = (2**40 % CAPACITY) + SLOT_HEADER_BYTES + 16
        assert put(writer, 1, b"good record 1") and put(writer, 2, b"good record 2")
        writer.publish()
        memory.slots[place + bit // 8] ^= 1 << (bit % 8)
        assert copied(reader.drain(CAPACITY)) == [(1, b"good record 1")]
        with pytest.raises(RingDamaged):
            reader.drain(CAPACITY)


@settings(deadline=None, max_examples=200)
@given(st.integers(0, WORD_MASK), st.sampled_from([HEAD, TAIL]), st.integers(0, 3))
def test_a_scribbled_head_or_tail_never_gives_a_wrong_record(value: int, word: int, count: int) -> None:
    memory = Memory(2**20)
    writer, reader = memory.writer(), memory.reader()
    sent = [(number, b"q" * (50 + number)) for number in range(count)]
    for kind, payload in sent:
        assert put(writer, kind, payload)
    writer.publish()
    memory.words.store(word, value)
    try:
        got = copied(reader.drain(CAPACITY))
        assert got == sent[: len(got)]
        while put(writer, 9, b"r" * 100):
            pass
    except RingDamaged:
        pass


def test_after_a_reset_the_ring_serves_again_and_the_writer_can_see_it() -> None:
    memory = Memory()
    writer, reader = memory.writer(), memory.reader()
    assert put(writer, 1, b"lost")
    writer.publish()
    memory.slots[3] ^= 0xFF
    with pytest.raises(RingDamaged):
        reader.drain(CAPACITY)
    reader.reset()
    assert writer.resets == 1
    assert put(writer, 2, b"arrives")
    writer.publish()
    assert copied(reader.drain(CAPACITY)) == [(2, b"arrives")]


def test_random_bytes_in_the_slots_are_never_handed_out() -> None:
    numbers = random.Random(5)
    for _ in range(200):
        memory = Memory()
        writer, reader = memory.writer(), memory.reader()
        assert put(writer, 1, b"v" * 500)
        writer.publish()
        memory.slots[:] = numbers.randbytes(CAPACITY)
        with pytest.raises(RingDamaged):
            reader.drain(CAPACITY)
