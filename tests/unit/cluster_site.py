"""A cluster without network or processes: the machine, duties, brokers that do as they are asked."""

from __future__ import annotations

from danube.core.cluster.commands import (
    Agreed,
    ClusterCommand,
    GrantLease,
    Ownership,
    PutKey,
    RegisterBroker,
    ReleasePartitions,
    RenewLease,
    UnloadPartitions,
)
from danube.core.metadata.commands import Change, Command, CreateTopic, TopicRecord
from danube.core.metadata.machine import Metadata
from danube.core.partition.policy import TopicPolicy
from danube.core.placement.balance import BalanceSettings
from danube.core.placement.duties import Duties
from danube.core.placement.load_report import SHARED, STORAGE_PREFIX, LoadReport, report_command
from danube.errors import CallerError

LEASE_MS = 2_000
SECOND_US = 1_000_000


class Site:
    """Time goes on by hand; ``step`` is one look of whoever leads."""

    def __init__(self, settings: BalanceSettings | None = None, brokers: int = 3) -> None:
        self.settings = settings or BalanceSettings(strategy="fair")
        self.state = Metadata()
        self.now_us = 10 * SECOND_US
        self.duties = Duties(1, self.settings)
        self.leases: dict[int, int] = {}
        self.refused: list[CallerError] = []
        self.unloads: list[tuple[int, int, int, str]] = []
        self.holding: set[int] = set()  # brokers that release nothing
        self._next_lease = 100
        self._index = 0
        self._tick()
        for broker_id in range(1, brokers + 1):
            self.register(broker_id)
        self.lead()

    def lead(self) -> None:
        """Another member leads from now on."""
        self.duties = Duties(1, self.settings)
        self.duties.begin(self.state, self.now_us)

    def register(self, broker_id: int, *, shared: bool = True, mode: str = "") -> None:
        lease_id = self._next_lease = self._next_lease + 1
        self.do(GrantLease(lease_id=lease_id, ttl_ms=LEASE_MS))
        self.do(
            RegisterBroker(
                broker_id=broker_id, lease_id=lease_id, native_address=f"b{broker_id}:6660", mode=mode
            )
        )
        self.do(PutKey(key=f"{STORAGE_PREFIX}{broker_id}", value=SHARED if shared else b"local"))
        self.leases[broker_id] = lease_id

    def topic(self, name: str, partitions: int = 0, *, reliable: bool = True) -> TopicRecord:
        policy = TopicPolicy(reliable=reliable, durability="written" if reliable else "memory")
        command = CreateTopic(topic=f"/default/{name}", partitions=partitions, policy=policy, created_us=1)
        self.do(command)
        return self.state.topic(f"/default/{name}")

    def topics(self, count: int) -> None:
        for number in range(count):
            self.topic(f"t{self.state.topic_count + number}-{self.state.version}")

    def report(self, broker_id: int, report: LoadReport) -> None:
        self.do(report_command(broker_id, self.leases[broker_id], report))

    def renew(self, *broker_ids: int) -> None:
        for broker_id in broker_ids or list(self.leases):
            self.try_do(RenewLease(lease_id=self.leases[broker_id]))

    def die(self, broker_id: int) -> None:
        """It renews no more."""
        del self.leases[broker_id]

    # What is agreed on

    def _tick(self) -> None:
        self._index += 1
        self.state.apply(self.state.version + 1, Agreed(index=self._index, term=1, now_us=self.now_us))

    def do(self, command: Command) -> list[Change]:
        """Have a command agreed on; raises the CallerError that refuses it."""
        self._tick()
        if not self.state.check(command):
            return []
        changes = self.state.apply(self.state.version + 1, command)
        self.duties.changed(changes)
        return changes

    def try_do(self, command: Command) -> None:
        try:
            self.do(command)
        except CallerError as error:
            self.refused.append(error)

    # Time

    def decide(self) -> list[ClusterCommand]:
        """What the leader would do now; nothing is done."""
        return self.duties.turn(self.state, self.now_us)

    def step(self, seconds: float = 0.1, *, renew: bool = True) -> list[ClusterCommand]:
        """Time passes, brokers renew and release what they are asked for, the leader looks once."""
        self.now_us += int(seconds * SECOND_US)
        self._tick()
        if renew:
            self.renew()
        self.release_asked()
        commands = self.decide()
        for command in commands:
            if isinstance(command, UnloadPartitions):
                for topic_id, partition, _ in command.partitions:
                    self.unloads.append((self.now_us, topic_id, partition, command.reason))
            self.try_do(command)
        return commands

    def run(self, seconds: float, each: float = 0.1) -> None:
        for _ in range(round(seconds / each)):
            self.step(each)

    def settle(self, steps: int = 50) -> int:
        """Steps until nothing is to be done; how many it took."""
        for number in range(steps):
            if not self.step() and not self.asked():
                return number
        raise AssertionError("it does not come to rest")

    def release_asked(self) -> None:
        for ownership in self.asked():
            if ownership.broker_id in self.leases and ownership.broker_id not in self.holding:
                place = (ownership.topic_id, ownership.partition, ownership.epoch)
                self.try_do(ReleasePartitions(broker_id=ownership.broker_id, partitions=(place,)))

    # Questions

    def ownerships(self) -> list[Ownership]:
        return self.state.cluster.owners.records()

    def asked(self) -> list[Ownership]:
        return [one for one in self.ownerships() if one.broker_id and one.reason]

    def owner(self, record: TopicRecord, partition: int = 0) -> int:
        return self.state.cluster.owners.of(record.topic_id, partition).broker_id

    def counts(self) -> dict[int, int]:
        counts: dict[int, int] = {broker.broker_id: 0 for broker in self.state.cluster.brokers.records()}
        for one in self.ownerships():
            if one.broker_id:
                counts[one.broker_id] += 1
        return counts

    def unowned(self) -> int:
        return sum(
            self.state.cluster.owners.of(record.topic_id, partition).broker_id == 0
            for record in self.state.topics()
            for partition in range(record.partition_count)
        )
