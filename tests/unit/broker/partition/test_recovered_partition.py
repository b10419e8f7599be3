"""A partition after metadata was lost: behind nobody's hole, which any disk of before may fill."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from danube.broker.mover.returning import asides
from danube.broker.tiers.inheritance import KeptOwner
from danube.core.cluster.commands import Reservation
from danube.core.placement.recovered import EPOCHS_AHEAD, OFFSETS_AHEAD
from danube.errors import Fenced
from danube.wal.segments.holes import Hole, HoleKind
from danube.wal.tier.hole_changes import Tail
from tests.unit.broker.tiers.test_failover import drained, exposed, sound
from tests.unit.cluster_hosts import STEP, Cluster, Host
from tests.unit.wal_samples import IDENTITY, memory_directory


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Host]]:
    with memory_directory(tmp_path) as root:
        cluster = Cluster()
        yield [Host(cluster, number, root / str(number)) for number in (1, 2, 3)]


def lose_metadata(cluster: Cluster, known: Reservation) -> None:
    """All is down, and what is known of the partition is as of ``known``."""
    assert cluster.owner is None
    cluster.epoch = known.epoch + EPOCHS_AHEAD
    cluster.reservation = Reservation(*IDENTITY, known.end + OFFSETS_AHEAD, 0, cluster.epoch)


def test_no_directory_is_continued_and_all_comes_back(hosts: list[Host]) -> None:
    first = hosts[0]
    exposed(first)
    known = first.cluster.reservation
    lose_metadata(first.cluster, known)
    inherited = first.take().open()
    end = known.end + OFFSETS_AHEAD
    assert (inherited.continued, inherited.start, inherited.hole_end) == (False, end, end)
    assert first.cluster.holes() == [(6, end, "open")]
    first.publish(b"a")
    drained(first)
    assert end in first.cluster.acked, "nobody waits behind the hole"
    assert [one.word for one in first.bring_back()] == ["offered"]
    first.take_back()
    assert first.cluster.holes() == [(11, end, "open")], "another disk may hold more"
    assert first.records() == first.cluster.given
    drained(first)
    assert first.cluster.acked == set(first.cluster.given)
    assert [one.word for one in first.bring_back()] == ["removed"] and not asides(first.data_dir)
    sound(first.cluster)


def test_what_an_owner_gave_whom_nobody_remembers_comes_back_too(hosts: list[Host]) -> None:
    """The journal still knows the first owner; the second one's time is lost with its reservation."""
    first, second, third = hosts
    exposed(first)
    known = first.cluster.reservation
    second.take().open()
    second.publish(b"a", b"b")
    second.crash()
    lose_metadata(first.cluster, known)
    third.take().open()
    end = known.end + OFFSETS_AHEAD
    assert first.cluster.holes() == [(6, STEP, "open"), (STEP, end, "open")]
    third.publish(b"c")
    drained(third)
    for host in (first, second):
        host.restart()
        assert [one.word for one in host.bring_back()] == ["offered"]
        third.take_back()
        assert [one.word for one in host.bring_back()] == ["removed"]
    assert first.cluster.holes() == [(11, STEP, "unused"), (STEP + 2, end, "open")]
    drained(third)
    assert third.records() == third.cluster.given
    assert third.cluster.acked == set(third.cluster.given)
    sound(third.cluster)


def test_an_older_disk_does_not_end_the_hole_that_a_later_one_fills(hosts: list[Host]) -> None:
    """Given away cleanly, so the hole begins exactly where the older log ends."""
    first, second, third = hosts
    first.take().open()
    first.publish(b"0", b"1")
    known = first.cluster.reservation
    first.release()
    second.take().open()
    second.publish(b"2", b"3")
    second.crash()
    lose_metadata(first.cluster, known)
    third.take().open()
    first.restart()
    assert [one.word for one in first.bring_back()] == ["removed"]
    second.restart()
    assert [one.word for one in second.bring_back()] == ["offered"]
    third.take_back()
    assert third.records() == third.cluster.given and len(third.cluster.given) == 4
    assert [one.word for one in second.bring_back()] == ["removed"]


def test_an_operator_ends_the_hole_when_no_disk_is_missing(hosts: list[Host]) -> None:
    first = hosts[0]
    exposed(first)
    lose_metadata(first.cluster, first.cluster.reservation)
    first.take().open()
    first.bring_back()
    first.take_back()
    first.accept_loss()
    assert [kind for _, _, kind in first.cluster.holes()] == ["given_up"]
    drained(first)
    assert first.cluster.acked == set(first.cluster.given)
    assert first.subscription is not None and first.subscription.ack_floor == first.log.log_end  # type: ignore[union-attr]


def test_an_heir_that_dies_before_it_reserves_leaves_one_hole(hosts: list[Host]) -> None:
    first, second, _ = hosts
    exposed(first)
    lose_metadata(first.cluster, first.cluster.reservation)
    lost = first.cluster.reservation
    first.take().open()
    first.crash()
    first.cluster.reservation = lost
    inherited = first.take().open()
    assert inherited.start == lost.end and len(first.cluster.holes()) == 1
    first.crash()
    first.cluster.reservation = lost
    second.take().open()
    assert len(first.cluster.holes()) == 1
    second.publish(b"a")
    for _ in range(3):
        first.restart()
        first.bring_back()
        second.take_back()
    assert second.records() == second.cluster.given and not asides(first.data_dir)


def test_an_owner_of_before_uploads_nothing_any_more(hosts: list[Host]) -> None:
    first, second, _ = hosts
    exposed(first)
    lose_metadata(first.cluster, first.cluster.reservation)
    former = Host(first.cluster, 1, first.data_dir)
    former.epoch = 1
    second.take().open()
    second.publish(b"a")
    second.upload()
    second.crash()
    first.cluster.reservation = Reservation(*IDENTITY, STEP, 1, 1)  # as the old cluster has it
    with pytest.raises(Fenced):
        former.open()
        former.upload()


def test_whose_nobody_s_hole_is() -> None:
    hole = Hole(10, 20, 0, 5 * 256 + 255)
    assert Tail(1, 256, 5 * 256 + 255, 30, []).owns(hole) and Tail(2, 512, 767, 12, []).owns(hole)
    assert not Tail(1, 256, 6 * 256 + 255, 30, []).owns(hole), "it is of the time after"
    assert not Tail(1, 256, 511, 30, []).owns(hole.settled(HoleKind.GIVEN_UP, 1))


def test_which_directory_is_continued_after_metadata_was_lost(hosts: list[Host]) -> None:
    from danube.broker.tiers.inheritance import Heir, continues
    from danube.wal.tier.manifest import Manifest
    from tests.unit.broker.tiers.test_failover import _owner

    heir = Heir(_owner(hosts[0]), 1, 9, Reservation(*IDENTITY, 50, 0, 8))  # type: ignore[arg-type]
    manifest = Manifest.empty("/default/t", IDENTITY, 9 * 256, 10)
    assert not continues(KeptOwner(1, 4, 6), True, heir, manifest)
    assert not continues(None, True, heir, manifest) and not continues(None, False, heir, manifest)
