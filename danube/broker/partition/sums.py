"""Limits of namespaces and tenants on what they publish, store and deliver together, judged by owners.

Each worker owes what all workers of the host take (:mod:`danube.ipc.usage`), and the host has its share of
the limit, which follows from the load reports of all brokers (:mod:`danube.core.placement.shares`).  Stored
bytes are counted each second, and those of other brokers come with their reports.  What is delivered counts
in sums of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from danube.broker.partition.limits import LimitedPartition, storage_full, stored_bytes
from danube.core.dispatch.rate import DispatchSum
from danube.core.partition.publish_rate import SumRate
from danube.core.placement.load_report import demands_of
from danube.core.placement.shares import NOTHING, Demand, key_of, share
from danube.host import clock
from danube.ipc.usage import NOT_USED

if TYPE_CHECKING:
    from collections.abc import Mapping

    from danube.core.metadata.machine import Metadata
    from danube.core.metadata.policies import NamespacePolicy
    from danube.core.partition.publish_rate import PublishRate, SharedDebt
    from danube.errors import QuotaExceeded
    from danube.ipc.usage import Usage, Used

Demands = dict[int, "Mapping[str, Demand]"]
"""By broker that is alive, what it has told of each sum."""

LOOKS: Final = 6  # of the last five seconds, between which rates are told
_RATES: Final = {"take": SumRate, "dispatch": DispatchSum}


class SumName(NamedTuple):
    """``whose``: namespace or tenant, and its name; ``kind``: what of it is limited, a key of ``_RATES``."""

    whose: str
    kind: str

    @property
    def key(self) -> int:
        """The number by which workers and brokers know it."""
        return key_of(self.whose if self.kind == "take" else f"{self.whose} {self.kind}")


class SummedPartition(LimitedPartition, Protocol):
    """Members of :class:`danube.broker.partition.hosted.HostedPartition` that sums are about."""

    publish_rate: PublishRate | None


class Sum:
    """Limits of a namespace or tenant on publishing and storing, or those on delivering."""

    def __init__(self, name: SumName, usage: Usage) -> None:
        self.whose = name.whose
        self.key = name.key
        self.slot = usage.slot(self.key)
        self.rate = _RATES[name.kind](self.slot)
        self.policy: NamespacePolicy | None = None

    @property
    def storage_bytes_max(self) -> int:
        """The bytes that its topics may store; 0: it does not count them."""
        policy = self.policy if isinstance(self.rate, SumRate) else None
        return 0 if policy is None else policy.max_storage_bytes

    def follow(self, policy: NamespacePolicy, broker_id: int, demands: Demands) -> None:
        """Take over the limits, of which this broker has its share."""
        self.policy = policy
        told = {one: found.get(str(self.key), NOTHING) for one, found in demands.items()}
        records = {i: (one.records, one.held) for i, one in told.items()}
        size_bytes = {i: (one.size_bytes, one.held) for i, one in told.items()}
        of_records, of_bytes = self.rate.quotas
        self.rate.set(
            share(getattr(policy, of_records), broker_id, records),
            share(getattr(policy, of_bytes), broker_id, size_bytes),
            clock.monotonic_ns(),
        )
        elsewhere = sum(one.stored_bytes for i, one in told.items() if i != broker_id)
        self.rate.refusal = self._full(self.storage_bytes_max, self.slot.stored_bytes() + elsewhere)

    def _full(self, limit: int, stored: int) -> QuotaExceeded | None:
        if not limit or stored < limit:
            return None
        return storage_full(self.whose, stored, limit, "max_storage_bytes")


class Sums:
    """The sums that the partitions of one worker count in."""

    def __init__(
        self,
        open_usage: Callable[[], Usage],
        state: Callable[[], Metadata],
        broker_id: int = 0,
        *,
        look: Callable[[], Mapping[int, Used]],
    ) -> None:
        """``open_usage`` is called when the first sum is limited here.  ``broker_id``: 0 on a single host.

        ``look``: the figures of all sums by key, over all workers.
        """
        self._open_usage = open_usage
        self._look = look
        self._looks: deque[tuple[int, Mapping[int, Used]]] = deque(maxlen=LOOKS)
        self._state = state
        self._broker_id = broker_id
        self._usage: Usage | None = None
        self._sums: dict[SumName, Sum] = {}

    def of(self, namespace: str) -> tuple[tuple[SumRate, ...], tuple[DispatchSum, ...]]:
        """The rates that publishes and deliveries of a namespace count in: its own, and its tenant's."""
        quotas = self._state().quotas
        tenant = quotas.tenant_of(namespace)
        policies = {f"namespace {namespace}": quotas.policy(namespace)}
        if tenant is not None:
            policies[f"tenant {tenant.name}"] = tenant.quota
        rates = [self._sum(name, policy).rate for name, policy in _limited(policies)]
        return (
            tuple(rate for rate in rates if isinstance(rate, SumRate)),
            tuple(rate for rate in rates if isinstance(rate, DispatchSum)),
        )

    def _sum(self, name: SumName, policy: NamespacePolicy) -> Sum:
        one = self._sums.get(name)
        if one is None:
            if self._usage is None:
                self._usage = self._open_usage()
            one = self._sums[name] = Sum(name, self._usage)
        if one.policy != policy:
            one.follow(policy, self._broker_id, self._demands())
        return one

    def _demands(self) -> Demands:
        cluster = self._state().cluster
        alive = [broker.broker_id for broker in cluster.brokers.records() if broker.alive]
        return {broker_id: demands_of(cluster.keys, broker_id) for broker_id in alive}

    def second(self, partitions: Iterable[SummedPartition]) -> None:
        """Count what is stored, and follow the reports of other brokers; once a second."""
        policies = self._policies() if self._state().quotas else {}
        if self._usage is not None and self._sums:
            self._follow(self._usage, policies, partitions)
        if policies:
            self._looks.append((clock.monotonic_ns(), self._look()))
        else:
            self._looks.clear()

    def _follow(
        self, usage: Usage, policies: Mapping[SumName, NamespacePolicy], partitions: Iterable[SummedPartition]
    ) -> None:
        stored, demands = self._stored(partitions), self._demands()
        for name, one in list(self._sums.items()):
            policy = policies.get(name)
            if policy is None:
                one.slot.free()
                del self._sums[name]
                continue
            usage.look(one.slot)
            one.slot.store(stored.get(one.rate, 0))
            one.follow(policy, self._broker_id, demands)

    def _stored(self, partitions: Iterable[SummedPartition]) -> dict[SharedDebt, int]:
        """Return what the partitions store of each sum whose bytes are limited."""
        stored: dict[SharedDebt, int] = {one.rate: 0 for one in self._sums.values() if one.storage_bytes_max}
        for hosted in partitions if stored else ():
            rates = () if hosted.publish_rate is None else hosted.publish_rate.sums
            counted = [rate for rate in rates if rate in stored]
            if counted:
                size_bytes = stored_bytes(hosted)
                for rate in counted:
                    stored[rate] += size_bytes
        return stored

    def used(self, whose: str) -> dict[str, int]:
        """Return what is used of each limit of a namespace or tenant, over all workers and brokers.

        Rates are of the last seconds; those of other brokers, and what they store, are of their last reports.
        """
        taken, delivered = (self._figures(SumName(whose, kind).key) for kind in _RATES)
        return {
            "max_publish_rate": round(taken.records),
            "max_publish_bytes": round(taken.size_bytes),
            "max_storage_bytes": taken.stored_bytes,
            "max_dispatch_rate": round(delivered.records),
            "max_dispatch_bytes": round(delivered.size_bytes),
        }

    def _figures(self, key: int) -> Demand:
        found = [self._here(key)]
        for broker_id, told in self._demands().items():
            if broker_id != self._broker_id:
                found.append(told.get(str(key), NOTHING))
        return Demand(
            sum(one.records for one in found),
            sum(one.size_bytes for one in found),
            stored_bytes=sum(one.stored_bytes for one in found),
        )

    def _here(self, key: int) -> Demand:
        """Return the rates of this broker between the looks, and what it stores."""
        if not self._looks:
            return NOTHING
        (first_ns, first), (last_ns, last) = self._looks[0], self._looks[-1]
        before, now = first.get(key, NOT_USED), last.get(key, NOT_USED)
        seconds = max(1.0, (last_ns - first_ns) / 1e9)
        return Demand(
            max(0, now.records - before.records) / seconds,
            max(0, now.size_bytes - before.size_bytes) / seconds,
            stored_bytes=now.stored_bytes,
        )

    def _policies(self) -> dict[SumName, NamespacePolicy]:
        """The policies that limit sums, by the name of their sum."""
        quotas = self._state().quotas
        found = {f"namespace {name}": policy for name, policy in quotas.policies()}
        found |= {f"tenant {one.name}": one.quota for one in quotas.tenants()}
        return dict(_limited(found))


def _limited(policies: Mapping[str, NamespacePolicy]) -> Iterator[tuple[SumName, NamespacePolicy]]:
    """Yield the sums that these policies limit."""
    for whose, policy in policies.items():
        if policy.limits_taking:
            yield SumName(whose, "take"), policy
        if policy.limits_dispatch:
            yield SumName(whose, "dispatch"), policy
