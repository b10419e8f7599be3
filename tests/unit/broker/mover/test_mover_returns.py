"""The mover's rounds: stranded directories are set aside, given back and removed; held ones stay."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from danube.broker.mover.partition import NEVER_US, RETURN_INTERVAL_US, MovedPartition, Step
from danube.broker.mover.returning import OFFERS_MAX, Returns, asides, stranded
from danube.core.partition.tier_plan import TierSettings
from danube.errors import Damage, DanubeError, StoreUnavailable
from danube.host import telemetry
from danube.wal.segments.segment import LogIdentity
from danube.wal.stores.objects import ObjectStore
from danube.wal.tier import returned
from danube.wal.tier.manifest import Manifest
from danube.wal.tier.uploader import Uploader
from tests.unit.broker.tiers.test_failover import exposed
from tests.unit.cluster_hosts import NOW_US, Cluster, Host
from tests.unit.wal_samples import IDENTITY, memory_directory


class SteppedMover:
    """Runs jobs at once, and what is put off when the test says so."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.later: list[Callable[[], None]] = []

    @property
    def store(self) -> ObjectStore:
        return self._store

    def block(self, job: Callable[[], Any], ended: Callable[[Any, DanubeError | None], None]) -> None:
        try:
            result = job()
        except DanubeError as error:
            ended(None, error)
        else:
            ended(result, None)

    def call_later(self, delay_s: float, action: Callable[[], None]) -> None:
        self.later.append(action)


def limited(self: telemetry.Events, event: str, /, *, source: object, **facts: Any) -> None:
    """Every one of them, also within a second."""
    self.warning(event, source=source, **facts)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Host]]:
    with memory_directory(tmp_path) as root:
        cluster = Cluster()
        yield [Host(cluster, number, root / str(number)) for number in (1, 2)]


def test_a_stranded_directory_comes_back_by_rounds(hosts: list[Host]) -> None:
    first, second = hosts
    exposed(first)
    assert stranded(first.cluster.store, first.data_dir) == [], "nobody has taken over"
    second.take().open()
    held: set[LogIdentity] = {IDENTITY}
    mover = SteppedMover(first.cluster.store)
    Returns(mover, first.data_dir, lambda identity: identity in held).begin()
    assert first.directory.exists() and not asides(first.data_dir), "a worker has it still"
    held.clear()
    mover.later.pop()()
    assert not first.directory.exists() and len(asides(first.data_dir)) == 1
    second.take_back()
    mover.later.pop()()
    assert not asides(first.data_dir) and second.records() == first.cluster.given
    assert len(mover.later) == 1, "and so on"


def rounds(host: Host, count: int, after: Callable[[], object] = lambda: None) -> None:
    """So many rounds of the mover of a disk that came back."""
    mover = SteppedMover(host.cluster.store)
    Returns(mover, host.data_dir, lambda identity: False).begin()
    for _ in range(count - 1):
        after()
        mover.later.pop()()


def test_what_is_offered_is_read_once_however_long_the_owner_lets_it_wait(
    hosts: list[Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = hosts
    exposed(first)
    second.take().open()
    store = first.cluster.store
    read: list[str] = []
    get = store.get
    monkeypatch.setattr(store, "get", lambda key, *range_: (read.append(key), get(key, *range_))[1])
    rounds(first, 6)
    objects = [key for key in read if key.endswith(".seg")]
    assert len(objects) == len(set(objects)) == 2
    second.take_back()
    rounds(first, 1)
    assert not asides(first.data_dir) and second.records() == first.cluster.given


def test_what_the_owner_never_names_is_offered_a_few_times_and_told_once(
    hosts: list[Host], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = hosts
    exposed(first)
    second.take().open()

    def damaged(*_: Any) -> None:
        raise Damage("a batch of it fails its checksum")

    monkeypatch.setattr(returned, "examine_returned", damaged)
    monkeypatch.setattr(telemetry.Events, "limited", limited)
    rounds(first, 12, second.take_back)
    refused = [one for one in caplog.records if "returned records cannot be used" in one.getMessage()]
    told = [one for one in caplog.records if "records stay on this disk" in one.getMessage()]
    assert len(refused) == 2 * OFFERS_MAX and len(told) == 1
    monkeypatch.undo()
    second.crash()
    second.take().open()
    rounds(first, 2, second.take_back)
    assert second.records() == first.cluster.given, "another owner is asked again"


def test_a_damaged_file_is_read_and_told_once_and_the_others_come_back(
    hosts: list[Host], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = hosts
    exposed(first)
    second.take().open()
    path = sorted(first.directory.glob("*.seg"))[-2]
    data = bytearray(path.read_bytes())
    data[70] ^= 1
    path.write_bytes(data)
    monkeypatch.setattr(telemetry.Events, "limited", limited)
    rounds(first, 12, second.take_back)
    messages = [one.getMessage() for one in caplog.records]
    assert messages.count("a segment cannot come back") == 1
    assert messages.count("records stay on this disk") == 1
    assert set(second.records()) == set(first.cluster.given) - {6, 7}


def test_a_directory_that_was_made_ready_meanwhile_is_left_alone(hosts: list[Host]) -> None:
    first, second = hosts
    exposed(first)
    second.take().open()
    [(identity, directory, kept)] = stranded(first.cluster.store, first.data_dir)
    assert (identity, directory) == (IDENTITY, first.directory) and kept.last_epoch == 1
    mover = SteppedMover(first.cluster.store)
    returns = Returns(mover, first.data_dir, lambda identity: False)
    second.crash()
    first.take().open()
    returns._found([(identity, directory, kept)], None)
    assert first.directory.exists() and first.log is not None


def test_a_store_that_is_away_only_delays_a_round(hosts: list[Host]) -> None:
    from tests.unit.faulty_store import fail_before

    first, second = hosts
    exposed(first)
    second.take().open()
    mover = SteppedMover(first.cluster.store)
    first.cluster.store.always = fail_before
    Returns(mover, first.data_dir, lambda identity: False).begin()
    first.cluster.store.always = None
    for _ in range(2):
        mover.later.pop()()
        second.take_back()
    mover.later.pop()()
    assert not asides(first.data_dir) and second.records() == first.cluster.given


def test_the_owner_s_mover_looks_for_offers_as_long_as_there_are_open_holes(hosts: list[Host]) -> None:
    first, second = hosts
    exposed(first)
    second.take().open()
    second.publish(b"a")
    assert second.uploader is not None
    owner = second.uploader.owner
    moved = MovedPartition(owner, Uploader(first.cluster.store, owner), TierSettings(), 0)
    now_us = 1 << 50

    def steps() -> list[str]:
        done = []
        while (step := moved.next_step(now_us, False)[0]) is not None:
            moved.took(step, moved.job(step, now_us)(), now_us)
            done.append(step.value)
        return done

    assert steps() == ["scan", "load", "return"], "the directory first: it asks no store"
    first.restart()
    first.bring_back()
    assert steps() == [], "not before it is time again"
    now_us += RETURN_INTERVAL_US
    assert steps() == ["return"]
    assert [hole.kind.name for hole in moved.manifest.all_holes()] == ["UNUSED"]
    now_us += RETURN_INTERVAL_US
    assert steps() == [], "and then there is nothing to look for"
    second.uploader.load()
    assert second.records() == first.cluster.given


def test_a_subscription_that_was_just_made_does_not_wait_for_the_next_copy(hosts: list[Host]) -> None:
    """Its owner may die before that, and the next one would not know of it."""
    first = hosts[0].take()
    first.open()
    assert first.uploader is not None
    owner = first.uploader.owner
    moved = MovedPartition(owner, Uploader(first.cluster.store, owner), TierSettings(), 0)

    def steps() -> list[Step]:
        done = []
        while (step := moved.next_step(NOW_US, False)[0]) is not None:
            moved.took(step, moved.job(step, NOW_US)(), NOW_US)
            done.append(step)
        return done

    moved.take({"kind": "cursors", "blob": b"1"})
    assert Step.CURSORS in steps()
    moved.take({"kind": "cursors", "blob": b"2"})
    assert steps() == [], "progress is copied now and then"
    moved.take({"kind": "cursors", "blob": b"3", "soon": True})
    moved.take({"kind": "cursors", "blob": b"4"})
    assert steps() == [Step.CURSORS] and steps() == []


def test_what_was_given_away_is_looked_after_no_more(hosts: list[Host]) -> None:
    first, second = hosts
    exposed(first)
    second.take().open()
    assert second.uploader is not None
    owner = second.uploader.owner
    moved = MovedPartition(owner, Uploader(first.cluster.store, owner), TierSettings(), 0)
    moved.took(Step.LOAD, moved.job(Step.LOAD, NOW_US)(), NOW_US)
    moved.take({"kind": "detach", "gone": False})
    assert moved.next_step(NOW_US, False)[0] is not None, "what is only here is uploaded as long as it can be"
    moved.take({"kind": "detach", "gone": True})
    assert moved.next_step(1 << 60, False) == (None, NEVER_US)


def test_what_came_back_is_told_though_its_offer_cannot_be_taken_away(
    hosts: list[Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = hosts
    exposed(first)
    second.take().open()
    assert second.uploader is not None
    store, owner = first.cluster.store, second.uploader.owner
    moved = MovedPartition(owner, Uploader(store, owner), TierSettings(), 0)
    moved.took(Step.LOAD, moved.job(Step.LOAD, NOW_US)(), NOW_US)
    first.restart()
    first.bring_back()

    def refused(keys: Iterable[str]) -> None:
        raise StoreUnavailable("this broker may delete nothing")

    monkeypatch.setattr(store, "delete", refused)
    job = moved.job(Step.RETURN, NOW_US)
    with pytest.raises(StoreUnavailable) as failure:
        job()
    moved.failed(Step.RETURN, failure.value, NOW_US, 0.5)
    manifest = Manifest.decode(moved.state()["manifest"])
    assert [hole.kind.name for hole in manifest.all_holes()] == ["UNUSED"]


def test_holes_that_are_given_up_are_settled_by_the_next_manifest(hosts: list[Host]) -> None:
    first, second = hosts
    exposed(first)
    second.take().open()
    assert second.uploader is not None
    owner = second.uploader.owner
    moved = MovedPartition(owner, Uploader(first.cluster.store, owner), TierSettings(), 0)
    now_us = 1 << 50
    moved.take({"kind": "give_up", "end_offset": 1 << 40})
    while (step := moved.next_step(now_us, False)[0]) is not None:
        moved.took(step, moved.job(step, now_us)(), now_us)
    assert [hole.kind.name for hole in moved.manifest.all_holes()] == ["GIVEN_UP"]
