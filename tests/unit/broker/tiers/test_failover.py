"""A partition that goes on at another host: nothing is given twice or passed, the tail comes back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from danube.broker.mover.returning import asides
from danube.broker.tiers.inheritance import KeptOwner, continues, read_owner
from danube.core.cluster.commands import Reservation
from danube.errors import Fenced, ObjectMissing
from danube.wal.segments.holes import Hole
from danube.wal.tier.manifest import Manifest
from danube.wal.tier.returned import take_returned
from danube.wal.tier.uploader import Uploader, adding
from danube.wal.verify.store import verify_store
from danube.wal.verify.tree import Verified
from tests.unit.cluster_hosts import NOW_US, STEP, Cluster, Host
from tests.unit.failing_files import FailingFiles, Killed
from tests.unit.faulty_store import Crash, crash_after, crash_before
from tests.unit.wal_samples import IDENTITY, memory_directory


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Host]]:
    with memory_directory(tmp_path) as root:
        cluster = Cluster()
        yield [Host(cluster, number, root / str(number)) for number in (1, 2, 3)]


def exposed(first: Host) -> None:
    """Six records in the store, five more on the host's disk alone, a subscription at the fourth; it dies."""
    first.take().open()
    first.publish(b"0", b"1", b"2")
    first.publish(b"3", b"4", b"5")
    first.ack(first.deliver()[:3])
    first.upload()
    first.copy_cursors()
    first.evict()
    first.publish(b"6", b"7")
    first.seal()
    first.publish(b"8", b"9", b"10")
    first.ack(first.deliver()[:1])
    first.crash()


def sound(cluster: Cluster) -> None:
    verified = Verified()
    verify_store(cluster.store.memory, NOW_US, verified)
    strange = [one for one in verified.findings if "store.json" not in str(one)]
    assert not strange, strange


def drained(host: Host) -> None:
    for _ in range(20):
        host.ack(host.deliver())


def test_a_clean_release_is_continued_without_a_hole(hosts: list[Host]) -> None:
    first, second, _ = hosts
    first.take().open()
    first.publish(b"0", b"1")
    first.ack(first.deliver()[:1])
    first.release()
    inherited = second.take().open()
    assert not inherited.continued and inherited.start == 2 and inherited.hole_end == 0
    second.publish(b"2")
    assert second.records() == second.cluster.given == {0: b"0", 1: b"1", 2: b"2"}
    assert second.deliver() == [1, 2] and second.cluster.holes() == []
    first.restart()
    assert [one.word for one in first.bring_back()] == ["removed"], "all that it holds is in the store"


def test_an_owner_that_starts_again_goes_on_with_its_own_log(hosts: list[Host]) -> None:
    first = hosts[0]
    exposed(first)
    inherited = first.take().open()
    assert inherited.continued and first.records() == first.cluster.given
    first.publish(b"11")
    assert sorted(first.cluster.given) == list(range(12)) and first.cluster.holes() == []
    kept = read_owner(first.directory)
    assert kept == KeptOwner(1, 1, 2, 1)


def test_an_owner_whose_machine_ended_gives_no_offset_twice(hosts: list[Host]) -> None:
    """It stays the owner, and goes on behind what was reserved; what its disk kept comes back."""
    first = hosts[0]
    exposed(first)  # 0 .. 8 are synced, and somebody has seen 8, 9 and 10
    first.take().open()
    first.publish(b"11")
    first.publish(b"12")
    reserved_end = first.cluster.reservation.end
    first.cut_power(12)
    inherited = first.take().open()
    assert not inherited.continued and inherited.start == inherited.hole_end == reserved_end
    first.publish(b"next")
    assert reserved_end in first.cluster.given, "what was lost stands for no other record"
    first.ack(first.deliver())
    for _ in range(4):
        first.bring_back()
        first.take_back()
    drained(first)
    assert first.cluster.acked == first.cluster.given.keys() - {12}, "and nothing else is lost"
    assert first.cluster.holes() == [(12, reserved_end, "unused")]
    first.publish(b"more")
    first.crash()
    first.incarnation += 1
    assert first.take().open().continued, "a process that was killed leaves nothing out"
    assert read_owner(first.directory) == KeptOwner(1, 3, 4, 3)
    sound(first.cluster)


def test_what_was_never_reserved_is_continued_also_after_the_end_of_the_machine(hosts: list[Host]) -> None:
    first = hosts[0]
    first.take().open()
    first.publish(b"0")
    first.release()
    first.cluster.reservation = Reservation(*IDENTITY, 0, 0, 0)
    first.incarnation, first.lost_before = 2, 2
    assert first.take().open().continued


def test_an_object_that_is_gone_does_not_keep_the_partition_from_its_next_owner(hosts: list[Host]) -> None:
    first, second, _ = hosts
    exposed(first)
    memory = first.cluster.store.memory
    memory.delete([found.key for found in memory.list("") if found.key.endswith(".seg")])
    inherited = second.take().open()
    assert not inherited.continued and inherited.start == STEP
    second.publish(b"a")
    second.upload()
    with pytest.raises(ObjectMissing):
        second.deliver()  # what is missing is not passed
    assert second.subscription is not None and second.subscription.ack_floor == 3


def test_a_former_owner_that_takes_back_what_returns_hides_it_from_nobody(hosts: list[Host]) -> None:
    """It gave the partition away whole, with a hole in it; its mover looks for offers a little longer."""
    first, second, third = hosts
    exposed(first)
    second.take().open()
    second.publish(b"a")
    drained(second)
    late = second.uploader
    assert late is not None
    second.release()
    third.take().open()
    first.restart()
    first.bring_back()
    with contextlib.suppress(Fenced):
        take_returned(late, second.data_dir / "work", NOW_US)
    third.take_back()
    drained(third)
    assert third.cluster.acked == set(third.cluster.given), "nothing is published any more"
    sound(third.cluster)


@pytest.mark.parametrize("call", range(12))
def test_who_names_a_hole_late_names_none_where_the_owner_went_on(hosts: list[Host], call: int) -> None:
    """A broker sleeps while it takes over; the owner is back meanwhile, and goes on with its own log."""
    first, second, _ = hosts
    exposed(first)
    cluster = first.cluster

    def sleep(name: str, arguments: tuple[Any, ...], carry_out: Callable[[], Any]) -> Any:
        cluster.owner = None
        first.take().open()
        return carry_out()

    second.take()
    cluster.store.faults[len(cluster.store.calls) + call] = sleep
    with contextlib.suppress(Fenced):
        second.open()
    second.crash()
    cluster.owner, known = first, first.inherited
    assert known is not None and first.log is not None and first.uploader is not None
    first.publish(b"11")
    first.upload()
    assert first.uploader.manifest.uploaded_end == first.log.log_end
    assert cluster.holes() == ([] if known.continued else [(6, STEP, "open")])
    sound(cluster)


def test_behind_an_owner_that_died_the_next_one_begins_behind_all_that_it_may_have_given(
    hosts: list[Host],
) -> None:
    first, second, _ = hosts
    exposed(first)
    inherited = second.take().open()
    end = STEP
    assert (inherited.continued, inherited.start, inherited.hole_end) == (False, end, end)
    assert second.cluster.holes() == [(6, end, "open")]
    second.publish(b"a", b"b")
    assert second.deliver() == [3, 4, 5, end, end + 1], "nothing waits for an ack before the hole"
    second.ack([4, end, end + 1])
    assert second.subscription is not None and second.subscription.ack_floor == 3
    second.ack([3, 5])
    assert second.subscription.ack_floor == 6
    sound(second.cluster)


def test_a_consumer_that_acks_by_tens_comes_through_a_failover_and_a_return(hosts: list[Host]) -> None:
    """No ten ends where the hole begins, nor where what came back ends; it never waits and never fails."""
    first, second, _ = hosts
    first.take().open()
    first.publish(*[b"%d" % number for number in range(25)])
    first.upload()
    first.copy_cursors()
    first.publish(*[b"%d" % number for number in range(25, 32)])
    first.crash()
    second.take().open()
    second.publish(*[b"%d" % number for number in range(40, 47)])
    got = second.deliver()
    assert got == [*range(25), *range(STEP, STEP + 7)], "all that there is, with nothing acked"
    second.ack(got[:30])
    second.upload()
    first.restart()
    assert [one.word for one in first.bring_back()] == ["offered"]
    second.take_back()
    got = got[30:] + second.deliver()
    assert got == [STEP + 5, STEP + 6, *range(25, 32)], "what came back, with two behind it not acked"
    second.publish(b"a")
    got += second.deliver()
    assert len(got) == 10
    second.ack(got)
    one = second.subscription
    assert one is not None and second.cluster.acked == set(second.cluster.given)
    numbers = one.statistics()
    assert numbers["redelivered"] == numbers["timed_out"] == 0 and one.ack_floor == one.next
    sound(second.cluster)


def test_the_tail_comes_back_in_front_of_the_hole_and_is_delivered(hosts: list[Host]) -> None:
    first, second, _ = hosts
    exposed(first)
    second.take().open()
    second.publish(b"a", b"b")
    drained(second)
    second.upload()
    first.restart()
    assert [one.word for one in first.bring_back()] == ["offered"]
    assert second.take_back() is False
    assert second.cluster.holes() == [(11, STEP, "unused")]
    assert second.records() == second.cluster.given
    drained(second)
    assert second.cluster.acked == set(second.cluster.given)
    assert second.subscription is not None and second.subscription.ack_floor == second.log.log_end  # type: ignore[union-attr]
    assert [one.word for one in first.bring_back()] == ["removed"] and not asides(first.data_dir)
    sound(second.cluster)


def test_rounds_may_be_repeated_in_any_order(hosts: list[Host]) -> None:
    first, second, _ = hosts
    exposed(first)
    second.take().open()
    first.restart()
    for _ in range(3):
        first.bring_back()
    second.take_back()
    manifest = second.cluster.manifest
    for _ in range(3):
        assert second.take_back() is False
        first.bring_back()
    assert second.cluster.manifest == manifest and not asides(first.data_dir)
    assert second.records() == second.cluster.given


def test_two_owners_that_died_one_after_the_other_leave_a_hole_each(hosts: list[Host]) -> None:
    first, second, third = hosts
    exposed(first)
    second.take().open()
    second.publish(b"x", b"y")
    second.crash()
    third.take().open()
    assert [hole[2] for hole in third.cluster.holes()] == ["open", "open"]
    third.publish(b"z")
    drained(third)
    second.restart()
    second.bring_back()
    third.take_back()
    drained(third)
    assert third.subscription is not None and third.subscription.ack_floor == 6
    first.restart()
    first.bring_back()
    third.take_back()
    drained(third)
    assert third.records() == third.cluster.given and third.cluster.acked == set(third.cluster.given)
    sound(third.cluster)


def test_an_owner_that_never_appended_leaves_the_hole_with_its_predecessor(hosts: list[Host]) -> None:
    first, second, third = hosts
    exposed(first)
    reserved = first.cluster.reservation
    second.take().open()
    second.cluster.reservation = reserved  # it died before it reserved
    second.crash()
    third.take().open()
    assert third.cluster.holes() == [(6, STEP, "open")]
    first.restart()
    first.bring_back()
    third.take_back()
    assert third.records() == third.cluster.given


def test_an_owner_that_gets_its_partition_back_fills_the_hole_itself(hosts: list[Host]) -> None:
    first, second, _ = hosts
    exposed(first)
    reserved = first.cluster.reservation
    second.take().open()
    second.cluster.reservation = reserved
    second.crash()
    assert not first.take().open().continued
    first.publish(b"again")
    assert [one.word for one in first.bring_back()] == ["offered"]
    first.take_back()
    assert first.records() == first.cluster.given
    sound(first.cluster)


def test_a_disk_that_was_lost_leaves_a_hole_also_at_its_own_broker(hosts: list[Host]) -> None:
    import shutil

    first = hosts[0]
    exposed(first)
    shutil.rmtree(first.data_dir)
    assert not first.take().open().continued and first.cluster.holes() == [(6, STEP, "open")]
    for offset in range(6, 11):
        del first.cluster.given[offset]
    first.publish(b"new")
    first.accept_loss()
    assert first.cluster.holes() == [(6, STEP, "given_up")] and first.records() == first.cluster.given
    drained(first)
    assert first.cluster.acked >= set(first.cluster.given)


def test_what_was_given_up_stays_on_the_disk_that_came_too_late(hosts: list[Host]) -> None:
    first, second, _ = hosts
    exposed(first)
    second.take().open()
    second.accept_loss()
    first.restart()
    [outcome] = first.bring_back()
    assert outcome.word == "staying" and "6 to 11" in outcome.why and len(asides(first.data_dir)) == 1


def test_the_former_owner_is_fenced_with_the_hole(hosts: list[Host]) -> None:
    first, second, _ = hosts
    exposed(first)
    late = Uploader(first.cluster.store, _owner(first))
    late.load()
    second.take().open()
    path = sorted(first.directory.glob("*.seg"))[0]
    entry = late.upload(path)
    assert entry is not None
    with pytest.raises(Fenced):
        late.install(adding([entry]))
    assert second.cluster.holes() == [(6, STEP, "open")]


def _owner(host: Host) -> object:
    from danube.core.placement.recovered import LOG_EPOCHS
    from danube.wal.tier.uploader import Ownership
    from tests.unit.faulty_store import TOPIC

    return Ownership(TOPIC, IDENTITY, max(host.epoch, 1) * LOG_EPOCHS, host.directory)


def test_which_directory_is_continued(hosts: list[Host]) -> None:
    from danube.broker.tiers.inheritance import Heir

    def asked(
        kept: KeptOwner | None, reserved: tuple[int, int], *,
        holds: bool = True, hole: Hole | None = None, lost_before: int = 0,
    ) -> bool:  # fmt: skip
        manifest = Manifest.empty("/default/t", IDENTITY, 9 * 256, 10)
        if hole is not None:
            manifest = manifest.with_holes([hole])
        reservation = Reservation(*IDENTITY, 50 if reserved[0] else 0, *reserved)
        heir = Heir(_owner(hosts[0]), 1, 9, reservation, 9, lost_before)  # type: ignore[arg-type]
        return continues(kept, holds, heir, manifest)

    mine = KeptOwner(1, 4, 6)
    assert asked(None, (0, 0)), "written before there was a cluster"
    assert not asked(None, (0, 0), holds=False) and not asked(None, (1, 4)) and not asked(None, (2, 4))
    assert asked(mine, (1, 4)) and asked(mine, (1, 6)) and asked(mine, (0, 0))
    assert not asked(mine, (1, 3)) and not asked(mine, (1, 7)) and not asked(mine, (2, 5))
    assert not asked(KeptOwner(2, 4, 6), (1, 5)), "a copy of another broker's disk"
    assert not asked(mine, (1, 5), holds=False), "its segments are gone"
    assert not asked(mine, (1, 5), hole=Hole(10, 20, 1, 5 * 256 + 255))
    assert asked(mine, (1, 5), hole=Hole(10, 20, 1, 3 * 256 + 255)), "that was another disk's"
    assert not asked(mine, (1, 5), lost_before=7), "of a version that did not note who wrote it"
    assert not asked(KeptOwner(1, 4, 6, 6), (1, 5), lost_before=7)
    assert asked(KeptOwner(1, 4, 6, 7), (1, 5), lost_before=7) and asked(mine, (0, 0), lost_before=7)


# -- crashes ---------------------------------------------------------------------------------------


def every_crash(
    root: Path,
    failing: FailingFiles,
    act: Callable[[list[Host]], None],
    prepare: Callable[[list[Host]], None],
) -> None:
    """Run ``act`` with a crash at each of its calls, then again whole, and compare what everybody has."""

    def world(name: str) -> list[Host]:
        cluster = Cluster()
        made = [Host(cluster, number, root / name / str(number)) for number in (1, 2)]
        prepare(made)
        return made

    dry = world("dry")
    first_call = len(dry[0].cluster.store.calls)
    failing.arm(-1, 0)
    act(dry)
    store_calls, file_calls = len(dry[0].cluster.store.calls) - first_call, len(failing.calls)
    expected = dry[0].cluster.holes()
    points = [("store", at, how) for at in range(store_calls) for how in (crash_before, crash_after)]
    points += [("file", at, how) for at in range(file_calls) for how in ("killed", "killed after")]  # type: ignore[misc]
    assert len(points) > 20
    for number, (kind, at, how) in enumerate(points):
        hosts = world(str(number))
        cluster = hosts[0].cluster
        if kind == "store":
            cluster.store.faults[len(cluster.store.calls) + at] = how  # type: ignore[assignment]
        else:
            failing.arm(at, how)  # type: ignore[arg-type]
        try:
            act(hosts)
        except (Crash, Killed):
            failing.disarm()
            cluster.store.faults.clear()
            for host in hosts:
                if host.log is not None:
                    host.crash()
            act(hosts)
        failing.disarm()
        cluster.store.faults.clear()
        assert [hole for hole in cluster.holes() if hole[2] == "open"] == [
            hole for hole in expected if hole[2] == "open"
        ], (kind, at, how)
        owner = hosts[1]
        for _ in range(3):
            hosts[0].restart()
            hosts[0].bring_back()
            owner.take_back()
        drained(owner)
        held = owner.records()  # and perhaps what was written and not acknowledged
        assert cluster.given.items() <= held.items(), (kind, at, how)
        assert cluster.acked == set(held), (kind, at, how)
        assert not asides(hosts[0].data_dir) and not [hole for hole in cluster.holes() if hole[2] == "open"]
        sound(cluster)
        owner.crash()


def inheriting(hosts: list[Host]) -> None:
    hosts[1].take().open()
    hosts[1].publish(b"a", b"b")


def test_a_crash_at_every_call_of_taking_over_loses_and_doubles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = FailingFiles(monkeypatch)
    with memory_directory(tmp_path) as root:
        every_crash(root, failing, inheriting, lambda hosts: exposed(hosts[0]))


def test_a_crash_at_every_call_of_the_return_loses_and_doubles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = FailingFiles(monkeypatch)

    def prepare(hosts: list[Host]) -> None:
        exposed(hosts[0])
        inheriting(hosts)

    def act(hosts: list[Host]) -> None:
        if hosts[1].log is None:
            hosts[1].take().open()
        hosts[0].restart()
        hosts[0].bring_back()
        hosts[1].take_back()
        hosts[0].bring_back()

    with memory_directory(tmp_path) as root:
        every_crash(root, failing, act, prepare)
