"""Memory that client and broker share: what is offered, who is let in, and when a slot is used again."""

from __future__ import annotations

import fcntl
import gc
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from danube.broker.routing import shared_memory
from danube.broker.routing.shared_memory import attach
from danube.client.machine.shared_memory import SharedMemory
from danube.core.batch.columns import BatchView
from danube.core.protocol import native as wire
from danube.core.protocol.native import SHARED_TOKEN_BYTES, Kind, ShareMemory
from danube.errors import ClosedError, InvalidArgument, OwnerMoved, ProtocolError, SequenceGap, StorageFull
from danube.ipc.region import Region
from danube.limits import SHARED_BODY_BYTES_MIN, SHARED_MEMORY_BYTES_MAX, SHARED_SLOT_BYTES, SHARED_SLOTS
from tests.unit.client.machine.test_client_session import open_pair, send
from tests.unit.native_door import Door, FakeSocket, FakeTransport, feed, on_loop, publish
from tests.unit.near_peer import LARGE, NearPeer, near_pair, payload_of, sharing_pair
from tests.unit.offered_memory import SIZE, Offer, in_memory, mapped


def descriptors() -> int:
    """Of memory, in this process."""
    gc.collect()
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing
            found += os.readlink(f"/proc/self/fd/{name}").startswith("/memfd:")
    return found


# -- the client's half ----------------------------------------------------------------------------


def test_large_batches_lie_in_memory_and_small_ones_go_through_the_socket() -> None:
    peer, producer = sharing_pair()
    outgoing = send(producer, LARGE)
    [(frame, batch)] = peer.batches()
    assert payload_of(batch) == LARGE and (peer.offers, peer.inline) == (1, 1)
    peer.acknowledge(frame, 1)
    assert outgoing.result().offset == 1
    send(producer, LARGE[: SHARED_BODY_BYTES_MIN // 2])
    send(producer, b"small")
    assert [payload_of(batch) for _, batch in peer.batches()] == [
        LARGE[: SHARED_BODY_BYTES_MIN // 2],
        b"small",
    ]
    assert peer.inline == 3


def test_nothing_is_offered_to_a_broker_elsewhere_or_for_small_batches() -> None:
    far, producer = open_pair()
    send(producer, LARGE)
    assert [frame.kind for frame, _ in far.sent()] == [Kind.PUBLISH]
    near, producer = near_pair()
    send(producer, b"small")
    assert [frame.kind for frame, _ in near.sent()] == [Kind.PUBLISH]


def test_a_slot_is_used_again_only_when_its_batch_is_answered() -> None:
    peer, producer = sharing_pair()
    for number in range(SHARED_SLOTS + 2):
        send(producer, bytes([number]) * len(LARGE))
    sent = peer.batches()
    assert peer.inline == 1 + 2, "those that found no slot"
    assert [payload_of(batch)[0] for _, batch in sent] == list(range(SHARED_SLOTS + 2)), (
        "in order all the same"
    )
    places = {frame.start for frame, _ in sent[:SHARED_SLOTS]}
    assert len(places) == SHARED_SLOTS
    peer.acknowledge(sent[5][0], 5)
    send(producer, LARGE)
    [(again, _)] = peer.batches()
    assert again.start == sent[5][0].start, "the one that is warm"
    for frame, batch in sent[:SHARED_SLOTS]:
        if frame is not sent[5][0]:
            assert peer.memory is not None and peer.memory[frame.start : frame.end] == batch


def test_a_batch_that_is_too_large_for_a_slot_goes_through_the_socket() -> None:
    peer, producer = sharing_pair()
    send(producer, bytes(SHARED_SLOT_BYTES))
    [(frame, batch)] = peer.batches()
    assert peer.inline == 2 and len(payload_of(batch)) == SHARED_SLOT_BYTES
    peer.acknowledge(frame, 1)


def test_a_broker_that_refuses_is_not_asked_again_until_the_next_connection() -> None:
    peer, producer = near_pair()
    for offset in range(3):
        send(producer, LARGE)
        [(frame, _)] = peer.batches(accept=False)
        peer.acknowledge(frame, offset)
    assert (peer.offers, peer.inline) == (1, 3)
    peer.lose()
    peer.connect()
    peer.open(7, 3, 3)
    send(producer, LARGE)
    peer.batches()
    assert peer.offers == 2


def test_after_a_lost_connection_new_memory_is_shared_and_the_old_stays_as_it_was() -> None:
    peer, producer = sharing_pair()
    kept = send(producer, LARGE)
    [(frame, batch)] = peer.batches()
    old = peer.memory
    assert old is not None
    peer.lose()
    peer.connect()
    peer.open(7, 3, 1)
    [(again, resent)] = peer.batches()
    assert resent == batch and peer.offers == 2 and peer.memory is not old
    for number in range(SHARED_SLOTS):
        send(producer, bytes([number]) * len(LARGE))
    assert len(peer.batches()) == SHARED_SLOTS
    assert old[frame.start : frame.end] == batch, "the broker may be writing it to its log"
    peer.acknowledge(again, 1)
    assert kept.result().offset == 1


def test_a_handle_that_is_closed_takes_the_memory_of_its_unanswered_batches_along() -> None:
    peer, producer = sharing_pair()
    kept = send(producer, LARGE)
    [(frame, batch)] = peer.batches()
    old = peer.memory
    assert old is not None
    peer.feed(wire.error_frame(OwnerMoved("moved"), 0, frame.handle))
    peer.pass_time(1)
    peer.open(7, 3, 1)
    [(again, resent)] = peer.batches()
    assert resent == batch and again.correlation != frame.correlation and peer.offers == 2
    peer.acknowledge(frame, 1)  # late, for a batch that nobody waits for under this number
    send(producer, LARGE[::-1])
    peer.batches()
    assert old[frame.start : frame.end] == batch
    peer.acknowledge(again, 1)
    assert kept.result().offset == 1


def test_a_batch_that_was_refused_frees_its_slot_and_is_whole_when_it_is_sent_again() -> None:
    peer, producer = sharing_pair()
    failed, following = send(producer, LARGE), send(producer, LARGE[::-1])
    (first, _), (second, _) = peer.batches()
    peer.refuse(first, StorageFull("full"))
    peer.refuse(second, SequenceGap("a number is missing"))
    assert isinstance(failed.error, StorageFull) and not following.settled
    peer.open(9, 4)
    [(again, batch)] = peer.batches()
    assert payload_of(batch) == LARGE[::-1] and BatchView(batch).header.producer_id == 9
    peer.acknowledge(again, 1)
    assert following.result().offset == 1
    for _ in range(SHARED_SLOTS):
        send(producer, LARGE)
    peer.batches()
    assert peer.inline == 1, "every slot is free"


@pytest.mark.parametrize("lacks", ["memory", "requests"])
def test_what_cannot_be_offered_goes_through_the_socket(monkeypatch: pytest.MonkeyPatch, lacks: str) -> None:
    peer, producer = near_pair()
    before = descriptors()
    if lacks == "memory":
        monkeypatch.setattr(os, "memfd_create", _no_memory)
    else:
        monkeypatch.setattr("danube.client.machine.session.REQUESTS_MAX", 0)
    for _ in range(2):
        send(producer, LARGE)
    assert len(peer.batches()) == 2 and (peer.offers, peer.inline) == (0, 2)
    assert descriptors() == before


def _no_memory(*_: object) -> int:
    raise OSError(12, "Cannot allocate memory")


def _fail(peer: NearPeer) -> None:
    peer.session.fail(ClosedError("the client is closed"))


def _abandon(peer: NearPeer) -> None:
    peer.session.disown(ClosedError("a fork"))


def _close_handle(peer: NearPeer) -> None:
    [(_, body)] = peer.sent()
    (frame, _) = wire.read_shared(body, peer.memory)
    peer.feed(wire.error_frame(OwnerMoved("moved"), 0, frame.handle))


@pytest.mark.parametrize("end", [NearPeer.lose, _fail, _abandon, _close_handle])
def test_the_descriptor_is_open_as_long_as_batches_may_be_put_there(end: Callable[[NearPeer], None]) -> None:
    before = descriptors()
    peer, producer = sharing_pair()
    send(producer, LARGE)
    assert descriptors() == before + 3, "each mapping holds another"
    end(peer)
    peer.memory = None
    assert descriptors() == before


@pytest.mark.parametrize("accept", [True, False])
def test_an_answer_that_comes_late_changes_nothing(accept: bool) -> None:
    before = descriptors()
    memory = SharedMemory()
    memory.give_up()
    memory.decide(accept)
    assert memory.place(1, b"header and head", LARGE) is None
    assert memory.reserve(len(LARGE)) is None
    del memory
    assert descriptors() == before


# -- the broker's half ----------------------------------------------------------------------------


def test_what_one_side_writes_the_other_reads() -> None:
    offer = Offer()
    mapped = attach(offer.said())
    offer.close()
    offer.memory[100:105] = b"bytes"
    assert mapped[100:105] == b"bytes" and len(mapped) == SIZE and not mapped.readonly


@pytest.mark.parametrize(
    ("offer", "changed", "why"),
    [
        (Offer, {"token": bytes(SHARED_TOKEN_BYTES)}, "begin with the token"),
        (Offer, {"token": b"short"}, "token of 5"),
        (Offer, {"size": SIZE - 8}, "has not"),
        (Offer, {"size": SHARED_MEMORY_BYTES_MAX + 1}, "at most"),
        (Offer, {"size": 8}, "cannot be shared"),
        (Offer, {"process": 2**31 - 1}, "cannot share memory with the broker"),
        (Offer, {"descriptor": 10**6}, "cannot share memory with the broker"),
        (lambda: Offer(seals=fcntl.F_SEAL_GROW), {}, "could be cut"),
        (lambda: Offer(name="something-else"), {}, "not memory that a client shares"),
        (lambda: Offer(token=b""), {}, "begin with the token"),
    ],
)
def test_what_is_not_the_clients_own_memory_is_refused(
    offer: Callable[[], Offer], changed: dict[str, Any], why: str
) -> None:
    made = offer()
    before = descriptors()
    with pytest.raises(InvalidArgument, match=why):
        attach(made.said(**changed))
    assert descriptors() == before
    made.close()


def test_memory_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    offer = Offer()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(InvalidArgument, match="another user"):
        attach(offer.said())
    offer.close()


def test_the_brokers_own_memory_cannot_be_named() -> None:
    region = Region.create(1, ring_bytes=1 << 24, tail_bytes=1 << 24)
    process, _, descriptor = region.path.removeprefix("/proc/").partition("/fd/")
    size = os.stat(region.path).st_size
    said = ShareMemory(int(process), int(descriptor), size, bytes(region.memory[:SHARED_TOKEN_BYTES]))
    with pytest.raises(InvalidArgument, match="not memory that a client shares"):
        attach(said)
    region.close()


def test_memory_that_cannot_be_mapped_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    offer = Offer()
    monkeypatch.setattr(shared_memory.mmap, "mmap", _no_memory)
    with pytest.raises(InvalidArgument, match="cannot be mapped"):
        attach(offer.said())
    offer.close()


# -- the door -------------------------------------------------------------------------------------


class LoopbackSocket(FakeSocket):
    def getpeername(self) -> tuple[str, int]:
        return ("127.0.0.1", 40_000)


class LoopbackTransport(FakeTransport):
    def get_extra_info(self, name: str) -> Any:
        return LoopbackSocket() if name == "socket" else None


class SharingDoor(Door):
    """A door with one connection from this host, which shares memory."""

    def __init__(self) -> None:
        super().__init__()
        self.connection, self.transport = self.connect(transport=LoopbackTransport())

    def share(self, offer: Offer, correlation: int = 2) -> None:
        feed(self.connection, wire.control_frame(Kind.SHARE_MEMORY, offer.said(), correlation))
        offer.close()
        [answer] = self.sent(self.transport)
        assert (answer.kind, answer.correlation) == (Kind.RESULT, correlation)

    def taken(self) -> list[tuple[int, bytes]]:
        taken, self.router.taken = self.router.taken, []
        return [(correlation, bytes(body)) for correlation, body in taken]


def placed(offer: Offer, correlation: int, position: int = 4096) -> bytes:
    return in_memory(offer, publish(correlation, 64), position)


def test_frames_in_memory_and_in_the_socket_keep_their_order() -> None:
    def test() -> None:
        door, offer = SharingDoor(), Offer()
        door.share(offer)
        together = placed(offer, 3) + publish(4, 64) + placed(offer, 5, 8192)
        feed(door.connection, together)
        assert [correlation for correlation, _ in door.taken()] == [3, 4, 5]
        feed(door.connection, together, step=5)
        assert door.taken() == [(number, bytes([number]) * 64) for number in (3, 4, 5)]
        assert door.counted["shared_in"] == 4

    on_loop(test)


def test_a_frame_in_memory_that_found_a_full_ring_is_offered_again() -> None:
    def test() -> None:
        door, offer = SharingDoor(), Offer()
        door.share(offer)
        door.router.room = False
        feed(door.connection, placed(offer, 3) + publish(4, 64))
        assert not door.transport.reading and door.server.hand_over()
        door.router.room = True
        assert not door.server.hand_over() and door.transport.reading
        assert [correlation for correlation, _ in door.taken()] == [3, 4]
        assert door.counted["shared_in"] == 1, "however often it was offered"

    on_loop(test)


def test_new_memory_takes_the_place_of_the_old() -> None:
    def test() -> None:
        door, old, new = SharingDoor(), Offer(), Offer()
        door.share(old)
        before = placed(old, 3)
        said = wire.control_frame(Kind.SHARE_MEMORY, new.said(), 9)
        feed(door.connection, before + said + placed(new, 4))
        new.close()
        assert door.taken() == [(3, b"\3" * 64), (4, b"\4" * 64)]

    on_loop(test)


def test_memory_goes_with_its_connection_but_for_what_is_still_to_be_written() -> None:
    def test() -> None:
        before = mapped()
        door, offer = SharingDoor(), Offer()
        door.share(offer)
        feed(door.connection, placed(offer, 3))
        door.connection.connection_lost(None)
        del offer
        assert mapped() == before + 1
        assert door.taken() == [(3, b"\3" * 64)]
        assert mapped() == before

    on_loop(test)


def test_a_draining_broker_refuses_what_lies_in_memory_by_its_number() -> None:
    def test() -> None:
        door, offer = SharingDoor(), Offer()
        door.share(offer)
        door.server.draining = True
        feed(door.connection, placed(offer, 3))
        [answer] = door.sent(door.transport)
        assert (answer.kind, answer.correlation) == (Kind.ERROR, 3) and not door.taken()

    on_loop(test)


def test_memory_is_not_taken_from_another_host() -> None:
    def test() -> None:
        door, offer = Door(), Offer()
        connection, transport = door.connect()
        feed(connection, wire.control_frame(Kind.SHARE_MEMORY, offer.said(), 2))
        [answer] = door.sent(transport)
        assert (answer.kind, answer.correlation) == (Kind.ERROR, 2) and not transport.closed
        feed(connection, publish(3, 64))
        assert [correlation for correlation, _ in door.router.taken] == [3], "it goes on without"
        offer.close()

    on_loop(test)


def test_an_offer_that_is_refused_changes_nothing() -> None:
    def test() -> None:
        door, offer, bad = SharingDoor(), Offer(), Offer(token=b"")
        door.share(offer)
        feed(door.connection, wire.control_frame(Kind.SHARE_MEMORY, bad.said(), 3) + placed(offer, 4))
        [answer] = door.sent(door.transport)
        assert (answer.kind, answer.correlation) == (Kind.ERROR, 3)
        assert [correlation for correlation, _ in door.taken()] == [4]
        bad.close()

    on_loop(test)


def _not_publish(offer: Offer) -> bytes:
    return in_memory(offer, wire.control_frame(Kind.PING, None, 5))


def _two_frames(offer: Offer) -> bytes:
    return in_memory(offer, publish(3, 64) + publish(4, 64))


def _padded(offer: Offer) -> bytes:
    frame = bytearray(publish(3, 64))
    frame[6] = 3  # bytes of padding
    return in_memory(offer, bytes(frame))


@pytest.mark.parametrize(
    "frame",
    [
        lambda offer: wire.shared_frame(4096, SIZE),
        lambda offer: wire.shared_frame(2**64 - 8, 80),
        lambda offer: wire.shared_frame(4097, 80),
        lambda offer: wire.shared_frame(0, 80),
        lambda offer: wire.shared_frame(4096, 8),
        lambda offer: wire.shared_frame(4096, 80),  # zeros lie there
        lambda offer: wire.frame_header(Kind.SHARED, 8) + bytes(8),
        _not_publish,
        _two_frames,
        _padded,
    ],
)
def test_what_is_no_frame_of_the_memory_ends_the_connection(frame: Callable[[Offer], bytes]) -> None:
    def test() -> None:
        door, offer = SharingDoor(), Offer()
        door.share(offer)
        feed(door.connection, frame(offer))
        assert door.transport.closed and not door.taken()

    on_loop(test)


def test_a_frame_in_memory_before_there_is_any_ends_the_connection() -> None:
    def test() -> None:
        door = SharingDoor()
        feed(door.connection, wire.shared_frame(4096, 80))
        assert door.transport.closed and not door.taken()

    on_loop(test)
    with pytest.raises(ProtocolError, match="before memory was shared"):
        wire.read_shared(bytes(16), None)
