"""The offline verdict: what clients wrote down against what the broker still has.

Input is a set of journal events (:mod:`tests.crash.journal`), nothing else.  A violation is a sentence
that begins with the name of the broken promise:

    lost          an acknowledged record is not in the log
    moved         an acknowledged record is at another offset than its acknowledgement said
    invented      a record that nobody sent, or whose bytes are not what was sent
    repeated      a record of an idempotent producer is in the log twice
    reused        one offset was seen with two records
    hole          an offset between the first and the last one is missing, and nobody says that it is unused
    order         a producer's records lie in the log, or first came to a subscription, out of order
    undelivered   an acknowledged record was never delivered to, or never acked by, a subscription:
                  the cursor went ahead of the acks
    vanished      a record was delivered and is not in the log
    given twice   a record came again although its ack was stored: the broker had confirmed it
    passed over   a subscription says that it left records out, or stands behind the end with nothing to give
    liveness      too little was acknowledged for the run to say anything, or no fault fired

A power cut may take the last records that were acknowledged at ``written``: those of the last moments before
it, from the end.  They are counted (``taken_by_cuts``) and are no violation.

In a cluster a log has *lives*: the offsets between two ranges that are unused, because an owner that died
had reserved them.  A batch that had no answer is sent again in the next life; where the dead owner had
stored it as well it is there twice, with the acknowledged one last.  Within a life nothing is twice.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.crash.journal import Event, Identity

Place = tuple[str, int, int]  # topic, partition, offset
Ranges = list[tuple[int, int]]  # half-open, in order
SHOWN_MAX = 20
SECOND_NS = 1_000_000_000
_ENDING = {
    "kill_all", "kill_supervisor", "kill_during_recovery", "terminate", "power_cut_of_all"
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """What must have happened for a verdict to mean something."""

    modes: dict[str, str] = field(default_factory=dict)  # subscription -> mode
    topics: dict[str, str] = field(default_factory=dict)  # subscription -> topic that it reads wholly
    acknowledged_min: int = 1
    faults_min: int = 0
    acknowledged_after_fault_min: int = 0
    log_was_read: bool = True
    log_starts: dict[tuple[str, int], int] = field(default_factory=dict)  # where the log must begin
    unused: dict[tuple[str, int], Ranges] = field(default_factory=dict)  # offsets of no record, by the broker
    delivered_stays: bool = False  # what was delivered must be in the log: nothing expires
    acks_are_known: bool = True  # not where clients were killed between an ack and its line
    levels: dict[str, str] = field(default_factory=dict)  # topic -> durability; others keep all
    sync_lag_s: float = 1.0  # what a power cut may take of `written`
    one_owner: bool = False  # no other broker goes on with a log, so a resend is known in all of its lives
    alone: frozenset[str] = frozenset()  # subscriptions of one consumer that is never restarted
    on_its_way_s: float = 30.0  # a redelivery may lie with another consumer as long, beside the ack
    ack_copy_s: float = 0.0  # confirmed acks that the loss of an owner may take, in a cluster


@dataclass
class Verdict:
    """Violations by name, shortened, and the counts behind the verdict."""

    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    examples: list[str] = field(default_factory=list)
    statistics: dict[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return not self.counts

    def add(self, name: str, sentence: str) -> None:
        self.counts[name] += 1
        if self.counts[name] <= SHOWN_MAX:
            self.examples.append(f"{name}: {sentence}")

    def __str__(self) -> str:
        head = ", ".join(f"{name} {count}" for name, count in self.counts.items()) or "no violation"
        return "\n".join([head, *self.examples])


class _Ledger:
    """The journals, sorted by what they speak of."""

    def __init__(self, events: Iterable[Event], verdict: Verdict) -> None:
        self.verdict = verdict
        self.attempted: dict[Identity, str | None] = {}  # key
        self.topic_of: dict[Identity, str] = {}
        self.acknowledged: dict[Identity, Place | None] = {}  # None: the answer did not say where
        self.answered: dict[Identity, tuple[str, int]] = {}  # level and moment of the acknowledgement
        self.answers: dict[tuple[str, int], list[int]] = defaultdict(list)  # moments, by topic and partition
        self.at: dict[Place, Identity] = {}
        self.log: dict[tuple[str, int], list[tuple[int, Identity]]] = defaultdict(list)
        self.deliveries: dict[str, list[tuple[int, str, Place, Identity, str | None, bool]]] = defaultdict(
            list
        )
        self.acked: dict[str, set[Place]] = defaultdict(set)
        self.perhaps_acked: dict[str, set[Place]] = defaultdict(set)
        self.faults: list[Event] = []
        self.moments: list[tuple[int, int]] = []  # of acknowledgements: when, how many records
        self.failed = self.given_twice = 0
        self.received: list[tuple[Place, Identity, str | None, bool]] = []
        self.first_came: dict[Place, int] = {}  # the moment of its first delivery to anybody
        self.confirmed: dict[str, dict[Place, list[int]]] = defaultdict(lambda: defaultdict(list))  # moments
        self.stands: list[tuple[str, str, int, dict[str, int]]] = []
        self.taken: set[Identity] = set()  # lost in a power cut, as they may be
        for event in events:
            getattr(self, f"_on_{event[0]}")(*event[1:])

    def _on_try(self, producer: str, topic: str, first: int, end: int, key: str | None) -> None:
        for sequence in range(first, end):
            self.attempted[Identity(producer, sequence)] = key
            self.topic_of[Identity(producer, sequence)] = topic

    def _on_ok(
        self,
        producer: str,
        topic: str,
        first: int,
        end: int,
        partition: int,
        offset: int | None,
        durability: str,
        moment_ns: int,
    ) -> None:
        self.moments.append((moment_ns, end - first))
        self.answers[topic, partition].append(moment_ns)
        for sequence in range(first, end):
            identity = Identity(producer, sequence)
            self.answered[identity] = (durability, moment_ns)
            if offset is None:
                self.acknowledged[identity] = None
                continue
            place = (topic, partition, offset + sequence - first)
            self.acknowledged[identity] = place
            self._note(place, identity, "acknowledged")

    def _on_fail(self, producer: str, topic: str, first: int, end: int, error: str) -> None:
        self.failed += end - first

    def _on_got(
        self,
        subscription: str,
        consumer: str,
        topic: str,
        partition: int,
        offset: int,
        producer: str,
        sequence: int,
        key: str | None,
        intact: bool,
        redelivered: bool,
        moment_ns: int,
    ) -> None:
        place, identity = (topic, partition, offset), Identity(producer, sequence)
        self.received.append((place, identity, key, intact))
        self.first_came[place] = min(moment_ns, self.first_came.get(place, moment_ns))
        self._note(place, identity, f"delivered to {subscription}")
        self.deliveries[subscription].append((moment_ns, consumer, place, identity, key, redelivered))

    def _on_ack(self, subscription: str, topic: str, partition: int, offset: int) -> None:
        self.acked[subscription].add((topic, partition, offset))

    def _on_ack_unknown(self, subscription: str, topic: str, partition: int, offset: int) -> None:
        self.perhaps_acked[subscription].add((topic, partition, offset))

    def _on_confirmed(
        self, subscription: str, topic: str, partition: int, offsets: list[int], moment_ns: int
    ) -> None:
        for offset in offsets:
            self.confirmed[subscription][topic, partition, offset].append(moment_ns)

    def _on_stands(self, subscription: str, topic: str, partition: int, counts: dict[str, int]) -> None:
        self.stands.append((subscription, topic, partition, counts))

    def _on_log(
        self,
        topic: str,
        partition: int,
        offset: int,
        producer: str,
        sequence: int,
        key: str | None,
        intact: bool,
    ) -> None:
        place, identity = (topic, partition, offset), Identity(producer, sequence)
        self.received.append((place, identity, key, intact))
        self._note(place, identity, "read from the log")
        self.log[topic, partition].append((offset, identity))

    def _on_fault(self, *fields: Any) -> None:
        self.faults.append(list(fields))

    def _note(self, place: Place, identity: Identity, how: str) -> None:
        known = self.at.setdefault(place, identity)
        if known != identity:
            self.verdict.add("reused", f"{place} held {known}, then {how} with {identity}")


def check(events: Iterable[Event], expected: Expectation) -> Verdict:
    """Decide every promise; a verdict that passed says that nothing was broken and enough happened."""
    verdict = Verdict()
    ledger = _Ledger(events, verdict)
    _check_invented(ledger)
    places = _check_log(ledger, expected) if expected.log_was_read else {}
    for subscription, mode in expected.modes.items():
        # A fault gives back what a shared consumer had not looked at yet, and another one gets it late.
        if mode != "shared" or not ledger.faults:
            _check_first_deliveries(ledger, subscription, mode, expected.unused)
    for subscription, topic in expected.topics.items():
        _check_delivered(ledger, subscription, topic, places, expected.acks_are_known)
        _check_given_twice(ledger, subscription, expected)
    _check_stands(ledger)
    if expected.delivered_stays:
        _check_vanished(ledger, expected)
    _check_liveness(ledger, expected)
    verdict.statistics = _statistics(ledger)
    return verdict


def _check_invented(ledger: _Ledger) -> None:
    for place, identity, key, intact in ledger.received:
        if identity not in ledger.attempted:
            ledger.verdict.add("invented", f"{identity} at {place} was never sent")
        elif not intact or key != ledger.attempted[identity] or place[0] != ledger.topic_of[identity]:
            ledger.verdict.add("invented", f"{identity} at {place} is not what was sent")


def _check_log(ledger: _Ledger, expected: Expectation) -> dict[Identity, Place]:
    """Where the log has each record: as acknowledged, else the first place of one that is there twice."""
    places: dict[Identity, list[Place]] = {}
    for key, records in ledger.log.items():
        records.sort()
        unused = expected.unused.get(key, [])
        _check_dense(ledger, key, expected.log_starts.get(key, records[0][0]), unused)
        _check_sequences(ledger, key, [] if expected.one_owner else unused, places)
    missing = [one for one in ledger.acknowledged.items() if one[0] not in places]
    ledger.taken = _taken_by_cuts(ledger, missing, expected, places)
    for identity, told in ledger.acknowledged.items():
        found = places.get(identity)
        if identity in ledger.taken:
            continue
        if found is None:
            ledger.verdict.add("lost", f"{identity}, acknowledged at {told or 'a place unknown'}")
        elif told is not None and told not in found:
            ledger.verdict.add("moved", f"{identity}, acknowledged at {told}, is at {found[0]}")
        elif told is not None and told != found[-1]:
            ledger.verdict.add("repeated", f"{identity}, acknowledged at {told}, also at {found[-1]}")
    return {identity: found[0] for identity, found in places.items()}


def _cuts(ledger: _Ledger) -> list[tuple[int, int]]:
    """Each power cut: when, and when its fault was over."""
    return sorted((cut, fault[3]) for fault in ledger.faults for cut in fault[4].get("cut_ns", ()))


def _cut_of(moment_ns: int, cuts: list[tuple[int, int]], lag_s: float) -> int | None:
    """The power cut that may have taken what was stored at this moment, or a little before."""
    for cut_ns, ended_ns in cuts:
        if cut_ns - lag_s * SECOND_NS <= moment_ns <= ended_ns:
            return cut_ns
    return None


def _cut_after_kill(ledger: _Ledger, told: Place, moment_ns: int, lag_s: float) -> int | None:
    """The cut that came while nobody had opened the partition again, whose broker or worker had been killed
    right after this moment: what that one had not synced is synced at the next opening."""
    for cut_ns, _ in _cuts(ledger):
        for fault in ledger.faults:
            killed_ns, over_ns = fault[2], fault[3]
            if not killed_ns - lag_s * SECOND_NS <= moment_ns <= over_ns <= cut_ns:
                continue
            later = ledger.answers[told[:2]]
            place = bisect_right(later, over_ns)
            if place == len(later) or later[place] > cut_ns:
                return cut_ns
    return None


def _taken_by_cuts(
    ledger: _Ledger,
    missing: list[tuple[Identity, Place | None]],
    expected: Expectation,
    places: Mapping[Identity, list[Place]],
) -> set[Identity]:
    """Missing records that were acknowledged at ``written`` right before a power cut, and nothing behind them
    was kept."""
    cuts = _cuts(ledger)
    for moments in ledger.answers.values():
        moments.sort()
    found: dict[tuple[str, int, int], list[tuple[int, Identity]]] = defaultdict(list)
    for identity, told in missing:
        level, moment_ns = ledger.answered[identity]
        cut_ns = _cut_of(moment_ns, cuts, expected.sync_lag_s)
        if cut_ns is None and told is not None:
            cut_ns = _cut_after_kill(ledger, told, moment_ns, expected.sync_lag_s)
        if told is not None and level == "written" and cut_ns is not None:
            found[told[0], told[1], cut_ns].append((told[2], identity))
    if not found:
        return set()
    kept: dict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
    for identity, told in ledger.acknowledged.items():
        if told is not None and identity in places:
            kept[told[:2]].append((told[2], ledger.answered[identity][1]))
    for (topic, partition, cut_ns), lost in found.items():
        last = max((o for o, moment_ns in kept[topic, partition] if moment_ns < cut_ns), default=-1)
        for offset, identity in lost:
            if offset < last:
                ledger.verdict.add(
                    "lost", f"{identity}, acknowledged at {(topic, partition, offset)}, by a power cut that"
                    f" left {last}, which was acknowledged before it too"
                )  # fmt: skip
    return {identity for lost in found.values() for _, identity in lost}


def _check_dense(ledger: _Ledger, key: tuple[str, int], start: int, unused: Ranges) -> None:
    """Every offset has a record, or is said to be unused; none is both."""
    topic, partition = key
    following = start
    for offset, identity in ledger.log[key]:
        if offset > following and not _covered(following, offset, unused):
            ledger.verdict.add("hole", f"{topic} {partition}: offsets {following} to {offset} are missing")
        if _covered(offset, offset + 1, unused):
            ledger.verdict.add(
                "hole", f"{topic} {partition}: {offset} has {identity} and is said to be unused"
            )
        following = offset + 1


def _covered(start: int, end: int, unused: Ranges) -> bool:
    """Whether all offsets of a range are unused."""
    for first, last in unused:
        if first <= start < last:
            start = last
    return start >= end


def _check_sequences(
    ledger: _Ledger, key: tuple[str, int], unused: Ranges, places: dict[Identity, list[Place]]
) -> None:
    """Nothing twice in a life, each producer in order in it; what was acknowledged in order in all."""
    last: dict[tuple[str, int], int] = {}
    last_acknowledged: dict[str, int] = {}
    for offset, identity in ledger.log[key]:
        place, life = (*key, offset), _life(offset, unused)
        found = places.setdefault(identity, [])
        if any(one[:2] != key or _life(one[2], unused) == life for one in found):
            ledger.verdict.add("repeated", f"{identity} at {found[0]} and {place}")
            continue
        found.append(place)
        if identity.sequence < last.get((identity.producer, life), -1):
            before = last[identity.producer, life]
            ledger.verdict.add("order", f"{identity} at {place} comes after {before}")
        elif ledger.acknowledged.get(identity) == place:
            if identity.sequence < last_acknowledged.get(identity.producer, -1):
                before = last_acknowledged[identity.producer]
                ledger.verdict.add("order", f"{identity}, acknowledged at {place}, comes after {before}")
            last_acknowledged[identity.producer] = identity.sequence
        last[identity.producer, life] = identity.sequence


def _life(offset: int, unused: Ranges) -> int:
    """How many ranges of unused offsets come before an offset."""
    return bisect_right(unused, offset, key=lambda one: one[0])


def _check_vanished(ledger: _Ledger, expected: Expectation) -> None:
    cuts = _cuts(ledger)
    kept = {
        (topic, partition, offset) for (topic, partition), found in ledger.log.items() for offset, _ in found
    }
    for place, identity, _, _ in ledger.received:
        if place not in kept:
            written = expected.levels.get(place[0]) == "written"
            came_ns = ledger.first_came[place]
            if written and (
                _cut_of(came_ns, cuts, expected.sync_lag_s) is not None
                or _cut_after_kill(ledger, place, came_ns, expected.sync_lag_s) is not None
            ):
                continue
            ledger.verdict.add("vanished", f"{identity}, delivered at {place}, is not in the log")


def _check_first_deliveries(
    ledger: _Ledger, subscription: str, mode: str, unused: Mapping[tuple[str, int], Ranges]
) -> None:
    """First deliveries come in offset order: for the subscription, a key of it, or each shared consumer.

    What came again had come before, in its order, to somebody who had no time to look at it.
    Each life has an order of its own, as what comes back of a dead owner's disk comes after younger records.
    """
    seen: set[Place] = set()
    last: dict[tuple[Any, ...], int] = {}
    came = sorted(ledger.deliveries[subscription], key=lambda one: one[0])
    for _, consumer, place, identity, key, redelivered in came:
        if place in seen:
            continue
        seen.add(place)
        if redelivered:
            continue
        topic, partition, offset = place
        life = _life(offset, unused.get((topic, partition), []))
        stream: tuple[Any, ...] = (topic, partition, life)
        if mode == "shared":
            stream = (*stream, consumer)
        elif mode == "key_shared":
            stream = (*stream, key)
        if offset < last.get(stream, -1):
            ledger.verdict.add(
                "order",
                f"{subscription} ({mode}) first saw {identity} at {place} after offset {last[stream]}",
            )
        last[stream] = max(offset, last.get(stream, -1))


def _check_delivered(
    ledger: _Ledger, subscription: str, topic: str, places: dict[Identity, Place], acks_are_known: bool
) -> None:
    delivered = {one[2] for one in ledger.deliveries[subscription]}
    acked, perhaps_acked = ledger.acked[subscription], ledger.perhaps_acked[subscription]
    for identity, told in ledger.acknowledged.items():
        place = told or places.get(identity)  # one that is nowhere was found lost
        if place is None or place[0] != topic or identity in ledger.taken:
            continue
        if place not in delivered:
            ledger.verdict.add("undelivered", f"{identity} at {place} never came to {subscription}")
        elif acks_are_known and place not in acked and place not in perhaps_acked:
            ledger.verdict.add(
                "undelivered", f"{identity} at {place} was not acked by {subscription} and not redelivered"
            )
    for place in acked - delivered:
        ledger.verdict.add("invented", f"{subscription} acked {place}, which it never got")


def _check_given_twice(ledger: _Ledger, subscription: str, expected: Expectation) -> None:
    """What came after its ack was confirmed.

    A confirmed ack is on the disk, so neither a killed process nor a power cut takes it back; in a cluster it
    is on the owner's disk, and a copy of it follows.  Where several share a subscription one of them may hold
    a redelivery from before, but not over the end of all processes.
    """
    faults = sorted((fault[2], fault[3], _ends_all(fault)) for fault in ledger.faults)
    alone = subscription in expected.alone
    confirmed = {place: min(moments) for place, moments in ledger.confirmed[subscription].items()}
    for moment_ns, consumer, place, identity, _, _ in ledger.deliveries[subscription]:
        since_ns = confirmed.get(place)
        if since_ns is None or moment_ns <= since_ns:
            continue
        between = [one for one in faults if since_ns <= one[0] and one[1] <= moment_ns]
        late = moment_ns - since_ns > expected.on_its_way_s * SECOND_NS or any(one[2] for one in between)
        if not alone and not late:
            continue
        copying = expected.ack_copy_s * SECOND_NS
        if any(one[0] - copying <= since_ns <= one[1] and one[0] <= moment_ns for one in faults if copying):
            continue
        ledger.given_twice += 1
        ledger.verdict.add(
            "given twice",
            f"{subscription} gave {identity} at {place} to {consumer}"
            f" {(moment_ns - since_ns) / SECOND_NS:.3f} s after its ack was confirmed,"
            f" {len(between)} faults between",
        )


def _ends_all(fault: Event) -> bool:
    """Whether a fault ended every process of every broker, and with it all connections."""
    return bool(fault[0] in _ENDING or fault[4].get("ended") == "all")


def _check_stands(ledger: _Ledger) -> None:
    """What the broker says of its subscriptions when everything was taken."""
    for subscription, topic, partition, counts in ledger.stands:
        for name, count in counts.items():
            if count:
                ledger.verdict.add("passed over", f"{subscription} of {topic} {partition}: {name} {count}")


def _check_liveness(ledger: _Ledger, expected: Expectation) -> None:
    acknowledged = len(ledger.acknowledged)
    if acknowledged < expected.acknowledged_min:
        ledger.verdict.add(
            "liveness", f"{acknowledged} records acknowledged, wanted {expected.acknowledged_min}"
        )
    if len(ledger.faults) < expected.faults_min:
        ledger.verdict.add("liveness", f"{len(ledger.faults)} faults fired, wanted {expected.faults_min}")
    healed_ns = max((fault[3] for fault in ledger.faults), default=0)
    after = sum(count for moment_ns, count in ledger.moments if moment_ns > healed_ns)
    if after < expected.acknowledged_after_fault_min:
        ledger.verdict.add(
            "liveness",
            f"{after} records acknowledged after the last fault,"
            f" wanted {expected.acknowledged_after_fault_min}",
        )


def _statistics(ledger: _Ledger) -> dict[str, Any]:
    deliveries = sum(map(len, ledger.deliveries.values()))
    distinct = sum(len({one[2] for one in found}) for found in ledger.deliveries.values())
    names: dict[str, int] = defaultdict(int)
    for fault in ledger.faults:
        names[fault[0]] += 1
    return {
        "attempted": len(ledger.attempted),
        "acknowledged": len(ledger.acknowledged),
        "not_acknowledged": ledger.failed,
        "taken_by_cuts": len(ledger.taken),
        "confirmed": sum(map(len, ledger.confirmed.values())),
        "again_after_confirmed": _again(ledger),
        "given_twice": ledger.given_twice,
        "cuts": len(_cuts(ledger)),
        "in_log": sum(map(len, ledger.log.values())),
        "deliveries": deliveries,
        "redeliveries": deliveries - distinct,
        "acks": sum(map(len, ledger.acked.values())),
        "faults": dict(names),
    }


def _again(ledger: _Ledger) -> int:
    """Deliveries after a confirmed ack, whether or not they may be."""
    return sum(
        moment_ns > min(ledger.confirmed[subscription].get(place, [moment_ns]))
        for subscription, came in ledger.deliveries.items()
        for moment_ns, _, place, _, _, _ in came
    )
