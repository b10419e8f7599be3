"""Configured settings of moving and compacting, in the units of the plans."""

from __future__ import annotations

from typing import TYPE_CHECKING

from danube.core.partition.compaction_plan import CompactionSettings
from danube.core.partition.pace import Bounds
from danube.core.partition.tier_plan import TierSettings

if TYPE_CHECKING:
    from danube.config.sections import StorageConfig


def compaction_settings(storage: StorageConfig) -> CompactionSettings:
    return CompactionSettings(
        dirty_percent=storage.compact_dirty_percent,
        dirty_bytes_min=storage.compact_bytes_min,
        lag_us=storage.compact_after_ms * 1000,
        target_bytes=storage.merge_to_bytes,
        keys_max=storage.compact_keys_max,
    )


def hold_bounds(storage: StorageConfig) -> Bounds:
    return Bounds(storage.upload_hold_ms / 1000, storage.upload_hold_bytes)


def tier_settings(storage: StorageConfig) -> TierSettings:
    return TierSettings(
        upload_parallel=storage.upload_parallel,
        merge_below=storage.merge_below_bytes,
        merge_to=storage.merge_to_bytes,
        compaction=compaction_settings(storage),
        orphan_age_us=storage.orphan_age_ms * 1000,
    )
