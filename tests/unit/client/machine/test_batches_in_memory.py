"""Batches that a client makes in the memory it shares: whose a slot is, and that no batch is written over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from danube.client.machine.outgoing import Outgoing
from danube.client.machine.publishing import PartitionProducer
from danube.client.machine.shared_memory import CopyChoice, SharedMemory, _shift
from danube.client.records.outbox import Outbox
from danube.core import kernels
from danube.core.batch.builder import encode
from danube.core.batch.columns import BatchView
from danube.core.batch.payloads import Place
from danube.core.kernels import MALFORMED
from danube.core.kernels.objects import CONTENT
from danube.core.protocol import native as wire
from danube.core.protocol.native import Frame
from danube.errors import DanubeError, InvalidArgument, OperationTimeout, OwnerMoved, SequenceGap, StorageFull
from danube.limits import SHARED_BODY_BYTES_MIN, SHARED_SLOT_BYTES, SHARED_SLOTS
from tests.unit.near_peer import NearPeer, sharing_pair

COUNT = 1_000
CREDIT = 1 << 25
SIZE = SHARED_BODY_BYTES_MIN // COUNT + 1


class Sender:
    """An outbox whose client shares memory with a broker that has accepted it."""

    def __init__(self, compression: str = "none") -> None:
        self.peer, self.producer = sharing_pair()
        self.outbox = Outbox(
            "/default/t",
            "p",
            [self.producer],
            compression=compression,
            batch_bytes=1 << 21,
            in_flight_bytes_max=1 << 26,
        )

    def send(self, number: int, **more: Any) -> Outgoing:
        """A batch of COUNT records that hold ``number``."""
        [(outgoing, *_)] = self.outbox.batches(payloads(number), more.get("keys"), None)
        return outgoing

    def hold_back(self) -> None:
        """No batch may be sent for now."""
        self.go_on()
        assert self.peer.session.credit.take(CREDIT, self.producer)

    def go_on(self) -> None:
        self.peer.session.credit.reset(CREDIT)
        self.producer.transmit()

    def arrived(self) -> list[tuple[Frame, int]]:
        """Frames and the number of each batch, which is whole."""
        found = []
        for frame, batch in self.peer.batches():
            records = BatchView(batch).payloads()
            assert records == payloads(records[0][0])
            found.append((frame, records[0][0]))
        return found

    def free_slots(self) -> int:
        """How many batches get a slot now."""
        inline = self.peer.inline
        self.hold_back()
        made = [self.send(200) for _ in range(SHARED_SLOTS + 1)]
        found = sum(type(one.body) is memoryview for one in made)
        for one in made:
            assert self.producer.withdraw(one)
        assert self.peer.inline == inline
        self.go_on()
        return found


def payloads(number: int) -> list[bytes]:
    return [bytes([number]) * SIZE] * COUNT


@pytest.fixture(params=["usual", "streamed"])
def streams(with_kernels: None, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """How batches come into the memory, whatever it costs."""
    streamed = bool(request.param == "streamed")
    monkeypatch.setattr(CopyChoice, "streams", lambda _: streamed)
    return streamed


@pytest.fixture
def sender(streams: bool) -> Sender:
    return Sender()


def lies_in_memory(outgoing: Outgoing) -> bool:
    return type(outgoing.body) is memoryview


def test_a_list_is_copied_once_into_a_slot_of_its_own(sender: Sender) -> None:
    sent = [sender.send(number) for number in range(3)]
    assert all(lies_in_memory(one) and one.slot is None for one in sent), "the slot is the correlation's"
    arrived = sender.arrived()
    assert [number for _, number in arrived] == [0, 1, 2] and sender.peer.inline == 1
    memory = sender.peer.memory
    assert memory is not None
    for outgoing, (frame, _) in zip(sent, arrived, strict=True):
        outgoing.body[-8:] = b"the same"  # type: ignore[index]
        assert memory[frame.end - 8 : frame.end] == b"the same"
    for offset, (frame, _) in enumerate(arrived):
        sender.peer.acknowledge(frame, offset * COUNT, COUNT)
    assert [one.result().offset for one in sent] == [0, COUNT, 2 * COUNT]
    assert not any(one.body or one.head for one in sent), "who keeps the outcome does not keep the bytes"
    assert sender.free_slots() == SHARED_SLOTS


def test_batches_that_wait_keep_their_slots_and_what_finds_none_is_copied_later(sender: Sender) -> None:
    sender.hold_back()
    waiting = [sender.send(number) for number in range(SHARED_SLOTS + 2)]
    assert [lies_in_memory(one) for one in waiting] == [True] * SHARED_SLOTS + [False] * 2
    sender.go_on()
    arrived = sender.arrived()
    assert [number for _, number in arrived] == list(range(SHARED_SLOTS + 2))
    assert sender.peer.inline == 1 + 2
    sender.peer.acknowledge(arrived[0][0], 0, COUNT)
    sender.send(77)
    [(frame, number)] = sender.arrived()
    assert (frame.start, number) == (arrived[0][0].start, 77)


def test_a_batch_that_gets_another_number_is_made_anew_outside_and_leaves_its_slot(sender: Sender) -> None:
    sender.hold_back()
    outgoing = sender.send(1)
    outgoing.epoch -= 1
    sender.go_on()
    assert not lies_in_memory(outgoing) and outgoing.slot is None
    [(frame, number)] = sender.arrived()
    sender.peer.acknowledge(frame, 0, COUNT)
    assert number == 1 and sender.free_slots() == SHARED_SLOTS


def test_what_was_refused_is_sent_again_whole_though_its_slot_served_another(sender: Sender) -> None:
    failed, following = sender.send(1), sender.send(2)
    (first, _), (second, _) = sender.arrived()
    sender.peer.refuse(first, StorageFull("full"))
    sender.peer.refuse(second, SequenceGap("a number is missing"))
    assert isinstance(failed.error, StorageFull) and not following.settled
    for number in range(3, 3 + SHARED_SLOTS):  # queued until the new epoch is open
        sender.send(number)
    sender.peer.open(9, 4)
    assert [number for _, number in sender.arrived()] == list(range(2, 3 + SHARED_SLOTS))


def test_a_batch_that_an_owner_no_longer_takes_is_whole_when_the_next_one_gets_it(sender: Sender) -> None:
    sender.send(1)
    [(frame, _)] = sender.arrived()
    sender.peer.refuse(frame, OwnerMoved("moved"))
    for number in range(2, 2 + SHARED_SLOTS):
        sender.send(number)
    sender.peer.pass_time(1)
    sender.peer.open(7, 3, 1)
    assert [number for _, number in sender.arrived()] == list(range(1, 2 + SHARED_SLOTS))


@pytest.mark.parametrize("close_handle", [True, False])
def test_memory_that_is_given_up_still_holds_what_was_made_there(sender: Sender, close_handle: bool) -> None:
    peer = sender.peer
    sender.send(1)
    [(frame, _)] = sender.arrived()
    sender.hold_back()
    sender.send(2)  # made there, not sent
    old = peer.memory
    assert old is not None
    batch = bytes(old[frame.start : frame.end])
    if close_handle:
        peer.feed(wire.error_frame(OwnerMoved("moved"), 0, frame.handle))
        peer.pass_time(1)
    else:
        peer.lose()
        peer.connect()
    peer.session.credit.reset(CREDIT)
    peer.open(7, 3, 1)
    arrived = sender.arrived()
    assert [number for _, number in arrived] == [1, 2] and peer.offers == 2
    for number in range(3, 3 + SHARED_SLOTS):
        sender.send(number)
    assert [number for _, number in sender.arrived()] == list(range(3, 3 + SHARED_SLOTS))
    assert old[frame.start : frame.end] == batch, "the broker may be writing it to its log"


def _withdraw(sender: Sender, outgoing: Outgoing) -> None:
    assert sender.producer.withdraw(outgoing)


def _expire(sender: Sender, outgoing: Outgoing) -> None:
    sender.peer.pass_time(31)
    assert isinstance(outgoing.error, OperationTimeout)


@pytest.mark.parametrize("end", [_withdraw, _expire])
def test_a_batch_that_is_never_sent_leaves_its_slot(
    sender: Sender, end: Callable[[Sender, Outgoing], None]
) -> None:
    sender.hold_back()
    outgoing = sender.send(1)
    assert lies_in_memory(outgoing)
    end(sender, outgoing)
    assert sender.free_slots() == SHARED_SLOTS


def _changed_list(monkeypatch: pytest.MonkeyPatch) -> None:
    class Changed:
        NEAR_BYTES = kernels.list_kernels().NEAR_BYTES
        measure = staticmethod(kernels.list_kernels().measure)

        @staticmethod
        def fill(*_: object) -> int:
            return MALFORMED

        fill_past = fill

    monkeypatch.setattr(kernels, "list_kernels", lambda: Changed)


def _refused_send(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise InvalidArgument("not now")

    monkeypatch.setattr(PartitionProducer, "send", refuse)


@pytest.mark.parametrize("fails", [_changed_list, _refused_send])
def test_a_batch_that_cannot_be_made_or_sent_leaves_its_slot(
    sender: Sender, monkeypatch: pytest.MonkeyPatch, fails: Callable[[pytest.MonkeyPatch], None]
) -> None:
    with monkeypatch.context() as patch:
        fails(patch)
        for _ in range(2):
            with pytest.raises(InvalidArgument):
                sender.send(1)
    assert sender.outbox.in_flight_bytes == 0 and sender.free_slots() == SHARED_SLOTS


def test_a_batch_for_another_connection_is_copied_before_its_slot_serves_again(sender: Sender) -> None:
    """A partition moved to another broker after the batch was made."""
    sender.hold_back()
    outgoing = sender.send(1)
    other = NearPeer()
    other.connect()
    other.session.publish(outgoing, 1)
    assert not lies_in_memory(outgoing) and outgoing.slot is None
    [(_, batch)] = other.batches()
    assert BatchView(batch).payloads() == payloads(1) and other.inline == 1


@pytest.mark.parametrize("size", [SHARED_BODY_BYTES_MIN - 1_000, SHARED_SLOT_BYTES])
def test_small_batches_and_those_that_no_slot_can_hold_are_made_as_bytes(sender: Sender, size: int) -> None:
    [(outgoing, *_)] = sender.outbox.batches([bytes(size // 100)] * 100, None, None)
    assert type(outgoing.body) is bytes


def test_a_compressed_batch_is_copied(with_kernels: None) -> None:
    pytest.importorskip("lz4")
    some = [bytes(range(place % 256)) + place.to_bytes(4, "big") for place in range(10_000)]
    [(outgoing, *_)] = Sender("lz4").outbox.batches(some, None, None)
    assert type(outgoing.body) is bytes and len(outgoing.body) > SHARED_BODY_BYTES_MIN


def test_memory_of_the_wrong_size_is_not_used(with_kernels: None) -> None:
    made = encode(payloads(1), publish_time_us=1, allocate=lambda _: Place(memoryview(bytearray(8))))
    assert type(made.body) is bytes


@pytest.mark.parametrize("start", range(0, 128, 4))
def test_a_copy_never_begins_a_little_behind_where_its_source_does(start: int) -> None:
    body = bytes(SHARED_BODY_BYTES_MIN)
    source = id(body) + CONTENT
    place = source + start - 64
    moved = place + _shift(body, place)
    assert moved - place in (0, 64) and not 0 < (moved - source) & 4095 < 16
    assert _shift(memoryview(body), place) == 0, "nobody knows where that lies"


@pytest.mark.parametrize("kind", [bytes, memoryview])
def test_a_frame_is_where_its_place_says(streams: bool, kind: Callable[[bytes], bytes | memoryview]) -> None:
    memory = SharedMemory()
    memory.decide(accepted=True)
    body = kind(bytes(range(256)) * (SHARED_BODY_BYTES_MIN // 256) + b"the end")
    for length in range(8, 4_104, 8):  # one of them makes a usual copy that would be slow
        start = bytes(length - 4)
        shared = memory.place(length, start, body)
        assert shared is not None
        position, size = wire._SHARED.unpack(shared[wire.FRAME_HEADER_BYTES :])
        assert memory._view[position : position + size] == start + bytes(body)
        memory.answered(length)
    assert len(memory._free) == SHARED_SLOTS
    memory.give_up()


def test_an_error_of_the_broker_is_still_an_answer(sender: Sender) -> None:
    outgoing = sender.send(1)
    [(frame, _)] = sender.arrived()
    sender.peer.refuse(frame, StorageFull("full"))
    assert isinstance(outgoing.error, DanubeError) and sender.free_slots() == SHARED_SLOTS
