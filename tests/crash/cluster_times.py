"""How long nobody served: from the journals, per partition, as histograms.

Failover   from the beginning of a fault that took an owner away to the first acknowledgement at or behind
           the offset at which its successor begins.  An owner that came back in time has no successor.
Move       the longest time without an acknowledgement of a partition while it moved.
Stall      the longest time without an acknowledgement of a partition on a bad network.
Healing    from the end of a fault until all brokers are registered and every partition has an owner.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain, pairwise
from typing import Any, Final

from tests.crash.journal import Event

BOUNDS_S: Final = (0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 10.0, 20.0)
AFTER_MOVE_S: Final = 1.0
KILLS: Final = ("kill_broker",)
PAUSES: Final = ("pause_broker",)
CUTS: Final = ("cut_host", "cut_from_brokers", "not_heard", "hears_nothing", "flap")
ROUGH: Final = ("lose_a_tenth", "lose_three_tenths", "delay_packets", "thin_cables")

Acks = dict[tuple[str, int], list[tuple[int, int]]]  # by topic and partition: moment, offset


def times_of(events: Iterable[Event]) -> dict[str, list[float]]:
    """Seconds by what they are of, each in the order of the journal."""
    acks: Acks = defaultdict(list)
    faults = []
    for event in events:
        if event[0] == "ok" and event[6] is not None:
            acks[event[2], event[5]].append((event[8], event[6]))
        elif event[0] == "fault":
            faults.append(event)
    for moments in acks.values():
        moments.sort()
    found: dict[str, list[float]] = {
        name: []
        for name in ("failover after kill", "failover after pause", "failover after cut", "move", "healing")
    }
    for _, name, _, started_ns, ended_ns, facts in sorted(faults, key=lambda fault: fault[3]):
        found["healing"].append(facts["healed_s"])
        if "moved_ns" in facts:
            moments = acks[facts["topic"], facts["partition"]]
            found["move"] += _longest_gap_s(moments, facts["asked_ns"], facts["moved_ns"])
        if name in ROUGH:
            stalls = [_longest_gap_s(moments, started_ns, ended_ns) for moments in acks.values()]
            found.setdefault(f"stall, {name}", []).extend(chain.from_iterable(stalls))
        for kind, faults_of_kind in (("kill", KILLS), ("pause", PAUSES), ("cut", CUTS)):
            if name in faults_of_kind:
                found[f"failover after {kind}"] += _failovers_s(acks, started_ns, ended_ns, facts)
    return found


def _failovers_s(acks: Acks, started_ns: int, ended_ns: int, facts: dict[str, Any]) -> list[float]:
    """For each partition that the target owned, until its next owner acknowledged.

    Who acknowledges below that after the fault is the owner that came back, and what comes later is no
    failover of this fault.
    """
    healed_ns = started_ns + int((facts["seconds"] + facts["healed_s"] + 30) * 1e9)
    found = []
    for topic, partition, next_start in facts["owned"]:
        for moment, offset in acks[topic, partition]:
            if started_ns < moment < healed_ns and offset >= next_start:
                found.append(round((moment - started_ns) / 1e9, 3))
                break
            if moment > ended_ns:
                break
    return found


def _longest_gap_s(moments: Sequence[tuple[int, int]], begin_ns: int, end_ns: int) -> list[float]:
    """The longest time without an acknowledgement that touches a range; none where too few are known."""
    last_ns = end_ns + int(AFTER_MOVE_S * 1e9)
    gaps = [
        (later - earlier) / 1e9
        for (earlier, _), (later, _) in pairwise(moments)
        if later > begin_ns and earlier < last_ns
    ]
    return [round(max(gaps), 3)] if gaps else []


def summary(seconds: Sequence[float]) -> dict[str, Any]:
    """Count, middle and most, and how many are at most each bound."""
    ordered = sorted(seconds)
    return {
        "count": len(ordered),
        "median_s": ordered[len(ordered) // 2] if ordered else None,
        "p90_s": ordered[int(len(ordered) * 0.9)] if ordered else None,
        "max_s": ordered[-1] if ordered else None,
        "at_most_s": {str(bound): bisect_right(ordered, bound) for bound in BOUNDS_S},
        "seconds": ordered,
    }


def histogram(name: str, seconds: Sequence[float]) -> str:
    """A few lines for people; empty buckets at the ends are left out."""
    ordered = sorted(seconds)
    if not ordered:
        return f"{name}: none"
    middle, most = ordered[len(ordered) // 2], ordered[-1]
    lines = [f"{name}: {len(ordered)}, {middle:.2f} s in the middle, {most:.2f} s at most"]
    bounds = [0.0, *BOUNDS_S, float("inf")]
    for low, high in pairwise(bounds):
        count = bisect_right(ordered, high) - bisect_right(ordered, low)
        if count:
            lines.append(f"  {low:5.2f} to {high:5.2f} s  {count:4}  {'#' * min(count, 60)}")
    return "\n".join(lines)
