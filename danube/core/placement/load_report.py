"""Load reports of brokers, and the keys of the cluster that placing reads.

A report is a key with the broker's lease, so it ends with the broker.  It is small: totals, in which all
partitions of the broker count alike.  Values beyond their bounds are cut to them; a report that cannot be
read counts as none.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import msgspec

from danube.core.cluster.commands import PutKey
from danube.core.placement.shares import Demand

if TYPE_CHECKING:
    from collections.abc import Mapping

    from danube.core.cluster.keys import KeySpace

LOAD_PREFIX: Final = "/cluster/load/"
STORAGE_PREFIX: Final = "/cluster/storage/"
DECIDING_KEY: Final = "/cluster/leader"  # the broker whose controller leads; with its lease
BALANCE_KEY: Final = "/cluster/balance"  # the settings that it goes by
REBALANCE_KEY: Final = "/cluster/rebalance"  # a request that waits for the leader
MOVES_KEY: Final = "/cluster/moves"  # the last rounds

LOCAL: Final = b"local"
SHARED: Final = b"shared"
_RATE_MAX: Final = 1e15


class LoadReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``cpu`` and ``memory`` are shares of the broker's limits, 0 .. 1; rates count both directions."""

    cpu: float = 0.0
    memory: float = 0.0
    bytes_per_s: float = 0.0
    records_per_s: float = 0.0
    backlog_records: int = 0
    partition_count: int = 0
    usage: dict[str, Demand] = {}  # of what namespaces and tenants may have together, by key_of() their names


_encoder: Final = msgspec.json.Encoder()
_decoder: Final = msgspec.json.Decoder(LoadReport)


def report_command(broker_id: int, lease_id: int, report: LoadReport) -> PutKey:
    return PutKey(key=f"{LOAD_PREFIX}{broker_id}", value=_encoder.encode(report), lease_id=lease_id)


def report_of(keys: KeySpace, broker_id: int) -> LoadReport | None:
    """Return a broker's last report, cut to its bounds; None without one that can be read."""
    record = keys.find(f"{LOAD_PREFIX}{broker_id}")
    if record is None:
        return None
    try:
        report = _decoder.decode(record.value)
    except msgspec.DecodeError:
        return None
    return LoadReport(
        cpu=_within(report.cpu, 1.0),
        memory=_within(report.memory, 1.0),
        bytes_per_s=_within(report.bytes_per_s, _RATE_MAX),
        records_per_s=_within(report.records_per_s, _RATE_MAX),
        backlog_records=int(_within(float(report.backlog_records), _RATE_MAX)),
        partition_count=max(0, report.partition_count),
        usage=report.usage,
    )


def demands_of(keys: KeySpace, broker_id: int) -> Mapping[str, Demand]:
    """Return what a broker has told of limited sums; nothing without a report that can be read."""
    report = report_of(keys, broker_id)
    if report is None:
        return {}
    return {
        key: Demand(_within(one.records, _RATE_MAX), _within(one.size_bytes, _RATE_MAX), one.held,
                    max(0, one.stored_bytes))
        for key, one in report.usage.items()
    }  # fmt: skip


def _within(value: float, most: float) -> float:
    return min(max(value, 0.0), most) if math.isfinite(value) else 0.0


def storage_shared(keys: KeySpace, broker_id: int) -> bool:
    """Whether other brokers can read a broker's stored records; False if it is not known."""
    record = keys.find(f"{STORAGE_PREFIX}{broker_id}")
    return record is not None and record.value == SHARED
