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
from danube.server.metrics.table import Family

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

Series = tuple[tuple[str, ...], float]  # values of the labels, and of the series


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
    mover_alive: bool
    mover_starts: int
    store_answers: bool
    upload_share: float
    member: ObservedMember | None = None  # where the broker is part of a cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedMember:
    """This host's part of a cluster; without a ``status`` its controller did not answer."""

    status: ClusterStatus | None
    lease_s: float


def text(observed: Observed) -> bytes:
    """The exposition of everything."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Everything(observed))
    return exposition.generate_latest(registry)


class _Everything(Collector):
    def __init__(self, observed: Observed) -> None:
        self._observed = observed

    def collect(self) -> Iterator[Metric]:
        observed = self._observed
        found = {**_of_the_broker(observed), **_of_the_storage(observed)}
        if observed.member is not None:
            found |= _of_the_cluster(observed.member)
        for family in table.FAMILIES:
            series = found.get(family)
            if series is not None:
                yield _metric(family, observed.broker, series)

    def describe(self) -> Iterable[Metric]:
        return ()  # nothing is measured to register it


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


def _of_the_broker(observed: Observed) -> dict[Family, list[Series]]:
    workers = list(enumerate(observed.counters))
    found: dict[Family, list[Series]] = {
        table.BUILD_INFO: [((observed.version,), 1.0)],
        table.START_TIME: _one(observed.started_at_us / 1e6),
        table.WORKER_UP: [((str(index),), float(index in observed.answered)) for index, _ in workers],
        table.WORKER_RESTARTS: [((str(index),), one["restarts"]) for index, one in workers],
    }
    for counter, family in table.COUNTED.items():
        found[family] = _one(sum(one[counter.name.lower()] for one in observed.counters))
    if observed.measured.topic_count is not None:
        found[table.TOPICS_OWNED] = _one(observed.measured.topic_count)
    return found


def _of_the_storage(observed: Observed) -> dict[Family, list[Series]]:
    """Local storage has no pending bytes: nothing of it is ever off this host."""
    measured = observed.measured
    if measured.tiered is None:
        return {}
    found: dict[Family, list[Series]] = {table.TIERED: _one(measured.tiered)}
    if not measured.tiered:
        return found
    topics = sorted(measured.pending_by_topic.items())
    found[table.PENDING_BYTES] = [((topic,), pending.size_bytes) for topic, pending in topics]
    found[table.PENDING_SECONDS] = [((topic,), pending.age_s(observed.now_us)) for topic, pending in topics]
    if measured.pending is not None:
        found[table.HOST_PENDING_BYTES] = _one(measured.pending.size_bytes)
        found[table.HOST_PENDING_SECONDS] = _one(measured.pending.age_s(observed.now_us))
    found[table.UNKNOWN_PARTITIONS] = _one(measured.unknown_partitions)
    found[table.STORE_UP] = _one(observed.mover_alive and observed.store_answers)
    found[table.MOVER_UP] = _one(observed.mover_alive)
    found[table.MOVER_RESTARTS] = _one(max(0, observed.mover_starts - 1))
    if observed.mover_alive:
        found[table.UPLOAD_SHARE] = _one(observed.upload_share)
    return found


def _of_the_cluster(member: ObservedMember) -> dict[Family, list[Series]]:
    """Return the series of the cluster: few if the controller is silent, placing at the leader only."""
    status = member.status
    found: dict[Family, list[Series]] = {
        table.CONTROLLER_UP: _one(status is not None), table.LEASE_SECONDS: _one(member.lease_s)
    }  # fmt: skip
    if status is None:
        return found
    found |= {
        table.LEADS: _one(status.role == "leader"),
        table.LED: _one(bool(status.leader_id)),
        table.ELECTION: _one(status.current_term),
        table.COMMIT_INDEX: _one(status.commit_index),
        table.APPLIED_INDEX: _one(status.last_applied),
        table.MEMBERS: [(("voter",), len(status.voters)), (("learner",), len(status.learners))],
        table.REACHED: _one(len(status.reached)),
    }
    if status.placing is not None:
        found[table.MOVING] = _one(status.placing.moving)
        found[table.COOLING] = _one(status.placing.cooling)
        found[table.IMBALANCE] = _one(status.placing.imbalance)
    return found
