"""Channels of several workers in one process, driven by hand, and between two real processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress

import pytest

from danube.errors import InvalidArgument, LimitExceeded, RingDamaged
from danube.ipc.channel import CHANNEL_RECORD_BYTES_MAX, Channel, _Peer
from danube.ipc.region import Region
from danube.ipc.ring import KIND_END, SLOT_HEADER_BYTES, TAIL
from danube.limits import MIB
from tests.child_process import readable

RING = 16 * 1024


@pytest.fixture
def region() -> Iterator[Region]:
    made = Region.create(3, ring_bytes=RING)
    for worker in range(3):
        made.announce(worker, 10 + worker)
    yield made
    made.close()


def channel(region: Region, worker: int) -> Channel:
    return Channel(region, worker, region.incarnation(worker))


def received(taker: Channel) -> list[tuple[int, int, bytes]]:
    records = [(worker, kind, bytes(payload)) for worker, kind, payload in taker.poll()]
    taker.release()
    return records


def rung(taker: Channel) -> bool:
    return readable(taker, 0)


def replace(region: Region, worker: int, incarnation: int) -> Channel:
    """What the supervisor does after it reaped ``worker``."""
    region.announce(worker, incarnation)
    return channel(region, worker)


def damage(region: Region, writer: int, reader: int, byte: int) -> None:
    _, slots = region.ring_memory(writer, reader)
    slots[byte] ^= 0xFF


def test_records_arrive_once_in_order_after_flush(region: Region) -> None:
    one, two, three = (channel(region, worker) for worker in range(3))
    assert one.send(1, 7, [b"a", b"b"]) and one.send(2, 8, [b"c"]) and one.send(1, 9, [])
    assert received(two) == []
    one.flush()
    assert received(two) == [(0, 7, b"ab"), (0, 9, b"")]
    assert received(three) == [(0, 8, b"c")]
    assert received(two) == []


def test_a_kind_of_the_rings_own_is_refused(region: Region) -> None:
    one = channel(region, 0)
    with pytest.raises(InvalidArgument):
        one.send(1, KIND_END, [b""])


def test_the_bell_rings_only_for_a_sleeper(region: Region) -> None:
    one, two = channel(region, 0), channel(region, 1)
    one.send(1, 1, [b"x"])
    one.flush()
    assert not rung(two), "awake"
    assert received(two) and two.arm()
    one.send(1, 1, [b"y"])
    one.flush()
    assert rung(two)
    two.disarm()
    assert not rung(two) and received(two) == [(0, 1, b"y")]


def test_a_worker_does_not_fall_asleep_over_records(region: Region) -> None:
    one, two = channel(region, 0), channel(region, 1)
    one.send(1, 1, [b"x"])
    one.flush()
    assert not two.arm()
    received(two)
    assert two.arm()


def test_who_was_refused_is_woken_and_told_when_there_is_room(region: Region) -> None:
    one, two = channel(region, 0), channel(region, 1)
    two.arm()
    two.disarm()
    while one.send(1, 1, [bytes(1000)]):
        pass
    one.flush()
    assert one.unblocked() == [] and one.arm()
    assert len(two.poll()) > 10
    assert not rung(one)
    two.release()
    assert rung(one)
    one.disarm()
    assert one.unblocked() == [1] and one.unblocked() == []
    assert one.send(1, 1, [bytes(1000)])


def test_a_refused_worker_does_not_sleep_when_room_came_before_it_armed(region: Region) -> None:
    one, two = channel(region, 0), channel(region, 1)
    while one.send(1, 1, [bytes(1000)]):
        pass
    one.flush()
    received(two)
    assert not one.arm()
    assert one.unblocked() == [1] and one.unblocked() == [] and one.arm()


def test_a_worker_that_never_asks_who_has_room_is_kept_awake_only_once(region: Region) -> None:
    one, two = channel(region, 0), channel(region, 1)
    for _ in range(3):
        while one.send(1, 1, [bytes(1000)]):
            pass
        one.flush()
        assert one.arm()
        received(two)
        assert rung(one)
        one.disarm()
        assert not one.arm()
        assert one.arm()
        one.disarm()


def test_room_that_comes_between_the_refusal_and_its_noting_is_noticed(
    region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = channel(region, 0), channel(region, 1)
    block = _Peer.block

    def released_meanwhile(peer: _Peer) -> None:
        one.flush()
        received(two)
        block(peer)

    monkeypatch.setattr(_Peer, "block", released_meanwhile)
    while one.send(1, 1, [bytes(1000)]):
        pass
    assert not one.arm()
    assert one.unblocked() == [1]


@pytest.mark.parametrize("size", [RING // 2, RING, 10 * RING + 3])
def test_a_record_larger_than_half_a_ring_crosses_whole_and_in_order(region: Region, size: int) -> None:
    one, two = channel(region, 0), channel(region, 1)
    large = os.urandom(size)
    assert one.send(1, 1, [b"before"])
    assert one.send(1, 2, [large[:100], memoryview(large)[100:]])
    got: list[tuple[int, int, bytes]] = []
    sent_after = False
    for _ in range(100):
        one.flush()
        got += received(two)
        one.unblocked()
        sent_after = sent_after or one.send(1, 3, [b"after"])
    assert got == [(0, 1, b"before"), (0, 2, large), (0, 3, b"after")]
    assert one.arm() and two.arm()


def test_more_than_any_frame_is_an_error(region: Region) -> None:
    one = channel(region, 0)
    with pytest.raises(LimitExceeded):
        one.send(1, 1, [bytes(MIB)] * (CHANNEL_RECORD_BYTES_MAX // MIB) + [b"one more"])


def test_a_replaced_reader_gets_nothing_that_was_meant_for_the_dead_one(region: Region) -> None:
    one, two = channel(region, 0), channel(region, 1)
    one.send(1, 1, [b"drained by the dead one"])
    one.send(1, 2, [b"never drained"])
    one.flush()
    assert len(two.poll()) == 2  # and dies before release
    two = replace(region, 1, 50)
    one.send(1, 3, [b"sent before the sender knows"])
    one.flush()
    assert received(two) == [] and two.stale_count == 3
    assert one.peers_restarted() == [1] and one._peers[1].incarnation == 50
    one.send(1, 4, [b"for the new one"])
    one.flush()
    assert received(two) == [(0, 4, b"for the new one")]
    assert one.peers_restarted() == []


def test_records_of_a_replaced_writer_wait_until_its_restart_was_seen(region: Region) -> None:
    one, two = channel(region, 0), channel(region, 1)
    one.send(1, 1, [b"of the dead one"])
    one.flush()
    one.send(1, 1, [b"claimed and never published"])
    one = replace(region, 0, 60)
    one.send(1, 2, [b"of the new one"])
    one.flush()
    assert received(two) == [], "its restart was not yet seen"
    assert not two.arm(), "and that keeps the worker awake"
    assert two.peers_restarted() == [0]
    assert received(two) == [(0, 2, b"of the new one")]


def test_a_restart_wakes_sleepers(region: Region) -> None:
    two = channel(region, 1)
    assert two.arm()
    region.announce(0, 99)
    assert rung(two)


def test_half_a_large_record_of_a_dead_writer_is_forgotten(region: Region) -> None:
    one, two = channel(region, 0), channel(region, 1)
    one.send(1, 1, [bytes(5 * RING)])
    one.flush()
    assert received(two) == []
    one = replace(region, 0, 61)
    assert two.peers_restarted() == [0]
    one.send(1, 2, [b"new"])
    one.flush()
    assert received(two) == [(0, 2, b"new")]


def test_damage_is_an_error_that_names_the_peer_and_reset_tells_both_sides(region: Region) -> None:
    one, two, three = (channel(region, worker) for worker in range(3))
    one.send(1, 1, [b"good"])
    one.send(1, 2, [b"hit"])
    one.flush()
    damage(region, 0, 1, SLOT_HEADER_BYTES + 8 + 1)
    assert received(two) == [(0, 1, b"good")]
    for _ in range(2):
        with pytest.raises(RingDamaged) as caught:
            two.poll()
        assert caught.value.facts["worker"] == 0
    one.arm()
    two.reset(0)
    assert rung(one)
    assert one.peers_restarted() == [1] and two.peers_restarted() == [0] and three.peers_restarted() == []
    one.send(1, 3, [b"again"])
    one.flush()
    assert received(two) == [(0, 3, b"again")]


def test_a_scribbled_tail_heals_and_the_sender_only_sees_a_full_ring(region: Region) -> None:
    one, two = channel(region, 0), channel(region, 1)
    words, _ = region.ring_memory(0, 1)
    words.store(TAIL, 12345 << 20)
    assert one.send(1, 1, [b"z" * 1000]), "it has room by what it knew"
    while one.send(1, 1, [b"z" * 1000]):
        pass
    one.flush()
    assert two.peers_restarted() == [0] and one.peers_restarted() == [1]
    received(two)
    assert one.send(1, 2, [b"healed"])
    one.flush()
    assert received(two)[-1:] == [(0, 2, b"healed")]


def test_a_fragment_that_does_not_fit_its_record_is_damage(region: Region) -> None:
    one, two = channel(region, 0), channel(region, 1)
    peer = one._peers[1]
    assert peer.writer.put(KIND_END + 1, ((5).to_bytes(4, "little") + (3).to_bytes(4, "little"), b"four"), 12)
    peer.writer.publish()
    with pytest.raises(RingDamaged):
        two.poll()


def test_peers_take_turns_so_that_a_busy_one_does_not_starve_the_others(region: Region) -> None:
    one, two, three = (channel(region, worker) for worker in range(3))
    for sender in (one, two):
        for _ in range(10):
            assert sender.send(2, 1, [bytes(500)])
        sender.flush()
    order = [worker for _ in range(20) for worker, _, _ in three.poll(1)]
    assert order == [0, 1] * 10


def test_without_peers_a_channel_sleeps() -> None:
    alone = Region.create(1)
    only = Channel(alone, 0, 1)
    assert only.poll() == [] and only.arm()
    alone.close()


def _echo(region: Region, worker: int) -> None:
    """Send every record back where it came from, sleeping on the bell."""
    own = channel(region, worker)
    waiting: list[tuple[int, int, bytes]] = []
    while True:
        own.peers_restarted()
        records = own.poll()
        waiting += [(peer, kind, bytes(payload)) for peer, kind, payload in records]
        own.release()
        own.unblocked()
        while waiting and own.send(waiting[0][0], waiting[0][1], [waiting[0][2]]):
            waiting.pop(0)
        own.flush()
        if not records and own.arm():
            readable(own, 20)
            own.disarm()


def test_many_thousand_sleepy_round_trips_lose_no_wake_up(region: Region) -> None:
    """Both sides sleep whenever they can; a lost wake-up is a sleep of more than 10 s and fails."""
    one = channel(region, 0)
    child = os.fork()
    if child == 0:
        try:
            _echo(region, 1)
        finally:
            os._exit(1)
    try:
        sent = answered = sleeps = 0
        while answered < 40_000:
            window = 1 if answered < 10_000 else 1 + sent % 97
            while sent < 40_000 and sent - answered < window:
                if not one.send(1, sent % 1000, [sent.to_bytes(8, "little") * (sent % 23)]):
                    break
                sent += 1
            one.flush()
            for worker, kind, payload in one.poll():
                assert (worker, kind) == (1, answered % 1000)
                assert bytes(payload) == answered.to_bytes(8, "little") * (answered % 23)
                answered += 1
            one.release()
            one.unblocked()
            if answered < sent and one.arm():
                sleeps += 1
                assert readable(one, 10), "a wake-up was lost"
                one.disarm()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert sleeps > 100


class Half:
    """A part of a record that cannot be copied: its writer dies there."""

    def __len__(self) -> int:
        return 500


@pytest.mark.parametrize("point", ["fill", "put", "publish"])
def test_a_writer_killed_at_any_point_leaves_no_half_record(region: Region, point: str) -> None:
    two = channel(region, 1)
    child = os.fork()
    if child == 0:
        try:
            one = channel(region, 0)
            one.send(1, 1, [b"whole"])
            one.flush()
            with suppress(TypeError):
                one.send(1, 2, [b"h" * 500, Half() if point == "fill" else b"h" * 500])  # type: ignore[list-item]
            if point == "publish":
                one.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    os.waitpid(child, 0)
    expected = [(0, 1, b"whole")] + ([(0, 2, b"h" * 1000)] if point == "publish" else [])
    assert received(two) == expected
    one = replace(region, 0, 70)
    assert two.peers_restarted() == [0]
    one.send(1, 3, [b"of the replacement"])
    one.flush()
    assert received(two) == [(0, 3, b"of the replacement")]


def test_a_reader_killed_with_drained_slots_gives_them_back(region: Region) -> None:
    one = channel(region, 0)
    while one.send(1, 1, [bytes(1000)]):
        pass
    one.flush()
    child = os.fork()
    if child == 0:
        try:
            channel(region, 1).poll()
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    os.waitpid(child, 0)
    assert not one.send(1, 1, [bytes(1000)])
    two = replace(region, 1, 71)
    assert one.peers_restarted() == [1]
    assert received(two) == []
    assert one.send(1, 2, [bytes(1000)])
    one.flush()
    assert received(two) == [(0, 2, bytes(1000))]
