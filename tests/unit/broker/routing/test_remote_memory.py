"""A client's memory at a worker that owns a partition elsewhere: when it is mapped, and what crosses then."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from danube.broker.routing.remote import RecordKind
from danube.broker.routing.shared_memory import ClientMemory
from danube.core.protocol import native as wire
from danube.core.protocol.native import Kind
from danube.errors import ProtocolError
from tests.unit.broker.routing.test_remote_sessions import CONNECTION, HOLDER, OWNER, Pair, records
from tests.unit.broker_parts import TOPIC, RecordingSession, RoutedBench, expected, frames_in, numbered
from tests.unit.offered_memory import Offer, in_memory, mapped


class Sharing(Pair):
    """A connection whose client shares memory, and has a producer that lives elsewhere."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.session = RecordingSession(CONNECTION)
        self.share()
        self.forward(wire.control_frame(Kind.OPEN_PRODUCER, wire.OpenProducer(TOPIC, "p"), 3, 1))
        self.carry()
        self.got()

    def share(self) -> None:
        self.offer = Offer()
        self.session.memory = ClientMemory(self.offer.said())

    def publish(self, correlation: int, raw: bytes) -> bool:
        """What the door does with the SHARED frame of this batch."""
        shared = in_memory(self.offer, wire.frame_header(Kind.PUBLISH, len(raw), correlation, 1) + raw)
        memory = self.session.memory
        assert memory is not None
        frame, view = wire.read_shared(shared[wire.FRAME_HEADER_BYTES :], memory.view)
        return self.holder_end.forward(OWNER, self.session, frame, view)

    def crossing(self) -> list[int]:
        """Kinds of the frames that lie in the ring to the owner."""
        kinds = []
        for _, kind, record in self.to_owner.sent:
            assert kind == RecordKind.TO_OWNER
            kinds += [frame.kind for frame in frames_in(record[8:])]
        return kinds

    def published(self) -> list[int]:
        frames = self.got()
        assert {frame.kind for frame in frames} <= {Kind.PUBLISHED}
        return [frame.correlation for frame in frames]

    def stored(self) -> list[tuple[int, bytes]]:
        self.subscribe()
        self.carry()
        return records(self.got())


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Sharing]:
    made = Sharing(tmp_path)
    yield made
    made.offer.close()
    made.owner.shard.close()
    made.holder.shard.close()


def publish_all(pair: Sharing, *correlations: int, start: int) -> None:
    for place, correlation in enumerate(correlations):
        assert pair.publish(correlation, numbered(2, start + 2 * place))
        pair.carry()


def test_the_first_batch_is_copied_and_the_others_are_read_where_they_lie(pair: Sharing) -> None:
    assert pair.publish(4, numbered(2))
    assert pair.crossing() == [Kind.SHARE_MEMORY, Kind.PUBLISH], "nobody waits for the answer"
    pair.carry()
    assert pair.publish(5, numbered(2, 2))
    assert pair.crossing() == [Kind.SHARED]
    pair.carry()
    assert pair.published() == [4, 5]
    assert pair.stored() == expected(0, 4)
    assert pair.holder.counters["forwarded_out"] == pair.owner.counters["forwarded_in"] == 2


def test_batches_are_copied_until_the_owner_has_answered(pair: Sharing) -> None:
    for correlation in (4, 5):
        assert pair.publish(correlation, numbered(2, 2 * (correlation - 4)))
    assert pair.crossing() == [Kind.SHARE_MEMORY, Kind.PUBLISH, Kind.PUBLISH]


def test_an_owner_that_cannot_map_it_gets_copies(pair: Sharing) -> None:
    pair.offer.close()  # a client that has died, or keeps no descriptor
    publish_all(pair, 4, 5, start=0)
    assert pair.publish(6, numbered(2, 4))
    assert pair.crossing() == [Kind.PUBLISH], "and is not asked again"
    pair.carry()
    assert pair.published() == [4, 5, 6] and pair.stored() == expected(0, 6)
    pair.share()


def test_a_full_ring_is_asked_again_later(pair: Sharing) -> None:
    pair.to_owner.room = False
    assert not pair.publish(4, numbered(2))
    pair.to_owner.room = True
    publish_all(pair, 4, 5, start=0)
    assert pair.published() == [4, 5] and pair.stored() == expected(0, 4)
    memory = pair.session.memory
    assert memory is not None and memory.readers == {OWNER: True}


def test_an_answer_about_earlier_memory_says_nothing_about_this(pair: Sharing) -> None:
    assert pair.publish(4, numbered(2))
    pair.offer.close()
    pair.share()
    assert pair.publish(5, numbered(2, 2))
    for worker, kind, record in pair.to_owner.take()[:2]:
        pair.owner_end.take(HOLDER, kind, memoryview(bytearray(record)))
        assert worker == OWNER
    pair.owner_end.flush()
    pair.bring()
    assert pair.publish(6, numbered(2, 4))
    assert pair.crossing() == [Kind.PUBLISH], "the owner may not have mapped it"


def test_new_memory_takes_the_place_of_the_old_at_the_owner(pair: Sharing) -> None:
    before = mapped()
    publish_all(pair, 4, 5, start=0)
    assert mapped() == before + 1
    pair.offer.close()
    pair.share()
    publish_all(pair, 6, 7, start=4)
    assert mapped() == before + 1
    assert pair.published() == [4, 5, 6, 7] and pair.stored() == expected(0, 8)


def test_what_the_client_has_changed_meanwhile_is_refused_and_nothing_else_is_touched(pair: Sharing) -> None:
    publish_all(pair, 4, start=0)
    assert pair.publish(5, numbered(2, 2))
    pair.offer.memory[4096:4104] = bytes(8)
    pair.carry()
    published, refused = pair.got()
    assert (published.kind, published.correlation) == (Kind.PUBLISHED, 4)
    assert (refused.kind, refused.correlation) == (Kind.ERROR, 0)
    assert isinstance(wire.decode_error(refused.body), ProtocolError)
    publish_all(pair, 6, start=2)
    assert pair.published() == [6] and pair.stored() == expected(0, 4)


def test_another_incarnation_of_the_owner_is_asked_again(pair: Sharing, tmp_path: Path) -> None:
    assert pair.publish(4, numbered(2))
    pair.to_owner.take()
    pair.holder_end.worker_restarted(OWNER)
    RoutedBench(tmp_path / "routed", 2).router.worker_restarted(pair.session, OWNER)
    assert not pair.holder_end._asked
    assert pair.publish(5, numbered(2))
    assert pair.crossing() == [Kind.SHARE_MEMORY, Kind.PUBLISH]


def test_the_owner_gives_it_back_with_the_connection(pair: Sharing) -> None:
    before = mapped()
    publish_all(pair, 4, 5, start=0)
    pair.holder_end.notify(OWNER, RecordKind.SESSION_GONE, CONNECTION)
    pair.carry()
    gc.collect()
    assert mapped() == before
