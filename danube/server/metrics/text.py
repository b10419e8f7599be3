"""Prometheus' text from the facts of a broker; the only place that imports prometheus_client.

One collector makes all series anew from one observation.  The library's own registry, its process-wide
metrics and its multiprocess mode are not used: workers count in shared memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry, exposition
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from danube.cluster.control.calls import ClusterStatus
from danube.core.partition.pending import HostMeasured
from danube.server.metrics import table
from danube.server.metrics.series import Series, within
from danube.server.metrics.table import Family

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """All that is exported, as it was at one time."""

    broker: str
    version: str
    started_at_us: int
    now_us: int
    counters: Sequence[Mapping[str, int]]  # of each worker, by name
    answered: frozenset[int]  # workers that answered in time
    measured: HostMeasured
    insecure: bool
    mover_alive: bool
    mover_starts: int
    store_answers: bool
    upload_share: float
    tls_failed: bool = False  # certificates of the metrics process cannot be loaded again
    member: ObservedMember | None = None  # where the broker is part of a cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedMember:
    """This host's part of a cluster; without a ``status`` its controller did not answer."""

    status: ClusterStatus | None
    lease_s: float


def text(observed: Observed, series_max: int) -> bytes:
    """The exposition of everything, in at most ``series_max`` series."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Everything(observed, series_max))
    return exposition.generate_latest(registry)


class _Everything(Collector):
    def __init__(self, observed: Observed, series_max: int) -> None:
        self._observed = observed
        self._series_max = series_max

    def collect(self) -> Iterator[Metric]:
        observed = self._observed
        found = {**_of_the_broker(observed), **_of_the_storage(observed)}
        if observed.member is not None:
            found |= _of_the_cluster(observed.member)
        found = within(found, self._series_max)
        for family in table.FAMILIES:
            series = found.get(family.name)
            if series is not None:
                yield _metric(family, observed.broker, series)

    def describe(self) -> Iterable[Metric]:
        return ()  # registration needs no measurement


def _metric(family: Family, broker: str, series: Iterable[Series]) -> Metric:
    labels = ("broker", *family.labels)
    made: CounterMetricFamily | GaugeMetricFamily
    if family.kind == "counter":
        made = CounterMetricFamily(family.name, family.says, labels=labels)
    else:
        made = GaugeMetricFamily(family.name, family.says, labels=labels)
    for values, value in series:
        made.add_metric((broker, *values), value)
    return made


def _one(value: float) -> list[Series]:
    return [((), value)]


def _of_the_broker(observed: Observed) -> dict[str, list[Series]]:
    workers = list(enumerate(observed.counters))
    found: dict[str, list[Series]] = {
        "danube_build_info": [((observed.version,), 1.0)],
        "danube_broker_start_time_seconds": _one(observed.started_at_us / 1e6),
        "danube_insecure": _one(observed.insecure),
        "danube_worker_up": [((str(index),), float(index in observed.answered)) for index, _ in workers],
        "danube_worker_restarts_total": [((str(index),), one["restarts"]) for index, one in workers],
    }
    failed = observed.tls_failed or any(one["tls_reload_failed"] for one in observed.counters)
    found["danube_tls_reload_failed"] = _one(failed)
    failed = any(one["keys_reload_failed"] for one in observed.counters)
    found["danube_auth_keys_reload_failed"] = _one(failed)
    unknown = any(one["rights_unknown"] for one in observed.counters)
    found["danube_auth_rights_unknown"] = _one(unknown)
    for counter, family in table.COUNTED.items():
        found[family.name] = _one(sum(one[counter.name.lower()] for one in observed.counters))
    if observed.measured.topic_count is not None:
        found["danube_broker_topics_owned"] = _one(observed.measured.topic_count)
    return found


def _of_the_storage(observed: Observed) -> dict[str, list[Series]]:
    """Return the storage's series; local storage has no pending bytes, as no bytes leave this host."""
    measured = observed.measured
    if measured.tiered is None:
        return {}
    found: dict[str, list[Series]] = {"danube_storage_tiered": _one(measured.tiered)}
    if not measured.tiered:
        return found
    topics = sorted(measured.pending_by_topic.items())
    found["danube_storage_pending_bytes"] = [((topic,), pending.size_bytes) for topic, pending in topics]
    found["danube_storage_pending_seconds"] = [
        ((topic,), pending.age_s(observed.now_us)) for topic, pending in topics
    ]
    if measured.pending is not None:
        found["danube_storage_host_pending_bytes"] = _one(measured.pending.size_bytes)
        found["danube_storage_host_pending_seconds"] = _one(measured.pending.age_s(observed.now_us))
    found["danube_storage_unknown_partitions"] = _one(measured.unknown_partitions)
    found["danube_storage_store_up"] = _one(observed.mover_alive and observed.store_answers)
    found["danube_storage_mover_up"] = _one(observed.mover_alive)
    found["danube_storage_mover_restarts_total"] = _one(max(0, observed.mover_starts - 1))
    if observed.mover_alive:
        found["danube_storage_upload_share"] = _one(observed.upload_share)
    return found


def _of_the_cluster(member: ObservedMember) -> dict[str, list[Series]]:
    """Return the series of the cluster: few if the controller is silent, placing at the leader only."""
    status = member.status
    found: dict[str, list[Series]] = {
        "danube_cluster_controller_up": _one(status is not None),
        "danube_cluster_lease_seconds": _one(member.lease_s),
    }
    if status is None:
        return found
    found |= {
        "danube_cluster_leads": _one(status.role == "leader"),
        "danube_cluster_leader_known": _one(bool(status.leader_id)),
        "danube_cluster_term": _one(status.current_term),
        "danube_cluster_commit_index": _one(status.commit_index),
        "danube_cluster_applied_index": _one(status.last_applied),
        "danube_cluster_members": [(("voter",), len(status.voters)), (("learner",), len(status.learners))],
        "danube_cluster_members_reached": _one(len(status.reached)),
    }
    if status.placing is not None:
        found["danube_cluster_partitions_moving"] = _one(status.placing.moving)
        found["danube_cluster_partitions_cooling"] = _one(status.placing.cooling)
        found["danube_cluster_imbalance"] = _one(status.placing.imbalance)
    return found
