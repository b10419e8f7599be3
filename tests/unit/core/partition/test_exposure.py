"""What is not off the host: sums, and what the owner of a partition counts without the mover's help."""

from __future__ import annotations

from pathlib import Path

import pytest

from danube.broker.tiers.worker_tiers import TierOptions
from danube.core.partition.pending import NOTHING, SECOND_US, Pending, together
from danube.host import clock
from tests.unit.broker_parts import RecordingSession, batch
from tests.unit.tier_parts import TieredBench


def test_sums_take_all_bytes_and_the_oldest_record() -> None:
    parts = [Pending(5, 300), NOTHING, Pending(7, 200), Pending(1, 0)]
    assert together(parts) == together(parts[::-1]) == Pending(13, 200)
    assert together([]) == NOTHING


def test_an_age_is_never_negative_and_nothing_has_none() -> None:
    assert Pending(1, 3 * SECOND_US).age_s(8 * SECOND_US) == 5.0
    assert Pending(1, 3 * SECOND_US).age_s(1 * SECOND_US) == 0.0
    assert NOTHING.age_s(8 * SECOND_US) == 0.0


def publish(bench: TieredBench, session: RecordingSession, count: int) -> None:
    bench.publish(session, batch(*([b"x" * 100] * count)))
    bench.turn()


@pytest.fixture
def bench(tmp_path: Path) -> TieredBench:
    return TieredBench(tmp_path, TierOptions(cache_bytes=1 << 20))


def test_what_is_sealed_is_pending_until_a_manifest_names_it(bench: TieredBench) -> None:
    session = RecordingSession()
    bench.open_producer(session)
    bench.mover.prompt = False  # a mover that does not run, or cannot reach the store
    sizes = []
    for _ in range(3):
        publish(bench, session, 10)
        bench.seal()
        sizes.append(bench.tier.pending().size_bytes)
    publish(bench, session, 1)
    log = bench.hosted.log
    assert log is not None and log.active is not None
    assert sizes == sorted(set(sizes)) and sizes[0] > 1_000, "each sealed segment stays in the sum"
    assert bench.tier.pending().size_bytes == sizes[-1] + log.active.data_end
    assert bench.tier.pending().oldest_us == next(iter(log.front())).first_append_us
    bench.mover.prompt = True
    bench.mover.step()
    assert bench.tier.uploaded_end == 30
    assert bench.tier.pending() == Pending(log.active.data_end, log.active.first_append_us)
    bench.seal()
    assert bench.tier.pending() == NOTHING and bench.tier.statistics()["pending_seconds"] == 0


def test_a_segment_that_is_being_sealed_is_pending(bench: TieredBench) -> None:
    session = RecordingSession()
    bench.open_producer(session)
    publish(bench, session, 10)
    before = bench.tier.pending()
    bench.shard.storage.roll(bench.hosted)  # the sealer has not had its turn
    assert bench.tier.pending() == before and before.size_bytes > 1_000


def test_what_has_expired_is_not_at_risk_any_more(bench: TieredBench) -> None:
    session = RecordingSession()
    bench.open_producer(session)
    bench.mover.upload = False
    publish(bench, session, 10)
    bench.seal()
    assert bench.tier.pending().size_bytes > 0
    bench.tier.trimmed = 10
    assert bench.tier.pending() == NOTHING


def test_it_is_known_what_the_store_holds_once_the_mover_has_read_it(bench: TieredBench) -> None:
    session = RecordingSession()
    bench.open_producer(session)
    identity = bench.tier.identity
    manifest = bench.mover.manifests[identity].encode()
    fields = {"topic_id": identity.topic_id, "partition": identity.partition, "manifest": manifest}
    fields["epoch"] = bench.tier.hosted.core.epoch
    bench.tier.confirmed = False
    bench.tiers.on_frame({"kind": "state", **fields, "loaded": False, "error": "the store is away"})
    assert bench.tier.statistics()["known"] is False
    assert bench.tier.statistics()["upload_error"] == "the store is away"
    bench.tiers.on_frame({"kind": "state", **fields, "loaded": True, "error": ""})
    bench.tiers.on_frame({"kind": "state", **fields, "loaded": False, "error": "the store is away"})
    assert bench.tier.statistics()["known"] is True, "another mover's beginning takes nothing back"


def test_the_store_is_as_the_mover_says_and_unknown_without_one(bench: TieredBench) -> None:
    bench.tiers.on_connected()
    assert bench.tiers.store() == {"name": "", "answers": None, "error": "", "hint": ""}
    bench.tiers.on_frame({"kind": "store", "name": "s3://b", "answers": False, "error": "refused"})
    told = {"name": "s3://b", "answers": False, "error": "refused", "hint": ""}
    assert bench.tiers.store() == told, "a mover of before gives no hint"
    bench.tiers.on_frame({"kind": "store", **told, "hint": "check the keys"})
    assert bench.tiers.store()["hint"] == "check the keys"
    bench.tiers.on_frame({"kind": "store", **told})
    bench.mover.connected = False
    assert bench.tiers.store() == {
        "name": "s3://b",
        "answers": None,
        "error": "the mover does not run",
        "hint": "",
    }
    bench.mover.connected = True
    bench.tiers.on_connected()
    assert bench.tiers.store() == {"name": "s3://b", "answers": None, "error": "", "hint": ""}


def test_counting_again_looks_at_rolled_segments_only_after_a_change(
    bench: TieredBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = RecordingSession()
    bench.open_producer(session)
    bench.mover.upload = False
    publish(bench, session, 10)
    bench.seal()
    publish(bench, session, 10)
    first = bench.tier.pending()
    log = bench.hosted.log
    assert log is not None
    monkeypatch.setattr(log, "above", lambda offset: pytest.fail("counted again"))
    assert bench.tier.pending() == first
    publish(bench, session, 5)
    assert bench.tier.pending().size_bytes > first.size_bytes
    assert bench.tier.pending().age_s(clock.wall_us()) >= 0
