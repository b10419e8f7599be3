"""The verdict over one epoch, in a process of its own so that its memory goes back when it is done.

Run as ``verdict.py judge JSON``.  The topics of a soak outlive its epochs, so an epoch is what lies at or
above the offsets where it began.  What comes below was judged before: after a crash it may be delivered once
more, and then only its bytes must be right.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = str(Path(__file__).resolve().parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

from tests.crash.checker import Expectation, Verdict, check  # noqa: E402
from tests.crash.journal import Event, read_journals  # noqa: E402

Bases = dict[tuple[str, int], int]
_TOPIC_AT = {
    "got": 3,
    "ack": 2,
    "ack_unknown": 2,
    "log": 1,
}  # where each event names its topic; partition and offset follow


class EpochEvents:
    """The events of an epoch out of its journals; ``damaged`` lists wrong bytes from before it."""

    def __init__(self, bases: Bases) -> None:
        self.bases = bases
        self.earlier = 0
        self.damaged: list[str] = []

    def chosen(self, events: Iterable[Event]) -> Iterator[Event]:
        for event in events:
            at = _TOPIC_AT.get(event[0])
            if at is None or event[at + 2] >= self.bases.get((event[at], event[at + 1]), 0):
                yield event
                continue
            self.earlier += event[0] == "got"
            if event[0] == "got" and not event[9]:
                self.damaged.append(f"{event[1]} got {event[6]} {event[7]} from before with other bytes")


def judge(options: dict[str, Any]) -> Verdict:
    """Check the journals of ``options['journals']``; see :func:`expectation_of` for the rest."""
    bases = {
        (topic, partition): offset
        for topic, offsets in options["bases"].items()
        for partition, offset in enumerate(offsets)
    }
    events = EpochEvents(bases)
    paths = sorted(Path(options["journals"]).glob("*.jsonl"))
    verdict = check(events.chosen(read_journals(paths)), expectation_of(options, bases))
    for sentence in events.damaged:
        verdict.add("invented", sentence)
    verdict.statistics["redeliveries_from_before"] = events.earlier
    return verdict


def expectation_of(options: dict[str, Any], bases: Bases) -> Expectation:
    return Expectation(
        modes=options["modes"],
        topics=options["topics_read"],
        acknowledged_min=options["acknowledged_min"],
        faults_min=options["faults_min"],
        acknowledged_after_fault_min=options["acknowledged_after_fault_min"],
        acks_are_known=options["acks_are_known"],
        log_starts=bases,
    )


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    verdict = judge(json.loads(sys.argv[2]))
    found = {"counts": verdict.counts, "examples": verdict.examples, "statistics": verdict.statistics}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
