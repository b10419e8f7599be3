"""What the mover removes by rule: objects that nobody names, parts of uploads that never ended (row E6)."""

from __future__ import annotations

import asyncio

from danube.broker import mover_copies, mover_partition
from danube.config_sections import StorageConfig
from danube.core.tier_plan import TierSettings
from danube.wal.manifest_keys import partition_prefix
from tests.unit.faulty_store import check_store
from tests.unit.test_mover import WAIT_S, Place, on_a_loop
from tests.unit.test_mover import no_bug as no_bug
from tests.unit.test_mover import place as place
from tests.unit.wal_samples import IDENTITY

ORPHAN_US = 200_000
DAY_S = 86_400


@on_a_loop
async def test_orphans_go_at_their_age_and_what_is_named_stays(place: Place) -> None:
    asked: list[int] = []
    place.store.clean_uploads = lambda older_us: asked.append(older_us) or 0  # type: ignore[func-returns-value,method-assign]
    originals = place.make(2)
    orphan = partition_prefix(IDENTITY) + f"{0:020d}-{4:020d}-{'ab' * 8}.seg"
    place.store.memory.put(orphan, b"an upload whose manifest never came")
    settings = TierSettings(merge_below=0, orphan_age_us=ORPHAN_US, reader_grace_us=0)
    async with place.mover(settings) as connect:
        worker = await connect()
        worker.attach(place.directory)
        await worker.uploaded(2)
        async with asyncio.timeout(WAIT_S):
            while place.store.memory.head(orphan) is not None or len(asked) < 2:
                await asyncio.sleep(0.02)
        assert set(asked) == {ORPHAN_US}, "parts, too, again and again"
    check_store(place.store.memory, originals, set())


def test_by_default_nothing_lies_about_for_more_than_a_day() -> None:
    age_s = StorageConfig().orphan_age_ms / 1_000
    grace_s = TierSettings().reader_grace_us / 1e6
    sweep_s = mover_partition.SWEEP_INTERVAL_US / 1e6
    assert TierSettings().orphan_age_us == age_s * 1e6
    assert age_s + sweep_s + grace_s < DAY_S
    assert age_s + mover_copies.CLEAN_UPLOADS_S < DAY_S
