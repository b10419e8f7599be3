"""Decisions of the leader about brokers and partitions: a machine from metadata and time to commands.

In this order, each turn:

Expire:     leases whose time is over.  The first GRACE of a leadership expires none, so that brokers that
            could not renew without a leader can do so.
Release:    partitions of brokers that are gone, if other brokers can read them.
Assign:     partitions without an owner: to the broker that they were meant for, else as the strategy says.
Drain:      brokers that are to be emptied release, a bounded number at once; then they are drained.
Rebalance:  when requested, or by itself; a round at a time.

Memory:     none that matters.  The next leader decides from the metadata alone; only the times since when a
            move is under way or a broker is back begin again.
Harmless:   every command names its basis (epochs, a lease's revision, a registration that has ended), and
            the machine refuses a command whose basis has changed.
Local:      a reliable partition of a broker without shared storage is on one disk only.  The leader never
            takes it from that broker; without an owner, it waits for that broker.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, TypeVar

import msgspec
import numpy as np

from danube.core.cluster.commands import (
    AnyClusterCommand,
    AssignPartitions,
    BrokerChanged,
    BrokerForgotten,
    BrokerRecord,
    DeleteKey,
    ExpireLeases,
    KeyPut,
    Ownership,
    OwnershipChanged,
    PutKey,
    ReleasePartitions,
    SetBrokerMode,
    UnloadPartitions,
)
from danube.core.cluster.ownership import DEAD
from danube.core.metadata.commands import Change, TopicCreated, TopicUpdated
from danube.core.metadata.machine import Metadata
from danube.core.placement.balance import (
    LEVELS,
    STRATEGIES,
    BalanceSettings,
    Imbalance,
    Loads,
    Move,
    Picture,
    imbalance,
    measure,
    place,
    plan_moves,
)
from danube.core.placement.load_report import (
    BALANCE_KEY,
    DECIDING_KEY,
    LOAD_PREFIX,
    MOVES_KEY,
    REBALANCE_KEY,
    report_of,
    storage_shared,
)
from danube.core.placement.partition_table import NOBODY, Flags, PartitionTable
from danube.core.placement.recovered import epoch_floor
from danube.limits import PARTITIONS_PER_COMMAND_MAX

GRACE_US: Final = 500_000
SETTLE_US: Final = 15_000_000  # time before a returned broker is a target of moves
MOVE_US: Final = 300_000_000  # a move that takes longer no longer delays others
LOOK_US: Final = 1_000_000  # longest interval of rounds, even without changes
WEIGH_US: Final = 10_000_000  # interval of comparisons of loads
PARTITIONS_PER_TURN: Final = 1_024
MOVES_KEPT_MAX: Final = 256

_DECIDING: Final = (BrokerChanged, BrokerForgotten, OwnershipChanged, TopicCreated, TopicUpdated)
_Parts = tuple[tuple[int, int, int], ...]


class Placing(msgspec.Struct, frozen=True):
    """A leader's report of its placing.

    ``moving`` partitions are on their way to another broker; ``cooling`` ones were moved and stay for a
    while.  ``imbalance`` is the deviation of the brokers' loads divided by their mean.
    """

    moving: int
    cooling: int
    imbalance: float


class MovesRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """The value of MOVES_KEY: the time of the last round, and the moves with their times, the newest last."""

    round_us: int = 0
    moves: tuple[tuple[int, int, int, int, int], ...] = ()  # topic id, partition, from, to, time


class RebalanceRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """The value of REBALANCE_KEY; ``max_moves`` 0 is as many as a round has."""

    max_moves: int = 0


_encoder: Final = msgspec.json.Encoder()
_Value = TypeVar("_Value", BalanceSettings, MovesRecord, RebalanceRequest)


def rebalance_command(max_moves: int = 0) -> PutKey:
    """Ask the leader for a round of moves; it survives the leader."""
    return PutKey(key=REBALANCE_KEY, value=_encoder.encode(RebalanceRequest(max_moves)))


def _value_of(state: Metadata, key: str, kind: type[_Value]) -> _Value | None:
    """The value of a key; the defaults where it cannot be read, None where there is no key."""
    record = state.cluster.keys.find(key)
    try:
        return msgspec.json.decode(record.value, type=kind) if record is not None else None
    except msgspec.DecodeError:
        return kind()


def balance_settings(state: Metadata) -> BalanceSettings:
    """Return the settings of balancing that the cluster's key holds; the defaults without a valid key."""
    found = _value_of(state, BALANCE_KEY, BalanceSettings)
    known = found is not None and found.strategy in STRATEGIES and found.aggressiveness in LEVELS
    return found if found is not None and known else BalanceSettings()


def moves_record(state: Metadata) -> MovesRecord:
    return _value_of(state, MOVES_KEY, MovesRecord) or MovesRecord()


class ClusterView:
    """Brokers and partitions in one state of the metadata, for duties and for questions."""

    def __init__(self, state: Metadata, table: PartitionTable, settings: BalanceSettings) -> None:
        self.state = state
        self.table = table
        self.settings = settings
        self.brokers = state.cluster.brokers.records()
        for broker in self.brokers:
            table.slot(broker.broker_id)
        by_id = {broker.broker_id: broker for broker in self.brokers}
        self.by_slot: list[BrokerRecord | None] = [by_id.get(one) for one in table.broker_ids]
        keys = state.cluster.keys
        known = [one for one in self.by_slot if one is not None]
        self.shared = self._flags({one.broker_id for one in known if storage_shared(keys, one.broker_id)})
        self.takes = self._flags({one.broker_id for one in known if one.alive and one.mode == "active"})
        self._loads: Loads | None = None
        self._picture: Picture | None = None

    def _flags(self, broker_ids: set[int]) -> Flags:
        return np.array([one in broker_ids for one in self.table.broker_ids], np.bool_)

    @property
    def picture(self) -> Picture:
        if self._picture is None:
            keys = self.state.cluster.keys
            reports = [report_of(keys, broker_id) for broker_id in self.table.broker_ids]
            self._picture = Picture(self.table, self.takes, reports)
        return self._picture

    @property
    def loads(self) -> Loads:
        if self._loads is None:
            self._loads = measure(self.picture, self.settings)
        return self._loads

    @property
    def imbalance(self) -> Imbalance:
        return imbalance(self.loads.load, self.takes)

    def movable(self) -> Flags:
        """By row: whether it is owned, and readable for brokers other than its owner."""
        owner = self.table.column("owner")
        shared = np.append(self.shared, False)[owner]
        return np.asarray((owner != NOBODY) & (shared | ~self.table.column("reliable")))

    def home(self, ownership: Ownership, row: int) -> int:
        """Broker slot that alone has the records of an unowned partition, or NOBODY."""
        if not ownership.epoch or not self.table.column("reliable")[row] or not ownership.from_broker_id:
            return NOBODY
        slot = self.table.find_slot(ownership.from_broker_id)
        forgotten = slot == NOBODY or self.by_slot[slot] is None
        return NOBODY if forgotten or self.shared[slot] else slot

    def plan(self, count_max: int, now_us: int, settled: Flags | None = None) -> list[Move]:
        """A round of moves: nothing that is on its way already, or was moved a short while ago.

        Also nothing if loads are equal enough, see Level.
        """
        if self.imbalance.cv <= self.settings.level.imbalance:
            return []
        free = self.movable()
        for row in self.table.asked:
            free[row] = False
        cooldown_us = self.settings.level.cooldown_s * 1_000_000
        for topic_id, partition, _, _, moved_us in moves_record(self.state).moves:
            moved = self.table.row(topic_id, partition)
            if moved is not None and now_us - moved_us < cooldown_us:
                free[moved] = False
        targets = self.takes & settled if settled is not None else self.takes
        return plan_moves(self.picture, self.loads, self.settings, free, targets, count_max)


class Duties:
    """One leadership after the other; ``begin`` starts each."""

    def __init__(self, broker_id: int, settings: BalanceSettings) -> None:
        self._broker_id = broker_id
        self._settings = settings
        self._table = PartitionTable()
        self._began_us = 0
        self._looked_us = 0
        self._weighed_us = 0
        self._touched = False  # whether anything that decides about partitions changed since the last look
        self._leases: dict[int, tuple[int, int]] = {}  # by broker: its lease and since when
        self._asked_us: dict[tuple[int, int, int], int] = {}  # moves under way, by topic, partition, epoch

    def begin(self, state: Metadata, now_us: int, table: PartitionTable | None = None) -> None:
        """Decide from now on; ``state`` holds all that was agreed on before, and so does ``table``."""
        self._began_us = self._weighed_us = now_us
        self._leases = {one.broker_id: (one.lease_id, 0) for one in state.cluster.brokers.records()}
        self._asked_us = {}
        self._table = table if table is not None else PartitionTable.of(state)
        self._touched = True

    def changed(self, changes: list[Change]) -> None:
        """Take in the machine's changes since the last turn; to be called before the next turn."""
        self._table.take(changes)
        self._touched = self._touched or any(map(_decides, changes))

    def placing(self, state: Metadata, now_us: int) -> Placing:
        """State of placing between two turns."""
        since_us = now_us - self._settings.level.cooldown_s * 1_000_000
        return Placing(
            moving=len(self._table.asked),
            cooling=sum(moved_us >= since_us for *_, moved_us in moves_record(state).moves),
            imbalance=round(ClusterView(state, self._table, self._settings).imbalance.cv, 4),
        )

    @property
    def pressing(self) -> bool:
        """Whether the next turn should come at once."""
        return self._touched

    def turn(self, state: Metadata, now_us: int) -> list[AnyClusterCommand]:
        """Return the commands to propose now: a bounded number, none when all is well."""
        commands = [*self._announce(state), *self._expire(state, now_us)]
        if not self._touched and now_us - self._looked_us < LOOK_US:
            return commands
        self._looked_us = now_us
        decided = self._decide(ClusterView(state, self._table, self._settings), now_us)
        self._touched = bool(decided)
        return commands + decided

    def _decide(self, outlook: ClusterView, now_us: int) -> list[AnyClusterCommand]:
        released = self._release_dead(outlook)
        assigned = self._assign(outlook)
        room = self._room(now_us)
        drained = self._drain(outlook, room)
        room -= sum(len(one.partitions) for one in drained if isinstance(one, UnloadPartitions))
        moved = self._rebalance(outlook, now_us, room) if not released and not assigned else []
        return [*released, *assigned, *drained, *moved]

    def _announce(self, state: Metadata) -> list[AnyClusterCommand]:
        """Announce the deciding broker and its settings, as long as that broker is alive."""
        broker = state.cluster.brokers.find(self._broker_id)
        if broker is None or not broker.alive:
            return []
        id_text, settings = str(self._broker_id).encode(), _encoder.encode(self._settings)
        wanted = ((DECIDING_KEY, id_text, broker.lease_id), (BALANCE_KEY, settings, 0))
        said = state.cluster.keys.find
        return [
            PutKey(key=key, value=value, lease_id=lease_id)
            for key, value, lease_id in wanted
            if (found := said(key)) is None or (found.value, found.lease_id) != (value, lease_id)
        ]

    # -- leases -----------------------------------------------------------------------------------

    def _expire(self, state: Metadata, now_us: int) -> list[AnyClusterCommand]:
        if now_us - self._began_us < GRACE_US:
            return []
        due = state.cluster.leases.due(now_us)
        return [ExpireLeases(leases=tuple(due))] if due else []

    # -- partitions of dead brokers, and of none --------------------------------------------------

    def _release_dead(self, outlook: ClusterView) -> list[AnyClusterCommand]:
        dead = [slot for slot, one in enumerate(outlook.by_slot) if one is None or not one.alive]
        owner = self._table.column("owner")
        if not dead or not np.isin(owner, dead).any():
            return []
        movable = outlook.movable()
        owned = [(row, slot) for slot in dead for row in np.flatnonzero((owner == slot) & movable).tolist()]
        return [
            ReleasePartitions(broker_id=broker_id, partitions=parts, reason=DEAD)
            for broker_id, parts in self._by_broker(owned[:PARTITIONS_PER_TURN])
        ]

    def _assign(self, outlook: ClusterView) -> list[AnyClusterCommand]:
        if not self._table.unowned:
            return []
        placed: list[tuple[int, int]] = []
        open_rows: list[int] = []
        avoid: dict[int, int] = {}
        taken = 0
        for row, ownership in self._table.unowned.items():
            slot = self._destined(outlook, ownership, row)
            if slot is None:
                continue  # it waits for a broker that is not there
            taken += 1
            if slot != NOBODY:
                placed.append((row, slot))
            else:
                open_rows.append(row)
                if ownership.reason not in ("", DEAD):
                    avoid[row] = self._table.find_slot(ownership.from_broker_id)
            if taken == PARTITIONS_PER_TURN:
                break
        if open_rows:
            placed += place(outlook.picture, outlook.loads, open_rows, avoid)
        floor = epoch_floor(outlook.state)
        return [
            AssignPartitions(broker_id=broker_id, partitions=parts, epoch_floor=floor)
            for broker_id, parts in self._by_broker(placed)
        ]

    def _destined(self, outlook: ClusterView, ownership: Ownership, row: int) -> int | None:
        """Return where an unowned partition has to go; NOBODY: anywhere; None: nowhere now."""
        takes = outlook.takes
        home = outlook.home(ownership, row)
        if home != NOBODY:
            return home if takes[home] else None
        if ownership.to_broker_id:
            slot = self._table.find_slot(ownership.to_broker_id)
            if slot != NOBODY and takes[slot]:
                return slot
        return NOBODY

    def _by_broker(self, placed: Iterable[tuple[int, int]]) -> Iterator[tuple[int, _Parts]]:
        """Broker ids with their rows as commands name them, as many as one command may name."""
        by_slot: dict[int, list[int]] = {}
        for row, slot in placed:
            by_slot.setdefault(slot, []).append(row)
        for slot, rows in sorted(by_slot.items()):
            for start in range(0, len(rows), PARTITIONS_PER_COMMAND_MAX):
                some = rows[start : start + PARTITIONS_PER_COMMAND_MAX]
                yield self._table.broker_ids[slot], tuple(map(self._table.place, some))

    # -- moves ------------------------------------------------------------------------------------

    def _room(self, now_us: int) -> int:
        """How many more moves may be under way; one that hangs does not count for ever."""
        under_way = {self._table.place(row): now_us for row in self._table.asked}
        self._asked_us = {place: self._asked_us.get(place, since) for place, since in under_way.items()}
        counted = sum(1 for since in self._asked_us.values() if now_us - since < MOVE_US)
        return max(0, self._settings.moves_max - counted)

    def _round_under_way(self, now_us: int) -> bool:
        table, since = self._table, self._asked_us
        return any(
            one.reason == "rebalance" and now_us - since.get(table.place(row), now_us) < MOVE_US
            for row, one in table.asked.items()
        )

    def _drain(self, outlook: ClusterView, room: int) -> list[AnyClusterCommand]:
        commands: list[AnyClusterCommand] = []
        for slot, broker in enumerate(outlook.by_slot):
            if broker is None or broker.mode == "active" or not broker.alive:
                continue
            rows = self._table.rows_of_slot(slot)
            rows = rows[outlook.movable()[rows]] if len(rows) else rows
            waiting = [row for row in rows.tolist() if row not in self._table.asked]
            if not len(rows):
                commands += self._drained(broker, slot)
            elif room > 0 and waiting and outlook.takes.any():
                chosen = place(outlook.picture, outlook.loads, waiting[:room], {})
                room -= len(chosen)
                commands += self._unloads(chosen, "drain")
        return commands

    def _drained(self, broker: BrokerRecord, slot: int) -> list[AnyClusterCommand]:
        if broker.mode == "drained":
            return []
        kept = len(self._table.rows_of_slot(slot))
        reason = broker.reason
        if kept:
            reason = f"{kept} partitions stay: they are on its disk only"
        return [SetBrokerMode(broker_id=broker.broker_id, mode="drained", reason=reason)]

    def _unloads(self, chosen: list[tuple[int, int]], reason: str) -> list[AnyClusterCommand]:
        return [
            UnloadPartitions(partitions=parts, reason=reason, to_broker_id=broker_id)
            for broker_id, parts in self._by_broker(chosen)
        ]

    def _rebalance(self, outlook: ClusterView, now_us: int, room: int) -> list[AnyClusterCommand]:
        """Begin a round that was requested or is due, unless an earlier one is under way.

        A requested round includes brokers that have just joined; an automatic round lets them settle first.
        """
        asked = _value_of(outlook.state, REBALANCE_KEY, RebalanceRequest)
        settled = self._settled(outlook, now_us)
        if room <= 0 or self._round_under_way(now_us):
            return []
        record = moves_record(outlook.state)
        if asked is None and not self._due(record, now_us):
            return []
        count_max = (asked.max_moves if asked else 0) or self._settings.level.moves_per_round
        targets = settled if asked is None else outlook.takes
        moves = outlook.plan(min(room, count_max), now_us, targets)
        if asked is None and not moves:
            return []
        commands: list[AnyClusterCommand] = [DeleteKey(key=REBALANCE_KEY)] if asked is not None else []
        commands.append(self._noted(record, moves, now_us))
        return [*commands, *self._unloads([(one.row, one.target) for one in moves], "rebalance")]

    def _due(self, record: MovesRecord, now_us: int) -> bool:
        settings = self._settings
        if not settings.automatic or now_us - self._weighed_us < WEIGH_US:
            return False
        self._weighed_us = now_us
        interval_s = settings.interval_s or settings.level.interval_s
        return now_us - max(record.round_us, self._began_us) >= interval_s * 1_000_000

    def _settled(self, outlook: ClusterView, now_us: int) -> Flags:
        """By slot: whether the broker takes partitions and has been there for a while."""
        settled = outlook.takes.copy()
        for broker in outlook.brokers:
            lease_id, since_us = self._leases.get(broker.broker_id, (0, now_us))
            if lease_id != broker.lease_id:
                since_us = now_us
            self._leases[broker.broker_id] = (broker.lease_id, since_us)
            if since_us and now_us - since_us < SETTLE_US:
                settled[self._table.slot(broker.broker_id)] = False
        return settled

    def _noted(self, record: MovesRecord, moves: list[Move], now_us: int) -> PutKey:
        ids = self._table.broker_ids
        made = [(*self._table.place(one.row)[:2], ids[one.source], ids[one.target], now_us) for one in moves]
        since_us = now_us - self._settings.level.cooldown_s * 1_000_000
        kept = [one for one in record.moves if one[4] >= since_us]
        newest = tuple([*kept, *made][-MOVES_KEPT_MAX:])
        return PutKey(key=MOVES_KEY, value=_encoder.encode(MovesRecord(now_us, newest)))


def _decides(change: Change) -> bool:
    """Return whether a change calls for a turn at once."""
    if isinstance(change, KeyPut):
        return not change.record.key.startswith(LOAD_PREFIX)
    return isinstance(change, _DECIDING)
