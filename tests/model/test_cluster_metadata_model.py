"""Random keys, leases, brokers and ownership: the machine does what a plain reference does, step by step.

Half of the commands are wrong on purpose.  After each step a machine that is fed with the stored bytes
alone, one that was restored from a snapshot and one that reads changes agree with the first.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest

from danube.core.cluster.commands import (
    Agreed,
    AllocateId,
    AssignPartitions,
    BrokerChanged,
    BrokerForgotten,
    CompareAndSet,
    DeleteKey,
    DeletePrefix,
    ExpireLeases,
    ForgetBroker,
    GrantLease,
    IdAllocated,
    KeyDeleted,
    KeyPut,
    LeaseEnded,
    LeaseKept,
    OffsetsReserved,
    OwnershipChanged,
    PutKey,
    RegisterBroker,
    ReleasePartitions,
    RenewLease,
    ReserveOffsets,
    RevokeLease,
    SetBrokerMode,
    UnloadPartitions,
)
from danube.core.metadata.commands import (
    Change,
    Command,
    CreateTopic,
    DeleteTopic,
    TopicCreated,
    TopicDeleted,
    decode_commands,
    encode_command,
    join_commands,
)
from danube.core.metadata.machine import Metadata
from danube.core.partition.policy import TopicPolicy
from danube.errors import CallerError

STEPS = 250
KEYS = ["/a", "/a/b", "/a/c", "/ab", "/b/x/y", "/b/x"]
PREFIXES = ["/", "/a/", "/b/", "/b/x/"]
LEASES = [1, 2, 3]
BROKERS = [1, 2, 3]
TOPICS = ["/default/one", "/default/two"]
PARTITIONS = 2
VALUES = [b"", b"\n", bytes(range(256)), b"x" * 300]


class Key(NamedTuple):
    value: bytes
    version: int
    created: int
    modified: int
    lease: int


class Reference:
    """Nothing but dictionaries; refuses by returning False."""

    def __init__(self) -> None:
        self.index = 0
        self.now_us = 0
        self.entry = 0
        self.sequences: dict[str, int] = {}
        self.keys: dict[str, Key] = {}
        self.counters: dict[str, int] = {}
        self.leases: dict[int, tuple[int, int, int]] = {}  # ttl_ms, expires_us, revision
        self.brokers: dict[int, tuple[str, int]] = {}  # mode, lease
        self.topics: dict[str, int] = {}
        self.last_topic = 0
        self.owners: dict[tuple[int, int], tuple[int, int]] = {}  # owner, epoch
        self.reserved: dict[tuple[int, int], tuple[int, int, int, bool]] = {}  # end, owner, epoch, closed

    def take(self, command: Command) -> bool:
        """Whether the command is allowed; carries it out then."""
        done: bool = getattr(self, f"_{command.__struct_config__.tag}")(command)
        return done

    def needed(self, command: Command) -> bool:
        """Whether an allowed command changes anything."""
        match command:
            case DeleteKey(key=key) | CompareAndSet(key=key, value=None):
                return key in self.keys
            case DeletePrefix(prefix=prefix):
                return any(key.startswith(prefix) for key in self.keys)
            case ExpireLeases():
                return bool(self._over(command))
            case SetBrokerMode():
                return self.brokers[command.broker_id][0] != command.mode
            case ReserveOffsets():
                return any(self._reservation(command, one) != self.reserved.get(one[:2])
                           for one in command.partitions)  # fmt: skip
            case UnloadPartitions():
                return False  # said by the machine alone; see the model's step
        return True

    def _create_topic(self, command: CreateTopic) -> bool:
        if command.topic in self.topics:
            return False
        self.last_topic += 1
        self.topics[command.topic] = self.last_topic
        return True

    def _delete_topic(self, command: DeleteTopic) -> bool:
        topic_id = self.topics.pop(command.topic, None)
        for place in [place for place in self.owners if place[0] == topic_id]:
            del self.owners[place]
            self.reserved.pop(place, None)
        return topic_id is not None

    def _agreed(self, command: Agreed) -> bool:
        if command.index < max(1, self.entry):
            return False
        if command.origin and command.sequence <= self.sequences.get(command.origin, 0):
            return False
        self.entry = command.index
        self.now_us = max(self.now_us, command.now_us)
        if command.origin:
            self.sequences[command.origin] = command.sequence
        return True

    def _own_time(self, now_us: int) -> None:
        if not self.entry:
            self.now_us = max(self.now_us, now_us)

    def _put_key(self, command: PutKey) -> bool:
        if command.lease_id and command.lease_id not in self.leases:
            return False
        self._own_time(command.now_us)
        former = self.keys.get(command.key)
        lease = command.lease_id
        if command.ttl_ms:
            lease = former.lease if former and former.lease < 0 else -self.index
            self.leases[lease] = (command.ttl_ms, self.now_us + command.ttl_ms * 1000, self.index)
        if former and former.lease < 0 and former.lease != lease:
            del self.leases[former.lease]
        version, created = (former.version + 1, former.created) if former else (1, self.index)
        self.keys[command.key] = Key(command.value, version, created, self.index, lease)
        return True

    def _delete_key(self, command: DeleteKey) -> bool:
        former = self.keys.pop(command.key, None)
        if former and former.lease < 0:
            del self.leases[former.lease]
        return True

    def _delete_prefix(self, command: DeletePrefix) -> bool:
        for key in [key for key in self.keys if key.startswith(command.prefix)]:
            self._delete_key(DeleteKey(key=key))
        return True

    def _compare_and_set(self, command: CompareAndSet) -> bool:
        former = self.keys.get(command.key)
        if command.revision == -1:
            equal = former is not None and former.value == command.expected
        else:
            equal = command.revision == (former.modified if former else 0)
        if not equal or (command.lease_id and command.lease_id not in self.leases):
            return False
        if command.value is None:
            return self._delete_key(DeleteKey(key=command.key))
        return self._put_key(
            PutKey(
                key=command.key, value=command.value, lease_id=command.lease_id, ttl_ms=command.ttl_ms,
                now_us=command.now_us,
            )
        )  # fmt: skip

    def _allocate_id(self, command: AllocateId) -> bool:
        self.counters[command.counter] = self.counters.get(command.counter, 0) + 1
        return True

    def _grant_lease(self, command: GrantLease) -> bool:
        if command.lease_id in self.leases:
            return False
        self._own_time(command.now_us)
        expires_us = self.now_us + command.ttl_ms * 1000
        self.leases[command.lease_id] = (command.ttl_ms, expires_us, self.index)
        return True

    def _renew_lease(self, command: RenewLease) -> bool:
        if command.lease_id not in self.leases:
            return False
        ttl_ms = self.leases.pop(command.lease_id)[0]
        return self._grant_lease(GrantLease(lease_id=command.lease_id, ttl_ms=ttl_ms, now_us=command.now_us))

    def _revoke_lease(self, command: RevokeLease) -> bool:
        if command.lease_id not in self.leases:
            return False
        self._end(command.lease_id)
        return True

    def _over(self, command: ExpireLeases) -> list[int]:
        now_us = self.now_us if self.entry else max(self.now_us, command.now_us)
        return [
            lease for lease, revision in command.leases
            if lease in self.leases
            and self.leases[lease][2] == revision and self.leases[lease][1] <= now_us
        ]  # fmt: skip

    def _expire_leases(self, command: ExpireLeases) -> bool:
        over = self._over(command)
        self._own_time(command.now_us)
        for lease in over:
            self._end(lease)
        return True

    def _end(self, lease: int) -> None:
        del self.leases[lease]
        self.keys = {key: record for key, record in self.keys.items() if record.lease != lease}
        for broker, (mode, held) in self.brokers.items():
            if held == lease:
                self.brokers[broker] = (mode, 0)

    def _register_broker(self, command: RegisterBroker) -> bool:
        if command.lease_id not in self.leases:
            return False
        mode, former = self.brokers.get(command.broker_id, ("active", 0))
        self.brokers[command.broker_id] = (command.mode or mode, command.lease_id)
        if former not in (0, command.lease_id):
            self._end(former)
        return True

    def _set_broker_mode(self, command: SetBrokerMode) -> bool:
        if command.broker_id not in self.brokers:
            return False
        self.brokers[command.broker_id] = (command.mode, self.brokers[command.broker_id][1])
        return True

    def _forget_broker(self, command: ForgetBroker) -> bool:
        owned = any(owner == command.broker_id for owner, _ in self.owners.values())
        if command.broker_id not in self.brokers or self.brokers[command.broker_id][1] or owned:
            return False
        del self.brokers[command.broker_id]
        return True

    def _current(self, partitions: tuple[tuple[int, int, int], ...]) -> bool:
        return all(
            topic_id in self.topics.values() and self.owners.get((topic_id, partition), (0, 0))[1] == epoch
            for topic_id, partition, epoch in partitions
        )

    def _assign_partitions(self, command: AssignPartitions) -> bool:
        broker = command.broker_id
        if not self._current(command.partitions) or broker not in self.brokers:
            return False
        owners = {self.owners.get(place[:2], (0, 0))[0] for place in command.partitions}
        mode, lease = self.brokers[broker]
        if owners - {0, broker} or not lease or (mode != "active" and owners != {broker}):
            return False
        for topic_id, partition, epoch in command.partitions:
            self.owners[topic_id, partition] = (broker, epoch + 1)
        return True

    def _unload_partitions(self, command: UnloadPartitions) -> bool:
        known = not command.to_broker_id or command.to_broker_id in self.brokers
        owned = all(self.owners.get(place[:2], (0, 0))[0] for place in command.partitions)
        return known and self._current(command.partitions) and owned

    def _release_partitions(self, command: ReleasePartitions) -> bool:
        owners = {self.owners.get(place[:2], (0, 0))[0] for place in command.partitions}
        alive = self.brokers.get(command.broker_id, ("", 0))[1] != 0
        if not self._current(command.partitions) or owners != {command.broker_id}:
            return False
        if command.reason == "dead" and alive:
            return False
        for topic_id, partition, epoch in command.partitions:
            self.owners[topic_id, partition] = (0, epoch)
        return True

    @staticmethod
    def _reservation(command: ReserveOffsets, one: tuple[int, int, int, int]) -> tuple[int, int, int, bool]:
        return one[3], command.broker_id, one[2], command.last

    def _reserve_offsets(self, command: ReserveOffsets) -> bool:
        for topic_id, partition, epoch, end in command.partitions:
            known_end, _, known_epoch, closed = self.reserved.get((topic_id, partition), (0, 0, 0, False))
            if self.owners.get((topic_id, partition)) != (command.broker_id, epoch):
                return False
            again = closed and known_epoch == epoch and not (command.last and end == known_end)
            if again or (command.last and (known_epoch != epoch or end > known_end)):
                return False
            if end < known_end and not command.last:
                return False
        for one in command.partitions:
            self.reserved[one[:2]] = self._reservation(command, one)
        return True


class Model:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.clustered = self.random.random() < 0.5
        self.machine = Metadata()
        self.reference = Reference()
        self.follower = Metadata()
        self.reader: dict[str, dict[Any, Any]] = {"keys": {}, "leases": {}, "brokers": {}, "owners": {},
                                                   "reserved": {}}  # fmt: skip
        self.counters: dict[str, int] = {}
        self.epochs: dict[tuple[int, int], int] = {}
        self.ends: dict[tuple[int, int], int] = {}
        self.clock_us = 1_000
        self.refused = self.taken = 0

    def step(self) -> None:
        command = self.command()
        self.reference.index = self.machine.version + 1
        try:
            needed = self.machine.check(command)
        except CallerError:
            before = self.machine.snapshot()
            assert not self.reference.take(command), command
            assert self.machine.snapshot() == before
            self.refused += 1
            return
        if not isinstance(command, UnloadPartitions):
            allowed_change = self.reference.needed(command)
            assert needed == allowed_change, command
        if not needed:
            return
        assert self.reference.take(command), command
        self.apply(command)
        self.taken += 1

    def apply(self, command: Command) -> None:
        former = self.machine.copy() if self.random.random() < 0.1 else None
        [stored] = decode_commands(join_commands([encode_command(command)]))
        changes = self.machine.apply(self.machine.version + 1, stored)
        assert changes or isinstance(command, Agreed), command
        if former is not None:
            self.follower = Metadata.restore(self.machine.snapshot())
            changes = self.follower.changes_since(former)
        else:
            self.follower.apply(self.follower.version + 1, stored)
        self.read(changes)
        self.compare()

    def read(self, changes: list[Change]) -> None:
        keys, leases = self.reader["keys"], self.reader["leases"]
        reserved = self.reader["reserved"]
        brokers, owners = self.reader["brokers"], self.reader["owners"]
        for change in changes:
            match change:
                case KeyPut(record=key):
                    keys[key.key] = Key(
                        key.value, key.version, key.create_revision, key.mod_revision, key.lease_id
                    )
                case KeyDeleted(record=key):
                    del keys[key.key]
                case LeaseKept(record=lease):
                    leases[lease.lease_id] = (lease.ttl_ms, lease.expires_us, lease.revision)
                case LeaseEnded(record=lease):
                    del leases[lease.lease_id]
                case BrokerChanged(record=broker):
                    brokers[broker.broker_id] = (broker.mode, broker.lease_id)
                case BrokerForgotten(record=broker):
                    del brokers[broker.broker_id]
                case IdAllocated(record=allocated):
                    assert allocated.number > self.counters.get(allocated.counter, 0)
                    self.counters[allocated.counter] = allocated.number
                case OwnershipChanged(record=record) if record.reason == "deleted":
                    del owners[record.topic_id, record.partition]
                    reserved.pop((record.topic_id, record.partition), None)
                case OffsetsReserved(record=kept):
                    place = (kept.topic_id, kept.partition)
                    assert kept.end >= self.ends.get(place, 0) or kept.closed, "a reservation went back"
                    self.ends[place] = kept.end
                    reserved[place] = (kept.end, kept.broker_id, kept.epoch, kept.closed)
                case OwnershipChanged(record=record):
                    place = (record.topic_id, record.partition)
                    if record.broker_id and owners.get(place, (0, 0))[1] != record.epoch:
                        assert record.epoch > self.epochs.get(place, 0), "an epoch was given twice"
                        self.epochs[place] = record.epoch
                    owners[place] = (record.broker_id, record.epoch)
                case _:
                    assert (
                        isinstance(change, TopicCreated | TopicDeleted) or type(change).__name__ == "Skipped"
                    )

    def compare(self) -> None:
        reference, cluster = self.reference, self.machine.cluster
        assert self.reader["keys"] == reference.keys
        assert self.reader["leases"] == reference.leases
        assert self.reader["brokers"] == reference.brokers
        assert self.reader["owners"] == reference.owners
        assert self.reader["reserved"] == reference.reserved
        assert dict(cluster.keys.counters()) == reference.counters == self.counters
        assert [record.key for record in cluster.keys.records()] == sorted(reference.keys)
        assert cluster.agreement.now_us == reference.now_us and cluster.agreement.index == reference.entry
        assert dict(cluster.agreement.origins()) == reference.sequences
        sizes = sum(len(key) + len(record.value) for key, record in reference.keys.items())
        assert cluster.keys.size_bytes == sizes
        for lease in reference.leases:
            held = sorted(key for key, record in reference.keys.items() if record.lease == lease)
            assert cluster.keys.of_lease(lease) == held
        snapshot = self.machine.snapshot()
        assert snapshot == self.follower.snapshot()
        if self.random.random() < 0.2:
            self.follower = self.follower.copy()
            assert Metadata.restore(snapshot).snapshot() == snapshot

    def command(self) -> Command:
        self.clock_us += self.random.randrange(0, 4_000)
        draw = self.random.choice
        kind = self.random.randrange(10)
        if kind < 4:
            return self.key_command()
        if kind < 6:
            return self.lease_command()
        if kind < 7:
            return draw(
                [
                    RegisterBroker(
                        broker_id=draw(BROKERS), lease_id=draw(LEASES), native_address="h:1",
                        mode=draw(["", "", "active", "drained"]),
                    ),
                    SetBrokerMode(broker_id=draw(BROKERS), mode=draw(["active", "active", "draining"])),
                    ForgetBroker(broker_id=draw(BROKERS)),
                ]
            )  # fmt: skip
        if kind < 8 and self.clustered:
            return Agreed(
                index=self.reference.entry + self.random.randrange(-1, 3), term=1, now_us=self.clock_us,
                origin=draw(["", "p", "q"]), sequence=self.random.randrange(self.taken // 2 + 2),
            )  # fmt: skip
        if kind < 9:
            return self.ownership_command()
        topic = draw(TOPICS)
        create = CreateTopic(topic=topic, partitions=PARTITIONS, policy=TopicPolicy(), created_us=1)
        return create if self.random.random() < 0.8 else DeleteTopic(topic=topic)

    def key_command(self) -> Command:
        draw = self.random.choice
        key, value = draw(KEYS), draw(VALUES)
        lease = draw([0, 0, *LEASES])
        ttl_ms = 0 if lease else draw([0, 0, 5, 20])
        former = self.reference.keys.get(key)
        revision = draw([-1, 0, former.modified if former else 0, 3])
        expected = former.value if former and self.random.random() < 0.6 else value
        return draw(
            [
                PutKey(key=key, value=value, lease_id=lease, ttl_ms=ttl_ms, now_us=self.clock_us),
                PutKey(key=key, value=value, lease_id=lease, ttl_ms=ttl_ms, now_us=self.clock_us),
                DeleteKey(key=key),
                DeletePrefix(prefix=draw(PREFIXES)),
                CompareAndSet(
                    key=key, value=draw([value, value, None]), revision=revision, expected=expected,
                    lease_id=lease, ttl_ms=ttl_ms, now_us=self.clock_us,
                ),
                AllocateId(counter=draw(["/n", "/m"])),
            ]
        )  # fmt: skip

    def lease_command(self) -> Command:
        lease = self.random.choice(LEASES)
        known = list(self.reference.leases)
        seen = tuple(
            (one, self.reference.leases[one][2] - (self.random.random() < 0.2))
            for one in known
            if self.random.random() < 0.7
        )
        ttl_ms = self.random.choice([5, 20, 80])
        return self.random.choice(
            [
                GrantLease(lease_id=lease, ttl_ms=ttl_ms, now_us=self.clock_us),
                GrantLease(lease_id=lease, ttl_ms=ttl_ms, now_us=self.clock_us),
                RenewLease(lease_id=lease, now_us=self.clock_us),
                RevokeLease(lease_id=lease),
                ExpireLeases(leases=seen, now_us=self.clock_us),
            ]
        )

    def ownership_command(self) -> Command:
        draw = self.random.choice
        topic_ids = list(self.reference.topics.values()) or [1]
        places = {(draw(topic_ids), self.random.randrange(PARTITIONS)) for _ in range(draw([1, 1, 2]))}
        partitions = tuple(
            (*place, self.reference.owners.get(place, (0, 0))[1] + (self.random.random() < 0.1))
            for place in sorted(places)
        )
        owner = self.reference.owners.get(partitions[0][:2], (0, 0))[0]
        broker = owner if owner and self.random.random() < 0.5 else draw(BROKERS)
        ends = tuple(
            (*one, max(0, self.reference.reserved.get(one[:2], (0,))[0] + draw([-3, 0, 0, 5, 10])))
            for one in partitions
        )
        return draw(
            [
                ReserveOffsets(broker_id=broker, partitions=ends, last=draw([False, False, True])),
                ReserveOffsets(broker_id=broker, partitions=ends),
                AssignPartitions(broker_id=broker, partitions=partitions),
                AssignPartitions(broker_id=broker, partitions=partitions),
                UnloadPartitions(partitions=partitions, reason="unload", to_broker_id=draw([0, 1])),
                ReleasePartitions(broker_id=broker, partitions=partitions, reason=draw(["", "dead"])),
            ]
        )


@pytest.mark.parametrize("number", range(30))
def test_the_machine_does_what_the_reference_does(number: int, seed: int) -> None:
    model = Model(seed * 1_000 + number)
    for _ in range(STEPS):
        model.step()
    assert model.taken > STEPS // 5 and model.refused > STEPS // 20
